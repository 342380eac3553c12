"""The commands ``run``, ``check``, ``recipes``, ``init``, ``regenerate``, ``probe`` and ``rescue``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

import mtp_train as mtp
from mtp_train.cli.output import Result, add_command, is_main_process, progress_of


def add_run(commands: Any) -> None:
    """Declare ``run``."""
    _add_recipe(commands, "run", "run or resume a recipe: regenerate, train, evaluate, gate, export", _run)


def add_check(commands: Any) -> None:
    """Declare ``check``."""
    check = _add_recipe(commands, "check", "check a recipe and print its plan; reads no weights", _check)
    check.add_argument(
        "--processes",
        type=_count,
        metavar="N",
        help="processes that will train (default: train.processes, else as launched)",
    )
    device = check.add_mutually_exclusive_group()
    device.add_argument(
        "--device", metavar="NAME", help="plan for h100, h200, a100, l40s, rtx4090 or mi300x (default: this machine's)"
    )
    device.add_argument("--memory", dest="device", metavar="24GiB", help="plan for a GPU of this memory")


def add_recipes(commands: Any) -> None:
    """Declare ``recipes``."""
    command = add_command(commands, "recipes", "list the recipes and accelerate files of the package")
    command.set_defaults(handler=_recipes)


def add_init(commands: Any) -> None:
    """Declare ``init``."""
    command = add_command(commands, "init", "write a commented recipe for a model")
    command.add_argument("out", type=Path, metavar="FILE", help="the new recipe, as my-model.yaml")
    command.add_argument("--trunk", required=True, metavar="CKPT", help="the model, or a peft adapter of the base")
    command.add_argument("--base", metavar="BASE", help="the checkpoint it was fine-tuned from, with the head")
    _add_data(command)
    command.add_argument("--processes", type=_count, metavar="N", help="refuse a launch of another number of processes")
    command.set_defaults(handler=_init)


def add_regenerate(commands: Any) -> None:
    """Declare ``regenerate``."""
    text = "only generate the trunk's answers to the recipe's prompts"
    _add_recipe(commands, "regenerate", text, _regenerate)


def add_probe(commands: Any) -> None:
    """Declare ``probe``."""
    command = add_command(commands, "probe", "find out in minutes whether a rescue will help")
    command.add_argument("finetune", help="a checkpoint, or a peft adapter of the base")
    command.add_argument("--from", dest="base", required=True, metavar="BASE", help="its base, with the head")
    command.add_argument("--out", type=Path, metavar="DIR", help="the measurements (default: FINETUNE-probe)")
    _add_data(command)
    command.set_defaults(handler=_probe)


def add_rescue(commands: Any) -> None:
    """Declare ``rescue``."""
    command = add_command(commands, "rescue", "put the base's head back, retrained if that helps")
    command.add_argument("finetune", help="a checkpoint, or a peft adapter of the base")
    command.add_argument("--from", dest="base", required=True, metavar="BASE", help="its base, with the head")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run; the checkpoint is DIR/export")
    _add_data(command)
    command.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="section.field=value")
    command.set_defaults(handler=_rescue)


def _add_data(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="prompts like those that the model will serve (default: built-in ones)",
    )


def _add_recipe(
    commands: Any, name: str, text: str, handler: Callable[[argparse.Namespace], Result]
) -> argparse.ArgumentParser:
    command = add_command(commands, name, text, allow_abbrev=False)
    command.add_argument("recipe", type=Path, help="a YAML file, or a name that mtp-train recipes lists")
    command.add_argument("overrides", nargs="*", metavar="section.field=value")
    command.set_defaults(handler=handler)
    return command


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; expected 1 or more")
    return number


def _run(args: argparse.Namespace) -> Result:
    try:
        done = mtp.run(args.recipe, args.overrides, console=Console(quiet=not is_main_process()))
    except mtp.GateRefusedError as error:
        done = mtp.RunResult(error.run_dir or Path(), error.exit_code, error.reason, str(error), "done")
        if not args.json:
            if is_main_process() and done.page is not None:
                print(f"report: {done.page}")
            raise
        # With --json a refusal is a result like any other: a script reads the verdict from the document.
    return Result(done.to_json(), str(done), done.exit_code)


def _check(args: argparse.Namespace) -> Result:
    found = mtp.check(args.recipe, args.overrides, processes=args.processes, device=args.device)
    return Result(found.to_json(), str(found))


def _recipes(args: argparse.Namespace) -> Result:
    found = mtp.recipes()
    return Result(found.to_json(), str(found))


def _init(args: argparse.Namespace) -> Result:
    done = mtp.write_recipe(args.out, args.trunk, args.base, data=args.data, processes=args.processes)
    return Result(done.to_json(), str(done))


def _regenerate(args: argparse.Namespace) -> Result:
    with progress_of(args) as progress:
        done = mtp.regenerate(args.recipe, args.overrides, progress=progress)
    return Result(done.to_json(), str(done))


def _probe(args: argparse.Namespace) -> Result:
    console = Console(quiet=args.json or not is_main_process())
    found = mtp.probe(args.finetune, args.base, args.out, data=args.data, console=console)
    return Result(found.to_json(), str(found))


def _rescue(args: argparse.Namespace) -> Result:
    console = Console(quiet=args.json or not is_main_process())
    done = mtp.rescue(args.finetune, args.base, args.out, data=args.data, overrides=args.overrides, console=console)
    return Result(done.to_json(), str(done))
