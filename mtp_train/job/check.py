"""``mtp-train check``: check a recipe, its data and its model's config, and estimate time, memory and disk.

Reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Size
from transformers import PretrainedConfig

from mtp_train.data.groups import COST_PER_MILLION
from mtp_train.families import family_for, kinds_served, of_kind, raw_text_config, require_served_trunk
from mtp_train.families.engines import engine_commands
from mtp_train.families.spec import RawConfig
from mtp_train.heads.diagnose import head_shapes, named_rejections, trunk_config
from mtp_train.heads.lora import require_lora_targets
from mtp_train.heads.module import MtpHead, unroll_of
from mtp_train.job.auto import Choice
from mtp_train.job.head_source import require_source_model
from mtp_train.job.input_identity import input_bytes
from mtp_train.job.inputs import (
    decoding_problem,
    gather_text,
    require_attention,
    require_draft_vocab,
    require_offload,
    require_own_data,
    require_rows,
    require_unroll,
)
from mtp_train.job.round_launches import count_launches
from mtp_train.job.run_answers import require_answers
from mtp_train.job.run_dir import require_place, with_recorded_precision, with_resolved_precision
from mtp_train.job.sft.estimate_memory import tuning_cost, tuning_footprint
from mtp_train.job.sft.tuned_model import require_trainable
from mtp_train.job.start import Overrides, RecipeLike, launched_processes, settled_recipe
from mtp_train.job.study.material import for_objective
from mtp_train.recipe.loading import dump_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.train.estimate import (
    GIB,
    Cost,
    Footprint,
    Sizes,
    active_weights,
    estimate_cost,
    estimate_footprint,
    in_shards,
    key_weights,
)
from mtp_train.train.hours import Device, Hours, device_named, estimate_hours, probed
from mtp_train.train.plan import Plan, make_plan
from mtp_train.trunk.load import Trunk, empty_trunk
from mtp_train.trunk.precision import resolve_precision
from mtp_train.trunk.quantise import require_quantizable
from mtp_train.trunk.tokenizer import load_tokenizer
from mtp_train.weights.demo import resolve
from mtp_train.weights.files import CONFIG_FILE, Checkpoint, locate_checkpoint, read_config
from mtp_train.weights.identity import HASH_BYTES_PER_SECOND, TOKENIZER_PATTERNS
from mtp_train.weights.quantised import quant_method

_FINE_TUNE_BYTES = 16
"""Bytes per weight of a fine-tuned trunk: the weight, its gradient and AdamW's two moments, all in fp32."""


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
    cost: Cost
    """Floating-point operations by part, and disk bytes."""
    hashed_bytes: int
    """Bytes of local inputs that the first start reads to identify them by content."""
    serves: Mapping[str, str]
    """Engine to the command that serves the export, or ``no: REASON``."""
    kinds: Mapping[str, tuple[str, ...]]
    """For a new head, the kinds that the trunk can be given, each with the engines that draft with it; else empty."""
    hours: Hours | None = None
    """At most, by stage; None on a device whose speed is unknown, and for studies and fine-tunes."""
    launches_assumed: str | None = None
    """Why the launches of a decoding round are assumed and not counted; None if they are counted."""
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
        plan = {**asdict(self.plan), "total_tokens": self.plan.total_tokens}
        cost = {**asdict(self.cost), "total_flops": self.cost.total_flops}
        return {
            "recipe": asdict(self.recipe),
            "auto": {choice.field: {"value": choice.value, "reason": choice.reason} for choice in self.choices},
            "precision_reason": self.precision_reason,
            "family": self.family,
            "data": self.data,
            "plan": plan,
            "memory": self.memory.to_json(),
            "memory_in_shards": None if self.memory_in_shards is None else self.memory_in_shards.to_json(),
            "decoding": self.decoding,
            "device_bytes": self.device_bytes,
            "cost": cost,
            "hours": None if self.hours is None else {**asdict(self.hours), "total": self.hours.total},
            "launches_assumed": self.launches_assumed,
            "identity": {"bytes": self.hashed_bytes, "seconds": self.hashed_bytes / HASH_BYTES_PER_SECOND},
            "serves": dict(self.serves),
            "kinds": dict(self.kinds),
        }

    def __str__(self) -> str:
        plan, memory, shards, cost = self.plan, self.memory, self.memory_in_shards, self.cost
        shared = "" if shards is None else f"# in training with fsdp2.yaml or zero3.yaml, {shards.to_text()}\n"
        shared += "" if self.decoding is None else f"# a run is refused: {self.decoding}\n"
        shared += self._room_text()
        shared += self._loading_text()
        chosen = "".join(f"# {choice}\n" for choice in self.choices)
        return (
            f"{dump_recipe(self.recipe)}\n{chosen}"
            f"# train.precision: {self.recipe.train.precision}; {self.precision_reason}\n"
            f"# {self.family}: trunk {memory.trunk_parameters / 1e6:.1f} M parameters, head "
            f"{memory.head_parameters / 1e6:.2f} M ({memory.trained_parameters / 1e6:.2f} M trained)\n"
            f"# {plan.max_steps} steps of {plan.sequences_per_step} x {plan.seq_len_tokens} tokens "
            f"({plan.total_tokens / 1e6:.2f} M in all), {plan.world_size} process(es), {plan.accumulation} "
            f"micro-batch(es) each\n# memory per process, {memory.to_text()}\n{shared}"
            f"# about {cost.total_flops / 1e12:.3g} TFLOP on all processes: trunk {cost.trunk_flops / 1e12:.3g}, head "
            f"{cost.head_flops / 1e12:.3g}, loss {cost.loss_flops / 1e12:.3g}, answers at most "
            f"{cost.regenerate_flops / 1e12:.3g}; disk at most {cost.disk_bytes / GIB:.2f} GiB besides answers\n"
            f"{self._hours_text()}# identity: {self.hashed_bytes / GIB:.2f} GiB of inputs are hashed once, in about "
            f"{self.hashed_bytes / HASH_BYTES_PER_SECOND:.0f} s at {HASH_BYTES_PER_SECOND / 1e9:g} GB/s (a core); "
            "later starts read what changed"
            f"{self._data_text()}{self._kind_text()}{self._holdout_text()}{self._serves_text()}"
        )

    def _room_text(self) -> str:
        least = min(one.total_bytes for one in (self.memory, self.memory_in_shards) if one is not None)
        if self.device_bytes is None or least <= self.device_bytes:
            return ""
        lora = self.recipe.head.lora
        less = [
            "more processes",
            *(["head.lora"] if lora is None else ["fewer head.lora.targets"] if lora.targets is None else []),
            *([] if self.recipe.train.gradient_checkpointing else ["train.gradient_checkpointing"]),
            "smaller data.seq_len_tokens",
        ]
        return (
            f"# training does not fit: {least / GIB:.0f} GiB on a process, and its device has "
            f"{self.device_bytes / GIB:.0f} GiB. Less is needed with {', '.join(less[:-1])} or {less[-1]}\n"
        )

    def _loading_text(self) -> str:
        whole, shards = self.memory.loading_bytes, self.memory_in_shards
        if not whole:
            return ""
        others = "" if shards is None else f"; to train with fsdp2.yaml {shards.loading_bytes / GIB:.2f} GiB"
        return f"# main memory of each process while it loads the trunk: whole {whole / GIB:.2f} GiB{others}\n"

    def _hours_text(self) -> str:
        hours = self.hours
        if hours is None:
            return ""
        rounds, launches = hours.rounds, hours.rounds.launches
        how = "counted" if self.launches_assumed is None else f"assumed, as {self.launches_assumed}"
        return (
            f"# a step of training takes about {hours.step_seconds:.3g} s; a decoding round of one text "
            f"{rounds.plain_seconds * 1e3:.3g} ms, with {rounds.depth} draft(s) {rounds.drafting_seconds * 1e3:.3g} ms "
            f"({launches.plain:,} and {launches.drafting:,} kernels, {how})\n"
            f"# at most about {_duration(hours.total)} on {self.plan.world_size} x {hours.device}, from operations and "
            f"bytes: answers {_duration(hours.regenerate)}, training {_duration(hours.train)}, evaluation "
            f"{_duration(hours.evaluate)}\n"
        )

    def _data_text(self) -> str:
        return f"\n# data: {self.data or 'not read, as the trunk has no tokenizer; a run refuses such a trunk'}"

    def _holdout_text(self) -> str:
        field = self.recipe.data.group_field
        if field is not None:
            return f"\n# held out by the column {field!r}"
        return f"\n# held out by first user turn or file, near-duplicate prompts joined: {COST_PER_MILLION}"

    def _serves_text(self) -> str:
        if not self.recipe.export.enabled:
            return self._gate_text()
        exported = "with its head" if self.recipe.head.kind == "mtp" else "a draft model beside its TRUNK"
        engines = "\n".join(f"# {engine}: {text}" for engine, text in self.serves.items())
        return f"{self._gate_text()}\n# the export, {exported}, in\n{engines}{self._kinds_text()}"

    def _gate_text(self) -> str:
        return "" if self.recipe.gate.enabled else "\n# gate: off; the head is not measured, and is exported unjudged"

    def _kinds_text(self) -> str:
        others = [
            f"\n# head.kind={kind}{'' if kind == 'mtp' else ' head.init=random'}: {', '.join(engines) or 'no engine'}"
            for kind, engines in self.kinds.items()
            if kind != self.recipe.head.kind
        ]
        return f"\n# engines that draft with other kinds of head on this trunk{''.join(others)}" if others else ""

    def _kind_text(self) -> str:
        study, sft = self.recipe.study, self.recipe.sft
        if sft is not None:
            learns = "all weights of the trunk" if sft.lora is None else f"LoRA of rank {sft.lora.r} on the trunk"
            return f"\n# sft: {learns}, its head {sft.head}; every process holds the whole model"
        if study is None:
            return ""
        heads = ", ".join(study.objectives)
        text = f"\n# study: {len(study.objectives)} head(s) ({heads}); operations and disk are of all of them"
        fine_tune = study.drift.fine_tune if study.drift is not None else None
        if fine_tune is not None:
            text += (
                f"\n# drift: a fine-tune of {fine_tune.max_steps} steps on one process, about "
                f"{self.memory.trunk_parameters * _FINE_TUNE_BYTES / GIB:.2f} GiB without activations"
            )
        return text


