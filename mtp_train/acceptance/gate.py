"""The gate: whether a retrained head is better than its baseline at the settings that are served.

Every setting has a paired interval of the gain in tau over groups (``acceptance/intervals.py``). The gate passes if the
interval of at least one setting lies above 0, by Holm's correction over the settings, and no interval lies below 0. The
test for a loss has no such correction: a loss at one setting is enough to refuse.

Against plain decoding every accepted draft is a gain in tau, which says nothing about speed. There the gate requires a
measured speedup above 1, or a tau above the break-even of the engine that will serve the head
(``acceptance/speed.py``), by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtp_train.acceptance.counts import Interval, PromptCounts, num_groups, paired, tau
from mtp_train.acceptance.intervals import POWER, Difference, Spread, holm_levels, tau_difference
from mtp_train.acceptance.speed import SpeedTest, Verdict, break_even_tau, speed_difference

PLAIN_BASELINE = "none"
"""The baseline that drafts nothing."""
Pair = tuple[Sequence[PromptCounts], Sequence[PromptCounts]]
"""Counts of the retrained head and of the baseline, on the same prompts."""


@dataclass(frozen=True, kw_only=True)
class GateSetting:
    """The gate's result at one setting."""

    setting: str
    """Name of the setting: ``greedy``, or temperature and filters."""
    tau: float
    """Tau of the retrained head."""
    baseline_tau: float
    delta_tau_ci95: Interval | None
    """Paired 95 % interval of the gain, before any correction; None for a single group."""
    verdict: Verdict
    """Where the deciding interval lies; ``above`` is by Holm's correction over the settings. Against plain decoding:
    whether drafts pay."""
    detectable_gain: float | None
    """Power: the smallest true gain in tau that is detected with probability 0.8, at the strictest level of the
    correction. None if the heads differ nowhere, or all prompts are in one group."""
    prompts: int
    groups: int
    """Number of groups that the interval is computed over."""
    tau_ci95: Interval | None = None
    """95 % interval of :attr:`tau`. This field and those below are set against plain decoding only."""
    break_even_tau: float | None = None
    """Tau from which drafts pay: the target engine's (``gate.break_even_tau``) where it is known, else measured."""
    speedup: float | None = None
    """Tokens per second over those of plain decoding, prefill included."""
    speedup_ci95: Interval | None = None


@dataclass(frozen=True)
class GateVerdict:
    """Whether the retrained head may be exported, and why.

    Attributes:
        passed: True when at least one setting shows a gain and none a loss.
        baseline: Arm the retrained head was compared with.
        delta_tau_ci95: Paired 95 % interval of tau(retrained) - tau(baseline) at the first setting, whatever
            confidence the gate used; None if there is no interval.
        reason: The figures that decided, without a full stop, so that a caller can append a command.
        groups: Groups of the first setting's prompts; None if nothing was judged.
        detectable_gain: The power of the gate: the smallest true gain in tau at the first setting that is detected with
            probability 0.8; None if there is no interval.
        settings: Every setting that was judged, the first included.
    """

    passed: bool
    baseline: str
    delta_tau_ci95: Interval | None
    reason: str
    groups: int | None = None
    detectable_gain: float | None = None
    settings: tuple[GateSetting, ...] = ()


def setting_name(temperature: float, top_p: float, top_k: int, rule: str) -> str:
    """Return the name of a setting in reports; filters that are off are left out."""
    if not temperature:
        return "greedy"
    filters = ([f"top-p {top_p:g}"] if top_p < 1.0 else []) + ([f"top-k {top_k}"] if top_k else [])
    return ", ".join([f"temperature {temperature:g}", *filters, f"{rule} drafts"])


