"""Count the kernels that a captured round would launch, on a CPU: operations of a round that compute or copy.

Each of torch's operations is one launch. Views and empty buffers launch nothing. Operations that are two kernels on a
GPU (a copy, then a change in place) count twice. What a GPU alone decides is not seen, such as splitting a product.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_inference.batch import NO_TOKEN, RoundPlan
from mtp_inference.capture import round_up
from mtp_inference.decoder import Needs, make_batch
from mtp_inference.drafters.drafter import DrafterMaker
from mtp_inference.kernels.fused import FusedKernels
from mtp_inference.session import PENDING_PLACES
from mtp_train.trunk.load import Trunk

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
    # One kernel for the splits of the keys, one that combines them.
    "attend_window",
}


class LaunchCounter(TorchDispatchMode):
    """Count the launches of the operations inside the mode, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # In inference mode an operation arrives whole that autograd would have split into those that launch.
        with self:
            outputs = func.decompose(*args, **(kwargs or {}))
        if outputs is not NotImplemented:
            return outputs
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NO_LAUNCH:
            self.counts[name] += 2 if name in TWO_LAUNCHES else 1
        return func(*args, **(kwargs or {}))


def launches_of_a_round(
    trunk: Trunk, drafting: DrafterMaker | None, depth: int, fused: FusedKernels | None
) -> Counter[str]:
    """Count the launches of a round of one row, planned as a captured round is, after a prefill and one round."""
    needs = Needs(num_rows=1, capacity=32, max_window=8, depth=depth, num_stops=1, penalises=False)
    batch = make_batch(trunk, drafting, needs, "argmax", prefill_chunk=8, fused=fused)
    batch.reset()
    prompt_RT = torch.arange(4)[None]
    batch.prefill(slice(0, 1), prompt_RT, torch.tensor([16]), torch.tensor([[NO_TOKEN]]))
    batch.depth_B.fill_(depth)
    plan = RoundPlan(depth, 5 + depth, 1, PENDING_PLACES, None)
    plan = round_up(plan, batch.cache.capacity, batch.reads_lengths)
    batch.run_round(plan)
    with LaunchCounter() as counter:
        batch.run_round(plan)
    return counter.counts
