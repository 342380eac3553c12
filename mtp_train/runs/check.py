"""``mtp-train check``: check a recipe, its data and its model's config, and estimate memory and disk.

Reads no weights. :class:`Shapes` plans for any device; a run refuses with it a trunk that its GPU cannot decode with.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState

from mtp_train.checkpoints.demo import resolve
from mtp_train.checkpoints.files import CONFIG_FILE, TORCH_DTYPES, Checkpoint, open_checkpoint, read_config
from mtp_train.checkpoints.identity import TOKENIZER_PATTERNS, matching_files
from mtp_train.checkpoints.locations import locate_checkpoint
from mtp_train.checkpoints.quantised import quant_method, require_declared
from mtp_train.checkpoints.suggestions import command
from mtp_train.errors import CheckpointError, MtpError
from mtp_train.evaluation.decoding import MAX_BATCH
from mtp_train.families import Family, kinds_served, of_kind
from mtp_train.families.engines import engine_commands
from mtp_train.head_kinds import find_head_kind
from mtp_train.heads.diagnose import empty_head, named_rejections, stored_dtype, trunk_config
from mtp_train.recipe.loading import RecipeLike, dump_recipe, load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.shipped import accelerate_file
from mtp_train.runs.display import Rows, Shown, serving_lines, wiring_note
from mtp_train.runs.inputs import (
    LoneHead,
    RunText,
    gather_text,
    open_donor,
    plan_head,
    recipe_tokenizer,
    require_source_model,
)
from mtp_train.runs.refusals import HeadOnTrunk, raise_together, refusals, require_trainable
from mtp_train.runs.resolve import (
    Choice,
    Overrides,
    keys_and_values,
    launched_processes,
    override_texts,
    resolved_recipe,
    values_of,
)
from mtp_train.runs.run_directory import RunDirectory
from mtp_train.runs.served_states import served_layers, serving_command
from mtp_train.runs.settings import measured_tokens, memory_options, plan_of
from mtp_train.train.machine import Device, device_named
from mtp_train.train.plan import GIB, Footprint, Plan, estimate_disk, estimate_footprint, in_shards
from mtp_train.trunk.load import Trunk, empty_trunk
from mtp_train.trunk.precision import resolve_precision
from mtp_train.trunk.recurrent_kernels import missing_kernels

ROOM_SHARE = 0.85
"""The largest share of a GPU's memory for a trunk and two heads that decode: caches and activations need the rest."""
STATE_BYTES = 4
"""Most bytes of a number in a hidden-state cache: states are computed in fp32 at most."""
DOUBLINGS = 5
"""Most times that the number of processes is doubled."""
SERVERS = (
    "data.regenerate.endpoint=http://localhost:8000/v1",
    "data.regenerate.batch_size=null",
    "gate.enabled=false",
)
"""Leave answers and measurements to servers: no process then decodes with the whole trunk."""
STATES = "train.states.endpoint=http://localhost:8000/v1"
"""Leave the layers to a server too."""


