"""Verify: how many drafts of a window are kept, and which token the trunk puts after them.

The window reads the last committed token and K drafts; p at its position t is what plain decoding would draw from after
the t-th of them. A round keeps the drafts up to the first refused one and commits one token of the trunk's own there.
Three rules, each leaving the text distributed as without drafts:

* **Greedy.** Keep a draft while it is the trunk's argmax. Only argmaxes are committed. This is the matching rule below
  with p of one entry.
* **Matching** (:func:`verify_matching`). Draw the trunk's token at every position, with noise that belongs to the
  position, and keep a draft while it equals the token drawn. Only the trunk's draws are committed, each from p after
  the committed text: position t counts only where all drafts before it were kept. So the text equals, token for token,
  what the same seed gives without drafts, whatever was drafted. For a drafter without chance (q one-hot at its draft)
  this is the rejection rule: the draft is accepted with probability p(draft), and a draw that is not the draft is
  distributed as norm(max(p - q, 0)), which is p without the draft.
* **Rejection** (:func:`verify_rejection`). The draft x was drawn from q. Keep it with probability min(1, p(x) / q(x));
  in place of the first refused one draw from norm(max(p - q, 0)); where none was refused, draw from p. A token x then
  comes with probability min(p, q)(x) + (1 - sum min(p, q)) norm(max(p - q, 0))(x) = p(x), for any q (Leviathan et al.,
  arXiv:2211.17192, section 2.3 and Appendix A.1; Chen et al., arXiv:2302.01318, Theorem 1). It keeps more drafts than
  matching does where the drafter samples. The identity wants the very q that was drawn from, filters included, and
  noise that is independent between the drawing of a draft, its acceptance and the token in its place.

The token committed at a position rests on no noise of later positions. So a position whose draft was thrown away,
because an earlier one was refused, may be drafted again with the same noise.

Fixed shapes, no waiting for the device, no branch on values. Shapes: B rows of the batch, K drafts (K1 = K + 1), V
vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mtp_inference.sampling import draw
from mtp_train.acceptance import accept_greedy


class Verdict(NamedTuple):
    """What a round commits."""

    num_accepted_B: Tensor
    """Int64, 0 to the number drafted."""
    tokens_BK1: Tensor
    """Int64; columns 0..num_accepted are committed: accepted drafts, then the trunk's own token. The rest is void."""


def verify_matching(drafts_BK: Tensor, choices_BK1: Tensor, num_drafted_B: Tensor) -> Verdict:
    """Accept drafts while they equal the trunk's own tokens: greedy decoding, and sampling with a greedy drafter.

    Args:
        drafts_BK: Drafted tokens, int64. Those from column ``num_drafted`` on do not count.
        choices_BK1: The trunk's token at every window position, int64: its argmax, or what ``draw`` took from p with
            the noise of that position.
        num_drafted_B: Drafts of each row, int64, 0 to K.
    """
    # No token is -1, so that a draft which does not count equals no choice.
    counted_BK = drafts_BK.masked_fill(~_is_drafted(drafts_BK, num_drafted_B), -1)
    # An accepted draft equals the trunk's choice, so that the committed tokens are all choices.
    return Verdict(accept_greedy(counted_BK, choices_BK1), choices_BK1)


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
        drafts_BK: Drafted tokens, int64. Those from column ``num_drafted`` on do not count; any valid id will do.
        q_BKV: What each draft was drawn from, fp32: the same tensor, not computed again.
        p_BK1V: The trunk's probabilities at every window position, fp32.
        accept_u_BK: Uniform numbers of stream ACCEPT, at the position of each draft.
        token_u_BK1: Uniform numbers of stream TOKEN, at the position of each draft and of the token after them.
        num_drafted_B: Drafts of each row, int64, 0 to K. Whether a draft counts may depend on the drafts before it and
            on q, never on the draft itself: leaving out the improbable ones would bias the text.
    """
    p_draft_BK = p_BK1V[:, :-1].gather(-1, drafts_BK[..., None])[..., 0]
    q_draft_BK = q_BKV.gather(-1, drafts_BK[..., None])[..., 0]
    # Multiplied out and strict: no division by 0, and a token of probability 0 is refused even at u = 0.
    is_kept_BK = (accept_u_BK * q_draft_BK < p_draft_BK) & _is_drafted(drafts_BK, num_drafted_B)
    num_accepted_B = is_kept_BK.cumprod(-1).sum(-1)
    stop_B1 = num_accepted_B[:, None]
    own_B1 = draw(_own_BV(q_BKV, p_BK1V, stop_B1, num_drafted_B)[:, None], token_u_BK1.gather(1, stop_B1))
    return Verdict(num_accepted_B, torch.cat([drafts_BK, own_B1], dim=1).scatter(1, stop_B1, own_B1))


def _own_BV(q_BKV: Tensor, p_BK1V: Tensor, stop_B1: Tensor, num_drafted_B: Tensor) -> Tensor:
    """Return the weights of the trunk's own token: max(p - q, 0) in place of a refused draft, p where none was."""
    p_BV = p_BK1V.take_along_dim(stop_B1[..., None], dim=1)[:, 0]
    num_drafts = q_BKV.shape[1]
    if num_drafts == 0:
        return p_BV
    q_BV = q_BKV.take_along_dim(stop_B1[..., None].clamp(max=num_drafts - 1), dim=1)[:, 0]
    residual_BV = (p_BV - q_BV).clamp_(min=0.0)
    # Nothing is left where p and q differ by rounding alone: p itself is then as good.
    is_residual_B1 = (stop_B1 < num_drafted_B[:, None]) & (residual_BV.amax(-1, keepdim=True) > 0.0)
    return torch.where(is_residual_B1, residual_BV, p_BV)


def _is_drafted(drafts_BK: Tensor, num_drafted_B: Tensor) -> Tensor:
    return torch.arange(drafts_BK.shape[1], device=drafts_BK.device) < num_drafted_B[:, None]
