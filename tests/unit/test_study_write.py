"""Files of a study: complete, written atomically, and an earlier study is never damaged."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from mtp_train.evaluation.cells import StudyReport, load_study
from mtp_train.report import study_write
from mtp_train.report.figures import FigureFile
from mtp_train.report.study_write import write_study
from study_samples import BARE, STUDY

PROVENANCE = {"versions": {"torch": "2.13.0"}}


@pytest.fixture(autouse=True)
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no figures, since they have their own tests."""

    def draw(report: StudyReport) -> list[FigureFile]:
        stems = ("tau", *(f"tasks_{number}" for number in range(1, len(report.arms))))
        return [FigureFile(stem, "A figure.", report.title.encode()) for stem in stems if report.cells]

    monkeypatch.setattr(study_write, "render_study_figures", draw)


def contents(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as handle:
        return list(csv.DictReader(handle))


def test_study_writes_its_files_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "studies" / "one"
    write_study(STUDY, out, PROVENANCE)
    figures = [f"figures/{stem}.png" for stem in ("tasks_1", "tasks_2", "tasks_3", "tau")]
    files = contents(out)
    assert sorted(files) == ["acceptance.csv", "comparisons.csv", *figures, "report.html", "report.json"]
    assert load_study(out / "report.json") == STUDY
    assert b"2.13.0" in files["report.html"]


def test_acceptance_csv_has_one_row_a_cell(tmp_path: Path) -> None:
    write_study(STUDY, tmp_path, {})
    rows = rows_of(tmp_path / "acceptance.csv")
    assert len(rows) == len(STUDY.cells)
    assert list(rows[0])[:7] == ["arm", "task", "temperature", "context_tokens", "depth", "rule", "trunk"]
    keys = ("distilled+graft", "math", "0.6", "512", "2", "argmax")
    (row,) = [row for row in rows if tuple(row.values())[:6] == keys]
    cell = next(
        c
        for c in STUDY.cells
        if (c.arm, c.task, c.temperature, c.context_tokens, c.depth, c.rule)
        == ("distilled+graft", "math", 0.6, 512, 2, "argmax")
    )
    assert cell.marginal is not None
    assert cell.accepted_histogram is not None
    assert row["marginal_2"] == str(cell.marginal[1])
    assert cell.marginal_ci95 is not None
    assert row["marginal_2_ci95_high"] == str((cell.marginal_ci95[1] or (0, 0))[1])
    assert row["marginal_3"] == row["marginal_3_ci95_low"] == row["accepted_histogram_3"] == ""
    assert row["accepted_histogram_0"] == str(cell.accepted_histogram[0])
    assert row["tau_ci95_low"] == str(cell.tau_ci95[0] if cell.tau_ci95 else "")
    plain = rows[0]
    assert plain["rule"] == "none"
    assert plain["context_tokens"] == plain["marginal_1"] == plain["tau_ci95_low"] == plain["break_even_tau"] == ""


def test_comparisons_csv_has_one_row_a_comparison(tmp_path: Path) -> None:
    write_study(STUDY, tmp_path, {})
    rows = rows_of(tmp_path / "comparisons.csv")
    assert len(rows) == len(STUDY.comparisons)
    assert rows[0]["delta_tau"] == str(STUDY.comparisons[0].delta_tau)
    assert rows[0]["delta_overlap_at_equal_entropy_ci95_high"] == "0.24"


def test_figures_of_an_earlier_study_are_removed(tmp_path: Path) -> None:
    write_study(STUDY, tmp_path, {})
    (tmp_path / "figures" / "mine.png").write_bytes(b"kept")
    (tmp_path / "figures" / "tasks_a.png").write_bytes(b"kept")
    write_study(replace(STUDY, arms=dict(list(STUDY.arms.items())[:2])), tmp_path, {})
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        *("mine.png", "tasks_1.png", "tasks_a.png", "tau.png")
    ]


def test_bare_study_is_headers_and_a_page(tmp_path: Path) -> None:
    write_study(BARE, tmp_path, {})
    assert sorted(contents(tmp_path)) == ["acceptance.csv", "comparisons.csv", "report.html", "report.json"]
    assert rows_of(tmp_path / "acceptance.csv") == []
    assert (tmp_path / "comparisons.csv").read_text().startswith("first,second,task,")


def test_failing_page_leaves_the_previous_study_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_study(STUDY, tmp_path, {})
    before = contents(tmp_path)

    def fail(*arguments: object) -> str:
        raise RuntimeError("no template")

    monkeypatch.setattr(study_write, "render_study_page", fail)
    with pytest.raises(RuntimeError, match="no template"):
        write_study(BARE, tmp_path, {})
    assert contents(tmp_path) == before


def test_failing_disk_leaves_the_previous_study_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_study(STUDY, tmp_path, {})
    before = contents(tmp_path)
    written = []

    def fill_up(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == 4:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fill_up)
    with pytest.raises(OSError, match="No space left"):
        write_study(replace(STUDY, title="another"), tmp_path, PROVENANCE)
    assert contents(tmp_path) == before
