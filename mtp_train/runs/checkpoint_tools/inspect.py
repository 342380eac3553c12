"""``mtp-train inspect``: report the state of a checkpoint's MTP head and trunk, and the command that repairs it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rich.progress import Progress

from mtp_train.checkpoints import suggestions
from mtp_train.checkpoints.adapter import ADAPTER_CONFIG_FILE, merge_command
from mtp_train.checkpoints.files import Checkpoint, JsonObject, is_gguf, unnamed_files, unnamed_weights
from mtp_train.checkpoints.gguf.model_file import DRAFT_ARCH, GgufModel, open_gguf
from mtp_train.checkpoints.keymap import REDUCED_OUTPUT, HeadLayout
from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.native import require_same_trunk_shape, trunk_tensors
from mtp_train.checkpoints.quantised import (
    QUANTISATION,
    read_plain_in_blocks,
    undeclared_weights,
    unlisted_layers,
    unmatched_by_sglang,
)
from mtp_train.checkpoints.values import (
    HeadDifference,
    common_tensors,
    compare_heads,
    find_non_finite,
    squared_change,
    zero_head,
)
from mtp_train.errors import MtpError, first_of
from mtp_train.families.engines import DSPARK, MLX_ALONE, complete, engine_commands
from mtp_train.head_kinds import SUGGESTED_DEPTH
from mtp_train.heads.diagnose import (
    DSPARK_BLOCK,
    DSPARK_PREFIX,
    HeadDiagnosis,
    diagnose_head,
    foreign_drafter,
)
from mtp_train.heads.draft_model import (
    DraftModel,
    diagnose_draft,
    draft_model,
    draft_plan,
    values_problem,
)
from mtp_train.heads.initial import INITIAL_NOTES, NEVER_TRAINED, UNTRAINED, Initial, initial_parts, norm_value
from mtp_train.runs.checkpoint_tools.gguf_files import (
    RECORDS,
    graft_gguf_command,
    missing_of_head,
    problems_of_head,
    stored_types,
)
from mtp_train.runs.display import Rows, Shown, quiet_progress, serving_lines
from mtp_train.trunk.whole import TrunkDiagnosis, diagnose_trunk, holds_trunk, untie_command

Status = Literal[
    "healthy",
    "declared_but_missing",
    "undeclared",
    "partial",
    "quantised",
    "stripped",
    "none",
    "damaged",
    "miswired",
    "foreign",
    "untrained",
]
_WITHOUT_HEAD = ("declared_but_missing", "stripped", "none", "partial")
_KEYS = ("missing_keys", "shape_errors", "dtype_errors")


@dataclass(frozen=True)
class TrunkChange:
    """How far a fine-tune's trunk is from the trunk of its base."""

    share_of_tensors: float
    """Tensors that differ over tensors compared."""
    largest_relative_change: float
    """Largest ``norm(new - old) / norm(old)`` over all tensors with a finite ratio."""

    def __str__(self) -> str:
        return (
            f"{self.share_of_tensors:.0%} of tensors differ from the base, by {self.largest_relative_change:.2g} at "
            "most (relative)"
        )


def _of_files(checkpoint: Checkpoint, layout: HeadLayout | None, progress: Progress) -> JsonObject:
    """Return the fields of an inspection about a directory and its weights, whatever they are the weights of."""
    return {
        "checkpoint": str(checkpoint.path),
        "non_finite_keys": tuple(find_non_finite(checkpoint, progress)),
        "unlisted_keys": checkpoint.unlisted_keys,
        "superseded": tuple(f"{key} in {file}" for file, key in checkpoint.superseded),
        "unnamed_weights": unnamed_files(checkpoint, layout),
    }


def _not_finite(keys: Sequence[str]) -> tuple[str, ...]:
    return (f"NaN or infinite values: {first_of(keys)}",) if keys else ()


