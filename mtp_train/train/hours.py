"""Estimate the hours of a run from operations, bytes and kernel launches, for a few devices.

A decoding round reads every weight that it uses once, for each draft those of the head, and launches its kernels;
products of many rows take the time of their operations. The devices' figures in :data:`DEVICES` are the makers' peaks,
of which :data:`SHARES` are assumed to be reached. They were not measured; a CPU is measured by a probe of a tenth of a
second.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mtp_train.errors import DataError
from mtp_train.recipe.schema import Recipe
from mtp_train.train.estimate import GIB, Cost, Sizes
from mtp_train.train.plan import Plan
from mtp_train.trunk.precision import main_memory_bytes


class Device(NamedTuple):
    """Memory and peak figures of a device."""

    name: str
    kind: str
    """torch's device type."""
    memory_bytes: int
    bf16_tflops: float | None
    """Dense products; None where it is unknown."""
    gb_per_second: float | None
    launch_seconds: float


_LAUNCH, _CPU_LAUNCH = 2e-6, 7e-6
"""Seconds per kernel: in a captured graph, and per operation on a CPU (the demo decodes 160 tokens/s with 8 layers)."""
DEVICES = {
    name: Device(name, "cuda", gib * GIB, tflops, bandwidth, _LAUNCH)
    for name, gib, tflops, bandwidth in (
        ("h100", 80, 989.0, 3350.0),
        ("h200", 141, 989.0, 4800.0),
        ("a100", 80, 312.0, 2039.0),
        ("l40s", 48, 362.0, 864.0),
        ("rtx4090", 24, 165.0, 1008.0),
        ("mi300x", 192, 1307.0, 5300.0),
    )
}
"""By the data sheets of their makers: SXM boards, products of bf16 without sparsity."""


class Shares(NamedTuple):
    """Shares of the peaks that are assumed to be reached."""

    operations: float = 0.4
    bandwidth: float = 0.7


SHARES = Shares()
KERNELS_PER_LAYER = 100
"""Kernels of a decoder layer in one forward pass of transformers' own functions, counted in a model of 32 layers."""
BACKWARD = 3
"""Launches of a training step over those of a forward pass."""
PLAIN_ARM = "none"
"""The arm that decodes without drafts."""
_ROWS, _SIZE, _COPIED = 256, 1024, 1 << 24


@dataclass(frozen=True)
class RoundLaunches:
    """Kernels that a decoding round launches, in all layers, drafts included."""

    plain: int
    """Without drafts."""
    drafting: int
    """With ``head.num_depths`` drafts."""

    @classmethod
    def assumed(cls, num_layers: int, depth: int) -> RoundLaunches:
        """Return the launches of a model whose rounds cannot be counted; each draft runs one layer of the head."""
        return cls(num_layers * KERNELS_PER_LAYER, (num_layers + depth) * KERNELS_PER_LAYER)


@dataclass(frozen=True)
class Rounds:
    """Estimated seconds of a decoding round of one text, and its launches."""

    plain_seconds: float
    drafting_seconds: float
    depth: int
    """Drafts of a round with drafts."""
    launches: RoundLaunches


@dataclass(frozen=True)
class Hours:
    """Estimated hours by stage; at most, as every response counts with its full length and no draft as accepted."""

    device: str
    regenerate: float
    train: float
    evaluate: float
    rounds: Rounds
    step_seconds: float
    """Seconds of a training step."""

    @property
    def total(self) -> float:
        """Sum of all stages."""
        return self.regenerate + self.train + self.evaluate


def device_named(name: str | None) -> Device:
    """Return a device of the table, or for None the one that this process would use.

    Raises:
        DataError: There is no such device in the table.
    """
    if name is not None:
        if name not in DEVICES:
            raise DataError(f"--device: {name!r}; expected one of {', '.join(DEVICES)}. Correct it, or leave it out.")
        return DEVICES[name]
    kind = _device_type()
    if kind != "cuda":
        return Device(kind, kind, main_memory_bytes(), None, None, _CPU_LAUNCH)
    called = torch.cuda.get_device_name()
    known = next((one for one in DEVICES.values() if one.name in called.lower().replace(" ", "")), None)
    memory = torch.cuda.get_device_properties().total_memory
    if known is None:
        return Device(called, "cuda", memory, None, None, _LAUNCH)
    return known._replace(name=called, memory_bytes=memory)


