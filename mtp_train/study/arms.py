"""Arms: how a user names them, and what becomes of a name: a trunk to load, and what drafts in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from mtp_inference import MAX_DEPTH, HeadDrafting
from mtp_inference.draft import DrafterMaker
from mtp_inference.other_drafters import ModelDrafting, NgramDrafting
from mtp_train.arms import PLAIN
from mtp_train.errors import CheckpointError, DataError
from mtp_train.external import ExternalDrafter, external_drafter
from mtp_train.families import Family
from mtp_train.families.engines import engine_commands
from mtp_train.heads.attach import HeadPlan, build_head, graft_plan, native_plan, stored_head_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.draft_model import draft_model, draft_plan
from mtp_train.heads.module import MtpHead
from mtp_train.heads.quantization import Quantization, pack_head, require_bitsandbytes, require_quantizable
from mtp_train.heads.trunk import Trunk, load_trunk
from mtp_train.inputs import automatic_dtype, is_head_directory, open_location
from mtp_train.machine import use_threads
from mtp_train.recipe_io import load_recipe
from mtp_train.run_dir import RECIPE_FILE
from mtp_train.weights.adapter import locate_adapter
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.identity import InputFiles, checkpoint_files, directory_files

OWN, NGRAM, MODEL = "own", "ngram", "model:"
_NAME = re.compile(r"[\w.-]+")
_PACKED = re.compile(r"(?P<location>.*)@(?P<bits>none|8bit|4bit)")
_BITS: dict[str, Quantization | None] = {"none": None, "8bit": "8bit", "4bit": "4bit"}


@dataclass(frozen=True)
class ArmSpec:
    """One thing to compare: a trunk and what drafts for it."""

    name: str
    trunk: str
    head: str | None
    """A head directory, a checkpoint to take the head from, ``own`` for the trunk's, an external drafter, ``ngram``, or
    ``model:CKPT`` for a draft model; None for plain decoding."""
    adapter: str | None = None
    """A peft adapter that the trunk wears, unmerged."""
    quantization: Quantization | None = None
    """How the trunk is packed as it is loaded."""
    head_quantization: Quantization | None = None
    """How the head is packed."""

    @property
    def trunk_key(self) -> tuple[str, str | None, Quantization | None]:
        """Equal for arms that share a loaded trunk."""
        return self.trunk, self.adapter, self.quantization

    @property
    def served_path(self) -> str:
        """The checkpoint that an engine would serve: trunk and head in one; a placeholder where there is none yet."""
        if self.head == OWN:
            return self.trunk
        head = Path(self.head or "")
        # Beside the head directory of a run lies what the run exported.
        exported = is_head_directory(head) and (head.parent / "export").is_dir()
        return str(head.parent / "export") if exported else "EXPORT"

    @property
    def trunk_name(self) -> str:
        """The trunk as the report names it."""
        parts = (f"+{self.adapter}" if self.adapter else "", f"@{self.quantization}" if self.quantization else "")
        return self.trunk + "".join(parts)

    @property
    def head_name(self) -> str | None:
        """The head as the report names it."""
        location = self.trunk if self.head == OWN else self.head
        return f"{location}@{self.head_quantization}" if self.head_quantization else location


def parse_arm(text: str) -> ArmSpec:
    """Read ``[NAME=]TRUNK[@8bit|@4bit][+HEAD]`` or ``[NAME=]RUN[@none|@8bit|@4bit]``.

    A run directory is its trunk with its retrained head, packed as its recipe says unless the name says otherwise; a
    checkpoint alone drafts with its own head.

    Raises:
        DataError: It has no trunk.
    """
    name, _, rest = text.partition("=")
    if not rest or not _NAME.fullmatch(name) or Path(text).exists():
        name, rest = "", text
    trunk, plus, head = (rest, "", "") if Path(rest).exists() else rest.partition("+")
    if not trunk or (plus and not head):
        raise DataError(
            f"arm {text!r}: no trunk, or no head behind the +; expected [NAME=]TRUNK[+HEAD], or the directory of a "
            "run. Name a checkpoint first."
        )
    if not plus and is_run(Path(trunk)):
        return arm_of_run(Path(trunk), name)
    named_trunk, (trunk, trunk_bits) = trunk, _unpacked(trunk)
    if not plus and is_run(Path(trunk)):
        return replace(arm_of_run(Path(trunk), name or _short(named_trunk)), quantization=trunk_bits)
    head, head_bits = _unpacked(head or OWN)
    return named(ArmSpec(name, trunk, head, None, trunk_bits, head_bits))


def _unpacked(text: str) -> tuple[str, Quantization | None]:
    packed = _PACKED.fullmatch(text)
    return (packed["location"], _BITS[packed["bits"]]) if packed else (text, None)


def named(spec: ArmSpec) -> ArmSpec:
    """Return an arm that has no name under one made of its parts."""
    return spec if spec.name else replace(spec, name=default_name(spec))


def default_name(spec: ArmSpec) -> str:
    """Name an arm after its parts."""
    head_bits = f"@{spec.head_quantization}" if spec.head_quantization else ""
    if spec.head is None or (spec.head == OWN and not head_bits):
        return trunk_label(spec)
    return f"{trunk_label(spec)}+{_short(spec.head)}{head_bits}"


def trunk_label(spec: ArmSpec) -> str:
    """Name an arm's trunk in short."""
    adapter = f"+{_short(spec.adapter)}" if spec.adapter else ""
    return _short(spec.trunk) + adapter + (f"@{spec.quantization}" if spec.quantization else "")


