"""Prompts of one length, in groups that fill a batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from mtp_inference.bench.chain import Chain
from mtp_inference.bench.subject import Subject
from mtp_train.errors import DataError

Group = list[list[int]]
"""Prompts of one batch, all of the same length."""


@dataclass(frozen=True)
class Prompts:
    """Prompts from a file, cut to the requested length, or drawn from a chain.

    Args:
        given: Token lists of the file; None to draw prompts.
        text: The chain to draw prompts from.
        seed: Seed of the drawn prompts.
    """

    given: Sequence[Sequence[int]] | None
    text: Chain
    seed: int

    def groups(self, batch: int, length: int) -> list[Group]:
        """Return full groups: all groups of the file, or one drawn group.

        Raises:
            DataError: The file has too few prompts of that length.
        """
        if self.given is None:
            generator = torch.Generator().manual_seed(self.seed)
            return [self.text.draw(batch, length, generator).tolist()]
        fitting = [list(ids[:length]) for ids in self.given if len(ids) >= length]
        if len(fitting) < batch:
            raise DataError(
                f"--prompts: {len(fitting)} of {len(self.given)} prompts have {length} tokens; expected at least "
                f"{batch}. Ask for shorter --prompt-lengths, smaller --batches, or give more prompts."
            )
        return [fitting[start : start + batch] for start in range(0, len(fitting) - batch + 1, batch)]


def read_prompts(path: Path, subject: Subject) -> list[list[int]]:
    """Read ``{"prompt_ids": [...]}`` or ``{"prompt": "..."}``, one object per line.

    Raises:
        DataError: The file is missing, a line has another form, a token is out of range, or a text prompt is given
            for a checkpoint without a tokenizer.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--prompts: {path} cannot be read ({type(error).__name__}); expected a JSON Lines file. Check the path."
        ) from None
    tokenizer = _tokenizer(subject) if any('"prompt"' in line for line in lines) else None
    vocab_size = subject.trunk.lm_head_VD.shape[0]
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    return [_prompt(line, f"{path}:{number}", tokenizer, vocab_size) for number, line in numbered]


def _tokenizer(subject: Subject) -> Any:
    """Return the tokenizer of the checkpoint; None if it has none."""
    if subject.checkpoint is None:
        return None
    try:
        return AutoTokenizer.from_pretrained(subject.checkpoint.path)
    except (OSError, ValueError, KeyError):
        return None


def _prompt(line: str, where: str, tokenizer: Any, vocab_size: int) -> list[int]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error}); expected an object on every line. Correct the line.") from None
    if not isinstance(record, dict) or not {"prompt", "prompt_ids"} & record.keys():
        raise DataError(f'{where}: no prompt; expected {{"prompt_ids": [...]}} or {{"prompt": "..."}}. Add one.')
    if "prompt_ids" not in record:
        if tokenizer is None or not isinstance(record["prompt"], str):
            raise DataError(
                f"{where}: a prompt that cannot be tokenized; expected text, and a checkpoint with a tokenizer. "
                "Give prompt_ids."
            )
        ids: list[int] = tokenizer(record["prompt"])["input_ids"]
        return ids
    ids = record["prompt_ids"]
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < vocab_size for one in ids):
        raise DataError(
            f"{where}: prompt_ids are not token ids; expected integers from 0 to {vocab_size - 1}. Correct them."
        )
    return ids
