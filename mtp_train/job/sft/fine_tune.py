"""Run a recipe that fine-tunes the trunk: train it, write it in its own layout, measure its heads, export the better.

Stages that are done are skipped, as in ``mtp_train.job.pipeline``. The gate chooses between the head from before and
the head trained beside the trunk; it never refuses the fine-tuned trunk itself.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from mtp_train.acceptance.gate import GateVerdict, decide_gate
from mtp_train.errors import CheckpointError
from mtp_train.evaluation.results import RunReport
from mtp_train.evaluation.statistics import lossless
from mtp_train.heads.build import HeadPlan, artifact_plan, build_head, graft_plan
from mtp_train.heads.diagnose import layout_of, text_config_of
from mtp_train.hooks.train_beside import trained_weights
from mtp_train.job.evaluate_run import RETRAINED, MeasuredRun, changed_output, measure_arms, sample_texts
from mtp_train.job.held_out import HELD_OUT, held_out_figures
from mtp_train.job.input_identity import hash_run_inputs, require_run_inputs
from mtp_train.job.inputs import Inputs, gather_inputs
from mtp_train.job.model_card import write_card
from mtp_train.job.run_dir import PROVENANCE_FILE, Outcome, clear_leftovers, tell_precision
from mtp_train.job.sft.tuned_model import lora_layers, require_trainable, unloaded_trunk
from mtp_train.job.sft.tuning import fine_tune_stage, is_trained, newest_checkpoint, require_whole_model
from mtp_train.job.shared_files import require_shared
from mtp_train.job.stages import Stage, claim_run, load_run_trunk
from mtp_train.job.training import STATE, trained_artifact
from mtp_train.recipe.schema import Recipe, SftSection
from mtp_train.report.table import summary
from mtp_train.report.wording import headline
from mtp_train.report.write import write_report
from mtp_train.train.launch import RunAccelerator
from mtp_train.train.log import read_metrics
from mtp_train.train.threads import settle_threads
from mtp_train.trunk.load import Trunk
from mtp_train.weights.adapter import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    Adapter,
    AdapterWeights,
    is_adapter,
    read_adapter,
)
from mtp_train.weights.artifact import load_artifact, save_artifact
from mtp_train.weights.export import LinkMode, write_checkpoint
from mtp_train.weights.files import Checkpoint, open_checkpoint, read_json
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.lora_merge import plan_changes, write_merged
from mtp_train.weights.native import NativeHead, trunk_tensors
from mtp_train.weights.quantised import PLAIN_DTYPES
from mtp_train.weights.run_export import EXPORT, HEAD
from mtp_train.weights.suggestions import train_command
from mtp_train.weights.writing import new_directory


def write_tuned(source: Checkpoint, saved: Path, out: Path, *, link: LinkMode, progress: Progress) -> None:
    """Write a copy of ``source`` with the trained trunk; its head is unchanged.

    Args:
        source: The checkpoint that was fine-tuned; it is only read.
        saved: A checkpoint of the Trainer, or a LoRA adapter.
        out: The new directory.
        link: Hard-link files without a changed tensor, or copy them.
        progress: Shows the progress of writing.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: ``saved`` does not fit ``source``, a weight is not finite, or the disk is full.
    """
    layout = layout_of(source)
    adapter = read_adapter(saved) if is_adapter(saved) else whole_trunk(open_checkpoint(saved))
    changes = plan_changes(source, layout, adapter)
    if not adapter.pairs:
        require_all_changed(source, layout, changes.keys(), saved)
    write_merged(source, layout, changes, out, link=link, progress=progress)


def whole_trunk(saved: Checkpoint) -> Adapter:
    """Return a saved model as an adapter that replaces each of the trunk's tensors."""
    layout = layout_of(saved)
    # Integer tensors, such as hash-routing tables, are not trained.
    learnt = [key for key, info in saved.tensors.items() if info.dtype in PLAIN_DTYPES and not layout.is_head_key(key)]
    # For tied embeddings, transformers saves the input embedding only.
    keeps_tied = layout.lm_head_key not in saved.tensors
    return Adapter(saved.path, AdapterWeights(saved), (), {}, {key: key for key in learnt}, keeps_tied)


