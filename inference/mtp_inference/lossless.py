"""Decode plainly, and compare a decoded text with plain decoding, by the rounding of the model's own dtype.

Decoding with drafts multiplies other shapes than plain decoding, so that logits differ in their last bits, and two
tokens that are nearly as good may change places. :func:`compare` therefore measures, at the first difference of two
texts, how far rounding moves the logits of this model after this prefix:

- reference: one forward over the text without a cache, in fp32 where the weights can be converted layer by layer;
- plain: the same forward in the run's dtype, and transformers' cached decoding, one token at a time;
- windows: the decoder's own windows, with the rounds and rollbacks that produced the text.

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from mtp_inference.batch import Batch
from mtp_inference.cache.model_cache import PREFILL_CHUNK
from mtp_inference.cpu_layers import CpuLayers
from mtp_inference.drafters.drafter import BatchSize, RoundPlan
from mtp_inference.requests import Round
from mtp_inference.round import prefill
from mtp_inference.sampling.distributions import TOKEN, Sampling, SamplingRows, probabilities, uniform
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.precision import HALF_DTYPES

CHECKED_POSITIONS = 16
"""Positions before a difference at which the errors of windows and of cached decoding are measured."""
MOST_POSITIONS = 256
"""Positions at which the error of the forward without a cache is measured."""
NOISE_RATIO = 3.0
"""Typical error of windows, over that of plain decoding, that counts as rounding. Correct windows of SmolLM2-135M and
of 14 tiny families reach 2.0 at most, in fp32 and in bf16. The largest errors do not compare: rounding may send a token
to another expert in one of two correct forwards. A fault is missed if it moves logits by less than about 2.8 times what
rounding does, and no token across a gap of more than twice the noise."""
MOST_FP32_STEPS = 4096
"""Largest error of plain decoding in fp32, in units of fp32's rounding of the largest logit; 160 at most was measured
in the same models. More is an error of the model or of its cache and no rounding."""
PROBE_ROUNDS = (Round(3, 3), Round(3, 0), Round(3, 1), Round(3, 2))
"""Rounds to replay, over and over, for a text whose rounds are not known."""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a decoded text with the text of plain decoding."""

    verdict: Literal["identical", "near_tie", "divergence"]
    """``near_tie``: rounding decides between the two tokens of the first difference. ``divergence``: a bug."""
    position: int | None = None
    """Index of the first new token that differs; None if the texts are identical."""
    gap: float | None = None
    """For greedy texts, the largest reference logit minus the smaller of the two tokens' logits. For sampled texts, the
    distance of the random number from the farther token's interval of the cumulative distribution."""
    noise: float | None = None
    """Largest error of a logit in plain decoding of the shared prefix."""
    window_ratio: float | None = None
    """Typical error of a logit in the decoder's windows, over that in plain decoding; None if the first new token
    differs, which no window computes."""


class Errors(NamedTuple):
    """Errors of the logits of a text against the reference. The error of a position is the largest of its logits'."""

    noise: float
    """Largest error in plain decoding, at least the rounding of the largest logit."""
    window_ratio: float | None
    """Median error in the decoder's windows over that in plain decoding; None if the text has no new token."""
    is_rounding: bool
    """Whether plain decoding and the windows differ from the reference by no more than rounding."""
    reference_TV: Tensor
    """Logits after the last ``CHECKED_POSITIONS`` tokens or fewer, fp32."""
    plain_TV: Tensor
    """The same logits by cached plain decoding in the run's dtype, as fp32."""


@torch.inference_mode()
def plain_greedy(trunk: Trunk, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Collection[int]) -> list[int]:
    """Decode one prompt of at least one token greedily, token by token.

    Returns:
        The new token ids, the EOS that ended the text included.

    Example:
        >>> from mtp_inference import SpeculativeDecoder, plain_greedy
        >>> trunk = SpeculativeDecoder.from_pretrained("demo:base", depth=0, device="cpu").trunk
        >>> len(plain_greedy(trunk, [4, 5, 6], 8, eos_ids=()))
        8
    """
    cache = DynamicCache(config=trunk.config)
    tokens_1T = torch.tensor([list(prompt_ids)], device=trunk.lm_head_VD.device)
    text: list[int] = []
    while len(text) < max_new_tokens and not (text and text[-1] in eos_ids):
        tokens_1T = trunk.logits(trunk.hidden(tokens_1T, cache=cache)[:, -1:]).argmax(dim=-1)
        text.append(int(tokens_1T))
    return text