@dataclass(frozen=True, kw_only=True)
class Inspection(Shown):
    """State of the MTP head and the trunk of a checkpoint, or of a GGUF file, as :func:`inspect` returns it.

    ``print(inspection)`` shows what ``mtp-train inspect`` prints; :meth:`to_json` returns the document of its
    ``--json``.
    """

    checkpoint: str
    family: str
    status: Status
    """One word for the state of the head:

    - ``healthy``: declared, present and complete.
    - ``declared_but_missing``: the config declares a head whose tensors are gone.
    - ``undeclared``: head tensors without a declaration, or with two that differ.
    - ``partial``: keys are missing.
    - ``quantised``: packed in a form that is not read here.
    - ``stripped``: no head, but the base has one.
    - ``none``: no head.
    - ``damaged``: see :attr:`problems`.
    - ``miswired``: a known wrong form of the base's head, or zeros.
    - ``foreign``: another kind of drafter, or MLX's layout.
    - ``untrained``: matrices as drawn at random; norms as before any training, or the base's.
    """
    head: HeadDiagnosis
    """Declared and present modules, missing and unexpected keys, shape and dtype errors of the head."""
    trunk: TrunkDiagnosis = field(default_factory=TrunkDiagnosis)
    """Missing parameters, shape and dtype errors of the trunk; empty for a checkpoint without one."""
    trunk_changed: TrunkChange | None = None
    """None without a base."""
    head_difference: HeadDifference | None = None
    """How the head differs from the base's; None without a base or a complete head, except for a head of zeros."""
    non_finite_keys: tuple[str, ...] = ()
    """Tensors that contain NaN or infinities."""
    unlisted_keys: tuple[str, ...] = ()
    """Tensors in the index's shards that the index does not list: transformers, vLLM and SGLang read them, llama.cpp's
    converter refuses them."""
    superseded: tuple[str, ...] = ()
    """Stored copies of tensors that the index names in another file, as ``KEY in FILE``."""
    unnamed_weights: tuple[str, ...] = ()
    """Weight files in the directory that are no part of the checkpoint, and the number of their tensors."""
    problems: tuple[str, ...] = ()
    """Why ``generate`` and ``export`` refuse the checkpoint, a phrase each, whatever its head's status."""
    serves: Mapping[str, str]
    """Engine to the command that serves the checkpoint with its head, or ``no: REASON``."""
    cure: str | None = None
    """The command to run next; None for a checkpoint that needs no repair."""
    runs_here: str
    """``yes``, or the command that decodes with a drafter, or why the head cannot be trained or decoded with here."""
    note: str | None = None
    """A sentence about a drafter, about tensors beside the head, or about the storage in a GGUF file."""

    @property
    def stale(self) -> bool | None:
        """Whether the trunk changed and the head still equals the base's; None without a base or a head."""
        if self.trunk_changed is None or not self.head.found_keys or self.head.foreign is not None:
            return None
        difference = self.head_difference
        return self.trunk_changed.share_of_tensors > 0 and difference is not None and difference.kind == "equal"

    def to_json(self) -> JsonObject:
        found = super().to_json() | {"stale": self.stale}
        head = found.pop("head")
        trunk = found.pop("trunk")
        return {
            **found,
            **{name: head[name] for name in ("declared_modules", "present_modules", "unexpected_keys", *_KEYS)},
            **{f"trunk_{name}": trunk[name] for name in _KEYS},
        }

    def _title(self) -> str:
        return f"{self.checkpoint}: {self.status}" + (" (stale)" if self.stale else "")

    def _rows(self) -> Rows:
        head = self.head
        trunk = self.trunk
        found = {
            "trunk missing": trunk.missing_keys,
            "missing": head.missing_keys,
            "unexpected": head.unexpected_keys,
            "shape": head.shape_errors,
            "dtype": head.dtype_errors,
            "under other names": head.other_names,
            "trunk shape": trunk.shape_errors,
            "trunk dtype": trunk.dtype_errors,
            "NaN or infinite": self.non_finite_keys,
            "not in the index": self.unlisted_keys,
            "superseded by the index": self.superseded,
            "no part of the checkpoint": self.unnamed_weights,
        }
        return [
            ("family", f"{self.family}; modules declared {head.declared_modules}, present {head.present_modules}"),
            ("note", self.note),
            *((title, first_of(keys)) for title, keys in found.items() if keys),
            ("trunk", self.trunk_changed),
            ("head", self.head_difference),
            ("train, decode", None if self.runs_here == "yes" else self.runs_here),
            *serving_lines(self.serves),
            ("cure", self.cure or "nothing to cure"),
        ]


