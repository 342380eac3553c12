"""``mtp-train inspect`` of whatever it is given: a checkpoint, an external drafter, or a draft model."""

from __future__ import annotations

from rich.progress import Progress

from mtp_train.commands.inspect import SUGGESTED_DEPTH, Inspection, inspect_checkpoint
from mtp_train.commands.inspect_assistant import drafter_inspection, inspect_assistant
from mtp_train.families import assistant_for, of_kind
from mtp_train.families.draft_engines import draft_engines
from mtp_train.families.engines import engine_commands
from mtp_train.heads.draft_model import DraftModel, diagnose_draft, draft_model, draft_plan
from mtp_train.weights.files import Checkpoint


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
    diagnosis = diagnose_draft(draft)
    if trunk is not None and diagnosis.complete:
        draft_plan(draft, trunk)
    return drafter_inspection(
        draft.checkpoint,
        diagnosis,
        progress,
        family=draft.kind,
        serves=_serving_commands(draft, trunk),
        what="DRAFT",
        runs_here="beside its trunk:",
        note=f"{draft.title} for a trunk of hidden size {draft.config.get('hidden_size')}, not a checkpoint with a "
        "head; TRUNK stands for the one that it was made for",
    )


def _serving_commands(draft: DraftModel, trunk: Checkpoint | None) -> dict[str, str]:
    """Return, per engine, the command that serves the trunk with the draft model, or why there is none."""
    if trunk is None:
        return dict.fromkeys(draft_engines(draft.kind, ""), "depends on the trunk: inspect it again with --base TRUNK")
    engines = of_kind(trunk.family, draft.kind).engines
    return engine_commands(engines, str(draft.checkpoint.path), SUGGESTED_DEPTH)
