"""Cache the trunk's hidden states on disk: the trunk is frozen, so they are the same in every epoch and objective.

Only the layer that head and loss read is stored. Training from a cache runs no forward pass of the trunk: it needs the
embedding and the output matrix alone. A cache is a directory, named by :func:`cache_digest`, of shards::

    <digest>/states-00000.safetensors    the states of some documents, each under its number

A shard is complete or absent: an interrupted build continues with the missing shards.

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

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from mtp_train.checkpoints.files import SAFETENSORS_DTYPES
from mtp_train.checkpoints.identity import Contents
from mtp_train.checkpoints.writing import held_tensor, write_safetensors
from mtp_train.data.pack import PackedSequence
from mtp_train.data.tokenize import Document
from mtp_train.errors import TrainingError
from mtp_train.heads.alignment import PADDING_DOCUMENT
from mtp_train.train.plan import GIB

SHARD_BYTES = 1 << 28

HiddenFn = Callable[[Tensor, Tensor, int], Tensor]
"""From tokens (1, S), their document numbers (1, S) and the most tokens of one forward pass to the trunk's hidden
states (1, S, D), as :func:`mtp_train.train.packed_rows.isolated_hidden`. With a trunk in shards, all processes have to
call it equally often."""


def cache_digest(
    trunk: Contents, adapter: Contents | None, documents: Sequence[Document], state: Tensor, *settings: str | None
) -> str:
    """Return a digest of everything that the stored states depend on.

    Args:
        state: Any state, whose width and dtype count.
        settings: The precision, the quantisation and the held dtype of the trunk.
    """
    tokens = hashlib.sha256()
    for document in documents:
        tokens.update(len(document.input_ids).to_bytes(8, "little"))
        tokens.update(document.input_ids.tobytes())
    contents = [dict(trunk), None if adapter is None else dict(adapter)]
    identity = [tokens.hexdigest(), *contents, *settings, str(state.dtype), state.shape[-1]]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def one_state(hidden_fn: HiddenFn, device: torch.device) -> Tensor:
    """Return the trunk's state of one token, (1, 1, D), for the width and the dtype of its states."""
    token_11 = torch.zeros(1, 1, dtype=torch.long, device=device)
    return hidden_fn(token_11, torch.zeros_like(token_11), 1)


class HiddenCache:
    """The hidden states of documents, in shards of the same number of documents.

    Args:
        state: Any state, for the width and the dtype.
    """

    def __init__(self, directory: Path, documents: Sequence[Document], state: Tensor) -> None:
        self.directory, self.documents = directory, documents
        self.width, self.dtype = state.shape[-1], state.dtype
        token_bytes = self.width * self.dtype.itemsize
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

    def build(
        self,
        hidden_fn: HiddenFn,
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
        self.directory.mkdir(parents=True, exist_ok=True)
        num_turns = -(-self.num_shards // world)
        for turn in range(num_turns):
            shard = turn * world + rank
            is_missing = shard < self.num_shards and not self._path(shard).exists()
            first = shard * self.shard_documents
            documents = self.documents[first : first + self.shard_documents] if is_missing else []
            states_1SD = hidden_fn(*_in_one_row(documents, device), max_tokens)
            if is_missing:
                parts = states_1SD[0].split([len(document.input_ids) for document in documents])
                self._write(self._path(shard), {str(first + index): part for index, part in enumerate(parts)})
            on_shard(turn + 1, num_turns)

    def rows(self, sequences: Sequence[PackedSequence]) -> Tensor:
        """Return what ``isolated_hidden`` returns for packed sequences: (B, T, D), 0 on padding, on the CPU."""
        states_BTD = torch.zeros(len(sequences), len(sequences[0].input_ids_T), self.width, dtype=self.dtype)
        for row, sequence in enumerate(sequences):
            states_TD = torch.cat([self.document(index) for index in sequence.members])
            states_BTD[row, : len(states_TD)] = states_TD
        return states_BTD

    def document(self, index: int) -> Tensor:
        return self._file(index // self.shard_documents).get_tensor(str(index))

    def _path(self, shard: int) -> Path:
        return self.directory / f"states-{shard:05d}.safetensors"

    @staticmethod
    def _write(path: Path, states: dict[str, Tensor]) -> None:
        # Two runs may build the same cache, also on two machines: each writes under a name of its own, then renames.
        partial = path.with_suffix(f".{socket.gethostname()}-{os.getpid()}.partial")
        partial.unlink(missing_ok=True)
        tensors = [held_tensor(name, SAFETENSORS_DTYPES[value.dtype], value) for name, value in states.items()]
        write_safetensors(partial, tensors)
        partial.replace(path)


def _in_one_row(documents: Sequence[Document], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and document numbers, (1, S); one token of padding if there are no documents."""
    if not documents:
        token_11 = torch.zeros(1, 1, dtype=torch.long, device=device)
        return token_11, torch.full_like(token_11, PADDING_DOCUMENT)
    ids = np.concatenate([document.input_ids for document in documents])
    numbers = np.repeat(np.arange(len(documents)), [len(document.input_ids) for document in documents])
    return torch.from_numpy(ids).long()[None].to(device), torch.from_numpy(numbers)[None].to(device)
