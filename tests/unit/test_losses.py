"""Losses and their gradients against autograd in fp64 on logits that are held all at once.

Shapes: K depths, N target rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtp_inference.bench.memory import PeakMemory
from mtp_train.losses import chunked as losses
from mtp_train.losses.chunked import (
    CHUNK_ROWS,
    LossTerms,
    align_to_targets,
    chain_losses,
    depth_weights,
    frozen_head_loss,
)
from mtp_train.losses.rows import row_losses

KINDS: tuple[str, ...] = ("ce", "kl", "reverse_kl", "tv", "lk", "e2e_tv")
DISTILLING = tuple(kind for kind in KINDS if kind != "ce")


class Rows(NamedTuple):
    student_KND: Tensor
    teacher_ND: Tensor
    lm_head_VD: Tensor
    targets_N: Tensor
    row_weight_KN: Tensor


def random_rows(num_rows: int, num_depths: int = 2, hidden: int = 8, vocab: int = 31) -> Rows:
    """Return rows of which a third of every depth, and the first row of all depths, weigh nothing."""
    generator = torch.Generator().manual_seed(num_rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight_KN = draw(num_depths, num_rows).abs()
    weight_KN[torch.rand(num_depths, num_rows, generator=generator) < 1 / 3] = 0
    # Depth k has no start for its first k rows.
    for depth in range(num_depths):
        weight_KN[depth, : depth + 1] = 0
    targets_N = torch.randint(vocab, (num_rows,), generator=generator)
    student_KND = draw(num_depths, num_rows, hidden).requires_grad_()
    return Rows(student_KND, draw(num_rows, hidden), draw(vocab, hidden), targets_N, weight_KN)


def autograd_loss(rows: Rows, kind: str, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return total, sums per depth and the gradient, all rows at once and in fp64."""
    student_KND = rows.student_KND.detach().double().requires_grad_()
    lm_head_VD, weight_KN = rows.lm_head_VD.double(), rows.row_weight_KN.double()
    logits_KNV = student_KND @ lm_head_VD.T
    if kind == "ce":
        targets_KN = rows.targets_N.expand(len(student_KND), -1)
        loss_KN = F.cross_entropy(logits_KNV.flatten(0, 1), targets_KN.flatten(), reduction="none")
        loss_KN = loss_KN.view_as(weight_KN)
    else:
        log_q_KNV = torch.log_softmax(logits_KNV / temperature, dim=-1)
        log_p_NV = torch.log_softmax(rows.teacher_ND.double() @ lm_head_VD.T / temperature, dim=-1)
        loss_KN = divergence(kind, log_q_KNV, log_p_NV.expand_as(log_q_KNV), temperature)
    if kind == "e2e_tv":
        loss_KN = chained_by_hand(loss_KN, weight_KN)
    total = (weight_KN * loss_KN).sum()
    (gradient_KND,) = torch.autograd.grad(total, student_KND)
    return total.detach(), (loss_KN * (weight_KN != 0)).sum(dim=1).detach(), gradient_KND


def divergence(kind: str, log_q: Tensor, log_p: Tensor, temperature: float) -> Tensor:
    q, p = log_q.exp(), log_p.exp()
    kl = temperature**2 * F.kl_div(log_q, p, reduction="none").sum(-1)
    tv = 1 - torch.minimum(p, q).sum(-1)
    if kind == "lk":
        share = (-3 * (1 - tv.detach())).exp()
        return share * kl + (1 - share) * tv
    reverse = temperature**2 * F.kl_div(log_p, q, reduction="none").sum(-1)
    return {"kl": kl, "reverse_kl": reverse, "tv": tv, "e2e_tv": tv}[kind]


def chained_by_hand(tv_KN: Tensor, weight_KN: Tensor) -> Tensor:
    """Return ``1 - product of what the depths of one start keep``, start by start."""
    num_depths, num_rows = tv_KN.shape
    loss_KN = torch.zeros_like(tv_KN)
    for start in range(num_rows):
        kept = torch.ones((), dtype=tv_KN.dtype)
        for depth in range(1, num_depths + 1):
            row = start + depth
            if row < num_rows and weight_KN[depth - 1, row] != 0:
                kept = kept * (1 - tv_KN[depth - 1, row])
                loss_KN[depth - 1, row] = 1 - kept
    return loss_KN


def ours(rows: Rows, kind: str, temperature: float = 1.0) -> LossTerms:
    return frozen_head_loss(*rows, kind=kind, temperature=temperature)


def gradient_of(terms: LossTerms, student_KND: Tensor, scale: float = 1.0) -> Tensor:
    student_KND.grad = None
    (terms.total * scale).backward()
    assert student_KND.grad is not None
    return student_KND.grad


def test_depth_weights_fall_geometrically_and_sum_to_one() -> None:
    assert depth_weights(1, 0.6) == [1.0]
    assert depth_weights(3, 0.5) == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert depth_weights(4, 1.0) == [0.25] * 4


