"""Compute a text's tokens and drafts again, in fp32 and without any cache, and say which were not the best ones.

Everything is conditioned on the text itself: a trunk token on the tokens before it, a draft of depth k on the drafts
before it in its round. So one close call, after which two sides go different ways, does not hide what follows.

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
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import unroll
from mtp_train.heads.trunk import Trunk

MANTISSA_BITS = {torch.bfloat16: 7, torch.float32: 23}


def step_at(logit: float, dtype: torch.dtype) -> float:
    """Return the distance between neighbouring numbers of a dtype at a logit's size."""
    return float(2.0 ** (math.floor(math.log2(max(abs(logit), 1e-6))) - MANTISSA_BITS[dtype]))


@torch.inference_mode()
def misses(subject: Subject, texts: Sequence[Text], *, dtype: torch.dtype, leading_row: bool) -> list[Miss]:
    """Return every token and draft of the texts that is not the best one.

    Args:
        subject: In fp32, the head wired as the engine under test wires it.
        texts: What to compute again.
        dtype: What the texts were computed in; sets the size of a step.
        leading_row: Whether the head reads one more row, of the first token and no hidden state, before all others.
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
    """Yield position, depth (0 for the trunk), token and logits (V,) of all that a text holds."""
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
                logits_V = head.module_for(depth).project(state_D, trunk.project)
                yield start + depth - 1, depth, token, of_drafts(logits_V, subject.draft_vocab_R)


def of_drafts(logits: Tensor, draft_vocab_R: Tensor | None) -> Tensor:
    """Return logits (..., V) that are minus infinity for tokens that a head may not draft."""
    if draft_vocab_R is None:
        return logits
    return torch.full_like(logits, -torch.inf).index_copy(-1, draft_vocab_R, logits[..., draft_vocab_R])


def draft_states(
    trunk: Trunk, head: MtpHead, hidden_TD: Tensor, tokens: Sequence[int], leading_row: bool
) -> list[Tensor]:
    """Return the states that the drafts after the last hidden state were read from, one per draft.

    Args:
        trunk: The trunk, for its embedding.
        head: The head.
        hidden_TD: What the head reads of the trunk: a state of every token but the last committed one.
        tokens: All committed tokens, then the drafts.
        leading_row: See :func:`misses`.
    """
    ids = list(tokens)
    if leading_row:
        # Row 0 reads token 1 of this list: the text's first token, beside a state of zeros.
        ids = [ids[0], *ids]
        hidden_TD = torch.cat([torch.zeros_like(hidden_TD[:1]), hidden_TD])
    num_rows = len(hidden_TD)
    num_drafts = len(ids) - num_rows - 1
    # Rows past the last hidden state are seen by none before them.
    padded_TD = torch.nn.functional.pad(hidden_TD, (0, 0, 0, len(ids) - num_rows))
    tokens_1T = torch.tensor([ids])
    states = unroll(
        head,
        padded_TD[None],
        tokens_1T,
        head.embedding(trunk.embed),
        num_depths=num_drafts,
        positions_BT=torch.arange(len(ids))[None],
        document_BT=torch.zeros_like(tokens_1T),
    )
    return [state_1TD[0, num_rows - 1] for state_1TD in states]