def inspect(checkpoint: str | Path, base: str | Path | None = None, *, progress: Progress | None = None) -> Inspection:
    """Report the state of a checkpoint's MTP head and trunk. Reads every weight once, a block at a time.

    Args:
        checkpoint: A directory, a hub id or ``demo:NAME``: a model, a draft model, or an external drafter; or a GGUF
            file, which is not compared with a base.
        base: The checkpoint that it was fine-tuned from, to tell a stale head and how far the trunk moved.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        UnsupportedModelError: No family record fits the checkpoint.
        CheckpointError: It cannot be read, or does not fit ``base``. NaN is reported and not refused.

    Example:
        >>> import mtp_train as mtp
        >>> found = mtp.inspect("demo:finetune", base="demo:base")
        >>> found.status, found.head.missing_keys[0]
        ('declared_but_missing', 'mtp.fc.weight')
        >>> found.cure
        'mtp-train graft ...'
    """
    if is_gguf(checkpoint):
        if base is not None:
            raise MtpError(f"--base: given with the GGUF file {checkpoint}; expected the file alone. Leave it out.")
        return _inspect_gguf(Path(checkpoint))
    opened = open_location(str(checkpoint))
    trunk = None if base is None else open_location(str(base))
    progress = progress or quiet_progress()
    if opened.mlx_sign is not None:
        return _inspect_mlx(opened, progress)
    if foreign_drafter(opened, ()) is not None:
        return _inspect_dspark(opened, progress)
    draft = draft_model(opened)
    if draft is not None:
        return _inspect_draft(draft, trunk, progress)
    return _inspect_checkpoint(opened, trunk, progress)


def _inspect_checkpoint(checkpoint: Checkpoint, base: Checkpoint | None, progress: Progress) -> Inspection:
    """Inspect a model, and compare it with the base that it was fine-tuned from."""
    diagnosis = diagnose_head(checkpoint)
    base_head = base is not None and bool(diagnose_head(base).found_keys)
    change = None
    files = _of_files(checkpoint, checkpoint.layout, progress)
    comparable = diagnosis.comparable and not (files["non_finite_keys"] or undeclared_weights(checkpoint))
    difference = zero_head(checkpoint) if comparable else None
    initial = initial_parts(checkpoint) if comparable and difference is None else Initial()
    trunk = diagnose_trunk(checkpoint) if holds_trunk(checkpoint) else TrunkDiagnosis()
    if base is not None and not trunk.missing_keys:
        require_same_trunk_shape(checkpoint, base)
        change = compare_trunks(checkpoint, base, progress)
        if comparable and base_head:
            difference = difference or compare_heads(checkpoint, base, norm_value(checkpoint))
    problems = (*trunk.problems, *_not_finite(files["non_finite_keys"]), *_adapter_problems(checkpoint))
    if initial and difference is not None and difference.kind == "unrelated" and difference.same_norms:
        initial |= {"norms"}
    status = _head_status(diagnosis, problems, base_head, difference, untrained=initial == UNTRAINED)
    if trunk.missing_keys and status in _WITHOUT_HEAD:
        # The weights that are gone come first: the head may be among them.
        status = "damaged"
    unread = problems[0] if problems else diagnosis.describe() if diagnosis.quantised or diagnosis.foreign else None
    found = Inspection(
        **files,
        family=checkpoint.family.name,
        status=status,
        # Without any trace of a head, every key of one is not "missing"; another drafter's keys are not "unexpected".
        head=replace(diagnosis, missing_keys=(), unexpected_keys=()) if status in ("none", "foreign") else diagnosis,
        trunk=trunk,
        trunk_changed=change,
        head_difference=difference,
        problems=problems,
        serves={},
        runs_here="yes" if unread is None else f"no: {unread}",
        note="; ".join(_notes(checkpoint, initial, compared=difference is not None or not comparable)) or None,
    )
    return replace(found, serves=_serving(found, checkpoint), cure=_find_cure(found, checkpoint, base))


def _adapter_problems(checkpoint: Checkpoint) -> tuple[str, ...]:
    beside = (checkpoint.path / ADAPTER_CONFIG_FILE).is_file()
    return (f"{ADAPTER_CONFIG_FILE} beside the model, which transformers applies and engines do not",) if beside else ()


def _head_status(
    diagnosis: HeadDiagnosis,
    problems: Sequence[str],
    base_has_head: bool = False,
    difference: HeadDifference | None = None,
    untrained: bool = False,
) -> Status:
    """Return the status of a head. That it is missing or incomplete comes before other problems of its checkpoint."""
    is_miswired = difference is not None and bool(difference.keys)
    if diagnosis.foreign is not None:
        return "foreign"
    if not diagnosis.found_keys:
        if diagnosis.declared_modules or diagnosis.conflict:
            return "declared_but_missing"
        return "stripped" if base_has_head else "none"
    if not (diagnosis.complete or diagnosis.quantised or is_miswired):
        return "partial"
    if problems:
        return "damaged"
    if untrained:
        return "untrained"
    if is_miswired:
        return "miswired"
    if diagnosis.quantised:
        return "quantised"
    declared = diagnosis.declared_modules == diagnosis.present_modules and diagnosis.conflict is None
    return "healthy" if declared else "undeclared"


