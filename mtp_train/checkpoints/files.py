"""Open a checkpoint directory: read its config, and list its tensors from the file headers, without loading them.

Only safetensors are read. :func:`open_checkpoint` checks all files when it opens the checkpoint, so that no command
fails in the middle of a write.

The checkpoint is the single file, or the shards that the index names. Other weight files in the directory come from
earlier saves or other tools, and loaders disagree on them:

- vLLM and SGLang read every ``*.safetensors`` where there is no index;
- SGLang reads an ``mtp.safetensors`` beside GLM-4.5's index;
- llama.cpp's converter and MLX read every ``model*.safetensors``.

The last copy of a tensor counts, so that one left-over file replaces the head or the trunk.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, Field, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.suggestions import original_of
from mtp_train.errors import CheckpointError, one_line
from mtp_train.families import FAMILIES, Family, RawConfig, family_for, raw_text_config
from mtp_train.families.engines import Engines

JsonObject = dict[str, Any]
"""An object as a file of JSON holds it."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
# The files beside the weights from which a model, its tokenizer or its processor is loaded.
_NAMED = re.compile(
    r".*config\.json|model\.safetensors\.index\.json|tokenizer.*\.(?:json|model)|spiece\.model|.*\.tiktoken"
    r"|(?:vocab|added_tokens|special_tokens_map)\.(?:json|txt)|merges\.txt|chat_template.*\.(?:json|jinja)"
)

# Larger numbers than these are in no model's config.
_MAX_BLOCKS = 1000
_MAX_TOKEN = 1 << 24
_QUANTISATION = "quantization_config"
_CORRECT = "Restore the original, or correct the field."
BLOCK_ELEMENTS = 1 << 22
# The dtypes that we read, by safetensors' names.
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SAFETENSORS_DTYPES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


