"""Two optimiser steps of every family's tiny model under whatever launcher started this, and its states kept before.

A file gets what came of it. The documents of a step differ in number and length, so that processes run the trunk a
different number of times.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import nn
from torch.distributed.tensor import DTensor

from cpu_shards import pretend_to_have_gpus
from documents import random_documents
from mtp_train.data.pack import PackedSequence, collate, pack_documents
from mtp_train.runs.settings import plan_of, train_options
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.launch import make_accelerator
from mtp_train.train.loop import train_head
from mtp_train.train.shard import ShardedStates, give_up_shards, shards_trunk
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.states import TrunkStates, isolated_hidden
from runs import tiny_recipe
from tiny import ALL_FAMILIES, chained_head, tiny_head, tiny_trunk

SEQ_LEN, NUM_DEPTHS, SEQUENCES, STEPS = 24, 2, 4, 2
LENGTHS = (24, 24, 3, 5, 7, 9, 23)
TIED = "qwen3_5, tied"
HALF = "qwen3_5, bfloat16"
RECOMPUTED = "qwen3_5, recomputed"
KEYS_ONLY = "qwen3_5, two modules that read the text alike"
"""Forwards of the head that end at keys and values."""
CASES = (*ALL_FAMILIES, TIED, HALF, RECOMPUTED, KEYS_ONLY)
KEPT_CASES = (
    "qwen3_5",
    "deepseek_v4",
    *(name for name in ("qwen4_exp",) if name in ALL_FAMILIES),
    "mimo",
    "mixtral",
    TIED,
    HALF,
)
"""Trunks that differ in what hidden states pass outside of the layers, or in what the layers hold."""


class Lines:
    """A log that keeps the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def log(self, _step: int, line: dict[str, Any]) -> None:
        self.losses.append(line["loss"])

    def close(self) -> None:
        """Do nothing."""


def sequences(step: int) -> Sequence[PackedSequence]:
    packed = pack_documents(random_documents(LENGTHS, seed=step), SEQ_LEN, pack=True, seed=0, epoch=0)
    assert len(packed) == SEQUENCES
    return packed


def held(module: nn.Module) -> int:
    """Return how many of a module's numbers are in this process."""
    parts = [
        parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.data for parameter in module.parameters()
    ]
    return sum((part.to_local() if isinstance(part, DTensor) else part).numel() for part in parts)


class Trained(NamedTuple):
    """What came of a case."""

    losses: list[float]
    whole: int
    """Numbers in the trunk."""
    held: int
    """Of them in this process, between steps."""
    left: int
    """Of them in this process, after they were given up."""


class Kept(NamedTuple):
    """What came of running a case's trunk in shards for its states alone, in this process."""

    off: float
    """The largest difference from what the whole trunk computes."""
    whole: int
    """Numbers in the trunk's layers."""
    held: int
    """Of them in this process, between passes."""
    left: int
    """Layers that are still somewhere after they were let go of."""


def keep(case: str, accelerator: Accelerator) -> Kept:
    """Run a case's trunk over a sequence, another one in each process."""
    trunk = trunk_of(case)
    batch = collate([sequences(0)[accelerator.process_index]])
    tokens_1T, document_1T = batch.tokens_BT, batch.document_BT
    expected = isolated_hidden(trunk, tokens_1T, document_1T)
    whole, states = held(trunk.layers), ShardedStates(trunk)
    states.gather_here(accelerator)
    rows = [[sequences(0)[rank]] for rank in range(accelerator.num_processes)]
    prepared = states.prepare(rows, accelerator.process_index)
    off = float((states(tokens_1T, document_1T, prepared) - expected).abs().max())
    kept, layers = held(trunk.layers), [weakref.ref(layer) for layer in trunk.layers]
    del states, trunk
    gc.collect()
    return Kept(off, whole, kept, sum(layer() is not None for layer in layers))


def trunk_of(case: str) -> Trunk:
    """Return the trunk of a case, whole."""
    trunk = tiny_trunk(case.split(", ")[0], tied=case == TIED)
    return trunk.to(torch.bfloat16) if case == HALF else trunk


def train(case: str, accelerator: Accelerator) -> Trained:
    """Train a case for two steps."""
    trunk = trunk_of(case)
    whole = held(trunk)
    module = HeadTraining(
        (ShardedStates if shards_trunk(accelerator) else TrunkStates)(trunk),
        chained_head(trunk, NUM_DEPTHS, drafts_only=True) if case == KEYS_ONLY else tiny_head(trunk),
        num_depths=NUM_DEPTHS,
        kind="kl",
        temperature=1.0,
        recompute=case == RECOMPUTED,
        compute_dtype=torch.bfloat16 if case == HALF else torch.float32,
    )
    recipe = tiny_recipe(
        Path("anywhere"),
        Path("anywhere"),
        head__num_depths=NUM_DEPTHS,
        data__seq_len_tokens=SEQ_LEN,
        train__tokens_per_step=SEQUENCES * SEQ_LEN,
        train__max_steps=STEPS,
        train__save_steps=STEPS,
    )
    lines = Lines()
    plan = plan_of(recipe, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = plan.accumulation
    with tempfile.TemporaryDirectory() as directory:
        train_head(
            module,
            options=train_options(recipe),
            plan=plan,
            batch_fn=sequences,
            accelerator=accelerator,
            state_dir=Path(directory),
            make_log=lambda _step: lines,
            on_step=lambda _done: None,
        )
        accelerator.wait_for_everyone()
    kept = held(trunk)
    if shards_trunk(accelerator):
        give_up_shards(trunk, accelerator)
    reference = weakref.ref(trunk)
    del trunk, module
    gc.collect()
    left = reference()
    return Trained(lines.losses, whole, kept, 0 if left is None else held(left))


if __name__ == "__main__":
    pretend_to_have_gpus()
    joined = make_accelerator()
    if joined.distributed_type is DistributedType.DEEPSPEED:
        # Everything here is small enough for DeepSpeed to keep it whole.
        settings = joined.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        settings["stage3_param_persistence_threshold"] = 0
    kept = {case: gather_object([keep(case, joined)._asdict()]) for case in KEPT_CASES}
    trained = {case: train(case, joined)._asdict() for case in CASES}
    if joined.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps({"kept": kept, "trained": trained}))
