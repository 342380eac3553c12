"""``mtp-train export``: write a run's head, or a checkpoint's own, in a form that engines load."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.progress import Progress

from mtp_train.checkpoints.artifact import Artifact, HeadPlan, load_artifact
from mtp_train.checkpoints.contents import left_out, unnamed_files
from mtp_train.checkpoints.draft_checkpoint import DraftForm
from mtp_train.checkpoints.export import LinkMode, write_checkpoint, write_head_only
from mtp_train.checkpoints.files import Checkpoint, is_gguf, open_checkpoint, read_json
from mtp_train.checkpoints.gguf.architectures import gguf_head_for
from mtp_train.checkpoints.gguf.model_file import open_gguf, write_draft_gguf
from mtp_train.checkpoints.gguf.sidecar import GgufKind, write_gguf
from mtp_train.checkpoints.gguf.tensors import gguf_tensors
from mtp_train.checkpoints.identity import checkpoint_files, directory_files, require_same
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.locations import (
    HEAD,
    RECIPE_FILE,
    is_head_directory,
    locate_adapter,
    open_location,
    refuse_adapter,
)
from mtp_train.checkpoints.native import exact_tensor, native_head_of, stored_tensor
from mtp_train.checkpoints.suggestions import draft_model_flag
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.checkpoints.writing import new_directory, refuse_existing, removed_on_failure
from mtp_train.errors import CheckpointError, GateRefusedError, MtpError
from mtp_train.evaluation.results import REPORT_FILE, load_report
from mtp_train.heads.diagnose import diagnose_head, layout_of, text_config_of, with_head_beside
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs.checkpoint_tools.gguf_files import config_of, export_gguf_head
from mtp_train.runs.checkpoint_tools.inspect import SUGGESTED_DEPTH
from mtp_train.runs.display import quiet_progress
from mtp_train.runs.export import write_card, write_export
from mtp_train.runs.run_directory import ADAPTER, PROVENANCE_FILE, TRUNK, claimed_by_run
from mtp_train.trunk.tokenizer import load_tokenizer
from mtp_train.trunk.whole import first_of, require_whole_trunk

# Programs that pass both draft nothing, or crash (unsloth#10169, LM Studio's bug tracker #2244).
_ONE_HEAD = "TRUNK.gguf must have no head of its own (convert_hf_to_gguf.py --no-mtp); if it has one, leave -md out."


@dataclass(frozen=True)
class ExportResult:
    """The files that :func:`export` wrote."""

    out: Path
    """The new directory."""
    trunk: Path
    """The checkpoint of the trunk that the head drafts for."""
    file: Path | None = None
    """The GGUF file in ``out``; None for other forms."""
    spec_type: Literal["draft-mtp", "draft-eagle3"] = "draft-mtp"
    """llama.cpp's kind of the drafter in ``file``."""
    flag: str | None = None
    """vLLM's flag that drafts with a head-only export; None for other forms."""
    notes: tuple[str, ...] = ()
    """Sentences about weight files that were left out, the trunk's layers that a draft model for speculators reads, and
    the trunk that a GGUF file is passed with."""

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {"out": str(self.out), "notes": self.notes}
        if self.file is not None:
            values["file"] = str(self.file)
        if self.flag is not None:
            values["flag"] = self.flag
        return values

    def __str__(self) -> str:
        if self.file is not None:
            drafter = f"-md {self.file} --spec-type {self.spec_type} --spec-draft-n-max 3"
            return "\n".join([f"Wrote {self.file}. Serve it: llama-server -m TRUNK.gguf {drafter}", *self.notes])
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
        source: A run directory, a checkpoint with a complete head, declared or not, or a GGUF file with ``head_only``.
        out: The new directory.
        head_only: Write an MTP head alone, as a directory that vLLM loads as a draft model.
        gguf: Write the head alone as a GGUF file for llama.cpp: ``"f32"``, ``"f16"``, ``"bf16"`` or ``"q8_0"``.
        speculators: Write an EAGLE-3 head in the format of the speculators package.
        copy: Copy the trunk's unchanged files; False hard-links them where the file system allows.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        MtpError: Several forms are given, or ``copy`` with ``gguf``.
        OutputExistsError: ``out`` exists.
        CheckpointError: No head that this form holds, an unmeasured run, or a weight that is missing or not finite.
        ChangedInputError: The run's trunk changed since the head was trained on it.
        GateRefusedError: The run's head is not better than its baseline.
        UnsupportedModelError: llama.cpp has no graph for this head.

    Example:
        >>> print(mtp_train.export("runs/my-27b", "my-27b-head", gguf="q8_0"))
        Wrote my-27b-head/mtp-my-27b.gguf. Serve it: llama-server ...
    """
    source, out, progress = Path(source), Path(out), progress or quiet_progress()
    _require_one_form(head_only=head_only, gguf=gguf is not None, speculators=speculators, copy=copy)
    if is_gguf(source):
        return _take_head_out(source, out, head_only, progress)
    refuse_existing(out, what="the checkpoint" if gguf is None else "the GGUF file")
    found = _head_to_export(source, progress)
    _require_sound(source, found, progress, head_only=head_only, alone=head_only or gguf is not None)
    trunk, layout = found.trunk, layout_of(found.holder)
    if gguf is not None:
        return _export_gguf(source, found, layout, out, gguf, progress)
    if speculators and found.plan.family.kind == "mtp":
        raise CheckpointError(
            f"{trunk.path}: its head is an MTP head, which is part of the trunk's checkpoint; expected a head of kind "
            "eagle3. Leave --speculators out."
        )
    if head_only:
        write_head_only(trunk, layout, found.plan.head, out)
        depths = found.plan.num_depths if isinstance(found.plan, Artifact) else SUGGESTED_DEPTH
        return ExportResult(out, trunk.path, flag=draft_model_flag(str(out), depths))
    form: DraftForm = "speculators" if speculators else "engines"
    notes = _write_with_trunk(source, found, out, form, "copy" if copy else "hard", progress)
    return ExportResult(out, trunk.path, notes=notes)


def _export_gguf(
    source: Path, found: _HeadToExport, layout: HeadLayout, out: Path, kind: GgufKind, progress: Progress
) -> ExportResult:
    if isinstance(found.plan, Artifact) and found.plan.family.kind != "mtp":
        file = _write_draft_gguf(source, found.trunk, found.plan, out, kind, progress)
        return ExportResult(out, found.trunk.path, file=file, spec_type="draft-eagle3")
    file = _write_gguf(found, layout, out, kind, progress)
    return ExportResult(out, found.trunk.path, file=file, notes=(_ONE_HEAD,))


def _take_head_out(source: Path, out: Path, head_only: bool, progress: Progress) -> ExportResult:
    if not head_only:
        raise MtpError(f"{source}: a GGUF file; expected --head-only, which takes its head out. Add it.")
    return ExportResult(out, source, file=export_gguf_head(source, out, progress), notes=(_ONE_HEAD,))


def _write_with_trunk(
    source: Path, found: _HeadToExport, out: Path, form: DraftForm, link: LinkMode, progress: Progress
) -> tuple[str, ...]:
    """Write the trunk's checkpoint with the head in it, or a run's draft model; return what to tell about it."""
    trunk, layout = found.trunk, layout_of(found.holder)
    if not isinstance(found.plan, Artifact):
        write_checkpoint(trunk, layout, found.plan.head, out, link=link)
        return _notes(found)
    adapter, hub_id = found.adapter, found.hub_id
    write_export(trunk, found.plan, out, adapter=adapter, link=link, progress=progress, form=form, hub_id=hub_id)
    with removed_on_failure(out):
        write_card(source, out)
    notes = left_out(unnamed_files(trunk, layout)) if found.plan.family.kind == "mtp" else ()
    if form == "speculators":
        layers = found.plan.family.wiring.trunk_layers(text_config_of(trunk))
        notes += (f"It reads the hidden states after the layers {', '.join(map(str, layers))} of its trunk.",)
    return notes


def _require_one_form(*, head_only: bool, gguf: bool, speculators: bool, copy: bool) -> None:
    given = [f"--{name}" for name, on in (("head-only", head_only), ("gguf", gguf), ("speculators", speculators)) if on]
    if len(given) > 1:
        raise MtpError(f"{' and '.join(given)}: given together; expected one of them. Leave the others out.")
    if gguf and copy:
        raise MtpError("--copy: given with --gguf, which links no files; expected one of them. Leave --copy out.")


def _notes(found: _HeadToExport) -> tuple[str, ...]:
    """Return the sentences about weight files that are no part of the checkpoint: the head's, and those left out."""
    trunk, holder = found.trunk, found.holder
    head = {key: info for key, info in holder.tensors.items() if key not in trunk.tensors}
    files = unnamed_files(trunk, layout_of(trunk))
    taken = [one for one in files if one.file in {info.file for info in head.values()}]
    others = [
        one
        for one in files
        if one not in taken or one.num_tensors > sum(info.file == one.file for info in head.values())
    ]
    names = [info.name for info in head.values() if info.name is not None]
    notes = [f"Its head is that of {', '.join(map(str, taken))}, which {trunk.path} does not name."] if taken else []
    notes += [f"Its head was under other names: {first_of(names)}."] if names else []
    return (*notes, *left_out(others))


