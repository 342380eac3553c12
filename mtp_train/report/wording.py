"""What the report says in words and how it prints a number: one source for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mtp_train.acceptance import Interval
from mtp_train.acceptance_gate import GateVerdict
from mtp_train.acceptance_intervals import POWER
from mtp_train.report.schema import ArmResult, Lossless, RunReport

Arms = dict[str, ArmResult]

GROUPS = "groups"
COLUMNS = (
    "tau [95 %]",
    GROUPS,
    "by position",
    "tokens/s",
    "speedup",
    "repeats",
    "entropy",
)

GLOSSARY = (
    ("trunk", "The frozen model whose tokens count. Drafts never change what it says, only how fast."),
    ("head", "The small MTP module that drafts the next tokens."),
    ("round", "Draft a few tokens, let the trunk verify them in one pass, accept the leading ones it agrees with."),
    ("tau", "Mean tokens committed per round, the trunk's own bonus token included. 1.00 is plain decoding."),
    ("by position", "Marginal acceptance: the share of all rounds that accepted the draft at position 1, 2, ..."),
    ("conditional", "The same among the rounds that accepted the position before."),
    ("dense", "Teacher-forced acceptance at every position of the trunk's own text: comparable across depths."),
    ("overlap", "Mean of sum min(p, q): the acceptance that rejection sampling at temperature 1 would reach."),
    (
        "[95 %]",
        "Interval over groups of prompts. Rounds of one prompt are alike, and so are prompts of one group, so more of "
        "them alone do not narrow it.",
    ),
    ("groups", "Groups of prompts that are held out whole: a module, a conversation, a file."),
    ("speedup", "Tokens per second over those of the same trunk in the same decoder without drafts."),
    ("repeats", "Share of 8-grams that already occurred in the same output. Loops are easy to draft and inflate tau."),
    ("entropy", "How uncertain the trunk is about its next token, in nats. A lower entropy is easier to draft."),
    ("graft", "The base model's head put on the fine-tune without training."),
    ("retrained", "The head after training on what the fine-tune itself says, or beside it while it was tuned."),
    ("vanilla", "The base model with the head it came with."),
)

RECORDED = {
    "control": "the same training on the base's old text",
    "ceiling": "ten times the steps",
    "random": "the same training from random weights",
    "ngram": "no head but a static n-gram table of the same training text, what remembering its phrases gives",
}

OVERLAP_WARNED, SEEN_WARNED = 0.4, 0.1
"""Shares that are warned of: of held-out 8-grams in the training text, and of held-out prompts that were seen.

Splits without a leak: .002 and 0 for code by module, .24 to .27 and at most .03 for the demo's records by module, which
are more templated than most text. With leaks: .64 and .47 where the demo's records are held out one by one, .94 and .91
where each has a copy in training.
"""

BASELINES = {"graft": "the graft", "native": "the native head", "none": "plain decoding"}


@dataclass(frozen=True)
class Headline:
    """The one thing to take away."""

    tone: Literal["good", "bad", "neutral"]
    title: str
    detail: str


@dataclass(frozen=True)
class ArmGroups:
    """Arms by what they may be compared with.

    Attributes:
        alike: Measured here on the run's trunk: like for like.
        apart: Measured on another trunk (vanilla): not like for like.
        recorded: Measured elsewhere and shown as recorded.
    """

    alike: Arms
    apart: Arms
    recorded: Arms


def group_arms(report: RunReport) -> ArmGroups:
    """Split the arms into those that compare like for like and the others."""
    here = {name: arm for name, arm in report.arms.items() if arm.measured_here}
    # The run's trunk is the one that was drafted for; vanilla never names it.
    names = [name for name in ("retrained", "graft", "native", *here) if name in here and name != "vanilla"]
    apart = {name: arm for name, arm in here.items() if name == "vanilla" or arm.trunk != here[names[0]].trunk}
    return ArmGroups(
        alike={name: arm for name, arm in here.items() if name not in apart},
        apart=apart,
        recorded={name: arm for name, arm in report.arms.items() if not arm.measured_here},
    )


def headline(report: RunReport) -> Headline:
    """Return the run's verdict. Output that is not lossless comes first: its acceptance figures mean nothing."""
    if report.lossless and report.lossless.faults:
        return lossy_headline(report.lossless)
    if report.gate is None and report.settings.get("head") == "kept":
        return kept_headline(report)
    if report.gate is None:
        return Headline("neutral", "Acceptance measured", "Nothing was retrained, so that there was nothing to judge.")
    baseline = BASELINES.get(report.gate.baseline, report.gate.baseline)
    detail = capitalised(report.gate.reason)
    if not report.gate.passed:
        return Headline("bad", f"Refused: no gain shown over {baseline}", detail)
    return Headline("good", f"The retrained head beats {baseline}", detail)


def kept_headline(report: RunReport) -> Headline:
    """Return the verdict on a head that was kept while its trunk was fine-tuned."""
    tau = report.arms["graft"].tau
    return Headline(
        "neutral",
        "The trunk was fine-tuned, its head kept as it was: stale",
        f"The head commits {format_number(tau, 2)} tokens a round on the tuned trunk; plain decoding, 1.00. Retrain it "
        f"on what that says: {report.settings['next']}",
    )


