"""Sentences and number formats of the report, shared by the terminal, the page and the model card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtp_train.acceptance.counts import Interval
from mtp_train.acceptance.gate import GateVerdict
from mtp_train.acceptance.intervals import POWER
from mtp_train.acceptance.names import CEILING, CONTROL, GRAFT, NATIVE, PLAIN, RANDOM, RETRAINED, TABLE, VANILLA
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import (
    UNJUDGED,
    UNJUDGED_SENTENCE,
    VERDICTS,
    ArmComparison,
    ArmResult,
    Cell,
    Finding,
    Lossless,
    Report,
    Tone,
    recommended,
)

Arms = dict[str, ArmResult]

RECORDED = {
    CONTROL: "the same training on the base's old text",
    CEILING: "ten times the steps",
    RANDOM: "the same training from random weights",
    TABLE: "a static n-gram table of the same training text instead of a head: the gain from repeated phrases alone",
}

SPEED_VERDICTS = {"above": "drafts pay", "below": "drafts do not pay", "neither": "undecided"}
BASELINES = {GRAFT: "the graft", NATIVE: "the native head", PLAIN: "plain decoding"}


ALIKE, APART, ELSEWHERE = "", "other trunk", "recorded"
"""Groups of arms whose figures compare with each other, by their titles: those measured here on the run's trunk, those
measured here on another trunk (vanilla), and those measured elsewhere, which are shown as recorded."""


def group_arms(report: Report) -> dict[str, Arms]:
    """Return the arms of a report by their group; a group may be empty."""
    groups: dict[str, Arms] = {ALIKE: {}, APART: {}, ELSEWHERE: {}}
    here = {name: arm for name, arm in report.arms.items() if arm.measured_here}
    # The trunk of the first of these arms is the run's trunk. The vanilla arm has another one, the base model.
    trunks = [here[name].trunk for name in (RETRAINED, GRAFT, NATIVE, *here) if name in here and name != VANILLA]
    for name, arm in report.arms.items():
        measured = APART if name == VANILLA or arm.trunk != trunks[0] else ALIKE
        groups[measured if arm.measured_here else ELSEWHERE][name] = arm
    return groups


def headline(report: Report) -> Finding:
    """Return the verdict: a failed lossless check, else the gate's, else the first finding, else the best arm."""
    if report.faults:
        # Acceptance has no meaning without it.
        return Finding("bad", "Not lossless: do not trust these figures", lossless_sentence(report.lossless))
    if report.settings.get("gate") == UNJUDGED:
        return Finding("neutral", "Unjudged head", UNJUDGED_SENTENCE)
    if report.gate is not None:
        return _gate_headline(report, report.gate)
    if report.findings:
        first = report.findings[0]
        return Finding(first.tone, verdict_title(first), first.evidence)
    ranked = ranked_arms(report)
    if not ranked:
        return Finding("neutral", "Acceptance measured", "No arm drafted at a common setting.")
    return _one_arm(ranked[0]) if len(ranked) == 1 else _best_arm(report, ranked)


def ranked_arms(report: Report) -> list[Cell]:
    """Return the cells of drafting arms with a tau at the headline setting, the highest tau first."""
    return sorted(
        (cell for cell in report.at(report.headline).values() if cell.tau is not None),
        key=lambda cell: cell.tau or 0.0,
        reverse=True,
    )


def _gate_headline(report: Report, gate: GateVerdict) -> Finding:
    retrained = report.arms.get(RETRAINED)
    baseline = BASELINES.get(gate.baseline, gate.baseline)
    detail = capitalised(gate.reason)
    if gate.outcome == "undecided":
        unwritten = ": nothing is exported" if report.title is report.endpoint is None else ""
        return Finding("neutral", f"Undecided whether drafts pay{unwritten}", detail)
    if gate.outcome == "refused":
        shown = "drafts do not pay" if gate.baseline == PLAIN else f"no gain shown over {baseline}"
        return Finding("bad", f"Refused: {shown}", detail)
    # Of two servers the second is judged.
    title = f"{'The retrained head' if report.title is None else list(report.arms)[-1]} beats {baseline}"
    if retrained is None:
        return Finding("good", title, detail)
    if gate.baseline == PLAIN and gate.settings[0].decides == "tau":
        title = "Passed by the break-even tau of another engine"
    return Finding(*payment(retrained, title), detail)


