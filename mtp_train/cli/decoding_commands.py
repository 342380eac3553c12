"""The commands that decode: ``generate``, ``evaluate`` and ``compare``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

import mtp_train as mtp
from mtp_train.cli.output import Result, add_command, progress_of, rendered
from mtp_train.errors import printable

RULES = ("greedy", "argmax", "sampled")
PACKINGS = ("none", "8bit", "4bit")


def add_generate(commands: Any) -> None:
    """Declare ``generate``."""
    command = add_command(commands, "generate", "decode with the built-in speculative decoder")
    command.add_argument("checkpoint")
    command.add_argument(
        "--head",
        help="a head directory, a draft model, a checkpoint to take one from, an assistant, ngram, or model:CKPT "
        "(default: its own)",
    )
    command.add_argument("--adapter", metavar="DIR", help="a peft adapter for the trunk, applied without merging")
    command.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    command.add_argument("--chat", action="store_true", help="put the prompt through the chat template")
    command.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="longest response, in tokens")
    command.add_argument(
        "--depth", type=int, default=3, metavar="K", help="drafts per round, 0 to 7; 0 is plain decoding"
    )
    command.add_argument(
        "--mtp",
        choices=("on", "off", "auto"),
        default="on",
        help="off is plain decoding; auto drafts what pays",
    )
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    command.add_argument("--top-k", type=int, default=0, metavar="N", help="0 is off")
    command.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off")
    command.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 is off")
    command.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="1 is off")
    command.add_argument("--seed", type=int, default=0, metavar="S", help="of the first prompt; prompt i has S + i")
    command.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    command.add_argument(
        "--draft-sampling",
        choices=("argmax", "sampled"),
        default="sampled",
        help="how drafts are chosen above temperature 0; sampled drafts are accepted more often",
    )
    command.add_argument(
        "--show-drafts", action="store_true", help="mark accepted drafts: green, or in brackets without a terminal"
    )
    command.set_defaults(handler=_generate)


def add_evaluate(commands: Any) -> None:
    """Declare ``evaluate``."""
    command = add_command(commands, "evaluate", "acceptance and speed by task, temperature, context, depth and rule")
    command.add_argument(
        "checkpoint", metavar="CKPT|RUN", help="a checkpoint, or the directory of a run: its trunk and its trained head"
    )
    command.add_argument(
        "--head",
        help="a head directory, a checkpoint to take one from, an assistant, ngram, or model:CKPT (default: its own)",
    )
    command.add_argument("--adapter", metavar="DIR", help="a peft adapter for the trunk, applied without merging")
    command.add_argument(
        "--trunk-bits",
        nargs="+",
        choices=PACKINGS,
        help="pack the trunk: an arm for each (default: none, or as in a run's recipe)",
    )
    command.add_argument(
        "--head-bits", nargs="+", choices=PACKINGS, default=["none"], help="pack the head: an arm for each"
    )
    command.add_argument("--endpoint", metavar="URL", help="measure a server too, as http://host:port/v1")
    command.add_argument("--served-model", metavar="NAME", help="its name for the model (default: the only one)")
    command.add_argument("--api-key-env", metavar="VAR", help="the environment variable with the server's key")
    command.add_argument("--concurrency", type=int, default=1, metavar="N", help="requests to the server at a time")
    command.add_argument(
        "--request-timeout",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="longest wait for it to send a part of a response (default: 3600)",
    )
    command.add_argument("--served-only", action="store_true", help="measure the server alone; load no weights here")
    _add_grid(command)
    command.set_defaults(handler=_evaluate)


def add_compare(commands: Any) -> None:
    """Declare ``compare``."""
    command = add_command(commands, "compare", "measure several arms, and test which differences are real")
    command.add_argument(
        "arms",
        nargs="+",
        metavar="[NAME=]TRUNK[+HEAD]",
        help="a checkpoint with its own head, a trunk + what drafts (see evaluate --head), or the directory of a run; "
        "@8bit or @4bit behind one packs it, @none behind a run ignores its recipe's quantisation",
    )
    _add_grid(command)
    command.set_defaults(handler=_compare)


def _add_grid(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--suite",
        default="auto",
        help="builtin, demo, mt-bench:LOC, spec-bench:LOC, speed-bench:LOC, humaneval:LOC, gsm8k:LOC, or a file",
    )
    command.add_argument("--tasks", nargs="+", metavar="TASK", help="only these tasks of the suite")
    command.add_argument("--prompts-per-task", type=int, default=8, metavar="N", help="prompts to decode of each task")
    command.add_argument(
        "--temperatures", nargs="+", type=float, default=[0.0, 1.0], metavar="T", help="of the trunk; 0 is greedy"
    )
    command.add_argument(
        "--contexts",
        nargs="+",
        type=_context,
        default=[None],
        metavar="N|own",
        help="extend prompts to these lengths with text before them (default: own, as they are)",
    )
    command.add_argument(
        "--depths",
        nargs="+",
        type=int,
        metavar="K",
        help="drafts per round (default: 1 2 3 5, if the heads can)",
    )
    command.add_argument(
        "--rules",
        nargs="+",
        choices=RULES,
        default=list(RULES),
        help="greedy at temperature 0; above: argmax drafts, or sampled ones with rejection",
    )
    command.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="longest response, in tokens")
    command.add_argument("--batch", type=int, default=1, metavar="N", help="prompts decoded together")
    command.add_argument("--seed", type=int, default=0, metavar="S", help="of sampling and of the choice of prompts")
    command.add_argument("--no-costs", dest="costs", action="store_false", help="leave out memory and prefill of heads")
    command.add_argument("--wandb", choices=("off", "offline", "online"), default="off", help="track the report")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory, or one to resume")


def _context(text: str) -> int | None:
    if text == "own":
        return None
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}'; expected a number of tokens, or own")
    return int(text)


def _generate(args: argparse.Namespace) -> Result:
    from mtp_inference import Sampling

    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
    streams = not (args.json or args.show_drafts or len(args.prompt) > 1)
    with progress_of(args) as progress:
        done = mtp.generate(
            args.checkpoint,
            args.prompt,
            head=args.head,
            adapter=args.adapter,
            chat=args.chat,
            max_new_tokens=args.max_new_tokens,
            depth=args.depth,
            mtp=args.mtp,
            sampling=sampling,
            stop=args.stop,
            draft_sampling=args.draft_sampling,
            on_text=_print_piece if streams else None,
            progress=progress,
        )
    if not args.json:
        print(f"{chr(10) * streams}{done.summary}", file=sys.stderr)
    if args.show_drafts:
        console = Console(soft_wrap=True)
        with console.capture() as capture:
            console.print(done.marked(brackets=not console.is_terminal), end="")
        return Result(done.to_json(), capture.get(), styled=True)
    return Result(done.to_json(), "" if streams else str(done))


def _print_piece(text: str) -> None:
    print(printable(text), end="", flush=True)


def grid_of(args: argparse.Namespace) -> mtp.EvaluationGrid:
    """Return the grid of settings that the arguments of ``evaluate`` or ``compare`` describe."""
    return mtp.EvaluationGrid(
        suite=args.suite,
        tasks=args.tasks,
        prompts_per_task=args.prompts_per_task,
        temperatures=args.temperatures,
        contexts=args.contexts,
        depths=args.depths,
        rules=args.rules,
        max_new_tokens=args.max_new_tokens,
        batch=args.batch,
        seed=args.seed,
    )


def _evaluate(args: argparse.Namespace) -> Result:
    with progress_of(args) as progress:
        done = mtp.evaluate(
            args.checkpoint,
            args.out,
            head=args.head,
            adapter=args.adapter,
            trunk_bits=args.trunk_bits,
            head_bits=args.head_bits,
            grid=grid_of(args),
            endpoint=args.endpoint,
            served_model=args.served_model,
            api_key_env=args.api_key_env,
            concurrency=args.concurrency,
            request_timeout_seconds=args.request_timeout,
            served_only=args.served_only,
            costs=args.costs,
            wandb=args.wandb,
            progress=progress,
        )
    return _measured(done)


def _compare(args: argparse.Namespace) -> Result:
    with progress_of(args) as progress:
        done = mtp.compare(
            args.arms, args.out, grid=grid_of(args), costs=args.costs, wandb=args.wandb, progress=progress
        )
    return _measured(done)


def _measured(done: mtp.EvaluationResult) -> Result:
    # A draft that changes the text is a bug of the decoder, whatever the figures are.
    lossless = done.report.lossless
    return Result(done.to_json(), rendered(done), 1 if lossless and lossless.faults else 0, styled=True)
