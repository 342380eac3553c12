"""The verdict of a probe follows from intervals alone: of the level that was lost, and of what a short training won."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_train.runs.rescue import HeadLevel, ProbeResult, judge

OWN = HeadLevel(3.0, (2.8, 3.2), 0.70)
GRAFT = HeadLevel(2.0, (1.9, 2.1), 0.50)


def found(**figures: Any) -> ProbeResult:
    values: dict[str, Any] = {
        "verdict": "undecided",
        "reason": "",
        "command": "",
        "graft": GRAFT,
        "base": OWN,
        "lost_overlap": 0.1,
        "lost_overlap_ci95": (0.05, 0.15),
        "trained_tau": 2.3,
        "gain_ci95": (0.2, 0.4),
        "trained_steps": 20,
    }
    return ProbeResult(**(values | figures))


@pytest.mark.parametrize(
    ("figures", "verdict", "told"),
    [
        ({}, "retrain", "20 steps raised tau from 2.00 by [0.20, 0.40] to 2.30, and a rescue trains for longer"),
        ({"lost_overlap": None, "lost_overlap_ci95": None}, "retrain", "unknown, as the texts of the two models share"),
        ({"gain_ci95": (-0.1, 0.2)}, "retrain", "0.10 [0.05, 0.15]. 20 steps were too few to win it back"),
        # 3 % of the base's overlap is 0.021, of the graft's tau 0.06.
        ({"lost_overlap_ci95": (-0.01, 0.02), "gain_ci95": (-0.1, 0.2)}, "graft", "less than 3 % of the base's 0.70"),
        ({"lost_overlap_ci95": (-0.01, 0.02), "gain_ci95": (0.01, 0.2)}, "graft", "less than 3 % of the base's 0.70"),
        ({"lost_overlap_ci95": (-0.01, 0.02), "gain_ci95": (0.07, 0.2)}, "retrain", "20 steps raised tau"),
        ({"lost_overlap_ci95": (-0.01, 0.03), "gain_ci95": (-0.1, 0.2)}, "undecided", "More prompts in --data would"),
        ({"lost_overlap_ci95": None, "gain_ci95": None}, "undecided", "changed tau by (no interval)"),
        ({"base": HeadLevel(1.1, (1.0, 1.29), 0.1)}, "fault", "tau 1.10 [1.00, 1.29]; expected more than 1.3."),
        ({"wiring": "The head drafts better with X"}, "fault", "The head drafts better with X. It is in a wrong form"),
        # Not shown to be at fault.
        ({"base": HeadLevel(1.1, (1.0, 1.31), 0.1)}, "retrain", "20 steps raised tau"),
    ],
)
def test_the_verdict_follows_from_intervals(figures: dict[str, Any], verdict: str, told: str) -> None:
    said, reason = judge(found(**figures))
    assert said == verdict
    assert told in reason


def test_drafters_that_are_not_trained_have_no_figures_of_a_training() -> None:
    alone = found(graft=HeadLevel(2.0, (1.9, 2.1), None), trained_tau=None, gain_ci95=None, trained_steps=None)
    assert judge(alone) == ("graft", "Drafters of its kind are not trained here")
    assert "overlap lost" not in str(alone)
    assert "overlap lost" in str(found())
