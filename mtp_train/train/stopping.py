"""Stop at SIGTERM, which schedulers and launchers send before they kill a process, and at SIGINT (Ctrl-C).

The first signal stops the work where it is, by :class:`Stopped`, or at the end of the training step
(:func:`noted_signal`). A second one of the same kind ends the process at once. A launcher may send both kinds: a
terminal's Ctrl-C reaches all processes, and the launcher then sends SIGTERM to those it started.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mtp_train.errors import StoppedError


class Stopped(BaseException):
    """A signal stopped the work. Not an ``Exception``, so that no handler of errors takes it for one."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect: 143 or 130."""
        return 128 + self.number


class Signals:
    """What this process was told while its handlers are set."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_noting = False
        """Whether a signal is only noted, because the work stops by itself soon."""

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if self.number == number:
            os._exit(Stopped(number).exit_code)
        if self.number is not None:
            return
        self.number = number
        if not self.is_noting:
            raise Stopped(number)


_current: Signals | None = None


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[Signals]:
    """Raise :class:`Stopped` at the first signal within the block.

    Python sets signal handlers in the main thread only: in other threads this does nothing. A signal that the process
    ignores (SIGINT in a shell's background job) stays ignored.
    """
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield _current or Signals()
        return
    _current = Signals()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _current.handle)
        yield _current
    finally:
        _current = None
        for number, handler in before.items():
            # None: C code set the handler, and Python cannot set it again.
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def noted_signal() -> Iterator[Signals]:
    """Note the first signal within the block instead of raising, so that a step can finish and its state be saved."""
    with stopped_by_signals() as signals:
        signals.is_noting = True
        try:
            yield signals
        finally:
            signals.is_noting = False


def stopped_after(run_dir: Path, done: int, max_steps: int, signals: Signals) -> StoppedError:
    """Return the error for a training that a signal stopped; another process may have received the signal."""
    stopped = Stopped(signals.number or signal.SIGTERM)
    return StoppedError(
        f"{run_dir}: stopped by {stopped} after step {done} of {max_steps}.\n"
        "The state is saved: start the same command again to resume.",
        stopped.exit_code,
    )


def leave(exit_code: int) -> NoReturn:
    """End this process.

    A process of a group ends after its exit handlers, without the finalisation of the interpreter: a thread of gloo
    that still releases a tensor would abort it then ("terminate called without an active exception"), and its launcher
    would end with 1 although all results are written. Processes on GPUs wait for one another by gloo too.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
