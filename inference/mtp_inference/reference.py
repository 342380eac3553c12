"""Plain greedy decoding with transformers' own cache, and the comparison of the decoder with it.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from mtp_inference.sampling.distributions import TOKEN, Sampling, SamplingRows, probabilities, uniform
from mtp_train.trunk.load import Trunk

NEAR_TIE_GAP = 1e-5
"""Gap between two logits below which fp32 rounding may decide between their tokens."""


def plain_greedy(trunk: Trunk, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Collection[int]) -> list[int]:
    """Decode one prompt greedily, token by token.

    Args:
        trunk: The target model.
        prompt_ids: Token ids, at least one.
        max_new_tokens: At least 1.
        eos_ids: Token ids that end a text.

    Returns:
        The new token ids, the EOS that ended the text included.

    Raises:
        ValueError: The prompt is empty.

    Example:
        >>> from mtp_inference import SpeculativeDecoder, plain_greedy
        >>> trunk = SpeculativeDecoder.from_pretrained("demo:base", depth=0, device="cpu").trunk
        >>> len(plain_greedy(trunk, [4, 5, 6], 8, eos_ids=()))
        8
    """
    return generate_equal_length(trunk, [prompt_ids], max_new_tokens, eos_ids)[0]


@torch.inference_mode()
def generate_equal_length(
    trunk: Trunk, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos_ids: Collection[int]
) -> list[list[int]]:
    """Decode prompts of one length together, greedily and without drafts.

    All rows run until every text has ended; tokens after a row's EOS are dropped.

    Args:
        trunk: The target model.
        prompts: Token ids of B prompts, all of the same length, at least one token each.
        max_new_tokens: At least 1.
        eos_ids: Token ids that end a text.

    Returns:
        The new token ids of each prompt, the EOS that ended the text included.

    Raises:
        ValueError: The prompts differ in length, or are empty.

    Example:
        >>> from mtp_inference import SpeculativeDecoder, generate_equal_length
        >>> trunk = SpeculativeDecoder.from_pretrained("demo:base", depth=0, device="cpu").trunk
        >>> [len(text) for text in generate_equal_length(trunk, [[4, 5], [6, 7]], 3, eos_ids=())]
        [3, 3]
    """
    lengths = sorted({len(prompt) for prompt in prompts})
    if len(lengths) != 1 or lengths[0] == 0:
        raise ValueError(f"prompts: lengths {lengths}; expected one length above 0. Group the prompts by length.")
    eos = frozenset(eos_ids)
    cache = DynamicCache(config=trunk.config)
    tokens_BT = torch.tensor([list(prompt) for prompt in prompts], device=trunk.lm_head_VD.device)
    texts: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        tokens_BT = trunk.logits(trunk.hidden(tokens_BT, cache=cache)[:, -1:]).argmax(dim=-1)
        for text, token in zip(texts, tokens_BT[:, 0].tolist(), strict=True):
            if not text or text[-1] not in eos:
                text.append(token)
        if all(text[-1] in eos for text in texts):
            break
    return texts


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a decoded text with the text of plain decoding.

    Example:
        >>> from mtp_inference import Comparison
        >>> Comparison("near_tie", position=3, gap=2e-6).verdict
        'near_tie'
    """

    verdict: Literal["identical", "near_tie", "divergence"]
    """``near_tie``: at the first difference both tokens are within rounding of the best. ``divergence``: a bug."""
    position: int | None = None
    """Index of the first new token that differs; None if the texts are identical."""
    gap: float | None = None
    """For greedy texts, the best logit at that position minus the smaller of the two tokens' logits, recomputed without
    a cache. For sampled texts, the distance of the random number from the farther token's interval."""