def lossy_headline(lossless: Lossless) -> Headline:
    """Return the verdict on a decoder that changed texts."""
    return Headline("bad", "Not lossless: do not trust these figures", lossless_sentence(lossless))


def key_figures(report: RunReport) -> list[tuple[str, str]]:
    """Return the (figure, meaning) pairs to show large; none without a retrained head or a lossless decoder."""
    retrained = report.arms.get("retrained")
    if retrained is None or retrained.tau is None or (report.lossless and report.lossless.faults):
        return []
    figures = [(f"{retrained.tau:.2f}", "tokens per round, retrained")]
    baseline = report.gate.baseline if report.gate else "graft"
    before = report.arms.get(baseline)
    if before is not None and before.tau is not None:
        figures.insert(0, (f"{before.tau:.2f}", f"tokens per round, {BASELINES.get(baseline, baseline)}"))
    if retrained.speedup is not None:
        figures.append((format_speedup(retrained.speedup), "the speed without drafts"))
    return figures


GATE_COLUMNS = ("setting", "prompts", "groups", "baseline", "retrained", "gain [95 %]", "verdict", "would see")


def gate_rows(gate: GateVerdict | None) -> list[tuple[str, ...]]:
    """Return what the gate found at each setting, under :data:`GATE_COLUMNS`."""
    verdicts = {"above": "gain shown", "below": "loss shown", "neither": "not shown"}
    return [
        (
            one.setting,
            str(one.prompts),
            str(one.groups),
            f"{one.baseline_tau:.2f}",
            f"{one.tau:.2f}",
            "-" if one.delta_tau_ci95 is None else "[{:+.2f}, {:+.2f}]".format(*one.delta_tau_ci95),
            verdicts[one.verdict],
            "-" if one.detectable_gain is None else f"+{one.detectable_gain:.2f}",
        )
        for one in (gate.settings if gate is not None else ())
    ]


def gate_lines(gate: GateVerdict | None) -> list[str]:
    """Return what the gate found at each setting, one line each."""
    return [
        f"Gate, {setting}: tau {before} to {after}, gain {interval} over {groups} groups: {verdict}"
        for setting, _, groups, before, after, interval, verdict, _ in gate_rows(gate)
    ]


def group_sentence(arms: Mapping[str, ArmResult]) -> str:
    """Say how many groups the intervals of arms rest on; empty where no arm has a known number."""
    by_count: dict[int, list[str]] = {}
    for name, arm in arms.items():
        if arm.tau_ci95 is not None and arm.groups is not None:
            by_count.setdefault(arm.groups, []).append(name)
    if len(by_count) < 2:
        told = "".join(f"{count} groups of prompts" for count in by_count)
    else:
        told = ", ".join(f"{count} groups ({' '.join(names)})" for count, names in by_count.items())
    return f"Intervals are over {told}." if told else ""


def power_sentence(gate: GateVerdict | None) -> str:
    """Say how small a gain the gate would have seen at each setting; empty where it has no interval."""
    settings = [one for one in (gate.settings if gate is not None else ()) if one.detectable_gain is not None]
    seen = [f"{one.detectable_gain:.2f}" + (f" ({one.setting})" if len(settings) > 1 else "") for one in settings]
    if not seen:
        return ""
    return f"Power of the gate: it sees a true gain in tau of {', '.join(seen)} with probability {POWER:g}."


def lossless_sentence(lossless: Lossless | None) -> str:
    """Say whether decoding with drafts gave the text of plain decoding."""
    if lossless is None or not lossless.checked:
        return "Not checked: no output was compared with plain decoding."
    same = f"{lossless.identical} of {lossless.checked} outputs equal plain decoding token for token"
    if lossless.faults:
        return (
            f"{same}; {lossless.faults} differ without a near tie to excuse it. "
            "Acceptance of a decoder that changes the text has no meaning."
        )
    if lossless.near_tie_divergences:
        return f"{same}; the other {lossless.near_tie_divergences} part at a near tie, where rounding decides."
    return f"{same}."


def recorded_sentence(groups: ArmGroups) -> str:
    """Say what recorded arms are, those that are known by name."""
    told = [f"{name} is {RECORDED[name]}" for name in groups.recorded if name in RECORDED]
    return f"Measured earlier with settings of their own and shown for scale{': ' if told else ''}{'; '.join(told)}."


def held_out_sentence(settings: Mapping[str, Any]) -> str:
    """Say how many groups the held-out prompts come from, and how much of their text was trained on; else nothing."""
    found = settings.get("held_out")
    if found is None:
        return ""
    text = f"{found['prompts']} held-out prompts of {found['groups']} groups."
    share, template = found["overlap_8gram"], found["template_8gram"]
    if share is not None:
        text += (
            f" {format_percent(share)} of the 8-grams of these prompts and their answers occur in the training text, "
            f"templates left out ({format_percent(template)} of all); {found['prompts_seen']} prompts occur there to "
            "70 % or more."
        )
    if share is not None and (share > OVERLAP_WARNED or found["prompts_seen"] > SEEN_WARNED * found["prompts"]):
        text += (
            f" Warning: above {OVERLAP_WARNED:.0%}, or {SEEN_WARNED:.0%} of the prompts, much of the held-out text was "
            "trained on and tau is too high. Group records that share text by data.group_field, or remove duplicates."
        )
    median = settings.get("target_entropy_median")
    if median is not None:
        text += f" Half of the target tokens have an entropy below {median:.3f} nats: the lower, the more templated."
    return text