def compare_trunks(checkpoint: Checkpoint, base: Checkpoint, progress: Progress) -> TrunkChange:
    changed = 0
    largest = 0.0
    shared = common_tensors(checkpoint, base)
    for key, base_key in progress.track(shared.values(), description="comparing with the base"):
        difference, size, _ = squared_change(
            read_plain_in_blocks(checkpoint, key), read_plain_in_blocks(base, base_key)
        )
        # NaN counts as changed: it differs from everything.
        if difference != 0.0:
            changed += 1
            relative = (difference / size) ** 0.5 if size else 0.0
            largest = max(largest, relative if math.isfinite(relative) else 0.0)
    return TrunkChange(changed / len(shared), largest)


def _notes(checkpoint: Checkpoint, initial: Initial, *, compared: bool) -> Iterator[str]:
    """Yield phrases about an output matrix of fewer tokens, and about what the head's tensors leave open."""
    reduced = list(filter(REDUCED_OUTPUT.fullmatch, checkpoint.tensors))
    if reduced:
        yield (
            f"{first_of(reduced)}: an output matrix of fewer tokens beside the head, with which some engines draft, "
            "and others with the whole lm_head; it stays as it is, and is not grafted"
        )
    if initial in INITIAL_NOTES:
        yield INITIAL_NOTES[initial]
    if not compared:
        yield "the head's wiring was not checked: swapped halves and shifted norms show beside the base's (--base)"


def _serving(found: Inspection, checkpoint: Checkpoint) -> dict[str, str]:
    """Return, per engine, the command that serves the checkpoint with its head, or ``no: REASON``."""
    path = str(checkpoint.path)
    if found.problems:
        reason = f"no: {found.problems[0]}"
    elif found.status == "foreign":
        block = checkpoint.text_config.get(DSPARK_BLOCK)
        return engine_commands(complete(DSPARK), path, block if isinstance(block, int) else SUGGESTED_DEPTH)
    elif checkpoint.family.layer is None:
        return engine_commands(checkpoint.engines, path, SUGGESTED_DEPTH)
    elif found.status != "healthy":
        reason = {
            "untrained": f"no: {NEVER_TRAINED}",
            "miswired": f"no: {found.head_difference}",
            "undeclared": "no: the head is there but config.json does not declare it"
            if found.head.conflict is None
            else f"no: config.json declares {found.head.conflict}, and engines read one or the other",
            "quantised": f"not verified: head quantised with {found.head.method}; the cure gives one in plain floats",
        }.get(found.status, f"no: {found.head.describe()}")
    # ``export --head-only`` writes none of the trunk's layers.
    elif not any(name.startswith("layers.") for name in trunk_tensors(checkpoint)):
        flag = suggestions.draft_model_flag(path, SUGGESTED_DEPTH)
        reason = f"no: holds a head without its trunk; with vLLM serve the trunk and add {flag}"
    else:
        return engine_commands(checkpoint.engines, path, suggested_depth(checkpoint)) | _misread(checkpoint)
    return dict.fromkeys(checkpoint.family.serving, reason)


def suggested_depth(checkpoint: Checkpoint) -> int:
    """Return the drafts a round of a checkpoint's own head that no run has measured."""
    return checkpoint.family.kind.load_parts().suggested_drafts(checkpoint.text_config)


