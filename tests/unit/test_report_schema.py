"""report.json: the fields users rely on, nulls, and reading it back."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from mtp_train.errors import DataError
from mtp_train.evaluation.results import Lossless, Report, load_report
from report_samples import EMPTY, SAMPLE, at_depths
from study_samples import BARE, STUDY

DEEP = at_depths(SAMPLE, {1: (1.1, 1.3), 2: (1.2, 1.6), 3: (0.9, 1.9)})


def stored(report: Report) -> Any:
    return json.loads(json.dumps(report.to_json(), allow_nan=False))


def read(raw: Any, directory: Path) -> Report:
    (directory / "report.json").write_text(json.dumps(raw))
    return load_report(directory / "report.json")


@pytest.mark.parametrize("report", [SAMPLE, DEEP, EMPTY, STUDY, BARE], ids=["run", "depths", "empty", "study", "bare"])
def test_report_reads_back_as_it_was_written(report: Report, tmp_path: Path) -> None:
    assert read(stored(report), tmp_path) == report


def test_report_has_the_promised_fields() -> None:
    raw = stored(SAMPLE)
    assert raw.keys() >= {"arms", "lossless", "gate", "settings", "cells"}
    arm = {
        *("trunk", "head", "tau", "tau_ci95", "acceptance_rate", "marginal", "conditional", "dense", "overlap"),
        *("target_entropy", "repeated_8gram_share", "tokens_per_second", "speedup", "rounds", "prompts", "groups"),
        *("measured_here", "speedup_ci95", "break_even_tau"),
    }
    assert raw["arms"]["retrained"].keys() >= arm
    setting = {"arm", "task", "temperature", "context_tokens", "top_p", "top_k", "depth", "rule"}
    assert all(cell.keys() >= arm | setting for cell in raw["cells"])
    assert raw["lossless"].keys() == {field.name for field in fields(Lossless)}
    assert raw["gate"].keys() >= {"passed", "baseline", "delta_tau_ci95", "reason"}
    assert raw["arms"]["none"]["marginal"] is raw["arms"]["none"]["head"] is stored(EMPTY)["gate"] is None


def test_numbers_that_are_not_finite_become_null() -> None:
    nan = float("nan")
    odd = replace(SAMPLE.arms["none"], speedup=float("inf"), overlap=(0.5, nan), target_entropy=nan)
    raw = stored(replace(EMPTY, arms={"odd": odd}, settings={"deep": [{"value": nan}]}))["arms"]["odd"]
    assert (raw["speedup"], raw["target_entropy"], raw["overlap"]) == (None, None, [0.5, None])


def test_fields_of_another_version_are_refused_by_their_place(tmp_path: Path) -> None:
    raw = stored(STUDY)
    raw["cells"][2]["tua"] = raw["cells"][2].pop("depth")
    with pytest.raises(DataError, match=r"report\.json: cells\.2\.depth: .* cells\.2\.tua: .*; expected the fields of"):
        read(raw, tmp_path)
    with pytest.raises(DataError, match=r"arms: Input should be an object"):
        read({**stored(SAMPLE), "arms": [1]}, tmp_path)


@pytest.mark.parametrize("content", [None, "{", '"text"'], ids=["missing", "cut off", "not an object"])
def test_unreadable_file_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=r"report\.json: .*; expected"):
        load_report(path)
