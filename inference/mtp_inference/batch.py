"""A batch on the device: prefill some rows, run a round over all rows.

A round drafts, verifies, accepts and commits. It consists of tensor operations in fixed shapes, in place, and does not
synchronise with the device. It returns one small tensor with its outcome, which the host may read later.

Shapes: B rows of the batch, R rows that are prefilled together, T window tokens, D hidden, K drafts (K1 = K + 1),
N stop tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.cache.rows import keep_rows_of
from mtp_inference.cache.window import Window
from mtp_inference.cpu_layers import CpuLayers
from mtp_inference.drafters.drafter import Drafter, Place
from mtp_inference.forward import prefill_chunks, window_states
from mtp_inference.sampling.chooser import Chooser, Drafts
from mtp_inference.sampling.distributions import Sampling
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.precision import Scratch, slow_halves

NO_TOKEN = -1
BAD_TRUNK, BAD_DRAFTER = -1, -2
"""Returned in place of a number of tokens if the logits of the trunk, or of the drafter, are NaN or infinite."""


class Widening(NamedTuple):
    """Stages of a batch that multiply in fp32, converting the weights layer by layer, and not in the stored dtype."""

    prefill: bool
    rounds: bool


HELD = Widening(False, False)
WIDE_ROWS = 4
"""Smallest number of batch rows whose rounds run in fp32, converting the weights in every round. At four rows, a model
of 64 million weights gains with three drafts per row (1.2 to 1.3 times the speed) and loses without drafts (0.8 to
0.9). A smaller model's figures vary too much to tell. Not measured on a processor with AVX2 only."""


def choose_widening(trunk: Trunk, num_rows: int) -> Widening:
    """Return the stages that are faster in fp32.

    All rounds of a batch, with drafts or without, use the same precision, as another precision may decide near ties
    differently.
    """
    weight = trunk.lm_head_VD
    if not slow_halves(weight.dtype, weight.device):
        return HELD
    return Widening(True, num_rows >= WIDE_ROWS)


@dataclass(frozen=True)
class RoundPlan:
    """Settings of a round, known on the host. A captured round is replayed only for an equal plan."""

    depth: int
    """Drafts per row; 0 is plain decoding."""
    used: int
    """Positions in use after the round, an upper bound."""
    pending: int
    """Committed tokens of a row that the drafter has not processed yet, an upper bound over rows."""
    most_pending: int
    """The largest value that ``pending`` can have."""
    start: int | None
    """The first position of the window, if it is the same for all rows and known on the host; else None."""


