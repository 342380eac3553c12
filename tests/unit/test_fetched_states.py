"""States that are fetched ahead: each document once, in a bounded buffer, and never a wait without an end."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import pytest
import torch
from torch import Tensor

from documents import random_documents
from mtp_train.train import fetched_states
from mtp_train.train.fetched_states import FetchedStates
from tiny import tiny_trunk

WIDTH, LENGTH, AHEAD, CONCURRENCY = 4, 3, 2, 3
DOCUMENTS = random_documents([LENGTH] * 12)


class Source:
    """Fetches like an endpoint: some requests are in flight; the oldest of them, or the newest, arrives next."""

    def __init__(self, place: int = 0) -> None:
        self.place, self.num_asked, self.num_stops = place, 0, 0
        self.in_flight = list[tuple[int, Sequence[int]]]()

    def __call__(self, texts: Iterable[Sequence[int]]) -> Iterator[tuple[int, Tensor]]:
        waiting = enumerate(texts)
        while True:
            sent = list(islice(waiting, CONCURRENCY - len(self.in_flight)))
            self.in_flight = self.in_flight + sent
            self.num_asked = self.num_asked + len(sent)
            if not self.in_flight:
                break
            number, text = self.in_flight.pop(self.place)
            yield number, states_of(text)

    def stop(self) -> None:
        self.num_stops += 1

    def end(self) -> None:
        self.is_ended = True

    def states(self, kept: Sequence[int] = ()) -> FetchedStates:
        trunk = tiny_trunk("glm4_moe")
        dtype = torch.float32
        return FetchedStates(trunk, DOCUMENTS, self, self.stop, self.end, width=WIDTH, dtype=dtype, kept=kept)


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
    source = Source(place)
    order = [7, 2, 11, 0, 5, 4, 3, 9]
    states = source.states(kept=[1, 2])
    states.expect(iter(order))
    assert_reads(states, 2, *order, 1, 2)
    assert source.num_asked == len({1, *order})
    with pytest.raises(LookupError, match="not expected"):
        states.document(8)


def test_fetching_waits_while_the_buffer_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    states = source.states()
    # An error instead of a wait.
    monkeypatch.setattr(states._changed, "wait_for", lambda predicate: 1 / predicate())
    states._fill(iter(range(len(DOCUMENTS))))
    assert source.num_asked == AHEAD + CONCURRENCY - 1


def test_closing_takes_what_is_in_flight_and_ends_the_thread() -> None:
    source = Source()
    threads = threading.active_count()
    states = source.states()
    states.expect(iter(range(len(DOCUMENTS))))
    assert_reads(states, 0)
    assert states.close().startswith("states: training waited ")
    assert threading.active_count() == threads
    assert (source.in_flight, source.num_stops, source.is_ended) == ([], 1, True)
    assert source.num_asked < len(DOCUMENTS)
