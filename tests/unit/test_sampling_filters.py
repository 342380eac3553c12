"""Top-k, top-p and draws without a sort or a scan of the vocabulary: what a sort keeps, and what a scan draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from mtp_inference.sampling import distributions
from mtp_inference.sampling.distributions import (
    LISTED,
    Sampling,
    SamplingRows,
    draw,
    keep_top,
)
from recorded_graph import Recorder

SETTINGS = [
    Sampling(temperature=1.0, top_k=top_k, top_p=top_p)
    for top_k, top_p in itertools.product((0, 1, 5, 300, LISTED, LISTED + 1, 5000), (1.0, 0.999, 0.95, 0.5, 0.1, 1e-9))
]
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "peaked": lambda logits: 3.0 * logits,
    "sharp": lambda logits: 8.0 * logits,
    "tied": lambda logits: (3.0 * logits).round(),
    "bf16": lambda logits: (3.0 * logits).bfloat16().float(),
    "with minus infinity": lambda logits: (3.0 * logits).masked_fill(logits < -0.5, -math.inf),
    "with zeros of both signs": lambda logits: torch.where(logits.abs() < 1.0, logits.sign() * 0.0, logits),
}
EQUAL_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "all equal": torch.zeros_like,
    "two values": lambda logits: 2.0 * (logits > 1.0),
}


def keep_top_by_sort(scores_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Apply the filters as on a device whose values the host cannot read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributions, "reads_values", lambda _device: False)
        return keep_top(scores_BTV, rows)


def keep_top_by_transformers(scores_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Apply transformers' processors to each row."""
    no_tokens = torch.zeros(scores_BTV.shape[1], 0, dtype=torch.long)
    for scores_TV, top_k, tail in zip(scores_BTV, rows.top_k_B.tolist(), rows.top_p_tail_B.tolist(), strict=True):
        if top_k:
            scores_TV.copy_(TopKLogitsWarper(top_k)(no_tokens, scores_TV))
        if tail:
            scores_TV.copy_(TopPLogitsWarper(1.0 - tail)(no_tokens, scores_TV))
    return scores_BTV


def draw_by_scan(p_BTV: Tensor, u_BT: Tensor) -> Tensor:
    """Draw by one cumulative sum over the vocabulary."""
    sums_BTV = p_BTV.cumsum(-1).masked_fill_(p_BTV <= 0.0, 0.0)
    total_BT1 = sums_BTV.amax(-1, keepdim=True)
    below_BT1 = total_BT1.nextafter(torch.zeros_like(total_BT1))
    threshold_BT1 = (u_BT[..., None] * total_BT1).minimum(below_BT1)
    return (sums_BTV > threshold_BT1).view(torch.uint8).argmax(-1)


def logits_of(kind: str, vocab: int) -> Tensor:
    return (KINDS | EQUAL_KINDS)[kind](torch.randn(len(SETTINGS), 2, vocab))


def kept(find: Callable[[Tensor, SamplingRows], Tensor], logits_BTV: Tensor, settings: list[Sampling]) -> Tensor:
    """Return which tokens can be drawn."""
    return find(logits_BTV.clone(), SamplingRows.stack(settings, "cpu")).softmax(-1) > 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [50, 1500, 2560])
