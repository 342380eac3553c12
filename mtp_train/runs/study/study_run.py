"""Run a study recipe: regenerate once, retrain a head per objective, measure all arms.

Stages that are done are skipped, as in ``mtp_train.runs.pipeline``. A measurement resumes after its last prompt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mtp_inference.opening import OWN
from mtp_train.acceptance.names import GRAFT, HOME, NATIVE, VANILLA
from mtp_train.checkpoints.locations import HEAD
from mtp_train.data.tokenize import Document
from mtp_train.evaluation.arms import ArmSpec
from mtp_train.evaluation.assemble import Measurements
from mtp_train.evaluation.grid import EvaluationGrid
from mtp_train.evaluation.results import Report
from mtp_train.evaluation.run import Processes, measure_study, study_report
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.sections import StudySection
from mtp_train.report.summary import summary
from mtp_train.report.wording import lossless_sentence, verdict_title
from mtp_train.report.write import log_report, write_report
from mtp_train.runs.regeneration import data_stage
from mtp_train.runs.run import Run, RunTrunk
from mtp_train.runs.run_directory import Outcome, RunDirectory
from mtp_train.runs.settings import tracking_of
from mtp_train.runs.study.material import StudyInputs, for_objective, gather_study
from mtp_train.runs.study.protocol import (
    LevelDifference,
    find,
    levels_at_home,
    levels_on_shared_prompts,
    retrained,
)
from mtp_train.runs.training import train_stage

HEADS, GRID_DIR, HOME_DIR = "heads", "grid", "home"


def run_study_stages(run: Run, study: StudySection, console: Console) -> Outcome:
    """Run all stages. The processes share training and the decoding of arms; the rest is the main process's."""
    recipe, run_dir = run.recipe, run.directory.path
    found = gather_study(recipe, study, run.inputs)
    if run.is_main:
        for directory in (run_dir, *(head_dir(run_dir, objective) for objective in study.objectives)):
            RunDirectory(directory).clear_leftovers()
    run.claim()
    train_heads(run, study)
    run.accelerator.wait_for_everyone()
    run.attempt.stage = "evaluate"
    measured = measure_arms(run, study, found)
    if not run.is_main:
        return Outcome(0, "done", "", "done")
    report = report_of(recipe, study, measured, found)
    run.directory.require_same_inputs(recipe, run.progress)
    write_report(report, run_dir, run.directory.provenance)
    log_report(report, run_dir, tracking_of(recipe), recipe.model_dump(mode="json"))
    console.print(summary(report))
    if report.lossless is not None and report.lossless.faults:
        return Outcome(1, "not_lossless", f"{lossless_sentence(report.lossless)} Please report it.", "done")
    claim_tested = report.findings[0]
    return Outcome(0, "done", f"{verdict_title(claim_tested)} {claim_tested.evidence}", "done")


def head_dir(run_dir: Path, objective: str) -> Path:
    """Return the directory of one head's training, laid out like a run directory."""
    return run_dir / HEADS / objective


def train_heads(run: Run, study: StudySection) -> None:
    """Retrain a head for each objective without one; the responses are generated once for all heads."""
    documents: list[Document] | None = None
    trunk = RunTrunk(run)
    for objective in study.objectives:
        directory = head_dir(run.directory.path, objective)
        if run.accelerator.gather_items([(directory / HEAD).is_dir()])[0]:
            continue
        # A trunk that was sharded, or whose layers were dropped for a hidden-state cache, is gone: load it again.
        trunk.load(decodes=documents is None and run.recipe.regenerates)
        if documents is None:
            run.attempt.stage = "data"
            documents = data_stage(run, trunk.trunk)
        run.attempt.stage = "train"
        of_head = replace(run, recipe=for_objective(run.recipe, objective), directory=RunDirectory(directory))
        train_stage(of_head, trunk.trunk, documents)
        run.accelerator.wait_for_everyone()
        trunk.drop()


def measure_arms(run: Run, study: StudySection, found: StudyInputs) -> Measurements:
    """Measure every arm on the same prompts, and vanilla also on its own. Every process must call it."""
    recipe, run_dir, accelerator, progress = run.recipe, run.directory.path, run.accelerator, run.progress
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
