"""Heads in GGUF files: what is wrong with one, and put one into the file of a trunk as it is served."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import ReaderTensor
from rich.progress import Progress

from mtp_train.checkpoints.export import LinkMode
from mtp_train.checkpoints.files import Checkpoint, is_gguf
from mtp_train.checkpoints.gguf.architectures import GGUF_HEADS, gguf_head_for
from mtp_train.checkpoints.gguf.model_file import (
    GgufModel,
    block_of,
    dequantised_tensor,
    open_gguf,
    torch_shape,
    with_modules,
    write_embedded,
)
from mtp_train.checkpoints.gguf.record import NUM_MODULES
from mtp_train.checkpoints.gguf.sidecar import GgufKind, head_tensors
from mtp_train.checkpoints.keymap import REDUCED_OUTPUT
from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.native import exact_tensor, native_head_of
from mtp_train.checkpoints.suggestions import command
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.checkpoints.writing import PendingTensor, refuse_existing
from mtp_train.errors import CheckpointError, first_of
from mtp_train.families import FAMILIES
from mtp_train.heads.diagnose import diagnose_head, text_config_of
from mtp_train.heads.initial import require_trained_head

_ALWAYS = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")
"""What a module has in every architecture that names it so."""
_BLOCK = re.compile(r"^blk\.\d+\.")
_BY_TOKEN = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
"""Matrices of a module with a row for every token."""
RECORDS = {record.arch: record for record in GGUF_HEADS.values()}
_REPEATING = {
    GGUF_HEADS[one].arch for family in FAMILIES if family.keys.shared for one in family.model_types if one in GGUF_HEADS
}
"""Architectures whose heads repeat their trunk's embedding and lm_head; llama.cpp reads the trunk's if they do not."""


def graft_gguf_command(file: Path) -> str:
    """Return the command that puts a base's head into a file; BASE is to be replaced."""
    return command("graft", file, "--from", "BASE", "--out", f"{file.name.removesuffix('.gguf')}-mtp.gguf")


def stored_types(tensors: Iterable[ReaderTensor]) -> str:
    """Return the types of tensors, the most frequent first."""
    return ", ".join(
        f"{name} ({count})" for name, count in Counter(one.tensor_type.name for one in tensors).most_common()
    )


def missing_of_head(model: GgufModel) -> tuple[str, ...]:
    """Return the names that every module of the architecture has and a module of this head lacks."""
    record = RECORDS.get(model.arch)
    wanted = [name for name in _ALWAYS if record is not None and name in record.names.values()]
    blocks = sorted({block_of(name) for name in model.head})
    named = (f"blk.{block}.{name}" for block in blocks for name in wanted)
    return tuple(name for name in named if name not in model.head)


def problems_of_head(model: GgufModel) -> tuple[str, ...]:
    """Return what is wrong with a head, a phrase each: missing names, NaN, matrices of zeros, its vocabulary."""
    missing = missing_of_head(model)
    problems = [f"missing: {', '.join(missing)}"] if missing else []
    if model.arch in RECORDS:
        problems += _misfits(model, {name: torch_shape(one) for name, one in model.head.items()})
    for name, one in model.head.items():
        values = gguf.quants.dequantize(one.data, one.tensor_type)
        if not np.isfinite(values).all():
            problems.append(f"NaN or infinite values: {name}")
        elif name.endswith("nextn.eh_proj.weight") and not values.any():
            problems.append(f"all zeros: {name}")
    return tuple(problems)


