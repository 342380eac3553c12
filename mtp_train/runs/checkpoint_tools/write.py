"""``mtp-train graft``, ``merge`` and ``export``: write checkpoints without training.

``graft`` puts the base's MTP head back on a fine-tune. ``merge`` merges a LoRA adapter into a checkpoint, whose layout
and MTP head stay as they are. ``export`` writes a run's head, or a checkpoint's own, in a form that engines load.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.progress import Progress

from mtp_train.checkpoints.adapter import plan_merge, read_adapter
from mtp_train.checkpoints.artifact import Artifact, load_artifact
from mtp_train.checkpoints.export import LinkMode, with_fields, write_checkpoint, write_head_only
from mtp_train.checkpoints.files import Checkpoint, is_gguf, left_out, open_checkpoint, read_json
from mtp_train.checkpoints.gguf.architectures import gguf_head_for
from mtp_train.checkpoints.gguf.model_file import open_gguf, write_draft_gguf
from mtp_train.checkpoints.gguf.sidecar import GgufKind, gguf_tensors, write_gguf
from mtp_train.checkpoints.identity import checkpoint_files, directory_files, require_same
from mtp_train.checkpoints.keymap import REDUCED_OUTPUT
from mtp_train.checkpoints.locations import (
    HEAD,
    RECIPE_FILE,
    is_head_directory,
    locate_adapter,
    locate_checkpoint,
    open_location,
    refuse_adapter,
)
from mtp_train.checkpoints.native import Take, exact_tensor, native_head_of, stored_tensor
from mtp_train.checkpoints.suggestions import (
    draft_model_flag,
    graft_command,
    probe_command,
    train_command,
)
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.checkpoints.writing import new_directory, refuse_existing, removed_on_failure
from mtp_train.errors import CheckpointError, GateRefusedError, MtpError
from mtp_train.evaluation.results import REPORT_FILE, load_report
from mtp_train.heads.build import graft_plan
from mtp_train.heads.diagnose import diagnose_head, layout_of
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs.checkpoint_tools.gguf_files import config_of, export_gguf_head, graft_gguf, inspect_gguf
from mtp_train.runs.checkpoint_tools.inspect import SUGGESTED_DEPTH, serving_commands
from mtp_train.runs.display import Shown, quiet_progress, serving_lines
from mtp_train.runs.export import write_card, write_export, write_untrained_card
from mtp_train.runs.run_directory import ADAPTER, PROVENANCE_FILE, TRUNK, checkpoint_identity
from mtp_train.trunk.tokenizer import load_tokenizer
from mtp_train.trunk.whole import first_of, require_whole_trunk


@dataclass(frozen=True)
class GraftResult(Shown):
    """The checkpoint that :func:`graft` wrote."""

    out: Path
    """The new directory, or the first split of the GGUF file."""
    fine_tune: str
    """The trunk's checkpoint, as the caller named it."""
    base: str
    """The head's checkpoint, as the caller named it."""
    serves: Mapping[str, str]
    """Engine to the command that serves ``out``, or ``no: REASON``."""
    notes: tuple[str, ...] = ()
    """Sentences about weight files that were left out, or about the storage in a GGUF file."""

    def __str__(self) -> str:
        served = (f"{engines}: {text}" for engines, text in serving_lines(self.serves))
        wrote = f"Wrote {self.out}: the trunk of {self.fine_tune}, the head of {self.base}."
        next_step = f"Would training it pay? {probe_command(self.fine_tune, self.base)}"
        return "\n".join([wrote, *self.notes, *served, next_step])