def _duration(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1.0 else f"{hours * 60:.1f} min"


def check(
    recipe: RecipeLike, overrides: Overrides = (), *, processes: int | None = None, device: str | None = None
) -> CheckResult:
    """Check a recipe, its data and its model's config, and estimate what the run needs. Reads no weights.

    A directory with a config and no tokenizer is enough for the estimates; the data is not read then.

    Args:
        recipe: A YAML file, the name of a recipe of the package, or a mapping of the same shape.
        overrides: Dotted field to value, as for :func:`run`.
        processes: Processes that will train; None for ``WORLD_SIZE`` of a launcher, else 1.
        device: What each of them will run on, to plan for another machine: ``"h100"``, ``"h200"``, ``"a100"``,
            ``"l40s"``, ``"rtx4090"`` or ``"mi300x"``. None for this one's.

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
    world_size = processes or launched_processes()
    machine = device_named(device)
    settled = settled_recipe(recipe, overrides, world_size=world_size, device=machine)
    found = _checked(settled.recipe, world_size, machine, is_here=device is None)
    return replace(found, choices=settled.choices, device_bytes=machine.memory_bytes)


def _checked(recipe: Recipe, world_size: int, machine: Device, *, is_here: bool) -> CheckResult:
    recipe = with_recorded_precision(recipe, Path(recipe.run_dir))
    require_place(Path(recipe.run_dir), recipe)
    require_source_model(recipe)
    require_answers(recipe, Path(recipe.run_dir))
    device = PartialState().device if is_here else torch.device(machine.kind)
    recipe, reason = _with_precision(recipe, None if is_here else machine, device)
    path = locate_checkpoint(resolve(recipe.model.trunk))
    raw = read_config(path / CONFIG_FILE)
    family = family_for(raw, where=str(path))
    num_modules = recipe.fresh_modules if recipe.attaches else family.declared_modules(raw) or 1
    head_family = of_kind(family, recipe.head.kind)
    if recipe.model.quantization is not None:
        require_quantizable(recipe.model.quantization, raw, where=path)
    if recipe.model.offload is not None:
        require_offload(recipe.model.offload, world_size, raw, where=path)
    convention = head_family.convention(recipe.head.convention)
    require_unroll(recipe, convention, num_modules)
    require_rows(recipe)
    # Raises an error for a head that cannot run here.
    _ = head_family.classes
    if recipe.export.enabled:
        require_served_trunk(recipe.head.kind, raw_text_config(raw), where=str(path))
    config = trunk_config(path, family, trust_remote_code=recipe.model.trust_remote_code)
    text_config = config.get_text_config()
    require_attention(recipe, head_family, text_config, num_modules)
    require_draft_vocab(recipe, text_config.vocab_size)
    if recipe.sft is not None:
        require_trainable(family, raw, where=path)
    require_own_data(recipe, path)
    plan = make_plan(recipe, world_size)
    with named_rejections(path):
        trunk = empty_trunk(config, family, trust_remote_code=recipe.model.trust_remote_code)
        trunk.show_layers(head_family.wiring.trunk_layers(text_config))
        head = head_shapes(head_family, text_config, num_modules)
    trained = None
    if recipe.head.lora is not None:
        trained = require_lora_targets(recipe.head.lora, head_family, text_config, num_modules, convention)
    gpu_bytes = machine.memory_bytes if device.type == "cuda" else None
    memory = whole_footprint(recipe, trunk, head, plan, device, gpu_bytes, trained)
    drafts_chain = unroll_of(head_family, convention, num_modules) == "chained_drafts"
    sizes = _sizes(recipe, trunk, head, memory, text_config, drafts_chain=drafts_chain)
    shards = _sharded(recipe, raw, memory, trunk, plan)
    cost = whole_cost(recipe, plan, sizes, memory)
    serves = engine_commands(head_family.serving, f"{recipe.run_dir}/export", recipe.head.num_depths)
    hashed, data = input_bytes(recipe), _data(recipe, path, raw, text_config.vocab_size)
    kinds = kinds_served(family, raw_text_config(raw)) if recipe.attaches else {}
    decoding = _decoding(recipe, memory, machine)
    with torch.device("meta"):
        empty_head = MtpHead(head_family, text_config, num_modules=num_modules, convention=convention)
    hours, assumed = _hours(recipe, plan, cost, sizes, memory, trunk, empty_head, machine)
    title = head_family.title
    found = CheckResult(recipe, reason, title, plan, memory, shards, cost, hashed, serves, kinds, hours, assumed)
    return replace(found, decoding=decoding, data=data)


def _hours(
    recipe: Recipe,
    plan: Plan,
    cost: Cost,
    sizes: Sizes,
    memory: Footprint,
    trunk: Trunk,
    head: MtpHead,
    machine: Device,
) -> tuple[Hours | None, str | None]:
    """Return the hours of a run, None for those of a study or a fine-tune, and why its launches are assumed, if so."""
    if recipe.study is not None or recipe.sft is not None:
        return None, None
    fuses = machine.kind == "cuda" and recipe.model.offload is None
    launches, assumed = count_launches(trunk, head, recipe.head.num_depths, fuses=fuses)
    hours = estimate_hours(
        recipe,
        plan,
        cost,
        sizes,
        trunk_parameters=memory.trunk_parameters,
        num_layers=len(trunk.layers),
        launches=launches,
        device=probed(machine),
    )
    return hours, assumed


def _sharded(recipe: Recipe, config: RawConfig, memory: Footprint, trunk: Trunk, plan: Plan) -> Footprint | None:
    # Packed trunks and fine-tunes are refused under FSDP2 and ZeRO-3.
    packed = recipe.model.quantization is not None or quant_method(config) is not None
    if packed or recipe.sft is not None:
        return None
    return in_shards(memory, trunk, plan, is_adapted=recipe.model.adapter is not None)


def _decoding(recipe: Recipe, memory: Footprint, machine: Device) -> str | None:
    offloads = recipe.model.offload is not None or recipe.model.quantization is not None
    if machine.kind != "cuda" or not recipe.decodes or offloads or recipe.study is not None or recipe.sft is not None:
        return None
    head_bytes = memory.trunk_bytes // memory.trunk_parameters * memory.head_parameters
    return decoding_problem(memory.trunk_bytes, head_bytes, machine.memory_bytes)


def _data(recipe: Recipe, trunk: Path, config: RawConfig, vocab_size: int) -> str | None:
    """Read the data as a run does, and return how it is split; None without a tokenizer.

    Raises:
        MtpError: A run would refuse the data or the tokenizer.
    """
    if not any(file for pattern in TOKENIZER_PATTERNS for file in trunk.glob(pattern)):
        return None
    without_weights = Checkpoint(trunk, config, None, {})
    tokenizer = load_tokenizer(without_weights, recipe.model.trust_remote_code)
    return gather_text(recipe, tokenizer, vocab_size).split


def _with_precision(recipe: Recipe, planned: Device | None, device: torch.device) -> tuple[Recipe, str]:
    """Return the recipe with its precision resolved, and why; all devices that can be planned for have native bf16."""
    if planned is None:
        recipe = with_resolved_precision(recipe, device)
        return recipe, resolve_precision(recipe.train.precision, device).reason
    precision = "bf16" if recipe.train.precision == "auto" else recipe.train.precision
    train = replace(recipe.train, precision=precision)
    return replace(recipe, train=train), f"{planned.name} multiplies bf16 natively"


def _sizes(
    recipe: Recipe,
    trunk: Trunk,
    head: Mapping[str, Size],
    memory: Footprint,
    text_config: PretrainedConfig,
    *,
    drafts_chain: bool,
) -> Sizes:
    experts = int(text_config.num_experts_per_tok) if any(".experts." in name for name in head) else 1
    module = {name: shape for name, shape in head.items() if name.startswith("blocks.0.")}
    return Sizes(
        trunk=active_weights({name: value.shape for name, value in trunk.decoder.named_parameters()}, experts),
        head=active_weights(module, experts),
        head_keys=key_weights(module) if drafts_chain else 0,
        lm_head=text_config.vocab_size * text_config.hidden_size,
        draft_lm_head=(recipe.head.draft_vocab or text_config.vocab_size) * text_config.hidden_size,
        head_stored=memory.head_parameters,
        state=trunk.state_width,
        head_trained=memory.trained_parameters,
    )


def whole_footprint(
    recipe: Recipe,
    trunk: Trunk,
    head: Mapping[str, Size],
    plan: Plan,
    device: torch.device,
    gpu_bytes: int | None,
    lora_parameters: int | None,
) -> Footprint:
    """Estimate the memory of training a head, or of fine-tuning the trunk, as the recipe asks."""
    if recipe.sft is None:
        return estimate_footprint(recipe, trunk, head, plan, device, gpu_bytes, lora_parameters)
    return tuning_footprint(recipe, recipe.sft, trunk, head, plan, gpu_bytes)


def whole_cost(recipe: Recipe, plan: Plan, sizes: Sizes, memory: Footprint) -> Cost:
    """Estimate operations and disk of all that a recipe trains. The heads of a study share the regenerated answers."""
    if recipe.sft is not None:
        return tuning_cost(recipe, recipe.sft, plan, sizes, memory)
    if recipe.study is None:
        offloaded = memory.offloaded_bytes if recipe.model.offload == "disk" else 0
        return estimate_cost(recipe, plan, sizes, offloaded)
    costs = [estimate_cost(for_objective(recipe, objective), plan, sizes) for objective in recipe.study.objectives]
    return replace(
        costs[0],
        trunk_flops=sum(cost.trunk_flops for cost in costs),
        head_flops=sum(cost.head_flops for cost in costs),
        loss_flops=sum(cost.loss_flops for cost in costs),
        disk_bytes=sum(cost.disk_bytes for cost in costs),
    )
