"""The gate against planted effects: one setting or several, groups instead of prompts, and the power it states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from test_acceptance_intervals import counts

from mtp_train.acceptance.counts import PromptCounts
from mtp_train.acceptance.gate import GateVerdict, Pair, decide_gate, min_gate_groups
from mtp_train.acceptance.intervals import tau_difference
from simulated_drafters import counts_of, rounds_by_accepted


def gate(after: Sequence[PromptCounts], before: Sequence[PromptCounts], confidence: float = 0.95) -> GateVerdict:
    return decide_gate({"greedy": Pair(after, before)}, "graft", confidence)


def equal_arms(rng: np.random.Generator, groups: int, per_group: int) -> tuple[list[PromptCounts], list[PromptCounts]]:
    """Draw two heads that are as good, which differ by chance from group to group."""
    names = [f"g{number}" for number in range(groups) for _ in range(per_group)]
    ease_GP = rng.normal(0.8, 0.8, (groups, 1)) + rng.normal(0.0, 0.3, (groups, per_group))

    def head() -> list[PromptCounts]:
        own_GP = ease_GP + rng.normal(0.0, 0.3, (groups, 1)) + rng.normal(0.0, 0.2, (groups, per_group))
        return counts_of(rounds_by_accepted(rng, own_GP.reshape(1, -1), mean_length=60.0, spread=0.5)[0], names)

    return head(), head()


def test_gate_needs_enough_groups() -> None:
    assert [min_gate_groups(c) for c in (0.9, 0.95, 0.99)] == [4, 5, 7]
    five, four = (
        [[dataclasses.replace(one, group=f"g{index % number}") for index, one in enumerate(arm)] for arm in LARGE[:2]]
        for number in (5, 4)
    )
    assert gate(*five).passed
    few = gate(*four)
    assert not few.passed
    assert "needs prompts of at least 5 groups. Raise evaluate.prompts or data.holdout" in few.reason
    assert "10 prompts of 4 groups" in few.reason


@pytest.mark.parametrize("groups", [5, 8, 12, 32])
def test_equal_heads_pass_in_no_more_than_2_5_percent(groups: int) -> None:
    """Of 400 gates, within three standard errors above nominal; a bootstrap passes 4 to 5 % with 5 groups."""
    rng = np.random.default_rng(groups)
    passed = [gate(*equal_arms(rng, groups, per_group=2)).passed for _ in range(400)]
    assert np.mean(passed) <= 0.025 + 3 * 0.0078


def test_gate_without_rounds() -> None:
    after, _, *_ = LARGE
    plain = [counts(prompt.prompt_id, 0) for prompt in after]
    empty = gate(plain, after)
    assert not empty.passed
    assert empty.delta_tau_ci95 is None
    assert "decoded no round: there is nothing to judge it by. Raise evaluate.max_new_tokens" in empty.reason


def test_gate_reports_a_95_interval_at_any_confidence() -> None:
    loose, usual = (gate(LARGE.head, LARGE.baseline, confidence) for confidence in (0.8, 0.95))
    assert loose.delta_tau_ci95 == usual.delta_tau_ci95
    assert "80 % interval" in loose.reason


# Settings by hand


def by_hand(differences: Sequence[int]) -> Pair:
    """Return a head that accepts so many drafts more than its baseline in ten rounds of each prompt."""
    arms = [[counts(f"p{number}", 10, 5 + more) for number, more in enumerate(arm)] for arm in (differences, [0] * 10)]
    return Pair(*arms)


# The mean of these is 1 and their standard error sqrt(14 / 9 / 10) = 0.3944: t = 2.535 with 9 degrees of freedom, p =
# 0.032. Tables have 2.262 for 5 % and 2.685 for 2.5 %.
GAIN = by_hand([3, 2, 2, 2, 1, 1, 0, 0, 0, -1])
LOSS = by_hand([-3, -2, -2, -2, -1, -1, 0, 0, 0, 1])
NOTHING = by_hand([1, -1] * 5)
LARGE = by_hand([4, 3, 3, 3, 2, 2, 2, 2, 2, 1])


@pytest.mark.parametrize(
    ("pairs", "passed", "verdicts", "told"),
    [
        (
            [GAIN],
            True,
            ["above"],
            "on 10 prompts of 10 groups: the 95 % interval of the gain, [0.011, 0.189], lies above 0",
        ),
        (
            [GAIN, NOTHING],
            False,
            ["neither", "neither"],
            "97.5 % interval of the gain, [-0.006, 0.206], does not lie above 0 "
            "(a gain of 0.14 would have been seen with probability 0.8); setting 1: tau ",
        ),
        ([GAIN, LARGE], True, ["above", "above"], "setting 0: tau 1.60 against 1.50 (graft)"),
        ([LOSS], False, ["below"], "the 95 % interval of the gain, [-0.189, -0.011], lies below 0"),
        # 0.1 +- 2.262 * 0.03944, and not 2.685 times.
        ([LOSS, NOTHING], False, ["below", "neither"], "the 95 % interval of the gain, [-0.189, -0.011], lies below 0"),
        ([NOTHING, LARGE], True, ["neither", "above"], "; setting 1: tau "),
        ([LOSS, LARGE], False, ["below", "above"], "; setting 1: tau "),
        ([LARGE, NOTHING, LOSS], False, ["above", "neither", "below"], "; setting 2: tau "),
    ],
)
def test_a_gain_is_corrected_for_the_settings_and_a_loss_is_not(
    pairs: list[Pair], passed: bool, verdicts: list[str], told: str
) -> None:
    verdict = decide_gate({f"setting {number}": pair for number, pair in enumerate(pairs)}, "graft")
    assert [tau_difference(*one[:2]).p_value for one in (GAIN, LOSS)] == pytest.approx([0.032, 0.032], abs=5e-4)
    assert (verdict.passed, [one.verdict for one in verdict.settings]) == (passed, verdicts)
    assert verdict.delta_tau_ci95 == tau_difference(*pairs[0][:2]).ci95
    assert told in verdict.reason


@pytest.mark.parametrize(("settings", "t"), [(1, 2.2622), (2, 2.6850), (4, 3.1109)])
def test_the_power_is_that_of_the_corrected_test(settings: int, t: float) -> None:
    """t of 9 degrees of freedom at 5, 2.5 and 1.25 % two-sided; 0.8834 at 20 % one-sided."""
    pairs = [GAIN, *[LARGE] * (settings - 1)]
    verdict = decide_gate({f"setting {number}": pair for number, pair in enumerate(pairs)}, "graft")
    assert verdict.settings[0].detectable_gain == pytest.approx((t + 0.8834) * 0.03944, abs=1e-5)
