"""Responses of a server that count once a sample of their block is found to be the trunk's."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from mtp_train.data.answers import AnswerFit
from mtp_train.data.responses import RegeneratedRow, RegeneratedStore, rows_after
from mtp_train.errors import DataError
from mtp_train.weights.writing import write_text

CHECK_EVERY, SAMPLE = 1000, 32
"""Responses of a block, and how many of them the trunk reads."""
MARK_SUFFIX = ".checked"
Row = TypeVar("Row")
JudgeFn = Callable[[Sequence[RegeneratedRow]], AnswerFit]


class CheckedStore:
    """A process's store, and how much of it has been checked.

    Responses are on the disk at once, so that a kill loses none; a mark beside their file holds the length up to which
    they are checked.

    Args:
        store: The process's.
        judge: Lets the trunk read responses.
        url: The server, for messages.
        others: Files of earlier calls with another number of processes, which this process checks too.
    """

    def __init__(self, store: RegeneratedStore, judge: JudgeFn, url: str, others: Sequence[Path] = ()) -> None:
        self.store = store
        self._judge = judge
        self._url = url
        for path in others:
            self._check(path, list(rows_after(path, _marked(path))))
        self._unchecked = list(rows_after(store.path, _marked(store.path)))

    def append(self, rows: Sequence[RegeneratedRow]) -> None:
        """Add rows; check a block once it is whole.

        Raises:
            DataError: Its sample is not the trunk's: the block is dropped.
        """
        self.store.append(rows)
        self._unchecked += rows
        if len(self._unchecked) >= CHECK_EVERY:
            self.check()

    def check(self) -> None:
        """Check the rows since the last check, those of an earlier call that was killed among them.

        Raises:
            DataError: Their sample is not the trunk's: they are dropped.
        """
        self._check(self.store.path, self._unchecked)
        self._unchecked = []

    def _check(self, path: Path, rows: Sequence[RegeneratedRow]) -> None:
        readable = [row for row in rows if row.response_ids]
        if readable:
            fit = self._judge(spread(readable, f"{path.name} {rows[0].id} {len(rows)}"))
            if not fit.is_trunks:
                kept = _marked(path)
                os.truncate(path, kept)
                raise _not_the_trunks(self._url, fit, len(rows), sum(1 for _ in rows_after(path, 0)))
        if rows:
            write_text(_mark(path), f"{path.stat().st_size}\n")


def spread(rows: Sequence[Row], seed: str) -> list[Row]:
    """Return a sample of rows, one from each stretch: a server may be another from some row on."""
    drawn, bounds = random.Random(seed), [part * len(rows) // SAMPLE for part in range(SAMPLE + 1)]
    return [drawn.choice(rows[start:end]) for start, end in pairwise(bounds) if end > start]


def _mark(path: Path) -> Path:
    return path.with_suffix(MARK_SUFFIX)


def _marked(path: Path) -> int:
    """Return the length up to which a file is checked."""
    mark = _mark(path)
    length = int(mark.read_text()) if mark.is_file() else 0
    # A shorter file is not the one that was checked.
    return length if path.is_file() and length <= path.stat().st_size else 0


def _not_the_trunks(url: str, fit: AnswerFit, dropped: int, kept: int) -> DataError:
    return DataError(
        f"data.regenerate.endpoint: {url} gives answers that are not the trunk's: over {fit.answers} of its last "
        f"{dropped} the trunk gives the tokens a mean probability of {fit.found:.3f}; expected {fit.expected:.3f} "
        f"within {fit.allowed:.3f}. These {dropped} are dropped, and {kept} that were checked before are kept. Serve "
        "model.trunk with the sampling of data.regenerate; then the same command goes on from here."
    )
