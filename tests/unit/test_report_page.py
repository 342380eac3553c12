"""report.html: self-contained, escaped, and clear about which arms compare."""

from __future__ import annotations

import base64
import re
from dataclasses import replace

import pytest

from mtp_train.report import GateResult, RunReport
from mtp_train.report.figures import FigureFile
from mtp_train.report.page import render_page
from rendering import HOSTILE, Reader
from report_samples import EMPTY, RETRAINED, SAMPLE, at_depths

FIGURE = FigureFile("tau", "Tokens per round.", b"\x89PNG fake")


def page_of(report: RunReport, **provenance: object) -> str:
    return render_page(report, [FIGURE], provenance)


@pytest.mark.parametrize("report", [SAMPLE, EMPTY], ids=["full", "empty"])
def test_page_is_well_formed(report: RunReport) -> None:
    reader = Reader(page_of(report))
    assert reader.open == []
    assert [tag for tag, _ in reader.tags[:2]] == ["html", "head"]


def test_page_asks_nothing_of_the_network_and_runs_nothing() -> None:
    page = page_of(SAMPLE, argv=["mtp-train", "run"])
    assert not re.search(r"https?:|//|<script|<link|<iframe|@import|url\(", page)
    sources = [attrs["src"] for _, attrs in Reader(page).tags if "src" in attrs]
    assert sources == ["data:image/png;base64," + base64.b64encode(FIGURE.png).decode()]


def test_hostile_names_are_shown_as_text() -> None:
    arm = replace(RETRAINED, trunk=HOSTILE, head=HOSTILE)
    gate = GateResult(passed=False, baseline=HOSTILE, delta_tau_ci95=None, reason=HOSTILE)
    page = page_of(replace(SAMPLE, arms={HOSTILE: arm}, gate=gate, settings={HOSTILE: HOSTILE}), origin=HOSTILE)
    reader = Reader(page)
    clean = Reader(page_of(replace(SAMPLE, arms={"one": arm}, gate=replace(gate, baseline="one", reason="two"))))
    assert {tag for tag, _ in reader.tags} == {tag for tag, _ in clean.tags}
    assert not any("onerror" in attrs for _, attrs in reader.tags)
    assert reader.text.count(HOSTILE) >= 8


def test_vanilla_and_recorded_arms_stand_apart() -> None:
    text = Reader(page_of(SAMPLE)).text
    alike, rest = text.split("Another trunk, shown apart")
    apart, recorded = rest.split("Recorded, not measured here")
    assert "vanilla" not in alike
    assert "1.21 for vanilla, against 0.38" in apart
    assert "vanilla (other trunk)" in apart
    assert "ceiling (recorded)" in recorded
    assert "ceiling" not in alike + apart


def test_page_says_verdict_lossless_settings_and_provenance() -> None:
    text = Reader(page_of(SAMPLE, versions={"torch": "2.13.0"})).text
    for expected in (
        "The retrained head beats the graft",
        "48 of 48 outputs equal plain decoding",
        "[+2.04, +2.18]",
        "it detects a true gain in tau of 0.11 (greedy)",
        "The same at temperature 0.6, top-p 0.95, argmax drafts",
        "device.threads",
        "versions.torch",
        "How to read this",
    ):
        assert expected in text


def test_sections_without_content_are_left_out() -> None:
    text = Reader(page_of(EMPTY)).text
    for heading in ("Same trunk", "Another trunk", "Recorded", "The gate", "Settings", "Provenance"):
        assert heading not in text


def test_shorter_arms_leave_their_last_positions_blank() -> None:
    rows = re.findall(r"<tr><th scope=\"rowgroup\".*?</tr>", page_of(SAMPLE), flags=re.DOTALL)
    graft = next(row for row in rows if "graft" in row)
    assert re.findall(r"<td>(.*?)</td>", graft) == ["0.240", "0.070", "-"]


def test_command_in_the_reason_can_be_copied() -> None:
    command = "mtp-train graft one --from two --out three"
    gate = GateResult(passed=False, baseline="graft", delta_tau_ci95=None, reason=f"no gain. Use: {command}")
    page = page_of(replace(SAMPLE, gate=gate))
    assert page.count(f"No gain. Use: {command}</") == 2


def test_accepted_drafts_of_sample_texts_are_marked() -> None:
    page = page_of(SAMPLE)
    assert "<span>def add(a, b):</span>\n<mark>    return a</mark> + b\n</pre>" in page
    hostile = replace(SAMPLE.samples[0], pieces=(("<script>", True),))
    assert "<mark>&lt;script&gt;</mark>" in page_of(replace(SAMPLE, samples=(hostile,)))
    assert "Sample texts" not in page_of(replace(SAMPLE, samples=()))


def test_page_recommends_one_depth_and_lists_the_break_even_of_each() -> None:
    text = Reader(page_of(at_depths(SAMPLE, {1: (1.1, 1.3), 3: (0.9, 1.2)}))).text
    section = text.split("What to serve")[1].split("By position")[0]
    assert "Serve with 1 draft a round" in section
    assert "break-even tau" in section
    assert "not shown" in text
