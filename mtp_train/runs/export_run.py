"""Write the exported checkpoint: the trunk with its MTP head, or a separate draft model for EAGLE and Medusa heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.progress import Progress

from mtp_train.checkpoints.adapter import read_adapter
from mtp_train.checkpoints.artifact import Artifact
from mtp_train.checkpoints.contents import source_files
from mtp_train.checkpoints.draft_checkpoint import DraftForm, require_readable, write_draft_checkpoint
from mtp_train.checkpoints.export import LinkMode
from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.lora_merge import plan_changes, write_adapted
from mtp_train.errors import CheckpointError
from mtp_train.heads.diagnose import layout_of, text_config_of


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
    """Write a head to a new directory: an MTP head inside its trunk's checkpoint, other kinds as a draft model.

    Args:
        trunk: The trunk's checkpoint; it is only read.
        artifact: The head.
        out: The new directory.
        adapter: Directory of the trunk's LoRA adapter, which is merged into the exported trunk; None without one.
        link: Hard-link unchanged files if the file system allows it, or copy all files.
        progress: Shows the progress of writing.
        form: Format of a draft model; not used for an MTP head.
        hub_id: The trunk's id on the hub; None if it is only on this machine.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The adapter cannot be merged, no engine reads such a draft model, or the disk is full.
    """
    if artifact.family.kind == "mtp":
        write_adapted(trunk, layout_of(trunk), artifact.head, out, adapter=adapter, link=link, progress=progress)
        return
    require_exportable(trunk, artifact.family.kind, adapter)
    layer_config = artifact.family.layer.config(text_config_of(trunk), artifact.num_modules)
    on_trunk = replace(artifact, layout=layout_of(trunk, artifact.family))
    write_draft_checkpoint(trunk, on_trunk, layer_config, out, form=form, verifier=hub_id)


def require_exportable(trunk: Checkpoint, kind: str, adapter: Path | None) -> None:
    """Check that a head of a kind can be exported for a trunk, before anything is trained.

    Raises:
        CheckpointError: The adapter cannot be merged, no engine reads such a draft model for this trunk, or the trunk's
            directory contains links that are not copied.
    """
    layout = layout_of(trunk)
    # Raises if a link prevents copying.
    source_files(trunk)
    changed = {} if adapter is None else plan_changes(trunk, layout, read_adapter(adapter))
    if kind == "mtp":
        return
    require_readable(trunk, kind)
    # A draft model contains copies of these tensors of its trunk.
    repeated = sorted({layout.embed_key, layout.lm_head_key} & changed.keys())
    if repeated:
        raise CheckpointError(
            f"{adapter}: changes {', '.join(repeated)}, which a draft model copies; expected an adapter of the "
            "layers. Merge it first (mtp-train merge) and attach the head to the result."
        )
