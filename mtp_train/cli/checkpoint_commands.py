"""The commands that read and write checkpoints: ``inspect``, ``graft``, ``merge``, ``export``, ``demo``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mtp_train as mtp
from mtp_train.cli.output import Result, add_command, add_output, progress_of


def add_inspect(commands: Any) -> None:
    """Declare ``inspect``."""
    command = add_command(commands, "inspect", "report the state of a checkpoint's head")
    command.add_argument("checkpoint")
    command.add_argument("--base", help="the checkpoint it was fine-tuned from")
    command.set_defaults(handler=_inspect)


def add_graft(commands: Any) -> None:
    """Declare ``graft``."""
    command = add_command(commands, "graft", "put the base's head back on a fine-tune")
    command.add_argument("finetune")
    command.add_argument("--from", dest="base", required=True, metavar="BASE")
    add_output(command)
    command.set_defaults(handler=_graft)


def add_merge(commands: Any) -> None:
    """Declare ``merge``."""
    command = add_command(commands, "merge", "merge a LoRA adapter into a checkpoint, head kept")
    command.add_argument("checkpoint")
    command.add_argument("--adapter", required=True, metavar="DIR", help="a peft LoRA adapter: a directory or a hub id")
    add_output(command)
    command.set_defaults(handler=_merge)


def add_export(commands: Any) -> None:
    """Declare ``export``."""
    command = add_command(commands, "export", "write a servable checkpoint of a run")
    command.add_argument("source", type=Path, metavar="RUN|CKPT")
    add_output(command)
    form = command.add_mutually_exclusive_group()
    form.add_argument("--gguf", choices=("f32", "f16", "q8_0"), help="the head alone, as a GGUF file for llama.cpp")
    form.add_argument("--head-only", action="store_true", help="the head alone, as a draft model for vLLM")
    form.add_argument("--speculators", action="store_true", help="an EAGLE-3 head in the speculators package's format")
    command.set_defaults(handler=_export)


def add_demo(commands: Any) -> None:
    """Declare ``demo``."""
    command = add_command(commands, "demo", "write the embedded demo: two checkpoints and prompts")
    command.add_argument("target", type=Path, metavar="DIR")
    command.set_defaults(handler=_demo)


def _inspect(args: argparse.Namespace) -> Result:
    with progress_of(args) as progress:
        found = mtp.inspect(args.checkpoint, args.base, progress=progress)
    return Result(found.to_json(), str(found))


def _graft(args: argparse.Namespace) -> Result:
    with progress_of(args) as progress:
        done = mtp.graft(args.finetune, args.base, args.out, copy=args.copy, progress=progress)
    return Result(done.to_json(), str(done))


def _merge(args: argparse.Namespace) -> Result:
    with progress_of(args) as progress:
        done = mtp.merge(args.checkpoint, args.adapter, args.out, copy=args.copy, progress=progress)
    return Result(done.to_json(), str(done))


def _export(args: argparse.Namespace) -> Result:
    with progress_of(args) as progress:
        done = mtp.export(
            args.source,
            args.out,
            head_only=args.head_only,
            gguf=args.gguf,
            speculators=args.speculators,
            copy=args.copy,
            progress=progress,
        )
    return Result(done.to_json(), str(done))


def _demo(args: argparse.Namespace) -> Result:
    done = mtp.demo(args.target)
    return Result(done.to_json(), str(done))
