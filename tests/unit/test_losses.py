"""Losses and their gradients against autograd in fp64 on logits that are held all at once.

Shapes: K depths, N target rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtp_train.losses import chunked as losses
from mtp_train.losses.catalogue import RowLoss, find_loss, resolved
from mtp_train.losses.chunked import (
    CHUNK_ROWS,
    CHUNK_TENSORS,
    LOSS_BYTES,
    LossTerms,
    align_to_targets,
    chunk_rows,
    depth_weights,
    frozen_head_loss,
    row_work,
)
from peak_memory import PeakMemory
from tolerances import assert_same, rounding

KINDS: tuple[str, ...] = ("ce", "kl", "reverse_kl", "tv", "lk", "e2e_tv")
DISTILLING = tuple(kind for kind in KINDS if kind != "ce")


class Rows(NamedTuple):
    student_KND: Tensor
    teacher_ND: Tensor
    lm_head_VD: Tensor
    targets_N: Tensor
    row_weight_KN: Tensor


def random_rows(num_rows: int, vocab: int = 31) -> Rows:
    """Return rows of which a third of every depth, and the first row of all depths, weigh nothing."""
    generator = torch.Generator().manual_seed(num_rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight_KN = draw(2, num_rows).abs()
    weight_KN[torch.rand(2, num_rows, generator=generator) < 1 / 3] = 0
    # Depth k has no start for its first k rows.
    for depth in range(2):
        weight_KN[depth, : depth + 1] = 0
    targets_N = torch.randint(vocab, (num_rows,), generator=generator)
    student_KND = draw(2, num_rows, 8).requires_grad_()
    return Rows(student_KND, draw(num_rows, 8), draw(vocab, 8), targets_N, weight_KN)


def autograd_loss(
    rows: Rows, kind: str, temperature: float, own_KVD: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return total, sums per depth and the gradient, all rows at once and in fp64.

    ``own_KVD``: the head's output matrices, where it does not use the trunk's.
    """
    student_KND = rows.student_KND.detach().double().requires_grad_()
    lm_head_VD = rows.lm_head_VD.double()
    weight_KN = rows.row_weight_KN.double()
    logits_KNV = student_KND @ (lm_head_VD if own_KVD is None else own_KVD.double()).mT
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
    q = log_q.exp()
    p = log_p.exp()
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


