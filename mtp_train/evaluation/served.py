"""Measure a served model as an arm: send the same prompts to a running server, and read its counts.

Tasks are sent one after the other, so that the increase of the server's counters belongs to one task. With one request
at a time, or where responses have counts, it belongs to one prompt, which intervals need.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.progress import Progress

from mtp_inference.sampling.distributions import Sampling, distribution_of
from mtp_train.acceptance.counts import PromptCounts, acceptance_rate, conditional, marginal, repeated_ngram_share, tau
from mtp_train.acceptance.intervals import tau_interval
from mtp_train.acceptance.names import SERVED
from mtp_train.answers.draft_counts import SpecCounts, increase, response_counts
from mtp_train.answers.endpoint import GREEDY, Endpoint, Refusal, SettingNames, read_api_key
from mtp_train.answers.generate import Answering
from mtp_train.answers.served import Answer, fit_of, spread
from mtp_train.checkpoints.files import is_gguf
from mtp_train.checkpoints.locations import open_location
from mtp_train.errors import DataError
from mtp_train.evaluation.grid import EvaluationGrid, grid_prompts
from mtp_train.evaluation.prompt_records import TaskPrompt
from mtp_train.evaluation.results import ALL_TASKS, Cell
from mtp_train.evaluation.statistics import ByPrompt, macro_tau
from mtp_train.heads.diagnose import text_config_of
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.tokenizer import eos_token_ids, load_tokenizer

WARM_UP_TOKENS = 8
SETTLE_LOOKS, SETTLE_SECONDS = 20, 0.1
"""Retries, and seconds between them, until the counters include the responses that were just received."""
MAX_FOREIGN_SHARE = 0.01
"""Limit of tokens for other clients, as a share of our tokens. Above it, the counters do not describe our prompts."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server with the OpenAI API, and the checkpoint that it serves."""

    name: str = SERVED
    """Its arm."""
    url: str
    checkpoint: str
    """Source of the tokenizer, the chat template and the EOS ids."""
    model: str | None = None
    """Name of the model in the server's list; None where it serves a single model."""
    api_key_env: str | None = None
    concurrency: int = 1
    request_timeout_seconds: float
    """Longest wait for the server to send a part of a response."""

    def identity(self) -> dict[str, Any]:
        """Return the server's settings for the identity of a study: the name of the key's variable, never the key."""
        settings = asdict(self)
        # It changes no figure: an evaluation may be resumed with another one.
        del settings["request_timeout_seconds"]
        return settings

    @property
    def setting(self) -> str:
        """The user's setting with the address, for messages."""
        return "--endpoint" if self.name == SERVED else f"arm {self.name}"


@dataclass(frozen=True, kw_only=True)
class Served:
    """The measurements of a served model."""

    cells: tuple[Cell, ...]
    """One cell per temperature for all tasks, followed by those of single tasks; the first is the headline."""
    document: dict[str, Any]
    """The server, request settings, throughput, failures, warnings and the verdict on the answers."""
    answers: Mapping[float, tuple[Answer, ...]]
    """Prompts and responses as token ids, by temperature."""
    by_prompt: ByPrompt
    """Counts of single prompts at each temperature, those without drafts included; empty where they are not known."""


