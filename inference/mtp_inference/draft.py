"""Drafting: run the head over what was committed, then let it go on by itself.

A head row t pairs the trunk's hidden state after token t with token t+1 (``mtp_train.heads.alignment``). Rows built
from committed tokens and true hidden states stay in the head's cache; rows that read a draft are dropped again.

Shapes: B rows of the batch, T head rows of a call, S head rows seen, D hidden, K depths.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from mtp_train.errors import UnsupportedModelError
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import StepOutput, mtp_step
from mtp_train.heads.trunk import Trunk


class Drafter(Protocol):
    """What the decoder asks of a drafter."""

    def extend(self, hidden_BTD: Tensor, next_tokens_BT: Tensor) -> None:
        """Take in new committed rows: hidden states after tokens t, and the tokens t+1 that followed them."""

    def draft(self, depth: int) -> Tensor:
        """Return ``depth`` drafted tokens, int64 of shape (B, depth). At least one row is new since the last call."""


class RecursiveDrafter:
    """Draft every depth with the head's one module.

    All new committed rows run in one call, the last of them giving depth 1. Depth k + 1 is one more row: the state that
    depth k recycled, its drafted token, the next position. It sees the committed rows and the drafted rows before it.
    """

    def __init__(self, trunk: Trunk, head: MtpHead) -> None:
        self.trunk = trunk
        self.head = head
        self.cache = DynamicCache()
        self._hidden: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def extend(self, hidden_BTD: Tensor, next_tokens_BT: Tensor) -> None:
        """See :class:`Drafter`."""
        self._hidden.append(hidden_BTD)
        self._tokens.append(next_tokens_BT)

    def draft(self, depth: int) -> Tensor:
        """See :class:`Drafter`."""
        hidden_BTD, tokens_BT = torch.cat(self._hidden, dim=1), torch.cat(self._tokens, dim=1)
        self._hidden, self._tokens = [], []
        drafts: list[Tensor] = []
        for depth_now in range(1, depth + 1):
            # Depth k of the draft that starts at row t stands at position t + k - 1: the row's place in the cache.
            position = self.cache.get_seq_length()
            step = _run_rows(
                self.trunk, self.head, hidden_BTD, tokens_BT, depth=depth_now, position=position, cache=self.cache
            )
            hidden_BTD, tokens_BT = step.recycled_BTD[:, -1:], _last_token(self.trunk, step)
            drafts.append(tokens_BT)
        self.cache.crop(1 - depth)
        return torch.cat(drafts, dim=1)


class ChainedDrafter:
    """Draft depth k with module k, each over its own rows.

    Row t of module k reads token t+k and what module k-1 made of row t. Its last k-1 rows read drafts: they are dropped
    after the round and run again, with the committed tokens, in the next one. So each module has, besides its rows in
    the cache, the inputs of rows that it has yet to see with committed tokens.

    Args:
        depth: Deepest draft that will be asked for.
    """

    def __init__(self, trunk: Trunk, head: MtpHead, depth: int) -> None:
        self.trunk = trunk
        self.head = head
        self.cache = DynamicCache()
        self._next_tokens: list[Tensor] = []
        self._inputs: list[list[Tensor]] = [[] for _ in range(depth)]

    def extend(self, hidden_BTD: Tensor, next_tokens_BT: Tensor) -> None:
        """See :class:`Drafter`."""
        self._inputs[0].append(hidden_BTD)
        self._next_tokens.append(next_tokens_BT)

    def draft(self, depth: int) -> Tensor:
        """See :class:`Drafter`."""
        tokens_BT = torch.cat(self._next_tokens, dim=1)
        self._next_tokens = [tokens_BT]
        num_committed = tokens_BT.shape[1]
        unsettled: list[Tensor] = []
        for depth_now in range(1, depth + 1):
            # Rows from here on read drafts of this round.
            num_settled = max(num_committed - (depth_now - 1), 0)
            token_B1, unsettled = self._run_module(depth_now, unsettled, tokens_BT, num_settled)
            tokens_BT = torch.cat([tokens_BT, token_B1], dim=1)
        return tokens_BT[:, num_committed:]

    def _run_module(
        self, depth: int, unsettled: list[Tensor], tokens_BT: Tensor, num_settled: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Run one module over the rows it lacks, and keep those that read committed tokens only.

        Args:
            depth: The module's depth.
            unsettled: What the module before made of rows that read drafts.
            tokens_BT: Committed tokens from position 1 on, then this round's drafts.
            num_settled: Rows that read committed tokens only, counted from row 0.

        Returns:
            The drafted token (B, 1), and this module's output at the rows that read drafts.
        """
        first = self.cache.get_seq_length(depth - 1)
        waiting_BTD = torch.cat(self._inputs[depth - 1], dim=1)
        hidden_BTD = torch.cat([waiting_BTD, *unsettled], dim=1)
        step = _run_rows(
            self.trunk,
            self.head,
            hidden_BTD,
            tokens_BT[:, first + depth - 1 :],
            depth=depth,
            position=first + depth - 1,
            cache=self.cache,
        )
        num_kept = num_settled - first
        self.cache.layers[depth - 1].crop(num_kept - hidden_BTD.shape[1])
        self._inputs[depth - 1] = [waiting_BTD[:, num_kept:]]
        if depth < len(self._inputs):
            self._inputs[depth].append(step.recycled_BTD[:, :num_kept])
        return _last_token(self.trunk, step), [step.recycled_BTD[:, num_kept:]]


