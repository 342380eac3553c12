"""The main job from end to end: check, graft, regenerate, train, evaluate, gate, export.

Every stage writes a complete result to the run directory and is skipped if that result exists, so a killed run resumes
from the stage that it had reached. ``train`` and ``data`` do not import the decoder: it is passed to them here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.progress import Progress

from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.contents import left_out, unnamed_files
from mtp_train.checkpoints.files import read_json
from mtp_train.checkpoints.run_export import EXPORT, HEAD
from mtp_train.checkpoints.writing import LOCK_FILE, full_disk_is_named
from mtp_train.data.tokenize import Document
from mtp_train.errors import GateRefusedError, LostProcessError, MtpError, OutputExistsError, RecipeError, StoppedError
from mtp_train.evaluation.results import UNJUDGED, UNJUDGED_SENTENCE
from mtp_train.evaluation.settings import draft_depth
from mtp_train.heads.diagnose import layout_of
from mtp_train.recipe.auto_fields import FROM_TEXT
from mtp_train.recipe.schema import Recipe
from mtp_train.report.table import summary
from mtp_train.report.write import write_report
from mtp_train.runs.auto import Choice, settle_training, tell_choices
from mtp_train.runs.decoder_check import check_decoder
from mtp_train.runs.evaluate_run import Evaluation, evaluate_run, served_commands, unjudged
from mtp_train.runs.export_run import write_export
from mtp_train.runs.input_identity import hash_run_inputs, require_run_inputs
from mtp_train.runs.inputs import Inputs, gather_inputs
from mtp_train.runs.model_card import write_card
from mtp_train.runs.regeneration import regenerate_stage
from mtp_train.runs.run_dir import (
    FIRST_STAGE,
    PROVENANCE_FILE,
    Outcome,
    clear_leftovers,
    forget_outcome,
    held_by_one_run,
    is_main_process,
    read_outcome,
    record_failure,
    record_recipe,
    require_ours,
    require_still_held,
    tell_precision,
    with_recorded_precision,
    with_resolved_precision,
    write_outcome,
)
from mtp_train.runs.shared_files import require_shared
from mtp_train.runs.stages import RunTrunks, Stage, claim_run, make_documents, trained_documents
from mtp_train.runs.training import STATE, train_stage
from mtp_train.train.estimate import memory_is_named
from mtp_train.train.launch import (
    RunAccelerator,
    describe_processes,
    lost_process_is_named,
    make_accelerator,
    require_processes,
)
from mtp_train.train.log import read_metrics
from mtp_train.train.plan import make_plan
from mtp_train.train.stopping import Stopped, stopped_by_signals
from mtp_train.trunk.progress import progress_on


def run(recipe: Recipe, console: Console, choices: Sequence[Choice] = ()) -> Outcome:
    """Run a recipe to its outcome, and record it in the run directory.

    Args:
        recipe: The recipe.
        console: Where progress bars and the table of results are printed.
        choices: Fields that were ``auto``; those that depend on the training text are resolved once it exists.

    Returns:
        The outcome; the recorded one if the run had finished before.

    Raises:
        MtpError: The user's input is wrong, the gate refused, or a process was lost. The outcome is recorded first if
            the run directory belongs to this run.
    """
    run_dir = Path(recipe.run_dir)
    with stopped_by_signals(), full_disk_is_named(run_dir, what="the run"):
        recipe = with_recorded_precision(recipe, run_dir)
        require_ours(run_dir, recipe)
        earlier = read_outcome(run_dir)
        if earlier is not None and earlier.finished:
            if is_main_process():
                with progress_on(console) as progress:
                    require_run_inputs(recipe, run_dir, progress, finished=True)
            console.print(f"{run_dir}: finished before ({earlier.reason}); nothing left to do.")
            return earlier
        with held_by_one_run(run_dir, console):
            return _run(recipe, run_dir, console, choices)


def _run(recipe: Recipe, run_dir: Path, console: Console, choices: Sequence[Choice]) -> Outcome:
    """Run the stages in a run directory that this run holds, and record the outcome."""
    forget_outcome(run_dir)
    stage = Stage()
    try:
        accelerator = join_processes(recipe, stage)
        console.print(describe_processes(accelerator), highlight=False)
        tell_choices(choices, console)
        recipe = settle(recipe, accelerator)
        progress_bars = progress_on(console, is_main=accelerator.is_main_process)
        named = memory_is_named(recipe, lambda: stage.name)
        with full_disk_is_named(run_dir, what="the run"), lost_process_is_named(), named, progress_bars as progress:
            if accelerator.is_main_process:
                require_run_inputs(recipe, run_dir, progress, anew=True)
            stages = stages_of(recipe, [choice.field for choice in choices])
            outcome = stages(recipe, run_dir, accelerator, console, progress, stage)
    except MtpError as error:
        require_still_held(run_dir)
        reached = "done" if isinstance(error, GateRefusedError) else stage.name
        # A process that never joined the others may belong to a launch that was refused the directory.
        unjoined = isinstance(error, LostProcessError) and not (stage.joined or is_main_process())
        if not (isinstance(error, OutputExistsError) or unjoined):
            said = record_failure(run_dir, Outcome(error.exit_code, error.reason, str(error), reached))
            if said is not None and isinstance(error, LostProcessError):
                raise LostProcessError(f"launcher: another process of this run is gone. {said.message}") from error
        raise
    except Stopped as stopped:
        told = StoppedError(
            f"{run_dir}: stopped by {stopped.name} in the stage {stage.name!r}.\n"
            "Start the same command again: it goes on from what that stage has saved.",
            stopped.exit_code,
        )
        # A process that has not joined the others may belong to a launch that does not hold the directory.
        if is_main_process() or stage.name != FIRST_STAGE:
            record_failure(run_dir, Outcome(told.exit_code, told.reason, str(told), stage.name))
        raise told from None
    except Exception as error:
        require_still_held(run_dir)
        record_failure(run_dir, Outcome(1, "bug", f"{type(error).__name__}: {error}", stage.name))
        raise
    if accelerator.is_main_process:
        write_outcome(run_dir, outcome)
    return outcome


def join_processes(recipe: Recipe, stage: Stage) -> RunAccelerator:
    """Join the processes of the launch, and check that all nodes share the run directory.

    Raises:
        TrainingError: They do not, their number is not ``train.processes``, or accelerate's state differs from the
            launcher's settings.
        LostProcessError: Another process ended before all had joined.
    """
    with lost_process_is_named():
        accelerator = make_accelerator()
        stage.joined = True
        require_processes(recipe.train.processes, accelerator)
        # The main process holds the lock. Machines without a common file system are found before any trunk is loaded.
        require_shared(Path(recipe.run_dir), [LOCK_FILE], accelerator)
    return accelerator


def settle(recipe: Recipe, accelerator: Accelerator) -> Recipe:
    """Return a recipe with ``precision: auto`` resolved, to the same precision on all machines of a launch."""
    resolved: Recipe = broadcast_object_list([with_resolved_precision(recipe, accelerator.device)])[0]
    return resolved


def stages_of(
    recipe: Recipe, auto: Collection[str] = ()
) -> Callable[[Recipe, Path, RunAccelerator, Console, Progress, Stage], Outcome]:
    """Return the function that runs the stages of a run or a study; the import of studies is local."""
    if recipe.study is not None:
        from mtp_train.runs.study.study_run import run_study_stages

        return run_study_stages
    return partial(run_stages, auto=auto)


def run_stages(
    recipe: Recipe,
    run_dir: Path,
    accelerator: RunAccelerator,
    console: Console,
    progress: Progress,
    stage: Stage,
    *,
    auto: Collection[str] = (),
) -> Outcome:
    """Run all stages. The processes share all but the report and the export, which are the main process's."""
    inputs = gather_inputs(recipe, accelerator.num_processes, progress)
    tell_precision(recipe, accelerator.device, progress.console)
    # As the main process finds it: a network file system may show a new directory to other machines later.
    trained = accelerator.gather_items([(run_dir / HEAD).is_dir()])[0]
    main = accelerator.is_main_process
    records = hash_run_inputs(recipe, run_dir, progress) if main else {}
    trunks = RunTrunks(recipe, run_dir, inputs, accelerator, progress)
    if not trained:
        trunks.load(decodes=recipe.regenerates and recipe.decodes)
    elif recipe.gate.enabled:
        trunks.load(decodes=True)
    # Nothing is written before all inputs are checked, so that a corrected recipe can use the same directory.
    if main:
        clear_leftovers(run_dir)
    inputs = claim_run(recipe, run_dir, inputs, records, accelerator, progress)
    trunks.offload()
    if not trained:
        if recipe.gate.enabled and trunks.evaluates:
            held_out = [prompt.prompt_ids for prompt in inputs.held_out]
            check_decoder(trunks.trunk, held_out, inputs.eos_ids, draft_depth(recipe), progress.console)
        stage.name = "data"
        in_shards = not trunks.evaluates
        documents = make_documents(recipe, run_dir, inputs, trunks.trunk, accelerator, progress, in_shards=in_shards)
        recipe, inputs = settle_length(recipe, run_dir, inputs, documents, accelerator, auto, progress)
        stage.name = "train"
        trunks.prepare_training()
        train_stage(recipe, run_dir, inputs, trunks.trunk, documents, accelerator, progress)
    require_shared(run_dir, [HEAD], accelerator)
    stage.name = "evaluate"
    if recipe.gate.enabled:
        training = trained_documents(recipe, run_dir, inputs)
        trunks.prepare_decoding()
        evaluation = evaluate_run(recipe, run_dir, inputs, trunks.trunk, training, accelerator, progress)
    else:
        trunks.drop()
        evaluation = unjudged(recipe, inputs)
    if not main:
        return Outcome(0, "done", "", "done")
    report_on(evaluation, recipe, run_dir, console, progress)
    gate = evaluation.gate
    if gate is not None and not gate.passed:
        raise GateRefusedError(gate.reason)
    stage.name = "export"
    exported = export_head(recipe, run_dir, inputs, progress) if recipe.export.enabled else ""
    if gate is None:
        return Outcome(0, UNJUDGED, f"{UNJUDGED_SENTENCE}{exported}\n{served_commands(recipe, run_dir)}", "done")
    return Outcome(0, "done", f"{gate.reason}.{exported}", "done")


