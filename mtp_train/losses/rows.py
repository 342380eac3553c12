"""Compute the loss of single rows, and its gradient, between the head's q and the trunk's p, in fp32.

With temperature T, q = softmax(z / T) and p = softmax(t / T) of the head's logits z and the trunk's logits t::

    ce          -log q(x), x the target token (T = 1)
    kl          T^2 sum_v p log(p / q)                      dz = T (q - p)
    reverse_kl  T^2 sum_v q log(q / p)                      dz = T q (log(q / p) - sum q log(q / p))
    tv          1 - alpha, alpha = sum_v min(p, q)          dz = q (s - sum q s) / T, s = sign(q - p) / 2
    lk          l kl + (1 - l) tv, l = exp(-3 alpha)        l is held fixed in the gradient

- ``kl`` and ``reverse_kl`` carry T^2, which keeps the size of their gradient across temperatures (Hinton et al.,
  arXiv:1503.02531, section 2.1).
- alpha is the probability that a draft sampled from q is accepted (Leviathan et al., arXiv:2211.17192, theorem 3.5), so
  ``tv`` is the rejection rate.
- The gradient of ``tv`` vanishes where p and q do not overlap; ``lk`` starts from ``kl`` for that reason
  (arXiv:2602.23881).
- ``e2e_tv`` combines the ``tv`` of a start's depths (:func:`mtp_train.losses.chunked.chain_losses`).

The functions of the losses are listed in ``losses/catalogue.py``. They overwrite their tensors where possible, because
every further tensor of shape (C, V) adds to the peak of memory. All depths of a chunk share
the result of ``prepare``, which they do not overwrite.

Shapes: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mtp_train.losses.catalogue import RowLoss

LK_RATE = 3.0


class Teacher(NamedTuple):
    """The trunk's distribution over a chunk of rows in fp32, computed once and read by every depth."""

    p_CV: Tensor
    negative_entropy_C: Tensor
    """``sum_v p log p``."""


def log_probabilities(logits_CV: Tensor, temperature: float) -> Tensor:
    """Return ``log softmax(logits / T)``, as a new tensor in fp32 that the caller may overwrite."""
    logits_CV = logits_CV.float()
    return torch.log_softmax(logits_CV if temperature == 1 else logits_CV / temperature, dim=-1)


def probabilities(teacher_logits_CV: Tensor, temperature: float) -> Teacher:
    """Return p at a temperature with its negative entropy."""
    log_p_CV = log_probabilities(teacher_logits_CV, temperature)
    p_CV = _exponentials(log_p_CV, keep=True)
    return Teacher(p_CV, torch.linalg.vecdot(p_CV, log_p_CV))


def _exponentials(log_q_CV: Tensor, keep: bool = False) -> Tensor:
    """Return q from its logarithm, which is overwritten unless ``keep``."""
    if log_q_CV.device.type == "cpu":
        # Its exponential is one and a half times as fast as exp(), and the sums of q are 1.
        return torch.softmax(log_q_CV, dim=-1)
    return log_q_CV.exp() if keep else log_q_CV.exp_()


def cross_entropy(logits_CV: Tensor, _teacher: Tensor | None, targets_C: Tensor, _temperature: float) -> RowLoss:
    log_q_CV = log_probabilities(logits_CV, 1.0)
    loss_C = -log_q_CV.gather(1, targets_C[:, None]).squeeze(1)
    gradient_CV = _exponentials(log_q_CV)
    gradient_CV.scatter_add_(1, targets_C[:, None], gradient_CV.new_full((len(targets_C), 1), -1.0))
    return RowLoss(loss_C, gradient_CV)


def kl(logits_CV: Tensor, teacher: Teacher, _targets: Tensor, temperature: float) -> RowLoss:
    log_q_CV = log_probabilities(logits_CV, temperature)
    loss_C = _kl(log_q_CV, teacher, temperature)
    return RowLoss(loss_C, _scaled(_exponentials(log_q_CV).sub_(teacher.p_CV), temperature))


def reverse_kl(logits_CV: Tensor, log_p_CV: Tensor, _targets: Tensor, temperature: float) -> RowLoss:
    log_q_CV = log_probabilities(logits_CV, temperature)
    q_CV = _exponentials(log_q_CV, keep=True)
    ratio_CV = log_q_CV.sub_(log_p_CV)
    mean_C = torch.linalg.vecdot(q_CV, ratio_CV)
    gradient_CV = ratio_CV.sub_(mean_C[:, None]).mul_(q_CV)
    return RowLoss(temperature**2 * mean_C, _scaled(gradient_CV, temperature))


def total_variation(logits_CV: Tensor, teacher: Teacher, _targets: Tensor, temperature: float) -> RowLoss:
    return _total_variation(_exponentials(log_probabilities(logits_CV, temperature)), teacher.p_CV, temperature)


def lk(logits_CV: Tensor, teacher: Teacher, _targets: Tensor, temperature: float) -> RowLoss:
    log_q_CV = log_probabilities(logits_CV, temperature)
    forward_C = _kl(log_q_CV, teacher, temperature)
    q_CV = _exponentials(log_q_CV)
    del log_q_CV
    tv = _total_variation(q_CV, teacher.p_CV, temperature)
    share_C = (-LK_RATE * (1 - tv.loss_C)).exp()
    gradient_CV = _scaled(q_CV.sub_(teacher.p_CV), temperature).mul_(share_C[:, None])
    gradient_CV.addcmul_(tv.gradient_CV, (1 - share_C)[:, None])
    return RowLoss(share_C * forward_C + (1 - share_C) * tv.loss_C, gradient_CV)


def _kl(log_q_CV: Tensor, teacher: Teacher, temperature: float) -> Tensor:
    # sum p (log p - log q) needs one more tensor of shape (C, V). The rounding of this difference is absolute, and the
    # gradient, q - p, does not contain it.
    return temperature**2 * (teacher.negative_entropy_C - torch.linalg.vecdot(teacher.p_CV, log_q_CV))


def _total_variation(q_CV: Tensor, p_CV: Tensor, temperature: float) -> RowLoss:
    # 1 - sum min(p, q) = sum (q - p) s.
    sign_CV = (q_CV - p_CV).sign_().div_(2)
    mean_C = torch.linalg.vecdot(q_CV, sign_CV)
    loss_C = mean_C - torch.linalg.vecdot(p_CV, sign_CV)
    return RowLoss(loss_C, _scaled(sign_CV.sub_(mean_C[:, None]).mul_(q_CV), 1 / temperature))


def _scaled(gradient_CV: Tensor, factor: float) -> Tensor:
    return gradient_CV if factor == 1 else gradient_CV.mul_(factor)
