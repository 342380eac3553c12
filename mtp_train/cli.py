"""The one command line. It parses, calls a command, prints its result, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.console import Console, RenderableType
from rich.progress import Progress

from mtp_train.cli_study import add_compare, add_evaluate, add_rescue, evaluated_arms, grid_of, server_of
from mtp_train.errors import GateRefusedError, MtpError

if TYPE_CHECKING:
    from mtp_train.study.arms import ArmSpec
    from mtp_train.study.beside import Server


class Result(NamedTuple):
    """What a command has to say."""

    document: Any
    """For ``--json``."""
    text: str
    exit_code: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; a recipe as the first one means ``run``.

    Returns:
        0 done, 2 wrong input, 3 the gate refused. A bug leaves as a traceback (exit code 1).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        arguments.insert(0, "run")
    args = parser.parse_args(arguments)
    quieten_libraries()
    try:
        # With --json stdout is for the one document: whatever a library prints goes to stderr.
        with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
            result: Result = args.handler(args)
    except MtpError as error:
        if is_main_process() or error.of_one_process:
            print(f"mtp-train: {error}", file=sys.stderr)
        return error.exit_code
    if is_main_process():
        print(json.dumps(result.document, indent=2, allow_nan=False) if args.json else result.text)
    return result.exit_code


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; each command names its handler."""
    parser = argparse.ArgumentParser(
        prog="mtp-train",
        description="Put the MTP head back on a fine-tuned model, retrain it, prove the gain, and export it. A recipe "
        "in the place of COMMAND is run.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")

    _add_recipes(commands, common)

    inspect = commands.add_parser("inspect", parents=[common], help="say what a checkpoint has of a head")
    inspect.add_argument("checkpoint")
    inspect.add_argument("--base", help="the checkpoint it was fine-tuned from")
    inspect.set_defaults(handler=_inspect)

    graft = commands.add_parser("graft", parents=[common], help="put the base's head back on a fine-tune")
    graft.add_argument("finetune")
    graft.add_argument("--from", dest="base", required=True, metavar="BASE")
    _add_output(graft)
    graft.set_defaults(handler=_graft)

    rescue = commands.add_parser("rescue", parents=[common], help="put the base's head back, retrained if that helps")
    add_rescue(rescue)
    rescue.set_defaults(handler=_rescue)

    merge = commands.add_parser("merge", parents=[common], help="merge a LoRA adapter into a checkpoint, head kept")
    merge.add_argument("checkpoint")
    merge.add_argument("--adapter", required=True, metavar="DIR", help="a peft LoRA adapter: a directory or a hub id")
    _add_output(merge)
    merge.set_defaults(handler=_merge)

    export = commands.add_parser("export", parents=[common], help="write a servable checkpoint of a run")
    _add_export(export)
    export.set_defaults(handler=_export)

    generate = commands.add_parser("generate", parents=[common], help="decode with the built-in speculative decoder")
    _add_generate(generate)

    _add_studies(commands, common)

    push = commands.add_parser("push", parents=[common], help="upload an export to the Hugging Face hub")
    push.add_argument("export", type=Path, metavar="EXPORT", help="a checkpoint with a healthy head")
    push.add_argument("repo", metavar="REPO", help="the model repository, OWNER/NAME")
    push.add_argument("--yes", action="store_true", help="upload; without it only what would be uploaded is printed")
    push.set_defaults(handler=_push)

    demo = commands.add_parser("demo", parents=[common], help="write the embedded demo checkpoints")
    demo.add_argument("target", type=Path, metavar="DIR")
    demo.set_defaults(handler=_demo)
    return parser


def _add_studies(commands: Any, common: argparse.ArgumentParser) -> None:
    for name, add, handler, text in (
        ("evaluate", add_evaluate, _evaluate, "acceptance and speed by task, temperature, context, depth and rule"),
        ("compare", add_compare, _compare, "the same of several arms, and which differences are real"),
    ):
        study = commands.add_parser(name, parents=[common], help=text)
        add(study)
        study.set_defaults(handler=handler)


