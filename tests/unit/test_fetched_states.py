"""States that are fetched ahead: each document once, in a bounded buffer, and never a wait without an end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from test_micro_batches import batches
from test_training import recipe, weights_of
from torch import Tensor

from documents import random_documents
from mtp_train.runs.settings import plan_of
from mtp_train.train import fetched_states
from mtp_train.train.fetched_states import FetchedStates
from mtp_train.train.loop import Training, micro_batches
from tiny import tiny_trunk

T = TypeVar("T")
WIDTH, LENGTH, AHEAD, CONCURRENCY = 4, 3, 2, 3
DOCUMENTS = random_documents([LENGTH] * 12)
PATIENCE_SECONDS = 60.0
"""Ends a wait that would have no end in a broken program."""


class Source:
    """Fetches like an endpoint: some requests are in flight; the oldest of them, or the newest, arrives next."""

    def __init__(self, place: int = 0, fails_after: int | None = None) -> None:
        self.place, self.fails_after = place, fails_after
        self.num_asked, self.is_stopped = 0, False
        self.in_flight = list[tuple[int, Sequence[int]]]()
        self.paused = threading.Event()
        """Set when fetching begins to wait for training."""

    def __call__(self, texts: Iterable[Sequence[int]]) -> Iterator[tuple[int, Tensor]]:
        waiting = enumerate(texts)
        while True:
            self.in_flight += islice(waiting, CONCURRENCY - len(self.in_flight))
            self.num_asked = max([self.num_asked, *(number + 1 for number, _ in self.in_flight)])
            if self.num_asked - len(self.in_flight) == self.fails_after:
                raise ConnectionError("the server is gone")
            if not self.in_flight:
                return self.paused.set()
            number, text = self.in_flight.pop(self.place)
            yield number, states_of(text)

    def stop(self) -> None:
        self.is_stopped = True

    def states(self, kept: Sequence[int] = ()) -> FetchedStates:
        trunk = tiny_trunk("glm4_moe")
        states = FetchedStates(trunk, DOCUMENTS, self, self.stop, width=WIDTH, dtype=torch.float32, kept=kept)
        states._changed = Watched(self.paused)
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


def assert_reads(states: FetchedStates, *numbers: int) -> None:
    for number in numbers:
        assert torch.equal(states.document(number), states_of(DOCUMENTS[number].input_ids.tolist()))


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_states, "AHEAD_BYTES", AHEAD * LENGTH * WIDTH * 4)


@pytest.mark.parametrize("place", [0, -1], ids=["oldest", "newest"])
def test_documents_are_read_in_the_order_of_training_whatever_arrives_first(place: int) -> None:
    """The newest first: what training waits for is in flight while the buffer is full. Some are read again."""
    source, order = Source(place), [7, 2, 11, 0, 5, 4, 3, 9]
    states = source.states(kept=[1, 2])
    assert source.num_asked == 2
    states.expect(iter(order))
    assert_reads(states, 2, *order, 1, 2)
    assert source.num_asked == len(order) - 1


def test_no_more_is_fetched_ahead_than_the_buffer_holds_and_after_the_end_nothing() -> None:
    source = Source()
    states = source.states()
    states.expect(iter(range(len(DOCUMENTS))))
    for number in range(5):
        assert source.paused.wait(PATIENCE_SECONDS)
        assert source.num_asked <= number + AHEAD + CONCURRENCY
        source.paused.clear()
        assert_reads(states, number)
    assert source.paused.wait(PATIENCE_SECONDS)
    asked, threads = source.num_asked, threading.active_count()
    assert source.in_flight
    assert states.close().startswith("states: training waited ")
    # The files of the requests in flight are deleted.
    assert (source.num_asked, source.in_flight, source.is_stopped) == (asked, [], True)
    assert threading.active_count() == threads - 1


def test_a_failure_is_raised_once_what_arrived_has_been_read() -> None:
    states = Source(fails_after=2).states()
    states.expect(iter(range(9)))
    assert_reads(states, 0, 1)
    with pytest.raises(ConnectionError, match="the server is gone"):
        states.document(2)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_expected_is_what_training_asks_for(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used, asked, states = recipe(train__micro_batch_sequences=1), list[int](), Source().states()
    monkeypatch.setattr(states, "document", lambda number: asked.append(number) or torch.zeros(1, WIDTH))
    accelerator: Any = SimpleNamespace(process_index=rank, device=torch.device("cpu"))
    plan = plan_of(used, 2)
    run: Any = SimpleNamespace(
        options=SimpleNamespace(max_steps=3), plan=plan, accelerator=accelerator, batch_fn=batches(plan)
    )
    for step in (1, 2):
        list(micro_batches(run.batch_fn(step), plan, weights_of(used), accelerator, states))
    assert plan.accumulation > 1
    assert asked == list(Training.documents_from(run, 1)) != []
