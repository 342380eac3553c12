"""Measure teacher-forced acceptance: what each depth would draft at every position of the trunk's own text.

Unlike counts from decoding, the figures do not depend on where rounds begin or on the draft depth, so they compare
heads with little noise. Sums run over all batches and processes before any ratio is taken. The steps:
:func:`target_figures` (per target row), :func:`dense_sums` (:class:`DenseSums`), :meth:`DenseSums.figures` (ratios).

Shapes: K depths.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from mtp_train.acceptance.counts import entropy, overlap
from mtp_train.heads.head import Head
from mtp_train.losses.chunked import chunk_rows, gpu_bytes_of, to_starts
from mtp_train.trunk.ends import Ends, draft_logits
from mtp_train.trunk.precision import slow_halves

if TYPE_CHECKING:
    from mtp_train.train.packed_rows import AlignedRows

AnyHead = TypeVar("AnyHead", bound=Head)


class TargetFigures(NamedTuple):
    """Figures of every target row; 0 where no depth has a target."""

    agreed_KN: Tensor
    """bool, whether argmax q = argmax p."""
    overlap_KN: Tensor
    """fp32, ``sum_v min(p, q)``."""
    entropy_N: Tensor
    """fp32, entropy of p in nats."""


class DenseSums(NamedTuple):
    """Sums over targets, which add up over batches and processes; fp32 of shape (K,)."""

    agreed_K: Tensor
    """Targets where argmax q = argmax p."""
    overlapped_K: Tensor
    """``sum_v min(p, q)``."""
    chained_K: Tensor
    """Drafts of :attr:`reached_K` at which this depth and all earlier ones agreed: greedy decoding accepts them."""
    chained_overlap_K: Tensor
    """Sum over the same drafts of the product of overlaps up to this depth: the acceptance of sampled drafts."""
    reached_K: Tensor
    """Drafts that can occur in decoding: the round begins after a token of the response, and every earlier depth has a
    target. No round begins inside the prompt, as the first token comes from prefill."""
    targets_K: Tensor
    entropy_K: Tensor
    """Entropy of p, in nats."""

    def figures(self) -> dict[str, float | None]:
        """Return the ratios as a line of the log names them; None for a depth without targets.

        ``held_out_tau`` is the mean number of tokens per round of greedy decoding, if a round began at every token of
        the responses, ``held_out_tau_sampled`` that of sampling at temperature 1. The overlap is the expected
        acceptance of a sampled draft (arXiv:2211.17192, theorem 3.5).
        """
        found: dict[str, float | None] = {
            "held_out_tau": _tau(self.chained_K, self.reached_K),
            "held_out_tau_sampled": _tau(self.chained_overlap_K, self.reached_K),
            "held_out_entropy": _ratios(self.entropy_K, self.targets_K)[0],
        }
        for name, sums_K in (("agreement", self.agreed_K), ("overlap", self.overlapped_K)):
            for depth, ratio in enumerate(_ratios(sums_K, self.targets_K), start=1):
                found[f"held_out_{name}_depth_{depth}"] = ratio
        return found


def target_figures(
    rows: AlignedRows, ends: Ends, head: Head, *, temperature: float = 1.0, draft_vocab_R: Tensor | None = None
) -> TargetFigures:
    """Return the figures of all target rows. Only p and q of one chunk of rows are held at a time.

    Args:
        ends: Their output matrix gives p, and q if the head has none of its own.
        temperature: Divisor of the logits of p and q, above 0.
        draft_vocab_R: int, the tokens that the head may draft; q is 0 elsewhere. None for all.
    """
    valid_KN = rows.valid_KN
    agreed_KN = torch.zeros_like(valid_KN)
    overlap_KN = torch.zeros(valid_KN.shape, device=valid_KN.device)
    entropy_N = torch.zeros(valid_KN.shape[1], device=valid_KN.device)
    logits = draft_logits(ends, draft_vocab_R, rows.teacher_ND.dtype)
    # As many fp32 tensors of a chunk as in a loss: p, q and what they are computed from.
    num_rows = chunk_rows(len(ends.lm_head_VD), gpu_bytes_of(valid_KN.device))
    for chunk in valid_KN.any(dim=0).nonzero().squeeze(1).split(num_rows):
        p_CV = _softmax(ends.project(rows.teacher_ND[chunk]), temperature)
        entropy_N[chunk] = entropy(p_CV)
        for depth in range(len(valid_KN)):
            # The output matrix multiplies the trunk's states in their dtype: convert the head's to it.
            state_CD = rows.student_KND[depth, chunk].to(rows.teacher_ND.dtype)
            q_CV = _softmax(head.project(depth + 1, state_CD, logits), temperature)
            agreed_KN[depth, chunk] = q_CV.argmax(-1) == p_CV.argmax(-1)
            overlap_KN[depth, chunk] = overlap(p_CV, q_CV)
    return TargetFigures(agreed_KN, overlap_KN, entropy_N)


def dense_sums(rows: AlignedRows, ends: Ends, head: Head, draft_vocab_R: Tensor | None = None) -> DenseSums:
    """Return the sums of :func:`target_figures` at temperature 1 over the targets of the rows."""
    valid_KN = rows.valid_KN
    agreed_KN, overlap_KN, entropy_N = target_figures(rows, ends, head, draft_vocab_R=draft_vocab_R)
    valid_KS, agreed_KS, overlap_KS = (to_starts(one) for one in (valid_KN, agreed_KN, overlap_KN))
    reached_KS = valid_KS.cumprod(0) * rows.starts_N
    return DenseSums(
        agreed_K=(agreed_KN & valid_KN).sum(1).float(),
        overlapped_K=(overlap_KN * valid_KN).sum(1),
        chained_K=(agreed_KS.cumprod(0) * reached_KS).sum(1).float(),
        chained_overlap_K=(overlap_KS.cumprod(0) * reached_KS).sum(1),
        reached_K=reached_KS.sum(1).float(),
        targets_K=valid_KN.sum(1).float(),
        entropy_K=(entropy_N * valid_KN).sum(1),
    )


def _softmax(logits_CV: Tensor, temperature: float) -> Tensor:
    # No division at temperature 1: it would copy a chunk's logits, a quarter of a gigabyte.
    logits_CV = logits_CV.float()
    return torch.softmax(logits_CV if temperature == 1.0 else logits_CV / temperature, dim=-1)


@contextmanager
def many_rows(trunk: Ends, head: AnyHead) -> Iterator[AnyHead]:
    """Run a trunk over many rows in the faster precision, and yield the head to run with it.

    Where the device is slow in the dtype in which they are held, the trunk computes in fp32 and the head is a copy in
    fp32.
    """
    if not slow_halves(trunk.lm_head_VD.dtype, trunk.lm_head_VD.device):
        yield head
        return
    with trunk.computing_in(torch.float32):
        yield deepcopy(head).float()


def _ratios(sums_K: Tensor, counts_K: Tensor) -> list[float | None]:
    return [float(total / count) if count else None for total, count in zip(sums_K, counts_K, strict=True)]


def _tau(chained_K: Tensor, reached_K: Tensor) -> float | None:
    """Return 1 + the sum of the marginal shares."""
    shares = [share for share in _ratios(chained_K, reached_K) if share is not None]
    return 1.0 + sum(shares) if shares else None
