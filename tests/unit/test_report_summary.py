"""The report in a terminal of 80 columns."""

from __future__ import annotations

from dataclasses import replace

from mtp_train.report.summary import summary
from rendering import printed
from report_samples import EMPTY, RETRAINED, SAMPLE
from study_samples import BARE, STUDY

STUDY_TEXT = printed(summary(STUDY))


def line_of(text: str, arm: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(arm))


def test_every_arm_has_its_figures_on_one_line() -> None:
    text = printed(summary(SAMPLE))
    assert line_of(text, "retrained").split() == [
        *("retrained", "3.44", "[3.38,", "3.50]", ".88", ".82", ".74", "1,691.2", "2.21")
    ]
    assert line_of(text, "none").split() == ["none", "1.00", "-", "312.5", "1.00"]
    places = [text.index(part) for part in ("\nretrained", "\nother trunk:", "\nvanilla", "\nrecorded:", "\nceiling")]
    assert places == sorted(places)
    assert "1.21 for vanilla, against 0.38" in " ".join(text.split())


def test_summary_of_a_run_says_verdict_power_and_lossless() -> None:
    text = " ".join(printed(summary(SAMPLE)).split())
    for expected in (
        "The retrained head beats the graft",
        "a true gain in tau of 0.11 (greedy), 0.16 (temperature 0.6, top-p 0.95, argmax drafts) with",
        "Lossless: 48 of 48",
    ):
        assert expected in text
    assert "Acceptance measured" in printed(summary(EMPTY))


def test_summary_of_a_study_says_findings_tasks_differences_and_what_to_serve() -> None:
    words = " ".join(STUDY_TEXT.replace("│", " ").split())
    for expected in (
        f"Confirmed: {STUDY.findings[0].statement.lower()}",
        STUDY.findings[0].evidence,
        "Greedy, 3 drafts a round, own context",
        "coding 2.86 [2.71, 3.00] 1.72 [1.57, 1.86] 3.24 [3.09, 3.38]",
        "18 of 24 are real",
        "vanilla+native - distilled+retrained: -0.34 [-0.52, -0.17] over 24 groups: tau differs, head does not",
        "distilled+retrained: Serve with 5 drafts a round, the fastest of the depths measured here (1, 2, 3, 5)",
        "718 of 720 outputs equal plain decoding",
    ):
        assert expected in words
    for title in ("Tau by task", "Differences", "What to serve"):
        assert title not in printed(summary(BARE))


def test_brackets_in_names_are_text() -> None:
    name = "[red]x[/nope]"
    assert name in printed(summary(replace(SAMPLE, arms={name: RETRAINED})), width=120)
