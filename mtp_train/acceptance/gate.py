"""The gate: whether a retrained head is better than its baseline at the settings that are served.

Every setting has a paired interval of the gain in tau over groups (``acceptance/intervals.py``). The gate passes if the
interval of at least one setting lies above 0, by Holm's correction over the settings, and no interval lies below 0. The
test for a loss has no such correction: a loss at one setting is enough to refuse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mtp_train.acceptance.counts import Interval, PromptCounts, num_groups, paired, tau
from mtp_train.acceptance.intervals import POWER, Difference, Spread, holm_levels, tau_difference

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
    verdict: Literal["above", "below", "neither"]
    """Where the deciding interval lies; ``above`` is by Holm's correction over the settings."""
    detectable_gain: float | None
    """Power: the smallest true gain in tau that is detected with probability 0.8, at the strictest level of the
    correction. None if the heads differ nowhere, or all prompts are in one group."""
    prompts: int
    groups: int
    """Number of groups that the interval is computed over."""


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


def decide_gate(measured: Mapping[str, Pair], baseline: str, confidence: float = 0.95) -> GateVerdict:
    """Decide whether a retrained head is better than its baseline.

    Args:
        measured: Counts of both heads by setting. The verdict's own interval and groups are from the first setting.
        baseline: Name of the baseline's arm.
        confidence: Confidence of the two-sided intervals that decide, over all settings together.
    """
    needed, level = min_gate_groups(confidence), 1.0 - confidence
    differences = [tau_difference(a, paired(a, b)) for a, b in measured.values()]
    levels = holm_levels([one.p_value for one in differences], level)
    judged = [
        _judge(name, pair, difference, own_level, level, len(measured))
        for (name, pair), difference, own_level in zip(measured.items(), differences, levels, strict=True)
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
        (f"{one.setting}: " if len(settings) > 1 else "") + _told(one, interval, baseline) for one, interval in judged
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
    verdict: Literal["above", "below", "neither"] = "neither"
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
