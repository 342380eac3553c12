"""The commands that read and write checkpoints: ``inspect``, ``graft``, ``merge``, ``export``, ``demo``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mtp_train as mtp
from mtp_train.cli.output import Result, add_command, chosen, progress_of

KINDS = ("f32", "f16", "bf16", "q8_0")


def add_commands(commands: Any) -> None:
    """Declare the commands."""
    inspect = add_command(commands, "inspect", "report the state of a checkpoint's head", _inspect)
    inspect.add_argument("checkpoint")
    inspect.add_argument("--base", help="the checkpoint it was fine-tuned from")

    graft = add_command(commands, "graft", "put the base's head back on a fine-tune", _graft)
    graft.add_argument("finetune")
    graft.add_argument("--from", dest="base", required=True, metavar="BASE")
    graft.add_argument("--head", choices=KINDS, help="its storage in a GGUF file (default: q8_0, or as BASE has it)")
    _add_output(graft)

    merge = add_command(commands, "merge", "merge a LoRA adapter into a checkpoint, head kept", _merge)
    merge.add_argument("checkpoint")
    merge.add_argument("--adapter", required=True, metavar="DIR", help="a peft LoRA adapter: a directory or a hub id")
    _add_output(merge)

    export = add_command(commands, "export", "write a servable checkpoint of a run", _export)
    export.add_argument("source", type=Path, metavar="RUN|CKPT")
    _add_output(export)
    form = export.add_mutually_exclusive_group()
    form.add_argument("--gguf", choices=KINDS, help="the head alone, as a GGUF file for llama.cpp")
    form.add_argument("--head-only", action="store_true", help="the head alone, as a draft model for vLLM")
    form.add_argument("--speculators", action="store_true", help="an EAGLE-3 head in the speculators package's format")

    demo = add_command(commands, "demo", "write the embedded demo: two checkpoints and prompts", _demo)
    demo.add_argument("target", type=Path, metavar="DIR")


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    command.add_argument("--copy", action="store_true", help="copy unchanged shards instead of hard-linking them")


def _inspect(args: argparse.Namespace) -> Result:
    with progress_of(args) as progress:
        return mtp.inspect(args.checkpoint, args.base, progress=progress)


def _graft(args: argparse.Namespace) -> Result:
    with progress_of(args) as progress:
        return mtp.graft(args.finetune, args.base, args.out, head=args.head, copy=args.copy, progress=progress)


def _merge(args: argparse.Namespace) -> Result:
    with progress_of(args) as progress:
        return mtp.merge(args.checkpoint, args.adapter, args.out, copy=args.copy, progress=progress)


def _export(args: argparse.Namespace) -> Result:
    form = chosen(args, "head_only", "gguf", "speculators", "copy")
    with progress_of(args) as progress:
        return mtp.export(args.source, args.out, **form, progress=progress)


def _demo(args: argparse.Namespace) -> Result:
    return mtp.demo(args.target)
