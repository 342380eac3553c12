"""``mtp-train``: parse the command line, run the command, print its result, and turn errors into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import NoReturn

import mtp_train as mtp
from mtp_train.cli.commands import add_commands
from mtp_train.cli.output import printed
from mtp_train.errors import printable
from mtp_train.train.stopping import Stopped, stopped_by_signals
from mtp_train.trunk.progress import is_main_process

CLOSED_PIPE = 141
"""Exit code where nobody reads stdout any more, as of a program that SIGPIPE ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; a recipe's path or name as the first one means ``run``.

    Returns:
        0 done, 2 wrong input, 3 the gate refused, 143 or 130 stopped by SIGTERM or SIGINT, 141 stdout was closed. A
        bug leaves as a traceback (exit code 1).
    """
    try:
        with stopped_by_signals():
            return _run(list(sys.argv[1:] if argv is None else argv))
    except Stopped as stopped:
        if is_main_process():
            again = "Start the same command again; run, regenerate, evaluate and compare go on from what they saved."
            print(f"mtp-train: stopped by {stopped.name}.\n{again}", file=sys.stderr)
        return stopped.exit_code
    except BrokenPipeError:
        # The reader of a pipe, such as head, has read enough. Python's own flush at exit must not fail on it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _run(arguments: list[str]) -> int:
    parser = build_parser()
    if not arguments:
        parser.print_help()
        return 0
    if _means_recipe(arguments[0]):
        arguments.insert(0, "run")
    args = parse(parser, arguments)
    quieten_libraries(verbose=args.verbose)
    try:
        # With --json stdout is for the one document: output of libraries goes to stderr.
        with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
            result = printed(args.handler(args))
    except mtp.MtpError as error:
        if args.verbose:
            traceback.print_exc()
        if is_main_process() or error.of_one_process or _ends_this_node(error):
            print(f"mtp-train: {error}", file=sys.stderr)
        return error.exit_code
    if is_main_process():
        text = result.text if result.styled else printable(result.text)
        print(json.dumps(result.document, indent=2, allow_nan=False) if args.json else text, flush=True)
    return result.exit_code


def _ends_this_node(error: mtp.MtpError) -> bool:
    """Return whether a node prints that a process is lost: the main process of another node may be that process."""
    return isinstance(error, mtp.LostProcessError) and os.environ.get("LOCAL_RANK") == "0"


def _means_recipe(word: str) -> bool:
    """Return whether the first word is a recipe: a path, or a name, which ``run`` corrects if it is mistyped."""
    if word.endswith((".yaml", ".yml")):
        return True
    names = [recipe.name for recipe in mtp.recipes().recipes]
    # Close enough that no command is taken for a recipe.
    return bool(difflib.get_close_matches(word, names, n=1, cutoff=0.8))


class Parser(argparse.ArgumentParser):
    """A parser that names the nearest command, choice or option in place of a misspelt one."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with 2."""
        misspelt = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if misspelt is not None:
            message += _meant(misspelt[1], re.findall(r"[\w.-]+", misspelt[2]))
        unknown = re.match(r"unrecognized arguments: (-[^ =]*)", message)
        if unknown is not None:
            message += _meant(unknown[1], self._option_string_actions)
        super().error(message)


def _meant(found: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(found, list(names), n=1)
    return f". Did you mean {near[0]}?" if near else ""


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. An unknown one is an error of the command that it was given to."""
    args, unknown = parser.parse_known_args(arguments)
    if hasattr(args, "overrides"):
        # argparse takes a list of words in one place only; changes to a recipe may follow options.
        changes = [word for word in unknown if word[0] != "-" and "=" in word]
        args.overrides = [*args.overrides, *changes]
        unknown = [word for word in unknown if word not in changes]
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def build_parser() -> argparse.ArgumentParser:
    """Build the parser. Each command sets its handler."""
    parser = Parser(
        prog="mtp-train",
        description="Put the MTP head back on a fine-tuned model, retrain it, prove the gain, and export it. A recipe "
        "in the place of COMMAND is run.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mtp-train {mtp.__version__}")
    add_commands(parser.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    return parser


def quieten_libraries(*, verbose: bool = False) -> None:
    """Keep progress bars and notices of the libraries off the terminal; their errors still show.

    Libraries read the variables when they are imported, which most commands do late or not at all.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if verbose:
        logging.basicConfig(level=logging.INFO)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "info")
        return
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if "datasets" in sys.modules:
        import datasets

        datasets.disable_progress_bars()
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
    for library in ("torch.distributed.elastic", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)
