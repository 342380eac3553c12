"""A recipe with a section ``study``: a vanilla and a distilled model, compared.

It is a run that trains a head for each objective on the same responses, measures all arms over a grid and tests the
claim. A measurement resumes after its last prompt.

The published claim: retraining a head on the distilled trunk's own responses brings acceptance back to the vanilla
level. Two models generate different text, and text of lower entropy is easier to draft. The level is therefore compared
twice: raw, as tokens per round, and at equal target entropy, as overlap of p and q at depth 1. "Back" means that at
most a stated share of the vanilla level is missing. The claim is confirmed if the whole interval of the difference lies
above that bound, refuted if the whole interval lies below it, and undecided otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mtp_inference.opening import OWN
from mtp_train.acceptance.counts import Interval
from mtp_train.acceptance.names import GRAFT, NATIVE, RETRAINED, VANILLA
from mtp_train.acceptance.speed import Verdict, side
from mtp_train.checkpoints.locations import HEAD
from mtp_train.evaluation.arms import ArmSpec
from mtp_train.evaluation.grid import EvaluationGrid
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import ALL_TASKS, VERDICTS, ArmComparison, Cell, Finding, Report, Tone
from mtp_train.evaluation.run import Study, study_report
from mtp_train.losses.catalogue import find_loss
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.sections import StudySection
from mtp_train.report.wording import format_number, format_percent, lossless_sentence, signed, verdict_title
from mtp_train.runs.run import Run
from mtp_train.runs.run_directory import DONE, Outcome, RunDirectory
from mtp_train.runs.trunks import HIDDEN

HEADS, GRID_DIR = "heads", "grid"
CLAIM = "Retraining on the distilled trunk's own responses brings acceptance back to the vanilla level"
TONES: Mapping[Verdict, Tone] = {"above": "good", "below": "bad", "neither": "neutral"}
BACK = "Back at the vanilla level by "
WEAK = (
    " The retrained head is above that level by more than the margin: vanilla's own head is not trained out, or for "
    "other text, so the level is a low bar."
)


def head_runs(run: Run) -> list[Run]:
    """Return a run for each head that is trained: the run itself, or one for each objective of a study, below it."""
    study = run.recipe.study
    return [run] if study is None else [_of_objective(run, one) for one in study.objectives]


def _of_objective(run: Run, objective: str) -> Run:
    recipe = run.recipe
    run_dir = run.directory.path
    values: dict[str, object] = {
        "objective.loss": objective,
        "objective.temperature": recipe.objective.temperature if find_loss(objective).distils else 1.0,
    }
    cache = recipe.train.hidden_cache
    if cache is not None and cache.directory is None:
        values["train.hidden_cache.directory"] = str(run_dir / HIDDEN)
    return replace(run, recipe=recipe.replaced(values), directory=RunDirectory(run_dir / HEADS / objective))


def measure_study(run: Run, study: StudySection) -> Report | None:
    """Measure the heads and test the claim; the main process returns the report. All processes decode."""
    recipe = run.recipe
    run_dir = run.directory.path
    grid = grid_of(recipe, study)
    measured = Study(
        arm_specs(recipe, study, run_dir),
        grid,
        run_dir / GRID_DIR,
        run.progress,
        prompts=run.inputs.text.held_out,
        processes=run.processes,
    ).measure()
    if not run.is_main:
        return None
    settings = [setting for setting in grid.settings() if setting.depth == grid.headline.depth]
    report = study_report(measured, grid, f"vanilla and distilled: {recipe.model.head_from}, {recipe.model.trunk}")
    return replace(
        report,
        settings={**report.settings, "margin": study.margin},
        findings=() if report.faults else find(report, study, settings),
    )


def study_outcome(report: Report) -> Outcome:
    """Return the outcome of a study: what became of its claim."""
    if report.faults:
        return Outcome(1, "not_lossless", f"{lossless_sentence(report.lossless)} Please report it.", DONE)
    claim = report.findings[0]
    return Outcome(0, "done", f"{verdict_title(claim)} {claim.evidence}", DONE)


def arm_specs(recipe: Recipe, study: StudySection, run_dir: Path) -> list[ArmSpec]:
    model = recipe.model
    base = str(model.head_from)

    def on_trunk(name: str, head: str) -> ArmSpec:
        return ArmSpec(name, model.trunk, head, model.adapter, model.quantization)

    native = [on_trunk(NATIVE, OWN)] if NATIVE in recipe.evaluate.arms else []
    heads = [on_trunk(retrained(one), str(run_dir / HEADS / one / HEAD)) for one in study.objectives]
    return [on_trunk(GRAFT, base), *native, *heads, ArmSpec(VANILLA, base, OWN, quantization=model.quantization)]


def grid_of(recipe: Recipe, study: StudySection) -> EvaluationGrid:
    return EvaluationGrid(
        suite="held-out prompts",
        prompts_per_task=recipe.evaluate.prompts,
        temperatures=study.temperatures,
        depths=study.depths,
        rules=study.rules,
        max_new_tokens=recipe.evaluate.max_new_tokens,
        batch=study.batch,
        seed=recipe.seed,
    )


# The claim


def retrained(objective: str) -> str:
    return f"{RETRAINED}-{objective}"


def tone_of(interval: Interval | None, limit: float) -> Tone:
    """Return the verdict on the claim that a difference lies above ``limit``, by its interval."""
    return TONES[side(interval, limit)]


def find(report: Report, study: StudySection, settings: Sequence[Setting]) -> tuple[Finding, ...]:
    """Test the prediction by the first objective's head: the verdict first, then its measures at each setting.

    Which arm has the higher tau, and whether the graft is stale, are comparisons of the report.
    """
    # Rules of one temperature share its text, and give the same findings about it: drop duplicates.
    measures = dict.fromkeys(one for setting in settings for one in back_at_vanilla(report, setting, study))
    # Confirmed if all measures confirm it, refuted if all refute it.
    tones = {one.tone for one in measures}
    tone = tones.pop() if len(tones) == 1 else "neutral"
    found = {
        word: [one.statement.removeprefix(BACK).rstrip(".") for one in measures if one.tone == of]
        for of, word in VERDICTS.items()
    }
    told = [f"{word} by {', '.join(some)}" for word, some in found.items() if some]
    low = WEAK * any(is_low_bar(report, one, study) for one in settings)
    return Finding(tone, f"{CLAIM}.", f"{'; '.join(told).capitalize() or 'Not measured'}.{low}"), *measures


def is_low_bar(report: Report, setting: Setting, study: StudySection) -> bool:
    """Return whether the head is above vanilla at equal target entropy by more than the margin."""
    level = (cell_of(report, VANILLA, setting).overlap or (None,))[0]
    one = comparison_of(report, retrained(study.objectives[0]), VANILLA, setting)
    return level is not None and tone_of(one.delta_overlap_at_equal_entropy_ci95, study.margin * level) == "good"


def _finding(tone: Tone, statement: str, evidence: str) -> Finding:
    return Finding(tone, f"{statement}.", f"{VERDICTS[tone].capitalize()}: {evidence}")


def back_at_vanilla(report: Report, setting: Setting, study: StudySection) -> list[Finding]:
    """Test the prediction at one setting: raw, and at equal target entropy if the texts share enough entropies."""
    head = retrained(study.objectives[0])
    mine = cell_of(report, head, setting)
    theirs = cell_of(report, VANILLA, setting)
    one = comparison_of(report, head, VANILLA, setting)
    texts = (
        f"entropy {format_number(mine.target_entropy, 2)} against {format_number(theirs.target_entropy, 2)} nats, "
        f"repeats {format_percent(mine.repeated_8gram_share)} against {format_percent(theirs.repeated_8gram_share)}"
    )
    findings = []
    if mine.tau is not None and theirs.tau is not None:
        limit = -study.margin * theirs.tau
        gain = signed(one.delta_tau, one.delta_tau_ci95)
        findings.append(
            _finding(
                tone_of(one.delta_tau_ci95, limit),
                f"{BACK}tau ({setting.name})",
                f"{head} {mine.tau:.2f} against {VANILLA} {theirs.tau:.2f}: {gain} over {one.groups} groups; back "
                f"means above {limit:+.2f} ({100 * study.margin:g} %). Each on text of its own: {texts}.",
            )
        )
    delta = one.delta_overlap_at_equal_entropy
    interval = one.delta_overlap_at_equal_entropy_ci95
    if delta is not None and theirs.overlap and theirs.overlap[0] is not None:
        limit = -study.margin * theirs.overlap[0]
        text = "greedy text" if setting.rule == "greedy" else f"text of temperature {setting.temperature:g}"
        findings.append(
            _finding(
                tone_of(interval, limit),
                f"{BACK}overlap at equal target entropy ({text})",
                f"{head} less {VANILLA}: {signed(delta, interval, 3)} over {one.groups} groups; back means above "
                f"{limit:+.3f} ({100 * study.margin:g} % of {theirs.overlap[0]:.3f}).",
            )
        )
    return findings


def cell_of(report: Report, arm: str, setting: Setting) -> Cell:
    return report.by_place[arm, ALL_TASKS, setting]


def comparison_of(report: Report, first: str, second: str, setting: Setting) -> ArmComparison:
    """Return the comparison of two arms at a setting, all tasks together, in either stored order."""
    for one in report.comparisons:
        if {one.first, one.second} == {first, second} and one.task == ALL_TASKS and one.setting == setting:
            return one if one.first == first else one.swapped()
    raise LookupError(f"no comparison of {first} and {second} at {setting.slug}")
