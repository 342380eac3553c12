"""``mtp-train check``: check a recipe, its data and its model's config, and estimate memory and disk.

Reads no weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from mtp_train.checkpoints.demo import resolve
from mtp_train.checkpoints.files import CONFIG_FILE, Checkpoint, read_config
from mtp_train.checkpoints.identity import TOKENIZER_PATTERNS
from mtp_train.checkpoints.locations import locate_checkpoint
from mtp_train.checkpoints.quantised import quant_method
from mtp_train.families import family_for, kinds_served, of_kind, raw_text_config
from mtp_train.families.engines import engine_commands
from mtp_train.families.spec import RawConfig
from mtp_train.heads.diagnose import empty_head, named_rejections, trunk_config
from mtp_train.heads.lora import require_lora_targets
from mtp_train.recipe.loading import RecipeLike, dump_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.head_source import require_source_model
from mtp_train.runs.inputs import RunText, gather_text
from mtp_train.runs.refusals import HeadOnTrunk, decoding_problem, raise_together, refusals
from mtp_train.runs.resolve import Choice, Overrides, launched_processes, resolved_recipe
from mtp_train.runs.run_directory import RunDirectory
from mtp_train.runs.settings import cache_bytes, measured_tokens, memory_options, plan_of
from mtp_train.train.machine import Device, device_named
from mtp_train.train.plan import GIB, Footprint, Plan, estimate_disk, estimate_footprint, in_shards
from mtp_train.trunk.load import empty_trunk
from mtp_train.trunk.precision import resolve_precision
from mtp_train.trunk.tokenizer import load_tokenizer


@dataclass(frozen=True)
class CheckResult:
    """The resolved recipe and its estimates, as :func:`check` returns them."""

    recipe: Recipe
    precision_reason: str
    """Why ``train.precision: auto`` was resolved as it is in :attr:`recipe`."""
    family: str
    plan: Plan
    """Steps, sequences per step, tokens per sequence, processes."""
    memory: Footprint
    """Bytes per process, by part; ``memory.total_bytes`` is the sum."""
    memory_in_shards: Footprint | None
    """Bytes per process during training under FSDP2 or ZeRO-3; None for one process or a recipe that cannot shard.
    ``loading_bytes`` is FSDP2's."""
    disk_bytes: int
    """The most bytes that the run adds to the disk, besides regenerated answers."""
    serves: Mapping[str, str]
    """Engine to the command that serves the export, or ``no: REASON``."""
    kinds: Mapping[str, tuple[str, ...]]
    """For a new head, the kinds that the trunk can be given, each with the engines that draft with it; else empty."""
    choices: tuple[Choice, ...] = ()
    """Settings that were ``auto``, with the reasons for their values."""
    decoding: str | None = None
    """Why no device can decode with the trunk, so that a run refuses it; None if one can, or nothing decodes."""
    device_bytes: int | None = None
    """Memory of the device of each process, of which some must stay free; main memory for a CPU."""
    data: str | None = None
    """What is trained on, held out and evaluated on, in words; None if the data was not read, for want of a tokenizer
    beside the trunk's config."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as ``mtp-train check --json`` prints them."""
        shards = self.memory_in_shards
        found = {
            **vars(self),
            "recipe": self.recipe.model_dump(mode="json"),
            "auto": {choice.field: {"value": choice.value, "reason": choice.reason} for choice in self.choices},
            "plan": {
                **asdict(self.plan),
                "total_tokens": self.plan.total_tokens,
                "measured_tokens": math.prod(measured_tokens(self.recipe)),
            },
            "memory": self.memory.to_json(),
            "memory_in_shards": None if shards is None else shards.to_json(),
        }
        del found["choices"]
        return found

    def __str__(self) -> str:
        return "\n".join([dump_recipe(self.recipe), *(f"# {line}" for line in self._lines())])

    def _lines(self) -> Iterator[str]:
        recipe, plan, memory, shards = self.recipe, self.plan, self.memory, self.memory_in_shards
        yield from map(str, self.choices)
        yield f"train.precision: {recipe.train.precision}; {self.precision_reason}"
        yield (
            f"{self.family}: trunk {memory.trunk_parameters / 1e6:.1f} M parameters, head "
            f"{memory.head_parameters / 1e6:.2f} M ({memory.trained_parameters / 1e6:.2f} M trained)"
        )
        yield (
            f"{plan.max_steps} steps of {plan.sequences_per_step} x {plan.seq_len_tokens} tokens "
            f"({plan.total_tokens / 1e6:.2f} M in all), {plan.world_size} process(es), {plan.accumulation} "
            "micro-batch(es) each"
        )
        measures, tokens = measured_tokens(recipe)
        if measures:
            yield (
                f"{measures} measurements of the head on at most {tokens} tokens kept out of training, forward passes "
                f"only: at most {measures * tokens / plan.total_tokens:.0%} of the tokens above"
            )
        yield f"memory per process, {memory.to_text()}"
        if shards is not None:
            yield f"in training with fsdp2.yaml or zero3.yaml, {shards.to_text()}"
        if self.decoding is not None:
            yield f"a run is refused: {self.decoding}"
        yield from self._room()
        if memory.loading_bytes:
            others = "" if shards is None else f"; to train with fsdp2.yaml {shards.loading_bytes / GIB:.2f} GiB"
            whole = f"whole {memory.loading_bytes / GIB:.2f} GiB"
            yield f"main memory of each process while it loads the trunk: {whole}{others}"
        yield f"disk: at most {self.disk_bytes / GIB:.2f} GiB besides answers"
        yield f"data: {self.data or 'not read, as the trunk has no tokenizer; a run refuses such a trunk'}"
        if recipe.study is not None:
            heads = recipe.study.objectives
            yield f"study: {len(heads)} head(s) ({', '.join(heads)}); disk is of all of them"
        groups = "first user turn or file, near-duplicate prompts joined"
        yield f"held out by {groups if recipe.data.group_field is None else f'the column {recipe.data.group_field!r}'}"
        if not recipe.gate.enabled:
            yield "gate: off; the head is not measured, and is exported unjudged"
        if recipe.export.enabled:
            yield from self._served()

    def _room(self) -> Iterator[str]:
        recipe, lora = self.recipe, self.recipe.head.lora
        least = min(one.total_bytes for one in (self.memory, self.memory_in_shards) if one is not None)
        if self.device_bytes is None or least <= self.device_bytes:
            return
        less = [
            "more processes",
            *(["head.lora"] if lora is None else ["fewer head.lora.targets"] if lora.targets is None else []),
            *([] if recipe.train.gradient_checkpointing else ["train.gradient_checkpointing"]),
            "smaller data.seq_len_tokens",
        ]
        yield (
            f"training does not fit: {least / GIB:.0f} GiB on a process, and its device has "
            f"{self.device_bytes / GIB:.0f} GiB. Less is needed with {', '.join(less[:-1])} or {less[-1]}"
        )

    def _served(self) -> Iterator[str]:
        own = self.recipe.head.kind
        yield f"the export, {'with its head' if own == 'mtp' else 'a draft model beside its TRUNK'}, in"
        yield from (f"{engine}: {text}" for engine, text in self.serves.items())
        others = {kind: engines for kind, engines in self.kinds.items() if kind != own}
        if others:
            yield "engines that draft with other kinds of head on this trunk"
        for kind, engines in others.items():
            init = "" if kind == "mtp" else " head.init=random"
            yield f"head.kind={kind}{init}: {', '.join(engines) or 'no engine'}"


