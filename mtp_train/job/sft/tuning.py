"""Fine-tune the trunk of a run by transformers' Trainer, its head kept or trained beside it.

The Trainer's checkpoints are the resume state: they contain the model with its head, or an adapter.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.progress import Progress
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mtp_train.data.pack import global_batches
from mtp_train.data.trainer_rows import StepRows, pad_rows
from mtp_train.errors import TrainingError
from mtp_train.heads.attention import without_cudnn_attention
from mtp_train.heads.experts import following_autocast
from mtp_train.hooks.keep_head import keep_head
from mtp_train.hooks.train_beside import shards_model, train_head_beside
from mtp_train.job.inputs import Inputs
from mtp_train.job.sft.estimate_memory import KEPT_CHECKPOINTS
from mtp_train.job.sft.tuned_model import load_model
from mtp_train.job.training import STATE
from mtp_train.recipe.schema import Recipe, SftSection
from mtp_train.recipe.shipped import accelerate_file
from mtp_train.stopping import Signals, noted_signal, stopped_after
from mtp_train.train.launch import run_facts
from mtp_train.train.log import RunLog
from mtp_train.train.plan import Plan
from mtp_train.upstream.transformers_private import use_one_gpu

# A hidden file: copies, exports and uploads of a checkpoint leave it out.
COMPLETE_FILE = ".complete"


def newest_checkpoint(state_dir: Path) -> Path | None:
    """Return the newest complete checkpoint; None if there is none."""
    found = [path.parent for path in state_dir.glob(f"checkpoint-*/{COMPLETE_FILE}")]
    return max(found, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(checkpoint.name.rpartition("-")[-1])


class Watch(TrainerCallback):
    """Logs, checks losses, and marks complete checkpoints. It is the trainer's last callback: a mark is set last.

    Args:
        make_log: From the step to resume at to the open log; None on processes that do not log.
        facts: Returns the facts of the launch, for every line of the log.
        on_step: Called after each step with the number of steps done, for a progress bar.
        signals: The signals that this process received.
    """

    def __init__(
        self,
        make_log: Callable[[int], RunLog | None],
        facts: Callable[[], dict[str, Any]],
        on_step: Callable[[int], None],
        signals: Signals,
        accelerator: Accelerator,
    ) -> None:
        self.make_log, self.facts, self.on_step, self.signals = make_log, facts, on_step, signals
        self.accelerator = accelerator
        self.log: RunLog | None = None
        self._since = 0.0
        self._tokens = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Open the log at the step that training starts or resumes at."""
        self.log = self.make_log(state.global_step)
        self._since, self._tokens = time.perf_counter(), int(state.num_input_tokens_seen)
        self.on_step(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Save and stop if any process received a signal; check the loss before anything is saved."""
        told = torch.tensor([float(self.signals.number is not None)], device=self.accelerator.device)
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
        """Write a line of the log.

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
        """Mark a checkpoint as complete after every process has written its part."""
        self.accelerator.wait_for_everyone()
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero:
            (directory / COMPLETE_FILE).touch()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Close the log."""
        if self.log is not None:
            self.log.close()


def log_line(logs: dict[str, Any], norm: float, tokens: int, seconds: float) -> dict[str, Any]:
    """Return the numbers of one log line from the Trainer's, including the losses of a head beside it."""
    return {
        "loss": logs["loss"],
        **{name: value for name, value in logs.items() if name.startswith("mtp_loss")},
        "lr": logs["learning_rate"],
        "grad_norm": norm,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def require_whole_model(accelerator: Accelerator) -> None:
    """Check that every process holds the whole model.

    Raises:
        TrainingError: The launcher asks for shards.
    """
    shards = shards_model(accelerator.state)
    if shards is not None:
        raise TrainingError(
            f"sft: the launcher asks for {shards}; expected every process to hold the whole model, so that checkpoints "
            f"can contain its head. Launch with {accelerate_file('ddp')} or {accelerate_file('zero2')}, with sft.lora "
            "if memory is short; or fine-tune in shards by a script of your own, and use mtp-train graft."
        )


def is_trained(run_dir: Path, recipe: Recipe) -> bool:
    """Return whether the training is finished."""
    newest = newest_checkpoint(run_dir / STATE)
    return newest is not None and step_of(newest) >= recipe.train.max_steps


def fine_tune_stage(
    recipe: Recipe,
    sft: SftSection,
    run_dir: Path,
    inputs: Inputs,
    accelerator: Accelerator,
    progress: Progress,
) -> None:
    """Train from the newest complete checkpoint to the last step.

    Raises:
        TrainingError: The loss or the gradient is not finite.
        StoppedError: A process received SIGTERM or SIGINT; a checkpoint is saved.
    """
    state_dir = run_dir / STATE
    saved = newest_checkpoint(state_dir)
    if accelerator.is_main_process:
        clear_torn(state_dir)
    accelerator.wait_for_everyone()
    with noted_signal() as signals, without_cudnn_attention():
        trainer = make_trainer(recipe, sft, run_dir, inputs, saved, accelerator, progress, signals)
        with following_autocast(trainer.model.config):
            trainer.train(resume_from_checkpoint=None if saved is None else str(saved))
    if trainer.state.global_step < recipe.train.max_steps:
        raise stopped_after(run_dir, trainer.state.global_step, recipe.train.max_steps, signals)


def clear_torn(state_dir: Path) -> None:
    """Remove checkpoints that a kill left incomplete, as the Trainer would count them."""
    newest = newest_checkpoint(state_dir)
    for path in state_dir.glob("checkpoint-*"):
        if newest is None or step_of(path) > step_of(newest):
            shutil.rmtree(path)


def make_trainer(
    recipe: Recipe,
    sft: SftSection,
    run_dir: Path,
    inputs: Inputs,
    saved: Path | None,
    accelerator: Accelerator,
    progress: Progress,
    signals: Signals,
) -> Trainer:
    """Return the trainer with its model, rows and callbacks; ``saved`` is the checkpoint to resume from."""
    plan, device = inputs.plan, accelerator.device
    batches = global_batches(
        inputs.documents,
        seq_len_tokens=recipe.data.seq_len_tokens,
        pack=False,
        sequences_per_step=plan.sequences_per_step,
        seed=recipe.seed,
    )
    arguments = training_arguments(recipe, plan, run_dir / STATE, on_cpu=device.type == "cpu")
    trainer = Trainer(
        model=load_model(recipe, sft, inputs, saved, device),
        args=arguments,
        train_dataset=StepRows(batches, plan.max_steps, plan.sequences_per_step),
        data_collator=pad_rows,
        processing_class=inputs.tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    donor = (inputs.base or inputs.finetune).path
    if sft.head == "beside":
        train_head_beside(
            trainer,
            donor,
            lr=sft.head_lr,
            num_depths=recipe.head.num_depths,
            depth_decay=recipe.objective.depth_decay,
        )
    else:
        keep_head(trainer.model, donor)
    task = progress.add_task("fine-tuning the trunk", total=plan.max_steps)
    trainer.add_callback(
        Watch(
            lambda resume_step: open_log(recipe, run_dir, resume_step) if trainer.is_world_process_zero() else None,
            lambda: run_facts(trainer.accelerator, trainer.model_wrapped, recipe.train.precision),
            lambda done: progress.update(task, completed=done),
            signals,
            trainer.accelerator,
        )
    )
    return trainer


def open_log(recipe: Recipe, run_dir: Path, resume_step: int) -> RunLog:
    """Open the run's log at the step that training resumes at."""
    track = recipe.track
    return RunLog(run_dir, wandb=track.wandb, project=track.project, config=asdict(recipe), resume_step=resume_step)


def training_arguments(recipe: Recipe, plan: Plan, state_dir: Path, *, on_cpu: bool) -> TrainingArguments:
    """Return the Trainer's arguments for the recipe's settings."""
    train = recipe.train
    arguments = TrainingArguments(
        output_dir=str(state_dir),
        max_steps=plan.max_steps,
        per_device_train_batch_size=plan.micro_batch_sequences,
        gradient_accumulation_steps=plan.accumulation,
        # Rows are in the order of the steps, so a resumed run only has to skip the first ones.
        train_sampling_strategy="sequential",
        learning_rate=train.lr,
        lr_scheduler_type="cosine" if train.schedule == "cosine" else "constant_with_warmup",
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        max_grad_norm=train.max_grad_norm,
        bf16=train.precision == "bf16",
        save_steps=train.save_steps,
        save_total_limit=KEPT_CHECKPOINTS,
        logging_steps=train.log_steps,
        # Log a loss that is not finite as it is, so that `Watch` can end the run.
        logging_nan_inf_filter=False,
        include_num_input_tokens_seen="non_padding",
        seed=recipe.seed,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and plan.world_size > 1 else None,
        dataloader_pin_memory=not on_cpu,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
    )
    # By default the Trainer uses all visible GPUs in one process (DataParallel), with a batch for each.
    use_one_gpu(arguments)
    return arguments
