"""Sentences of a study's report, shared by the page and the terminal."""

from __future__ import annotations

from typing import Literal

from mtp_train.acceptance.counts import Interval
from mtp_train.evaluation.cells import ALL_TASKS, VERDICTS, ArmComparison, Cell, Finding
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.report.study_slices import Slices
from mtp_train.report.wording import (
    GLOSSARY,
    Headline,
    depth_sentence,
    format_speedup,
    format_tau,
    lossy_headline,
    payment,
)

TONES: dict[str, Literal["good", "bad", "neutral"]] = {"good": "good", "bad": "bad"}
"""Tone of a headline by tone of a finding; any other tone is neutral."""

RULE_WORDS = {
    "none": "no drafts",
    "greedy": "greedy",
    "argmax": "argmax drafts",
    "sampled": "sampled drafts",
    "served": "the server's rule",
}

_ADDED = (
    ("macro", "Mean of tau over prompts. Tau itself pools rounds, so long texts weigh more."),
    ("overlap", "Mean of sum min(p, q) at depth 1: the expected acceptance of rejection sampling."),
    ("rule", "How drafts are made and verified; figures of different rules do not compare."),
    ("greedy", "Temperature 0: drafts are accepted while they equal the trunk's most probable token."),
    (
        "argmax drafts",
        "The head's most probable token, accepted with the trunk's probability of it. Most engines do this.",
    ),
    ("sampled drafts", "Drawn from the head's distribution and verified by rejection sampling."),
    ("tau needed", "Break-even: the tau at which a round takes as long as plain decoding of the same tokens."),
    (
        "real",
        "The difference passes a test paired by prompt, over groups of prompts, at 5 % over all comparisons together "
        "(Holm's correction).",
    ),
    ("the head", "Compared at equal target entropy, so that an easier text alone makes no difference."),
    ("own context", "The unchanged prompts. A context of 512 is the same prompts with other text before them."),
)
STUDY_GLOSSARY = tuple({**dict(GLOSSARY), **dict(_ADDED)}.items())


def setting_words(setting: Setting) -> str:
    """Describe a setting in one line."""
    context = "own context" if setting.context_tokens is None else f"context of {setting.context_tokens:,} tokens"
    # A server may not report the number of drafts.
    drafts = f", {depth_words(setting.depth)} a round" if setting.depth else ""
    return f"temperature {setting.temperature:g}, {RULE_WORDS[setting.rule]}{drafts}, {context}"


def depth_words(depth: int) -> str:
    """Format a number of drafts."""
    return "no drafts" if depth == 0 else f"{depth} draft{'s' * (depth > 1)}"


def study_headline(slices: Slices) -> Headline:
    """Return the verdict: a failed lossless check, else the first finding, else the arm with the highest tau."""
    report = slices.report
    if report.lossless and report.lossless.faults:
        return lossy_headline(report.lossless)
    if report.findings:
        first = report.findings[0]
        return Headline(TONES.get(first.tone, "neutral"), verdict_title(first), first.evidence)
    ranked = ranked_arms(slices)
    if not ranked:
        return Headline("neutral", "Acceptance measured", "No arm drafted at a common setting.")
    return _one_arm(*ranked[0]) if len(ranked) == 1 else _best_arm(slices, ranked)


def verdict_title(finding: Finding) -> str:
    """Return a finding's statement after its verdict; alone, a refuted statement would read as confirmed."""
    verdict = VERDICTS.get(finding.tone, VERDICTS["neutral"])
    return f"{verdict.capitalize()}: {finding.statement[:1].lower()}{finding.statement[1:]}"


def finding_headline(finding: Finding) -> Headline:
    """Return a finding as a headline."""
    return Headline(TONES.get(finding.tone, "neutral"), finding.statement, finding.evidence)


def ranked_arms(slices: Slices) -> list[tuple[str, Cell, float]]:
    """Return (arm, cell at the headline setting, tau) of the drafting arms, the highest tau first."""
    known = [(name, cell, cell.tau) for name, cell in slices.pooled().items() if cell.tau is not None]
    return sorted(known, key=lambda entry: -entry[2])


