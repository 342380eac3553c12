"""The log of a run: ``metrics.jsonl``, and the trackers that its recipe asks for."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.utils
from rich.console import Console

from json_files import read_json
from mtp_train.checkpoints.locations import RECIPE_FILE
from mtp_train.errors import RecipeError
from mtp_train.report.write import log_report
from mtp_train.runs.display import LOG_FILE, logged
from mtp_train.train.log import METRICS_FILE, TRACKED_FILE, RunLog, Tracking, read_metrics
from report_samples import SAMPLE
from study_samples import STUDY


def steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run_dir)]


def fill(run_dir: Path, last: int, tracking: Tracking | None = None, resume_step: int = 0) -> None:
    log = RunLog(run_dir, resume_step, tracking=tracking or Tracking(), config={"seed": 1})
    for step in range(resume_step + 1, last + 1):
        log.log(step, {"loss": 1.0 / step, "device": "cpu"})
    log.close()


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0)
    log.log(1, {"loss": 0.5, "wrapper": "HeadTraining", "loss_depth_2": None})
    log.log(2, {"loss": 0.25})
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 0.5, "wrapper": "HeadTraining", "loss_depth_2": None},
        {"step": 2, "loss": 0.25},
    ]


def test_resuming_drops_the_steps_that_will_be_done_again(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    log = RunLog(tmp_path, 3)
    assert steps(tmp_path) == [1, 2, 3]
    log.log(4, {"loss": 9.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)[-2:]] == [(3, 1 / 3), (4, 9.0)]


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


# Trackers


class Recorder:
    """Fake of the package wandb and of its runs."""

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, Any], int | None]] = []
        self.finished = 0

    def init(self, **settings: Any) -> Recorder:
        self.opened.append(settings)
        return self

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished += 1

    @staticmethod
    def Html(text: str) -> str:
        return text


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", found)
    return found


ONLINE = Tracking("online", project="tests")


def test_a_resumed_run_and_its_report_go_on_in_the_same_wandb_run(
    tmp_path: Path, new_run: Path, recorder: Recorder
) -> None:
    run_dir = new_run
    fill(run_dir, 2, ONLINE)
    fill(run_dir, 3, ONLINE, resume_step=2)
    log_report(SAMPLE, run_dir, ONLINE, {"seed": 1})
    names = ("project", "name", "dir", "mode", "config", "resume")
    assert [[one[name] for name in names] for one in recorder.opened] == [
        ["tests", "run", run_dir, "online", {"seed": 1}, "allow"]
    ] * 3
    assert {one["id"] for one in recorder.opened} == {read_json(run_dir / TRACKED_FILE)["wandb"]}
    assert recorder.finished == 3
    # Numbers, and no text.
    assert recorder.logged[:3] == [({"loss": 1.0 / step}, step) for step in (1, 2, 3)]
    (report, step) = recorder.logged[3]
    assert step is None
    assert (report["arms/retrained/tau"], report["gate/passed"], report["gate/delta_tau_ci95_low"]) == (3.44, 1.0, 2.04)
    assert "arms/none/acceptance_rate" not in report
    fill(tmp_path / "other", 1, ONLINE)
    assert recorder.opened[-1]["id"] != recorder.opened[0]["id"]


def test_wandb_gets_the_page_of_a_report(tmp_path: Path, recorder: Recorder) -> None:
    (tmp_path / "report.html").write_text("<p>", encoding="utf-8")
    log_report(STUDY, tmp_path, replace(ONLINE, wandb="offline"))
    assert (recorder.opened[0]["mode"], recorder.opened[0]["config"]) == ("offline", dict(STUDY.settings))
    assert recorder.logged[0][0]["report"] == "<p>"


def test_other_trackers_get_the_numbers(new_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, trackio, calls = Recorder(), Recorder(), list[Any]()
    writer.add_scalar = lambda *given, **more: calls.append((*given, more["global_step"]))  # type: ignore[attr-defined]
    writer.flush = writer.close = lambda: None  # type: ignore[attr-defined]
    made: list[Any] = []

    def opened(*given: Any, **more: Any) -> Recorder:
        made.append((given, more))
        return writer

    monkeypatch.setattr(torch.utils, "tensorboard", SimpleNamespace(SummaryWriter=opened), raising=False)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    both = Tracking(tensorboard=True, trackio=True, project="tests")
    fill(new_run, 3, both, resume_step=2)
    # TensorBoard drops the steps that are done again.
    assert made == [((str(new_run / "tensorboard"),), {"purge_step": 3})]
    assert calls == [("loss", 1 / 3, 3)]
    assert (trackio.opened[0]["project"], trackio.opened[0]["name"]) == ("tests", "run")
    assert trackio.logged == [({"loss": 1 / 3}, 3)]
    log_report(SAMPLE, new_run, both)
    assert (trackio.logged[1][0]["arms/retrained/tau"], made[1][1]) == (3.44, {})


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    Tracking().require()
    with pytest.raises(RecipeError, match=r"track.wandb: the package is not installed; .* 'pip install wandb'"):
        Tracking("offline").require()
    with pytest.raises(RecipeError, match=r"track.tensorboard: (.|\n)*track.trackio: "):
        Tracking(tensorboard=True, trackio=True).require()


def test_offline_leaves_a_wandb_run_to_upload_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")  # the recipe overrides the environment
    fill(tmp_path, 1, Tracking("offline"))
    (directory,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = directory.glob("*.wandb")
    assert file.stat().st_size > 0
    assert directory.name.endswith(read_json(tmp_path / TRACKED_FILE)["wandb"])
