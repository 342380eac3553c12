"""Count accepted drafts, and compute acceptance figures from the counts.

A round drafts K tokens and accepts a prefix of them. ``accepted_per_pos[i]`` counts the rounds that accepted at
least ``i + 1`` drafts. *Marginal* acceptance divides it by the rounds, *conditional* acceptance by its predecessor.
``tau`` is the mean number of tokens a round commits, bonus token included: ``1 + accepted / rounds``.

Intervals are in ``acceptance/intervals.py``, the gate that uses them in ``acceptance/gate.py``.

Shape letters: N rows, V vocabulary, K depths, P prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor


FloatArray = npt.NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class PromptCounts:
    """Counts of decoding one prompt.

    Attributes:
        prompt_id: Name of the prompt, the same for every arm.
        rounds: Number of decoding rounds; the first token comes from prefill, outside any round.
        num_draft_tokens: Drafted tokens, ``rounds * K`` at a fixed depth K.
        accepted_per_pos: Rounds in which at least ``i + 1`` drafts were accepted, for i in 0..K-1.
        new_tokens: Tokens returned to the caller.
        group: The prompt's group; intervals leave out whole groups.
        seconds_prefill: Wall time until the first token; None if it was not measured.
        seconds_decode: Wall time of the rounds; None if it was not measured.
    """

    prompt_id: str
    rounds: int
    num_draft_tokens: int
    accepted_per_pos: tuple[int, ...]
    new_tokens: int
    group: str
    seconds_prefill: float | None = None
    seconds_decode: float | None = None

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_pos)


def tau(counts: Sequence[PromptCounts]) -> float:
    """Return the mean tokens committed per round, pooled over prompts; 1.0 if nothing was drafted."""
    rounds = sum(c.rounds for c in counts)
    return 1.0 + sum(c.num_accepted_tokens for c in counts) / rounds if rounds else 1.0


def num_groups(counts: Sequence[PromptCounts]) -> int:
    return len({c.group for c in counts})


def acceptance_rate(counts: Sequence[PromptCounts]) -> float | None:
    """Return accepted over drafted tokens, pooled over prompts; None if nothing was drafted."""
    drafted = sum(c.num_draft_tokens for c in counts)
    return sum(c.num_accepted_tokens for c in counts) / drafted if drafted else None


def marginal(counts: Sequence[PromptCounts]) -> list[float]:
    """Return, for each position, the share of rounds that accepted it. Its sum is ``tau - 1``.

    Example:
        FastMTP (arXiv:2509.18362) reports .81 .56 .36 and tau 2.73 = 1 + .81 + .56 + .36: marginal figures. The same
        head in conditional figures reads .81 .69 .64.

    Returns:
        K shares; empty where nothing was drafted.
    """
    accepted_PK, rounds_P = accepted_by_position(counts)
    return (accepted_PK.sum(axis=0) / rounds_P.sum()).tolist()


def conditional(counts: Sequence[PromptCounts]) -> list[float | None]:
    """Return, for each position, accepted drafts over the rounds in which all earlier drafts were accepted.

    Returns:
        K shares, None at a position that no round reached; empty where nothing was drafted.
    """
    accepted_PK, rounds_P = accepted_by_position(counts)
    chain = [float(rounds_P.sum()), *accepted_PK.sum(axis=0).tolist()]
    return [later / earlier if earlier else None for earlier, later in pairwise(chain)]


def accepted_by_position(counts: Sequence[PromptCounts]) -> tuple[FloatArray, FloatArray]:
    """Return each prompt's accepted drafts by position, shape (P, K), and its rounds, shape (P,), at one depth K.

    Without any round K is 0.
    """
    width = max((len(c.accepted_per_pos) for c in counts if c.rounds), default=0)
    # A prompt that ended at prefill has no round, and may have no positions either.
    accepted = [c.accepted_per_pos if c.rounds else (0,) * width for c in counts]
    rounds = [c.rounds for c in counts]
    return np.array(accepted, dtype=np.float64).reshape(len(counts), width), np.array(rounds, dtype=np.float64)


def repeated_ngram_share(token_lists: Iterable[Sequence[int]], n: int = 8) -> float | None:
    """Return the share of n-grams that already occurred earlier in the same output, pooled over outputs.

    Repetition loops are easy to draft, so a high share means an inflated tau.

    Returns:
        The share in 0..1; None where no output has n tokens.
    """
    total = repeated = 0
    for tokens in token_lists:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / total if total else None


def overlap(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """Return ``sum_v min(p, q)`` for each row: the probability that rejection sampling accepts a draft from q.

    Leviathan et al. (arXiv:2211.17192), Theorem 3.5: the expectation, free of sampling noise.
    """
    return p_NV.minimum(q_NV).sum(-1)


def entropy(p_NV: Tensor) -> Tensor:
    """Return the entropy of each row in nats; entries of probability 0 add nothing."""
    return -p_NV.xlogy(p_NV).sum(-1)