def check(
    recipe: RecipeLike, overrides: Overrides = (), *, processes: int | None = None, device: str | None = None
) -> CheckResult:
    """Check a recipe, its data and its model's config, and estimate what the run needs. Reads no weights.

    A directory with a config and no tokenizer is enough for the estimates; the data is not read then.

    Args:
        recipe: A YAML file, the name of a recipe of the package, or a mapping of the same shape.
        overrides: Dotted field to value, as for :func:`run`.
        processes: Processes that will train; None for ``train.processes``, else ``WORLD_SIZE`` of a launcher, else 1.
        device: What each of them will run on, to plan for another machine: ``"h100"``, ``"h200"``, ``"a100"``,
            ``"l40s"``, ``"rtx4090"``, ``"mi300x"``, or the memory of a GPU, ``"24GiB"``. None for this one's.

    Raises:
        RecipeError: The recipe is wrong; the message lists all problems.
        MtpError: A step does not divide among the processes, the model is unknown, missing or cannot run, or the data
            cannot be read or is too little.

    Example:
        >>> import mtp_train as mtp
        >>> found = mtp.check("retrain_head", {"train.max_steps": 50}, processes=2)
        >>> found.plan.accumulation, found.memory.total_bytes / 2**30
        (1, 0.31)
    """
    machine = device_named(device)
    resolved = resolved_recipe(recipe, overrides, world_size=processes, device=machine)
    world_size = processes or resolved.recipe.train.processes or launched_processes()
    found = _checked(resolved.recipe, world_size, machine, is_here=device is None)
    return replace(found, choices=resolved.choices, device_bytes=machine.memory_bytes)


