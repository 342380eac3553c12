"""The walk of a new user, on tiny models in a terminal: the commands of the pages, and data in thirty forms."""

from __future__ import annotations

import bz2
import contextlib
import csv
import fcntl
import gzip
import json
import os
import pty
import re
import shutil
import struct
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from drafting_server import DraftingServer
from launching import environment
from llama_server import llama, serving
from mtp_train.checkpoints.tokenizer import eos_token_ids, load_tokenizer
from mtp_train.evaluation.arms import ArmSpec, load_arm_trunk, open_arm
from openai_server import openai_server
from repository import RECIPES, REPOSITORY, shell_commands
from runs import LEARNS, TINY_RESCUE, overrides_of, write_headless, write_inputs, write_recipe
from walker import MARK

SMALL = [*TINY_RESCUE, *overrides_of(**LEARNS)]
# The number of processes that a page plans for divides what is chosen by rule.
BY_RULE = [one for one in SMALL if not one.startswith(("train.tokens_per_step", "track"))]
ATTACHED = {**LEARNS, "data__holdout": 0.4, "data__group_field": "group", "data__seq_len_tokens": 96}
# The gate may refuse the head of a tiny model, and the page looks at the export.
ATTACHED["gate__enabled"] = False
MEASURED = ["--prompts-per-task", "2", "--max-new-tokens", "8", "--temperatures", "0"]
NAMES = {"my-27b": "finetune", "./my-27b": "finetune", "my-model": "finetune"}
NAMES |= {"CKPT": "finetune-mtp"} | dict.fromkeys(("BASE", "Qwen/Qwen3.6-27B"), "base")
# Of a vocabulary of 259 tokens.
NAMES["head.draft_vocab=32000"] = "head.draft_vocab=128"
PAGES = ("README.md", *(f"recipes/{name}.md" for name in ("rescue", "retrain", "attach", "gate", "acceptance")))
# Engines, other models, and what has a test of its own: GGUF files, drafts of an engine, a server of states.
NOT_HERE = re.compile(r"[a-z]\.endpoint|gguf|gemma|drafts\.jsonl|vanilla_vs_distill|\.\.\.|eval/")
SERVER = re.compile(r"http://[\w.]+:\d+(?:/v1)?")


def server_of(word: str, command: Sequence[str]) -> str:
    """Return which server a command asks: one whose counts are scripted, or one that decodes."""
    if word.startswith("stale=") or "my-27b-mtp" in command:
        return "stale"
    return "retrained" if {"compare", "--served-only"} & {*command} else "decoding"


