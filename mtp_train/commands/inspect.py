"""``mtp-train inspect``: what a checkpoint has of a head, whether it is healthy, and the command that cures it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from rich.progress import Progress

from mtp_train.cures import (
    attach_command,
    draft_model_flag,
    export_command,
    graft_command,
    named_base,
    retrain_command,
)
from mtp_train.families import Family
from mtp_train.families.engines import engine_commands
from mtp_train.heads.diagnose import HeadDiagnosis, diagnose_head, layout_of
from mtp_train.weights.change import shared_tensors, squared_change
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.finite import find_non_finite
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.native import native_head_of, plain_tensor, require_same_trunk_shape, trunk_tensors

Status = Literal["healthy", "declared_but_missing", "undeclared", "partial", "quantised", "stripped", "none"]
SUGGESTED_DEPTH = 3


@dataclass(frozen=True)
class TrunkChange:
    """How far a fine-tune's trunk is from its base's."""

    share_of_tensors: float
    """Tensors that differ over tensors compared."""
    largest_relative_change: float
    """Largest ``norm(new - old) / norm(old)`` over tensors where it is finite."""


@dataclass(frozen=True)
class Inspection:
    """The result; the fields are the contract of ``inspect --json``."""

    checkpoint: str
    family: str
    declared_modules: int
    present_modules: int
    status: Status
    stale: bool | None
    """None without a base to compare with."""
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    shape_errors: tuple[str, ...]
    non_finite_keys: tuple[str, ...]
    trunk_changed: TrunkChange | None
    serves: dict[str, str]
    cure: str | None
    runs_here: str
    """``yes``, or why the head can be inspected, grafted and exported, but not trained or decoded with."""
    note: str | None = None
    """What the checkpoint is, where it is not one with a head."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def inspect_checkpoint(checkpoint: Checkpoint, base: Checkpoint | None, progress: Progress) -> Inspection:
    """Inspect a checkpoint, with ``base`` also against the model it came from.

    Raises:
        UnsupportedModelError: No family claims it.
        CheckpointError: It cannot be read, or the base's trunk has another shape.
    """
    layout = layout_of(checkpoint)
    diagnosis = diagnose_head(checkpoint)
    base_head = base is not None and bool(diagnose_head(base).found_keys)
    if base is not None:
        require_same_trunk_shape(checkpoint, layout, base, layout_of(base))
    status = head_status(diagnosis, base_head)
    change = compare_trunks(checkpoint, layout, base, progress) if base is not None else None
    stale = None
    if base is not None and change is not None and diagnosis.found_keys:
        stale = change.share_of_tensors > 0 and _same_head(checkpoint, layout, base)
    non_finite = tuple(find_non_finite(checkpoint, progress))
    return Inspection(
        checkpoint=str(checkpoint.path),
        family=layout.family.name,
        declared_modules=diagnosis.declared_modules,
        present_modules=diagnosis.present_modules,
        status=status,
        stale=stale,
        missing_keys=diagnosis.missing_keys if status != "none" else (),
        unexpected_keys=diagnosis.unexpected_keys,
        shape_errors=diagnosis.shape_errors,
        non_finite_keys=non_finite,
        trunk_changed=change,
        serves=serving_commands(checkpoint, diagnosis, status),
        cure=find_cure(checkpoint, base, status, stale),
        runs_here=_runs_here(layout.family, diagnosis),
    )


def _runs_here(family: Family, diagnosis: HeadDiagnosis) -> str:
    if family.borrowed is None:
        return f"no: {family.why_not_run}"
    return f"no: {diagnosis.describe()}" if diagnosis.quantised else "yes"


def head_status(diagnosis: HeadDiagnosis, base_has_head: bool) -> Status:
    """Name the state of the head."""
    if not diagnosis.found_keys:
        if diagnosis.declared_modules:
            return "declared_but_missing"
        return "stripped" if base_has_head else "none"
    if diagnosis.quantised:
        return "quantised"
    if not diagnosis.complete:
        return "partial"
    return "healthy" if diagnosis.declared_modules == diagnosis.present_modules else "undeclared"


