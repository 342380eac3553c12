"""Choose the tokens of a batch: the trunk's tokens and the drafts, and verify the drafts.

The trunk's distribution p and the drafter's distribution q go through the same processors. Random numbers depend on the
request's seed, the position and the purpose, never on the batch. A request therefore gets the same text in every batch.

Verification keeps the trunk's distribution (Leviathan et al., arXiv:2211.17192, appendix A.1). A draft x is drawn from
q and accepted with probability min(1, p(x) / q(x)); a rejected draft is replaced by a draw from max(p - q, 0),
normalised. The probability of token x is then ``min(p(x), q(x)) + max(p(x) - q(x), 0) = p(x)``. Argmax drafts are
verified by matching: a draft is accepted if it equals the token that the trunk draws from p at this position.

Shapes: B rows, R of them that begin a request (R1: one token each), T window positions, K drafts (K1 = K + 1), V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mtp_inference.cache.rows import RowState, first_places
from mtp_inference.sampling.distributions import (
    ACCEPT,
    DRAFT,
    TOKEN,
    Sampling,
    SamplingRows,
    draw,
    probabilities,
    uniform,
)


class Verdict(NamedTuple):
    """Number of accepted drafts, the tokens that a round commits, and what they were drawn from."""

    num_accepted_B: Tensor
    """Int64, 0 to the number drafted."""
    tokens_BK1: Tensor
    """Int64; columns 0..num_accepted are committed: accepted drafts, then the trunk's own token. Ignore the rest."""
    p_BTV: Tensor | None = None
    """fp32, the trunk's distribution at every position; None if all rows are greedy."""


def verify_matching(drafts_BK: Tensor, choices_BK1: Tensor, num_drafted_B: Tensor) -> Verdict:
    """Accept drafts up to the first that differs from the trunk's own choice: for greedy decoding and argmax drafts.

    Columns of the drafts from ``num_drafted`` on, 0 to K, are ignored.
    """
    # No token is -1, so an ignored draft never equals a choice.
    counted_BK = drafts_BK.masked_fill(~first_places(drafts_BK, num_drafted_B), -1)
    # An accepted draft equals the trunk's choice, so all committed tokens are choices.
    num_accepted_B = (counted_BK == choices_BK1[:, :-1]).cumprod(-1).sum(-1)
    return Verdict(num_accepted_B, choices_BK1)


def verify_rejection(
    drafts_BK: Tensor,
    q_BKV: Tensor,
    p_BK1V: Tensor,
    accept_u_BK: Tensor,
    token_u_BK1: Tensor,
    num_drafted_B: Tensor,
) -> Verdict:
    """Accept sampled drafts with probability min(1, p / q).

    Rows with one-hot p and q decode greedily.

    Args:
        drafts_BK: Drafted tokens, int64; columns from ``num_drafted`` on are ignored, with any valid token id.
        q_BKV: The distribution that each draft was drawn from, fp32: the same tensor, not a recomputed one.
        p_BK1V: The trunk's probabilities at every window position, fp32.
        accept_u_BK: Uniform numbers of stream ACCEPT, at the position of each draft.
        token_u_BK1: Uniform numbers of stream TOKEN, at the position of each draft and of the token after them.
        num_drafted_B: Number of drafts of each row, int64, 0 to K. It may depend on earlier drafts and on q, never on
            the draft itself: dropping improbable drafts would bias the text.
    """
    p_draft_BK = p_BK1V[:, :-1].gather(-1, drafts_BK[..., None])[..., 0]
    q_draft_BK = q_BKV.gather(-1, drafts_BK[..., None])[..., 0]
    # Multiply instead of dividing by 0. The comparison is strict: a token of probability 0 is rejected even at u = 0.
    is_kept_BK = (accept_u_BK * q_draft_BK < p_draft_BK) & first_places(drafts_BK, num_drafted_B)
    num_accepted_B = is_kept_BK.cumprod(-1).sum(-1)
    stop_B1 = num_accepted_B[:, None]
    own_B1 = draw(_own_BV(q_BKV, p_BK1V, stop_B1, num_drafted_B)[:, None], token_u_BK1.gather(1, stop_B1))
    return Verdict(num_accepted_B, torch.cat([drafts_BK, own_B1], dim=1).scatter(1, stop_B1, own_B1), p_BK1V)


def _own_BV(q_BKV: Tensor, p_BK1V: Tensor, stop_B1: Tensor, num_drafted_B: Tensor) -> Tensor:
    """Return the weights of the trunk's own token: max(p - q, 0) after a rejected draft, p if none was rejected."""
    p_BV = p_BK1V.take_along_dim(stop_B1[..., None], dim=1)[:, 0]
    num_drafts = q_BKV.shape[1]
    if num_drafts == 0:
        return p_BV
    q_BV = q_BKV.take_along_dim(stop_B1[..., None].clamp(max=num_drafts - 1), dim=1)[:, 0]
    residual_BV = (p_BV - q_BV).clamp_(min=0.0)
    # The residual is 0 everywhere if p and q differ only by rounding: draw from p then.
    is_residual_B1 = (stop_B1 < num_drafted_B[:, None]) & (residual_BV.amax(-1, keepdim=True) > 0.0)
    return torch.where(is_residual_B1, residual_BV, p_BV)


