"""report.html: self-contained, escaped, clear about which arms compare, and without empty sections."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtp_train.acceptance.gate import GateVerdict
from mtp_train.evaluation.results import Report
from mtp_train.report.figures import FigureFile
from mtp_train.report.write import render_page
from rendering import HOSTILE, Reader
from report_samples import EMPTY, SAMPLE
from study_samples import BARE, STUDY

FIGURES = [FigureFile(stem, f"Caption of {stem}.", b"\x89PNG fake") for stem in ("tau", "depth")]


def page_of(report: Report, **provenance: object) -> str:
    return render_page(report, FIGURES if report.cells else [], provenance, {})


def section(page: str, title: str) -> str:
    """Return the text between a heading and the next."""
    return Reader(page.split(f">{title}</h2>")[1].split("<h2")[0]).text


PAGE = page_of(STUDY, versions={"torch": "2.13.0"})


@pytest.mark.parametrize("report", [SAMPLE, EMPTY, STUDY, BARE], ids=["run", "empty", "study", "bare"])
def test_page_is_well_formed_and_asks_nothing_of_the_network(report: Report) -> None:
    page = page_of(report, argv=["mtp-train", "run"])
    reader = Reader(page)
    assert reader.open == []
    assert not re.search(r"https?:|//|<script|<link|<iframe|@import|url\(", page)
    sources = [attrs["src"] or "" for _, attrs in reader.tags if "src" in attrs]
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    links = [attrs["href"] for tag, attrs in reader.tags if tag == "a"]
    assert links == [f"#{attrs['id']}" for _, attrs in reader.tags if "id" in attrs]


def test_sections_without_content_are_left_out() -> None:
    found = {
        name: re.findall(r"<h2[^>]*>(.*?)</h2>", page_of(report)) for name, report in (("run", SAMPLE), ("", EMPTY))
    }
    assert found[""] == ["Is it lossless?", "How to read this"]
    assert "Differences" not in found["run"]
    study = re.findall(r"<h2[^>]*>(.*?)</h2>", PAGE)
    for title in ("Differences", "By task", "By temperature", "By depth", "By context"):
        assert title in study
    assert "The gate" not in study


def test_hostile_names_are_shown_as_text() -> None:
    gate = GateVerdict(outcome="refused", baseline=HOSTILE, delta_tau_ci95=None, reason=HOSTILE)
    arm = "distilled+retrained"
    hostile = replace(
        STUDY,
        title=HOSTILE,
        arms={HOSTILE: replace(STUDY.arms[arm], trunk=HOSTILE, head=HOSTILE)},
        gate=gate,
        settings={HOSTILE: HOSTILE},
        cells=tuple(replace(c, arm=HOSTILE, task=HOSTILE) for c in STUDY.cells if c.arm == arm and c.task == "all"),
        comparisons=tuple(replace(c, first=HOSTILE, task=HOSTILE) for c in STUDY.comparisons),
        findings=tuple(replace(c, statement=HOSTILE + "!", evidence=HOSTILE) for c in STUDY.findings),
        endpoint={HOSTILE: [HOSTILE]},
        samples=(replace(SAMPLE.samples[0], pieces=((HOSTILE, True),)),),
    )
    reader = Reader(page_of(hostile, origin=HOSTILE))
    known = {tag for page in (PAGE, page_of(SAMPLE)) for tag, _ in Reader(page).tags}
    assert {tag for tag, _ in reader.tags} <= known
    assert not any("onerror" in attrs for _, attrs in reader.tags)
    assert reader.open == []
    assert reader.text.count(HOSTILE) > 12


def test_vanilla_and_recorded_arms_stand_apart() -> None:
    page = page_of(SAMPLE)
    alike = section(page, "Same trunk, same prompts")
    apart = section(page, "Another trunk, shown apart")
    assert "vanilla" not in alike
    assert "1.21 for vanilla, against 0.38" in apart
    assert "models/base\nhead: models/base" in apart
    assert "ceiling" in section(page, "Recorded, not measured here")


def test_page_of_a_run_says_verdict_gate_settings_and_provenance() -> None:
    page = page_of(SAMPLE, versions={"torch": "2.13.0"})
    text = Reader(page).text
    for expected in (
        "The retrained head beats the graft",
        "48 of 48 outputs equal",
        "device.threads",
        "versions.torch",
    ):
        assert expected in text
    assert "[+2.04, +2.18]" in section(page, "The gate")
    assert "it detects a true gain in tau of 0.11 (greedy)" in section(page, "The gate")
    assert "temperature 0.6, top-p 0.95, argmax drafts" in section(page, "By temperature")
    assert "<span>def add(a, b):</span><mark>" not in page
    assert "<mark>    return a</mark> + b\n</pre>" in page


def test_a_wide_table_is_a_list_on_a_narrow_screen_where_every_figure_has_its_heading() -> None:
    def tables(title: str) -> list[list[str]]:
        part = PAGE.split(f">{title}</h2>")[1].split("<h2")[0]
        return [one.split() for one in re.findall(r'<table class="([^"]*)"', part)]

    assert tables("By depth") == tables("Differences") == [["grid", "stack"]]
    assert tables("By position in the draft") == [["grid"]], "the control: as wide as a telephone"
    depth = PAGE.split(">By depth</h2>")[1].split("<h2")[0]
    headings = re.findall(r"<th[^>]*>([^<]+)</th>", depth.split("</thead>")[0])[1:]
    first = depth.split('<th scope="row">')[1].split("</tr>")[0]
    assert re.findall(r'data-label="([^"]*)"', first) == headings
    narrow = PAGE.split("max-width: 640px")[-1]
    assert ".stack td::before { content: attr(data-label)" in narrow
    assert ".stack thead { display: none; }" in narrow


def test_command_in_the_reason_can_be_copied() -> None:
    command = "mtp-train graft one --from two --out three"
    gate = GateVerdict(outcome="refused", baseline="graft", delta_tau_ci95=None, reason=f"no gain. Use: {command}")
    assert page_of(replace(SAMPLE, gate=gate)).count(f"No gain. Use: {command}</") == 1


def test_page_of_a_run_ends_with_recorded_arms_and_has_the_commands_that_serve() -> None:
    page = render_page(SAMPLE, [], {}, {"vllm": "vllm serve runs/one/export --speculative-config '{}'"})
    assert "vllm serve runs/one/export --speculative-config '{}'" in section(page, "What to serve")
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    assert titles.index("Recorded, not measured here") > titles.index("The gate") > titles.index("What to serve")


def test_samples_show_the_same_text_before_and_after_training() -> None:
    (sample,) = SAMPLE.samples
    page = page_of(replace(SAMPLE, samples=(replace(sample, before=(("\n", False), ("    return a + b\n", False))),)))
    before, after = re.findall(r'<pre class="sample">(.*?)</pre>', page, re.DOTALL)
    assert (before.count("<mark>"), after.count("<mark>")) == (0, 1)
    assert (before.startswith("<b>graft</b>"), after.startswith("<b>retrained</b>")) == (True, True)
    assert Reader(before).text.split("graft")[1] == Reader(after).text.split("retrained")[1]


def test_tables_of_a_study_are_slices_at_the_headline() -> None:
    assert "18 of 24" in section(PAGE, "Differences")
    assert "tau differs, head does not" in section(PAGE, "Differences")
    assert "2.86 [2.71, 3.00]" in section(PAGE, "By task")
    assert "temperature 0.6, sampled drafts" in section(PAGE, "By temperature")
    assert re.findall(r"\d drafts?\b", section(PAGE, "By depth")) == ["1 draft", "2 drafts", "3 drafts", "5 drafts"]
    assert "2,048" in section(PAGE, "By context")
    assert all(word in section(PAGE, "By context") for word in ("overlap", "entropy"))
    assert "All 756 cells are in acceptance.csv" in PAGE
