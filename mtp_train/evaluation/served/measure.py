"""Measure acceptance and speed of a served model: send the prompts of a suite to an OpenAI completions server.

Tasks are sent one after the other, so that the increase of the server's counters belongs to one task. With one request
at a time it belongs to one prompt, which intervals need. :mod:`mtp_train.evaluation.served.metrics` lists the figures
that each engine reports.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import numpy as np
from rich.progress import Progress

from mtp_inference import Sampling
from mtp_train.acceptance.counts import Interval, repeated_ngram_share
from mtp_train.acceptance.intervals import pooled_tau_interval, ratio_interval, sum_by_group
from mtp_train.data.answers import Answer
from mtp_train.data.endpoint import RESPONSE_TIMEOUT_SECONDS, Endpoint, SettingNames, read_api_key
from mtp_train.errors import DataError
from mtp_train.evaluation.cells import ALL_TASKS, Cell
from mtp_train.evaluation.prompt_records import TaskPrompt
from mtp_train.evaluation.results import NOT_TEACHER_FORCED, ArmResult
from mtp_train.evaluation.served.asking import Answered, Asking, Block
from mtp_train.evaluation.served.metrics import NOTHING, SpecCounts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ARM = "served"
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The smallest set of responses with its own counts: one prompt, or several that were sent together."""

    answered: tuple[Answered, ...]
    counts: SpecCounts | None
    """None where the server does not report acceptance."""


def make_cell(
    units: Sequence[Unit], *, task: str, temperature: float, model: str, url: str, drafts: bool | None
) -> Cell:
    """Return the cell of one task at one temperature, or of all tasks.

    Args:
        units: The responses with their counts; at least one response.
        task: Name of the task.
        temperature: Sampling temperature.
        model: Name of the served model.
        url: Address of the server.
        drafts: Whether the server drafts; None if unknown.
    """
    answered = [one for unit in units for one in unit.answered]
    counts = _pooled(units)
    return Cell(
        arm=ARM,
        task=task,
        temperature=temperature,
        context_tokens=None,
        depth=counts.depth if counts is not None else 0,
        # At temperature 0 all verify rules are equal. Above 0, the rule is a setting that the server does not report.
        rule="none" if drafts is False else "greedy" if drafts and temperature == 0.0 else "served",
        trunk=model,
        head=None if drafts is False else url,
        **_acceptance(units, counts, drafts),
        teacher_forced=NOT_TEACHER_FORCED,
        repeated_8gram_share=repeated_ngram_share([one.token_ids for one in answered]),
        tokens_per_second=_ratio(sum(one.tokens for one in answered), sum(one.streamed.seconds for one in answered)),
        speedup=None,
        prompts=len(answered),
        groups=len(set(_groups(units))),
        measured_here=True,
        new_tokens=sum(one.tokens for one in answered),
        mean_prompt_tokens=sum(len(one.prompt.prompt_ids) for one in answered) / len(answered),
        seconds_prefill=_mean([one.seconds_first for one in answered]),
        round_seconds=_round_seconds(answered, counts),
        break_even_tau=None,
        break_even_acceptance=None,
    )


def as_arm(cell: Cell) -> ArmResult:
    """Return a cell as a row of the report's table of arms."""
    return ArmResult(**{field.name: getattr(cell, field.name) for field in fields(ArmResult)})


def _pooled(units: Sequence[Unit]) -> SpecCounts | None:
    told = [unit.counts for unit in units if unit.counts is not None]
    return reduce(SpecCounts.__add__, told, NOTHING) if len(told) == len(units) else None


def _acceptance(units: Sequence[Unit], counts: SpecCounts | None, drafts: bool | None) -> dict[str, Any]:
    """Return the fields of a cell about rounds and drafts."""
    none = dict.fromkeys(("tau_ci95", "acceptance_rate", "marginal", "conditional", "accepted_histogram"))
    if counts is None or not counts.rounds:
        plain = 1.0 if drafts is False or counts is not None else None
        return {**none, "tau": plain, "tau_macro": plain, "rounds": None, "draft_tokens": 0, "accepted_tokens": 0}
    alone = [unit for unit in units if len(unit.answered) == 1]
    single = [unit.counts for unit in alone if unit.counts is not None]
    by_prompt = len(single) == len(units)
    reached = counts.accepted_per_pos
    chain = None if reached is None else (counts.rounds, *reached)
    return {
        "tau": counts.tau,
        "tau_ci95": _tau_interval(single, _groups(alone), counts.depth) if by_prompt else None,
        "tau_macro": float(np.mean([one.tau for one in single if one.rounds])) if by_prompt else None,
        "acceptance_rate": _ratio(counts.accepted_tokens, counts.draft_tokens),
        "marginal": None if reached is None else tuple(share / counts.rounds for share in reached),
        "conditional": None if chain is None else tuple(_ratio(later, earlier) for earlier, later in pairwise(chain)),
        "accepted_histogram": None if chain is None else tuple(a - b for a, b in pairwise((*chain, 0))),
        "rounds": counts.rounds,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
    }