def graft(
    fine_tune: str | Path,
    base: str | Path,
    out: str | Path,
    *,
    head: GgufKind | None = None,
    copy: bool = False,
    progress: Progress | None = None,
) -> GraftResult:
    """Write a fine-tune together with the MTP head of its base. Every tensor keeps its bytes.

    Args:
        fine_tune: The checkpoint without its head: a directory, a hub id, ``demo:NAME``, or a GGUF file.
        base: The checkpoint to take the head from, of the same trunk shape; for a GGUF file also one with a head.
        out: The new directory, or the new GGUF file.
        head: Storage of the head in a GGUF file: ``"q8_0"``, ``"f16"``, ``"bf16"`` or ``"f32"``; None for Q8_0, or as
            the base's GGUF file has it.
        copy: Copy unchanged files; False hard-links them where the file system allows.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The base has no complete head, its trunk has another shape, or a weight is not finite.
        UnsupportedModelError: No family record fits one of the two.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.graft("demo:finetune", "demo:base", "grafted").serves["vllm"]
        'vllm serve grafted ...'
    """
    out, progress = Path(out), progress or quiet_progress()
    link: LinkMode = "copy" if copy else "hard"
    if is_gguf(fine_tune):
        files = graft_gguf(Path(fine_tune), str(base), out, head, link, progress)
        return _in_gguf(files, str(fine_tune), str(base))
    if head is not None:
        raise MtpError(
            f"--head: given for {fine_tune}, whose head keeps its bytes; expected a GGUF file. Leave it out."
        )
    trunk, donor = open_location(str(fine_tune)), open_location(str(base))
    refuse_existing(out, what="the checkpoint")
    plan = graft_plan(trunk, donor, "auto")
    require_whole_trunk(trunk)
    require_finite_checkpoint(trunk, progress)
    require_finite_checkpoint(donor, progress)
    write_checkpoint(trunk, plan.layout, plan.head, out, link=link, progress=progress)
    with removed_on_failure(out):
        identities = checkpoint_identity(str(fine_tune), trunk), checkpoint_identity(str(base), donor)
        write_untrained_card(out, *identities, None, SUGGESTED_DEPTH)
        written = open_checkpoint(out)
        serves = serving_commands(written, diagnose_head(written), "healthy")
    notes = left_out(trunk, plan.layout)
    reduced = [key for key in donor.tensors if REDUCED_OUTPUT.fullmatch(key)]
    if reduced:
        notes += (f"Left out, as it is of {donor.path}'s own tokens: {first_of(reduced)}.",)
    return GraftResult(out, str(fine_tune), str(base), serves, notes)


def _in_gguf(files: Sequence[Path], fine_tune: str, base: str) -> GraftResult:
    found = inspect_gguf(files[0])
    told = [f"Its trunk is that of {fine_tune} byte for byte; the head's tensors are {found.head_quantisation}."]
    told += [f"Its splits are {', '.join(path.name for path in files)}."] if len(files) > 1 else []
    told += [f"Do not pass {one} with -md beside it: the head is in the file." for one in found.heads_beside]
    return GraftResult(files[0], fine_tune, base, found.serves, tuple(told))


@dataclass(frozen=True)
class MergeResult(Shown):
    """The checkpoint that :func:`merge` wrote, and the next command for its head."""

    out: str
    """The new directory."""
    checkpoint: str
    """The checkpoint that the adapter was merged into, as the caller named it."""
    adapter: str
    """The adapter, as the caller named it."""
    num_tensors: int
    """Stored tensors that changed."""
    shards_rewritten: int
    shards_kept: int
    head_keys: int
    """Tensors of the head in the checkpoint, which are unchanged."""
    tokenizer_files: tuple[str, ...]
    """Files of the tokenizer and chat template that are the adapter's; empty where it has none of its own."""
    attached: bool
    """Whether the family's releases have no MTP head, so that one has to be trained from scratch."""
    notes: tuple[str, ...] = ()
    """Sentences about weight files that were left out."""

    @property
    def cure(self) -> str:
        """The command to run next: measure what the head lost, put the base's head back, or train a new one.

        ``BASE`` in it stands for the base model, which is not known here.
        """
        if self.head_keys:
            return probe_command(self.out, self.checkpoint)
        return train_command(self.out) if self.attached else graft_command(self.out, "BASE")

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"cure": self.cure}

    def __str__(self) -> str:
        shards = self.shards_rewritten + self.shards_kept
        lines = [f"Wrote {self.out}: {self.num_tensors} tensors changed, in {self.shards_rewritten} of {shards} files."]
        if self.head_keys:
            lines.append(
                f"Its head is the head of {self.checkpoint}, bit for bit, and was not trained for the merged trunk. "
                f"Measure whether it drafts worse: {self.cure}"
            )
        else:
            what = "Attach one" if self.attached else "Put the base's back"
            lines.append(f"It has no head, like {self.checkpoint}. {what}: {self.cure}")
        if self.tokenizer_files:
            lines.append(f"Its tokenizer is the adapter's: {', '.join(self.tokenizer_files)}.")
        return "\n".join([*lines, *self.notes])


