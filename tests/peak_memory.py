"""Count the bytes of tensors allocated at the same time, on any device, the ``meta`` device included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Track the memory of tensors allocated inside the block, beside those given; ``peak_bytes`` is the maximum."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.given = {value.untyped_storage()._cdata for value in given}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and update the allocated tensors and the peak."""
        result = func(*args, **(kwargs or {}))
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in self.given:
                storage = value.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self.live.values()))
        return result
