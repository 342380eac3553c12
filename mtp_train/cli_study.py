"""The command line of ``evaluate``, ``compare`` and ``rescue``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mtp_train.errors import DataError

if TYPE_CHECKING:
    from mtp_train.study.arms import ArmSpec
    from mtp_train.study.beside import Server
    from mtp_train.study.measure import Grid

T = TypeVar("T")
RULES = ("greedy", "argmax", "sampled")
PACKINGS = ("none", "8bit", "4bit")


def add_rescue(command: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``rescue``."""
    command.add_argument("finetune", help="a checkpoint, or a peft adapter of the base")
    command.add_argument("--from", dest="base", required=True, metavar="BASE", help="what it came from, with its head")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run; the checkpoint is DIR/export")
    command.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="prompts like those it will serve (default: built-in ones)",
    )
    command.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="section.field=value")


def add_evaluate(command: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``evaluate``."""
    command.add_argument(
        "checkpoint", metavar="CKPT|RUN", help="a checkpoint, or the directory of a run: its trunk and its trained head"
    )
    command.add_argument(
        "--head",
        help="a head directory, a checkpoint to take one from, an assistant, ngram, or model:CKPT (default: its own)",
    )
    command.add_argument("--adapter", metavar="DIR", help="a peft adapter for the trunk, put on unmerged")
    command.add_argument(
        "--trunk-bits",
        nargs="+",
        choices=PACKINGS,
        help="pack the trunk: an arm for each (default: none; of a run what its recipe says)",
    )
    command.add_argument(
        "--head-bits", nargs="+", choices=PACKINGS, default=["none"], help="pack the head: an arm for each"
    )
    command.add_argument("--endpoint", metavar="URL", help="ask the same of a server too, as http://host:port/v1")
    command.add_argument("--served-model", metavar="NAME", help="what the server calls it (default: the only one)")
    command.add_argument("--api-key-env", metavar="VAR", help="the environment variable with the server's key")
    command.add_argument("--concurrency", type=int, default=1, metavar="N", help="requests to the server at a time")
    command.add_argument("--served-only", action="store_true", help="ask the server alone; load no weights here")
    _add_grid(command)


def add_compare(command: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``compare``."""
    command.add_argument(
        "arms",
        nargs="+",
        metavar="[NAME=]TRUNK[+HEAD]",
        help="a checkpoint with its own head, a trunk + what drafts (see evaluate --head), or the directory of a run; "
        "@8bit or @4bit behind either packs it, @none behind a run leaves out what its recipe says",
    )
    _add_grid(command)


def _add_grid(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--suite",
        help="builtin, demo, mt-bench:LOC, spec-bench:LOC, speed-bench:LOC, humaneval:LOC, gsm8k:LOC, or a file",
    )
    command.add_argument("--tasks", nargs="+", metavar="TASK", help="only these tasks of the suite")
    command.add_argument("--prompts-per-task", type=int, default=8, metavar="N")
    command.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0], metavar="T")
    command.add_argument(
        "--contexts",
        nargs="+",
        type=_context,
        default=[None],
        metavar="N|own",
        help="bring prompts to these lengths with other text before them (default: own, as they are)",
    )
    command.add_argument(
        "--depths", nargs="+", type=int, metavar="K", help="drafts per round (default: 1 2 3 5, where the heads can)"
    )
    command.add_argument(
        "--rules",
        nargs="+",
        choices=RULES,
        default=list(RULES),
        help="greedy at temperature 0; above: argmax drafts, or sampled ones with rejection",
    )
    command.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    command.add_argument("--batch", type=int, default=1, metavar="N", help="prompts decoded together")
    command.add_argument("--seed", type=int, default=0, metavar="S")
    command.add_argument("--no-costs", dest="costs", action="store_false", help="leave out latency and prefill")
    command.add_argument("--wandb", choices=("off", "offline", "online"), default="off", help="track the report")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory, or one to go on in")


def grid_of(args: argparse.Namespace, arms: Sequence[ArmSpec]) -> Grid:
    """Return the grid that was asked for, with defaults that suit the arms."""
    from mtp_train.commands.evaluate import default_depths, default_suite
    from mtp_train.study.measure import Grid

    return Grid(
        suite=args.suite or default_suite([one.trunk for one in arms] or [subject(args).trunk]),
        tasks=None if args.tasks is None else tuple(args.tasks),
        prompts_per_task=args.prompts_per_task,
        temperatures=_unique(args.temperatures),
        contexts=_unique(args.contexts),
        depths=default_depths(arms) if args.depths is None else _unique(args.depths),
        rules=_unique(args.rules),
        max_new_tokens=args.max_new_tokens,
        batch=args.batch,
        seed=args.seed,
    )


def evaluated_arms(args: argparse.Namespace) -> list[ArmSpec]:
    """Return the arms of ``evaluate``: one, or one for each way of packing; none where a server alone is asked."""
    from mtp_train.study.arms import named

    if args.served_only:
        return []
    arm = subject(args)
    own = (arm.quantization or "none", "none")
    trunk_bits = own[:1] if args.trunk_bits is None else _unique(args.trunk_bits)
    packings = [(trunk, head) for trunk in trunk_bits for head in _unique(args.head_bits)]
    return [
        named(
            replace(
                arm,
                name=arm.name if (trunk, head) == own else "",
                quantization=None if trunk == "none" else trunk,
                head_quantization=None if head == "none" else head,
            )
        )
        for trunk, head in packings
    ]


def subject(args: argparse.Namespace) -> ArmSpec:
    """Return what ``evaluate`` names, packed only where a run's recipe says so; without a name where it is no run.

    Raises:
        MtpError: A run is given another head or adapter, or has no head so far.
    """
    from mtp_train.study.arms import OWN, ArmSpec, arm_of_run, is_run

    run_dir = Path(args.checkpoint)
    if not is_run(run_dir):
        return ArmSpec("", args.checkpoint, OWN if args.head is None else args.head, args.adapter)
    for flag, value in (("--head", args.head), ("--adapter", args.adapter)):
        if value is not None:
            raise DataError(
                f"{flag}: given with {run_dir}, a run, which has its own; expected a checkpoint. Leave {flag} out, or "
                "name the run's trunk."
            )
    return arm_of_run(run_dir)


def server_of(args: argparse.Namespace) -> Server | None:
    """Return the server that ``evaluate`` is to ask.

    Raises:
        DataError: A setting of a server is given, and no server; or a number is out of range.
    """
    from mtp_train.study.beside import Server

    if args.endpoint is None:
        for flag in ("served_model", "api_key_env", "served_only"):
            if vars(args)[flag]:
                name = flag.replace("_", "-")
                raise DataError(f"--{name}: given without --endpoint; expected a server. Add --endpoint URL.")
        return None
    if args.concurrency < 1:
        raise DataError(f"--concurrency: {args.concurrency}; expected 1 or more. Correct it.")
    return Server(
        url=args.endpoint,
        checkpoint=subject(args).trunk,
        model=args.served_model,
        api_key_env=args.api_key_env,
        concurrency=args.concurrency,
    )


def _unique(values: Sequence[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


def _context(text: str) -> int | None:
    if text == "own":
        return None
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}'; expected a number of tokens, or own")
    return int(text)
