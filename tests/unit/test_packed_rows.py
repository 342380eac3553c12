"""No document of a packed row reaches another, in any kind of layer."""

from __future__ import annotations

import pytest
import torch

from calls import calls_of
from mtp_train.heads.alignment import PADDING_DOCUMENT
from mtp_train.trunk.states import Segment, group_by_length, isolated_hidden
from tiny import random_tokens, tiny_trunk

TOKENS_BT = random_tokens(12, 2, seed=5)
P = PADDING_DOCUMENT
# Two rows: three documents and padding; a document as long as the row.
DOCUMENT = [[0] * 5 + [1] * 3 + [2] * 2 + [P] * 2, [0] * 12]


def test_groups_are_of_similar_length_and_fit_when_padded() -> None:
    def lengths(*wanted: int, max_tokens: int) -> list[list[int]]:
        found = [Segment(index, 0, length) for index, length in enumerate(wanted)]
        return [[segment.length for segment in group] for group in group_by_length(found, max_tokens)]

    assert lengths(5, 3, 2, 12, max_tokens=24) == [[12, 5], [3, 2]]
    assert lengths(5, 3, 2, 12, max_tokens=12) == [[12], [5, 3], [2]]
    assert lengths(4, 4, 4, max_tokens=8) == [[4, 4], [4]]
    assert lengths(9, 2, max_tokens=4) == [[9], [2]]
    assert lengths(max_tokens=4) == []


def test_no_forward_holds_more_tokens_than_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk("qwen3_5")
    forwards = calls_of(monkeypatch, trunk, "hidden")
    isolated_hidden(trunk, TOKENS_BT, torch.tensor(DOCUMENT))
    assert [tokens_NL.shape for (tokens_NL,) in forwards] == [(2, 12), (2, 3)]


def test_a_batch_of_padding_has_states_of_zero() -> None:
    trunk = tiny_trunk("qwen3_5")
    hidden_BTD = isolated_hidden(trunk, TOKENS_BT, torch.full((2, 12), P))
    assert hidden_BTD.shape == (2, 12, 32)
    assert not hidden_BTD.any()
    assert trunk.embed(TOKENS_BT).abs().min() > 0
