"""Run a recipe from end to end: data, train, evaluate, judge, report, export.

Every stage writes a complete result to the run directory and is skipped if that result exists, so a killed run resumes
from the stage that it had reached. ``train`` and ``data`` do not import the decoder: it is passed to them here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from mtp_train.acceptance.gate import GateVerdict
from mtp_train.acceptance.names import PLAIN
from mtp_train.answers.store import ResponseCounts
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.demo import PREFIX
from mtp_train.checkpoints.files import left_out
from mtp_train.checkpoints.identity import checkpoint_files, require_same
from mtp_train.checkpoints.locations import EXPORT, HEAD, open_location
from mtp_train.checkpoints.suggestions import command
from mtp_train.checkpoints.writing import full_disk_is_named
from mtp_train.errors import DataError, GateRefusedError, GateUndecidedError, RecipeError
from mtp_train.evaluation.results import REPORT_FILE, UNJUDGED, UNJUDGED_SENTENCE, Report, load_report
from mtp_train.evaluation.run import SERVED_CHECKPOINT
from mtp_train.progress import is_main_process, progress_on
from mtp_train.recipe.loading import RecipeLike
from mtp_train.recipe.schema import Recipe
from mtp_train.report.summary import summary
from mtp_train.report.wording import capitalised
from mtp_train.report.write import PAGE_FILE, log_report, write_report
from mtp_train.runs.display import Rows, Shown, logged, quiet_progress, serving_lines, wiring_note
from mtp_train.runs.evaluate_run import advised, evaluate_run, served_commands, unjudged, without_gain
from mtp_train.runs.export import serves_of, write_card, write_export
from mtp_train.runs.forecast import Forecast, round_units, stages_of
from mtp_train.runs.refusals import CHECK_PROMPTS, check_decoder
from mtp_train.runs.regeneration import data_stage, generate_responses
from mtp_train.runs.resolve import FROM_TEXT, Choice, Overrides, recipe_of, resolve_training, resolved_recipe, values_of
from mtp_train.runs.run import Run, join_processes, memory_is_named, require_shared
from mtp_train.runs.run_directory import DONE, Outcome, RunDirectory
from mtp_train.runs.settings import STATE, tracking_of
from mtp_train.runs.study import head_runs, measure_study, study_outcome
from mtp_train.runs.training import part_documents, train_stage
from mtp_train.runs.trunks import answering_dtype, decoding_trunk, load_to_train
from mtp_train.train.launch import describe_processes, lost_process_is_named
from mtp_train.train.log import read_metrics
from mtp_train.train.stopping import stopped_by_signals
from mtp_train.trunk.precision import resolve_precision
from mtp_train.trunk.recurrent_kernels import missing_kernels


def run(recipe: RecipeLike, overrides: Overrides = (), *, console: Console | None = None) -> RunResult:
    """Run a recipe: regenerate responses, train the head, evaluate, apply the gate, export.

    A run directory with the same recipe and inputs is resumed at the stage it reached; a finished one is returned.
    Runs in this process. For several GPUs, use ``accelerate launch -m mtp_train RECIPE``.

    Args:
        recipe: A YAML file, the name of a recipe of the package (see :func:`recipes`), or a mapping of the same shape.
        overrides: Dotted field to value, ``{"train.lr": 1e-4, "data.sources.0.path": "chats.jsonl"}``; a list is
            replaced as a whole. Strings ``"train.lr=1e-4"`` work too.
        console: Where progress bars and the table of results are printed; None prints nothing.

    Raises:
        RecipeError: The recipe is wrong; the message lists all problems.
        GateRefusedError: The trained head is not better than its baseline. Its ``run_dir`` holds the report.
        MtpError: A checkpoint or data cannot be used, the run directory holds something else, or memory ran out.

    Example:
        >>> import mtp_train as mtp
        >>> done = mtp.run("retrain_head", {"run_dir": "runs/a", "train.max_steps": 50})
        >>> done.report.arms["retrained"].tau
        3.21
        >>> done.export
        PosixPath('runs/a/export')
    """
    checked, choices = resolved_recipe(recipe, overrides)
    outcome = run_recipe(checked, console or Console(quiet=True), choices)
    if outcome.exit_code == GateRefusedError.exit_code:
        kind = GateUndecidedError if outcome.reason == GateUndecidedError.reason else GateRefusedError
        refused = kind(outcome.message)
        refused.run_dir = Path(checked.run_dir)
        raise refused
    return RunResult(**vars(outcome), run_dir=Path(checked.run_dir))


def run_recipe(
    recipe: Recipe, console: Console, choices: Sequence[Choice] = (), forecast: Forecast | None = None
) -> Outcome:
    """Run a recipe to its outcome, or return that of a run that had finished. A refusal of the gate is an outcome.

    ``forecast`` is that of a rescue, which has stages before this run.
    """
    directory = RunDirectory(Path(recipe.run_dir))
    with stopped_by_signals():
        directory.require_ours(recipe)
        earlier = directory.outcome
        if earlier is not None and earlier.finished:
            if is_main_process():
                with progress_on(console) as progress:
                    directory.require_same_inputs(recipe, progress, finished=True)
            console.print(f"{directory.path}: finished before ({earlier.reason}); nothing left to do.")
            return earlier
        with (
            directory.held(console),
            logged(directory.path, console),
            directory.recording() as attempt,
            full_disk_is_named(directory.path, what="the run"),
            lost_process_is_named(),
            memory_is_named(lambda: attempt.stage),
            progress_on(console, is_main=is_main_process()) as progress,
        ):
            accelerator, recipe = join_processes(recipe, directory)
            console.print(describe_processes(accelerator))
            # Those that the text or the start decides are printed then.
            later = FROM_TEXT if recipe.train.select is None or recipe.study is not None else (*FROM_TEXT, "train.lr")
            if first := [one for one in choices if one.field not in later]:
                console.print(f"chosen by rule: {values_of(first)}")
            run = Run.begin(recipe, directory, accelerator, progress, attempt)
            stages = stages_of(recipe, run.inputs.finetune, accelerator.device.type)
            run.forecast = forecast or Forecast(stages, console)
            precision, reason = resolve_precision(recipe.train.precision, accelerator.device)
            console.print(f"training in {precision}: {reason}")
            missing = missing_kernels(run.inputs.finetune.family.trunk.recurrent, accelerator.device.type)
            if missing is not None:
                console.print(missing)
            outcome = run_stages(run, console, [choice.field for choice in choices])
            if run.is_main:
                directory.write_outcome(outcome)
            return outcome


def run_stages(run: Run, console: Console, auto: Collection[str] = ()) -> Outcome:
    """Run all stages. The processes share all but the report and the export, which are the main process's."""
    report = _train_and_measure(run, auto)
    if report is None:
        return Outcome(0, "done", "", DONE)
    _report(run, report, console)
    if run.recipe.study is not None:
        return study_outcome(report)
    if report.gate is not None and not report.gate.passed:
        return _judged(report.gate)
    run.attempt.stage = "export"
    exported = _export(run) if run.recipe.export.enabled else ""
    if report.gate is not None:
        return _judged(report.gate, f".{exported}")
    commands = served_commands(run.recipe, run.directory.path)
    stayed = without_gain(run.directory.path)
    no_gain = "" if stayed is None else f" {capitalised(stayed)}. This is the head as it was."
    return Outcome(0, UNJUDGED, f"{UNJUDGED_SENTENCE}{no_gain}{exported}\n{commands}", DONE)


