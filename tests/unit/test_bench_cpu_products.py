"""The benchmark of products of few rows on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.cpu_products import ROWS, SHAPES, main, table
from mtp_train.trunk.precision import bf16_support

PAGE = Path(__file__).parents[2] / "inference" / "benchmarks" / "cpu"


def test_every_way_is_measured_where_it_exists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("benchmarks.cpu_products.SHAPES", ((24, 16),))
    main(["--bytes", "20000", "--repeats", "1", "--out", str(tmp_path)])
    *_, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert document == json.loads((tmp_path / "products.json").read_text(encoding="utf-8"))
    found = {
        (one["precision"], one["rows"]): one.keys() - {"matrix", "precision", "rows"} for one in document["results"]
    }
    always = {"linear", "packed"}
    expected = {
        ("fp32", 1): always | {"padded", "columns", "sum"},
        ("fp32", 2): always | {"padded", "columns"},
        ("fp32", 4): always,
        ("fp32", 8): always,
    }
    if bf16_support(torch.device("cpu"))[0]:
        expected |= {("bf16", rows): always | ({"padded"} if rows < 4 else set()) for rows in ROWS}
    assert found == expected


def test_the_page_has_the_figures_of_the_recorded_run() -> None:
    page = (PAGE / "README.md").read_text(encoding="utf-8")
    results = json.loads((PAGE / "products.json").read_text(encoding="utf-8"))["results"]
    assert len(results) == 2 * len(SHAPES) * len(ROWS)
    assert table(results) in page
    assert table(results[1:]) not in page
