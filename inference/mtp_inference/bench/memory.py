"""Count the bytes of tensors that live at once, on any device, tensors without storage (``meta``) included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Watch what is computed within the block; ``peak_bytes`` is the most that lived.

    Args:
        given: Tensors made before it, which do not count.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.given = {value.untyped_storage()._cdata for value in given}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and look at what is there afterwards."""
        result = func(*args, **(kwargs or {}))
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in self.given:
                storage = value.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self.live.values()))
        return result
