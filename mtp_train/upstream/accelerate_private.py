"""Every use of an undocumented part of accelerate: the parser of its launcher.

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
