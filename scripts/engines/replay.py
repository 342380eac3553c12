"""Recompute the tokens and drafts of a text in fp32 without any cache, and find those that are not the argmax.

All logits are conditioned on the text itself: a trunk token on the tokens before it, a draft of depth k on the earlier
drafts of its round. So a near tie, after which the two sides diverge, does not hide later errors.

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engines.ours import Subject
from engines.traces import Text
from engines.verdict import Miss
from mtp_train.heads.head import Head
from mtp_train.trunk.load import Trunk

MANTISSA_BITS = {torch.bfloat16: 7, torch.float32: 23}


def step_at(logit: float, dtype: torch.dtype) -> float:
    """Return the distance between adjacent numbers of a dtype at the magnitude of a logit."""
    return float(2.0 ** (math.floor(math.log2(max(abs(logit), 1e-6))) - MANTISSA_BITS[dtype]))


@torch.inference_mode()
def misses(subject: Subject, texts: Sequence[Text], *, dtype: torch.dtype, leading_row: bool) -> list[Miss]:
    """Return every token and draft of the texts that is not the argmax.

    Args:
        subject: Trunk and head in fp32, with the wiring of the engine under test.
        texts: The texts to recompute.
        dtype: The dtype in which the texts were decoded; determines the size of a step.
        leading_row: Whether the head reads an extra first row: the first token with a hidden state of zeros.
    """
    found = []
    for number, text in enumerate(texts):
        for position, depth, token, logits_V in replayed(subject, text, leading_row):
            best = float(logits_V.max())
            gap = best - float(logits_V[token])
            if gap > 0:
                found.append(Miss(number, position, depth, gap, gap / step_at(best, dtype)))
    return found


def replayed(subject: Subject, text: Text, leading_row: bool) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yield position, depth (0 for the trunk), token and logits (V,) of every token and draft of a text."""
    trunk, head = subject.trunk, subject.head
    tokens = [*text.prompt_ids, *text.token_ids]
    num_prompt = len(text.prompt_ids)
    hidden_TD = trunk.hidden(torch.tensor([tokens]))[0]
    read_TD = trunk.head_input(hidden_TD, head.convention)
    for position, token in enumerate(text.token_ids):
        yield position, 0, token, trunk.logits(hidden_TD[num_prompt + position - 1])
    for start, one in zip(text.starts, text.rounds, strict=True):
        if one.drafts:
            known = tokens[: num_prompt + start]
            states = draft_states(trunk, head, read_TD[: len(known) - 1], [*known, *one.drafts], leading_row)
            for depth, (token, state_D) in enumerate(zip(one.drafts, states, strict=True), start=1):
                yield start + depth - 1, depth, token, head.project(depth, state_D, trunk.project)


def draft_states(trunk: Trunk, head: Head, hidden_TD: Tensor, tokens: Sequence[int], leading_row: bool) -> list[Tensor]:
    """Return the head's hidden states from which a round's drafts are computed, one per draft.

    Args:
        trunk: The trunk, for its embedding.
        head: The head.
        hidden_TD: Hidden states of the trunk for all committed tokens but the last.
        tokens: All committed tokens, then the drafts.
        leading_row: See :func:`misses`.
    """
    ids = list(tokens)
    if leading_row:
        # Row 0 reads token 1 of this list, which is the text's first token, with a hidden state of zeros.
        ids = [ids[0], *ids]
        hidden_TD = torch.cat([torch.zeros_like(hidden_TD[:1]), hidden_TD])
    num_rows = len(hidden_TD)
    num_drafts = len(ids) - num_rows - 1
    # Attention is causal: the padding rows at the end do not affect earlier rows.
    padded_TD = torch.nn.functional.pad(hidden_TD, (0, 0, 0, len(ids) - num_rows))
    tokens_1T = torch.tensor([ids])
    states = head.unroll(
        padded_TD[None],
        tokens_1T,
        head.embedding(trunk.embed),
        num_depths=num_drafts,
        positions_BT=torch.arange(len(ids))[None],
        document_BT=torch.zeros_like(tokens_1T),
    )
    return [state_1TD[0, num_rows - 1] for state_1TD in states]
