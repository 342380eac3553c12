"""``inspect``, ``graft`` and ``export`` on GGUF files: a head for the trunk as it is served, in the trunk's file."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from gguf import ReaderTensor
from rich.progress import Progress

from mtp_train.checkpoints.export import LinkMode
from mtp_train.checkpoints.files import Checkpoint, is_gguf
from mtp_train.checkpoints.gguf.architectures import GGUF_HEADS, gguf_head_for
from mtp_train.checkpoints.gguf.model_file import (
    DRAFT_ARCH,
    GgufModel,
    dequantised_tensor,
    open_gguf,
    torch_shape,
    with_modules,
    write_embedded,
    write_head_alone,
)
from mtp_train.checkpoints.gguf.record import NUM_MODULES
from mtp_train.checkpoints.gguf.sidecar import GgufKind, head_tensors
from mtp_train.checkpoints.keymap import REDUCED_OUTPUT
from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.native import exact_tensor, native_head_of
from mtp_train.checkpoints.suggestions import train_command
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.checkpoints.writing import PendingTensor, refuse_existing
from mtp_train.errors import CheckpointError
from mtp_train.heads.diagnose import diagnose_head, layout_of, text_config_of
from mtp_train.runs.display import Shown
from mtp_train.trunk.whole import first_of

GgufStatus = Literal["healthy", "declared_but_missing", "undeclared", "partial", "damaged", "none"]
_ALWAYS = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")
"""What a module has in every architecture that names it so."""
_BY_TOKEN = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
"""Matrices of a module with a row for every token."""
_RECORDS = {record.arch: record for record in GGUF_HEADS.values()}


@dataclass(frozen=True)
class GgufInspection(Shown):
    """State of the head in a GGUF file, as :func:`mtp_train.inspect` returns it."""

    file: str
    architecture: str
    quantisation: str
    """Types of the trunk's tensors, the most frequent first."""
    head_quantisation: str | None
    """The same of the head's; None without one."""
    declared_modules: int
    present_modules: int
    status: GgufStatus
    """As of a checkpoint; ``damaged`` is a head with NaN, or all zeros."""
    problems: tuple[str, ...]
    holds_trunk: bool
    """False for a head in a file of its own."""
    heads_beside: tuple[str, ...]
    """Other files in the directory that hold a head of this architecture without a trunk."""
    serves: Mapping[str, str]
    cure: str | None

    def _title(self) -> str:
        return f"{self.file}: {self.status}" + ("" if self.holds_trunk else ", a head in a file of its own")

    def _rows(self) -> list[tuple[str, str]]:
        modules = f"modules declared {self.declared_modules}, present {self.present_modules}"
        beside = ", ".join(self.heads_beside)
        both = f"{beside} beside a head in the file: pass one of them, -md for the other file, never both"
        return [
            ("architecture", f"{self.architecture}; {modules}"),
            ("trunk", self.quantisation),
            *([("head", self.head_quantisation)] if self.head_quantisation else []),
            *(("problem", one) for one in self.problems),
            *([("warning", both)] if self.heads_beside and self.present_modules and self.holds_trunk else []),
            *self.serves.items(),
            ("cure", self.cure or "nothing to cure"),
        ]


def inspect_gguf(file: Path) -> GgufInspection:
    model = open_gguf(file)
    beside = heads_beside(model)
    problems = tuple(_head_problems(model))
    status = _status(model, problems)
    cure = graft_gguf_command(file) if model.arch in _RECORDS else train_command(str(file))
    return GgufInspection(
        file=str(file),
        architecture=model.arch,
        quantisation=_types(one for name, one in model.tensors.items() if name not in model.head),
        head_quantisation=_types(model.head.values()) if model.head else None,
        declared_modules=model.declared_modules,
        present_modules=model.present_modules,
        status=status,
        problems=problems,
        holds_trunk=model.holds_trunk,
        heads_beside=beside,
        serves={"llama.cpp": _served(model, file, status, problems, beside)},
        cure=None if status == "healthy" else cure,
    )