REJECTIONS = (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What transformers raises for files with wrong values: it reports some, and crashes on the rest."""


def is_gguf(location: str | Path) -> bool:
    return Path(location).suffix == ".gguf"


@dataclass(frozen=True)
class TensorInfo:
    """The file, dtype (in safetensors' spelling), shape and place of a stored tensor."""

    file: str
    """Path of the file inside the checkpoint, as a POSIX path."""
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    """The first byte in the file."""

    @property
    def num_bytes(self) -> int:
        return TORCH_DTYPES[self.dtype].itemsize * math.prod(self.shape)


StoredTensors = Mapping[str, TensorInfo]
"""The tensors of a checkpoint or of a file, by key."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint directory, built by :func:`open_checkpoint`."""

    path: Path
    config: RawConfig
    index: JsonObject | None
    """The parsed index, None for a single file."""
    tensors: StoredTensors
    superseded: tuple[tuple[str, str], ...] = ()
    """File and key of each stored copy of a tensor that the index names in another file, sorted."""
    trusts_code: bool = False
    """Whether transformers may run code that is stored in it, for its config, its model and its tokenizer."""

    @cached_property
    def family(self) -> Family:
        """The family record that the config selects."""
        return family_for(self.config, where=str(self.path))

    @property
    def text_config(self) -> RawConfig:
        return raw_text_config(self.config)

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())

    @property
    def engines(self) -> Engines:
        """The support of each engine for this checkpoint, given the stored dtypes of its tensors."""
        return self.family.serving_of(self.config)

    def read(self, key: str) -> Tensor:
        """Load one tensor on the CPU, in its stored dtype."""
        info = self.tensors[key]
        return self._read_bytes(key, 0, info.num_bytes).view(TORCH_DTYPES[info.dtype]).view(info.shape)

    def read_in_blocks(self, key: str, row_size: int | None = None) -> Iterator[Tensor]:
        """Yield a tensor in slices along its first axis, each of at most ``BLOCK_ELEMENTS`` elements or of one row.

        ``row_size`` is the number of elements that a row stands for, where it is not the number that is stored.
        """
        info = self.tensors[key]
        if not info.shape or not info.num_bytes:
            yield self.read(key)
            return
        rows = max(1, BLOCK_ELEMENTS // (row_size or math.prod(info.shape[1:])))
        for first in range(0, info.shape[0], rows):
            yield self.read_rows(key, first, min(first + rows, info.shape[0]))

    def read_rows(self, key: str, first: int, stop: int) -> Tensor:
        """Load the rows ``first`` to ``stop - 1`` of a tensor with at least one axis."""
        info = self.tensors[key]
        row_bytes = info.num_bytes // info.shape[0]
        data = self._read_bytes(key, first * row_bytes, (stop - first) * row_bytes)
        return data.view(TORCH_DTYPES[info.dtype]).view(-1, *info.shape[1:])

    @cached_property
    def mlx_sign(self) -> str | None:
        """What shows that the checkpoint is in MLX's layout, which MLX alone reads; None for any other checkpoint."""
        quantised = self.config.get("quantization")
        if isinstance(quantised, dict) and "quant_method" not in quantised:
            return "config.json has quantization without a method"
        for file in {info.file for info in self.tensors.values()}:
            if read_metadata(self.path / file).get("format") == "mlx":
                return f"the header of {file} has format: mlx"
        return None

    @cached_property
    def layout(self) -> HeadLayout:
        """The keys of a head of the checkpoint's family.

        Reading it raises a CheckpointError where the trunk has no embedding under the family's prefixes, the config has
        no layer count, or the checkpoint is MLX's.
        """
        if self.mlx_sign is not None:
            raise CheckpointError(
                f"{self.path}: in MLX's layout ({self.mlx_sign}), which MLX alone reads; expected "
                f"transformers' layout. Use {original_of(self.path) or 'the checkpoint'} that it was converted from."
            )
        family = self.family
        embed_keys = {prefix: family.embedding(prefix) for prefix in family.keys.trunk_prefixes}
        prefix = next((prefix for prefix, embed_key in embed_keys.items() if embed_key in self.tensors), None)
        if prefix is None:
            raise self._without_embedding(embed_keys.values())
        num_layers = self.text_config.get("num_hidden_layers")
        if not isinstance(num_layers, int) and family.follows_the_trunk:
            raise CheckpointError(
                f"{self.path}: config.json has num_hidden_layers = {num_layers!r}; expected an integer. Restore the "
                "original."
            )
        layout = HeadLayout(family, prefix, num_layers or 0, family.keys.num_sublayers(self.text_config))
        experts = [key for key in self.tensors if ".experts." in key]
        # Without a head, the trunk's experts tell how the head's are stored.
        shown = list(filter(layout.is_head_key, experts)) or experts
        # The lm_head may be packed, or tied and not stored.
        in_wrapper = f"language_model.{layout.lm_head_key.removesuffix('weight')}"
        is_wrapped = any(key.startswith(in_wrapper) for key in self.tensors)
        return replace(
            layout,
            fused_experts=bool(experts) and not any(re.search(r"\.experts\.\d+\.", key) for key in shown),
            lm_head_prefix="language_model." if is_wrapped else "",
        )

    def _without_embedding(self, expected: Iterable[str]) -> CheckpointError:
        lone = _lone_head_key(self)
        if lone is not None:
            return CheckpointError(
                f"{self.path}: an MTP head of {self.family.title} ({lone}) without a trunk; expected the checkpoint of "
                "a trunk. Point at the complete checkpoint; with --from it, graft puts its head on a fine-tune."
            )
        if "fc.weight" in self.tensors:
            return CheckpointError(
                f"{self.path}: tensors of an EAGLE draft model, while config.json declares "
                f"{self.config.get('architectures')}; expected architectures that name it. In a copy, write "
                '"architectures": ["EagleLlamaForCausalLM"], or ["LlamaForCausalLMEagle3"] for EAGLE-3.'
            )
        return CheckpointError(
            f"{self.path}: the trunk's embedding is missing; expected {' or '.join(expected)}. Point at the complete "
            "checkpoint."
        )

    @property
    def misread_keys(self) -> tuple[str, ...]:
        """Keys whose superseded copy loaders take: they read the shards in order, and the last copy counts."""
        return tuple(key for file, key in self.superseded if file > self.tensors[key].file)

    @property
    def unlisted_keys(self) -> tuple[str, ...]:
        """Keys of tensors in the index's shards that the index does not list; empty for a single file."""
        listed = self.tensors if self.index is None else self.index["weight_map"]
        return tuple(key for key in self.tensors if key not in listed)

    def _read_bytes(self, key: str, offset: int, count: int) -> Tensor:
        """Return ``count`` bytes of a tensor, from its byte ``offset`` on, as a uint8 tensor.

        The file is read, not memory-mapped: the system may refuse to map a shard that is larger than its memory, and
        the pages of a mapping count as this process's memory.
        """
        file = self.tensors[key].file
        data = torch.empty(count, dtype=torch.uint8)
        with (self.path / file).open("rb") as handle:
            handle.seek(self.tensors[key].start + offset)
            if handle.readinto(data.numpy().data) < count:
                raise CheckpointError(
                    f"{self.path / file}: became shorter while it was read; expected files that no process writes to. "
                    "Run the command again."
                )
        return data


def _lone_head_key(checkpoint: Checkpoint) -> str | None:
    """Return a stored key that only an MTP head has (a norm of its inputs), under its own name or without prefix."""
    family = checkpoint.family
    layers = checkpoint.text_config.get("num_hidden_layers")
    layout = HeadLayout(family, family.keys.trunk_prefixes[0], layers if isinstance(layers, int) else 0)
    named = {"trunk": layout.trunk_prefix, "layer": layout.num_hidden_layers, "module": 0}
    own = [prefix.format(**named) for prefix in family.keys.head_prefixes]
    # Some families number their modules after the prefix.
    prefixes = ("", *own, *(f"{prefix}0." for prefix in own))
    first_layer = tuple(f"{prefix}layers.0." for prefix in family.keys.trunk_prefixes)
    if any(key.startswith(first_layer) for key in checkpoint.tensors):
        return None
    for key in checkpoint.tensors:
        found = (layout.map_key(prefix + key) for prefix in prefixes)
        if any(one is not None and one.ours.endswith(".embed_norm.weight") for one in found):
            return key
    return None


def read_json(path: Path) -> JsonObject:
    """Parse the JSON object in a small file of a checkpoint.

    Raises:
        CheckpointError: The file is missing, cannot be read or is not a JSON object.
    """
    # Opening a pipe waits for a process that writes to it.
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; expected it in the checkpoint. Check the path.")
    try:
        parsed = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({os.strerror(error.errno or 0)}); expected a JSON file. Restore the file."
        ) from None
    # ValueError: not UTF-8, not JSON, or an integer of thousands of digits. RecursionError: nested too deep.
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{path}: not valid JSON ({reason}); expected an object. Restore the file.") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: contains {type(parsed).__name__}; expected a JSON object. Restore the file.")
    return parsed


