"""Measure the costs of a head: memory for its weights and KV cache, and time in prefill.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtp_inference import HeadDrafting
from mtp_inference.batch import Batch
from mtp_inference.cache.convolved import NgramStore
from mtp_inference.cache.model_cache import AttentionStore, CompressedStore, ConvolvedStore, IndexedStore, WindowCache
from mtp_inference.cache.recurrent import RecurrentStore
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


class Kept(NamedTuple):
    """Size of a cache for one text, in bytes."""

    per_token: int
    per_text: int
    """Bytes that do not: recurrent states, inputs of convolutions and compressors, full sliding windows."""


def head_costs(
    arm: str,
    trunk: Trunk,
    drafting: MtpHead | Drafting | None,
    *,
    prefill_tokens: int = 2048,
    max_seconds: float = 60.0,
) -> ArmCosts:
    """Return the memory of an arm's weights and caches, and the ratio of prefill speed with its drafter and without.

    Bytes are counted in the decoder's caches, in their dtype: the latent for latent attention, the window for a sliding
    layer. For a head with several modules, the KV caches of all drafting modules count. A draft model counts as a head;
    an n-gram drafter has neither weights nor keys.

    Args:
        drafting: The head, or the maker of another drafter; None for plain decoding.
        prefill_tokens: Length of the prompt of random tokens; limited by the model's ``max_position_embeddings``.
        max_seconds: Time limit of the prefill's passes; one is made at least, after a warm-up.
    """
    maker: Drafting | None = HeadDrafting(drafting) if isinstance(drafting, MtpHead) else drafting
    depth = _deepest(maker)
    trunk_kept, head_kept = probe_caches(trunk, maker, depth)
    weights = own_weight_bytes(trunk, maker)
    known = trunk.config.to_dict().get("max_position_embeddings") or prefill_tokens + 1
    num_tokens = min(prefill_tokens, known - 1)
    rates = None if maker is None else _prefill_rates(trunk, maker, depth, num_tokens, max_seconds)
    return ArmCosts(
        arm=arm,
        head_bytes=weights,
        head_kv_bytes_per_token=head_kept.per_token,
        trunk_kv_bytes_per_token=trunk_kept.per_token,
        trunk_state_bytes=trunk_kept.per_text,
        context_tokens_lost=math.ceil(weights / trunk_kept.per_token) if trunk_kept.per_token else None,
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


def probe_caches(trunk: Trunk, maker: Drafting | None, depth: int) -> tuple[Kept, Kept]:
    """Run a short prompt and return the cache sizes of the trunk and of the drafter for one text."""
    batch = Batch(trunk, maker, BatchSize(1, capacity=PROBE_TOKENS, depth=depth, max_window=PROBE_TOKENS))
    prompt_BT = torch.zeros(1, PROBE_TOKENS - depth - 1, dtype=torch.long, device=trunk.lm_head_VD.device)
    prefill(batch, slice(0, 1), prompt_BT)
    drafter = batch.drafter
    return kept_of(batch.cache), kept_of(drafter.cache) if isinstance(drafter, _KEEPING) else Kept(0, 0)


def kept_of(cache: WindowCache) -> Kept:
    layers = [_layer_bytes(layer) for layer in cache.layers]
    return Kept(round(sum(grows for grows, _ in layers)), round(sum(fixed for _, fixed in layers)))


def _layer_bytes(layer: Any) -> tuple[float, float]:
    if isinstance(layer, RecurrentStore):
        state = sum(_size(part) for part in (layer.conv_BCW, layer.state_BHKV) if part is not None)
        beside = _placed_bytes(layer.placed(), layer.max_undecided) if isinstance(layer, NgramStore) else 0.0
        return 0.0, state + beside
    if not isinstance(layer, AttentionStore) or not layer.is_initialized:
        return 0.0, 0.0
    # In compressed layers, keys and values are one tensor.
    slots = [layer.keys] if layer.values is layer.keys else [layer.keys, layer.values]
    if isinstance(layer, IndexedStore) and layer.indexer_keys_BSX is not None:
        slots.append(layer.indexer_keys_BSX)
    per_slot = sum(map(_size, slots)) / layer.size
    grows, fixed = (per_slot, 0.0) if layer.sliding_window is None else (0.0, per_slot * layer.sliding_window)
    if isinstance(layer, CompressedStore):
        grows += sum(_size(one) / one.shape[1] for one in layer.entries_BEX.values()) / layer.group_size
        # Two groups of inputs: the one being filled, and the one before it, which is read too.
        fixed += sum(2 * layer.group_size * _size(one) / one.shape[1] for one in layer.inputs_BSX.values())
    if isinstance(layer, ConvolvedStore):
        fixed += _placed_bytes(layer.rings_BZC.values(), layer.max_undecided)
    if isinstance(layer, IndexedStore) and layer.inputs_BSX is not None and layer.pools_BP is not None:
        of_a_pool = sum(_size(one) / one.shape[1] for one in layer.pools_BP)
        grows += _size(layer.inputs_BSX) / layer.size + of_a_pool / layer.pools_BP.slots_BPN.shape[-1]
    return grows, fixed


def _placed_bytes(rings: Iterable[Tensor], max_undecided: int) -> float:
    """Return the bytes of ring buffers, without the slots that are reserved for undecided drafts."""
    return sum(_size(ring) * (1 - max_undecided / ring.shape[1]) for ring in rings)


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
