"""The trunk answers prompts on a server: proof that it is the trunk, then many requests at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from mtp_train.data.checked import CheckedStore
from mtp_train.data.endpoint import GREEDY, Endpoint, Refusal
from mtp_train.data.prompts import Prompt
from mtp_train.data.regenerated import Question, answered, ask, fitting_prompts, make_row
from mtp_train.data.responses import RegeneratedStore
from mtp_train.errors import DataError
from mtp_train.heads.trunk import Trunk

PROBE_PROMPTS, PROBE_TOKENS = 16, 64
MIN_AGREEMENT = 0.95
"""Between precisions greedy decoding differs at near ties alone, a few tokens in a hundred; another model in more."""
QUEUED_PER_REQUEST = 2
"""Requests made ready for each one in flight."""

Waiting = dict[Future[dict[str, Any] | Refusal], tuple[Prompt, Question]]


@dataclass(frozen=True, kw_only=True)
class ServedCounts:
    """Say what came of one process's prompts."""

    generated: int
    refused: int
    """Prompts that the server would not answer; another call asks it again."""
    refusal: str | None
    """What it said to the last of these."""


def missing_prompts(
    prompts: Sequence[Prompt], store: RegeneratedStore, *, seq_len_tokens: int, rank: int, world: int
) -> list[Prompt]:
    """Return those of this process's prompts that have no response yet: every ``world``-th, from ``rank``.

    Raises:
        DataError: Every prompt is too long, or the store holds responses to other prompts.
    """
    fitting = sorted(fitting_prompts(prompts, seq_len_tokens), key=lambda prompt: prompt.id)
    stored = answered(fitting, store)
    return [prompt for prompt in fitting[rank::world] if prompt.id not in stored]


def probe(endpoint: Endpoint, trunk: Trunk, prompts: Sequence[Prompt], *, seq_len_tokens: int) -> float:
    """Check that a server serves the trunk, and find out how it takes prompts.

    It answers prompts greedily, and the trunk reads the answers: the tokens must be those that the trunk itself would
    have said at their places.

    Args:
        endpoint: The server; told here whether to send token ids or text.
        trunk: The trunk.
        prompts: A few, spread over the data.
        seq_len_tokens: No response goes past this many tokens, prompt included.

    Returns:
        The share of the tokens that are.

    Raises:
        DataError: It refuses, says nothing, or says something else.
    """
    tokens = agreeing = 0
    for number, prompt in enumerate(prompts):
        question = ask(prompt, max_new_tokens=PROBE_TOKENS, seq_len_tokens=seq_len_tokens, seed=0)
        answer = endpoint.complete(endpoint.payload(question, GREEDY))
        if isinstance(answer, Refusal) and number == 0:
            endpoint.prompts_as = "text"
            answer = endpoint.complete(endpoint.payload(question, GREEDY))
        response = answer if isinstance(answer, Refusal) else endpoint.response_ids(question, answer)
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
            f"{tokens} tokens that it says greedily are those that the trunk would say; expected "
            f"{MIN_AGREEMENT:.0%} or more. Serve model.trunk (with model.adapter, where there is one), unquantised."
        )
    return agreement


@torch.no_grad()
def own_choices(trunk: Trunk, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> torch.Tensor:
    """Return what the trunk would say greedily in the place of each token of a response, int64 on the CPU."""
    tokens_1T = torch.tensor([[*prompt_ids, *response_ids]], device=trunk.lm_head_VD.device)
    hidden_TD = trunk.hidden(tokens_1T)[0, len(prompt_ids) - 1 : -1]
    return trunk.logits(hidden_TD).argmax(-1).cpu()


def regenerate_served(
    prompts: Sequence[Prompt],
    store: CheckedStore,
    endpoint: Endpoint,
    sampling: Mapping[str, float],
    *,
    seq_len_tokens: int,
    max_new_tokens: int,
    eos_ids: Collection[int],
    seed: int,
    on_prompt: Callable[[int, int], None],
) -> ServedCounts:
    """Let a server answer prompts, and store each response as soon as it is there.

    Args:
        prompts: Those of this process, without those answered before (:func:`missing_prompts`).
        store: This process's.
        endpoint: The server.
        sampling: How tokens are chosen (:meth:`Endpoint.payload`).
        seq_len_tokens: No response goes past this many tokens, prompt included.
        max_new_tokens: Limit of every response.
        eos_ids: The tokens that end a response.
        seed: With a prompt's id it makes the seed of its noise.
        on_prompt: Told the number of prompts behind us and in all.

    Raises:
        DataError: The server fails for good, is not what it seemed, has refused every prompt there is, or its answers
            are no longer the trunk's.
    """
    generated, refusals = 0, []
    waiting: Waiting = {}
    queue = iter(prompts)
    pool = ThreadPoolExecutor(endpoint.concurrency)
    try:
        while True:
            for prompt in islice(queue, QUEUED_PER_REQUEST * endpoint.concurrency - len(waiting)):
                question = ask(prompt, max_new_tokens=max_new_tokens, seq_len_tokens=seq_len_tokens, seed=seed)
                waiting[pool.submit(endpoint.complete, endpoint.payload(question, sampling))] = (prompt, question)
            if not waiting:
                break
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            rows, refused = _read(endpoint, {future: waiting.pop(future) for future in done}, store, eos_ids)
            generated += rows
            refusals += refused
            on_prompt(generated + len(refusals), len(prompts))
        store.check()
    finally:
        # Where one request has failed for good, the others need not go on trying.
        endpoint.close()
        pool.shutdown(cancel_futures=True)
    if refusals and next(iter(store.store), None) is None:
        raise DataError(
            f"data.regenerate.endpoint: {endpoint.url} refuses all of {len(prompts)} prompts ({refusals[-1]}); "
            "expected responses. Check the server's log."
        )
    return ServedCounts(generated=generated, refused=len(refusals), refusal=refusals[-1] if refusals else None)


def _read(endpoint: Endpoint, done: Waiting, store: CheckedStore, eos_ids: Collection[int]) -> tuple[int, list[str]]:
    """Store what came back; return the number of responses, and what was said to prompts without one.

    Raises:
        DataError: A request failed for good; what came back beside it is stored.
    """
    rows, refusals = [], []
    failure: BaseException | None = None
    for future, (prompt, question) in done.items():
        failure = future.exception() or failure
        if future.exception() is not None:
            continue
        answer = future.result()
        response = answer if isinstance(answer, Refusal) else endpoint.response_ids(question, answer)
        if isinstance(response, Refusal):
            refusals.append(response.reason)
        else:
            rows.append(make_row(prompt, response, eos_ids, question.seed))
    if rows:
        store.append(rows)
    if failure is not None:
        raise failure
    return len(rows), refusals