_Model = TypeVar("_Model", bound=BaseModel)
# What exceeds it makes no finite weight in fp32.
Number = Annotated[float, Field(ge=-1e30, le=1e30)]


def validated(model: type[_Model], content: RawConfig, file: Path, hint: str, prefix: str = "") -> _Model:
    """Return the fields of a JSON object that a model declares; other fields are left alone.

    Raises:
        CheckpointError: A field is missing, or of another type or size. Nothing is converted: "4" and True are no int.
    """
    try:
        return model.model_validate(content, strict=True)
    except ValidationError as invalid:
        errors = invalid.errors()
    name = str(errors[0]["loc"][0])
    if name not in content:
        raise CheckpointError(f"{file}: {prefix}{name} is missing; expected a value. {hint}")
    # A field that may have several types has an error for each.
    rules = {error["msg"].removeprefix("Input should be "): None for error in errors if error["loc"][0] == name}
    raise CheckpointError(f"{file}: {prefix}{name} is {content[name]!r:.60}; expected {' or '.join(rules)}. {hint}")


def named_file(directory: Path, name: object, *, named_by: Path) -> str:
    """Return the path of a file that the checkpoint names, relative to the checkpoint's directory.

    Raises:
        CheckpointError: The name leads out of the checkpoint.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or ".." in parts or parts[0].startswith("/"):
        raise CheckpointError(
            f"{named_by}: names {name!r:.200}; expected the path of a file inside {directory}, without '..'. Restore "
            "the original, or put the file into the checkpoint and name it there."
        )
    return "/".join(parts)


def scan_safetensors(path: Path, name: str | None = None) -> dict[str, TensorInfo]:
    """List the tensors of one safetensors file from its header; ``name`` is its path in the checkpoint.

    Raises:
        CheckpointError: The file is missing or damaged, or a tensor has a dtype that is not read here.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: no such file; expected a shard of the checkpoint. Download it again.")
    try:
        # It checks the header against the size of the file, and does not return the places of the tensors.
        with safe_open(path, framework="np"), path.open("rb") as handle:
            start = 8 + int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(start - 8))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: truncated or damaged ({error}); expected a whole safetensors file. Download or copy it again."
        ) from None
    header.pop("__metadata__", None)
    unread = next((key for key, entry in header.items() if entry["dtype"] not in TORCH_DTYPES), None)
    if unread is not None:
        raise CheckpointError(
            f"{path}: {unread} is stored as {header[unread]['dtype']}, which is not supported; expected one of "
            f"{', '.join(TORCH_DTYPES)}. Use a checkpoint in one of these dtypes."
        )
    return {
        key: TensorInfo(name or path.name, entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for key, entry in header.items()
    }


def read_metadata(path: Path) -> Mapping[str, str]:
    with safe_open(path, framework="np") as file:
        return file.metadata() or {}


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint directory, and check that its files are complete and consistent.

    Raises:
        CheckpointError: The directory, config, index or a shard is missing or damaged, or the weights are pickles.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: not a directory; expected a checkpoint directory or a hub id (owner/name). Check the spelling."
        )
    packs = sorted(path.glob("*.gguf"))
    if packs and not any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"{path}: holds GGUF files and no safetensors; expected a checkpoint, or the name of a GGUF file. Use "
            f"{shlex.quote(str(packs[0]))}."
        )
    config = read_config(path / CONFIG_FILE)
    _require_generation_config(path)
    _refuse_other_weights(path, config)
    has_single = (path / SINGLE_FILE).is_file()
    if (path / INDEX_FILE).is_file():
        index = read_json(path / INDEX_FILE)
        if not has_single or not _adds_nothing(path, index):
            tensors, superseded = _scan_indexed(path, index)
            files = {info.file for info in tensors.values()}
            if has_single and SINGLE_FILE not in files:
                moved = shlex.join(["mv", str(path / SINGLE_FILE), f"{path.absolute()}-{SINGLE_FILE}"])
                raise CheckpointError(
                    f"{path}: contains two sets of weights, {SINGLE_FILE} and the {len(files)} file(s) of "
                    f"{INDEX_FILE}: transformers reads the first, vLLM and SGLang the second, llama.cpp's converter "
                    f"both; expected one. To keep those of the index: {moved}"
                )
            return Checkpoint(path, config, index, tensors, superseded)
    if has_single:
        return Checkpoint(path, config, None, scan_safetensors(path / SINGLE_FILE))
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{path}: weights are pickles ({', '.join(pickles[:3])}), which can run code when read; expected "
            "safetensors. Convert them once with transformers' save_pretrained in a place you trust."
        )
    raise CheckpointError(
        f"{path}: no weights; expected {SINGLE_FILE} or {INDEX_FILE}. Point at the directory that contains them."
    )


