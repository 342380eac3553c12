"""Being told to stop: what schedulers and launchers send some seconds before they kill."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopSignal:
    """Whether SIGTERM came."""

    received = False


@contextlib.contextmanager
def noted_sigterm() -> Iterator[StopSignal]:
    """Take note of SIGTERM within the block instead of dying of it, so that a step can end and its state be saved."""
    noted = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set handlers: whoever runs us in another has his own ways.
        yield noted
        return

    def note(_number: int, _frame: FrameType | None) -> None:
        noted.received = True

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, before)
