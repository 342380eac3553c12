"""Read the request given to ``accelerate launch`` from the launcher's command line.

If accelerate's launcher finds no GPU, or gets ``--cpu``, it drops a request for several processes or for shards, starts
one plain process, and sets no variable about it. The command line of the launcher, which is the parent process, still
has the request.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from accelerate.utils import DistributedType

from mtp_train.upstream.accelerate_private import default_config_path, launch_parser, read_config_file

# accelerate's launcher sets it for every process. A process without it was not launched by accelerate.
_MARK = "ACCELERATE_MIXED_PRECISION"
_TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"
_TORCHRUN_PROGRAMS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_PROGRAMS = ("accelerate-launch", "accelerate.commands.launch")
_PROGRAMS_OF_COMMANDS = ("accelerate", "accelerate.commands.accelerate_cli")
_FLAGS: dict[str, DistributedType] = {
    "use_deepspeed": DistributedType.DEEPSPEED,
    "use_fsdp": DistributedType.FSDP,
    "use_megatron_lm": DistributedType.MEGATRON_LM,
}
SHARDING = frozenset(_FLAGS.values())
THREADS_VARIABLE = "OMP_NUM_THREADS"
"""The variable by which accelerate's launcher and torchrun set the number of threads of their processes."""


class Request(NamedTuple):
    """Processes, shards and threads that the user requested from the launcher.

    Attributes:
        num_processes: Number of processes; None if not given.
        sharding: Kind of sharding; None if not given.
        default_threads: Whether the launcher set ``OMP_NUM_THREADS`` to its own default.
    """

    num_processes: int | None
    sharding: DistributedType | None
    default_threads: bool = False

    def __str__(self) -> str:
        """Describe the request in an error message."""
        parts = [] if self.num_processes is None else [f"{self.num_processes} process{'es' * (self.num_processes > 1)}"]
        return " with ".join([*parts, "no shards" if self.sharding is None else f"{self.sharding.value} shards"])


NOTHING = Request(None, None)


def launcher_request() -> Request:
    """Return the request of the launcher above this process; an empty one if no launcher is found or readable.

    Of torchrun only the threads are read: it drops no request.
    """
    if _MARK not in os.environ:
        return _torchrun_request() if _TORCHRUN_MARK in os.environ else NOTHING
    for command, directory, environment in _ancestors():
        arguments = launch_arguments(command)
        if arguments is not None:
            return read_request(arguments, directory, environment)
    return NOTHING


def _torchrun_request() -> Request:
    for command, _, environment in _ancestors():
        if any(Path(word).name.removesuffix(".exe") in _TORCHRUN_PROGRAMS for word in command):
            return Request(None, None, default_threads=THREADS_VARIABLE not in environment)
    return NOTHING


def _ancestors() -> Iterator[tuple[list[str], Path, Mapping[str, str]]]:
    """Yield command line, working directory and environment of each ancestor of this process that can be read."""
    try:
        parents = psutil.Process().parents()
    except (psutil.Error, OSError):
        return
    for process in parents:
        with contextlib.suppress(psutil.Error, OSError):
            yield process.cmdline(), Path(process.cwd()), process.environ()


def launch_arguments(command: Sequence[str]) -> list[str] | None:
    """Return the arguments of accelerate's launcher in a command line; None if it starts something else."""
    for index, word in enumerate(command):
        name = Path(word).name.removesuffix(".exe")
        if name in _PROGRAMS:
            return list(command[index + 1 :])
        if name in _PROGRAMS_OF_COMMANDS and list(command[index + 1 : index + 2]) == ["launch"]:
            return list(command[index + 2 :])
    return None


def read_request(arguments: Sequence[str], directory: Path, environment: Mapping[str, str]) -> Request:
    """Read the launcher's arguments and the config file that they name, as the launcher itself does.

    Args:
        arguments: The command line after ``accelerate launch``.
        directory: The launcher's working directory.
        environment: The launcher's environment variables.
    """
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            args = launch_parser().parse_args(list(arguments))
        except SystemExit:
            return NOTHING
    # 0 is accelerate's own default on a machine without GPUs.
    num_processes = args.num_processes or None
    sharding = next((kind for flag, kind in _FLAGS.items() if getattr(args, flag, False)), None)
    # A config file cannot set threads: accelerate refuses the key.
    default_threads = args.num_cpu_threads_per_process is None and THREADS_VARIABLE not in environment
    # accelerate reads the default file only without --cpu. A flag for the kind of sharding overrides every file.
    path = args.config_file or (default_config_path() if not args.cpu else None)
    if path is not None and (directory / path).is_file():
        try:
            file = read_config_file(str(directory / path))
        except Exception:
            # The launcher has read this file already: a run must not fail because the file has changed since.
            return Request(num_processes, sharding, default_threads)
        # -1 is accelerate's own default.
        count = getattr(file, "num_processes", None)
        if num_processes is None and isinstance(count, int) and count > 0:
            num_processes = count
        if sharding is None and not (args.multi_gpu or args.tpu) and file.distributed_type in SHARDING:
            sharding = DistributedType(file.distributed_type)
    return Request(num_processes, sharding, default_threads)
