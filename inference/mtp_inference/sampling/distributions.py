"""Sampling settings, the probabilities that they give, and reproducible random numbers.

Filters follow the order and the definitions of transformers' processors (temperature, top-k, top-p, min-p). Each row of
the batch has its own settings. Temperature 0 is greedy: probability 1 for the largest logit.

Random numbers are counter-based: a number is a hash of the request's seed, the absolute position of the token that it
decides, and a stream, one for each decision at a position. A text therefore does not depend on the rest of the batch,
and a position that is decided again, after a rejected draft, gets the same number.

All functions run on the tensors' device in fixed shapes and do not synchronise, so a CUDA graph can capture them. The
Python values of :class:`SamplingRows` select the steps that run, so they are part of the key of a
captured graph. On a CPU, where reading a value costs nothing, :func:`keep_top` reads values.

Shapes: B rows of the batch, T positions, V vocabulary, N blocks of S tokens, M listed scores, R = B x T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from mtp_train.errors import MtpError

TOKEN, DRAFT, ACCEPT = 0, 1, 2
"""Streams of :func:`uniform`: the trunk's own token, the drafted token, whether the draft is accepted."""

MIN_TEMPERATURE = 1e-3
LISTED = 256
"""Number of largest scores in the first list. Sorting so few takes a CPU less time than finding them."""
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
        warm = self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature < math.inf
        whole_k, whole_seed = (isinstance(one, int) and 0 <= one < 2**63 for one in (self.top_k, self.seed))
        for name, is_right, expected in (
            ("temperature", warm, f"0 or a number from {MIN_TEMPERATURE}. Use 0 for the most probable token."),
            ("top_k", whole_k, "a whole number from 0. Use 0 to switch it off."),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number in (0, 1]. Use 1 to switch it off."),
            ("min_p", 0.0 <= self.min_p < 1.0, "a number in [0, 1). Use 0 to switch it off."),
            ("seed", whole_seed, "a whole number from 0 to 2**63 - 1. Use 0 where any will do."),
        ):
            if not is_right:
                raise MtpError(f"sampling.{name}: {getattr(self, name)}; expected {expected}")


