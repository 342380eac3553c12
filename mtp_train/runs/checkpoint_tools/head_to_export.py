"""Find the head that an export writes: the retrained head of a run, or the head that a checkpoint holds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.progress import Progress

from mtp_train.checkpoints.adapter import locate_adapter
from mtp_train.checkpoints.artifact import Artifact, load_artifact
from mtp_train.checkpoints.files import Checkpoint, open_checkpoint, read_json
from mtp_train.checkpoints.finite import require_finite_checkpoint
from mtp_train.checkpoints.identity import checkpoint_files, directory_files, require_same
from mtp_train.checkpoints.locations import is_head_directory, open_location, refuse_adapter
from mtp_train.checkpoints.native import NativeHead, native_head_of
from mtp_train.checkpoints.run_export import RECIPE_FILE
from mtp_train.errors import CheckpointError, GateRefusedError
from mtp_train.evaluation.results import REPORT_FILE, load_report
from mtp_train.heads.diagnose import diagnose_head, layout_of
from mtp_train.heads.unnamed import with_unnamed_head
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs.checkpoint_tools.inspect import SUGGESTED_DEPTH
from mtp_train.runs.run_directory import ADAPTER, PROVENANCE_FILE, TRUNK, claimed_by_run
from mtp_train.trunk.whole import require_whole_trunk

HEAD_DIRECTORY = "head"


class HeadToExport(NamedTuple):
    """A head and the checkpoint of its trunk."""

    trunk: Checkpoint
    holder: Checkpoint
    """The checkpoint with the head: the trunk's, with the tensors of an unnamed weight file where it has no head."""
    head: NativeHead
    num_depths: int
    """Number of drafts per round to suggest for it."""
    adapter: Path | None
    """The LoRA adapter that the run's trunk was trained with; None without one."""
    artifact: Artifact | None
    """The head as the run stores it; None for the head of a checkpoint."""
    hub_id: str | None
    """Hub id of a run's trunk; None for a local one."""

    @property
    def kind(self) -> str:
        """Kind of the head. A checkpoint's own head is an MTP head."""
        return "mtp" if self.artifact is None else self.artifact.family.kind


def head_to_export(source: Path, progress: Progress, *, alone: bool) -> HeadToExport:
    """Return the head of a run that passed its gate, or the head of a checkpoint, beside a sound trunk.

    A run that fine-tuned its trunk has already exported it with the head that its gate chose: that checkpoint is read.

    Args:
        source: A run directory, or a checkpoint.
        progress: Shows the progress of reading the trunk's weights.
        alone: Whether the head is written without its trunk's checkpoint, which then has to be whole as it is.

    Raises:
        CheckpointError: There is no head to export, the run's head has not been measured, or a weight of the trunk is
            missing or not finite. With ``alone``: the head is no MTP head, or its trunk has an unmerged adapter.
        ChangedInputError: The run's trunk changed since the head was trained and measured on it.
        GateRefusedError: The run's head is not better than its baseline.
    """
    found = _located(source, progress)
    if alone:
        _require_mtp_head(found)
        _refuse_adapter(source, found)
    require_whole_trunk(found.trunk)
    # A head on its own repeats only a few of the trunk's tensors, but is loaded beside all of them.
    require_finite_checkpoint(found.holder, progress)
    return found


def _located(source: Path, progress: Progress) -> HeadToExport:
    if not is_head_directory(source / HEAD_DIRECTORY):
        refuse_adapter(source, str(source))
        trunk = open_checkpoint(source)
        holder = with_unnamed_head(trunk, layout_of(trunk))
        return HeadToExport(trunk, holder, _own_head(holder), SUGGESTED_DEPTH, None, None, None)
    _require_exportable(source)
    identity = read_json(source / PROVENANCE_FILE)["trunk"]
    model = load_recipe(source / RECIPE_FILE).model
    # The recipe may name the trunk by a link or a hub id that leads elsewhere by now: the recorded path comes first.
    trunk = open_location(identity["path"] if Path(identity["path"]).exists() else model.trunk)
    adapter = locate_adapter(model.adapter, model.trunk) if model.adapter else None
    loaders = {TRUNK: partial(checkpoint_files, trunk)}
    if adapter is not None:
        loaders[ADAPTER] = partial(directory_files, adapter)
    # keeps=False: an export writes nothing to the run directory, which may belong to another user.
    require_same(claimed_by_run(source), loaders, progress, finished=True, keeps=False)
    artifact = load_artifact(source / HEAD_DIRECTORY)
    # A revision is recorded for trunks of the hub only.
    hub_id = identity["name"] if identity["revision"] else None
    return HeadToExport(trunk, trunk, artifact.head, artifact.num_depths, adapter, artifact, hub_id)


def _require_mtp_head(found: HeadToExport) -> None:
    if found.artifact is not None and found.kind != "mtp":
        raise CheckpointError(
            f"{found.trunk.path}: its head is {found.artifact.family.title}; expected an MTP head. Export it without "
            "--head-only or --gguf: it becomes a draft model, a directory of its own that llama.cpp's converter reads."
        )


def _refuse_adapter(source: Path, found: HeadToExport) -> None:
    if found.adapter is not None:
        raise CheckpointError(
            f"{source}: its trunk has the unmerged adapter {found.adapter}; expected a trunk in one checkpoint, as the "
            "head's file repeats some of its weights. Export the run, then take the head alone from the export."
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
