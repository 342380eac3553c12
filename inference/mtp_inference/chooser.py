"""How a batch chooses tokens: the trunk's own, and the drafts'.

The trunk's p and the drafter's q go through the same processors, with the text that each of them has read. Noise
depends on a request's seed, the position and the purpose, never on the batch, so that a row says the same alone.

Shapes: B rows, T window positions, K drafts (K1 = K + 1), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mtp_inference.sampling import (
    ACCEPT,
    DRAFT,
    TOKEN,
    Sampling,
    SamplingRows,
    draw,
    penalise,
    probabilities,
    seen_before,
    uniform,
)
from mtp_inference.verify import Verdict, verify_matching, verify_rejection

DraftSampling = Literal["argmax", "sampled"]


class Drafts(NamedTuple):
    """What a drafter proposes."""

    tokens_BK: Tensor
    """int64."""
    q_BKV: Tensor | None = None
    """fp32, what each token was drawn from; None where it was the drafter's first choice."""
    num_drafted_B: Tensor | None = None
    """int64, how many of a row's tokens count; None for all."""
    peak_BK: Tensor | None = None
    """The largest logit that each token was chosen by, NaN where one was; None where there were no logits."""


class Chooser:
    """The choices of one batch.

    Args:
        settings: One for each row.
        draft_sampling: ``argmax``: a draft is the drafter's first choice, accepted with the probability that the trunk
            gives it. ``sampled``: drafts are drawn from q and verified by rejection sampling.
        vocab_size: V.
        device: Where the batch lives.
        penalises: Whether a row may have a repetition penalty: what was read is then kept track of.
    """

    def __init__(
        self,
        settings: Sequence[Sampling],
        draft_sampling: DraftSampling,
        *,
        vocab_size: int,
        device: torch.device,
        penalises: bool,
    ) -> None:
        self.settings = list(settings)
        self.draft_sampling = draft_sampling
        self.rows = SamplingRows.stack(self.settings, device)
        self.seen_BV: Tensor | None = None
        if penalises:
            self.seen_BV = torch.zeros(len(self.settings), vocab_size, dtype=torch.bool, device=device)

    @property
    def samples_drafts(self) -> bool:
        """Whether drafts are drawn from q."""
        return self.draft_sampling == "sampled" and self.rows.any_sampled

    def set_rows(self, rows: slice, settings: Sequence[Sampling]) -> None:
        """Give rows to other requests."""
        self.settings[rows] = settings
        self.rows = self.rows.replaced(SamplingRows.stack(self.settings, self.rows.seed_B.device))

    @property
    def steps(self) -> tuple[bool, ...]:
        """Say which steps run; rounds that differ here are different rounds."""
        rows = self.rows
        return (rows.any_sampled, rows.any_top_k, rows.any_top_p, rows.any_min_p, rows.any_penalty)

    def read_prompts(self, rows: slice, prompt_RT: Tensor) -> None:
        """Take in the prompts of rows."""
        if self.seen_BV is not None:
            self.seen_BV[rows] = torch.zeros_like(self.seen_BV[rows]).scatter_(1, prompt_RT, True)

    def read(self, tokens_BT: Tensor, counts_BT: Tensor) -> None:
        """Take in committed tokens, those where ``counts_BT`` is set; the first of a row in use always is."""
        if self.seen_BV is not None:
            # Written twice rather than left out: a scatter has no holes.
            read_BT = torch.where(counts_BT, tokens_BT, tokens_BT[:, :1])
            self.seen_BV.scatter_(1, read_BT, True)

    def first(self, rows: slice, logits_R1V: Tensor, position: int) -> Tensor:
        """Choose the tokens after prompts, (R,)."""
        seen_R1V = None if self.seen_BV is None else self.seen_BV[rows, None]
        of_rows = SamplingRows.stack(self.settings[rows], logits_R1V.device)
        position_R1 = torch.full(logits_R1V.shape[:2], position, device=logits_R1V.device)
        first_R1 = _choose(logits_R1V, of_rows, seen_R1V, position_R1)
        if self.seen_BV is not None:
            self.seen_BV[rows] = self.seen_BV[rows].scatter(1, first_R1, True)
        return first_R1[:, 0]

    def verify(
        self, logits_BTV: Tensor, window_BT: Tensor, length_B: Tensor, drafts: Drafts, limit_B: Tensor
    ) -> Verdict:
        """Say how many drafts of each row stand, and what is committed.

        Args:
            logits_BTV: The trunk's, after each token of the window.
            window_BT: The last committed token and the drafts.
            length_B: The position of the last committed token.
            drafts: The drafts.
            limit_B: How many drafts of each row may be accepted.
        """
        positions_BT = length_B[:, None] + torch.arange(1, window_BT.shape[1] + 1, device=window_BT.device)
        seen_BTV = None if self.seen_BV is None else seen_before(self.seen_BV, window_BT)
        if drafts.q_BKV is None:
            choices_BT = _choose(logits_BTV, self.rows, seen_BTV, positions_BT)
            return verify_matching(drafts.tokens_BK, choices_BT, limit_B)
        seed_B = self.rows.seed_B
        return verify_rejection(
            drafts.tokens_BK,
            drafts.q_BKV,
            probabilities(logits_BTV, self.rows, seen_BTV),
            uniform(seed_B, positions_BT[:, :-1], ACCEPT),
            uniform(seed_B, positions_BT, TOKEN),
            limit_B,
        )

    def begin_draft(self, last_B: Tensor, length_B: Tensor) -> DraftChoice:
        """Begin a draft after the last committed tokens and their positions."""
        return DraftChoice(self, last_B, length_B)


