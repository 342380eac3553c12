"""Progress in a log is a line for a task that takes long; on a terminal it is bars, and elsewhere nothing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mtp_train.progress import LINE_SECONDS, LoggedProgress, progress_on, shown_loading


class Hand:
    """A clock that is moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_for_a_task_every_thirty_seconds() -> None:
    file = io.StringIO()
    clock = Hand()
    with LoggedProgress(Console(file=file, width=200), clock) as progress:
        task = progress.add_task("answering [1]", total=100)
        for second in range(1, 71):
            clock.now = float(second)
            progress.advance(task)
        other = progress.add_task("looking", total=None)
        clock.now += LINE_SECONDS
        progress.update(other, completed=5, description="looking on")
        progress.update(task, completed=100)
    assert file.getvalue().splitlines() == [
        "answering [1]: 30 of 100, 0:01:10 left",
        "answering [1]: 60 of 100, 0:00:40 left",
        "looking on: 5",
        "answering [1]: 100 of 100, 0:00:00 left",
    ]


def test_a_loop_over_tensors_speaks_on_stderr_where_results_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Hand()
    with LoggedProgress(Console(), clock) as progress:
        for second in progress.track(range(1, 41), description="looking for NaN"):
            clock.now = float(second)
    assert capsys.readouterr() == ("", "looking for NaN: 30 of 40, 0:00:10 left\n")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_large_model_is_said_to_load(terminal: bool) -> None:
    file = io.StringIO()
    with progress_on(Console(file=file, width=200, force_terminal=terminal)) as progress:
        with shown_loading(progress, "my-27b", 54_000_000_000):
            (task,) = progress.tasks
            assert task.description == "loading my-27b, 54.0 GB"
        with shown_loading(progress, "small", 1000), pytest.raises(ZeroDivisionError):
            raise ZeroDivisionError
        assert progress.tasks == []
    assert file.getvalue() == "loading my-27b, 54.0 GB\n" or terminal


@pytest.mark.parametrize(
    ("terminal", "is_main", "quiet"), [(True, False, False), (False, False, False), (False, True, True)]
)
def test_other_processes_and_quiet_consoles_show_nothing(terminal: bool, is_main: bool, quiet: bool) -> None:
    progress = progress_on(Console(force_terminal=terminal, quiet=quiet, file=io.StringIO()), is_main=is_main)
    assert progress.disable
    assert not isinstance(progress, LoggedProgress)
    assert not progress_on(Console(force_terminal=True, file=io.StringIO())).disable, "the control"
