"""``mtp-train inspect``: what a checkpoint has of a head, whether it is healthy, and the command that cures it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
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
from mtp_train.heads.whole import TrunkDiagnosis, diagnose_trunk, first_of, holds_trunk
from mtp_train.weights.adapter import ADAPTER_CONFIG_FILE, merge_command
from mtp_train.weights.change import paired_rows, shared_tensors, squared_change
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.finite import find_non_finite
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.native import native_head_of, plain_tensor, require_same_trunk_shape, trunk_tensors
from mtp_train.weights.writing import PendingTensor

Status = Literal["healthy", "declared_but_missing", "undeclared", "partial", "quantised", "stripped", "none", "damaged"]
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
    dtype_errors: tuple[str, ...]
    """Of the head: ``key: found DTYPE, expected ..``."""
    trunk_missing_keys: tuple[str, ...]
    """Parameters of the decoder, by transformers' names, that no stored tensor gives."""
    trunk_shape_errors: tuple[str, ...]
    trunk_dtype_errors: tuple[str, ...]
    non_finite_keys: tuple[str, ...]
    problems: tuple[str, ...]
    """Why ``generate``, ``export`` and ``push`` refuse the checkpoint, a phrase each, whatever its head's status."""
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
    trunk = diagnose_trunk(checkpoint) if holds_trunk(checkpoint, layout) else TrunkDiagnosis()
    change = compare_trunks(checkpoint, layout, base, progress) if base is not None else None
    stale = None
    if base is not None and change is not None and diagnosis.found_keys:
        stale = change.share_of_tensors > 0 and _same_head(checkpoint, layout, base)
    non_finite = tuple(find_non_finite(checkpoint, progress))
    problems = (*trunk.problems, *non_finite_problems(non_finite), *adapter_problems(checkpoint))
    status = whole_status(head_status(diagnosis, base_head), problems)
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
        dtype_errors=diagnosis.dtype_errors,
        trunk_missing_keys=trunk.missing_keys,
        trunk_shape_errors=trunk.shape_errors,
        trunk_dtype_errors=trunk.dtype_errors,
        non_finite_keys=non_finite,
        problems=problems,
        trunk_changed=change,
        serves=serving_commands(checkpoint, diagnosis, status, problems),
        cure=find_cure(checkpoint, base, status, stale, problems),
        runs_here=_runs_here(layout.family, diagnosis, problems),
    )


def non_finite_problems(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the phrase for tensors with NaN or infinities; nothing where there are none."""
    return (f"NaN or infinite values: {first_of(keys)}",) if keys else ()


def adapter_problems(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the phrase for an adapter in a model's directory; nothing where there is none."""
    beside = (checkpoint.path / ADAPTER_CONFIG_FILE).is_file()
    return (f"{ADAPTER_CONFIG_FILE} beside the model, which transformers applies and engines do not",) if beside else ()


def whole_status(of_head: Status, problems: Sequence[str]) -> Status:
    """Return the status of a checkpoint from its head's, which counts where the head is not there or incomplete."""
    return "damaged" if problems and of_head in ("healthy", "undeclared", "quantised") else of_head


def _runs_here(family: Family, diagnosis: HeadDiagnosis, problems: Sequence[str]) -> str:
    if family.borrowed is None:
        return f"no: {family.why_not_run}"
    if problems:
        return f"no: {problems[0]}"
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
        and checkpoint.tensors[pending.key].shape == pending.shape
        and _same_values(plain_tensor(checkpoint, pending.key, pending.key), pending)
        for pending in tensors
    )


def _same_values(ours: PendingTensor, theirs: PendingTensor) -> bool:
    pairs = paired_rows(ours.parts(), theirs.parts())
    return all(torch.equal(mine.to(other.dtype), other) for mine, other in pairs)


def serving_commands(
    checkpoint: Checkpoint, diagnosis: HeadDiagnosis, status: Status, problems: Sequence[str] = ()
) -> dict[str, str]:
    """Return, per engine, the command that serves the checkpoint with its head, or why none does."""
    if problems:
        return dict.fromkeys(checkpoint.family.engines, f"no: {problems[0]}")
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


def find_cure(
    checkpoint: Checkpoint,
    base: Checkpoint | None,
    status: Status,
    stale: bool | None,
    problems: Sequence[str] = (),
) -> str | None:
    """Return the next command, None where nothing is wrong."""
    path = str(checkpoint.path)
    if problems and problems == adapter_problems(checkpoint):
        return merge_command(path, path)
    if problems:
        return f"hf download CHECKPOINT --local-dir {shlex.quote(path)}"
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
        ("dtype", inspection.dtype_errors),
        ("trunk missing", inspection.trunk_missing_keys),
        ("trunk shape", inspection.trunk_shape_errors),
        ("trunk dtype", inspection.trunk_dtype_errors),
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