def _add_recipes(commands: Any, common: argparse.ArgumentParser) -> None:
    for name, handler, text in (
        ("run", _run, "run a recipe from where it stands: regenerate, train, evaluate, gate, export"),
        ("check", _check, "check a recipe and print its plan; touches no weights"),
        ("regenerate", _regenerate, "only the stage that lets the trunk answer the recipe's prompts"),
    ):
        command = commands.add_parser(name, parents=[common], help=text, allow_abbrev=False)
        command.add_argument("recipe", type=Path)
        command.add_argument("overrides", nargs="*", metavar="section.field=value")
        command.set_defaults(handler=handler)
    commands.choices["check"].add_argument(
        "--processes", type=_count, metavar="N", help="how many will train; else what a launcher started"
    )


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    command.add_argument("--copy", action="store_true", help="copy unchanged files instead of hard-linking them")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; expected 1 or more")
    return number


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", type=Path, metavar="RUN|CKPT")
    _add_output(command)
    form = command.add_mutually_exclusive_group()
    form.add_argument("--gguf", choices=("f32", "f16", "q8_0"), help="the head alone, as a GGUF file for llama.cpp")
    form.add_argument("--head-only", action="store_true", help="the head alone, to name as vLLM's draft model")
    form.add_argument("--speculators", action="store_true", help="an EAGLE-3 head as the speculators package keeps it")


