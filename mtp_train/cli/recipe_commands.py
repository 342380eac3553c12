"""The commands ``run``, ``check``, ``recipes``, ``init``, ``regenerate``, ``probe`` and ``rescue``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mtp_train as mtp
from mtp_train.cli.output import Handler, Printed, Result, add_command, console_of, progress_of
from mtp_train.trunk.progress import is_main_process


def add_commands(commands: Any) -> None:
    """Declare the commands."""
    _add_recipe(commands, "run", "run or resume a recipe: regenerate, train, evaluate, gate, export", _run)

    check = _add_recipe(commands, "check", "check a recipe and print its plan; reads no weights", _check)
    processes = "processes that will train (default: train.processes, else as launched)"
    check.add_argument("--processes", type=_count, metavar="N", help=processes)
    _add_device(check)
    shown = "print the resolved recipe, with the reasons for its automatic settings, in place of the plan"
    check.add_argument("--show", choices=("recipe",), help=shown)

    add_command(commands, "recipes", "list the recipes and accelerate files of the package", _recipes)

    init = add_command(commands, "init", "write a commented recipe for a model", _init)
    init.add_argument("out", type=Path, metavar="FILE", help="the new recipe, as my-model.yaml")
    init.add_argument("--trunk", required=True, metavar="CKPT", help="the model, or a peft adapter of the base")
    init.add_argument("--base", metavar="BASE", help="the checkpoint it was fine-tuned from, with the head")
    _add_data(init)
    init.add_argument("--processes", type=_count, metavar="N", help="refuse a launch of another number of processes")
    _add_device(init)

    answers = "only generate the trunk's answers to the recipe's prompts"
    _add_recipe(commands, "regenerate", answers, _regenerate)

    probe = add_command(commands, "probe", "find out in minutes whether a rescue will help", _probe)
    _add_pair(probe)
    probe.add_argument("--out", type=Path, metavar="DIR", help="the measurements (default: FINETUNE-probe)")
    _add_data(probe)

    rescue = add_command(commands, "rescue", "put the base's head back, retrained if that helps", _rescue)
    _add_pair(rescue)
    rescue.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run; the checkpoint is DIR/export")
    _add_data(rescue)
    rescue.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="section.field=value")


def _add_pair(command: argparse.ArgumentParser) -> None:
    command.add_argument("finetune", help="a checkpoint, or a peft adapter of the base")
    command.add_argument("--from", dest="base", required=True, metavar="BASE", help="its base, with the head")


def _add_device(command: argparse.ArgumentParser) -> None:
    device = command.add_mutually_exclusive_group()
    planned = "plan for h100, h200, a100, l40s, rtx4090 or mi300x (default: this machine's)"
    device.add_argument("--device", metavar="NAME", help=planned)
    device.add_argument("--memory", dest="device", metavar="24GiB", help="plan for a GPU of this memory")


def _add_data(command: argparse.ArgumentParser) -> None:
    prompts = "prompts like those that the model will serve (default: built-in ones)"
    command.add_argument("--data", nargs="+", default=[], metavar="PATH", help=prompts)


def _add_recipe(commands: Any, name: str, text: str, handler: Handler) -> argparse.ArgumentParser:
    command = add_command(commands, name, text, handler, allow_abbrev=False)
    command.add_argument("recipe", type=Path, help="a YAML file, or a name that mtp-train recipes lists")
    command.add_argument("overrides", nargs="*", metavar="section.field=value")
    return command


def require_valid(args: argparse.Namespace) -> None:
    """Check the fields of a recipe before the libraries that run it are imported, which takes seconds.

    Raises:
        RecipeError: A field is wrong; the message lists all problems.
    """
    from mtp_train.recipe.loading import plain_recipe, with_stand_ins

    with_stand_ins(*plain_recipe(args.recipe, args.overrides))


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; expected 1 or more")
    return number


def _run(args: argparse.Namespace) -> Printed:
    require_valid(args)
    try:
        done = mtp.run(args.recipe, args.overrides, console=console_of(args))
    except mtp.GateRefusedError as error:
        done = mtp.RunResult(error.run_dir or Path(), error.exit_code, error.reason, str(error), "done")
        if not args.json:
            if is_main_process() and done.page is not None:
                print(f"report: {done.page}")
            raise
        # With --json a refusal is a result like any other: a script reads the verdict from the document.
    return Printed(done.to_json(), str(done), done.exit_code)


def _check(args: argparse.Namespace) -> Printed:
    require_valid(args)
    found = mtp.check(args.recipe, args.overrides, processes=args.processes, device=args.device)
    is_refused = found.room.problem is not None and args.device is not None
    text = str(found) if args.show is None else found.resolved_yaml().rstrip()
    return Printed(found.to_json(), text, mtp.MtpError.exit_code if is_refused else 0)


def _recipes(args: argparse.Namespace) -> Result:
    return mtp.recipes()


def _init(args: argparse.Namespace) -> Result:
    plan = {"processes": args.processes, "device": args.device}
    return mtp.write_recipe(args.out, args.trunk, args.base, data=args.data, **plan)


def _regenerate(args: argparse.Namespace) -> Result:
    require_valid(args)
    with progress_of(args) as progress:
        return mtp.regenerate(args.recipe, args.overrides, progress=progress)


def _probe(args: argparse.Namespace) -> Result:
    return mtp.probe(args.finetune, args.base, args.out, data=args.data, console=console_of(args))


def _rescue(args: argparse.Namespace) -> Result:
    changes = {"data": args.data, "overrides": args.overrides, "console": console_of(args)}
    return mtp.rescue(args.finetune, args.base, args.out, **changes)
