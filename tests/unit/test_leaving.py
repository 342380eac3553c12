"""A process of a group ends after its exit handlers, and is not finalised: gloo's threads would abort it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launching import environment

PROGRAM = """
import atexit, os, sys, torch
from mtp_train.train.stopping import leave

class Finalised:
    def __del__(self, write=os.write):
        write(2, b"finalised")

kept = Finalised()
atexit.register(print, "handlers", end=" ")
if sys.argv[1] == "group":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
print("done", end=" ")
leave(3)
"""


@pytest.mark.parametrize(("kind", "errors"), [("group", ""), ("alone", "finalised")])
def test_a_process_of_a_group_is_not_finalised(kind: str, errors: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, str(program), kind],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "done handlers ", errors)
