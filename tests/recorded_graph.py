"""CUDA graphs without a GPU: record every operation of a round, then run the operations again instead of Python.

As with a real graph, what was recorded keeps its addresses, and Python is not run again. What would wait for the device
is refused while recording, as CUDA refuses it. A recording that fails leaves what torch 2.11 leaves of a capture: its
stream as the current one, and an allocator that cannot give memory back, for which each new capture asks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mtp_inference.capture

WAITS = {
    "item",
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "allclose",
    "nonzero",
    "masked_select",
    "_unique2",
    "bincount",
}


class Recorder(TorchDispatchMode):
    """Record operations; tensors that one of them returned are known by number, all others by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], list[Any], dict[str, Any], list[int]]] = []
        self.returned: list[Tensor] = []
        self.numbers: dict[int, int] = {}
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_waiting(func, args)
        known_args = [each(self._known, value) for value in args]
        known_kwargs = {name: each(self._known, value) for name, value in kwargs.items()}
        outputs = func(*args, **kwargs)
        self.operations.append((func, known_args, known_kwargs, [self._number(one) for one in several(outputs)]))
        return outputs

    def replay(self) -> None:
        """Run the operations again; what the last one returned is written over."""
        values: list[Tensor | None] = [None] * len(self.returned)

        def value(leaf: Any) -> Any:
            return values[leaf.index] if isinstance(leaf, Number) else leaf

        for func, args, kwargs, numbers in self.operations:
            named = {name: each(value, leaf) for name, leaf in kwargs.items()}
            outputs = func(*[each(value, leaf) for leaf in args], **named)
            for number, output in zip(numbers, several(outputs), strict=True):
                if number >= 0:
                    values[number] = output
        last = values[-1]
        assert last is not None
        self.returned[-1].copy_(last)

    def undo(self) -> None:
        """Put back what the operations wrote: recording a CUDA graph does not run it."""
        for storage, saved in self.before.values():
            storage.copy_(saved)

    def _known(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self.numbers:
            return Number(self.numbers[id(leaf)])
        storage = leaf.untyped_storage()
        if storage.data_ptr() not in self.before:
            self.before[storage.data_ptr()] = storage, storage.clone()
        return leaf

    def _number(self, output: Any) -> int:
        """Return the number of a tensor not seen before, -1 for one that was written in place."""
        if not isinstance(output, Tensor) or id(output) in self.numbers:
            return -1
        self.numbers[id(output)] = len(self.returned)
        # Kept, so that no later tensor has its identity.
        self.returned.append(output)
        return self.numbers[id(output)]


@dataclasses.dataclass(frozen=True)
class Number:
    """Stands for a tensor that an earlier operation returned."""

    index: int


def each(change: Callable[[Any], Any], argument: Any) -> Any:
    """Change an argument of an operation, or each entry of one that is a list."""
    return [change(entry) for entry in argument] if isinstance(argument, list | tuple) else change(argument)


def several(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def refuse_waiting(func: Any, args: tuple[Any, ...]) -> None:
    name = func.overloadpacket.__name__
    by_mask = name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
    # A tensor made of Python values: on a GPU a copy from the host. A single value is passed along.
    by_copy = name == "lift_fresh" and args[0].ndim > 0
    if name in WAITS or by_mask or by_copy:
        raise RuntimeError(f"{name}: not permitted while a stream is capturing")


class RecordedGraph:
    """In place of ``torch.cuda.CUDAGraph``."""

    made: list[RecordedGraph]

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.num_replays = 0
        self.made.append(self)

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self.num_replays += 1
        with torch.inference_mode():
            self.recorder.replay()


DEFAULT_STREAM = "default stream"


class RecordedDevice:
    """In place of the parts of ``torch.cuda`` that know of streams and memory."""

    def __init__(self) -> None:
        self.stream: object = DEFAULT_STREAM
        self.is_broken = False

    def empty_cache(self) -> None:
        if self.is_broken:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def set_stream(self, stream: object) -> None:
        self.stream = stream

    @contextmanager
    def recording(
        self, graph: RecordedGraph, pool: str | None, stream: object, capture_error_mode: str
    ) -> Iterator[None]:
        """In place of ``torch.cuda.graph``."""
        assert capture_error_mode == "thread_local"
        self.empty_cache()
        assert pool == (None if len(graph.made) == 1 else "pool")
        before = self.stream
        self.stream = stream
        try:
            with pytest.MonkeyPatch.context() as patch, graph.recorder:
                # Reads the memory without an operation.
                patch.setattr(Tensor, "tolist", refuse_tolist)
                yield
        except RuntimeError:
            self.is_broken = True
            # Ending the capture fails, before the stream is put back.
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        finally:
            graph.recorder.undo()
        self.stream = before


def stand_in(patch: pytest.MonkeyPatch) -> RecordedDevice:
    """Put everything here in the place of torch's own; return the device."""
    device = RecordedDevice()
    RecordedGraph.made = []
    for name, ours in {
        "CUDAGraph": RecordedGraph,
        "graph": device.recording,
        "Stream": object,
        "current_stream": lambda: device.stream,
        "set_stream": device.set_stream,
        "empty_cache": device.empty_cache,
    }.items():
        patch.setattr(torch.cuda, name, ours)
    # Whether a capture has failed is known for the life of a process.
    patch.setattr(mtp_inference.capture, "_has_failed", False)
    return device


def refuse_tolist(tensor: Tensor) -> list[Any]:
    raise RuntimeError("tolist: not permitted while a stream is capturing")
