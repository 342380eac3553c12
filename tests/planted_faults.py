"""Faults to plant in the decoder: in what a round accepts and commits, in what it draws, and in what its windows see.

Each is a function of a ``pytest.MonkeyPatch``; those of windows leave plain decoding as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_inference.batch import Batch
from mtp_inference.cache.model_cache import AttentionStore, WindowCache
from mtp_inference.cache.window import Window
from mtp_inference.sampling import chooser
from mtp_inference.sampling.chooser import Chooser, Drafts, Verdict
from mtp_train.trunk.load import Trunk

Fault = Callable[[pytest.MonkeyPatch], None]


def none(_patch: pytest.MonkeyPatch) -> None:
    """Leave the decoder as it is."""


# What a round accepts and commits


def accepts_within(margin: float) -> Fault:
    """Accept drafts whose logit is up to ``margin`` below the largest."""

    def verify(
        _chooser: Chooser, logits_BTV: Tensor, _window_BT: Tensor, _length_B: Tensor, drafts: Drafts, limit_B: Tensor
    ) -> Verdict:
        drafts_BK = drafts.tokens_BK
        of_drafts_BK = logits_BTV[:, :-1].gather(-1, drafts_BK[..., None])[..., 0]
        is_drafted_BK = torch.arange(drafts_BK.shape[1]) < limit_B[:, None]
        is_kept_BK = (of_drafts_BK >= logits_BTV[:, :-1].amax(-1) - margin) & is_drafted_BK
        accepted_B = is_kept_BK.cumprod(-1).sum(-1)
        own_B1 = logits_BTV.argmax(-1).gather(1, accepted_B[:, None])
        tokens_BT = torch.cat([drafts_BK, own_B1], dim=1).scatter(1, accepted_B[:, None], own_B1)
        return Verdict(accepted_B, tokens_BT)

    return lambda patch: patch.setattr(Chooser, "verify", verify)


def commits_another(one_in: int) -> Fault:
    """Commit the best token that is not the right one, once in so many tokens of a batch."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        stock = Chooser.verify
        num_committed = 0

        def verify(self: Chooser, logits_BTV: Tensor, *rest: Any) -> Verdict:
            nonlocal num_committed
            verdict = stock(self, logits_BTV, *rest)
            tokens_BT = verdict.tokens_BK1.clone()
            for row, accepted in enumerate(verdict.num_accepted_B.tolist()):
                before = num_committed
                num_committed = num_committed + accepted + 1
                if before // one_in != num_committed // one_in:
                    best, second = logits_BTV[row, accepted].topk(2).indices
                    tokens_BT[row, accepted] = second if tokens_BT[row, accepted] == best else best
            return verdict._replace(tokens_BK1=tokens_BT)

        patch.setattr(Chooser, "verify", verify)

    return plant


# What a round draws


def accepts_too_often(patch: pytest.MonkeyPatch) -> None:
    """Accept sampled drafts with probability min(1, 1.5 p / q)."""
    stock = chooser.verify_rejection

    def eager(drafts_BK: Tensor, q_BKV: Tensor, p_BTV: Tensor, accept_u_BK: Tensor, *rest: Any) -> Verdict:
        return stock(drafts_BK, q_BKV, p_BTV, accept_u_BK / 1.5, *rest)

    patch.setattr(chooser, "verify_rejection", eager)


def draws_from_p_after_a_rejection(patch: pytest.MonkeyPatch) -> None:
    """Draw the trunk's own token from p in place of max(p - q, 0)."""
    patch.setattr(chooser, "_own_BV", lambda _q, p_BTV, stop_B1, _n: p_BTV.take_along_dim(stop_B1[..., None], 1)[:, 0])


def draws_with_another_number(patch: pytest.MonkeyPatch) -> None:
    """Draw every token of the trunk's own with the number of the position before."""
    stock = chooser.uniform
    patch.setattr(chooser, "uniform", lambda seed_B, position_BT, stream: stock(seed_B, position_BT - 1, stream))


# What a window sees


def is_verified(store: AttentionStore, keys: Tensor) -> bool:
    """Whether a layer runs over drafts, and not over a prompt or a single token."""
    return keys.shape[2] > 1 and store.window is not None and not store.window.is_fresh


