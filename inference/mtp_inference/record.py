"""Record what the rounds of a text decided on, so that :mod:`mtp_inference.rule` can decide again.

Replaying a text does not show this: rejected drafts are not part of it, and other shapes round otherwise. A round
therefore returns, with its outcome, the few numbers that its decision rests on. They are tensors of fixed shapes, so
that captured rounds record too.

Shapes: B rows, T window tokens (K drafts and the token before them), V vocabulary, N = ``BEST`` tokens, W numbers of a
row, and P positions of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp_inference.cache.rows import first_places
from mtp_inference.sampling.chooser import Drafts, Verdict
from mtp_inference.sampling.distributions import Sampling

BEST = 10
"""Number of largest logits that are recorded for each position: the contenders for its token."""
Q_OF_DRAFT = 3
"""Column of :attr:`RoundRecord.draws`."""
FloatArray = NDArray[np.float32]


def decided_on(window_BT: Tensor, logits_BTV: Tensor, verdict: Verdict, drafts: Drafts, limit_B: Tensor) -> Tensor:
    """Return what a round decided on, (B, T x W), as the bits of fp32 numbers in int64, like the counts of a round.

    W is the window's token, the ids of the largest logits, their values, and where rows are sampled: both ends of the
    chosen token's interval of the cumulative distribution, as shares of its total, p and q of the draft. Token ids are
    exact below 2**24.
    """
    best = logits_BTV.topk(BEST, dim=-1)
    parts = [window_BT[..., None], best.indices, best.values]
    if verdict.p_BTV is not None:
        tokens_BT = verdict.tokens_BK1
        of_drafts_BT2 = verdict.p_BTV.new_zeros((*tokens_BT.shape, 2))
        if drafts.q_BKV is not None:
            # p and q of each draft. They stay 0 after the last draft, and for drafts that were not sampled.
            both = [one.gather(-1, drafts.tokens_BK[..., None]) for one in (verdict.p_BTV[:, :-1], drafts.q_BKV)]
            of_drafts_BT2[:, :-1] = torch.cat(both, dim=-1)
        parts += [_intervals(verdict.p_BTV, tokens_BT, drafts, limit_B), of_drafts_BT2]
    return torch.cat([part.float() for part in parts], dim=-1).view(torch.int32).long().flatten(1)


def _intervals(p_BTV: Tensor, tokens_BT: Tensor, drafts: Drafts, limit_B: Tensor) -> Tensor:
    """Return where the interval of each row's token begins and ends, (B, T, 2), as shares of the total weight.

    After a rejected draft the weights are ``max(p - q, 0)``, and p where that is 0 everywhere.
    """
    weights_BTV = p_BTV
    if drafts.q_BKV is not None:
        num_drafts = drafts.q_BKV.shape[1]
        left_BKV = (p_BTV[:, :num_drafts] - drafts.q_BKV).relu()
        is_left_BK = first_places(drafts.q_BKV, limit_B) & left_BKV.any(-1)
        left_BKV = torch.where(is_left_BK[..., None], left_BKV, p_BTV[:, :num_drafts])
        weights_BTV = torch.cat([left_BKV, p_BTV[:, num_drafts:]], dim=1)
    is_before_BTV = torch.arange(p_BTV.shape[-1], device=p_BTV.device) < tokens_BT[..., None]
    before_BT = (weights_BTV * is_before_BTV).sum(-1)
    own_BT = weights_BTV.gather(-1, tokens_BT[..., None])[..., 0]
    return torch.stack([before_BT, before_BT + own_BT], dim=-1) / weights_BTV.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Contenders:
    """The largest logits of some positions, largest first."""

    ids_PN: NDArray[np.int64]
    values_PN: FloatArray

    @classmethod
    def of(cls, logits_PV: Tensor) -> Contenders:
        best = logits_PV.topk(BEST, dim=-1)
        return cls(best.indices.cpu().numpy(), best.values.float().cpu().numpy())

    @classmethod
    def joined(cls, parts: Sequence[Contenders]) -> Contenders:
        return cls(np.concatenate([one.ids_PN for one in parts]), np.concatenate([one.values_PN for one in parts]))

    def __len__(self) -> int:
        return len(self.ids_PN)

    def part(self, start: int, stop: int | None = None) -> Contenders:
        return Contenders(self.ids_PN[start:stop], self.values_PN[start:stop])


@dataclass(frozen=True)
class RoundRecord:
    """What a round decided on for one text. Prefill is a round of one row without drafts."""

    tokens: tuple[int, ...]
    """A token for each row of the window."""
    num_kept: int
    """Number of tokens that the round committed."""
    limit: int
    """Number of drafts that could be accepted."""
    decided_TW: FloatArray
    """A row of :func:`decided_on`."""

    @classmethod
    def of(cls, outcome: Sequence[int], num_tokens: int) -> RoundRecord:
        """Read a row of a round's outcome, of a window of so many tokens."""
        num_kept, _, limit, *bits = outcome[num_tokens:]
        decided_TW = np.array(bits, np.int32).view(np.float32).reshape(num_tokens, -1)
        return cls(tuple(outcome[:num_tokens]), num_kept, limit, decided_TW)

    @property
    def window(self) -> list[int]:
        return self.decided_TW[:, 0].astype(int).tolist()

    @property
    def num_best(self) -> int:
        return min(BEST, (self.decided_TW.shape[1] - 1) // 2)

    @property
    def best(self) -> Contenders:
        """The contenders of each row."""
        ids_TN, values_TN = np.split(self.decided_TW[:, 1 : 1 + 2 * self.num_best], 2, axis=1)
        return Contenders(ids_TN.astype(np.int64), values_TN)

    @property
    def draws(self) -> FloatArray:
        """Both ends of each token's interval, p and q of each draft, (T, 4); (T, 0) if all rows are greedy."""
        return self.decided_TW[:, 1 + 2 * self.num_best :]


@dataclass(frozen=True)
class TextRecord:
    """What all rounds of a text decided on."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stops: frozenset[int]
    rounds: tuple[RoundRecord, ...]

    @property
    def samples_drafts(self) -> bool:
        """Whether drafts were drawn from the drafter's distribution, and verified by rejection sampling."""
        is_sampled = self.sampling.temperature > 0.0
        return is_sampled and any((one.draws[:, Q_OF_DRAFT] > 0.0).any() for one in self.rounds)

    def best(self, num_tokens: int) -> Contenders:
        """Return the contenders for the first new tokens."""
        return Contenders.joined([one.best.part(0, one.num_kept) for one in self.rounds]).part(0, num_tokens)