def _tau_interval(counts: Sequence[SpecCounts], groups: Sequence[str], depth: int) -> Interval | None:
    totals_P2 = np.array([(one.accepted_tokens, one.rounds) for one in counts], dtype=np.float64)
    accepted_G, rounds_G = sum_by_group(totals_P2, groups).T
    return pooled_tau_interval(accepted_G, rounds_G, depth)


def _groups(units: Sequence[Unit]) -> list[str]:
    """Return the group of every response's prompt."""
    return [one.prompt.group for unit in units for one in unit.answered]


def _round_seconds(answered: Sequence[Answered], counts: SpecCounts | None) -> float | None:
    """Return the mean seconds per round, or per token where no rounds were counted."""
    if counts is not None and counts.rounds:
        return _ratio(sum(one.seconds_decode or 0.0 for one in answered), counts.rounds)
    timed = [one for one in answered if one.tokens_decode is not None]
    return _ratio(sum(one.seconds_decode or 0.0 for one in timed), sum(one.tokens_decode or 0 for one in timed))


def latencies(answered: Sequence[Answered]) -> dict[str, Any]:
    """Return percentiles in milliseconds: time to the first chunk, between chunks, and per token after the first chunk.

    The time per token is a mean within each response, and its percentiles are over responses. All tokens of a round
    arrive at the same time, in one chunk or several. None where the server does not report the tokens of the first
    chunk.
    """
    gaps = [later.seconds - earlier.seconds for one in answered for earlier, later in pairwise(one.streamed.arrivals)]
    timed = [one for one in answered if one.tokens_decode]
    return {
        "first_token_ms": _percentiles([one.seconds_first for one in answered if one.seconds_first is not None]),
        "between_pieces_ms": _percentiles(gaps),
        "per_token_ms": _percentiles([(one.seconds_decode or 0.0) / (one.tokens_decode or 1) for one in timed]),
    }


