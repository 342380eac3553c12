"""Measure served models as arms: send the same prompts to running servers, and read their counts.

Counts of drafts are in the responses, or are the increase of the server's counters. Those are of all its requests
together, so that the counts of single prompts need one request at a time.

Servers take turns, a few prompts each, so that what slows their machine down slows all of them. The times that requests
take give the speed of one server over another: with as many requests in flight all the time, a server writes tokens in
inverse proportion to them.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from mtp_inference.requests import Request
from mtp_train.acceptance.counts import PromptCounts
from mtp_train.acceptance.names import SERVED
from mtp_train.answers.draft_counts import Counters, SpecCounts, increase, response_counts
from mtp_train.answers.endpoint import Endpoint, Refusal, Response, read_api_key
from mtp_train.answers.served import Judge, fit_of, spread
from mtp_train.checkpoints.files import is_gguf, read_json
from mtp_train.checkpoints.identity import hash_file
from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.tokenizer import eos_token_ids, load_tokenizer
from mtp_train.data.tokenize import Prompt
from mtp_train.errors import DataError
from mtp_train.evaluation.grid import EvaluationGrid, greedy, grid_prompts
from mtp_train.evaluation.prompt_records import PromptRecord, Rule, Setting
from mtp_train.evaluation.results import ALL_TASKS, REPORT_FILE, Cell, load_report
from mtp_train.evaluation.statistics import MeasuredArm, Served, make_cells
from mtp_train.evaluation.store import STUDY_FILE, Store
from mtp_train.heads.diagnose import text_config_of
from mtp_train.trunk.load import Trunk

WARM_UP_TOKENS = 8
TURN = 4
"""Requests, times those in flight, that a server answers before the next one's turn."""
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

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise DataError(f"--concurrency: {self.concurrency}; expected a number above 0. Correct it.")

    @property
    def evaluation(self) -> Path | None:
        """The directory of a finished evaluation of the server, in place of an address; None for an address."""
        return None if self.name == SERVED or "://" in self.url else Path(self.url)

    def identity(self) -> dict[str, Any]:
        """Return the server's settings for the identity of a study: the name of the key's variable, never the key."""
        found = asdict(self)
        if self.evaluation is not None:
            found["report"] = hash_file(self.evaluation / REPORT_FILE).sha256
        return found


@dataclass(frozen=True, kw_only=True)
class ServedRecord(PromptRecord):
    """One prompt that a server answered: it reports counts, and no single rounds.

    Times are llama-server's own; of other servers, :attr:`seconds_decode` is that of the whole request.
    """

    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...]
    num_tokens: int
    """Number of new tokens, as counted by the server."""
    told: SpecCounts | None
    """Its drafts; None where the server does not count those of single prompts."""

    def counts(self, depth: int) -> PromptCounts:
        """Return the server's counts. Without drafts every token but the first is a round."""
        told = self.told or SpecCounts()
        # Where the positions are unknown, only the sum means something.
        reached = told.accepted_per_pos or (told.accepted_tokens,)
        return replace(
            super().counts(depth),
            rounds=told.rounds_of(self.num_tokens),
            num_draft_tokens=told.draft_tokens,
            accepted_per_pos=(*reached, *[0] * depth)[:depth],
            new_tokens=self.num_tokens,
        )


class _Asked(NamedTuple):
    """The answers to some prompts at one temperature."""

    records: Sequence[ServedRecord]
    failed: Sequence[tuple[Prompt, str]]
    """Prompts without a response, and why."""
    seconds: float
    """Wall time of all requests."""
    generated: int
    """The increase of the server's counter of tokens, which is of all its clients; 0 where it has none."""
    counted: SpecCounts | None
    """The increase of the server's counters of drafts; None where it has none."""

    @property
    def drafts(self) -> SpecCounts | None:
        """The drafts of all prompts, added up; None where there are some, and those of single prompts are not known."""
        told = [one.told for one in self.records if one.told is not None]
        if len(told) == len(self.records):
            return sum(told, SpecCounts())
        return self.counted if self.counted == SpecCounts() else None


