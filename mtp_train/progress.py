"""Show how far a command is: bars on a terminal, and a line from time to time in a log."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINE_SECONDS = 30.0
"""Time between two lines of a task in a log."""
LARGE_BYTES = 1 << 30
"""A model of so many bytes takes long enough to load for a line in a log."""


def is_main_process() -> bool:
    """Return whether this process prints for all processes of a launch, by the launcher's variable.

    The variable is valid before accelerate is set up.
    """
    return os.environ.get("RANK", "0") == "0"


class LoggedProgress(Progress):
    """Progress in a log: a line for a task that has run for another 30 s, in place of bars that overwrite themselves.

    Args:
        console: Where the lines are printed; on stderr if the console prints on stdout, which is for results.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        # Disabled: rich draws nothing, and keeps count all the same. With auto_refresh, track() would count in a thread
        # that ends at once where nothing is drawn.
        super().__init__(console=console, disable=True, auto_refresh=False, get_time=clock)
        self._lines = Console(stderr=True) if console.file is sys.stdout else console
        self._printed: dict[TaskID, float] = {}

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._print_if_due(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print_if_due(task_id)

    def _print_if_due(self, task_id: TaskID) -> None:
        task = next(task for task in self.tasks if task.id == task_id)
        elapsed = task.elapsed or 0.0
        if elapsed - self._printed.get(task_id, 0.0) < LINE_SECONDS:
            return
        self._printed[task_id] = elapsed
        total = "" if task.total is None else f" of {task.total:g}"
        left = "" if task.time_remaining is None else f", {timedelta(seconds=round(task.time_remaining))} left"
        self.print_line(f"{task.description}: {task.completed:g}{total}{left}")

    def print_line(self, text: str) -> None:
        self._lines.print(text, highlight=False, markup=False, soft_wrap=True)


def progress_on(console: Console, *, is_main: bool = True) -> Progress:
    """Return progress bars on a terminal, and lines in a log; neither on processes other than the main one."""
    # Bars on a quiet console would swallow what other code prints.
    is_shown = is_main and not console.quiet
    if is_shown and not console.is_terminal:
        return LoggedProgress(console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not is_shown, transient=True)


@contextlib.contextmanager
def shown_loading(progress: Progress, name: str, num_bytes: int) -> Iterator[None]:
    """Show within the block that a model is loaded: a bar on a terminal, and in a log a line for a large one."""
    description = f"loading {name}, {num_bytes / 1e9:.1f} GB"
    if isinstance(progress, LoggedProgress) and num_bytes >= LARGE_BYTES:
        progress.print_line(description)
    task = progress.add_task(description, total=None)
    try:
        yield
    finally:
        progress.remove_task(task)
