"""Generate responses on a server that serves the trunk, and check that they come from the trunk.

:func:`probe` checks the server before it is used, :func:`regenerate_served` sends many requests at a time, and
:class:`CheckedStore` applies the test of :func:`fit_of` to each block of stored responses.

The test: a token y drawn from p has probability p(y), whose mean is sum p^2 and whose variance is
sum p^3 - (sum p^2)^2. Over the tokens of a text the differences p(y) - sum p^2 add up to a martingale with steps of at
most 1, so Freedman's inequality bounds their sum: it exceeds ``allowance`` with probability ``FALSE_ALARM``. Tokens of
another model are less probable under the trunk than its own; tokens sampled at a lower temperature are more probable.
In greedy decoding all probabilities are 0 or 1, and the test compares the share of the trunk's first choices.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mtp_train.answers.endpoint import GREEDY, Endpoint, Refusal
from mtp_train.answers.generate import Answering, Question
from mtp_train.answers.store import RegeneratedRow, RegeneratedStore, rows_after
from mtp_train.checkpoints.writing import write_text
from mtp_train.data.tokenize import Prompt
from mtp_train.errors import DataError
from mtp_train.trunk.load import Trunk, non_finite_error

FALSE_ALARM = 1e-6
"""Probability that one check refuses responses of the trunk itself, rounding aside."""
SLACK, GREEDY_SLACK = 0.02, 0.05
"""Mean difference to allow for rounding: another precision changes probabilities slightly, and resolves near ties
differently."""
ROWS_AT_A_TIME = 256

DistributionFn = Callable[[Tensor], Tensor]
"""From logits (T, V) to the distribution that each token is drawn from."""
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

    @property
    def can_tell(self) -> bool:
        """Whether the test would have refused tokens of probability 0."""
        return self.allowed < self.expected


def allowance(variance: float, rate: float = FALSE_ALARM) -> float:
    """Return the bound that a sum of martingale differences exceeds, on either side, with probability ``rate``.

    Freedman's inequality, for differences of at most 1.
    """
    log = math.log(2 / rate)
    return log / 3 + math.sqrt((log / 3) ** 2 + 2 * variance * log)


@torch.no_grad()
def fit_of(
    trunk: Trunk,
    answers: Sequence[Answer],
    distribution: DistributionFn,
    *,
    is_greedy: bool,
    eos_ids: Collection[int],
) -> AnswerFit:
    """Return how probable responses are under the trunk, by one forward pass over each.

    Args:
        answers: Prompts and responses, with at least one response token in total.
        distribution: The distribution that the trunk's tokens are drawn from.
        eos_ids: The tokens that end a response. They count as one token, as servers do not report which one it was.

    Raises:
        CheckpointError: The trunk's logits are NaN or infinite.
    """
    tokens, sums = 0, [0.0, 0.0, 0.0]
    for prompt_ids, response_ids in answers:
        tokens_1T = torch.tensor([[*prompt_ids, *response_ids]], device=trunk.lm_head_VD.device)
        hidden_TD = trunk.hidden(tokens_1T)[0, len(prompt_ids) - 1 : -1]
        said_T = tokens_1T[0, len(prompt_ids) :]
        tokens += len(said_T)
        for start in range(0, len(said_T), ROWS_AT_A_TIME):
            part = slice(start, start + ROWS_AT_A_TIME)
            logits_TV = trunk.logits(hidden_TD[part])
            if not logits_TV.amax().isfinite():
                raise non_finite_error("trunk", trunk, tokens_1T.shape[1])
            more = _moments(distribution(logits_TV).double(), said_T[part], sorted(eos_ids))
            sums = [one + other for one, other in zip(sums, more, strict=True)]
    found, expected, variance = sums
    allowed = allowance(max(variance, 0.0)) / tokens + (GREEDY_SLACK if is_greedy else SLACK)
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


CHECK_EVERY, SAMPLE = 1000, 32
"""Responses per block, and how many of each block are run through the trunk."""
MARK_SUFFIX = ".checked"
Row = TypeVar("Row")
JudgeFn = Callable[[Sequence[RegeneratedRow]], AnswerFit]


class CheckedStore:
    """The response store of a process, with a mark of how far it has been checked.

    Responses are written to disk at once, so that a kill loses none. A ``.checked`` file beside them holds the length
    in bytes up to which they were checked.

    Args:
        others: Files of earlier calls with another number of processes, which this process checks too.
    """

    def __init__(self, store: RegeneratedStore, judge: JudgeFn, url: str, others: Sequence[Path] = ()) -> None:
        self.store = store
        self._judge = judge
        self._url = url
        for path in others:
            self._check(path, list(rows_after(path, _marked(path))))
        self._unchecked = list(rows_after(store.path, _marked(store.path)))

    def append(self, rows: Sequence[RegeneratedRow]) -> None:
        """Store rows, and check a block of them once it is complete."""
        self.store.append(rows)
        self._unchecked += rows
        if len(self._unchecked) >= CHECK_EVERY:
            self.check()

    def check(self) -> None:
        """Check the rows since the last check, including rows of an earlier call that was killed."""
        self._check(self.store.path, self._unchecked)
        self._unchecked = []

    def _check(self, path: Path, rows: Sequence[RegeneratedRow]) -> None:
        readable = [row for row in rows if row.response_ids]
        if readable:
            fit = self._judge(spread(readable, f"{path.name} {rows[0].id} {len(rows)}"))
            if not fit.is_trunks:
                kept = _marked(path)
                os.truncate(path, kept)
                raise _not_the_trunks(self._url, fit, len(rows), sum(1 for _ in rows_after(path, 0)))
        if rows:
            write_text(_mark(path), f"{path.stat().st_size}\n")


def spread(rows: Sequence[Row], seed: str) -> list[Row]:
    """Return a sample with one row from each stretch of rows: the server may have been replaced at some row."""
    drawn, bounds = random.Random(seed), [part * len(rows) // SAMPLE for part in range(SAMPLE + 1)]
    return [drawn.choice(rows[start:end]) for start, end in pairwise(bounds) if end > start]


def _mark(path: Path) -> Path:
    return path.with_suffix(MARK_SUFFIX)


def _marked(path: Path) -> int:
    mark = _mark(path)
    length = int(mark.read_text()) if mark.is_file() else 0
    # A file shorter than its mark was replaced since the check.
    return length if path.is_file() and length <= path.stat().st_size else 0


def _not_the_trunks(url: str, fit: AnswerFit, dropped: int, kept: int) -> DataError:
    return DataError(
        f"data.regenerate.endpoint: {url} gives answers that are not the trunk's: over {fit.answers} of its last "
        f"{dropped} the trunk gives the tokens a mean probability of {fit.found:.3f}; expected {fit.expected:.3f} "
        f"within {fit.allowed:.3f}. These {dropped} are dropped, and {kept} that were checked before are kept. Serve "
        "model.trunk with the sampling of data.regenerate; then the same command resumes from here."
    )


PROBE_PROMPTS, PROBE_TOKENS = 16, 64
MIN_AGREEMENT = 0.95
"""Least share of greedy tokens that equal the trunk's. Another precision changes a few tokens in a hundred, at near
ties; another model changes more."""

Done = dict[int, Future[dict[str, Any] | Refusal]]


@dataclass(frozen=True, kw_only=True)
class ServedCounts:
    """Prompts of one process, counted by outcome."""

    generated: int
    refused: int
    """Prompts that the server refused. The next call sends them again."""
    refusal: str | None
    """The server's error for the last refused prompt."""