def row_losses(
    kind: str, logits_CV: Tensor, teacher_CV: Tensor | None, targets_C: Tensor, temperature: float
) -> RowLoss:
    loss = find_loss(kind)
    return resolved(loss.rows)(logits_CV, loss.prepared(teacher_CV, temperature), targets_C, temperature)


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


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_s_own_output_matrices_give_its_logits_and_gradient(
    kind: str, compute_dtype: torch.dtype | None
) -> None:
    """Each depth has another matrix, and none has the trunk's, which gives p."""
    rows = random_rows(CHUNK_ROWS + 7)
    own_KVD = torch.randn(2, *rows.lm_head_VD.shape, generator=torch.Generator().manual_seed(1))
    total, sum_K, gradient_KND = autograd_loss(rows, kind, 1.0, own_KVD)
    terms = frozen_head_loss(*rows, kind=kind, own_heads=list(own_KVD), compute_dtype=compute_dtype)
    gradient = gradient_of(terms, rows.student_KND)
    if compute_dtype is None:
        torch.testing.assert_close(terms.total.double(), total, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(terms.sum_K.double(), sum_K, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient.double(), gradient_KND, rtol=1e-5, atol=1e-4)
    else:
        assert terms.total.item() == pytest.approx(total.item(), rel=1e-2)
        assert ((gradient - gradient_KND).norm() / gradient_KND.norm()).item() < 6e-2


@pytest.mark.parametrize(
    ("vocab_size", "gpu_gib", "expected"),
    [
        (248_320, None, 256),
        (248_320, 80, 384),
        # A thirty-second part of the memory: 0.5 GB.
        (32_000, 16, 768),
        # Never fewer than on a CPU, and not more than products gain from.
        (248_320, 16, 256),
        (4096, 80, 4096),
    ],
)
def test_a_gpu_has_chunks_for_its_memory(vocab_size: int, gpu_gib: int | None, expected: int) -> None:
    assert chunk_rows(vocab_size, None if gpu_gib is None else gpu_gib << 30) == expected


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_on_a_gpu_takes_no_more_than_two_gigabytes(
    compute_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The goal of 8,192 tokens, 248,320 words and three depths, counted on tensors without values."""
    vocab_size, num_tokens, width = 248_320, 8192, 64
    num_rows = chunk_rows(vocab_size, 80 << 30)
    monkeypatch.setattr(torch, "autocast", lambda *_device, **_enabled: nullcontext())
    student_KND, teacher_ND, lm_head_VD, weight_KN = (
        torch.empty(shape, device="meta", dtype=dtype)
        for shape, dtype in (
            ((3, num_tokens, width), torch.float32),
            ((num_tokens, width), compute_dtype),
            ((vocab_size, width), compute_dtype),
            ((3, num_tokens), torch.float32),
        )
    )
    used_N = torch.arange(num_tokens, device="meta")
    given = [student_KND.requires_grad_(), teacher_ND, lm_head_VD, used_N, weight_KN]
    settings = {"kind": "kl", "compute_dtype": compute_dtype, "used_N": used_N}
    monkeypatch.setattr(losses, "chunk_rows", lambda *_: num_rows)
    with PeakMemory(given) as memory:
        frozen_head_loss(*given, **settings)
    # Beside the gradient, which is the result.
    beside = student_KND.nbytes
    assert num_rows * vocab_size * 4 < memory.peak_bytes - beside < LOSS_BYTES == 2e9
    monkeypatch.setattr(losses, "chunk_rows", lambda *_: 2 * num_rows)
    with PeakMemory(given) as larger:
        frozen_head_loss(*given, **settings)
    assert larger.peak_bytes - beside > LOSS_BYTES


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


def extra_bytes(num_rows: int, kind: str, lm_head_dtype: torch.dtype = torch.float32, temperature: float = 1.0) -> int:
    """Return the peak of the forward pass beyond the gradient that it must keep."""
    rows = random_rows(num_rows, vocab=VOCAB)
    rows = rows._replace(lm_head_VD=rows.lm_head_VD.to(lm_head_dtype))
    with PeakMemory(rows) as memory:
        ours(rows, kind, temperature)
    return memory.peak_bytes - rows.student_KND.nbytes


@pytest.mark.parametrize("lm_head_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_the_rows(kind: str, lm_head_dtype: torch.dtype) -> None:
    few, many = (extra_bytes(factor * CHUNK_ROWS, kind, lm_head_dtype) for factor in (2, 8))
    # Row numbers and masks grow, by a few bytes a row; logits would by 4,000.
    assert few <= many < few + 6 * CHUNK_ROWS * 64
    assert CHUNK_BYTES <= many < 9 * CHUNK_BYTES


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("lm_head_dtype", [torch.float32, torch.bfloat16])
def test_as_many_tensors_of_a_chunk_are_held_as_the_footprint_counts(
    lm_head_dtype: torch.dtype, temperature: float
) -> None:
    num_rows = 2 * CHUNK_ROWS
    peaks = [extra_bytes(num_rows, kind, lm_head_dtype, temperature) for kind in KINDS]
    # Hidden states, their gradient, losses and row numbers: at most 64 numbers of 8 bytes a row.
    beside = num_rows * 64 * 8
    assert (CHUNK_TENSORS - 1) * CHUNK_BYTES < max(peaks) <= CHUNK_TENSORS * CHUNK_BYTES + beside
    assert beside < CHUNK_BYTES


# Four blocks, the last of one row; two blocks.
@pytest.mark.parametrize("block_rows", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_rows_give_the_bits_of_the_whole_chunk(
    kind: str, dtype: torch.dtype, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits_CV, teacher_CV = torch.randn(2, 7, 31, generator=generator).to(dtype)
    targets_C = torch.arange(7)
    whole = row_work(find_loss(kind), teacher_CV, 1.0, dtype)(logits_CV.clone(), targets_C)
    monkeypatch.setattr(losses, "BLOCK_NUMBERS", block_rows * 31)
    work = row_work(find_loss(kind), teacher_CV, 1.0, dtype)
    for _ in range(2):
        blocks = work(logits_CV.clone(), targets_C)
        assert torch.equal(blocks.loss_C, whole.loss_C)
        assert torch.equal(blocks.gradient_CV, whole.gradient_CV)


@pytest.mark.parametrize("kind", DISTILLING)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_rows_of_a_wide_vocabulary_are_off_by_rounding_alone(kind: str, temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    vocab = 4000
    logits_CV, teacher_CV = 3 * torch.randn(2, 6, vocab, generator=generator)
    # Near p, kl is a small difference of two large sums.
    logits_CV[:3] = teacher_CV[:3] + 1e-3 * logits_CV[:3]
    exact_CV = logits_CV.double().requires_grad_()
    log_q_CV, log_p_CV = (torch.log_softmax(one / temperature, dim=-1) for one in (exact_CV, teacher_CV.double()))
    loss_C = divergence(kind, log_q_CV, log_p_CV, temperature)
    (gradient_CV,) = torch.autograd.grad(loss_C.sum(), exact_CV)
    row = row_losses(kind, logits_CV, teacher_CV, torch.zeros(6, dtype=torch.long), temperature)
    # Sums of V terms that weigh 1 together, over logarithms of this size.
    largest = float(log_q_CV.detach().abs().max()) * max(1.0, temperature**2)
    terms = round(vocab**0.5)
    assert float((row.loss_C - loss_C.detach()).abs().max()) < rounding(largest, terms)
    near = (log_q_CV - log_p_CV).abs() > 1e-6 if kind in ("tv", "lk", "e2e_tv") else torch.ones(6, vocab).bool()
    found_CV, expected_CV = (torch.where(near, one, 0.0) for one in (row.gradient_CV.double(), gradient_CV))
    assert_same(found_CV, expected_CV, terms, torch.float32)


def test_the_measure_sees_logits_that_are_held_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", 8 * CHUNK_ROWS)
    assert extra_bytes(8 * CHUNK_ROWS, "ce") > 9 * CHUNK_BYTES