class Room(NamedTuple):
    """What a run needs of the device of each process."""

    plan: Plan
    memory: Footprint
    """Of training with the whole trunk."""
    in_shards: Footprint | None
    """Of training with trunk and head in shards (FSDP2, ZeRO-3); None where that is not possible. ``loading_bytes`` is
    FSDP2's."""
    device: Device
    decodes: bool
    """Whether each process decodes with the whole trunk."""
    decoded_texts: int
    """The most texts that are decoded together."""
    text_bytes: int
    """Bytes of the keys and values of each of them."""

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
        if self.memory.offloaded_bytes:
            text += f", and {self.memory.loading_bytes / GIB:.3g} GiB of main memory"
        return text

    @property
    def decoding_problem(self) -> str | None:
        """Why a GPU cannot decode with the trunk; None if it can, or need not."""
        needed = self.memory.decoding_bytes
        if not self.decodes or self.device.kind != "cuda" or needed <= ROOM_SHARE * self.device.memory_bytes:
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
    """The trunk and the head of a recipe, without their weights."""

    def __init__(self, model: HeadOnTrunk) -> None:
        self.model = model
        family = model.family
        self._is_packed = quant_method(model.trunk.config) is not None
        with named_rejections(model.trunk.path):
            self.trunk: Trunk = empty_trunk(trunk_config(model.trunk), model.trunk)
            self.trunk.show_layers(family.wiring.trunk_layers(model.text_config))
            self.trunk.shows_keys = family.reads_keys
            self._head = {
                name: value.shape for name, value in empty_head(family, model.text_config, model.num_modules).items()
            }

    @cached_property
    def _stored(self) -> torch.dtype:
        trunk = self.model.trunk
        if self._is_packed or not trunk.tensors:
            return torch.bfloat16
        return TORCH_DTYPES[stored_dtype(trunk)]

    def room(self, recipe: Recipe, world_size: int, device: Device) -> Room:
        plan = plan_of(recipe, world_size)
        model = self.model
        on_gpu = device.kind == "cuda"
        options = memory_options(recipe)
        memory = estimate_footprint(
            options,
            self.trunk,
            self._head,
            plan,
            torch.device(device.kind),
            device.memory_bytes if on_gpu else None,
            lora_parameters=model.lora_parameters(recipe),
            stored=self._stored,
            packed_bytes=model.trunk.num_bytes or None if self._is_packed and on_gpu else None,
        )
        shards = None
        # accelerate shards on GPUs only, and packed trunks are refused under FSDP2 and ZeRO-3, unless they are served.
        if on_gpu and (options.is_served or not (self._is_packed or recipe.model.quantization)):
            shards = in_shards(
                memory, options, self.trunk, self._head, plan, is_adapted=recipe.model.adapter is not None
            )
        answered = recipe.data.regenerate
        own = None if answered is None or answered.endpoint else answered.batch_size
        each = keys_and_values(model.text_config, device) * plan.seq_len_tokens
        return Room(plan, memory, shards, device, recipe.decodes and recipe.study is None, own or MAX_BATCH, each)

    def alternatives(
        self, recipe: Recipe, world_size: int, device: Device, given: RecipeLike, changes: Sequence[str] = ()
    ) -> Iterator[tuple[str, str]]:
        """Yield arguments to add with which a run that does not fit does, and what it then needs; one of each sort.

        Args:
            given: The recipe before its values that are ``auto`` were chosen, which follow the arguments.
            changes: Overrides that are added to it already.
        """
        for sort in _changes(recipe, world_size, device):
            for overrides, processes in sort:
                if recipe.train.processes not in (None, processes):
                    overrides = [*overrides, f"train.processes={processes}"]
                try:
                    if self.room(load_recipe(recipe, overrides), processes, device).problem is not None:
                        continue
                    # By the device, which the arguments do not change.
                    added = [f"train.precision={recipe.train.precision}", *changes, *overrides]
                    changed, _ = resolved_recipe(given, added, world_size=processes, device=device)
                    room = self.room(changed, processes, device)
                    fits = room.problem is None and not refusals(changed, self.model, processes)
                except MtpError:
                    continue
                if fits:
                    launched = [] if processes == world_size else ["--processes", str(processes)]
                    yield shlex.join([*overrides, *launched]), room.needs
                    break


def _changes(recipe: Recipe, world_size: int, device: Device) -> Iterator[list[tuple[list[str], int]]]:
    """Yield overrides and processes of a changed recipe, in sorts, in each the smallest change first."""
    one = ["train.micro_batch_sequences=1"]
    recompute = ["train.gradient_checkpointing=true"]
    same = [[], one, recompute, [*one, *recompute]]
    # LoRA changes the result.
    lighter = same if recipe.head.lora or recipe.head.is_new else [*same, [*one, *recompute, "head.lora={}"]]
    doubled = [world_size << power for power in range(1, DOUBLINGS + 1)]
    whole = [] if recipe.model.offload is None else ["model.offload=null"]

    def sort(first: list[str], changes: list[list[str]], *counts: int) -> list[tuple[list[str], int]]:
        return [([*first, *change], count) for count, change in itertools.product(counts, changes)]

    yield sort([], lighter[1:], world_size)
    if device.kind != "cpu":
        yield sort(["model.offload=cpu"], lighter, 1)
    for bits in ("8bit", "4bit"):
        yield sort([f"model.quantization={bits}", *whole], lighter, world_size)
    yield sort(whole, same, *doubled)
    servers = [*(SERVERS if recipe.data.regenerate is not None else SERVERS[-1:]), *whole]
    if recipe.decodes and recipe.data.regenerate is not None:
        yield sort(servers, same, world_size, *doubled)
    if recipe.model.adapter is recipe.model.quantization is recipe.train.states is None:
        yield sort([*servers, STATES], same, world_size)


