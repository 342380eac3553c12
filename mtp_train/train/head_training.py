"""States and head as one module with the loss inside its forward.

accelerate prepares and wraps this one module: it refuses several models under FSDP2 and DeepSpeed.

Shapes: B packed rows, T tokens, K depths, N = B * T target rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.data.pack import PackedBatch
from mtp_train.heads.head import Head
from mtp_train.losses.chunked import LossTerms, frozen_head_loss
from mtp_train.train.packed_rows import AlignedRows, aligned_rows, autocasting
from mtp_train.train.teacher_forced import DenseSums, dense_sums
from mtp_train.trunk.ends import Ends
from mtp_train.trunk.states import Forwards, States


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward. The host plans it, so that the forward does not wait for the device.

    No tuple or dict: wrappers move the tensors inside of these, one by one.
    """

    batch: PackedBatch
    scale_K: Tensor
    """fp32, factor of each depth's summed loss: the depth's weight over the number of its targets in the whole step."""
    prepared: Tensor | Forwards | None = None
    """What :meth:`mtp_train.trunk.states.States.prepare` returned; None for a trunk that plans its passes itself."""
    used_N: Tensor | None = None
    """int64, the rows at which any depth has a target; None looks for them in the forward."""
    starts_BP: Tensor | None = None
    """int64, the start rows that count, see :attr:`mtp_train.data.pack.PackedSequence.starts_P`; None for all."""

    def mapped(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return a copy in which every tensor is changed."""
        changed: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, batch=PackedBatch(*map(change, self.batch)), **changed)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on a device. The host does not wait for copies from page-locked memory."""
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))


class HeadTraining(nn.Module):
    """The hidden states of a frozen trunk, and the head that is trained on them.

    Args:
        temperature: Softens p and q of every loss that distils.
        apart: Independent depths: each attends to rows of its own depth only (``heads.step.unroll``).
        recompute: Recompute the head's activations in the backward pass, to save memory (``heads.step.unroll``).
        draft_vocab: int, shape (R,), ascending: p and q are distributions over these tokens alone, and no other token
            may be a target. None for all. Those of a head with its own output rows.
        compute_dtype: bfloat16 or float32, the dtype of all matrix products, whatever dtype the weights are held in:
            the head's by autocast, the trunk's by :meth:`~mtp_train.trunk.states.States.computing_in`, so that it
            computes what it does in decoding. Packed quantised weights use the products of their own kernels.
            accelerate's mixed precision is not used: under FSDP2 and DeepSpeed it also rounds the inputs of the loss
            and the head's weights.
    """

    def __init__(
        self,
        states: States,
        head: Head,
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
        self.states = states.requires_grad_(False).eval()
        # Before the first forward pass: states of shown layers are recorded during the pass.
        self.ends.show_to(head)
        self.head = head
        head.freeze_unused(num_depths)
        self.num_depths = num_depths
        self.kind = kind
        self.temperature = temperature
        self.apart = apart
        self.recompute = recompute
        self.compute_dtype = compute_dtype
        self._rows_RD: Tensor | None = None
        self.draft_vocab: Tensor | None
        self.register_buffer("draft_vocab", None if draft_vocab is None else draft_vocab.long(), persistent=False)

    @property
    def ends(self) -> Ends:
        return self.states.ends

    def train(self, mode: bool = True) -> HeadTraining:
        """Set the mode of the head; the trunk stays in eval mode."""
        super().train(mode)
        self.states.eval()
        return self

    def forward(self, micro: MicroBatch, *, measures: bool = False) -> LossTerms | DenseSums:
        """Return the loss of one micro-batch.

        Args:
            measures: Return the sums for acceptance figures instead of the loss. They are computed in this forward
                because sharded weights are whole only within it.
        """
        with self.states.computing_in(self.compute_dtype):
            rows = aligned_rows(
                self.ends,
                self.head,
                micro.batch,
                # Outside of autocast, as in decoding.
                self.states(micro.batch.tokens_BT, micro.batch.document_BT, micro.prepared),
                self.num_depths,
                apart=self.apart,
                recompute=self.recompute,
                autocast=self.compute_dtype,
                starts_BP=micro.starts_BP,
            )
            if measures:
                with autocasting(micro.scale_K.device, self.compute_dtype):
                    return dense_sums(rows, self.ends, self.head, self.draft_vocab)
        return self._loss(rows, micro.scale_K, micro.used_N)

    def _loss(self, rows: AlignedRows, scale_K: Tensor, used_N: Tensor | None) -> LossTerms:
        lm_head_VD = self.ends.lm_head_VD
        own_heads = self.head.own_lm_heads(self.num_depths)
        targets_N = rows.targets_N
        vocab_R = self.draft_vocab
        if vocab_R is not None:
            # The trunk is frozen: its rows are chosen and converted once.
            if self._rows_RD is None:
                self._rows_RD = lm_head_VD[vocab_R].to(self.compute_dtype)
            lm_head_VD = self._rows_RD
            if own_heads is not None:
                # A head may have the rows of the draft vocabulary alone.
                own_heads = [own if len(own) == len(vocab_R) else own[vocab_R] for own in own_heads]
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
            # A head that shares the trunk's matrix shares its bound too: both are compared without it.
            teacher_bound=None if own_heads is None else self.ends.logit_bound,
            compute_dtype=self.compute_dtype,
            used_N=used_N,
        )