def make_drafter(trunk: Trunk, head: MtpHead, depth: int) -> Drafter:
    """Return the drafter for the way the head's family unrolls.

    Args:
        depth: Deepest draft that will be asked for.

    Raises:
        UnsupportedModelError: A chained head has fewer modules than that.
    """
    if head.family.unroll == "recursive":
        return RecursiveDrafter(trunk, head)
    if depth > len(head.blocks):
        raise UnsupportedModelError(
            f"depth: {depth}; expected at most {len(head.blocks)}, as this {head.family.title} head has one module per "
            f"depth. Use depth {len(head.blocks)}."
        )
    return ChainedDrafter(trunk, head, depth)


def _run_rows(
    trunk: Trunk,
    head: MtpHead,
    hidden_BTD: Tensor,
    tokens_BT: Tensor,
    *,
    depth: int,
    position: int,
    cache: DynamicCache,
) -> StepOutput:
    """Append consecutive head rows, the first of them at ``position``; each sees all rows before it."""
    num_rows, num_new = tokens_BT.shape
    dtype = head.module_for(depth).proj.weight.dtype
    positions_T = torch.arange(position, position + num_new, device=tokens_BT.device)
    num_seen = cache.get_seq_length(0 if head.family.unroll == "recursive" else depth - 1)
    return mtp_step(
        head,
        hidden_BTD.to(dtype),
        trunk.embed(tokens_BT).to(dtype),
        depth=depth,
        positions_BT=positions_T.expand(num_rows, -1),
        mask_BTS=None if num_new == 1 else _causal_mask(num_rows, num_new, num_seen, tokens_BT.device),
        cache=cache,
    )


def _causal_mask(num_rows: int, num_new: int, num_seen: int, device: torch.device) -> Tensor:
    mask_TS = torch.ones(num_new, num_seen + num_new, dtype=torch.bool, device=device).tril(num_seen)
    return mask_TS.expand(num_rows, -1, -1)


def _last_token(trunk: Trunk, step: StepOutput) -> Tensor:
    """Return the head's greedy choice after its last row, shape (B, 1)."""
    hidden_B1D = step.logit_hidden_BTD[:, -1:].to(trunk.lm_head_VD.dtype)
    return trunk.logits(hidden_B1D).argmax(dim=-1)