def report_on(evaluation: Evaluation, recipe: Recipe, run_dir: Path, console: Console, progress: Progress) -> None:
    """Write and print the report, after a check that no input was changed since the beginning."""
    require_run_inputs(recipe, run_dir, progress)
    write_report(
        evaluation.report,
        run_dir,
        provenance=read_json(run_dir / PROVENANCE_FILE),
        marginal_ci95=evaluation.marginal_ci95,
        metrics=read_metrics(run_dir),
    )
    console.print(summary(evaluation.report))


def export_head(recipe: Recipe, run_dir: Path, inputs: Inputs, progress: Progress) -> str:
    """Write the exported checkpoint and its card, and return a sentence that says where."""
    if not (run_dir / EXPORT).exists():
        artifact, link = load_artifact(run_dir / HEAD), recipe.export.link
        write_export(inputs.finetune, artifact, run_dir / EXPORT, adapter=inputs.adapter, link=link, progress=progress)
    write_card(run_dir, run_dir / EXPORT)
    unnamed = unnamed_files(inputs.finetune, layout_of(inputs.finetune))
    return " ".join([f" Exported to {run_dir / EXPORT}.", *left_out(unnamed)])


def settle_length(
    recipe: Recipe,
    run_dir: Path,
    inputs: Inputs,
    documents: Sequence[Document],
    accelerator: Accelerator,
    auto: Collection[str],
    progress: Progress,
) -> tuple[Recipe, Inputs]:
    """Resolve the length of training for its text, if it is ``auto``, and record it, unless training had begun."""
    fields = [field for field in auto if field in FROM_TEXT]
    if not fields or broadcast_object_list([(run_dir / STATE).exists()])[0]:
        return recipe, inputs
    settled = settle_training(recipe, fields, documents, accelerator.num_processes)
    recipe, choices = broadcast_object_list([settled])[0]
    if accelerator.is_main_process:
        record_recipe(run_dir, recipe)
        tell_choices(choices, progress.console)
    return recipe, replace(inputs, plan=make_plan(recipe, accelerator.num_processes))


