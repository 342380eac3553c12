"""Read what `accelerate launch` was asked for from its own command line.

Where accelerate's launcher finds no GPU, or is given `--cpu`, it drops the request for several processes or for shards
and starts one plain process. It sets no variable that tells that process so. The command line of the launcher, which is
the parent process, still has the request.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from accelerate.utils import DistributedType

# accelerate's launcher sets it for every process. A process without it was not launched, or was cut loose on purpose.
_MARK = "ACCELERATE_MIXED_PRECISION"
_PROGRAMS = ("accelerate-launch", "accelerate.commands.launch")
_PROGRAMS_OF_COMMANDS = ("accelerate", "accelerate.commands.accelerate_cli")
_FLAGS: dict[str, DistributedType] = {
    "use_deepspeed": DistributedType.DEEPSPEED,
    "use_fsdp": DistributedType.FSDP,
    "use_megatron_lm": DistributedType.MEGATRON_LM,
}
SHARDING = frozenset(_FLAGS.values())


class Request(NamedTuple):
    """What a launcher was asked for; None is not asked for."""

    num_processes: int | None
    sharding: DistributedType | None

    def __str__(self) -> str:
        """Describe it in an error message."""
        parts = [] if self.num_processes is None else [f"{self.num_processes} process{'es' * (self.num_processes > 1)}"]
        return " with ".join([*parts, "no shards" if self.sharding is None else f"{self.sharding.value} shards"])


NOTHING = Request(None, None)


def launcher_request() -> Request:
    """Return what the launcher above this process was asked for; nothing where none is found, or none can be read."""
    if _MARK not in os.environ:
        return NOTHING
    for command, directory in _ancestors():
        arguments = launch_arguments(command)
        if arguments is not None:
            return read_request(arguments, directory)
    return NOTHING


def _ancestors() -> Iterator[tuple[list[str], Path]]:
    """Yield the command line and the working directory of each ancestor of this process that can be read."""
    try:
        parents = psutil.Process().parents()
    except (psutil.Error, OSError):
        return
    for process in parents:
        with contextlib.suppress(psutil.Error, OSError):
            yield process.cmdline(), Path(process.cwd())


def launch_arguments(command: Sequence[str]) -> list[str] | None:
    """Return the arguments of accelerate's launcher in a command line; None if it starts something else."""
    for index, word in enumerate(command):
        name = Path(word).name.removesuffix(".exe")
        if name in _PROGRAMS:
            return list(command[index + 1 :])
        if name in _PROGRAMS_OF_COMMANDS and list(command[index + 1 : index + 2]) == ["launch"]:
            return list(command[index + 2 :])
    return None


def read_request(arguments: Sequence[str], directory: Path) -> Request:
    """Read the launcher's arguments and the file that they name, as the launcher itself does.

    Args:
        arguments: What stands after ``accelerate launch``.
        directory: The launcher's working directory.
    """
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            args = launch_command_parser().parse_args(list(arguments))
        except SystemExit:
            return NOTHING
    # 0 is accelerate's own default on a machine without GPUs.
    num_processes = args.num_processes or None
    sharding = next((kind for flag, kind in _FLAGS.items() if getattr(args, flag, False)), None)
    # accelerate reads the default file only without --cpu, and takes no kind from any file where a flag names one.
    path = args.config_file or (default_config_file if not args.cpu else None)
    if path is not None and (directory / path).is_file():
        try:
            file = load_config_from_file(str(directory / path))
        except Exception:
            # The launcher has read this file: a run must not end because it has changed since.
            return Request(num_processes, sharding)
        # -1 is accelerate's own default.
        count = getattr(file, "num_processes", None)
        if num_processes is None and isinstance(count, int) and count > 0:
            num_processes = count
        if sharding is None and not (args.multi_gpu or args.tpu) and file.distributed_type in SHARDING:
            sharding = DistributedType(file.distributed_type)
    return Request(num_processes, sharding)
