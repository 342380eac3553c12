"""``mtp-train graft``, ``merge`` and ``export``: write checkpoints without training.

``graft`` puts the base's MTP head back on a fine-tune. ``merge`` merges a LoRA adapter into a checkpoint, whose layout
and MTP head stay as they are. ``export`` writes a run's head, or a checkpoint's own, in a form that engines load.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.progress import Progress

from mtp_train.checkpoints.adapter import plan_merge, read_adapter
from mtp_train.checkpoints.artifact import Artifact, load_artifact
from mtp_train.checkpoints.export import LinkMode, with_fields, write_checkpoint, write_head_only
from mtp_train.checkpoints.files import Checkpoint, is_gguf, left_out, open_checkpoint, read_json
from mtp_train.checkpoints.gguf.model_file import open_gguf, write_draft_gguf, write_head_alone
from mtp_train.checkpoints.gguf.sidecar import GgufKind, write_gguf
from mtp_train.checkpoints.identity import checkpoint_files, directory_files, require_same
from mtp_train.checkpoints.keymap import REDUCED_OUTPUT
from mtp_train.checkpoints.locations import (
    HEAD,
    RECIPE_FILE,
    is_head_directory,
    locate_checkpoint,
    open_location,
    refuse_adapter,
)
from mtp_train.checkpoints.native import Take, exact_tensor, native_head_of, stored_tensor
from mtp_train.checkpoints.suggestions import (
    checkpoint_name,
    command,
    draft_model_flag,
    graft_command,
    probe_command,
    train_command,
)
from mtp_train.checkpoints.tokenizer import load_tokenizer
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.checkpoints.writing import new_directory, refuse_existing, removed_on_failure
from mtp_train.errors import CheckpointError, GateRefusedError, MtpError, first_of
from mtp_train.evaluation.results import REPORT_FILE, load_report
from mtp_train.head_kinds import MTP, SUGGESTED_DEPTH
from mtp_train.heads.build import graft_plan
from mtp_train.heads.diagnose import diagnose_head
from mtp_train.heads.initial import require_trained_head
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs.checkpoint_tools.gguf_files import config_of, graft_gguf, graft_gguf_command
from mtp_train.runs.checkpoint_tools.inspect import inspect, suggested_depth
from mtp_train.runs.display import Rows, Shown, quiet_progress, serving_lines
from mtp_train.runs.export import serves_of, write_card, write_export, write_untrained_card
from mtp_train.runs.inputs import adapter_of
from mtp_train.runs.run_directory import ADAPTER, PROVENANCE_FILE, TRUNK, checkpoint_identity
from mtp_train.trunk.whole import require_whole_trunk


@dataclass(frozen=True, kw_only=True)
class WriteResult(Shown):
    """What :func:`graft`, :func:`merge`, :func:`export` or :func:`write_recipe` wrote."""

    out: Path
    """The new directory or file; of the splits of a GGUF file the first one."""
    content: str
    """What it holds, in a phrase."""
    trunk: str | None = None
    """How many tensors of the trunk it has, and how many of them byte for byte; None without a trunk."""
    serves: Mapping[str, str] = field(default_factory=dict)
    """Engine to the command that drafts with the head, or ``no: REASON``; empty without a head."""
    notes: tuple[str, ...] = ()
    """Sentences about the head, weight files that were left out, the storage in a GGUF file, or a recipe's needs."""
    cure: str | None = None
    """The command to run next; None if nothing is left to do."""

    def _title(self) -> str:
        return f"Wrote {self.out}: {self.content}."

    def _rows(self) -> Rows:
        return [
            ("trunk", self.trunk),
            *(("note", one) for one in self.notes),
            *serving_lines(self.serves),
            ("next", self.cure),
        ]


