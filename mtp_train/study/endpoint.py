"""Measure a model that is served: the prompts of a suite, asked of a running server of OpenAI's completions.

Tasks are asked one after the other, so that the server's counters can be told apart by task; with one request at a time
also by prompt, which is what intervals need. See :mod:`mtp_train.study.served_metrics` for what each engine tells,
:mod:`mtp_train.study.served_report` for what is made of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from rich.progress import Progress

from mtp_train.data.answers import Answer
from mtp_train.data.endpoint import Endpoint, SettingNames, read_api_key
from mtp_train.errors import DataError
from mtp_train.report.cells import ALL_TASKS, Cell
from mtp_train.report.schema import ArmResult
from mtp_train.study.records import TaskPrompt
from mtp_train.study.served_asking import Answered, Asking, Block
from mtp_train.study.served_metrics import NOTHING
from mtp_train.study.served_report import Unit, as_arm, latencies, make_cell, two_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMES = SettingNames("--endpoint", "--served-model", "--api-key-env", "then run the command again")
MAX_FOREIGN_SHARE = 0.01
"""Of our own tokens; more drafts of others than that, and the counters say little of ours."""
MAX_UNDRAFTED_SHARE = 0.05
SHORT_SHARE = 0.25
"""Of ``max_new_tokens``: the shorter of two lengths."""

Source = Literal["responses", "counters", "responses, rounds inferred", "none"]


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a server was found to do."""

    arm: ArmResult
    """All tasks at the first temperature."""
    cells: tuple[Cell, ...]
    """Per temperature, each task and all together."""
    document: dict[str, Any]
    """The server, how it was asked, what its figures rest on, speeds, latencies, failures, warnings and the verdict."""
    answers: Mapping[float, tuple[Answer, ...]]
    """By temperature, what it was asked and what it said."""


@dataclass(frozen=True, kw_only=True)
class _Heat:
    """All blocks at one temperature."""

    temperature: float
    blocks: tuple[Block, ...]
    short: tuple[Answered, ...] = ()
    """Responses of the shorter length, where speed has to stand for acceptance."""

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
    model: str | None,
    api_key_env: str | None,
    seed: int,
    progress: Progress,
    wait: Callable[[float], object] | None = None,
) -> Served:
    """Ask a server every prompt at every temperature and count what it accepts.

    Args:
        url: Its address up to and with the version (``http://localhost:8000/v1``).
        prompts: What it is asked, as token ids; as their text where it takes text alone.
        tokenizer: The trunk's.
        eos_ids: The tokens that end a response.
        vocab_size: Tokens that the trunk knows.
        temperatures: Of the sampling, from the trunk's whole distribution; the first is the headline.
        max_new_tokens: Limit of every response.
        concurrency: Requests at a time. 1 gives every figure an interval, whatever the server tells.
        model: The model that is to answer; None for the only one served.
        api_key_env: The environment variable that holds the server's key.
        seed: With a prompt's id it makes the seed of its noise.
        progress: Shows how far it is.
        wait: What waits some seconds (:class:`~mtp_train.data.endpoint.Endpoint`).

    Raises:
        DataError: The server cannot be used, fails for good, was started again meanwhile, or served others so that its
            counters do not tell of our prompts alone.
    """
    _require_askable(url, prompts, temperatures)
    key = read_api_key(api_key_env, NAMES)
    endpoint = Endpoint(
        url, tokenizer, eos_ids, vocab_size, api_key=key, concurrency=concurrency, wait=wait, names=NAMES
    )
    with contextlib.closing(endpoint):
        endpoint.choose_model(model)
        asking = Asking(endpoint, seed)
        asking.warm_up(prompts[0])
        bar = progress.add_task(f"asking {endpoint.model}", total=len(prompts) * len(temperatures))
        heats = [
            _ask_all(asking, prompts, temperature, max_new_tokens, lambda: progress.advance(bar))
            for temperature in temperatures
        ]
        source = _source(heats)
        if source == "none":
            progress.update(bar, total=2 * len(prompts) * len(temperatures))
            heats = [
                _ask_briefly(asking, heat, prompts, max_new_tokens, lambda: progress.advance(bar)) for heat in heats
            ]
    return _served(asking, heats, source, prompts, seed, max_new_tokens)


def _require_askable(url: str, prompts: Sequence[TaskPrompt], temperatures: Sequence[float]) -> None:
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise DataError(
            f"{NAMES.url}: {url!r}; expected an address such as http://localhost:8000/v1. Give it with its version."
        )
    if not prompts or not temperatures:
        raise DataError(f"{NAMES.url}: nothing to ask; expected prompts and temperatures. Choose a suite with prompts.")


