"""States that are fetched ahead: each document once, in a bounded buffer, and never a wait without an end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from test_micro_batches import batches
from test_training import recipe, weights_of
from torch import Tensor

from documents import random_documents
from mtp_train.data.pack import PackedSequence
from mtp_train.runs.settings import plan_of
from mtp_train.train import fetched_states
from mtp_train.train.fetched_states import FetchedStates
from mtp_train.train.hidden_cache import HiddenCache
from mtp_train.train.loop import Training, micro_batches
from mtp_train.trunk.states import StoredStates
from tiny import tiny_trunk

T = TypeVar("T")
WIDTH, LENGTH, AHEAD, CONCURRENCY = 4, 3, 2, 3
DOCUMENTS = random_documents([LENGTH] * 12)
ALL = range(len(DOCUMENTS))
PATIENCE_SECONDS = 60.0
"""Ends a wait that would have no end in a broken program."""


class Source:
    """Fetches like an endpoint: some requests are in flight; the newest of them, or the oldest, arrives next."""

    def __init__(self, *, newest_first: bool = False, fails_after: int | None = None) -> None:
        self.place, self.fails_after = -1 if newest_first else 0, fails_after
        self.asked = list[list[int]]()
        self.in_flight = list[tuple[int, Sequence[int]]]()
        self.paused = threading.Event()
        """Set when fetching waits for training, and at its end."""

    def __call__(self, texts: Iterable[Sequence[int]]) -> Iterator[tuple[int, Tensor]]:
        waiting, arrived = enumerate(texts), 0
        while True:
            for pair in islice(waiting, CONCURRENCY - len(self.in_flight)):
                self.in_flight.append(pair)
                self.asked.append(list(pair[1]))
            if not self.in_flight:
                return self.paused.set()
            if arrived == self.fails_after:
                raise ConnectionError("the server is gone")
            number, text = self.in_flight.pop(self.place)
            arrived += 1
            yield number, states_of(text)

    def states(self, numbers: Iterable[int] | None = None, **named: Any) -> FetchedStates:
        """Return states that this source fetches, of some documents or not yet."""
        form: dict[str, Any] = {"width": WIDTH, "dtype": torch.float32}
        states = FetchedStates(tiny_trunk("glm4_moe"), DOCUMENTS, self, **form | named)
        states._changed = Watched(self.paused)
        if numbers is not None:
            states.expect(iter(numbers))
        return states


class Watched(threading.Condition):
    """A condition that notes when the thread which fetches begins to wait."""

    def __init__(self, paused: threading.Event) -> None:
        super().__init__()
        self.paused = paused

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        if threading.current_thread() is not threading.main_thread() and not predicate():
            self.paused.set()
        found = super().wait_for(predicate, PATIENCE_SECONDS)
        assert found
        return found


def states_of(text: Sequence[int]) -> Tensor:
    return torch.tensor(text, dtype=torch.float32)[:, None].repeat(1, WIDTH)


def assert_are_of(states_TD: Tensor, number: int) -> None:
    assert torch.equal(states_TD.float(), states_of(DOCUMENTS[number].input_ids.tolist()))


def num_fetching() -> int:
    return sum("_fill" in thread.name for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_states, "AHEAD_BYTES", AHEAD * LENGTH * WIDTH * 4)


@pytest.mark.parametrize("newest_first", [False, True])
def test_documents_are_read_in_the_order_of_training_whatever_arrives_first(newest_first: bool) -> None:
    """The newest first: what training waits for is in flight while the buffer is full."""
    order = [7, 2, 11, 0, 5, 4, 3, 9]
    source = Source(newest_first=newest_first)
    states = source.states(order)
    for number in order:
        assert_are_of(states.document(number), number)
    assert source.asked == [DOCUMENTS[number].input_ids.tolist() for number in order]


def test_no_more_is_fetched_ahead_than_the_buffer_and_the_requests_in_flight_hold() -> None:
    source = Source()
    states = source.states(ALL)
    for number in range(len(DOCUMENTS) - AHEAD - CONCURRENCY):
        assert source.paused.wait(PATIENCE_SECONDS)
        assert len(source.asked) <= number + AHEAD + CONCURRENCY
        source.paused.clear()
        assert_are_of(states.document(number), number)
    states.close()


def test_a_failure_of_the_source_is_raised_once_what_arrived_has_been_read() -> None:
    states = Source(fails_after=2).states(ALL)
    for number in (0, 1):
        assert_are_of(states.document(number), number)
    with pytest.raises(ConnectionError, match="the server is gone"):
        states.document(2)


def test_a_document_that_was_not_expected_is_an_error() -> None:
    states = Source().states([3, 1])
    with pytest.raises(LookupError, match="states were not expected"):
        states.document(2)


def test_closing_reads_what_is_in_flight_and_ends_the_thread() -> None:
    stopped, source = threading.Event(), Source()
    states = source.states(ALL, stop=stopped.set)
    assert source.paused.wait(PATIENCE_SECONDS)
    asked = len(source.asked)
    assert source.in_flight
    assert num_fetching() == 1
    assert states.close().startswith("states: training waited ")
    assert stopped.is_set()
    assert not source.in_flight
    assert len(source.asked) == asked
    assert num_fetching() == 0
    assert Source().states().close()


def test_kept_documents_are_fetched_at_once_and_stay() -> None:
    source = Source(newest_first=True)
    states = source.states(kept=[4, 1])
    assert source.asked == [DOCUMENTS[number].input_ids.tolist() for number in (4, 1)]
    states.expect(iter([0, 1, 2]))
    for number in (4, 1, 0, 1, 2, 4):
        assert_are_of(states.document(number), number)
    assert len(source.asked) == 4


def test_a_process_without_a_shard_to_write_asks_for_nothing(tmp_path: Path) -> None:
    cache, asked = HiddenCache(tmp_path, DOCUMENTS, width=WIDTH, dtype=torch.bfloat16), list[int]()
    for rank in (0, 1):
        source = Source()
        named: dict[str, Any] = {"max_tokens": LENGTH, "rank": rank, "world": 2, "on_shard": lambda *_: None}
        cache.build(source.states(dtype=cache.dtype), cache.missing() or [0], device=torch.device("cpu"), **named)
        asked.append(len(source.asked))
    assert asked == [len(DOCUMENTS), 0]
    assert_are_of(cache.document(5), 5)


class Asked(StoredStates):
    """Notes which documents training asks for."""

    def __init__(self) -> None:
        super().__init__(tiny_trunk("glm4_moe"), width=WIDTH, dtype=torch.float32)
        self.numbers = list[int]()

    def document(self, number: int) -> Tensor:
        self.numbers.append(number)
        return torch.zeros(1, WIDTH)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_expected_is_what_training_asks_for(rank: int) -> None:
    used, asked = recipe(train__micro_batch_sequences=1), Asked()
    plan = plan_of(used, 2)
    accelerator: Any = SimpleNamespace(process_index=rank, device=torch.device("cpu"))
    batch_fn: Callable[[int], list[PackedSequence]] = batches(plan)
    for step in (1, 2):
        list(micro_batches(batch_fn(step), plan, weights_of(used), accelerator, asked))
    run: Any = SimpleNamespace(
        options=SimpleNamespace(max_steps=3), plan=plan, accelerator=accelerator, batch_fn=batch_fn
    )
    assert plan.accumulation > 1
    assert asked.numbers == list(Training.documents_from(run, 1)) != []
