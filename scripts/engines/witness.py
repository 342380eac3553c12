"""Run an engine and our decoder on the same job, compare them, and build the record of the comparison."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.launch import EngineUnderTest, engine_threads, run_program
from engines.ours import Subject, decode, load_subject
from engines.replay import misses
from engines.traces import Text, after_first_round, count, cut, read_texts
from engines.verdict import Miss, count_controls, judge, worst
from mtp_train.checkpoints.files import Checkpoint
from mtp_train.families.spec import Streams
from mtp_train.heads import assistant
from mtp_train.heads.head import Head
from mtp_train.heads.module import MtpHead
from mtp_train.runs.run_directory import environment_facts
from mtp_train.upstream.transformers_private import replacing

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MOST_STEPS = {"bfloat16": 4.0, "float32": 256.0}
"""Largest gap of a near tie, in steps of the dtype at the magnitude of the best logit."""


INVERTED = {
    "recycle": ("recycle", "after_final_norm", "before_final_norm"),
    "other_state": ("hidden", "after_final_norm", "before_final_norm"),
    "zero_first_embedding": ("zero_first_embedding", False, True),
    "other_prefix": ("prefix", "chained", "trunk"),
}
"""Controls to the field of ``Convention`` that gets its other value: the second where it has the first, else this."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A comparison to run."""

    engine: EngineUnderTest
    checkpoint: Checkpoint
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    dtype: str
    python: str
    """The interpreter of the engine's environment."""
    files: Mapping[str, str]
    """Further files for the engine's program: a binary, or the model in another format."""
    work: Path
    trust_remote_code: bool = False
    """Whether the engine may run the Python code of the checkpoint."""
    draft: Path | None = None
    """A head of another kind than MTP, as a draft model."""
    control: str | None = None
    """The part of the wiring that our side gets wrong on purpose."""

    @cached_property
    def fp32(self) -> Subject:
        """The subject in fp32, for the replay."""
        return self._subject(torch.float32)

    @cached_property
    def tested(self) -> Subject:
        """The subject in the dtype of the comparison, for decoding."""
        return self._subject(DTYPES[self.dtype])

    @property
    def leading_row(self) -> bool:
        """Whether our head reads an extra first row."""
        # Engines add no extra row for draft models.
        return (self.engine.leading_row and self.draft is None) != (self.control == "leading_row")

    @property
    def assistant(self) -> dict[str, int]:
        """The constants of :mod:`mtp_train.heads.assistant` to draft with."""
        offset, more = self.engine.assistant
        return {
            "POSITION_OFFSET": offset + (self.control == "other_position"),
            "MORE_SLIDING_KEYS": more + (self.control == "other_window"),
        }

    def _subject(self, dtype: torch.dtype) -> Subject:
        subject = load_subject(self.checkpoint, self.engine.convention, dtype, self.draft)
        if self.control == "later_layers":
            subject.head.trunk_layers = tuple(layer + 1 for layer in subject.head.trunk_layers)
        subject.trunk.show_to(subject.head)
        if self.control == "other_tokens":
            rows = subject.head.blocks[0].lm_head
            rows.token_ids_R = (rows.token_ids_R + 1) % rows.vocab_size
        if self.control == "other_order":
            subject.head.blocks = torch.nn.ModuleList(reversed(list(subject.head.blocks)))
        streams = subject.head.family.trunk.streams
        if streams is not None and self.control in ("other_streams", "trunk_mixer"):
            _confuse_streams(subject, streams, self.control)
        if self.control == "other_state":
            subject.trunk.show_before_norm()
        if self.control in INVERTED:
            (field, first, second), convention = INVERTED[self.control], subject.head.convention
            other = second if getattr(convention, field) == first else first
            subject.head.convention = replace(convention, **{field: other})
        return subject


