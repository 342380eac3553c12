"""The result of a command, its progress bar, and the arguments that several commands share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.progress import Progress

from mtp_train.trunk.progress import progress_on


class Result(NamedTuple):
    """Output of a command."""

    document: Any
    """Plain JSON values, for ``--json``."""
    text: str
    exit_code: int = 0
    styled: bool = False
    """Whether the text has the terminal's own control characters, as a table in colours has."""


def is_main_process() -> bool:
    """Return whether this process prints for all processes of a launch."""
    return os.environ.get("RANK", "0") == "0"


def progress_of(args: argparse.Namespace) -> Progress:
    """Return progress on stderr, bars on a terminal and lines in a log; hidden with ``--json``."""
    return progress_on(Console(stderr=True, quiet=args.json))


def rendered(renderable: RenderableType) -> str:
    """Return a table as text, in the width and colours that stdout supports."""
    console = Console()
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().rstrip()


class WithDefaults(argparse.HelpFormatter):
    """Print the default of every option that has one, unless its help already speaks of it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        says_nothing = default is None or isinstance(default, bool) or default in ([], argparse.SUPPRESS)
        if text is None or "default" in text or says_nothing:
            return text
        shown = " ".join(str(one) for one in default) if isinstance(default, list) else default
        return f"{text} (default: {shown})"


def add_command(commands: Any, name: str, text: str, **settings: Any) -> argparse.ArgumentParser:
    """Add a subcommand with ``--json`` to the parser's commands and return its parser."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, formatter_class=WithDefaults, **settings)
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    command.set_defaults(parser=command)
    return command


def add_output(command: argparse.ArgumentParser) -> None:
    """Declare ``--out`` and ``--copy``."""
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    command.add_argument("--copy", action="store_true", help="copy unchanged shards instead of hard-linking them")
