"""Two optimiser steps of every family's tiny model under whatever launcher started this, and its states kept before.

A file gets what came of it. The documents of a step differ in number and length, so that processes run the trunk a
different number of times.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import nn
from torch.distributed.tensor import DTensor

from assistants import HAS_ASSISTANTS, assistant_head, tiny_assistant, tiny_gemma_trunk
from cpu_shards import pretend_to_have_gpus
from documents import random_documents
from json_files import write_json
from mtp_train.data.pack import PackedSequence, collate, pack_documents
from mtp_train.heads.head import Head
from mtp_train.heads.lora import put_on_lora
from mtp_train.recipe.sections import LoraSection
from mtp_train.runs.settings import plan_of, train_options
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.launch import RunAccelerator, make_accelerator
from mtp_train.train.loop import train_head
from mtp_train.train.shard import ShardedStates, gather_in, give_up_shards, shards_trunk
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.states import TrunkStates, isolated_hidden
from runs import tiny_recipe
from tiny import ALL_FAMILIES, chained_head, tiny_head, tiny_trunk

SEQ_LEN, NUM_DEPTHS, SEQUENCES, STEPS = 24, 2, 4, 2
LENGTHS = (24, 24, 3, 5, 7, 9, 23)
TIED = "qwen3_5, tied"
HALF = "qwen3_5, bfloat16"
HALF_EXPERTS = "glm4_moe, bfloat16"
ADAPTED = "glm4_moe, bfloat16, LoRA"
RESUMED = (HALF_EXPERTS, ADAPTED)
"""Their last step is done again, from the state before it."""
RECOMPUTED = "qwen3_5, recomputed"
KEYS_ONLY = "qwen3_5, two modules that read the text alike"
"""Forwards of the head that end at keys and values."""
ASSISTED = "gemma4, with its assistant"
CASES = (*ALL_FAMILIES, TIED, HALF, *RESUMED, RECOMPUTED, KEYS_ONLY, *([ASSISTED] if HAS_ASSISTANTS else []))
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
    ends: int
    """Numbers of the trunk outside of its layers."""
    held_ends: int
    """Of them in this process, between steps."""
    rounded: int
    """Numbers in the head's linear layers and experts."""
    gathered: int
    """Gathers of so many numbers, in bf16."""
    summed: list[str]
    """The dtypes in which gradients were summed over the processes."""


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
    tokens_1T = batch.tokens_BT
    document_1T = batch.document_BT
    expected = isolated_hidden(trunk, tokens_1T, document_1T)
    whole = held(trunk.layers)
    states = ShardedStates(trunk)
    gather_in(states, states.ends, accelerator)
    rows = [[sequences(0)[rank]] for rank in range(accelerator.num_processes)]
    prepared = states.prepare(rows, accelerator.process_index)
    off = float((states(tokens_1T, document_1T, prepared) - expected).abs().max())
    kept = held(trunk.layers)
    layers = [weakref.ref(layer) for layer in trunk.layers]
    del states, trunk
    gc.collect()
    return Kept(off, whole, kept, sum(layer() is not None for layer in layers))


def trunk_of(case: str) -> Trunk:
    """Return the trunk of a case, whole."""
    trunk = tiny_gemma_trunk() if case == ASSISTED else tiny_trunk(case.split(", ")[0], tied=case == TIED)
    return trunk.to(torch.bfloat16) if "bfloat16" in case else trunk


def module_of(case: str, accelerator: Accelerator) -> HeadTraining:
    """Return the trunk and the head of a case, whole."""
    trunk = trunk_of(case)
    makers: dict[str, Callable[[], Head]] = {
        KEYS_ONLY: lambda: chained_head(trunk, NUM_DEPTHS, drafts_only=True),
        ASSISTED: lambda: assistant_head(tiny_assistant()),
    }
    head = makers.get(case, lambda: tiny_head(trunk))()
    if case == ADAPTED:
        put_on_lora(head, LoraSection(r=2), seed=0)
    return HeadTraining(
        (ShardedStates if shards_trunk(accelerator) else TrunkStates)(trunk),
        head,
        num_depths=NUM_DEPTHS,
        kind="kl",
        temperature=1.0,
        recompute=case == RECOMPUTED,
        compute_dtype=torch.bfloat16 if "bfloat16" in case else torch.float32,
    )


@contextlib.contextmanager
def recording(new: str, old: str) -> Iterator[list[tuple[str, int]]]:
    """Yield a list that gets dtype and size of the result of every call of a collective, which torch 2.13 renamed."""
    name = new if hasattr(torch.distributed, new) else old
    collective = getattr(torch.distributed, name)
    found = list[tuple[str, int]]()

    def recorded(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append((str(output.dtype), output.numel()))
        return collective(output, *args, **kwargs)

    setattr(torch.distributed, name, recorded)
    yield found
    setattr(torch.distributed, name, collective)


def train(case: str, accelerator: RunAccelerator) -> Trained:
    """Train a case for two steps."""
    module = module_of(case, accelerator)
    whole = held(module.states)
    layers = held(module.ends.layers)
    weights = module.head.named_parameters()
    rounded = sum(one.numel() for name, one in weights if one.ndim > 1 and not name.endswith("gate.weight"))
    recipe = tiny_recipe(
        Path("anywhere"),
        Path("anywhere"),
        head__num_depths=NUM_DEPTHS,
        data__seq_len_tokens=SEQ_LEN,
        train__tokens_per_step=SEQUENCES * SEQ_LEN,
        train__max_steps=STEPS,
        train__save_steps=1,
    )
    lines = Lines()
    plan = plan_of(recipe, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = plan.accumulation
    with (
        tempfile.TemporaryDirectory() as own,
        recording("all_gather_single", "all_gather_into_tensor") as gathers,
        recording("reduce_scatter_single", "reduce_scatter_tensor") as sums,
    ):
        directory = Path(accelerator.said_by_main(own))
        for again in range(1 + (case in RESUMED)):
            if again:
                module = module_of(case, accelerator)
                if accelerator.is_main_process:
                    shutil.rmtree(directory / f"step-{STEPS:08d}")
                accelerator.free_memory()
                accelerator.wait_for_everyone()
            train_head(
                module,
                options=train_options(recipe),
                plan=plan,
                batch_fn=sequences,
                accelerator=accelerator,
                state_dir=directory,
                make_log=lambda _step: lines,
                on_step=lambda _done: None,
            )
            accelerator.wait_for_everyone()
    trunk = module.ends
    kept = held(trunk)
    kept_ends = held(trunk) - held(trunk.layers)
    if shards_trunk(accelerator):
        give_up_shards(trunk, accelerator)
    reference = weakref.ref(trunk)
    del trunk, module
    gc.collect()
    left = reference()
    remain = 0 if left is None else held(left)
    gathered = gathers.count(("torch.bfloat16", rounded))
    summed = sorted({dtype for dtype, _ in sums})
    return Trained(lines.losses, whole, kept, remain, whole - layers, kept_ends, rounded, gathered, summed)


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
        write_json(Path(sys.argv[1]), {"kept": kept, "trained": trained})
