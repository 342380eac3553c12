"""Sampling settings, the probabilities that they give, and reproducible random numbers.

Filters follow the order and the definitions of transformers' processors (temperature, top-k, top-p, min-p). Each row of
the batch has its own settings. Temperature 0 is greedy: probability 1 for the largest logit.

Random numbers are counter-based: a number is a hash of the request's seed, the absolute position of the token that it
decides, and a stream, one for each decision at a position. A text therefore does not depend on the rest of the batch,
and a position that is decided again, after a rejected draft, gets the same number.

All functions run on the tensors' device in fixed shapes and do not synchronise, so a CUDA graph can capture them. The
Python values of :class:`SamplingRows` select the steps that run, so they are part of the key of a
captured graph. On a CPU, where reading a value costs nothing, one filter reads values.

Top-k and top-p keep the tokens from an edge on: all tokens with a larger score than the edge, and some of the tokens
with the edge's own score. The result is that of transformers' processors, which sort the scores in ascending order.
Top-k keeps every token that ties with the k-th. Top-p drops tokens one by one while the probabilities dropped so far
sum to at most ``1 - top_p``: of equal scores the first in the vocabulary first, and never the last token of the order.
Where a whole number of equal tokens makes up this sum, rounding decides about one of them, as it does in a sort. An
accelerator sorts. On a CPU, where a sort takes longer than a layer, the edge of top-p is found among the largest
scores: for a row whose top-k is at most ``LISTED`` in those that ``topk`` lists, for another one in a list that grows
until all other tokens may be dropped. A row's way depends on its own settings and scores, never on other rows.

Shapes: B rows of the batch, T positions, V vocabulary, N blocks of S tokens, M listed scores (M1 = M + 1), R = B x T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_train.errors import MtpError

TOKEN, DRAFT, ACCEPT = 0, 1, 2
"""Streams of :func:`uniform`: the trunk's own token, the drafted token, whether the draft is accepted."""

MIN_TEMPERATURE = 1e-3
LISTED = 1024
"""Number of largest scores in a list. On a CPU, ``topk`` takes as long for 64 of 250,000 scores as for 1024."""
GROWTH = 16
"""Factor between the lengths of lists."""
BLOCKS = (512, 256, 128)
"""Values of S, near the square root of a vocabulary of 250,000 tokens, so that both scans are short. The first one that
divides the vocabulary is taken; sizes of released models are multiples of 128, with few exceptions."""

# Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014): SplitMix64, as signed integers.
_GOLDEN = 0x9E37_79B9_7F4A_7C15 - 2**64
_MIX_1 = 0xBF58_476D_1CE4_E5B9 - 2**64
_MIX_2 = 0x94D0_49BB_1331_11EB - 2**64


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings of one request. The default is greedy.

    Raises:
        MtpError: A value is out of range.

    Example:
        >>> from mtp_inference import Sampling
        >>> Sampling(temperature=0.7, top_p=0.9, seed=1).top_k
        0
    """

    temperature: float = 0.0
    """0 is greedy. The smallest other value is 0.001, as dividing by less would overflow the logits."""
    top_k: int = 0
    """Keep the k most probable tokens, and tokens that tie with the last of these; 0 is off."""
    top_p: float = 1.0
    """Keep the fewest tokens whose probabilities reach this sum, in (0, 1]; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this probable, relative to the most probable one, in [0, 1); 0 is off."""
    seed: int = 0
    """Fixes the noise, 0 to 2**63 - 1."""

    def __post_init__(self) -> None:
        _require(
            self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature < math.inf,
            f"temperature: {self.temperature}; expected 0 or a number from {MIN_TEMPERATURE}. Use 0 for the most "
            "probable token.",
        )
        _require(
            isinstance(self.top_k, int) and 0 <= self.top_k < 2**63,
            f"top_k: {self.top_k}; expected a whole number from 0. Use 0 to switch it off.",
        )
        _require(0.0 < self.top_p <= 1.0, f"top_p: {self.top_p}; expected a number in (0, 1]. Use 1 to switch it off.")
        _require(0.0 <= self.min_p < 1.0, f"min_p: {self.min_p}; expected a number in [0, 1). Use 0 to switch it off.")
        _require(
            isinstance(self.seed, int) and 0 <= self.seed < 2**63,
            f"seed: {self.seed}; expected a whole number from 0 to 2**63 - 1. Use 0 where any will do.",
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingRows:
    """The settings of a batch: one entry per row, and flags for the steps that at least one row needs."""

    temperature_B: Tensor
    """fp32; 1 in greedy rows."""
    is_greedy_B: Tensor
    kth_B: Tensor
    """int64, ``top_k - 1``: the place of the last score that top-k keeps; 0 if top-k is off."""
    keeps_any_k_B: Tensor
    """bool: top-k is off."""
    is_listed_B: Tensor
    """bool: top-k keeps at most ``LISTED`` scores."""
    top_p_tail_B: Tensor
    """fp32, ``1 - top_p``: subtracted in double like in transformers, as rounding decides ties at the edge."""
    min_p_B: Tensor
    seed_B: Tensor
    any_sampled: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_listed: bool
    """Whether a row with top-p is listed."""
    any_searched: bool
    """Whether a row with top-p is not listed."""
    top_k_width: int
    """Number of scores that top-k lists; 0 if no row has a top-k."""

    @property
    def steps(self) -> tuple[bool, ...]:
        """Return which steps run: equal for batches that run the same operations on a GPU, where lists are not used."""
        return self.any_sampled, self.any_top_k, self.any_top_p, self.any_min_p

    @classmethod
    def stack(cls, settings: Sequence[Sampling], device: torch.device | str) -> SamplingRows:
        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        # Filters have no effect on greedy rows.
        sampled = [one for one in settings if one.temperature > 0.0]
        most_k = max((one.top_k for one in sampled), default=0)
        # Of the sampled rows with top-p.
        lists = {_is_listed(one) for one in sampled if one.top_p < 1.0}
        return cls(
            temperature_B=column([one.temperature or 1.0 for one in settings], torch.float32),
            is_greedy_B=column([one.temperature == 0.0 for one in settings], torch.bool),
            kth_B=column([max(one.top_k - 1, 0) for one in settings], torch.int64),
            keeps_any_k_B=column([one.top_k == 0 for one in settings], torch.bool),
            is_listed_B=column([_is_listed(one) for one in settings], torch.bool),
            top_p_tail_B=column([1.0 - one.top_p for one in settings], torch.float32),
            min_p_B=column([one.min_p for one in settings], torch.float32),
            seed_B=column([one.seed for one in settings], torch.int64),
            any_sampled=bool(sampled),
            any_top_k=most_k > 0,
            any_top_p=bool(lists),
            any_min_p=any(one.min_p > 0.0 for one in sampled),
            any_listed=True in lists,
            any_searched=False in lists,
            top_k_width=listed_width(most_k) if most_k else 0,
        )

    def replaced(self, new: SamplingRows) -> SamplingRows:
        """Write new settings into these tensors in place: a captured round refers to them by address."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_B")}
        return replace(new, **{name: tensor.copy_(getattr(new, name)) for name, tensor in tensors.items()})