def ask(servers: Sequence[Server], grid: EvaluationGrid, progress: Progress) -> dict[str, Served]:
    """Send the grid's unchanged prompts to servers of one trunk at each of the grid's temperatures.

    Those of a finished evaluation are read.

    Returns:
        The measurements, by arm.

    Raises:
        MtpError: A server or the trunk's tokenizer cannot be used, or an evaluation had other prompts.
    """
    if not servers:
        return {}
    place = servers[0].checkpoint
    if is_gguf(place):
        from mtp_train.checkpoints.gguf.model_file import gguf_tokenizer

        tokenizer = gguf_tokenizer(Path(place))
        eos_ids = frozenset({tokenizer.eos_token_id})
        vocab_size = len(tokenizer)
    else:
        checkpoint = open_location(place)
        tokenizer = load_tokenizer(checkpoint)
        eos_ids = eos_token_ids(checkpoint, tokenizer)
        vocab_size = text_config_of(checkpoint).vocab_size
    prompts = grid_prompts(grid, tokenizer, (None,))[None]
    found = {one.name: read_served(one, one.evaluation, grid, prompts) for one in servers if one.evaluation is not None}
    running = [one for one in servers if one.name not in found]
    for load in dict.fromkeys(one.concurrency for one in running):
        with contextlib.ExitStack() as stack:
            endpoints = {
                one: stack.enter_context(contextlib.closing(connect(one, tokenizer, eos_ids, vocab_size)))
                for one in running
                if one.concurrency == load
            }
            found |= measure_endpoints(endpoints, prompts, grid, progress)
    return {one.name: found[one.name] for one in servers}


def read_served(server: Server, place: Path, grid: EvaluationGrid, prompts: Sequence[Prompt]) -> Served:
    """Return the measurements in the directory of an evaluation of a server.

    Raises:
        DataError: They were made with other prompts or settings, or the directory has no records of single prompts.
    """
    report = load_report(place / REPORT_FILE)
    study = read_json(place / STUDY_FILE)
    document = dict(report.endpoint or {})
    store = Store(place, study)
    cells = [replace(one, arm=server.name, trunk=server.checkpoint) for one in report.cells if one.arm == SERVED]
    decoded = {
        one.setting: [*store.read(SERVED, one.setting, ServedRecord).values()] for one in cells if one.task == ALL_TASKS
    }
    here = {**json.loads(json.dumps(asdict(grid))), "concurrency": server.concurrency}
    odd = [name for name, value in here.items() if {**study["grid"], **document}.get(name) != value]
    asked = {one.id: one.prompt_ids for one in prompts}
    records = [one for some in decoded.values() for one in some]
    if not records or any(asked.get(one.prompt_id) != one.prompt_ids for one in records):
        odd.append("prompts")
    if odd:
        raise DataError(
            f"arm {server.name}: {place} differs in {', '.join(odd)}; expected the prompts and settings of this "
            "command, and a record of each prompt. Give the evaluations and this command the same options."
        )
    head = None if document["drafts"] is False else document["url"]
    return Served(arm=MeasuredArm(server.name, server.checkpoint, head, decoded), cells=tuple(cells), document=document)


def connect(server: Server, tokenizer: Any, eos_ids: Collection[int], vocab_size: int) -> Endpoint:
    """Return a client of the server's model, with the trunk's tokenizer, EOS ids and vocabulary size.

    Raises:
        DataError: The address is not one, the key's variable is not set, or the server does not list the model.
    """
    address = server.url.rstrip("/")
    endpoint = Endpoint(
        address if "/" in address.partition("://")[2] else f"{address}/v1",
        tokenizer,
        eos_ids,
        vocab_size,
        api_key=read_api_key(server.api_key_env),
        concurrency=server.concurrency,
        from_cache=False,
    )
    endpoint.choose_model(server.model)
    return endpoint


def served_checkpoint(server: Server) -> str:
    """Return the files that a server says it serves, where they are on this machine.

    Raises:
        DataError: It names none, or they are elsewhere.
    """
    if server.evaluation is not None:
        return str(read_json(server.evaluation / STUDY_FILE)["server"][0]["checkpoint"])
    with contextlib.closing(connect(server, None, (), 0)) as endpoint:
        place = endpoint.checkpoint
    if place is None or not Path(place).exists():
        raise DataError(
            f"arm {server.name}: {server.url} serves {place or 'files that it does not name'}; expected files on this "
            "machine, whose tokenizer writes the prompts. Name the trunk: --tokenizer CKPT."
        )
    return place


