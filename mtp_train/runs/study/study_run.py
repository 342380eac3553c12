"""Run a study recipe: regenerate once, retrain a head per objective, measure all arms.

Stages that are done are skipped, as in ``mtp_train.runs.pipeline``. A measurement resumes after its last prompt.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from mtp_inference.opening import OWN
from mtp_train.acceptance.names import GRAFT, HOME, NATIVE, VANILLA
from mtp_train.checkpoints.files import read_json
from mtp_train.checkpoints.run_export import HEAD
from mtp_train.data.tokenize import Document
from mtp_train.evaluation.arms import ArmSpec
from mtp_train.evaluation.assemble import Measurements
from mtp_train.evaluation.grid import EvaluationGrid
from mtp_train.evaluation.results import Report
from mtp_train.evaluation.run import Processes, measure_study, study_report
from mtp_train.recipe.schema import Recipe, StudySection
from mtp_train.report.summary import summary
from mtp_train.report.wording import lossless_sentence, verdict_title
from mtp_train.report.write import log_report, write_report
from mtp_train.runs.input_identity import hash_run_inputs, require_run_inputs
from mtp_train.runs.inputs import Inputs, gather_inputs
from mtp_train.runs.run_dir import PROVENANCE_FILE, Outcome, clear_leftovers, tell_precision
from mtp_train.runs.stages import Stage, claim_run, load_run_trunk, make_documents
from mtp_train.runs.study.material import StudyInputs, for_objective, gather_study
from mtp_train.runs.study.protocol import (
    LevelDifference,
    find,
    levels_at_home,
    levels_on_shared_prompts,
    retrained,
)
from mtp_train.runs.training import train_stage
from mtp_train.train.launch import RunAccelerator
from mtp_train.train.shard import give_up_shards, shards_trunk

HEADS, GRID_DIR, HOME_DIR = "heads", "grid", "home"


def run_study_stages(
    recipe: Recipe, run_dir: Path, accelerator: RunAccelerator, console: Console, progress: Progress, stage: Stage
) -> Outcome:
    """Run all stages. The processes share training and the decoding of arms; the rest is the main process's."""
    study = section_of(recipe)
    inputs = gather_inputs(recipe, accelerator.num_processes, progress)
    tell_precision(recipe, accelerator.device, progress.console)
    found = gather_study(recipe, study, inputs)
    main = accelerator.is_main_process
    records = hash_run_inputs(recipe, run_dir, progress) if main else {}
    if main:
        for directory in (run_dir, *(head_dir(run_dir, objective) for objective in study.objectives)):
            clear_leftovers(directory)
    inputs = claim_run(recipe, run_dir, inputs, records, accelerator, progress)
    train_heads(recipe, study, run_dir, inputs, accelerator, progress, stage)
    accelerator.wait_for_everyone()
    stage.name = "evaluate"
    measured = measure_arms(recipe, study, run_dir, found, accelerator, progress)
    if not main:
        return Outcome(0, "done", "", "done")
    report = report_of(recipe, study, measured, found)
    require_run_inputs(recipe, run_dir, progress)
    write_report(report, run_dir, read_json(run_dir / PROVENANCE_FILE))
    log_report(report, run_dir, recipe.track.project, recipe.track.wandb)
    console.print(summary(report))
    if report.lossless is not None and report.lossless.faults:
        return Outcome(1, "not_lossless", f"{lossless_sentence(report.lossless)} Please report it.", "done")
    claim_tested = report.findings[0]
    return Outcome(0, "done", f"{verdict_title(claim_tested)} {claim_tested.evidence}", "done")


def section_of(recipe: Recipe) -> StudySection:
    """Return the recipe's ``study`` section.

    Raises:
        ValueError: The recipe has none.
    """
    if recipe.study is None:
        raise ValueError("the recipe has no study section; expected one. Run it by mtp_train.runs.pipeline.run.")
    return recipe.study


def head_dir(run_dir: Path, objective: str) -> Path:
    """Return the directory of one head's training, laid out like a run directory."""
    return run_dir / HEADS / objective


