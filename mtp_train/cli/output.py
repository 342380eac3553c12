"""The result of a command, its progress bar, and the arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from rich.console import Console, RenderableType
from rich.progress import Progress

from mtp_train.trunk.progress import is_main_process, progress_on


class Printed(NamedTuple):
    """Output of a command whose text or exit code differs from its result's."""

    document: Any
    """Plain JSON values, for ``--json``."""
    text: str
    exit_code: int = 0
    styled: bool = False
    """Whether the text has the terminal's own control characters, as a table in colours has."""


class Result(Protocol):
    """A result of the public API; it prints as a short text."""

    def to_json(self) -> Any:
        """Return plain JSON values, for ``--json``."""


Handler = Callable[[argparse.Namespace], Result | Printed]


def printed(found: Result | Printed) -> Printed:
    """Return what a command prints of its result."""
    return found if isinstance(found, Printed) else Printed(found.to_json(), str(found))


def progress_of(args: argparse.Namespace) -> Progress:
    """Return progress on stderr, bars on a terminal and lines in a log; hidden with ``--quiet``."""
    return progress_on(Console(stderr=True, quiet=args.quiet))


def console_of(args: argparse.Namespace) -> Console:
    """Return the console of a run: its tables on stdout, and with ``--json`` on stderr; hidden with ``--quiet``."""
    return Console(quiet=args.quiet or not is_main_process())


def rendered(renderable: RenderableType) -> str:
    """Return a table as text, in the width and colours that stdout supports."""
    console = Console()
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().rstrip()


class WithDefaults(argparse.HelpFormatter):
    """Print the default of every option, unless its help already contains one; do not break examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("example: ") else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        says_nothing = default is None or isinstance(default, bool) or default in ([], argparse.SUPPRESS)
        if text is None or "default" in text or says_nothing:
            return text
        shown = " ".join(str(one) for one in default) if isinstance(default, list) else default
        return f"{text} (default: {shown})"


EXAMPLES = {
    "run": "retrain_head run_dir=runs/first train.max_steps=50",
    "check": "my-27b.yaml --processes 8 --device h100",
    "recipes": "",
    "init": "my-27b.yaml --trunk ./my-27b --base BASE --data chats.jsonl",
    "regenerate": "my-27b.yaml",
    "probe": "./my-27b --from BASE --data chats.jsonl",
    "rescue": "./my-27b --from BASE --data chats.jsonl --out runs/my-27b",
    "inspect": "./my-27b --base BASE",
    "graft": "./my-27b --from BASE --out ./my-27b-mtp",
    "merge": "BASE --adapter ./my-lora --out ./my-27b",
    "export": "runs/my-27b --out ./my-27b-head --gguf q8_0",
    "demo": "./demo",
    "generate": "./my-27b-mtp --depth 3 --prompt 'def add(a, b):'",
    "evaluate": "runs/my-27b --temperatures 0 1 --depths 1 3 --out eval/my-27b",
    "compare": "old=./my-27b+BASE new=runs/my-27b --out eval/old-new",
}
"""Arguments of every command, for its help."""


def add_command(commands: Any, name: str, text: str, handler: Handler, **settings: Any) -> argparse.ArgumentParser:
    """Add a subcommand with the options of all commands to the parser's commands and return its parser."""
    about = {"help": text, "description": f"{text[0].upper()}{text[1:]}."}
    about["epilog"] = f"example: mtp-train {name} {EXAMPLES[name]}".rstrip()
    command: argparse.ArgumentParser = commands.add_parser(name, formatter_class=WithDefaults, **about, **settings)
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    command.add_argument("-q", "--quiet", action="store_true", help="print the result and errors only")
    command.add_argument("-v", "--verbose", action="store_true", help="print messages of libraries, and tracebacks")
    command.set_defaults(parser=command, handler=handler)
    return command


def chosen(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return arguments by name, as keywords of a function of the public API."""
    return {name: getattr(args, name) for name in names}