def verdict_title(finding: Finding) -> str:
    """Return a finding's statement after its verdict; alone, a refuted statement would read as confirmed."""
    return f"{VERDICTS[finding.tone].capitalize()}: {finding.statement[:1].lower()}{finding.statement[1:]}"


def _one_arm(cell: Cell) -> Finding:
    detail = f"Tau {format_tau(cell)} over {cell.prompts or 0} prompts of {cell.groups or 0} groups"
    if cell.speedup is None:
        return Finding("neutral", f"{cell.arm} commits {cell.tau:.2f} tokens a round", f"{detail}.")
    needed = f"; {cell.break_even_tau:.2f} would break even" if cell.break_even_tau is not None else ""
    return Finding(
        *payment(cell, f"{cell.arm} drafts at {cell.speedup:.2f}x the speed without drafts"), f"{detail}{needed}."
    )


def _best_arm(report: Report, ranked: Sequence[Cell]) -> Finding:
    best, *rest = ranked
    pairs = [{row.first: row, row.second: row} for row in report.compared]
    against = {arm: row for pair in pairs if best.arm in pair for arm, row in pair.items()}
    others = ", ".join(f"{one.arm} {one.tau:.2f}" for one in rest)
    equals = [one.arm for one in rest if one.arm not in against or not against[one.arm].differs]
    if equals:
        return Finding(
            "neutral",
            f"No arm is shown to be ahead; {best.arm} has the highest tau",
            f"Tau {best.tau:.2f} against {others}. No real difference from {' and '.join(equals)}.",
        )
    second = rest[0].arm
    return Finding(
        *payment(best, f"{best.arm} has the highest tau: {best.tau:.2f}"),
        f"Against {others}; each difference is real. From {second}: {difference_words(against[second])}.",
    )


def payment(arm: ArmResult, title: str) -> tuple[Tone, str]:
    """Return tone and title of a headline on an arm: green only where its drafts are shown to pay.

    A title stays as it is where no interval of the speed is known.
    """
    if arm.pays in (None, "above"):
        return "good", title
    measured = f"speedup {format_estimate(arm.speedup, arm.speedup_ci95)}"
    if arm.pays == "below":
        return "bad", f"{title}, and drafts slow decoding down here: {measured}"
    return "neutral", f"{title}; undecided whether it is faster: {measured}"


def key_figures(report: Report) -> list[tuple[str, str]]:
    """Return the (figure, meaning) pairs to show large; none without losslessness, or where no arm drafts."""
    ranked = ranked_arms(report)
    if report.faults or not ranked:
        return []
    retrained = report.arms.get(RETRAINED)
    if report.gate is not None and retrained is not None:
        shown: Arms = {name: report.arms[name] for name in (report.gate.baseline, RETRAINED) if name in report.arms}
        name = RETRAINED
        arm = retrained
    else:
        shown = {ranked[0].arm: ranked[0]}
        fastest = max(ranked, key=lambda cell: cell.speedup or 0.0)
        name = fastest.arm
        arm = fastest
    found = [
        (f"{one.tau:.2f}", f"tokens per round, {BASELINES.get(its_name, its_name)}")
        for its_name, one in shown.items()
        if one.tau is not None
    ]
    if arm.speedup is not None:
        found.append((f"{arm.speedup:.2f}x", f"the speed without drafts, {name}{bounds(arm.speedup_ci95)}"))
    if report.comparisons:
        found.append((count_real(report), "differences are real"))
    return found


