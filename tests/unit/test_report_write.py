"""Files of a report: complete, written atomically, and an earlier report is never damaged."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import Report, load_report
from mtp_train.report import write
from mtp_train.report.figures import FigureFile
from mtp_train.report.write import write_report
from report_samples import EMPTY
from study_samples import STUDY, make_cell

PROVENANCE = {"versions": {"torch": "2.13.0"}}


@pytest.fixture(autouse=True)
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no figures, since they have their own tests."""

    def draw(report: Report, metrics: object) -> list[FigureFile]:
        return [FigureFile("tau", "A figure.", str(report.title).encode())] if report.cells else []

    monkeypatch.setattr(write, "render_figures", draw)


def contents(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as handle:
        return list(csv.DictReader(handle))


def test_report_writes_its_files_and_nothing_else(tmp_path: Path, new_run: Path) -> None:
    write_report(STUDY, tmp_path / "studies" / "one", PROVENANCE)
    files = contents(tmp_path / "studies" / "one")
    assert sorted(files) == ["acceptance.csv", "comparisons.csv", "figures/tau.png", "report.html", "report.json"]
    assert load_report(tmp_path / "studies" / "one" / "report.json") == STUDY
    assert b"2.13.0" in files["report.html"]
    write_report(EMPTY, new_run, {})
    assert sorted(contents(new_run)) == ["acceptance.csv", "report.html", "report.json"]
    assert rows_of(new_run / "acceptance.csv") == []


def test_acceptance_csv_has_one_row_a_cell(tmp_path: Path) -> None:
    write_report(STUDY, tmp_path, {})
    rows = rows_of(tmp_path / "acceptance.csv")
    assert len(rows) == len(STUDY.cells)
    keys = ("distilled+graft", "math", "0.6", "1.0", "0", "512", "2", "argmax")
    (row,) = [row for row in rows if tuple(row.values())[:8] == keys]
    cell = make_cell("distilled+graft", "math", Setting(0.6, 512, 2, "argmax"))
    assert cell.marginal is not None
    assert cell.marginal_ci95 is not None
    assert row["marginal_2"] == str(cell.marginal[1])
    assert row["marginal_2_ci95_high"] == str((cell.marginal_ci95[1] or (0, 0))[1])
    assert row["marginal_3"] == row["marginal_3_ci95_low"] == ""
    plain = rows[0]
    assert plain["rule"] == "none"
    assert plain["context_tokens"] == plain["marginal_1"] == plain["tau_ci95_low"] == plain["break_even_tau"] == ""


def test_failing_page_leaves_the_previous_report_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(STUDY, tmp_path, {})
    before = contents(tmp_path)

    def fail(*arguments: object) -> str:
        raise RuntimeError("no template")

    monkeypatch.setattr(write, "render_page", fail)
    with pytest.raises(RuntimeError, match="no template"):
        write_report(EMPTY, tmp_path, {})
    assert contents(tmp_path) == before
