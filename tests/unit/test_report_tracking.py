"""Logging a study to Weights & Biases, with a fake package and without network."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_train.report.write import log_report
from study_samples import BARE, STUDY


class Recorder:
    """Fake of the package and of its run."""

    def __init__(self, fail: bool = False) -> None:
        self.settings: dict[str, Any] = {}
        self.logged: dict[str, Any] = {}
        self.finished = 0
        self.fail = fail

    def init(self, **settings: Any) -> Recorder:
        self.settings = settings
        return self

    def log(self, values: dict[str, Any]) -> None:
        if self.fail:
            raise OSError("disk full")
        self.logged |= values

    def finish(self) -> None:
        self.finished += 1

    @staticmethod
    def Table(columns: list[str], data: list[list[Any]]) -> SimpleNamespace:
        return SimpleNamespace(columns=columns, data=data)

    @staticmethod
    def Image(path: str) -> str:
        return path


def test_tables_figures_and_numbers_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "study"
    (out / "figures").mkdir(parents=True)
    (out / "figures" / "tau.png").write_bytes(b"png")
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    log_report(STUDY, out, "tests", "offline")
    given = recorder.settings
    assert (given["project"], given["name"], given["dir"], given["mode"]) == ("tests", "study", out, "offline")
    assert given["config"] == dict(STUDY.settings)
    cells = recorder.logged["tables/acceptance"]
    assert len(cells.data) == len(STUDY.cells)
    assert {len(row) for row in cells.data} == {len(cells.columns)}
    assert cells.data[0][cells.columns.index("tau")] == STUDY.cells[0].tau
    assert len(recorder.logged["tables/comparisons"].data) == len(STUDY.comparisons)
    assert recorder.logged["figures/tau"] == str(out / "figures" / "tau.png")
    assert recorder.logged["arms/distilled+graft/tau"] == STUDY.arms["distilled+graft"].tau
    assert "arms/distilled/acceptance_rate" not in recorder.logged
    assert recorder.finished == 1


def test_run_is_ended_where_logging_fails_and_logged_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(fail=True)
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    with pytest.raises(OSError, match="disk full"):
        log_report(BARE, tmp_path, "tests", "online")
    assert recorder.finished == 1
    # Again, as a rerun does.
    recorder.fail = False
    for _ in range(2):
        log_report(BARE, tmp_path, "tests", "online")
    assert (recorder.finished, "tables/acceptance" in recorder.logged) == (2, True)


def test_off_does_not_import_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    log_report(STUDY, tmp_path, "tests", "off")
    assert list(tmp_path.iterdir()) == []
