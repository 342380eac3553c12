"""Trunk and head as the one module that is prepared, wrapped and called: the loss is inside its forward.

Shapes: B packed rows, T tokens, K depths, N = B * T target rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from mtp_train.heads.alignment import shift_left, valid_targets
from mtp_train.heads.flex import Attention
from mtp_train.heads.isolate import isolated_hidden
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import unroll
from mtp_train.heads.trunk import Trunk
from mtp_train.heads.widen import widened
from mtp_train.losses import LossKind, LossTerms, RowsIn, align_to_targets, frozen_head_loss
from mtp_train.train.dense_sums import DenseSums, dense_sums


class Batch(NamedTuple):
    """Packed rows on a device; all of shape (B, T)."""

    tokens_BT: Tensor
    positions_BT: Tensor
    document_BT: Tensor
    loss_mask_BT: Tensor


class AlignedRows(NamedTuple):
    """Everything a loss or a metric needs, depths brought to common target rows."""

    student_KND: Tensor
    teacher_ND: Tensor
    targets_N: Tensor
    valid_KN: Tensor
    starts_N: Tensor
    """bool, at start rows: whether decoding can begin a round there, as the token after it is a target itself."""


def aligned_rows(
    trunk: Trunk,
    head: MtpHead,
    batch: Batch,
    num_depths: int,
    *,
    hidden_BTD: Tensor | None = None,
    apart: bool = False,
    recompute: bool = False,
    attention: Attention = "dense",
) -> AlignedRows:
    """Run trunk and head over packed rows and line the depths up by target row.

    Args:
        trunk: The trunk.
        head: The head.
        batch: The rows.
        num_depths: K.
        hidden_BTD: What the trunk makes of them where that is known, zeros on padding.
        apart: See :func:`mtp_train.heads.step.unroll`.
        recompute: Likewise.
        attention: Likewise.
    """
    trunk.show_layers(head.trunk_layers)
    if hidden_BTD is None:
        hidden_BTD = isolated_hidden(trunk, batch.tokens_BT, batch.document_BT)
    starts = unroll(
        head,
        trunk.head_input(hidden_BTD, head.convention),
        batch.tokens_BT,
        head.embedding(trunk.embed),
        num_depths=num_depths,
        positions_BT=batch.positions_BT,
        document_BT=batch.document_BT,
        apart=apart,
        recompute=recompute,
        attention=attention,
    )
    valid = [valid_targets(batch.document_BT, batch.loss_mask_BT, depth + 1) for depth in range(num_depths)]
    return AlignedRows(
        align_to_targets(starts).flatten(1, 2),
        trunk.normed(hidden_BTD).flatten(0, 1),
        shift_left(batch.tokens_BT, 1, 0).flatten(),
        align_to_targets(valid).flatten(1, 2),
        # Depth 0 would predict the token that depth 1 reads.
        valid_targets(batch.document_BT, batch.loss_mask_BT, 0).flatten(),
    )


class HeadTraining(nn.Module):
    """A frozen trunk and the head that is trained on it.

    Args:
        trunk: The trunk; stays in eval mode and without gradients whatever ``train()`` is told.
        head: The head, in fp32.
        num_depths: K.
        kind: The loss.
        temperature: Softens p and q of every loss but ``ce``.
        on_policy: Leave out what comes after a wrong draft (``losses.survivors``).
        apart: Depths see rows of their own depth only (``heads.step.unroll``).
        recompute: Spend a second forward pass of the head instead of memory (``heads.step.unroll``).
        attention: How depths see one another without or with masks (``heads.step.unroll``).
        draft_vocab: int, shape (R,), ascending: p and q are distributions over these tokens alone, and no other token
            may be a target. None for all.
        rows_in: What makes losses and gradients of logits (``losses.row_work``).
        compute_dtype: What all matrices are multiplied in, the trunk's too, whatever dtype their weights are held in:
            bfloat16 (by autocast) or float32. Packed weights multiply in their own way.
    """

    def __init__(
        self,
        trunk: Trunk,
        head: MtpHead,
        *,
        num_depths: int,
        kind: LossKind,
        temperature: float,
        on_policy: bool = False,
        apart: bool = False,
        recompute: bool = False,
        attention: Attention = "dense",
        draft_vocab: Tensor | None = None,
        rows_in: RowsIn = "torch",
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.trunk = trunk.requires_grad_(False).eval()
        # Before anything is kept of what the trunk makes.
        self.trunk.show_layers(head.trunk_layers)
        self.head = head
        # Modules that no depth uses get no gradient, which data-parallel wrappers take for a fault.
        for module in set(head.blocks) - {head.module_for(depth) for depth in range(1, num_depths + 1)}:
            module.requires_grad_(False)
        self.num_depths = num_depths
        self.kind = kind
        self.temperature = temperature
        self.on_policy = on_policy
        self.rows_in = rows_in
        self.apart = apart
        self.recompute = recompute
        self.attention = attention
        self.compute_dtype = compute_dtype
        self.register_buffer("draft_vocab", None if draft_vocab is None else draft_vocab.long(), persistent=False)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run trunk and head in ``compute_dtype`` meanwhile.

        Here and not by accelerate: FSDP2's and DeepSpeed's own mixed precision round the loss's inputs and weights.
        """
        if self.compute_dtype is torch.float32:
            with widened(self.trunk):
                yield
            return
        with torch.autocast(self.trunk.lm_head_VD.device.type, self.compute_dtype):
            yield

    def train(self, mode: bool = True) -> HeadTraining:
        """Put the head, and only the head, in training mode."""
        super().train(mode)
        self.trunk.eval()
        return self

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        document_BT: Tensor,
        loss_mask_BT: Tensor,
        scale_K: Tensor,
        hidden_BTD: Tensor | None = None,
        *,
        measures: bool = False,
    ) -> LossTerms | DenseSums:
        """Return the loss of one micro-batch.

        Args:
            tokens_BT: int, packed tokens.
            positions_BT: int, restarting at each document.
            document_BT: int, document numbers.
            loss_mask_BT: bool, tokens that may be targets.
            scale_K: fp32, what each depth's summed loss is multiplied by: the depth's weight over the number of its
                targets in the whole step.
            hidden_BTD: What the trunk makes of the tokens, where that is known: the trunk's layers are then not run.
            measures: Return what acceptance is made of instead. Here, because sharded weights are whole only within.
        """
        batch = Batch(tokens_BT, positions_BT, document_BT, loss_mask_BT)
        with self.computing():
            rows = aligned_rows(
                self.trunk,
                self.head,
                batch,
                self.num_depths,
                hidden_BTD=hidden_BTD,
                apart=self.apart,
                recompute=self.recompute,
                attention=self.attention,
            )
            if measures:
                return dense_sums(rows, self.trunk, self.head)
        lm_head_VD, own_heads = self.trunk.lm_head_VD, self.head.own_lm_heads(self.num_depths)
        targets_N, vocab_R = rows.targets_N, cast("Tensor | None", self.draft_vocab)
        if vocab_R is not None:
            lm_head_VD = lm_head_VD[vocab_R]
            own_heads = None if own_heads is None else [own_VD[vocab_R] for own_VD in own_heads]
            # Of other tokens the place is wrong, but they are nobody's targets.
            targets_N = torch.searchsorted(vocab_R, targets_N).clamp(max=len(vocab_R) - 1)
        return frozen_head_loss(
            rows.student_KND,
            rows.teacher_ND,
            lm_head_VD,
            targets_N,
            rows.valid_KN.float() * scale_K[:, None],
            kind=self.kind,
            temperature=self.temperature,
            own_heads=own_heads,
            on_policy=self.on_policy,
            rows_in=self.rows_in,
            compute_dtype=self.compute_dtype,
        )
