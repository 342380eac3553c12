"""Whether drafts pay: the measured speedup and its interval, and the gate against plain decoding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mtp_train.acceptance.counts import PromptCounts
from mtp_train.acceptance.gate import GateVerdict, decide_gate
from mtp_train.acceptance.speed import Pair, break_even_tau, measured_speedup, tokens_per_second
from mtp_train.evaluation.results import recommended
from report_samples import GRAFT, PLAIN, RETRAINED

ROUNDS, PREFILL, STEP = 40, 0.2, 0.05
"""Rounds of a prompt; seconds of its prefill and of a plain step."""
TIMED = 8


def counts(name: str, rounds: int, tokens: int, step: float, accepted: int = 0, depth: int = 0) -> PromptCounts:
    by_position = (accepted,) if depth else ()
    return PromptCounts(name, rounds, depth * rounds, by_position, tokens, name, PREFILL, rounds * step)


def pair(shares: list[float], cost: float, spread: float = 0.0, seed: int = 0) -> Pair:
    """Return counts with one draft a round and plain counts of the same texts; the first ones are timed.

    ``shares`` of drafts are accepted by prompt; ``cost`` is the true break-even tau, ``spread`` that of times.
    """
    noise = np.random.default_rng(seed).normal(1.0, spread, (2, len(shares))).tolist()
    drafted = []
    plain = []
    for number, share in enumerate(shares):
        accepted = round(share * ROUNDS)
        tokens = 1 + ROUNDS + accepted
        drafted.append(counts(f"p{number}", ROUNDS, tokens, cost * STEP * noise[0][number], accepted, depth=1))
        plain.append(counts(f"p{number}", tokens - 1, tokens, STEP * noise[1][number]))
    return Pair(drafted, plain, drafted[:TIMED], plain[:TIMED])


SHARES = [0.5, 0.6, 0.4, 0.55, 0.45, 0.5, 0.6, 0.4]


def gate(*pairs: Pair, target: float | None = None) -> GateVerdict:
    return decide_gate({f"setting {n}": one for n, one in enumerate(pairs)}, "none", target_break_even=target)


def test_break_even_and_speedup_of_known_times() -> None:
    known = pair([0.5] * 4, cost=1.25)
    drafted, plain, *_ = known
    assert break_even_tau(drafted, plain) == pytest.approx(1.25)
    found = measured_speedup(known)
    assert found is not None
    assert found.value == pytest.approx((PREFILL + 60 * STEP) / (PREFILL + 40 * 1.25 * STEP))
    assert tokens_per_second(drafted, drafted) == pytest.approx(61 / (PREFILL + 40 * 1.25 * STEP))
    # Only the beginnings of two prompts are timed: the rounds of whole texts count.
    short = [counts(one.prompt_id, 4, 7, 1.25 * STEP, 2, depth=1) for one in drafted[:2]]
    begun = measured_speedup(Pair(drafted, plain, short, [counts(one.prompt_id, 6, 7, STEP) for one in plain[:2]]))
    assert begun is not None
    assert begun.value == pytest.approx(found.value)
    unknown = [replace(one, seconds_prefill=None, seconds_decode=None) for one in drafted]
    assert (break_even_tau(unknown, plain), measured_speedup(Pair(drafted, plain, unknown, plain))) == (None, None)
    assert measured_speedup(Pair(drafted, plain)) is None
    alone = measured_speedup(Pair(*(some[:1] for some in known)))
    assert alone is not None
    assert alone.interval(0.05) is None


def test_a_head_that_slows_decoding_down_is_refused_although_tau_rose() -> None:
    verdict = gate(pair(SHARES, cost=1.75, spread=0.02))
    assert (verdict.outcome, verdict.passed) == ("refused", False)
    assert verdict.delta_tau_ci95 is not None
    assert verdict.delta_tau_ci95[0] > 0
    assert verdict.reason.startswith("tau 1.50 on 8 prompts of 8 groups, break-even tau 1.7")
    (setting,) = verdict.settings
    assert (setting.verdict, setting.decides) == ("below", "speedup")
    assert setting.speedup_ci95 is not None
    assert setting.speedup_ci95[0] < setting.speedup_ci95[1] < 1.0
    told = "the 95 % interval of the speedup, [{:.3f}, {:.3f}], lies below 1".format(*setting.speedup_ci95)
    assert verdict.reason.endswith(told)
    assert setting.break_even_tau == pytest.approx(1.75, rel=0.05)


def test_a_speedup_whose_interval_holds_one_is_undecided() -> None:
    verdict = gate(pair([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], cost=1.55, spread=0.1))
    assert (verdict.outcome, verdict.passed, verdict.settings[0].verdict) == ("undecided", False, "neither")
    assert "], does not lie above 1 (a gain of 0." in verdict.reason
    few = gate(pair(SHARES[:3], cost=1.0, spread=0.01))
    assert (few.outcome, "needs prompts of at least 5 groups" in few.reason) == ("undecided", True)


def test_a_setting_that_is_slowed_down_refuses_whatever_the_others_show() -> None:
    fast = pair(SHARES, cost=1.1, spread=0.02)
    slow = pair(SHARES, cost=1.9, spread=0.02)
    assert gate(fast, pair(SHARES, cost=1.5, spread=0.05, seed=2)).passed
    assert gate(fast, slow).outcome == "refused"


def test_without_times_there_is_no_speedup_to_pass_with() -> None:
    drafted, plain, *_ = pair(SHARES, cost=1.0)
    verdict = gate(Pair(drafted, plain))
    assert verdict.outcome == "undecided"
    assert "break-even tau unknown; no speed was measured: no interval of the speedup" in verdict.reason


@pytest.mark.parametrize(("target", "outcome"), [(1.3, "passed"), (1.47, "undecided"), (1.8, "refused")])
def test_the_break_even_of_the_target_engine_decides_whatever_the_speed_here(target: float, outcome: str) -> None:
    for cost, speed in ((1.05, "1.3"), (1.95, "0.7")):
        verdict = gate(pair(SHARES, cost=cost, spread=0.02), target=target)
        assert (verdict.outcome, verdict.settings[0].break_even_tau) == (outcome, target)
        assert f"gate.break_even_tau {target:.2f}" in verdict.reason
        assert "% interval of tau, [1." in verdict.reason
        # What was measured here is said as it is: a slow head is not called a fast one.
        assert f"here: measured speedup {speed}" in verdict.reason


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


# A machine with other work


def test_passes_are_added_while_times_keep_the_speedup_undecided() -> None:
    noisy = pair(SHARES, cost=1.5, spread=0.15, seed=1)
    clean = pair(SHARES, cost=1.5, spread=0.001)
    decided = pair(SHARES, cost=1.1, spread=0.1)
    needs = [found.needs_passes for one in (noisy, clean, decided) if (found := measured_speedup(one)) is not None]
    # Of exact times, only more prompts decide; a speedup that is shown needs nothing, however rough its times.
    assert needs == [True, False, False]
