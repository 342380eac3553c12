"""A whole recipe on tiny random checkpoints: what it takes to run the pipeline in a test."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from byte_tokenizer import byte_tokenizer
from checkpoints import base_and_finetune, set_fields
from json_files import read_json
from mtp_train.checkpoints.locations import RECIPE_FILE
from mtp_train.cli.main import main
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs import rescue
from mtp_train.runs.checkpoint_tools.inspect import SUGGESTED_DEPTH
from tiny import tiny_trunk
from wrapped import save_wrapped

BYTE_VOCAB_SIZE = 259
Capture = pytest.CaptureFixture[str]


def write_inputs(directory: Path, family_name: str = "qwen3_5", num_records: int = 24) -> Path:
    """Write a base, a fine-tune of it without a head, and chats; return the directory."""
    base, finetune = base_and_finetune(directory, family_name, vocab_size=BYTE_VOCAB_SIZE)
    tokenizer = byte_tokenizer()
    for path in (base, finetune):
        tokenizer.save_pretrained(path)
    with (directory / "chats.jsonl").open("w") as file:
        for number in range(num_records):
            messages = [
                {"role": "user", "content": f"say {number % 5}"},
                {"role": "assistant", "content": f"{number} " * (3 + number % 4)},
            ]
            file.write(json.dumps({"messages": messages, "group": f"g{number % 16}"}) + "\n")
    return directory


def write_headless(
    directory: Path, family_name: str, num_layers: int | None = None, wrapper: str | None = None
) -> Path:
    """Write chats and, in the place of the fine-tune, a model as its release has it: no head, no word of one.

    It may be inside of a vision-language model.
    """
    write_inputs(directory)
    path = directory / "finetune"
    for old in path.iterdir():
        old.unlink()
    if wrapper is not None:
        save_wrapped(path, wrapper, family_name, tied=wrapper == "gemma3", vocab_size=BYTE_VOCAB_SIZE)
        if wrapper == "mistral3":
            # Mistral Small has no window.
            set_fields(path, {"sliding_window": None})
    else:
        tiny_trunk(family_name, vocab_size=BYTE_VOCAB_SIZE, num_layers=num_layers).causal_lm.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def passed_report(run_dir: Path, baseline: str) -> Any:
    """Return the report of a run whose head beat the baseline, and whose drafts changed no text."""
    report = read_json(run_dir / "report.json")
    assert (report["gate"]["passed"], report["gate"]["baseline"]) == (True, baseline)
    assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0
    return report


def tiny_mapping(directory: Path, run_dir: Path, **overrides: Any) -> dict[str, Any]:
    """Return the plain values of a recipe of a few seconds on ``write_inputs``; ``section__field=value`` overrides."""
    mapping: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model": {"trunk": str(directory / "finetune"), "head_from": str(directory / "base")},
        "head": {"num_depths": 2},
        "data": {
            "sources": [{"path": str(directory / "chats.jsonl")}],
            "group_field": "group",
            "holdout": 0.4,
            "seq_len_tokens": 96,
        },
        "train": {
            "max_steps": 4,
            "tokens_per_step": 192,
            "lr": 1e-3,
            "precision": "fp32",
            "save_steps": 2,
            "log_steps": 1,
        },
        "evaluate": {"arms": ["none", "graft", "retrained"], "prompts": 6, "max_new_tokens": 12},
        "track": {"wandb": "off"},
    }
    for name, value in overrides.items():
        section, _, field = name.partition("__")
        if field:
            mapping.setdefault(section, {})[field] = value
        else:
            mapping[section] = value
    return mapping


def tiny_recipe(directory: Path, run_dir: Path, **overrides: Any) -> Recipe:
    """Return the recipe of ``tiny_mapping``."""
    return load_recipe(tiny_mapping(directory, run_dir, **overrides))


def write_recipe(path: Path, directory: Path, run_dir: Path, **overrides: Any) -> Path:
    """Write the recipe of ``tiny_mapping`` as a user would, and return its path."""
    path.write_text(yaml.safe_dump(tiny_mapping(directory, run_dir, **overrides)), encoding="utf-8")
    return path


# Enough for a random tiny head to beat the random graft clearly on the trunk's own words.
LEARNS: dict[str, Any] = {
    # Greedily: of a model this random a head learns little from sampled text.
    "data__regenerate": {"max_new_tokens": 24, "temperature": 0.0},
    "train__max_steps": 30,
    "train__lr": 1e-2,
    "train__tokens_per_step": 384,
    "train__save_steps": 10,
    "train__log_steps": 10,
    "evaluate__prompts": 8,
    "evaluate__max_new_tokens": 24,
}

ATTACH: dict[str, Any] = {
    **LEARNS,
    "model__head_from": None,
    "head__init": "copy_last_layer",
    "head__num_depths": SUGGESTED_DEPTH,
    "evaluate__arms": ["none", "retrained"],
    "gate__baseline": "none",
    # By the clock, heads of tiny trunks cost more than they bring. Tau above 1 decides.
    "gate__break_even_tau": 1.0,
}
"""The same for a trunk that ``write_headless`` wrote."""

# Ends with the head it started from, as far as decoding can see: the gate must refuse it.
GETS_NO_BETTER = {"train__lr": 1e-9, "train__max_steps": 1}


def overrides_of(**fields: Any) -> list[str]:
    """Return ``section__field=value`` pairs, as above, as overrides on a command line."""
    return [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in fields.items()]


TINY_RESCUE = overrides_of(
    head__num_depths=2,
    data__holdout=0.4,
    data__group_field="group",
    data__seq_len_tokens=96,
    data__regenerate={"max_new_tokens": 24, "temperature": 0.0},
    train__max_steps=2,
    train__tokens_per_step=192,
    train__warmup_steps=0,
    train__precision="fp32",
    evaluate__prompts=6,
    evaluate__max_new_tokens=12,
    track__wandb="off",
)
"""A rescue on ``write_inputs`` in a few seconds; it sets the steps, so that no probe goes before it."""


@contextlib.contextmanager
def few_timed_prompts() -> Iterator[None]:
    """Time three prompts of a run once: decoding one at a time is most of a tiny run's work, and no test reads it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtp_train.evaluation.decoding.SPEED_PROMPTS", 3)
        patch.setattr("mtp_train.evaluation.decoding.SPEED_PASSES", 1)
        patch.setattr("mtp_train.evaluation.decoding.SPEED_SECONDS", 0.0)
        yield


