"""Drafters of known acceptance: what a study would keep of them, drawn instead of decoded.

Each prompt has an acceptance of its own, so that the rounds of a prompt are alike.

Shapes: S studies, P prompts, K drafts (K1 = K + 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mtp_train.acceptance.counts import PromptCounts
from mtp_train.data.tokenize import Prompt
from mtp_train.evaluation.dense import DenseRows
from mtp_train.evaluation.prompt_records import PromptRecord

DEPTH = 3
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def rounds_by_accepted(
    rng: np.random.Generator, skill_SP: Floats, mean_length: float = 150.0, spread: float = 0.5
) -> Ints:
    """Draw each prompt's rounds by how many drafts they accepted, shape (S, P, K1).

    ``skill_SP`` is the log odds that a draft is accepted; ``spread`` that of the logarithm of lengths.
    """
    length_SP = rng.lognormal(math.log(mean_length), spread, skill_SP.shape)
    each_SP1 = (1.0 / (1.0 + np.exp(-skill_SP)))[..., None]
    share_SPK1 = np.concatenate([each_SP1 ** np.arange(DEPTH) * (1 - each_SP1), each_SP1**DEPTH], axis=-1)
    committed_SP = 1.0 + share_SPK1 @ np.arange(DEPTH + 1)
    return rng.multinomial(np.ceil(length_SP / committed_SP).astype(int), share_SPK1)


def counts_of(rounds_PK1: Ints, groups: Sequence[str] = ()) -> list[PromptCounts]:
    """Return what acceptance is computed from, one for each prompt; without groups each is one of its own."""
    reached_PK1 = rounds_PK1[:, ::-1].cumsum(axis=1)[:, ::-1]
    return [
        PromptCounts(f"p{number}", rounds, DEPTH * rounds, tuple(accepted), 0, group or f"p{number}")
        for number, ((rounds, *accepted), group) in enumerate(
            zip(reached_PK1.tolist(), groups or [""] * len(reached_PK1), strict=True)
        )
    ]


def decoded_of(rounds_PK1: Ints, tasks: Sequence[str] = ("one",)) -> list[PromptRecord]:
    """Return one record for each prompt; tasks take turns."""
    return [
        decoded(
            [number for number, times in enumerate(row) for _ in range(times)], f"p{index}", tasks[index % len(tasks)]
        )
        for index, row in enumerate(rounds_PK1.tolist())
    ]


def decoded(
    accepted: Sequence[int],
    prompt_id: str = "p0",
    task: str = "one",
    *,
    group: str | None = None,
    drafted: Sequence[int] | None = None,
    num_tokens: int | None = None,
    seconds: tuple[float, float] | None = None,
) -> PromptRecord:
    """Return a record of rounds that accepted so many drafts."""
    num_tokens = 1 + len(accepted) + sum(accepted) if num_tokens is None else num_tokens
    return PromptRecord(
        prompt_id=prompt_id,
        group=prompt_id if group is None else group,
        task=task,
        prompt_tokens=10,
        token_ids=tuple(range(num_tokens)),
        drafted=(DEPTH,) * len(accepted) if drafted is None else tuple(drafted),
        accepted=tuple(accepted),
        seconds_prefill=None if seconds is None else seconds[0],
        seconds_decode=None if seconds is None else seconds[1],
    )


def dense_of(entropies: Sequence[Floats], overlaps: Sequence[Floats], tasks: Sequence[str] = ("one",)) -> DenseRows:
    """Return rows of depth 1 with these figures, an array for each prompt; tasks take turns."""
    overlap_1N = np.concatenate(overlaps)[None].astype(np.float32)
    return DenseRows(
        prompts=[Prompt(f"p{index}", f"p{index}", (), tasks[index % len(tasks)]) for index in range(len(entropies))],
        prompt_N=np.repeat(np.arange(len(entropies)), [len(one) for one in entropies]),
        entropy_N=np.concatenate(entropies).astype(np.float32),
        overlap_KN=overlap_1N,
        agreed_KN=overlap_1N > 0.5,
        valid_KN=np.ones(overlap_1N.shape, dtype=np.bool_),
    )
