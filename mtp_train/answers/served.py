"""Generate responses on a server that serves the trunk, and check that they come from the trunk.

The test: a token y drawn from p has probability p(y), whose mean is sum p^2 and whose variance is
sum p^3 - (sum p^2)^2. Over the tokens of a text the differences p(y) - sum p^2 add up to a martingale with steps of at
most 1, so Freedman's inequality bounds their sum: it exceeds ``allowance`` with probability ``FALSE_ALARM``. Tokens of
another model are less probable under the trunk than its own; tokens sampled at a lower temperature are more probable.
In greedy decoding all probabilities are 0 or 1, and the test compares the share of the trunk's first choices.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from mtp_inference.sampling.distributions import Sampling, SamplingRows, probabilities
from mtp_train.answers.endpoint import Endpoint, Refusal
from mtp_train.answers.generate import Answering
from mtp_train.answers.store import RegeneratedRow, RegeneratedStore
from mtp_train.data.tokenize import Prompt
from mtp_train.errors import DataError
from mtp_train.trunk.ends import Ends, non_finite_error
from mtp_train.trunk.load import Trunk

FALSE_ALARM = 1e-6
"""Probability that one check refuses responses of the trunk itself, rounding aside."""
SLACK, GREEDY_SLACK = 0.02, 0.05
"""Mean difference to allow for rounding: another precision changes probabilities slightly, and resolves near ties
differently."""
ROWS_AT_A_TIME = 256

Answer = tuple[Sequence[int], Sequence[int]]
"""The tokens of a prompt and of its response."""


class AnswerFit(NamedTuple):
    """How probable responses are under the trunk."""

    answers: int
    tokens: int
    found: float
    """Mean probability of the tokens of the responses."""
    expected: float
    """Mean probability of tokens drawn from the trunk at the same positions."""
    allowed: float
    """Largest difference between ``found`` and ``expected`` that chance and rounding explain."""

    @property
    def is_trunks(self) -> bool:
        return abs(self.found - self.expected) <= self.allowed


def allowance(variance: float, rate: float = FALSE_ALARM) -> float:
    """Return the bound that a sum of martingale differences exceeds, on either side, with probability ``rate``.

    Freedman's inequality, for differences of at most 1.
    """
    log = math.log(2 / rate)
    return log / 3 + math.sqrt((log / 3) ** 2 + 2 * variance * log)


class Judge(NamedTuple):
    """What shows how probable a text is under the trunk."""

    ends: Ends
    hidden: Callable[[Sequence[int]], Tensor]
    """From the tokens of a text to its hidden states, (T, D)."""

    @classmethod
    def of(cls, trunk: Trunk) -> Judge:
        return cls(trunk, lambda token_ids: trunk.hidden(torch.tensor([token_ids], device=trunk.lm_head_VD.device))[0])


@torch.no_grad()
def fit_of(judge: Judge, answers: Sequence[Answer], sampling: Sampling, eos_ids: Collection[int]) -> AnswerFit:
    """Return how probable responses are under the trunk, by one forward pass over each.

    Args:
        answers: Prompts and responses, with at least one response token in total.
        sampling: How the trunk's tokens are chosen; the seed does not matter.
        eos_ids: The tokens that end a response. They count as one token, as servers do not report which one it was.

    Raises:
        CheckpointError: The trunk's logits are NaN or infinite.
    """
    tokens = 0
    sums = np.zeros(3)
    ends = judge.ends
    device = judge.ends.lm_head_VD.device
    rows = SamplingRows.stack([sampling], device)
    for prompt_ids, response_ids in answers:
        hidden_TD = judge.hidden([*prompt_ids, *response_ids]).to(device)[len(prompt_ids) - 1 : -1]
        said_T = torch.tensor(response_ids, device=device)
        tokens += len(said_T)
        for start in range(0, len(said_T), ROWS_AT_A_TIME):
            part = slice(start, start + ROWS_AT_A_TIME)
            logits_TV = ends.logits(hidden_TD[part])
            if not logits_TV.amax().isfinite():
                raise non_finite_error("trunk", ends, len(prompt_ids) + len(response_ids))
            p_TV = probabilities(logits_TV[None], rows)[0].double()
            sums += _moments(p_TV, said_T[part], sorted(eos_ids))
    found, expected, variance = sums.tolist()
    allowed = allowance(max(variance, 0.0)) / tokens + (SLACK if sampling.temperature else GREEDY_SLACK)
    return AnswerFit(len(answers), tokens, found / tokens, expected / tokens, allowed)


def _moments(p_TV: Tensor, said_T: Tensor, eos_ids: Sequence[int]) -> list[float]:
    """Return the sums of the tokens' probabilities, of their means and of their variances."""
    if eos_ids:
        first, *others = eos_ids
        said_T = torch.where(torch.isin(said_T, said_T.new_tensor(eos_ids)), first, said_T)
        p_TV[:, first] += p_TV[:, others].sum(-1)
        p_TV[:, others] = 0.0
    mean_T = p_TV.square().sum(-1)
    variance_T = p_TV.pow(3).sum(-1) - mean_T.square()
    found_T = p_TV.gather(-1, said_T[:, None])[:, 0]
    return [float(one.sum()) for one in (found_T, mean_T, variance_T)]


