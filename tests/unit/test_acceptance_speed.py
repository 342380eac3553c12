"""Whether drafts pay: the decision, its figures, and the gate against plain decoding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mtp_train.acceptance.counts import Interval, PromptCounts
from mtp_train.acceptance.gate import GateVerdict, Pair, decide_gate
from mtp_train.acceptance.speed import Verdict, break_even_tau, pays, speed_difference
from mtp_train.evaluation.results import recommended
from report_samples import GRAFT, PLAIN, RETRAINED

ROUNDS, PREFILL, STEP = 40, 0.2, 0.05
"""Rounds of a prompt; seconds of its prefill and of a plain step."""


def pair(shares: list[float], cost: float, spread: float = 0.0, seed: int = 0) -> Pair:
    """Return counts with one draft a round and plain counts of the same texts.

    Args:
        shares: By prompt, the share of drafts that are accepted.
        cost: Time of a round over that of a plain step, the true break-even tau.
        spread: Relative standard deviation of the time of a text.
        seed: Seed of the times.
    """
    noise = np.random.default_rng(seed).normal(1.0, spread, (2, len(shares))).tolist()
    drafted, plain = [], []
    for number, share in enumerate(shares):
        accepted = round(share * ROUNDS)
        tokens = 1 + ROUNDS + accepted
        seconds, plain_seconds = ROUNDS * cost * STEP * noise[0][number], (tokens - 1) * STEP * noise[1][number]
        name = f"p{number}"
        drafted.append(PromptCounts(name, ROUNDS, ROUNDS, (accepted,), tokens, PREFILL + seconds, name, seconds))
        plain.append(PromptCounts(name, tokens - 1, 0, (), tokens, PREFILL + plain_seconds, name, plain_seconds))
    return Pair(drafted, plain, drafted, plain)


SHARES = [0.5, 0.6, 0.4, 0.55, 0.45, 0.5, 0.6, 0.4]


def gate(*pairs: Pair, target: float | None = None) -> GateVerdict:
    return decide_gate({f"setting {n}": one for n, one in enumerate(pairs)}, "none", target_break_even=target)


@pytest.mark.parametrize(
    ("speedup", "speed", "tau", "needed", "verdict"),
    [
        (1.2, (1.1, 1.3), None, None, "above"),
        (1.2, None, (2.5, 3.5), 2.2, "above"),
        # A mean above 1 whose intervals show nothing.
        (1.2, (0.8, 1.6), (1.0, 4.0), 2.2, "neither"),
        (1.2, (0.8, 1.6), (2.5, 4.0), 2.2, "neither"),
        (1.2, None, (1.0, 4.0), 2.2, "neither"),
        (1.2, None, None, 2.2, "neither"),
        # Rounds pay, whole replies do not.
        (0.9, None, (2.5, 3.5), 2.2, "neither"),
        (1.1, None, (1.5, 2.1), 2.2, "neither"),
        (0.87, (0.85, 0.9), (1.4, 1.6), 1.75, "below"),
        (0.87, None, (1.4, 1.6), 1.75, "below"),
        (None, None, (2.5, 3.5), 2.2, "above"),
        (None, None, (1.5, 2.1), 2.2, "below"),
    ],
)
def test_drafts_pay_where_an_interval_shows_it(
    speedup: float | None, speed: Interval | None, tau: Interval | None, needed: float | None, verdict: Verdict
) -> None:
    assert pays(speedup, speed, tau, needed) == verdict


def test_break_even_and_speedup_of_known_times() -> None:
    drafted, plain, *_ = pair([0.5] * 4, cost=1.25)
    assert break_even_tau(drafted, plain) == pytest.approx(1.25)
    gain = speed_difference(drafted, plain)
    assert gain is not None
    assert 1 + gain.value == pytest.approx((PREFILL + 60 * STEP) / (PREFILL + 40 * 1.25 * STEP))
    unknown = [replace(one, seconds=None, seconds_decode=None) for one in drafted]
    assert (break_even_tau(unknown, plain), speed_difference(unknown, plain)) == (None, None)
    assert speed_difference([], []) is None
    alone = speed_difference(drafted[:1], plain[:1])
    assert alone is not None
    assert alone.ci95 is None


def test_a_head_that_slows_decoding_down_is_refused_although_tau_rose() -> None:
    verdict = gate(pair(SHARES, cost=1.75, spread=0.02))
    assert not verdict.passed
    assert verdict.delta_tau_ci95 is not None
    assert verdict.delta_tau_ci95[0] > 0
    assert "tau 1.50, break-even tau 1.7" in verdict.reason
    assert "measured speedup 0.8" in verdict.reason
    assert "drafts are shown to slow decoding down (95 % interval of speedup [0." in verdict.reason
    (setting,) = verdict.settings
    assert setting.verdict == "below"
    assert setting.speedup_ci95 is not None
    assert setting.speedup_ci95[0] < setting.speedup_ci95[1] < 1.0
    assert setting.break_even_tau == pytest.approx(1.75, rel=0.05)


def test_a_speedup_that_no_interval_supports_is_refused() -> None:
    verdict = gate(pair([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], cost=1.55, spread=0.1))
    assert (verdict.passed, verdict.settings[0].verdict) == (False, "neither")
    assert "drafts are not shown to pay" in verdict.reason


def test_a_setting_that_is_slowed_down_refuses_whatever_the_others_show() -> None:
    fast, slow = pair(SHARES, cost=1.1, spread=0.02), pair(SHARES, cost=1.9, spread=0.02)
    assert gate(fast, pair(SHARES, cost=1.5, spread=0.05, seed=2)).passed
    assert not gate(fast, slow).passed


def test_without_times_there_is_no_speedup_to_pass_with() -> None:
    drafted, plain, *_ = pair(SHARES, cost=1.0)
    unknown = [replace(one, seconds=None, seconds_decode=None) for one in drafted]
    verdict = gate(Pair(unknown, plain, unknown, plain))
    assert not verdict.passed
    assert "break-even tau unknown, no speed was measured" in verdict.reason


@pytest.mark.parametrize(("target", "passed"), [(1.3, True), (1.47, False), (1.8, False)])
def test_the_break_even_of_the_target_engine_decides_whatever_the_speed_here(target: float, passed: bool) -> None:
    for cost in (1.05, 1.95):
        verdict = gate(pair(SHARES, cost=cost, spread=0.02), target=target)
        assert (verdict.passed, verdict.settings[0].break_even_tau) == (passed, target)
        assert f"break-even tau {target:.2f}" in verdict.reason


def test_the_gate_rarely_passes_drafts_that_neither_pay_nor_cost() -> None:
    rng = np.random.default_rng(5)
    runs = [pair(rng.uniform(0.3, 0.7, 12).tolist(), cost=1.5, spread=0.05, seed=seed) for seed in range(300)]
    assert np.mean([gate(one).passed for one in runs]) <= 0.025 + 3 * 0.009


def test_the_fastest_depth_that_is_shown_to_pay_is_recommended() -> None:
    slow = replace(GRAFT, speedup_ci95=(0.9, 0.99), break_even_tau=1.5)
    unsure = replace(RETRAINED, speedup=3.0, speedup_ci95=(0.5, 5.5), tau_ci95=(1.0, 6.0), break_even_tau=1.3)
    paying = [replace(RETRAINED, speedup=speed, speedup_ci95=(speed - 0.1, speed + 0.1)) for speed in (1.4, 1.7)]
    assert recommended([PLAIN, slow, unsure, *paying]) is paying[1]
    assert recommended([PLAIN, slow, unsure, RETRAINED]) is None
    assert (PLAIN.pays, RETRAINED.pays, slow.pays, unsure.pays) == (None, None, "below", "neither")