def _misfits(trunk: GgufModel, head: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return which tensors of a head, given with their shapes, llama.cpp does not load beside a trunk, a phrase each.

    It expects the shapes of the trunk's blocks, and all tokens of the embedding.
    """
    own = [
        (_BLOCK.sub("", key), _sizes(torch_shape(one))) for key, one in trunk.tensors.items() if key not in trunk.head
    ]
    own += [(name, sizes) for key, sizes in own if key == "token_embd.weight" for name in _BY_TOKEN]
    known = dict(own)
    problems = []
    for name, shape in head.items():
        key = _BLOCK.sub("", name)
        sizes = _sizes(shape)
        if key in known and (key, sizes) not in own:
            problems.append(f"{name} is {list(sizes)}, in the trunk {list(known[key])}")
    return problems


def _sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Leave out sizes of 1: converters write the gate of a shared expert as a vector or as a row."""
    return tuple(size for size in shape if size != 1)


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
    head, fields, modules = _of_gguf(trunk, base, kind) if is_gguf(base) else _of_checkpoint(trunk, base, progress)
    named = {
        (one.name, torch_shape(one)) if isinstance(one, ReaderTensor) else (one.key, one.shape): one for one in head
    }
    if trunk.arch in _REPEATING:
        # They are the embedding and the lm_head of another trunk.
        named = {key: one for key, one in named.items() if not key[0].endswith(_BY_TOKEN)}
    if misfits := _misfits(trunk, dict(named.keys())):
        raise CheckpointError(
            f"{base}: {misfits[0]}; expected a head for {fine_tune}. Name the base that it was fine-tuned from."
        )
    new = [one for (name, _), one in named.items() if name not in trunk.tensors or name in trunk.head]
    changed = with_modules(trunk, fields, modules)
    return write_embedded(trunk, new, changed, out, kind=kind or "q8_0", link=link, progress=progress)


_Head = tuple[Sequence[PendingTensor | ReaderTensor], Mapping[str, Any], int]
"""Tensors, fields of which the lists reach over the head's blocks, and the number of modules."""


def _of_checkpoint(trunk: GgufModel, base: str, progress: Progress) -> _Head:
    donor = open_location(base)
    diagnosis = diagnose_head(donor)
    if not diagnosis.complete:
        raise CheckpointError(f"{base}: {diagnosis.describe()}; expected a checkpoint with a complete head.")
    record = gguf_head_for(donor)
    config = config_of(donor)
    _require_fit(trunk, base, record.arch, int(config["num_hidden_layers"]), int(config["hidden_size"]))
    require_finite_checkpoint(donor, progress)
    require_trained_head(donor)
    if reduced := list(filter(REDUCED_OUTPUT.fullmatch, donor.tensors)):
        progress.console.print(
            f"Left out, as llama.cpp reads a reduced draft vocabulary of EAGLE-3 only: {first_of(reduced)}.",
        )
    tensors = head_tensors(donor, native_head_of(donor, donor.layout, take=exact_tensor), record, config)
    config |= {NUM_MODULES: diagnosis.present_modules}
    return tensors, {name: field(config) for name, field in record.fields.items()}, diagnosis.present_modules


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


def _of_gguf(trunk: GgufModel, base: str, kind: GgufKind | None) -> _Head:
    donor = open_gguf(Path(base))
    problems = problems_of_head(donor) if donor.head else ["no head"]
    if problems:
        raise CheckpointError(
            f"{base}: {problems[0]}; expected a GGUF file with a complete head. Use the base's checkpoint."
        )
    _require_fit(trunk, base, donor.arch, donor.num_layers, donor.value("embedding_length"))
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


def _require_fit(trunk: GgufModel, base: str, arch: str, num_layers: int, channels: int) -> None:
    own_channels = trunk.value("embedding_length")
    if not trunk.holds_trunk:
        raise CheckpointError(f"{trunk.files[0]}: holds a head alone; expected the GGUF file of a trunk.")
    if (trunk.arch, trunk.num_layers, own_channels) != (arch, num_layers, channels):
        raise CheckpointError(
            f"{base}: its head is for {arch} with {num_layers} layers of {channels} channels; expected {trunk.arch} "
            f"with {trunk.num_layers} of {own_channels}, as {trunk.files[0]} has. Name the base that it was "
            "fine-tuned from."
        )