def probabilities(logits_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Return the distribution that each position's token is drawn from, for logits of any float dtype.

    Returns:
        Probabilities, fp32 (B, T, V). Rows of temperature 0 are one-hot at the first of the largest logits.
    """
    scores_BTV = logits_BTV.float()
    first_BT1 = scores_BTV.argmax(-1, keepdim=True)
    if not rows.any_sampled:
        return _one_hot(first_BT1, scores_BTV)
    p_BTV = _filtered(scores_BTV, rows).softmax(-1)
    return torch.where(rows.is_greedy_B[:, None, None], _one_hot(first_BT1, scores_BTV), p_BTV)


def distribution_of(sampling: Sampling, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function from logits (T, V) to fp32 probabilities (T, V)."""
    rows = SamplingRows.stack([sampling], device)
    return lambda logits_TV: probabilities(logits_TV[None], rows)[0]


def uniform(seed_B: Tensor, position_BT: Tensor, stream: int) -> Tensor:
    """Return the uniform number of a stream at a position of a request's text.

    Args:
        seed_B: Int64, the request's seed.
        position_BT: Int64, absolute position of the token to decide, prompt included.
        stream: TOKEN, DRAFT or ACCEPT.

    Returns:
        Multiples of 2**-24 in [0, 1), fp32 (B, T); the same on every device and in every batch.
    """
    # SplitMix64 with a different start for each seed and stream; the position is the step number.
    start_B = _mix(_mix(seed_B + _GOLDEN) + stream)
    bits_BT = _mix(start_B[:, None] + position_BT * _GOLDEN)
    return _shift_right(bits_BT, 40).float() * 2.0**-24


def draw(p_BTV: Tensor, u_BT: Tensor) -> Tensor:
    """Draw one token per position by inverting the cumulative distribution.

    Args:
        p_BTV: Weights of 0 or more, fp32, at least one positive. They need not sum to 1.
        u_BT: Uniform numbers in [0, 1), fp32.

    Returns:
        Tokens, int64 (B, T), never a token of weight 0. ``u_BT`` resolves weights to 2**-24 of their sum.
    """
    p_BTNS = in_blocks(p_BTV)
    sums_BTN = p_BTNS.sum(-1)
    return first_over(p_BTNS, sums_BTN, u_BT[..., None] * sums_BTN.sum(-1, keepdim=True))[..., 0]


def _is_listed(sampling: Sampling) -> bool:
    return 1 <= sampling.top_k <= LISTED


def _require(is_right: bool, complaint: str) -> None:
    if not is_right:
        raise MtpError(f"sampling.{complaint}")


def _one_hot(token_BT1: Tensor, like_BTV: Tensor) -> Tensor:
    return torch.zeros_like(like_BTV).scatter_(-1, token_BT1, 1.0)


def _filtered(scores_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Apply temperature, top-k, top-p and min-p; ignore the result for greedy rows."""
    scores_BTV = scores_BTV / rows.temperature_B[:, None, None]
    if rows.any_top_k or rows.any_top_p:
        scores_BTV = keep_top(scores_BTV, rows)
    if rows.any_min_p:
        p_BTV = scores_BTV.softmax(-1)
        least_BT1 = rows.min_p_B[:, None, None] * p_BTV.amax(-1, keepdim=True)
        scores_BTV.masked_fill_(p_BTV < least_BT1, -math.inf)
    return scores_BTV


def _mix(bits: Tensor) -> Tensor:
    """Apply SplitMix64's output function: int64 products wrap like unsigned ones."""
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    # >> copies the sign bit; the mask removes the copies.
    return (bits >> count) & ((1 << (64 - count)) - 1)


class Edge(NamedTuple):
    """The score of the edge, and the number of tokens with this score that are dropped, fp32 (B, T, 1) each."""

    score_BT1: Tensor
    dropped_BT1: Tensor


def listed_width(top_k: int) -> int:
    """Return the number of scores to list for the largest top-k of a batch."""
    width = LISTED
    while width < top_k:
        width *= GROWTH
    return width


def keep_top(scores_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Apply top-k, then top-p, in place: set the scores of dropped tokens to minus infinity."""
    if not reads_values(scores_BTV.device):
        return keep_top_by_sort(scores_BTV, rows)
    if rows.any_top_k:
        top_BTM = scores_BTV.topk(min(rows.top_k_width, scores_BTV.shape[-1])).values
        kth_B11 = rows.kth_B.clamp(max=top_BTM.shape[-1] - 1)[:, None, None]
        least_BT1 = top_BTM.gather(-1, kth_B11.expand(-1, top_BTM.shape[1], -1))
        least_BT1.masked_fill_(rows.keeps_any_k_B[:, None, None], -math.inf)
        if not rows.any_top_p or rows.any_searched:
            scores_BTV.masked_fill_(scores_BTV < least_BT1, -math.inf)
        if not rows.any_top_p:
            return scores_BTV
    else:
        least_BT1 = torch.full_like(scores_BTV[..., :1], -math.inf)
    edge, is_listed_B11 = Edge(least_BT1, torch.zeros_like(least_BT1)), rows.is_listed_B[:, None, None]
    tail_B11 = _rounding_to(rows.top_p_tail_B[:, None, None])
    if rows.any_searched:
        edge = _chosen(is_listed_B11, edge, edge_of_growing_lists(scores_BTV, tail_B11))
    if rows.any_listed:
        num_kept_BT1 = (scores_BTV >= least_BT1).sum(-1, keepdim=True)
        edge = _chosen(is_listed_B11, listed_edge(top_BTM[..., :LISTED], least_BT1, num_kept_BT1, tail_B11), edge)
    return _keep_from(edge, scores_BTV)


def keep_top_by_sort(scores_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Apply top-k, then top-p, in place and in fixed shapes, without reading a value: a CUDA graph can capture it."""
    vocab = scores_BTV.shape[-1]
    # Ascending as in transformers, but stable: of equal scores at the edge of top-p the first are dropped.
    sorted_BTV, order_BTV = scores_BTV.sort(dim=-1, stable=True)
    if rows.any_top_k:
        place_B11 = (vocab - 1 - rows.kth_B).clamp(min=0)[:, None, None]
        least_BT1 = sorted_BTV.gather(-1, place_B11.expand(-1, scores_BTV.shape[1], 1))
        least_BT1.masked_fill_(rows.keeps_any_k_B[:, None, None], -math.inf)
        sorted_BTV.masked_fill_(sorted_BTV < least_BT1, -math.inf)
    if rows.any_top_p:
        is_dropped_BTV = sorted_BTV.softmax(-1).cumsum_(-1) <= rows.top_p_tail_B[:, None, None]
        is_dropped_BTV[..., -1] = False
        sorted_BTV.masked_fill_(is_dropped_BTV, -math.inf)
    return scores_BTV.scatter_(-1, order_BTV, sorted_BTV)


def reads_values(device: torch.device) -> bool:
    """Whether the host can read values of the device's tensors without waiting."""
    return device.type == "cpu"


def _rounding_to(tail_B11: Tensor) -> Tensor:
    """Return the largest number that rounds to the tail in fp32, in fp64.

    Compared with it, sums in fp64 are rounded to fp32, like transformers' sums on a CPU.
    """
    next_B11 = tail_B11.nextafter(torch.full_like(tail_B11, math.inf))
    return (tail_B11.double() + next_B11.double()) / 2


def _chosen(is_first_B11: Tensor, first: Edge, second: Edge) -> Edge:
    return Edge(*(torch.where(is_first_B11, one, other) for one, other in zip(first, second, strict=True)))


def _keep_from(edge: Edge, scores_BTV: Tensor) -> Tensor:
    is_edge_BTV = scores_BTV == edge.score_BT1
    is_edge_BTNS = in_blocks(is_edge_BTV)
    first_BT1 = first_over(is_edge_BTNS, is_edge_BTNS.sum(-1).float(), edge.dropped_BT1)
    is_early_BTV = torch.arange(scores_BTV.shape[-1], device=scores_BTV.device) < first_BT1
    return scores_BTV.masked_fill_((scores_BTV < edge.score_BT1) | (is_edge_BTV & is_early_BTV), -math.inf)


def _edge(score_BT1: Tensor, one_BT1: Tensor, below_BT1: Tensor, tail_B11: Tensor) -> Edge:
    """Return the edge at a score, from the probability of one token with it, and the sum of those below."""
    return Edge(score_BT1, ((tail_B11 - below_BT1) / one_BT1).floor().float())


def listed_edge(top_BTM: Tensor, least_BT1: Tensor, num_kept_BT1: Tensor, tail_B11: Tensor) -> Edge:
    """Find the edge of top-p among the tokens that top-k keeps.

    Args:
        top_BTM: The largest scores, in descending order.
        least_BT1: The least score that top-k keeps, which the list contains.
        num_kept_BT1: Number of tokens that top-k keeps. Those that are not listed tie with the least.
    """
    is_below_BTM = top_BTM < least_BT1
    num_below_BT1 = is_below_BTM.sum(-1, keepdim=True)
    # Add the tokens that are not listed as one entry, after the others.
    outside_BT1 = least_BT1 + (num_kept_BT1 + num_below_BT1 - top_BTM.shape[-1]).log()
    p_BTM1 = torch.cat([top_BTM.masked_fill(is_below_BTM, -math.inf), outside_BT1], dim=-1).softmax(-1)
    p_BTM1 = p_BTM1.to(tail_B11.dtype)
    # Entries below the least have no probability. Where the entry of the other tokens exceeds the tail, the edge is the
    # least, not this entry.
    return _edge_in(torch.cat([top_BTM, least_BT1], dim=-1), p_BTM1, num_below_BT1 + 1, tail_B11)


def _edge_in(scores_BTM1: Tensor, p_BTM1: Tensor, num_passed_BT1: Tensor, tail_B11: Tensor) -> Edge:
    """Find the edge in a list.

    Args:
        scores_BTM1: Scores in descending order, but that of the last entry, which is at most the edge's.
        p_BTM1: Their probabilities. The last entry is the sum of tokens that are not listed.
        num_passed_BT1: Number of entries at the end of the list that are not the edge.
    """
    num_dropped_BT1 = (p_BTM1.flip(-1).cumsum(-1) <= tail_B11).sum(-1, keepdim=True).maximum(num_passed_BT1)
    place_BT1 = (p_BTM1.shape[-1] - 1 - num_dropped_BT1).clamp(min=0)
    score_BT1 = scores_BTM1.gather(-1, place_BT1)
    below_BT1 = (p_BTM1 * (scores_BTM1 < score_BT1)).sum(-1, keepdim=True)
    return _edge(score_BT1, p_BTM1.gather(-1, place_BT1), below_BT1, tail_B11)


def edge_of_growing_lists(scores_BTV: Tensor, tail_B11: Tensor) -> Edge:
    """Find the edge of top-p in a list of the largest scores. A row whose list is too short gets a longer one.

    Reads values on the host.

    Args:
        tail_B11: ``1 - top_p``, fp64. Rows whose tail rounds to 0 in fp32 keep all tokens.
    """
    scores_RV = scores_BTV.flatten(0, 1)
    tail_R1 = tail_B11.expand(-1, scores_BTV.shape[1], -1).flatten(0, 1)
    edges = Edge(torch.full_like(scores_RV[:, :1], -math.inf), torch.zeros_like(scores_RV[:, :1]))
    waiting = [((tail_R1[:, 0].float() > 0.0).nonzero()[:, 0], LISTED)]
    while waiting:
        open_R, width = waiting.pop()
        # Most often all rows are open.
        top_RM1, p_RM1 = _list_of(scores_RV if len(open_R) == len(scores_RV) else scores_RV[open_R], width)
        found = _edge_in(top_RM1, p_RM1, torch.ones_like(open_R)[:, None], tail_R1[open_R])
        # All other tokens may be dropped, and none of them ties with the edge.
        is_found_R = ((p_RM1[:, -1:] <= tail_R1[open_R]) & (found.score_BT1 > top_RM1[:, -2:-1]))[:, 0]
        is_found_R |= width >= scores_RV.shape[-1]
        for values, new in zip(edges, found, strict=True):
            values[open_R[is_found_R]] = new[is_found_R]
        # One row at a time: long lists of several rows do not fit into the cache.
        waiting += [(row_1, GROWTH * width) for row_1 in open_R[~is_found_R][:, None]]
    return Edge(*(values.view_as(scores_BTV[..., :1]) for values in edges))


def _list_of(scores_RV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores in descending order and their probabilities, as :func:`_edge_in` takes them.

    Probabilities are fp64, as that of the other tokens is the difference of two sums near 1.
    """
    if width >= scores_RV.shape[-1]:
        top_RM = scores_RV.sort(descending=True).values
        p_RM = top_RM.softmax(-1).double()
        outside_R1 = torch.zeros_like(p_RM[:, :1])
    else:
        top_RM, token_RM = scores_RV.topk(width)
        p_RV = scores_RV.softmax(-1)
        p_RM = p_RV.gather(-1, token_RM).double()
        sum_R1 = p_RV.sum(-1, keepdim=True, dtype=torch.float64)
        outside_R1 = (sum_R1 - p_RM.sum(-1, keepdim=True)).clamp_(min=0.0)
    least_R1 = torch.full_like(top_RM[:, :1], -math.inf)
    return torch.cat([top_RM, least_R1], dim=-1), torch.cat([p_RM, outside_R1], dim=-1)


def in_blocks(values_BTV: Tensor) -> Tensor:
    """Return a vocabulary in blocks, (B, T, N, S): a view, or a padded copy if no size of blocks divides it."""
    vocab = values_BTV.shape[-1]
    size = next((size for size in BLOCKS if vocab % size == 0), min(BLOCKS[0], vocab))
    missing = -vocab % size
    if missing:
        values_BTV = torch.nn.functional.pad(values_BTV, (0, missing))
    return values_BTV.unflatten(-1, (-1, size))


def first_over(weights_BTNS: Tensor, sums_BTN: Tensor, threshold_BT1: Tensor) -> Tensor:
    """Return the first token at which the sum of the weights so far exceeds a threshold.

    The sums of blocks are scanned to choose a block, and then the tokens of this block: on a GPU one processor scans a
    row, while all processors sum blocks.

    Args:
        weights_BTNS: Weights of 0 or more in blocks, fp32, or bool to count.
        threshold_BT1: fp32. A threshold from the total on counts as a little less than the total.

    Returns:
        int64 (B, T, 1), never a token of weight 0, unless all weights are 0.
    """
    num_blocks, size = weights_BTNS.shape[-2:]
    if num_blocks == 1:
        block_BT1, inside_BTS = None, weights_BTNS[..., 0, :]
    else:
        block_BT1, sums_so_far_BTN = _first_over(sums_BTN, threshold_BT1)
        # Sums may fall in a parallel scan, so the sum before the block is not the entry before.
        threshold_BT1 = threshold_BT1 - (sums_so_far_BTN - sums_BTN).gather(-1, block_BT1)
        inside_BTS = weights_BTNS.gather(-2, block_BT1[..., None].expand(-1, -1, -1, size))[..., 0, :]
    token_BT1 = _first_over(inside_BTS.float(), threshold_BT1)[0]
    return token_BT1 if block_BT1 is None else token_BT1.add(block_BT1, alpha=size)


def _first_over(weights_BTN: Tensor, threshold_BT1: Tensor) -> tuple[Tensor, Tensor]:
    # A parallel scan sums each entry in its own order, so sums may change at a weight of 0, and may even fall.
    # Therefore weights of 0 are masked out, and the total is the largest sum, not the last.
    sums_BTN = weights_BTN.cumsum(-1).masked_fill_(weights_BTN <= 0.0, -math.inf)
    total_BT1 = sums_BTN.amax(-1, keepdim=True)
    # The next number after the threshold, at most the total. A threshold may reach the total by rounding; no sum would
    # exceed it.
    least_BT1 = threshold_BT1.minimum(total_BT1).nextafter(total_BT1)
    return (sums_BTN >= least_BT1).view(torch.uint8).argmax(-1, keepdim=True), sums_BTN