def graft(
    fine_tune: str | Path,
    base: str | Path,
    out: str | Path,
    *,
    head: GgufKind | None = None,
    copy: bool = False,
    progress: Progress | None = None,
) -> WriteResult:
    """Write a fine-tune together with the MTP head of its base. Every tensor keeps its bytes.

    Args:
        fine_tune: The checkpoint without its head: a directory, a hub id, ``demo:NAME``, or a GGUF file.
        base: The checkpoint to take the head from, of the same trunk shape; for a GGUF file also one with a head.
        out: The new directory, or the new GGUF file.
        head: Its storage in a GGUF file; None: Q8_0, or as BASE's file has it.
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
    out, fine_tune, base = Path(out), str(fine_tune), str(base)
    progress = progress or quiet_progress()
    link: LinkMode = "copy" if copy else "hard"
    _require_form(out, fine_tune)
    if is_gguf(fine_tune):
        return _in_gguf(graft_gguf(Path(fine_tune), base, out, head, link, progress), fine_tune, base)
    if head is not None:
        raise MtpError(f"--head: given for {fine_tune}, no GGUF file; expected one. Leave it out.")
    trunk = open_location(fine_tune)
    donor = open_location(base)
    refuse_existing(out, what="the checkpoint")
    # First: a trunk that lost weights is of another shape than its base.
    require_whole_trunk(trunk)
    plan = graft_plan(trunk, donor, "auto")
    for one in (trunk, donor):
        require_finite_checkpoint(one, progress)
    require_trained_head(donor)
    equal = write_checkpoint(trunk, plan.head, out, link=link, progress=progress)
    with removed_on_failure(out):
        sources = checkpoint_identity(fine_tune, trunk), checkpoint_identity(base, donor)
        depth = suggested_depth(donor)
        write_untrained_card(out, *sources, None, depth)
        serves = serves_of(out, trunk.family, depth)
    return WriteResult(
        out=out,
        content=f"the trunk of {fine_tune}, the head of {base}",
        trunk=equal,
        serves=serves,
        notes=_left_out(trunk, donor),
        cure=probe_command(fine_tune, base),
    )


def _left_out(trunk: Checkpoint, donor: Checkpoint) -> tuple[str, ...]:
    notes = left_out(trunk)
    if reduced := list(filter(REDUCED_OUTPUT.fullmatch, donor.tensors)):
        notes += (f"Left out, as it is of {donor.path}'s own tokens: {first_of(reduced)}.",)
    return notes


def _require_form(out: Path, fine_tune: str) -> None:
    """Refuse a name that would be taken for a file where a directory is written, or the other way round."""
    if is_gguf(fine_tune) != is_gguf(out):
        name = out.with_suffix("") if is_gguf(out) else out / f"{Path(fine_tune).stem}-mtp.gguf"
        raise MtpError(
            f"--out: {out}, for {fine_tune}; expected a .gguf file for a .gguf file, or directories. Use --out "
            f"{shlex.quote(str(name))}."
        )


def _in_gguf(files: Sequence[Path], fine_tune: str, base: str) -> WriteResult:
    found = inspect(files[0])
    notes = [f"{found.note}."]
    notes += [f"Its splits are {', '.join(path.name for path in files)}."] if len(files) > 1 else []
    return WriteResult(
        out=files[0],
        content=f"the trunk of {fine_tune} byte for byte, the head of {base}",
        serves=found.serves,
        notes=tuple(notes),
        cure=probe_command(fine_tune, base),
    )


def merge(
    checkpoint: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    copy: bool = False,
    progress: Progress | None = None,
) -> WriteResult:
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
        >>> mtp.merge("demo:base", "my-lora", "merged").trunk
        '108 tensors, all bytes of 100 equal'
    """
    out, checkpoint, adapter = Path(out), str(checkpoint), str(adapter)
    progress = progress or quiet_progress()
    refuse_existing(out, what="the checkpoint")
    lora = read_adapter(locate_checkpoint(adapter))
    source = open_location(checkpoint)
    layout = source.layout
    plan = plan_merge(source, lora)
    require_whole_trunk(source, adapter_beside=True)
    if tokenizer := [name for name, file in plan.files.items() if file is not None]:
        # Refuses a token without an embedding.
        load_tokenizer(replace(source, config=with_fields(source, plan.config_fields)), adapter=lora.path)
    require_finite_checkpoint(source, progress)
    link: LinkMode = "copy" if copy else "hard"
    equal = write_checkpoint(source, None, out, link=link, progress=progress, merge=plan)
    shards, rewritten = ({source.tensors[key].file for key in keys} for keys in (source.tensors, plan.tensors))
    own_head = [key for key in source.tensors if layout.is_head_key(key) and layout.shared_key(key) is None]
    with removed_on_failure(out):
        identity = checkpoint_identity(checkpoint, source)
        write_untrained_card(out, identity, identity if own_head else None, adapter, suggested_depth(source))
    head = f"It has no head, like {checkpoint}."
    cure = graft_command(str(out), "BASE")
    if own_head:
        head = f"Its head is the head of {checkpoint}, bit for bit, and was not trained for the merged trunk."
        cure = probe_command(str(out), checkpoint)
    elif source.family.attached:
        cure = train_command(str(out))
    used = [f"Its tokenizer is the adapter's: {', '.join(sorted(tokenizer))}."] if tokenizer else []
    return WriteResult(
        out=out,
        content=f"{len(plan.tensors)} tensors of {checkpoint} adapted, in {len(rewritten)} of {len(shards)} files",
        trunk=equal,
        notes=(head, *used, *left_out(source)),
        cure=cure,
    )


