"""Test the claims of a study of a vanilla and a distilled model, and return findings with their intervals.

The published claim: retraining a head on the distilled trunk's own responses brings acceptance back to the vanilla
level. Two models generate different text, and text of lower entropy is easier to draft. The level is therefore compared
twice: raw, as tokens per round, and at equal target entropy, as overlap of p and q at depth 1. "Back" means that at
most a stated share of the vanilla level is missing. The claim is confirmed if the whole interval of the difference lies
above that bound, refuted if the whole interval lies below it, and undecided otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mtp_train.acceptance.counts import Interval, PromptCounts
from mtp_train.acceptance.intervals import Difference, tau_difference
from mtp_train.acceptance.names import GRAFT, HOME, RETRAINED, VANILLA
from mtp_train.evaluation.entropy import EntropySums, fine_edges, overlap_difference
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import (
    ALL_TASKS,
    VERDICTS,
    ArmComparison,
    Cell,
    Finding,
    Report,
    Tone,
    negated,
)
from mtp_train.evaluation.statistics import MeasuredArm
from mtp_train.recipe.sections import StudySection
from mtp_train.report.wording import format_number, signed

CLAIM = "Retraining on the distilled trunk's own responses brings acceptance back to the vanilla level"
BACK = "Back at the vanilla level by "
BEATS_GRAFT = "Retraining beats the grafted head on the distilled trunk"
DRAFTS_BETTER = "A head trained towards {} drafts better than one towards {}"


def retrained(objective: str) -> str:
    """Return the arm name of a head that was retrained towards an objective."""
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
        first, second = (EntropySums.of(arm.dense[place], fine_edges()) for arm in (head, vanilla))
        found.append(LevelDifference(setting, tau, overlap_difference(*_over_all(first, second), None)))
    return found


def _unmet(counts: PromptCounts) -> PromptCounts:
    return replace(
        counts, rounds=0, num_draft_tokens=0, accepted_per_pos=tuple(0 for _ in counts.accepted_per_pos), new_tokens=0
    )


def _over_all(first: EntropySums, second: EntropySums) -> tuple[EntropySums, EntropySums]:
    """Return both sums over the prompts of both arms, with no positions for prompts of the other arm."""
    names = first.prompt_ids + second.prompt_ids, first.groups + second.groups, first.tasks + second.tasks
    before, after = (0, len(second.prompt_ids)), (len(first.prompt_ids), 0)

    def padded(sums: EntropySums, rows: tuple[int, int]) -> EntropySums:
        return EntropySums(*names, *(np.pad(one, (rows, (0, 0))) for one in (sums.counts_PB, sums.overlaps_PB)))

    return padded(first, before), padded(second, after)


def find(
    report: Report,
    study: StudySection,
    levels: Sequence[LevelDifference],
    grafted: Sequence[LevelDifference],
) -> tuple[Finding, ...]:
    """Test every claim, the prediction first.

    Args:
        report: Cells and comparisons of all arms.
        study: The recipe's ``study`` section.
        levels: Levels of the first objective's head against the arm that gives the vanilla level.
        grafted: Levels of the grafted head, likewise.
    """
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
    return Finding(tone=tone, statement=f"{CLAIM}.", evidence=f"{'; '.join(told).capitalize() or 'Not measured'}.")


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
        findings.append(
            _finding(
                tone_of(level.overlap.ci95, limit),
                f"{BACK}overlap at equal target entropy ({_text(level.setting)})",
                f"{head} less {home}: {_over_groups(level.overlap, 3)}; back means above {limit:+.3f} "
                f"({100 * study.margin:g} % of {theirs.overlap[0]:.3f}).",
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
    """Return an arm's cell at a setting, all tasks together."""
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
