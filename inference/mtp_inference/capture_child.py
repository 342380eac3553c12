"""Try to capture rounds in a child process, which :mod:`mtp_inference.capture_probe` starts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial

import torch

from mtp_inference.batch import RoundPlan
from mtp_inference.capture import capture_graph, round_up
from mtp_inference.capture_probe import GREEDY, SAMPLED, ProbeSubject, described
from mtp_inference.decoder import GPU_CAPACITY_STEP, Needs, fused_kernels, make_batch
from mtp_inference.drafters.other_drafters import NgramDrafting
from mtp_inference.sampling.distributions import Sampling
from mtp_inference.session import PENDING_PLACES
from mtp_train.families import FAMILIES
from mtp_train.trunk.load import Trunk, empty_trunk

DEPTH = 3
PROMPT_TOKENS = 8
KINDS = {
    GREEDY: Sampling(),
    SAMPLED: Sampling(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1),
}


def main() -> None:
    """Read a trunk's description from stdin; print which rounds cannot be captured as JSON lines."""
    subject = ProbeSubject.from_bytes(sys.stdin.buffer.read())
    refused = refused_rounds(subject, lambda kind: print(json.dumps({"capturing": kind}), flush=True))
    print(json.dumps({"refused": refused}), flush=True)
    # After a failed capture, an orderly exit may crash.
    os._exit(0)


def refused_rounds(subject: ProbeSubject, on_capture: Callable[[str], None]) -> dict[str, str]:
    """Capture a round of every kind; return the first kind that fails, with the reason.

    Args:
        subject: Description of the trunk and the batch.
        on_capture: Called with the kind before each capture.
    """
    trunk = rebuilt_trunk(subject)
    rows = slice(0, subject.num_rows)
    needs = Needs(
        num_rows=subject.num_rows,
        capacity=GPU_CAPACITY_STEP,
        max_window=PROMPT_TOKENS,
        depth=DEPTH,
        num_stops=0,
        penalises=True,
    )
    # All kinds of drafts give a window of the same shape.
    batch = make_batch(trunk, NgramDrafting(), needs, "argmax", PROMPT_TOKENS, fused=fused_kernels(trunk, None))
    prompt_RT = torch.zeros(subject.num_rows, PROMPT_TOKENS, dtype=torch.long, device=subject.device)
    room_R = torch.full((subject.num_rows,), GPU_CAPACITY_STEP, device=subject.device)
    batch.prefill(rows, prompt_RT, room_R, prompt_RT[:, :0])
    stream, pool = torch.cuda.Stream(), None
    for kind, sampling in KINDS.items():
        batch.chooser.set_rows(rows, [sampling] * subject.num_rows)
        for depth in (0, DEPTH):
            plan = RoundPlan(depth, PROMPT_TOKENS + DEPTH + 1, depth + 1, PENDING_PLACES, None)
            plan = round_up(plan, batch.cache.capacity, batch.reads_lengths)
            # Libraries choose kernels and allocate workspaces in this run.
            batch.run_round(plan)
            on_capture(kind)
            try:
                graph, _ = capture_graph(partial(batch.run_round, plan), pool, stream)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                return {kind: str(error)}
            graph.replay()
            pool = graph.pool()
    return {}


def rebuilt_trunk(subject: ProbeSubject) -> Trunk:
    """Return a trunk with tensors of the same shapes and dtypes, whose weights share one buffer per dtype.

    Raises:
        ValueError: A model built from the config has other weights than the trunk.
    """
    family = next(family for family in FAMILIES if family.name == subject.family)
    trunk = empty_trunk(subject.config, family)
    # Compare shapes only: a config contains just the default dtype.
    made = {name: shape for name, (shape, _) in described(trunk).items()}
    if made != {name: shape for name, (shape, _) in subject.weights.items()}:
        raise ValueError("trunk: its config makes other weights than it has; expected the same.")
    model = trunk.causal_lm
    sizes: dict[torch.dtype, int] = {}
    for shape, dtype in subject.weights.values():
        sizes[dtype] = max(sizes.get(dtype, 0), torch.Size(shape).numel())
    shared = {dtype: torch.zeros(size, dtype=dtype, device=subject.device) for dtype, size in sizes.items()}
    for name, (shape, dtype) in subject.weights.items():
        path, _, leaf = name.rpartition(".")
        value = shared[dtype][: torch.Size(shape).numel()].view(shape)
        model.get_submodule(path)._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
    for name, values in subject.buffers.items():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = values.to(subject.device)
    return trunk.eval()
