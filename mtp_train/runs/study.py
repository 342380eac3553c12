"""A recipe with a section ``study``: a vanilla and a distilled model, compared.

The stages: regenerate once, retrain a head per objective, measure all arms, test the claims. Stages that are done are
skipped, as in ``mtp_train.runs.pipeline``. A measurement resumes after its last prompt.

The published claim: retraining a head on the distilled trunk's own responses brings acceptance back to the vanilla
level. Two models generate different text, and text of lower entropy is easier to draft. The level is therefore compared
twice: raw, as tokens per round, and at equal target entropy, as overlap of p and q at depth 1. "Back" means that at
most a stated share of the vanilla level is missing. The claim is confirmed if the whole interval of the difference lies
above that bound, refuted if the whole interval lies below it, and undecided otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mtp_inference.opening import OWN
from mtp_train.acceptance.counts import Interval, PromptCounts
from mtp_train.acceptance.intervals import Difference, tau_difference
from mtp_train.acceptance.names import GRAFT, HOME, NATIVE, RETRAINED, VANILLA
from mtp_train.checkpoints.locations import HEAD
from mtp_train.data.groups import join_near_duplicates
from mtp_train.data.records import Record, content_group
from mtp_train.data.tokenize import Document, build_prompts
from mtp_train.errors import DataError
from mtp_train.evaluation.arms import ArmSpec
from mtp_train.evaluation.entropy import overlap_difference
from mtp_train.evaluation.grid import EvaluationGrid
from mtp_train.evaluation.prompt_records import HELD_OUT_TASK, Setting, TaskPrompt
from mtp_train.evaluation.results import ALL_TASKS, VERDICTS, ArmComparison, Cell, Finding, Report, Tone, negated
from mtp_train.evaluation.run import Study, study_report
from mtp_train.evaluation.statistics import MeasuredArm, Measurements
from mtp_train.evaluation.suites import load_suite, suite_prompts
from mtp_train.losses.catalogue import find_loss
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.sections import StudySection
from mtp_train.report.wording import format_number, lossless_sentence, signed, verdict_title
from mtp_train.runs.inputs import Inputs, split_records
from mtp_train.runs.regeneration import data_stage
from mtp_train.runs.run import Run, RunTrunk
from mtp_train.runs.run_directory import DONE, Outcome, RunDirectory
from mtp_train.runs.training import HIDDEN, train_stage

HEADS, GRID_DIR, HOME_DIR = "heads", "grid", "home"
HOME_TASK = "vanilla's own"
CLAIM = "Retraining on the distilled trunk's own responses brings acceptance back to the vanilla level"
BACK = "Back at the vanilla level by "
BEATS_GRAFT = "Retraining beats the grafted head on the distilled trunk"
WEAK = (
    " The retrained head is above that level by more than the margin: vanilla's own head is not trained out, so the "
    "level is a low bar."
)
DRAFTS_BETTER = "A head trained towards {} drafts better than one towards {}"


def measure_study_heads(run: Run, study: StudySection) -> Report | None:
    """Train and measure the heads; the main process returns the report. The processes share training and decoding."""
    recipe, run_dir, inputs = run.recipe, run.directory.path, run.inputs
    if inputs.base is None:
        raise DataError("model.head_from: null; expected the vanilla model of the study. Name it.")
    prompts = shared_prompts(recipe, study, inputs)
    if run.is_main:
        for directory in (run_dir, *(head_dir(run_dir, objective) for objective in study.objectives)):
            RunDirectory(directory).clear_leftovers()
    run.claim()
    train_heads(run, study)
    run.accelerator.wait_for_everyone()
    run.attempt.stage = "evaluate"
    grid = grid_of(recipe, study)
    measured = measure_arms(run, study, grid, prompts)
    return report_of(recipe, study, grid, measured) if run.is_main else None


def study_outcome(report: Report) -> Outcome:
    """Return the outcome of a study: what became of its claim."""
    if report.lossless is not None and report.lossless.faults:
        return Outcome(1, "not_lossless", f"{lossless_sentence(report.lossless)} Please report it.", DONE)
    claim = report.findings[0]
    return Outcome(0, "done", f"{verdict_title(claim)} {claim.evidence}", DONE)


def head_dir(run_dir: Path, objective: str) -> Path:
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


def measure_arms(run: Run, study: StudySection, grid: EvaluationGrid, prompts: Sequence[TaskPrompt]) -> Measurements:
    """Measure every arm on the same prompts, and vanilla also on its own. Every process must call it."""
    recipe, run_dir = run.recipe, run.directory.path
    specs = arm_specs(recipe, study, run_dir)
    opened = partial(Study, grid=grid, progress=run.progress, processes=run.processes)
    measured = opened(specs, out=run_dir / GRID_DIR, prompts=prompts).measure()
    if run.inputs.home:
        home = [TaskPrompt.of(prompt, HOME_TASK) for prompt in run.inputs.home]
        vanilla = ArmSpec(HOME, str(recipe.model.head_from), OWN, quantization=recipe.model.quantization)
        at_home = opened([vanilla], out=run_dir / HOME_DIR, prompts=home).measure()
        measured.arms += [arm for arm in at_home.arms if arm.head is not None]
    return measured


def report_of(recipe: Recipe, study: StudySection, grid: EvaluationGrid, measured: Measurements) -> Report:
    """Compute the report of measured arms, and test the claims."""
    settings = [setting for setting in grid.settings() if setting.depth == grid.headline.depth]
    report = study_report(measured, grid, f"vanilla and distilled: {recipe.model.head_from}, {recipe.model.trunk}")
    by_name = {arm.name: arm for arm in measured.arms}

    def levels(head: str) -> list[LevelDifference]:
        if HOME in by_name:
            return levels_at_home(by_name[head], by_name[HOME], settings)
        return levels_on_shared_prompts(report, head, settings)

    told = {**report.settings, "vanilla_sources": list(study.vanilla_sources), "margin": study.margin}
    sound = report.lossless is None or not report.lossless.faults
    findings = find(report, study, levels(retrained(study.objectives[0])), levels(GRAFT)) if sound else ()
    return replace(report, settings=told, findings=findings)


def arm_specs(recipe: Recipe, study: StudySection, run_dir: Path) -> list[ArmSpec]:
    model = recipe.model
    base = str(model.head_from)

    def on_trunk(name: str, head: str) -> ArmSpec:
        return ArmSpec(name, model.trunk, head, model.adapter, model.quantization)

    native = [on_trunk(NATIVE, OWN)] if NATIVE in recipe.evaluate.arms else []
    heads = [on_trunk(retrained(one), str(head_dir(run_dir, one) / HEAD)) for one in study.objectives]
    vanilla = ArmSpec(VANILLA, base, OWN, quantization=model.quantization)
    return [on_trunk(GRAFT, base), *native, *heads, vanilla]


def grid_of(recipe: Recipe, study: StudySection) -> EvaluationGrid:
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


def shared_prompts(recipe: Recipe, study: StudySection, inputs: Inputs) -> list[TaskPrompt]:
    """Return the prompts that all arms decode: those held out, or a suite's without what repeats training text."""
    if study.suite is None:
        return [TaskPrompt.of(prompt, HELD_OUT_TASK) for prompt in inputs.held_out]
    training, _ = split_records(recipe)
    groups = {record.group for record in training}
    known = {prompt.prompt_ids for prompt in build_prompts(training, inputs.tokenizer)}
    loaded = load_suite(study.suite, recipe.data.chat_template_kwargs)
    near = near_trained([one.record for one in loaded.records], training)
    every = suite_prompts(loaded, inputs.tokenizer, seed=recipe.seed)
    unseen = [
        prompt
        for prompt in every
        if prompt.group not in groups and prompt.id not in near and prompt.prompt_ids not in known
    ]
    if len(unseen) < 2:
        raise DataError(
            f"study.suite: {study.suite} has {len(every)} prompts, {len(unseen)} of them not trained on; expected at "
            "least 2, as intervals are over groups of prompts. Name another suite, or null for the held-out prompts."
        )
    by_task: dict[str, list[TaskPrompt]] = {}
    for prompt in unseen:
        by_task.setdefault(prompt.task, []).append(prompt)
    return [prompt for some in by_task.values() for prompt in some[: study.prompts_per_task]]


