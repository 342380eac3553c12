"""A study's report.json: read back as it was written, and nothing else taken for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_train.errors import DataError
from mtp_train.evaluation.cells import StudyReport, load_study
from study_samples import BARE, STUDY


def stored(report: StudyReport) -> Any:
    return json.loads(json.dumps(report.to_json(), allow_nan=False))


@pytest.mark.parametrize("report", [STUDY, BARE], ids=["full", "bare"])
def test_study_reads_back_as_it_was_written(report: StudyReport, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report.to_json()))
    assert load_study(path) == report


def test_numbers_that_are_not_finite_become_null() -> None:
    first = STUDY.cells[0]
    odd = replace(first.teacher_forced, overlap=(float("nan"), 0.5))
    cell = replace(first, speedup=float("inf"), teacher_forced=odd)
    raw = stored(replace(STUDY, cells=(cell,)))
    assert raw["cells"][0]["speedup"] is None
    assert raw["cells"][0]["overlap"] == [None, 0.5]


def test_report_of_a_run_is_no_study() -> None:
    raw = stored(STUDY)
    del raw["cells"]
    with pytest.raises(DataError, match=r"run/report\.json: not the report of a study; expected exactly the fields"):
        StudyReport.from_json(raw, "run/report.json")


def test_an_older_study_reads_without_what_came_later() -> None:
    raw = stored(STUDY)
    del raw["depths"], raw["samples"]
    assert StudyReport.from_json(raw, "old.json") == STUDY


def test_unknown_field_of_a_row_is_refused_by_its_place() -> None:
    raw = stored(STUDY)
    raw["cells"][2]["tua"] = raw["cells"][2].pop("tau")
    with pytest.raises(DataError, match=r"here: cells\.2: fields missing or unknown: tau, tua"):
        StudyReport.from_json(raw, "here")