def _write_gguf(found: _HeadToExport, layout: HeadLayout, out: Path, kind: GgufKind, progress: Progress) -> Path:
    """Write ``mtp-NAME.gguf``, named after the trunk, into a new directory; return its path."""
    trunk = found.trunk
    head = found.plan.head
    if not isinstance(found.plan, Artifact):
        head = native_head_of(found.holder, layout, layout, take=exact_tensor)
    record = gguf_head_for(trunk.family, str(trunk.text_config.get("model_type")), where=str(trunk.path))
    config = config_of(trunk)
    tensors = gguf_tensors(trunk, layout, head, record, config)
    tokenizer = load_tokenizer(trunk, trust_remote_code=False)
    name = f"mtp-{checkpoint_name(trunk.path)}.gguf"
    with new_directory(out, what="the GGUF file") as directory:
        write_gguf(
            directory / name,
            record,
            tensors,
            kind=kind,
            trunk=trunk.path,
            config=config,
            tokenizer=tokenizer,
            progress=progress,
        )
    return out / name


def _write_draft_gguf(
    source: Path, checkpoint: Checkpoint, head: Artifact, out: Path, kind: GgufKind, progress: Progress
) -> Path:
    """Write ``eagle3-NAME.gguf``, named after the trunk's GGUF file, into a new directory; return its path.

    Raises:
        CheckpointError: The head is no EAGLE-3 head, or the run's trunk is no GGUF file.
    """
    trunk = load_recipe(source / RECIPE_FILE).model.trunk
    if head.family.kind != "eagle3" or not is_gguf(trunk):
        raise CheckpointError(
            f"{source}: a head of kind {head.family.kind} for {trunk}; expected an MTP head, or an EAGLE-3 head for "
            "a trunk that is a GGUF file. Export it without --gguf: it becomes a draft model, which llama.cpp's "
            "converter reads."
        )
    name = f"eagle3-{Path(trunk).name}"
    with new_directory(out, what="the GGUF file") as directory, tempfile.TemporaryDirectory(dir=directory) as work:
        draft = Path(work) / "draft"
        write_export(checkpoint, head, draft, adapter=None, link="hard", progress=progress)
        write_draft_gguf(open_checkpoint(draft), open_gguf(Path(trunk)), directory / name, kind, progress)
    return out / name


