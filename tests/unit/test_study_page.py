"""report.html of a study: self-contained, escaped, and without empty sections."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtp_train.evaluation.cells import StudyReport
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.report import Lossless
from mtp_train.report.figures import FigureFile
from mtp_train.report.page import render_study_page
from rendering import HOSTILE, Reader
from study_samples import BARE, RATES, STUDY, make_comparisons

FIGURES = [FigureFile(stem, f"Caption of {stem}.", b"\x89PNG fake") for stem in ("tau", "tasks_1", "depth", "costs")]
SECTIONS = (
    *("Arms", "Differences", "What to serve", "By position in the draft", "By task"),
    *("By temperature", "By depth"),
    *("By context", "What it costs"),
    "The served model",
)


def page_of(report: StudyReport, **provenance: object) -> str:
    return render_study_page(report, FIGURES if report.cells else [], provenance)


def headings(page: str) -> list[str]:
    return re.findall(r"<h2[^>]*>(.*?)</h2>", page)


def section(page: str, title: str) -> str:
    """Return the text between a heading and the next."""
    return Reader(page.split(f">{title}</h2>")[1].split("<h2")[0]).text


def body_text(page: str) -> str:
    """Return the visible text of the page, without its title."""
    return Reader(page).text.split("mtp-train report: ")[1]


PAGE = page_of(STUDY, versions={"torch": "2.13.0"})


@pytest.mark.parametrize("report", [STUDY, BARE], ids=["full", "bare"])
def test_page_is_well_formed(report: StudyReport) -> None:
    assert Reader(page_of(report)).open == []


def test_page_asks_nothing_of_the_network_and_runs_nothing() -> None:
    assert not re.search(r"https?:|//|<script|<link|<iframe|@import|url\(", PAGE)
    sources = [attrs["src"] or "" for _, attrs in Reader(PAGE).tags if "src" in attrs]
    assert len(sources) == len(FIGURES)
    assert all(source.startswith("data:image/png;base64,") for source in sources)


def test_links_lead_to_the_sections_that_are_there() -> None:
    tags = Reader(PAGE).tags
    targets = [attrs["href"] for tag, attrs in tags if tag == "a"]
    assert targets == [f"#{attrs['id']}" for _, attrs in tags if "id" in attrs]
    assert len(targets) == len(SECTIONS)


def test_full_study_has_every_section_and_a_bare_one_none() -> None:
    found = headings(PAGE)
    assert [title for title in found if title in SECTIONS] == list(SECTIONS)
    assert headings(page_of(BARE)) == ["Is it lossless?", "How to read this"]


def test_hostile_names_are_shown_as_text() -> None:
    arm = "distilled+retrained"
    rows = {
        "cells": tuple(replace(c, arm=HOSTILE, task=HOSTILE) for c in STUDY.cells if c.arm == arm and c.task == "all"),
        "comparisons": tuple(replace(c, first=HOSTILE, task=HOSTILE) for c in STUDY.comparisons),
        "costs": tuple(replace(c, arm=HOSTILE) for c in STUDY.costs),
        "findings": tuple(replace(c, tone=HOSTILE, statement=HOSTILE + "!", evidence=HOSTILE) for c in STUDY.findings),
    }
    arms = {HOSTILE: replace(STUDY.arms[arm], trunk=HOSTILE, head=HOSTILE)}
    hostile = replace(
        STUDY, **rows, title=HOSTILE, arms=arms, settings={HOSTILE: HOSTILE}, endpoint={HOSTILE: [HOSTILE]}
    )
    reader = Reader(page_of(hostile, origin=HOSTILE))
    assert {tag for tag, _ in reader.tags} <= {tag for tag, _ in Reader(PAGE).tags}
    assert not any("onerror" in attrs for _, attrs in reader.tags)
    assert reader.open == []
    assert reader.text.count(HOSTILE) > 20


def test_lossy_decoder_is_said_before_any_finding() -> None:
    page = page_of(replace(STUDY, lossless=Lossless(checked=9, identical=0, near_tie_divergences=0)))
    text = body_text(page)
    assert text.index("do not trust") < text.index(STUDY.findings[0].statement)


def test_findings_are_told_once_each() -> None:
    body = body_text(PAGE)
    assert [body.count(finding.statement) for finding in STUDY.findings] == [1, 1, 1]


def test_differences_are_told_in_words() -> None:
    text = section(PAGE, "Differences")
    assert "18 of 24" in text
    assert "tau differs, head does not" in text
    assert text.count("not shown") == 3


def test_tables_are_slices_at_the_headline() -> None:
    assert section(PAGE, "By task").count("distilled+retrained") == 3
    assert "2.86 [2.71, 3.00]" in section(PAGE, "By task")
    assert "0.6, sampled drafts" in section(PAGE, "By temperature")
    assert re.findall(r"\d drafts?\b", section(PAGE, "By depth")) == ["1 draft", "2 drafts", "3 drafts", "5 drafts"]
    assert "2,048" in section(PAGE, "By context")
    assert "All 756 cells of the grid are in acceptance.csv" in PAGE


def test_one_arm_has_one_line_a_point() -> None:
    arm = "distilled+retrained"
    cells = tuple(cell for cell in STUDY.cells if cell.arm == arm)
    page = page_of(replace(STUDY, arms={arm: STUDY.arms[arm]}, cells=cells))
    rows = re.findall(r'<th scope="row"><span class="name">(.*?)</span>', page.split(">By task</h2>")[1])
    assert rows[:3] == ["coding", "math", "writing"]


def test_costs_are_printed_in_units() -> None:
    assert "421 MB" in section(PAGE, "What it costs")
    assert "0.97x at 2,048 tokens" in section(PAGE, "What it costs")


def test_page_of_a_large_grid_stays_short() -> None:
    settings = tuple(Setting(0.0, None, depth, "greedy") for depth in range(1, 40))
    large = replace(STUDY, comparisons=tuple(make_comparisons((Setting(0.0, None, 3, "greedy"), *settings))))
    assert len(page_of(large)) < 1.1 * len(PAGE)


@pytest.mark.parametrize("name", RATES)
def test_every_arm_is_named_with_its_trunk(name: str) -> None:
    text = section(PAGE, "Arms")
    assert f"head: heads/{name}" in text
    assert "different trunks" in text