def require_all_changed(source: Checkpoint, layout: HeadLayout, changed: Collection[str], saved: Path) -> None:
    """Check that every floating-point tensor of the trunk is replaced.

    Raises:
        CheckpointError: A tensor would keep its old value.
    """
    trunk = trunk_tensors(source, layout).values()
    left = [key for key in trunk if source.tensors[key].dtype in PLAIN_DTYPES and key not in changed]
    if left:
        raise CheckpointError(
            f"{saved}: has no tensor for {left[0]} ({len(left)} such tensors of {source.path}); expected all of the "
            "trunk. Its own files are complete: use them as they are, and please report it."
        )


GRAFT = "graft"


@dataclass(frozen=True)
class Tuned:
    """A recipe and its inputs with the fine-tuned trunk in the place of the original one, for the evaluation."""

    recipe: Recipe
    inputs: Inputs


def after_tuning(recipe: Recipe, inputs: Inputs, tuned: Checkpoint, name: str) -> Tuned:
    """Return the recipe and the inputs of a run on the fine-tuned trunk; its ``graft`` arm is the head from before.

    Args:
        recipe: The recipe of the fine-tune.
        inputs: Its inputs.
        tuned: The fine-tuned checkpoint.
        name: Path of the export, to be named in the report.
    """
    donor = recipe.model.head_from or recipe.model.trunk
    return Tuned(
        replace(
            recipe,
            model=replace(recipe.model, trunk=name, head_from=donor),
            head=replace(recipe.head, init="graft"),
        ),
        replace(inputs, finetune=tuned, base=inputs.base or inputs.finetune),
    )


def tuned_plans(run_dir: Path, sft: SftSection, tuned: Tuned) -> dict[str, HeadPlan]:
    """Return the heads to measure on the tuned trunk."""
    donor = tuned.inputs.base or tuned.inputs.finetune
    plans = {GRAFT: graft_plan(tuned.inputs.finetune, donor, tuned.recipe.head.convention)}
    if sft.head == "beside":
        plans[RETRAINED] = artifact_plan(load_artifact(run_dir / "head"))
    return plans


def measure_tuned(
    run_dir: Path, sft: SftSection, tuned: Tuned, trunk: Trunk, accelerator: RunAccelerator, progress: Progress
) -> tuple[RunReport, MeasuredRun]:
    """Decode with every head and judge; the trunk may lose its layers at the end. Every process must call it.

    Without a head beside there is nothing to compare, and the report has no gate.
    """
    plans = tuned_plans(run_dir, sft, tuned)
    measured = measure_arms(tuned.recipe, run_dir, tuned.inputs, trunk, plans, accelerator, progress)
    gate = None
    if sft.head == "beside":
        gate = judge_beside(measured, tuned.recipe.gate.confidence)
    settings = {
        **measured.facts,
        HELD_OUT: held_out_figures(tuned.inputs, measured.outputs, tuned.inputs.documents),
        "fine_tuned": "all weights" if sft.lora is None else f"LoRA, rank {sft.lora.r}",
        "head": sft.head,
        "next": train_command(tuned.recipe.model.trunk, [source.path for source in tuned.recipe.data.sources]),
    }
    report = RunReport(
        arms=measured.results,
        lossless=lossless(measured.checked),
        gate=gate,
        settings=settings,
        cells=measured.cells,
        depths=measured.depths,
        samples=sample_texts(measured, tuned.inputs),
    )
    return report, measured


def judge_beside(measured: MeasuredRun, confidence: float) -> GateVerdict:
    """Decide whether the export gets the head that was trained beside the trunk; the reason names the head it gets."""
    refused = changed_output(measured, GRAFT)
    if refused is not None:
        return refused
    verdict = decide_gate(measured.pairs(GRAFT), GRAFT, confidence)
    told = "trained beside the trunk" if verdict.passed else "from before, which is not shown to be worse"
    return replace(verdict, reason=f"{verdict.reason}. The export has the head {told}")


TUNED, ADAPTER = "tuned", "adapter"


