"""The gate: whether a retrained head is better than its baseline at the settings that are served.

Every setting has a paired interval of the gain in tau over groups (``acceptance_intervals.py``). The gate passes when
the interval of at least one setting lies above 0, by Holm's correction over the settings, and none lies below 0. An
interval that speaks against the head is not widened by the correction: harm at one setting is enough to refuse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mtp_train.acceptance import Interval, PromptCounts, num_groups, paired, tau
from mtp_train.acceptance_intervals import POWER, Difference, Spread, holm_levels, tau_difference

Pair = tuple[Sequence[PromptCounts], Sequence[PromptCounts]]
"""Counts of the retrained head and of the baseline, on the same prompts."""


@dataclass(frozen=True, kw_only=True)
class GateSetting:
    """What the gate found at one setting."""

    setting: str
    """Its name: ``greedy``, or temperature and filters."""
    tau: float
    """Of the retrained head."""
    baseline_tau: float
    delta_tau_ci95: Interval | None
    """Paired 95 % interval of the gain, before any correction; None for a single group."""
    verdict: Literal["above", "below", "neither"]
    """Where the deciding interval lies; ``above`` is by Holm's correction over the settings."""
    detectable_gain: float | None
    """Power: the smallest true gain in tau seen here with probability 0.8, at the strictest level of the correction;
    None where heads differ nowhere or prompts are of a single group."""
    prompts: int
    groups: int
    """Groups that the interval leaves out one at a time."""


@dataclass(frozen=True)
class GateVerdict:
    """Whether the retrained head may be exported, and why.

    Attributes:
        passed: True when at least one setting shows a gain and none a loss.
        baseline: Arm the retrained head was compared with.
        delta_tau_ci95: Paired 95 % interval of tau(retrained) - tau(baseline) at the first setting, whatever
            confidence the gate used; None where there is none to state.
        reason: The figures that decided, without a full stop: a caller may add a command to copy.
        groups: Groups of the first setting's prompts; None where nothing was judged.
        detectable_gain: The power of the gate: the smallest true gain in tau at the first setting that it would have
            seen with probability 0.8; None where the interval is.
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
    """Name a setting in reports; filters that are off are not told."""
    if not temperature:
        return "greedy"
    filters = ([f"top-p {top_p:g}"] if top_p < 1.0 else []) + ([f"top-k {top_k}"] if top_k else [])
    return ", ".join([f"temperature {temperature:g}", *filters, f"{rule} drafts"])


def min_gate_groups(confidence: float = 0.95) -> int:
    """Return the fewest groups that can show a gain: luck alone favours one head on all n with chance 2 ** -n."""
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: {confidence}; expected a number between 0 and 1. Use 0.95.")
    return max(2, math.ceil(-math.log2(1.0 - confidence)))


def decide_gate(measured: Mapping[str, Pair], baseline: str, confidence: float = 0.95) -> GateVerdict:
    """Decide whether a retrained head is better than its baseline.

    Args:
        measured: By setting, the first one foremost, what both heads counted.
        baseline: The baseline's arm.
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
    """Return what was found at one setting, and the deciding interval in words.

    Args:
        name: The setting's.
        pair: Counts of both heads.
        difference: Of their tau.
        own_level: Level at which Holm's procedure tests the setting for a gain.
        level: Level at which it is tested for a loss.
        num_settings: How many are judged together.
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
        # Heads without a difference anywhere have no spread, which tells nothing of the power.
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
    """Say in words what one setting showed."""
    lies = {"above": "lies above 0", "below": "lies below 0", "neither": "does not lie above 0"}[found.verdict]
    power = ""
    if found.verdict == "neither" and found.detectable_gain is not None:
        power = f" (a gain of {found.detectable_gain:.2f} would have been seen with probability {POWER:g})"
    return f"{_figures(found, baseline)}: {interval} {lies}{power}"


def _rounds(counts: Sequence[PromptCounts]) -> int:
    return sum(one.rounds for one in counts)