def near_trained(records: Sequence[Record], training: Sequence[Record]) -> set[str]:
    """Return the ids of the records whose prompt equals a training record's, or is a near-duplicate of it."""
    by_content = [replace(record, group=content_group(record.content)) for record in (*training, *records)]
    joined = join_near_duplicates(by_content)
    trained = {record.group for record in joined[: len(training)]}
    return {record.id for record in joined[len(training) :] if record.group in trained}


def for_objective(recipe: Recipe, objective: str) -> Recipe:
    temperature = recipe.objective.temperature if find_loss(objective).distils else 1.0
    values: dict[str, object] = {"objective.loss": objective, "objective.temperature": temperature}
    cache = recipe.train.hidden_cache
    if cache is not None and cache.directory is None:
        values["train.hidden_cache.directory"] = str(Path(recipe.run_dir) / HIDDEN)
    return recipe.replaced(values)


# Claims


def retrained(objective: str) -> str:
    return f"{RETRAINED}-{objective}"


@dataclass(frozen=True)
class LevelDifference:
    """The difference of a retrained head on the distilled trunk and the vanilla level, at one setting."""

    setting: Setting
    tau: Difference
    overlap: Difference | None
    """Difference of overlap at depth 1 at equal target entropy; None if the texts share too few entropies."""