def merge(
    checkpoint: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    copy: bool = False,
    progress: Progress | None = None,
) -> MergeResult:
    """Write a checkpoint with a LoRA adapter merged into its trunk. The model is not loaded; its head stays as it is.

    Args:
        checkpoint: The model that the adapter was trained on: a directory, a hub id or ``demo:NAME``.
        adapter: A peft LoRA adapter: a directory or a hub id.
        out: The new directory.
        copy: Copy files without a changed tensor; False hard-links them where the file system allows.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The adapter cannot be merged or does not fit, or a weight is not finite.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.merge("Qwen/Qwen3.6-27B", "my-lora", "my-27b").num_tensors
        448
    """
    result_dir, checkpoint, adapter = Path(out), str(checkpoint), str(adapter)
    progress = progress or quiet_progress()
    refuse_existing(result_dir, what="the checkpoint")
    lora = read_adapter(locate_checkpoint(adapter))
    source = open_location(checkpoint)
    layout = layout_of(source)
    plan = plan_merge(source, layout, lora)
    require_whole_trunk(source, adapter_beside=True)
    if tokenizer := [name for name, file in plan.files.items() if file is not None]:
        # Refuses a token without an embedding.
        resized = replace(source, config=with_fields(source, plan.config_fields))
        load_tokenizer(resized, trust_remote_code=False, adapter=lora.path)
    require_finite_checkpoint(source, progress)
    link: LinkMode = "copy" if copy else "hard"
    write_checkpoint(source, layout, None, result_dir, link=link, progress=progress, merge=plan)
    shards, rewritten = ({source.tensors[key].file for key in keys} for keys in (source.tensors, plan.tensors))
    own_head = [key for key in source.tensors if layout.is_head_key(key) and layout.shared_key(key) is None]
    with removed_on_failure(result_dir):
        identity = checkpoint_identity(checkpoint, source)
        head_from = identity if own_head else None
        write_untrained_card(result_dir, identity, head_from, adapter, SUGGESTED_DEPTH)
    notes = left_out(source, layout)
    return MergeResult(
        out=str(result_dir),
        checkpoint=checkpoint,
        adapter=adapter,
        num_tensors=len(plan.tensors),
        shards_rewritten=len(rewritten),
        shards_kept=len(shards - rewritten),
        head_keys=len(own_head),
        tokenizer_files=tuple(sorted(tokenizer)),
        attached=source.family.attached,
        notes=notes,
    )


# Programs that pass both draft nothing, or crash (unsloth#10169, LM Studio's bug tracker #2244).
_ONE_HEAD = "TRUNK.gguf must have no head of its own (convert_hf_to_gguf.py --no-mtp); if it has one, leave -md out."


@dataclass(frozen=True)
class ExportResult(Shown):
    """The files that :func:`export` wrote."""

    out: Path
    """The new directory."""
    trunk: Path
    """The checkpoint of the trunk that the head drafts for."""
    file: Path | None = None
    """The GGUF file in ``out``; None for other forms."""
    spec_type: Literal["draft-mtp", "draft-eagle3"] | None = None
    """llama.cpp's kind of the drafter in ``file``."""
    flag: str | None = None
    """vLLM's flag that drafts with a head-only export; None for other forms."""
    notes: tuple[str, ...] = ()
    """Sentences about weight files that were left out, and about the trunk that a GGUF file is passed with."""

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
    copy: bool = False,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a servable checkpoint from a run that passed the gate, or from a checkpoint that holds a head.

    The default form is the trunk's checkpoint with the head in it, and an index that lists all tensors. Weight files
    that the checkpoint does not name are left out. A run's EAGLE, EAGLE-3 or Medusa head becomes a draft model.
    ``head_only`` and ``gguf`` choose another form; give at most one of them.

    Args:
        source: A run directory, a checkpoint with a complete head, declared or not, or a GGUF file with ``head_only``.
        out: The new directory.
        head_only: Write an MTP head alone, as a directory that vLLM loads as a draft model.
        gguf: Write the head alone as a GGUF file for llama.cpp: ``"f32"``, ``"f16"``, ``"bf16"`` or ``"q8_0"``.
        copy: Copy the trunk's unchanged files; False hard-links them where the file system allows.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        MtpError: Both forms are given, or ``copy`` with ``gguf``.
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
    if gguf is not None and (head_only or copy):
        other = "--head-only" if head_only else "--copy"
        raise MtpError(f"{other}: given with --gguf, which writes the head alone; expected one of them. Leave it out.")
    if is_gguf(source):
        if not head_only:
            raise MtpError(f"{source}: a GGUF file; expected --head-only, which takes its head out. Add it.")
        written = export_gguf_head(source, out, progress)
        return ExportResult(out, source, file=written, spec_type="draft-mtp", notes=(_ONE_HEAD,))
    refuse_existing(out, what="the checkpoint" if gguf is None else "the GGUF file")
    # llama.cpp's converter reads FP8 and FP4 without rounding.
    found = _head_to_export(source, progress, stored_tensor if gguf is None else exact_tensor)
    trunk, head = found.trunk, found.head
    _require_sound(source, found, progress, head_only=head_only, alone=head_only or gguf is not None)
    if gguf is not None:
        return _write_gguf_file(source, found, out, gguf, progress)
    if head_only:
        write_head_only(trunk, layout_of(trunk), head.head, out)
        return ExportResult(out, trunk.path, flag=draft_model_flag(str(out), head.num_depths))
    write_export(trunk, head, out, adapter=found.adapter, link="copy" if copy else "hard", progress=progress)
    if found.is_of_run:
        with removed_on_failure(out):
            write_card(source, out)
    notes = left_out(trunk, layout_of(trunk)) if head.family.kind == "mtp" else ()
    return ExportResult(out, trunk.path, notes=notes)