def _ask_all(
    asking: Asking, prompts: Sequence[TaskPrompt], temperature: float, max_new_tokens: int, tick: Callable[[], None]
) -> _Heat:
    """Ask every prompt at one temperature, task by task; one by one, where one is asked at a time."""
    blocks: list[Block] = []
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        group = [prompt for prompt in prompts if prompt.task == task]
        size = 1 if asking.endpoint.concurrency == 1 else len(group)
        parts = [group[start : start + size] for start in range(0, len(group), size)]
        done = [asking.block(part, temperature, max_new_tokens, tick) for part in parts]
        _require_own(asking, done, task)
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
    """Ask every prompt once more for a shorter response."""
    short = max(1, int(SHORT_SHARE * max_new_tokens))
    return replace(heat, short=asking.block(prompts, heat.temperature, short, tick).answered)


def _require_own(asking: Asking, blocks: Sequence[Block], task: str) -> None:
    """Refuse counters that hold others' drafts beside ours, where they are all there is."""
    answered = [one for block in blocks for one in block.answered]
    counted = any(block.gained is not None and block.gained.drafts is not None for block in blocks)
    # Of a request that failed nobody knows what was said for it.
    if not counted or any(block.failed for block in blocks) or all(map(_is_exact, answered)):
        return
    own = sum(block.own_tokens for block in blocks)
    foreign = sum(max(0, block.foreign_tokens or 0) for block in blocks)
    if foreign > MAX_FOREIGN_SHARE * own:
        raise DataError(
            f"{NAMES.url}: {asking.endpoint.url} said {own + foreign} tokens while it said {own} to us ({task}, "
            f"{len(answered)} prompts); expected no one else to ask it, as its counters do not tell requests apart. "
            "Measure while it is idle, or start vLLM with --per-request-spec-decode-metrics summary."
        )


def _is_exact(one: Answered) -> bool:
    # A response of one token has no round to tell of.
    return one.tokens <= 1 or (one.counts is not None and not one.counts.inferred)


def _source(heats: Sequence[_Heat]) -> Source:
    """Return what tells of acceptance, the surest that is there for all responses."""
    answered = [one for heat in heats for one in heat.answered]
    told = [one.counts for one in answered if one.counts is not None]
    if told and all(map(_is_exact, answered)):
        return "responses"
    counted = [block.gained.drafts for heat in heats for block in heat.blocks if block.gained is not None]
    if any(drafts is not None and drafts.rounds for drafts in counted):
        return "counters"
    return "responses, rounds inferred" if told else "none"


def _units(heat: _Heat, source: Source) -> list[Unit]:
    """Return a temperature's responses with what was counted for them."""
    if source == "counters":
        blocks = [block for block in heat.blocks if block.answered and block.gained is not None]
        return [Unit(answered=block.answered, counts=block.gained.drafts) for block in blocks if block.gained]
    told = source != "none"
    return [Unit(answered=(one,), counts=(one.counts or NOTHING) if told else None) for one in heat.answered]


def _drafts(heats: Sequence[_Heat], source: Source) -> bool | None:
    """Return whether the server drafts; None where it does not tell."""
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
    # In their own order resampling gives what it gives in process.
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
    """Return what decides whether drafts pay, and how it was found."""
    if source != "none":
        found: list[dict[str, Any]] = [
            {"temperature": cell.temperature, "tau": cell.tau, "tau_ci95": cell.tau_ci95, "rounds": cell.rounds}
            for cell in cells
            if cell.task == ALL_TASKS
        ]
        return {"way": "acceptance", "sentence": "What the server says that it accepts.", "temperatures": found}
    found = [
        {"temperature": heat.temperature, **(two_lengths(heat.short, heat.answered) or {"tokens_per_second": None})}
        for heat in heats
    ]
    silent = "It does not draft" if drafts is False else "It does not tell what it accepts"
    sentence = f"{silent}: decoding speed between two lengths of each response, time to the first token left out."
    return {"way": "two lengths", "sentence": sentence, "temperatures": found}


def _warnings(heats: Sequence[_Heat], source: Source) -> list[str]:
    """Return what a reader has to know of the figures, one sentence each."""
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
        ours = " (what failed requests had begun among them)" if failed else ""
        said.append(f"Beside our {own} tokens the server counted {foreign} that it did not send us{ours}.")
    if missing:
        said.append(f"The server counted {missing} tokens fewer than the {own} that it sent.")
    if undrafted > MAX_UNDRAFTED_SHARE * own:
        said.append(f"{undrafted} of {own} tokens came from steps without drafts, which tau leaves out.")
    if source == "responses, rounds inferred":
        said.append(
            "The server tells drafted and accepted tokens, not rounds: those are inferred from the tokens, and tau may "
            "be a little off. Start llama-server with --metrics."
        )
    if cached:
        said.append(f"{cached} prompt tokens came from the server's prefix cache: the first token came sooner for it.")
    return said


def _undrafted(unit: Unit) -> int:
    """Return tokens that neither prefill nor a counted round explains."""
    if unit.counts is None:
        return 0
    explained = len(unit.answered) + unit.counts.rounds + unit.counts.accepted_tokens
    return max(0, sum(one.tokens for one in unit.answered) - explained)


def _cached_tokens(one: Answered) -> int:
    document = one.streamed.document
    details = (document.get("usage") or {}).get("prompt_tokens_details") or document.get("meta_info") or {}
    return int(details.get("cached_tokens") or 0)
