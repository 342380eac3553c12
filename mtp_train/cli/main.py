"""``mtp-train``: parse the command line, run the command, print its result, and turn errors into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import inspect
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

import mtp_train as mtp
from mtp_train.errors import printable
from mtp_train.progress import is_main_process, progress_on
from mtp_train.train.stopping import Stopped, stopped_by_signals

_CHANGE = re.compile(r"[a-z]+\.[a-z_0-9.]+=")
CLOSED_PIPE = 141
"""Exit code where nobody reads stdout any more, as of a program that SIGPIPE ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default the one of ``sys.argv``; return its exit code.

    0 done, 2 wrong input, 3 the gate refused, 143 or 130 stopped by SIGTERM or SIGINT, 141 stdout was closed. A bug
    leaves as a traceback (exit code 1).
    """
    try:
        with stopped_by_signals():
            return _run(list(sys.argv[1:] if argv is None else argv))
    except Stopped as stopped:
        if is_main_process():
            print(
                f"mtp-train: stopped by {stopped}.\n"
                "Start the same command again; run, regenerate, evaluate and compare go on from what they saved.",
                file=sys.stderr,
            )
        return stopped.exit_code
    except BrokenPipeError:
        # The reader of a pipe, such as head, has read enough. Python's own flush at exit must not fail on it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _run(arguments: list[str]) -> int:
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:
        # A shell asks for completions; the process ends here.
        import argcomplete

        argcomplete.autocomplete(parser)
    if not arguments:
        parser.print_help()
        return 0
    # A recipe's path, or a name so close to one that no command is taken for it; `run` corrects a mistyped name.
    if arguments[0].endswith((".yaml", ".yml")) or difflib.get_close_matches(
        arguments[0], [recipe.name for recipe in mtp.recipes().recipes], n=1, cutoff=0.8
    ):
        arguments.insert(0, "run")
    if arguments[0] not in EXAMPLES and (near := difflib.get_close_matches(arguments[0], EXAMPLES, n=1)):
        parser.error(f"no command {arguments[0]!r}; did you mean {near[0]}?")
    args = parse(parser, arguments)
    quieten_libraries(verbose=args.verbose)
    try:
        # With --json stdout is for the one document: output of libraries goes to stderr.
        with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
            found = args.handler(args)
            result = found if isinstance(found, Printed) else Printed(found.to_json(), str(found))
    except mtp.MtpError as error:
        if args.verbose:
            traceback.print_exc()
        # Another node's main process may be the one that was lost: each node prints that one is.
        ends_node = isinstance(error, mtp.LostProcessError) and os.environ.get("LOCAL_RANK") == "0"
        if is_main_process() or error.of_one_process or ends_node:
            print(f"mtp-train: {error}", file=sys.stderr)
        return error.exit_code
    if is_main_process() and (result.text or args.json):
        text = result.text if result.styled else printable(result.text)
        print(json.dumps(result.document, indent=2, allow_nan=False) if args.json else text, flush=True)
    return result.exit_code


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. An unknown one is an error of the command that it was given to."""
    args, unknown = parser.parse_known_args(arguments)
    if hasattr(args, "data"):
        # Hints name changes to add to a command, which may end in --data.
        unknown += [word for word in args.data if _CHANGE.match(word)]
        args.data = [path for path in args.data if path not in unknown]
    if hasattr(args, "overrides"):
        # argparse takes a list of words in one place only; changes to a recipe may follow options.
        changes = [word for word in unknown if word[0] != "-" and "=" in word]
        args.overrides = [*args.overrides, *changes]
        unknown = [word for word in unknown if word not in changes]
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    for name in ("chat_template_kwargs", "columns"):
        if pairs := getattr(args, name, None):
            setattr(args, name, dict(pairs))
    if getattr(args, "columns", None) and hasattr(args, "data"):
        columns = json.dumps(args.columns)
        args.overrides += [f"data.sources.{number}.columns={columns}" for number in range(max(1, len(args.data)))]
    return args


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mtp-train",
        description="Put the MTP head back on a fine-tuned model, retrain it, prove the gain, and export it. A recipe "
        "in the place of COMMAND is run.",
        epilog='completion in bash and zsh: eval "$(register-python-argcomplete mtp-train)"',
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mtp-train {mtp.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add_some in (_add_runs, _add_checkpoints, _add_generate, _add_evaluate, _add_compare):
        add_some(commands)
    return parser


def quieten_libraries(*, verbose: bool = False) -> None:
    """Keep progress bars and notices of the libraries off the terminal; their errors still show.

    Libraries read the variables when they are imported, which is later than this.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if verbose:
        logging.basicConfig(level=logging.INFO)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "info")
        return
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for library in ("torch.distributed.elastic", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)


class Printed(NamedTuple):
    """Output of a command whose text or exit code differs from its result's."""

    document: Any
    """Plain JSON values, for ``--json``."""
    text: str
    """Empty if it is printed already."""
    exit_code: int = 0
    styled: bool = False
    """Whether the text has the terminal's own control characters, as a table in colours has."""


Handler = Callable[[argparse.Namespace], Any]
"""Returns a result of the public API, or what to print of it."""


class WithDefaults(argparse.RawDescriptionHelpFormatter):
    """Print the default of every option, unless its help already contains one; do not break examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        default = action.default
        says_nothing = str(default) in ("None", "False", "[]", argparse.SUPPRESS)
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


def call(args: argparse.Namespace, **given: Any) -> Any:
    """Call the command's function of the public API with the arguments that have the names of its parameters.

    Args:
        given: Further arguments, and other values for those of the command line.
    """
    if hasattr(args, "recipe"):
        # The libraries that run a recipe take seconds to import: a wrong field is told before.
        from mtp_train.recipe.loading import load_recipe

        load_recipe(args.recipe, args.overrides)
    function = getattr(mtp, "write_recipe" if args.command == "init" else args.command)
    parameters = inspect.signature(function).parameters
    given = {key: value for key, value in vars(args).items() if key in parameters} | given
    if "console" in parameters:
        # Tables are on stdout, with ``--json`` on stderr.
        given["console"] = Console(highlight=False, quiet=args.quiet or not is_main_process())
    if "progress" not in parameters or "progress" in given:
        return function(**given)
    with progress_on(Console(stderr=True, highlight=False, quiet=args.quiet)) as progress:
        return function(**given, progress=progress)


def add_command(
    commands: Any, name: str, text: str, handler: Handler = call, **settings: Any
) -> argparse.ArgumentParser:
    """Add a subcommand with the options of all commands to the parser's commands and return its parser."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        formatter_class=WithDefaults,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example: mtp-train {name} {EXAMPLES[name]}".rstrip(),
        **settings,
    )
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    command.add_argument("-q", "--quiet", action="store_true", help="print the result and errors only")
    command.add_argument("-v", "--verbose", action="store_true", help="print messages of libraries, and tracebacks")
    command.set_defaults(parser=command, handler=handler)
    return command


KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0")
RULES = ("greedy", "argmax", "sampled")
DRAFT_STYLE = "\x1b[4;32m", "\x1b[0m"
"""Control sequences of a terminal around an accepted draft: green and underlined."""
BASE = "--base", "--from"
_KEY = "the environment variable with the server's key"


def _add_runs(commands: Any) -> None:
    _add_recipe(commands, "run", "run or resume a recipe: regenerate, train, evaluate, gate, export", _run_recipe)

    check = _add_recipe(commands, "check", "check a recipe and print its plan; reads no weights", _check)
    check.add_argument(
        "--processes",
        type=_count,
        metavar="N",
        help="processes that will train (default: train.processes, else as launched)",
    )
    _add_device(check)
    check.add_argument(
        "--show",
        choices=("recipe", "data"),
        help="in place of the plan: the resolved recipe, with the reasons for its automatic settings; or records as "
        "the model reads them, what is trained on in «»",
    )

    add_command(commands, "recipes", "list the recipes and accelerate files of the package")

    init = add_command(commands, "init", "write a recipe for a model")
    init.add_argument("out", type=Path, metavar="FILE", help="the new recipe, as my-model.yaml")
    init.add_argument("--trunk", required=True, metavar="CKPT", help="the model, or a peft adapter of the base")
    init.add_argument(*BASE, metavar="BASE", help="the checkpoint it was fine-tuned from, with the head")
    _add_data(init)
    init.add_argument("--processes", type=_count, metavar="N", help="refuse a launch of another number of processes")
    _add_device(init)

    _add_recipe(commands, "regenerate", "only generate the trunk's answers to the recipe's prompts")

    probe = add_command(
        commands, "probe", "find out in minutes whether a rescue will help, or how an engine wires a head", _probe
    )
    _add_pair(probe, required=False)
    probe.add_argument("--drafts", type=Path, metavar="FILE", help="in place of --from: drafts of an engine")
    probe.add_argument("--endpoint", metavar="URL", help="in place of --from: a server that counts its drafts")
    probe.add_argument("--head", help="with these two: the head that drafts (default: the checkpoint's own)")
    probe.add_argument("--served-model", metavar="NAME", help="the server's name for the model (default: the only one)")
    probe.add_argument("--api-key-env", metavar="VAR", help=_KEY)
    probe.add_argument("--out", type=Path, metavar="DIR", help="the measurements (default: FINETUNE-rescued/probe)")
    _add_data(probe)

    rescue = add_command(commands, "rescue", "put the base's head back, retrained if that helps")
    _add_pair(rescue)
    rescue.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run; the checkpoint is DIR/export")
    _add_data(rescue)