def tone_of(interval: Interval | None, limit: float = 0.0) -> Tone:
    """Return the verdict on the claim that a difference lies above ``limit``, by its interval."""
    if interval is None:
        return "neutral"
    low, high = interval
    return "good" if low > limit else "bad" if high < limit else "neutral"


def levels_on_shared_prompts(report: Report, head: str, settings: Sequence[Setting]) -> list[LevelDifference]:
    """Compare a retrained head with vanilla on the prompts of all arms, paired."""
    found = []
    for setting in settings:
        one = comparison_of(report, head, VANILLA, setting)
        delta, ci95 = one.delta_overlap_at_equal_entropy, one.delta_overlap_at_equal_entropy_ci95
        overlap = None if delta is None else Difference(delta, ci95, None, one.groups)
        found.append(
            LevelDifference(setting, Difference(one.delta_tau, one.delta_tau_ci95, one.p_value, one.groups), overlap)
        )
    return found


def levels_at_home(head: MeasuredArm, vanilla: MeasuredArm, settings: Sequence[Setting]) -> list[LevelDifference]:
    """Compare a retrained head with vanilla, each on prompts of its own; a prompt counts only for its own arm."""
    found = []
    for setting in settings:
        mine, theirs = ([one.counts(setting.depth) for one in arm.decoded[setting]] for arm in (head, vanilla))
        tau = tau_difference([*mine, *map(_unmet, theirs)], [*map(_unmet, mine), *theirs])
        place = setting.temperature, setting.context_tokens
        overlap = overlap_difference(head.dense[place], vanilla.dense[place], paired=False)
        found.append(LevelDifference(setting, tau, overlap))
    return found


def _unmet(counts: PromptCounts) -> PromptCounts:
    return replace(
        counts, rounds=0, num_draft_tokens=0, accepted_per_pos=tuple(0 for _ in counts.accepted_per_pos), new_tokens=0
    )


def find(
    report: Report,
    study: StudySection,
    levels: Sequence[LevelDifference],
    grafted: Sequence[LevelDifference],
) -> tuple[Finding, ...]:
    """Test every claim, the prediction first, by the levels of the first objective's head and of the grafted head."""
    settings = [level.setting for level in levels]
    first, *others = study.objectives
    measures = list(dict.fromkeys(one for level in levels for one in back_at_vanilla(report, level, study)))
    found = (
        prediction(measures),
        *measures,
        *(is_better(report, retrained(first), GRAFT, setting, BEATS_GRAFT) for setting in settings),
        *(finding for level in grafted for finding in is_stale(level)),
        *(
            # Same trunk, prompts, data, steps and seed.
            is_better(report, retrained(first), retrained(other), setting, DRAFTS_BETTER.format(first, other))
            for other in others
            for setting in settings
        ),
    )
    # Rules of one temperature share its text, and give the same findings about it: drop duplicates.
    return tuple(dict.fromkeys(found))


def prediction(measures: Sequence[Finding]) -> Finding:
    """Return the finding about the prediction: confirmed if all measures confirm it, refuted if all refute it."""
    tones = {one.tone for one in measures}
    tone: Tone = "good" if tones == {"good"} else "bad" if tones == {"bad"} else "neutral"
    found = {word: [one.statement for one in measures if one.tone == of] for of, word in VERDICTS.items()}
    told = [f"{word} by {', '.join(map(_measure, some))}" for word, some in found.items() if some]
    weak = WEAK if any(one.evidence.endswith(WEAK) for one in measures) else ""
    evidence = f"{'; '.join(told).capitalize() or 'Not measured'}.{weak}"
    return Finding(tone=tone, statement=f"{CLAIM}.", evidence=evidence)


