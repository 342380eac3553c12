"""Read GGUF files of whole models: write one with a head in it or a draft model beside one, dequantise one.

llama.cpp stores the modules of a head as blocks behind the trunk's: ``block_count`` counts both,
``nextn_predict_layers`` the modules. Lists with a value for each block are that long.
"""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Stored, GGUFReader, GGUFValueType, ReaderField, ReaderTensor
from huggingface_hub import constants
from rich.progress import Progress
from torch import Tensor

from mtp_train.checkpoints.draft_checkpoint import CHOSEN_KEY, OFFSETS_KEY, OUTPUT_KEY
from mtp_train.checkpoints.export import LinkMode, add_in_place, place_file
from mtp_train.checkpoints.files import SAFETENSORS_DTYPES, Checkpoint, open_checkpoint
from mtp_train.checkpoints.gguf.architectures import gguf_head_for
from mtp_train.checkpoints.gguf.record import (
    BEFORE_FFN,
    EMBEDDING_NAME,
    FIELDS,
    LM_HEAD_NAME,
    NAMES,
    Value,
    flag,
    whole,
)
from mtp_train.checkpoints.gguf.sidecar import GgufKind, add_value, paired, write_tensors
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.native import NativeHead, stored_tensor
from mtp_train.checkpoints.writing import PendingTensor, full_disk_is_named, held_tensor, new_directory
from mtp_train.errors import CheckpointError, UnsupportedModelError, one_line
from mtp_train.families import RawConfig

SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""The end of the name of a split."""
BLOCK_COUNT = "block_count"
NUM_MODULES_KEY = "nextn_predict_layers"
_SHARED = ("token_embd.weight", "output_norm.weight", "output.weight")
"""The trunk's tensors that llama.cpp's loader requires beside a head in a file of its own."""


@dataclass(frozen=True)
class GgufModel:
    """A model in a GGUF file, or in the splits of one; the weights stay on disk.

    Attributes:
        files: The file, or its splits in order; the first has the metadata.
        tensors: Name to tensor, in the order of the files.
    """

    files: tuple[Path, ...]
    readers: tuple[GGUFReader, ...]
    tensors: Mapping[str, ReaderTensor]

    def value(self, name: str) -> Any:
        """Return a metadata field of the architecture, without its prefix; None where there is none."""
        field = self.readers[0].get_field(f"{self.arch}.{name}")
        return None if field is None else field.contents()

    @cached_property
    def arch(self) -> str:
        """llama.cpp's name of the architecture."""
        field = self.readers[0].get_field("general.architecture")
        return "" if field is None else str(field.contents())

    @property
    def declared_modules(self) -> int:
        """Modules of a head that the metadata declares."""
        return int(self.value(NUM_MODULES_KEY) or 0)

    @cached_property
    def num_layers(self) -> int:
        """Blocks of the trunk."""
        return int(self.value(BLOCK_COUNT) or 0) - self.declared_modules

    @property
    def holds_trunk(self) -> bool:
        """Whether this is more than a head in a file of its own."""
        return any(name.startswith("blk.0.") for name in self.tensors)

    @cached_property
    def head(self) -> dict[str, ReaderTensor]:
        """The tensors of the head's blocks."""
        return {name: one for name, one in self.tensors.items() if block_of(name) >= self.num_layers}

    @property
    def present_modules(self) -> int:
        """Blocks of a head that have tensors."""
        return len(set(map(block_of, self.head)))


def block_of(name: str) -> int:
    """Return the block of a tensor; -1 for one outside of the blocks."""
    return int(name.split(".")[1]) if name.startswith("blk.") else -1


def open_gguf(path: Path) -> GgufModel:
    """Open a GGUF file; any split of a model opens the whole.

    Raises:
        CheckpointError: The file or a split is missing, or is no GGUF file.
    """
    split = SPLIT.search(path.name)
    count = int(split[2]) if split else 1
    files = tuple(split_path(path, number, count) for number in range(count))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {', '.join(missing[:3])} not found; expected a GGUF file with all of its splits. Download them "
            "into one directory."
        )
    try:
        readers = tuple(GGUFReader(file) for file in files)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"{path}: cannot be read as GGUF ({one_line(error):.120}); expected a complete file of GGUF "
            "version 2 or 3. Download it again."
        ) from error
    return GgufModel(files, readers, {one.name: one for reader in readers for one in reader.tensors})


