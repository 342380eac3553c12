"""Acceptance figures against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from mtp_train.acceptance.counts import entropy, repeated_ngram_share


def test_repeated_ngrams_count_within_one_output_only() -> None:
    assert repeated_ngram_share([[1, 2, 3, 1, 2, 3]], n=3) == pytest.approx(1 / 4)
    assert repeated_ngram_share([[1, 2, 3], [1, 2, 3]], n=3) == 0.0
    assert repeated_ngram_share([[7] * 10], n=8) == pytest.approx(2 / 3)
    assert repeated_ngram_share([[1, 2, 3]], n=8) is None
    # The report's figure is of 8-grams: of nine, the last repeats the first.
    assert repeated_ngram_share([[*range(8), *range(8)]]) == pytest.approx(1 / 9)


def test_entropy_is_in_nats_and_survives_zeros() -> None:
    p_NV = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    assert entropy(p_NV).tolist() == pytest.approx([math.log(4), 0.0])
