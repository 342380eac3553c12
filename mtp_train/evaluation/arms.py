"""Arms: how a user names them, and what becomes of a name: a trunk to load, and what drafts in it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from rich.progress import Progress

from mtp_inference.opening import NGRAM, OWN, OpenModel, open_model
from mtp_train.acceptance.names import PLAIN
from mtp_train.checkpoints.locations import RECIPE_FILE, is_run
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.errors import CheckpointError, DataError
from mtp_train.train.machine import use_threads
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.quantise import Quantization
from mtp_train.trunk.whole import require_whole_trunk

_NAME = re.compile(r"[\w.-]+")
_PACKED = re.compile(r"(?P<location>.*)@(?P<bits>none|8bit|4bit)")
BITS_OPTIONS: dict[str, Quantization | None] = {"none": None, "8bit": "8bit", "4bit": "4bit"}


@dataclass(frozen=True)
class ArmSpec:
    """One thing to compare: a trunk and what drafts for it."""

    name: str
    trunk: str
    head: str | None
    """A head directory, a checkpoint to take the head from, ``own`` for the trunk's, an external drafter, or ``ngram``;
    None for plain decoding."""
    adapter: str | None = None
    """A peft adapter that the trunk wears, unmerged."""
    quantization: Quantization | None = None

    @property
    def trunk_name(self) -> str:
        return (
            self.trunk
            + (f"+{self.adapter}" if self.adapter else "")
            + (f"@{self.quantization}" if self.quantization else "")
        )

    def identity(self) -> dict[str, Any]:
        """Return what makes it another arm as plain JSON, without paths: their content is compared instead."""
        kind = self.head if self.head in (None, OWN, NGRAM) else "files"
        return {**asdict(self), "trunk": None, "head": kind, "adapter": self.adapter is not None}


def parse_arm(text: str) -> ArmSpec:
    """Read ``[NAME=]TRUNK[@8bit|@4bit][+HEAD]`` or ``[NAME=]RUN[@none|@8bit|@4bit]``.

    A run directory is its trunk with its retrained head, packed as its recipe says unless the name says otherwise; a
    checkpoint alone drafts with its own head.

    Raises:
        DataError: It has no trunk.
    """
    name, _, rest = text.partition("=")
    if not rest or not _NAME.fullmatch(name) or Path(text).exists():
        name = ""
        rest = text
    trunk, plus, head = (rest, "", "") if Path(rest).exists() else rest.partition("+")
    if not trunk or (plus and not head):
        raise DataError(
            f"arm {text!r}: no trunk, or no head behind the +; expected [NAME=]TRUNK[+HEAD], or the directory of a "
            "run. Name a checkpoint first."
        )
    packed = None if is_run(Path(trunk)) else _PACKED.fullmatch(trunk)
    place, bits = (packed["location"], BITS_OPTIONS[packed["bits"]]) if packed else (trunk, None)
    if plus or not is_run(Path(place)):
        return named(ArmSpec(name, place, head or OWN, None, bits))
    arm = arm_of_run(Path(place), name or _short(trunk))
    return replace(arm, quantization=bits) if packed else arm


def named(spec: ArmSpec) -> ArmSpec:
    """Return an arm, under a name made of its parts where it has none."""
    name = trunk_label(spec)
    if spec.head is not None and spec.head != OWN:
        name += f"+{_short(spec.head)}"
    return spec if spec.name else replace(spec, name=name)


def trunk_label(spec: ArmSpec) -> str:
    return replace(spec, trunk=_short(spec.trunk), adapter=spec.adapter and _short(spec.adapter)).trunk_name


def _short(location: str) -> str:
    """Return the last part of a path or an id, without generic names."""
    parts = [part for part in re.split(r"[/:]", location.rstrip("/")) if part not in ("", ".", "..")]
    return "/".join(parts[-2:]) if parts and parts[-1] in ("head", "export") else (parts or [location])[-1]


def arm_of_run(run_dir: Path, name: str = "") -> ArmSpec:
    """Return a run's trunk, packed as it was trained beside, with its retrained head, under the directory's name where
    none is given.

    Raises:
        CheckpointError: It has no head so far.
    """
    model = yaml.safe_load((run_dir / RECIPE_FILE).read_text(encoding="utf-8"))["model"]
    head = run_dir / "head"
    if not head.is_dir():
        raise CheckpointError(
            f"{run_dir}: a run without a head so far; expected one that has trained. Run its recipe to the end first."
        )
    return ArmSpec(
        name or _short(str(run_dir)), model["trunk"], str(head), model.get("adapter"), model.get("quantization")
    )


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


def open_arm(spec: ArmSpec) -> OpenModel:
    """Open and check the files of an arm; no weight is loaded yet."""
    return open_model(
        spec.trunk,
        spec.head,
        adapter=spec.adapter,
        quantization=spec.quantization,
        where=spec.name,
    )


def require_sound(models: Collection[OpenModel], progress: Progress) -> None:
    """Check that trunks and drafters have all their tensors, and only finite values.

    Raises:
        CheckpointError: A tensor is missing, or has a NaN or an infinite value.
    """
    trunks = {one.checkpoint.path: one.checkpoint for one in models}
    for checkpoint in trunks.values():
        require_whole_trunk(checkpoint)
    for checkpoint in trunks.values():
        require_finite_checkpoint(checkpoint, progress)


def local_device() -> torch.device:
    """Return the device that arms are measured on: the one accelerate trains on, ``ACCELERATE_USE_CPU`` included."""
    return PartialState().device


def load_arm_trunk(model: OpenModel, device: torch.device) -> Trunk:
    """Load the trunk in the dtype that suits the device. On a CPU, set the number of threads for its size."""
    if device.type == "cpu":
        use_threads(model.checkpoint.text_config)
    return model.load_trunk(device)