def count_real(report: Report) -> str:
    """Return the number of real differences of the whole report, as ``18 of 24``."""
    rows = report.comparisons
    return f"{sum(row.differs for row in rows):,} of {len(rows):,}"


def serving_depth(report: Report) -> int | None:
    """Return the drafts per round to serve the retrained head with; None where no depth is shown to pay."""
    best = recommended(report.by_depth(RETRAINED).values())
    return None if best is None else best.depth


def serving_sentences(report: Report) -> list[str]:
    """Return for each arm the number of drafts to serve with, at the headline's temperature, context and rule.

    In a run, for the retrained head alone.
    """
    arms = [arm for arm in report.drafting if report.title is not None or arm == RETRAINED]
    told = {
        arm: (served_sentence if arm in (report.endpoint or ()) else depth_sentence)(report.by_depth(arm).values())
        for arm in arms
    }
    return [f"{arm}: {text}" if len(arms) > 1 else text for arm, text in told.items() if text]


def served_sentence(cells: Iterable[Cell]) -> str:
    """Return what a server's drafts bring, by its own time; may be empty."""
    return "; ".join(
        f"{SPEED_VERDICTS[cell.pays]}: {format_estimate(cell.speedup, cell.speedup_ci95)} times the speed without them"
        for cell in cells
        if cell.pays is not None
    )


def depth_sentence(cells: Iterable[Cell]) -> str:
    """Return the number of drafts to serve with, given a head's cells at several numbers of drafts; may be empty."""
    known = [cell for cell in cells if cell.pays is not None]
    if not known:
        return ""
    best = recommended(known)
    depths = ", ".join(str(cell.depth) for cell in known)
    if best is None:
        unsure = [
            f"{depth_words(cell.depth)} {format_estimate(cell.speedup, cell.speedup_ci95)}"
            for cell in known
            if cell.pays == "neither"
        ]
        if not unsure:
            return f"Serve without drafts: they slow decoding down at each of the depths measured here ({depths})."
        return (
            f"Undecided whether drafts pay: the interval of the speedup contains 1 for {'; '.join(unsure)}. Measure "
            "more prompts, on a machine without other work."
        )
    return (
        f"Serve with {depth_words(best.depth)} a round, the fastest of the depths measured here ({depths}) that are "
        f"shown to pay: {format_estimate(best.speedup, best.speedup_ci95)} times the speed of plain decoding "
        "by the built-in decoder. An engine's rounds may cost more: mtp-train compare plain=URL drafts=URL."
    )


def setting_words(setting: Setting) -> str:
    context = "own context" if setting.context_tokens is None else f"context of {setting.context_tokens:,} tokens"
    # A server may not report the number of drafts.
    drafts = f", {depth_words(setting.depth)} a round" if setting.depth else ""
    return f"{setting.name}{drafts}, {context}"


def depth_words(depth: int) -> str:
    # A server may not report how many.
    return "drafts" if depth == 0 else f"{depth} draft{'s' * (depth > 1)}"


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
    form = f"+.{decimals}f"
    return "-" if value is None else f"{value:{form}}{bounds(interval, form)}"


def power_sentence(gate: GateVerdict | None) -> str:
    """Return a sentence with the gain that the gate can detect at each setting; empty where no gain is known."""
    settings = [one for one in (gate.settings if gate is not None else ()) if one.detectable_gain is not None]
    seen = [f"{one.detectable_gain:.2f}" + (f" ({one.setting})" if len(settings) > 1 else "") for one in settings]
    if not seen:
        return ""
    gain = f"a true gain in {settings[0].decides} of {', '.join(seen)}"
    return f"Power of the gate: it detects {gain} with probability {POWER:g}."