FIRST_CHECK, CHECK_EVERY, SAMPLE = 16, 256, 16
"""Responses of the first check, which ends the work where another model is served, and of each later one; and how many
of them are run through the trunk."""
Row = TypeVar("Row")


def regenerate_served(
    prompts: Sequence[Prompt],
    store: RegeneratedStore,
    endpoint: Endpoint,
    answering: Answering,
    judge: Judge,
    on_prompt: Callable[[int, int], None],
) -> tuple[int, list[str]]:
    """Send prompts to a server, and store its responses once a sample of them is found to be the trunk's.

    A kill loses the responses since the last check, of which there are fewer than :data:`CHECK_EVERY`.

    Args:
        on_prompt: Called with the number of prompts done and the number in all.

    Returns:
        The number of stored responses, and the server's error for each prompt that it refused. The next call sends
        these prompts again.

    Raises:
        DataError: The server fails for good, refuses every prompt, or returns responses that are not the trunk's.
    """
    unchecked, refusals, stored = list[RegeneratedRow](), list[str](), 0

    def keep() -> None:
        nonlocal stored
        rows = unchecked.copy()
        unchecked.clear()
        if rows:
            _require_trunks(rows, judge, answering, endpoint.url)
            store.append(rows)
            stored += len(rows)

    try:
        for number, answer in endpoint.answers(map(answering.request, prompts), endpoint.ask):
            if isinstance(answer, Refusal):
                refusals.append(answer.reason)
            else:
                unchecked.append(answering.row(prompts[number], answer.token_ids))
            on_prompt(stored + len(unchecked) + len(refusals), len(prompts))
            if len(unchecked) >= (CHECK_EVERY if stored else FIRST_CHECK):
                keep()
    finally:
        # Responses that arrived before an error or a signal.
        keep()
    if refusals and next(iter(store), None) is None:
        raise DataError(
            f"{endpoint.url}: refuses all of {len(prompts)} prompts ({refusals[-1]}); "
            "expected responses. Check the server's log, and that its context holds data.seq_len_tokens."
        )
    return stored, refusals


def _require_trunks(rows: Sequence[RegeneratedRow], judge: Judge, answering: Answering, url: str) -> None:
    readable = [(row.prompt_ids, row.response_ids) for row in rows if row.response_ids]
    if not readable:
        return
    fit = fit_of(judge, spread(readable, f"{rows[0].id} {len(rows)}"), answering.sampling, answering.eos_ids)
    if not fit.is_trunks:
        raise DataError(
            f"{url}: gives answers that are not the trunk's: over {fit.answers} of its last "
            f"{len(rows)} the trunk gives the tokens a mean probability of {fit.found:.3f}; expected "
            f"{fit.expected:.3f} within {fit.allowed:.3f}. These {len(rows)} are dropped. Serve model.trunk (with "
            "model.adapter, where there is one), with the sampling of data.regenerate; then the same command resumes "
            "from here."
        )


def spread(rows: Sequence[Row], seed: str) -> list[Row]:
    """Return a sample with one row from each stretch of rows: the server may have been replaced at some row."""
    drawn = random.Random(seed)
    bounds = [part * len(rows) // SAMPLE for part in range(SAMPLE + 1)]
    return [drawn.choice(rows[start:end]) for start, end in pairwise(bounds) if end > start]
