"""Times of replies, with a clock that advances only by work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from clocks import WorkClock
from mtp_inference import SpeculativeDecoder
from mtp_train.evaluation import costs as latency
from mtp_train.evaluation.cells import Latency
from mtp_train.evaluation.costs import measure_latency
from scripted import ScriptedDrafting, plain_texts, random_prompt
from tiny import tiny_head, tiny_trunk

LENGTHS = (3, 7, 12)
DEPTH = 2
TRUNK = tiny_trunk("qwen3_5")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkClock]:
    """A forward of the trunk takes one tick."""
    clock = WorkClock(monkeypatch)
    with clock.watching(TRUNK.decoder, 1, each_token=False):
        yield clock


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    return [random_prompt(length, seed) for seed, length in enumerate(lengths)]


def scripted(prompts: Sequence[Sequence[int]]) -> ScriptedDrafting:
    # The rows of a batch go apart, and come together again.
    return ScriptedDrafting(plain_texts(TRUNK, prompts, LENGTHS[-1] + 2 * (DEPTH + 1)), (2, 0, 1, 2, 2))


def measure(
    prompts: list[list[int]], batches: Sequence[int], repeats: int = 1, max_seconds: float = 1e9
) -> list[Latency]:
    rows = measure_latency(
        "head",
        TRUNK,
        scripted(prompts),
        depth=DEPTH,
        prompts=prompts,
        output_tokens=LENGTHS,
        batches=batches,
        repeats=repeats,
        max_seconds=max_seconds,
        on_run=lambda: None,
    )
    return list(rows)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_plain_reply_takes_a_forward_for_each_token(clock: WorkClock, batch: int) -> None:
    rows = measure(prompts_of([5] * batch), [batch])
    assert [(row.batch, row.output_tokens, row.prompt_tokens) for row in rows] == [(batch, n, 5) for n in LENGTHS]
    assert [row.plain_seconds for row in rows] == list(LENGTHS)


@pytest.mark.parametrize("batch", [1, 3])
def test_one_run_says_of_every_length_what_a_run_of_that_length_takes(clock: WorkClock, batch: int) -> None:
    prompts = prompts_of([6] * batch)
    rows = measure(prompts, [batch])
    for row in rows:
        decoder = SpeculativeDecoder(TRUNK, scripted(prompts), DEPTH, eos_ids=(), max_batch=batch)
        before = clock.ticks
        decoder.decode(prompts, row.output_tokens)
        assert row.seconds == clock.ticks - before
    assert rows[-1].seconds < rows[-1].plain_seconds


def test_prompts_of_different_lengths_are_prefilled_apart_and_finished_together(clock: WorkClock) -> None:
    (row,) = [row for row in measure(prompts_of([4, 9]), [2]) if row.output_tokens == LENGTHS[0]]
    # Two prefills, and a round for each token but the first.
    assert row.plain_seconds == 2 + LENGTHS[0] - 1
    assert row.prompt_tokens == round((4 + 9) / 2)


def test_every_repeat_continues_other_prompts_and_no_token_ends_a_reply(
    monkeypatch: pytest.MonkeyPatch, clock: WorkClock
) -> None:
    seen = []
    timed = latency.reply_seconds

    def reply_seconds(
        decoder: SpeculativeDecoder, group: latency.Group, lengths: Sequence[int], room: int
    ) -> list[float]:
        seen.append((decoder.depth, [list(ids) for ids in group], decoder.eos_ids, room))
        return timed(decoder, group, lengths, room)

    monkeypatch.setattr(latency, "reply_seconds", reply_seconds)
    prompts = prompts_of([5, 5, 8])
    measure(prompts, [1], repeats=4)
    warm_ups, runs = seen[:2], seen[2:]
    assert [depth for depth, *_ in warm_ups] == [0, DEPTH]
    # Each goes first in every other repeat; the list of prompts begins again.
    assert [depth for depth, *_ in runs] == [0, DEPTH, DEPTH, 0, 0, DEPTH, DEPTH, 0]
    assert [group for _, group, *_ in runs[::2]] == [[prompts[index]] for index in (0, 1, 2, 0)]
    assert {(eos, room) for *_, eos, room in seen} == {(frozenset(), 8 + LENGTHS[-1])}


def test_figures_are_medians_over_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = itertools.chain([9.0], itertools.cycle([1.0, 50.0, 2.0]))
    drafted = itertools.chain([9.0], itertools.cycle([0.5, 0.7, 40.0]))
    monkeypatch.setattr(
        latency, "reply_seconds", lambda decoder, *_: [next(drafted if decoder.depth else plain)] * len(LENGTHS)
    )
    rows = measure(prompts_of([5]), [1], repeats=3)
    assert {(row.plain_seconds, row.seconds) for row in rows} == {(2.0, 0.7)}


@pytest.mark.parametrize(("max_seconds", "repeats"), [(0.0, 1), (1e9, 3)])
def test_time_that_is_spent_ends_the_repeats_but_no_batch_goes_without(
    clock: WorkClock, max_seconds: float, repeats: int
) -> None:
    ended_at: list[float] = []
    prompts = prompts_of([5] * 2)
    rows = measure_latency(
        "head",
        TRUNK,
        scripted(prompts),
        depth=DEPTH,
        prompts=prompts,
        output_tokens=(4,),
        batches=(1, 2, 4),
        repeats=3,
        max_seconds=max_seconds,
        on_run=lambda: ended_at.append(clock.read()),
    )
    # Two prompts do not fill a batch of 4; a progress bar is filled whatever is left out.
    assert [row.batch for row in rows] == [1, 2]
    assert len(ended_at) == 2 * 2 * 3
    assert len(set(ended_at)) == 2 * 2 * repeats


@pytest.mark.parametrize(("max_seconds", "repeats"), [(70.0, 1), (85.0, 2), (110.0, 3)])
def test_a_repeat_that_would_end_late_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, max_seconds: float, repeats: int
) -> None:
    clock = WorkClock(monkeypatch)

    def reply_seconds(*_: object) -> list[float]:
        clock.ticks += 10
        return [10.0]

    monkeypatch.setattr(latency, "reply_seconds", reply_seconds)
    decoders = [SpeculativeDecoder(TRUNK, None, 0, eos_ids=())] * 2
    # Each warms up for 10, and takes 10 a turn: one turn is over at 40, two at 60.
    taken = latency.in_turns(decoders, [prompts_of([5])] * 3, [1], max_seconds=max_seconds, on_run=lambda: None)
    assert [len(runs) for runs in taken] == [repeats, repeats]


def test_a_head_drafts_in_it_too(clock: WorkClock) -> None:
    head = tiny_head(TRUNK)
    prompts = prompts_of([5, 5])
    rows = measure_latency(
        "head",
        TRUNK,
        head,
        depth=1,
        prompts=prompts,
        output_tokens=(4,),
        batches=(2,),
        repeats=1,
        on_run=lambda: None,
    )
    decoder = SpeculativeDecoder(TRUNK, head, 1, eos_ids=(), max_batch=2)
    before = clock.ticks
    decoder.decode(prompts, 4)
    assert [(row.seconds, row.plain_seconds) for row in rows] == [(clock.ticks - before, 4)]