def probe(endpoint: Endpoint, trunk: Trunk, prompts: Sequence[Prompt], *, seq_len_tokens: int) -> float:
    """Check that a server serves the trunk, and whether it accepts prompts as token ids.

    The server answers prompts greedily. Each token has to equal the trunk's own greedy choice at that position, near
    ties aside.

    Returns:
        The share of tokens that equal the trunk's choice.

    Raises:
        DataError: The server refuses a prompt, or its tokens are not the trunk's.
    """
    tokens = agreeing = 0
    answering = Answering(max_new_tokens=PROBE_TOKENS, seq_len_tokens=seq_len_tokens)
    for prompt in prompts:
        question = answering.ask(prompt)
        response = endpoint.response_ids(question, endpoint.first(partial(_greedily, endpoint, question)))
        if isinstance(response, Refusal):
            raise DataError(
                f"data.regenerate.endpoint: {endpoint.url} {response.reason}; expected a response to {prompt.id}. "
                "Check the server's log, and that its context holds data.seq_len_tokens."
            )
        tokens += len(response)
        agreeing += int((own_choices(trunk, question.prompt_ids, response) == torch.tensor(response)).sum())
    agreement = agreeing / tokens if tokens else 0.0
    if agreement < MIN_AGREEMENT:
        raise DataError(
            f"data.regenerate.endpoint: {endpoint.url} does not serve the trunk as {endpoint.model}: {agreeing} of "
            f"{tokens} tokens that it generates greedily are the trunk's own; expected "
            f"{MIN_AGREEMENT:.0%} or more. Serve model.trunk (with model.adapter, where there is one), unquantised."
        )
    return agreement