def _one_arm(name: str, cell: Cell, tau: float) -> Headline:
    detail = f"Tau {format_tau(cell)} over {cell.prompts or 0} prompts of {cell.groups or 0} groups"
    if cell.speedup is None:
        return Headline("neutral", f"{name} commits {tau:.2f} tokens a round", f"{detail}.")
    title = f"{name} drafts at {format_speedup(cell.speedup)} the speed without drafts"
    needed = f"; {cell.break_even_tau:.2f} would break even" if cell.break_even_tau is not None else ""
    return Headline(*payment(cell, title), f"{detail}{needed}.")


def _best_arm(slices: Slices, ranked: list[tuple[str, Cell, float]]) -> Headline:
    (best, cell, tau), *rest = ranked
    rows = [row for row in slices.comparisons() if row.task == ALL_TASKS]
    against = {row.second: row for row in (*rows, *(row.swapped() for row in rows)) if row.first == best}
    others = ", ".join(f"{name} {its_tau:.2f}" for name, _, its_tau in rest)
    equals = [name for name, _, _ in rest if name not in against or not against[name].differs]
    if equals:
        title = f"No arm is shown to be ahead; {best} has the highest tau"
        return Headline(
            "neutral", title, f"Tau {tau:.2f} against {others}. No real difference from {' and '.join(equals)}."
        )
    detail = f"Against {others}; each difference is real. From {rest[0][0]}: {difference_words(against[rest[0][0]])}."
    return Headline(*payment(cell, f"{best} has the highest tau: {tau:.2f}"), detail)


def pair_words(row: ArmComparison) -> str:
    """Return the name of a comparison: ``first - second``."""
    return f"{row.first} - {row.second}"


def difference_words(row: ArmComparison) -> str:
    """Describe what differs between two arms: tau, the head, or only the entropy of their texts."""
    alone = row.delta_tau_ci95 is not None and not row.delta_tau_ci95[0] <= 0.0 <= row.delta_tau_ci95[1]
    level = "not shown over so many comparisons" if alone else "no difference shown"
    if row.same_trunk:
        return "tau and head differ" if row.differs else level
    interval = row.delta_overlap_at_equal_entropy_ci95
    if interval is None:
        return "tau differs, by text or head" if row.differs else level
    head = (interval[0] > 0) - (interval[1] < 0)
    if not row.differs:
        return "tau not shown to differ, head does" if head else level
    if not head:
        return "tau differs, head does not"
    return "tau and head differ" if head * row.delta_tau > 0 else "tau differs one way, head the other"


def signed(value: float | None, interval: Interval | None, decimals: int = 2) -> str:
    """Format a difference with its sign, and its interval where it has one."""
    if value is None:
        return "-"
    bounds = f" [{interval[0]:+.{decimals}f}, {interval[1]:+.{decimals}f}]" if interval else ""
    return f"{value:+.{decimals}f}{bounds}"


def count_real(slices: Slices) -> str:
    """Return the number of real differences of the whole report, as ``18 of 24``."""
    rows = slices.report.comparisons
    return f"{sum(row.differs for row in rows):,} of {len(rows):,}"


def study_key_figures(slices: Slices) -> list[tuple[str, str]]:
    """Return the (figure, meaning) pairs to show large; none where the lossless check failed."""
    report = slices.report
    ranked = ranked_arms(slices)
    if (report.lossless and report.lossless.faults) or not ranked:
        return []
    figures = [(f"{ranked[0][2]:.2f}", f"tokens per round, {ranked[0][0]}")]
    fast = [(cell.speedup, arm) for arm, cell in slices.pooled().items() if cell.speedup is not None]
    if fast:
        speedup, arm = max(fast)
        figures.append((format_speedup(speedup), f"the speed without drafts, {arm}"))
    if report.comparisons:
        figures.append((count_real(slices), "differences are real"))
    prompts = max((cell.prompts or 0) for _, cell, _ in ranked)
    figures.append((f"{prompts:,}", f"prompts of {len(slices.tasks)} tasks" if len(slices.tasks) > 1 else "prompts"))
    return figures


def serving_sentences(slices: Slices) -> list[str]:
    """Return for each arm the number of drafts to serve with, at the headline's temperature, context and rule."""
    found = []
    for arm in slices.arms:
        cells = {one.depth: slices.cells.get((arm, ALL_TASKS, one)) for one in slices.depths()}
        told = depth_sentence({depth: cell for depth, cell in cells.items() if cell is not None})
        if told:
            found.append(f"{arm}: {told}" if len(slices.arms) > 1 else told)
    return found
