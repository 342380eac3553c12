"""The errors a user can meet, each with the exit code it ends in.

Every message answers four questions: where, what was found, what was expected, and what to do about it.
The command line prints the message alone; a traceback means a bug.
"""

from __future__ import annotations


class MtpError(Exception):
    """Report something the user can put right. Ends in exit code 2."""

    exit_code = 2
    reason = "bad_input"
    """What ``outcome.json`` calls it."""
    of_one_process = False
    """Whether one process of a launch may meet it and the others not, so that it speaks for itself."""


class RecipeError(MtpError):
    """Report every problem of a recipe at once, each with its dotted path.

    Args:
        problems: One line per problem, ``"{path}: {found}; expected {rule}. {cure}"``.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class CheckpointError(MtpError):
    """Report a checkpoint that is incomplete, damaged, or does not fit what it is used for."""


class UnsupportedModelError(MtpError):
    """Report an architecture without a known head layout, or one that a step cannot serve."""


class DataError(MtpError):
    """Report data that cannot be read, is empty, or leaves no token to train on."""


class OutputExistsError(MtpError):
    """Report an output target that exists and must not be overwritten."""


class ChangedInputError(MtpError):
    """Report an input that is not the one that a directory's results were begun with."""


class TrainingError(MtpError):
    """Report a run that cannot go on (a non-finite loss, a run directory of another recipe)."""


class GateRefusedError(MtpError):
    """Report a retrained head that is not better than its baseline. Ends in exit code 3."""

    exit_code = 3
    reason = "gate_refused"


class LostProcessError(MtpError):
    """Report that another process of a run is gone, which is nobody's input. Ends in exit code 1."""

    exit_code = 1
    reason = "lost_process"


class StoppedError(MtpError):
    """Report a run that was told to stop and can go on later. Ends in the exit code of its signal."""

    exit_code = 143
    reason = "stopped"


class OutOfMemoryError(MtpError):
    """Report that memory did not suffice, with the setting that would make it."""

    reason = "out_of_memory"
    of_one_process = True


class FullDiskError(CheckpointError):
    """Report a disk that is full or not writable."""

    of_one_process = True
