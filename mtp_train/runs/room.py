"""Whether the devices of a run hold what it loads, from shapes alone, and the settings with which they do.

``check`` plans with it for any device. A run refuses with it a trunk that its GPU cannot decode with.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from mtp_train.checkpoints.files import TORCH_DTYPES, Checkpoint
from mtp_train.checkpoints.quantised import quant_method
from mtp_train.errors import MtpError
from mtp_train.families import family_for
from mtp_train.heads.diagnose import empty_head, named_rejections, stored_dtype, trunk_config
from mtp_train.heads.lora import require_lora_targets
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.refusals import HeadOnTrunk, refusals
from mtp_train.runs.settings import memory_options, plan_of
from mtp_train.train.machine import Device
from mtp_train.train.plan import GIB, Footprint, Plan, estimate_footprint, in_shards
from mtp_train.trunk.load import Trunk, empty_trunk

ROOM_SHARE = 0.85
"""The largest share of a GPU's memory for a trunk and two heads that decode: caches and activations need the rest."""
DOUBLINGS = 5
"""Most times that the number of processes is doubled."""
SERVERS = (
    *("data.regenerate.endpoint=http://localhost:8000/v1", "data.regenerate.batch_size=null"),
    "gate.enabled=false",
)
"""Leave answers and measurements to servers: no process then decodes with the whole trunk."""
Change = tuple[list[str], int]


@dataclass(frozen=True)
class Room:
    """What a run needs of the device of each process."""

    plan: Plan
    memory: Footprint
    """Of training with the whole trunk."""
    in_shards: Footprint | None
    """Of training with trunk and head in shards (FSDP2, ZeRO-3); None where that is not possible."""
    device: Device
    decodes: bool
    """Whether each process decodes with the whole trunk."""

    @property
    def needs_shards(self) -> bool:
        return self.in_shards is not None and self.memory.total_bytes > self.device.memory_bytes

    @property
    def training(self) -> Footprint:
        return self.in_shards if self.in_shards is not None and self.needs_shards else self.memory

    @property
    def needs(self) -> str:
        """The memory that each process needs, in words."""
        used = max(self.training.total_bytes, self.memory.decoding_bytes if self.decodes else 0)
        text = f"{used / GIB:.3g} GiB a process" + (", in shards" if self.needs_shards else "")
        loading = f", and {self.memory.loading_bytes / GIB:.3g} GiB of main memory"
        return f"{text}{loading}" if self.memory.offloaded_bytes else text

    @property
    def decoding_problem(self) -> str | None:
        """Why a GPU cannot decode with the trunk; None if it can, or need not."""
        needed, memory = self.memory.decoding_bytes, self.device.memory_bytes
        if not self.decodes or self.device.kind != "cuda" or needed <= ROOM_SHARE * memory:
            return None
        return (
            f"{needed / GIB:.3g} GiB of trunk and two heads, to answer prompts and to measure, on {self.device}, of "
            f"which {ROOM_SHARE:.0%} can hold them"
        )

    @property
    def problem(self) -> str | None:
        """Why the run does not fit; None if it does."""
        needed = self.training.total_bytes
        if self.decoding_problem is None and needed > self.device.memory_bytes:
            return f"{needed / GIB:.3g} GiB to train on each process, on {self.device}"
        return self.decoding_problem


class Shapes:
    """The trunk and the head of a recipe, without their weights; ``checkpoint`` is None if the trunk's are not here."""

    def __init__(self, recipe: Recipe, model: HeadOnTrunk, checkpoint: Checkpoint | None) -> None:
        self.model, self._checkpoint, family = model, checkpoint, model.family
        self._is_packed = quant_method(model.config) is not None
        with named_rejections(model.path):
            of_trunk, trusts = family_for(model.config, where=str(model.path)), recipe.model.trust_remote_code
            config = trunk_config(model.path, of_trunk, trust_remote_code=trusts)
            self.trunk: Trunk = empty_trunk(config, of_trunk, trust_remote_code=trusts)
            self.trunk.show_layers(family.wiring.trunk_layers(model.text_config))
            self._head = {
                name: value.shape for name, value in empty_head(family, model.text_config, model.num_modules).items()
            }

    @cached_property
    def _stored(self) -> torch.dtype:
        if self._checkpoint is None or self._is_packed:
            return torch.bfloat16
        return TORCH_DTYPES[stored_dtype(self._checkpoint, self._checkpoint.family)]

    def room(self, recipe: Recipe, world_size: int, device: Device) -> Room:
        plan, model, on_gpu = plan_of(recipe, world_size), self.model, device.kind == "cuda"
        trained = None
        if recipe.head.lora is not None:
            convention = model.family.convention(recipe.head.convention)
            shape = model.family, model.text_config, model.num_modules, convention
            trained = require_lora_targets(recipe.head.lora, *shape)
        stored = self._checkpoint if self._is_packed and on_gpu else None
        memory = estimate_footprint(
            memory_options(recipe),
            self.trunk,
            self._head,
            plan,
            torch.device(device.kind),
            device.memory_bytes if on_gpu else None,
            lora_parameters=trained,
            stored=self._stored,
            packed_bytes=None if stored is None else stored.num_bytes,
        )
        shards = None
        # accelerate shards on GPUs only, and packed trunks are refused under FSDP2 and ZeRO-3.
        if on_gpu and recipe.model.quantization is None and not self._is_packed:
            shards = in_shards(memory, self.trunk, plan, is_adapted=recipe.model.adapter is not None)
        return Room(plan, memory, shards, device, recipe.decodes and recipe.study is None)

    def alternatives(self, recipe: Recipe, world_size: int, device: Device) -> Iterator[tuple[str, str]]:
        """Yield arguments to add with which a run that does not fit does, and what it then needs; one of each sort."""
        for sort in _changes(recipe, world_size, device):
            for overrides, processes in sort:
                if recipe.train.processes not in (None, processes):
                    overrides = [*overrides, f"train.processes={processes}"]
                try:
                    changed = load_recipe(recipe, overrides)
                    room = self.room(changed, processes, device)
                    refused = refusals(changed, self.model, processes)
                except MtpError:
                    continue
                if room.problem is None and not refused:
                    launched = [] if processes == world_size else ["--processes", str(processes)]
                    yield shlex.join([*overrides, *launched]), room.needs
                    break


def _changes(recipe: Recipe, world_size: int, device: Device) -> Iterator[list[Change]]:
    """Yield changes of a recipe in sorts, in each the smallest change first."""
    one, recompute = ["train.micro_batch_sequences=1"], ["train.gradient_checkpointing=true"]
    same = [[], one, recompute, [*one, *recompute]]
    # LoRA changes the result.
    lighter = same if recipe.head.lora or recipe.head.is_new else [*same, [*one, *recompute, "head.lora={}"]]
    doubled = [world_size << power for power in range(1, DOUBLINGS + 1)]
    whole = [] if recipe.model.offload is None else ["model.offload=null"]
    yield [(change, world_size) for change in lighter[1:]]
    if device.kind != "cpu":
        yield [(["model.offload=cpu", *change], 1) for change in lighter]
    for bits in ("8bit", "4bit"):
        yield [([f"model.quantization={bits}", *whole, *change], world_size) for change in lighter]
    yield [([*whole, *change], count) for count, change in itertools.product(doubled, same)]
    if recipe.decodes and recipe.regenerates:
        servers = [*SERVERS, *whole]
        counts = itertools.product([world_size, *doubled], same)
        yield [([*servers, *change], count) for count, change in counts]
