"""What is done with the decoder's kernels: ``python fused_jobs.py agree DEVICE | decode FAMILY | compile ...``.

A process of its own prints what came of it as JSON: whether kernels are interpreted is settled when Triton is imported.

Shapes: B rows, T tokens, C channels, W kernel width, H heads, K key heads, S slots, X width, V value width.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpreterBuilder

import mtp_inference.decoder
from mtp_inference import SpeculativeDecoder
from mtp_inference.kernels import programs
from mtp_inference.kernels.attention import attend_in_torch, attend_window
from mtp_inference.kernels.conv_delta import conv_in_torch, conv_window, delta_token, delta_window
from mtp_inference.kernels.norms import FORMULAS, GATED_FORMULAS, NormFormula, rms_norm, rms_norm_in_torch
from mtp_inference.kernels.rotary import rotate, rotated_in_torch
from tiny import tiny_head, tiny_trunk

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPSILON = 1e-6
NAMES = {torch.int64: "i64"} | {dtype: name for name, dtype in DTYPES.items()}
PROGRAMS = (
    "rms_norm_program",
    "conv_window_program",
    "delta_program",
    "rotate_program",
    "attend_program",
    "combine_program",
)


class Draw:
    """Random tensors on a device."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype or self.dtype)


def apart(found: Any, expected: Any) -> float:
    """Return the largest difference of two results, relative to the largest value; they have one shape and dtype."""
    if isinstance(found, Tensor):
        found, expected = [found], [expected]
    differences = []
    for ours, theirs in zip(found, expected, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise AssertionError(f"{ours.shape} {ours.dtype}; expected {theirs.shape} {theirs.dtype}")
        differences.append((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp(min=1e-6))
    return float(max(differences))


def norms(draw: Draw) -> dict[str, tuple[float, float]]:
    """Return how far each formula is from torch's, and from torch's with a larger epsilon."""
    found = {}
    for formula in (*FORMULAS, *GATED_FORMULAS):
        for width in (16, 37):
            # Heads of a wider product, as Qwen3.5's queries are beside their gates.
            x = draw(2, 3, 2 * width)[..., :width]
            weight_D = draw(width)
            gate = draw(2, 3, width) if formula.activation else None
            ours = programs.launch_rms_norm(x, weight_D, gate, EPSILON, *formula)
            found[f"{tuple(formula)} {width}"] = (
                apart(ours, rms_norm_in_torch(x, weight_D, gate, EPSILON, formula)),
                apart(ours, rms_norm_in_torch(x, weight_D, gate, 0.1, formula)),
            )
    return found


def convolutions(draw: Draw) -> dict[str, tuple[float, float]]:
    """Return how far windows are from torch's, and from torch's over other earlier inputs."""
    found = {}
    for num_tokens, activation, has_bias in ((4, "silu", False), (1, "", True), (8, "silu", True)):
        before_BCW, inputs_BCT = draw(2, 4, 300).mT, draw(2, num_tokens, 300).mT
        weight_CW, bias_C = draw(300, 4), draw(300) if has_bias else None
        known, ours = programs.launch_conv_window(before_BCW, inputs_BCT, weight_CW, bias_C, activation)
        given = (inputs_BCT, weight_CW, bias_C, activation)
        expected_known, expected = conv_in_torch(before_BCW, *given)
        if not torch.equal(known, expected_known):
            raise AssertionError("convolution: other inputs kept")
        found[f"{num_tokens} {activation} {has_bias}"] = (
            apart(ours, expected),
            apart(ours, conv_in_torch(before_BCW.roll(1, -1), *given)[1]),
        )
    return found


def deltas(draw: Draw) -> dict[str, tuple[float, float]]:
    """Return how far windows and tokens are from torch's, and from torch's with another decay."""
    found = {}
    for num_tokens, key_heads, widths in ((4, 2, (16, 8)), (8, 4, (12, 20)), (1, 1, (16, 24))):
        mixed = draw(2, num_tokens, 2 * key_heads * widths[0])
        query, key = (part.unflatten(-1, (key_heads, -1)) for part in mixed.chunk(2, dim=-1))
        value, beta = draw(2, num_tokens, 4, widths[1]), draw(2, num_tokens, 4).sigmoid()
        g = -draw(2, num_tokens, 4, dtype=torch.float32).abs()
        state = draw(2, 4, *widths, dtype=torch.float32)
        for normalises in (True, False):
            # As large as normalised ones, so that windows do not grow.
            scale = 1.0 if normalises else widths[0] ** -0.5
            given = (query * scale, key * scale, value)
            ours = programs.launch_delta_window(*given, g, beta, state, normalises)
            found[f"window {num_tokens} {widths} {normalises}"] = (
                apart(ours, delta_window(*given, g, beta, state, normalises)),
                apart(ours[0], delta_window(*given, 2 * g, beta, state, normalises)[0]),
            )
    ours, theirs, wrong = (state.clone() for _ in range(3))
    output = programs.launch_delta_token(query, key, value, g, beta, ours, True)
    expected = delta_token(query, key, value, g, beta, theirs, True)
    delta_token(query, key, value, 2 * g, beta, wrong, True)
    found["token"] = (apart((output, ours), (expected, theirs)), apart(ours, wrong))
    return found


def rotations(draw: Draw) -> dict[str, tuple[float, float]]:
    """Return how far rotations are from torch's, and from torch's in the other direction."""
    found = {}
    for width, turned, table_rows in ((16, 16, 2), (24, 8, 1)):
        query, key = draw(2, 3, 4, 2 * width)[..., :width].transpose(1, 2), draw(2, 3, 1, width).transpose(1, 2)
        angle = draw(table_rows, 3, turned // 2, dtype=torch.float32).repeat(1, 1, 2)
        cos, sin = angle.cos().to(draw.dtype), angle.sin().to(draw.dtype)
        ours = programs.launch_rotate(query, key, cos, sin)
        found[f"{width} {turned}"] = (
            apart(ours, [rotated_in_torch(part, cos, sin) for part in (query, key)]),
            apart(ours, [rotated_in_torch(part, cos, -sin) for part in (query, key)]),
        )
    return found


class Attended(NamedTuple):
    """A window of two rows, and the layer that attends from it."""

    num_tokens: int
    group: int
    key_heads: int
    slots: int
    starts: tuple[int, int]
    """Position of each row's first token; -2 is where a row of a chained module may start."""
    widths: tuple[int, int] = (16, 16)
    sliding_window: int | None = None
    has_sinks: bool = False
    softcap: float = 0.0


ATTENDED = (
    # More splits than are combined at once; a row out of use.
    Attended(1, 1, 1, 1100, (0, 1090)),
    Attended(2, 8, 1, 200, (0, 190), (16, 24)),
    Attended(3, 2, 2, 200, (5, 130), (20, 12), has_sinks=True),
    # Rings that the second row has filled more than once.
    Attended(4, 4, 1, 40, (3, 77), sliding_window=24),
    Attended(5, 3, 2, 40, (36, 500), (16, 8), sliding_window=24, has_sinks=True, softcap=5.0),
    Attended(6, 6, 1, 150, (-2, 100), softcap=2.0),
    Attended(7, 5, 1, 140, (0, 63)),
    # Several blocks of queries.
    Attended(8, 8, 1, 200, (3, 190)),
    Attended(8, 7, 1, 96, (0, 300), sliding_window=80),
)


def attentions(draw: Draw) -> dict[str, tuple[float, float]]:
    """Return how far windows are from torch's, and from torch's with one key less at either end of what is seen."""
    found = {}
    for one in ATTENDED:
        heads, key_width = one.group * one.key_heads, one.widths[0]
        query = draw(2, one.num_tokens, heads, 2 * key_width)[..., :key_width].transpose(1, 2)
        # Slots in use of a larger buffer.
        key, value = (draw(2, one.key_heads, one.slots + 8, width)[:, :, : one.slots] for width in one.widths)
        positions = torch.tensor(one.starts, device=draw.device)[:, None] + torch.arange(one.num_tokens).to(draw.device)
        reach, sinks = one.sliding_window or one.slots, draw(heads) if one.has_sinks else None
        more = key_width**-0.5, sinks, one.softcap
        ours = programs.launch_attend_window(query, key, value, positions, reach, *more)
        if one.sliding_window is None:
            wrong = attend_in_torch(query, key, value, positions - 1, reach, *more)
        else:
            wrong = attend_in_torch(query, key, value, positions, reach - 1, *more)
        found[str(one)] = (
            apart(ours, attend_in_torch(query, key, value, positions, reach, *more)),
            apart(ours, wrong),
        )
    return found


def dot_of_wide(builder: InterpreterBuilder, left: Any, right: Any, *others: Any) -> Any:
    """Multiply in fp32: the interpreter of Triton 3.7 multiplies the bits of bf16 as if they were whole numbers."""
    wide = [builder.cast_impl(one, tl.float32) if one.dtype == tl.bfloat16 else one for one in (left, right)]
    return DOT(builder, *wide, *others)


DOT = InterpreterBuilder.create_dot


def agree(device: str) -> dict[str, Any]:
    """Compare every kernel with torch."""
    InterpreterBuilder.create_dot = dot_of_wide
    kinds: dict[str, Callable[[Draw], dict[str, tuple[float, float]]]] = {
        "norm": norms,
        "convolution": convolutions,
        "delta": deltas,
        "rotation": rotations,
        "attention": attentions,
    }
    return {
        name: {kind: compare(Draw(device, dtype)) for kind, compare in kinds.items()} for name, dtype in DTYPES.items()
    }


def decode(name: str) -> dict[str, Any]:
    """Decode a tiny trunk with interpreted kernels and with torch's operations; return both texts and the launches."""
    counts: Counter[str] = Counter()

    def interpreted(launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            counts[launch.__name__] += 1
            return launch(*arguments)

        return run

    # For all of torch's devices at once: torch 2.13 runs the last one's kernel for each.
    rms_norm.register_kernel(("cpu", "meta"))(interpreted(programs.launch_rms_norm))
    conv_window.register_kernel(("cpu", "meta"))(interpreted(programs.launch_conv_window))
    delta_window.register_kernel(("cpu", "meta"))(interpreted(programs.launch_delta_window))
    delta_token.register_kernel(("cpu", "meta"))(interpreted(programs.launch_delta_token))
    rotate.register_kernel(("cpu", "meta"))(interpreted(programs.launch_rotate))
    attend_window.register_kernel(("cpu", "meta"))(interpreted(programs.launch_attend_window))
    trunk = tiny_trunk(name)
    head = tiny_head(trunk)
    prompts = [[5, 9, 2, 11, 3], [7, 1, 8]]
    texts = []
    for runs in (True, False):
        mtp_inference.decoder.runs_kernels = lambda device, runs=runs: runs  # type: ignore[assignment, misc]
        drafted = SpeculativeDecoder(trunk, head, 2, ()).decode(prompts, 8)
        plain = SpeculativeDecoder(trunk, None, 0, ()).decode(prompts, 4)
        texts.append([list(result.token_ids) for result in (*drafted, *plain)])
    return {"fused": texts[0], "torch": texts[1], "launches": dict(counts)}


class Launch:
    """In place of a kernel: keeps the arguments of its launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arguments: list[Any] = []
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.arguments, self.options = list(arguments), options

        return launch


def compiled(target: GPUTarget, launch: Launch) -> dict[str, Any]:
    """Compile a kernel as this launch would; return what it takes of a device that is not there."""
    constants, signature, attributes = {}, {}, {}
    for place, (name, value) in enumerate(zip(launch.kernel.arg_names, launch.arguments, strict=True)):
        is_constant = place in launch.kernel.constexprs or (isinstance(value, int) and value == 1)
        if is_constant:
            constants[name], signature[name] = value, "constexpr"
        elif isinstance(value, Tensor):
            signature[name] = "*" + NAMES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=target, options=launch.options)
    found = {"threads": built.metadata.num_warps * target.warp_size, "shared": built.metadata.shared}
    if target.backend == "hip":
        # Scalars beyond the scalar registers go to vector registers, and not to memory.
        sizes = r"\.(?:vgpr_spill_count|private_segment_fixed_size):\s*(\d+)"
        return found | {"spilled": sum(map(int, re.findall(sizes, built.asm["amdgcn"])))}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.findall(rf"{what}:(\d+)", usage)[-1]) for what in ("REG", "STACK", "LOCAL"))
    return found | {"registers": registers, "spilled": stack + local}


def launches(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Return launches in the shapes of a 9B Qwen3.5, by name; a number of the name is the window's."""

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    def norm(width: int, formula: NormFormula) -> Callable[[], Any]:
        gate = empty(4, width) if formula.activation else None
        return lambda: programs.launch_rms_norm(empty(4, width), empty(width), gate, EPSILON, *formula)

    def conv(num_tokens: int) -> Callable[[], Any]:
        inputs = empty(1, num_tokens, 8192).mT
        return lambda: programs.launch_conv_window(empty(1, 8192, 4), inputs, empty(8192, 4), None, "silu")

    def delta(num_tokens: int, launch: Any) -> Callable[[], Any]:
        query, key, value = empty(1, num_tokens, 8192).split([2048, 2048, 4096], dim=-1)
        parts = [part.unflatten(-1, (-1, 128)) for part in (query, key, value)]
        gates = empty(1, num_tokens, 32, of=torch.float32), empty(1, num_tokens, 32)
        return lambda: launch(*parts, *gates, empty(1, 32, 128, 128, of=torch.float32), True)

    def rotate(num_tokens: int) -> Callable[[], Any]:
        heads = [empty(1, num_tokens, count, 256).transpose(1, 2) for count in (16, 4)]
        return lambda: programs.launch_rotate(*heads, empty(1, num_tokens, 64), empty(1, num_tokens, 64))

    def attention(num_tokens: int, num_heads: int, key_heads: int, widths: tuple[int, int]) -> Callable[[], Any]:
        query = empty(1, num_heads, num_tokens, widths[0])
        key, value = (empty(1, key_heads, 16384, width) for width in widths)
        positions, sinks = empty(1, num_tokens, of=torch.int64), empty(num_heads)
        return lambda: programs.launch_attend_window(query, key, value, positions, 4096, 0.1, sinks, 50.0)

    return {
        "norm 4096": norm(4096, FORMULAS[2]),
        "norm 16384": norm(16384, FORMULAS[0]),
        "norm of heads": norm(256, FORMULAS[2]),
        "gated norm": norm(128, GATED_FORMULAS[0]),
        "convolution 4": conv(4),
        "convolution 1": conv(1),
        "delta 4": delta(4, programs.launch_delta_window),
        "delta 8": delta(8, programs.launch_delta_window),
        "delta 1": delta(1, programs.launch_delta_token),
        "rotation 4": rotate(4),
        "attention 4": attention(4, 16, 4, (256, 256)),
        "attention 8": attention(8, 16, 4, (256, 256)),
        "latent attention 4": attention(4, 128, 128, (192, 128)),
    }


def compile_all(backend: str, arch: str, dtype: str) -> dict[str, Any]:
    """Compile every launch for one device."""
    target = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)
    kernels = {name: vars(programs)[name] for name in PROGRAMS}
    found = {}
    for name, launch in launches(DTYPES[dtype]).items():
        held = {program: Launch(kernel) for program, kernel in kernels.items()}
        vars(programs).update(held)
        launch()
        vars(programs).update(kernels)
        found |= {f"{name}: {program}": compiled(target, one) for program, one in held.items() if one.arguments}
    return found


def main() -> None:
    """Do what the command line names."""
    what, *words = sys.argv[1:]
    print(json.dumps({"agree": agree, "decode": decode, "compile": compile_all}[what](*words)))


if __name__ == "__main__":
    main()