def _adds_nothing(path: Path, index: JsonObject) -> bool:
    """Return whether an index beside the single file names that file alone, or shards that are no longer there.

    transformers' ``save_pretrained`` deletes the shards of an earlier save, but not their index.
    """
    weight_map = index.get("weight_map")
    files = weight_map.values() if isinstance(weight_map, dict) else ()
    names = {file for file in files if isinstance(file, str)}
    return bool(names) and (names == {SINGLE_FILE} or not all(os.path.isfile(path / name) for name in names))


# Some configs write -1 for a token that the model does not have.
_Token = Annotated[int, Field(ge=-1, le=_MAX_TOKEN)]
_Tokens = _Token | list[_Token] | None
# Building a model with more blocks would not end.
_Blocks = Annotated[int, Field(le=_MAX_BLOCKS)]


class _TokenFields(BaseModel):
    eos_token_id: _Tokens = None
    bos_token_id: _Tokens = None
    pad_token_id: _Tokens = None


class _SectionFields(_TokenFields):
    """The fields of a config, and of its sections, that are counted with here."""

    model_type: str | None = None
    architectures: list[str] | None = None
    auto_map: JsonObject | None = None
    rope_scaling: JsonObject | None = None
    rope_parameters: JsonObject | None = None
    # Learning rates follow from it.
    hidden_size: PositiveInt | None = None
    num_hidden_layers: _Blocks | None = None
    depth: _Blocks | list[_Blocks] | None = None


class _GenerationFields(_TokenFields):
    do_sample: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    top_k: int | None = None


def read_config(path: Path) -> JsonObject:
    """Read a model's config, and check the types and sizes of the fields that we count with.

    transformers checks the others when it builds the model.
    """
    config = read_json(path)
    _require_section(config, path)
    return config


