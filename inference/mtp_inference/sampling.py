"""From logits to tokens: one request's settings, the probabilities they make, and noise that can be drawn again.

Filters follow transformers' processors in order and in meaning (repetition penalty, temperature, top-k, top-p, min-p),
each row of the batch with its own settings. Temperature 0 is greedy: probability 1 on the largest logit.

Noise is counted, not consumed: a uniform number is a hash of the request's seed, the absolute position of the token it
decides, and a stream, one per decision taken at a position. So a text does not depend on what else is in the batch, and
a position decided again, after a rejected draft, meets the same noise.

Everything runs on the tensors' device in fixed shapes, without waiting for it: it can be captured in a CUDA graph. The
Python flags of :class:`SamplingRows` choose what runs, so they belong in the key of a captured graph.

Shapes: B rows of the batch, T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_train.errors import MtpError

TOKEN, DRAFT, ACCEPT = 0, 1, 2
"""Streams of :func:`uniform`: the trunk's own token, the drafted token, whether the draft is accepted."""

MIN_TEMPERATURE = 1e-3

# Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014): SplitMix64, as signed integers.
_GOLDEN = 0x9E37_79B9_7F4A_7C15 - 2**64
_MIX_1 = 0xBF58_476D_1CE4_E5B9 - 2**64
_MIX_2 = 0x94D0_49BB_1331_11EB - 2**64


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request picks its tokens. The default is greedy.

    Raises:
        MtpError: A value is out of range.
    """

    temperature: float = 0.0
    """0 is greedy, and 0.001 the least above it, as smaller ones would overflow the logits."""
    top_k: int = 0
    """Keep the k most probable tokens and whatever ties with the last of them; 0 is off."""
    top_p: float = 1.0
    """Keep the fewest tokens whose probabilities reach this sum, in (0, 1]; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this probable, relative to the most probable one, in [0, 1); 0 is off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen before, greedy rows included; 1 is off."""
    seed: int = 0
    """Fixes the noise, 0 to 2**63 - 1."""

    def __post_init__(self) -> None:
        heat, penalty = self.temperature, self.repetition_penalty
        _require(
            heat == 0.0 or MIN_TEMPERATURE <= heat < math.inf,
            f"temperature: {heat}; expected 0 or a number from {MIN_TEMPERATURE}. Use 0 for greedy decoding.",
        )
        _require(
            isinstance(self.top_k, int) and 0 <= self.top_k < 2**63,
            f"top_k: {self.top_k}; expected a whole number from 0. Use 0 to switch it off.",
        )
        _require(0.0 < self.top_p <= 1.0, f"top_p: {self.top_p}; expected a number in (0, 1]. Use 1 to switch it off.")
        _require(0.0 <= self.min_p < 1.0, f"min_p: {self.min_p}; expected a number in [0, 1). Use 0 to switch it off.")
        _require(
            0.0 < penalty < math.inf,
            f"repetition_penalty: {penalty}; expected a number above 0. Use 1 to switch it off.",
        )
        _require(
            isinstance(self.seed, int) and 0 <= self.seed < 2**63,
            f"seed: {self.seed}; expected a whole number from 0 to 2**63 - 1. Use 0 where any will do.",
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingRows:
    """The settings of a batch: one entry per row, and flags that say which steps any row needs."""

    temperature_B: Tensor
    """fp32."""
    top_k_B: Tensor
    """int64; 0 is off."""
    top_p_tail_B: Tensor
    """fp32, ``1 - top_p``: subtracted in double as transformers does, or ties at the edge would fall otherwise."""
    min_p_B: Tensor
    """fp32."""
    penalty_B: Tensor
    """fp32."""
    seed_B: Tensor
    """int64."""
    any_sampled: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_penalty: bool

    @classmethod
    def stack(cls, settings: Sequence[Sampling], device: torch.device | str) -> SamplingRows:
        """Put one request's settings in each row."""

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        # Greedy rows take the largest logit whatever the filters say.
        sampled = [one for one in settings if one.temperature > 0.0]
        return cls(
            temperature_B=column([one.temperature for one in settings], torch.float32),
            top_k_B=column([one.top_k for one in settings], torch.int64),
            top_p_tail_B=column([1.0 - one.top_p for one in settings], torch.float32),
            min_p_B=column([one.min_p for one in settings], torch.float32),
            penalty_B=column([one.repetition_penalty for one in settings], torch.float32),
            seed_B=column([one.seed for one in settings], torch.int64),
            any_sampled=bool(sampled),
            any_top_k=any(one.top_k > 0 for one in sampled),
            any_top_p=any(one.top_p < 1.0 for one in sampled),
            any_min_p=any(one.min_p > 0.0 for one in sampled),
            any_penalty=any(one.repetition_penalty != 1.0 for one in settings),
        )

    def replaced(self, new: SamplingRows) -> SamplingRows:
        """Write other settings into these tensors, which a captured round knows by their address."""
        return SamplingRows(
            temperature_B=self.temperature_B.copy_(new.temperature_B),
            top_k_B=self.top_k_B.copy_(new.top_k_B),
            top_p_tail_B=self.top_p_tail_B.copy_(new.top_p_tail_B),
            min_p_B=self.min_p_B.copy_(new.min_p_B),
            penalty_B=self.penalty_B.copy_(new.penalty_B),
            seed_B=self.seed_B.copy_(new.seed_B),
            any_sampled=new.any_sampled,
            any_top_k=new.any_top_k,
            any_top_p=new.any_top_p,
            any_min_p=new.any_min_p,
            any_penalty=new.any_penalty,
        )