def export(
    source: str | Path,
    out: str | Path,
    *,
    head_only: bool = False,
    gguf: GgufKind | None = None,
    copy: bool = False,
    progress: Progress | None = None,
) -> WriteResult:
    """Write a servable checkpoint from a run that passed the gate, or from a checkpoint that holds a head.

    The default form is the trunk's checkpoint with the head in it, and an index that lists all tensors. Weight files
    that the checkpoint does not name are left out. A run's EAGLE, EAGLE-3 or Medusa head becomes a draft model.
    ``head_only`` and ``gguf`` choose another form; give at most one of them.

    Args:
        source: A run directory, a checkpoint with a complete head, declared or not, or a GGUF file with ``head_only``.
        out: The new directory.
        head_only: Write an MTP head alone, as a directory that vLLM loads as a draft model.
        gguf: Write the head alone as a GGUF file for llama.cpp, see ``head`` of :func:`graft`.
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
        Wrote my-27b-head/mtp-my-27b.gguf: the head alone. ...
    """
    source, out, progress = Path(source), Path(out), progress or quiet_progress()
    if gguf is not None and (head_only or copy):
        other = "--head-only" if head_only else "--copy"
        raise MtpError(f"{other}: given with --gguf, which writes the head alone; expected one of them. Leave it out.")
    if is_gguf(source):
        if not head_only:
            instead = command("export", source, "--head-only", "--out", out)
            raise MtpError(f"{source}: a GGUF file, as its head stays; expected --head-only alone. Run '{instead}'.")
        return _head_in_gguf(_head_of_gguf(source, out, progress))
    refuse_existing(out, what="the checkpoint" if gguf is None else "the GGUF file")
    # llama.cpp's converter reads FP8 and FP4 without rounding.
    trunk, head, adapter = _head_to_export(source, progress, stored_tensor if gguf is None else exact_tensor)
    if adapter is not None and (head_only or gguf is not None):
        raise CheckpointError(
            f"{source}: its trunk has the unmerged adapter {adapter}; expected a trunk in one checkpoint, as the "
            "head's file repeats some of its weights. Export the run, then take the head alone from the export."
        )
    require_whole_trunk(trunk)
    # A head on its own repeats only a few of the trunk's tensors, but is loaded beside all of them.
    require_finite_checkpoint(trunk, progress)
    if gguf is not None:
        return _head_in_gguf(_write_gguf(source, trunk, head, out, gguf, progress))
    if head_only:
        return _write_head_only(trunk, head, out)
    return _write_whole(source, trunk, head, adapter, out, "copy" if copy else "hard", progress)


def _write_whole(
    source: Path,
    trunk: Checkpoint,
    head: Artifact,
    adapter: Path | None,
    out: Path,
    link: LinkMode,
    progress: Progress,
) -> WriteResult:
    """Write the trunk's checkpoint with the head in it, or the head as a draft model; of a run, with its card."""
    equal = write_export(trunk, head, out, adapter=adapter, link=link, progress=progress)
    report = None
    with removed_on_failure(out):
        if is_head_directory(source / HEAD):
            report = load_report(source / REPORT_FILE)
            write_card(source, out)
        serves = serves_of(out, head.family, head.num_depths, report)
    if head.kind.has_file:
        return WriteResult(out=out, content=f"a draft model for {trunk.path}", serves=serves)
    return WriteResult(
        out=out,
        content=f"the trunk of {trunk.path} with its head",
        trunk=equal,
        serves=serves,
        notes=left_out(trunk),
    )


def _write_head_only(trunk: Checkpoint, head: Artifact, out: Path) -> WriteResult:
    if head.kind != MTP:
        raise CheckpointError(
            f"{trunk.path}: its head is {head.family.title}; expected an MTP head. Export it without --head-only."
        )
    write_head_only(trunk, head.head, out)
    serve = f"vllm serve {shlex.quote(str(trunk.path))} {draft_model_flag(str(out), head.num_depths)}"
    return WriteResult(out=out, content=_ALONE, serves={"vllm": serve})


_ALONE = "the head alone"
# Programs that pass both draft nothing, or crash (unsloth#10169, LM Studio's bug tracker #2244).
_ONE_HEAD = "TRUNK.gguf must have no head of its own (convert_hf_to_gguf.py --no-mtp); if it has one, leave -md out."


