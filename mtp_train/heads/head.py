"""What training, teacher-forced metrics and drafters use of a head of any kind.

Shapes: B rows, T tokens, P start rows, D the trunk's hidden size, A the width of the head's states, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from mtp_train.families import Convention, Family


class Head(nn.Module):
    """A head that drafts several tokens from the states of a frozen trunk."""

    blocks: nn.ModuleList
    """All its weights."""
    family: Family
    convention: Convention
    """Its ``hidden`` names the trunk's states that :meth:`unroll` takes."""
    trunk_layers: tuple[int, ...] = ()
    """The trunk's layers whose input the head reads; empty where it reads the last hidden state."""
    reads_keys = False
    """Whether the head attends to the trunk's keys and values, see ``Ends.show_to``."""
    teacher_forced = True
    """Whether :meth:`unroll` is implemented. If not, the head is decoded with only, and reports have no teacher-forced
    metrics of it."""

    @abstractmethod
    def unroll(
        self,
        hidden_BTD: Tensor,
        tokens_BT: Tensor,
        embed: Callable[[Tensor], Tensor],
        *,
        num_depths: int,
        positions_BT: Tensor,
        document_BT: Tensor,
        apart: bool = False,
        recompute: bool = False,
        starts_BP: Tensor | None = None,
    ) -> list[Tensor]:
        """Draft ``num_depths`` tokens from many rows at once, as decoding does; tokens are teacher-forced.

        Args:
            hidden_BTD: The trunk's states that the head reads, see ``Ends.head_input``.
            tokens_BT: int, the tokens of the same rows.
            embed: The result of :meth:`embedding`.
            positions_BT: int, restarting at each document.
            document_BT: int, document number, ``PADDING_DOCUMENT`` on padding.
            apart: Independent depths, in heads that can do so; see :func:`mtp_train.heads.step.unroll`.
            recompute: Recompute the activations of each depth in the backward pass.
            starts_BP: int, ascending: the P start rows to draft from in each row; None for all T.

        Returns:
            K tensors (B, P, A): the state for the logits of depth k at each start row.
        """

    @abstractmethod
    def own_lm_heads(self, num_depths: int) -> list[Tensor] | None:
        """Return the output matrix (V or R rows, A) of each depth, None where all depths use the trunk's."""

    @abstractmethod
    def project(self, depth: int, state: Tensor, shared: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the logits (..., V) of states (..., A) of :meth:`unroll`.

        Args:
            depth: 1-based depth of the states.
            shared: The trunk's function from states to logits, for heads without an output matrix.
        """

    def embedding(self, shared: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return the embedding function of the head's input tokens: its own, or else ``shared``, the trunk's."""
        return shared

    @abstractmethod
    def freeze_unused(self, num_depths: int) -> None:
        """Freeze what no depth uses: it gets no gradient, which data-parallel wrappers do not expect."""
