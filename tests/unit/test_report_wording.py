"""Sentences of the report: the verdict, and which arms compare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtp_train.acceptance.counts import Interval
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import ALL_TASKS, Lossless, Report
from mtp_train.report.slices import Slices, slice_report
from mtp_train.report.wording import (
    Headline,
    difference_words,
    flatten,
    group_arms,
    held_out_sentence,
    serving_sentences,
    setting_words,
)
from mtp_train.report.wording import headline as headline_of
from mtp_train.report.wording import key_figures as key_figures_of
from report_samples import EMPTY, GRAFT, PASSED, RETRAINED, SAMPLE, at_depths
from study_samples import BARE, HEADLINE, RATES, STUDY, TASKS

UNTESTED = replace(STUDY, findings=())
BEST = "distilled+retrained"


def headline(report: Report) -> Headline:
    return headline_of(slice_report(report))


def key_figures(report: Report) -> list[str]:
    return [value for value, _ in key_figures_of(slice_report(report))]


def serving(report: Report) -> list[str]:
    return serving_sentences(slice_report(report))


def test_any_arm_on_another_trunk_is_apart() -> None:
    other = replace(GRAFT, trunk="models/other")
    groups = group_arms(replace(SAMPLE, arms={"other": other, "retrained": RETRAINED}))
    assert list(groups.apart) == ["other"]
    assert list(groups.alike) == ["retrained"]


def test_headline_follows_the_gate() -> None:
    assert headline(SAMPLE).tone == "good"
    refused = headline(replace(SAMPLE, gate=replace(PASSED, outcome="refused")))
    assert refused.tone == "bad"
    assert refused.title == "Refused: no gain shown over the graft"
    assert headline(EMPTY).tone == "neutral"


def test_headline_of_a_lossy_decoder_overrules_the_gate() -> None:
    report = replace(SAMPLE, lossless=Lossless(checked=48, identical=40, near_tie_divergences=1))
    lossy = headline(report)
    assert lossy.tone == "bad"
    assert "do not trust" in lossy.title
    assert "7 differ without a near tie" in lossy.detail
    assert key_figures(report) == []


def test_key_figures_are_before_after_and_speed() -> None:
    assert key_figures(SAMPLE) == ["1.33", "3.44", "2.21x"]
    assert key_figures(EMPTY) == []


def test_settings_are_flattened_in_order() -> None:
    assert flatten({"b": {"y": 1, "x": None}, "a": [1, 2]}) == [("b.y", "1"), ("b.x", "-"), ("a", "1 2")]
    assert flatten({"rows": [{"x": 1}, {"x": 2}]}) == [("rows.1.x", "1"), ("rows.2.x", "2")]


HELD_OUT = {"prompts": 36, "groups": 12, "overlap_8gram": 0.24, "template_8gram": 0.18, "prompts_seen": 1}


def test_the_held_out_text_is_told_with_its_groups_and_its_overlap() -> None:
    text = held_out_sentence({"held_out": HELD_OUT, "target_entropy_median": 0.0104})
    assert text.startswith("36 held-out prompts of 12 groups. 24.0 % of the 8-grams")
    assert "(18.0 % of all); 1 prompts occur there to 70 % or more" in text
    assert text.endswith("an entropy below 0.010 nats; a low value means templated text.")
    assert "Warning" not in text
    assert held_out_sentence({}) == ""


@pytest.mark.parametrize("figures", [{"overlap_8gram": 0.41}, {"prompts_seen": 4}])
def test_held_out_text_that_was_trained_on_is_warned_of(figures: dict[str, float]) -> None:
    text = held_out_sentence({"held_out": HELD_OUT | figures})
    assert "Warning: above 40%, or 10% of the prompts, much of the held-out text was trained on" in text


PAYING = {1: (1.1, 1.3), 2: (1.2, 1.6), 3: (0.9, 1.9)}


def test_one_depth_is_recommended_the_fastest_that_is_shown_to_pay() -> None:
    """Depth 3 is as fast on average, and no interval shows it."""
    report = at_depths(SAMPLE, PAYING)
    assert serving(report) == [
        "Serve with 2 drafts a round, the fastest of the depths measured here (1, 2, 3) that are shown to pay: "
        "1.40 [1.20, 1.60] times the speed of plain decoding."
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
    assert (found.tone, found.title) == (tone, title)


def test_headline_against_plain_decoding_is_the_gates() -> None:
    slow = at_depths(SAMPLE, {3: (0.8, 0.9)})
    refused = headline(replace(slow, gate=replace(PASSED, outcome="refused", baseline="none")))
    assert (refused.tone, refused.title) == ("bad", "Refused: drafts do not pay")
    undecided = headline(replace(slow, gate=replace(PASSED, outcome="undecided", baseline="none")))
    assert (undecided.tone, undecided.title) == ("neutral", "Undecided whether drafts pay: nothing is exported")
    # By the break-even of another engine it may pay there; here it does not.
    passed = headline(replace(slow, gate=replace(PASSED, baseline="none")))
    assert (passed.tone, passed.title) == (
        "bad",
        "Passed by the break-even tau of another engine, and drafts slow decoding down here: speedup 0.85 [0.80, 0.90]",
    )


# Studies


def slices_of(*arms: str) -> Slices:
    """Return the slices of the study with these arms only, without findings."""
    kept = {name: arm for name, arm in UNTESTED.arms.items() if name in arms}
    return slice_report(replace(UNTESTED, arms=kept, cells=tuple(c for c in UNTESTED.cells if c.arm in arms)))


def pooled_differ(report: Report, differs: bool) -> Report:
    rows = (replace(row, differs=differs) if row.task == ALL_TASKS else row for row in report.comparisons)
    return replace(report, comparisons=tuple(rows))


def test_headline_setting_is_the_one_that_the_arms_state() -> None:
    assert slice_report(STUDY).headline == HEADLINE
    # A server drafts at a depth of its own.
    served = tuple(cell for cell in STUDY.cells if cell.depth in (0, 2))
    assert slice_report(replace(STUDY, cells=served)).headline == replace(HEADLINE, depth=2)
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
    slices = slice_report(replace(BARE, cells=(served,), arms={"served": served.result}))
    assert [s.rule for s in slices.temperatures()] == ["served"]
    assert slices.headline is not None
    assert setting_words(slices.headline) == "temperature 0.6, served drafts, own context"
    assert headline_of(slices).title == "Acceptance measured"


def test_headline_is_the_first_finding() -> None:
    verdict = headline(STUDY)
    statement = STUDY.findings[0].statement
    assert (verdict.tone, verdict.title) == ("good", f"Confirmed: {statement[0].lower()}{statement[1:]}")
    open_question = replace(STUDY, findings=(replace(STUDY.findings[0], tone="neutral"),))
    assert headline(open_question).title.startswith("Undecided: ")


def test_headline_names_the_best_arm_only_where_every_difference_is_real() -> None:
    ahead = headline(UNTESTED)
    assert (ahead.tone, ahead.title) == ("good", f"{BEST} has the highest tau: 2.95")
    assert ahead.detail.endswith("From vanilla+native: tau differs, head does not.")
    level = headline(pooled_differ(UNTESTED, False))
    assert level.tone == "neutral"
    assert level.title.startswith("No arm is shown to be ahead")
    assert level.detail.endswith("No real difference from vanilla+native and distilled+graft.")
    uncompared = headline(replace(UNTESTED, comparisons=()))
    assert uncompared.title == level.title


def test_headline_of_one_arm_is_what_its_drafts_bring() -> None:
    verdict = headline_of(slices_of(BEST, "distilled"))
    assert (verdict.tone, verdict.title) == ("good", f"{BEST} drafts at 2.17x the speed without drafts")
    assert "1.36 would break even" in verdict.detail


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
