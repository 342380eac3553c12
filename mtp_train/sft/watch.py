"""What transformers' Trainer tells and is told while it fine-tunes: our log, our progress bar, our way of stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mtp_train.errors import TrainingError
from mtp_train.train.log import RunLog
from mtp_train.train.stop import StopSignal

# Hidden: what copies, exports or uploads a checkpoint leaves it out.
COMPLETE_FILE = ".complete"


def newest_checkpoint(state_dir: Path) -> Path | None:
    """Return the newest checkpoint that was saved to the end, None where there is none."""
    found = [path.parent for path in state_dir.glob(f"checkpoint-*/{COMPLETE_FILE}")]
    return max(found, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(checkpoint.name.rpartition("-")[-1])


class Watch(TrainerCallback):
    """Logs, checks and marks; the last of a trainer's callbacks, so that a mark says that all others are done.

    Args:
        make_log: Given the step resumed from, opens the log; None on processes that do not log.
        facts: Returns what the launcher gave, for every line of the log.
        on_step: Called after each step with the number of steps done, for a progress bar.
        sigterm: Says whether to stop.
    """

    def __init__(
        self,
        make_log: Callable[[int], RunLog | None],
        facts: Callable[[], dict[str, Any]],
        on_step: Callable[[int], None],
        sigterm: StopSignal,
        accelerator: Accelerator,
    ) -> None:
        self.make_log, self.facts, self.on_step, self.sigterm = make_log, facts, on_step, sigterm
        self.accelerator = accelerator
        self.log: RunLog | None = None
        self._since = 0.0
        self._tokens = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Open the log where the training goes on."""
        self.log = self.make_log(state.global_step)
        self._since, self._tokens = time.perf_counter(), int(state.num_input_tokens_seen)
        self.on_step(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Save and stop where any process was told to; look at the loss before anything is saved."""
        told = torch.tensor([float(self.sigterm.received)], device=self.accelerator.device)
        if self.accelerator.reduce(told, reduction="sum").item():
            control.should_save = control.should_training_stop = True
        control.should_log = control.should_log or control.should_save
        self.on_step(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Write a line.

        Raises:
            TrainingError: The loss or the gradient is not finite.
        """
        if logs is None or "loss" not in logs:
            return
        norm = float(logs.get("grad_norm", 0.0))
        if not (math.isfinite(logs["loss"]) and math.isfinite(norm)):
            raise TrainingError(
                f"step {state.global_step}: loss {logs['loss']}, gradient norm {norm}; expected finite numbers. Lower "
                "train.lr; the last saved checkpoint is untouched."
            )
        seconds, tokens = time.perf_counter() - self._since, int(state.num_input_tokens_seen) - self._tokens
        self._since, self._tokens = self._since + seconds, self._tokens + tokens
        if self.log is not None:
            self.log.log(state.global_step, log_line(logs, norm, tokens, seconds) | self.facts())

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Mark a checkpoint as whole, once every process has written its part."""
        self.accelerator.wait_for_everyone()
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero:
            (directory / COMPLETE_FILE).touch()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """End the log."""
        if self.log is not None:
            self.log.close()


def log_line(logs: dict[str, Any], norm: float, tokens: int, seconds: float) -> dict[str, Any]:
    """Turn the Trainer's numbers into those of one line; the losses of a head beside it are among them."""
    return {
        "loss": logs["loss"],
        **{name: value for name, value in logs.items() if name.startswith("mtp_loss")},
        "lr": logs["learning_rate"],
        "grad_norm": norm,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
    }