def _head_of_gguf(file: Path, out: Path, progress: Progress) -> Path:
    """Write ``mtp-NAME.gguf``, the head of a GGUF file as it is, into a new directory."""
    model = open_gguf(file)
    refuse_existing(out, what="the GGUF file")
    if not model.head:
        raise CheckpointError(
            f"{file}: no head; expected a GGUF file with one. Put one in with '{graft_gguf_command(file)}'."
        )
    written = out / f"mtp-{file.name}"
    write_head_alone(model, written, progress)
    return written


def _head_in_gguf(file: Path) -> WriteResult:
    return WriteResult(out=file, content=_ALONE, serves=inspect(file).serves, notes=(_ONE_HEAD,))


def _write_gguf(source: Path, trunk: Checkpoint, head: Artifact, out: Path, kind: GgufKind, progress: Progress) -> Path:
    """Write ``mtp-NAME.gguf``, named after the trunk, into a new directory; a draft model in a file of its kind."""
    if head.kind.has_file:
        return _write_draft_gguf(source, trunk, head, out, kind, progress)
    name = f"mtp-{checkpoint_name(trunk.path)}.gguf"
    with new_directory(out, what="the GGUF file") as directory:
        write_gguf(directory / name, trunk, head.head, config_of(trunk), kind, progress)
    return out / name


def _write_draft_gguf(
    source: Path, trunk: Checkpoint, head: Artifact, out: Path, kind: GgufKind, progress: Progress
) -> Path:
    """Write ``KIND-NAME.gguf`` into a new directory, for a trunk that is a GGUF file."""
    file = load_recipe(source / RECIPE_FILE).model.trunk
    kind_of_head = head.kind
    if not kind_of_head.load_parts().format.is_in_gguf or not is_gguf(file):
        raise CheckpointError(
            f"{source}: a head of kind {kind_of_head.name} for {file}; expected an MTP head, or an EAGLE-3 head for "
            "a trunk that is a GGUF file. Export it without --gguf: it becomes a draft model, which llama.cpp's "
            "converter reads."
        )
    name = f"{kind_of_head.name}-{Path(file).name}"
    with new_directory(out, what="the GGUF file") as directory, tempfile.TemporaryDirectory(dir=directory) as work:
        draft = Path(work) / "draft"
        write_export(trunk, head, draft, adapter=None, link="hard", progress=progress)
        write_draft_gguf(open_checkpoint(draft), open_gguf(Path(file)), directory / name, kind, progress)
    return out / name


def _head_to_export(source: Path, progress: Progress, take: Take) -> tuple[Checkpoint, Artifact, Path | None]:
    """Return the head of a run that passed its gate, or of a checkpoint, with its trunk and the trunk's adapter.

    Args:
        take: Reads the head's tensors of a checkpoint.
    """
    if not is_head_directory(source / HEAD):
        refuse_adapter(source, str(source))
        trunk = open_checkpoint(source)
        return trunk, _own_head(trunk, take), None
    if not (source / REPORT_FILE).is_file():
        raise CheckpointError(
            f"{source}: its head has not been measured; expected a run that reached the gate. Run its recipe again: "
            "it goes on from where it stands."
        )
    gate = load_report(source / REPORT_FILE).gate
    if gate is not None and not gate.passed:
        raise GateRefusedError(gate.reason)
    identity = read_json(source / PROVENANCE_FILE)["trunk"]
    recipe = load_recipe(source / RECIPE_FILE)
    # The recipe may name the trunk by a link or a hub id that leads elsewhere by now: the recorded path comes first.
    trunk = open_location(identity["path"] if Path(identity["path"]).exists() else recipe.model.trunk)
    adapter = adapter_of(recipe)
    inputs = {TRUNK: checkpoint_files(trunk)}
    if adapter is not None:
        inputs[ADAPTER] = directory_files(adapter)
    # keeps=False: an export writes nothing to the run directory, which may belong to another user.
    require_same(source, inputs, progress, finished=True, keeps=False)
    return trunk, load_artifact(source / HEAD), adapter


def _own_head(checkpoint: Checkpoint, take: Take) -> Artifact:
    diagnosis = diagnose_head(checkpoint)
    if not diagnosis.complete:
        raise CheckpointError(
            f"{checkpoint.path}: {diagnosis.describe()}; expected a run directory or a checkpoint with a complete "
            "head. Use mtp-train graft to put the base's head back."
        )
    require_trained_head(checkpoint)
    layout = checkpoint.layout
    head = native_head_of(checkpoint, layout, take=take)
    return Artifact(
        layout=layout,
        num_modules=diagnosis.present_modules,
        num_depths=SUGGESTED_DEPTH,
        convention="auto",
        head=replace(
            head,
            config_fields={
                **head.config_fields,
                **checkpoint.family.declaring(diagnosis.present_modules, checkpoint.config),
            },
        ),
        notes={},
    )
