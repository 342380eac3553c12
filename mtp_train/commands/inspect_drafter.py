"""``mtp-train inspect`` of whatever it is given: a checkpoint, an external drafter, or a draft model."""

from __future__ import annotations

import shlex

from rich.progress import Progress

from mtp_train.commands.inspect import SUGGESTED_DEPTH, Inspection, inspect_checkpoint
from mtp_train.commands.inspect_assistant import inspect_assistant
from mtp_train.families import assistant_for, of_kind
from mtp_train.families.draft_engines import draft_engines
from mtp_train.families.engines import engine_commands
from mtp_train.heads.draft_model import DraftModel, diagnose_draft, draft_model, draft_plan
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.finite import find_non_finite


def inspect_anything(checkpoint: Checkpoint, base: Checkpoint | None, progress: Progress) -> Inspection:
    """Inspect a checkpoint as what its config says it is.

    Raises:
        UnsupportedModelError: Nothing here knows it.
        CheckpointError: It cannot be read, or does not go with the base.
    """
    if assistant_for(checkpoint.config) is not None:
        return inspect_assistant(checkpoint, base, progress)
    draft = draft_model(checkpoint)
    if draft is not None:
        return inspect_draft(draft, base, progress)
    return inspect_checkpoint(checkpoint, base, progress)


def inspect_draft(draft: DraftModel, trunk: Checkpoint | None, progress: Progress) -> Inspection:
    """Inspect a draft model, with ``trunk`` also whether it drafts for it, and who serves the two.

    Raises:
        UnsupportedModelError: Its forward is not known here, or the trunk gets no such heads.
        CheckpointError: It is made for a trunk of another size or with another embedding.
    """
    path = str(draft.checkpoint.path)
    diagnosis = diagnose_draft(draft)
    if trunk is not None and diagnosis.complete:
        draft_plan(draft, trunk)
    return Inspection(
        checkpoint=path,
        family=draft.kind,
        declared_modules=diagnosis.declared_modules,
        present_modules=diagnosis.present_modules,
        status="healthy" if diagnosis.complete else "partial",
        stale=None,
        missing_keys=diagnosis.missing_keys,
        unexpected_keys=diagnosis.unexpected_keys,
        shape_errors=diagnosis.shape_errors,
        non_finite_keys=tuple(find_non_finite(draft.checkpoint, progress)),
        trunk_changed=None,
        serves=_serving_commands(draft, trunk, f"no: {diagnosis.describe()}" if not diagnosis.complete else None),
        cure=None if diagnosis.complete else f"hf download DRAFT --local-dir {shlex.quote(path)}",
        runs_here=f"beside its trunk: mtp-train generate TRUNK --head {shlex.quote(path)}",
        note=f"{draft.title} for a trunk of hidden size {draft.config.get('hidden_size')}, not a checkpoint with a "
        "head; TRUNK stands for the one that it was made for",
    )


def _serving_commands(draft: DraftModel, trunk: Checkpoint | None, damaged: str | None) -> dict[str, str]:
    """Return, per engine, the command that serves the trunk with the draft model, or why there is none."""
    engines = draft_engines(draft.kind, "") if trunk is None else of_kind(trunk.family, draft.kind).engines
    if damaged is not None:
        return dict.fromkeys(engines, damaged)
    if trunk is None:
        return dict.fromkeys(engines, "depends on the trunk: inspect it again with --base TRUNK")
    return engine_commands(engines, str(draft.checkpoint.path), SUGGESTED_DEPTH)