def no_rollback(patch: pytest.MonkeyPatch) -> None:
    """Keep the recurrent state of rejected drafts."""
    commit = WindowCache.commit
    patch.setattr(WindowCache, "commit", lambda cache, _num_kept_B: commit(cache, None))


def rollback_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Begin the window after a rejection one position late, behind the key of the rejected draft."""
    commit = Batch.commit

    def late(batch: Batch, tokens_BT: Tensor, accepted_B: Tensor, kept_B: Tensor) -> None:
        commit(batch, tokens_BT, accepted_B, kept_B)
        is_rejected_B = (accepted_B < batch.depth_B) & batch.active_B
        batch.length_B += is_rejected_B.long()

    patch.setattr(Batch, "commit", late)


def late_positions(trunk: Trunk, every: int = 1) -> Fault:
    """Rotate drafts as if they stood one position further, in every n-th layer."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        rotary = trunk.decoder.rotary_emb
        for layer in list(trunk.layers)[::every]:
            attention = layer.self_attn
            stock = attention.forward

            def late(*args: Any, stock: Callable[..., Any] = stock, **kwargs: Any) -> Any:
                cos_BTX, sin_BTX = kwargs["position_embeddings"]
                if 1 < cos_BTX.shape[1] <= 8:
                    step_cos, step_sin = rotary(cos_BTX, torch.ones(1, 1, dtype=torch.long))
                    late_cos = cos_BTX.clone()
                    late_sin = sin_BTX.clone()
                    late_cos[:, 1:] = (cos_BTX * step_cos - sin_BTX * step_sin)[:, 1:]
                    late_sin[:, 1:] = (sin_BTX * step_cos + cos_BTX * step_sin)[:, 1:]
                    kwargs["position_embeddings"] = late_cos, late_sin
                return stock(*args, **kwargs)

            patch.setattr(attention, "forward", late, raising=False)

    return plant


def sees_one_later_token(patch: pytest.MonkeyPatch) -> None:
    """Let each row of a verify window attend to the next token's key."""
    places = Window.places

    def wider(window: Window, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        seen_by_B1T1, held_B11S = places(window, *args, **kwargs)
        return seen_by_B1T1 + int(window.num_tokens > 1 and not window.is_fresh), held_B11S

    patch.setattr(Window, "places", wider)


def sees_a_rejected_key(patch: pytest.MonkeyPatch) -> None:
    """Leave the key and value of a rejected draft in the place of the token that was committed instead."""
    commit = WindowCache.commit
    update = AttentionStore.update
    num_kept_B: Tensor | None = None

    def noted(cache: WindowCache, kept_B: Tensor | None) -> None:
        nonlocal num_kept_B
        num_kept_B = None if kept_B is None else kept_B.clone()
        commit(cache, kept_B)

    def stale(store: AttentionStore, keys: Tensor, values: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, ...]:
        if not is_verified(store, keys) or num_kept_B is None or len(num_kept_B) != len(keys):
            return update(store, keys, values, *rest, **named)
        rows = (num_kept_B < keys.shape[2]).nonzero()[:, 0]
        slots = store.window.slots_BT(store.size)[:, 0][rows]
        old = [buffer[rows, :, slots].clone() for buffer in (store.keys, store.values)]
        found = [one.clone() for one in update(store, keys, values, *rest, **named)]
        for one, rejected in zip(found, old, strict=True):
            one[rows, :, slots] = rejected.to(one.dtype)
        return tuple(found)

    patch.setattr(WindowCache, "commit", noted)
    patch.setattr(AttentionStore, "update", stale)


def shifted_rows(patch: pytest.MonkeyPatch) -> None:
    """Give verify windows every cached key and value of the position before."""
    update = AttentionStore.update

    def shifted(store: AttentionStore, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        found = update(store, keys, values, *args, **kwargs)
        return tuple(one.roll(1, 2) for one in found) if is_verified(store, keys) else found

    patch.setattr(AttentionStore, "update", shifted)


def coarse_keys(patch: pytest.MonkeyPatch) -> None:
    """Round the keys and values of verify windows to bf16."""
    update = AttentionStore.update

    def coarse(store: AttentionStore, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        if is_verified(store, keys):
            keys = keys.bfloat16().to(keys.dtype)
            values = values.bfloat16().to(values.dtype)
        return update(store, keys, values, *args, **kwargs)

    patch.setattr(AttentionStore, "update", coarse)