def _checked(recipe: Recipe, world_size: int, machine: Device, *, is_here: bool) -> CheckResult:
    directory = RunDirectory(Path(recipe.run_dir))
    directory.require_outside_inputs(recipe)
    require_source_model(recipe)
    device = PartialState().device if is_here else torch.device(machine.kind)
    if is_here:
        recipe = directory.with_precision(recipe, resolve_precision("auto", device).precision)
        reason = resolve_precision(recipe.train.precision, device).reason
    else:
        # As all devices that can be planned for do.
        recipe, reason = directory.with_precision(recipe, "bf16"), f"{machine.name} multiplies bf16 natively"
    path = locate_checkpoint(resolve(recipe.model.trunk))
    raw = read_config(path / CONFIG_FILE)
    family = family_for(raw, where=str(path))
    num_modules = recipe.fresh_modules if recipe.head.is_new else family.declared_modules(raw) or 1
    head_family = of_kind(family, recipe.head.kind)
    config = trunk_config(path, family, trust_remote_code=recipe.model.trust_remote_code)
    text_config = config.get_text_config()
    raise_together(refusals(recipe, HeadOnTrunk(path, raw, text_config, head_family, num_modules), world_size))
    plan = plan_of(recipe, world_size)
    with named_rejections(path):
        trunk = empty_trunk(config, family, trust_remote_code=recipe.model.trust_remote_code)
        trunk.show_layers(head_family.wiring.trunk_layers(text_config))
        head = empty_head(head_family, text_config, num_modules)
    trained = None
    if recipe.head.lora is not None:
        convention = head_family.convention(recipe.head.convention)
        trained = require_lora_targets(recipe.head.lora, head_family, text_config, num_modules, convention)
    gpu_bytes = machine.memory_bytes if device.type == "cuda" else None
    shapes = {name: value.shape for name, value in head.items()}
    memory = estimate_footprint(memory_options(recipe), trunk, shapes, plan, device, gpu_bytes, trained)
    # Packed trunks are refused under FSDP2 and ZeRO-3.
    is_packed = recipe.model.quantization is not None or quant_method(raw) is not None
    shards = None if is_packed else in_shards(memory, trunk, plan, is_adapted=recipe.model.adapter is not None)
    serves = engine_commands(head_family.serving, f"{recipe.run_dir}/export", recipe.head.num_depths)
    text = _text(recipe, path, raw, text_config.vocab_size)
    num_tokens = plan.total_tokens if text is None else text.most_tokens(recipe)
    disk_bytes = whole_disk(recipe, cache_bytes(recipe, num_tokens, trunk.state_width), memory)
    kinds = kinds_served(family, raw_text_config(raw)) if recipe.head.is_new else {}
    decoding = None
    if machine.kind == "cuda":
        head_bytes = memory.trunk_bytes // memory.trunk_parameters * memory.head_parameters
        decoding = decoding_problem(recipe, memory.trunk_bytes, head_bytes, machine.memory_bytes)
    title = head_family.title
    found = CheckResult(recipe, reason, title, plan, memory, shards, disk_bytes, serves, kinds)
    return replace(found, decoding=decoding, data=None if text is None else text.split)


def _text(recipe: Recipe, trunk: Path, config: RawConfig, vocab_size: int) -> RunText | None:
    """Read the data as a run does, and split it; None without a tokenizer.

    Raises:
        MtpError: A run would refuse the data or the tokenizer.
    """
    if not any(file for pattern in TOKENIZER_PATTERNS for file in trunk.glob(pattern)):
        return None
    without_weights = Checkpoint(trunk, config, None, {})
    tokenizer = load_tokenizer(without_weights, recipe.model.trust_remote_code)
    return gather_text(recipe, tokenizer, vocab_size)


def whole_disk(recipe: Recipe, cached: int, memory: Footprint) -> int:
    """Estimate the disk bytes of all that a recipe trains; ``cached``: of the hidden states, which all heads share."""
    if recipe.study is not None:
        return len(recipe.study.objectives) * estimate_disk(memory, 0) + cached
    offloaded = memory.offloaded_bytes if recipe.model.offload == "disk" else 0
    return estimate_disk(memory, cached) + offloaded