def _device_type() -> str:
    """Return the type of the device that accelerate will choose, without its state, which joins the processes."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"
    return "cpu" if accelerator is None or wants_cpu else accelerator.type


def probed(device: Device) -> Device:
    """Return a CPU with its measured speeds of fp32 products and of copies; another device as it is."""
    if device.kind != "cpu" or device.bf16_tflops is not None:
        return device
    rows, matrix, block = torch.ones(_ROWS, _SIZE), torch.ones(_SIZE, _SIZE), torch.ones(_COPIED // 4)
    products = _fastest(lambda: rows @ matrix)
    copies = _fastest(block.clone)
    # A share of the peak is assumed below; the probe measures what is reached.
    return device._replace(
        bf16_tflops=2 * _ROWS * _SIZE * _SIZE / products / 1e12 / SHARES.operations,
        gb_per_second=2 * _COPIED / copies / 1e9 / SHARES.bandwidth,
    )


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


class Speeds(NamedTuple):
    """What a device is assumed to reach."""

    flops: float
    """Operations per second."""
    bandwidth: float
    """Bytes per second."""
    launch_seconds: float
    itemsize: int
    """Bytes of a weight."""

    @classmethod
    def of(cls, device: Device) -> Speeds | None:
        """Return the speeds of a device; None if they are unknown."""
        if device.bf16_tflops is None or device.gb_per_second is None:
            return None
        return cls(
            device.bf16_tflops * 1e12 * SHARES.operations,
            device.gb_per_second * 1e9 * SHARES.bandwidth,
            device.launch_seconds,
            4 if device.kind == "cpu" else 2,
        )


@dataclass(frozen=True)
class RoundModel:
    """The time of a decoding round by the sizes of the model.

    Args:
        sizes: Weights that take part in products.
        trunk_parameters: All weights of the trunk; of a mixture, those of every expert.
        launches: Kernels of a round.
        depth: Drafts of a round with drafts.
        speeds: Speeds of the device.
    """

    sizes: Sizes
    trunk_parameters: int
    launches: RoundLaunches
    depth: int
    speeds: Speeds

    def seconds(self, rows: int, *, drafts: bool) -> float:
        """Return the seconds of a round of ``rows`` texts."""
        sizes, depth = self.sizes, self.depth if drafts else 0
        window = rows * (1 + depth)
        verify = self._pass(min(self.trunk_parameters, sizes.trunk * window), sizes.lm_head, sizes.trunk, window)
        draft = self._pass(min(sizes.head_stored, sizes.head * rows), sizes.draft_lm_head, sizes.head, rows)
        launches = self.launches.drafting if drafts else self.launches.plain
        return verify + depth * draft + launches * self.speeds.launch_seconds

    def _pass(self, layers_read: int, output: int, layers: int, rows: int) -> float:
        read, products = layers_read + output, 2 * (layers + output) * rows
        return max(read * self.speeds.itemsize / self.speeds.bandwidth, products / self.speeds.flops)

    def rounds(self) -> Rounds:
        """Return the seconds of rounds of one text."""
        return Rounds(self.seconds(1, drafts=False), self.seconds(1, drafts=True), self.depth, self.launches)


def estimate_hours(
    recipe: Recipe,
    plan: Plan,
    cost: Cost,
    sizes: Sizes,
    *,
    trunk_parameters: int,
    num_layers: int,
    launches: RoundLaunches,
    device: Device,
) -> Hours | None:
    """Estimate the hours of a run's stages.

    Args:
        recipe: The recipe.
        plan: Steps and processes.
        cost: Operations of training.
        sizes: Weights of the model.
        trunk_parameters: All weights of the trunk; of a mixture, those of every expert.
        num_layers: Layers of the trunk.
        launches: Kernels of a decoding round.
        device: Of every process, :func:`probed`.

    Returns:
        None where the device's speeds are unknown.
    """
    speeds = Speeds.of(device)
    if speeds is None:
        return None
    model = RoundModel(sizes, trunk_parameters, launches, recipe.head.num_depths, speeds)
    spec, regenerate = recipe.data.regenerate, 0.0
    if spec is not None and spec.enabled and spec.endpoint is None:
        rows = spec.batch_size or 16
        batches = math.ceil((spec.max_prompts or 0) / (rows * plan.world_size))
        regenerate = batches * spec.max_new_tokens * model.seconds(rows, drafts=False)
    trained = cost.trunk_flops + cost.head_flops + cost.loss_flops
    launched = plan.accumulation * BACKWARD * num_layers * KERNELS_PER_LAYER * speeds.launch_seconds
    step = trained / plan.max_steps / plan.world_size / speeds.flops + launched
    evaluate = _evaluation_seconds(recipe, plan, model)
    train = plan.max_steps * step
    return Hours(device.name, regenerate / 3600, train / 3600, evaluate / 3600, model.rounds(), step)


def _evaluation_seconds(recipe: Recipe, plan: Plan, model: RoundModel) -> float:
    """Return the seconds of decoding the held-out prompts with every arm; no draft counts as accepted."""
    evaluate = recipe.evaluate
    if not recipe.gate.enabled:
        return 0.0
    # With `auto`, greedy decoding and the checkpoint's own sampling.
    settings = len(evaluate.temperature) if isinstance(evaluate.temperature, tuple) else 2
    prompts = math.ceil(evaluate.prompts / plan.world_size)
    rounds = sum(model.seconds(1, drafts=arm != PLAIN_ARM) for arm in evaluate.arms)
    return settings * evaluate.max_new_tokens * prompts * rounds
