"""Findings of a study about its claims, from made-up figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mtp_train.acceptance.counts import Interval
from mtp_train.evaluation.results import ALL_TASKS, Cell, Report
from mtp_train.recipe.sections import StudySection
from mtp_train.runs.study import (
    CLAIM,
    GRAFT,
    VANILLA,
    WEAK,
    back_at_vanilla,
    comparison_of,
    find,
)
from study_samples import HEADLINE, STUDY as SAMPLE, make_cell

STUDY = StudySection(objectives=("kl", "ce"), margin=0.05)
KL, CE = "retrained-kl", "retrained-ce"


def cell(arm: str, tau: float) -> Cell:
    return replace(make_cell("distilled+graft", ALL_TASKS, HEADLINE), arm=arm, tau=tau, overlap=(0.6,))


def comparison(first: str, second: str, delta: float, ci95: Interval | None, overlap: float | None = None) -> Any:
    return replace(
        SAMPLE.comparisons[0],
        first=first,
        second=second,
        delta_tau=delta,
        delta_tau_ci95=ci95,
        delta_overlap_at_equal_entropy=overlap,
        delta_overlap_at_equal_entropy_ci95=None if overlap is None else (overlap - 0.01, overlap + 0.01),
    )


USUAL = replace(
    SAMPLE,
    cells=(cell(VANILLA, 2.5), cell(GRAFT, 1.4), cell(KL, 3.1), cell(CE, 3.0)),
    comparisons=(
        comparison(GRAFT, KL, -1.7, (-2.0, -1.4)),
        comparison(KL, CE, 0.1, (-0.1, 0.3)),
        comparison(VANILLA, KL, -0.6, (-0.9, -0.3), overlap=-0.02),
    ),
)


def compared(tau: tuple[float, Interval], overlap: tuple[float, Interval]) -> Report:
    """Return the usual report with these differences of the retrained head from vanilla."""
    rows = [row for row in USUAL.comparisons if VANILLA not in (row.first, row.second)]
    given = {"delta_overlap_at_equal_entropy": overlap[0], "delta_overlap_at_equal_entropy_ci95": overlap[1]}
    return replace(USUAL, comparisons=(*rows, replace(comparison(KL, VANILLA, *tau), **given)))


@pytest.mark.parametrize(
    ("tau", "overlap", "tones"),
    [
        ((0.5, (0.2, 0.8)), (0.02, (0.01, 0.03)), ["good", "good"]),
        # Easier text is not a better head.
        ((0.5, (0.2, 0.8)), (-0.1, (-0.12, -0.08)), ["good", "bad"]),
        ((-0.5, (-0.8, -0.2)), (-0.02, (-0.04, 0.0)), ["bad", "neutral"]),
        # Within the margin of 5 %: 0.125 of tau, 0.03 of overlap.
        ((-0.05, (-0.12, 0.02)), (-0.01, (-0.029, 0.01)), ["good", "good"]),
    ],
)
def test_the_prediction_is_judged_raw_and_at_equal_entropy(
    tau: tuple[float, Interval], overlap: tuple[float, Interval], tones: list[str]
) -> None:
    found = back_at_vanilla(compared(tau, overlap), HEADLINE, STUDY)
    assert [one.tone for one in found] == tones
    assert found[0].statement == "Back at the vanilla level by tau (greedy)."
    assert f"retrained-kl 3.10 against vanilla 2.50: {tau[0]:+.2f} [{tau[1][0]:+.2f}, {tau[1][1]:+.2f}]" in (
        found[0].evidence
    )
    assert "above -0.12 (5 %)" in found[0].evidence
    assert "equal target entropy" in found[1].statement
    assert "above -0.030 (5 % of 0.600)" in found[1].evidence


@pytest.mark.parametrize(
    ("overlap", "tone", "said"),
    [
        ((0.01, (0.005, 0.015)), "good", "Confirmed by tau (greedy), overlap at equal target entropy (greedy text)."),
        (
            (-0.1, (-0.12, -0.08)),
            "neutral",
            "Confirmed by tau (greedy); refuted by overlap at equal target entropy (greedy text).",
        ),
        # A head above the level, by more than the margin of .03, shows that vanilla's own is weak.
        (
            (0.05, (0.031, 0.07)),
            "good",
            f"Confirmed by tau (greedy), overlap at equal target entropy (greedy text).{WEAK}",
        ),
    ],
)
def test_the_prediction_needs_every_measure(overlap: tuple[float, Interval], tone: str, said: str) -> None:
    # Another rule of the same temperature gives the same findings.
    first, *measures = find(compared((0.5, (0.2, 0.8)), overlap), STUDY, [HEADLINE, HEADLINE])
    assert (first.statement, first.tone, first.evidence) == (f"{CLAIM}.", tone, said)
    assert len(measures) == 2


def test_a_comparison_is_found_whichever_way_round_it_was_made() -> None:
    turned = comparison_of(USUAL, KL, VANILLA, HEADLINE)
    assert (turned.first, turned.delta_tau, turned.delta_tau_ci95) == (KL, 0.6, (0.3, 0.9))
    assert turned.delta_overlap_at_equal_entropy == 0.02
    assert turned.delta_overlap_at_equal_entropy_ci95 == pytest.approx((0.01, 0.03))
    assert comparison_of(USUAL, VANILLA, KL, HEADLINE).delta_tau == -0.6
    with pytest.raises(LookupError, match="no comparison of vanilla and graft"):
        comparison_of(USUAL, VANILLA, GRAFT, HEADLINE)