def _add_pair(command: argparse.ArgumentParser, *, required: bool = True) -> None:
    command.add_argument("fine_tune", metavar="finetune", help="a checkpoint, or a peft adapter of the base")
    command.add_argument(*BASE, required=required, metavar="BASE", help="its base, with the head")


def _add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device",
        metavar="NAME",
        help="plan for h100, h200, b200, a100, l40s, rtx4090, rtx5090 or mi300x, or a GPU of 24GiB (default: this "
        "machine's)",
    )


def _add_data(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="prompts like those that the model will serve (default: built-in ones)",
    )
    _add_columns(command.add_argument)
    command.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="section.field=value")


def _add_columns(add: Any) -> None:
    add(
        "--columns",
        nargs="+",
        type=_pair,
        metavar="OURS=THEIRS",
        help="names of columns in the data, as instruction=question output=answer",
    )


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"'{text}'; expected NAME=VALUE")
    return name, value


def _add_recipe(commands: Any, name: str, text: str, handler: Handler = call) -> argparse.ArgumentParser:
    command = add_command(commands, name, text, handler, allow_abbrev=False)
    command.add_argument("recipe", type=Path, help="a YAML file, or a name that mtp-train recipes lists")
    command.add_argument("overrides", nargs="*", metavar="section.field=value")
    return command


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; expected 1 or more")
    return number


def _probe(args: argparse.Namespace) -> Any:
    training = [args.base, args.out, *args.data, *args.overrides]
    server = [args.served_model, args.api_key_env]
    if args.drafts:
        name = "probe_drafts"
        wrong = [*training, args.endpoint, *server]
    elif args.endpoint:
        name = "probe_endpoint"
        wrong = training
    else:
        name = "probe"
        wrong = [args.head, *server, args.base is None]
    if any(wrong):
        raise mtp.DataError(
            "probe: its options are of three probes; expected --from BASE with --data, --out and --set, or --drafts "
            "FILE with --head, or --endpoint URL with --head, --served-model and --api-key-env. Leave the others out."
        )
    args.command = name
    args.checkpoint = args.fine_tune
    return call(args)


def _run_recipe(args: argparse.Namespace) -> Printed:
    try:
        done = call(args)
    except mtp.GateRefusedError as error:
        done = mtp.RunResult(error.exit_code, error.reason, str(error), "done", error.run_dir or Path())
        if not args.json:
            if is_main_process() and done.page is not None:
                print(f"report: {done.page}")
            raise
        # With --json a refusal is a result like any other: a script reads the verdict from the document.
    return Printed(done.to_json(), str(done), done.exit_code)


def _check(args: argparse.Namespace) -> Printed:
    found = call(args)
    is_refused = found.room.problem is not None and args.device is not None
    shown = {"recipe": found.resolved_yaml().rstrip(), "data": found.shown or str(found), None: str(found)}
    return Printed(found.to_json(), shown[args.show], mtp.MtpError.exit_code if is_refused else 0)


def _add_checkpoints(commands: Any) -> None:
    inspected = add_command(commands, "inspect", "report the state of a checkpoint's head")
    inspected.add_argument("checkpoint")
    inspected.add_argument(*BASE, metavar="BASE", help="the checkpoint it was fine-tuned from")

    graft = add_command(commands, "graft", "put the base's head back on a fine-tune")
    graft.add_argument("fine_tune", metavar="finetune")
    graft.add_argument(*BASE, required=True, metavar="BASE", help="the checkpoint it was fine-tuned from")
    graft.add_argument("--head", choices=KINDS, help="its storage in a GGUF file (default: q8_0, or as BASE has it)")
    _add_output(graft)

    merge = add_command(commands, "merge", "merge a LoRA adapter into a checkpoint, head kept")
    merge.add_argument("checkpoint")
    merge.add_argument("--adapter", required=True, metavar="DIR", help="a peft LoRA adapter: a directory or a hub id")
    _add_output(merge)

    export = add_command(commands, "export", "write a servable checkpoint of a run")
    export.add_argument("source", type=Path, metavar="RUN|CKPT")
    _add_output(export)
    form = export.add_mutually_exclusive_group()
    form.add_argument("--gguf", choices=KINDS, help="the head alone, as a GGUF file for llama.cpp")
    form.add_argument("--head-only", action="store_true", help="the head alone, as a draft model for vLLM")

    demo = add_command(commands, "demo", "write the embedded demo: two checkpoints and prompts")
    demo.add_argument("out", type=Path, metavar="DIR")


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    command.add_argument("--copy", action="store_true", help="copy unchanged shards instead of hard-linking them")


