"""The exceptions of mtp-train, each with the exit code of the command line.

Every message states where the problem is, what was found, what was expected, and what to do. The command line prints
the message alone; a traceback means a bug.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

_SECRET_NAMES = re.compile(r"(?:TOKEN|API_?KEY|ACCESS_KEY|SECRET|PASSWORD)$", re.IGNORECASE)
_SHORTEST_SECRET = 8
_IN_ADDRESS = re.compile(
    r"(?<=://)[^/\s@]+(?=@)|(?<=[?&])((?:api_?key|token|key|password|secret|sig\w*)=)[^&\s#'\"]+", re.IGNORECASE
)
# All control characters but tab and line end, and those that turn the direction of text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def first_of(names: Sequence[str]) -> str:
    """Return the first of some names, with their number where there are several."""
    return names[0] if len(names) == 1 else f"{names[0]} ({len(names)} in all)"


def redacted(text: str) -> str:
    """Return text without credentials: those in addresses, and values of environment variables that name a secret."""
    text = _IN_ADDRESS.sub(lambda match: f"{match[1] or ''}***", text)
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAMES.search(name):
            text = text.replace(value, "***")
    return text


def printable(text: str) -> str:
    """Return text with control characters as escapes: text of checkpoints and servers must not steer a terminal."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def one_line(error: Exception) -> str:
    """Return the text of another package's error in one line, to be quoted in a message."""
    return " ".join(str(error).split())


class MtpError(Exception):
    """Report a problem that the user can fix. Base class of all errors below; exit code 2.

    Example:
        >>> import mtp_train as mtp
        >>> try:
        ...     mtp.graft("my-27b", "Qwen/Qwen3.6-27B", "my-27b-mtp")
        ... except mtp.OutputExistsError as error:
        ...     print(error)
        my-27b-mtp: exists; expected a new path for the checkpoint. ...
    """

    exit_code = 2
    reason = "bad_input"
    """The ``reason`` in ``outcome.json``."""
    of_one_process = False
    """Whether a single process of a launch can raise it, so that every process prints its own message."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(redacted(message)))


class RecipeError(MtpError):
    """Report all problems of a recipe at once, each with its dotted path.

    Args:
        *problems: One line per problem, ``"{path}: {found}; expected {rule}. {hint}"``.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(problems))


class CheckpointError(MtpError):
    """Report a checkpoint that is incomplete or damaged, or that does not fit its use."""


class UnsupportedModelError(MtpError):
    """Report an architecture without a known head layout, or one that a step does not support."""


class DataError(MtpError):
    """Report data that cannot be read, is empty, or leaves no token to train on."""


class UnsupportedRecordError(DataError):
    """Report a record with image, audio or other parts that are not text. Readers skip such records."""


class OutputExistsError(MtpError):
    """Report an output path that exists and must not be overwritten."""


class ChangedInputError(MtpError):
    """Report an input that changed since the results in a directory were begun."""


class TrainingError(MtpError):
    """Report a run that cannot continue, such as a non-finite loss or a run directory of another recipe."""


class GateRefusedError(MtpError):
    """Report a trained head that is not better than its baseline. Exit code 3."""

    exit_code = 3
    reason = "gate_refused"
    run_dir: Path | None = None
    """Directory of the refused run, with its report; None for an error of another function than ``run``."""


class GateUndecidedError(GateRefusedError):
    """Report a trained head whose drafts are shown neither to pay nor to cost. Exit code 3, as nothing is exported."""

    reason = "gate_undecided"


class NotLosslessError(MtpError):
    """Report a decoder that changes the text of this trunk. Exit code 1, as no input of the user caused it."""

    exit_code = 1
    reason = "not_lossless"


class LostProcessError(MtpError):
    """Report that another process of a distributed run died. Exit code 1, as no input of the user caused it."""

    exit_code = 1
    reason = "lost_process"


class StoppedError(MtpError):
    """Report a run that a signal stopped and that can be resumed.

    Args:
        message: How far it came, and how to go on.
        exit_code: 143 for SIGTERM, 130 for SIGINT.
    """

    exit_code = 143
    reason = "stopped"

    def __init__(self, message: str, exit_code: int = 143) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class OutOfMemoryError(MtpError):
    """Report that memory ran out; the message names the setting that reduces it."""

    reason = "out_of_memory"
    of_one_process = True


class FullDiskError(CheckpointError):
    """Report a disk that is full or not writable."""

    of_one_process = True