def split_path(path: Path, number: int, count: int) -> Path:
    """Return the path of a split, named after any of the splits or after the whole."""
    stem = SPLIT.sub("", path.name).removesuffix(".gguf")
    return path if count == 1 else path.with_name(f"{stem}-{number + 1:05}-of-{count:05}.gguf")


def with_modules(trunk: GgufModel, donor: Mapping[str, Value], num_modules: int) -> dict[str, Value]:
    """Return the fields that change where a head joins a trunk, named without their prefix.

    Args:
        donor: Fields of the model that the head is from, of which the lists reach over the head's blocks.
    """
    changed: dict[str, Value] = {BLOCK_COUNT: trunk.num_layers + num_modules, NUM_MODULES_KEY: num_modules}
    for name, theirs in donor.items():
        if not isinstance(theirs, list) or len(theirs) <= trunk.num_layers or name == "rope.dimension_sections":
            continue
        mine = trunk.value(name)
        if mine in (None, []):
            mine = theirs
        # A number that holds for all layers may be a list where the head's differs.
        own = mine if isinstance(mine, list) else [mine] * trunk.num_layers
        changed[name] = [*own[: trunk.num_layers], *theirs[trunk.num_layers :]]
    return changed


def write_embedded(
    trunk: GgufModel,
    head: Sequence[PendingTensor | ReaderTensor],
    changed: Mapping[str, Value],
    out: Path,
    *,
    kind: GgufKind,
    link: LinkMode,
    progress: Progress,
) -> tuple[Path, ...]:
    """Write a trunk with a head to a new file, or to as many splits; return their paths.

    The trunk's tensors keep their bytes, its splits but the first their files.

    Args:
        trunk: The model; tensors of an old head are left out.
        head: The head's tensors: encoded as ``kind``, or copied as another file has them.
        changed: Fields that change, without the architecture's prefix.
        out: The new file; splits are named after it.
    """
    targets = [split_path(out, number, len(trunk.files)) for number in range(len(trunk.files))]
    kept = [one for one in trunk.readers[0].tensors if block_of(one.name) < trunk.num_layers]
    with _new_files(targets) as written:
        _write(trunk, [*kept, *head], changed, written[0], kind, progress)
        for source, target in zip(trunk.files[1:], written[1:], strict=True):
            place_file(source, target, link)
    return tuple(targets)


def write_head_alone(model: GgufModel, out: Path, progress: Progress) -> None:
    """Write a model's head as a file of its own, with the trunk's tensors that the loader requires, bytes unchanged."""
    tensors = [*(model.tensors[name] for name in _SHARED if name in model.tensors), *model.head.values()]
    with _new_files([out]) as (written,):
        _write(replace(model, readers=model.readers[:1]), tensors, {}, written, "f16", progress)


