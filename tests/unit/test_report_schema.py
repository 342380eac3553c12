"""report.json: the fields users rely on, nulls, and reading it back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_train.errors import DataError
from mtp_train.evaluation.results import TeacherForced
from mtp_train.report import Lossless, RunReport, load_report
from report_samples import EMPTY, PLAIN, SAMPLE, at_depths


def stored(report: RunReport) -> Any:
    return json.loads(json.dumps(report.to_json(), allow_nan=False))


DEEP = at_depths(SAMPLE, {1: (1.1, 1.3), 2: (1.2, 1.6), 3: (0.9, 1.9)})


@pytest.mark.parametrize("report", [SAMPLE, DEEP, EMPTY], ids=["full", "depths", "empty"])
def test_report_reads_back_as_it_was_written(report: RunReport) -> None:
    assert RunReport.from_json(stored(report), "here") == report


def test_report_has_the_promised_fields() -> None:
    raw = stored(SAMPLE)
    assert set(raw) == {"arms", "lossless", "gate", "settings", "cells", "depths", "samples"}
    assert set(raw["arms"]["retrained"]) == {
        "trunk",
        "head",
        "tau",
        "tau_ci95",
        "acceptance_rate",
        "marginal",
        "conditional",
        "dense",
        "overlap",
        "target_entropy",
        "repeated_8gram_share",
        "tokens_per_second",
        "speedup",
        "rounds",
        "prompts",
        "groups",
        "measured_here",
        "speedup_ci95",
        "break_even_tau",
    }
    setting = {"arm", "temperature", "top_p", "top_k", "rule", "depth"}
    assert [set(cell) for cell in raw["cells"]] == [set(raw["arms"]["retrained"]) | setting] * 3
    assert set(raw["lossless"]) == {"checked", "identical", "near_tie_divergences", "noise"}
    assert set(raw["gate"]) == {
        *("passed", "baseline", "delta_tau_ci95", "reason", "groups", "detectable_gain", "settings")
    }
    assert [one["setting"] for one in raw["gate"]["settings"]] == [
        "greedy",
        "temperature 0.6, top-p 0.95, argmax drafts",
    ]


def test_figures_without_a_meaning_are_null() -> None:
    raw = stored(SAMPLE)["arms"]
    assert raw["none"]["marginal"] is None
    assert raw["none"]["head"] is None
    assert raw["retrained"]["conditional"] == [0.88, 0.93, None]
    assert stored(EMPTY)["gate"] is None


def test_numbers_that_are_not_finite_become_null() -> None:
    nans = TeacherForced(dense=None, overlap=(0.5, float("nan")), target_entropy=float("nan"))
    odd = replace(PLAIN, speedup=float("inf"), teacher_forced=nans)
    raw = stored(replace(EMPTY, arms={"odd": odd}, settings={"deep": [{"value": float("nan")}]}))
    assert raw["arms"]["odd"]["speedup"] is None
    assert raw["arms"]["odd"]["target_entropy"] is None
    assert raw["arms"]["odd"]["overlap"] == [0.5, None]
    assert raw["settings"] == {"deep": [{"value": None}]}


def test_unknown_and_missing_fields_are_refused() -> None:
    raw = stored(SAMPLE)
    raw["arms"]["retrained"]["tua"] = raw["arms"]["retrained"].pop("tau")
    with pytest.raises(DataError, match=r"old\.json: arms\.retrained: fields missing or unknown: tau, tua; expected"):
        RunReport.from_json(raw, "old.json")


@pytest.mark.parametrize("field", ["arms", "settings"])
def test_wrong_shape_is_refused(field: str) -> None:
    raw = stored(SAMPLE)
    raw[field] = [1]
    with pytest.raises(DataError, match=rf"old\.json: {field}: list; expected an object"):
        RunReport.from_json(raw, "old.json")


@pytest.mark.parametrize("content", [None, "{", '"text"'], ids=["missing", "cut off", "not an object"])
def test_unreadable_file_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=r"report\.json: .*; expected"):
        load_report(path)


def test_faults_are_differences_without_a_near_tie() -> None:
    assert Lossless(checked=48, identical=46, near_tie_divergences=2).faults == 0
    assert Lossless(checked=48, identical=46, near_tie_divergences=1).faults == 1
