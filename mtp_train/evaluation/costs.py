"""Measure the costs of a head: memory for its weights and KV cache, and time in prefill.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mtp_inference import HeadDrafting
from mtp_inference.batch import Batch
from mtp_inference.cache.model_cache import AttentionStore, WindowCache
from mtp_inference.drafters.assistant_drafter import AssistantDrafting
from mtp_inference.drafters.drafter import BatchSize, Drafting
from mtp_inference.drafters.head_drafter import ChainedDrafter, ChainedDraftsDrafter, RecursiveDrafter
from mtp_inference.drafters.other_drafters import ModelDrafter, ModelDrafting
from mtp_inference.requests import MAX_DEPTH
from mtp_inference.round import prefill
from mtp_train.acceptance.names import PLAIN
from mtp_train.evaluation.decoding import SPEED_PASSES, Stopwatch, TrunkArms
from mtp_train.evaluation.grid import greedy
from mtp_train.evaluation.prompt_records import TaskPrompt
from mtp_train.evaluation.results import ArmCosts
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk

_KEEPING = (RecursiveDrafter, ChainedDrafter, ChainedDraftsDrafter, ModelDrafter)
"""Drafters with a KV cache of their own."""
PROBE_TOKENS = 16
"""Length of the probe: longer than any head has modules, so that every layer of the cache holds something."""
PROBE_SLOTS = 256
"""Slots by which the two caches of the probe differ: a multiple of what any layer compresses into one entry."""


def head_costs(
    arm: str,
    trunk: Trunk,
    drafting: MtpHead | Drafting | None,
    *,
    prefill_tokens: int = 2048,
    max_seconds: float = 60.0,
) -> ArmCosts:
    """Return the memory of an arm's weights and caches, and the ratio of prefill speed with its drafter and without.

    Bytes are those of the decoder's caches, in their dtype: the latent for latent attention, none for a sliding layer.
    For a head with several modules, the KV caches of all drafting modules count. A draft model counts as a head; an
    n-gram drafter has neither weights nor keys.

    Args:
        drafting: The head, or the maker of another drafter; None for plain decoding.
        prefill_tokens: Length of the prompt of random tokens; limited by the model's ``max_position_embeddings``.
        max_seconds: Time limit of the prefill's passes; one is made at least, after a warm-up.
    """
    maker: Drafting | None = HeadDrafting(drafting) if isinstance(drafting, MtpHead) else drafting
    depth = _deepest(maker)
    of_trunk, of_head = bytes_per_token(trunk, maker, depth)
    weights = own_weight_bytes(trunk, maker)
    known = trunk.config.to_dict().get("max_position_embeddings") or prefill_tokens + 1
    num_tokens = min(prefill_tokens, known - 1)
    rates = None if maker is None else _prefill_rates(trunk, maker, depth, num_tokens, max_seconds)
    return ArmCosts(
        arm=arm,
        head_bytes=weights,
        head_kv_bytes_per_token=of_head,
        trunk_kv_bytes_per_token=of_trunk,
        context_tokens_lost=math.ceil(weights / of_trunk) if of_trunk else None,
        prefill_ratio=None if rates is None else rates[1] / rates[0],
        prefill_tokens=None if rates is None else num_tokens,
    )


def own_weight_bytes(trunk: Trunk, maker: Drafting | None) -> int:
    """Return the bytes of a drafter's weights, each tensor once, without tensors shared with the trunk."""
    shared = {tensor.data_ptr() for tensor in trunk.causal_lm.state_dict().values()}
    own = {tensor.data_ptr(): _size(tensor) for tensor in _tensors(maker) if tensor.data_ptr() not in shared}
    if isinstance(maker, HeadDrafting) and maker.draft_vocab_R is not None:
        # A reduced draft vocabulary holds a copy of its rows of the output matrix.
        weight_VD = trunk.lm_head_VD
        return sum(own.values()) + len(maker.draft_vocab_R) * weight_VD.shape[1] * weight_VD.element_size()
    return sum(own.values())