def _greedily(endpoint: Endpoint, question: Question) -> dict[str, Any] | Refusal:
    return endpoint.complete(endpoint.payload(question, GREEDY))


@torch.no_grad()
def own_choices(trunk: Trunk, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Tensor:
    """Return the trunk's greedy choice at the position of each response token, int64 on the CPU."""
    tokens_1T = torch.tensor([[*prompt_ids, *response_ids]], device=trunk.lm_head_VD.device)
    hidden_TD = trunk.hidden(tokens_1T)[0, len(prompt_ids) - 1 : -1]
    return trunk.logits(hidden_TD).argmax(-1).cpu()


def regenerate_served(
    prompts: Sequence[Prompt],
    store: CheckedStore,
    endpoint: Endpoint,
    sampling: Mapping[str, float],
    answering: Answering,
    on_prompt: Callable[[int, int], None],
) -> ServedCounts:
    """Send prompts to a server, and store each response as soon as it arrives.

    Args:
        on_prompt: Called with the number of prompts done and the number in all.

    Raises:
        DataError: The server fails for good, refuses every prompt, or returns responses that are not the trunk's.
    """
    questions = [answering.ask(prompt) for prompt in prompts]
    generated, refusals = 0, list[str]()

    def on_done(done: Done) -> None:
        nonlocal generated
        rows, failure = list[RegeneratedRow](), None
        for number, future in done.items():
            if (error := future.exception()) is not None:
                failure = error
                continue
            response = endpoint.response_ids(questions[number], future.result())
            if isinstance(response, Refusal):
                refusals.append(response.reason)
            else:
                rows.append(answering.row(prompts[number], response))
        if rows:
            store.append(rows)
        # A request that failed for good ends the others; what was answered is stored first.
        if failure is not None:
            raise failure
        generated += len(rows)
        on_prompt(generated + len(refusals), len(prompts))

    with contextlib.closing(endpoint):
        work = (partial(endpoint.complete, endpoint.payload(question, sampling)) for question in questions)
        endpoint.run_all(work, on_done)
        store.check()
    if refusals and next(iter(store.store), None) is None:
        raise DataError(
            f"data.regenerate.endpoint: {endpoint.url} refuses all of {len(prompts)} prompts ({refusals[-1]}); "
            "expected responses. Check the server's log."
        )
    return ServedCounts(generated=generated, refused=len(refusals), refusal=refusals[-1] if refusals else None)