class Batch:
    """The rows of one batch.

    Args:
        trunk: The trunk.
        drafter: The drafter; None for plain decoding.
        chooser: Chooses the trunk's tokens and verifies drafts.
        cache: The trunk's cache, with room for the longest window.
        prefill_chunk: Prompt tokens of one forward.
        num_stops: N.
        widening: Stages that run in fp32 on a trunk stored in fewer bits.
        cpu_layers: Layers that rounds run by a faster forward.
    """

    def __init__(
        self,
        trunk: Trunk,
        drafter: Drafter | None,
        chooser: Chooser,
        cache: WindowCache,
        prefill_chunk: int,
        num_stops: int,
        widening: Widening = HELD,
        cpu_layers: CpuLayers | None = None,
    ) -> None:
        self.trunk = trunk
        self.widening = widening
        self._cpu_layers = cpu_layers
        self._scratch = Scratch()
        self.drafter = drafter
        self.chooser = chooser
        self.cache = cache
        self.prefill_chunk = prefill_chunk
        device = trunk.lm_head_VD.device

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        rows = cache.num_rows
        self.last_B = zeros(rows)
        """The last committed tokens; the trunk's cache contains all tokens before them."""
        self.length_B = zeros(rows)
        """Positions of the last committed tokens; 0 in inactive rows."""
        self.active_B = zeros(rows, dtype=torch.bool)
        self.room_B = zeros(rows)
        """Number of new tokens until a row's limit."""
        self.depth_B = zeros(rows)
        """Largest number of drafts of a row to accept."""
        self.stop_BN = zeros(rows, num_stops) + NO_TOKEN
        self.rows_B1 = torch.arange(rows, device=device)[:, None]
        self.owner: object = None
        """The session that decodes with these rows."""

    @torch.inference_mode()
    def prefill(self, rows: slice, prompt_RT: Tensor, room_R: Tensor, stop_RN: Tensor) -> Tensor:
        """Run prompts of one length; return their first tokens, (R,), or ``BAD_TRUNK`` if logits are not finite."""
        # Without a drafter only the last chunk is read.
        hidden = deque[Tensor](maxlen=1 if self.drafter is None else None)
        with self._widened(self.widening.prefill):
            hidden.extend(prefill_chunks(self.trunk, self.cache, rows, prompt_RT, self.prefill_chunk))
        hidden_RTD = torch.cat(list(hidden), dim=1)
        if self.widening.prefill and not self.widening.rounds:
            # The first token and the drafter use the precision of the rounds.
            hidden_RTD = hidden_RTD.to(self.trunk.lm_head_VD.dtype)
        with self._widened(self.widening.rounds):
            return self._begin(rows, prompt_RT, room_R, stop_RN, hidden_RTD)

    def _begin(self, rows: slice, prompt_RT: Tensor, room_R: Tensor, stop_RN: Tensor, hidden_RTD: Tensor) -> Tensor:
        num_tokens = prompt_RT.shape[1]
        self.chooser.read_prompts(rows, prompt_RT)
        logits_R1V = self.trunk.logits(hidden_RTD[:, -1:])
        first_R = self.chooser.first(rows, logits_R1V, num_tokens)
        if self.drafter is not None:
            self.drafter.start(rows, hidden_RTD, prompt_RT, first_R)
        self.last_B[rows] = first_R
        self.room_B[rows] = room_R - 1
        self.stop_BN[rows] = stop_RN
        running_R = (room_R > 1) & ~(stop_RN == first_R[:, None]).any(-1)
        self.active_B[rows] = running_R
        self.length_B[rows] = num_tokens * running_R
        return first_R.masked_fill(_is_bad(logits_R1V.amax(-1))[:, 0], BAD_TRUNK)

    @torch.inference_mode()
    def run_round(self, plan: RoundPlan) -> Tensor:
        """Draft, verify, accept, commit.

        Returns:
            int64 (B, K1 + 3): the committed tokens, then their number (0 for an inactive row; ``BAD_TRUNK`` or
            ``BAD_DRAFTER`` if the logits that they were chosen from are not finite), the number of accepted drafts, and
            the number of drafts.
        """
        with self._in_round():
            return self._round(plan)

    @torch.inference_mode()
    def replay(self, plan: RoundPlan, window_BT: Tensor, num_kept_B: Tensor) -> Tensor:
        """Verify a window of given tokens as a round does, keep the first of them, and return the logits (B, T, V)."""
        with self._in_round():
            _, logits_BTV = self.run_window(plan, window_BT)
            self.cache.commit(num_kept_B)
        self.length_B += num_kept_B
        return logits_BTV

    def _round(self, plan: RoundPlan) -> Tensor:
        drafts = self._draft(plan)
        window_BT = torch.cat([self.last_B[:, None], drafts.tokens_BK], dim=1)
        hidden_BTD, logits_BTV = self.run_window(plan, window_BT)
        limit_B = self.depth_B.clamp(max=plan.depth)
        if drafts.num_drafted_B is not None:
            limit_B = limit_B.minimum(drafts.num_drafted_B)
        accepted_B, tokens_BT = self.chooser.verify(logits_BTV, window_BT, self.length_B, drafts, limit_B)
        self.cache.commit(accepted_B + 1)
        kept_B = (accepted_B + 1) * self.active_B
        told_B = _flagged(kept_B, logits_BTV, drafts)
        if self.drafter is not None:
            self.drafter.extend(hidden_BTD, tokens_BT, kept_B)
        self._commit(tokens_BT, accepted_B, kept_B)
        return torch.cat([tokens_BT, told_B[:, None], accepted_B[:, None], limit_B[:, None]], dim=1)

    def run_window(self, plan: RoundPlan, window_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Run the trunk over a window of every row; return hidden states (B, T, D) and logits (B, T, V)."""
        positions_BT = self.length_B[:, None] + torch.arange(window_BT.shape[1], device=window_BT.device)
        rows = slice(0, len(window_BT))
        window = Window(rows, positions_BT, plan.used, plan.start)
        hidden_BTD = window_states(self.trunk, self.cache, window_BT, window)
        return hidden_BTD, self.trunk.logits(hidden_BTD)

    def place(self, plan: RoundPlan) -> Place:
        """Return the positions of a round for the drafter."""
        return Place(plan.used, plan.pending, self.last_B, self.length_B, self.cache)

    @torch.inference_mode()
    def settle(self, plan: RoundPlan) -> None:
        """Make the drafter process its pending tokens."""
        if self.drafter is not None:
            self.drafter.settle(self.place(plan))

    def reset(self) -> None:
        """Make all rows inactive, before a session."""
        if self._cpu_layers is not None:
            self._cpu_layers.refresh()
        self.active_B.zero_()
        self.length_B.zero_()
        self.chooser.set_rows(slice(None), [Sampling()] * self.cache.num_rows)

    def release(self, row: int) -> None:
        """Make a row inactive."""
        self.active_B[row] = False
        self.length_B[row] = 0

    @torch.no_grad()
    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and drop all others. Buffers move: a captured round is no longer valid."""
        rows_R = torch.tensor(rows, device=self.last_B.device)
        self.cache.keep_rows(rows_R)
        self.chooser.keep_rows(rows_R)
        if self.drafter is not None:
            self.drafter.keep_rows(rows_R)
        keep_rows_of(self, ("last_B", "length_B", "active_B", "room_B", "depth_B", "stop_BN"), rows_R)
        self.rows_B1 = self.rows_B1[: len(rows)]

    @contextmanager
    def _in_round(self) -> Iterator[None]:
        """Choose the precision and the products of a round."""
        cpu_layers = nullcontext() if self._cpu_layers is None else self._cpu_layers.used()
        with self._widened(self.widening.rounds), cpu_layers:
            yield

    def _widened(self, applies: bool) -> AbstractContextManager[None]:
        return self.trunk.computing_in(torch.float32, self._scratch) if applies else nullcontext()

    def _draft(self, plan: RoundPlan) -> Drafts:
        if plan.depth == 0 or self.drafter is None:
            return Drafts(self.last_B.new_zeros(len(self.last_B), 0))
        return self.drafter.draft(plan.depth, self.place(plan), self.chooser)

    def _commit(self, tokens_BT: Tensor, accepted_B: Tensor, kept_B: Tensor) -> None:
        counts_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) < kept_B[:, None]
        self.chooser.read(tokens_BT, counts_BT)
        is_stop_BT = (tokens_BT[..., None] == self.stop_BN[:, None]).any(-1) & counts_BT
        self.room_B -= kept_B
        self.last_B.copy_(torch.where(self.active_B, tokens_BT[self.rows_B1, accepted_B[:, None]][:, 0], self.last_B))
        self.active_B &= (self.room_B > 0) & ~is_stop_BT.any(-1)
        # Inactive rows keep running, at position 0 of their buffers.
        self.length_B.copy_((self.length_B + kept_B) * self.active_B)


def _flagged(kept_B: Tensor, logits_BTV: Tensor, drafts: Drafts) -> Tensor:
    """Return ``kept_B``, replaced by an error code in active rows whose logits are NaN or infinite.

    The largest logit shows this in one pass, as it is NaN if any logit is. Minus infinity at other tokens is valid: it
    marks tokens that are excluded.
    """
    told_B = kept_B
    if drafts.peak_BK is not None:
        told_B = told_B.masked_fill(_is_bad(drafts.peak_BK).any(-1) & (kept_B > 0), BAD_DRAFTER)
    is_read_BT = torch.arange(logits_BTV.shape[1], device=kept_B.device) < kept_B[:, None]
    return told_B.masked_fill((_is_bad(logits_BTV.amax(-1)) & is_read_BT).any(-1), BAD_TRUNK)


def _is_bad(peak: Tensor) -> Tensor:
    # Fewer kernels than isfinite.
    return ~(peak.abs() < torch.inf)


def padded_stops(stops: Sequence[frozenset[int]], width: int) -> list[list[int]]:
    """Return the stop tokens of several rows, each padded to ``width`` with ``NO_TOKEN``."""
    return [sorted(one) + [NO_TOKEN] * (width - len(one)) for one in stops]