def witness(task: Task, depth: int, *, with_controls: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Compare at one depth; return the record's entry and the versions in the engine's environment.

    Args:
        task: The comparison.
        depth: Drafts per round.
        with_controls: Whether to compare with wrong wirings as well.

    Raises:
        EngineProgramError: The engine's program failed.
        ValueError: The program left prompts out.
    """
    document = run_program(task.engine, task.python, job_of(task, depth), task.work / f"depth-{depth}")
    entry = compare_decoding(task, depth, document)
    if with_controls:
        entry["controls"] = controls(task, lambda wrong: compare_decoding(wrong, depth, document))
    return entry, document["versions"]


def controls(task: Task, compare: Callable[[Task], dict[str, Any]]) -> dict[str, Any]:
    """Repeat the comparison with one wrong part of our wiring at a time, to show which parts the texts can test.

    ``inference/benchmarks/engines/README.md`` describes the parts.

    Args:
        task: The comparison.
        compare: Returns the entry of a task.
    """
    found = {}
    head = task.fp32.head
    has_streams = head.family.trunk.streams is not None
    more = {
        **dict.fromkeys(("zero_first_embedding", "leading_row"), not head.reads_keys),
        "recycle": not has_streams and not head.reads_keys,
        "other_state": not has_streams and not head.reads_keys and not head.trunk_layers,
        **dict.fromkeys(("other_position", "other_window"), head.reads_keys),
        "later_layers": bool(head.trunk_layers),
        "other_streams": has_streams,
        "trunk_mixer": has_streams,
        "other_tokens": num_drafted(head) is not None,
        "other_order": len(head.blocks) > 1,
        "other_prefix": isinstance(head, MtpHead) and head.chaining in ("chained", "chained_drafts"),
    }
    for control in (name for name, shows in more.items() if shows):
        entry = compare(replace(task, control=control))
        found[control] = {name: entry[name] for name in ("verdict", "texts_equal")}
    return found


def num_drafted(head: Head) -> int | None:
    """Return the size of a head's draft vocabulary; None for all tokens."""
    ids_R = getattr(getattr(head.blocks[0], "lm_head", None), "token_ids_R", None)
    return None if ids_R is None else len(ids_R)


def _confuse_streams(subject: Subject, streams: Streams, control: str) -> None:
    for block in subject.head.blocks:
        if control == "trunk_mixer":
            block.mixer = subject.trunk.decoder.get_submodule(streams.trunk_mixer)
        else:
            block.fuse = _reading_the_next_stream(block.fuse)


def _reading_the_next_stream(fuse: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda hidden_BTD, embed_BTD: fuse(hidden_BTD.roll(embed_BTD.shape[-1], -1), embed_BTD)


def job_of(task: Task, depth: int) -> dict[str, Any]:
    """Return the job of the engine's program."""
    draft = None
    if task.draft is not None:
        # Engines draft with an assistant by their options for MTP heads.
        kind = "mtp" if task.fp32.head.reads_keys else task.fp32.head.family.kind.name
        draft = {"kind": kind, "path": str(task.draft.resolve())}
    return {
        "checkpoint": str(task.checkpoint.path.resolve()),
        "depth": depth,
        "max_new_tokens": task.max_new_tokens,
        "dtype": task.dtype,
        "prompts": [list(prompt_ids) for prompt_ids in task.prompts],
        "trust_remote_code": task.trust_remote_code,
        "draft": draft,
        **task.files,
    }


def compare_decoding(task: Task, depth: int, document: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the prompts that the engine decoded, compare, and return the record's entry."""
    theirs = read_texts(document, task.prompts)
    if task.engine.drafts_first:
        theirs = [after_first_round(text) for text in theirs]
    eos_ids = frozenset(document.get("eos_ids", []))
    theirs = [cut(text, task.max_new_tokens, eos_ids) for text in theirs]
    with replacing(assistant, **task.assistant):
        ours = _decode(task, [text.prompt_ids for text in theirs], depth, eos_ids)
        our_misses = _misses(task, ours)
        their_misses = our_misses if ours == theirs else _misses(task, theirs)
    return {
        **judge(ours, theirs, our_misses, their_misses, most_steps=MOST_STEPS[task.dtype]),
        "ours": count(ours, depth),
        "theirs": count(theirs, depth),
        "eos_ids": sorted(eos_ids),
    }


def _misses(task: Task, texts: Sequence[Text]) -> list[Miss]:
    return misses(task.fp32, texts, dtype=DTYPES[task.dtype], leading_row=task.leading_row)


def _decode(task: Task, prompts: Sequence[Sequence[int]], depth: int, eos_ids: frozenset[int]) -> list[Text]:
    return decode(
        task.tested,
        prompts,
        depth=depth,
        max_new_tokens=task.max_new_tokens,
        eos_ids=eos_ids,
        leading_row=task.leading_row,
    )


def record(task: Task, name: str, entries: Mapping[int, dict[str, Any]], versions: Mapping[str, str]) -> dict[str, Any]:
    """Return the record of a comparison."""
    facts = environment_facts()
    return {
        "engine": name,
        "verdict": worst([entry["verdict"] for entry in entries.values()]),
        "date": datetime.date.today().isoformat(),
        "compared": "tokens, drafts and rounds",
        "versions": dict(versions),
        "our_versions": facts["versions"],
        "machine": {**facts["hardware"], "engine_threads": engine_threads()},
        "controls": count_controls(entries.values()),
        "checkpoint": {
            "name": task.checkpoint.path.name,
            "family": task.checkpoint.family.name,
            "sha256": checkpoint_hash(task.checkpoint.path),
        },
        **_draft_model(task),
        "settings": {
            "dtype": task.dtype,
            "temperature": 0.0,
            "prompts": len(task.prompts),
            "max_new_tokens": task.max_new_tokens,
            "convention": task.engine.convention,
            "leading_row": task.leading_row,
            "head_beside": task.draft is None and "draft_file" in task.files,
        },
        "depths": {str(depth): entry for depth, entry in entries.items()},
    }


def _draft_model(task: Task) -> dict[str, Any]:
    if task.draft is None:
        return {}
    return {
        "draft_model": {
            "kind": task.fp32.head.family.kind.name,
            "draft_vocab": num_drafted(task.fp32.head),
            "sha256": checkpoint_hash(task.draft),
        }
    }


def checkpoint_hash(directory: Path) -> str:
    """Return one sha256 over a checkpoint's config and weights."""
    digest = hashlib.sha256()
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
