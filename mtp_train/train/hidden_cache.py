"""Cache the trunk's hidden states on disk: the trunk is frozen, so they are the same in every epoch and objective.

Only the layer that head and loss read is stored. Training from a cache runs no forward pass of the trunk: it needs the
embedding and the output matrix alone. A cache is a directory of shards::

    <digest>/manifest.json               the values that the digest is computed from
    <digest>/states-00000.safetensors    "states": the tokens of some documents, one document after the other

A shard is complete or absent: an interrupted build continues with the missing shards.

Shapes: N documents, S tokens of a shard, B rows, T tokens of a row, D hidden.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from mtp_train.checkpoints.files import SAFETENSORS_DTYPES
from mtp_train.checkpoints.identity import Contents
from mtp_train.checkpoints.writing import held_tensor, write_json, write_safetensors
from mtp_train.data.pack import PackedSequence
from mtp_train.data.tokenize import Document
from mtp_train.errors import TrainingError
from mtp_train.heads.alignment import PADDING_DOCUMENT

SHARD_BYTES = 1 << 28
MANIFEST_FILE = "manifest.json"
STATES = "states"

HiddenFn = Callable[[Tensor, Tensor, int], Tensor]
"""From tokens (1, S), their document numbers (1, S) and the most tokens of one forward pass to the trunk's hidden
states (1, S, D), as :func:`mtp_train.train.packed_rows.isolated_hidden`. With a trunk in shards, all processes have to
call it equally often."""


@dataclass(frozen=True)
class CacheLayout:
    """The layout of a cache: which document's tokens are where. It is the same in every process."""

    lengths: tuple[int, ...]
    width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return sum(self.lengths) * self.token_bytes

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Index of each document's first token over all shards, (N + 1,)."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    @cached_property
    def first_documents(self) -> list[int]:
        """Index of each shard's first document, followed by the number of documents."""
        room = max(1, SHARD_BYTES // self.token_bytes)
        firsts, begun = [0], 0
        for index, length in enumerate(self.lengths):
            if begun and begun + length > room:
                firsts.append(index)
                begun = 0
            begun += length
        return [*firsts, len(self.lengths)]

    @property
    def num_shards(self) -> int:
        return len(self.first_documents) - 1


def layout_for(hidden_fn: HiddenFn, documents: Sequence[Document], device: torch.device) -> CacheLayout:
    """Return the layout of a cache. Runs the trunk on one token for the width and the dtype of its states."""
    token_11 = torch.zeros(1, 1, dtype=torch.long, device=device)
    one = hidden_fn(token_11, torch.zeros_like(token_11), 1)
    return CacheLayout(tuple(len(document.input_ids) for document in documents), one.shape[-1], one.dtype)


def cache_identity(
    trunk: Contents,
    adapter: Contents | None,
    documents: Sequence[Document],
    layout: CacheLayout,
    precision: str,
    quantization: str | None,
) -> dict[str, Any]:
    """Return everything that the stored states depend on."""
    tokens = hashlib.sha256()
    for document in documents:
        ids = np.asarray(document.input_ids, dtype=np.int32)
        tokens.update(len(ids).to_bytes(8, "little"))
        tokens.update(ids.tobytes())
    return {
        "documents": tokens.hexdigest(),
        "trunk": dict(trunk),
        "adapter": None if adapter is None else dict(adapter),
        "precision": precision,
        "quantization": quantization,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "width": layout.width,
        "tokens": sum(layout.lengths),
    }


def digest_of(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def require_room(layout: CacheLayout, directory: Path, max_bytes: int) -> None:
    """Check the size of a cache against the recipe's limit and the free disk space.

    Raises:
        TrainingError: The cache is larger than the recipe allows, or than the disk has room for.
    """
    gib = layout.num_bytes / (1 << 30)
    what = f"{gib:.2f} GiB for {sum(layout.lengths)} tokens of {layout.token_bytes} bytes"
    if layout.num_bytes > max_bytes:
        raise TrainingError(
            f"train.hidden_cache.max_gib: {what}; expected at most {max_bytes / (1 << 30):g} GiB. Raise it, take "
            "fewer documents, or write train.hidden_cache: null."
        )
    found = next(parent for parent in (directory, *directory.parents) if parent.exists())
    free = shutil.disk_usage(found).free
    missing = layout.num_bytes - sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if missing > free:
        raise TrainingError(
            f"{directory}: {what}, of which {missing / (1 << 30):.2f} GiB are yet to be written; expected room for "
            f"them, and {free / (1 << 30):.2f} GiB are free. Name another directory in train.hidden_cache.directory."
        )


def build_cache(
    hidden_fn: HiddenFn,
    documents: Sequence[Document],
    layout: CacheLayout,
    directory: Path,
    *,
    device: torch.device,
    max_tokens: int,
    rank: int,
    world: int,
    on_shard: Callable[[int, int], None],
) -> None:
    """Write the missing shards of this process, which has every ``world``-th shard.

    Every process takes the same number of turns, also without a shard left to write: if the trunk is in shards, all
    processes run its forward passes together.

    Args:
        max_tokens: Most tokens of one forward pass, padding included.
        on_shard: Called with the number of turns done and the number in all.
    """
    directory.mkdir(parents=True, exist_ok=True)
    num_turns = -(-layout.num_shards // world)
    for turn in range(num_turns):
        shard = turn * world + rank
        path = _shard_path(directory, shard)
        writes = shard < layout.num_shards and not path.exists()
        first, end = layout.first_documents[shard : shard + 2] if writes else (0, 0)
        tokens_1S, document_1S = _in_one_row(documents[first:end], device)
        states_1SD = hidden_fn(tokens_1S, document_1S, max_tokens)
        if writes:
            _write(states_1SD[0], path)
        on_shard(turn + 1, num_turns)


def _in_one_row(documents: Sequence[Document], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and document numbers, (1, S); one token of padding if there are no documents."""
    if not documents:
        token_11 = torch.zeros(1, 1, dtype=torch.long, device=device)
        return token_11, torch.full_like(token_11, PADDING_DOCUMENT)
    ids = np.concatenate([np.asarray(document.input_ids, dtype=np.int64) for document in documents])
    numbers = np.repeat(np.arange(len(documents)), [len(document.input_ids) for document in documents])
    return torch.from_numpy(ids)[None].to(device), torch.from_numpy(numbers)[None].to(device)


def _write(states_SD: Tensor, path: Path) -> None:
    # Two runs may build the same cache, also on two machines: each writes under a name of its own, then renames.
    partial = path.with_suffix(f".{socket.gethostname()}-{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    write_safetensors(partial, [held_tensor(STATES, SAFETENSORS_DTYPES[states_SD.dtype], states_SD)])
    partial.replace(path)


def _shard_path(directory: Path, shard: int) -> Path:
    return directory / f"states-{shard:05d}.safetensors"


def write_manifest(directory: Path, identity: dict[str, Any], layout: CacheLayout) -> None:
    """Write ``manifest.json``, which describes the cache for people; it is never read back."""
    directory.mkdir(parents=True, exist_ok=True)
    described = {**identity, "documents_held": len(layout.lengths), "bytes": layout.num_bytes}
    write_json(directory / MANIFEST_FILE, described)


class HiddenCache:
    """A complete cache, from which a few documents at a time are read."""

    def __init__(self, directory: Path, layout: CacheLayout) -> None:
        self.layout = layout
        # Memory-mapped: the operating system caches as much as fits.
        self._files = [safe_open(_shard_path(directory, shard), framework="pt") for shard in range(layout.num_shards)]

    def rows(self, sequences: Sequence[PackedSequence], *, pins: bool = False) -> Tensor:
        """Return what ``isolated_hidden`` returns for packed sequences: (B, T, D), 0 on padding, on the CPU.

        With ``pins`` the result is in page-locked memory, which a GPU copies from while it computes.
        """
        shape = (len(sequences), len(sequences[0].input_ids_T), self.layout.width)
        states_BTD = torch.zeros(shape, dtype=self.layout.dtype, pin_memory=pins)
        for row, sequence in enumerate(sequences):
            place = 0
            for index in sequence.members:
                states_TD = self.document(index)
                states_BTD[row, place : place + len(states_TD)] = states_TD
                place += len(states_TD)
        return states_BTD

    def document(self, index: int) -> Tensor:
        shard = bisect_right(self.layout.first_documents, index) - 1
        begin = int(self.layout.starts[self.layout.first_documents[shard]])
        start, end = (int(place) - begin for place in self.layout.starts[index : index + 2])
        states_TD: Tensor = self._files[shard].get_slice(STATES)[start:end]
        return states_TD