def _short(location: str) -> str:
    """Return the last part of a path or an id that says something."""
    parts = [part for part in re.split(r"[/:]", location.rstrip("/")) if part not in ("", ".", "..")]
    return "/".join(parts[-2:]) if parts and parts[-1] in ("head", "export") else (parts or [location])[-1]


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a recipe's run, and no checkpoint."""
    return (directory / RECIPE_FILE).is_file()


def arm_of_run(run_dir: Path, name: str = "") -> ArmSpec:
    """Return a run's trunk, packed as it was trained beside, with its retrained head, under the directory's name where
    none is given.

    Raises:
        CheckpointError: It has no head so far.
    """
    recipe = load_recipe(run_dir / RECIPE_FILE)
    if recipe.sft is not None:
        # The trunk of its recipe is the one before: what was tuned is in its export, with the head chosen for it.
        return ArmSpec(name or _short(str(run_dir)), str(run_dir / "export"), OWN)
    head = run_dir / "head"
    if not head.is_dir():
        raise CheckpointError(
            f"{run_dir}: a run without a head so far; expected one that has trained. Run its recipe to the end first."
        )
    model = recipe.model
    return ArmSpec(name or _short(str(run_dir)), model.trunk, str(head), model.adapter, model.quantization)


def require_distinct(specs: Sequence[ArmSpec]) -> None:
    """Check that no two arms share a name.

    Raises:
        DataError: Two do.
    """
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or PLAIN in names:
        raise DataError(
            f"arms: {', '.join(twice) or PLAIN} names more than one; expected a name for each, and '{PLAIN}' is plain "
            "decoding. Write NAME=TRUNK+HEAD."
        )


@dataclass(frozen=True)
class OpenArm:
    """An arm whose files were opened and checked; nothing of it is in memory yet."""

    spec: ArmSpec
    checkpoint: Checkpoint
    family: Family
    adapter: Path | None
    plan: HeadPlan | None
    """The head's; None where something else drafts, or nothing."""
    external: ExternalDrafter | None
    draft_model: Checkpoint | None

    @property
    def deepest(self) -> int:
        """Most drafts a round may have: a head that chains its modules has one for each."""
        deepest = None if self.plan is None else self.plan.deepest
        return MAX_DEPTH if deepest is None else min(deepest, MAX_DEPTH)

    @property
    def flags(self) -> Callable[[int], Mapping[str, str]] | None:
        """From drafts per round to the flags of each engine; None where none were verified for what drafts."""
        if self.plan is not None:
            dtypes = {key: info.dtype for key, info in self.checkpoint.tensors.items()}
            dtypes |= {tensor.key: tensor.dtype for tensor in self.plan.template.tensors}
            engines = {name: one for name, one in self.plan.family.engines_for(dtypes).items() if one.supported}
            return partial(engine_commands, engines, self.spec.served_path)
        return None if self.external is None else partial(_external_flags, self.external)

    @property
    def draft_checkpoints(self) -> list[Checkpoint]:
        """Checkpoints besides the trunk's whose weights are read."""
        external = None if self.external is None else self.external.checkpoint
        return [one for one in (external, self.draft_model) if one is not None]

    @property
    def head_loader(self) -> Callable[[], InputFiles] | None:
        """What finds the files of what drafts; None where it has none besides the trunk's."""
        head = self.spec.head
        if head is None or head in (OWN, NGRAM):
            return None
        if self.draft_checkpoints:
            return partial(checkpoint_files, self.draft_checkpoints[0])
        if is_head_directory(Path(head)):
            return partial(directory_files, Path(head))
        return partial(checkpoint_files, open_location(head))