@contextmanager
def _new_files(targets: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield paths to write, and rename the files to the targets when the block succeeds."""
    first = targets[0]
    first.parent.mkdir(parents=True, exist_ok=True)
    with (
        full_disk_is_named(first, what="the GGUF file"),
        tempfile.TemporaryDirectory(dir=first.parent, prefix=f".{first.stem}-") as directory,
    ):
        written = [Path(directory) / target.name for target in targets]
        yield written
        for one, target in zip(written, targets, strict=True):
            one.rename(target)


def _write(
    model: GgufModel,
    tensors: Sequence[PendingTensor | ReaderTensor],
    changed: Mapping[str, Value],
    path: Path,
    kind: GgufKind,
    progress: Progress,
) -> None:
    """Write a file with a model's metadata, ``changed``, and these tensors, those of a file as they are."""
    writer = _CopyWriter(path, model.arch)
    first, *others = model.readers
    writer.data_alignment = first.alignment
    values = {f"{model.arch}.{name}": value for name, value in changed.items()}
    if others:
        values["split.tensors.count"] = sum(len(reader.tensors) for reader in others) + len(tensors)
    of_file = ("GGUF.", "general.architecture") if others else ("GGUF.", "general.architecture", "split.")
    for name, field in first.fields.items():
        if not name.startswith(of_file):
            copy_field(writer, field, values.pop(name, None))
    for name, value in values.items():
        add_value(writer, name, value)
    write_tensors(writer, tensors, kind, progress)


def copy_field(writer: gguf.GGUFWriter, field: ReaderField, value: Value = None) -> None:
    """Write a field of another file; a new value keeps its type, so that a loader that read it reads it still."""
    kind = GGUFValueType.ARRAY if isinstance(value, list) else field.types[0]
    # The reader takes the type of an array's entries from the first one.
    item = GGUFValueType(int(field.parts[3][0])) if field.types == [GGUFValueType.ARRAY] else field.types[-1]
    writer.add_key_value(field.name, field.contents() if value is None else value, kind, sub_type=item)


class _CopyWriter(gguf.GGUFWriter):
    """A writer that takes empty arrays, which files have and ``GGUFWriter`` refuses."""

    def _pack_val(self, *value: Any, **types: Any) -> bytes:
        if value[1] is GGUFValueType.ARRAY and len(value[0]) == 0:
            return self._pack("I", value[1]) + self._pack("I", types["sub_type"]) + self._pack("Q", 0)
        return super()._pack_val(*value, **types)


def torch_shape(stored: ReaderTensor) -> tuple[int, ...]:
    """Return the shape that torch would give a tensor."""
    return tuple(stored.shape[::-1].tolist())


def dequantised_tensor(stored: ReaderTensor) -> Tensor:
    """Return the values of a tensor, in fp32."""
    return torch.tensor(gguf.quants.dequantize(stored.data, stored.tensor_type)).reshape(torch_shape(stored))


logger = logging.getLogger(__name__)
_EXACT = {Stored.F32, Stored.F16}
_TRUNK_PREFIX = "model."
"""Of the keys of a text model that transformers saves."""


def dequantised(file: Path) -> Path:
    """Return the directory of a checkpoint with the dequantised weights of a GGUF file, written by the first call.

    transformers reads the trunk, its config and its tokenizer. Weights become bf16, or fp32 if none is quantised. The
    directory lies in the hub's cache under a name that follows from the file's path, size and time.
    """
    model = open_gguf(file)
    stats = [(str(one.resolve()), one.stat().st_size, one.stat().st_mtime_ns) for one in model.files]
    # Copies of earlier versions, whose values were rounded more than once, have other names.
    digest = hashlib.sha256(f"rounded once {stats}".encode()).hexdigest()[:12]
    target = Path(constants.HF_HOME) / "mtp-train" / f"{file.stem}-{digest}"
    if not target.is_dir():
        types = {one.tensor_type for one in model.tensors.values()}
        dtype = torch.float32 if types <= _EXACT else torch.bfloat16
        logger.warning("%s: dequantising to %s in %s", file, str(dtype).removeprefix("torch."), target)
        _write_checkpoint(model, target, dtype)
    return target


def gguf_tokenizer(file: Path) -> Any:
    """Return the tokenizer of a GGUF file."""
    from transformers import AutoTokenizer

    return _read(open_gguf(file), AutoTokenizer)


def _read(model: GgufModel, reader: Any, **options: Any) -> Any:
    first = model.files[0]
    try:
        return reader.from_pretrained(first.parent, gguf_file=first.name, **options)
    except (ValueError, NotImplementedError, KeyError) as error:
        raise UnsupportedModelError(
            f"{first}: transformers does not read the architecture {model.arch} from GGUF "
            f"({one_line(error):.120}); expected one that it does, as llama, qwen3 or, from 5.23, "
            "qwen35. Use the safetensors checkpoint; mtp-train inspect and graft work with this file."
        ) from error


def _write_checkpoint(model: GgufModel, target: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mtp_train.upstream.transformers_private import unpacking_gguf_in_fp32

    with new_directory(target, what="the dequantised checkpoint") as directory:
        tokenizer = _read(model, AutoTokenizer)
        with unpacking_gguf_in_fp32():
            trunk = _read(model, AutoModelForCausalLM, dtype=dtype)
        # transformers keeps the file's quantisation in the config, and then refuses to save.
        trunk.config.__dict__.pop("quantization_config", None)
        trunk.is_quantized = False
        trunk.hf_quantizer = None
        trunk.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        if model.head and model.declared_modules:
            _add_head(model, directory, dtype)


def _add_head(model: GgufModel, directory: Path, dtype: torch.dtype) -> None:
    trunk = open_checkpoint(directory)
    record = gguf_head_for(trunk)
    layout = HeadLayout(trunk.family, _TRUNK_PREFIX, model.num_layers)
    parameters = {name: ours for ours, name in record.names.items() if isinstance(name, str)}
    tensors = []
    for name, stored in model.head.items():
        _, block, rest = name.split(".", 2)
        if rest not in parameters and rest in (EMBEDDING_NAME, LM_HEAD_NAME):
            # A copy of the trunk's.
            continue
        ours = f"blocks.{int(block) - model.num_layers}.{parameters.get(rest)}"
        keys = [key for key, _ in layout.split(ours, torch.empty(torch_shape(stored), device="meta"))]
        if len(keys) != 1 or rest not in parameters:
            raise UnsupportedModelError(
                f"{model.files[0]}: {name} is not read back from GGUF here; expected a head whose tensors are only "
                "renamed. Use the safetensors checkpoint; mtp-train inspect and graft work with this file."
            )
        offset = record.norm_offset if name.endswith("norm.weight") else 0.0
        blocks = partial(_loaded, stored, offset)
        tensors.append(PendingTensor(keys[0], SAFETENSORS_DTYPES[dtype], torch_shape(stored), blocks))
    declared = trunk.family.declaring(model.declared_modules, trunk.config)
    add_in_place(trunk, NativeHead(tuple(tensors), (), declared))


def _loaded(stored: gguf.ReaderTensor, offset: float) -> list[Tensor]:
    return [dequantised_tensor(stored).sub_(offset)]


DRAFT_ARCH = "eagle3"
_LAYER = "midlayer."
"""In place of our ``layer.``."""
_DRAFT_NAMES = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    OUTPUT_KEY: "output.weight",
    **{
        ours.replace("layer.", _LAYER, 1): f"blk.0.{name}"
        for ours, name in {**NAMES, **BEFORE_FFN}.items()
        if isinstance(name, str)
    },
    f"{_LAYER}hidden_norm.weight": "blk.0.attn_norm_2.weight",
}
"""Keys of the format of EAGLE-3's authors, to names by llama.cpp's converter for its architecture ``eagle3``."""
_DRAFT_FIELDS = {
    **FIELDS,
    "vocab_size": whole("vocab_size"),
    "rope.dimension_count": whole("head_dim"),
    "target_hidden_size": whole("target_hidden_size"),
    "norm_before_residual": flag("norm_before_residual", default=False),
    "norm_before_fc": flag("norm_before_fc", default=False),
}


def write_draft_gguf(draft: Checkpoint, trunk: GgufModel, path: Path, kind: GgufKind, progress: Progress) -> None:
    """Write a draft model that :func:`write_draft_checkpoint` wrote as a GGUF file.

    Args:
        trunk: The GGUF file of its trunk, whose vocabulary is copied.
    """
    config = draft.config
    tensors = [_draft_tensor(draft, key, config) for key in draft.tensors if key not in (OFFSETS_KEY, CHOSEN_KEY)]
    if OFFSETS_KEY in draft.tensors:
        offsets_R = draft.read(OFFSETS_KEY)
        # Its readers want the tokens themselves.
        tensors.append(held_tensor("d2t", "I64", offsets_R + torch.arange(len(offsets_R))))
    writer = _CopyWriter(path, DRAFT_ARCH)
    writer.add_type(gguf.GGUFType.MODEL)
    for name, read in _DRAFT_FIELDS.items():
        add_value(writer, f"{DRAFT_ARCH}.{name}", read(config))
    writer.add_block_count(1)
    # The layers that engines read where a draft model names none, as ours do not.
    add_value(writer, f"{DRAFT_ARCH}.target_layers", [2, trunk.num_layers // 2, trunk.num_layers - 3])
    for name, field in trunk.readers[0].fields.items():
        if name.startswith("tokenizer."):
            copy_field(writer, field)
    write_tensors(writer, tensors, kind, progress)


def _draft_tensor(draft: Checkpoint, key: str, config: RawConfig) -> PendingTensor:
    """Return a tensor under its GGUF name; rows of queries and keys in the order of llama.cpp's rotary embedding."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    num_heads = next((int(config[field]) for part, field in heads.items() if f".{part}." in key), None)
    stored = stored_tensor(draft, key, _DRAFT_NAMES[key])
    return stored if num_heads is None else replace(stored, blocks=lambda: [paired(draft.read(key), num_heads)])
