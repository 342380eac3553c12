"""Signals stop work, a second one of a kind at once; and a process of a group ends without being finalised."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from launching import environment
from mtp_train.train.stopping import Stopped, noted_signal, stopped_by_signals

LEAVES = """
import atexit, os, sys, torch
from mtp_train.train.stopping import leave

class Finalised:
    def __del__(self, write=os.write):
        write(2, b"finalised")

kept = Finalised()
atexit.register(print, "handlers", end=" ")
if sys.argv[1] == "group":
    # gloo's threads would abort it.
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
print("done", end=" ")
leave(3)
"""
STOPPED_TWICE = """
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


@pytest.mark.parametrize(
    ("program", "word", "expected"),
    [
        pytest.param(LEAVES, "group", (3, "done handlers ", ""), id="not finalised in a group"),
        pytest.param(LEAVES, "alone", (3, "done handlers ", "finalised"), id="finalised alone"),
        pytest.param(STOPPED_TWICE, "", (130, "saving\n", ""), id="at the second signal of a kind"),
    ],
)
def test_a_process_ends(program: str, word: str, expected: tuple[int, str, str]) -> None:
    command = [sys.executable, "-c", program, word]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == expected


@pytest.mark.usefixtures("heard")
def test_handlers_are_put_back_and_a_noted_signal_raises_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stopped_by_signals(), noted_signal() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.number == signal.SIGTERM
    with pytest.raises(Stopped, match="SIGINT"), stopped_by_signals():
        os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.usefixtures("heard")
def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stopped_by_signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
    assert signals.number is None
