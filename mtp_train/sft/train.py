"""Fine-tune the trunk of a run by transformers' Trainer, its head kept or trained beside it.

The Trainer's checkpoints are the resume state: they hold the model with its head, or an adapter.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

from accelerate import Accelerator
from rich.progress import Progress
from transformers import PrinterCallback, Trainer, TrainingArguments

from mtp_train.data.pack import global_batches
from mtp_train.data.rows import StepRows, pad_rows
from mtp_train.errors import StoppedError, TrainingError
from mtp_train.heads.sdpa import without_cudnn_attention
from mtp_train.inputs import Inputs
from mtp_train.joint import shards_model, train_head_beside
from mtp_train.preserve import keep_head
from mtp_train.recipe import Recipe
from mtp_train.recipe_sft import SftSection
from mtp_train.sft.cost import KEPT_CHECKPOINTS
from mtp_train.sft.model import load_model
from mtp_train.sft.watch import Watch, newest_checkpoint, step_of
from mtp_train.train.launch import run_facts
from mtp_train.train.log import RunLog
from mtp_train.train.plan import Plan
from mtp_train.train.stop import StopSignal, noted_sigterm
from mtp_train.training import STATE


def require_whole_model(accelerator: Accelerator) -> None:
    """Check that every process is to hold the whole model.

    Raises:
        TrainingError: The launcher asks for shards.
    """
    shards = shards_model(accelerator.state)
    if shards is not None:
        raise TrainingError(
            f"sft: the launcher asks for {shards}; expected every process to hold the whole model, whose checkpoints "
            "can then hold its head. Launch with recipes/accelerate/ddp.yaml or zero2.yaml, with sft.lora where it "
            "does not fit; or fine-tune in shards by a script of your own, and use mtp-train graft."
        )


def is_trained(run_dir: Path, recipe: Recipe) -> bool:
    """Say whether the training has been done to its end."""
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
    """Train from the newest whole checkpoint to the last step.

    Raises:
        TrainingError: The loss or the gradient is not finite.
        StoppedError: SIGTERM came; a checkpoint is saved.
    """
    state_dir = run_dir / STATE
    saved = newest_checkpoint(state_dir)
    if accelerator.is_main_process:
        clear_torn(state_dir)
    accelerator.wait_for_everyone()
    with noted_sigterm() as sigterm, without_cudnn_attention():
        trainer = make_trainer(recipe, sft, run_dir, inputs, saved, accelerator, progress, sigterm)
        trainer.train(resume_from_checkpoint=None if saved is None else str(saved))
    if trainer.state.global_step < recipe.train.max_steps:
        raise StoppedError(
            f"{run_dir}: told to stop (SIGTERM) after step {trainer.state.global_step} of {recipe.train.max_steps}; "
            "expected to go on to the end. The state is saved: start the same command again."
        )


def clear_torn(state_dir: Path) -> None:
    """Remove checkpoints that a kill left unfinished: the Trainer would count them."""
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
    sigterm: StopSignal,
) -> Trainer:
    """Put model, rows and what watches them together; ``saved`` is the checkpoint that the training goes on from."""
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
            sigterm,
            trainer.accelerator,
        )
    )
    return trainer


def open_log(recipe: Recipe, run_dir: Path, resume_step: int) -> RunLog:
    """Open the run's log where the training goes on."""
    track = recipe.track
    return RunLog(run_dir, wandb=track.wandb, project=track.project, config=asdict(recipe), resume_step=resume_step)


def training_arguments(recipe: Recipe, plan: Plan, state_dir: Path, *, on_cpu: bool) -> TrainingArguments:
    """Say in the Trainer's words what the recipe says."""
    train = recipe.train
    arguments = TrainingArguments(
        output_dir=str(state_dir),
        max_steps=plan.max_steps,
        per_device_train_batch_size=plan.micro_batch_sequences,
        gradient_accumulation_steps=plan.accumulation,
        # Rows stand in the order of the steps: where to go on is a matter of counting.
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
        # A loss that is not finite is to be seen, not replaced.
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
    if arguments.n_gpu > 1:
        # The Trainer would spread every batch over all the GPUs that it sees, and take a batch for each.
        arguments._n_gpu = 1
    return arguments
