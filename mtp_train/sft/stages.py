"""A fine-tune as a recipe: train the trunk, write it in its own layout, measure its head, export the better one.

The stages are those of a run (``mtp_train.pipeline``), and like them skipped where they are done. The fine-tune itself
is never refused because of its head.
"""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import Progress

from mtp_train.heads.attach import build_head, graft_plan
from mtp_train.heads.diagnose import layout_of, text_config_of
from mtp_train.inputs import Inputs, gather_inputs
from mtp_train.joint import trained_weights
from mtp_train.machine import settle_threads, tell_precision
from mtp_train.model_card import write_card
from mtp_train.recipe import Recipe
from mtp_train.recipe_sft import SftSection
from mtp_train.report.schema import RunReport
from mtp_train.report.table import summary
from mtp_train.report.wording import headline
from mtp_train.report.write import write_report
from mtp_train.run_dir import PROVENANCE_FILE, Outcome, clear_leftovers
from mtp_train.run_inputs import hash_run_inputs, require_run_inputs
from mtp_train.sft.measure import Tuned, after_tuning, measure_tuned
from mtp_train.sft.model import lora_layers, require_trainable, unloaded_trunk
from mtp_train.sft.train import fine_tune_stage, is_trained, require_whole_model
from mtp_train.sft.watch import newest_checkpoint
from mtp_train.sft.write import write_tuned
from mtp_train.stages import Stage, claim_run, load_run_trunk
from mtp_train.training import HEAD, STATE, trained_artifact
from mtp_train.weights.adapter import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from mtp_train.weights.artifact import load_artifact, save_artifact
from mtp_train.weights.export import write_checkpoint
from mtp_train.weights.files import open_checkpoint, read_json
from mtp_train.weights.native import NativeHead
from mtp_train.weights.writing import new_directory

EXPORT, TUNED, ADAPTER = "export", "tuned", "adapter"


def run_sft_stages(
    recipe: Recipe, run_dir: Path, accelerator: Accelerator, console: Console, progress: Progress, stage: Stage
) -> Outcome:
    """Go through the stages. Only the main process writes the checkpoint, measures and prints."""
    sft = section_of(recipe)
    require_whole_model(accelerator)
    inputs = gather_inputs(recipe, accelerator.num_processes, progress)
    tell_precision(recipe, accelerator.device, progress.console)
    rows = recipe.train.micro_batch_sequences * recipe.data.seq_len_tokens
    settle_threads("training", rows, inputs.finetune, accelerator.device, progress.console)
    require_trainable(inputs.finetune.family, inputs.finetune.config, where=inputs.finetune.path)
    if sft.lora is not None:
        # Raises where LoRA has nothing to be put on.
        lora_layers(unloaded_trunk(recipe, inputs.finetune), sft.lora)
    main = accelerator.is_main_process
    records = hash_run_inputs(recipe, run_dir, progress) if main else {}
    if main:
        clear_leftovers(run_dir)
    inputs = claim_run(recipe, run_dir, inputs, records, accelerator, progress)
    if not is_trained(run_dir, recipe):
        stage.name = "train"
        fine_tune_stage(recipe, sft, run_dir, inputs, accelerator, progress)
    accelerator.wait_for_everyone()
    if not main:
        return Outcome(0, "done", "", "done")
    # The model goes before the checkpoint that was made of it comes.
    gc.collect()
    stage.name = "write"
    # The trunk that was loaded, and whose checkpoint is written anew now, is the one that the run began with.
    require_run_inputs(recipe, run_dir, progress)
    write_trained(recipe, sft, run_dir, inputs, progress)
    stage.name = "evaluate"
    name = str(run_dir / EXPORT)
    tuned = after_tuning(recipe, inputs, open_checkpoint(run_dir / TUNED), name)
    trunk = load_run_trunk(tuned.recipe, tuned.inputs, accelerator)
    report, measured = measure_tuned(run_dir, sft, tuned, trunk, progress)
    origin = read_json(run_dir / PROVENANCE_FILE)
    write_report(report, run_dir, provenance=origin, marginal_ci95=measured.marginal_ci95)
    console.print(summary(report))
    stage.name = "export"
    export_tuned(recipe, run_dir, tuned, report)
    shutil.rmtree(run_dir / TUNED)
    # The detail comes last: it may end in a command, which is copied.
    message = f"Exported to {name}. {headline(report).detail}"
    if report.lossless is not None and report.lossless.faults:
        return Outcome(1, "not_lossless", message, "done")
    return Outcome(0, "done", message, "done")


def section_of(recipe: Recipe) -> SftSection:
    """Return the recipe's fine-tune.

    Raises:
        ValueError: It has none.
    """
    if recipe.sft is None:
        raise ValueError("the recipe has no sft section; expected one. Run it by mtp_train.pipeline.run.")
    return recipe.sft


def write_trained(recipe: Recipe, sft: SftSection, run_dir: Path, inputs: Inputs, progress: Progress) -> None:
    """Write what the last checkpoint of the training holds, each part where it is not there yet.

    The trunk in its own layout, as ``tuned``; the head that was trained beside it; the adapter.
    """
    saved = newest_checkpoint(run_dir / STATE)
    if saved is None:
        raise ValueError(f"{run_dir}: no whole checkpoint; expected a training that was done.")
    if sft.head == "beside" and not (run_dir / HEAD).is_dir():
        head = build_head(inputs.head_plan, text_config_of(inputs.finetune), dtype=torch.float32)
        # A module that no depth uses was not trained.
        head.load_state_dict(trained_weights(saved), strict=False)
        save_artifact(trained_artifact(recipe, inputs, head.state_dict(), None), run_dir / HEAD)
    if sft.lora is not None and not (run_dir / ADAPTER).is_dir():
        with new_directory(run_dir / ADAPTER, what="the adapter") as directory:
            for file in (ADAPTER_CONFIG_FILE, ADAPTER_FILE):
                shutil.copyfile(saved / file, directory / file)
    if not (run_dir / TUNED).is_dir():
        write_tuned(inputs.finetune, saved, run_dir / TUNED, link=recipe.export.link, progress=progress)


def export_tuned(recipe: Recipe, run_dir: Path, tuned: Tuned, report: RunReport) -> None:
    """Write the tuned trunk with the better head, and its card."""
    if not (run_dir / EXPORT).exists():
        trunk = tuned.inputs.finetune
        head = chosen_head(recipe, run_dir, tuned, report)
        # The links outlive the directory that they lead to.
        write_checkpoint(trunk, layout_of(trunk), head, run_dir / EXPORT, link="hard")
    write_card(run_dir, run_dir / EXPORT)


def chosen_head(recipe: Recipe, run_dir: Path, tuned: Tuned, report: RunReport) -> NativeHead:
    """Return the head that the gate chose, or the one that was kept."""
    if report.gate is not None and report.gate.passed:
        return load_artifact(run_dir / HEAD).head
    trunk, donor = tuned.inputs.finetune, tuned.inputs.base
    if donor is None or recipe.head.init == "native":
        # It is in there still, byte for byte.
        donor = trunk
    return graft_plan(trunk, donor, recipe.head.convention).template