def _require_section(section: JsonObject, path: Path, prefix: str = "") -> None:
    """Raise a CheckpointError where a field of a config or of its sections is wrong whatever the model."""
    validated(_SectionFields, section, path, _CORRECT, prefix)
    # The number of head modules, under the names that families give it.
    counts = {family.declaration.count for family in FAMILIES}
    for name, value in section.items():
        is_section = name.endswith("_config")
        fits = isinstance(value, dict) if is_section else type(value) is int and abs(value) <= _MAX_BLOCKS
        if value is not None and (is_section or name in counts) and not fits:
            expected = "an object" if is_section else f"an integer up to {_MAX_BLOCKS}"
            raise CheckpointError(f"{path}: {prefix}{name} is {value!r:.60}; expected {expected}. {_CORRECT}")
        if isinstance(value, dict) and is_section and name != _QUANTISATION:
            _require_section(value, path, f"{prefix}{name}.")


def _require_generation_config(path: Path) -> None:
    file = path / GENERATION_CONFIG_FILE
    if not os.path.lexists(file):
        return
    validated(_GenerationFields, read_json(file), file, _CORRECT)
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_pretrained(path)
    except REJECTIONS as error:
        raise CheckpointError(
            f"{file}: transformers rejects it ({one_line(error):.300}); expected settings that it can "
            "read. Correct the field, or remove the file."
        ) from error


def _refuse_other_weights(path: Path, config: RawConfig) -> None:
    """Raise a CheckpointError where transformers would load other files than the index or the single file."""
    explicit = config.get("transformers_weights")
    sharded = next((file.name for file in sorted(path.iterdir()) if _DISTRIBUTED.fullmatch(file.name)), None)
    if sharded is not None:
        found = f"contains {sharded}, a shard of a distributed save"
    elif explicit is not None:
        found = f"config.json sets transformers_weights = {explicit!r}"
    else:
        return
    raise CheckpointError(
        f"{path}: {found}, which transformers loads instead of the other weights and engines ignore; expected "
        f"{SINGLE_FILE} or {INDEX_FILE} alone. Keep one set of weights, under these names."
    )


