"""The host's part of one call: assign requests to rows, plan each round, and read its outcome.

A free row is given to the next waiting request, so that the batch stays full. The host reads a round's outcome a fixed
number of rounds late: one round on a GPU, so that the device never waits for the host, and none elsewhere. Until then
it computes with upper bounds, as if every row kept all tokens of its window.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mtp_inference.capture import Rounds, read_later
from mtp_inference.depth import Acceptance, DepthController, RoundCosts, batch_depth
from mtp_inference.drafters.drafter import PENDING_PLACES, RoundPlan
from mtp_inference.record import RoundRecord, TextRecord
from mtp_inference.requests import Chunk, GenerationResult, Request, Round
from mtp_inference.round import BAD_DRAFTER, BAD_TRUNK, prefill, settle_drafter
from mtp_inference.text import TextStream
from mtp_train.errors import MtpError
from mtp_train.trunk.ends import non_finite_error

MAX_PREFILL_TOKENS = 16384
"""Largest number of prompt tokens prefilled together; a single prompt may be longer."""
MIN_FREE_SHARE = 0.25
"""Smallest share of finished rows to drop. Dropping copies the caches of the other rows, which takes up to the time of
a round; with this share, a batch of any size is copied only a few times."""
MIN_TOKENS_LEFT = 8
"""Smallest number of tokens, left of the longest text, for which finished rows are dropped."""


def is_worth_dropping(num_live: int, num_rows: int, tokens_left: int) -> bool:
    """Return whether to drop the finished rows of a batch, with ``tokens_left`` of its longest text."""
    return num_rows - num_live >= MIN_FREE_SHARE * num_rows and tokens_left >= MIN_TOKENS_LEFT


@dataclass
class Lane:
    """One request and what is decoded of it."""

    index: int
    request: Request
    depth: int
    """Largest number of drafts per round."""
    stops: frozenset[int]
    text_stream: TextStream | None
    controller: DepthController | None
    started: float
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    recorded: list[RoundRecord] = field(default_factory=list)
    """What prefill and each round decided on; empty if the batch records nothing."""
    position: int = 0
    """Upper bound of the last committed token's position."""
    pending: int = 0
    """Upper bound of the committed tokens that the drafter has not processed yet."""
    seconds_prefill: float = 0.0
    is_done: bool = False

    @property
    def tokens_left(self) -> int:
        """Number of new tokens until the limit, an upper bound on the host."""
        return self.request.max_new_tokens - len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> Chunk:
        """Add committed tokens up to the end of the text; return them, and the result if the text has ended.

        The last of ``tokens`` is the trunk's own, those before it are accepted drafts.
        """
        added: list[int] = []
        pieces: list[tuple[str, bool]] = []
        for place, token in enumerate(tokens, start=1):
            added.append(token)
            self.tokens.append(token)
            if self.text_stream is not None and (piece := self.text_stream.push(token)):
                pieces.append((piece, place < len(tokens)))
            self.is_done = token in self.stops or self.tokens_left <= 0
            if self.is_done:
                break
        if self.is_done and self.text_stream is not None and (piece := self.text_stream.finish()):
            pieces.append((piece, False))
        result = self._result() if self.is_done else None
        return Chunk(index=self.index, token_ids=tuple(added), pieces=tuple(pieces), result=result)

    def _result(self) -> GenerationResult:
        request = self.request
        record = TextRecord(
            tuple(request.prompt_ids), request.max_new_tokens, request.sampling, self.stops, tuple(self.recorded)
        )
        return GenerationResult(
            token_ids=tuple(self.tokens),
            text=self.text_stream.text if self.text_stream is not None else "",
            finish_reason="stop" if self.tokens[-1] in self.stops else "length",
            depth=self.depth,
            round_log=tuple(self.rounds),
            record=record if self.recorded else None,
            seconds_prefill=self.seconds_prefill,
            seconds_decode=time.perf_counter() - self.started - self.seconds_prefill,
        )


class InFlight(NamedTuple):
    """A round whose outcome the host has not read yet."""

    read: Callable[[], list[list[int]]]
    lanes: dict[int, Lane]
    """Row of the outcome to its lane; later rounds may have fewer rows."""
    plan: RoundPlan
    launched: float