def run_sft_stages(
    recipe: Recipe, run_dir: Path, accelerator: RunAccelerator, console: Console, progress: Progress, stage: Stage
) -> Outcome:
    """Run all stages. Only the main process writes the checkpoint and the report."""
    sft = section_of(recipe)
    require_whole_model(accelerator)
    inputs = gather_inputs(recipe, accelerator.num_processes, progress)
    tell_precision(recipe, accelerator.device, progress.console)
    settle_threads("training", inputs.plan.micro_batch_tokens, inputs.finetune, accelerator.device, progress.console)
    require_trainable(inputs.finetune.family, inputs.finetune.config, where=inputs.finetune.path)
    if sft.lora is not None:
        # Raises if a LoRA target is no linear layer.
        lora_layers(unloaded_trunk(recipe, inputs.finetune), sft.lora)
    main = accelerator.is_main_process
    records = hash_run_inputs(recipe, run_dir, progress) if main else {}
    if main:
        clear_leftovers(run_dir)
    inputs = claim_run(recipe, run_dir, inputs, records, accelerator, progress)
    if not accelerator.gather_items([is_trained(run_dir, recipe)])[0]:
        stage.name = "train"
        fine_tune_stage(recipe, sft, run_dir, inputs, accelerator, progress)
    accelerator.wait_for_everyone()
    # Free the trained model before its checkpoint is loaded.
    gc.collect()
    stage.name = "write"
    if main:
        # Check that the trunk's checkpoint has not changed since the run began, before its files are copied.
        require_run_inputs(recipe, run_dir, progress)
        write_trained(recipe, sft, run_dir, inputs, progress)
    require_shared(run_dir, [TUNED, HEAD], accelerator)
    stage.name = "evaluate"
    name = str(run_dir / EXPORT)
    tuned = after_tuning(recipe, inputs, open_checkpoint(run_dir / TUNED), name)
    trunk = load_run_trunk(tuned.recipe, tuned.inputs, accelerator, progress)
    report, measured = measure_tuned(run_dir, sft, tuned, trunk, accelerator, progress)
    if not main:
        return Outcome(0, "done", "", "done")
    origin = read_json(run_dir / PROVENANCE_FILE)
    curves = read_metrics(run_dir)
    write_report(report, run_dir, provenance=origin, marginal_ci95=measured.marginal_ci95, metrics=curves)
    console.print(summary(report))
    stage.name = "export"
    export_tuned(recipe, run_dir, tuned, report)
    shutil.rmtree(run_dir / TUNED)
    # The detail comes last, as it may end in a command to copy.
    message = f"Exported to {name}. {headline(report).detail}"
    if report.lossless is not None and report.lossless.faults:
        return Outcome(1, "not_lossless", message, "done")
    return Outcome(0, "done", message, "done")


def section_of(recipe: Recipe) -> SftSection:
    """Return the recipe's ``sft`` section.

    Raises:
        ValueError: The recipe has none.
    """
    if recipe.sft is None:
        raise ValueError("the recipe has no sft section; expected one. Run it by mtp_train.job.pipeline.run.")
    return recipe.sft


def write_trained(recipe: Recipe, sft: SftSection, run_dir: Path, inputs: Inputs, progress: Progress) -> None:
    """Write the results of the training's last checkpoint, as far as they are missing.

    These are the trunk in its own layout (``tuned``), the head that was trained beside it, and the adapter.
    """
    saved = newest_checkpoint(run_dir / STATE)
    if saved is None:
        raise ValueError(f"{run_dir}: no complete checkpoint; expected a finished training.")
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
    """Write the fine-tuned trunk with the better head, and its model card."""
    if not (run_dir / EXPORT).exists():
        trunk = tuned.inputs.finetune
        head = chosen_head(recipe, run_dir, tuned, report)
        # Hard links: `tuned` is removed afterwards.
        write_checkpoint(trunk, layout_of(trunk), head, run_dir / EXPORT, link="hard")
    write_card(run_dir, run_dir / EXPORT)


def chosen_head(recipe: Recipe, run_dir: Path, tuned: Tuned, report: RunReport) -> NativeHead:
    """Return the head that the gate chose; without a gate, the head that was kept."""
    if report.gate is not None and report.gate.passed:
        return load_artifact(run_dir / HEAD).head
    trunk, donor = tuned.inputs.finetune, tuned.inputs.base
    if donor is None or recipe.head.init == "native":
        # The fine-tuned checkpoint contains the kept head, byte for byte.
        donor = trunk
    return graft_plan(trunk, donor, recipe.head.convention).template
