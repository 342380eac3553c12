"""Cache the trunk's hidden states on disk: the trunk is frozen, so they are the same in every epoch and objective.

Only the layer that head and loss read is stored. Training from a cache runs no forward pass of the trunk: it needs the
embedding and the output matrix alone. A cache is a directory, named by :func:`cache_digest`, of shards::

    <digest>/states-00000.safetensors    the states of some documents, each under its number

A shard is complete or absent: an interrupted build continues with the missing shards.

:class:`HiddenCache` is such a directory, :class:`CachedStates` the states that training reads from it.

Shapes: S tokens of a shard, B rows, T tokens of a row or a document, D hidden.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from mtp_train.checkpoints.identity import Contents
from mtp_train.checkpoints.writing import held_tensors, write_safetensors
from mtp_train.data.pack import PackedSequence, collate, one_row
from mtp_train.data.tokenize import Document
from mtp_train.errors import TrainingError
from mtp_train.train.plan import GIB
from mtp_train.trunk.ends import Ends
from mtp_train.trunk.states import States, StoredStates

SHARD_BYTES = 1 << 28


def cache_digest(
    trunk: Contents,
    adapter: Contents | None,
    documents: Sequence[Document],
    *settings: object,
    dtype: torch.dtype,
    width: int,
) -> str:
    """Return a digest of everything that the stored states depend on.

    Args:
        settings: What else they depend on, as JSON has it: the precision, the quantisation, a server.
        dtype: Of the states.
        width: Of the states, D.
    """
    tokens = hashlib.sha256()
    for document in documents:
        tokens.update(len(document.input_ids).to_bytes(8, "little"))
        tokens.update(document.input_ids.tobytes())
    contents = dict(trunk), None if adapter is None else dict(adapter)
    identity = [tokens.hexdigest(), *contents, *settings, str(dtype), width]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


class HiddenCache:
    """The hidden states of documents, in shards of the same number of documents.

    Args:
        width: Of the states, D.
        dtype: Of the states.
    """

    def __init__(self, directory: Path, documents: Sequence[Document], *, width: int, dtype: torch.dtype) -> None:
        self.directory = directory
        self.documents = documents
        self.width = width
        self.dtype = dtype
        token_bytes = width * dtype.itemsize
        lengths = [len(document.input_ids) for document in documents]
        self.num_tokens = sum(lengths)
        self.num_bytes = self.num_tokens * token_bytes
        self.shard_documents = max(1, SHARD_BYTES // (max(lengths) * token_bytes))
        self.num_shards = -(-len(documents) // self.shard_documents)
        # Memory-mapped: the operating system caches as much as fits.
        self._file = cache(lambda shard: safe_open(self._path(shard), framework="pt"))

    def require_room(self) -> None:
        """Raise a TrainingError if the disk has no room for what is not written yet."""
        found = next(parent for parent in (self.directory, *self.directory.parents) if parent.exists())
        free = shutil.disk_usage(found).free
        missing = self.num_bytes - sum(path.stat().st_size for path in self.directory.glob("*.safetensors"))
        if missing > free:
            raise TrainingError(
                f"{self.directory}: {missing / GIB:.2f} GiB of hidden states for {self.num_tokens} tokens are to be "
                f"written; expected room for them, and {free / GIB:.2f} GiB are free. Name another directory in "
                "train.hidden_cache.directory, take fewer documents, or write train.hidden_cache: null."
            )

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are not written yet."""
        return [shard for shard in range(self.num_shards) if not self._path(shard).exists()]

    def build(
        self,
        states: States,
        missing: Sequence[int],
        *,
        device: torch.device,
        max_tokens: int,
        rank: int,
        world: int,
        on_shard: Callable[[int, int], None],
    ) -> None:
        """Write this process's part of the missing shards.

        Every process takes the same number of turns, also without a shard left to write: if the trunk is in shards, all
        processes run its forward passes together.

        Args:
            missing: As :meth:`missing` returned it in one process: others may see new files later.
            max_tokens: Most tokens of one forward pass, padding included.
            on_shard: Called with the number of turns done and the number in all.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        turns = [missing[first : first + world] for first in range(0, len(missing), world)]
        states.expect(member for shard in missing[rank::world] for member in self._row_of(shard).members)
        for turn, shards in enumerate(turns, start=1):
            rows = [self._row_of(shard) for shard in [*shards, *[self.num_shards] * (world - len(shards))]]
            own = collate([rows[rank]])
            prepared = states.prepare([[row] for row in rows], rank, max_tokens)
            states_1SD = states(own.tokens_BT.to(device), own.document_BT.to(device), prepared)
            if rank < len(shards):
                members = rows[rank].members
                parts = states_1SD[0].split([len(self.documents[member].input_ids) for member in members])
                self._write(self._path(shards[rank]), dict(zip(map(str, members), parts, strict=True)))
            on_shard(turn, len(turns))

    def _row_of(self, shard: int) -> PackedSequence:
        """Return a shard's documents in one row; for the number after the last shard, a token of padding."""
        members = range(len(self.documents))[shard * self.shard_documents : (shard + 1) * self.shard_documents]
        return one_row(self.documents, members, max(1, sum(len(self.documents[one].input_ids) for one in members)))

    def document(self, index: int) -> Tensor:
        return self._file(index // self.shard_documents).get_tensor(str(index))

    def _path(self, shard: int) -> Path:
        return self.directory / f"states-{shard:05d}.safetensors"

    @staticmethod
    def _write(path: Path, states: dict[str, Tensor]) -> None:
        # Two runs may build the same cache, also on two machines: each writes under a name of its own, then renames.
        partial = path.with_suffix(f".{socket.gethostname()}-{os.getpid()}.partial")
        partial.unlink(missing_ok=True)
        write_safetensors(partial, held_tensors(states))
        partial.replace(path)


class CachedStates(StoredStates):
    """States that are read from a cache."""

    def __init__(self, ends: Ends, cache: HiddenCache, dtype: torch.dtype) -> None:
        super().__init__(ends, width=cache.width, dtype=dtype)
        self.cache = cache

    def document(self, number: int) -> Tensor:
        return self.cache.document(number)