def _measure(statement: str) -> str:
    return statement.removeprefix(BACK).rstrip(".")


def _finding(tone: Tone, statement: str, evidence: str) -> Finding:
    return Finding(tone=tone, statement=f"{statement}.", evidence=f"{VERDICTS[tone].capitalize()}: {evidence}")


def back_at_vanilla(report: Report, level: LevelDifference, study: StudySection) -> list[Finding]:
    """Test the prediction at one setting: raw, and at equal target entropy if the texts share enough entropies."""
    head = retrained(study.objectives[0])
    home = HOME if any(cell.arm == HOME for cell in report.cells) else VANILLA
    mine, theirs = cell_of(report, head, level.setting), cell_of(report, home, level.setting)
    texts = f"entropy {format_number(mine.target_entropy, 2)} against {format_number(theirs.target_entropy, 2)} nats"
    if theirs.repeated_8gram_share is not None:
        texts += f", repeats {100 * (mine.repeated_8gram_share or 0):.0f} % against "
        texts += f"{100 * theirs.repeated_8gram_share:.0f} %"
    findings = []
    if mine.tau is not None and theirs.tau is not None:
        limit = -study.margin * theirs.tau
        findings.append(
            _finding(
                tone_of(level.tau.ci95, limit),
                f"{BACK}tau ({level.setting.name})",
                f"{head} {mine.tau:.2f} against {home} {theirs.tau:.2f}: {_over_groups(level.tau, 2)}; back "
                f"means above {limit:+.2f} ({100 * study.margin:g} %). Each on text of its own: {texts}.",
            )
        )
    if level.overlap is not None and theirs.overlap and theirs.overlap[0] is not None:
        limit = -study.margin * theirs.overlap[0]
        weak = WEAK if tone_of(level.overlap.ci95, -limit) == "good" else ""
        findings.append(
            _finding(
                tone_of(level.overlap.ci95, limit),
                f"{BACK}overlap at equal target entropy ({_text(level.setting)})",
                f"{head} less {home}: {_over_groups(level.overlap, 3)}; back means above {limit:+.3f} "
                f"({100 * study.margin:g} % of {theirs.overlap[0]:.3f}).{weak}",
            )
        )
    return findings


def is_better(report: Report, head: str, other: str, setting: Setting, statement: str) -> Finding:
    """Test whether a head has the higher tau: same trunk, same prompts."""
    one = comparison_of(report, head, other, setting)
    mine, theirs = cell_of(report, head, setting), cell_of(report, other, setting)
    difference = _over_groups(Difference(one.delta_tau, one.delta_tau_ci95, None, one.groups), 2)
    evidence = f"tau {format_number(mine.tau, 2)} against {format_number(theirs.tau, 2)}: {difference}."
    return _finding(tone_of(one.delta_tau_ci95), f"{statement} ({setting.name})", evidence)


def is_stale(level: LevelDifference) -> list[Finding]:
    """Test whether the untouched head is worse on the distilled trunk at equal target entropy."""
    if level.overlap is None:
        return []
    return [
        _finding(
            tone_of(negated(level.overlap.ci95)),
            f"The grafted head is stale: overlap at equal target entropy ({_text(level.setting)})",
            f"{GRAFT} less vanilla with its own head: {_over_groups(level.overlap, 3)}.",
        )
    ]


def cell_of(report: Report, arm: str, setting: Setting) -> Cell:
    return next(cell for cell in report.cells if cell.arm == arm and cell.task == ALL_TASKS and cell.setting == setting)


def comparison_of(report: Report, first: str, second: str, setting: Setting) -> ArmComparison:
    """Return the comparison of two arms at a setting, all tasks together, in either stored order."""
    for one in report.comparisons:
        if {one.first, one.second} == {first, second} and one.task == ALL_TASKS and one.setting == setting:
            return one if one.first == first else one.swapped()
    raise LookupError(f"no comparison of {first} and {second} at {setting.slug}")


def _text(setting: Setting) -> str:
    return "greedy text" if setting.rule == "greedy" else f"text of temperature {setting.temperature:g}"


def _over_groups(difference: Difference, decimals: int) -> str:
    return f"{signed(difference.value, difference.ci95, decimals)} over {difference.groups} groups"