@torch.inference_mode()
def compare(
    tokens: Sequence[int],
    plain_tokens: Sequence[int],
    trunk: Trunk,
    prompt_ids: Sequence[int],
    *,
    sampling: Sampling | None = None,
    rounds: Sequence[Round] = (),
) -> Comparison:
    """Compare a text with the text of plain decoding with the same settings.

    The first difference is a near tie if the reference logits of both tokens are within twice the noise of plain
    decoding of the largest logit (each of two logits may be wrong by the noise), and the decoder's windows are no
    noisier than plain decoding (:data:`NOISE_RATIO`). A sampled text must have drafts verified by matching
    (``draft_sampling="argmax"``, see ``sampling/chooser.py``). One uniform number then selected both tokens: the
    difference is a near tie if the number is as near to both tokens' intervals of the cumulative distribution as
    windows that are :data:`NOISE_RATIO` times as noisy as plain decoding move these. Rounding may also decide which
    token is the last that top-p or top-k keeps, so both outcomes are tried.

    Args:
        tokens: New token ids of the decoder under test.
        plain_tokens: New token ids of plain decoding.
        trunk: The target model that decoded both.
        prompt_ids: The prompt of both.
        sampling: The settings of both; None for greedy texts.
        rounds: The rounds that produced ``tokens``; if empty, rounds of three drafts, some of them rejected.

    Example:
        >>> from mtp_inference import SpeculativeDecoder, compare, plain_greedy
        >>> trunk = SpeculativeDecoder.from_pretrained("demo:base", depth=0, device="cpu").trunk
        >>> plain = plain_greedy(trunk, [4, 5, 6], 8, eos_ids=())
        >>> compare(plain, plain, trunk, [4, 5, 6]).verdict
        'identical'
    """
    position = _first_difference(tokens, plain_tokens)
    if position is None:
        return Comparison("identical")
    if position == min(len(tokens), len(plain_tokens)):
        return Comparison("divergence", position)
    errors = measure_errors(trunk, prompt_ids, plain_tokens[:position], rounds)
    pair = (tokens[position], plain_tokens[position])
    if sampling is None or sampling.temperature == 0.0:
        logits_V = errors.reference_TV[-1]
        gap, limit = float(logits_V.max() - logits_V[list(pair)].min()), 2 * errors.noise
    else:
        limit = _noise_of_draws(errors, sampling.temperature)
        gap = gap_of_draws(errors.reference_TV[-1], sampling, len(prompt_ids) + position, pair, limit)
    is_tie = gap <= limit and errors.is_rounding
    return Comparison("near_tie" if is_tie else "divergence", position, gap, errors.noise, errors.window_ratio)