@dataclass(frozen=True, kw_only=True)
class _Answered:
    prompt: TaskPrompt
    token_ids: tuple[int, ...]
    tokens: int
    """Number of new tokens, as counted by the server."""
    counts: SpecCounts | None
    """Draft counts in the response; None where it has none."""
    seconds: tuple[float, float] | None
    """Time of prefill and of decoding, by the server's clock; None where the response has none."""


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Prompts that were sent together, with the drafts of all of them."""

    answered: tuple[_Answered, ...]
    failed: tuple[tuple[TaskPrompt, str], ...]
    """Prompts without a response, and why."""
    seconds: float
    counts: SpecCounts | None
    """None where the server does not count its drafts."""
    generated: int | None
    """Tokens that the server counted meanwhile for all clients; None where it has no counters."""

    @property
    def parts(self) -> list[_Block]:
        """The block, or without counters a block for each of its responses that has counts of its own."""
        if self.counts is not None:
            return [self]
        own = replace(self, seconds=self.seconds / max(1, len(self.answered)))
        told = [replace(own, answered=(one,), counts=one.counts) for one in self.answered if one.counts is not None]
        return told or [self]


def ask(server: Server, grid: EvaluationGrid, progress: Progress) -> Served:
    """Send the grid's unchanged prompts to the server at each of the grid's temperatures, and return the measurements.

    Raises:
        MtpError: The server or the checkpoint's tokenizer cannot be used.
    """
    if is_gguf(server.checkpoint):
        from mtp_train.checkpoints.gguf.model_file import gguf_tokenizer

        tokenizer = gguf_tokenizer(Path(server.checkpoint))
        eos_ids, vocab_size = frozenset({tokenizer.eos_token_id}), len(tokenizer)
    else:
        checkpoint = open_location(server.checkpoint)
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=False)
        eos_ids, vocab_size = eos_token_ids(checkpoint, tokenizer), text_config_of(checkpoint).vocab_size
    prompts = grid_prompts(grid, tokenizer, (None,))[None]
    with contextlib.closing(connect(server, tokenizer, eos_ids, vocab_size)) as endpoint:
        found = measure_endpoint(endpoint, prompts, grid, progress)
    if server.name == SERVED:
        return found
    # Servers of one trunk name its files differently.
    cells = (replace(cell, arm=server.name, trunk=server.checkpoint) for cell in found.cells)
    return replace(found, cells=tuple(cells))


def connect(
    server: Server,
    tokenizer: Any,
    eos_ids: Collection[int],
    vocab_size: int,
    wait: Callable[[float], object] | None = None,
) -> Endpoint:
    """Return a client of the server's model, with the trunk's tokenizer, EOS ids and vocabulary size.

    Raises:
        DataError: The address is not one, the key's variable is not set, or the server does not list the model.
    """
    url = urlsplit(server.url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise DataError(
            f"{server.setting}: {server.url!r}; expected an address such as http://localhost:8000/v1. Correct it."
        )
    names = SettingNames(server.setting, "--served-model", "--api-key-env", "then run the command again")
    endpoint = Endpoint(
        server.url if url.path.strip("/") else f"{server.url.rstrip('/')}/v1",
        tokenizer,
        eos_ids,
        vocab_size,
        api_key=read_api_key(server.api_key_env, names),
        concurrency=server.concurrency,
        timeout_seconds=server.request_timeout_seconds,
        wait=wait,
        names=names,
    )
    endpoint.choose_model(server.model)
    return endpoint


def served_checkpoint(server: Server) -> str:
    """Return the files that a server says it serves, where they are on this machine.

    Raises:
        DataError: It names none, or they are elsewhere.
    """
    with contextlib.closing(connect(server, None, (), 0)) as endpoint:
        place = endpoint.checkpoint
    if place is None or not Path(place).exists():
        raise DataError(
            f"{server.setting}: {server.url} serves {place or 'files that it does not name'}; expected files on this "
            "machine, whose tokenizer writes the prompts. Name the trunk: --tokenizer CKPT."
        )
    return place


def measure_endpoint(
    endpoint: Endpoint, prompts: Sequence[TaskPrompt], grid: EvaluationGrid, progress: Progress
) -> Served:
    """Send every prompt at every temperature of a grid, and measure acceptance and throughput.

    Args:
        endpoint: The server. With a concurrency of 1, every figure has an interval, whichever counts the server
            reports.
        prompts: The prompts, sent as token ids, or as text to a server that accepts only text.
        grid: Its temperatures, without top-p and top-k; the first one is the headline. Its seed gives, combined with a
            prompt's id, the sampling seed of its request.
        progress: The progress display.

    Raises:
        DataError: The server fails permanently, was restarted, or serves other clients.
    """
    _warm_up(endpoint, prompts[0], grid)
    bar = progress.add_task(f"asking {endpoint.model}", total=len(prompts) * len(grid.temperatures))
    tick = partial(progress.advance, bar)
    return _served(endpoint, {one: _ask_all(endpoint, prompts, one, grid, tick) for one in grid.temperatures}, grid)


def _warm_up(endpoint: Endpoint, prompt: TaskPrompt, grid: EvaluationGrid) -> None:
    """Send one uncounted request, to warm up the server and to find out whether it accepts token ids."""
    short = replace(grid, max_new_tokens=WARM_UP_TOKENS)
    first = endpoint.first(partial(_answer, prompt, endpoint, 0.0, short))
    if isinstance(first, Refusal):
        raise DataError(
            f"{endpoint.url}: {first.reason}, for prompt {prompt.id}; expected a response. Check the server's log, and "
            "that its context length fits the prompts."
        )


def _answer(prompt: TaskPrompt, endpoint: Endpoint, temperature: float, grid: EvaluationGrid) -> _Answered | Refusal:
    question = Answering(max_new_tokens=grid.max_new_tokens, seed=grid.seed).ask(prompt)
    payload = endpoint.payload(question, {**GREEDY, "temperature": temperature})
    try:
        document = endpoint.complete_with_counts(payload)
        if isinstance(document, Refusal):
            return document
        token_ids = endpoint.response_ids(question, document)
    except DataError as error:
        raise DataError(f"prompt {prompt.id} ({prompt.task}, temperature {temperature:g}): {error}") from None
    if isinstance(token_ids, Refusal):
        return token_ids
    tokens = (document.get("usage") or {}).get("completion_tokens") or len(token_ids)
    counts, timings = response_counts(document), document.get("timings")
    # Of llama-server.
    seconds = (timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000) if timings else None
    return _Answered(prompt=prompt, token_ids=tuple(token_ids), tokens=tokens, counts=counts, seconds=seconds)


def _ask_all(
    endpoint: Endpoint,
    prompts: Sequence[TaskPrompt],
    temperature: float,
    grid: EvaluationGrid,
    tick: Callable[[], None],
) -> list[_Block]:
    """Send every prompt at one temperature, task by task; prompt by prompt where the concurrency is 1."""
    blocks: list[_Block] = []
    answer = partial(_answer, endpoint=endpoint, temperature=temperature, grid=grid)
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        group = [prompt for prompt in prompts if prompt.task == task]
        size = 1 if endpoint.concurrency == 1 else len(group)
        parts = [group[start : start + size] for start in range(0, len(group), size)]
        done = [_ask_block(endpoint, part, answer, tick) for part in parts]
        _require_own(endpoint, done)
        blocks += done
    failed = [one for block in blocks for one in block.failed]
    if len(failed) == len(prompts):
        raise DataError(
            f"{endpoint.names.url}: {endpoint.url} refuses all of {len(prompts)} prompts at temperature "
            f"{temperature:g} ({failed[0][0].id}: {failed[0][1]}); expected responses. Check the server's log."
        )
    return blocks


def _ask_block(
    endpoint: Endpoint,
    prompts: Sequence[TaskPrompt],
    answer: Callable[[TaskPrompt], _Answered | Refusal],
    tick: Callable[[], None],
) -> _Block:
    before, started = endpoint.counters(), time.perf_counter()
    found: dict[int, _Answered | Refusal] = {}

    def on_done(done: dict[int, Future[_Answered | Refusal]]) -> None:
        for number, future in done.items():
            found[number] = future.result()
            tick()

    endpoint.run_all((partial(answer, prompt) for prompt in prompts), on_done)
    seconds, results = time.perf_counter() - started, sorted(found.items())
    answered = tuple(one for _, one in results if isinstance(one, _Answered))
    failed = tuple((prompts[number], one.reason) for number, one in results if isinstance(one, Refusal))
    generated = counts = None
    if before is not None:
        generated, counts = _gained(endpoint, before, sum(one.tokens for one in answered))
    return _Block(answered=answered, failed=failed, seconds=seconds, counts=counts, generated=generated)


def _gained(endpoint: Endpoint, before: Mapping[tuple[str, str], float], own_tokens: int) -> tuple[int, SpecCounts]:
    """Return the increase of the counters, read until they include all tokens that we received."""
    for number in range(SETTLE_LOOKS):
        if number:
            endpoint.wait(SETTLE_SECONDS)
        now = endpoint.counters()
        if now is None:
            raise DataError(
                f"{endpoint.url}: no counters at /metrics after its responses; expected them as before. Check that the "
                "server is still running, and run the command again."
            )
        generated, counts = increase(before, now, endpoint.served_with)
        if generated >= own_tokens:
            break
    return generated, counts


def _require_own(endpoint: Endpoint, blocks: Sequence[_Block]) -> None:
    """Check that the counters include no drafts for other clients."""
    answered = [one for block in blocks for one in block.answered]
    own, generated = sum(one.tokens for one in answered), sum(block.generated or 0 for block in blocks)
    # The number of tokens generated for a failed request is unknown.
    if generated > (1.0 + MAX_FOREIGN_SHARE) * own and not any(block.failed for block in blocks):
        task = answered[0].prompt.task
        raise DataError(
            f"{endpoint.names.url}: {endpoint.url} generated {generated} tokens, {own} of them for us ({task}, "
            f"{len(answered)} prompts); expected no other client, as its counters do not separate requests. Measure "
            "while it is idle."
        )


def _served(endpoint: Endpoint, asked: Mapping[float, Sequence[_Block]], grid: EvaluationGrid) -> Served:
    parts = {one: [part for block in blocks if block.answered for part in block.parts] for one, blocks in asked.items()}
    told = [part.counts for some in parts.values() for part in some]
    counted = None not in told
    drafts = any(counts.rounds for counts in told if counts is not None) if counted else None
    cells = []
    for temperature, some in parts.items():
        for task in (ALL_TASKS, *dict.fromkeys(part.answered[0].prompt.task for part in some)):
            group = [part for part in some if task in (ALL_TASKS, part.answered[0].prompt.task)]
            cells.append(_cell(endpoint, group, task, temperature, drafts))
    failed = [(one, *pair) for one, blocks in asked.items() for block in blocks for pair in block.failed]
    warnings = [f"{len(failed)} requests failed, {failed[0][1].id} first: {failed[0][2]}."] if failed else []
    if not counted:
        warnings.append(
            "The server does not count its drafts, so acceptance is unknown. Counts come from vLLM, SGLang and "
            "llama-server."
        )
    document = {
        "url": endpoint.url,
        "server": endpoint.served_with or None,
        "model": endpoint.model,
        "prompts_as": endpoint.prompts_as,
        "drafts": drafts,
        "counts": "counters" if any(block.counts for blocks in asked.values() for block in blocks) else "responses",
        "concurrency": endpoint.concurrency,
        "max_new_tokens": grid.max_new_tokens,
        "seed": grid.seed,
        "speeds": [_speed(temperature, blocks) for temperature, blocks in asked.items()],
        "failures": [
            {"prompt": prompt.id, "task": prompt.task, "temperature": temperature, "reason": reason}
            for temperature, prompt, reason in failed
        ],
        "answers": None,
        "warnings": warnings,
    }
    answers = {
        temperature: tuple((one.prompt.prompt_ids, one.token_ids) for block in blocks for one in block.answered)
        for temperature, blocks in asked.items()
    }
    pooled = [cell for cell in cells if cell.task == ALL_TASKS]
    single = {one: [part for part in some if len(part.answered) == 1] for one, some in parts.items()}
    by_prompt = {cell.setting: _part_counts(single[cell.temperature], cell.depth) for cell in pooled}
    return Served(cells=tuple(cells), document=document, answers=answers, by_prompt=by_prompt)


def _part_counts(parts: Sequence[_Block], depth: int) -> dict[str, tuple[str, PromptCounts]]:
    """Return task and counts of each part by its first prompt. Without drafts every token but the first is a round."""
    found = {}
    for part in parts:
        one, counts = part.answered[0], part.counts
        if counts is None:
            continue
        # Where the positions are unknown, only the sum means something.
        reached = counts.accepted_per_pos or (counts.accepted_tokens,)
        made = PromptCounts(
            prompt_id=one.prompt.id,
            rounds=counts.rounds if depth else one.tokens - 1,
            num_draft_tokens=counts.draft_tokens,
            accepted_per_pos=(*reached, *[0] * depth)[:depth],
            new_tokens=one.tokens,
            seconds=None if one.seconds is None else sum(one.seconds),
            group=one.prompt.group,
            seconds_decode=None if one.seconds is None else one.seconds[1],
        )
        found[one.prompt.id] = one.prompt.task, made
    return found


def _speed(temperature: float, blocks: Sequence[_Block]) -> dict[str, Any]:
    """Return the throughput at one temperature, prefill included."""
    seconds = sum(block.seconds for block in blocks)
    tokens = sum(one.tokens for block in blocks for one in block.answered)
    return {
        "temperature": temperature,
        "requests": sum(len(block.answered) for block in blocks),
        "failed": sum(len(block.failed) for block in blocks),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def _cell(endpoint: Endpoint, parts: Sequence[_Block], task: str, temperature: float, drafts: bool | None) -> Cell:
    """Return the cell of one task at one temperature, or of all tasks."""
    answered = [one for part in parts for one in part.answered]
    new_tokens = sum(one.tokens for one in answered)
    told = [part.counts for part in parts if part.counts is not None]
    counts = reduce(SpecCounts.__add__, told, SpecCounts()) if drafts is not None else None
    return Cell(
        arm=SERVED,
        task=task,
        temperature=temperature,
        context_tokens=None,
        depth=counts.depth if counts is not None else 0,
        # At temperature 0 all verify rules are equal. Above 0, the rule is a setting that the server does not report.
        rule="none" if drafts is False else "greedy" if drafts and temperature == 0.0 else "served",
        trunk=endpoint.model,
        head=None if drafts is False else endpoint.url,
        **_acceptance(parts, counts),
        repeated_8gram_share=repeated_ngram_share([one.token_ids for one in answered]),
        tokens_per_second=new_tokens / sum(part.seconds for part in parts),
        prompts=len(answered),
        groups=len({one.prompt.group for one in answered}),
        new_tokens=new_tokens,
        mean_prompt_tokens=sum(len(one.prompt.prompt_ids) for one in answered) / len(answered),
    )


def _acceptance(parts: Sequence[_Block], counts: SpecCounts | None) -> dict[str, Any]:
    """Return the fields of a cell about rounds and drafts."""
    if counts is None or not counts.rounds:
        plain = None if counts is None else 1.0
        return {"tau": plain, "tau_macro": plain, "draft_tokens": 0, "accepted_tokens": 0}
    by_part = [made for _, made in _part_counts(parts, counts.depth).values()]
    reached = counts.accepted_per_pos
    all_apart = all(len(part.answered) == 1 for part in parts)
    figures: dict[str, Any] = {}
    if reached is not None:
        figures = {"marginal": tuple(marginal(by_part)), "conditional": tuple(conditional(by_part))}
        figures["accepted_histogram"] = tuple(a - b for a, b in pairwise((counts.rounds, *reached, 0)))
    return {
        "tau": tau(by_part),
        "tau_ci95": tau_interval(by_part) if all_apart else None,
        "tau_macro": macro_tau(by_part) if all_apart else None,
        "acceptance_rate": acceptance_rate(by_part),
        "rounds": counts.rounds,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
        **figures,
    }


def judged(served: Served, trunk: Trunk, eos_ids: Collection[int]) -> Served:
    """Return the measurements with a verdict on whether the trunk wrote the responses, from a sample per temperature.

    Raises:
        CheckpointError: The trunk's logits are NaN or infinite.
    """
    found, warnings = [], list(served.document["warnings"])
    for temperature, answers in served.answers.items():
        fit = fit_of(
            trunk,
            spread([answer for answer in answers if answer[1]], f"{temperature}"),
            distribution_of(Sampling(temperature=temperature), trunk.lm_head_VD.device),
            is_greedy=temperature == 0.0,
            eos_ids=eos_ids,
        )
        verdict = fit.is_trunks if fit.can_tell or not fit.is_trunks else None
        found.append({"temperature": temperature, **fit._asdict(), "are_the_trunks": verdict})
        if verdict is None:
            warnings.append(
                f"{fit.tokens} tokens at temperature {temperature:g} are too few to tell whether the trunk wrote them. "
                "Use more prompts or longer responses."
            )
        elif not verdict:
            warnings.append(
                f"The responses at temperature {temperature:g} are not the trunk's: over {fit.answers} responses, the "
                f"trunk gives the tokens a mean probability of {fit.found:.3f}, and its own tokens {fit.expected:.3f} "
                f"within {fit.allowed:.3f}. The served model, its quantisation or its sampling differs."
            )
    return replace(served, document={**served.document, "answers": found, "warnings": warnings})
