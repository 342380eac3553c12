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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pydantic import ConfigDict, computed_field

from mtp_train.acceptance.counts import Interval, num_groups, tau
from mtp_train.acceptance.intervals import POWER, Difference, holm_levels, tau_difference, tau_interval
from mtp_train.acceptance.names import PLAIN
from mtp_train.acceptance.speed import Pair, Verdict, break_even_tau, measured_speedup, side

GateOutcome = Literal["passed", "refused", "undecided"]


@dataclass(frozen=True, kw_only=True)
class GateSetting:
    setting: str
    """Name of the setting: ``greedy``, or temperature and filters."""
    tau: float
    baseline_tau: float
    delta_tau_ci95: Interval | None
    """Paired 95 % interval of the gain, before any correction; None for a single group."""
    prompts: int
    groups: int
    """Number of groups that the interval is computed over."""
    verdict: Verdict = "neither"
    """Where the deciding interval lies; ``above`` is by Holm's correction over the settings. Against plain decoding:
    whether drafts pay."""
    detectable_gain: float | None = None
    """Power: the smallest true gain in :attr:`decides` that is detected with probability 0.8, at the strictest level of
    the correction. None if the heads differ nowhere, or all prompts are in one group."""
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
        settings: Every setting that was judged, the first included.
    """

    outcome: GateOutcome
    baseline: str
    delta_tau_ci95: Interval | None
    reason: str
    settings: tuple[GateSetting, ...] = ()

    # A report that is read has the computed field too.
    __pydantic_config__ = ConfigDict(extra="ignore")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


class GateRule(NamedTuple):
    """The settings of a gate."""

    confidence: float = 0.95
    break_even_tau: float | None = None
    """Of the engine that will serve the head; None where the measured speed decides."""


DEFAULT_RULE = GateRule()


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
    needed = min_gate_groups(confidence)
    level = 1.0 - confidence
    silent = [name for name, pair in measured.items() if not sum(one.rounds for one in pair.head)]
    if silent:
        where = f" ({silent[0]})" if len(measured) > 1 else ""
        return GateVerdict(
            "refused",
            baseline,
            None,
            f"the retrained head decoded no round{where}: there is nothing to judge it by. Raise "
            "evaluate.max_new_tokens",
        )
    tests = [_test_of(name, pair, baseline, target_break_even) for name, pair in measured.items()]
    levels = holm_levels([test.decides.p_value for test in tests], level)
    judged = [_judge(test, own, level, len(measured)) for test, own in zip(tests, levels, strict=True)]
    settings = tuple(setting for setting, _ in judged)
    verdicts = {one.verdict for one in settings}
    outcome: GateOutcome = "refused" if baseline != PLAIN or "below" in verdicts else "undecided"
    if "above" in verdicts and "below" not in verdicts:
        outcome = "passed"
    told = "; ".join(f"{one.setting}: {words}" if len(settings) > 1 else words for one, words in judged)
    if min(one.groups for one in settings) < needed:
        outcome = "refused" if baseline != PLAIN else "undecided"
        told = (
            f"{tests[0].told}; {confidence:.4g} confidence needs prompts of at least {needed} groups. Raise "
            "evaluate.prompts or data.holdout"
        )
    return GateVerdict(outcome, baseline, settings[0].delta_tau_ci95, told, settings)


class _Test(NamedTuple):
    """One setting without its verdict, and the difference that decides by its side of 0."""

    found: GateSetting
    decides: Difference
    figure: str
    """The figure that the difference stands for, in words."""
    figure_of: Callable[[float], float]
    """Returns the figure of a difference; that of 0 is the limit."""
    told: str
    """The setting's figures in words."""


def _test_of(name: str, pair: Pair, baseline: str, target: float | None) -> _Test:
    gain = tau_difference(pair.head, pair.baseline)
    found = GateSetting(
        setting=name,
        tau=tau(pair.head),
        baseline_tau=tau(pair.baseline),
        delta_tau_ci95=gain.ci95,
        prompts=len(pair.head),
        groups=num_groups(pair.head),
    )
    prompts = f"on {found.prompts} prompts of {found.groups} groups"
    if baseline != PLAIN:
        told = f"tau {found.tau:.2f} against {found.baseline_tau:.2f} ({baseline}) {prompts}"
        return _Test(found, gain, "the gain", lambda gain: gain, told)
    speedup = measured_speedup(pair)
    needed = break_even_tau(pair.timed_head, pair.timed_baseline)
    found = replace(
        found,
        tau_ci95=tau_interval(pair.head),
        break_even_tau=needed if target is None else target,
    )
    measured = "no speed was measured"
    if speedup is not None:
        found = replace(found, speedup=speedup.value, speedup_ci95=speedup.interval(0.05))
        measured = f"measured speedup {speedup.value:.2f}, timed on prompts of {num_groups(pair.timed_head)} groups"
    if target is not None:
        margin = Difference(1.0 + gain.value - target, gain.spread, gain.groups)
        told = f"tau {found.tau:.2f} {prompts}, gate.break_even_tau {target:.2f}; here: {measured}"
        return _Test(found, margin, "tau", lambda margin: target + margin, told)
    known = "unknown" if needed is None else f"{needed:.2f}"
    log_speedup = Difference(0.0, None, gain.groups) if speedup is None else speedup.log
    told = f"tau {found.tau:.2f} {prompts}, break-even tau {known}; {measured}"
    return _Test(replace(found, decides="speedup"), log_speedup, "the speedup", math.exp, told)


def _judge(test: _Test, own_level: float, level: float, num_settings: int) -> tuple[GateSetting, str]:
    """Return the result at one of ``num_settings`` settings, and in words what decided.

    Holm's procedure tests for a gain at ``own_level``; a loss is tested for at ``level``.
    """
    verdict: Verdict = "neither"
    if own_level and side(test.decides.interval(own_level), 0.0) == "above":
        verdict = "above"
    elif side(test.decides.interval(level), 0.0) == "below":
        verdict = "below"
    spread, detectable, limit = test.decides.spread, None, test.figure_of(0.0)
    # Heads without a difference in any group have no spread, so the power is unknown.
    if spread is not None and spread.error:
        detectable = test.figure_of(spread.detectable(level / num_settings)) - limit
    decides_at = level if verdict == "below" else own_level or level
    bounds = test.decides.interval(decides_at)
    told = f"{test.told}: no interval of {test.figure}"
    if bounds is not None:
        low, high = map(test.figure_of, bounds)
        lies = {"above": "lies above", "below": "lies below", "neither": "does not lie above"}[verdict]
        told = (
            f"{test.told}: the {100 * (1 - decides_at):.4g} % interval of {test.figure}, [{low:.3f}, {high:.3f}], "
            f"{lies} {limit:.4g}"
        )
    if verdict == "neither" and detectable is not None:
        told += f" (a gain of {detectable:.2f} would have been seen with probability {POWER:g})"
    return replace(test.found, verdict=verdict, detectable_gain=detectable), told