def min_gate_groups(confidence: float = 0.95) -> int:
    """Return the fewest groups that can show a gain.

    By chance alone, one head is better on all of n groups with probability ``2 ** -n``.
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: {confidence}; expected a number between 0 and 1. Use 0.95.")
    return max(2, math.ceil(-math.log2(1.0 - confidence)))


def decide_gate(
    measured: Mapping[str, Pair], baseline: str, confidence: float = 0.95, *, target_break_even: float | None = None
) -> GateVerdict:
    """Decide whether a retrained head is better than its baseline.

    Args:
        measured: Counts of both heads by setting. The verdict's own interval and groups are from the first setting.
        baseline: Name of the baseline's arm.
        confidence: Confidence of the two-sided intervals that decide, over all settings together.
        target_break_even: Break-even tau of the engine that will serve the head, which then decides against plain
            decoding; None to decide by the speed measured here.
    """
    needed, level = min_gate_groups(confidence), 1.0 - confidence
    differences = [tau_difference(a, paired(a, b)) for a, b in measured.values()]
    speeds = [
        _speed_test(pair, difference, target_break_even) if baseline == PLAIN_BASELINE else None
        for pair, difference in zip(measured.values(), differences, strict=True)
    ]
    p_values = [(speed or difference).p_value for difference, speed in zip(differences, speeds, strict=True)]
    levels = holm_levels(p_values, level)
    judged = [
        _judge(name, pair, difference, own_level, level, len(measured))
        if speed is None
        else _judge_speed(name, pair, speed, own_level, level, len(measured))
        for (name, pair), difference, speed, own_level in zip(
            measured.items(), differences, speeds, levels, strict=True
        )
    ]
    settings = tuple(setting for setting, _ in judged)
    first = settings[0]
    silent = [one.setting for one, (a, _) in zip(settings, measured.values(), strict=True) if not _rounds(a)]
    if silent:
        where = f" ({silent[0]})" if len(settings) > 1 else ""
        reason = f"the retrained head decoded no round{where}: there is nothing to judge it by"
        return GateVerdict(False, baseline, None, f"{reason}. Raise evaluate.max_new_tokens")
    passed = any(one.verdict == "above" for one in settings) and all(one.verdict != "below" for one in settings)
    few = min(one.groups for one in settings)
    told = "; ".join(
        (f"{one.setting}: " if len(settings) > 1 else "")
        + (_told_speed(one, interval) if baseline == PLAIN_BASELINE else _told(one, interval, baseline))
        for one, interval in judged
    )
    if few < needed:
        passed = False
        told = (
            f"{_figures(first, baseline)}; {confidence:.4g} confidence needs prompts of at least {needed} groups. "
            "Raise evaluate.prompts or data.holdout"
        )
    return GateVerdict(passed, baseline, first.delta_tau_ci95, told, first.groups, first.detectable_gain, settings)


def _judge(
    name: str, pair: Pair, difference: Difference, own_level: float, level: float, num_settings: int
) -> tuple[GateSetting, str]:
    """Return the result at one setting, and the deciding interval in words.

    Args:
        name: Name of the setting.
        pair: Counts of both heads.
        difference: Difference of their tau.
        own_level: Level at which Holm's procedure tests the setting for a gain.
        level: Level at which it is tested for a loss.
        num_settings: Number of settings that are judged together.
    """
    verdict: Verdict = "neither"
    spread, decides_at = difference.spread, own_level
    if spread is not None:
        if spread.interval(difference.value, own_level)[0] > 0.0:
            verdict = "above"
        elif spread.interval(difference.value, level)[1] < 0.0:
            verdict, decides_at = "below", level
    found = GateSetting(
        setting=name,
        tau=tau(pair[0]),
        baseline_tau=tau(pair[1]),
        delta_tau_ci95=difference.ci95,
        verdict=verdict,
        # Heads without a difference in any group have no spread, so the power is unknown.
        detectable_gain=spread.detectable(level / num_settings) if spread is not None and spread.error else None,
        prompts=len(pair[0]),
        groups=num_groups(pair[0]),
    )
    return found, "" if spread is None else _interval_words(spread, difference.value, decides_at)


def _speed_test(pair: Pair, difference: Difference, target_break_even: float | None) -> SpeedTest:
    plain = paired(*pair)
    measured = break_even_tau(pair[0], plain)
    on_target = target_break_even is not None
    return SpeedTest(
        difference, speed_difference(pair[0], plain), target_break_even if on_target else measured, on_target
    )


def _judge_speed(
    name: str, pair: Pair, speed: SpeedTest, own_level: float, level: float, num_settings: int
) -> tuple[GateSetting, str]:
    """Return the result at one setting against plain decoding, and in words what decided.

    Arguments are those of :func:`_judge`.
    """
    if own_level and speed.verdict(own_level) == "above":
        verdict: Verdict = "above"
        decides_at = own_level
    else:
        verdict = "below" if speed.verdict(level) == "below" else "neither"
        decides_at = level if verdict == "below" else own_level or level
    spread = speed.tau_gain.spread
    found = GateSetting(
        setting=name,
        tau=tau(pair[0]),
        baseline_tau=tau(pair[1]),
        delta_tau_ci95=speed.tau_gain.ci95,
        verdict=verdict,
        detectable_gain=spread.detectable(level / num_settings) if spread is not None and spread.error else None,
        prompts=len(pair[0]),
        groups=num_groups(pair[0]),
        tau_ci95=speed.tau_interval(0.05),
        break_even_tau=speed.break_even_tau,
        speedup=None if speed.gain is None else 1.0 + speed.gain.value,
        speedup_ci95=speed.speedup_interval(0.05),
    )
    intervals = ("tau", speed.tau_interval) if speed.on_target else ("speedup", speed.speedup_interval)
    name, decides = intervals[0], intervals[1](decides_at)
    return found, f"{100 * (1 - decides_at):.4g} % interval of {name} {_bounds(decides)}"


def _bounds(interval: Interval | None) -> str:
    return "without an interval" if interval is None else f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def _told_speed(found: GateSetting, intervals: str) -> str:
    """Return the result at one setting against plain decoding in words."""
    speed = "no speed was measured" if found.speedup is None else f"measured speedup {found.speedup:.2f}x"
    needed = "unknown" if found.break_even_tau is None else f"{found.break_even_tau:.2f}"
    shown = {
        "above": "drafts are shown to pay",
        "below": "drafts are shown to slow decoding down",
        "neither": "drafts are not shown to pay",
    }[found.verdict]
    return (
        f"tau {found.tau:.2f}, break-even tau {needed}, {speed} against plain decoding on {found.prompts} prompts of "
        f"{found.groups} groups: {shown} ({intervals})"
    )


def _interval_words(spread: Spread, value: float, level: float) -> str:
    low, high = spread.interval(value, level)
    return f"the {100 * (1 - level):.4g} % interval of the gain, [{low:+.3f}, {high:+.3f}],"


def _figures(found: GateSetting, baseline: str) -> str:
    return (
        f"tau {found.tau:.2f} against {found.baseline_tau:.2f} ({baseline}) on {found.prompts} prompts of "
        f"{found.groups} groups"
    )


def _told(found: GateSetting, interval: str, baseline: str) -> str:
    """Return the result at one setting in words."""
    lies = {"above": "lies above 0", "below": "lies below 0", "neither": "does not lie above 0"}[found.verdict]
    power = ""
    if found.verdict == "neither" and found.detectable_gain is not None:
        power = f" (a gain of {found.detectable_gain:.2f} would have been seen with probability {POWER:g})"
    return f"{_figures(found, baseline)}: {interval} {lies}{power}"


def _rounds(counts: Sequence[PromptCounts]) -> int:
    return sum(one.rounds for one in counts)