class DraftChoice:
    """The tokens of one draft, chosen one after the other."""

    def __init__(self, chooser: Chooser, last_B: Tensor, length_B: Tensor) -> None:
        self._chooser = chooser
        self._length_B = length_B
        self._read = [last_B[:, None]]
        self._q: list[Tensor] = []
        self._peaks: list[Tensor] = []

    @property
    def last_B1(self) -> Tensor:
        """The newest token."""
        return self._read[-1]

    def add(self, logits_B1V: Tensor) -> None:
        """Choose the next token."""
        chooser = self._chooser
        self._peaks.append(logits_B1V.amax(dim=-1))
        seen_B1V = None
        if chooser.seen_BV is not None:
            seen_B1V = seen_before(chooser.seen_BV, torch.cat(self._read, dim=1))[:, -1:]
        if chooser.samples_drafts:
            q_B1V = probabilities(logits_B1V, chooser.rows, seen_B1V)
            position_B1 = (self._length_B + len(self._read))[:, None]
            self._q.append(q_B1V)
            self._read.append(draw(q_B1V, uniform(chooser.rows.seed_B, position_B1, DRAFT)))
        else:
            # Temperature and truncation keep the first choice; a penalty may move it.
            if seen_B1V is not None:
                logits_B1V = penalise(logits_B1V, seen_B1V, chooser.rows)
            self._read.append(logits_B1V.argmax(dim=-1))

    def result(self) -> Drafts:
        """Return the draft."""
        q_BKV = torch.cat(self._q, dim=1) if self._q else None
        return Drafts(torch.cat(self._read[1:], dim=1), q_BKV, peak_BK=torch.cat(self._peaks, dim=1))


def _choose(logits_BTV: Tensor, rows: SamplingRows, seen_BTV: Tensor | None, positions_BT: Tensor) -> Tensor:
    """Return the trunk's own token at every position, (B, T)."""
    if rows.any_sampled:
        return draw(probabilities(logits_BTV, rows, seen_BTV), uniform(rows.seed_B, positions_BT, TOKEN))
    if seen_BTV is not None:
        logits_BTV = penalise(logits_BTV, seen_BTV, rows)
    return logits_BTV.argmax(dim=-1)