def train_heads(
    recipe: Recipe,
    study: StudySection,
    run_dir: Path,
    inputs: Inputs,
    accelerator: RunAccelerator,
    progress: Progress,
    stage: Stage,
) -> None:
    """Retrain a head for each objective without one; the responses are generated once for all heads."""
    documents: list[Document] | None = None
    in_shards = shards_trunk(accelerator)
    for objective in study.objectives:
        directory = head_dir(run_dir, objective)
        if accelerator.gather_items([(directory / HEAD).is_dir()])[0]:
            continue
        writes = documents is None and recipe.regenerates
        # A trunk that was sharded, or whose layers were dropped for a hidden-state cache, is gone: load it again.
        trunk = load_run_trunk(recipe, inputs, accelerator, progress, to_shard=in_shards and not writes)
        if documents is None:
            stage.name = "data"
            documents = make_documents(recipe, run_dir, inputs, trunk, accelerator, progress)
        stage.name = "train"
        variant = for_objective(recipe, objective)
        train_stage(variant, directory, inputs, trunk, documents, accelerator, progress)
        accelerator.wait_for_everyone()
        give_up_shards(trunk, accelerator)
        del trunk
        gc.collect()


def measure_arms(
    recipe: Recipe,
    study: StudySection,
    run_dir: Path,
    found: StudyInputs,
    accelerator: RunAccelerator,
    progress: Progress,
) -> Measurements:
    """Measure every arm on the same prompts, and vanilla also on its own. Every process must call it."""
    processes = Processes(accelerator.process_index, accelerator.num_processes, accelerator.gather_items)
    grid = grid_of(recipe, study)
    specs = arm_specs(recipe, study, run_dir)
    measured = measure_study(specs, grid, run_dir / GRID_DIR, progress, found.prompts, processes)
    if found.home:
        vanilla = ArmSpec(HOME, str(recipe.model.head_from), OWN, quantization=recipe.model.quantization)
        at_home = measure_study([vanilla], grid, run_dir / HOME_DIR, progress, found.home, processes)
        measured.arms += [arm for arm in at_home.arms if arm.head is not None]
    return measured


def report_of(recipe: Recipe, study: StudySection, measured: Measurements, found: StudyInputs) -> Report:
    """Compute the report of measured arms, and test the claims."""
    grid = grid_of(recipe, study)
    settings = [setting for setting in grid.settings() if setting.depth == grid.headline.depth]
    title = f"vanilla and distilled: {recipe.model.head_from}, {recipe.model.trunk}"
    report = study_report(measured, grid, title)
    by_name = {arm.name: arm for arm in measured.arms}

    def levels(head: str) -> list[LevelDifference]:
        if found.home:
            return levels_at_home(by_name[head], by_name[HOME], settings)
        return levels_on_shared_prompts(report, head, settings)

    told = {**report.settings, "vanilla_sources": list(study.vanilla_sources), "margin": study.margin}
    sound = report.lossless is None or not report.lossless.faults
    head = retrained(study.objectives[0])
    findings = find(report, study, levels(head), levels(GRAFT)) if sound else ()
    return replace(report, settings=told, findings=findings)


def arm_specs(recipe: Recipe, study: StudySection, run_dir: Path) -> list[ArmSpec]:
    """Return the arms that all decode the same prompts."""
    model = recipe.model
    base = str(model.head_from)

    def on_trunk(name: str, head: str) -> ArmSpec:
        return ArmSpec(name, model.trunk, head, model.adapter, model.quantization)

    native = [on_trunk(NATIVE, OWN)] if NATIVE in recipe.evaluate.arms else []
    heads = [on_trunk(retrained(one), str(head_dir(run_dir, one) / HEAD)) for one in study.objectives]
    vanilla = ArmSpec(VANILLA, base, OWN, quantization=model.quantization)
    return [on_trunk(GRAFT, base), *native, *heads, vanilla]


def grid_of(recipe: Recipe, study: StudySection) -> EvaluationGrid:
    """Return the settings to measure."""
    return EvaluationGrid(
        suite=study.suite or "held-out prompts",
        prompts_per_task=study.prompts_per_task if study.suite else recipe.evaluate.prompts,
        temperatures=study.temperatures,
        depths=study.depths,
        rules=study.rules,
        max_new_tokens=recipe.evaluate.max_new_tokens,
        batch=study.batch,
        seed=recipe.seed,
    )