def apart_sentence(groups: ArmGroups, settings: Mapping[str, Any]) -> str:
    """Say why an arm on another trunk is not like for like: what it decodes, how much of that repeats itself, and both
    entropies where they are known."""
    return f"{_entropy_sentence(groups)}{_vanilla_sentence(groups, settings)}"


def _vanilla_sentence(groups: ArmGroups, settings: Mapping[str, Any]) -> str:
    vanilla = groups.apart.get("vanilla")
    if vanilla is None or "vanilla_prompts" not in settings:
        return ""
    source = settings["vanilla_prompts"]
    told = f"goes on from {source}, text of its own kind" if source else "answers the same prompts, not text of its own"
    repeats = vanilla.repeated_8gram_share
    if repeats is None:
        return f" vanilla {told}."
    return f" vanilla {told}; {format_percent(repeats)} of the 8-grams it writes repeat, which are easy to draft."


def _entropy_sentence(groups: ArmGroups) -> str:
    text = "Another trunk writes other text, so that its tau does not compare with the arms above"
    entropies = [f"{arm.target_entropy:.2f} for {name}" for name, arm in groups.apart.items() if arm.target_entropy]
    own = [arm.target_entropy for arm in groups.alike.values() if arm.target_entropy]
    if not entropies or not own:
        return f"{text}."
    return (
        f"{text}: text of low entropy is easier to draft. "
        f"Target entropy in nats per token: {', '.join(entropies)}, against {own[0]:.2f} on the trunk above."
    )


def arm_cells(arm: ArmResult) -> tuple[str, ...]:
    """Return an arm's row under :data:`COLUMNS`."""
    return (
        format_tau(arm),
        format_groups(arm),
        format_shares(arm.marginal),
        format_number(arm.tokens_per_second, 1),
        format_speedup(arm.speedup),
        format_percent(arm.repeated_8gram_share),
        format_number(arm.target_entropy, 2),
    )


def format_tau(arm: ArmResult) -> str:
    """Print tau with its interval where there is one."""
    return format_estimate(arm.tau, arm.tau_ci95)


def format_groups(arm: ArmResult) -> str:
    """Print the number of groups that an interval of tau rests on, or a dash."""
    return format_number(None if arm.tau_ci95 is None else arm.groups, 0)


def count_words(groups: Iterable[int]) -> str:
    """Say how many groups intervals rest on: ``12 groups``, or ``10 to 12 groups``; at least one count."""
    known = sorted(set(groups))
    return f"{' to '.join(str(count) for count in dict.fromkeys((known[0], known[-1])))} groups"


class HasGroups(Protocol):
    """A figure that knows the number of its groups."""

    @property
    def groups(self) -> int | None:
        """Groups of prompts; None where nobody noted it."""
        ...


def over_groups(figures: Iterable[HasGroups]) -> str:
    """Say what the intervals of some figures rest on, to follow ``over``."""
    known = [figure.groups for figure in figures if figure.groups is not None]
    return f"{count_words(known)} of prompts" if known else "groups of prompts"


def format_estimate(value: float | None, interval: Interval | None) -> str:
    """Print a figure with its interval where there is one."""
    if value is None or interval is None:
        return format_number(value, 2)
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def format_shares(shares: Iterable[float | None] | None) -> str:
    """Print shares in a row, two decimals each: ``.88 .82 .74``."""
    return " ".join(format_number(share, 2).removeprefix("0") for share in shares or ()) or "-"


def format_number(value: float | None, decimals: int) -> str:
    """Print a number with thousands separated, or a dash."""
    return "-" if value is None else f"{value:,.{decimals}f}"


def format_percent(value: float | None) -> str:
    """Print a share as a percentage, or a dash."""
    return "-" if value is None else f"{100 * value:.1f} %"


def format_speedup(value: float | None) -> str:
    """Print a ratio as a multiple, or a dash."""
    return "-" if value is None else f"{value:.2f}x"


def format_seconds(value: float | None) -> str:
    """Print a time in the unit that suits it, or a dash."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def format_bytes(value: int) -> str:
    """Print a size in the unit that suits it."""
    size = float(value)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as (dotted name, printed value) rows, in order."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            rows += flatten({str(number): item for number, item in enumerate(value, 1)}, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            rows.append((f"{prefix}{key}", " ".join(str(item) for item in value) or "-"))
        else:
            rows.append((f"{prefix}{key}", "-" if value is None else str(value)))
    return rows


def capitalised(text: str) -> str:
    """Give a message a capital. No full stop: it may end in a command, and a command is copied."""
    return text[:1].upper() + text[1:]