def _tensors(maker: Drafting | None) -> Iterable[Tensor]:
    module: torch.nn.Module
    if isinstance(maker, HeadDrafting):
        module = maker.head
    elif isinstance(maker, ModelDrafting):
        module = maker.model.causal_lm
    elif isinstance(maker, AssistantDrafting):
        module = maker.model
    else:
        return ()
    tensors: Iterable[Tensor] = module.state_dict().values()
    return tensors


def _deepest(maker: Drafting | None) -> int:
    """Return the smallest depth at which every module of the drafter is used; 0 for plain decoding."""
    if isinstance(maker, HeadDrafting) and maker.head.unroll in ("chained", "chained_drafts"):
        return min(len(maker.head.blocks), MAX_DEPTH)
    return 0 if maker is None else 1


def bytes_per_token(trunk: Trunk, maker: Drafting | None, depth: int) -> tuple[int, int]:
    """Return by how many bytes the trunk's cache and the drafter's grow with each token of a text.

    Two caches of different sizes are filled with a short prompt. Both are larger than any sliding window.
    """
    device = trunk.lm_head_VD.device
    prompt_BT = torch.zeros(1, PROBE_TOKENS - depth - 1, dtype=torch.long, device=device)

    def caches(capacity: int) -> list[WindowCache]:
        batch = Batch(trunk, maker, BatchSize(1, capacity=capacity, depth=depth, max_window=PROBE_TOKENS))
        prefill(batch, slice(0, 1), prompt_BT)
        return [batch.cache, *([batch.drafter.cache] if isinstance(batch.drafter, _KEEPING) else [])]

    windows = [
        layer.sliding_window + cache.max_window
        for cache in caches(PROBE_TOKENS)
        for layer in cache.layers
        if isinstance(layer, AttentionStore) and layer.sliding_window is not None
    ]
    small, large = (caches(max(windows, default=0) + more) for more in (PROBE_SLOTS, 2 * PROBE_SLOTS))
    of_trunk, *of_head = (
        round((_cache_bytes(two) - _cache_bytes(one)) / PROBE_SLOTS) for one, two in zip(small, large, strict=True)
    )
    return of_trunk, sum(of_head)


def _cache_bytes(cache: WindowCache) -> int:
    """Return the bytes of all tensors that the layers of a cache hold, each tensor once."""
    found: dict[int, int] = {}
    held: list[Any] = [vars(layer) for layer in cache.layers]
    while held:
        one = held.pop()
        if isinstance(one, Tensor):
            found[one.data_ptr()] = _size(one)
        elif isinstance(one, Mapping):
            held += one.values()
        elif isinstance(one, list | tuple):
            held += one
    return sum(found.values())


def _prefill_rates(
    trunk: Trunk, maker: Drafting, depth: int, num_tokens: int, max_seconds: float
) -> tuple[float, float]:
    """Return the prompt tokens per second without the drafter and with it, each the best of some passes."""
    generator = torch.Generator().manual_seed(0)
    prompt_ids = tuple(torch.randint(trunk.lm_head_VD.shape[0], (num_tokens,), generator=generator).tolist())
    drafting = {"head": maker}
    arms = TrunkArms(trunk=trunk, name="", drafting=drafting, head_names={}, max_new_tokens=1, eos_ids=(), seed=0)
    plain, drafted = greedy(depth).plain, greedy(depth)
    begun = time.perf_counter()
    prompt = TaskPrompt(id="", group="", task="", prompt_ids=prompt_ids)
    watch = Stopwatch(arms, [prompt], [(PLAIN, plain), ("head", drafted)])
    warm_up = max(time.perf_counter() - begun, 1e-9)
    watch.run(max(1, min(SPEED_PASSES, int(max_seconds / warm_up) - 1)), lambda: None)
    without, with_head = (num_tokens / (records[0].seconds_prefill or math.inf) for records in watch.records.values())
    return without, with_head


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
