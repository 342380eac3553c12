"""Generate responses on a server that serves the trunk: check first that it does, then send many requests at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mtp_train.answers.check import CheckedStore
from mtp_train.answers.endpoint import GREEDY, Endpoint, Refusal
from mtp_train.answers.generate import Answering, Question
from mtp_train.answers.store import RegeneratedRow
from mtp_train.data.tokenize import Prompt
from mtp_train.errors import DataError
from mtp_train.trunk.load import Trunk

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

    Args:
        endpoint: The server. Its ``prompts_as`` is set here.
        prompts: A few prompts, spread over the data.
        seq_len_tokens: Limit of prompt and response together.

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
def own_choices(trunk: Trunk, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> torch.Tensor:
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
        prompts: The prompts of this process that have no response yet
            (:func:`mtp_train.answers.generate.missing_prompts`).
        store: The store of this process.
        sampling: Sampling settings (:meth:`Endpoint.payload`).
        answering: The settings of responses.
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
