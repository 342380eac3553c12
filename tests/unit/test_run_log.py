from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mtp_train.checkpoints.locations import RECIPE_FILE
from mtp_train.errors import RecipeError
from mtp_train.runs.display import LOG_FILE, logged
from mtp_train.train.log import METRICS_FILE, RunLog, read_metrics


def open_log(run_dir: Path, resume_step: int = 0, wandb: Any = "off") -> RunLog:
    return RunLog(run_dir, wandb=wandb, project="tests", config={"seed": 1}, resume_step=resume_step)


def steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run_dir)]


def fill(run_dir: Path, last: int) -> None:
    log = open_log(run_dir)
    for step in range(1, last + 1):
        log.log(step, {"loss": 1.0 / step})
    log.close()


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.log(1, {"loss": 0.5, "wrapper": "HeadTraining", "loss_depth_2": None})
    log.log(2, {"loss": 0.25})
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 0.5, "wrapper": "HeadTraining", "loss_depth_2": None},
        {"step": 2, "loss": 0.25},
    ]


def test_resuming_drops_the_steps_that_will_be_done_again(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    log = open_log(tmp_path, resume_step=3)
    assert steps(tmp_path) == [1, 2, 3]
    log.log(4, {"loss": 9.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)[-2:]] == [(3, 1 / 3), (4, 9.0)]


def test_wandb_gets_the_numbers_but_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    run = SimpleNamespace(
        log=lambda numbers, step: calls.append(("log", (numbers, step))), finish=lambda: calls.append(("finish", None))
    )

    def init(**arguments: Any) -> SimpleNamespace:
        calls.append(("init", (arguments["mode"], arguments["project"], arguments["config"])))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    log = open_log(tmp_path, wandb="online")
    log.log(3, {"loss": 0.5, "device": "cpu"})
    log.close()
    expected = [("init", ("online", "tests", {"seed": 1})), ("log", ({"loss": 0.5}, 3)), ("finish", None)]
    assert calls == expected


def test_what_a_run_prints_is_in_its_log_once_it_owns_the_directory(tmp_path: Path) -> None:
    console = Console(quiet=True)

    def refused() -> None:
        with logged(tmp_path, console):
            warnings.simplefilter("always")
            console.print("1 process")
            assert not (tmp_path / LOG_FILE).exists()
            (tmp_path / RECIPE_FILE).touch()
            warnings.warn("odd", stacklevel=1)
            logging.getLogger("mtp_train.trunk").warning("slow")
            raise RecipeError("seed: odd.")

    with pytest.raises(RecipeError):
        refused()
    console.print("after")
    _, started, *lines = (tmp_path / LOG_FILE).read_text().splitlines()
    assert started[:2] == "20"
    assert lines == ["1 process", "UserWarning: odd", "slow", "RecipeError: seed: odd."]


def test_off_does_not_import_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    fill(tmp_path, 1)
    assert steps(tmp_path) == [1]


def test_offline_leaves_a_wandb_run_to_upload_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")  # the recipe overrides the environment
    log = open_log(tmp_path, wandb="offline")
    log.log(1, {"loss": 0.5})
    log.close()
    (directory,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = directory.glob("*.wandb")
    assert file.stat().st_size > 0
    assert steps(tmp_path) == [1]