def seen_before(seen_BV: Tensor, window_tokens_BT: Tensor) -> Tensor:
    """Say which tokens each position of a window has behind it.

    Args:
        seen_BV: Bool, the tokens of the committed text.
        window_tokens_BT: Int64, what the window reads; position t has read tokens 0..t.

    Returns:
        Bool (B, T, V).
    """
    num_tokens = window_tokens_BT.shape[1]
    read_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=seen_BV.device).tril()
    # A token that position t has not read is replaced by the first one, which every position has.
    read_BTT = torch.where(read_TT, window_tokens_BT[:, None, :], window_tokens_BT[:, :1, None])
    return seen_BV[:, None, :].repeat(1, num_tokens, 1).scatter_(2, read_BTT, True)


def penalise(logits_BTV: Tensor, seen_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Make tokens seen before less probable (Keskar et al., arXiv:1909.05858, with transformers' rule for signs)."""
    penalty_B11 = rows.penalty_B[:, None, None]
    penalised_BTV = torch.where(logits_BTV < 0, logits_BTV * penalty_B11, logits_BTV / penalty_B11)
    return torch.where(seen_BTV, penalised_BTV, logits_BTV)


def probabilities(logits_BTV: Tensor, rows: SamplingRows, seen_BTV: Tensor | None = None) -> Tensor:
    """Return what each position's token is drawn from.

    Args:
        logits_BTV: Logits of any float dtype.
        rows: Settings of the rows.
        seen_BTV: Bool, tokens seen before each position (:func:`seen_before`); needed where a row has a penalty.

    Returns:
        Probabilities, fp32 (B, T, V). Rows of temperature 0 hold one 1.0, at the first of their largest logits.

    Raises:
        ValueError: A row has a penalty and ``seen_BTV`` is None.
    """
    scores_BTV = logits_BTV.float()
    if rows.any_penalty:
        if seen_BTV is None:
            raise ValueError(
                "probabilities: a row has a repetition penalty and seen_BTV is None; expected the tokens seen before "
                "each position. Pass what seen_before() returns."
            )
        scores_BTV = penalise(scores_BTV, seen_BTV, rows)
    first_BT1 = scores_BTV.argmax(-1, keepdim=True)
    if not rows.any_sampled:
        return _one_hot(first_BT1, scores_BTV)
    p_BTV = _filtered(scores_BTV, rows).softmax(-1)
    return torch.where(rows.temperature_B[:, None, None] > 0.0, p_BTV, _one_hot(first_BT1, scores_BTV))


def distribution_of(sampling: Sampling, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function from logits (T, V) to what each token is drawn from, fp32; there is no repetition penalty."""
    rows = SamplingRows.stack([sampling], device)
    return lambda logits_TV: probabilities(logits_TV[None], rows)[0]


def uniform(seed_B: Tensor, position_BT: Tensor, stream: int) -> Tensor:
    """Return the uniform number that decides one thing at one position of one request's text.

    Args:
        seed_B: Int64, the request's seed.
        position_BT: Int64, absolute position of the token that is decided, the prompt counted.
        stream: TOKEN, DRAFT or ACCEPT.

    Returns:
        Multiples of 2**-24 in [0, 1), fp32 (B, T): the same on every device, in every batch.
    """
    # SplitMix64 with a start of its own for each seed and stream; the position counts its steps.
    start_B = _mix(_mix(seed_B + _GOLDEN) + stream)
    bits_BT = _mix(start_B[:, None] + position_BT * _GOLDEN)
    return _shift_right(bits_BT, 40).float() * 2.0**-24


def draw(p_BTV: Tensor, u_BT: Tensor) -> Tensor:
    """Draw one token per position by inverting the cumulative distribution.

    Args:
        p_BTV: Weights of 0 or more, fp32, at least one of them positive. They need not sum to 1.
        u_BT: Uniform numbers in [0, 1), fp32.

    Returns:
        Tokens, int64 (B, T); never one of weight 0. The grain of ``u_BT`` is 2**-24 of their sum.
    """
    # A parallel scan sums each entry in an order of its own, so that sums may step at a weight of 0, and even fall.
    # Hence weights of 0 take no part, and the total is the largest sum, not the last.
    sums_BTV = p_BTV.cumsum(-1).masked_fill_(p_BTV <= 0.0, 0.0)
    total_BT1 = sums_BTV.amax(-1, keepdim=True)
    # u * total may round up to the total (it does where the total is subnormal), and then no sum would lie above it.
    below_BT1 = total_BT1.nextafter(torch.zeros_like(total_BT1))
    threshold_BT1 = (u_BT[..., None] * total_BT1).minimum(below_BT1)
    return (sums_BTV > threshold_BT1).view(torch.uint8).argmax(-1)


def _require(is_right: bool, complaint: str) -> None:
    if not is_right:
        raise MtpError(f"sampling.{complaint}")


def _one_hot(token_BT1: Tensor, like_BTV: Tensor) -> Tensor:
    return torch.zeros_like(like_BTV).scatter_(-1, token_BT1, 1.0)


def _filtered(scores_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Apply temperature, top-k, top-p and min-p; what comes out for greedy rows does not count."""
    temperature_B11 = rows.temperature_B[:, None, None]
    scores_BTV = scores_BTV / torch.where(temperature_B11 > 0.0, temperature_B11, 1.0)
    if rows.any_top_k or rows.any_top_p:
        scores_BTV = _keep_top(scores_BTV, rows)
    if rows.any_min_p:
        p_BTV = scores_BTV.softmax(-1)
        least_BT1 = rows.min_p_B[:, None, None] * p_BTV.amax(-1, keepdim=True)
        scores_BTV.masked_fill_(p_BTV < least_BT1, -math.inf)
    return scores_BTV


def _keep_top(scores_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Apply top-k, then top-p, off one sort, in place: at a real vocabulary each tensor more is felt."""
    vocab = scores_BTV.shape[-1]
    # Ascending, as transformers sorts, and stable, as it does not: of equal scores at the edge of top-p the first go,
    # whatever the width of the window. Plain decoding and a window must keep the same tokens.
    sorted_BTV, order_BTV = scores_BTV.sort(dim=-1, stable=True)
    if rows.any_top_k:
        k_B = torch.where(rows.top_k_B > 0, rows.top_k_B.clamp(max=vocab), vocab)
        least_BT1 = sorted_BTV.gather(-1, (vocab - k_B)[:, None, None].expand(-1, scores_BTV.shape[1], 1))
        sorted_BTV.masked_fill_(sorted_BTV < least_BT1, -math.inf)
    if rows.any_top_p:
        dropped_BTV = sorted_BTV.softmax(-1).cumsum_(-1) <= rows.top_p_tail_B[:, None, None]
        dropped_BTV[..., -1] = False
        sorted_BTV.masked_fill_(dropped_BTV, -math.inf)
    return scores_BTV.scatter_(-1, order_BTV, sorted_BTV)


def _mix(bits: Tensor) -> Tensor:
    """Return SplitMix64's output function: int64 products wrap, as unsigned ones do."""
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    # >> drags the sign along; the mask takes it away again.
    return (bits >> count) & ((1 << (64 - count)) - 1)