def two_lengths(short: Sequence[Answered], long: Sequence[Answered]) -> dict[str, Any] | None:
    """Return the decoding speed from a short and a long response to each prompt, with its interval.

    Returns:
        Milliseconds per token, tokens per second, their intervals, and the number of prompts; None where no prompt has
        two lengths, or the server does not stream.
    """
    first = {one.prompt.id: one for one in short}
    pairs = [(first[one.prompt.id], one) for one in long if one.prompt.id in first]
    tokens, seconds, groups = [], [], []
    for brief, whole in pairs:
        if brief.seconds_decode is None or whole.seconds_decode is None or whole.tokens <= brief.tokens:
            continue
        tokens.append(whole.tokens - brief.tokens)
        seconds.append(whole.seconds_decode - brief.seconds_decode)
        groups.append(whole.prompt.group)
    if not tokens or sum(seconds) <= 0.0:
        return None
    seconds_G, tokens_G = sum_by_group(np.array([seconds, tokens], dtype=np.float64).T, groups).T
    interval = ratio_interval(seconds_G, tokens_G, math.inf)
    known = interval is not None and interval[0] > 0.0
    return {
        "prompts": len(tokens),
        "groups": len(tokens_G),
        "tokens": sum(tokens),
        "ms_per_token": 1000.0 * sum(seconds) / sum(tokens),
        "ms_per_token_ci95": [1000.0 * limit for limit in interval] if interval is not None else None,
        "tokens_per_second": sum(tokens) / sum(seconds),
        "tokens_per_second_ci95": [1.0 / interval[1], 1.0 / interval[0]] if interval is not None and known else None,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = 1000.0 * np.array(seconds)
    return {"mean": float(values.mean())} | {f"p{share}": float(np.percentile(values, share)) for share in PERCENTILES}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


NAMES = SettingNames("--endpoint", "--served-model", "--api-key-env", "then run the command again")
MAX_FOREIGN_SHARE = 0.01
"""Limit of tokens for other clients, as a share of our tokens. Above it, the counters do not describe our prompts."""
MAX_UNDRAFTED_SHARE = 0.05
SHORT_SHARE = 0.25
"""Length of the shorter response, as a share of ``max_new_tokens``."""

Source = Literal["responses", "counters", "responses, rounds inferred", "none"]


@dataclass(frozen=True, kw_only=True)
class Served:
    """The measurements of a served model."""

    arm: ArmResult
    """The cell of all tasks at the first temperature."""
    cells: tuple[Cell, ...]
    """One cell per temperature and task, and one per temperature for all tasks."""
    document: dict[str, Any]
    """The server, request settings, source of the figures, speeds, latencies, failures, warnings and the verdict."""
    answers: Mapping[float, tuple[Answer, ...]]
    """Prompts and responses as token ids, by temperature."""


@dataclass(frozen=True, kw_only=True)
class _Heat:
    """The blocks of one temperature."""

    temperature: float
    blocks: tuple[Block, ...]
    short: tuple[Answered, ...] = ()
    """Responses of the shorter length, for servers that do not report acceptance."""

    @property
    def answered(self) -> tuple[Answered, ...]:
        return tuple(one for block in self.blocks for one in block.answered)


def measure_endpoint(
    url: str,
    prompts: Sequence[TaskPrompt],
    *,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Collection[int],
    vocab_size: int,
    temperatures: Sequence[float],
    max_new_tokens: int,
    concurrency: int,
    request_timeout_seconds: float = RESPONSE_TIMEOUT_SECONDS,
    model: str | None,
    api_key_env: str | None,
    seed: int,
    progress: Progress,
    wait: Callable[[float], object] | None = None,
) -> Served:
    """Send every prompt to a server at every temperature, and measure acceptance and speed.

    Args:
        url: Address of the server, including the API version (``http://localhost:8000/v1``).
        prompts: The prompts, sent as token ids, or as text to a server that accepts only text.
        tokenizer: The trunk's.
        eos_ids: The tokens that end a response.
        vocab_size: Size of the trunk's vocabulary.
        temperatures: Sampling temperatures, without top-p and top-k; the first one is the headline.
        max_new_tokens: Limit of every response.
        concurrency: Requests at a time. With 1, every figure has an interval, whichever counts the server reports.
        request_timeout_seconds: Longest wait for the server to send a part of a response.
        model: Name of the served model; None for a server with a single model.
        api_key_env: The environment variable with the server's key.
        seed: Combined with a prompt's id to the sampling seed of its request.
        progress: The progress display.
        wait: Function that waits a number of seconds (:class:`~mtp_train.data.endpoint.Endpoint`).

    Raises:
        DataError: The server cannot be used, fails permanently, was restarted meanwhile, or served other clients, so
            that its counters do not describe our prompts alone.
    """
    _require_askable(url, prompts, temperatures)
    key = read_api_key(api_key_env, NAMES)
    endpoint = Endpoint(
        url,
        tokenizer,
        eos_ids,
        vocab_size,
        api_key=key,
        concurrency=concurrency,
        timeout_seconds=request_timeout_seconds,
        wait=wait,
        names=NAMES,
    )
    with contextlib.closing(endpoint):
        endpoint.choose_model(model)
        asking = Asking(endpoint, seed)
        asking.warm_up(prompts[0])
        heats = _heats(asking, prompts, temperatures, max_new_tokens, progress)
    return _served(asking, heats, _source(heats), prompts, seed, max_new_tokens)


def _heats(
    asking: Asking,
    prompts: Sequence[TaskPrompt],
    temperatures: Sequence[float],
    max_new_tokens: int,
    progress: Progress,
) -> list[_Heat]:
    """Send every prompt at every temperature; to a server that reports no acceptance, also with a shorter limit."""
    bar = progress.add_task(f"asking {asking.endpoint.model}", total=len(prompts) * len(temperatures))
    heats = [
        _ask_all(asking, prompts, temperature, max_new_tokens, lambda: progress.advance(bar))
        for temperature in temperatures
    ]
    if _source(heats) != "none":
        return heats
    progress.update(bar, total=2 * len(prompts) * len(temperatures))
    return [_ask_briefly(asking, heat, prompts, max_new_tokens, lambda: progress.advance(bar)) for heat in heats]


def _require_askable(url: str, prompts: Sequence[TaskPrompt], temperatures: Sequence[float]) -> None:
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise DataError(
            f"{NAMES.url}: {url!r}; expected an address such as http://localhost:8000/v1. Include the API version."
        )
    if not prompts or not temperatures:
        raise DataError(f"{NAMES.url}: no prompts or no temperatures; expected both. Choose a suite with prompts.")


def _ask_all(
    asking: Asking, prompts: Sequence[TaskPrompt], temperature: float, max_new_tokens: int, tick: Callable[[], None]
) -> _Heat:
    """Send every prompt at one temperature, task by task; prompt by prompt where the concurrency is 1."""
    blocks: list[Block] = []
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        group = [prompt for prompt in prompts if prompt.task == task]
        size = 1 if asking.endpoint.concurrency == 1 else len(group)
        parts = [group[start : start + size] for start in range(0, len(group), size)]
        done = [asking.block(part, Sampling(temperature=temperature), max_new_tokens, tick) for part in parts]
        require_own(asking, done, task)
        blocks += done
    heat = _Heat(temperature=temperature, blocks=tuple(blocks))
    if not heat.answered:
        failed = blocks[0].failed[0]
        raise DataError(
            f"{NAMES.url}: {asking.endpoint.url} refuses all of {len(prompts)} prompts at temperature {temperature:g} "
            f"({failed.prompt.id}: {failed.reason}); expected responses. Check the server's log."
        )
    return heat


def _ask_briefly(
    asking: Asking, heat: _Heat, prompts: Sequence[TaskPrompt], max_new_tokens: int, tick: Callable[[], None]
) -> _Heat:
    """Send every prompt again, for a shorter response."""
    short = max(1, int(SHORT_SHARE * max_new_tokens))
    return replace(heat, short=asking.block(prompts, Sampling(temperature=heat.temperature), short, tick).answered)


def require_own(asking: Asking, blocks: Sequence[Block], task: str) -> None:
    """Raise DataError if counters are the only source of acceptance and include drafts for other clients."""
    answered = [one for block in blocks for one in block.answered]
    counted = any(block.gained is not None and block.gained.drafts is not None for block in blocks)
    # The number of tokens generated for a failed request is unknown.
    if not counted or any(block.failed for block in blocks) or all(map(is_exact, answered)):
        return
    own = sum(block.own_tokens for block in blocks)
    foreign = sum(max(0, block.foreign_tokens or 0) for block in blocks)
    if foreign > MAX_FOREIGN_SHARE * own:
        raise DataError(
            f"{NAMES.url}: {asking.endpoint.url} generated {own + foreign} tokens, {own} of them for us ({task}, "
            f"{len(answered)} prompts); expected no other client, as its counters do not separate requests. "
            "Measure while it is idle, or start vLLM with --per-request-spec-decode-metrics summary."
        )


def is_exact(one: Answered) -> bool:
    """Return whether a response itself tells its rounds. A response of one token has none."""
    return one.tokens <= 1 or (one.counts is not None and not one.counts.inferred)


def _source(heats: Sequence[_Heat]) -> Source:
    """Return the most reliable source of acceptance that is available for all responses."""
    answered = [one for heat in heats for one in heat.answered]
    told = [one.counts for one in answered if one.counts is not None]
    if told and all(map(is_exact, answered)):
        return "responses"
    counted = [block.gained.drafts for heat in heats for block in heat.blocks if block.gained is not None]
    if any(drafts is not None and drafts.rounds for drafts in counted):
        return "counters"
    return "responses, rounds inferred" if told else "none"


def _units(heat: _Heat, source: Source) -> list[Unit]:
    """Return the responses of one temperature with their counts."""
    if source == "counters":
        blocks = [block for block in heat.blocks if block.answered and block.gained is not None]
        return [Unit(answered=block.answered, counts=block.gained.drafts) for block in blocks if block.gained]
    told = source != "none"
    return [Unit(answered=(one,), counts=(one.counts or NOTHING) if told else None) for one in heat.answered]


def _drafts(heats: Sequence[_Heat], source: Source) -> bool | None:
    """Return whether the server drafts; None if unknown."""
    if source != "none":
        return True
    counted = all(block.gained is not None for heat in heats for block in heat.blocks)
    beside = all({"timings", "meta_info"} & one.streamed.document.keys() for heat in heats for one in heat.answered)
    return False if counted or beside else None


def _served(
    asking: Asking,
    heats: Sequence[_Heat],
    source: Source,
    prompts: Sequence[TaskPrompt],
    seed: int,
    max_new_tokens: int,
) -> Served:
    endpoint, drafts = asking.endpoint, _drafts(heats, source)
    # Sorted like the prompts: resampling then gives the same intervals as a measurement in process.
    place = {prompt.id: number for number, prompt in enumerate(prompts)}
    cells = []
    for heat in heats:
        units = sorted(_units(heat, source), key=lambda unit: place[unit.answered[0].prompt.id])
        tasks = dict.fromkeys(one.prompt.task for one in heat.answered)
        groups = {ALL_TASKS: units} | {
            task: [unit for unit in units if unit.answered[0].prompt.task == task] for task in tasks
        }
        cells += [
            make_cell(
                group, task=task, temperature=heat.temperature, model=endpoint.model, url=endpoint.url, drafts=drafts
            )
            for task, group in groups.items()
        ]
    failed = [one for heat in heats for block in heat.blocks for one in block.failed]
    document = {
        "url": endpoint.url,
        "server": {"kind": asking.server or None, "version": asking.version},
        "model": endpoint.model,
        "prompts_as": endpoint.prompts_as,
        "drafts": drafts,
        "acceptance_from": source,
        "concurrency": endpoint.concurrency,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "speeds": [_speed(heat) for heat in heats],
        "failures": [
            {"prompt": one.prompt.id, "task": one.prompt.task, "temperature": one.temperature, "reason": one.reason}
            for one in failed
        ],
        "answers": None,
        "warnings": _warnings(heats, source),
        "verdict": _verdict(heats, cells, source, drafts),
    }
    answers = {
        heat.temperature: tuple((one.prompt.prompt_ids, one.token_ids) for one in heat.answered) for heat in heats
    }
    return Served(arm=as_arm(cells[0]), cells=tuple(cells), document=document, answers=answers)


def _speed(heat: _Heat) -> dict[str, Any]:
    """Return the throughput and the latencies at one temperature."""
    seconds = sum(block.seconds for block in heat.blocks)
    tokens = sum(block.own_tokens for block in heat.blocks)
    return {
        "temperature": heat.temperature,
        "requests": len(heat.answered),
        "failed": sum(len(block.failed) for block in heat.blocks),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        **latencies(heat.answered),
    }


def _verdict(heats: Sequence[_Heat], cells: Sequence[Cell], source: Source, drafts: bool | None) -> dict[str, Any]:
    """Return the figures that decide whether drafts save time, and how they were measured."""
    if source != "none":
        found: list[dict[str, Any]] = [
            {"temperature": cell.temperature, "tau": cell.tau, "tau_ci95": cell.tau_ci95, "rounds": cell.rounds}
            for cell in cells
            if cell.task == ALL_TASKS
        ]
        return {"way": "acceptance", "sentence": "Acceptance as reported by the server.", "temperatures": found}
    found = [
        {"temperature": heat.temperature, **(two_lengths(heat.short, heat.answered) or {"tokens_per_second": None})}
        for heat in heats
    ]
    silent = "The server does not draft" if drafts is False else "The server does not report acceptance"
    sentence = f"{silent}: decoding speed from two lengths of each response, without the time to the first token."
    return {"way": "two lengths", "sentence": sentence, "temperatures": found}


def _warnings(heats: Sequence[_Heat], source: Source) -> list[str]:
    """Return warnings about the figures, one sentence each."""
    blocks = [block for heat in heats for block in heat.blocks]
    own = sum(block.own_tokens for block in blocks)
    foreign = sum(max(0, block.foreign_tokens or 0) for block in blocks)
    missing = -sum(min(0, block.foreign_tokens or 0) for block in blocks)
    failed = [one for block in blocks for one in block.failed]
    units = [unit for heat in heats for unit in _units(heat, source)]
    undrafted = sum(_undrafted(unit) for unit in units)
    cached = sum(map(_cached_tokens, (one for block in blocks for one in block.answered)))
    said = []
    if failed:
        said.append(f"{len(failed)} requests failed, {failed[0].prompt.id} first: {failed[0].reason}.")
    if foreign:
        ours = " (including tokens of failed requests)" if failed else ""
        said.append(f"Beside our {own} tokens the server counted {foreign} that it did not send to us{ours}.")
    if missing:
        said.append(f"The server counted {missing} tokens fewer than the {own} that it sent.")
    if undrafted > MAX_UNDRAFTED_SHARE * own:
        said.append(f"{undrafted} of {own} tokens came from steps without drafts, which tau leaves out.")
    if source == "responses, rounds inferred":
        said.append(
            "The server reports drafted and accepted tokens but no rounds. Rounds are inferred from the tokens, so tau "
            "may be slightly off. Start llama-server with --metrics."
        )
    if cached:
        said.append(
            f"{cached} prompt tokens came from the server's prefix cache, which shortens the time to the first token."
        )
    return said


def _undrafted(unit: Unit) -> int:
    """Return the number of tokens that came neither from prefill nor from a counted round."""
    if unit.counts is None:
        return 0
    explained = len(unit.answered) + unit.counts.rounds + unit.counts.accepted_tokens
    return max(0, sum(one.tokens for one in unit.answered) - explained)


def _cached_tokens(one: Answered) -> int:
    document = one.streamed.document
    details = (document.get("usage") or {}).get("prompt_tokens_details") or document.get("meta_info") or {}
    return int(details.get("cached_tokens") or 0)