def _add_compare(commands: Any) -> None:
    add = add_command(
        commands, "compare", "measure several arms, and test which differences are real", _measure
    ).add_argument
    arms = "a checkpoint with its own head, a trunk + what drafts (see evaluate --head), or the directory of a run; "
    arms += "@8bit or @4bit behind one packs it, @none behind a run ignores its recipe's quantisation; or NAME=URL: "
    arms += "servers of one trunk, or NAME=DIR of finished evaluations of servers; the second of two is judged against "
    arms += "the first (exit code 3: not better)"
    add("arms", nargs="+", metavar="[NAME=]TRUNK[+HEAD]", help=arms)
    written = "writes the prompts for servers (default: the first server's files)"
    add("--tokenizer", metavar="CKPT", help=written)
    judges = "a run without a gate, whose baseline and export two evaluations measured: record the verdict in it"
    add("--judges", metavar="RUN", help=judges)
    add("--api-key-env", metavar="VAR", help=_KEY)
    loads = "requests to a server at a time; several numbers measure it at each, as NAME@N (default: 1)"
    add("--concurrency", nargs="+", type=int, default=[1], metavar="N", help=loads)
    _add_grid(add)


def _add_generate(commands: Any) -> None:
    add = add_command(commands, "generate", "decode with the built-in speculative decoder", _generate).add_argument
    add("checkpoint")
    _add_drafter(add)
    several = "may be given several times; with --chat and none, the lines of stdin are the turns of a conversation"
    add("--prompt", dest="prompts", action="append", default=[], metavar="TEXT", help=several)
    add("--chat", action="store_true", help="put the prompt through the chat template")
    add("--show-drafts", action="store_true", help="underline the accepted drafts of a single text")
    _add_variables(add)
    add("--max-new-tokens", type=int, default=128, metavar="N", help="longest response, in tokens")
    add("--depth", type=int, default=3, metavar="K", help="drafts per round, as far as the head can; 0 is none")
    add("--mtp", choices=("on", "off", "auto"), default="on", help="off is plain decoding; auto drafts what pays")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    add("--top-k", type=int, default=0, metavar="N", help="0 is off")
    add("--top-p", type=float, default=1.0, metavar="P", help="1 is off")
    add("--min-p", type=float, default=0.0, metavar="P", help="0 is off")
    add("--seed", type=int, default=0, metavar="S", help="of the first prompt; prompt i has S + i")
    add(
        "--draft-sampling",
        choices=("argmax", "sampled"),
        default="sampled",
        help="how drafts are chosen above temperature 0; sampled drafts are accepted more often",
    )


def _add_drafter(add: Any) -> None:
    drafter = "a head directory, a draft model, a checkpoint to take one from, an assistant, or ngram"
    add("--head", help=f"{drafter} (default: its own)")
    add("--adapter", metavar="DIR", help="a peft adapter for the trunk, applied without merging")


def _add_evaluate(commands: Any) -> None:
    add = add_command(
        commands, "evaluate", "measure acceptance and speed by task, temperature, context, depth and rule", _measure
    ).add_argument
    add(
        "checkpoint", metavar="CKPT|RUN", help="a checkpoint, or the directory of a run: its trunk and its trained head"
    )
    _add_drafter(add)
    add("--endpoint", metavar="URL", help="measure a server too, as http://host:port/v1")
    add("--served-model", metavar="NAME", help="its name for the model (default: the only one)")
    add("--api-key-env", metavar="VAR", help=_KEY)
    add("--concurrency", type=int, default=1, metavar="N", help="requests to a server at a time")
    add("--served-only", action="store_true", help="measure the server alone; load no weights here")
    _add_grid(add)


