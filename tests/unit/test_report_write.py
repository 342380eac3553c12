"""Files of a report: complete, written atomically, and an earlier report is never damaged."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from mtp_train.report import figures, load_report, write_report
from mtp_train.report.write import FlatTable, csv_text
from report_samples import EMPTY, RETRAINED, SAMPLE

FILES = ["acceptance.csv", "figures/marginal_acceptance.png", "figures/speedup.png", "figures/tau.png"]
FILES += ["report.html", "report.json"]
# Differs from SAMPLE in every file.
OTHER = replace(SAMPLE, arms={"retrained": replace(RETRAINED, tau=2.0, marginal=(0.5, 0.3, 0.2), speedup=1.5)})


def contents(run_dir: Path) -> dict[str, bytes]:
    return {path.relative_to(run_dir).as_posix(): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_report_writes_its_files_and_nothing_else(tmp_path: Path) -> None:
    write_report(SAMPLE, tmp_path / "runs" / "one", provenance={"versions": {"torch": "2.13.0"}})
    written = contents(tmp_path / "runs" / "one")
    assert sorted(written) == FILES
    assert load_report(tmp_path / "runs" / "one" / "report.json") == SAMPLE
    assert b"2.13.0" in written["report.html"]


def test_files_are_readable_by_others(tmp_path: Path) -> None:
    write_report(SAMPLE, tmp_path)
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "report.json").stat().st_mode == plain.stat().st_mode


def test_new_report_replaces_every_file(tmp_path: Path) -> None:
    write_report(SAMPLE, tmp_path)
    before = contents(tmp_path)
    write_report(OTHER, tmp_path)
    assert [name for name, content in contents(tmp_path).items() if content == before[name]] == []


def test_csv_has_one_row_an_arm_and_one_column_a_figure() -> None:
    first, served = SAMPLE.arms, [cell.arm for cell in SAMPLE.cells]
    lines = list(csv.DictReader(io.StringIO(csv_text(SAMPLE))))
    assert [line["arm"] for line in lines] == [*first, *served]
    assert [(line["temperature"], line["top_p"], line["tau"]) for line in lines[-2:]] == [
        ("0.6", "0.95", "1.3"),
        ("0.6", "0.95", "3.1"),
    ]
    rows = {line["arm"]: line for line in lines[: len(first)]}
    assert (rows["retrained"]["groups"], rows["retrained"]["temperature"]) == ("12", "0.0")
    assert rows["retrained"]["rule"] == "greedy"
    assert rows["ceiling"]["rule"] == ""
    assert list(rows) == ["none", "graft", "retrained", "vanilla", "ceiling"]
    assert list(rows["none"])[:8] == [
        *("arm", "trunk", "head", "tau", "tau_ci95_low", "tau_ci95_high", "acceptance_rate", "marginal_1")
    ]
    assert rows["retrained"]["marginal_3"] == "0.74"
    assert rows["retrained"]["tau_ci95_low"] == "3.38"
    assert rows["retrained"]["conditional_3"] == ""
    assert rows["graft"]["marginal_3"] == ""
    assert rows["none"]["marginal_1"] == rows["none"]["tau_ci95_high"] == rows["none"]["head"] == ""
    assert rows["ceiling"]["measured_here"] == "False"


def test_csv_of_no_arms_is_its_header() -> None:
    assert csv_text(EMPTY).splitlines()[0].startswith("arm,trunk,head,tau,")
    assert len(csv_text(EMPTY).splitlines()) == 1


def test_failing_figure_leaves_the_previous_report_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(SAMPLE, tmp_path)
    before = contents(tmp_path)

    def fail(drawn: object) -> bytes:
        raise RuntimeError("no font")

    monkeypatch.setattr(figures, "speedup_figure", fail)
    with pytest.raises(RuntimeError, match="no font"):
        write_report(OTHER, tmp_path)
    assert contents(tmp_path) == before


def test_failing_disk_leaves_the_previous_report_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(SAMPLE, tmp_path)
    before = contents(tmp_path)
    written = []

    def fill_up(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fill_up)
    with pytest.raises(OSError, match="No space left"):
        write_report(OTHER, tmp_path)
    assert contents(tmp_path) == before


def test_figure_that_no_longer_applies_is_removed(tmp_path: Path) -> None:
    write_report(SAMPLE, tmp_path)
    (tmp_path / "figures" / "mine.png").write_bytes(b"kept")
    write_report(replace(SAMPLE, arms={"retrained": replace(RETRAINED, speedup=None)}), tmp_path)
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert names == ["marginal_acceptance.png", "mine.png", "tau.png"]


def test_json_holds_no_nan(tmp_path: Path) -> None:
    nan = replace(RETRAINED.teacher_forced, target_entropy=float("nan"))
    write_report(replace(SAMPLE, arms={"retrained": replace(RETRAINED, teacher_forced=nan)}), tmp_path)
    raw = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert raw["arms"]["retrained"]["target_entropy"] is None


def test_no_cell_of_a_table_is_a_formula() -> None:
    table = FlatTable(["task", "gain"], [["=HYPERLINK(1)", -0.5], ["+1", None], ["@x", 2], ["-a", 1.5], ["a=b", 0]])
    assert table.csv().splitlines() == ["task,gain", "'=HYPERLINK(1),-0.5", "'+1,", "'@x,2", "'-a,1.5", "a=b,0"]
