"""A run that is stopped, started twice, or whose directory goes away: one message, and the run goes on afterwards."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import SoftFileLease, Timeout
from rich.console import Console

from launching import environment, head, metrics, outcome, responses
from mtp_train.answers.generate import RegeneratedStore
from mtp_train.checkpoints.writing import LOCK_FILE
from mtp_train.cli.main import main
from mtp_train.errors import OutputExistsError, StoppedError
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import pipeline, run_directory
from mtp_train.runs import run as run_module
from mtp_train.runs.run_directory import RunDirectory
from mtp_train.train.stopping import Stopped, noted_signal, stopped_by_signals
from runs import copy_run, run_quietly, tree

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Let SIGINT through: a shell makes its background jobs ignore it, and what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# The stage, what the signal interrupts, and what of a finished run the stopped one does not have yet.
STAGES = {
    "check": (run_module, "gather_inputs", ()),
    "data": (RegeneratedStore, "append", None),
    "evaluate": (pipeline, "evaluate_run", ("export", "report.json")),
    "export": (pipeline, "write_card", ("export",)),
}


@pytest.mark.parametrize(
    ("stage", "number"),
    list(zip(STAGES, [signal.SIGINT, signal.SIGTERM] * 2, strict=True)),
)
def test_a_signal_ends_any_stage_with_two_lines_and_the_run_goes_on(
    stage: str,
    number: signal.Signals,
    recipe: Path,
    run_dir: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, name, without = STAGES[stage]
    if without is not None:
        copy_run(run_dir, tmp_path / "run", *without)
    stock, calls = getattr(owner, name), iter(range(9))

    def told_the_last_time(*arguments: Any, **settings: Any) -> Any:
        # In regeneration not before the second batch, so that something is saved.
        if next(calls) == (stage == "data"):
            os.kill(os.getpid(), number)
        return stock(*arguments, **settings)

    command = ["run", str(recipe), f"run_dir={tmp_path / 'run'}"]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, told_the_last_time)
        capfd.readouterr()
        assert main(command) == 128 + number
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines[-2:] == [
        f"mtp-train: {tmp_path / 'run'}: stopped by {number.name} in the stage {stage!r}.",
        "Start the same command again: it goes on from what that stage has saved.",
    ]
    assert "Traceback" not in "\n".join(lines)
    said = outcome(tmp_path / "run")
    assert (said["exit_code"], said["reason"], said["stage"]) == (128 + number, "stopped", stage)
    assert not (tmp_path / "run" / LOCK_FILE).exists()
    if stage == "data":
        assert 0 < len(responses(tmp_path / "run")) < len(responses(run_dir))
    assert main(command) == 0
    assert responses(tmp_path / "run") == responses(run_dir)
    assert [line["loss"] for line in metrics(tmp_path / "run")] == [line["loss"] for line in metrics(run_dir)]
    assert all((head(tmp_path / "run")[key] == value).all() for key, value in head(run_dir).items())
    assert {path.name for path in (tmp_path / "run").iterdir()} == {path.name for path in run_dir.iterdir()}


def test_the_second_signal_of_a_kind_ends_the_process_at_once() -> None:
    program = """
import os, signal
from mtp_train.train.stopping import Stopped, stopped_by_signals
signal.signal(signal.SIGINT, signal.default_int_handler)
with stopped_by_signals():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except Stopped:
        # A launcher's own signal after a terminal's: the clean-up goes on.
        os.kill(os.getpid(), signal.SIGTERM)
        print("saving", flush=True)
        os.kill(os.getpid(), signal.SIGINT)
        print("never printed", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "saving\n", "")


def test_handlers_are_put_back_and_a_noted_signal_raises_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stopped_by_signals(), noted_signal() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.number == signal.SIGTERM
    with pytest.raises(Stopped, match="SIGINT"), stopped_by_signals():
        os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stopped_by_signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.number is None
    finally:
        signal.signal(signal.SIGINT, before)


# One writer


HOLD = """
import sys
from pathlib import Path
from rich.console import Console
from mtp_train.runs.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).held(Console(quiet=True)):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds ``tmp_path / "run"`` until its standard input ends."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_start_is_refused_and_a_killed_one_is_taken_over(
    recipe: Path, tmp_path: Path, other_run: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = load_recipe(recipe, [f"run_dir={tmp_path / 'run'}"])
    before = tree(tmp_path)
    with pytest.raises(OutputExistsError, match=rf"run is in use by process {other_run.pid} on .*; expected one run"):
        run_quietly(again)
    assert tree(tmp_path) == before
    other_run.kill()
    other_run.wait()
    assert (tmp_path / "run" / LOCK_FILE).exists()
    with monkeypatch.context() as patched:
        patched.setattr(run_module, "gather_inputs", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(StoppedError):
            run_quietly(again)
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_a_lock_of_another_machine_is_taken_over_only_without_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "LEASE_SECONDS", 0.2)
    record = f"filelock/2\npid=7\nhost=elsewhere\nmode=lease\ntoken={'0' * 32}\nduration=0.2\nstart=1\n"
    (tmp_path / LOCK_FILE).write_text(record)
    with RunDirectory(tmp_path).held(QUIET):
        assert "host=elsewhere" not in (tmp_path / LOCK_FILE).read_text()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / LOCK_FILE).write_text(record)

    def never(lock: SoftFileLease, **_settings: Any) -> None:
        raise Timeout(lock.lock_file)

    monkeypatch.setattr(SoftFileLease, "acquire", never)
    with pytest.raises(OutputExistsError, match="in use by process 7 on elsewhere"), RunDirectory(tmp_path).held(QUIET):
        pass
    assert (tmp_path / LOCK_FILE).read_text() == record


def test_a_run_directory_that_is_removed_is_named_and_not_made_again(
    recipe: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = copy_run(run_dir, tmp_path / "run", "report.json", "export")
    stock = pipeline.evaluate_run

    def removed(*arguments: Any) -> Any:
        shutil.rmtree(gone)
        return stock(*arguments)

    monkeypatch.setattr(pipeline, "evaluate_run", removed)
    with pytest.raises(OutputExistsError, match=r"run was removed, or run\.lock in it, while this run wrote there"):
        run_quietly(load_recipe(recipe, [f"run_dir={gone}"]))
    assert RunDirectory(gone).outcome is None


# Places that cannot be written


@pytest.mark.parametrize("command", ["run", "regenerate", "demo", "evaluate"])
def test_a_place_that_cannot_be_written_is_named(
    command: str, recipe: Path, inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    target = tmp_path / "file" / "run"
    words = {
        "run": ["run", recipe, f"run_dir={target}"],
        "regenerate": ["regenerate", recipe, f"run_dir={target}"],
        "demo": ["demo", target],
        "evaluate": ["evaluate", inputs / "base", "--out", target],
    }[command]
    capfd.readouterr()
    assert main([str(word) for word in words]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert str(target) in said
    assert re.search(r"Not a directory|cannot write there|lies below the file", said)
    assert (tmp_path / "file").read_text() == "mine"
