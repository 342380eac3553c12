"""What a GPU is asked to do in a process of its own: ``python gpu_jobs.py steps FAMILY | failed-capture``.

Prints what came of it as JSON on the last line. Nothing here needs a package that only whole runs import (wandb,
deepspeed).
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.tensor import DTensor

from documents import random_documents
from mtp_inference import SpeculativeDecoder
from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.drafters.drafter import BatchSize, Drafter, RoundPlan
from mtp_inference.drafters.ngram_drafter import NgramDrafter, NgramDrafting
from mtp_inference.sampling.chooser import DraftChoice, Drafts
from mtp_train.data.pack import PackedSequence, pack_documents
from mtp_train.losses.chunked import depth_weights
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.launch import make_accelerator, prepare, run_facts, takes_fused
from mtp_train.train.loop import make_optimizer, micro_batches, optimise
from mtp_train.train.plan import TrainOptions, make_plan
from mtp_train.train.shard import ShardedStates, shards_trunk
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.states import TrunkStates
from tiny import tiny_head, tiny_trunk

SEQ_LEN, NUM_DEPTHS, STEPS = 24, 2, 2
LENGTHS = (24, 24, 3, 5, 7, 9, 23)
MAX_GRAD_NORM = 1.0
OPTIONS = TrainOptions(
    lr=1e-2,
    betas=(0.9, 0.95),
    weight_decay=0.0,
    max_grad_norm=MAX_GRAD_NORM,
    schedule="constant",
    warmup_steps=0,
    max_steps=STEPS,
    log_steps=1,
    save_steps=STEPS,
    depth_decay=0.6,
)


def sequences(step: int) -> list[PackedSequence]:
    """Return the packed documents of a step."""
    return pack_documents(random_documents(LENGTHS, seed=step), SEQ_LEN, pack=True, seed=0, epoch=0)


def two_steps(
    accelerator: Accelerator,
    family: str,
    *,
    bf16: bool = False,
    recompute: bool = False,
    second: AbstractContextManager[None] | None = None,
) -> dict[str, Any]:
    """Train a tiny head for two steps, the second one in a context.

    Returns:
        Losses and gradient norms, and where and how that was done.
    """
    num_sequences = len(sequences(0))
    trunk = tiny_trunk(family)
    compute_dtype = torch.bfloat16 if bf16 else torch.float32
    settings = {"kind": "kl", "temperature": 1.0, "recompute": recompute, "compute_dtype": compute_dtype}
    states = (ShardedStates if shards_trunk(accelerator) else TrunkStates)(trunk)
    module = HeadTraining(states, tiny_head(trunk), num_depths=NUM_DEPTHS, **settings)
    plan = make_plan(
        max_steps=STEPS,
        tokens_per_step=num_sequences * SEQ_LEN,
        seq_len_tokens=SEQ_LEN,
        micro_batch_sequences=num_sequences,
        world_size=accelerator.num_processes,
    )
    accelerator.gradient_accumulation_steps = plan.accumulation
    optimizer = make_optimizer(module.head, OPTIONS, fused=takes_fused(accelerator))
    wrapped, optimizer = prepare(module, optimizer, accelerator, plan, MAX_GRAD_NORM)
    wrapped.train()
    for group in optimizer.param_groups:
        group["lr"] = OPTIONS.lr
    found = []
    for step, context in enumerate((nullcontext(), second or nullcontext())):
        weight_K = depth_weights(NUM_DEPTHS, OPTIONS.depth_decay)
        given = micro_batches(sequences(step), plan, weight_K, accelerator, module.states)
        with context:
            found.append(optimise(wrapped, optimizer, accelerator, MAX_GRAD_NORM, given))
    joined = torch.distributed.is_initialized()
    return {
        "losses": [float(value) for sums_2K, _ in found for value in sums_2K[0]],
        "norms": [norm_1.item() for _, norm_1 in found],
        "sharded": sum(isinstance(parameter, DTensor) for parameter in module.ends.layers.parameters()),
        "backend": torch.distributed.get_backend() if joined else None,
        **run_facts(accelerator, wrapped, module.compute_dtype),
    }


def two_steps_on(family: str, *, on_cpu: bool, **settings: Any) -> dict[str, Any]:
    """Train in this process, whatever accelerate was used for before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return two_steps(Accelerator(cpu=on_cpu, mixed_precision="no"), family, **settings)


class WaitingDrafting(NgramDrafting):
    """Drafts are looked at by the host, which no graph can hold."""

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        return WaitingDrafter(size, trunk.lm_head_VD.device)


class WaitingDrafter(NgramDrafter):
    """Looks up drafts, and waits for them."""

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        drafts = super().draft(plan, choice)
        drafts.tokens_BK.sum().item()
        return drafts


def failed_capture(device: torch.device) -> dict[str, Any]:
    """Let a capture fail; return the process's warnings and its texts afterwards."""
    trunk = tiny_trunk("qwen3_5", seed=1).to(device)
    texts, captured, warned = [], [], []
    before = torch.cuda.current_stream()
    # Plainly, with the drafter that waits, and with one that would not.
    for drafting in (None, WaitingDrafting(), NgramDrafting()):
        decoder = SpeculativeDecoder(trunk, drafting, 3, (), captures=drafting is not None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            texts.append([list(result.token_ids) for result in decoder.generate([list(range(1, 9))], 24)])
        warned.append([str(one.message) for one in caught if "cannot be captured" in str(one.message)])
        captured.append(decoder.captured_rounds)
    return {
        "texts": texts,
        "captured": captured,
        "warned": warned,
        "on_the_stream_before": torch.cuda.current_stream() == before,
        "still_computes": float(torch.ones(3, device=device).sum()),
    }


def main() -> None:
    """Do what the command line names."""
    what, *words = sys.argv[1:]
    found = failed_capture(torch.device("cuda")) if what == "failed-capture" else two_steps(make_accelerator(), *words)
    if int(found.get("world_size", 1)) > 1:
        raise SystemExit("several processes; expected one")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
