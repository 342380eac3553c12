"""Plain greedy decoding with nothing but transformers' own cache, and the check of the decoder against it.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache

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
    if list(tokens) == list(plain_tokens):
        return Comparison("identical")
    pairs = zip(tokens, plain_tokens, strict=False)
    shorter = min(len(tokens), len(plain_tokens))
    position = next((index for index, (ours, plain) in enumerate(pairs) if ours != plain), shorter)
    if position == shorter:
        return Comparison("divergence", position)
    prefix_BT = torch.tensor([[*prompt_ids, *plain_tokens[:position]]], device=trunk.lm_head_VD.device)
    logits_V: Tensor = trunk.logits(trunk.hidden(prefix_BT)[0, -1]).float()
    gap = float(logits_V.max() - logits_V[[tokens[position], plain_tokens[position]]].min())
    return Comparison("near_tie" if gap < near_tie_gap else "divergence", position, gap)