@torch.inference_mode()
def compare(
    tokens: Sequence[int],
    plain_tokens: Sequence[int],
    trunk: Trunk,
    prompt_ids: Sequence[int],
    near_tie_gap: float = NEAR_TIE_GAP,
) -> Comparison:
    """Compare a greedy text with the text of plain decoding.

    The first difference is a near tie if the logits of both tokens are within ``near_tie_gap`` of the largest logit.

    Args:
        tokens: New token ids of the decoder under test.
        plain_tokens: New token ids of plain decoding.
        trunk: The target model that decoded both.
        prompt_ids: The prompt of both.
        near_tie_gap: Gap between logits below which two tokens count as tied.

    Returns:
        The verdict, with the position and the gap of the first difference.

    Example:
        >>> from mtp_inference import SpeculativeDecoder, compare, plain_greedy
        >>> trunk = SpeculativeDecoder.from_pretrained("demo:base", depth=0, device="cpu").trunk
        >>> plain = plain_greedy(trunk, [4, 5, 6], 8, eos_ids=())
        >>> compare(plain, plain, trunk, [4, 5, 6])
        Comparison(verdict='identical', position=None, gap=None)
    """
    position = _first_difference(tokens, plain_tokens)
    if position is None:
        return Comparison("identical")
    if position == min(len(tokens), len(plain_tokens)):
        return Comparison("divergence", position)
    logits_V = _logits_after(trunk, [*prompt_ids, *plain_tokens[:position]])
    gap = float(logits_V.max() - logits_V[[tokens[position], plain_tokens[position]]].min())
    return Comparison("near_tie" if gap < near_tie_gap else "divergence", position, gap)


@torch.inference_mode()
def compare_sampled(
    tokens: Sequence[int],
    plain_tokens: Sequence[int],
    trunk: Trunk,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    near_tie_gap: float,
) -> Comparison:
    """Compare a sampled text with the text of plain sampling with the same seed.

    The drafts must have been verified by matching (``draft_sampling="argmax"``, see ``sampling/chooser.py``), which
    gives the text of plain sampling. At the first difference, one uniform number selected two neighbouring tokens of
    the cumulative distribution. The difference is a near tie if the number lies within ``near_tie_gap`` of the
    intervals of both tokens. Rounding may also decide which token is the last that top-p or top-k keeps, so both
    outcomes of these filters are tried.

    Args:
        tokens: New token ids of the decoder under test.
        plain_tokens: New token ids of plain decoding with the same settings.
        trunk: The target model that decoded both.
        prompt_ids: The prompt of both.
        sampling: The settings of both, without a repetition penalty.
        near_tie_gap: Largest distance of the number from the interval of either token, as a share of the sum.
    """
    position = _first_difference(tokens, plain_tokens)
    if position is None:
        return Comparison("identical")
    if position == min(len(tokens), len(plain_tokens)):
        return Comparison("divergence", position)
    prefix = [*prompt_ids, *plain_tokens[:position]]
    logits_V = _logits_after(trunk, prefix)
    draws = [_draw(*one, len(prefix)) for one in _near_filters(logits_V, sampling, near_tie_gap)]
    gap = max(
        min(_distance(number, sums_V, token) for number, sums_V in draws)
        for token in (tokens[position], plain_tokens[position])
    )
    return Comparison("near_tie" if gap < near_tie_gap else "divergence", position, gap)


def _draw(logits_V: Tensor, sampling: Sampling, position: int) -> tuple[float, Tensor]:
    """Return the random number that selects the token at a position, and the cumulative distribution."""
    rows = SamplingRows.stack([sampling], logits_V.device)
    sums_V = probabilities(logits_V[None, None], rows)[0, 0].double().cumsum(-1)
    place_11 = torch.tensor([[position]], device=logits_V.device)
    return float(uniform(rows.seed_B, place_11, TOKEN)) * float(sums_V[-1]), sums_V


def _near_filters(logits_V: Tensor, sampling: Sampling, near_tie_gap: float) -> list[tuple[Tensor, Sampling]]:
    """Return the logits and settings, and the variants that rounding could turn them into.

    top-p may reach its sum a token earlier or later. If the last token that top-k keeps and the next one are within the
    gap, top-k may keep the other token, or both.
    """
    top_ps = [sampling.top_p]
    if sampling.top_p < 1.0:
        top_ps += [max(sampling.top_p - near_tie_gap, 1e-6), min(sampling.top_p + near_tie_gap, 1.0)]
    kept = [(logits_V, sampling.top_k)]
    if 0 < sampling.top_k < len(logits_V):
        p_V, order_V = (logits_V / sampling.temperature).softmax(-1).sort(descending=True)
        last = slice(sampling.top_k - 1, sampling.top_k + 1)
        if float(p_V[last][0] - p_V[last][1]) < near_tie_gap:
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


def _logits_after(trunk: Trunk, token_ids: Sequence[int]) -> Tensor:
    """Return the logits after the last token of a text, fp32 (V,), computed without a cache."""
    tokens_1T = torch.tensor([list(token_ids)], device=trunk.lm_head_VD.device)
    return trunk.logits(trunk.hidden(tokens_1T)[0, -1]).float()