def measure_endpoints(
    running: Mapping[Server, Endpoint], prompts: Sequence[Prompt], grid: EvaluationGrid, progress: Progress
) -> dict[str, Served]:
    """Send every prompt at every temperature of a grid to servers in turn, and measure acceptance and throughput.

    Args:
        running: Clients of the servers, with one number of requests at a time.
        grid: Its temperatures, without top-p and top-k; the first one is the headline. Its seed gives, combined with a
            prompt's id, the sampling seed of its request.

    Returns:
        The measurements, by arm.

    Raises:
        DataError: A server fails permanently, was restarted, or serves other clients.
    """
    total = len(prompts) * len(grid.temperatures)
    bars = {one: progress.add_task(f"asking {endpoint.model}", total=total) for one, endpoint in running.items()}
    counting = {}
    for one, endpoint in running.items():
        # An uncounted request: the first one of a server may take long.
        list(endpoint.answers([greedy(0).request(prompts[0], WARM_UP_TOKENS, grid.seed)], endpoint.ask))
        counting[one] = endpoint.counters() is not None
    asked: dict[Server, dict[float, _Asked]] = {one: {} for one in running}
    for temperature in grid.temperatures:
        turns: dict[Server, list[_Asked]] = {one: [] for one in running}
        order = deque(running)
        size = TURN * order[0].concurrency
        for start in range(0, len(prompts), size):
            for one in order:
                some = prompts[start : start + size]
                tick = partial(progress.advance, bars[one])
                turns[one].append(_turn(running[one], some, temperature, grid, tick, counts=counting[one]))
            # The first one changes, too.
            order.rotate()
        for one, endpoint in running.items():
            asked[one][temperature] = _together(endpoint, turns[one], temperature)
    return {one.name: _served(one, endpoint, asked[one]) for one, endpoint in running.items()}


def _served(server: Server, endpoint: Endpoint, asked: Mapping[float, _Asked]) -> Served:
    pooled = [one.drafts for one in asked.values()]
    drafts = None if None in pooled else any(one.rounds for one in pooled if one is not None)
    decoded = {_setting(one, found, drafts): found.records for one, found in asked.items()}
    # Servers of one trunk name its files differently.
    trunk = endpoint.model if server.name == SERVED else server.checkpoint
    measured = MeasuredArm(server.name, trunk, None if drafts is False else endpoint.url, decoded)
    return Served(
        arm=measured,
        cells=tuple(_told(cell, asked[cell.temperature], drafts) for cell in make_cells(measured)),
        document=_document(endpoint, asked, drafts),
    )


def _told(cell: Cell, asked: _Asked, drafts: bool | None) -> Cell:
    """Return a cell with the server's throughput, and without the figures that it does not report."""
    counted = None
    if cell.task == ALL_TASKS:
        cell = replace(cell, tokens_per_second=cell.new_tokens / asked.seconds)
        counted = asked.counted
    if drafts is None:
        if counted is None or not counted.rounds:
            return replace(cell, tau=None, rounds=None)
        rounds = counted.rounds_of(cell.new_tokens, cell.prompts or 0)
        mean = 1 + counted.accepted_tokens / rounds
        return replace(cell, tau=mean, rounds=rounds, accepted_tokens=counted.accepted_tokens)
    if asked.drafts is not None and asked.drafts.accepted_per_pos is None:
        return replace(cell, marginal=None, marginal_ci95=None, conditional=None)
    return cell


def _setting(temperature: float, asked: _Asked, drafts: bool | None) -> Setting:
    # At temperature 0 all verify rules are equal. Above 0, the rule is a setting that the server does not report.
    rule: Rule = "none" if drafts is False else "greedy" if temperature == 0.0 else "served"
    return Setting(temperature, None, asked.drafts.depth if drafts and asked.drafts else 0, rule)


def _turn(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    temperature: float,
    grid: EvaluationGrid,
    tick: Callable[[], None],
    *,
    counts: bool,
) -> _Asked:
    """Send some prompts at one temperature, and read the server's counters if it ``counts``.

    They are read after each prompt where these are sent one at a time, else after the last.
    """
    setting = replace(greedy(0), temperature=temperature)
    requests = [setting.request(prompt, grid.max_new_tokens, grid.seed) for prompt in prompts]

    def timed(request: Request) -> tuple[Response | Refusal, float]:
        sent = endpoint.clock()
        return endpoint.ask(request), endpoint.clock() - sent

    records: dict[int, ServedRecord] = {}
    failed: dict[int, str] = {}
    first = counters = _counters(endpoint) if counts else {}
    started = endpoint.clock()
    for number, (answer, taken) in endpoint.answers(requests, timed):
        gained = None
        if counts and endpoint.concurrency == 1:
            # The next request is sent after this.
            own = 0 if isinstance(answer, Refusal) else _num_tokens(answer)
            counters, _, gained = _gained(endpoint, counters, own)
        if isinstance(answer, Refusal):
            failed[number] = answer.reason
        else:
            records[number] = _record(prompts[number], answer, gained, taken)
        tick()
    seconds = endpoint.clock() - started
    generated, counted = 0, None
    if counts:
        _, generated, counted = _gained(endpoint, first, sum(one.num_tokens for one in records.values()))
    return _Asked(
        [one for _, one in sorted(records.items())],
        [(prompts[number], reason) for number, reason in sorted(failed.items())],
        seconds,
        generated,
        counted,
    )