GREEDY = Sampling()


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingRows:
    """The settings of a batch: one entry per row, and flags for the steps that at least one row needs.

    Filters are off in greedy rows, on which they have no effect.
    """

    temperature_B: Tensor
    """fp32; 1 in greedy rows."""
    is_greedy_B: Tensor
    top_k_B: Tensor
    """int64; 0 if top-k is off."""
    top_p_tail_B: Tensor
    """fp32, ``1 - top_p``: subtracted in double like in transformers, as rounding decides ties at the edge."""
    min_p_B: Tensor
    seed_B: Tensor
    any_sampled: bool
    any_greedy: bool
    any_top: bool
    """Whether a row has a top-k or a top-p."""
    any_min_p: bool

    @property
    def steps(self) -> tuple[bool, ...]:
        """Return which steps run: equal for batches that run the same operations."""
        return self.any_sampled, self.any_greedy, self.any_top, self.any_min_p

    @classmethod
    def stack(cls, settings: Sequence[Sampling], device: torch.device | str) -> SamplingRows:
        column = partial(torch.tensor, device=device)
        settings = [one if one.temperature > 0.0 else Sampling(seed=one.seed) for one in settings]
        return cls(
            temperature_B=column([one.temperature or 1.0 for one in settings], dtype=torch.float32),
            is_greedy_B=column([one.temperature == 0.0 for one in settings], dtype=torch.bool),
            top_k_B=column([one.top_k for one in settings], dtype=torch.int64),
            top_p_tail_B=column([1.0 - one.top_p for one in settings], dtype=torch.float32),
            min_p_B=column([one.min_p for one in settings], dtype=torch.float32),
            seed_B=column([one.seed for one in settings], dtype=torch.int64),
            any_sampled=any(one.temperature > 0.0 for one in settings),
            any_greedy=any(one.temperature == 0.0 for one in settings),
            any_top=any(one.top_k > 0 or one.top_p < 1.0 for one in settings),
            any_min_p=any(one.min_p > 0.0 for one in settings),
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
    if not rows.any_greedy:
        return _filtered(scores_BTV, rows).softmax(-1)
    first_BTV = torch.zeros_like(scores_BTV).scatter_(-1, scores_BTV.argmax(-1, keepdim=True), 1.0)
    if not rows.any_sampled:
        return first_BTV
    return torch.where(rows.is_greedy_B[:, None, None], first_BTV, _filtered(scores_BTV, rows).softmax(-1))


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


def _filtered(scores_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Apply temperature, top-k, top-p and min-p; ignore the result for greedy rows."""
    scores_BTV = scores_BTV / rows.temperature_B[:, None, None]
    if rows.any_top:
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


def keep_top(scores_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Apply top-k, then top-p: set the scores of dropped tokens to minus infinity.

    The result is that of transformers' processors, which sort the scores. So does an accelerator, in fixed shapes and
    without reading a value. On a CPU a sort takes longer than a layer, and ``topk`` does not: there the largest scores
    are filtered, and a row whose list is too short gets a longer one. A row's list depends on its own settings and
    scores, never on other rows.
    """
    scores_RV = scores_BTV.flatten(0, 1)
    vocab = scores_BTV.shape[-1]
    top_k_R1, tail_R1 = (
        one_B.repeat_interleave(scores_BTV.shape[1])[:, None] for one_B in (rows.top_k_B, rows.top_p_tail_B)
    )
    if not reads_values(scores_BTV.device):
        return keep_top_of(scores_RV, top_k_R1, tail_R1, vocab)[0].view_as(scores_BTV)
    open_R = ((top_k_R1 > 0) | (tail_R1 > 0.0)).flatten().nonzero()[:, 0]
    width = LISTED
    while len(open_R):
        # Mostly all rows are open, and then none is copied.
        is_whole = len(open_R) == len(scores_RV)
        given_RV = scores_RV if is_whole else scores_RV[open_R]
        found_RV, suffices_R = keep_top_of(given_RV, top_k_R1[open_R], tail_R1[open_R], min(width, vocab))
        if is_whole and bool(suffices_R.all()):
            return found_RV.view_as(scores_BTV)
        scores_RV[open_R[suffices_R]] = found_RV[suffices_R]
        open_R = open_R[~suffices_R]
        width *= GROWTH
    return scores_RV.view_as(scores_BTV)


def reads_values(device: torch.device) -> bool:
    """Whether the host can read values of the device's tensors without waiting."""
    return device.type == "cpu"


def keep_top_of(scores_RV: Tensor, top_k_R1: Tensor, tail_R1: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Apply top-k, then top-p, to the ``width`` largest scores of each row; drop all others.

    Top-k keeps every token that ties with the k-th. Top-p drops tokens one by one while the probabilities dropped so
    far sum to at most ``tail_R1``: of equal scores the first in the vocabulary first, and never the last token.

    Returns:
        The scores, minus infinity for dropped tokens, and bool (R,): whether no other token would have been kept.
    """
    outside_R1 = torch.full_like(scores_RV[:, :1], -math.inf)
    if width == scores_RV.shape[-1]:
        # Ascending as in transformers, but stable.
        listed_RM, token_RM = scores_RV.sort(dim=-1, stable=True)
    else:
        by_token_RM = scores_RV.topk(width, sorted=False).indices.sort(dim=-1).values
        listed_RM, order_RM = scores_RV.gather(-1, by_token_RM).sort(dim=-1, stable=True)
        token_RM = by_token_RM.gather(-1, order_RM)
        if not bool(top_k_R1.all()):
            rest_R1 = scores_RV.scatter(-1, token_RM, -math.inf).logsumexp(-1, keepdim=True)
            outside_R1 = torch.where(top_k_R1 > 0, outside_R1, rest_R1)
    least_R1 = listed_RM.gather(-1, (width - top_k_R1).clamp(0, width - 1))
    kept_RM = listed_RM.masked_fill((listed_RM < least_R1) & (top_k_R1 > 0), -math.inf)
    sums_RM = torch.cat([outside_R1, kept_RM], dim=-1).softmax(-1).cumsum(-1)[:, 1:]
    is_dropped_RM = sums_RM <= tail_R1
    is_dropped_RM[:, -1] = False
    kept_RM.masked_fill_(is_dropped_RM, -math.inf)
    # If the smallest score of the list is dropped, with all scores that tie with it, so are the scores outside.
    least_kept_R1 = kept_RM.masked_fill(kept_RM == -math.inf, math.inf).amin(-1, keepdim=True)
    suffices_R1 = torch.where(top_k_R1 > 0, least_R1, least_kept_R1) > listed_RM[:, :1]
    found_RV = torch.full_like(scores_RV, -math.inf).scatter_(-1, token_RM, kept_RM)
    return found_RV, suffices_R1[:, 0] if width < scores_RV.shape[-1] else torch.ones_like(suffices_R1[:, 0])


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
        weights_BTNS: Weights of 0 or more in blocks, fp32.
        threshold_BT1: fp32. A threshold from the total on counts as a little less than the total.

    Returns:
        int64 (B, T, 1), never a token of weight 0, unless all weights are 0.
    """
    block_BT1, sums_so_far_BTN = _first_over(sums_BTN, threshold_BT1)
    # Sums may fall in a parallel scan, so the sum before the block is not the entry before.
    threshold_BT1 = threshold_BT1 - (sums_so_far_BTN - sums_BTN).gather(-1, block_BT1)
    inside_BTS = weights_BTNS.take_along_dim(block_BT1[..., None], dim=-2)[..., 0, :]
    return _first_over(inside_BTS, threshold_BT1)[0].add(block_BT1, alpha=weights_BTNS.shape[-1])


def _first_over(weights_BTN: Tensor, threshold_BT1: Tensor) -> tuple[Tensor, Tensor]:
    # A parallel scan sums each entry in its own order, so sums may change at a weight of 0, and may even fall.
    # Therefore weights of 0 are masked out, and the total is the largest sum, not the last.
    sums_BTN = weights_BTN.cumsum(-1).masked_fill_(weights_BTN <= 0.0, -math.inf)
    total_BT1 = sums_BTN.amax(-1, keepdim=True)
    # The next number after the threshold, at most the total. A threshold may reach the total by rounding; no sum would
    # exceed it.
    least_BT1 = threshold_BT1.minimum(total_BT1).nextafter(total_BT1)
    return (sums_BTN >= least_BT1).view(torch.uint8).argmax(-1, keepdim=True), sums_BTN
