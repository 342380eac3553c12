"""The measuring engine: decode prompts with every arm of one trunk at every setting, one record each.

All prompts are decoded in ragged batches, for acceptance and for the texts, which are checked against plain decoding.
The beginnings of a few of them are decoded again, one at a time, for the time of a round. Every figure of a report is
computed from these records (``mtp_train.evaluation.statistics``).

Plain decoding runs through the same decoder at depth 0. A prompt has the same noise seed everywhere, so that every text
must equal the plain one, unless its drafts were sampled: such a text has the same distribution and other noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from rich.progress import Progress

from mtp_inference import GenerationResult, SpeculativeDecoder, TextCheck
from mtp_inference.drafters.drafter import Drafting, TrainedDrafting
from mtp_inference.drafters.ngram_drafter import NgramDrafting
from mtp_inference.lossless import PlainTexts
from mtp_train.acceptance.names import PLAIN
from mtp_train.acceptance.speed import measured_speedup
from mtp_train.data.tokenize import Prompt, choose_evenly
from mtp_train.evaluation.dense import DenseRows, dense_rows, replayed
from mtp_train.evaluation.prompt_records import PromptRecord, Setting
from mtp_train.evaluation.statistics import MeasuredArm, Records
from mtp_train.evaluation.store import Store
from mtp_train.trunk.load import Trunk

Prompts = Mapping[int | None, Sequence[Prompt]]
"""Prompts by the context length that they were extended to; None: as they are."""
Lane = tuple[str, Setting]
"""An arm at a setting; plain decoding is at :attr:`Setting.plain`."""
LaneRecords = dict[Lane, list[PromptRecord]]
"""Records in the order of the prompts."""
MAX_BATCH, MAX_BATCH_TOKENS = 16, 65_536
"""Most prompts decoded together, and the most positions of their caches."""
BATCHES_AT_A_TIME = 4
"""Batches that are decoded in one call, whose rows go to waiting prompts, and stored after it."""
SPEED_PROMPTS, SPEED_TOKENS, SPEED_PASSES = 8, 16, 3
"""Prompts that are timed, the tokens decoded of each, and how often: round times vary little between prompts and along
a text, and much with the other work of a machine."""
SPEED_SECONDS = 120.0
"""Time limit of the passes at one temperature and context, which go on while they may decide whether drafts pay. The
first :data:`SPEED_PASSES` are made in any case."""
SPEED_SETTINGS = {"speed_prompts": SPEED_PROMPTS, "speed_tokens": SPEED_TOKENS, "speed_passes": SPEED_PASSES}


@dataclass(frozen=True)
class Processes:
    """The processes that decode prompts together, every n-th prompt each."""

    index: int
    """Number of this process; 0 measures all that is not decoding."""
    count: int
    gather: Callable[[list[Any]], list[Any]]
    """Returns the items of all processes, in their order; all of them must call it."""


ALONE = Processes(0, 1, lambda own: own)


@dataclass(frozen=True, kw_only=True)
class TrunkArms:
    """A trunk in memory, what drafts for it, and how all of it decodes."""

    trunk: Trunk
    name: str
    """The trunk as the report names it."""
    drafting: Mapping[str, Drafting]
    """The drafters, by arm."""
    head_names: Mapping[str, str]
    """The drafters as the report names them, by arm."""
    plain_arm: str = PLAIN
    max_new_tokens: int
    eos_ids: Collection[int]
    seed: int
    """With a prompt's id, the seed of its noise."""
    batch: int = MAX_BATCH
    """Most prompts decoded together."""
    store: Store | None = None
    """Holds records of an interrupted study, which are not decoded again, and receives the new ones."""
    seq_len_tokens: int = 8192
    """Longest text for teacher-forced metrics, prompt included; a longer text is cut at its end. Prompts of a given
    context are measured with their whole answers."""
    dense_tokens: int | None = None
    """Most tokens of these texts; None for no limit."""

    def rows(self, prompts: Sequence[Prompt]) -> int:
        """Return how many of these prompts to decode together."""
        longest = max(len(one.prompt_ids) for one in prompts) + self.max_new_tokens
        return max(1, min(self.batch, len(prompts), MAX_BATCH_TOKENS // longest))

    def text_tokens(self, prompts: Sequence[Prompt], context_tokens: int | None) -> int:
        """Return the longest text for teacher-forced metrics of the prompts of a context."""
        if context_tokens is None:
            return self.seq_len_tokens
        return max(self.seq_len_tokens, max(len(one.prompt_ids) for one in prompts) + self.max_new_tokens)

    def lanes(self, settings: Iterable[Setting]) -> list[Lane]:
        return [(arm, setting) for setting in settings for arm in self.drafting]

    def by_plain(self, lanes: Iterable[Lane]) -> dict[Setting, list[Lane]]:
        """Return lanes by their plain setting, each list headed by plain decoding."""
        found: dict[Setting, list[Lane]] = {}
        for arm, setting in lanes:
            found.setdefault(setting.plain, [(self.plain_arm, setting.plain)]).append((arm, setting))
        return found

    def decoder(self, arm: str, setting: Setting, rows: int, *, records: bool = False) -> SpeculativeDecoder:
        """Return the decoder of an arm at a setting, for so many prompts at a time; ``records`` as in the class."""
        return SpeculativeDecoder(
            self.trunk,
            self.drafting.get(arm),
            setting.depth,
            self.eos_ids,
            draft_sampling="sampled" if setting.rule == "sampled" else "argmax",
            max_batch=rows,
            records=records,
        )


def measure_trunk(
    arms: TrunkArms,
    prompts: Prompts,
    settings: Sequence[Setting],
    progress: Progress,
    processes: Processes = ALONE,
    *,
    shallow: Sequence[Lane] = (),
) -> list[MeasuredArm]:
    """Measure the arms of a trunk in memory: acceptance on all prompts, times on a few, teacher-forced metrics.

    Args:
        settings: Those at which every drafter decodes.
        shallow: Heads with fewer drafts a round, greedily. They are timed, and their rounds are replayed from
            teacher-forced drafts.

    Returns:
        Plain decoding, then the drafters; every process returns the same, but only the first has teacher-forced
        metrics and ``shallow``.
    """
    lanes = arms.lanes(settings)
    own = {context: some[processes.index :: processes.count] for context, some in prompts.items()}
    decoded = joined(processes.gather([decode_prompts(arms, own, lanes, progress)]), prompts)
    timed: LaneRecords = {}
    for some in arms.by_plain([*lanes, *shallow]).values():
        timed |= _timed(arms, prompts, some, decoded, progress, processes)
    depth = max(one.depth for one in settings)
    plain = of_arm(decoded, arms.plain_arm)
    dense = _dense(arms, prompts, plain, depth, progress) if processes.index == 0 else {}
    for name, setting in shallow if dense else ():
        decoded[name, setting] = replayed(
            dense[name][setting.temperature, setting.context_tokens], plain[setting.plain], setting.depth
        )
    # The trunk's entropy is the same with any head, and plain decoding has no head to measure it with.
    first = _arm(arms, arms.plain_arm, decoded, timed, next(iter(dense.values()), {}))
    return [first, *(_arm(arms, name, decoded, timed, dense.get(name, {}), first) for name in arms.drafting)]


def _arm(
    arms: TrunkArms, name: str, decoded: LaneRecords, timed: LaneRecords, dense: Any, plain: MeasuredArm | None = None
) -> MeasuredArm:
    head = arms.head_names.get(name)
    return MeasuredArm(name, arms.name, head, of_arm(decoded, name), of_arm(timed, name), dense, plain)


def of_arm(records: LaneRecords, name: str) -> dict[Setting, list[PromptRecord]]:
    return {setting: found for (arm, setting), found in records.items() if arm == name}


def _timed(
    arms: TrunkArms,
    prompts: Prompts,
    lanes: Sequence[Lane],
    decoded: LaneRecords,
    progress: Progress,
    processes: Processes,
) -> LaneRecords:
    """Return the best times of a few prompts in plain decoding and in the lanes after it.

    Passes are added while a lane is undecided for lack of precise times (:attr:`Speedup.needs_passes`), up to
    :data:`SPEED_SECONDS`.
    """
    context = lanes[0][1].context_tokens
    few = speed_prompts(prompts[context], arms.seed)
    watch = Stopwatch(arms, few[processes.index :: processes.count], lanes)
    task = progress.add_task(f"timing {arms.name}", total=0)
    begun = time.perf_counter()
    measures = 0
    while True:
        measures += 1
        progress.update(task, total=measures * SPEED_PASSES * len(watch.prompts) * len(lanes))
        watch.run(SPEED_PASSES, partial(progress.advance, task))
        found = joined(processes.gather([watch.records]), {context: few})
        spent = max(processes.gather([time.perf_counter() - begun]))
        plain = _arm(arms, arms.plain_arm, decoded, found, {})
        pairs = [_arm(arms, name, decoded, found, {}).against(plain, setting) for name, setting in lanes[1:]]
        decided = not any(speedup is not None and speedup.needs_passes for speedup in map(measured_speedup, pairs))
        if decided or spent * (1 + 1 / measures) > SPEED_SECONDS:
            return found


def _dense(
    arms: TrunkArms, prompts: Prompts, plain: Records, depth: int, progress: Progress
) -> dict[str, dict[tuple[float, int | None], DenseRows]]:
    """Return each head's teacher-forced metrics on the trunk's own texts, by temperature and context."""
    return {
        name: {
            (one.temperature, one.context_tokens): dense_rows(
                arms.trunk,
                head,
                prompts[one.context_tokens],
                texts,
                depth,
                one.temperature,
                arms.text_tokens(prompts[one.context_tokens], one.context_tokens),
                arms.dense_tokens,
            )
            for one, texts in progress.track(plain.items(), description=f"teacher-forced figures, {name}")
        }
        for name, head in arms.drafting.items()
        if isinstance(head, TrainedDrafting) and head.head.teacher_forced
    }


def decode_prompts(arms: TrunkArms, prompts: Prompts, lanes: Iterable[Lane], progress: Progress) -> LaneRecords:
    """Decode every prompt with drafters and without, in ragged batches, and check the texts.

    Settings that differ only in depth and rule share one plain decoding.
    """
    by_plain = arms.by_plain(lanes)
    total = sum(len(prompts[plain.context_tokens]) * len(some) for plain, some in by_plain.items())
    advance = partial(progress.advance, progress.add_task(f"decoding with {arms.name}", total=total))
    records: LaneRecords = {}
    for plain, some in by_plain.items():
        given = prompts[plain.context_tokens]
        found = {lane: {} if arms.store is None else arms.store.read(*lane) for lane in some}
        advance(sum(len(one) for one in found.values()))
        lacking = [one for one in given if any(one.id not in found[lane] for lane in some)]
        if lacking:
            _decode_lacking(arms, lacking, found, advance)
        records |= {lane: [found[lane][prompt.id] for prompt in given] for lane in some}
    return records


def _decode_lacking(
    arms: TrunkArms,
    prompts: Sequence[Prompt],
    found: Mapping[Lane, dict[str, PromptRecord]],
    advance: Callable[..., object],
) -> None:
    """Decode prompts that a lane lacks, check the texts, and add the records to those ``found`` by prompt id."""
    plain_lane, *drafted = found

    def keep(
        lane: Lane, group: Iterable[Prompt], results: Iterable[GenerationResult], checks: Iterable[TextCheck]
    ) -> None:
        done = [
            record_of(prompt, one, check)
            for prompt, one, check in zip(group, results, checks, strict=True)
            if prompt.id not in found[lane]
        ]
        found[lane].update((one.prompt_id, one) for one in done)
        if arms.store is not None:
            arms.store.add(*lane, done)
        advance(len(done))

    # What plain decoding records is not stored: it decodes again the prompts that another lane lacks.
    results = [result for _, some in _decode(arms, plain_lane, prompts, advance) for result in some]
    texts = PlainTexts(arms.trunk, results)
    keep(plain_lane, prompts, results, texts.checks)
    index_of = {prompt.id: index for index, prompt in enumerate(prompts)}
    for lane in drafted:
        missing = [prompt for prompt in prompts if prompt.id not in found[lane]]
        for group, results in _decode(arms, lane, missing, advance):
            checks = [texts.check(index_of[prompt.id], one) for prompt, one in zip(group, results, strict=True)]
            keep(lane, group, results, checks)


def _decode(
    arms: TrunkArms, lane: Lane, prompts: Sequence[Prompt], advance: Callable[..., object]
) -> Iterator[tuple[Sequence[Prompt], list[GenerationResult]]]:
    if not prompts:
        return
    rows = arms.rows(prompts)
    limit = arms.max_new_tokens
    decoder = arms.decoder(*lane, rows, records=True)
    for start in range(0, len(prompts), BATCHES_AT_A_TIME * rows):
        group = prompts[start : start + BATCHES_AT_A_TIME * rows]
        results: dict[int, GenerationResult] = {}
        for chunk in decoder.stream([lane[1].request(prompt, limit, arms.seed) for prompt in group]):
            advance(0)
            if chunk.result is not None:
                results[chunk.index] = chunk.result
        yield group, [results[number] for number in range(len(group))]


class Stopwatch:
    """Time the beginnings of prompts with drafters and without, one at a time, and keep the best times.

    Every pass decodes the same rounds. On a CPU each round keeps its best time, as other work interrupts single rounds;
    on a GPU, where rounds run ahead of the host, all rounds of a prompt together. Lanes take turns prompt by prompt, so
    that a machine that slows down slows all of them down alike, and each pass reverses their order.

    Args:
        lanes: Plain decoding and the drafters at settings with its temperature and context.
    """

    def __init__(self, arms: TrunkArms, prompts: Sequence[Prompt], lanes: Sequence[Lane]) -> None:
        self.arms, self.prompts, self.lanes = arms, prompts, lanes
        self._decoders = {lane: arms.decoder(*lane, 1) for lane in lanes if prompts}
        self._best: dict[Lane, dict[str, tuple[PromptRecord, list[float]]]] = {lane: {} for lane in lanes}
        for lane in self._decoders:
            # Lazy initialisation happens in the first call.
            self._decode(prompts[0], lane)

    @property
    def records(self) -> LaneRecords:
        """The records with the best times so far."""
        return {
            lane: [
                replace(record, seconds_prefill=seconds[0], seconds_decode=sum(seconds[1:]))
                for record, seconds in by_prompt.values()
            ]
            for lane, by_prompt in self._best.items()
        }

    def run(self, passes: int, on_prompt: Callable[[], object]) -> None:
        """Time every prompt in every lane so many times more."""
        for number in range(passes):
            for prompt in self.prompts:
                for lane in self.lanes[:: -1 if number % 2 else 1]:
                    record, seconds = self._decode(prompt, lane)
                    _, best = self._best[lane].setdefault(prompt.id, (record, seconds))
                    best[:] = map(min, best, seconds)
                    on_prompt()

    def _decode(self, prompt: Prompt, lane: Lane) -> tuple[PromptRecord, list[float]]:
        """Return the record of a prompt, and the seconds of its prefill and of each round, or of all together."""
        # A lookup drafts in some rounds only, and rarely in the first ones: it is timed over the whole text.
        is_lookup = isinstance(self.arms.drafting.get(lane[0]), NgramDrafting)
        limit = self.arms.max_new_tokens
        request = lane[1].request(prompt, limit if is_lookup else min(SPEED_TOKENS, limit), self.arms.seed)
        times = [time.perf_counter()]
        results = []
        for chunk in self._decoders[lane].stream([request]):
            times.append(time.perf_counter())
            results.append(chunk.result)
        (result,) = filter(None, results)
        seconds = [after - before for before, after in pairwise(times)]
        if self.arms.trunk.lm_head_VD.device.type != "cpu":
            seconds = [seconds[0], sum(seconds[1:])]
        return record_of(prompt, result), seconds


def speed_prompts(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Return the prompts to time, as evenly over their groups as possible, in the order of the prompts."""
    chosen = {prompt.id for prompt in choose_evenly(prompts, SPEED_PROMPTS, seed)}
    return [one for one in prompts if one.id in chosen]


def joined(parts: Sequence[LaneRecords], prompts: Prompts) -> LaneRecords:
    """Return the records of all processes, each of which decoded some of the prompts, in the order of the prompts."""
    whole = {}
    for lane in parts[0]:
        by_prompt = {one.prompt_id: one for part in parts for one in part[lane]}
        whole[lane] = [by_prompt[prompt.id] for prompt in prompts[lane[1].context_tokens]]
    return whole


def record_of(prompt: Prompt, result: GenerationResult, check: TextCheck | None = None) -> PromptRecord:
    """Return the record of a decoded prompt, without times."""
    return PromptRecord(
        prompt_id=prompt.id,
        group=prompt.group,
        task=prompt.task,
        prompt_tokens=len(prompt.prompt_ids),
        token_ids=tuple(result.token_ids),
        drafted=tuple(one.num_drafted for one in result.round_log),
        accepted=tuple(one.num_accepted for one in result.round_log),
        check=check,
    )