def _judged(gate: GateVerdict, ending: str = "") -> Outcome:
    told = f"{gate.reason}{ending}"
    if gate.passed:
        return Outcome(0, "done", told, DONE)
    refused = GateUndecidedError if gate.outcome == "undecided" else GateRefusedError
    return Outcome(refused.exit_code, refused.reason, told, DONE)


def record_verdict(run_dir: Path, compared: Report, out: Path, evaluation: Path | None) -> Report:
    """Record the verdict of a comparison of servers in a run without a gate, and return it with what to do instead.

    The run's report, its page and the card of its export get the verdict, and last its outcome.

    Args:
        compared: The report of the baseline's server and the export's.
        out: Its directory, by which a run may be judged again.
        evaluation: The directory of the export's evaluation. It records the evaluated files; the server is not asked.

    Raises:
        DataError: The run was judged before, or the comparison is not of its baseline and its export on new prompts.
        ChangedInputError: The export's evaluation was of other files.
    """
    directory = RunDirectory(run_dir)
    export = run_dir / EXPORT
    recipe = directory.recipe
    gate = compared.gate
    if recipe is None or gate is None or evaluation is None or not export.is_dir():
        raise DataError(
            f"--judges: {run_dir}: not a run with an export, or other arms than two evaluations of servers; expected "
            "the command that a run without a gate prints. See recipes/gate.md."
        )
    with directory.held(quiet_progress().console, "the verdict"):
        settings = dict(load_report(run_dir / REPORT_FILE).settings)
        place = recipe.model.trunk if recipe.kind.has_file else str(export)
        files = {SERVED_CHECKPOINT: checkpoint_files(open_location(place))}
        require_same(evaluation, files, quiet_progress(), finished=True, keeps=False, option="evaluation")
        told = compared.settings.get("trained_on")
        refusals = {
            "it was judged before": settings.get("gate") not in (UNJUDGED, str(out)),
            f"the baseline decoded as {gate.baseline}": (gate.baseline == PLAIN) != (recipe.gate_baseline == PLAIN),
            f"the prompts are not new ({told})": told,
        }
        if found := [text for text, is_so in refusals.items() if is_so]:
            raise DataError(
                f"--judges: {run_dir}: {'; '.join(found)}; expected an unjudged run, with evaluations of its baseline "
                f"({recipe.gate_baseline}) and of its export on new prompts. Measure these, or leave --judges out."
            )
        gate = advised(recipe, gate, {}, without_gain(run_dir))
        settings |= {"gate": str(out), "measured": compared.settings}
        report = replace(compared, title=None, comparisons=(), gate=gate, settings=settings)
        serving = _serving(run_dir, report) if gate.passed else {}
        write_report(report, run_dir, directory.provenance, read_metrics(run_dir), serving)
        write_card(run_dir, export)
        stays = f". Exported to {export}." if gate.passed else f"\nThe export was written before, and stays: {export}"
        directory.write_outcome(_judged(gate, stays))
    return replace(compared, gate=gate)


