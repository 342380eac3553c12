"""What is done with the kernels of the losses: ``python triton_jobs.py agree DEVICE | compile TARGET``.

A process of its own prints what came of it as JSON: whether kernels are interpreted is settled when Triton is imported.

Shapes: C rows, V vocabulary, K depths, N target rows, D hidden.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from typing import Any, NamedTuple, get_args

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mtp_train.losses import triton_rows as losses_triton
from mtp_train.losses.chunked import CHUNK_ROWS, RowsIn, frozen_head_loss
from mtp_train.losses.rows import row_losses
from mtp_train.losses.triton_rows import BLOCK, WARPS, kernel_device, row_work

KINDS: tuple[str, ...] = ("ce", "kl", "reverse_kl", "tv", "lk")
DISTILLING = KINDS[1:]
INF = float("inf")
# Blocks that are not full, and less than one.
SHAPES = ((torch.float32, BLOCK + 5, 1.0), (torch.float32, 31, 2.5), (torch.bfloat16, BLOCK + 5, 2.5))
# On a device, what a job has: every row of a chunk, full blocks, all tokens of a large vocabulary.
LARGE = (torch.bfloat16, 248_320, 1.0)


class Rows(NamedTuple):
    """Logits of both, and the tokens that follow."""

    logits_CV: Tensor
    teacher_CV: Tensor
    targets_C: Tensor


def random_rows(width: int, dtype: torch.dtype, device: str, num_rows: int = 2) -> Rows:
    generator = torch.Generator().manual_seed(width)
    teacher_CV = 3 * torch.randn(num_rows, width, generator=generator)
    logits_CV = teacher_CV + torch.randn(num_rows, width, generator=generator)
    targets_C = torch.randint(width, (num_rows,), generator=generator)
    return Rows(logits_CV.to(device, dtype), teacher_CV.to(device, dtype), targets_C.to(device))


def by_kernel(kind: str, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
    """Return losses and gradients, once it is seen that nothing beside the rows was written."""
    num_rows, width = rows.logits_CV.shape
    around_CV = rows.logits_CV.new_full((num_rows + 2, width), 7.0)
    around_CV[1:-1] = rows.logits_CV
    work = row_work(kind, None if kind == "ce" else rows.teacher_CV.contiguous(), temperature)
    loss_C, gradient_CV = work(around_CV[1:-1], rows.targets_C)
    if not (around_CV[[0, -1]] == 7.0).all() or gradient_CV.data_ptr() != around_CV[1].data_ptr():
        raise AssertionError(f"{kind}: written beside the rows")
    return loss_C, gradient_CV


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return ((found.float() - expected).abs().max() / expected.abs().max()).item()


def differences(kind: str, rows: Rows, temperature: float) -> list[float]:
    """Return how far kernel and torch are apart: losses, and gradients."""
    expected = row_losses(kind, *rows, temperature)
    return [apart(*pair) for pair in zip(by_kernel(kind, rows, temperature), expected, strict=True)]


def agree(device: str) -> dict[str, Any]:
    """Compare kernels with torch, also where logits are large, equal, missing or broken, and in whole losses."""
    found: dict[str, Any] = {"float32": {}, "bfloat16": {}, "wrong": {}, "edges": edges(device), "whole": whole(device)}
    for kind in KINDS:
        for dtype, width, softened in SHAPES if device == "cpu" else (*SHAPES, LARGE):
            rows = random_rows(width, dtype, device, 2 if device == "cpu" else CHUNK_ROWS)
            temperature = 1.0 if kind == "ce" else softened
            name = f"{kind} {width} {temperature}"
            found[str(dtype).removeprefix("torch.")][name] = differences(kind, rows, temperature)
        rows = random_rows(31, torch.float32, device)
        large = rows._replace(logits_CV=rows.logits_CV + 1e4, teacher_CV=rows.teacher_CV - 1e4)
        found["float32"][f"{kind} large"] = differences(kind, large, 1.0)
        found["float32"][f"{kind} without a block"] = without_tokens(kind, device)
        found["wrong"] |= {f"{kind} {what}": value for what, value in misled(kind, rows).items()}
    return found


def misled(kind: str, rows: Rows) -> dict[str, float]:
    """Return how far losses are from torch's where the kernel is told another temperature, or of a token less."""
    loss_C = row_losses(kind, *rows, 1.0).loss_C
    last = rows.logits_CV.shape[1] - 1
    fewer = Rows(rows.logits_CV[:, :last], rows.teacher_CV[:, :last], rows.targets_C.clamp(max=last - 1))
    found = {"width": apart(by_kernel(kind, fewer, 1.0)[0], loss_C)}
    return found if kind == "ce" else found | {"temperature": apart(by_kernel(kind, rows, 1.01)[0], loss_C)}


def without_tokens(kind: str, device: str) -> list[float]:
    """Compare rows that shut out a block of tokens by -inf with rows that do not have these tokens."""
    rows = random_rows(BLOCK + 31, torch.float32, device)
    kept = Rows(rows.logits_CV[:, BLOCK:], rows.teacher_CV[:, BLOCK:], rows.targets_C % 31)
    for logits_CV in rows[:2]:
        logits_CV[:, :BLOCK] = -INF
    loss_C, gradient_CV = by_kernel(kind, rows._replace(targets_C=kept.targets_C + BLOCK), 1.0)
    if gradient_CV[:, :BLOCK].any():
        raise AssertionError(f"{kind}: a gradient where no probability is")
    expected = row_losses(kind, *kept, 1.0)
    return [apart(loss_C, expected.loss_C), apart(gradient_CV[:, BLOCK:], expected.gradient_CV)]