def _misread(checkpoint: Checkpoint) -> dict[str, str]:
    """Return, per engine that reads other tensors than the checkpoint's, or reads them wrongly, why it does not serve.

    vLLM and SGLang read every ``*.safetensors`` where there is no index. llama.cpp's converter reads every
    ``model*.safetensors``, and compares their keys with the index.
    """
    beside = [name for name in unnamed_weights(checkpoint) if "/" not in name and name.endswith(".safetensors")]
    of_model = [name for name in beside if name.startswith("model")]
    reads = "no: also reads {}, which is no part of the checkpoint"
    found = {}
    if beside and checkpoint.index is None:
        found = dict.fromkeys(("vllm", "sglang"), reads.format(", ".join(beside[:3])))
    elif checkpoint.misread_keys:
        found = dict.fromkeys(
            ("vllm", "sglang", "llama.cpp"),
            f"no: reads a copy that the index does not name: {first_of(checkpoint.misread_keys)}",
        )
    if of_model:
        found["llama.cpp"] = reads.format(", ".join(of_model[:3]))
    elif checkpoint.unlisted_keys:
        found["llama.cpp"] = (
            f"no: its converter refuses tensors that the index does not list: {first_of(checkpoint.unlisted_keys)}"
        )
    unmatched = unmatched_by_sglang(checkpoint)
    if layers := unlisted_layers(checkpoint):
        reason = f"no: reads {first_of(layers)} of the head as quantised: {QUANTISATION} lists no exception for it"
        found |= dict.fromkeys(("vllm", "sglang"), reason)
    elif unmatched is not None:
        found["sglang"] = (
            f"no: reads {unmatched} of the head as quantised, and drafts nothing: {QUANTISATION}.ignore names its parts"
        )
    if "llama.cpp" in found:
        found["ollama / lm studio"] = "no: needs llama.cpp's support"
    served = {engine for engine, support in checkpoint.engines.items() if support.supported is not False}
    return {engine: reason for engine, reason in found.items() if engine in served}


def _find_cure(found: Inspection, checkpoint: Checkpoint, base: Checkpoint | None) -> str | None:
    path, status, problems = str(checkpoint.path), found.status, found.problems
    donor = suggestions.named_base(checkpoint.path) or "BASE" if base is None else str(base.path)
    if found.trunk.untied is not None and len(problems) == 1:
        return untie_command(checkpoint.path)
    if status == "untrained":
        at_hand = base is not None and diagnose_head(base).complete and initial_parts(base) != UNTRAINED
        if at_hand:
            return suggestions.graft_command(path, donor)
        # From where the head is, without a probe, which needs a trained one.
        return suggestions.retrain_command(path, path, overrides=["train.max_steps=500"])
    if status == "miswired":
        # The base's head fits the base's trunk; on another trunk it has to be retrained as well.
        moved = found.trunk_changed is not None and found.trunk_changed.share_of_tensors > 0
        return suggestions.retrain_command(path, donor) if moved else suggestions.graft_command(path, donor)
    if problems and problems == _adapter_problems(checkpoint):
        return merge_command(path, path)
    if problems:
        return suggestions.download_command(checkpoint.path, "CHECKPOINT")
    if status in ("declared_but_missing", "stripped", "partial", "quantised"):
        return suggestions.graft_command(path, donor)
    if status == "undeclared" or (not found.stale and status == "healthy" and _misread(checkpoint)):
        return suggestions.command("export", path, "--out", suggestions.grafted_name(path))
    if checkpoint.family.layer is None:
        return suggestions.retrain_command(path, "ASSISTANT")
    if status == "none":
        # Releases of such a family have a head. It was probably dropped: Unsloth drops its count in the config too.
        lost = base is None and not checkpoint.family.attached
        return suggestions.inspect_command(path, donor) if lost else suggestions.train_command(path)
    # Bytes tell that the head was not trained for this trunk, not that it drafts worse.
    return suggestions.probe_command(path, donor) if found.stale else None


def _inspect_mlx(checkpoint: Checkpoint, progress: Progress) -> Inspection:
    """Inspect a checkpoint that MLX alone reads: neither its trunk nor its head is compared."""
    original = suggestions.original_of(checkpoint.path)
    return Inspection(
        **_of_files(checkpoint, None, progress),
        family=checkpoint.family.name,
        status="foreign",
        head=HeadDiagnosis(),
        serves=engine_commands(complete(MLX_ALONE), str(checkpoint.path), SUGGESTED_DEPTH),
        cure=suggestions.download_command(checkpoint.path, original or "ORIGINAL"),
        runs_here="no: in MLX's layout",
        note=f"in MLX's layout ({checkpoint.mlx_sign}), which MLX alone reads: use "
        f"{original or 'the checkpoint'} that it was converted from",
    )


def _inspect_dspark(checkpoint: Checkpoint, progress: Progress) -> Inspection:
    """Inspect a trunk of any family with a DSpark drafter under a prefix of its own: neither is compared."""
    keys = tuple(key for key in checkpoint.tensors if key.startswith(DSPARK_PREFIX))
    head = HeadDiagnosis(found_keys=keys, foreign=foreign_drafter(checkpoint, ()))
    found = Inspection(
        **_of_files(checkpoint, None, progress),
        family=str(checkpoint.text_config.get("model_type")),
        status="foreign",
        head=head,
        serves={},
        runs_here=f"no: {head.describe()}",
    )
    return replace(found, serves=_serving(found, checkpoint))


