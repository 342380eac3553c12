"""Open a checkpoint directory: read its config, and list its tensors from the file headers, without loading them.

Only safetensors are read. :func:`open_checkpoint` checks all files when it opens the checkpoint, so that no command
fails in the middle of a write.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtp_train.errors import CheckpointError
from mtp_train.families import Family, RawConfig, family_for, raw_text_config, refuse_unserved_heads
from mtp_train.families.engines import EngineSupport

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
OWN_CONFIG_FILE = "params.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Shards of transformers' distributed save, which it prefers to any other weights.
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")

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


@dataclass(frozen=True)
class TensorInfo:
    """The file, dtype (in safetensors' spelling) and shape of a stored tensor."""

    file: str
    """Path of the file inside the checkpoint, as a POSIX path."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the stored tensor."""
        return TORCH_DTYPES[self.dtype].itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint directory, built by :func:`open_checkpoint`."""

    path: Path
    config: RawConfig
    index: Mapping[str, Any] | None
    """The parsed index, None for a single file."""
    tensors: Mapping[str, TensorInfo]

    @cached_property
    def family(self) -> Family:
        """The family record that the config selects.

        Raises:
            UnsupportedModelError: There is no such record.
        """
        return family_for(self.config, where=str(self.path))

    @property
    def text_config(self) -> RawConfig:
        """The language model's part of the raw config."""
        return raw_text_config(self.config)

    @property
    def engines(self) -> Mapping[str, EngineSupport]:
        """The support of each engine for this checkpoint, given the stored dtypes of its tensors."""
        return self.family.serving_of({key: info.dtype for key, info in self.tensors.items()})

    def read(self, key: str) -> Tensor:
        """Load one tensor on the CPU, in its stored dtype."""
        with safe_open(self.path / self.tensors[key].file, framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(key)
        return tensor

    @cached_property
    def _starts(self) -> Mapping[tuple[str, str], int]:
        """File and key to the tensor's first byte in that file."""
        files = {info.file for info in self.tensors.values()}
        return {(file, key): start for file in files for key, start in _first_bytes(self.path / file).items()}

    def read_in_blocks(self, key: str, max_elements: int = 1 << 22) -> Iterator[Tensor]:
        """Yield a tensor in slices along its first axis, each of at most about ``max_elements`` elements (or one row).

        The file is read, not memory-mapped: pages of a mapping count as this process's memory while it is open.
        """
        info = self.tensors[key]
        if not info.shape or not info.num_bytes:
            yield self.read(key)
            return
        rows = max(1, max_elements // math.prod(info.shape[1:]))
        for first in range(0, info.shape[0], rows):
            yield self.read_rows(key, first, min(first + rows, info.shape[0]))

    def read_rows(self, key: str, first: int, stop: int) -> Tensor:
        """Load the rows ``first`` to ``stop - 1`` of a tensor with at least one axis."""
        info = self.tensors[key]
        row_bytes = info.num_bytes // info.shape[0]
        data = torch.empty((stop - first) * row_bytes, dtype=torch.uint8)
        with (self.path / info.file).open("rb", buffering=0) as handle:
            handle.seek(self._starts[info.file, key] + first * row_bytes)
            _fill(handle, data.numpy().data)
        return data.view(TORCH_DTYPES[info.dtype]).view(-1, *info.shape[1:])


def _first_bytes(path: Path) -> dict[str, int]:
    with path.open("rb") as handle:
        header_bytes = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(header_bytes))
    return {key: 8 + header_bytes + entry["data_offsets"][0] for key, entry in header.items() if key != "__metadata__"}


def _fill(handle: io.RawIOBase, view: memoryview) -> None:
    """Read until the buffer is full: one system call returns at most 2 GiB, and less on some file systems."""
    while view:
        count = handle.readinto(view)
        if not count:
            raise CheckpointError(
                "a weights file became shorter while it was read; expected files that no process writes to. Run the "
                "command again."
            )
        view = view[count:]


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CheckpointError: The file is missing, cannot be read or is not a JSON object.
    """
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; expected it in the checkpoint. Check the path.") from None
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({os.strerror(error.errno or 0)}); expected a JSON file. Restore the file."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); expected an object. Restore the file.") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: contains {type(parsed).__name__}; expected a JSON object. Restore the file.")
    return parsed


def named_file(directory: Path, name: object, *, named_by: Path) -> str:
    """Return the path of a file that the checkpoint names, relative to the checkpoint's directory.

    The file itself may be a link, as in the hub's cache. The directories above it may not.

    Args:
        directory: The checkpoint.
        name: The name in its index or config.
        named_by: The file that contains the name, for messages.

    Raises:
        CheckpointError: The name leads out of the checkpoint or through a link to a directory, or the link is broken.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or ".." in parts or parts[0].startswith("/") or "\\" in "".join(parts):
        raise CheckpointError(
            f"{named_by}: names {name!r}; expected the path of a file inside {directory}, without '..'. Restore the "
            "original, or put the file into the checkpoint and name it there."
        )
    for depth in range(1, len(parts)):
        parent = directory.joinpath(*parts[:depth])
        if parent.is_symlink():
            raise CheckpointError(
                f"{parent}: a link to a directory; expected a directory of the checkpoint itself. Replace the link "
                "with the directory."
            )
    file = directory.joinpath(*parts)
    if file.is_symlink() and not file.is_file():
        raise CheckpointError(
            f"{file}: a link that leads to no file; expected one of the checkpoint's files. Replace the link with "
            "the file, or download it again."
        )
    return "/".join(parts)


def scan_safetensors(path: Path, name: str | None = None) -> dict[str, TensorInfo]:
    """List the tensors of one safetensors file from its header.

    Args:
        path: The file.
        name: Its path inside the checkpoint; None for the file's own name.

    Raises:
        CheckpointError: The file is missing, truncated or not safetensors.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; expected a shard of the checkpoint. Download it again.")
    try:
        with safe_open(path, framework="pt") as handle:
            found = {}
            for key in handle.keys():  # noqa: SIM118 - a safetensors handle is not a dict
                piece = handle.get_slice(key)
                found[key] = TensorInfo(name or path.name, piece.get_dtype(), tuple(piece.get_shape()))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: truncated or damaged ({error}); expected a whole safetensors file. Download or copy it again."
        ) from None
    strange = next((key for key, info in found.items() if info.dtype not in TORCH_DTYPES), None)
    if strange is not None:
        raise CheckpointError(
            f"{path}: {strange} is stored as {found[strange].dtype}, which is not supported; expected one of "
            f"{', '.join(TORCH_DTYPES)}. Use a checkpoint in one of these dtypes."
        )
    return found


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint directory, and check that its files are complete and consistent.

    Raises:
        CheckpointError: The directory, config, index or a shard is missing or damaged, or the weights are pickles.
        UnsupportedModelError: Its heads are of a kind that no engine loads.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: not a directory; expected a checkpoint directory or a hub id (owner/name). Check the spelling."
        )
    named_file(path, CONFIG_FILE, named_by=path)
    config = _read_config(path)
    _refuse_other_weights(path, config)
    # transformers prefers the single file to an index, and so do we.
    for name in (SINGLE_FILE, INDEX_FILE):
        named_file(path, name, named_by=path)
    if (path / SINGLE_FILE).is_file():
        return Checkpoint(path, config, None, scan_safetensors(path / SINGLE_FILE))
    if (path / INDEX_FILE).is_file():
        index = read_json(path / INDEX_FILE)
        return Checkpoint(path, config, index, _scan_indexed(path, index))
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{path}: weights are pickles ({', '.join(pickles[:3])}), which can run code when read; expected "
            "safetensors. Convert them once with transformers' save_pretrained in a place you trust."
        )
    raise CheckpointError(
        f"{path}: no weights; expected {SINGLE_FILE} or {INDEX_FILE}. Point at the directory that contains them."
    )


def _read_config(path: Path) -> dict[str, Any]:
    config_file = path / CONFIG_FILE
    # Meta's releases have params.json instead, or a directory with it for each of several models.
    own = [] if config_file.is_file() else [*path.glob(OWN_CONFIG_FILE), *path.glob(f"*/{OWN_CONFIG_FILE}")]
    configs = {file.parent: read_json(file) for file in sorted(own) or [config_file]}
    # Before the check of the weights: they are pickles, and converting them would not help.
    for directory, config in configs.items():
        refuse_unserved_heads(config, where=str(directory))
    if own:
        raise CheckpointError(
            f"{path}: in the layout of the authors' own code ({OWN_CONFIG_FILE}, no {CONFIG_FILE}); expected a "
            "transformers checkpoint. Convert it once with transformers' script for the model, in a place you trust."
        )
    return configs[path]


def _refuse_other_weights(path: Path, config: RawConfig) -> None:
    """Raise a CheckpointError where transformers would load other files than the index or the single file."""
    explicit = config.get("transformers_weights")
    sharded = next((file.name for file in sorted(path.iterdir()) if _DISTRIBUTED.fullmatch(file.name)), None)
    found = f"config.json sets transformers_weights = {explicit!r}" if explicit is not None else None
    found = f"contains {sharded}, a shard of a distributed save" if sharded is not None else found
    if found is not None:
        raise CheckpointError(
            f"{path}: {found}, which transformers loads instead of the other weights and engines ignore; expected "
            f"{SINGLE_FILE} or {INDEX_FILE} alone. Keep one set of weights, under these names."
        )


def _scan_indexed(path: Path, index: Mapping[str, Any]) -> dict[str, TensorInfo]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path / INDEX_FILE}: has no weight_map; expected key -> file. Restore the index.")
    files: dict[Any, str] = {}
    for file in weight_map.values():
        # Each file name is checked once: the index of a large mixture has tens of thousands of entries, and few files.
        if not isinstance(file, str) or file not in files:
            files[file] = named_file(path, file, named_by=path / INDEX_FILE)
    named = {key: files[file] for key, file in weight_map.items()}
    missing = sorted({file for file in named.values() if not (path / file).is_file()})
    if missing:
        raise CheckpointError(
            f"{path / INDEX_FILE}: names {', '.join(missing[:3])}, which is not there ({len(missing)} missing in all); "
            "expected every shard beside the index. Download the missing shards."
        )
    stored = {file: scan_safetensors(path / file, file) for file in sorted(set(named.values()))}
    absent = sorted(key for key, file in named.items() if key not in stored[file])
    if absent:
        raise CheckpointError(
            f"{path / INDEX_FILE}: lists {absent[0]} in {named[absent[0]]}, which does not contain it ({len(absent)} "
            "such keys); expected index and shards of one save. Download both again."
        )
    # Loaders read every tensor of a shard, listed in the index or not. Of several with one key, the last shard's
    # counts.
    read = {key: info for infos in stored.values() for key, info in infos.items()}
    twice = sorted(key for key, file in named.items() if read[key].file != file)
    if twice:
        raise CheckpointError(
            f"{path / INDEX_FILE}: lists {twice[0]} in {named[twice[0]]}, but {read[twice[0]].file} contains another, "
            f"which transformers loads ({len(twice)} such keys); expected index and shards of one save. Download both "
            "again."
        )
    return {key: read[key] for key in (*named, *(key for key in read if key not in named))}


def locate_checkpoint(name: str) -> Path:
    """Return the directory of a checkpoint: a local path unchanged, or a hub id downloaded into the hub's cache.

    Raises:
        CheckpointError: It is neither a directory nor a hub id that can be downloaded.
    """
    path = Path(name).expanduser()
    if path.exists() or name.count("/") != 1 or name.startswith((".", "~", "/")):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, ignore_patterns=[f"*{suffix}" for suffix in PICKLE_SUFFIXES]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name}: neither a local directory nor a hub model that can be downloaded "
            f"({type(error).__name__}); expected one of them. Check the spelling, your network and your token."
        ) from None
