"""Hidden states that are fetched while the head is trained, in the order in which it reads them.

A thread fetches ahead into a buffer of bounded size, so that source and training run at the same time.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from mtp_train.data.tokenize import Document
from mtp_train.trunk.ends import Ends
from mtp_train.trunk.states import StoredStates

AHEAD_BYTES = 1 << 29
"""Size of the buffer: fetching pauses while it holds more."""
CLOSING_SECONDS = 30.0
"""Longest wait for the answers that are still to come when training ends. Each of them is a file to delete."""

Fetch = Callable[[Iterable[Sequence[int]]], Iterator[tuple[int, Tensor]]]
"""From texts to the number of each and its states (T, D), as they arrive. Texts are taken as the results are."""


class FetchedStates(StoredStates):
    """States that a function fetches, each document once.

    Args:
        stop: Ends the retries of ``fetch``.
        end: Called once nothing is fetched any more.
        kept: Numbers of the documents that are read more than once. They are fetched at once, and stay in memory.
    """

    def __init__(
        self,
        ends: Ends,
        documents: Sequence[Document],
        fetch: Fetch,
        stop: Callable[[], object],
        end: Callable[[], object],
        *,
        width: int,
        dtype: torch.dtype,
        kept: Collection[int] = (),
    ) -> None:
        super().__init__(ends, width=width, dtype=dtype)
        self._documents, self._fetch, self._stop, self._end = documents, fetch, stop, end
        self._kept = dict(self._fetched(kept))
        self._buffer: dict[int, Tensor] = {}
        self._failure: BaseException | None = None
        self._wanted: int | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.seconds_waited = 0.0
        self.seconds_ahead = 0.0
        """How long training waited for the source, and the source for training."""

    def _fetched(self, numbers: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        asked = list[int]()

        def texts() -> Iterator[Sequence[int]]:
            for number in numbers:
                asked.append(number)
                yield self._documents[number].input_ids.tolist()

        return ((asked[place], states_TD) for place, states_TD in self._fetch(texts()))

    def expect(self, documents: Iterator[int]) -> None:
        """Begin to fetch documents."""
        self._thread = threading.Thread(target=self._fill, args=(documents,), daemon=True)
        self._thread.start()

    def _fill(self, documents: Iterator[int]) -> None:
        asked = takewhile(lambda _: not self._is_closed, documents)
        failure: BaseException = LookupError("a document whose states were not expected; expected those of the plan.")
        try:
            for number, states_TD in self._fetched(one for one in asked if one not in self._kept):
                with self._changed:
                    self._buffer[number] = states_TD
                    self._changed.notify_all()
                    started = time.perf_counter()
                    # What training waits for may be among the answers that have not arrived yet.
                    self._changed.wait_for(self._may_go_on)
                    self.seconds_ahead += time.perf_counter() - started
        except BaseException as error:
            failure = error
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def _may_go_on(self) -> bool:
        size = sum(states_TD.nbytes for states_TD in self._buffer.values())
        return self._is_closed or size < AHEAD_BYTES or self._wanted not in (None, *self._buffer)

    def document(self, number: int) -> Tensor:
        if number in self._kept:
            return self._kept[number]
        with self._changed:
            started = time.perf_counter()
            self._wanted = number
            self._changed.notify_all()
            self._changed.wait_for(lambda: number in self._buffer or self._failure is not None)
            self.seconds_waited = self.seconds_waited + time.perf_counter() - started
            self._wanted = None
            if number not in self._buffer and self._failure is not None:
                raise self._failure
            states_TD = self._buffer.pop(number)
            self._changed.notify_all()
            return states_TD

    def close(self) -> str:
        """Stop fetching, and say who waited for whom."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._stop()
        if self._thread is not None:
            self._thread.join(CLOSING_SECONDS)
        self._end()
        return (
            f"states: training waited {self.seconds_waited:.0f} s for the server, and the server "
            f"{self.seconds_ahead:.0f} s for training."
        )