@torch.inference_mode()
def measure_errors(
    trunk: Trunk, prompt_ids: Sequence[int], tokens: Sequence[int], rounds: Sequence[Round] = ()
) -> Errors:
    """Measure the errors of plain decoding and of the decoder's windows over a text, against the reference."""
    text = [*prompt_ids, *tokens]
    whole_TV = _whole_logits(trunk, text)
    dtype = trunk.lm_head_VD.dtype
    widens = dtype in HALF_DTYPES and not trunk.offloaded
    if widens:
        with trunk.computing_in(torch.float32):
            reference_TV = _whole_logits(trunk, text)
    else:
        reference_TV = whole_TV
    num_checked = min(CHECKED_POSITIONS, len(text))
    last_TV = reference_TV[-num_checked:]
    plain_TV = _stepwise_logits(trunk, text, num_checked)
    step = torch.finfo(dtype).eps * float(reference_TV.abs().amax())
    plain = [_largest(plain_TV, last_TV), *([_largest(whole_TV, reference_TV)] if widens else [])]
    noise = max(step, *(float(errors_T.max()) for errors_T in plain))
    typical = max(step / 4, *(float(errors_T.median()) for errors_T in plain))
    window_ratio = None
    if tokens:
        windows_TV = _window_logits(trunk, prompt_ids, tokens, rounds or PROBE_ROUNDS)[-num_checked:]
        window_ratio = float(_largest(windows_TV, last_TV[-len(windows_TV) :]).median()) / typical
    # Packed weights may be multiplied in fewer bits, whatever the dtype of the other weights.
    computes_fp32 = all(parameter.dtype is torch.float32 for parameter in trunk.causal_lm.parameters())
    is_rounding = not computes_fp32 or noise <= MOST_FP32_STEPS * step
    is_rounding &= window_ratio is None or window_ratio <= NOISE_RATIO
    return Errors(noise, window_ratio, is_rounding, last_TV, plain_TV)


def _largest(logits_TV: Tensor, reference_TV: Tensor) -> Tensor:
    """Return the largest error of each position, (T,)."""
    # Equal infinities, of tokens that the model excludes, have no error.
    return (logits_TV - reference_TV).nan_to_num(nan=0.0).abs().amax(-1)


def _whole_logits(trunk: Trunk, text: Sequence[int]) -> Tensor:
    """Return the logits after the last tokens of a text, fp32 (T, V), by one forward without a cache."""
    tokens_1T = torch.tensor([list(text)], device=trunk.lm_head_VD.device)
    return trunk.logits(trunk.hidden(tokens_1T)[0, -MOST_POSITIONS:]).float()


def _stepwise_logits(trunk: Trunk, text: Sequence[int], num_positions: int) -> Tensor:
    """Return the logits after the last tokens of a text, fp32 (T, V), by transformers' cached decoding."""
    cache = DynamicCache(config=trunk.config)
    tokens_1T = torch.tensor([list(text)], device=trunk.lm_head_VD.device)
    first = len(text) - num_positions + 1
    pieces = [tokens_1T[:, :first], *tokens_1T[:, first:].split(1, dim=1)] if first < len(text) else [tokens_1T]
    return torch.cat([trunk.logits(trunk.hidden(piece, cache=cache)[0, -1:]).float() for piece in pieces])


def _window_logits(trunk: Trunk, prompt_ids: Sequence[int], tokens: Sequence[int], rounds: Sequence[Round]) -> Tensor:
    """Return the logits after each new token, fp32 (T, V), by the decoder's windows in the given rounds.

    Drafts that a round rejected are not known: other tokens take their places, and are rolled back.
    """
    width = 1 + max(one.num_drafted for one in rounds)
    size = BatchSize(
        num_rows=1,
        capacity=len(prompt_ids) + len(tokens) + 2 * width,
        depth=width - 1,
        max_window=max(min(len(prompt_ids), PREFILL_CHUNK), width),
    )
    batch = Batch(trunk, None, size, cpu_layers=CpuLayers([trunk.causal_lm]))
    batch.reset()
    batch.set_rows(slice(0, 1), [Sampling()], [size.capacity], [frozenset()])
    prefill(batch, slice(0, 1), batch.tensor([list(prompt_ids)]))
    logits: list[Tensor] = []
    for start, window, num_kept in _windows(tokens, rounds, trunk.lm_head_VD.shape[0]):
        position = len(prompt_ids) + start
        plan = RoundPlan(len(window) - 1, position + len(window), 0, position)
        with batch.in_round():
            _, logits_1TV = batch.run_window(plan, batch.tensor([window]))
            batch.cache.commit(batch.tensor([num_kept]))
        batch.length_B += num_kept
        logits.append(logits_1TV[0, :num_kept].float())
    return torch.cat(logits)


