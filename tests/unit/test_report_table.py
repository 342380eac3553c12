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
    assert "* Another trunk" in text
    assert "+ Recorded earlier" in text
    assert "Another trunk" not in printed(arm_table(replace(SAMPLE, arms={"retrained": RETRAINED})))


def test_summary_says_verdict_and_lossless() -> None:
    text = printed(summary(SAMPLE))
    assert "The retrained head beats the graft" in text
    assert "Lossless: 48 of 48" in text
    assert "Acceptance measured" in printed(summary(EMPTY))


def test_brackets_in_names_are_text() -> None:
    name = "[red]x[/nope]"
    report: RunReport = replace(SAMPLE, arms={name: RETRAINED})
    assert name in printed(summary(report), width=120)