def _together(endpoint: Endpoint, turns: Sequence[_Asked], temperature: float) -> _Asked:
    """Return the answers of all turns of a server."""
    records = [record for one in turns for record in one.records]
    failed = [failure for one in turns for failure in one.failed]
    if not records:
        raise DataError(
            f"{endpoint.url}: refuses all of {len(failed)} prompts at temperature "
            f"{temperature:g} ({failed[0][0].id}: {failed[0][1]}); expected responses. Check the server's log, and "
            "that its context length fits the prompts."
        )
    own = sum(one.num_tokens for one in records)
    generated = sum(one.generated for one in turns)
    # The number of tokens generated for a failed request is unknown.
    if not failed and generated > (1.0 + MAX_FOREIGN_SHARE) * own:
        raise DataError(
            f"{endpoint.url}: generated {generated} tokens, {own} of them for us "
            f"({len(records)} prompts); expected no other client, as its counters do not separate requests. Measure "
            "while it is idle."
        )
    counted = [one.counted for one in turns if one.counted is not None]
    total = sum(counted, SpecCounts()) if counted else None
    return _Asked(records, failed, sum(one.seconds for one in turns), generated, total)


def _num_tokens(response: Response) -> int:
    return (response.document.get("usage") or {}).get("completion_tokens") or len(response.token_ids)


def _record(prompt: Prompt, response: Response, gained: SpecCounts | None, seconds: float) -> ServedRecord:
    # Of llama-server.
    timings = response.document.get("timings") or {}
    return ServedRecord(
        prompt_id=prompt.id,
        group=prompt.group,
        task=prompt.task,
        prompt_tokens=len(prompt.prompt_ids),
        prompt_ids=prompt.prompt_ids,
        token_ids=tuple(response.token_ids),
        num_tokens=_num_tokens(response),
        told=response_counts(response.document) if gained is None else gained,
        seconds_prefill=timings["prompt_ms"] / 1000 if timings else None,
        seconds_decode=timings["predicted_ms"] / 1000 if timings else seconds,
    )


def _counters(endpoint: Endpoint) -> Counters:
    """Return the counters of a server that had some."""
    found = endpoint.counters()
    if found is None:
        raise DataError(
            f"{endpoint.url}: no counters at /metrics after its responses; expected them as before. Check that the "
            "server is still running, and run the command again."
        )
    return found


def _gained(endpoint: Endpoint, before: Counters, own_tokens: int) -> tuple[Counters, int, SpecCounts]:
    """Return the counters once they include all tokens that we received, and the increase of tokens and drafts."""
    looks = 0
    while True:
        now = _counters(endpoint)
        generated, counts = increase(before, now, endpoint.served_with)
        looks += 1
        if generated >= own_tokens or looks == SETTLE_LOOKS:
            return now, generated, counts
        endpoint.wait(SETTLE_SECONDS)


def _document(endpoint: Endpoint, asked: Mapping[float, _Asked], drafts: bool | None) -> dict[str, Any]:
    failures = [
        {"prompt": prompt.id, "task": prompt.task, "temperature": temperature, "reason": reason}
        for temperature, one in asked.items()
        for prompt, reason in one.failed
    ]
    warnings = [f"{len(failures)} requests failed, {one['prompt']} first: {one['reason']}." for one in failures[:1]]
    if drafts is None:
        warnings.append(
            "Acceptance by prompt is unknown: the server does not count its drafts, or all requests' together (vLLM): "
            "those give tau, and no interval, above --concurrency 1. Counts come from vLLM, SGLang and llama-server."
        )
    return {
        "url": endpoint.url,
        "server": endpoint.served_with or None,
        "model": endpoint.model,
        "drafts": drafts,
        "counts": "responses" if endpoint.concurrency > 1 or endpoint.counters() is None else "counters",
        "concurrency": endpoint.concurrency,
        "failures": failures,
        "answers": None,
        "warnings": warnings,
    }


def judged(served: Served, trunk: Trunk, eos_ids: Collection[int]) -> Served:
    """Return the measurements with a verdict on whether the trunk wrote the responses, from a sample per temperature.

    Raises:
        CheckpointError: The trunk's logits are NaN or infinite.
    """
    found = []
    warnings = list(served.document["warnings"])
    for setting, records in served.arm.decoded.items():
        temperature = setting.temperature
        answers = [
            (one.prompt_ids, one.token_ids) for one in records if isinstance(one, ServedRecord) and one.token_ids
        ]
        fit = fit_of(Judge.of(trunk), spread(answers, f"{temperature}"), setting.sampling(seed=0), eos_ids)
        # Among few tokens, those of probability 0 would pass as well.
        verdict = None if fit.is_trunks and fit.allowed >= fit.expected else fit.is_trunks
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