def _external_flags(drafter: ExternalDrafter, depth: int) -> dict[str, str]:
    assistant, config = drafter.assistant, drafter.checkpoint.config
    refused = assistant.refusals(config)
    commands = assistant.commands(config, str(drafter.checkpoint.path), depth)
    return {name: text for name, text in commands.items() if name not in refused and assistant.engines[name].supported}


def open_arm(spec: ArmSpec) -> OpenArm:
    """Open an arm's files.

    Raises:
        MtpError: Something is missing, damaged, or does not fit the trunk.
    """
    checkpoint = open_location(spec.trunk)
    if spec.quantization is not None:
        require_quantizable(spec.quantization, checkpoint.config, where=checkpoint.path)
    adapter = locate_adapter(spec.adapter, spec.trunk) if spec.adapter else None
    head = spec.head
    draft_model = open_location(head.removeprefix(MODEL)) if head is not None and head.startswith(MODEL) else None
    no_head = head is None or head == NGRAM or draft_model is not None
    external = None if no_head or head == OWN else external_drafter(head)
    if spec.head_quantization is not None and (no_head or external is not None):
        raise DataError(
            f"{spec.name}: {head} packed into {spec.head_quantization}; expected a head, which has linear layers to "
            "pack. Leave the bits out."
        )
    for bits in (spec.quantization, spec.head_quantization):
        if bits is not None:
            require_bitsandbytes(bits, spec.name)
    family = checkpoint.family if external is None else external.trunk_family(checkpoint)
    plan = None if no_head or external is not None else head_plan(checkpoint, head)
    return OpenArm(spec, checkpoint, family, adapter, plan, external, draft_model)


def head_plan(checkpoint: Checkpoint, head: str | None) -> HeadPlan:
    """Plan the head that a name stands for: a head directory, a draft model, a checkpoint to graft from, or the trunk's
    own.

    Raises:
        CheckpointError: It is missing, damaged, or of another shape than the trunk.
    """
    if head is None or head == OWN:
        return native_plan(checkpoint, "auto")
    if is_head_directory(Path(head)):
        return stored_head_plan(Path(head), checkpoint.family)
    donor = open_location(head)
    draft = draft_model(donor)
    return graft_plan(checkpoint, donor, "auto") if draft is None else draft_plan(draft, checkpoint)


def local_device() -> torch.device:
    """Return where arms are measured on this machine: where accelerate trains, ``ACCELERATE_USE_CPU`` included."""
    return PartialState().device


def load_arm_trunk(arm: OpenArm, device: torch.device) -> Trunk:
    """Load the trunk in the dtype, and compute with the threads, that suit the device."""
    if device.type == "cpu":
        use_threads(arm.checkpoint.text_config)
    return load_trunk(
        arm.checkpoint.path,
        arm.family,
        dtype=automatic_dtype(arm.checkpoint, arm.family, device),
        device=device,
        adapter=arm.adapter,
        quantization=arm.spec.quantization,
    )


def load_drafting(arm: OpenArm, trunk: Trunk) -> tuple[DrafterMaker | None, MtpHead | None]:
    """Load what drafts, and the head where it is one."""
    weight = trunk.lm_head_VD
    if arm.plan is not None:
        head = build_head(arm.plan, text_config_of(arm.checkpoint), dtype=weight.dtype).to(weight.device).eval()
        if arm.spec.head_quantization is not None:
            pack_head(head, arm.spec.head_quantization)
        return HeadDrafting(head, arm.plan.draft_vocab), head
    if arm.spec.head == NGRAM:
        return NgramDrafting(), None
    place: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
    if arm.external is not None:
        return arm.external.drafting(**place), None
    if arm.draft_model is not None:
        return ModelDrafting(load_trunk(arm.draft_model.path, arm.draft_model.family, **place)), None
    return None, None
