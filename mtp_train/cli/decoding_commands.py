"""The commands that decode: ``generate``, ``evaluate`` and ``compare``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

import mtp_train as mtp
from mtp_train.cli.output import Printed, add_command, chosen, progress_of, rendered
from mtp_train.errors import printable

RULES = ("greedy", "argmax", "sampled")
PACKINGS = ("none", "8bit", "4bit")


_DRAFTER = "a head directory, a draft model, a checkpoint to take one from, an assistant, ngram, or model:CKPT"


def add_commands(commands: Any) -> None:
    """Declare the commands."""
    generate = add_command(commands, "generate", "decode with the built-in speculative decoder", _generate)
    _add_generate(generate.add_argument)
    text = "measure acceptance and speed by task, temperature, context, depth and rule"
    evaluate = add_command(commands, "evaluate", text, _evaluate)
    _add_evaluate(evaluate.add_argument)
    _add_grid(evaluate.add_argument)
    compare = add_command(commands, "compare", "measure several arms, and test which differences are real", _compare)
    arms = "a checkpoint with its own head, a trunk + what drafts (see evaluate --head), or the directory of a run; "
    arms += "@8bit or @4bit behind one packs it, @none behind a run ignores its recipe's quantisation"
    compare.add_argument("arms", nargs="+", metavar="[NAME=]TRUNK[+HEAD]", help=arms)
    _add_grid(compare.add_argument)


def _add_generate(add: Callable[..., Any]) -> None:
    add("checkpoint")
    add("--head", help=f"{_DRAFTER} (default: its own)")
    add("--adapter", metavar="DIR", help="a peft adapter for the trunk, applied without merging")
    add("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    add("--chat", action="store_true", help="put the prompt through the chat template")
    _add_variables(add)
    add("--max-new-tokens", type=int, default=128, metavar="N", help="longest response, in tokens")
    add("--depth", type=int, default=3, metavar="K", help="drafts per round, 0 to 7; 0 is plain decoding")
    add("--mtp", choices=("on", "off", "auto"), default="on", help="off is plain decoding; auto drafts what pays")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    add("--top-k", type=int, default=0, metavar="N", help="0 is off")
    add("--top-p", type=float, default=1.0, metavar="P", help="1 is off")
    add("--min-p", type=float, default=0.0, metavar="P", help="0 is off")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="1 is off")
    add("--seed", type=int, default=0, metavar="S", help="of the first prompt; prompt i has S + i")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    chooses = "how drafts are chosen above temperature 0; sampled drafts are accepted more often"
    add("--draft-sampling", choices=("argmax", "sampled"), default="sampled", help=chooses)
    marks = "mark accepted drafts: green, or in brackets without a terminal"
    add("--show-drafts", action="store_true", help=marks)


def _add_evaluate(add: Callable[..., Any]) -> None:
    subject = "a checkpoint, or the directory of a run: its trunk and its trained head"
    add("checkpoint", metavar="CKPT|RUN", help=subject)
    add("--head", help=f"{_DRAFTER} (default: its own)")
    add("--adapter", metavar="DIR", help="a peft adapter for the trunk, applied without merging")
    packed = "pack the trunk: an arm for each (default: none, or as in a run's recipe)"
    add("--trunk-bits", nargs="+", choices=PACKINGS, help=packed)
    add("--head-bits", nargs="+", choices=PACKINGS, default=["none"], help="pack the head: an arm for each")
    add("--endpoint", metavar="URL", help="measure a server too, as http://host:port/v1")
    add("--served-model", metavar="NAME", help="its name for the model (default: the only one)")
    add("--api-key-env", metavar="VAR", help="the environment variable with the server's key")
    add("--concurrency", type=int, default=1, metavar="N", help="requests to the server at a time")
    waits = {"type": float, "default": 3600.0, "metavar": "SECONDS", "dest": "request_timeout_seconds"}
    add("--request-timeout", **waits, help="longest wait for it to send a part of a response (default: 3600)")
    add("--served-only", action="store_true", help="measure the server alone; load no weights here")


def _add_grid(add: Callable[..., Any]) -> None:
    suites = "builtin, demo, mt-bench:LOC, spec-bench:LOC, speed-bench:LOC, humaneval:LOC, gsm8k:LOC, or a file"
    add("--suite", default="auto", help=suites)
    add("--tasks", nargs="+", metavar="TASK", help="only these tasks of the suite")
    add("--prompts-per-task", type=int, default=8, metavar="N", help="prompts to decode of each task")
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0], metavar="T", help="of the trunk; 0 is greedy")
    extends = "extend prompts to these lengths with text before them (default: own, as they are)"
    _add_variables(add)
    add("--contexts", nargs="+", type=_context, default=[None], metavar="N|own", help=extends)
    add("--depths", nargs="+", type=int, metavar="K", help="drafts per round (default: 1 2 3 5, if the heads can)")
    rules = "greedy at temperature 0; above: argmax drafts, or sampled ones with rejection"
    add("--rules", nargs="+", choices=RULES, default=list(RULES), help=rules)
    add("--max-new-tokens", type=int, default=128, metavar="N", help="longest response, in tokens")
    add("--batch", type=int, default=16, metavar="N", help="most prompts decoded together for acceptance")
    add("--seed", type=int, default=0, metavar="S", help="of sampling and of the choice of prompts")
    add("--no-costs", dest="costs", action="store_false", help="leave out memory and prefill of heads")
    add("--wandb", choices=("off", "offline", "online"), default="off", help="track the report")
    add("--out", type=Path, required=True, metavar="DIR", help="a new directory, or one to resume")


def _add_variables(add: Callable[..., Any]) -> None:
    variables = "variables for the chat template, with values in JSON or text, as enable_thinking=false"
    given = {"nargs": "+", "action": _Variables, "metavar": "NAME=VALUE"}
    add("--chat-template-kwargs", **given, help=variables)


class _Variables(argparse.Action):
    """Read NAME=VALUE pairs into a mapping."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        found: dict[str, Any] = dict(getattr(namespace, self.dest) or {})
        for pair in values:
            name, equals, text = pair.partition("=")
            if not name or not equals:
                raise argparse.ArgumentError(self, f"'{pair}'; expected NAME=VALUE")
            try:
                found[name] = json.loads(text)
            except ValueError:
                found[name] = text
        setattr(namespace, self.dest, found)