DraftSampling = Literal["argmax", "sampled"]


class Drafts(NamedTuple):
    tokens_BK: Tensor
    q_BKV: Tensor | None = None
    """fp32, the distribution that each token was drawn from; None for argmax drafts."""
    num_drafted_B: Tensor | None = None
    """int64, number of a row's tokens that count; None for all. The caller includes it in the limit of
    :meth:`Chooser.verify`."""
    peak_BK: Tensor | None = None
    """The largest logit at each draft, NaN if any logit is NaN; None if the drafter has no logits."""


class Chooser(RowState):
    """Choose the tokens of one batch.

    Args:
        draft_sampling: ``argmax``: a draft is the drafter's first choice, accepted with the probability that the trunk
            gives it. ``sampled``: drafts are drawn from q and verified by rejection sampling.
    """

    def __init__(self, settings: Sequence[Sampling], draft_sampling: DraftSampling, device: torch.device) -> None:
        self.settings = list(settings)
        self.draft_sampling = draft_sampling
        self.rows = SamplingRows.stack(self.settings, device)

    @property
    def samples_drafts(self) -> bool:
        return self.draft_sampling == "sampled" and self.rows.any_sampled

    def set_rows(self, rows: slice, settings: Sequence[Sampling]) -> None:
        self.settings[rows] = settings
        self.rows = self.rows.replaced(SamplingRows.stack(self.settings, self.rows.seed_B.device))

    def keep_rows(self, rows_R: Tensor) -> None:
        self.settings = [self.settings[row] for row in rows_R.tolist()]
        self.rows = SamplingRows.stack(self.settings, self.rows.seed_B.device)

    def first(self, rows: slice, logits_R1V: Tensor, position: int) -> Verdict:
        """Choose the first tokens after prompts of one length; ``position`` is that length."""
        of_rows = SamplingRows.stack(self.settings[rows], logits_R1V.device)
        position_R1 = torch.full(logits_R1V.shape[:2], position, device=logits_R1V.device)
        tokens_R1, p_R1V = choose(logits_R1V, of_rows, position_R1)
        return Verdict(torch.zeros_like(tokens_R1[:, 0]), tokens_R1, p_R1V)

    def verify(
        self, logits_BTV: Tensor, window_BT: Tensor, length_B: Tensor, drafts: Drafts, limit_B: Tensor
    ) -> Verdict:
        """Verify the drafts of each row.

        Args:
            logits_BTV: The trunk's logits after each token of the window.
            limit_B: Number of drafts of each row that count: ``num_drafted_B`` of the rules above.
        """
        positions_BT = length_B[:, None] + torch.arange(1, window_BT.shape[1] + 1, device=window_BT.device)
        if drafts.q_BKV is None:
            choices_BT, p_BTV = choose(logits_BTV, self.rows, positions_BT)
            return verify_matching(drafts.tokens_BK, choices_BT, limit_B)._replace(p_BTV=p_BTV)
        seed_B = self.rows.seed_B
        return verify_rejection(
            drafts.tokens_BK,
            drafts.q_BKV,
            probabilities(logits_BTV, self.rows),
            uniform(seed_B, positions_BT[:, :-1], ACCEPT),
            uniform(seed_B, positions_BT, TOKEN),
            limit_B,
        )


class DraftChoice:
    """Choose the tokens of one draft, one after the other.

    Args:
        last_B: The last committed tokens.
        length_B: Their positions.
    """

    def __init__(self, chooser: Chooser, last_B: Tensor, length_B: Tensor) -> None:
        self._chooser = chooser
        self.length_B = length_B
        self._read = [last_B[:, None]]
        self._q: list[Tensor] = []
        self._peaks: list[Tensor] = []

    @property
    def last_B1(self) -> Tensor:
        return self._read[-1]

    def add(self, logits_B1V: Tensor) -> None:
        chooser = self._chooser
        self._peaks.append(logits_B1V.amax(dim=-1))
        if chooser.samples_drafts:
            q_B1V = probabilities(logits_B1V, chooser.rows)
            position_B1 = (self.length_B + len(self._read))[:, None]
            self._q.append(q_B1V)
            self._read.append(draw(q_B1V, uniform(chooser.rows.seed_B, position_B1, DRAFT)))
        else:
            # Temperature and truncation never change the argmax.
            self._read.append(logits_B1V.argmax(dim=-1))

    def result(self) -> Drafts:
        """Return the drafted tokens, none if no token was added."""
        if not self._peaks:
            return Drafts(self.last_B1[:, :0])
        q_BKV = torch.cat(self._q, dim=1) if self._q else None
        return Drafts(torch.cat(self._read[1:], dim=1), q_BKV, peak_BK=torch.cat(self._peaks, dim=1))


def choose(logits_BTV: Tensor, rows: SamplingRows, positions_BT: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the trunk's own tokens, and the distribution that they were drawn from unless all rows are greedy."""
    if not rows.any_sampled:
        return logits_BTV.argmax(dim=-1), None
    p_BTV = probabilities(logits_BTV, rows)
    return draw(p_BTV, uniform(rows.seed_B, positions_BT, TOKEN)), p_BTV
