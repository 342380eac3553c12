"""Sampling: filters against transformers' own processors, noise against SplitMix64 and chance, draws at their edges."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from torch import Tensor

from mtp_inference.sampling.distributions import (
    ACCEPT,
    DRAFT,
    TOKEN,
    Sampling,
    SamplingRows,
    draw,
    probabilities,
    uniform,
)
from mtp_train.errors import MtpError

MIXED = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=0.7, min_p=0.2),
    Sampling(temperature=0.6, top_k=12, top_p=0.9, min_p=0.05),
    Sampling(temperature=1.0, top_k=1000, top_p=0.05),
    Sampling(temperature=2.0, top_k=1),
]
LARGEST_BELOW_1 = 1.0 - 2.0**-24
"""Standard deviations that chance passes about once in a thousand million times."""


def stack(*settings: Sampling) -> SamplingRows:
    return SamplingRows.stack(settings, "cpu")


def by_transformers(scores_NV: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities of rows as ``generate`` makes them: same processors, same order."""
    steps = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(sampling.temperature),
            transformers.TopKLogitsWarper(sampling.top_k or scores_NV.shape[-1]),
            transformers.TopPLogitsWarper(sampling.top_p),
            transformers.MinPLogitsWarper(sampling.min_p),
        ]
    )
    return steps(torch.empty(len(scores_NV), 0), scores_NV).softmax(-1)


def assert_same_distribution(actual: Tensor, expected: Tensor, ties: bool = False) -> None:
    if ties:
        # Which of several equal tokens top-p drops, transformers leaves to a sort that is not stable.
        actual = actual.sort().values
        expected = expected.sort().values
    assert torch.equal(actual > 0.0, expected > 0.0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def wilson_hilferty(counts_N: Tensor, expected_N: Tensor) -> float:
    """Return how many standard deviations the chi-square lies from what chance gives (Wilson and Hilferty, 1931)."""
    freedom = len(counts_N) - 1
    chi_square = float(((counts_N - expected_N).square() / expected_N).sum())
    return ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-6}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name_with_a_cure(wrong: dict[str, float], named: str) -> None:
    with pytest.raises(MtpError, match=rf"sampling\.{named}: .*; expected .*\. Use "):
        Sampling(**wrong)


def test_settings_at_the_ends_of_their_ranges_are_taken() -> None:
    rows = stack(Sampling(temperature=0.001, top_k=2**63 - 1, top_p=1.0, min_p=0.0, seed=2**63 - 1), Sampling())
    assert rows.seed_B.tolist() == [2**63 - 1, 0]
    assert probabilities(torch.tensor([[[30.0, 0.0]], [[0.0, 30.0]]]), rows).tolist() == [[[1.0, 0.0]], [[0.0, 1.0]]]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "tied"])
def test_every_row_of_a_mixed_batch_equals_transformers(ties: bool) -> None:
    logits_BTV = 3.0 * torch.randn(len(MIXED), 4, 50)
    if ties:
        logits_BTV = logits_BTV.round()
    logits_BTV[:, 0, 7] = -math.inf
    p_BTV = probabilities(logits_BTV, stack(*MIXED))
    assert p_BTV.dtype == torch.float32
    for row, sampling in enumerate(MIXED):
        for ours_V, theirs_V in zip(p_BTV[row], by_transformers(logits_BTV[row], sampling), strict=True):
            assert_same_distribution(ours_V, theirs_V, ties)


@pytest.mark.parametrize("top_p", [0.1, 0.3, 0.7, 0.8, 0.9])
def test_top_p_drops_as_many_equal_tokens_as_transformers_and_the_first_of_them(top_p: float) -> None:
    sampling = Sampling(temperature=1.0, top_p=top_p)
    flat_V = torch.zeros(10)
    p_V = probabilities(flat_V[None, None], stack(sampling))[0, 0]
    assert_same_distribution(p_V, by_transformers(flat_V[None], sampling)[0], ties=True)
    num_kept = int((p_V > 0.0).sum())
    assert num_kept < 10
    assert bool((p_V[-num_kept:] > 0.0).all())


def test_a_greedy_row_takes_the_first_largest_logit() -> None:
    logits_BTV = torch.tensor([[[1.0, 3.0, 3.0]], [[1.0, 3.0, 2.0]]])
    p_BTV = probabilities(logits_BTV, stack(Sampling(), Sampling(temperature=1.0, top_k=2)))
    assert p_BTV[0].tolist() == [[0.0, 1.0, 0.0]]
    assert (p_BTV[1, 0] > 0.0).tolist() == [False, True, True]
    assert torch.equal(probabilities(logits_BTV, stack(Sampling(), Sampling()))[0], p_BTV[0])


def splitmix64(seed: int, position: int, stream: int) -> float:
    """Return the same number in Python's unbounded integers."""
    golden = 0x9E3779B97F4A7C15
    ones = 2**64 - 1

    def mix(z: int) -> int:
        z = (z & ones ^ (z & ones) >> 30) * 0xBF58476D1CE4E5B9 & ones
        z = (z ^ z >> 27) * 0x94D049BB133111EB & ones
        return z ^ z >> 31

    start = mix(mix(seed + golden) + stream)
    return (mix(start + position * golden) >> 40) / 2**24


def test_noise_is_splitmix64_of_seed_stream_and_position() -> None:
    seeds = [0, 1, 12345678901, 2**63 - 1]
    positions = [0, 1, 2, 4095, 10**6]
    for stream in (TOKEN, DRAFT, ACCEPT):
        u_BT = uniform(torch.tensor(seeds), torch.tensor([positions] * len(seeds)), stream)
        assert u_BT.dtype == torch.float32
        assert u_BT.tolist() == [[splitmix64(seed, position, stream) for position in positions] for seed in seeds]


def test_a_draw_inverts_the_cumulative_distribution_left_to_right() -> None:
    p_BTV = torch.tensor([0.25, 0.5, 0.25]).expand(1, 6, -1)
    u_BT = torch.tensor([[0.0, 0.2, 0.25, 0.7, 0.75, LARGEST_BELOW_1]])
    assert draw(p_BTV, u_BT).tolist() == [[0, 0, 1, 1, 2, 2]]
    assert draw(8.0 * p_BTV, u_BT).tolist() == [[0, 0, 1, 1, 2, 2]], "weights need not sum to 1"


def test_sums_that_fall_or_rise_at_a_weight_of_0_draw_no_such_token(monkeypatch: pytest.MonkeyPatch) -> None:
    # A parallel scan may return these sums: 0.5 at first, a step at the weight of 0, a fall after it.
    uneven_V = torch.tensor([0.5, 0.5000001, 1.0, 0.9999999])
    stock = torch.Tensor.cumsum

    def cumsum(self: Tensor, dim: int) -> Tensor:
        return uneven_V.expand(self.shape).clone() if self.shape[-1] == 4 else stock(self, dim)

    monkeypatch.setattr(torch.Tensor, "cumsum", cumsum)
    p_BTV = torch.tensor([[[0.5, 0.0, 0.5, 0.0]]])
    for u, token in [(0.49, 0), (0.5, 2), (0.50000006, 2), (LARGEST_BELOW_1, 2)]:
        assert draw(p_BTV, torch.tensor([[u]])).item() == token