class Session:
    """One call of the decoder.

    Args:
        waiting: Lanes without a row, in the order of admission.
        costs: Measured costs of rounds; this session adds to them.
        max_in_flight: Number of rounds that run ahead of the host.
    """

    def __init__(self, rounds: Rounds, waiting: Sequence[Lane], costs: RoundCosts, max_in_flight: int) -> None:
        self.rounds = rounds
        self.batch = rounds.batch
        # Not this object: a cycle would keep the buffers until the next collection.
        self.batch.owner = self._ticket = object()
        self.waiting = deque(waiting)
        self.costs = costs
        self.max_in_flight = max_in_flight
        self.lanes: dict[int, Lane] = {}
        """Row of the batch to the lane that is decoded in it."""
        self.in_flight: deque[InFlight] = deque()
        self._depths: list[int] = []
        self._last_look = 0.0
        # Other work on a CPU makes some rounds slower. Costs of drafts that were measured at other times than plain
        # rounds could then not be compared, and the time of this thread does not include that work.
        self._round_clock = time.thread_time if self.batch.last_B.device.type == "cpu" else time.perf_counter

    def run(self) -> Iterator[Chunk]:
        """Decode all lanes; yield a chunk for each lane that a prefill or a round extends."""
        while self.waiting or self.lanes or self.in_flight:
            while self.waiting and len(self.lanes) < self.batch.cache.num_rows:
                yield from self._admit()
            if self.lanes:
                self._require_rows()
                self._drop_rows()
                self._launch()
            while len(self.in_flight) > (self.max_in_flight if self.lanes else 0):
                yield from self._look()

    def _admit(self) -> Iterator[Chunk]:
        self._require_rows()
        started = time.perf_counter()
        lanes, rows = self._next_group()
        prompt_RT = self.batch.tensor([list(lane.request.prompt_ids) for lane in lanes])
        requests = [lane.request for lane in lanes]
        limits = [one.max_new_tokens for one in requests]
        stops = [lane.stops for lane in lanes]
        self.batch.set_rows(rows, [one.sampling for one in requests], limits, stops)
        outcome = prefill(self.batch, rows, prompt_RT).tolist()
        now = time.perf_counter()
        for lane, one in zip(lanes, outcome, strict=True):
            token, num_kept = one[:2]
            if self.batch.records:
                lane.recorded.append(RoundRecord.of(one, 1))
            lane.started = started
            lane.seconds_prefill = now - started
            lane.position = prompt_RT.shape[1]
            lane.pending = 1
            if num_kept == BAD_TRUNK:
                raise self._non_finite("trunk", lane)
            yield self._extend(lane, [token])

    def _next_group(self) -> tuple[list[Lane], slice]:
        first = row = next(row for row in range(self.batch.cache.num_rows) if row not in self.lanes)
        length = len(self.waiting[0].request.prompt_ids)
        while (
            self.waiting
            and row < self.batch.cache.num_rows
            and row not in self.lanes
            and len(self.waiting[0].request.prompt_ids) == length
            and (row == first or (row + 1 - first) * length <= MAX_PREFILL_TOKENS)
        ):
            self.lanes[row] = self.waiting.popleft()
            row += 1
        return [self.lanes[each] for each in range(first, row)], slice(first, row)

    def _drop_rows(self) -> None:
        """Drop the rows of finished texts if that makes the remaining rounds enough smaller."""
        if self.waiting or self.rounds.captures:
            # Waiting requests take the free rows; captured rounds refer to the buffers by address.
            return
        tokens_left = max(lane.tokens_left for lane in self.lanes.values())
        if not is_worth_dropping(len(self.lanes), self.batch.cache.num_rows, tokens_left):
            return
        rows = sorted(self.lanes)
        self.batch.keep_rows(self.batch.tensor(rows))
        self.lanes = {new: self.lanes[old] for new, old in enumerate(rows)}
        self._depths = []

    def _launch(self) -> None:
        depth = self._depth()
        plan = self._plan(depth)
        if depth == 0 and plan.pending + 1 > PENDING_PLACES:
            settle_drafter(self.batch, plan)
            for lane in self.lanes.values():
                lane.pending = 0
        launched = self._round_clock()
        read = read_later(self.rounds.run(plan))
        for lane in self.lanes.values():
            lane.pending = (0 if depth else lane.pending) + depth + 1
            lane.position += depth + 1
        self.in_flight.append(InFlight(read, dict(self.lanes), plan, launched))

    def _require_rows(self) -> None:
        if self.batch.owner is not self._ticket:
            raise MtpError(
                "decode: another call of this decoder began before this one had ended; expected one at a time, as they "
                "share buffers. Pass all requests together, or use a second decoder."
            )

    def _plan(self, depth: int) -> RoundPlan:
        lanes = self.lanes.values()
        position = max(lane.position for lane in lanes)
        is_full = len(self.lanes) == self.batch.cache.num_rows
        is_same = not self.in_flight and is_full and all(lane.position == position for lane in lanes)
        pending = max(lane.pending for lane in lanes)
        return RoundPlan(depth, position + depth + 1, pending, position if is_same else None)

    def _depth(self) -> int:
        """Return the depth of the round, and write each row's own depth to the batch.

        With ``auto``, a row drafts no more than it can commit: its limit minus the trunk's own token.
        """
        depth = max([self._chosen_depth(), *(lane.depth for lane in self.lanes.values() if lane.controller is None)])
        depths = [0] * self.batch.cache.num_rows
        for row, lane in self.lanes.items():
            depths[row] = lane.depth if lane.controller is None else min(depth, lane.depth, lane.tokens_left - 1)
        if depths != self._depths:
            self._depths = depths
            self.batch.depth_B.copy_(torch.tensor(depths))
        # Another depth is another graph, which takes longer to capture than it saves at the end of a text.
        return depth if self.rounds.captures else max(depths)

    def _chosen_depth(self) -> int:
        """Return the best depth for the rows whose depth the decoder chooses; 0 if there are none."""
        # A row at a fixed depth above 0 decides the round's depth itself.
        rows = [lane for lane in self.lanes.values() if lane.controller is not None or lane.depth == 0]
        if all(lane.controller is None for lane in rows):
            return 0
        return batch_depth(
            [lane.controller or DepthController(0, Acceptance()) for lane in rows],
            self.costs,
            self.batch.cache.num_rows,
            self.batch.size.depth,
            None if self.waiting else [lane.tokens_left for lane in rows],
        )

    def _look(self) -> Iterator[Chunk]:
        read, lanes, plan, launched = self.in_flight.popleft()
        rows = read()
        num_tokens = plan.depth + 1
        now = self._round_clock()
        # A round that waited for the previous round began when that one ended.
        self.costs.observe(len(rows), plan.depth, now - max(launched, self._last_look))
        self._last_look = now
        # If a later round with drafts has processed the pending tokens, the bound covers only that round's window.
        is_taken_in = any(later.plan.depth for later in self.in_flight)
        for row, lane in lanes.items():
            tokens = rows[row][:num_tokens]
            num_kept, num_accepted, num_drafted = rows[row][num_tokens : num_tokens + 3]
            if lane.is_done:
                continue
            if num_kept == BAD_TRUNK:
                raise self._non_finite("trunk", lane, num_accepted)
            if num_kept == BAD_DRAFTER:
                raise self._non_finite("drafter", lane)
            # The bounds assumed that the whole window was kept.
            lane.position -= plan.depth + 1 - num_kept
            if not is_taken_in:
                lane.pending -= plan.depth + 1 - num_kept
            lane.rounds.append(Round(num_drafted, num_accepted))
            if self.batch.records:
                lane.recorded.append(RoundRecord.of(rows[row], num_tokens))
            if lane.controller is not None:
                lane.controller.observe(num_drafted, num_accepted)
            yield self._extend(lane, tokens[:num_kept])

    def _non_finite(self, source: str, lane: Lane, num_accepted: int = 0) -> Exception:
        num_tokens = len(lane.request.prompt_ids) + len(lane.tokens) + num_accepted
        return non_finite_error(source, self.batch.trunk, num_tokens)

    def _extend(self, lane: Lane, tokens: Sequence[int]) -> Chunk:
        """Add committed tokens to a lane, and free its row if its text has ended."""
        chunk = lane.extend(tokens)
        if lane.is_done:
            self.lanes = {row: one for row, one in self.lanes.items() if one is not lane}
        return chunk