def _windows(tokens: Sequence[int], rounds: Sequence[Round], vocab_size: int) -> Iterator[tuple[int, list[int], int]]:
    """Yield the index of a window's first token, its tokens, and how many of them are kept."""
    start, number = 0, 0
    while start < len(tokens):
        depth, accepted = rounds[number % len(rounds)]
        num_kept = 1 + min(accepted, depth, len(tokens) - start - 1)
        window = list(tokens[start : start + num_kept])
        window += [(window[-1] + 1) % vocab_size] * (depth + 1 - num_kept)
        yield start, window, num_kept
        start, number = start + num_kept, number + 1


def _noise_of_draws(errors: Errors, temperature: float) -> float:
    """Return how far the rounding of windows may move the cumulative distribution of a position.

    Of 448 sampled texts of SmolLM2-135M in fp32, 87 parted where plain decoding's own rounding moves a boundary to the
    number (49,152 tokens have many boundaries), and 3 at up to 1.6 times as far.
    """
    plain_TV, reference_TV = (
        (logits_TV / temperature).double().softmax(-1).cumsum(-1)
        for logits_TV in (errors.plain_TV, errors.reference_TV)
    )
    step = errors.noise / temperature * torch.finfo(torch.float32).eps
    return NOISE_RATIO * max(float((plain_TV - reference_TV).abs().amax()), step)


def gap_of_draws(logits_V: Tensor, sampling: Sampling, position: int, pair: tuple[int, int], noise: float) -> float:
    """Return the distance of the random number at a position from the farther of two tokens' intervals.

    Args:
        position: Position of the two tokens in the text, prompt included.
        noise: Largest error of the cumulative distribution.
    """
    draws = [_draw(*one, position) for one in _near_filters(logits_V, sampling, noise)]
    return max(min(_distance(number, sums_V, token) for number, sums_V in draws) for token in pair)


def _draw(logits_V: Tensor, sampling: Sampling, position: int) -> tuple[float, Tensor]:
    """Return the random number that selects the token at a position, and the cumulative distribution."""
    rows = SamplingRows.stack([sampling], logits_V.device)
    sums_V = probabilities(logits_V[None, None], rows)[0, 0].double().cumsum(-1)
    place_11 = torch.tensor([[position]], device=logits_V.device)
    return float(uniform(rows.seed_B, place_11, TOKEN)) * float(sums_V[-1]), sums_V


def _near_filters(logits_V: Tensor, sampling: Sampling, noise: float) -> list[tuple[Tensor, Sampling]]:
    """Return the logits and settings, and the variants that rounding could turn them into.

    top-p may reach its sum a token earlier or later. If the last token that top-k keeps and the next one are within the
    noise, top-k may keep the other token, or both.
    """
    top_ps = [sampling.top_p]
    if sampling.top_p < 1.0:
        top_ps += [max(sampling.top_p - noise, 1e-6), min(sampling.top_p + noise, 1.0)]
    kept = [(logits_V, sampling.top_k)]
    if 0 < sampling.top_k < len(logits_V):
        p_V, order_V = (logits_V / sampling.temperature).softmax(-1).sort(descending=True)
        last = slice(sampling.top_k - 1, sampling.top_k + 1)
        if float(p_V[last][0] - p_V[last][1]) < noise:
            swapped_V = logits_V.index_copy(0, order_V[last], logits_V[order_V[last].flip(0)])
            kept += [(swapped_V, sampling.top_k), (logits_V, sampling.top_k + 1)]
    return [(logits, replace(sampling, top_p=top_p, top_k=top_k)) for top_p in top_ps for logits, top_k in kept]


def _distance(number: float, sums_V: Tensor, token: int) -> float:
    """Return the distance of a number from a token's interval of the cumulative distribution."""
    low = float(sums_V[token - 1]) if token else 0.0
    return max(low - number, number - float(sums_V[token]), 0.0)


def _first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the first index where two texts differ, at most the shorter length; None if they are equal."""
    if list(tokens) == list(others):
        return None
    pairs = zip(tokens, others, strict=False)
    shorter = min(len(tokens), len(others))
    return next((index for index, (one, other) in enumerate(pairs) if one != other), shorter)