def _scan_indexed(path: Path, index: JsonObject) -> tuple[dict[str, TensorInfo], tuple[tuple[str, str], ...]]:
    """Return the tensors of an index's shards, each as the index names it, and the copies that it does not name."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        found = f"weight_map is {weight_map!r:.40}" if "weight_map" in index else "has no weight_map"
        raise CheckpointError(f"{path / INDEX_FILE}: {found}; expected an object, key -> file. Restore the index.")
    files: dict[Any, str] = {}
    for file in weight_map.values():
        # Each file name is checked once: the index of a large mixture has tens of thousands of entries, and few files.
        if not isinstance(file, str) or file not in files:
            files[file] = named_file(path, file, named_by=path / INDEX_FILE)
    named = {key: files[file] for key, file in weight_map.items()}
    stored = {file: scan_safetensors(path / file, file) for file in sorted(set(named.values()))}
    absent = sorted(key for key, file in named.items() if key not in stored[file])
    if absent:
        raise CheckpointError(
            f"{path / INDEX_FILE}: lists {absent[0]} in {named[absent[0]]}, which does not contain it ({len(absent)} "
            "such keys); expected index and shards of one save. Download both again."
        )
    # Loaders read every tensor of a shard, listed in the index or not.
    unlisted = {key: info for infos in stored.values() for key, info in infos.items() if key not in named}
    tensors = {key: stored[file][key] for key, file in named.items()} | unlisted
    copies = ((file, key) for file, infos in stored.items() for key in infos if tensors[key].file != file)
    return tensors, tuple(sorted(copies))


def source_files(source: Checkpoint) -> list[Path]:
    """Return the files that a copy of a checkpoint needs, sorted by path: the weights, and the files beside them.

    Weights that the checkpoint does not name, an index that is not its own, hidden files, pickles, training
    checkpoints, and other models in subdirectories are left out.
    """
    # Weights are always included: their directories may have names like the ones that are left out.
    weights = _weights(source)
    beside = [file for file in _files_under(source.path, weights) if not _holds_weights(file)]
    if source.index is None:
        beside = [file for file in beside if file != source.path / INDEX_FILE]
    for file in beside:
        _require_known_link(source.path, file)
    return sorted(weights.union(beside))


def unnamed_weights(source: Checkpoint) -> dict[str, StoredTensors]:
    """Return the weight files in a checkpoint's directory that are no part of it, which copies leave out.

    Returns:
        POSIX path in the directory to the file's tensors; no tensors for a file that is not safetensors or is damaged.
    """
    found: dict[str, StoredTensors] = {}
    for file in sorted(filter(_holds_weights, _files_under(source.path, _weights(source)))):
        name = file.relative_to(source.path).as_posix()
        found[name] = {}
        if file.suffix == ".safetensors":
            with contextlib.suppress(CheckpointError):
                found[name] = scan_safetensors(file, name)
    return found


def _holds_weights(file: Path) -> bool:
    """Return whether a file is named like weights, or like weights set aside, such as ``model.safetensors.bak``."""
    return file.suffix != ".json" and any(suffix in WEIGHT_SUFFIXES for suffix in file.suffixes)


def _weights(source: Checkpoint) -> set[Path]:
    return {source.path / info.file for info in source.tensors.values()}


def _files_under(directory: Path, weights: Set[Path]) -> Iterator[Path]:
    """Yield links and files other than ``weights``; links to directories too."""
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith((".", "checkpoint-")) or entry.suffix in PICKLE_SUFFIXES or entry in weights:
            continue
        if entry.is_symlink() or entry.is_file():
            yield entry
        elif entry.is_dir() and not (entry / CONFIG_FILE).exists():
            yield from _files_under(entry, weights)


def _require_known_link(root: Path, file: Path) -> None:
    """Raise a CheckpointError for a link that is neither one of a model's own files nor a link into the hub's cache."""
    if not file.is_symlink():
        return
    real_root = root.resolve()
    if file.is_file():
        # In the hub's cache every file of snapshots/REVISION is a link into blobs, two directories up.
        blobs = real_root.parents[1] / "blobs" if real_root.parent.name == "snapshots" else None
        if (file.parent == root and _NAMED.fullmatch(file.name)) or file.resolve().parent == blobs:
            return
    found = "a link to a directory" if file.is_dir() else "a link"
    raise CheckpointError(
        f"{file}: {found}, which could bring in files from anywhere; expected links only to weights, config, tokenizer "
        "and processor files, or into the hub cache's blobs. Replace the link with the file, or remove the link."
    )


def unnamed_files(checkpoint: Checkpoint, layout: HeadLayout | None) -> tuple[str, ...]:
    """Describe the weight files that are no part of a checkpoint, sorted by path. Reads their headers.

    Args:
        layout: Its head layout; None for a drafter, whose files have no trunk's layout.
    """
    found = []
    for file, tensors in unnamed_weights(checkpoint).items():
        num_of_head = 0 if layout is None else sum(map(layout.is_head_key, tensors))
        of_head = f", {num_of_head} of a head" if num_of_head else ""
        content = f"{len(tensors)} tensors{of_head}" if tensors else "not readable as safetensors"
        found.append(f"{file} ({content})")
    return tuple(found)


def head_under_other_names(checkpoint: Checkpoint, needed: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return the stored keys of a head with a prefix more (``language_model.``), or without their own; else nothing.

    Args:
        needed: The keys of a complete head with their shapes.
    """
    first = min(needed)
    own = os.path.commonpath([key.replace(".", "/") for key in needed]).replace("/", ".") + "."
    for stored in (checkpoint.tensors, *unnamed_weights(checkpoint).values()):
        prefixes = sorted({key.removesuffix(first) for key in stored if key.endswith(f".{first}")})
        bare = {key.removeprefix(own): shape for key, shape in needed.items()}
        for names in (bare, *({one + key: shape for key, shape in needed.items()} for one in prefixes)):
            if all(name in stored and stored[name].shape == shape for name, shape in names.items()):
                return tuple(names)
    return ()


def left_out(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the sentences of a result that name the weight files and the copies of tensors that were not copied."""
    files = ", ".join(unnamed_files(checkpoint, checkpoint.layout))
    notes = (f"Left out, as no part of the checkpoint: {files}.",) if files else ()
    if not checkpoint.superseded:
        return notes
    file, key = checkpoint.superseded[0]
    count = len(checkpoint.superseded)
    return (*notes, f"Left out, as the index names another copy: {key} in {file} ({count} in all).")


def all_finite(block: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinities; true for integer and empty tensors."""
    if not block.is_floating_point() or not block.numel():
        return True
    # Minimum and maximum are NaN or infinite if any element is: one pass without a copy, ten times as fast as isfinite.
    # torch has no aminmax for float8.
    ends = torch.aminmax(block) if block.dtype.itemsize > 1 else torch.aminmax(block.float())
    return bool(torch.isfinite(torch.stack(ends)).all())


def require_finite(name: str, value: Tensor) -> None:
    if not all_finite(value):
        raise CheckpointError(
            f"{name}: holds NaN or infinite values; expected finite weights. Use a checkpoint saved before it diverged."
        )
