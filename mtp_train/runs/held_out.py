"""Compute a report's figures about held-out text: its groups, and its overlap of 8-grams with the training text.

A high overlap means that held-out texts, or near copies of them, were trained on, and that tau is too high.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_train.data.tokenize import Document
from mtp_train.runs.inputs import Inputs

NGRAM_TOKENS = 8
TEMPLATE_SHARE, TEMPLATE_AT_LEAST = 0.2, 5
"""An n-gram in at least this share of the training texts, and in at least so many of them, is part of a template (chat
markers, a system prompt, the keys of a record). It is no sign that a text was trained on, as every text has it."""
SEEN_SHARE = 0.7
"""A text counts as seen if at least this share of its 8-grams occurs in training (PaLM, arXiv:2204.02311, section
8)."""

Hashes = NDArray[np.uint64]
Text = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True)
class Overlap:
    """The overlap of held-out texts with training texts."""

    share: float | None
    """Share of their 8-grams without templates that occur in training; None if there are no such 8-grams."""
    template_share: float | None
    """Share of all their 8-grams that are part of templates."""
    seen: int
    """Number of texts with a share of ``SEEN_SHARE`` or more."""


def measure_overlap(held_out: Sequence[Text], training: Iterable[Text], special_ids: Collection[int] = ()) -> Overlap:
    """Measure the overlap of held-out texts with training texts.

    It takes about 0.1 ms for a training text of 500 tokens, and memory for the held-out text only.

    Args:
        held_out: Tokens of each text.
        training: Likewise.
        special_ids: The tokenizer's special tokens. No n-gram contains one.
    """
    special = np.array(sorted(special_ids), dtype=np.int64)
    texts = [ngram_hashes(text, special) for text in held_out]
    wanted = np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *texts]))
    counts = np.zeros(len(wanted), dtype=np.int64)
    num_texts = 0
    for text in training:
        num_texts += 1
        found = np.unique(ngram_hashes(text, special))
        places = np.searchsorted(wanted, found)
        places = places[places < len(wanted)]
        counts[places[wanted[places] == found[: len(places)]]] += 1
    is_template = counts >= max(TEMPLATE_AT_LEAST, TEMPLATE_SHARE * num_texts)
    own = overlapping = every = seen = 0
    for hashes in texts:
        places = np.searchsorted(wanted, hashes)
        kept = places[~is_template[places]]
        hits = int((counts[kept] > 0).sum())
        every, own, overlapping = every + len(hashes), own + len(kept), overlapping + hits
        seen += bool(len(kept)) and hits >= SEEN_SHARE * len(kept)
    return Overlap(
        share=overlapping / own if own else None, template_share=1 - own / every if every else None, seen=seen
    )


def ngram_hashes(text: Text, special: NDArray[np.int64]) -> Hashes:
    """Return the hash of every run of ``NGRAM_TOKENS`` tokens without a special one, (N,)."""
    tokens_T = np.asarray(text, dtype=np.int64)
    num = len(tokens_T) - NGRAM_TOKENS + 1
    if num < 1:
        return np.zeros(0, dtype=np.uint64)
    hashes_N = np.zeros(num, dtype=np.uint64)
    for offset in range(NGRAM_TOKENS):
        hashes_N = (hashes_N ^ tokens_T[offset : offset + num].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        hashes_N ^= hashes_N >> np.uint64(29)
    before_T = np.concatenate([[0], np.cumsum(np.isin(tokens_T, special))])
    return hashes_N[before_T[NGRAM_TOKENS:] == before_T[:-NGRAM_TOKENS]]


HELD_OUT = "held_out"
"""The key of these figures in a report's settings."""


def held_out_figures(
    inputs: Inputs, outputs: Sequence[Sequence[int]], training: Iterable[Document]
) -> dict[str, int | float | None]:
    """Return the figures of a run.

    Args:
        inputs: The run's inputs, with the held-out prompts.
        outputs: The trunk's response to each prompt.
        training: The training documents.
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
