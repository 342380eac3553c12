"""Trunk and head as one module with the loss inside its forward.

accelerate prepares and wraps this one module: it refuses several models under FSDP2 and DeepSpeed.

Shapes: B packed rows, T tokens, K depths, N = B * T target rows, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtp_train.heads.module import MtpHead, OutputRows
from mtp_train.losses.chunked import LossTerms, frozen_head_loss
from mtp_train.train.packed_rows import AlignedRows, Forwards, PackedBatch, aligned_rows, autocasting
from mtp_train.train.teacher_forced import DenseSums, dense_sums
from mtp_train.trunk.load import Trunk


@dataclass(frozen=True)
class Known:
    """Facts about a micro-batch on the host. Otherwise it has to wait for the device in every forward.

    No tuple or dict: wrappers move the tensors inside of these, one by one.
    """

    forwards: Forwards | None
    """The trunk's passes; None if its hidden states are given."""
    used_N: Tensor
    """int64, on the device: the target rows at which any depth has a target."""


class HeadTraining(nn.Module):
    """A frozen trunk and the head that is trained on it.

    Args:
        temperature: Softens p and q of every loss that distils.
        apart: Independent depths: each attends to rows of its own depth only (``heads.step.unroll``).
        recompute: Recompute the head's activations in the backward pass, to save memory (``heads.step.unroll``).
        draft_vocab: int, shape (R,), ascending: p and q are distributions over these tokens alone, and no other token
            may be a target. None for all. Those of a head with its own output rows.
        compute_dtype: bfloat16 or float32, the dtype of all matrix products, whatever dtype the weights are held in:
            the head's by autocast, the trunk's by :meth:`~mtp_train.trunk.load.Trunk.computing_in`, so that it computes
            what it does in decoding. Packed quantised weights use the products of their own kernels. accelerate's mixed
            precision is not used: under FSDP2 and DeepSpeed it also rounds the inputs of the loss and the head's
            weights.
    """

    def __init__(
        self,
        trunk: Trunk,
        head: MtpHead,
        *,
        num_depths: int,
        kind: str,
        temperature: float,
        apart: bool = False,
        recompute: bool = False,
        draft_vocab: Tensor | None = None,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.trunk = trunk.requires_grad_(False).eval()
        # Before the first forward pass: states of shown layers are recorded during the pass.
        self.trunk.show_layers(head.trunk_layers)
        self.head = head
        # Modules that no depth uses get no gradient, which data-parallel wrappers report as an error.
        for module in set(head.blocks) - {head.module_for(depth) for depth in range(1, num_depths + 1)}:
            module.requires_grad_(False)
        self.num_depths = num_depths
        self.kind = kind
        self.temperature = temperature
        self.apart = apart
        self.recompute = recompute
        self.compute_dtype = compute_dtype
        self.owns_rows = isinstance(head.module_for(1).lm_head, OutputRows)
        self.draft_vocab: Tensor | None
        self.register_buffer("draft_vocab", None if draft_vocab is None else draft_vocab.long(), persistent=False)

    def train(self, mode: bool = True) -> HeadTraining:
        """Set the mode of the head; the trunk stays in eval mode."""
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
        known: Known | None = None,
        measures: bool = False,
    ) -> LossTerms | DenseSums:
        """Return the loss of one micro-batch.

        Args:
            loss_mask_BT: bool, tokens that may be targets.
            scale_K: fp32, factor of each depth's summed loss: the depth's weight over the number of its targets in the
                whole step.
            hidden_BTD: The trunk's hidden states of the tokens; None runs the trunk's layers.
            known: Facts about the batch on the host; None looks at the tensors.
            measures: Return the sums for acceptance figures instead of the loss. They are computed in this forward
                because sharded weights are whole only within it.
        """
        batch = PackedBatch(tokens_BT, positions_BT, document_BT, loss_mask_BT)
        autocast = None if self.compute_dtype is torch.float32 else self.compute_dtype
        with self.trunk.computing_in(self.compute_dtype):
            rows = aligned_rows(
                self.trunk,
                self.head,
                batch,
                self.num_depths,
                hidden_BTD=hidden_BTD,
                forwards=None if known is None else known.forwards,
                apart=self.apart,
                recompute=self.recompute,
                autocast=autocast,
            )
            if measures:
                with autocasting(tokens_BT.device, autocast):
                    return dense_sums(rows, self.trunk, self.head, self.draft_vocab)
        return self._loss(rows, scale_K, None if known is None else known.used_N)

    def _loss(self, rows: AlignedRows, scale_K: Tensor, used_N: Tensor | None) -> LossTerms:
        lm_head_VD, own_heads = self.trunk.lm_head_VD, self.head.own_lm_heads(self.num_depths)
        targets_N, vocab_R = rows.targets_N, self.draft_vocab
        if vocab_R is not None:
            lm_head_VD = lm_head_VD[vocab_R]
            if own_heads is not None and not self.owns_rows:
                own_heads = [own_VD[vocab_R] for own_VD in own_heads]
            # Tokens outside the draft vocabulary get a wrong index here. They are masked out of the loss, so it is
            # never read.
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
            compute_dtype=self.compute_dtype,
            used_N=used_N,
        )