def shorten_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a probe take a few seconds on tiny models."""
    short = {"data.regenerate.max_prompts": 4, "data.regenerate.max_new_tokens": 8, "evaluate.max_new_tokens": 8}
    monkeypatch.setattr(rescue, "SHORT", rescue.SHORT | short | {"evaluate.prompts": 8, "train.max_steps": 1})


def run_command(*words: Any) -> int:
    """Run a command in this process, and return its exit code."""
    return main([str(word) for word in words])


def refusal(argv: list[Any], capfd: Capture) -> str:
    """Run a command that must exit 2 with one message: where, found, expected, what to do. Return the message."""
    capfd.readouterr()
    assert run_command(*argv) == 2
    message = capfd.readouterr().err
    assert re.fullmatch(r"mtp-train: [^\n]+: [^\n]+; expected [^\n]+\. [A-Z][^\n]+\.\n", message), message
    return message


def paste(command: str | None) -> Path:
    """Run a command that was printed, and return the checkpoint that it wrote."""
    words = shlex.split(command or "")
    assert words[0] == "mtp-train"
    assert main(words[1:]) == 0
    return Path(words[-1])


def document(argv: list[Any], capfd: Capture, exit_code: int = 0) -> Any:
    """Run a command with ``--json`` and return the one document that it printed."""
    capfd.readouterr()
    assert run_command(*argv, "--json") == exit_code
    return json.loads(capfd.readouterr().out)


def drafted_by(head: str | Path, depth: int, generate: list[Any], capfd: Capture) -> Any:
    """Return what a command decodes with a head, whose text is that of plain decoding."""
    plain, drafted = (
        document([*generate, "--head", head, "--depth", number], capfd)["requests"][0] for number in (0, depth)
    )
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["num_draft_tokens"] == depth * drafted["num_drafts"] > 0
    return drafted


def tree(directory: Path) -> dict[str, bytes | None]:
    """Return everything below a directory: a file's content, None for a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def copy_run(run_dir: Path, to: Path, *without: str) -> Path:
    """Copy a finished run as one of its own, without the outcome and the other parts that are named."""
    shutil.copytree(run_dir, to)
    recorded = to / RECIPE_FILE
    recorded.write_text(recorded.read_text().replace(str(run_dir), str(to)))
    for name in ("outcome.json", *without):
        path = to / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return to
