"""The host's side of one call: which request has which row, what each round does, and what came of it.

Rows are filled as they become free, so that a batch stays full while requests wait. The host looks at a round's
outcome a fixed number of rounds late: on a GPU one, so that the device never waits for it, elsewhere none. Until then
it counts with bounds: a row in flight may have kept every token of its windows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mtp_inference.batch import BAD_DRAFTER, BAD_TRUNK, RoundPlan, padded_stops
from mtp_inference.capture import Outcome, Rounds
from mtp_inference.depth import DepthController, RoundCosts, batch_depth
from mtp_inference.requests import Chunk, Request
from mtp_inference.stats import GenerationResult, Round, accepted_per_pos
from mtp_inference.text import TextStream
from mtp_train.errors import MtpError
from mtp_train.heads.non_finite import Source, non_finite_error

MAX_PREFILL_TOKENS = 16384
"""Prompt tokens that are prefilled together, beyond a first prompt of any length."""
PENDING_PLACES = 32
"""Committed tokens that may wait for a drafter that is not asked."""


@dataclass
class Lane:
    """One request on its row."""

    index: int
    request: Request
    row: int
    depth: int
    """Drafts per round, at most."""
    stops: frozenset[int]
    text_stream: TextStream | None
    controller: DepthController | None
    started: float
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    position: int = 0
    """Upper bound of the last committed token's position."""
    pending: int = 0
    """Upper bound of the committed tokens that the drafter has yet to take in."""
    seconds_prefill: float = 0.0
    is_done: bool = False

    @property
    def met_stop_string(self) -> bool:
        """Whether a stop string ended the text."""
        return self.text_stream is not None and self.text_stream.stopped

    def take(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Add committed tokens up to where the text ends; return those added and the text that became certain."""
        added: list[int] = []
        text = ""
        for token in tokens:
            added.append(token)
            self.tokens.append(token)
            if self.text_stream is not None:
                text += self.text_stream.push(token)
            self.is_done = token in self.stops or len(self.tokens) >= self.request.max_new_tokens
            self.is_done |= self.met_stop_string
            if self.is_done:
                break
        return added, text

    def chunk(self, added: Sequence[int], text: str) -> Chunk:
        """Return what to hand out, with the result where this is the end."""
        if not self.is_done:
            return Chunk(index=self.index, token_ids=tuple(added), text=text)
        if self.text_stream is not None:
            text += self.text_stream.finish()
        return Chunk(index=self.index, token_ids=tuple(added), text=text, result=self._result())

    def _result(self) -> GenerationResult:
        by_stop = self.tokens[-1] in self.stops or self.met_stop_string
        return GenerationResult(
            token_ids=tuple(self.tokens),
            text=self.text_stream.text if self.text_stream is not None else "",
            finish_reason="stop" if by_stop else "length",
            rounds=len(self.rounds),
            num_draft_tokens=sum(one.num_drafted for one in self.rounds),
            accepted_per_pos=accepted_per_pos(self.rounds, self.depth),
            round_log=tuple(self.rounds),
            seconds_prefill=self.seconds_prefill,
            seconds_decode=time.perf_counter() - self.started - self.seconds_prefill,
        )


class InFlight(NamedTuple):
    """A round whose outcome the host has yet to look at."""

    outcome: Outcome
    lanes: tuple[Lane, ...]
    plan: RoundPlan
    launched: float


class Session:
    """One call of the decoder.

    Args:
        rounds: The batch and the way its rounds run.
        waiting: Lanes without a row, in the order in which they are admitted.
        costs: What rounds cost; goes on being measured.
        max_depth: Deepest draft.
        max_in_flight: Rounds that run ahead of the host.
    """

    def __init__(
        self, rounds: Rounds, waiting: Sequence[Lane], costs: RoundCosts, max_depth: int, max_in_flight: int
    ) -> None:
        self.rounds = rounds
        self.batch = rounds.batch
        self.batch.owner = self
        self.waiting = deque(waiting)
        self.costs = costs
        self.max_depth = max_depth
        self.max_in_flight = max_in_flight
        self.lanes: dict[int, Lane] = {}
        self.in_flight: deque[InFlight] = deque()
        self._depths: list[int] = []
        self._last_look = 0.0

    def run(self) -> Iterator[Chunk]:
        """Decode everything; yield what each prefill and each round adds.

        Raises:
            MtpError: Another call took the buffers over in between.
            CheckpointError: Logits are NaN or infinite.
        """
        while self.waiting or self.lanes or self.in_flight:
            while self.waiting and len(self.lanes) < self.batch.cache.num_rows:
                yield from self._admit()
            if self.lanes:
                self._launch()
            while len(self.in_flight) > (self.max_in_flight if self.lanes else 0):
                yield from self._look()

    def _admit(self) -> Iterator[Chunk]:
        """Prefill the next requests of one length on neighbouring free rows."""
        self._require_rows()
        started = time.perf_counter()
        lanes, rows = self._next_group()
        device = self.batch.last_B.device
        prompt_RT = torch.tensor([list(lane.request.prompt_ids) for lane in lanes], device=device)
        room_R = torch.tensor([lane.request.max_new_tokens for lane in lanes], device=device)
        width = self.batch.stop_BN.shape[1]
        stop_RN = torch.tensor(padded_stops([lane.stops for lane in lanes], width), device=device, dtype=torch.long)
        self.batch.chooser.set_rows(rows, [lane.request.sampling for lane in lanes])
        first = self.batch.prefill(rows, prompt_RT, room_R, stop_RN).tolist()
        now = time.perf_counter()
        for lane, token in zip(lanes, first, strict=True):
            lane.started, lane.seconds_prefill = started, now - started
            lane.position, lane.pending = prompt_RT.shape[1], 1
            if token == BAD_TRUNK:
                raise self._non_finite("trunk", lane, [])
            added, text = lane.take([token])
            self._settle_lane(lane)
            yield lane.chunk(added, text)

    def _next_group(self) -> tuple[list[Lane], slice]:
        free = [row for row in range(self.batch.cache.num_rows) if row not in self.lanes]
        length = len(self.waiting[0].request.prompt_ids)
        lanes: list[Lane] = []
        for row in free:
            fits = not lanes or (
                row == lanes[-1].row + 1
                and len(self.waiting[0].request.prompt_ids) == length
                and (len(lanes) + 1) * length <= MAX_PREFILL_TOKENS
            )
            if not fits:
                break
            lane = self.waiting.popleft()
            lane.row = row
            self.lanes[row] = lane
            lanes.append(lane)
            if not self.waiting:
                break
        return lanes, slice(lanes[0].row, lanes[-1].row + 1)

    def _launch(self) -> None:
        """Start a round over all rows."""
        self._require_rows()
        depth = self._depth()
        plan = self._plan(depth)
        if depth == 0 and plan.pending + 1 > PENDING_PLACES and self.batch.drafter is not None:
            self.batch.settle(plan)
            for lane in self.lanes.values():
                lane.pending = 0
        launched = time.perf_counter()
        outcome = self.rounds.run(plan)
        for lane in self.lanes.values():
            lane.pending = (0 if depth else lane.pending) + depth + 1
            lane.position += depth + 1
        self.in_flight.append(InFlight(outcome, tuple(self.lanes.values()), plan, launched))

    def _require_rows(self) -> None:
        if self.batch.owner is not self:
            raise MtpError(
                "stream: another call of this decoder began before this one had ended; expected one at a time, as they "
                "share buffers. Pass all requests together, or use a second decoder."
            )

    def _plan(self, depth: int) -> RoundPlan:
        lanes = self.lanes.values()
        position = max(lane.position for lane in lanes)
        known = not self.in_flight and len(self.lanes) == self.batch.cache.num_rows
        same = known and all(lane.position == position for lane in lanes)
        pending = max(lane.pending for lane in lanes)
        start = position if same else None
        return RoundPlan(depth, position + depth + 1, pending, PENDING_PLACES, start)

    def _depth(self) -> int:
        """Return the depth of the round, having told the batch how much of it is each row's."""
        fixed = [lane.depth for lane in self.lanes.values() if lane.controller is None]
        adaptive = [lane.controller for lane in self.lanes.values() if lane.controller is not None]
        chosen = batch_depth(adaptive, self.costs, self.batch.cache.num_rows, self.max_depth) if adaptive else 0
        depth = max([chosen, *fixed])
        depths = [0] * self.batch.cache.num_rows
        for row, lane in self.lanes.items():
            depths[row] = lane.depth if lane.controller is None else min(depth, lane.depth)
        if depths != self._depths:
            self._depths = depths
            self.batch.depth_B.copy_(torch.tensor(depths))
        return depth

    def _look(self) -> Iterator[Chunk]:
        """Look at the oldest round."""
        outcome, lanes, plan, launched = self.in_flight.popleft()
        rows = outcome.rows()
        now = time.perf_counter()
        # A round that waited for the one before it began when that one ended.
        self.costs.observe(self.batch.cache.num_rows, plan.depth, now - max(launched, self._last_look))
        self._last_look = now
        # A round launched since may have taken in what was pending: the bound then counts its window alone.
        is_taken_in = any(later.plan.depth for later in self.in_flight)
        for lane in lanes:
            *tokens, num_kept, num_accepted, num_drafted = rows[lane.row]
            if lane.is_done:
                continue
            if num_kept == BAD_TRUNK:
                raise self._non_finite("trunk", lane, tokens[:num_accepted])
            if num_kept == BAD_DRAFTER:
                raise self._non_finite("drafter", lane, [])
            # The bounds counted on the whole window.
            lane.position -= plan.depth + 1 - num_kept
            if not is_taken_in:
                lane.pending -= plan.depth + 1 - num_kept
            lane.rounds.append(Round(num_drafted, num_accepted))
            if lane.controller is not None:
                lane.controller.observe(num_drafted, num_accepted)
            added, text = lane.take(tokens[:num_kept])
            self._settle_lane(lane)
            yield lane.chunk(added, text)

    def _non_finite(self, source: Source, lane: Lane, accepted: Sequence[int]) -> Exception:
        token_ids = [*lane.request.prompt_ids, *lane.tokens, *accepted]
        return non_finite_error(source, self.batch.trunk, self.batch.drafter, token_ids, max(lane.depth, 1))

    def _settle_lane(self, lane: Lane) -> None:
        """Free the row of a lane whose text has ended."""
        if not lane.is_done:
            return
        del self.lanes[lane.row]
        # The device knows of stop tokens and limits, not of stop strings.
        if lane.met_stop_string:
            self.batch.release(lane.row)
