"""``mtp-train graft`` and ``mtp-train export``: write a checkpoint that has its head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.progress import Progress

from mtp_train.commands.inspect import SUGGESTED_DEPTH
from mtp_train.errors import CheckpointError, GateRefusedError
from mtp_train.exporting import write_export
from mtp_train.heads.attach import graft_plan
from mtp_train.heads.diagnose import diagnose_head, layout_of
from mtp_train.heads.whole import require_whole_trunk
from mtp_train.inputs import is_head_directory, open_location, refuse_adapter
from mtp_train.model_card import write_card, write_graft_card
from mtp_train.recipe_io import load_recipe
from mtp_train.report.schema import REPORT_FILE, load_report
from mtp_train.run_dir import PROVENANCE_FILE, RECIPE_FILE, checkpoint_identity
from mtp_train.run_inputs import ADAPTER, TRUNK, Claimed, require_same
from mtp_train.weights.adapted import write_adapted
from mtp_train.weights.adapter import locate_adapter
from mtp_train.weights.artifact import Artifact, load_artifact
from mtp_train.weights.draft_checkpoint import DraftForm
from mtp_train.weights.export import LinkMode, write_checkpoint
from mtp_train.weights.files import Checkpoint, open_checkpoint, read_json
from mtp_train.weights.finite import require_finite_checkpoint
from mtp_train.weights.head_only import write_head_only
from mtp_train.weights.identity import checkpoint_files, directory_files
from mtp_train.weights.native import NativeHead, native_head_of
from mtp_train.weights.writing import refuse_existing

HEAD_DIRECTORY, EXPORT_DIRECTORY = "head", "export"


def graft(finetune: str, base: str, out: Path, *, link: LinkMode, progress: Progress) -> None:
    """Write the fine-tune with the base's head, bit for bit, and every trunk byte its own.

    Args:
        finetune: A path, a hub id or ``demo:NAME``.
        base: The same, of a checkpoint with a head.
        out: The new directory.
        link: Hard-link unchanged files, or copy them.
        progress: Where to show progress.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The base has no complete head, its trunk has another shape, or a weight is not finite.
    """
    trunk, donor = open_location(finetune), open_location(base)
    refuse_existing(out, what="the checkpoint")
    plan = graft_plan(trunk, donor, "auto")
    require_whole_trunk(trunk)
    require_finite_checkpoint(trunk, progress)
    require_finite_checkpoint(donor, progress)
    write_checkpoint(trunk, plan.layout, plan.template, out, link=link)
    identities = checkpoint_identity(finetune, trunk), checkpoint_identity(base, donor)
    write_graft_card(out, *identities, None, SUGGESTED_DEPTH)


@dataclass(frozen=True)
class Exported:
    """What an export took: the trunk's checkpoint, and how deep its head drafts by default."""

    trunk: Path
    num_depths: int


def export(
    source: Path,
    out: Path,
    *,
    link: LinkMode,
    progress: Progress,
    head_only: bool = False,
    form: DraftForm = "engines",
) -> Exported:
    """Write a servable checkpoint from a run that passed the gate, or from one whose config lost the head's count.

    A run's head of another kind than ``mtp`` becomes a draft model.

    Args:
        source: A run directory (its trunk and its trained head) or a checkpoint that holds a head.
        out: The new directory.
        link: Hard-link unchanged files, or copy.
        progress: Where to show progress.
        head_only: Write the head alone, as a directory that vLLM takes for a draft model.
        form: Of a draft model.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: There is no head to export, or the run's has not been measured.
        GateRefusedError: The run's head is not better than its baseline.
    """
    refuse_existing(out, what="the checkpoint")
    found = head_to_export(source, progress)
    trunk, head = found.trunk, found.head
    require_whole_trunk(trunk)
    require_finite_checkpoint(trunk, progress)
    if head_only:
        refuse_draft_model(found)
        refuse_with_adapter(source, found)
        write_head_only(trunk, layout_of(trunk), head, out)
    elif found.artifact is not None:
        write_export(
            trunk,
            found.artifact,
            out,
            adapter=found.adapter,
            link=link,
            progress=progress,
            form=form,
            hub_id=found.hub_id,
        )
        write_card(source, out)
    else:
        write_adapted(trunk, layout_of(trunk), head, out, adapter=None, link=link, progress=progress)
    return Exported(trunk.path, found.num_depths)


