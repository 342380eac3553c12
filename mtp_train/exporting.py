"""What leaves the house: a trunk's checkpoint with its head in it, or a head of another kind as a draft model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.progress import Progress

from mtp_train.errors import CheckpointError
from mtp_train.families import HeadKind
from mtp_train.heads.diagnose import layout_of, text_config_of
from mtp_train.weights.adapted import write_adapted
from mtp_train.weights.adapter import read_adapter
from mtp_train.weights.artifact import Artifact
from mtp_train.weights.draft_checkpoint import DraftForm, require_readable, write_draft_checkpoint
from mtp_train.weights.export import LinkMode, source_files
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.merge import plan_changes


def write_export(
    trunk: Checkpoint,
    artifact: Artifact,
    out: Path,
    *,
    adapter: Path | None,
    link: LinkMode,
    progress: Progress,
    form: DraftForm = "engines",
    hub_id: str | None = None,
) -> None:
    """Write a head to a new directory: in its trunk's checkpoint, or as a draft model beside it, as its kind is kept.

    Args:
        trunk: The trunk's checkpoint; it is only read.
        artifact: The head.
        out: The new directory.
        adapter: A LoRA adapter's directory that the trunk wears, merged where the trunk is written; None for none.
        link: Hard-link unchanged files where the file system allows, or copy them all.
        progress: Where to show progress.
        form: Of a draft model.
        hub_id: What others find the trunk by; None where it is only on this machine.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The adapter cannot be merged, nobody reads such a draft model, or the disk is full.
    """
    if artifact.family.kind == "mtp":
        if form != "engines":
            raise CheckpointError(
                f"{trunk.path}: its head is kept in its own checkpoint; expected a head of kind eagle3 to write for "
                f"{form}. Leave the form out."
            )
        write_adapted(trunk, layout_of(trunk), artifact.head, out, adapter=adapter, link=link, progress=progress)
        return
    require_exportable(trunk, artifact.family.kind, adapter)
    layer_config = artifact.family.head_layer_config(text_config_of(trunk), artifact.num_modules)
    on_trunk = replace(artifact, layout=layout_of(trunk, artifact.family))
    write_draft_checkpoint(trunk, on_trunk, layer_config, out, form=form, verifier=hub_id)


def require_exportable(trunk: Checkpoint, kind: HeadKind, adapter: Path | None) -> None:
    """Check what can be known of an export before anything is trained.

    Raises:
        CheckpointError: The adapter cannot be merged, nobody reads such a draft model for this trunk, or the trunk's
            directory holds links that are not copied.
    """
    layout = layout_of(trunk)
    # Raises where a link is in the way of copying.
    source_files(trunk)
    changed = {} if adapter is None else plan_changes(trunk, layout, read_adapter(adapter))
    if kind == "mtp":
        return
    require_readable(trunk, kind)
    # What a draft model repeats of its trunk.
    repeated = sorted({layout.embed_key, layout.lm_head_key} & changed.keys())
    if repeated:
        raise CheckpointError(
            f"{adapter}: changes {', '.join(repeated)}, which a draft model repeats; expected an adapter of the "
            "layers. Merge it first (mtp-train merge) and attach the head to the result."
        )
