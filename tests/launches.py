"""Count the kernels that a captured round would launch, on a CPU: operations of a round that compute or copy."""

from __future__ import annotations

from collections import Counter

import torch

from mtp_inference.batch import NO_TOKEN, RoundPlan
from mtp_inference.bench.launches import LaunchCounter
from mtp_inference.capture import round_up
from mtp_inference.decoder import Needs, make_batch
from mtp_inference.drafters.drafter import DrafterMaker
from mtp_inference.kernels.fused import FusedKernels
from mtp_inference.session import PENDING_PLACES
from mtp_train.trunk.load import Trunk


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
    plan = round_up(RoundPlan(depth, 5 + depth, 1, PENDING_PLACES, None), batch.cache.capacity)
    batch.run_round(plan)
    with LaunchCounter() as counter:
        batch.run_round(plan)
    return counter.counts
