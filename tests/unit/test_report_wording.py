"""Sentences of the report: the verdict, and which arms compare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtp_train.acceptance.counts import Interval
from mtp_train.evaluation.results import ALL_TASKS, Report
from mtp_train.report.wording import difference_words, headline, serving_sentences as serving, setting_words
from report_samples import EMPTY, PASSED, SAMPLE, at_depths
from study_samples import BARE, HEADLINE, STUDY

UNTESTED = replace(STUDY, findings=())
BEST = "distilled+retrained"


def test_headline_follows_the_gate() -> None:
    assert headline(SAMPLE).tone == "good"
    refused = headline(replace(SAMPLE, gate=replace(PASSED, outcome="refused")))
    assert refused.tone == "bad"
    assert refused.statement == "Refused: no gain shown over the graft"
    assert headline(EMPTY).tone == "neutral"


PAYING = {1: (1.1, 1.3), 2: (1.2, 1.6), 3: (0.9, 1.9)}


def test_one_depth_is_recommended_the_fastest_that_is_shown_to_pay() -> None:
    """Depth 3 is as fast on average, and no interval shows it."""
    report = at_depths(SAMPLE, PAYING)
    assert serving(report) == [
        "Serve with 2 drafts a round, the fastest of the depths measured here (1, 2, 3) that are shown to pay: "
        "1.40 [1.20, 1.60] times the speed of plain decoding by the built-in decoder. An engine's rounds may cost "
        "more: mtp-train compare plain=URL drafts=URL."
    ]
    none = serving(at_depths(SAMPLE, {1: (0.8, 0.9), 3: (0.9, 0.99)}))
    assert none == ["Serve without drafts: they slow decoding down at each of the depths measured here (1, 3)."]
    # An interval that contains 1 advises nothing.
    (unsure,) = serving(at_depths(SAMPLE, {1: (0.8, 0.9), 3: (0.9, 1.2)}))
    assert unsure.startswith("Undecided whether drafts pay: the interval of the speedup contains 1 for 3 drafts 1.05 [")
    assert serving(SAMPLE) == serving(EMPTY) == []


@pytest.mark.parametrize(
    ("interval", "tone", "title"),
    [
        ((1.1, 1.3), "good", "The retrained head beats the graft"),
        (
            (0.9, 1.9),
            "neutral",
            "The retrained head beats the graft; undecided whether it is faster: speedup 1.40 [0.90, 1.90]",
        ),
        (
            (0.8, 0.9),
            "bad",
            "The retrained head beats the graft, and drafts slow decoding down here: speedup 0.85 [0.80, 0.90]",
        ),
    ],
)
def test_headline_is_green_only_where_drafts_are_shown_to_pay(
    interval: tuple[float, float], tone: str, title: str
) -> None:
    found = headline(at_depths(SAMPLE, {3: interval}))
    assert (found.tone, found.statement) == (tone, title)


def test_headline_against_plain_decoding_is_the_gates() -> None:
    slow = at_depths(SAMPLE, {3: (0.8, 0.9)})
    refused = headline(replace(slow, gate=replace(PASSED, outcome="refused", baseline="none")))
    assert (refused.tone, refused.statement) == ("bad", "Refused: drafts do not pay")
    undecided = headline(replace(slow, gate=replace(PASSED, outcome="undecided", baseline="none")))
    assert (undecided.tone, undecided.statement) == ("neutral", "Undecided whether drafts pay: nothing is exported")
    # By the break-even of another engine it may pay there; here it does not.
    passed = headline(replace(slow, gate=replace(PASSED, baseline="none")))
    assert (passed.tone, passed.statement) == (
        "bad",
        "Passed by the break-even tau of another engine, and drafts slow decoding down here: speedup 0.85 [0.80, 0.90]",
    )


# Studies


def pooled_differ(report: Report, differs: bool) -> Report:
    rows = (replace(row, differs=differs) if row.task == ALL_TASKS else row for row in report.comparisons)
    return replace(report, comparisons=tuple(rows))


def test_headline_setting_is_the_one_that_the_arms_state() -> None:
    assert STUDY.headline == HEADLINE
    # A server drafts at a depth of its own.
    served = tuple(cell for cell in STUDY.cells if cell.depth in (0, 2))
    assert replace(STUDY, cells=served).headline == replace(HEADLINE, depth=2)
    assert BARE.headline is None


def test_cells_of_a_server_are_told_as_far_as_it_tells() -> None:
    cell = replace(STUDY.cells[-1], arm="served", task=ALL_TASKS, temperature=0.6, context_tokens=None, depth=0)
    served = replace(cell, rule="served", tau=None, speedup=None)
    report = replace(BARE, cells=(served,), arms={"served": served.result})
    assert [one.rule for one in report.along("temperature", "rule")] == ["served"]
    assert report.headline is not None
    assert setting_words(report.headline) == "temperature 0.6, served drafts, own context"
    assert headline(report).statement == "Acceptance measured"


def test_headline_names_the_best_arm_only_where_every_difference_is_real() -> None:
    ahead = headline(UNTESTED)
    assert (ahead.tone, ahead.statement) == ("good", f"{BEST} has the highest tau: 2.95")
    assert ahead.evidence.endswith("From vanilla+native: tau differs, head does not.")
    level = headline(pooled_differ(UNTESTED, False))
    assert level.tone == "neutral"
    assert level.statement.startswith("No arm is shown to be ahead")
    assert level.evidence.endswith("No real difference from vanilla+native and distilled+graft.")
    uncompared = headline(replace(UNTESTED, comparisons=()))
    assert uncompared.statement == level.statement


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
