"""The gate: whether a retrained head is better than its baseline at the settings that are served.

Every setting has a paired interval of the gain in tau over groups (``acceptance/intervals.py``). The gate passes if the
interval of at least one setting lies above 0, by Holm's correction over the settings, and no interval lies below 0. The
test for a loss has no such correction: a loss at one setting is enough to refuse.

Against plain decoding every accepted draft is a gain in tau, which need not be faster. There the gate requires a
measured speedup above 1, or a tau above the break-even of the engine that will serve the head
(``acceptance/speed.py``), by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mtp_train.acceptance.counts import Interval, PromptCounts, num_groups, paired, tau
from mtp_train.acceptance.intervals import POWER, Difference, Spread, holm_levels, tau_difference
from mtp_train.acceptance.names import PLAIN
from mtp_train.acceptance.speed import SpeedTest, Verdict, break_even_tau, side, speed_difference


class Pair(NamedTuple):
    """Counts of the retrained head and of the baseline, on the same prompts."""

    head: Sequence[PromptCounts]
    baseline: Sequence[PromptCounts]
    timed_head: Sequence[PromptCounts] = ()
    """Counts of the timed prompts, with their times; the gate against plain decoding judges the speed by them."""
    timed_baseline: Sequence[PromptCounts] = ()


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
    pairs = {name: pair._replace(baseline=paired(pair.head, pair.baseline)) for name, pair in measured.items()}
    silent = [name for name, pair in pairs.items() if not sum(one.rounds for one in pair.head)]
    if silent:
        where = f" ({silent[0]})" if len(pairs) > 1 else ""
        reason = f"the retrained head decoded no round{where}: there is nothing to judge it by"
        return GateVerdict(False, baseline, None, f"{reason}. Raise evaluate.max_new_tokens")
    tests: dict[str, TauTest | SpeedTest] = {}
    for name, pair in pairs.items():
        gain = tau_difference(pair.head, pair.baseline)
        tests[name] = TauTest(gain) if baseline != PLAIN else _speed_test(pair, gain, target_break_even)
    levels = holm_levels([test.p_value for test in tests.values()], level)
    judged = [
        _judge(name, pairs[name], test, baseline, own_level, level, len(pairs))
        for (name, test), own_level in zip(tests.items(), levels, strict=True)
    ]
    settings = tuple(setting for setting, _ in judged)
    passed = any(one.verdict == "above" for one in settings) and all(one.verdict != "below" for one in settings)
    told = "; ".join(f"{one.setting}: {words}" if len(settings) > 1 else words for one, words in judged)
    if min(one.groups for one in settings) < needed:
        passed = False
        told = (
            f"{_figures(settings[0], baseline)}; {confidence:.4g} confidence needs prompts of at least {needed} "
            "groups. Raise evaluate.prompts or data.holdout"
        )
    first = settings[0]
    return GateVerdict(passed, baseline, first.delta_tau_ci95, told, first.groups, first.detectable_gain, settings)


class TauTest(NamedTuple):
    """The test of a head against another one at one setting."""

    tau_gain: Difference

    @property
    def p_value(self) -> float | None:
        """Two-sided p-value of heads with the same tau."""
        return self.tau_gain.p_value

    def verdict(self, level: float) -> Verdict:
        """Return what the interval of the gain at this two-sided level shows."""
        spread = self.tau_gain.spread
        return "neither" if spread is None else side(spread.interval(self.tau_gain.value, level), 0.0)


def _speed_test(pair: Pair, difference: Difference, target_break_even: float | None) -> SpeedTest:
    timed, plain = pair.timed_head, paired(pair.timed_head, pair.timed_baseline)
    on_target = target_break_even is not None
    needed = target_break_even if on_target else break_even_tau(timed, plain)
    return SpeedTest(difference, speed_difference(timed, plain) if timed else None, needed, on_target)


def _judge(
    name: str,
    pair: Pair,
    test: TauTest | SpeedTest,
    baseline: str,
    own_level: float,
    level: float,
    num_settings: int,
) -> tuple[GateSetting, str]:
    """Return the result at one of ``num_settings`` settings, and in words what decided.

    Holm's procedure tests for a gain at ``own_level``; a loss is tested for at ``level``.
    """
    verdict: Verdict = "neither"
    if own_level and test.verdict(own_level) == "above":
        verdict = "above"
    elif test.verdict(level) == "below":
        verdict = "below"
    decides_at = level if verdict == "below" else own_level or level
    gain, spread = test.tau_gain, test.tau_gain.spread
    found = GateSetting(
        setting=name,
        tau=tau(pair.head),
        baseline_tau=tau(pair.baseline),
        delta_tau_ci95=gain.ci95,
        verdict=verdict,
        # Heads without a difference in any group have no spread, so the power is unknown.
        detectable_gain=spread.detectable(level / num_settings) if spread is not None and spread.error else None,
        prompts=len(pair.head),
        groups=num_groups(pair.head),
    )
    if isinstance(test, TauTest):
        return found, _told(found, spread, gain.value, decides_at, baseline)
    found = replace(
        found,
        tau_ci95=test.tau_interval(0.05),
        break_even_tau=test.break_even_tau,
        speedup=None if test.gain is None else 1.0 + test.gain.value,
        speedup_ci95=test.speedup_interval(0.05),
    )
    kind, decides = ("tau", test.tau_interval) if test.on_target else ("speedup", test.speedup_interval)
    words = f"{100 * (1 - decides_at):.4g} % interval of {kind} {_bounds(decides(decides_at))}"
    return found, _told_speed(found, words, num_groups(pair.timed_head))


def _bounds(interval: Interval | None) -> str:
    return "without an interval" if interval is None else f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def _told_speed(found: GateSetting, intervals: str, timed_groups: int) -> str:
    """Return the result at one setting against plain decoding in words."""
    speed = "no speed was measured"
    if found.speedup is not None:
        speed = f"measured speedup {found.speedup:.2f}x over {timed_groups} groups"
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


def _figures(found: GateSetting, baseline: str) -> str:
    return (
        f"tau {found.tau:.2f} against {found.baseline_tau:.2f} ({baseline}) on {found.prompts} prompts of "
        f"{found.groups} groups"
    )


def _told(found: GateSetting, spread: Spread | None, gain: float, level: float, baseline: str) -> str:
    """Return the result at one setting in words."""
    interval = ""
    if spread is not None:
        low, high = spread.interval(gain, level)
        interval = f"the {100 * (1 - level):.4g} % interval of the gain, [{low:+.3f}, {high:+.3f}],"
    lies = {"above": "lies above 0", "below": "lies below 0", "neither": "does not lie above 0"}[found.verdict]
    power = ""
    if found.verdict == "neither" and found.detectable_gain is not None:
        power = f" (a gain of {found.detectable_gain:.2f} would have been seen with probability {POWER:g})"
    return f"{_figures(found, baseline)}: {interval} {lies}{power}"