def _add_grid(add: Any) -> None:
    add(
        "--suite",
        default="auto",
        help="builtin, demo, mt-bench:LOC, spec-bench:LOC, speed-bench:LOC, humaneval:LOC, gsm8k:LOC, or a file",
    )
    _add_columns(add)
    add("--tasks", nargs="+", metavar="TASK", help="only these tasks of the suite")
    add("--prompts-per-task", type=int, default=8, metavar="N", help="prompts to decode of each task")
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0], metavar="T", help="of the trunk; 0 is greedy")
    _add_variables(add)
    add(
        "--contexts",
        nargs="+",
        type=_context,
        default=[None],
        metavar="N|own",
        help="extend prompts to these lengths with text before them (default: own, as they are)",
    )
    add("--depths", nargs="+", type=int, metavar="K", help="drafts per round (default: 1 2 3 5, if the heads can)")
    add(
        "--rules",
        nargs="+",
        choices=RULES,
        default=list(RULES),
        help="greedy at temperature 0; above: argmax drafts, or sampled ones with rejection",
    )
    add("--max-new-tokens", type=int, default=128, metavar="N", help="longest response, in tokens")
    add("--batch", type=int, default=16, metavar="N", help="most prompts decoded together for acceptance")
    add("--seed", type=int, default=0, metavar="S", help="of sampling and of the choice of prompts")
    add("--wandb", choices=("off", "offline", "online"), default="off", help="track the report")
    add("--out", type=Path, required=True, metavar="DIR", help="a new directory, or one to resume")


def _add_variables(add: Any) -> None:
    add(
        "--chat-template-kwargs",
        nargs="+",
        action="extend",
        type=_variable,
        metavar="NAME=VALUE",
        help="variables for the chat template, with values in JSON or text, as enable_thinking=false",
    )


def _variable(text: str) -> tuple[str, Any]:
    name, value = _pair(text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _context(text: str) -> int | None:
    if text == "own":
        return None
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}'; expected a number of tokens, or own")
    return int(text)


def _generate(args: argparse.Namespace) -> Printed:
    from mtp_inference import Sampling

    if not (args.prompts or args.chat):
        raise mtp.DataError("--prompt: missing; expected a text, or --chat for a conversation. Add --prompt 'TEXT'.")
    sampling = Sampling(**of_fields(args, Sampling))
    streams = not (args.json or len(args.prompts) > 1)
    with progress_on(Console(stderr=True, highlight=False, quiet=args.quiet)) as progress:

        def show(text: str, is_draft: bool) -> None:
            # A live bar would draw over the text, and print what goes to stdout line by line itself.
            progress.stop()
            before, after = DRAFT_STYLE if is_draft and args.show_drafts else ("", "")
            print(f"{before}{printable(text)}{after}", end="", flush=True)

        given = {"sampling": sampling, "on_text": show if streams else None, "progress": progress}
        if not args.prompts:
            return _converse(args, given)
        done = call(args, **given)
    if streams:
        print(flush=True)
    if not args.json:
        print(done.summary, file=sys.stderr)
    return Printed(done.to_json(), "" if streams else str(done))


def _converse(args: argparse.Namespace, given: dict[str, Any]) -> Printed:
    """Answer the lines of stdin, each after the last one's answer, and print how each was decoded."""
    args.command = "converse"
    answers = list[Any]()
    for done in call(args, turns=_turns(given["progress"]), **given):
        if not args.json:
            print(flush=True)
            print(done.summary, file=sys.stderr)
        answers += done.to_json()["requests"]
    return Printed({"requests": answers}, "")


def _turns(progress: Progress) -> Iterator[str]:
    """Yield the lines of stdin that have text, until it ends."""
    progress.stop()
    with contextlib.suppress(EOFError):
        while True:
            if turn := input("> " if sys.stdin.isatty() else "").strip():
                yield turn


def of_fields(args: argparse.Namespace, record: Any) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in fields(record)}


def _measure(args: argparse.Namespace) -> Printed:
    done = call(args, grid=mtp.EvaluationGrid(**of_fields(args, mtp.EvaluationGrid)))
    console = Console()
    with console.capture() as capture:
        console.print(done)
    # A draft that changes the text is a bug of the decoder, whatever the figures are.
    gate = done.report.gate
    refused = mtp.GateRefusedError.exit_code if gate is not None and not gate.passed else 0
    exit_code = 1 if done.report.faults else refused
    return Printed(done.to_json(), capture.get().rstrip(), exit_code, styled=True)
