"""Sampling settings, the probabilities that they give, and reproducible random numbers.

Filters follow the order and the definitions of transformers' processors (repetition penalty, temperature, top-k, top-p,
min-p). Each row of the batch has its own settings. Temperature 0 is greedy: probability 1 for the largest logit.

Random numbers are counter-based: a number is a hash of the request's seed, the absolute position of the token that it
decides, and a stream, one for each decision at a position. A text therefore does not depend on the rest of the batch,
and a position that is decided again, after a rejected draft, gets the same number.

All functions run on the tensors' device in fixed shapes and do not synchronise, so a CUDA graph can capture them. The
Python values of :class:`SamplingRows` select the steps that run, so they are part of the key of a
captured graph. On a CPU, where reading a value costs nothing, one filter reads values (``filters.py``).

Shapes: B rows of the batch, T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from mtp_inference.sampling.filters import LISTED, TopRows, keep_top, listed_width
from mtp_inference.sampling.scan import first_over, in_blocks
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
class SamplingRows(TopRows):
    """The settings of a batch: one entry per row, and flags for the steps that at least one row needs."""

    temperature_B: Tensor
    """fp32; 1 in greedy rows."""
    is_greedy_B: Tensor
    """bool."""
    min_p_B: Tensor
    """fp32."""
    penalty_B: Tensor
    """fp32."""
    seed_B: Tensor
    """int64."""
    any_sampled: bool
    any_min_p: bool
    any_penalty: bool

    @property
    def steps(self) -> tuple[bool, ...]:
        """Return which steps run: equal for batches that run the same operations on a GPU, where lists are not used."""
        return self.any_sampled, self.any_top_k, self.any_top_p, self.any_min_p, self.any_penalty

    @classmethod
    def stack(cls, settings: Sequence[Sampling], device: torch.device | str) -> SamplingRows:
        """Stack the settings of one request per row."""

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
            penalty_B=column([one.repetition_penalty for one in settings], torch.float32),
            seed_B=column([one.seed for one in settings], torch.int64),
            any_sampled=bool(sampled),
            any_top_k=most_k > 0,
            any_top_p=bool(lists),
            any_min_p=any(one.min_p > 0.0 for one in sampled),
            any_penalty=any(one.repetition_penalty != 1.0 for one in settings),
            any_listed=True in lists,
            any_searched=False in lists,
            top_k_width=listed_width(most_k) if most_k else 0,
        )

    def replaced(self, new: SamplingRows) -> SamplingRows:
        """Write new settings into these tensors in place: a captured round refers to them by address."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_B")}
        return replace(new, **{name: tensor.copy_(getattr(new, name)) for name, tensor in tensors.items()})


def seen_before(seen_BV: Tensor, window_tokens_BT: Tensor) -> Tensor:
    """Return the set of tokens before and at each position of a window, bool (B, T, V).

    ``seen_BV`` is the set of the committed text's tokens.
    """
    num_tokens = window_tokens_BT.shape[1]
    read_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=seen_BV.device).tril()
    # Replace tokens after position t by the first token, which every position has read.
    read_BTT = torch.where(read_TT, window_tokens_BT[:, None, :], window_tokens_BT[:, :1, None])
    return seen_BV[:, None, :].repeat(1, num_tokens, 1).scatter_(2, read_BTT, True)


def penalise(logits_BTV: Tensor, seen_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Apply the repetition penalty (Keskar et al., arXiv:1909.05858, with transformers' rule for signs)."""
    penalty_B11 = rows.penalty_B[:, None, None]
    penalised_BTV = torch.where(logits_BTV < 0, logits_BTV * penalty_B11, logits_BTV / penalty_B11)
    return torch.where(seen_BTV, penalised_BTV, logits_BTV)


def probabilities(logits_BTV: Tensor, rows: SamplingRows, seen_BTV: Tensor | None = None) -> Tensor:
    """Return the distribution that each position's token is drawn from.

    Args:
        logits_BTV: Logits of any float dtype.
        rows: Settings of the rows.
        seen_BTV: Tokens before each position (:func:`seen_before`); needed if a row has a penalty.

    Returns:
        Probabilities, fp32 (B, T, V). Rows of temperature 0 are one-hot at the first of the largest logits.
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
    return torch.where(rows.is_greedy_B[:, None, None], _one_hot(first_BT1, scores_BTV), p_BTV)


def distribution_of(sampling: Sampling, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function from logits (T, V) to fp32 probabilities (T, V); a repetition penalty is not applied."""
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
