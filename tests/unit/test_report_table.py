"""The report in a terminal."""

from __future__ import annotations

from dataclasses import replace

from mtp_train.report import RunReport, arm_table, summary
from rendering import printed
from report_samples import EMPTY, RETRAINED, SAMPLE


def line_of(text: str, arm: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(arm))


def test_every_arm_has_its_figures_on_one_line_of_80_columns() -> None:
    text = printed(arm_table(SAMPLE))
    assert line_of(text, "retrained").split() == [
        *("retrained", "3.44", "[3.38,", "3.50]", ".88", ".82", ".74", "1,691.2", "2.21x", "0.2", "%", "0.38")
    ]
    assert line_of(text, "none").split() == ["none", "1.00", "-", "312.5", "1.00x", "0.2", "%", "0.38"]


def test_arms_that_do_not_compare_are_marked_and_explained() -> None:
    text = printed(arm_table(SAMPLE))
    assert line_of(text, "vanilla").startswith("vanilla *")
    assert line_of(text, "ceiling").startswith("ceiling +")
    assert "Intervals are over 12 groups of prompts." in text
    assert "* Another trunk" in text
    assert "+ Recorded earlier" in text
    assert "Another trunk" not in printed(arm_table(replace(SAMPLE, arms={"retrained": RETRAINED})))


def test_numbers_of_groups_are_told_by_arm_where_they_differ() -> None:
    recorded = {**SAMPLE.arms, "ceiling": replace(SAMPLE.arms["ceiling"], groups=6)}
    text = " ".join(printed(arm_table(replace(SAMPLE, arms=recorded))).split())
    assert "Intervals are over 12 groups (graft retrained vanilla), 6 groups (ceiling)." in text
    unknown = {"retrained": replace(RETRAINED, groups=None)}
    assert "Intervals" not in printed(arm_table(replace(SAMPLE, arms=unknown)))


def test_summary_says_what_the_gate_found_and_would_have_seen() -> None:
    text = " ".join(printed(summary(SAMPLE)).split())
    assert "Gate, greedy: tau 1.33 to 3.44, gain [+2.04, +2.18] over 12 groups: gain shown" in text
    assert "temperature 0.6, top-p 0.95, argmax drafts: tau 1.30 to 3.10, gain [+1.71, +1.90] over 12 groups" in text
    assert "a true gain in tau of 0.11 (greedy), 0.16 (temperature 0.6, top-p 0.95, argmax drafts) with" in text
    assert "Power" not in printed(summary(EMPTY))


def test_summary_says_verdict_and_lossless() -> None:
    text = printed(summary(SAMPLE))
    assert "The retrained head beats the graft" in text
    assert "Lossless: 48 of 48" in text
    assert "Acceptance measured" in printed(summary(EMPTY))


def test_brackets_in_names_are_text() -> None:
    name = "[red]x[/nope]"
    report: RunReport = replace(SAMPLE, arms={name: RETRAINED})
    assert name in printed(summary(report), width=120)