def test_every_row_of_a_mixed_batch_keeps_what_a_sort_keeps(vocab: int, kind: str) -> None:
    logits_BTV = logits_of(kind, vocab)
    assert torch.equal(kept(keep_top, logits_BTV, SETTINGS), kept(keep_top_by_sort, logits_BTV, SETTINGS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sort_keeps_what_transformers_keeps(kind: str) -> None:
    """Of tokens with equal scores, transformers' sort may keep others."""
    logits_BTV = logits_of(kind, 1500)
    found, expected = (kept(one, logits_BTV, SETTINGS) for one in (keep_top_by_sort, keep_top_by_transformers))
    scores = [logits_BTV.masked_fill(~one, -math.inf).sort(-1).values for one in (found, expected)]
    assert torch.equal(*scores)


@pytest.mark.parametrize("kind", EQUAL_KINDS)
def test_of_many_equal_tokens_the_first_are_dropped_up_to_the_tail(kind: str) -> None:
    """Where a whole number of tokens makes up the tail, rounding decides about one of them."""
    logits_BTV = logits_of(kind, 2560)
    ours_BTV, sorted_BTV = (kept(one, logits_BTV, SETTINGS) for one in (keep_top, keep_top_by_sort))
    assert int((ours_BTV.sum(-1) - sorted_BTV.sum(-1)).abs().max()) <= 1
    # One set contains the other: both drop from the front.
    assert torch.equal((ours_BTV & sorted_BTV).sum(-1), ours_BTV.sum(-1).minimum(sorted_BTV.sum(-1)))


def test_more_tokens_than_are_listed_may_tie_with_the_last_of_top_k() -> None:
    logits_BTV = torch.zeros(2, 1, 5120)
    logits_BTV[..., :3] = 1.0
    settings = [Sampling(temperature=1.0, top_k=5, top_p=top_p) for top_p in (1.0, 0.5)]
    all_BTV, half_BTV = kept(keep_top, logits_BTV, settings)
    assert bool(all_BTV.all())
    # The three kept tokens make up 0.00159 of the sum: 2555 of the other 5117 are dropped, those in front.
    assert half_BTV[0, :3].all()
    assert half_BTV[0].sum() == 5120 - int(0.5 * (5117 + 3 * math.e))
    assert half_BTV[0, -2000:].all()


def test_the_sort_reads_no_value_and_a_growing_list_does() -> None:
    scores_BTV = torch.randn(1, 2, 1500)
    rows = SamplingRows.stack([Sampling(temperature=1.0, top_p=0.95)], "cpu")
    with Recorder():
        keep_top_by_sort(scores_BTV.clone(), rows)
    with Recorder(), pytest.raises(RuntimeError, match="not permitted while a stream is capturing"):
        keep_top(scores_BTV.clone(), rows)


@pytest.mark.parametrize("vocab", [2560, 1500])
def test_a_draw_finds_the_token_that_a_scan_in_double_finds(vocab: int) -> None:
    p_BTV = (3.0 * torch.randn(1, 1, vocab)).softmax(-1)
    u_BT = (torch.arange(4000) + 0.5)[:, None] / 4000
    tokens_B = draw(p_BTV.expand(len(u_BT), -1, -1), u_BT)[:, 0]
    sums_V = p_BTV[0, 0].double().cumsum(-1)
    low_B = sums_V[tokens_B] - p_BTV[0, 0].double()[tokens_B]
    high_B = sums_V[tokens_B]
    assert float((low_B - u_BT[:, 0]).max()) < 1e-6
    assert float((u_BT[:, 0] - high_B).max()) < 1e-6
    # Whole blocks lie between the first token and the last.
    assert int(tokens_B[0]) < 200
    assert int(tokens_B[-1]) > vocab - 200
    assert bool((tokens_B.diff() >= 0).all())
    scanned_B = draw_by_scan(p_BTV.expand(len(u_BT), -1, -1), u_BT)[:, 0]
    assert int((tokens_B != scanned_B).sum()) <= 2


@pytest.mark.parametrize(
    ("vocab", "weights"),
    [
        *((5, weights) for weights in ({2: 1.0}, {1: 0.3, 3: 0.7}, {2: 0.1, 3: 0.1, 4: 0.1}, {1: 1e-30, 3: 1e-38})),
        (5, {1: 1e-45}),
        # Of several blocks.
        *(
            (2560, dict.fromkeys(places, weight))
            for places in ([2000], [0, 2559], [511, 512], [700, 701, 1500])
            for weight in (1.0, 1e-30, 1e-45)
        ),
    ],
)
def test_a_weight_of_0_is_never_drawn(vocab: int, weights: dict[int, float]) -> None:
    p_BTV = torch.zeros(1, 6, vocab)
    for place, weight in weights.items():
        p_BTV[..., place] = weight
    tokens = draw(p_BTV, torch.tensor([[0.0, 2.0**-24, 0.4999, 0.5, 0.9999, 1.0 - 2.0**-24]]))[0].tolist()
    assert set(tokens) <= weights.keys()
    assert tokens[0] == min(weights)
    if min(weights.values()) > 1e-35:
        assert tokens[-1] == max(weights)
