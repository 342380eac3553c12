"""One round of speculative decoding: draft, verify, accept, commit.

The drafts never change the text. The trunk runs over the last committed token and all drafts at once, and drafts are
accepted by a rule that leaves the trunk's distribution unchanged (``sampling/chooser.py``). Plain decoding is the same
round without drafts. Other texts of the batch may be at other positions and keep other numbers of tokens.

A round consists of tensor operations in fixed shapes, in place, and does not synchronise with the device, so that
``capture.py`` can run it as a CUDA graph. ``session.py`` plans rounds and reads their outcomes.

Shapes: B rows of the batch, R rows that are prefilled together, T = K1 = K + 1 tokens of a window, K drafts, D hidden,
V vocabulary.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from mtp_inference.batch import Batch
from mtp_inference.cache.model_cache import prefill_chunks
from mtp_inference.cache.rows import first_places
from mtp_inference.drafters.drafter import RoundPlan
from mtp_inference.record import decided_on
from mtp_inference.sampling.chooser import DraftChoice, Drafts, Verdict

BAD_TRUNK, BAD_DRAFTER = -1, -2
"""Returned in place of a number of tokens if the logits of the trunk, or of the drafter, are NaN or infinite."""


@torch.inference_mode()
def run_round(batch: Batch, plan: RoundPlan) -> Tensor:
    """Extend every active row of a batch by its accepted drafts and one token of the trunk's own.

    Returns:
        int64 (B, K1 + 3): the committed tokens, then their number (0 for an inactive row; ``BAD_TRUNK`` or
        ``BAD_DRAFTER`` if the logits that they were chosen from are not finite), the number of accepted drafts, and
        the number of drafts. If the batch records, what the round decided on comes after them (``record.py``).
    """
    drafter, chooser, cache = batch.drafter, batch.chooser, batch.cache
    with batch.widened(batch.widens_rounds), batch.layers.used():
        # Draft.
        choice = DraftChoice(chooser, batch.last_B, batch.length_B)
        drafts = choice.result() if plan.depth == 0 or drafter is None else drafter.draft(plan, choice)

        # Verify: one forward over the last committed token and the drafts.
        window_BT = torch.cat([batch.last_B[:, None], drafts.tokens_BK], dim=1)
        hidden_BTD, logits_BTV = batch.run_window(plan, window_BT)

        # Accept drafts up to the first that is rejected, then take a token of the trunk's own.
        limit_B = batch.depth_B.clamp(max=plan.depth)
        if drafts.num_drafted_B is not None:
            limit_B = limit_B.minimum(drafts.num_drafted_B)
        verdict = chooser.verify(logits_BTV, window_BT, batch.length_B, drafts, limit_B)
        accepted_B, tokens_BT, _ = verdict

        # Commit; the cache rolls back what was rejected.
        kept_B = (accepted_B + 1) * batch.active_B
        cache.commit(accepted_B + 1)
        if drafter is not None:
            drafter.observe(hidden_BTD, tokens_BT, kept_B)
        batch.commit(tokens_BT, accepted_B, kept_B)
    return _outcome(batch, window_BT, logits_BTV, verdict, drafts, kept_B, limit_B)


@torch.inference_mode()
def prefill(batch: Batch, rows: slice, prompt_RT: Tensor) -> Tensor:
    """Run prompts of one length on rows whose settings are set; commit and return their first tokens.

    Returns:
        The outcome of a round without drafts, see :func:`run_round`.
    """
    trunk = batch.trunk
    num_tokens = prompt_RT.shape[1]
    # Without a drafter only the last chunk is read.
    hidden = deque[Tensor](maxlen=1 if batch.drafter is None else None)
    with batch.widened(batch.widens_prefill):
        hidden.extend(prefill_chunks(trunk, batch.cache, rows, prompt_RT, batch.prefill_chunk))
    hidden_RTD = torch.cat(list(hidden), dim=1)
    if batch.widens_prefill and not batch.widens_rounds:
        # The first token and the drafter use the precision of the rounds.
        hidden_RTD = hidden_RTD.to(trunk.lm_head_VD.dtype)
    with batch.widened(batch.widens_rounds):
        logits_R1V = trunk.logits(hidden_RTD[:, -1:])
        verdict = batch.chooser.first(rows, logits_R1V, num_tokens)
        first_R = verdict.tokens_BK1[:, 0]
        if batch.drafter is not None:
            batch.drafter.start(rows, hidden_RTD, prompt_RT, first_R)
    batch.last_B[rows] = first_R
    batch.room_B[rows] -= 1
    is_stop_R = (batch.stop_BN[rows] == first_R[:, None]).any(-1)
    batch.active_B[rows] = (batch.room_B[rows] > 0) & ~is_stop_R
    batch.length_B[rows] = num_tokens * batch.active_B[rows]
    none_R = verdict.num_accepted_B
    no_drafts = Drafts(prompt_RT[:, :0])
    return _outcome(batch, prompt_RT[:, -1:], logits_R1V, verdict, no_drafts, none_R + 1, none_R)


@torch.inference_mode()
def settle_drafter(batch: Batch, plan: RoundPlan) -> None:
    """Make the drafter process its pending tokens before a round without drafts."""
    if batch.drafter is not None:
        batch.drafter.draft(plan, DraftChoice(batch.chooser, batch.last_B, batch.length_B))


def _outcome(
    batch: Batch,
    window_BT: Tensor,
    logits_BTV: Tensor,
    verdict: Verdict,
    drafts: Drafts,
    kept_B: Tensor,
    limit_B: Tensor,
) -> Tensor:
    told_B = _flagged(kept_B, logits_BTV, drafts)
    counts_B3 = torch.stack([told_B, verdict.num_accepted_B, limit_B], dim=1)
    recorded = [decided_on(window_BT, logits_BTV, verdict, drafts, limit_B)] if batch.records else []
    return torch.cat([verdict.tokens_BK1, counts_B3, *recorded], dim=1)


def _flagged(kept_B: Tensor, logits_BTV: Tensor, drafts: Drafts) -> Tensor:
    """Return ``kept_B``, replaced by an error code in active rows whose logits are NaN or infinite.

    The largest logit shows this in one pass, as it is NaN if any logit is. Minus infinity at other tokens is valid: it
    marks tokens that are excluded.
    """
    told_B = kept_B
    if drafts.peak_BK is not None:
        told_B = told_B.masked_fill(_is_bad(drafts.peak_BK).any(-1) & (kept_B > 0), BAD_DRAFTER)
    is_bad_BT = _is_bad(logits_BTV.amax(-1)) & first_places(logits_BTV, kept_B)
    return told_B.masked_fill(is_bad_BT.any(-1), BAD_TRUNK)


def _is_bad(peak: Tensor) -> Tensor:
    # Fewer kernels than isfinite.
    return ~(peak.abs() < torch.inf)
