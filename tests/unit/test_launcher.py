"""What accelerate's launcher was asked for, read from its own command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from accelerate.commands.config import config_args
from accelerate.utils import DistributedType

from launching import MACHINES, environment
from mtp_train.errors import TrainingError
from mtp_train.train.launch import require_as_asked
from mtp_train.train.launcher import NOTHING, Request, launch_arguments, launcher_request, read_request

FSDP, DEEPSPEED = DistributedType.FSDP, DistributedType.DEEPSPEED
RECIPE = ("-m", "mtp_train", "recipe.yaml")
SET = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/venv/bin/python /venv/bin/accelerate launch --cpu x.py", ["--cpu", "x.py"]),
        ("python -X dev -m accelerate.commands.launch --cpu x.py", ["--cpu", "x.py"]),
        ("python -m accelerate.commands.accelerate_cli launch x.py", ["x.py"]),
        ("accelerate-launch.exe x.py", ["x.py"]),
        ("accelerate launch accelerate launch", ["accelerate", "launch"]),
        ("accelerate config launch", None),
        ("python -m torch.distributed.run x.py", None),
        ("bash", None),
        ("", None),
    ],
)
def test_the_launcher_is_known_by_its_program(command: str, expected: list[str] | None) -> None:
    assert launch_arguments(command.split()) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--config_file fsdp2.yaml", Request(8, FSDP)),
        ("--config_file fsdp2.yaml --num_processes 2 --cpu", Request(2, FSDP)),
        ("--config_file=zero3.yaml --num_processes=2", Request(2, DEEPSPEED)),
        ("--config_file cpu_ddp.yaml --cpu", Request(2, None)),
        ("--config_file fsdp2.yaml --multi_gpu --num_processes 2", Request(2, None)),
        ("--config_file single.yaml --num_processes 2", Request(2, None)),
        ("--config_file single.yaml", Request(1, None)),
        ("--use_fsdp --num-processes 3", Request(3, FSDP)),
        ("--use_deepspeed", Request(None, DEEPSPEED)),
        ("--num_processes 0", NOTHING),
        ("--config_file not_there.yaml --num_processes 2", Request(2, None)),
        ("", NOTHING),
        ("--an_option_of_another_release 3", NOTHING),
    ],
)
def test_arguments_and_the_file_that_they_name_are_read_as_the_launcher_reads_them(
    arguments: str, expected: Request
) -> None:
    assert read_request([*arguments.split(), *RECIPE], MACHINES, SET) == expected


def test_the_users_own_file_counts_where_the_launcher_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text((MACHINES / "fsdp2.yaml").read_text())
    monkeypatch.setattr(config_args, "default_config_file", str(path))
    assert read_request(RECIPE, MACHINES, SET) == Request(8, FSDP)
    assert read_request(["--cpu", *RECIPE], MACHINES, SET) == NOTHING
    path.write_text("num_processes: null\n")
    assert read_request(RECIPE, MACHINES, SET) == NOTHING
    path.write_text("not: [a file of accelerate's")
    assert read_request(["--num_processes", "2", *RECIPE], MACHINES, SET) == Request(2, None)


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ("--cpu", {"PATH": "/bin"}, True),
        ("--config_file single.yaml", {}, True),
        ("--config_file not_there.yaml", {}, True),
        ("--num_cpu_threads_per_process 1", {}, False),
        ("--num-cpu-threads-per-process=1", {}, False),
        ("--cpu", SET, False),
    ],
)
def test_a_number_of_threads_that_nobody_named_is_the_launcher_s_default(
    arguments: str, variables: dict[str, str], expected: bool
) -> None:
    assert read_request([*arguments.split(), *RECIPE], MACHINES, variables).default_threads is expected


def launched_by(monkeypatch: pytest.MonkeyPatch, *parents: Any) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr(psutil.Process, "parents", lambda _self: list(parents))


def process(command: str) -> Any:
    return SimpleNamespace(cmdline=command.split, cwd=lambda: str(MACHINES), environ=lambda: SET)


def refuse(*_: Any) -> Any:
    """Act as a process of another user."""
    raise psutil.AccessDenied


CLOSED = SimpleNamespace(cmdline=refuse, cwd=refuse, environ=refuse)
LAUNCHER = process("accelerate launch --num_processes 2 --cpu -m mtp_train recipe.yaml")


def test_the_nearest_launcher_that_can_be_read_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    launched_by(monkeypatch, CLOSED, process("bash run.sh"), LAUNCHER, process("accelerate launch --use_fsdp x"))
    assert launcher_request() == Request(2, None)
    launched_by(monkeypatch, CLOSED)
    assert launcher_request() == NOTHING
    monkeypatch.setattr(psutil.Process, "parents", refuse)
    assert launcher_request() == NOTHING


def test_a_process_that_no_launcher_gave_its_environment_has_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    launched_by(monkeypatch, LAUNCHER)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    assert launcher_request() == NOTHING


@pytest.mark.parametrize("command", ["/venv/bin/python /venv/bin/torchrun", "python -m torch.distributed.run"])
def test_threads_that_torchrun_set_by_itself_are_its_default(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = process(f"{command} --nproc-per-node 8 -m mtp_train recipe.yaml")
    launched_by(monkeypatch, process("bash run.sh"), parent)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launcher_request() == NOTHING
    parent.environ = lambda: {"PATH": "/bin"}
    assert launcher_request() == Request(None, None, default_threads=True)
    launched_by(monkeypatch, process("bash run.sh"))
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    assert launcher_request() == NOTHING


def test_a_real_parent_is_read(tmp_path: Path) -> None:
    """A program under the launcher's name starts another with a relative file; nothing of accelerate runs."""
    (tmp_path / "machine.yaml").write_text((MACHINES / "zero2.yaml").read_text())
    child = "from mtp_train.train.launcher import launcher_request; print(*launcher_request())"
    (tmp_path / "accelerate").write_text(
        f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    )
    command = [sys.executable, "accelerate", "launch", "--config_file", "machine.yaml", "--cpu", *RECIPE]
    marked = environment(ACCELERATE_MIXED_PRECISION="no")
    said = subprocess.run(command, cwd=tmp_path, env=marked, capture_output=True, text=True, check=False)
    assert said.stdout.split() == ["8", "DistributedType.DEEPSPEED", "False"], said.stderr