def regenerate_only(recipe: Recipe, progress: Progress) -> dict[str, int]:
    """Run the regeneration of a recipe alone; a later ``run`` of the recipe reuses the responses.

    Raises:
        RecipeError: The recipe does not regenerate.
    """
    settings = recipe.data.regenerate
    if settings is None or not settings.enabled:
        raise RecipeError(["data.regenerate: off; expected it enabled. Write data.regenerate.enabled: true."])
    run_dir = Path(recipe.run_dir)
    recipe = with_recorded_precision(recipe, run_dir)
    require_ours(run_dir, recipe)
    with full_disk_is_named(run_dir, what="the responses"), held_by_one_run(run_dir, progress.console):
        accelerator = join_processes(recipe, Stage())
        recipe = settle(recipe, accelerator)
        main = accelerator.is_main_process
        if main:
            require_run_inputs(recipe, run_dir, progress, anew=True)
        inputs = gather_inputs(recipe, accelerator.num_processes, progress)
        records = hash_run_inputs(recipe, run_dir, progress) if main else {}
        trunks = RunTrunks(recipe, run_dir, inputs, accelerator, progress)
        trunks.load(decodes=settings.endpoint is None)
        inputs = claim_run(recipe, run_dir, inputs, records, accelerator, progress)
        trunks.offload()
        in_shards = not trunks.evaluates
        _, counts = regenerate_stage(
            recipe, settings, run_dir, inputs, trunks.trunk, accelerator, progress, in_shards=in_shards
        )
    return asdict(counts)