@dataclass(frozen=True)
class CheckResult(Shown):
    """The resolved recipe and its estimates, as :func:`check` returns them."""

    recipe: Recipe
    precision_reason: str
    """Why ``train.precision: auto`` was resolved as it is in :attr:`recipe`."""
    family: str
    room: Room
    """Plan of the steps, memory of a process, and whether it has so much."""
    disk_bytes: int
    """The most bytes that the run adds to the disk, besides regenerated answers."""
    serves: Mapping[str, str]
    """Engine to the command that serves the export, or ``no: REASON``."""
    kinds: Mapping[str, tuple[str, ...]]
    """For a new head, the kinds that the trunk can be given, each with the engines that draft with it; else empty."""
    states_command: str | None
    """The command that serves the trunk's hidden states; None for a recipe that computes them."""
    data: str | None
    """What is trained on, held out and evaluated on, in words; None if the data was not read, for want of a tokenizer
    beside the trunk's config."""
    notes: tuple[str, ...]
    """What of the records is not in their text, which kernels are not installed here that the device would use, and
    which engines wire the head otherwise than it is trained; in words."""
    shown: str | None
    """Some of the records as the model reads them; None if the data was not read."""
    choices: tuple[Choice, ...]
    """Settings that were ``auto``, with the reasons for their values."""
    fitting: Mapping[str, str]
    """If the run does not fit: arguments to add to ``mtp-train check`` with which it does, and the memory that they
    leave to need."""
    launch: str | None
    """The command that starts the run that is planned here; None for a recipe that is no file."""

    @property
    def plan(self) -> Plan:
        """Steps, sequences per step, tokens per sequence, processes."""
        return self.room.plan

    @property
    def memory(self) -> Footprint:
        """Bytes per process in training, by part; ``memory.total_bytes`` is the sum."""
        return self.room.memory

    def to_json(self) -> dict[str, Any]:
        shards = self.room.in_shards
        return {
            "fits": self.room.problem is None,
            "problem": self.room.problem,
            "fitting": dict(self.fitting),
            "launch": self.launch,
            "recipe": self.recipe.model_dump(mode="json"),
            "auto": {choice.field: {"value": choice.value, "reason": choice.reason} for choice in self.choices},
            "precision_reason": self.precision_reason,
            "family": self.family,
            "states_command": self.states_command,
            "data": self.data,
            "notes": list(self.notes),
            "plan": {**asdict(self.plan), "total_tokens": self.plan.total_tokens},
            "memory": self.memory.to_json(),
            "memory_in_shards": None if shards is None else shards.to_json(),
            "device_bytes": self.room.device.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "serves": dict(self.serves),
            "kinds": {kind: list(engines) for kind, engines in self.kinds.items()},
        }

    def resolved_yaml(self) -> str:
        """Return the resolved recipe, and the reasons for settings that were ``auto`` as comments."""
        return dump_recipe(self.recipe) + "".join(f"# {choice}\n" for choice in self.choices)

    def _rows(self) -> Rows:
        recipe, plan, problem = self.recipe, self.plan, self.room.problem
        if problem is not None:
            yield "does not fit", problem
            yield "fits with", "one of these, added to this command" if self.fitting else "larger devices only"
            yield from ((f"  {needs}", arguments) for arguments, needs in self.fitting.items())
        yield from (("attention", note) for note in self.notes)
        if not recipe.gate.enabled:
            yield "attention", "the gate is off: the head is not measured, and is exported unjudged"
        yield "trains", self._subject()
        yield "text", self.data or "not read, as the trunk has no tokenizer; a run refuses such a trunk"
        # Fixed once the answers are there.
        is_chosen = any(choice.field == "train.max_steps" for choice in self.choices)
        about = "about " if recipe.data.regenerate is not None and is_chosen else ""
        yield (
            "steps",
            f"{about}{plan.max_steps} of {plan.sequences_per_step} x {plan.seq_len_tokens} tokens "
            f"({plan.total_tokens / 1e6:.2f} M in all) on {plan.world_size} process(es), {plan.accumulation} "
            f"micro-batch(es) each; {recipe.train.precision}: {self.precision_reason}",
        )
        count = recipe.data.loss_positions
        yield "losses", None if count is None else f"at {count} positions of each {plan.seq_len_tokens}"
        measures, tokens = measured_tokens(recipe)
        if measures:
            yield (
                "selects",
                f"the best of {measures} measurements on at most {tokens} tokens kept out of training, by forward "
                f"passes: at most {measures * tokens / plan.total_tokens:.0%} of the tokens above",
            )
        yield from self._sizes()
        if recipe.export.enabled:
            beside = ", a draft model beside its TRUNK" if recipe.kind.has_file else ""
            yield "export", f"{recipe.run_dir}/export{beside}, for"
            yield from ((f"  {engines}", text) for engines, text in serving_lines(self.serves))
            for kind, engines in self.kinds.items():
                init = " head.init=random" if find_head_kind(kind).has_file else ""
                if kind != recipe.head.kind:
                    yield f"  or with head.kind={kind}{init}", ", ".join(engines) or "no engine"
        if self.choices:
            yield "chosen by rule", values_of(self.choices)
        yield "launch", self.launch if problem is None else None

    def _subject(self) -> str:
        recipe, model, memory = self.recipe, self.recipe.model, self.memory
        start = {"graft": f"that of {model.head_from}", "native": "its own"}.get(recipe.head.init, "a new one")
        part = "" if recipe.head.lora is None else f", {_count(memory.trained_parameters)} of LoRA trained"
        several = "" if recipe.study is None else f"; a study of {', '.join(recipe.study.objectives)}"
        return (
            f"a head of kind {recipe.head.kind}, {start} ({_count(memory.head_parameters)}{part}), for {model.trunk}"
            f"{'' if model.adapter is None else f' with {model.adapter}'} ({self.family}, "
            f"{_count(memory.trunk_parameters)}, frozen){several}"
        )

    def _sizes(self) -> Rows:
        memory = self.memory
        shards = self.room.in_shards
        yield "memory of a process", f"{memory.to_text()}; on {self.room.device}"
        if shards is not None:
            yield "  in shards (fsdp2.yaml, zero3.yaml)", shards.to_text()
        if self.room.decodes:
            kept = self.room.decoded_texts * self.room.text_bytes
            needed = (
                f"{(memory.decoding_bytes + kept) / GIB:.2f} GiB, of which keys and values at most {kept / GIB:.2f}"
            )
            yield (
                "  to answer and to measure",
                f"{needed}: {self.room.decoded_texts} texts of {self.plan.seq_len_tokens} tokens",
            )
        if memory.loading_bytes:
            others = "" if shards is None else f"; {shards.loading_bytes / GIB:.2f} GiB with fsdp2.yaml"
            yield "main memory of each, to load", f"{memory.loading_bytes / GIB:.2f} GiB{others}"
        tokens = self.plan.sequences_per_step * self.plan.seq_len_tokens
        yield (
            "hidden states",
            f"{memory.state_bytes:,} bytes a token, {memory.state_bytes * tokens / GIB:.2f} GiB a step",
        )
        yield "  from a server", self.states_command
        yield "disk", f"at most {self.disk_bytes / GIB:.2f} GiB besides answers"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def check(
    recipe: RecipeLike, overrides: Overrides = (), *, processes: int | None = None, device: str | None = None
) -> CheckResult:
    """Check a recipe, its data and its model's config, and estimate what the run needs. Reads no weights.

    A directory with a config and no tokenizer is enough for the estimates; the data is not read then. A run that does
    not fit is no error: ``room.problem`` is set, and ``fitting`` names settings with which it fits.

    Args:
        recipe: A YAML file, the name of a recipe of the package, or a mapping of the same shape.
        overrides: Dotted field to value, as for :func:`run`.
        processes: Processes that will train; None for ``train.processes``, else ``WORLD_SIZE`` of a launcher, else 1.
        device: What each of them will run on, to plan for another machine: ``"h100"`` or another of
            ``mtp_train.train.machine.MEMORY_GIB``, or the memory of a GPU, ``"24GiB"``. None for this one's.

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
    resolved, choices = resolved_recipe(recipe, overrides, world_size=processes, device=machine)
    world_size = processes or resolved.train.processes or launched_processes()
    changes = override_texts(overrides)
    words = [] if isinstance(recipe, Mapping | Recipe) else [str(recipe), *changes]
    if words and resolved.train.processes not in (None, world_size):
        words.append(f"train.processes={world_size}")
    return _checked(resolved, choices, world_size, machine, words, (recipe, changes), is_here=device is None)


def _launch_command(words: Sequence[str], room: Room) -> str:
    """Return the command that starts the run of a plan: its number of processes, in shards if only these fit."""
    count = room.plan.world_size
    if count == 1:
        return command("run", *words)
    on_cpu = room.device.kind == "cpu"
    file = accelerate_file("cpu_ddp" if on_cpu else "fsdp2" if room.needs_shards else "ddp")
    variable = "ACCELERATE_USE_CPU=true " if on_cpu else ""
    return f"{variable}accelerate launch --config_file {file} --num_processes {count} -m mtp_train {shlex.join(words)}"


def _checked(
    recipe: Recipe,
    choices: tuple[Choice, ...],
    world_size: int,
    machine: Device,
    words: Sequence[str],
    given: tuple[RecipeLike, Sequence[str]],
    *,
    is_here: bool,
) -> CheckResult:
    """Check a resolved recipe; ``words``: the recipe and its overrides as a user writes them, none for a mapping."""
    directory = RunDirectory(Path(recipe.run_dir))
    directory.require_place(recipe)
    require_source_model(recipe)
    if is_here:
        device = PartialState().device
        recipe = directory.with_precision(recipe, resolve_precision("auto", device).precision)
        reason = resolve_precision(recipe.train.precision, device).reason
    else:
        # As all devices that can be planned for do.
        recipe, reason = directory.with_precision(recipe, "bf16"), "GPUs multiply it natively"
    trunk = _trunk(recipe)
    family = trunk.family
    require_trainable(family)
    has_own = not (recipe.kind.has_file or recipe.head.is_new)
    num_modules = (family.declared_modules(trunk.config) or 1) if has_own else recipe.fresh_modules
    head_family = _head_family(recipe, family)
    model = HeadOnTrunk(trunk, head_family, num_modules)
    raise_together(refusals(recipe, model, world_size))
    if trunk.tensors:
        require_declared(trunk)
        # The run refuses a head that does not fit; with the trunk's config alone, this is a plan for another machine.
        plan_head(recipe, trunk, open_donor(recipe))
    shapes = Shapes(model)
    room = shapes.room(recipe, world_size, machine)
    serves = engine_commands(head_family.serving_of(trunk.config), f"{recipe.run_dir}/export", recipe.head.num_depths)
    # A directory with a config alone is enough for a plan for another machine.
    tokenizer = recipe_tokenizer(recipe, trunk) if matching_files(trunk.path, TOKENIZER_PATTERNS) else None
    text = None if tokenizer is None else gather_text(recipe, tokenizer, model.text_config.vocab_size)
    layers = served_layers(model.text_config, head_family.wiring.trunk_layers(model.text_config))
    num_tokens = room.plan.total_tokens if text is None else text.most_tokens(recipe)
    notes = [*(() if text is None else text.notes), missing_kernels(family.trunk.recurrent, machine.kind)]
    notes.append(wiring_note(head_family, recipe.head.convention, serves))
    return CheckResult(
        recipe=recipe,
        precision_reason=reason,
        family=head_family.title,
        room=room,
        disk_bytes=disk_bytes(recipe, room.memory, num_tokens, shapes.trunk.state_width),
        serves=serves,
        kinds=kinds_served(family) if recipe.head.is_new else {},
        states_command=None if recipe.train.states is None else serving_command(recipe, trunk, layers),
        data=None if text is None else _described(recipe, text),
        notes=tuple(filter(None, notes)),
        shown=None if text is None else text.shown(tokenizer),
        choices=choices,
        fitting={} if room.problem is None else dict(shapes.alternatives(recipe, world_size, machine, *given)),
        launch=_launch_command(words, room) if words else None,
    )


def _head_family(recipe: Recipe, trunk: Family) -> Family:
    """Return the record of the trunk's family with the recipe's head, which a file of its own may describe."""
    donor = open_donor(recipe) if recipe.kind.has_file else None
    if isinstance(donor, LoneHead) and donor.kind == recipe.kind:
        return donor.family(trunk)
    return of_kind(trunk, recipe.head.kind)


def _trunk(recipe: Recipe) -> Checkpoint:
    """Return the trunk's checkpoint, without tensors if its weights are not here, or not whole."""
    path = locate_checkpoint(resolve(recipe.model.trunk))
    try:
        found = open_checkpoint(path)
    except CheckpointError:
        found = Checkpoint(path, read_config(path / CONFIG_FILE), None, {})
    return replace(found, trusts_code=recipe.model.trust_remote_code)


def _described(recipe: Recipe, text: RunText) -> str:
    paths = ", ".join(source.path for source in recipe.data.sources)
    column = recipe.data.group_field
    answers = f"answers of the trunk to {len(text.prompts)} prompts of {paths}" if text.prompts else paths
    groups = "by first user turn or file, near-duplicate prompts joined" if column is None else f"by column {column!r}"
    return "; ".join([answers, text.split, f"held out {groups}"])


def disk_bytes(recipe: Recipe, memory: Footprint, num_tokens: int, state_width: int) -> int:
    """Estimate the most disk bytes of all that a recipe trains. The heads of a study share the hidden states."""
    num_heads = 1 if recipe.study is None else len(recipe.study.objectives)
    cached = 0 if recipe.train.hidden_cache is None else num_tokens * state_width * STATE_BYTES
    return num_heads * estimate_disk(memory) + cached