def edges(device: str) -> dict[str, Any]:
    """Return losses and gradients of equal rows, of rows with a token of q = 0, and of rows with NaN logits."""
    rows = random_rows(31, torch.float32, device)
    equal, lacking, broken = (Rows(*(one.clone() for one in rows)) for _ in range(3))
    equal.logits_CV[:] = equal.teacher_CV
    lacking.logits_CV[:, 3] = -INF
    broken.logits_CV[:, 3] = float("nan")
    taught_badly = rows._replace(teacher_CV=broken.logits_CV)
    return {
        "equal": [value.abs().max().item() for kind in DISTILLING for value in by_kernel(kind, equal, 2.0)],
        "lacking kl": by_kernel("kl", lacking, 1.0)[0].isposinf().all().item(),
        "lacking tv": differences("tv", lacking, 1.0),
        "broken": [by_kernel(kind, broken, 1.0)[0].isnan().all().item() for kind in KINDS],
        "taught badly": [by_kernel(kind, taught_badly, 1.0)[0].isnan().all().item() for kind in DISTILLING],
    }


def whole(device: str) -> dict[str, list[float]]:
    """Return a whole loss by torch, and how far the kernels' total, sums and gradient are from torch's."""
    generator = torch.Generator().manual_seed(1)
    student_KND, teacher_ND, *matrices = (
        torch.randn(*shape, generator=generator).to(device) for shape in ((2, 6, 8), (6, 8), *[(31, 8)] * 3)
    )
    student_KND.requires_grad_()
    weight_KN = torch.ones(2, 6, device=device)
    weight_KN[:, :2] = 0
    found = {}
    settings: tuple[tuple[str, bool, torch.dtype], ...] = (
        ("e2e_tv", False, torch.float32),
        ("lk", True, torch.float32),
        ("ce", False, torch.float32),
        ("kl", False, torch.bfloat16),
    )
    for kind, own, dtype in settings:
        lm_head_VD, *own_heads = (matrix_VD.to(dtype) for matrix_VD in matrices)
        given = (student_KND, teacher_ND, lm_head_VD, torch.arange(6, device=device), weight_KN)
        both = []
        for rows_in in get_args(RowsIn):
            terms = frozen_head_loss(
                *given, kind=kind, own_heads=own_heads if own else None, on_policy=not own, rows_in=rows_in
            )
            both.append((terms.total, terms.sum_K, *torch.autograd.grad(terms.total, student_KND)))
        found[kind] = [both[0][0].item(), *(apart(ours, theirs) for theirs, ours in zip(*both, strict=True))]
    return found


def compiled(target: GPUTarget, name: str, dtype: str, width: int) -> dict[str, Any]:
    """Return what a kernel takes of a device that is not there."""
    kernel = {"measure": losses_triton.measure_rows, "ce": losses_triton.cross_entropy_rows}.get(
        name, losses_triton.distilled_rows
    )
    constants: dict[str, Any] = {"width": width, "size": BLOCK}
    if kernel is losses_triton.distilled_rows:
        constants["kind"] = name
    known = dict.fromkeys(constants, "constexpr") | {"temperature": "fp32", "targets_ptr": "*i64"}
    known |= dict.fromkeys(("peak_ptr", "log_sum_ptr", "loss_ptr"), "*fp32")
    signature = {argument: known.get(argument, f"*{dtype}") for argument in kernel.arg_names}
    # A launch derives the alignment from torch's allocations.
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, one in enumerate(kernel.arg_names) if one.endswith("_ptr")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    built = triton.compile(source, target=target, options={"num_warps": WARPS})
    if target.backend == "hip":
        return {"spilled": sum(map(int, re.findall(r"_spill_count:\s*(\d+)", built.asm["amdgcn"])))}
    ptx = built.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.findall(rf"{what}:(\d+)", usage)[-1]) for what in ("REG", "STACK", "LOCAL"))
    return {
        "registers": registers,
        "spilled": stack + local,
        "wide": len(re.findall(r"(?:ld|st)\.global\.v4", ptx)),
        "narrow": len(re.findall(r"(?:ld|st)\.global\.b16", ptx)),
        "rounded": len(re.findall(r"cvt\.rn\.bf16", ptx)),
    }


def compile_all(backend: str, arch: str, dtype: str, width: str) -> dict[str, Any]:
    """Compile every kernel for one device."""
    target = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)
    return {name: compiled(target, name, dtype, int(width)) for name in ("measure", *KINDS)}


def main() -> None:
    """Do what the command line names."""
    # -inf minus -inf, past the end of a row: numpy warns of it in the interpreter, a device does not.
    warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)
    what, *words = sys.argv[1:]
    print(json.dumps({"agree": agree, "compile": compile_all}[what](*words) | {"device": kernel_device()}))


if __name__ == "__main__":
    main()
