"""``mtp-train inspect`` of an external drafter: whether it is whole, and how to serve it beside its trunk."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from rich.progress import Progress

from mtp_train.commands.inspect import SUGGESTED_DEPTH, Inspection, non_finite_problems, whole_status
from mtp_train.errors import UnsupportedModelError
from mtp_train.families import assistant_for
from mtp_train.heads.assistant import diagnose_assistant
from mtp_train.heads.diagnose import HeadDiagnosis
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.finite import find_non_finite


def inspect_assistant(checkpoint: Checkpoint, base: Checkpoint | None, progress: Progress) -> Inspection:
    """Inspect an external drafter.

    Raises:
        UnsupportedModelError: It is none, or a base is given: it holds no trunk to compare.
        CheckpointError: transformers refuses its config.
    """
    assistant = assistant_for(checkpoint.config)
    if assistant is None:
        raise UnsupportedModelError(
            f"{checkpoint.path}: model_type {checkpoint.config.get('model_type')!r}; expected an assistant. Inspect it "
            "as a checkpoint."
        )
    if base is not None:
        raise UnsupportedModelError(
            f"--base {base.path}: given with {checkpoint.path}, a {assistant.title}, which holds no trunk to compare; "
            "expected the assistant alone. Leave --base out."
        )
    diagnosis = diagnose_assistant(checkpoint, assistant)
    size = checkpoint.config.get(assistant.trunk_hidden_size)
    return drafter_inspection(
        checkpoint,
        diagnosis,
        progress,
        family=assistant.name,
        serves=assistant.commands(checkpoint.config, str(checkpoint.path), SUGGESTED_DEPTH),
        what="ASSISTANT",
        runs_here="no: as a head; decode with",
        note=f"a {assistant.title}: an external drafter for {assistant.trunk.title} trunks of hidden size {size}, not "
        "a checkpoint with a head; TRUNK stands for the one that it was made for",
    )


def drafter_inspection(
    checkpoint: Checkpoint,
    diagnosis: HeadDiagnosis,
    progress: Progress,
    *,
    family: str,
    serves: Mapping[str, str],
    what: str,
    runs_here: str,
    note: str,
) -> Inspection:
    """Return the inspection of what drafts and holds no trunk.

    Args:
        checkpoint: It.
        diagnosis: What is there of it.
        progress: Where to show progress.
        family: What its kind is called.
        serves: Per engine, the command that serves a trunk with it, or why there is none; where it is damaged, nobody.
        what: Its place in the command that downloads it again.
        runs_here: What to say before the command that decodes with it.
        note: What it is.
    """
    path = shlex.quote(str(checkpoint.path))
    non_finite = tuple(find_non_finite(checkpoint, progress))
    problems = non_finite_problems(non_finite)
    whole = diagnosis.complete and not problems
    reason = problems[0] if diagnosis.complete and problems else diagnosis.describe()
    return Inspection(
        checkpoint=str(checkpoint.path),
        family=family,
        declared_modules=diagnosis.declared_modules,
        present_modules=diagnosis.present_modules,
        status=whole_status("healthy" if diagnosis.complete else "partial", problems),
        stale=None,
        missing_keys=diagnosis.missing_keys,
        unexpected_keys=diagnosis.unexpected_keys,
        shape_errors=diagnosis.shape_errors,
        dtype_errors=diagnosis.dtype_errors,
        trunk_missing_keys=(),
        trunk_shape_errors=(),
        trunk_dtype_errors=(),
        non_finite_keys=non_finite,
        problems=problems,
        trunk_changed=None,
        serves=dict(serves) if whole else dict.fromkeys(serves, f"no: {reason}"),
        cure=None if whole else f"hf download {what} --local-dir {path}",
        runs_here=f"{runs_here} mtp-train generate TRUNK --head {path}",
        note=note,
    )