def _add_generate(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint")
    command.add_argument(
        "--head",
        help="a head directory, a draft model, a checkpoint to take one from, an assistant, ngram, or model:CKPT "
        "(default: its own)",
    )
    command.add_argument("--adapter", metavar="DIR", help="a peft adapter for the trunk, put on unmerged")
    command.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    command.add_argument("--chat", action="store_true", help="put the prompt through the chat template")
    command.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
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
    command.add_argument("--seed", type=int, default=0, metavar="S", help="of the first prompt; the next has S + 1")
    command.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    command.add_argument(
        "--draft-sampling",
        choices=("argmax", "sampled"),
        default="sampled",
        help="how drafts are chosen above temperature 0; sampled drafts are accepted more often",
    )
    command.set_defaults(handler=_generate)


def quieten_libraries() -> None:
    """Keep the libraries' progress bars and notices off the terminal; their errors still show."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("WANDB_SILENT", "true")
    import datasets
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)


def is_main_process() -> bool:
    """Whether this process speaks for all of a launch."""
    return os.environ.get("RANK", "0") == "0"


def _progress(args: argparse.Namespace) -> Progress:
    console = Console(stderr=True)
    return Progress(console=console, disable=args.json or not console.is_terminal, transient=True)


def _run(args: argparse.Namespace) -> Result:
    from mtp_train.pipeline import run
    from mtp_train.recipe_io import load_recipe
    from mtp_train.run_dir import Outcome

    recipe = load_recipe(args.recipe, args.overrides)
    try:
        outcome = run(recipe, Console(quiet=not is_main_process()))
    except GateRefusedError as error:
        if not args.json:
            raise
        # The verdict is a result like any other: a script finds it in the document.
        outcome = Outcome(error.exit_code, "gate_refused", str(error), "done")
    return Result({"run_dir": recipe.run_dir, **outcome.__dict__}, outcome.message, outcome.exit_code)


def _check(args: argparse.Namespace) -> Result:
    from mtp_train.commands.check import check
    from mtp_train.recipe_io import load_recipe

    world_size = args.processes or int(os.environ.get("WORLD_SIZE", "1"))
    result = check(load_recipe(args.recipe, args.overrides), world_size)
    return Result(result.to_json(), result.to_text())


def _regenerate(args: argparse.Namespace) -> Result:
    from mtp_train.pipeline import regenerate_only
    from mtp_train.recipe_io import load_recipe

    with _progress(args) as progress:
        counts = regenerate_only(load_recipe(args.recipe, args.overrides), progress)
    text = "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in counts.items())
    return Result(counts, text)


def _inspect(args: argparse.Namespace) -> Result:
    from mtp_train.commands.inspect import render
    from mtp_train.commands.inspect_drafter import inspect_anything
    from mtp_train.inputs import open_location

    with _progress(args) as progress:
        base = open_location(args.base) if args.base else None
        inspection = inspect_anything(open_location(args.checkpoint), base, progress)
    return Result(inspection.to_json(), render(inspection))


def _graft(args: argparse.Namespace) -> Result:
    from mtp_train.commands.graft import graft

    with _progress(args) as progress:
        graft(args.finetune, args.base, args.out, link="copy" if args.copy else "hard", progress=progress)
    return Result({"out": str(args.out)}, f"Wrote {args.out}: the trunk of {args.finetune}, the head of {args.base}.")


def _rescue(args: argparse.Namespace) -> Result:
    from mtp_train.commands.rescue import rescue

    console = Console(quiet=args.json or not is_main_process())
    rescued = rescue(args.finetune, args.base, args.out, args.data, args.overrides, console)
    return Result(rescued.to_json(), rescued.to_text())


def _merge(args: argparse.Namespace) -> Result:
    from mtp_train.commands.merge import merge

    with _progress(args) as progress:
        report = merge(args.checkpoint, args.adapter, args.out, link="copy" if args.copy else "hard", progress=progress)
    return Result(report.to_json(), report.to_text())


def _export(args: argparse.Namespace) -> Result:
    from mtp_train.commands.graft import export
    from mtp_train.cures import draft_model_flag
    from mtp_train.weights.draft_checkpoint import DraftForm

    if args.gguf:
        return _export_gguf(args)
    link: Literal["hard", "copy"] = "copy" if args.copy else "hard"
    with _progress(args) as progress:
        form: DraftForm = "speculators" if args.speculators else "engines"
        done = export(args.source, args.out, link=link, progress=progress, head_only=args.head_only, form=form)
    if not args.head_only:
        return Result({"out": str(args.out)}, f"Wrote {args.out}.")
    flag = draft_model_flag(str(args.out), done.num_depths)
    text = f"Wrote {args.out}: the head alone. Draft with it: vllm serve {shlex.quote(str(done.trunk))} {flag}"
    return Result({"out": str(args.out), "flag": flag}, text)


def _export_gguf(args: argparse.Namespace) -> Result:
    from mtp_train.commands.export_gguf import export_gguf

    if args.copy:
        raise MtpError("--copy: given with --gguf, which links no files; expected one of them. Leave --copy out.")
    with _progress(args) as progress:
        file = export_gguf(args.source, args.out, kind=args.gguf, progress=progress)
    text = f"Wrote {file}. Serve it: llama-server -m TRUNK.gguf -md {file} --spec-type draft-mtp --spec-draft-n-max 3"
    return Result({"out": str(args.out), "file": str(file)}, text)


def _generate(args: argparse.Namespace) -> Result:
    from mtp_inference import Sampling
    from mtp_train.commands.generate import GenerateRequest, generate

    request = GenerateRequest(
        checkpoint=args.checkpoint,
        head=args.head,
        prompts=tuple(args.prompt),
        chat=args.chat,
        max_new_tokens=args.max_new_tokens,
        depth=args.depth,
        mtp=args.mtp,
        sampling=Sampling(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            seed=args.seed,
        ),
        stop=tuple(args.stop),
        draft_sampling=args.draft_sampling,
        adapter=args.adapter,
    )
    with _progress(args) as progress:
        document = generate(request, progress)
    return Result(document, "\n\n".join(one["text"] for one in document["requests"]))


def _evaluate(args: argparse.Namespace) -> Result:
    return _study(args, evaluated_arms(args), server_of(args))


def _compare(args: argparse.Namespace) -> Result:
    from mtp_train.study.arms import parse_arm

    return _study(args, [parse_arm(text) for text in args.arms], None)


def _study(args: argparse.Namespace, arms: list[ArmSpec], server: Server | None) -> Result:
    from mtp_train.commands.evaluate import study_arms
    from mtp_train.report.study_table import study_summary

    with _progress(args) as progress:
        report = study_arms(arms, grid_of(args, arms), args.out, progress, args.costs, args.wandb, server)
    # A decoder that changed a text is a bug, whatever else the report says.
    exit_code = 1 if report.lossless and report.lossless.faults else 0
    return Result(report.to_json(), _rendered(study_summary(report)), exit_code)


def _rendered(renderable: RenderableType) -> str:
    """Return what a table looks like where stdout goes."""
    console = Console()
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().rstrip()


def _push(args: argparse.Namespace) -> Result:
    from mtp_train.commands.push import push

    with _progress(args) as progress:
        upload = push(args.export, args.repo, yes=args.yes, progress=progress)
    return Result(upload.to_json(), upload.to_text())


def _demo(args: argparse.Namespace) -> Result:
    from mtp_train.demo import write_demo

    write_demo(args.target)
    text = (
        f"Wrote {args.target}/base (trunk and head) and {args.target}/finetune (its head stripped by save_pretrained)."
    )
    return Result({"base": str(args.target / "base"), "finetune": str(args.target / "finetune")}, text)
