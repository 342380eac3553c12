"""Plain greedy decoding with nothing but transformers' own cache, and the check of the decoder against it.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from mtp_inference.sampling import TOKEN, Sampling, SamplingRows, probabilities, uniform
from mtp_train.heads.trunk import Trunk

NEAR_TIE_GAP = 1e-5
"""Logit gap below which fp32 rounding may decide between two tokens."""


def plain_greedy(trunk: Trunk, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Collection[int]) -> list[int]:
    """Decode one prompt token by token; return the new tokens, EOS included where it ended the text."""
    return generate_equal_length(trunk, [prompt_ids], max_new_tokens, eos_ids)[0]


@torch.inference_mode()
def generate_equal_length(
    trunk: Trunk, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos_ids: Collection[int]
) -> list[list[int]]:
    """Decode prompts of one length together, greedily and without drafts.

    Rows that ended go along until all have; what they say after EOS is dropped.

    Args:
        trunk: The trunk.
        prompts: B prompts, all of the same length, at least one token each.
        max_new_tokens: At least 1.
        eos_ids: Tokens that end a text.

    Returns:
        New tokens of each prompt, EOS included where it ended the text.

    Raises:
        ValueError: The prompts differ in length, or are empty.
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
    """How a decoded text compares with the plain one."""

    verdict: Literal["identical", "near_tie", "divergence"]
    position: int | None = None
    """New token at which they first differ."""
    gap: float | None = None
    """How far the worse of the two tokens lies below the best logit there, recomputed without any cache."""


@torch.inference_mode()
def compare(
    tokens: Sequence[int],
    plain_tokens: Sequence[int],
    trunk: Trunk,
    prompt_ids: Sequence[int],
    near_tie_gap: float = NEAR_TIE_GAP,
) -> Comparison:
    """Say whether a text is the plain one, or parts from it where two tokens are as good as equal.

    Args:
        tokens: New tokens of the decoder under test.
        plain_tokens: New tokens of plain decoding.
        trunk: The trunk that decoded both.
        prompt_ids: Their prompt.
        near_tie_gap: Largest gap in logits that counts as a tie.
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
    """Say the same of a sampled text whose drafts were matched with the trunk's own draws (``verify.py``).

    With one seed it is plain sampling's text. Where they part, one uniform number picked two neighbouring tokens of the
    distribution: a near tie if it lies at the edge of both. Rounding may also decide which token is the last that top-p
    or top-k keeps, and each text may have met its own side of that edge.

    Args:
        tokens: New tokens of the decoder under test.
        plain_tokens: New tokens of plain decoding with the same settings.
        trunk: The trunk that decoded both.
        prompt_ids: Their prompt.
        sampling: The settings of both, without a repetition penalty.
        near_tie_gap: Largest distance of the number from the stretch of either token, as a share of the whole.
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
    """Return the number that picks the token at a position, and the cumulative distribution that it picks from."""
    rows = SamplingRows.stack([sampling], logits_V.device)
    sums_V = probabilities(logits_V[None, None], rows)[0, 0].double().cumsum(-1)
    place_11 = torch.tensor([[position]], device=logits_V.device)
    return float(uniform(rows.seed_B, place_11, TOKEN)) * float(sums_V[-1]), sums_V


def _near_filters(logits_V: Tensor, sampling: Sampling, near_tie_gap: float) -> list[tuple[Tensor, Sampling]]:
    """Return logits and settings, and those that filters could have met by rounding instead.

    top-p reaches its sum a little earlier or later. Where the last token that top-k keeps and the next one are as good
    as equal, top-k keeps the other one, or both.
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
    """Return how far a number lies from a token's stretch of the cumulative distribution."""
    low = float(sums_V[token - 1]) if token else 0.0
    return max(low - number, number - float(sums_V[token]), 0.0)


def _first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the first place where two texts differ, the shorter one's end included; None where they are the same."""
    if list(tokens) == list(others):
        return None
    pairs = zip(tokens, others, strict=False)
    shorter = min(len(tokens), len(others))
    return next((index for index, (one, other) in enumerate(pairs) if one != other), shorter)


def _logits_after(trunk: Trunk, token_ids: Sequence[int]) -> Tensor:
    """Return the logits after a text, fp32 (V,), computed without a cache."""
    tokens_1T = torch.tensor([list(token_ids)], device=trunk.lm_head_VD.device)
    return trunk.logits(trunk.hidden(tokens_1T)[0, -1]).float()