def _inspect_draft(draft: DraftModel, trunk: Checkpoint | None, progress: Progress) -> Inspection:
    """Inspect a draft model. With ``trunk``, check that the two fit and name the engines that serve both.

    A damaged draft model gets the damage as the reason of every engine.
    """
    checkpoint = draft.checkpoint
    diagnosis = diagnose_draft(draft)
    problem = values_problem(draft) if diagnosis.complete else None
    if trunk is not None and diagnosis.complete and problem is None and draft.unsupported is None:
        draft_plan(draft, trunk)
    parts = draft.kind.load_parts()
    of_trunk = parts.only_trunk if trunk is None else trunk.family
    if of_trunk is None:
        serves = dict.fromkeys(parts.engines(""), "depends on the trunk: inspect it again with --base TRUNK")
    else:
        depth = parts.suggested_drafts(draft.config)
        serves = engine_commands(draft.family(of_trunk).serving, str(checkpoint.path), depth)
    if draft.borrows_output and draft.format.is_in_gguf:
        serves |= {"llama.cpp": "not verified: the draft has no lm_head of its own"}
        if draft.config.get("draft_vocab_size") is not None:
            serves |= {"sglang": "no: uses the trunk's lm_head only without draft_vocab_size in config.json"}
    files = _of_files(checkpoint, None, progress)
    problems = (*filter(None, [problem]), *_not_finite(files["non_finite_keys"]))
    whole = diagnosis.complete and not problems
    reason = problems[0] if diagnosis.complete and problems else diagnosis.describe()
    refusal = problems[0] if problems else draft.unsupported
    return Inspection(
        **files,
        family=draft.kind.name,
        status="partial" if not diagnosis.complete else "damaged" if problems else "healthy",
        head=diagnosis,
        problems=problems,
        serves=serves if whole else dict.fromkeys(serves, f"no: {reason}"),
        cure=None if whole else suggestions.download_command(checkpoint.path, "DRAFTER"),
        runs_here=suggestions.command("generate", "TRUNK", "--head", checkpoint.path, "--prompt", "Hello")
        if refusal is None
        else f"no: {refusal}",
        note=f"{draft.title} for a trunk of hidden size {draft.config.get(draft.format.trunk_size)}"
        f"{parts.details(draft.config) if diagnosis.complete else ''}, not a checkpoint with a head; TRUNK is a "
        "placeholder for its trunk",
    )


def _inspect_gguf(file: Path) -> Inspection:
    """Inspect the head in a GGUF file, or a draft model; of the trunk nothing is read."""
    model = open_gguf(file)
    problems = problems_of_head(model)
    head = HeadDiagnosis(model.declared_modules, model.present_modules, tuple(model.head), missing_of_head(model))
    status: Status = "healthy" if model.arch == DRAFT_ARCH else _head_status(head, problems)
    cure = graft_gguf_command(file) if model.arch in RECORDS else suggestions.train_command(str(file))
    holds_trunk = model.holds_trunk and model.arch != DRAFT_ARCH
    others = stored_types(one for name, one in model.tensors.items() if name not in model.head)
    note = f"the trunk is {others}" if holds_trunk else f"a head in a file of its own, with {others} of its trunk"
    note += f"; the head is {stored_types(model.head.values())}" if model.head else ""
    return Inspection(
        checkpoint=str(file),
        family=model.arch,
        status=status,
        head=head,
        problems=problems,
        serves={"llama.cpp": _served_gguf(model, file, status, problems)},
        cure=None if status == "healthy" else cure,
        runs_here="dequantised, where transformers reads the architecture from GGUF",
        note=note,
    )


def _served_gguf(model: GgufModel, file: Path, status: Status, problems: Sequence[str]) -> str:
    """Return the command with which llama.cpp drafts with the head, or why it does not."""
    name = shlex.quote(str(file))
    kind = "draft-eagle3" if model.arch == DRAFT_ARCH else "draft-mtp"
    spec = f"--spec-type {kind} --spec-draft-n-max {SUGGESTED_DEPTH}"
    if model.arch not in (DRAFT_ARCH, *RECORDS):
        return f"no: llama.cpp has no graph for a head of {model.arch}"
    if status == "healthy":
        alone = model.arch == DRAFT_ARCH or not model.holds_trunk
        return f"llama-server -m {f'TRUNK.gguf -md {name}' if alone else name} {spec}"
    return f"no: {problems[0] if problems else 'no head'}"
