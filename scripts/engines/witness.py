"""One witness: drive the engine, do the same ourselves, compare, and say so in a record."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from engines.launch import EngineUnderTest, Kind, run_program
from engines.logits import judge_logits, own_row_logits, read_logits
from engines.ours import Subject, decode, load_subject
from engines.replay import misses
from engines.traces import Text, after_first_round, count, cut, read_texts
from engines.verdict import judge, worst
from mtp_train import __version__
from mtp_train.weights.files import Checkpoint

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MOST_STEPS = {"bfloat16": 4.0, "float32": 256.0}
"""Widest near tie, in steps of the dtype at the size of the best logit."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to witness."""

    engine: EngineUnderTest
    kind: Kind
    checkpoint: Checkpoint
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    eos_ids: frozenset[int]
    """Tokens that end a text on both sides; empty for an engine that is told to go on."""
    dtype: str
    python: str
    """The interpreter of the engine's environment."""
    files: Mapping[str, str]
    """What else the engine's program is given: a binary, the model in a format of its own."""
    work: Path

    @cached_property
    def fp32(self) -> Subject:
        """The subject that judges."""
        return load_subject(self.checkpoint, self.engine.convention, torch.float32)

    @cached_property
    def tested(self) -> Subject:
        """The subject that decodes as the engine does."""
        return load_subject(self.checkpoint, self.engine.convention, DTYPES[self.dtype])


def witness(task: Task, depth: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Compare at one depth; return the record's entry and the versions in the engine's environment."""
    entry, document = (_decoding if task.kind == "decode" else _logits)(task, depth)
    return entry, document["versions"]


def _job(task: Task, depth: int) -> dict[str, Any]:
    return {
        "kind": task.kind,
        "checkpoint": str(task.checkpoint.path.resolve()),
        "depth": depth,
        "max_new_tokens": task.max_new_tokens,
        "dtype": task.dtype,
        "prompts": [list(prompt_ids) for prompt_ids in task.prompts],
        **task.files,
    }


def _decoding(task: Task, depth: int) -> tuple[dict[str, Any], dict[str, Any]]:
    engine = task.engine
    document = run_program(engine, task.python, _job(task, depth), task.work / f"depth-{depth}")
    theirs = read_texts(document, task.prompts)
    if engine.drafts_first:
        theirs = [after_first_round(text) for text in theirs]
    theirs = [cut(text, task.max_new_tokens, task.eos_ids) for text in theirs]
    ours = _decode(task, [text.prompt_ids for text in theirs], depth)
    found = [
        misses(task.fp32.trunk, task.fp32.head, texts, dtype=DTYPES[task.dtype], leading_row=engine.leading_row)
        for texts in (ours, theirs)
    ]
    entry = {
        **judge(ours, theirs, *found, most_steps=MOST_STEPS[task.dtype]),
        "ours": count(ours, depth),
        "theirs": count(theirs, depth),
        "engine_counters": document["counters"],
    }
    return entry, document


def _decode(task: Task, prompts: Sequence[Sequence[int]], depth: int) -> list[Text]:
    return decode(
        task.tested,
        prompts,
        depth=depth,
        max_new_tokens=task.max_new_tokens,
        eos_ids=task.eos_ids,
        leading_row=task.engine.leading_row,
    )


def _logits(task: Task, depth: int) -> tuple[dict[str, Any], dict[str, Any]]:
    texts = [[*text.prompt_ids, *text.token_ids] for text in _decode(task, task.prompts, depth)]
    work = task.work / f"depth-{depth}"
    document = run_program(task.engine, task.python, {**_job(task, depth), "texts": texts}, work)
    ours = [own_row_logits(task.tested, text, depth) for text in texts]
    return judge_logits(ours, read_logits(work / "out.json")), document


def record(
    task: Task, name: str, date: str, entries: Mapping[int, dict[str, Any]], versions: Mapping[str, str]
) -> dict[str, Any]:
    """Return the record of a witness."""
    return {
        "engine": name,
        "verdict": worst([entry["verdict"] for entry in entries.values()]),
        "date": date,
        "compared": "tokens, drafts and rounds" if task.kind == "decode" else "logits of the head over whole texts",
        "versions": dict(versions),
        "our_versions": {
            "mtp-train": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": {"device": "cpu", "architecture": platform.machine()},
        "checkpoint": {
            "name": task.checkpoint.path.name,
            "family": task.checkpoint.family.name,
            "sha256": checkpoint_hash(task.checkpoint.path),
        },
        "settings": {
            "dtype": task.dtype,
            "temperature": 0.0,
            "prompts": len(task.prompts),
            "max_new_tokens": task.max_new_tokens,
            "ends_at_eos": task.engine.ends_at_eos,
            "convention": task.engine.convention,
            "leading_row": task.engine.leading_row,
            "drafts_first": task.engine.drafts_first,
        },
        "depths": {str(depth): entry for depth, entry in entries.items()},
    }


def checkpoint_hash(directory: Path) -> str:
    """Return one hash of a checkpoint's config and weights."""
    digest = hashlib.sha256()
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