def _served(model: GgufModel, file: Path, status: GgufStatus, problems: Sequence[str], beside: Sequence[str]) -> str:
    """Return the command that drafts with the head, or why llama.cpp does not."""
    name, spec = shlex.quote(str(file)), "--spec-type draft-mtp --spec-draft-n-max 3"
    if model.arch == DRAFT_ARCH:
        return f"llama-server -m TRUNK.gguf -md {name} --spec-type draft-eagle3 --spec-draft-n-max 3"
    if model.arch not in _RECORDS:
        return f"no: llama.cpp has no graph for a head of {model.arch}"
    if status == "healthy":
        return (
            f"llama-server -m {name} {spec}" if model.holds_trunk else f"llama-server -m TRUNK.gguf -md {name} {spec}"
        )
    if status == "none" and beside:
        return f"llama-server -m {name} -md {shlex.quote(str(file.with_name(beside[0])))} {spec}"
    return f"no: {problems[0] if problems else 'no head'}"


def graft_gguf_command(file: Path) -> str:
    """Return the command that puts a base's head into a file; BASE is to be replaced."""
    out = shlex.quote(f"{file.name.removesuffix('.gguf')}-mtp.gguf")
    return f"mtp-train graft {shlex.quote(str(file))} --from BASE --out {out}"


def _types(tensors: Any) -> str:
    counts = Counter(one.tensor_type.name for one in tensors)
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common())


def heads_beside(model: GgufModel) -> tuple[str, ...]:
    """Return the other GGUF files of a model's directory that hold a head of its architecture alone."""
    others = (path for path in sorted(model.files[0].parent.glob("*.gguf")) if path not in model.files)
    return tuple(path.name for path in others if "-of-" not in path.name and _is_head_for(model, path))


def _is_head_for(model: GgufModel, file: Path) -> bool:
    try:
        other = open_gguf(file)
        return other.arch == model.arch and other.present_modules > 0 and not other.holds_trunk
    # A neighbour that is broken, or of another kind, is nobody's head; names of its blocks may have no number.
    except (CheckpointError, ValueError, TypeError):
        return False


def _head_problems(model: GgufModel) -> list[str]:
    """Return what is wrong with a head: names that every module has, its vocabulary, NaN, and matrices of zeros."""
    record, missing, embedding = _RECORDS.get(model.arch), [], model.tensors.get("token_embd.weight")
    wanted = {name for name in _ALWAYS if record is not None and name in record.names.values()}
    for block in sorted({int(name.split(".")[1]) for name in model.head}):
        missing += [f"blk.{block}.{name}" for name in sorted(wanted) if f"blk.{block}.{name}" not in model.head]
    problems = [f"missing: {', '.join(missing)}"] if missing else []
    for name, one in model.head.items():
        values = gguf.quants.dequantize(one.data, one.tensor_type)
        if not np.isfinite(values).all():
            problems.append(f"NaN or infinite values: {name}")
        elif name.endswith("nextn.eh_proj.weight") and not values.any():
            problems.append(f"all zeros: {name}")
        elif name.endswith(_BY_TOKEN) and embedding is not None and len(values) != len(embedding.data):
            of_all = f"{len(values)} of {len(embedding.data)} tokens"
            problems.append(f"reduced draft vocabulary, which llama.cpp reads of EAGLE-3 only: {name}, {of_all}")
    return problems


def _status(model: GgufModel, problems: Sequence[str]) -> GgufStatus:
    if model.arch == DRAFT_ARCH:
        return "healthy"
    if not model.head:
        return "declared_but_missing" if model.declared_modules else "none"
    if problems:
        return "partial" if problems[0].startswith("missing") else "damaged"
    return "healthy" if model.declared_modules == model.present_modules else "undeclared"


def graft_gguf(
    fine_tune: Path, base: str, out: Path, kind: GgufKind | None, link: LinkMode, progress: Progress
) -> tuple[Path, ...]:
    """Write a GGUF file with the head of a base in it, in as many splits as the trunk; return their paths.

    The trunk's tensors keep their bytes.
    """
    trunk = open_gguf(fine_tune)
    refuse_existing(out, what="the GGUF file")
    if trunk.head.keys() - {one.name for one in trunk.readers[0].tensors}:
        raise CheckpointError(
            f"{fine_tune}: has a head in a split that is not the first; expected one without a head there. Merge the "
            "splits with llama-gguf-split --merge."
        )
    head, fields, modules = (_of_gguf if is_gguf(base) else _of_checkpoint)(trunk, base, kind, progress)
    changed = with_modules(trunk, fields, modules)
    names = [one.name if isinstance(one, ReaderTensor) else one.key for one in head]
    new = [one for one, name in zip(head, names, strict=True) if name not in trunk.tensors or name in trunk.head]
    return write_embedded(trunk, new, changed, out, kind=kind or "q8_0", link=link, progress=progress)