def _train_and_measure(run: Run, auto: Collection[str]) -> Report | None:
    """Run the stages up to the report, which the main process returns; those that are done are skipped."""
    recipe = run.recipe
    study = run.recipe.study
    directories = [one.directory for one in head_runs(run)]
    # As the main process finds them: a network file system may show new files to other machines later.
    found = [(one.path / HEAD).exists() for one in directories], (run.directory.path / REPORT_FILE).exists()
    are_trained, is_measured = run.accelerator.said_by_main(found)
    is_trained = all(are_trained)
    if not is_trained or (recipe.gate.enabled and study is None and not is_measured):
        _load_first(run, is_trained=is_trained)
    if run.is_main:
        for directory in {run.directory, *directories}:
            directory.clear_leftovers()
    run.claim()
    if not is_trained:
        _train(run, are_trained, auto)
    heads = [str((one.path / HEAD).relative_to(run.directory.path)) for one in directories]
    require_shared(run.directory.path, heads, run.accelerator)
    run.attempt.stage = "evaluate"
    if not is_measured:
        run.forecast.begin("measuring")
    if is_measured:
        report: Report | None = load_report(run.directory.path / REPORT_FILE)
    elif study is not None:
        run.held.release(run.accelerator)
        report = measure_study(run, study)
    elif recipe.gate.enabled:
        report = evaluate_run(run)
    else:
        run.held.release(run.accelerator)
        report = unjudged(run.recipe, run.inputs)
    return report if run.is_main else None