def commands_of(page: str, servers: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the arguments of a page's commands of ours, with small settings and our servers."""
    for number, words in enumerate(shell_commands((REPOSITORY / page).read_text(encoding="utf-8"))):
        if NOT_HERE.search(" ".join(words)) or words[0] not in ("mtp-train", "accelerate"):
            continue
        named = [NAMES.get(word, word) for word in words]
        named = [SERVER.sub(servers[server_of(word, words)], one) for one, word in zip(named, words, strict=True)]
        ours = named[1:] if words[0] == "mtp-train" else ["run", *named[named.index("mtp_train") + 1 :]]
        ours = [f"out-{number}" if one == "DIR" else one for one in ours]
        settings = BY_RULE if ours[0] == "init" else SMALL
        if "attach" in page:
            settings = overrides_of(**ATTACHED)
        more = {"evaluate": MEASURED, "compare": MEASURED, "run": ["track.wandb=off"]}
        more |= {one: ["--set", *settings] for one in ("rescue", "probe", "init")}
        yield [*ours, *([] if "probe" in ours and "--endpoint" in ours else more.get(ours[0], []))]


def chat(asked: str, *, role: str = "role", text: str = "content", user: str = "user", by: str = "assistant") -> Any:
    return [{role: user, text: asked}, {role: by, text: asked[::-1]}]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
SHAREGPT = {"role": "from", "text": "value", "user": "human", "by": "gpt"}
FORMS = {"data__group_field": None, "data__seq_len_tokens": 512, "train__tokens_per_step": 1024}
FORMS["data__regenerate"] = {"max_new_tokens": 24}
ROWS: dict[str, Any] = {
    "messages": lambda q: {"messages": chat(q)},
    "conversations": lambda q: {"conversations": chat(q)},
    "sharegpt": lambda q: {"conversations": chat(q, **SHAREGPT)},
    "sharegpt messages": lambda q: {"messages": chat(q, **SHAREGPT)},
    "system turn": lambda q: {"messages": [{"role": "system", "content": "s"}, *chat(q)]},
    "developer turn": lambda q: {"messages": [{"role": "developer", "content": "s"}, *chat(q)]},
    "system column": lambda q: {"system": "s", "messages": chat(q)},
    "tools": lambda q: {"tools": [TOOL], "messages": chat(q)},
    "tools as text": lambda q: {"tools": json.dumps([TOOL]), "messages": chat(q)},
    "tool calls": lambda q: {"messages": [*chat(q)[:1], CALL, {"role": "tool", "content": "1"}, *chat(q)[1:]]},
    "variables": lambda q: {"chat_template_kwargs": {"enable_thinking": False}, "messages": chat(q)},
    "parts": lambda q: {"messages": [{"role": "user", "content": [{"type": "text", "text": q}]}, *chat(q)[1:]]},
    "several turns": lambda q: {"messages": [*chat(q), *chat(q)]},
    "no answer": lambda q: {"messages": chat(q)[:1]},
    "prompt": lambda q: {"prompt": q},
    "prompt, response": lambda q: {"prompt": q, "response": q[::-1]},
    "prompt, completion": lambda q: {"prompt": q, "completion": q[::-1]},
    "prompt of turns": lambda q: {"prompt": chat(q)[:1], "completion": chat(q)[1:]},
    "alpaca": lambda q: {"instruction": "say", "input": q, "output": q[::-1]},
    "instruction, output": lambda q: {"instruction": q, "output": q[::-1]},
    "other columns": lambda q: {"question": q, "answer": q[::-1]},
}
"""Rows by the form that they have."""


def write_forms(directory: Path) -> Iterator[tuple[str, str]]:
    """Write prompts in thirty forms; yield the name and the path of each."""
    questions = [f"{chr(97 + number) * 7} {number} {chr(122 - number) * 5}" for number in range(24)]
    plain = [ROWS["prompt, response"](one) for one in questions]
    lines = "".join(f"{json.dumps(row)}\n" for row in plain)
    for number, (form, row) in enumerate(ROWS.items()):
        (directory / f"{number}.jsonl").write_text("".join(f"{json.dumps(row(one))}\n" for one in questions))
        yield form, f"{number}.jsonl"
    (directory / "a.json").write_text(json.dumps(plain))
    with (directory / "a.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["prompt", "response"])
        table.writeheader()
        table.writerows(plain)
    datasets.Dataset.from_list(plain).to_parquet(directory / "a.parquet")
    datasets.Dataset.from_list(plain).save_to_disk(directory / "saved")
    (directory / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (directory / "a.json.bz2").write_bytes(bz2.compress(json.dumps(plain).encode()))
    (directory / "parts" / "more").mkdir(parents=True)
    for place, some in (("parts/1.jsonl", plain[:12]), ("parts/more/2.jsonl", plain[12:])):
        (directory / place).write_text("".join(f"{json.dumps(row)}\n" for row in some))
    for path in ("a.json", "a.csv", "a.parquet", "saved", "a.jsonl.gz", "a.json.bz2", "parts", "parts/**/*.jsonl"):
        yield path, path
    (directory / "texts").mkdir()
    for number, one in enumerate(questions):
        (directory / "texts" / f"{number}.txt").write_text(f"{one}\n\n{one[::-1]}\n")
    yield "texts", "texts"


def walked(directory: Path, commands: list[tuple[str, list[str]]], columns: int) -> list[tuple[list[str], str, int]]:
    """Run commands in a terminal of so many columns; return the words, the output and the exit code of each."""
    todo = directory / "todo.json"
    todo.write_text(json.dumps(commands))
    variables = environment(TERM="xterm-256color", HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1")
    variables.pop("COLUMNS", None)
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, str(REPOSITORY / "tests" / "walker.py"), str(todo)], variables)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    shown = bytearray()
    # Linux ends a terminal that nobody writes to with an error.
    with contextlib.suppress(OSError):
        while block := os.read(terminal, 1 << 16):
            shown += block
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, shown[-3000:]
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    _, *found = re.split(rf"^{MARK}", text.replace("\r\n", "\n"), flags=re.MULTILINE)
    starts = [one.partition("\n") for one in found[::2]]
    return [
        (json.loads(words), output, int(code)) for (words, _, output), code in zip(starts, found[1::2], strict=True)
    ]


def too_wide(output: str, columns: int) -> list[str]:
    """Return the lines of tables, boxes and bars that a terminal breaks.

    Sentences and commands are one line each, so that they can be copied whole; the terminal wraps them.
    """
    lines = [line.rstrip() for line in re.split(r"[\r\n]", output)]
    return [line for line in lines if len(line) > columns and re.search(r"\S {2,}\S|[│─━╭╰]", line)]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The addresses of the servers that the pages ask, by :func:`server_of`."""
    directory = tmp_path / "served"
    directory.mkdir()
    write_inputs(directory)
    arm = open_arm(ArmSpec("graft", str(directory / "finetune"), str(directory / "base")))
    trunk = load_arm_trunk(arm, torch.device("cpu"))
    eos_ids = eos_token_ids(arm.checkpoint, load_tokenizer(arm.checkpoint))
    engine = DraftingServer(trunk, arm.load_drafting(trunk), 2, sorted(eos_ids), "vllm")
    decoding = openai_server(engine.reply, owner="vllm", shows=engine.shows)
    with serving(llama(0)) as stale, serving(llama(2)) as retrained, decoding as both:
        yield {"stale": stale.url, "retrained": retrained.url, "decoding": both.url}


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_the_walk_of_a_new_user_ends_well_and_fits_the_terminal(
    servers: dict[str, str], tmp_path: Path, columns: int
) -> None:
    commands = [("README.md", ["--help"]), ("README.md", ["recipes"])]
    for page in PAGES:
        place = tmp_path / Path(page).name
        place.mkdir()
        if "attach" in page:
            write_headless(place, "qwen3")
        else:
            write_inputs(place)
        (place / "recipes").symlink_to(RECIPES)
        if "gate" in page:
            write_recipe(place / "big.yaml", place, place / "runs" / "big", gate__enabled=False, train__max_steps=1)
            commands.append((place.name, ["run", "big.yaml"]))
        if "acceptance" in page:
            commands.append((place.name, ["graft", "finetune", "--from", "base", "--out", "finetune-mtp"]))
        commands += [(place.name, words) for words in commands_of(page, servers)]
    assert len(commands) >= 16
    forms = tmp_path / "forms"
    forms.mkdir()
    shutil.copytree(tmp_path / "README.md" / "finetune", tmp_path / "in" / "finetune")
    shutil.copytree(tmp_path / "README.md" / "base", tmp_path / "in" / "base")
    written = list(write_forms(forms))
    assert len(written) == 30
    write_recipe(forms / "tiny.yaml", tmp_path / "in", forms / "run", **FORMS)
    for form, path in written:
        change = ['data.sources.0.columns={"instruction": "question", "output": "answer"}'] * (form == "other columns")
        own = ["data.regenerate=null"] * (form == "texts")
        commands.append((forms.name, ["check", "tiny.yaml", f"data.sources.0.path={path}", *change, *own]))
    commands.append((forms.name, ["check", "tiny.yaml", "data.sources.0.path=absent.jsonl"]))
    found = walked(tmp_path, commands, columns)
    assert [words for words, *_ in found] == [words for _, words in commands]
    *rest, (_, _, refused) = found
    assert refused == 2, "the control"
    # The gate may refuse the head of a tiny model, at temperature 1 or of another kind.
    failed = [
        (words, output[-1000:]) for words, output, code in rest if code not in ((0, 3) if "run" in words else (0,))
    ]
    assert failed == [], "\n".join(map(str, failed))
    assert {json.dumps(words): lines for words, output, _ in found if (lines := too_wide(output, columns))} == {}


def test_a_table_that_is_too_wide_would_be_seen() -> None:
    assert too_wide("a  b\n" + "x " * 50 + "\r" + "name" + " " * 80 + "1\n" + "─" * 81, 80) == [
        "name" + " " * 80 + "1",
        "─" * 81,
    ]
