"""Compare the logits of a head over whole texts, for engines that do not decode.

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from engines.ours import Subject
from mtp_train.heads.alignment import input_tokens
from mtp_train.heads.step import mtp_step

MOST_DIFFERENCE = 1e-4
"""Tolerance for logits of size 10 and more, computed in fp32 with sums in different orders."""


@torch.inference_mode()
def own_row_logits(subject: Subject, text: Sequence[int], depth: int) -> list[Tensor]:
    """Return teacher-forced logits (T, V) of every depth, where each depth attends to its own rows only.

    At depth 1 this equals decoding. At deeper depths some toolkits train this way, while in decoding a query attends to
    the rows of depth 1. The last rows read tokens past the text.
    """
    tokens_1T = torch.tensor([list(text)])
    hidden_1TD = subject.trunk.head_input(subject.trunk.hidden(tokens_1T), subject.head.convention)
    found = []
    for number in range(1, depth + 1):
        step = mtp_step(
            subject.head,
            hidden_1TD,
            subject.head.embedding(subject.trunk.embed)(input_tokens(tokens_1T, number)),
            depth=number,
            positions_BT=torch.arange(len(text))[None],
            mask_BTS=None,
            cache=None,
        )
        module = subject.head.module_for(number)
        found.append(module.project(step.logit_hidden_BTD, subject.trunk.project)[0])
        hidden_1TD = step.recycled_BTD
    return found


def judge_logits(ours: Sequence[Sequence[Tensor]], theirs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Compare logits, and return the verdict with its figures, as JSON.

    Args:
        ours: Logits (T, V) by text and depth.
        theirs: ``"{text}.{depth}"`` to the logits (rows, V) of the first rows.
    """
    widest: dict[str, float] = {}
    agreeing = rows = 0
    for key, theirs_RV in sorted(theirs.items()):
        number, depth = key.split(".")
        ours_RV = ours[int(number)][int(depth) - 1][: len(theirs_RV)].float()
        widest[depth] = max(widest.get(depth, 0.0), float((ours_RV - theirs_RV).abs().max()))
        agreeing += int((ours_RV.argmax(-1) == theirs_RV.argmax(-1)).sum())
        rows += len(theirs_RV)
    return {
        "verdict": "equal" if rows and max(widest.values()) <= MOST_DIFFERENCE else "different",
        "largest_difference": widest,
        "most_difference": MOST_DIFFERENCE,
        "rows": rows,
        "rows_with_equal_choice": agreeing,
    }


def read_logits(out: Path) -> dict[str, Tensor]:
    """Return the logits that a program wrote, from the file beside its document."""
    return load_file(out.with_suffix(".safetensors"))
