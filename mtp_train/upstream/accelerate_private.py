"""Every use of an undocumented part of accelerate: the parser of its launcher, and the state that it keeps by class.

``SYMBOLS`` is looked up by tests/unit/test_upstream.py. accelerate is imported when a function is called.
"""

from __future__ import annotations

import argparse
from typing import Any

from mtp_train.upstream.symbols import Symbol

SYMBOLS = (
    Symbol(
        "accelerate.commands.launch",
        "launch_command_parser",
        "train/launcher.py",
        "accelerate launch does not pass on which of its settings the user wrote; only its parser can read them again",
    ),
    Symbol(
        "accelerate.commands.config.config_args",
        "default_config_file",
        "train/launcher.py",
        "the path of the file that the launcher reads where none is named is in no documented constant",
    ),
    Symbol(
        "accelerate.commands.config.config_args",
        "load_config_from_file",
        "train/launcher.py",
        "only it reads a config file with the defaults that the launcher uses",
    ),
    Symbol(
        "accelerate.state:PartialState",
        "_shared_state",
        "job/study/drift.py",
        "the state can be reset, but not put back: a launched process trains alone for a while, and then goes on",
    ),
    Symbol("accelerate.state:AcceleratorState", "_shared_state", "job/study/drift.py", "as above"),
    Symbol("accelerate.state:GradientState", "_shared_state", "job/study/drift.py", "as above"),
)


def launch_parser() -> argparse.ArgumentParser:
    """Return the parser of ``accelerate launch``."""
    from accelerate.commands.launch import launch_command_parser

    parser: argparse.ArgumentParser = launch_command_parser()
    return parser


def default_config_path() -> str:
    """Return the path of the config file that ``accelerate launch`` reads where none is named."""
    from accelerate.commands.config import config_args

    return str(config_args.default_config_file)


def read_config_file(path: str) -> Any:
    """Return the settings in a config file of accelerate, with accelerate's defaults for the others."""
    from accelerate.commands.config import config_args

    return config_args.load_config_from_file(path)


def shared_states() -> list[dict[str, Any]]:
    """Return the dicts in which accelerate keeps the state of this process, to clear and to fill again."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    return [cls._shared_state for cls in (PartialState, AcceleratorState, GradientState)]