def given(num_processes: int, kind: DistributedType) -> Any:
    plugin = SimpleNamespace(fsdp_version=2)
    return SimpleNamespace(
        num_processes=num_processes, distributed_type=kind, state=SimpleNamespace(fsdp_plugin=plugin)
    )


ONE, TWO = given(1, DistributedType.NO), given(2, DistributedType.MULTI_GPU)


@pytest.mark.parametrize(
    ("arguments", "found", "message"),
    [
        ("--num_processes 2", ONE, "asked for 2 processes with no shards, accelerate gives 1 process with no shards;"),
        (
            "--num_processes 2 --use_fsdp",
            ONE,
            "asked for 2 processes with FSDP shards, accelerate gives 1 process ",
        ),
        ("--use_fsdp", ONE, "asked for FSDP shards, accelerate gives 1 process with no shards;"),
        ("--num_processes 2 --use_fsdp", TWO, "with FSDP shards, accelerate gives 2 processes with no shards;"),
        (
            "--num_processes 2 --use_deepspeed",
            given(2, FSDP),
            "with DEEPSPEED shards, accelerate gives .* FSDP shards;",
        ),
        ("--num_processes 1", TWO, "asked for 1 process with no shards, accelerate gives 2 processes with no shards;"),
        ("--num_processes 2", TWO, None),
        ("--num_processes 2 --use_fsdp", given(2, FSDP), None),
        ("", ONE, None),
        ("", TWO, None),
    ],
)
def test_what_was_asked_for_and_what_came_up_agree_or_both_are_named(
    arguments: str, found: Any, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(found.num_processes))
    launched_by(monkeypatch, process(f"accelerate launch {arguments} -m mtp_train recipe.yaml"))
    if message is None:
        require_as_asked(found)
        return
    with pytest.raises(TrainingError, match=message):
        require_as_asked(found)
