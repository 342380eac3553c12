"""Tiny trunks that processes share, decoded under whatever launcher started this; a file gets each process's texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoints import save_stripped
from mtp_inference import Request, Sampling, SpeculativeDecoder
from mtp_inference.sampling.chooser import Chooser
from mtp_train.errors import TrainingError
from mtp_train.stopping import leave
from mtp_train.train.launch import RunAccelerator, make_accelerator
from mtp_train.trunk.load import Trunk, load_trunk
from tiny import family_of, tiny_head, tiny_trunk

PROMPTS = ([5, 9, 3, 7, 2, 8], [11, 4, 6, 1, 9, 12, 13, 2])
NEW_TOKENS, DEPTH = 24, 3
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0, top_p=0.9, seed=3)}


def texts(trunk: Trunk, depth: int, sampling: Sampling) -> list[list[int]]:
    """Return the new tokens of the prompts, decoded together."""
    decoder = SpeculativeDecoder(trunk, tiny_head(trunk) if depth else None, depth, ())
    requests = [Request(prompt_ids=ids, max_new_tokens=NEW_TOKENS, sampling=sampling) for ids in PROMPTS]
    return [list(result.token_ids) for result in decoder.decode(requests)]


def held(trunk: Trunk) -> int:
    """Return the number of this process's weights."""
    parts = [one.to_local() if isinstance(one, DTensor) else one for one in trunk.parameters()]
    return sum(part.numel() for part in parts)


def decoded(trunk: Trunk) -> dict[str, Any]:
    """Return the texts without drafts and with drafts, greedy and sampled."""
    return {
        name: {"plain": texts(trunk, 0, sampling), "drafted": texts(trunk, DEPTH, sampling)}
        for name, sampling in SAMPLINGS.items()
    }


def shared(name: str, directory: Path, accelerator: RunAccelerator) -> Trunk:
    """Load this process's part of a tiny trunk."""
    if accelerator.is_main_process:
        save_stripped(tiny_trunk(name), directory / name)
    accelerator.wait_for_everyone()
    group = accelerator.parallel_group(accelerator.num_processes)
    device = accelerator.device
    return load_trunk(directory / name, family_of(name), dtype=torch.float32, device=device, group=group)


def other_requests(trunk: Trunk, rank: int) -> str:
    """Return the error of requests that differ between processes."""
    try:
        texts(trunk, DEPTH, Sampling(temperature=1.0, seed=rank))
    except TrainingError as error:
        return str(error)
    return "no error"


def parted(trunk: Trunk, rank: int) -> dict[str, Any]:
    """Return the texts of processes of which all but the first would accept nothing, and how often this one would."""
    stock, changed = Chooser.verify, []

    def verify(chooser: Chooser, *given: Any) -> tuple[Tensor, Tensor]:
        accepted_B, tokens_BT = stock(chooser, *given)
        if rank == 0:
            return accepted_B, tokens_BT
        changed.append(int(accepted_B.sum()) + tokens_BT.numel())
        return torch.zeros_like(accepted_B), (tokens_BT + 1) % 8

    Chooser.verify = verify  # type: ignore[method-assign]
    try:
        return {"texts": texts(trunk, DEPTH, Sampling()), "changed": sum(changed)}
    finally:
        Chooser.verify = stock  # type: ignore[method-assign]


def measure(names: Sequence[str], directory: Path, accelerator: RunAccelerator) -> dict[str, Any]:
    """Return what the processes decode with each of these trunks, by name and process."""
    rank = accelerator.process_index
    found: dict[str, Any] = {}
    for name in names:
        trunk = shared(name, directory, accelerator)
        own = {"held": held(trunk), "decoded": decoded(trunk)}
        if name == names[0]:
            own |= {"other_requests": other_requests(trunk, rank), "parted": parted(trunk, rank)}
        found[name] = accelerator.gather_items([own])
    return found


if __name__ == "__main__":
    joined = make_accelerator()
    into, *wanted = sys.argv[1:]
    result = measure(wanted, Path(into).parent, joined)
    if joined.is_main_process:
        Path(into).write_text(json.dumps(result))
    joined.wait_for_everyone()
    leave(0)