def _load_first(run: Run, *, is_trained: bool) -> None:
    """Load the trunk in the form of the first stage, so that a refused trunk leaves the run directory free.

    A run whose training had begun has its text. With a hidden-state cache it may need no trunk until it decodes.
    """
    recipe = run.recipe
    goes_on = _has_begun(run)
    if is_trained or (recipe.data.regenerate is not None and recipe.decodes and not goes_on):
        decoding_trunk(run)
    elif recipe.train.hidden_cache is recipe.train.states is None or (recipe.gate.enabled and not goes_on):
        load_to_train(run)


def _has_begun(run: Run) -> bool:
    """Return whether the training of a head had begun, as the main process finds it."""
    return run.accelerator.said_by_main(any((one.directory.path / STATE).exists() for one in head_runs(run)))


def _train(run: Run, are_trained: Sequence[bool], auto: Collection[str]) -> None:
    """Train the missing heads, all on the same text."""
    recipe = run.recipe
    trunk = run.held.whole
    if recipe.gate.enabled and trunk is not None:
        prompts = [prompt.prompt_ids for prompt in run.inputs.text.held_out]
        seconds = check_decoder(trunk, prompts, run.inputs.eos_ids, recipe.draft_depth, run.progress.console)
        units = round_units(CHECK_PROMPTS, run.accelerator.device.type) * run.accelerator.num_processes
        run.forecast.rates["decoding"] = seconds / units
    del trunk
    run.attempt.stage = "data"
    documents = data_stage(run)
    fields = [field for field in auto if field in FROM_TEXT]
    # The length is fixed once training has begun.
    if fields and not _has_begun(run):
        text = [documents[index] for index in part_documents(run.recipe, documents)[0]]
        resolved = resolve_training(run.recipe, fields, text, run.accelerator.num_processes)
        run.settle(run.accelerator.said_by_main(resolved))
    run.attempt.stage = "train"
    # The heads of a study share a learning rate.
    chooses_lr = "train.lr" in auto and recipe.study is None
    for of_head, is_trained in zip(head_runs(run), are_trained, strict=True):
        if not is_trained:
            train_stage(of_head, documents, chooses_lr=chooses_lr)


def _report(run: Run, report: Report, console: Console) -> None:
    """Write and print the report, after a check that no input was changed since the beginning."""
    run.directory.require_same_inputs(run.recipe, run.progress)
    run_dir = run.directory.path
    is_served = run.recipe.export.enabled and (report.gate is None or report.gate.passed)
    serving = _serving(run_dir, report, run.inputs.finetune.path) if is_served else {}
    write_report(report, run_dir, run.directory.provenance, read_metrics(run_dir), serving)
    try:
        log_report(report, run_dir, tracking_of(run.recipe), run.recipe.model_dump(mode="json"))
    except Exception as error:
        # A tracker's server that is down costs no run its export.
        console.print(f"track: {type(error).__name__}: {error}; the report was written, but not tracked.", markup=False)
    console.print(summary(report))


def _serving(run_dir: Path, report: Report, trunk: Path | None = None) -> dict[str, str]:
    head = load_artifact(run_dir / HEAD)
    found = serves_of(run_dir / EXPORT, head.family, head.num_depths, report, trunk=trunk)
    return (
        {**found, "llama.cpp": "no: its converter does not know the demo's tokenizer"} if _is_demo(run_dir) else found
    )


def _is_demo(run_dir: Path) -> bool:
    recipe = RunDirectory(run_dir).recipe
    return recipe is not None and recipe.model.trunk.startswith(PREFIX)


def _export(run: Run) -> str:
    """Write the exported checkpoint and its card, and return a sentence with its place."""
    run_dir, trunk, equal = run.directory.path, run.inputs.finetune, None
    out = run_dir / EXPORT
    if not out.exists():
        equal = write_export(
            trunk,
            load_artifact(run_dir / HEAD),
            out,
            adapter=run.inputs.adapter,
            link=run.recipe.export.link,
            progress=run.progress,
        )
    write_card(run_dir, out)
    told = f" Exported to {out}{'' if equal is None else f' (trunk: {equal})'}."
    return " ".join([told, *left_out(trunk)])


