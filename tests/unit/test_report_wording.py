"""Sentences of the report: the verdict, and which arms compare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtp_train.evaluation.results import NOT_TEACHER_FORCED
from mtp_train.report import Lossless
from mtp_train.report.wording import (
    COLUMNS,
    ArmGroups,
    apart_sentence,
    arm_cells,
    depth_rows,
    flatten,
    group_arms,
    headline,
    held_out_sentence,
    key_figures,
    lossless_sentence,
    recorded_sentence,
    serving_sentence,
)
from report_samples import CEILING, EMPTY, GRAFT, PASSED, RETRAINED, SAMPLE, VANILLA, at_depths


def test_arms_are_grouped_by_what_they_compare_with() -> None:
    groups = group_arms(SAMPLE)
    assert list(groups.alike) == ["none", "graft", "retrained"]
    assert list(groups.apart) == ["vanilla"]
    assert list(groups.recorded) == ["ceiling"]


def test_any_arm_on_another_trunk_is_apart() -> None:
    other = replace(GRAFT, trunk="models/other")
    groups = group_arms(replace(SAMPLE, arms={"other": other, "retrained": RETRAINED}))
    assert list(groups.apart) == ["other"]
    assert list(groups.alike) == ["retrained"]


def test_vanilla_alone_is_still_apart() -> None:
    groups = group_arms(replace(SAMPLE, arms={"vanilla": VANILLA, "ceiling": CEILING}))
    assert not groups.alike
    assert list(groups.apart) == ["vanilla"]


def test_vanilla_is_explained_by_both_entropies() -> None:
    text = apart_sentence(group_arms(SAMPLE), SAMPLE.settings)
    assert "does not compare" in text
    assert "1.21 for vanilla, against 0.38" in text


def test_vanilla_is_explained_without_entropies() -> None:
    arms = {"retrained": replace(RETRAINED, teacher_forced=NOT_TEACHER_FORCED), "vanilla": VANILLA}
    assert apart_sentence(group_arms(replace(SAMPLE, arms=arms)), {}).endswith("the arms above.")


def test_headline_follows_the_gate() -> None:
    assert headline(SAMPLE).tone == "good"
    refused = headline(replace(SAMPLE, gate=replace(PASSED, passed=False)))
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


@pytest.mark.parametrize(
    ("lossless", "expected"),
    [
        (None, "Not checked"),
        (Lossless(checked=0, identical=0, near_tie_divergences=0), "Not checked"),
        (Lossless(checked=3, identical=3, near_tie_divergences=0), "3 of 3 outputs equal plain decoding"),
        (Lossless(checked=3, identical=2, near_tie_divergences=1), "the other 1 diverge at a near tie"),
    ],
)
def test_lossless_sentence_claims_no_more_than_was_checked(lossless: Lossless | None, expected: str) -> None:
    assert expected in lossless_sentence(lossless)


def test_key_figures_are_before_after_and_speed() -> None:
    assert [value for value, _ in key_figures(SAMPLE)] == ["1.33", "3.44", "2.21x"]
    assert key_figures(EMPTY) == []


def test_arm_cells_print_one_value_a_column() -> None:
    assert arm_cells(RETRAINED) == ("3.44 [3.38, 3.50]", "12", ".88 .82 .74", "1,691.2", "2.21x", "0.2 %", "0.38")
    assert len(COLUMNS) == len(arm_cells(RETRAINED))
    assert arm_cells(CEILING)[3:5] == ("-", "-")


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


def test_recorded_arms_are_explained_by_name() -> None:
    groups = group_arms(replace(SAMPLE, arms={"ceiling": CEILING, "ngram": CEILING, "other": CEILING}))
    assert recorded_sentence(groups).startswith(
        "Measured earlier with settings of their own and shown for scale: ceiling is ten times the steps; ngram is"
    )
    assert recorded_sentence(ArmGroups({}, {}, {"other": CEILING})).endswith("shown for scale.")


def test_held_out_text_too_short_for_an_eight_gram_is_told_without_shares() -> None:
    text = held_out_sentence({"held_out": HELD_OUT | {"overlap_8gram": None, "template_8gram": None}})
    assert text == "36 held-out prompts of 12 groups."


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("demo:code", "vanilla continues demo:code, text of its own kind; 40.0 % of the 8-grams it writes repeat"),
        (None, "vanilla answers the same prompts, not text of its own kind; 40.0 % of the 8-grams it writes repeat"),
    ],
)
def test_what_vanilla_decodes_is_told_with_its_repeats(source: str | None, told: str) -> None:
    arms = {"retrained": RETRAINED, "vanilla": replace(VANILLA, repeated_8gram_share=0.4)}
    assert told in apart_sentence(group_arms(replace(SAMPLE, arms=arms)), {"vanilla_prompts": source})


PAYING = {1: (1.1, 1.3), 2: (1.2, 1.6), 3: (0.9, 1.9)}


def test_one_depth_is_recommended_the_fastest_that_is_shown_to_pay() -> None:
    """Depth 3 is as fast on average, and no interval shows it."""
    report = at_depths(SAMPLE, PAYING)
    assert serving_sentence(report) == (
        "Serve with 2 drafts a round, the fastest of the depths measured here (1, 2, 3) that are shown to pay: "
        "1.40 [1.20, 1.60] times the speed of plain decoding."
    )
    assert depth_rows(report) == [
        ("1", "16", "3.44 [3.38, 3.50]", "1.25", "1.20 [1.10, 1.30]", "yes"),
        ("2", "16", "3.44 [3.38, 3.50]", "1.50", "1.40 [1.20, 1.60]", "yes"),
        ("3", "16", "3.44 [3.38, 3.50]", "1.75", "1.40 [0.90, 1.90]", "not shown"),
    ]
    none = serving_sentence(at_depths(SAMPLE, {1: (0.8, 0.9), 3: (0.9, 1.2)}))
    assert none == "Serve without drafts: none of the depths measured here (1, 3) is shown to pay."


@pytest.mark.parametrize(
    ("interval", "tone", "title"),
    [
        ((1.1, 1.3), "good", "The retrained head beats the graft"),
        ((0.9, 1.9), "neutral", "The retrained head beats the graft, and is not shown to decode faster"),
        ((0.8, 0.9), "bad", "The retrained head beats the graft, and drafts slow decoding down here"),
    ],
)
def test_headline_is_green_only_where_drafts_are_shown_to_pay(
    interval: tuple[float, float], tone: str, title: str
) -> None:
    found = headline(at_depths(SAMPLE, {3: interval}))
    assert (found.tone, found.title) == (tone, title)


def test_headline_against_plain_decoding_is_the_gates() -> None:
    slow = at_depths(SAMPLE, {3: (0.8, 0.9)})
    refused = headline(replace(slow, gate=replace(PASSED, passed=False, baseline="none")))
    assert (refused.tone, refused.title) == ("bad", "Refused: no speedup shown over plain decoding")
    # By the break-even of another engine it may pay there.
    passed = headline(replace(slow, gate=replace(PASSED, baseline="none")))
    assert (passed.tone, passed.title) == ("good", "The retrained head beats plain decoding")


def test_reports_without_intervals_of_speed_recommend_nothing() -> None:
    assert (serving_sentence(SAMPLE), depth_rows(SAMPLE), serving_sentence(EMPTY)) == ("", [], "")
    assert headline(SAMPLE).tone == "good"
