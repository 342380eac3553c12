"""What one row loses: divergences between the head's q and the trunk's p, each with its gradient, in fp32.

With temperature T, q = softmax(z / T) and p = softmax(t / T) of the head's logits z and the trunk's t::

    ce          -log q(x), of the token x that follows (T = 1)
    kl          T^2 sum_v p log(p / q)                      dz = T (q - p)
    reverse_kl  T^2 sum_v q log(q / p)                      dz = T q (log(q / p) - sum q log(q / p))
    tv          1 - alpha, alpha = sum_v min(p, q)          dz = q (s - sum q s) / T, s = sign(q - p) / 2
    lk          l kl + (1 - l) tv, l = exp(-3 alpha)        l is held fixed in the gradient

``kl`` and ``reverse_kl`` carry T^2, which keeps their gradient's size across temperatures (Hinton et al.,
arXiv:1503.02531, section 2.1). alpha is the chance that a draft sampled from q is accepted (Leviathan et al.,
arXiv:2211.17192, theorem 3.5), so ``tv`` is the rejection rate itself; its gradient vanishes where p and q do not meet,
which is what ``lk`` mends (arXiv:2602.23881). ``e2e_tv`` is made of ``tv``'s rows in ``losses.py``.

Shapes: C rows, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

LossKind = Literal["ce", "kl", "reverse_kl", "tv", "lk", "e2e_tv"]
RowsIn = Literal["torch", "triton"]
"""What computes them: this module, or the kernels of ``losses_triton.py``."""
LK_RATE = 3.0


class RowLoss(NamedTuple):
    """The loss of each row, and its gradient with respect to the head's logits."""

    loss_C: Tensor
    gradient_CV: Tensor


def row_losses(
    kind: LossKind, logits_CV: Tensor, teacher_logits_CV: Tensor | None, targets_C: Tensor, temperature: float
) -> RowLoss:
    """Return the losses of a chunk of rows; see the module's text.

    Args:
        kind: Which loss; ``e2e_tv`` gives its rows' ``tv``.
        logits_CV: The head's, any float dtype.
        teacher_logits_CV: The trunk's; None for ``ce`` alone.
        targets_C: int64, the tokens that follow; read by ``ce`` alone.
        temperature: T.

    Raises:
        ValueError: A loss that distils is asked for without teacher logits.
    """
    if kind == "ce":
        return _cross_entropy(logits_CV, targets_C)
    if teacher_logits_CV is None:
        raise ValueError(f"{kind}: no teacher logits; expected the trunk's. Give them, or use ce.")
    log_q_CV = torch.log_softmax(logits_CV.float() / temperature, dim=-1)
    log_p_CV = torch.log_softmax(teacher_logits_CV.float() / temperature, dim=-1)
    if kind == "kl":
        return _kl(log_q_CV, log_p_CV, temperature)
    if kind == "reverse_kl":
        return _reverse_kl(log_q_CV, log_p_CV, temperature)
    if kind == "lk":
        return _lk(log_q_CV, log_p_CV, temperature)
    return _total_variation(log_q_CV.exp_(), log_p_CV.exp_(), temperature)


# In place where it can be: each further tensor of this shape would be held at the peak.


def _cross_entropy(logits_CV: Tensor, targets_C: Tensor) -> RowLoss:
    log_q_CV = torch.log_softmax(logits_CV.float(), dim=-1)
    loss_C = -log_q_CV.gather(1, targets_C[:, None]).squeeze(1)
    gradient_CV = log_q_CV.exp_()
    gradient_CV.scatter_add_(1, targets_C[:, None], gradient_CV.new_full((len(targets_C), 1), -1.0))
    return RowLoss(loss_C, gradient_CV)


def _kl(log_q_CV: Tensor, log_p_CV: Tensor, temperature: float) -> RowLoss:
    p_CV = log_p_CV.exp()
    loss_C = temperature**2 * torch.linalg.vecdot(p_CV, log_p_CV.sub_(log_q_CV))
    return RowLoss(loss_C, log_q_CV.exp_().sub_(p_CV).mul_(temperature))


def _reverse_kl(log_q_CV: Tensor, log_p_CV: Tensor, temperature: float) -> RowLoss:
    q_CV = log_q_CV.exp()
    ratio_CV = log_q_CV.sub_(log_p_CV)
    mean_C = torch.linalg.vecdot(q_CV, ratio_CV)
    return RowLoss(temperature**2 * mean_C, ratio_CV.sub_(mean_C[:, None]).mul_(q_CV).mul_(temperature))


def _total_variation(q_CV: Tensor, p_CV: Tensor, temperature: float) -> RowLoss:
    sign_CV = p_CV.sub_(q_CV).neg_()
    loss_C = sign_CV.abs().sum(-1) / 2
    sign_CV.sign_().div_(2)
    mean_C = torch.linalg.vecdot(q_CV, sign_CV)
    return RowLoss(loss_C, sign_CV.sub_(mean_C[:, None]).mul_(q_CV).div_(temperature))


def _lk(log_q_CV: Tensor, log_p_CV: Tensor, temperature: float) -> RowLoss:
    tv = _total_variation(log_q_CV.exp(), log_p_CV.exp(), temperature)
    kl = _kl(log_q_CV, log_p_CV, temperature)
    share_C = (-LK_RATE * (1 - tv.loss_C)).exp()
    gradient_CV = kl.gradient_CV.mul_(share_C[:, None]).addcmul_(tv.gradient_CV, (1 - share_C)[:, None])
    return RowLoss(share_C * kl.loss_C + (1 - share_C) * tv.loss_C, gradient_CV)