@dataclass(frozen=True)
class RegenerateResult(Shown):
    """Directory and counts of the responses that :func:`regenerate` wrote."""

    run_dir: Path
    """The responses are in ``run_dir/data``."""
    counts: ResponseCounts
    """Responses, the documents made of them, their tokens, and the responses that were left out or cut."""

    def to_json(self) -> dict[str, int]:
        return asdict(self.counts)

    def _rows(self) -> Rows:
        return [(name.replace("_", " "), value) for name, value in asdict(self.counts).items()]


def regenerate(recipe: RecipeLike, overrides: Overrides = (), *, progress: Progress | None = None) -> RegenerateResult:
    """Let the trunk answer a recipe's prompts and stop. A later :func:`run` of the recipe resumes from the responses.

    Args:
        recipe: As for :func:`run`; ``data.regenerate`` must be enabled.
        overrides: As for :func:`run`.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        RecipeError: The recipe is wrong, or does not regenerate.
        MtpError: The trunk or the prompts cannot be read, or the run directory holds something else.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.regenerate("retrain_head", {"data.regenerate.max_prompts": 40}).counts.responses
        40
    """
    checked = recipe_of(recipe, overrides)
    settings = checked.data.regenerate
    directory = RunDirectory(Path(checked.run_dir))
    if settings is None:
        raise RecipeError("data.regenerate: null; expected a section. Write data.regenerate: {}.")
    progress = progress or quiet_progress()
    directory.require_ours(checked)
    with directory.held(progress.console, "the responses"), logged(directory.path, progress.console):
        accelerator, checked = join_processes(checked, directory)
        run = Run.begin(checked, directory, accelerator, progress, judges=False)
        if settings.endpoint is None:
            decoding_trunk(run, answering_dtype(run))
        elif checked.decodes:
            decoding_trunk(run)
        elif checked.train.states is None:
            load_to_train(run)
        run.claim()
        _, counts = generate_responses(run, settings)
    return RegenerateResult(directory.path, counts)


def open_report(source: str | Path) -> Report:
    """Read the report of a run, an evaluation or a comparison.

    Args:
        source: Its directory, or its ``report.json``.

    Raises:
        DataError: There is no report, or another version of mtp-train wrote it.

    Example:
        >>> import mtp_train as mtp
        >>> report = mtp.open_report("runs/retrain_head")
        >>> gain = report.arms["retrained"].tau - report.arms["graft"].tau
    """
    path = Path(source)
    return load_report(path / REPORT_FILE if path.is_dir() else path)


def page_of(run_dir: Path) -> str | None:
    """Return the URI of a run's report for people, which terminals open; None where there is no report."""
    path = run_dir / PAGE_FILE
    return path.resolve().as_uri() if path.is_file() else None


@dataclass(frozen=True)
class RunResult(Outcome, Shown):
    """Outcome of a finished run, as :func:`run` returns it.

    ``exit_code`` is 0, or 1 for a study whose drafts changed a text, which is a bug of the decoder. ``message`` has the
    verdict, and where the checkpoint was exported.
    """

    run_dir: Path

    @property
    def report(self) -> Report:
        """The report in the run directory; see :func:`open_report`."""
        return open_report(self.run_dir)

    @property
    def export(self) -> Path | None:
        """The exported checkpoint; None for a recipe that exports nothing."""
        path = self.run_dir / EXPORT
        return path if path.is_dir() else None

    @property
    def page(self) -> str | None:
        """URI of the report for people, which terminals open; None where there is no report."""
        return page_of(self.run_dir)

    @property
    def serves(self) -> dict[str, str]:
        """Engine to the command that serves the export, or ``no: REASON``; empty without an export."""
        if self.export is None or not (self.run_dir / HEAD).is_dir():
            return {}
        return _serving(self.run_dir, self.report)

    def _title(self) -> str:
        return self.message

    def _rows(self) -> Rows:
        yield "report", self.page
        yield from serving_lines(self.serves)
        if self.serves:
            head = load_artifact(self.run_dir / HEAD)
            yield "head", wiring_note(head.family, head.convention, self.serves)
            yield "try it", command("generate", self.run_dir, "--show-drafts", "--chat")
        if _is_demo(self.run_dir):
            yield "your own model", "mtp-train probe FINE_TUNE --from BASE --data chats.jsonl"
