"""Count the kernels that operations would launch on a GPU, and the bytes that they would move, on any device.

Each of torch's operations is one launch. Views and empty buffers launch nothing. Operations that are two kernels on a
GPU (a copy, then a change in place) count twice. What a GPU alone decides is not seen, such as splitting a product, or
the passes of a sort.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_LAUNCH = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
    "resize_",
    "_unsafe_view",
}
TWO_LAUNCHES = {
    "masked_fill",
    "masked_scatter",
    "scatter",
    "scatter_add",
    "index_put",
    "index_copy",
    "index_fill",
    "constant_pad_nd",
    "baddbmm",
    "slice_scatter",
    "select_scatter",
}
READ_IN_PART = {"gather", "index", "index_select", "embedding"}
"""Operations that read as much of their first tensor as they write."""


class LaunchCounter(TorchDispatchMode):
    """Count the launches of the operations inside the mode, by name, and their bytes.

    ``num_bytes`` counts each operand and each result of an operation once, without the copies of an expanded tensor: a
    lower bound for kernels that read an operand more than once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, and count it."""
        # In inference mode an operation arrives whole that autograd would have split into those that launch.
        with self:
            outputs = func.decompose(*args, **(kwargs or {}))
        if outputs is not NotImplemented:
            return outputs
        name = func.overloadpacket.__name__
        outputs = func(*args, **(kwargs or {}))
        if not func.is_view and name not in NO_LAUNCH:
            self.counts[name] += 2 if name in TWO_LAUNCHES else 1
            read = tree_leaves(outputs if name in READ_IN_PART else args[:1]) + tree_leaves((args[1:], kwargs))
            self.num_bytes += sum(_size(one) for one in read + tree_leaves(outputs) if isinstance(one, Tensor))
        return outputs


def _size(tensor: Tensor) -> int:
    elements = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= length if stride else 1
    return elements * tensor.element_size()