def compare_trunks(checkpoint: Checkpoint, layout: HeadLayout, base: Checkpoint, progress: Progress) -> TrunkChange:
    """Compare two trunks of the same shape, a block of a tensor in memory at a time."""
    changed, largest = 0, 0.0
    shared = shared_tensors(checkpoint, layout, base, layout_of(base))
    for key, base_key in progress.track(shared.values(), description="comparing with the base"):
        difference, size = squared_change(checkpoint, key, base, base_key)
        # NaN counts as changed: it differs from everything.
        if difference != 0.0:
            changed += 1
            relative = (difference / size) ** 0.5 if size else 0.0
            largest = max(largest, relative if math.isfinite(relative) else 0.0)
    return TrunkChange(changed / len(shared), largest)


def _same_head(checkpoint: Checkpoint, layout: HeadLayout, base: Checkpoint) -> bool:
    base_layout = layout_of(base)
    tensors = native_head_of(base, base_layout, layout).tensors
    return all(
        pending.key in checkpoint.tensors
        and torch.equal(plain_tensor(checkpoint, pending.key, pending.key).load(), pending.load())
        for pending in tensors
    )


def serving_commands(checkpoint: Checkpoint, diagnosis: HeadDiagnosis, status: Status) -> dict[str, str]:
    """Return, per engine, the command that serves the checkpoint with its head, or why none does."""
    if status != "healthy":
        reason = {
            "undeclared": "no: the head is there but config.json does not declare it",
            "quantised": f"not verified: head quantised with {diagnosis.method}; the cure gives one in plain floats",
        }.get(status, f"no: {diagnosis.describe()}")
        # What would not serve a head either is said before one is attached.
        never = engine_commands(checkpoint.family.engines, "", SUGGESTED_DEPTH) if status == "none" else {}
        return {
            engine: never[engine] if status == "none" and support.supported is False else reason
            for engine, support in checkpoint.family.engines.items()
        }
    if not holds_layers(checkpoint):
        flag = draft_model_flag(str(checkpoint.path), SUGGESTED_DEPTH)
        reason = f"no: holds a head without its trunk; with vLLM serve the trunk and add {flag}"
        return dict.fromkeys(checkpoint.family.engines, reason)
    return engine_commands(checkpoint.engines, str(checkpoint.path), SUGGESTED_DEPTH)


def holds_layers(checkpoint: Checkpoint) -> bool:
    """Whether there is a trunk, and not only what ``export --head-only`` leaves of it."""
    layout = layout_of(checkpoint)
    return any(name.startswith("layers.") for name in trunk_tensors(checkpoint, layout))


def find_cure(checkpoint: Checkpoint, base: Checkpoint | None, status: Status, stale: bool | None) -> str | None:
    """Return the next command, None where nothing is wrong."""
    path = str(checkpoint.path)
    donor = str(base.path) if base is not None else named_base(checkpoint.path) or "BASE"
    if status in ("declared_but_missing", "stripped", "partial", "quantised"):
        return graft_command(path, donor)
    if status == "undeclared":
        return export_command(path)
    if status == "none":
        return attach_command(path)
    return retrain_command(path, donor) if stale else None


def render(inspection: Inspection) -> str:
    """Return the inspection for a reader."""
    lines = [
        f"{inspection.checkpoint}: {inspection.status}" + (" (stale)" if inspection.stale else ""),
        f"family {inspection.family}; modules declared {inspection.declared_modules}, present "
        f"{inspection.present_modules}",
        *([inspection.note] if inspection.note else []),
    ]
    for title, keys in (
        ("missing", inspection.missing_keys),
        ("unexpected", inspection.unexpected_keys),
        ("shape", inspection.shape_errors),
        ("NaN or infinite", inspection.non_finite_keys),
    ):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            lines.append(f"{title}: {', '.join(keys[:3])}{more}")
    if inspection.trunk_changed is not None:
        change = inspection.trunk_changed
        lines.append(
            f"trunk: {change.share_of_tensors:.0%} of tensors differ from the base, by "
            f"{change.largest_relative_change:.2g} "
            "at most (relative)"
        )
    if inspection.runs_here != "yes":
        lines.append(f"train, decode: {inspection.runs_here}")
    lines += [f"{engine}: {text}" for engine, text in inspection.serves.items()]
    lines.append(f"cure: {inspection.cure}" if inspection.cure else "nothing to cure")
    return "\n".join(lines)
