"""Sentences of a study's report: verdict and differences; and the slices of the grid that it shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mtp_train.acceptance.counts import Interval
from mtp_train.evaluation.cells import ALL_TASKS, StudyReport
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.report import Lossless
from mtp_train.report.study_slices import Slices, slice_report
from mtp_train.report.study_wording import (
    difference_words,
    serving_sentences,
    setting_words,
    study_headline,
    study_key_figures,
)
from mtp_train.report.wording import Headline
from study_samples import BARE, HEADLINE, RATES, STUDY, TASKS, arm_of

UNTESTED = replace(STUDY, findings=())
BEST = "distilled+retrained"


def slices_of(*arms: str) -> Slices:
    """Return the slices of the study with these arms only, without findings."""
    kept = {name: arm for name, arm in UNTESTED.arms.items() if name in arms}
    return slice_report(replace(UNTESTED, arms=kept, cells=tuple(c for c in UNTESTED.cells if c.arm in arms)))


def pooled_differ(report: StudyReport, differs: bool) -> StudyReport:
    rows = (replace(row, differs=differs) if row.task == ALL_TASKS else row for row in report.comparisons)
    return replace(report, comparisons=tuple(rows))


def test_headline_setting_is_the_one_that_the_arms_state() -> None:
    assert slice_report(STUDY).headline == HEADLINE
    other = Setting(1.0, 512, 2, "sampled")
    index = slice_report(STUDY).cells
    arms = {arm: arm_of(index[arm, ALL_TASKS, other]) for arm in RATES}
    assert slice_report(replace(STUDY, arms=arms)).headline == other
    assert slice_report(BARE).headline is None


def test_slices_run_through_the_headline() -> None:
    slices = slice_report(STUDY)
    assert [(s.temperature, s.rule) for s in slices.temperatures()] == [
        *((0.0, "greedy"), (0.6, "sampled"), (0.6, "argmax"), (1.0, "sampled"), (1.0, "argmax"))
    ]
    assert [(s.temperature, s.rule) for s in slices.main_temperatures()] == [
        *((0.0, "greedy"), (0.6, "sampled"), (1.0, "sampled"))
    ]
    assert [s.depth for s in slices.depths()] == [1, 2, 3, 5]
    assert [s.context_tokens for s in slices.contexts()] == [None, 512, 2048]
    assert slices.arms == tuple(RATES)
    assert slices.tasks == tuple(TASKS)


def test_rule_of_the_headline_stands_for_its_temperature() -> None:
    setting = Setting(0.6, None, 3, "argmax")
    slices = replace(slice_report(STUDY), headline=setting)
    assert setting in slices.main_temperatures()


def test_cells_of_a_server_are_told_as_far_as_it_tells() -> None:
    cell = replace(STUDY.cells[-1], arm="served", task=ALL_TASKS, temperature=0.6, context_tokens=None, depth=0)
    served = replace(cell, rule="served", tau=None, speedup=None)
    slices = slice_report(replace(BARE, cells=(served,), arms={"served": arm_of(served)}))
    assert [s.rule for s in slices.temperatures()] == ["served"]
    assert slices.headline is not None
    assert setting_words(slices.headline) == "temperature 0.6, the server's rule, own context"
    assert study_headline(slices).title == "Acceptance measured"


def test_headline_of_a_lossy_decoder_goes_first() -> None:
    slices = slice_report(replace(STUDY, lossless=Lossless(checked=9, identical=1, near_tie_divergences=1)))
    assert "do not trust" in study_headline(slices).title
    assert study_key_figures(slices) == []


def test_headline_is_the_first_finding() -> None:
    verdict = study_headline(slice_report(STUDY))
    statement = STUDY.findings[0].statement
    assert (verdict.tone, verdict.title) == ("good", f"Confirmed: {statement[0].lower()}{statement[1:]}")
    open_question = replace(STUDY, findings=(replace(STUDY.findings[0], tone="neutral"),))
    assert study_headline(slice_report(open_question)).title.startswith("Undecided: ")
    odd = replace(STUDY, findings=(replace(STUDY.findings[0], tone="glorious"),))
    assert study_headline(slice_report(odd)).tone == "neutral"


def test_headline_names_the_best_arm_only_where_every_difference_is_real() -> None:
    ahead = study_headline(slice_report(UNTESTED))
    assert (ahead.tone, ahead.title) == ("good", f"{BEST} has the highest tau: 2.95")
    assert ahead.detail.endswith("From vanilla+native: tau differs, head does not.")
    level = study_headline(slice_report(pooled_differ(UNTESTED, False)))
    assert level.tone == "neutral"
    assert level.title.startswith("No arm is shown to be ahead")
    assert level.detail.endswith("No real difference from vanilla+native and distilled+graft.")
    uncompared = study_headline(slice_report(replace(UNTESTED, comparisons=())))
    assert uncompared.title == level.title


def test_headline_of_one_arm_is_what_its_drafts_bring() -> None:
    verdict = study_headline(slices_of(BEST, "distilled"))
    assert (verdict.tone, verdict.title) == ("good", f"{BEST} drafts at 2.17x the speed without drafts")
    assert "1.36 would break even" in verdict.detail


def test_headline_of_drafts_that_do_not_pay_is_bad() -> None:
    assert headline_at(speedup=0.9, speedup_ci95=(0.85, 0.95)).tone == "bad"


def headline_at(**figures: Any) -> Headline:
    """Return the headline of a study of one arm with these figures at every setting."""
    cells = tuple(replace(cell, **figures) for cell in STUDY.cells if cell.arm == BEST)
    return study_headline(slice_report(replace(UNTESTED, cells=cells, arms={BEST: STUDY.arms[BEST]})))


@pytest.mark.parametrize("speed", [None, (0.7, 1.7)])
def test_headline_is_green_only_where_an_interval_shows_the_speedup(speed: Interval | None) -> None:
    unsure = {"speedup": 1.2, "speedup_ci95": speed, "tau": 3.0, "tau_ci95": (1.0, 4.0), "break_even_tau": 2.2}
    verdict = headline_at(**unsure)
    assert verdict.tone == "neutral"
    assert verdict.title.endswith("the speed without drafts, and is not shown to decode faster")
    assert headline_at(**{**unsure, "speedup_ci95": None, "tau_ci95": (2.3, 3.7)}).tone == "good"


def test_the_arm_with_the_highest_tau_is_green_only_where_its_drafts_pay() -> None:
    cells = tuple(replace(c, speedup_ci95=(0.5, 0.9)) if c.arm == BEST else c for c in UNTESTED.cells)
    verdict = study_headline(slice_report(replace(UNTESTED, cells=cells)))
    assert (verdict.tone, verdict.title) == (
        "bad",
        f"{BEST} has the highest tau: 2.95, and drafts slow decoding down here",
    )


def test_headline_of_an_empty_study() -> None:
    assert study_headline(slice_report(BARE)).title == "Acceptance measured"


@pytest.mark.parametrize(
    ("same_trunk", "differs", "overlap", "words"),
    [
        (True, True, (-0.1, 0.1), "tau and head differ"),
        (True, False, None, "no difference shown"),
        (False, True, (-0.02, 0.01), "tau differs, head does not"),
        (False, True, (0.1, 0.2), "tau and head differ"),
        (False, True, (-0.2, -0.1), "tau differs one way, head the other"),
        (False, True, None, "tau differs, by text or head"),
        (False, False, (0.1, 0.2), "tau not shown to differ, head does"),
        (False, False, (-0.1, 0.2), "no difference shown"),
        (False, False, None, "no difference shown"),
    ],
)
def test_entropy_control_decides_what_differs(
    same_trunk: bool, differs: bool, overlap: Interval | None, words: str
) -> None:
    row = replace(
        STUDY.comparisons[0],
        delta_tau=0.5,
        delta_tau_ci95=(-0.1, 1.1),
        same_trunk=same_trunk,
        differs=differs,
        delta_overlap_at_equal_entropy_ci95=overlap,
    )
    assert difference_words(row) == words
    assert difference_words(row.swapped()) == words


def test_interval_beyond_zero_that_the_correction_does_not_pass_is_said() -> None:
    row = replace(STUDY.comparisons[0], same_trunk=True, differs=False, delta_tau_ci95=(0.1, 0.9))
    assert difference_words(row) == difference_words(row.swapped()) == "not shown over so many comparisons"


def test_swapped_comparison_turns_its_signs() -> None:
    row = replace(STUDY.comparisons[0], delta_tau=0.5, delta_tau_ci95=(0.1, 0.8))
    other = row.swapped()
    assert (other.first, other.delta_tau, other.delta_tau_ci95) == (row.second, -0.5, (-0.8, -0.1))
    assert other.swapped() == row


def test_key_figures_are_tau_speed_differences_and_prompts() -> None:
    assert [value for value, _ in study_key_figures(slice_report(STUDY))] == ["2.95", "2.17x", "18 of 24", "48"]
    assert study_key_figures(slice_report(BARE)) == []


def test_one_depth_is_recommended_with_its_interval() -> None:
    cells = tuple(replace(c, speedup=1.6, speedup_ci95=(1.5, 1.7)) if c.depth == 3 else c for c in UNTESTED.cells)
    slower = tuple(c if c.depth in (0, 3) else replace(c, speedup=0.8, speedup_ci95=(0.7, 0.9)) for c in cells)
    assert serving_sentences(slice_report(replace(UNTESTED, cells=slower)))[1:] == [
        f"{arm}: Serve with 3 drafts a round, the fastest of the depths measured here (1, 2, 3, 5) that are shown to "
        "pay: 1.60 [1.50, 1.70] times the speed of plain decoding."
        for arm in list(RATES)[1:]
    ]
    none = tuple(c if not c.depth else replace(c, speedup=0.8, speedup_ci95=(0.7, 0.9)) for c in UNTESTED.cells)
    (told,) = {one.partition(": ")[2] for one in serving_sentences(slice_report(replace(UNTESTED, cells=none)))}
    assert told == "Serve without drafts: none of the depths measured here (1, 2, 3, 5) is shown to pay."
    assert serving_sentences(slice_report(BARE)) == []