def _context(text: str) -> int | None:
    if text == "own":
        return None
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}'; expected a number of tokens, or own")
    return int(text)


def _generate(args: argparse.Namespace) -> Printed:
    from mtp_inference import Sampling

    sampling = Sampling(**chosen(args, "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"))
    options = chosen(args, "head", "adapter", "chat", "chat_template_kwargs", "max_new_tokens", "depth", "mtp")
    options |= chosen(args, "stop", "draft_sampling")
    streams = not (args.json or args.show_drafts or len(args.prompt) > 1)
    on_text = _print_piece if streams else None
    with progress_of(args) as progress:
        done = mtp.generate(
            args.checkpoint, args.prompt, **options, sampling=sampling, on_text=on_text, progress=progress
        )
    if not args.json:
        print(f"{chr(10) * streams}{done.summary}", file=sys.stderr)
    if args.show_drafts:
        console = Console(soft_wrap=True)
        with console.capture() as capture:
            console.print(done.marked(brackets=not console.is_terminal), end="")
        return Printed(done.to_json(), capture.get(), styled=True)
    return Printed(done.to_json(), "" if streams else str(done))


def _print_piece(text: str) -> None:
    print(printable(text), end="", flush=True)


def grid_of(args: argparse.Namespace) -> mtp.EvaluationGrid:
    """Return the grid of settings that the arguments of ``evaluate`` or ``compare`` describe."""
    return mtp.EvaluationGrid(**chosen(args, *(field.name for field in fields(mtp.EvaluationGrid))))


def _evaluate(args: argparse.Namespace) -> Printed:
    arm = chosen(args, "head", "adapter", "trunk_bits", "head_bits", "costs", "wandb")
    server = chosen(args, "endpoint", "served_model", "api_key_env", "concurrency", "request_timeout_seconds")
    with progress_of(args) as progress:
        return _measured(
            mtp.evaluate(
                args.checkpoint,
                args.out,
                **arm,
                **server,
                served_only=args.served_only,
                grid=grid_of(args),
                progress=progress,
            )
        )


def _compare(args: argparse.Namespace) -> Printed:
    with progress_of(args) as progress:
        options = chosen(args, "costs", "wandb")
        return _measured(mtp.compare(args.arms, args.out, **options, grid=grid_of(args), progress=progress))


def _measured(done: mtp.EvaluationResult) -> Printed:
    # A draft that changes the text is a bug of the decoder, whatever the figures are.
    lossless = done.report.lossless
    return Printed(done.to_json(), rendered(done), 1 if lossless and lossless.faults else 0, styled=True)
