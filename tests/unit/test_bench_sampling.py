"""The benchmark of sampling, and its count of a GPU's launches and bytes."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.sampling import FILTERS, LOGITS, WAYS, main
from mtp_inference.bench.launches import LaunchCounter


def test_launches_and_bytes_are_those_of_operations_worked_out_by_hand() -> None:
    values, index = torch.zeros(2, 100), torch.zeros(2, 3, dtype=torch.int64)
    with LaunchCounter() as counter:
        # Read 800 bytes, write 800.
        more = values + 1.0
        # A view.
        more = more[:, :50].unsqueeze(0)
        # Read 400 bytes, and one row of 200 that is expanded; write 400.
        more = more * torch.zeros_like(values[0, :50]).expand(2, -1)
        # Read 48 bytes of the index, and 24 of the values; write 24.
        values.gather(1, index)
        # A copy, then a change in place.
        values.masked_fill(values > 0.0, 1.0)
    assert counter.counts == {"add": 1, "mul": 1, "zeros_like": 1, "gather": 1, "gt": 1, "masked_fill": 2}
    zeros_like, gt, masked_fill = 200 + 200, 800 + 200, 800 + 200 + 800
    assert counter.num_bytes == 1600 + (400 + 200 + 400) + zeros_like + (48 + 24 + 24) + gt + masked_fill


def test_the_program_ends_in_one_line_with_every_result(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "1,3", "--vocab", "2560", "--repeats", "1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = [(result["logits"], result["rows"], result["way"], result["step"]) for result in report["results"]]
    steps = ("draw", *FILTERS)
    assert found == [(kind, rows, way, step) for kind in LOGITS for rows in (1, 3) for way in WAYS for step in steps]
    results = dict(zip(found, report["results"], strict=True))
    one, three = (results["peaked", rows, "decoder", "draw"] for rows in (1, 3))
    assert one["launches"] == three["launches"] < 30
    # A draw reads the weights once: 10 KB a row.
    assert one["mb"] < 0.1
    assert report["settings"]["vocab"] == 2560


def test_sampling_takes_few_launches_and_a_draw_few_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "1", "--vocab", "51200", "--repeats", "1", "--logits", "peaked"])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    found = {(result["way"], result["step"]): result for result in results}
    launches = {step: found["decoder", step]["launches"] for step in ("draw", *FILTERS)}
    bounds = {"draw": 26, "top-k 20": 8, "top-p 0.95": 120, "both": 72}
    assert {step: launches[step] <= bound for step, bound in bounds.items()} == dict.fromkeys(bounds, True), launches
    assert found["decoder", "draw"]["mb"] < found["sort", "draw"]["mb"] / 4
