"""A study in a terminal of 80 columns."""

from __future__ import annotations

from dataclasses import replace

from mtp_train.report.study_table import study_summary
from rendering import printed
from study_samples import BARE, RATES, STUDY

TEXT = printed(study_summary(STUDY))


def test_verdict_is_whole() -> None:
    words = " ".join(TEXT.replace("│", " ").split())
    assert f"Confirmed: {STUDY.findings[0].statement.lower()}" in words
    assert STUDY.findings[0].evidence in words


def test_every_arm_and_task_has_one_line() -> None:
    lines = [line.split() for line in TEXT.splitlines()]
    assert ["distilled+retrained", *("2.95", "[2.80,", "3.09]", "24", ".80", ".64", ".51", "2.17x", "0.38")] in lines
    assert [
        "coding",
        "(8",
        "groups)",
        *("2.86", "[2.71,", "3.00]", "1.72", "[1.57,", "1.86]", "3.24", "[3.09,", "3.38]"),
    ] in lines


def test_differences_what_to_serve_and_lossless_check_are_told() -> None:
    words = " ".join(TEXT.split())
    for expected in (
        "Temperature 0, greedy, 3 drafts a round, own context",
        "18 of 24 are real",
        "vanilla+native - distilled+retrained: -0.34 [-0.52, -0.17] over 24 groups: tau differs, head does not",
        "distilled+retrained: Serve with 5 drafts a round, the fastest of the depths measured here (1, 2, 3, 5)",
        "718 of 720 outputs equal plain decoding",
    ):
        assert expected in words


def test_nothing_is_said_of_what_was_not_measured() -> None:
    text = printed(study_summary(BARE))
    for title in ("Tau by task", "Differences", "What to serve"):
        assert title not in text


def test_brackets_in_names_are_text() -> None:
    name = "[red]x[/nope]"
    arm = next(iter(RATES))
    report = replace(
        STUDY,
        arms={name: STUDY.arms[arm]},
        cells=tuple(replace(cell, arm=name) for cell in STUDY.cells if cell.arm == arm),
        findings=(),
    )
    assert name in printed(study_summary(report), width=120)