class HeadToExport(NamedTuple):
    """A head, the checkpoint that it is for, how deep it drafts by default, and the adapter that the trunk wears."""

    trunk: Checkpoint
    head: NativeHead
    num_depths: int
    adapter: Path | None
    artifact: Artifact | None
    """A run's head as the run keeps it; None of a checkpoint."""
    hub_id: str | None
    """The trunk's, where a run's comes from the hub."""


def head_to_export(source: Path, progress: Progress) -> HeadToExport:
    """Return the head of a run that passed the gate, or that of a checkpoint.

    Raises:
        CheckpointError: There is no head to export, or the run's has not been measured.
        ChangedInputError: The run's head was trained and measured on another trunk than is there now.
        GateRefusedError: The run's head is not better than its baseline.
    """
    if is_fine_tune(source):
        source = source / EXPORT_DIRECTORY
    if not is_run(source):
        refuse_adapter(source, str(source))
        trunk = open_checkpoint(source)
        return HeadToExport(trunk, _own_head(trunk), SUGGESTED_DEPTH, None, None, None)
    _require_exportable(source)
    identity = read_json(source / PROVENANCE_FILE)["trunk"]
    model = load_recipe(source / RECIPE_FILE).model
    # A trunk that was moved since may be where the recipe's path leads by now.
    trunk = open_location(identity["path"] if Path(identity["path"]).exists() else model.trunk)
    adapter = locate_adapter(model.adapter, model.trunk) if model.adapter else None
    loaders = {TRUNK: partial(checkpoint_files, trunk)}
    if adapter is not None:
        loaders[ADAPTER] = partial(directory_files, adapter)
    # An export writes nothing to its run, which may be another user's.
    require_same(Claimed.by_run(source), loaders, progress, finished=True, keeps=False)
    artifact = load_artifact(source / HEAD_DIRECTORY)
    hub_id = identity["name"] if identity["revision"] else None
    return HeadToExport(trunk, artifact.head, artifact.num_depths, adapter, artifact, hub_id)


def is_run(source: Path) -> bool:
    """Whether a directory is that of a run with a trained head, and not a checkpoint."""
    return is_head_directory(source / HEAD_DIRECTORY)


def is_fine_tune(source: Path) -> bool:
    """Whether a directory is that of a run that fine-tuned the trunk: what it exported is all there is of that."""
    return (source / RECIPE_FILE).is_file() and load_recipe(source / RECIPE_FILE).sft is not None


def refuse_draft_model(found: HeadToExport) -> None:
    """Raise a CheckpointError where a head of another kind is to be taken out of a checkpoint that does not hold it."""
    if found.artifact is not None and found.artifact.family.kind != "mtp":
        raise CheckpointError(
            f"{found.trunk.path}: its head is {found.artifact.family.title}; expected an MTP head. Export it without "
            "--head-only or --gguf: it becomes a draft model, a directory of its own that llama.cpp's converter reads."
        )


def refuse_with_adapter(source: Path, found: HeadToExport) -> None:
    """Raise a CheckpointError where a head alone is asked for and its trunk wears an adapter."""
    if found.adapter is not None:
        raise CheckpointError(
            f"{source}: its trunk wears the adapter {found.adapter}; expected one whose weights are in one checkpoint, "
            "as the head's file repeats some of them. Export the run, then take the head alone from the export."
        )


def _require_exportable(run_dir: Path) -> None:
    if not (run_dir / REPORT_FILE).is_file():
        raise CheckpointError(
            f"{run_dir}: its head has not been measured; expected a run that reached the gate. Run its recipe again: "
            "it goes on from where it stands."
        )
    gate = load_report(run_dir / REPORT_FILE).gate
    if gate is not None and not gate.passed:
        raise GateRefusedError(gate.reason)


def _own_head(checkpoint: Checkpoint) -> NativeHead:
    diagnosis = diagnose_head(checkpoint)
    if not diagnosis.complete:
        raise CheckpointError(
            f"{checkpoint.path}: {diagnosis.describe()}; expected a run directory or a checkpoint with a complete "
            "head. Use mtp-train graft to put the base's head back."
        )
    layout = layout_of(checkpoint)
    template = native_head_of(checkpoint, layout, layout, verbatim=True)
    declared = checkpoint.family.declaring(diagnosis.present_modules, checkpoint.config)
    fields = {**template.config_fields, **declared}
    return NativeHead(template.tensors, template.shared_keys, fields)
