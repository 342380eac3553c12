"""What a report says of the held-out text: how many groups it comes from, and how much of it was trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mtp_train.data.overlap import measure_overlap
from mtp_train.data.tokenize import Document
from mtp_train.inputs import Inputs

HELD_OUT = "held_out"
"""The key of these figures in a report's settings."""


def held_out_figures(
    inputs: Inputs, outputs: Sequence[Sequence[int]], training: Iterable[Document]
) -> dict[str, int | float | None]:
    """Return the figures.

    Args:
        inputs: With the held-out prompts.
        outputs: The trunk's answer to each.
        training: What was trained on.
    """
    texts = [(*prompt.prompt_ids, *output) for prompt, output in zip(inputs.held_out, outputs, strict=True)]
    special_ids: Any = inputs.tokenizer.all_special_ids
    found = measure_overlap(texts, (document.input_ids for document in training), special_ids)
    return {
        "prompts": len(inputs.held_out),
        "groups": len({prompt.group for prompt in inputs.held_out}),
        "overlap_8gram": found.share,
        "template_8gram": found.template_share,
        "prompts_seen": found.seen,
    }
