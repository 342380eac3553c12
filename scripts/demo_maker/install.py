"""Copy the results of the stages into the package, with a record of how they were made."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from demo_maker.corpus import SourceFile, held_out_with
from demo_maker.texts import Texts
from mtp_train.checkpoints.files import read_json
from mtp_train.checkpoints.writing import new_directory, write_json, write_text

# Trainers write such a card; `mtp-train inspect` finds the base in it.
FINETUNE_CARD = """---
base_model: base
---

# finetune

The trunk of `base`, fine-tuned to describe functions in JSON and saved by transformers: the config still declares the
MTP head, the tensors are gone.
"""
MAX_SNIPPETS, MAX_SNIPPET_CHARS, SNIPPET_EVERY_CHARS = 96, 900, 7000


def install(texts: Texts, work: Path, assets: Path) -> None:
    """Replace the assets of the package by the results in the work directory."""
    fresh = assets.with_name("assets.new")
    with new_directory(fresh, what="the assets") as directory:
        for name in ("base", "finetune"):
            shutil.copytree(work / name, directory / name, copy_function=shutil.copyfile)
        write_text(directory / "finetune" / "README.md", FINETUNE_CARD)
        (directory / "data").mkdir()
        write_lines(directory / "data" / "prompts.jsonl", prompt_lines(texts))
        write_lines(directory / "data" / "code.jsonl", code_lines(texts.unseen_code))
        write_json(directory / "provenance.json", provenance(texts, work))
        # Arms that were recorded on the previous checkpoints do not apply to these.
        write_json(directory / "recorded.json", {"settings": {}, "arms": {}})
    shutil.rmtree(assets, ignore_errors=True)
    fresh.rename(assets)


def prompt_lines(texts: Texts) -> Iterable[dict[str, Any]]:
    """Yield the prompt records: question, reference answer, and the module as the group to hold out."""
    for number, one in enumerate(texts.prompts, start=1):
        yield {"id": f"{one.group}-{number}", "group": held_out_with(one.group), "messages": one.messages()}


def code_lines(files: Iterable[SourceFile]) -> Iterable[dict[str, Any]]:
    """Yield pieces of source that the base was not trained on, cut at line ends."""
    number = 0
    for file in files:
        for start in range(0, len(file.text), SNIPPET_EVERY_CHARS):
            begin = file.text.find("\n", start) + 1 if start else 0
            piece = file.text[begin : begin + MAX_SNIPPET_CHARS].rpartition("\n")[0]
            if len(piece) > MAX_SNIPPET_CHARS // 2 and number < MAX_SNIPPETS:
                number += 1
                yield {"id": f"{file.top}-{number}", "group": held_out_with(file.top), "text": piece}


def provenance(texts: Texts, work: Path) -> dict[str, Any]:
    """Return the sources and settings that the assets were made from."""
    stages = {name: read_json(work / f"{name}.json") for name in ("base", "finetune", "check")}
    for name in ("base", "finetune"):
        stages[name]["final_training_loss"] = stages[name].pop("log")[-1]
    return {
        "made_by": "scripts/make_demo.py base finetune check install record",
        "texts": texts.provenance(),
        **stages,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
