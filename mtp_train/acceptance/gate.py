"""The gate: whether a retrained head is better than its baseline at the settings that are served.

Every setting has a paired interval of the gain in tau over groups (``acceptance/intervals.py``). The gate passes if the
interval of at least one setting lies above 0, by Holm's correction over the settings, and no interval lies below 0. The
test for a loss has no such correction: a loss at one setting is enough to refuse.

Against plain decoding every accepted draft is a gain in tau, which need not be faster. There the gate requires a
measured speedup above 1, or a tau above the break-even of the engine that will serve the head
(``acceptance/speed.py``), by the same rules. Where no interval lies below, the outcome is ``undecided``: drafts are
shown neither to pay nor to cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pydantic import ConfigDict, computed_field

from mtp_train.acceptance.counts import Interval, num_groups, tau
from mtp_train.acceptance.intervals import POWER, Difference, holm_levels, tau_difference, tau_interval, tested
from mtp_train.acceptance.names import PLAIN
from mtp_train.acceptance.speed import Pair, Speedup, Verdict, break_even_tau, measured_speedup, side

GateOutcome = Literal["passed", "refused", "undecided"]


@dataclass(frozen=True, kw_only=True)
class GateSetting:
    setting: str
    """Name of the setting: ``greedy``, or temperature and filters."""
    tau: float
    baseline_tau: float
    delta_tau_ci95: Interval | None
    """Paired 95 % interval of the gain, before any correction; None for a single group."""
    verdict: Verdict
    """Where the deciding interval lies; ``above`` is by Holm's correction over the settings. Against plain decoding:
    whether drafts pay."""
    detectable_gain: float | None
    """Power: the smallest true gain in :attr:`decides` that is detected with probability 0.8, at the strictest level of
    the correction. None if the heads differ nowhere, or all prompts are in one group."""
    prompts: int
    groups: int
    """Number of groups that the interval is computed over."""
    decides: Literal["tau", "speedup"] = "tau"
    """The figure whose interval decides: the speedup against plain decoding, unless another engine's break-even tau is
    known."""
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
        outcome: ``passed`` when at least one setting shows a gain and none a loss. ``undecided`` against plain decoding
            when no setting shows either.
        baseline: Arm the retrained head was compared with.
        delta_tau_ci95: Paired 95 % interval of tau(retrained) - tau(baseline) at the first setting, whatever
            confidence the gate used; None if there is no interval.
        reason: The figures that decided, without a full stop, so that a caller can append a command.
        groups: Groups of the first setting's prompts; None if nothing was judged.
        detectable_gain: The power of the gate at the first setting (:attr:`GateSetting.detectable_gain`).
        settings: Every setting that was judged, the first included.
    """

    outcome: GateOutcome
    baseline: str
    delta_tau_ci95: Interval | None
    reason: str
    groups: int | None = None
    detectable_gain: float | None = None
    settings: tuple[GateSetting, ...] = ()

    # A report that is read has the computed field too.
    __pydantic_config__ = ConfigDict(extra="ignore")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


def min_gate_groups(confidence: float = 0.95) -> int:
    """Return the fewest groups that can show a gain.

    By chance alone, one head is better on all of n groups with probability ``2 ** -n``.
    """
    return max(2, math.ceil(-math.log2(1.0 - confidence)))


def decide_gate(
    measured: Mapping[str, Pair], baseline: str, confidence: float = 0.95, *, target_break_even: float | None = None
) -> GateVerdict:
    """Decide whether a retrained head is better than its baseline.

    Args:
        measured: Counts of both heads by setting. The verdict's own interval and groups are from the first setting.
        confidence: Confidence of the two-sided intervals that decide, over all settings together.
        target_break_even: Break-even tau of the engine that will serve the head, which then decides against plain
            decoding; None to decide by the speed measured here.
    """
    needed, level = min_gate_groups(confidence), 1.0 - confidence
    silent = [name for name, pair in measured.items() if not sum(one.rounds for one in pair.head)]
    if silent:
        where = f" ({silent[0]})" if len(measured) > 1 else ""
        reason = f"the retrained head decoded no round{where}: there is nothing to judge it by"
        return GateVerdict("refused", baseline, None, f"{reason}. Raise evaluate.max_new_tokens")
    tests = [_test_of(name, pair, baseline, target_break_even) for name, pair in measured.items()]
    levels = holm_levels([test.decides.p_value for test in tests], level)
    judged = [_judge(test, baseline, own, level, len(measured)) for test, own in zip(tests, levels, strict=True)]
    settings = tuple(setting for setting, _ in judged)
    verdicts = {one.verdict for one in settings}
    outcome: GateOutcome = "refused" if baseline != PLAIN or "below" in verdicts else "undecided"
    if "above" in verdicts and "below" not in verdicts:
        outcome = "passed"
    told = "; ".join(f"{one.setting}: {words}" if len(settings) > 1 else words for one, words in judged)
    if min(one.groups for one in settings) < needed:
        outcome = "refused" if baseline != PLAIN else "undecided"
        told = (
            f"{_figures(settings[0], baseline)}; {confidence:.4g} confidence needs prompts of at least {needed} "
            "groups. Raise evaluate.prompts or data.holdout"
        )
    first = settings[0]
    return GateVerdict(outcome, baseline, first.delta_tau_ci95, told, first.groups, first.detectable_gain, settings)


