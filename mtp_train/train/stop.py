"""Catch SIGTERM, which schedulers and launchers send some seconds before they kill a process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopSignal:
    """Whether the process received SIGTERM."""

    received = False


@contextlib.contextmanager
def noted_sigterm() -> Iterator[StopSignal]:
    """Record SIGTERM within the block instead of ending, so that the step can finish and its state be saved."""
    noted = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        # Python allows signal handlers in the main thread only. In other threads the caller has to stop the run.
        yield noted
        return

    def note(_number: int, _frame: FrameType | None) -> None:
        noted.received = True

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, before)