_Head = tuple[Sequence[PendingTensor | ReaderTensor], Mapping[str, Any], int]
"""Tensors, fields of which the lists reach over the head's blocks, and the number of modules."""


def _of_checkpoint(trunk: GgufModel, base: str, kind: GgufKind | None, progress: Progress) -> _Head:
    donor = open_location(base)
    diagnosis = diagnose_head(donor)
    if not diagnosis.complete:
        raise CheckpointError(f"{base}: {diagnosis.describe()}; expected a checkpoint with a complete head.")
    record, config = gguf_head_for(donor.family, str(donor.text_config.get("model_type")), where=base), config_of(donor)
    shape = {"block_count": int(config["num_hidden_layers"]), "embedding_length": int(config["hidden_size"])}
    _require_fit(trunk, base, record.arch, shape)
    require_finite_checkpoint(donor, progress)
    if reduced := [key for key in donor.tensors if REDUCED_OUTPUT.fullmatch(key)]:
        told = f"Left out, as llama.cpp reads a reduced draft vocabulary of EAGLE-3 only: {first_of(reduced)}."
        progress.console.print(told, highlight=False)
    layout = layout_of(donor)
    tensors = head_tensors(donor, layout, native_head_of(donor, layout, layout, take=exact_tensor), record, config)
    modules = diagnosis.present_modules
    found = {name: field({**config, NUM_MODULES: modules}) for name, field in record.fields.items()}
    return tensors, found, modules


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the text config that the fields of a GGUF file are read from, with defaults filled in.

    The raw config has fields that transformers drops. A config that lists its layers one by one has no layer count.
    """
    text_config = text_config_of(checkpoint)
    return {
        **checkpoint.text_config,
        **text_config.to_dict(),
        "num_hidden_layers": text_config.num_hidden_layers,
    }


def _of_gguf(trunk: GgufModel, base: str, kind: GgufKind | None, progress: Progress) -> _Head:
    donor = open_gguf(Path(base))
    problems = _head_problems(donor)
    if not donor.head or problems:
        found = problems[0] if problems else "no head"
        raise CheckpointError(f"{base}: {found}; expected a GGUF file with a complete head.")
    shape = {"block_count": donor.num_layers, "embedding_length": donor.value("embedding_length")}
    _require_fit(trunk, base, donor.arch, shape)
    prefix = f"{donor.arch}."
    fields = {
        name.removeprefix(prefix): field.contents()
        for name, field in donor.readers[0].fields.items()
        if name.startswith(prefix)
    }
    tensors = list(donor.head.values())
    return (tensors if kind is None else [_decoded(one) for one in tensors]), fields, donor.present_modules


def _decoded(one: ReaderTensor) -> PendingTensor:
    return PendingTensor(one.name, "F32", torch_shape(one), lambda: [dequantised_tensor(one)])


def _require_fit(trunk: GgufModel, base: str, arch: str, shape: Mapping[str, int]) -> None:
    mine = {"block_count": trunk.num_layers, "embedding_length": trunk.value("embedding_length")}
    if not trunk.holds_trunk:
        raise CheckpointError(f"{trunk.files[0]}: holds a head alone; expected the GGUF file of a trunk.")
    if trunk.arch != arch or mine != shape:
        raise CheckpointError(
            f"{base}: its head is for {arch} with {shape['block_count']} layers of {shape['embedding_length']} "
            f"channels; expected {trunk.arch} with {mine['block_count']} of {mine['embedding_length']}, as "
            f"{trunk.files[0]} has. Name the base that it was fine-tuned from."
        )


def export_gguf_head(file: Path, out: Path, progress: Progress) -> Path:
    """Write the head of a GGUF file as a file of its own, ``out/mtp-NAME.gguf``; return its path."""
    model = open_gguf(file)
    refuse_existing(out, what="the GGUF file")
    if not model.head:
        raise CheckpointError(
            f"{file}: no head; expected a GGUF file with one. Put one in with '{graft_gguf_command(file)}'."
        )
    target = out / f"mtp-{file.name}"
    write_head_alone(model, target, progress)
    return target
