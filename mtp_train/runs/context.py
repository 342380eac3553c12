"""What the stages of a run share: recipe, inputs and processes, and the trunk in memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Literal

import torch
from rich.progress import Progress

from mtp_train.checkpoints.identity import Records
from mtp_train.evaluation.decoding import Processes
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.forecast import Forecast
from mtp_train.runs.inputs import Inputs
from mtp_train.runs.run_directory import Attempt, RunDirectory
from mtp_train.runs.settings import plan_of
from mtp_train.train.launch import RunAccelerator
from mtp_train.train.plan import Plan
from mtp_train.train.shard import give_up_shards
from mtp_train.trunk.load import Trunk


@dataclass
class HeldTrunk:
    """The trunk in memory, of which there is one at a time."""

    trunk: Trunk | None = None
    form: Literal["whole", "in shards", "spent"] = "spent"
    """``spent``: in shards that a training has wrapped, so that no other one can use them."""
    dtype: torch.dtype | None = None

    @property
    def whole(self) -> Trunk | None:
        return self.trunk if self.form == "whole" else None

    def release(self, accelerator: RunAccelerator) -> None:
        """Let go of the trunk and its memory; the caller has to drop its own references."""
        if self.trunk is not None:
            give_up_shards(self.trunk, accelerator)
        self.trunk, self.form = None, "spent"
        # Shards and their hooks form reference cycles.
        gc.collect()


@dataclass
class RunContext:
    """What a run consists of. Every process of a launch has one."""

    recipe: Recipe
    directory: RunDirectory
    inputs: Inputs
    accelerator: RunAccelerator
    progress: Progress
    attempt: Attempt = field(default_factory=Attempt)
    records: Records = field(default_factory=dict)
    """Content hashes of the inputs from before they were loaded; of the main process."""
    held: HeldTrunk = field(default_factory=HeldTrunk)
    forecast: Forecast = field(default_factory=Forecast)

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def plan(self) -> Plan:
        return plan_of(self.recipe, self.accelerator.num_processes)

    @property
    def processes(self) -> Processes:
        return processes_of(self.accelerator)


def processes_of(accelerator: RunAccelerator) -> Processes:
    return Processes(accelerator.process_index, accelerator.num_processes, accelerator.gather_items)