def test_rows_move_to_their_target_row_by_hand() -> None:
    starts = [torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]) + 10 * depth for depth in (1, 2, 3)]
    aligned_KBT = align_to_targets(starts)
    assert aligned_KBT[:, 0].tolist() == [[0, 11, 12, 13], [0, 0, 21, 22], [0, 0, 0, 31]]
    assert aligned_KBT[:, 1].tolist() == [[0, 15, 16, 17], [0, 0, 25, 26], [0, 0, 0, 35]]


@pytest.mark.parametrize("num_depths", [2, 4], ids=["as deep as the row", "deeper than the row"])
def test_a_depth_beyond_the_row_has_no_start(num_depths: int) -> None:
    aligned_KBTD = align_to_targets([torch.ones(2, 2, 3)] * num_depths)
    assert aligned_KBTD.shape == (num_depths, 2, 2, 3)
    assert aligned_KBTD.sum(dim=(1, 2, 3)).tolist() == [6.0] + [0.0] * (num_depths - 1)


# One chunk; exactly two; three, the last of a single row.
@pytest.mark.parametrize("num_rows", [7, 2 * CHUNK_ROWS + 1, 3 * CHUNK_ROWS])
@pytest.mark.parametrize(
    ("kind", "temperature"), [("ce", 1.0), *((kind, value) for kind in DISTILLING for value in (1.0, 2.5, 0.5))]
)
def test_loss_and_gradient_equal_autograd(kind: str, temperature: float, num_rows: int) -> None:
    rows = random_rows(num_rows)
    total, sum_K, gradient_KND = autograd_loss(rows, kind, temperature)
    terms = ours(rows, kind, temperature)
    torch.testing.assert_close(terms.total.double(), total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(terms.sum_K.double(), sum_K, rtol=1e-6, atol=1e-6)
    gradient = gradient_of(terms, rows.student_KND, scale=3.0)
    # Logarithms of a low temperature are large, and fp32 has seven digits of them.
    torch.testing.assert_close(gradient.double(), 3 * gradient_KND, rtol=1e-5, atol=1e-5 if kind == "ce" else 1e-4)


def test_the_size_of_a_chunk_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(50)
    whole = ours(rows, "kl")
    gradient = gradient_of(whole, rows.student_KND)
    monkeypatch.setattr(losses, "CHUNK_ROWS", 7)
    pieces = ours(rows, "kl")
    torch.testing.assert_close(pieces.total, whole.total)
    torch.testing.assert_close(gradient_of(pieces, rows.student_KND), gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_weight_zero_give_nothing(kind: str) -> None:
    rows = random_rows(40)
    terms = ours(rows, kind)
    gradient_KND = gradient_of(terms, rows.student_KND)
    idle_KN = rows.row_weight_KN == 0
    assert idle_KN.any()
    assert torch.equal(gradient_KND.any(dim=-1), ~idle_KN)
    with torch.no_grad():
        rows.student_KND[idle_KN] = 1e4
    again = ours(rows, kind)
    assert torch.equal(again.total, terms.total)
    assert torch.equal(again.sum_K, terms.sum_K)


def test_no_row_at_all_is_a_loss_of_zero() -> None:
    rows = random_rows(5)._replace(row_weight_KN=torch.zeros(2, 5))
    terms = ours(rows, "kl")
    assert terms.total == 0
    assert not gradient_of(terms, rows.student_KND).any()


@pytest.mark.parametrize("kind", DISTILLING)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_loss_is_zero_with_zero_gradient_where_q_equals_p_and_positive_elsewhere(
    kind: str, temperature: float
) -> None:
    rows = random_rows(20)
    equal = rows._replace(student_KND=rows.teacher_ND.expand(2, -1, -1).clone().requires_grad_())
    terms = ours(equal, kind, temperature)
    assert terms.total == 0
    assert not gradient_of(terms, equal.student_KND).any()
    assert (ours(rows, kind, temperature).sum_K > 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_minimum_is_p(kind: str) -> None:
    """Free logits that follow the gradient end at p: of ce in expectation over the tokens that p draws."""
    generator = torch.Generator().manual_seed(5)
    teacher_1V = torch.randn(1, 6, generator=generator)
    p_V = torch.softmax(teacher_1V[0], dim=-1)
    logits_1V = torch.randn(1, 6, generator=generator)
    for step in range(6000):
        gradient_1V = torch.zeros(1, 6)
        for token, weight in enumerate(p_V.tolist()) if kind == "ce" else [(0, 1.0)]:
            row = row_losses(kind, logits_1V, teacher_1V, torch.tensor([token]), 1.0)
            gradient_1V += weight * row.gradient_CV
        # The kink of tv at its minimum wants steps that shrink.
        logits_1V = logits_1V - 2.0 / (1 + step / 100) * gradient_1V
    assert (torch.softmax(logits_1V[0], dim=-1) - p_V).abs().max() < 0.01


def test_the_chain_of_a_start_by_hand() -> None:
    # Depth k of a start stands k rows after it. Start 0 keeps 1/2, then 1/4 of that; start 1 keeps 3/4 and ends.
    tv_KN = torch.tensor([[0.0, 0.5, 0.25, 0.0], [0.0, 0.0, 0.75, 0.0]])
    weight_KN = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 2.0, 0.0]])
    loss_KN, slope_KN = chain_losses(tv_KN, weight_KN)
    assert loss_KN.tolist() == [[0, 0.5, 0.25, 0], [0, 0, 1 - 0.5 * 0.25, 0]]
    # d/d tv of the first draft: its own loss, and the second's, 2 (1 - kept_1 kept_2).
    assert slope_KN.tolist() == [[0, 1 + 2 * 0.25, 1, 0], [0, 0, 2 * 0.5, 0]]


