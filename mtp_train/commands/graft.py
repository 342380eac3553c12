"""``mtp-train graft`` and ``mtp-train export``: write a checkpoint that has its head."""

from __future__ import annotations

from pathlib import Path

from rich.progress import Progress

from mtp_train.errors import CheckpointError
from mtp_train.heads.attach import graft_plan, native_plan
from mtp_train.heads.diagnose import diagnose_head, layout_of
from mtp_train.weights.artifact import HEAD_CONFIG_FILE, load_artifact
from mtp_train.weights.export import LinkMode, write_checkpoint
from mtp_train.weights.files import Checkpoint, locate_checkpoint, open_checkpoint, read_json
from mtp_train.weights.finite import require_finite_checkpoint
from mtp_train.weights.native import NativeHead
from mtp_train.weights.writing import refuse_existing

HEAD_DIRECTORY = "head"
PROVENANCE_FILE = "provenance.json"


def graft(finetune: Checkpoint, base: Checkpoint, out: Path, *, link: LinkMode, progress: Progress) -> None:
    """Write the fine-tune with the base's head, bit for bit, and every trunk byte its own.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The base has no complete head, its trunk has another shape, or a weight is not finite.
    """
    refuse_existing(out, what="the checkpoint")
    plan = graft_plan(finetune, base, "auto")
    require_finite_checkpoint(finetune, progress)
    require_finite_checkpoint(base, progress)
    write_checkpoint(finetune, plan.layout, plan.template, out, link=link)


def export(source: Path, out: Path, *, link: LinkMode, progress: Progress) -> None:
    """Write a servable checkpoint from a finished run, or from a checkpoint whose config lost the head's count.

    Args:
        source: A run directory (its trunk and its trained head) or a checkpoint that holds a head.
        out: The new directory.
        link: Hard-link unchanged files, or copy.
        progress: Where to show progress.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: There is no head to export.
    """
    refuse_existing(out, what="the checkpoint")
    if (source / HEAD_DIRECTORY / HEAD_CONFIG_FILE).is_file():
        identity = read_json(source / PROVENANCE_FILE)["trunk"]
        trunk = open_checkpoint(locate_checkpoint(identity["path"]))
        head = load_artifact(source / HEAD_DIRECTORY).head
    else:
        trunk = open_checkpoint(source)
        head = _own_head(trunk)
    require_finite_checkpoint(trunk, progress)
    write_checkpoint(trunk, layout_of(trunk), head, out, link=link)


def _own_head(checkpoint: Checkpoint) -> NativeHead:
    diagnosis = diagnose_head(checkpoint)
    if not diagnosis.complete:
        raise CheckpointError(
            f"{checkpoint.path}: {diagnosis.describe()}; expected a run directory or a checkpoint with a complete "
            "head. Use mtp-train graft to put the base's head back."
        )
    template = native_plan(checkpoint, "auto").template
    fields = {**template.config_fields, checkpoint.family.count_field: diagnosis.present_modules}
    return NativeHead(template.tensors, template.shared_keys, fields)
