"""Compute the drafts of a head after a text without the decoder's caches, in two ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import mtp_step, unroll
from mtp_train.trunk.load import Trunk


def unrolled(
    head: MtpHead,
    hidden_1TD: Tensor,
    tokens_1T: Tensor,
    embed: Callable[[Tensor], Tensor],
    num_depths: int,
    *,
    recompute: bool = False,
) -> list[Tensor]:
    """Return the training unroll's states of one document, by depth."""
    return unroll(
        head,
        hidden_1TD,
        tokens_1T,
        embed,
        num_depths=num_depths,
        positions_BT=torch.arange(tokens_1T.shape[1])[None],
        document_BT=torch.zeros_like(tokens_1T),
        recompute=recompute,
    )


def drafts_from_scratch(trunk: Trunk, head: MtpHead, tokens: Sequence[int], depth: int) -> list[int]:
    """Draft without any cache: every depth runs all rows anew."""
    drafts: list[int] = []
    states_from_scratch(trunk, head, tokens, depth, drafts)
    return drafts


def states_from_scratch(
    trunk: Trunk, head: MtpHead, tokens: Sequence[int], depth: int, drafts: list[int]
) -> list[Tensor]:
    """Return the state (D,) that the draft of every depth is read from; drafts that are not given are added."""
    chained = head.chaining == "chained"
    text = list(tokens)
    states = []
    hidden_BTD = trunk.head_input(trunk.hidden(torch.tensor([text])), head.convention)[:, :-1]
    for depth_now in range(1, depth + 1):
        first = depth_now if chained else 1
        embed_BTD = head.embedding(trunk.embed)(torch.tensor([text[first:]]))
        num_rows = embed_BTD.shape[1]
        mask_BTS = torch.ones(1, num_rows, num_rows, dtype=torch.bool).tril()
        window = head.sliding_window(depth_now)
        step = mtp_step(
            head,
            hidden_BTD,
            embed_BTD,
            depth=depth_now,
            positions_BT=torch.arange(first - 1, first - 1 + num_rows)[None],
            mask_BTS=mask_BTS if window is None else mask_BTS.triu(1 - window),
            cache=None,
        )
        states.append(step.logit_hidden_BTD[0, -1])
        if len(drafts) < depth_now:
            drafts.append(int(head.module_for(depth_now).project(states[-1], trunk.project).argmax()))
        text.append(drafts[depth_now - 1])
        hidden_BTD = step.recycled_BTD if chained else torch.cat([hidden_BTD, step.recycled_BTD[:, -1:]], dim=1)
    return states


def drafts_of_training(trunk: Trunk, head: MtpHead, tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Return what the training unroll predicts at the last start row, its depths fed with the drafts."""
    states = states_of_training(trunk, head, tokens, drafts)
    projected = [
        head.module_for(depth).project(state_D, trunk.project) for depth, state_D in enumerate(states, start=1)
    ]
    return [int(logits_V.argmax()) for logits_V in projected]


def states_of_training(
    trunk: Trunk, head: MtpHead, tokens: Sequence[int], drafts: Sequence[int], *, recompute: bool = False
) -> list[Tensor]:
    """Return the state (D,) that the training unroll has for every draft at the last start row."""
    tokens_1T = torch.tensor([[*tokens, *drafts]])
    hidden_1TD = trunk.head_input(trunk.hidden(tokens_1T), head.convention)
    outputs = unrolled(head, hidden_1TD, tokens_1T, head.embedding(trunk.embed), len(drafts), recompute=recompute)
    return [output_BTD[0, len(tokens) - 2] for output_BTD in outputs]