class _Test(NamedTuple):
    """The differences at one setting. The gain in tau, less the margin to a known break-even tau, or the logarithm of
    the speedup decides, by its side of 0."""

    name: str
    pair: Pair
    gain: Difference
    decides: Difference
    speedup: Speedup | None = None
    break_even_tau: float | None = None
    by_speed: bool = False


def _test_of(name: str, pair: Pair, baseline: str, target: float | None) -> _Test:
    gain = tau_difference(pair.head, pair.baseline)
    if baseline != PLAIN:
        return _Test(name, pair, gain, gain)
    speedup = measured_speedup(pair)
    if target is not None:
        margin = tested(1.0 + gain.value - target, gain.spread, gain.groups)
        return _Test(name, pair, gain, margin, speedup, target)
    unknown = Difference(0.0, None, None, gain.groups)
    needed = break_even_tau(pair.timed_head, pair.timed_baseline)
    return _Test(name, pair, gain, unknown if speedup is None else speedup.log, speedup, needed, by_speed=True)


def _judge(test: _Test, baseline: str, own_level: float, level: float, num_settings: int) -> tuple[GateSetting, str]:
    """Return the result at one of ``num_settings`` settings, and in words what decided.

    Holm's procedure tests for a gain at ``own_level``; a loss is tested for at ``level``.
    """
    verdict: Verdict = "neither"
    if own_level and side(test.decides.interval(own_level), 0.0) == "above":
        verdict = "above"
    elif side(test.decides.interval(level), 0.0) == "below":
        verdict = "below"
    decides_at = level if verdict == "below" else own_level or level
    spread, detectable = test.decides.spread, None
    # Heads without a difference in any group have no spread, so the power is unknown.
    if spread is not None and spread.error:
        detectable = spread.detectable(level / num_settings)
        detectable = math.expm1(detectable) if test.by_speed else detectable
    found = GateSetting(
        setting=test.name,
        tau=tau(test.pair.head),
        baseline_tau=tau(test.pair.baseline),
        delta_tau_ci95=test.gain.ci95,
        verdict=verdict,
        detectable_gain=detectable,
        prompts=len(test.pair.head),
        groups=num_groups(test.pair.head),
    )
    if baseline != PLAIN:
        return found, _told(found, test.gain, decides_at, baseline)
    found = replace(
        found,
        decides="speedup" if test.by_speed else "tau",
        tau_ci95=tau_interval(test.pair.head),
        break_even_tau=test.break_even_tau,
        speedup=None if test.speedup is None else test.speedup.value,
        speedup_ci95=None if test.speedup is None else test.speedup.interval(0.05),
    )
    return found, _told_speed(found, test, decides_at)


def _told_speed(found: GateSetting, test: _Test, level: float) -> str:
    """Return the result at one setting against plain decoding in words, with the interval that decides at ``level``."""
    percent = f"{100 * (1 - level):.4g} %"
    measured = "no speed was measured"
    if test.speedup is not None:
        measured = f"measured speedup {test.speedup.value:.2f}{_bounds(test.speedup.interval(level), percent)}"
        measured += f", timed on prompts of {num_groups(test.pair.timed_head)} groups"
    figures = f"on {found.prompts} prompts of {found.groups} groups against plain decoding"
    if not test.by_speed:
        lies = {"above": "lies above", "below": "lies below", "neither": "is not shown to lie on either side of"}
        margin, needed = test.decides.interval(level), test.break_even_tau or 1.0
        bounds = None if margin is None else (margin[0] + needed, margin[1] + needed)
        return (
            f"tau {found.tau:.2f}{_bounds(bounds, percent)} {lies[found.verdict]} gate.break_even_tau {needed:.2f}, "
            f"the break-even of the engine that will serve the head, {figures}; here: {measured}"
        )
    shown = {
        "above": "drafts are shown to pay",
        "below": "drafts are shown to slow decoding down",
        "neither": "undecided whether drafts pay",
    }
    known = "unknown" if found.break_even_tau is None else f"{found.break_even_tau:.2f}"
    return f"{shown[found.verdict]}: {measured}; tau {found.tau:.2f}, break-even tau {known}, {figures}"


def _bounds(interval: Interval | None, percent: str) -> str:
    return "" if interval is None else f" ({percent} interval [{interval[0]:.2f}, {interval[1]:.2f}])"


def _figures(found: GateSetting, baseline: str) -> str:
    return (
        f"tau {found.tau:.2f} against {found.baseline_tau:.2f} ({baseline}) on {found.prompts} prompts of "
        f"{found.groups} groups"
    )


def _told(found: GateSetting, gain: Difference, level: float, baseline: str) -> str:
    bounds = gain.interval(level)
    interval = ""
    if bounds is not None:
        interval = f"the {100 * (1 - level):.4g} % interval of the gain, [{bounds[0]:+.3f}, {bounds[1]:+.3f}],"
    lies = {"above": "lies above 0", "below": "lies below 0", "neither": "does not lie above 0"}[found.verdict]
    power = ""
    if found.verdict == "neither" and found.detectable_gain is not None:
        power = f" (a gain of {found.detectable_gain:.2f} would have been seen with probability {POWER:g})"
    return f"{_figures(found, baseline)}: {interval} {lies}{power}"