def test_the_rejection_rate_by_hand() -> None:
    row = row_losses("tv", torch.tensor([[3.0, 1.0]]).log(), torch.tensor([[1.0, 1.0]]).log(), torch.tensor([0]), 1.0)
    assert row.loss_C.item() == pytest.approx(0.25)
    # dq/dz of the first token is 3/4 * 1/4, and raising it rejects as much more.
    assert row.gradient_CV[0].tolist() == pytest.approx([0.1875, -0.1875])


def test_a_step_against_the_gradient_lowers_the_loss() -> None:
    for kind in KINDS:
        rows = random_rows(20)
        terms = ours(rows, kind)
        step_KND = rows.student_KND.detach() - 1e-3 * gradient_of(terms, rows.student_KND)
        assert ours(rows._replace(student_KND=step_KND), kind).total < terms.total


def test_the_loss_of_a_row_by_hand() -> None:
    logits_CV = torch.tensor([[3.0, 1.0]]).log()
    teacher_CV = torch.tensor([[1.0, 1.0]]).log()
    loss_C, gradient_CV = row_losses("ce", logits_CV, None, torch.tensor([1]), 1.0)
    assert loss_C.item() == pytest.approx(1.3862944)  # -log 1/4
    assert gradient_CV[0].tolist() == pytest.approx([0.75, -0.75])
    loss_C, gradient_CV = row_losses("kl", logits_CV, teacher_CV, torch.tensor([1]), 1.0)
    assert loss_C.item() == pytest.approx(0.1438410)  # log(4/3) / 2
    assert gradient_CV[0].tolist() == pytest.approx([0.25, -0.25])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 1e-6], ids=["", "a millionth"])
def test_a_bf16_lm_head_gives_fp32_sums_and_the_gradient_of_the_students_dtype(kind: str, scale: float) -> None:
    rows = random_rows(300)
    rows = rows._replace(row_weight_KN=scale * rows.row_weight_KN)
    total, _, gradient_KND = autograd_loss(rows, kind, 1.0)
    terms = ours(rows._replace(lm_head_VD=rows.lm_head_VD.bfloat16()), kind)
    gradient = gradient_of(terms, rows.student_KND)
    assert terms.total.dtype == gradient.dtype == torch.float32
    assert terms.total.item() == pytest.approx(total.item(), rel=5e-3)
    # The sign of q - p is another one where rounding decides it.
    bound = 1e-2 if kind in ("ce", "kl", "reverse_kl") else 6e-2
    assert ((gradient - gradient_KND).norm() / gradient_KND.norm()).item() < bound


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_reach_into_the_loss(kind: str) -> None:
    rows = random_rows(20)
    expected = ours(rows, kind).total
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (rows.student_KND[0] @ rows.lm_head_VD.T).dtype == torch.bfloat16
        assert torch.equal(ours(rows, kind).total, expected)


VOCAB = 1000
CHUNK_BYTES = 4 * CHUNK_ROWS * VOCAB


def extra_bytes(num_rows: int, kind: str, lm_head_dtype: torch.dtype = torch.float32) -> int:
    """Return the peak of the forward pass beyond the gradient that it must keep."""
    rows = random_rows(num_rows, vocab=VOCAB)
    rows = rows._replace(lm_head_VD=rows.lm_head_VD.to(lm_head_dtype))
    with PeakMemory(rows) as memory:
        ours(rows, kind)
    return memory.peak_bytes - rows.student_KND.nbytes


@pytest.mark.parametrize("lm_head_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_the_rows(kind: str, lm_head_dtype: torch.dtype) -> None:
    few, many = (extra_bytes(factor * CHUNK_ROWS, kind, lm_head_dtype) for factor in (2, 8))
    # Row numbers and masks grow, by a few bytes a row; logits would by 4,000.
    assert few <= many < few + 6 * CHUNK_ROWS * 64
    assert CHUNK_BYTES <= many < 9 * CHUNK_BYTES


def test_the_measure_sees_logits_that_are_held_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", 8 * CHUNK_ROWS)
    assert extra_bytes(8 * CHUNK_ROWS, "ce") > 9 * CHUNK_BYTES
