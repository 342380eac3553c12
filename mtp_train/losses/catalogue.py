"""Register the losses that ``objective.loss`` can name: one line each, without importing torch.

The recipe validates names against this table. Training and estimates read a loss's properties from its entry. To add a
loss, write one function (:data:`RowsFn`) and register it, either in the table below or from another package before the
recipe is read (``log_probabilities`` is in ``mtp_train.losses.rows``)::

    def brier_rows(logits_CV, teacher_logits_CV, targets_C, temperature):
        log_q_CV, log_p_CV = (log_probabilities(one, temperature) for one in (logits_CV, teacher_logits_CV))
        q_CV, gap_CV = log_q_CV.exp(), log_q_CV.exp() - log_p_CV.exp()
        slope_CV = 2 * gap_CV
        mean_C1 = (q_CV * slope_CV).sum(-1, keepdim=True)
        return RowLoss(gap_CV.square().sum(-1), q_CV * (slope_CV - mean_C1) / temperature)

    register_loss(Loss("brier", brier_rows))

Shapes: C rows of a chunk, V vocabulary, K depths, N target rows.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class RowLoss(NamedTuple):
    """The loss of each row, and its gradient with respect to the head's logits."""

    loss_C: Tensor
    gradient_CV: Tensor


if TYPE_CHECKING:
    RowsFn = Callable[[Tensor, Any, Tensor, float], RowLoss]
    PrepareFn = Callable[[Tensor, float], Any]
    CombineFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    RowWork = Callable[[Tensor, Tensor], RowLoss]


@dataclass(frozen=True)
class Loss:
    """A loss and the functions that compute it.

    Functions are given as callables, or as ``"package.module:function"``, which is imported at first use.

    Attributes:
        name: The value of ``objective.loss``.
        rows: ``(logits_CV, teacher, targets_C, temperature)`` to a :class:`RowLoss` in fp32: the head's logits, the
            trunk's (None where ``distils`` is false) or the result of ``prepare``, the target tokens (int64) and T.
        combine: ``(loss_KN, row_weight_KN)`` to ``(loss_KN, slope_KN)``: the final loss of each row where it also
            depends on the row's other depths, and the derivative of ``sum(row_weight * final loss)`` with respect to
            each row's own loss. None: the losses of rows are final, and the slope is ``row_weight``.
        prepare: ``(teacher_logits_CV, temperature)`` to what ``rows`` reads in place of the trunk's logits, without
            overwriting it. It runs once for all depths of a chunk. None: ``rows`` reads the logits.
        distils: Whether the loss compares q with the trunk's distribution p. If not, the trunk's logits are not
            computed and ``objective.temperature`` has to be 1.
    """

    name: str
    rows: str | RowsFn
    combine: str | CombineFn | None = None
    prepare: str | PrepareFn | None = None
    distils: bool = True

    def prepared(self, teacher_logits_CV: Tensor, temperature: float) -> Any:
        return teacher_logits_CV if self.prepare is None else resolved(self.prepare)(teacher_logits_CV, temperature)


def resolved(function: Any) -> Any:
    """Return a function of a loss, imported if it is given by name; None stays None."""
    return pkgutil.resolve_name(function) if isinstance(function, str) else function


AUTO = "auto"
DEFAULT_LOSS = "kl"
"""``objective.loss: auto``. Of the six losses below, none drafts better both greedily and sampled
(``inference/benchmarks/objectives.md``)."""
_ROWS = "mtp_train.losses.rows"
_P, _LOG_P = f"{_ROWS}:probabilities", f"{_ROWS}:log_probabilities"
_LOSSES = {
    loss.name: loss
    for loss in (
        Loss("ce", f"{_ROWS}:cross_entropy", distils=False),
        Loss("kl", f"{_ROWS}:kl", prepare=_P),
        Loss("reverse_kl", f"{_ROWS}:reverse_kl", prepare=_LOG_P),
        Loss("tv", f"{_ROWS}:total_variation", prepare=_P),
        Loss("lk", f"{_ROWS}:lk", prepare=_P),
        Loss("e2e_tv", f"{_ROWS}:total_variation", "mtp_train.losses.chunked:chain_losses", prepare=_P),
    )
}


def register_loss(loss: Loss) -> None:
    """Add a loss, so that a recipe can name it. Every process of a run has to do so before it reads the recipe.

    Raises:
        ValueError: The name is ``auto``, or another loss has it.
    """
    if loss.name == AUTO or _LOSSES.get(loss.name, loss) != loss:
        raise ValueError(f"{loss.name!r}: the name of another loss; expected a new name. Choose one.")
    _LOSSES[loss.name] = loss


def loss_names() -> tuple[str, ...]:
    """Return the names of all losses, in the order in which they were registered."""
    return tuple(_LOSSES)


def loss_choices() -> tuple[str, ...]:
    """Return the values that ``objective.loss`` may have: ``auto`` and the names of all losses."""
    return (AUTO, *_LOSSES)


def find_loss(name: str) -> Loss:
    """Return a loss by its name, the default loss for ``auto``; raise a KeyError if there is no such loss."""
    return _LOSSES[DEFAULT_LOSS if name == AUTO else name]