def lossless_sentence(lossless: Lossless | None) -> str:
    if lossless is None or not lossless.checked:
        return "Not checked: no output was compared with plain decoding."
    same = f"{lossless.identical} of {lossless.checked} outputs equal plain decoding token for token"
    if lossless.faults:
        return f"{same}; {lossless.faults[0]}. Acceptance has no meaning for a decoder that changes the text."
    if lossless.near_tie_divergences:
        noise = "" if lossless.noise is None else f" (it moves the logits of contenders by up to {lossless.noise:.2g})"
        same += f"; {lossless.near_tie_divergences} diverge at a near tie, where rounding decides{noise}"
    if lossless.sampled:
        same += f"; {lossless.sampled} have sampled drafts, and every token is the one that the rule gives"
    return f"{same}."


def recorded_sentence(groups: Mapping[str, Arms]) -> str:
    """Return a sentence that explains the recorded arms whose names are known."""
    told = [f"{name} is {RECORDED[name]}" for name in groups[ELSEWHERE] if name in RECORDED]
    return f"Measured earlier with settings of their own and shown for scale{': ' if told else ''}{'; '.join(told)}."


def held_out_sentence(settings: Mapping[str, Any]) -> str:
    """Return what is known of the prompts: of a run, their number and groups; of a suite, whether it was trained on."""
    if "groups" not in settings:
        return str(settings.get("trained_on", ""))
    return f"{settings['prompts']} held-out prompts of {settings['groups']} groups; no group was trained on."


def apart_sentence(groups: Mapping[str, Arms], settings: Mapping[str, Any]) -> str:
    """Return sentences on why arms on another trunk do not compare: the text they decode, its repeats and entropies."""
    text = "Another trunk writes other text, so its tau does not compare with the arms above"
    entropies = [f"{arm.target_entropy:.2f} for {name}" for name, arm in groups[APART].items() if arm.target_entropy]
    own = [arm.target_entropy for arm in groups[ALIKE].values() if arm.target_entropy]
    if entropies and own:
        text += (
            ": text of low entropy is easier to draft. Target entropy in nats per token: "
            f"{', '.join(entropies)}, against {own[0]:.2f} on the trunk above"
        )
    vanilla = groups[APART].get(VANILLA)
    if vanilla is None or "vanilla_prompts" not in settings:
        return f"{text}."
    source = settings["vanilla_prompts"]
    repeats = vanilla.repeated_8gram_share
    own_kind = f"continues {source}, text of its own kind"
    text += f". vanilla {own_kind if source else 'answers the same prompts, not text of its own kind'}"
    if repeats is not None:
        text += f"; {format_percent(repeats)} of the 8-grams it writes repeat, and repeats are easy to draft"
    return f"{text}."


def format_tau(arm: ArmResult) -> str:
    return format_estimate(arm.tau, arm.tau_ci95)


def format_estimate(value: float | None, interval: Interval | None) -> str:
    return f"{format_number(value, 2)}{bounds(interval)}"


def bounds(interval: Interval | None, form: str = ".2f") -> str:
    """Return an interval as it stands behind its value; empty without one."""
    return "" if interval is None else f" [{interval[0]:{form}}, {interval[1]:{form}}]"


def format_shares(shares: Iterable[float | None] | None) -> str:
    """Format shares with two decimals each: ``.88 .82 .74``."""
    return " ".join(format_number(share, 2).removeprefix("0") for share in shares or ()) or "-"


def format_number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:,.{decimals}f}"


def format_percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def format_seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def flatten(values: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as rows of (dotted name, text of the value), in order."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            value = dict(enumerate(value, 1))
        if isinstance(value, Mapping):
            rows += flatten(value, f"{name}.")
        elif isinstance(value, list | tuple):
            rows.append((name, " ".join(map(str, value)) or "-"))
        else:
            rows.append((name, "-" if value is None else str(value)))
    return rows


def capitalised(text: str) -> str:
    """Capitalise the first letter. No full stop is added: a message may end in a command, which users copy."""
    return text[:1].upper() + text[1:]
