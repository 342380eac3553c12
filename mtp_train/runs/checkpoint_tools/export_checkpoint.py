"""``mtp-train export``: write a run's head, or a checkpoint's own, in a form that engines load."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mtp_train.checkpoints.draft_checkpoint import DraftForm
from mtp_train.checkpoints.export import LinkMode, write_head_only
from mtp_train.checkpoints.gguf.sidecar import GgufKind
from mtp_train.checkpoints.lora_merge import write_adapted
from mtp_train.checkpoints.suggestions import draft_model_flag
from mtp_train.checkpoints.writing import refuse_existing, removed_on_failure
from mtp_train.errors import CheckpointError, MtpError
from mtp_train.heads.diagnose import layout_of, text_config_of
from mtp_train.heads.unnamed import left_out, unnamed_files
from mtp_train.runs.checkpoint_tools.export_gguf import export_gguf
from mtp_train.runs.checkpoint_tools.head_to_export import HeadToExport, head_to_export
from mtp_train.runs.display import quiet_progress
from mtp_train.runs.export import write_card, write_export


@dataclass(frozen=True)
class ExportResult:
    """The files that :func:`export` wrote."""

    out: Path
    """The new directory."""
    trunk: Path
    """The checkpoint of the trunk that the head drafts for."""
    file: Path | None = None
    """The GGUF file in ``out``; None for other forms."""
    flag: str | None = None
    """vLLM's flag that drafts with a head-only export; None for other forms."""
    notes: tuple[str, ...] = ()
    """Sentences about weight files that were left out, and the trunk's layers that a draft model for speculators
    reads."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as ``mtp-train export --json`` prints them."""
        values: dict[str, Any] = {"out": str(self.out), "notes": self.notes}
        if self.file is not None:
            values["file"] = str(self.file)
        if self.flag is not None:
            values["flag"] = self.flag
        return values

    def __str__(self) -> str:
        if self.file is not None:
            serve = f"llama-server -m TRUNK.gguf -md {self.file} --spec-type draft-mtp --spec-draft-n-max 3"
            return f"Wrote {self.file}. Serve it: {serve}"
        if self.flag is not None:
            serve = f"vllm serve {shlex.quote(str(self.trunk))} {self.flag}"
            return f"Wrote {self.out}: the head alone. Draft with it: {serve}"
        return "\n".join([f"Wrote {self.out}.", *self.notes])


def export(
    source: str | Path,
    out: str | Path,
    *,
    head_only: bool = False,
    gguf: GgufKind | None = None,
    speculators: bool = False,
    copy: bool = False,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a servable checkpoint from a run that passed the gate, or from a checkpoint that holds a head.

    The default form is the trunk's checkpoint with the head in it, and an index that lists all tensors. A head in a
    weight file that the checkpoint does not name becomes its head; other such files are left out. A run's EAGLE,
    EAGLE-3 or Medusa head becomes a draft model. ``head_only``, ``gguf`` and ``speculators`` choose another form; give
    at most one of them.

    Args:
        source: A run directory, or a checkpoint with a complete head, whether its config declares the head or not.
        out: The new directory.
        head_only: Write an MTP head alone, as a directory that vLLM loads as a draft model.
        gguf: Write the head alone as a GGUF file for llama.cpp: ``"f32"``, ``"f16"`` or ``"q8_0"``.
        speculators: Write an EAGLE-3 head in the format of the speculators package.
        copy: Copy the trunk's unchanged files; False hard-links them where the file system allows. Forms without the
            trunk's files have none to copy.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        MtpError: Several forms are given, or ``copy`` with ``gguf``.
        OutputExistsError: ``out`` exists.
        CheckpointError: There is no head to export, the run has not been measured, the form does not hold this kind of
            head, or a weight of the trunk is missing or not finite.
        ChangedInputError: The run's trunk changed since the head was trained on it.
        GateRefusedError: The run's head is not better than its baseline.
        UnsupportedModelError: llama.cpp has no graph for this head.

    Example:
        >>> import mtp_train as mtp
        >>> print(mtp.export("runs/my-27b", "my-27b-head", gguf="q8_0"))
        Wrote my-27b-head/mtp-my-27b.gguf. Serve it: llama-server ...
    """
    source, out, progress = Path(source), Path(out), progress or quiet_progress()
    _require_one_form(head_only=head_only, gguf=gguf is not None, speculators=speculators, copy=copy)
    if gguf is not None:
        return _as_gguf(source, out, gguf, progress)
    form: DraftForm = "speculators" if speculators else "engines"
    return _as_checkpoint(source, out, head_only, form, "copy" if copy else "hard", progress)


def _require_one_form(*, head_only: bool, gguf: bool, speculators: bool, copy: bool) -> None:
    given = [f"--{name}" for name, on in (("head-only", head_only), ("gguf", gguf), ("speculators", speculators)) if on]
    if len(given) > 1:
        raise MtpError(f"{' and '.join(given)}: given together; expected one of them. Leave the others out.")
    if gguf and copy:
        raise MtpError("--copy: given with --gguf, which links no files; expected one of them. Leave --copy out.")


def _as_gguf(source: Path, out: Path, kind: GgufKind, progress: Progress) -> ExportResult:
    trunk, file = export_gguf(source, out, kind=kind, progress=progress)
    return ExportResult(out, trunk, file=file)


def _as_checkpoint(
    source: Path, out: Path, head_only: bool, form: DraftForm, link: LinkMode, progress: Progress
) -> ExportResult:
    refuse_existing(out, what="the checkpoint")
    found = head_to_export(source, progress, alone=head_only)
    trunk, head = found.trunk, found.head
    if form != "engines" and found.kind == "mtp":
        raise CheckpointError(
            f"{trunk.path}: its head is an MTP head, which is part of the trunk's checkpoint; expected a head of kind "
            "eagle3. Leave --speculators out."
        )
    if head_only:
        write_head_only(trunk, layout_of(found.holder), head, out)
        return ExportResult(out, trunk.path, flag=draft_model_flag(str(out), found.num_depths))
    if found.artifact is not None:
        adapter, hub_id = found.adapter, found.hub_id
        write_export(
            trunk, found.artifact, out, adapter=adapter, link=link, progress=progress, form=form, hub_id=hub_id
        )
        with removed_on_failure(out):
            write_card(source, out)
        notes = left_out(unnamed_files(trunk, layout_of(trunk))) if found.kind == "mtp" else ()
        if form == "speculators":
            layers = found.artifact.family.wiring.trunk_layers(text_config_of(trunk))
            notes += (f"It reads the hidden states after the layers {', '.join(map(str, layers))} of its trunk.",)
        return ExportResult(out, trunk.path, notes=notes)
    write_adapted(trunk, layout_of(found.holder), head, out, adapter=None, link=link, progress=progress)
    return ExportResult(out, trunk.path, notes=_notes(found))


def _notes(found: HeadToExport) -> tuple[str, ...]:
    """Return the sentences about weight files that are no part of the checkpoint: the head's, and those left out."""
    files = unnamed_files(found.trunk, layout_of(found.trunk))
    taken = [one for one in files if found.holder is not found.trunk and one.num_head_tensors]
    others = [one for one in files if one not in taken or one.num_tensors > one.num_head_tensors]
    head = f"Its head is that of {', '.join(map(str, taken))}, which {found.trunk.path} does not name."
    return (*([head] if taken else []), *left_out(others))