def _write_gguf_file(source: Path, found: _HeadToExport, out: Path, kind: GgufKind, progress: Progress) -> ExportResult:
    """Write ``mtp-NAME.gguf`` or ``eagle3-NAME.gguf``, named after the trunk, into a new directory."""
    if found.head.family.kind != "mtp":
        file = _write_draft_gguf(source, found, out, kind, progress)
        return ExportResult(out, found.trunk.path, file=file, spec_type="draft-eagle3")
    trunk, layout, config = found.trunk, layout_of(found.trunk), config_of(found.trunk)
    record = gguf_head_for(trunk.family, str(trunk.text_config.get("model_type")), where=str(trunk.path))
    tensors = gguf_tensors(trunk, layout, found.head.head, record, config)
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
    return ExportResult(out, trunk.path, file=out / name, spec_type="draft-mtp", notes=(_ONE_HEAD,))


def _write_draft_gguf(source: Path, found: _HeadToExport, out: Path, kind: GgufKind, progress: Progress) -> Path:
    trunk, head = load_recipe(source / RECIPE_FILE).model.trunk, found.head
    if head.family.kind != "eagle3" or not is_gguf(trunk):
        raise CheckpointError(
            f"{source}: a head of kind {head.family.kind} for {trunk}; expected an MTP head, or an EAGLE-3 head for "
            "a trunk that is a GGUF file. Export it without --gguf: it becomes a draft model, which llama.cpp's "
            "converter reads."
        )
    name = f"eagle3-{Path(trunk).name}"
    with new_directory(out, what="the GGUF file") as directory, tempfile.TemporaryDirectory(dir=directory) as work:
        draft = Path(work) / "draft"
        write_export(found.trunk, head, draft, adapter=None, link="hard", progress=progress)
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
    head: Artifact
    is_of_run: bool
    adapter: Path | None = None
    """The LoRA adapter that the run's trunk was trained with; None without one."""


def _head_to_export(source: Path, progress: Progress, take: Take) -> _HeadToExport:
    """Return the head of a run that passed its gate, or of a checkpoint, whose tensors are read by ``take``.

    A run that fine-tuned its trunk has already exported it with the head that its gate chose: that checkpoint is read.
    """
    if not is_head_directory(source / HEAD):
        refuse_adapter(source, str(source))
        trunk = open_checkpoint(source)
        return _HeadToExport(trunk, _own_head(trunk, take), is_of_run=False)
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
    inputs = {TRUNK: checkpoint_files(trunk)}
    if adapter is not None:
        inputs[ADAPTER] = directory_files(adapter)
    # keeps=False: an export writes nothing to the run directory, which may belong to another user.
    require_same(source, inputs, progress, finished=True, keeps=False)
    return _HeadToExport(trunk, load_artifact(source / HEAD), True, adapter)


def _require_sound(source: Path, found: _HeadToExport, progress: Progress, *, head_only: bool, alone: bool) -> None:
    """Check the weights, and for a head ``alone`` that it can be written without its trunk's checkpoint."""
    if head_only and found.head.family.kind != "mtp":
        raise CheckpointError(
            f"{found.trunk.path}: its head is {found.head.family.title}; expected an MTP head. Export it without "
            "--head-only: it becomes a draft model, a directory of its own."
        )
    if alone and found.adapter is not None:
        raise CheckpointError(
            f"{source}: its trunk has the unmerged adapter {found.adapter}; expected a trunk in one checkpoint, as the "
            "head's file repeats some of its weights. Export the run, then take the head alone from the export."
        )
    require_whole_trunk(found.trunk)
    # A head on its own repeats only a few of the trunk's tensors, but is loaded beside all of them.
    require_finite_checkpoint(found.trunk, progress)


def _own_head(checkpoint: Checkpoint, take: Take) -> Artifact:
    diagnosis = diagnose_head(checkpoint)
    if not diagnosis.complete:
        raise CheckpointError(
            f"{checkpoint.path}: {diagnosis.describe()}; expected a run directory or a checkpoint with a complete "
            "head. Use mtp-train graft to put the base's head back."
        )
    layout = layout_of(checkpoint)
    head = native_head_of(checkpoint, layout, layout, take=take)
    declared = checkpoint.family.declaring(diagnosis.present_modules, checkpoint.config)
    return Artifact(
        layout=layout,
        num_modules=diagnosis.present_modules,
        num_depths=SUGGESTED_DEPTH,
        convention="auto",
        head=replace(head, config_fields={**head.config_fields, **declared}),
        notes={},
    )