def checkpoint_name(path: Path) -> str:
    """Return the name of a checkpoint's directory; in the hub's cache, with its hashes, the model's name."""
    path = path.resolve()
    if path.parent.name == "snapshots":
        return path.parents[1].name.rsplit("--", 1)[-1]
    return path.name


class _HeadToExport(NamedTuple):
    """A head and the checkpoint of its trunk."""

    trunk: Checkpoint
    holder: Checkpoint
    """The checkpoint with the head: the trunk's, with the tensors of an unnamed weight file where it has no head."""
    plan: HeadPlan
    """The head; an artifact for the head of a run, whose adapter and hub id follow."""
    adapter: Path | None = None
    """The LoRA adapter that the run's trunk was trained with; None without one."""
    hub_id: str | None = None
    """Hub id of a run's trunk; None for a local one."""


def _head_to_export(source: Path, progress: Progress) -> _HeadToExport:
    """Return the head of a run that passed its gate, or of a checkpoint.

    A run that fine-tuned its trunk has already exported it with the head that its gate chose: that checkpoint is read.
    """
    if not is_head_directory(source / HEAD):
        refuse_adapter(source, str(source))
        trunk = open_checkpoint(source)
        holder = with_head_beside(trunk)
        return _HeadToExport(trunk, holder, _own_head(holder))
    if not (source / REPORT_FILE).is_file():
        raise CheckpointError(
            f"{source}: its head has not been measured; expected a run that reached the gate. Run its recipe again: "
            "it goes on from where it stands."
        )
    gate = load_report(source / REPORT_FILE).gate
    if gate is not None and not gate.passed:
        raise GateRefusedError(gate.reason)
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
    # A revision is recorded for trunks of the hub only.
    hub_id = identity["name"] if identity["revision"] else None
    return _HeadToExport(trunk, trunk, load_artifact(source / HEAD), adapter, hub_id)


def _require_sound(source: Path, found: _HeadToExport, progress: Progress, *, head_only: bool, alone: bool) -> None:
    """Check the weights, and for a head ``alone`` that it can be written without its trunk's checkpoint."""
    if head_only and found.plan.family.kind != "mtp":
        raise CheckpointError(
            f"{found.trunk.path}: its head is {found.plan.family.title}; expected an MTP head. Export it without "
            "--head-only: it becomes a draft model, a directory of its own."
        )
    if alone and found.adapter is not None:
        raise CheckpointError(
            f"{source}: its trunk has the unmerged adapter {found.adapter}; expected a trunk in one checkpoint, as the "
            "head's file repeats some of its weights. Export the run, then take the head alone from the export."
        )
    require_whole_trunk(found.trunk)
    # A head on its own repeats only a few of the trunk's tensors, but is loaded beside all of them.
    require_finite_checkpoint(found.holder, progress)


def _own_head(checkpoint: Checkpoint) -> HeadPlan:
    diagnosis = diagnose_head(checkpoint)
    if not diagnosis.complete:
        raise CheckpointError(
            f"{checkpoint.path}: {diagnosis.describe()}; expected a run directory or a checkpoint with a complete "
            "head. Use mtp-train graft to put the base's head back."
        )
    layout = layout_of(checkpoint)
    template = native_head_of(checkpoint, layout, layout, take=stored_tensor)
    declared = checkpoint.family.declaring(diagnosis.present_modules, checkpoint.config)
    head = replace(template, config_fields={**template.config_fields, **declared})
    return HeadPlan(layout, diagnosis.present_modules, "auto", head)
