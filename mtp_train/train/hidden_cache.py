"""The trunk's hidden states on disk: with a frozen trunk they are the same in every epoch and for every objective.

One layer is kept, the one that head and loss read, so that training needs no forward pass of the trunk at all, only its
embedding and its output matrix. A cache is a directory of shards::

    <digest>/manifest.json               what the digest is of
    <digest>/states-00000.safetensors    "states": the tokens of some documents, one document after the other

Shards are whole or absent: a build that was cut off goes on with those that are missing.

Shapes: N documents, S tokens of a shard, B rows, T tokens of a row, D hidden.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from mtp_train.data.pack import PackedSequence
from mtp_train.data.tokenize import Document
from mtp_train.errors import TrainingError
from mtp_train.heads.alignment import PADDING_DOCUMENT
from mtp_train.weights.files import SAFETENSORS_DTYPES
from mtp_train.weights.identity import Contents
from mtp_train.weights.writing import held_tensor, write_json, write_safetensors

SHARD_BYTES = 1 << 28
MANIFEST_FILE = "manifest.json"
STATES, SCALES = "states", "scales"
_FP8_MAX = 448.0

HiddenFn = Callable[[Tensor, Tensor, int], Tensor]
"""Tokens (1, S), their document numbers (1, S) and the most tokens of one forward pass, to the trunk's hidden states
(1, S, D): :func:`mtp_train.heads.isolate.isolated_hidden`. Where the trunk is in shards, all processes call it equally
often."""
StoredDtype = Literal["auto", "bf16", "fp8"]


@dataclass(frozen=True)
class CacheLayout:
    """What a cache holds and where, from the documents alone; the same in every process."""

    lengths: tuple[int, ...]
    """Tokens of each document."""
    width: int
    """D."""
    dtype: torch.dtype
    """Of a stored number; ``float8_e4m3fn`` comes with a scale per token, fp32."""
    computed: torch.dtype
    """Of what the trunk computes, and of what is read."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's state."""
        return self.width * self.dtype.itemsize + (4 if self.dtype is torch.float8_e4m3fn else 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole, but for the files' headers."""
        return sum(self.lengths) * self.token_bytes

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The place of each document's first token, (N + 1,), counted over all shards."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    @cached_property
    def first_documents(self) -> list[int]:
        """The first document of each shard, and at the end the number of documents."""
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
        """Files there are."""
        return len(self.first_documents) - 1


def layout_for(
    hidden_fn: HiddenFn, documents: Sequence[Document], dtype: StoredDtype, device: torch.device
) -> CacheLayout:
    """Lay a cache out; runs the trunk on one token to see how wide its states are and of which precision.

    Args:
        hidden_fn: Runs the trunk.
        documents: All that is trained on.
        dtype: ``auto`` is what the trunk computes.
        device: The trunk's.
    """
    token_11 = torch.zeros(1, 1, dtype=torch.long, device=device)
    one = hidden_fn(token_11, torch.zeros_like(token_11), 1)
    stored = {"auto": one.dtype, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[dtype]
    return CacheLayout(tuple(len(document.input_ids) for document in documents), one.shape[-1], stored, one.dtype)


def cache_identity(
    trunk: Contents,
    adapter: Contents | None,
    documents: Sequence[Document],
    layout: CacheLayout,
    precision: str,
    quantization: str | None,
) -> dict[str, Any]:
    """Say what states depend on.

    Args:
        trunk: The content of the trunk's checkpoint.
        adapter: That of its adapter.
        documents: All that is trained on.
        layout: What is kept of them.
        precision: That the trunk runs in, ``train.precision``.
        quantization: That it is packed by, ``model.quantization``.
    """
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
        "computed": str(layout.computed).removeprefix("torch."),
        "stored": str(layout.dtype).removeprefix("torch."),
        "width": layout.width,
        "tokens": sum(layout.lengths),
    }


def digest_of(identity: dict[str, Any]) -> str:
    """Return the name of a cache's directory."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def require_room(layout: CacheLayout, directory: Path, max_bytes: int) -> None:
    """Check that a cache may be and can be written.

    Raises:
        TrainingError: It is larger than the recipe allows, or than the disk has room for.
    """
    gib = layout.num_bytes / (1 << 30)
    what = f"{gib:.2f} GiB for {sum(layout.lengths)} tokens of {layout.token_bytes} bytes"
    if layout.num_bytes > max_bytes:
        raise TrainingError(
            f"train.hidden_cache.max_gib: {what}; expected at most {max_bytes / (1 << 30):g} GiB. Raise it, take "
            "dtype: fp8 or fewer documents, or write train.hidden_cache: null."
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
    """Write the shards of this process that are missing: every ``world``-th one.

    Every process takes as many turns, also without a shard of its own to write: the trunk may be in shards, whose
    forward passes all processes run together.

    Args:
        hidden_fn: Runs the trunk; the precision of its autocast is the caller's matter.
        documents: Those that the layout was made of.
        layout: The layout.
        directory: The cache's own, made if need be.
        device: The trunk's.
        max_tokens: Of one forward pass, padding included.
        rank: This process.
        world: Number of processes.
        on_shard: Told the number of turns behind us and in all.
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
            _write(states_1SD[0], layout.dtype, path)
        on_shard(turn + 1, num_turns)


def _in_one_row(documents: Sequence[Document], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and document numbers, (1, S); of no documents one token of padding."""
    if not documents:
        token_11 = torch.zeros(1, 1, dtype=torch.long, device=device)
        return token_11, torch.full_like(token_11, PADDING_DOCUMENT)
    ids = np.concatenate([np.asarray(document.input_ids, dtype=np.int64) for document in documents])
    numbers = np.repeat(np.arange(len(documents)), [len(document.input_ids) for document in documents])
    return torch.from_numpy(ids)[None].to(device), torch.from_numpy(numbers)[None].to(device)


def _write(states_SD: Tensor, dtype: torch.dtype, path: Path) -> None:
    tensors = {STATES: states_SD}
    if dtype is torch.float8_e4m3fn:
        # The format spans little: every token is scaled to its full range.
        scales_S1 = states_SD.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / _FP8_MAX
        tensors = {STATES: states_SD.float() / scales_S1, SCALES: scales_S1}
    # Two runs may build one cache; each writes files of its own until they have their name.
    partial = path.with_suffix(f".{os.getpid()}.partial")
    stored = {STATES: SAFETENSORS_DTYPES[dtype], SCALES: SAFETENSORS_DTYPES[torch.float32]}
    write_safetensors(partial, [held_tensor(name, stored[name], values) for name, values in tensors.items()])
    partial.replace(path)


def _shard_path(directory: Path, shard: int) -> Path:
    return directory / f"states-{shard:05d}.safetensors"


def write_manifest(directory: Path, identity: dict[str, Any], layout: CacheLayout) -> None:
    """Say for people what a directory holds; nothing reads it."""
    directory.mkdir(parents=True, exist_ok=True)
    described = {**identity, "documents_held": len(layout.lengths), "bytes": layout.num_bytes}
    write_json(directory / MANIFEST_FILE, described)


class HiddenCache:
    """Read a whole cache, a few documents at a time.

    Args:
        directory: The cache's own.
        layout: What it was built by.
    """

    def __init__(self, directory: Path, layout: CacheLayout) -> None:
        self.layout = layout
        # Mapped, not read: the system keeps in memory what fits.
        self._files = [safe_open(_shard_path(directory, shard), framework="pt") for shard in range(layout.num_shards)]

    def rows(self, sequences: Sequence[PackedSequence]) -> Tensor:
        """Return what ``isolated_hidden`` returns for packed sequences: (B, T, D), 0 on padding, on the CPU."""
        states_BTD = torch.zeros(
            len(sequences), len(sequences[0].input_ids_T), self.layout.width, dtype=self.layout.computed
        )
        for row, sequence in enumerate(sequences):
            place = 0
            for index in sequence.members:
                states_TD = self.document(index)
                states_BTD[row, place : place + len(states_TD)] = states_TD
                place += len(states_TD)
        return states_BTD

    def document(self, index: int) -> Tensor:
        """Return the states of one document, shape (T, D)."""
        shard = bisect_right(self.layout.first_documents, index) - 1
        begin = int(self.layout.starts[self.layout.first_documents[shard]])
        start, end = (int(place) - begin for place in self.layout.starts[index : index + 2])
        file = self._files[shard]
        states_TD: Tensor = file.get_slice(STATES)[start:end]
        if self.layout.dtype is torch.float8_e4m3fn:
            return (states_TD.float() * file.get_slice(SCALES)[start:end]).to(self.layout.computed)
        return states_TD.to(self.layout.computed)
