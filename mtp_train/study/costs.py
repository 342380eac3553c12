"""What a head costs beside what it gains: memory for its weights and keys, and time in prefill.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_inference.assistant_drafter import AssistantDrafting
from mtp_inference.cache import AttentionStore, CompressedStore, ConvolvedStore, IndexedStore, WindowCache
from mtp_inference.decoder import Needs, make_batch
from mtp_inference.draft import Drafter, DrafterMaker
from mtp_inference.head_drafter import ChainedDrafter, ChainedDraftsDrafter, RecursiveDrafter
from mtp_inference.ngrams import NgramStore
from mtp_inference.other_drafters import ModelDrafter, ModelDrafting
from mtp_inference.pooled import KeyPools
from mtp_inference.recurrent_cache import RecurrentStore
from mtp_inference.requests import MAX_DEPTH
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk
from mtp_train.report.cells import ArmCosts
from mtp_train.study.latency import OnRun, in_turns

_KEEPING = (RecursiveDrafter, ChainedDrafter, ChainedDraftsDrafter, ModelDrafter)
"""What drafts from a cache of its own."""
PROBE_TOKENS = 16
"""More than a head has modules: every layer has kept something then."""


class Kept(NamedTuple):
    """What a cache keeps of one text, in bytes."""

    per_token: int
    """That grows with the text."""
    per_text: int
    """Whatever its length: recurrent states, inputs of convolutions and compressors, sliding windows once full."""


def head_costs(
    arm: str,
    trunk: Trunk,
    drafting: MtpHead | DrafterMaker | None,
    *,
    prefill_tokens: int = 2048,
    repeats: int = 3,
    max_seconds: float = 60.0,
    on_run: OnRun | None = None,
) -> ArmCosts:
    """Count what an arm keeps in memory, and time prefill with what drafts and without.

    Bytes are those of the decoder's own caches, in the dtype that runs: of latent attention the latent, of a sliding
    layer its window. Keys of a head with several modules are those of all modules that draft. A draft model counts as a
    head; an n-gram drafter has neither weights nor keys.

    Args:
        arm: Name of the arm.
        trunk: The trunk.
        drafting: What drafts, None for plain decoding.
        prefill_tokens: Length of the prompt, of random tokens; less where the model knows fewer positions.
        repeats: Prompts that count, at most.
        max_seconds: What the timing should take; each is timed once in any case.
        on_run: Called ``2 * repeats`` times where something drafts, for a progress bar.
    """
    maker: DrafterMaker | None = HeadDrafting(drafting) if isinstance(drafting, MtpHead) else drafting
    depth = _deepest(maker)
    trunk_kept, head_kept = probe_caches(trunk, maker, depth)
    weights = own_weight_bytes(trunk, maker)
    known = trunk.config.to_dict().get("max_position_embeddings") or prefill_tokens + 1
    num_tokens = min(prefill_tokens, known - 1)
    rates = None if maker is None else _prefill_rates(trunk, maker, depth, num_tokens, repeats, max_seconds, on_run)
    return ArmCosts(
        arm=arm,
        head_bytes=weights,
        head_kv_bytes_per_token=head_kept.per_token,
        trunk_kv_bytes_per_token=trunk_kept.per_token,
        trunk_state_bytes=trunk_kept.per_text,
        context_tokens_lost=math.ceil(weights / trunk_kept.per_token) if trunk_kept.per_token else None,
        prefill_ratio=None if rates is None else rates[1] / rates[0],
        prefill_tokens=None if rates is None else num_tokens,
        plain_prefill_tokens_per_second=None if rates is None else rates[0],
    )


def own_weight_bytes(trunk: Trunk, maker: DrafterMaker | None) -> int:
    """Return the bytes of what drafts, each tensor once, without those that are the trunk's."""
    shared = {tensor.data_ptr() for tensor in trunk.causal_lm.state_dict().values()}
    own = {tensor.data_ptr(): _size(tensor) for tensor in _tensors(maker) if tensor.data_ptr() not in shared}
    if isinstance(maker, HeadDrafting) and maker.draft_vocab_R is not None:
        # A reduced vocabulary copies its rows of the output matrix.
        weight_VD = trunk.lm_head_VD
        return sum(own.values()) + len(maker.draft_vocab_R) * weight_VD.shape[1] * weight_VD.element_size()
    return sum(own.values())


def _tensors(maker: DrafterMaker | None) -> Iterable[Tensor]:
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


def _deepest(maker: DrafterMaker | None) -> int:
    """Return a depth at which every module drafts that ever does, 0 for plain decoding."""
    if isinstance(maker, HeadDrafting) and maker.head.unroll in ("chained", "chained_drafts"):
        return min(len(maker.head.blocks), MAX_DEPTH)
    return 0 if maker is None else 1


def probe_caches(trunk: Trunk, maker: DrafterMaker | None, depth: int) -> tuple[Kept, Kept]:
    """Run a short prompt; return what the caches of the trunk and of what drafts keep of a text."""
    needs = Needs(1, PROBE_TOKENS, PROBE_TOKENS, depth, num_stops=0, penalises=False)
    batch = make_batch(trunk, maker, needs, "argmax", PROBE_TOKENS)
    prompt_BT = torch.zeros(1, PROBE_TOKENS - depth - 1, dtype=torch.long, device=trunk.lm_head_VD.device)
    batch.prefill(slice(0, 1), prompt_BT, torch.ones_like(prompt_BT[:, 0]), prompt_BT[:, :0])
    cache = _cache_of(batch.drafter)
    return kept_of(batch.cache), Kept(0, 0) if cache is None else kept_of(cache)


def _cache_of(drafter: Drafter | None) -> WindowCache | None:
    return drafter.cache if isinstance(drafter, _KEEPING) else None


def kept_of(cache: WindowCache) -> Kept:
    """Return what a cache of one row keeps of a text."""
    layers = [_layer_bytes(layer) for layer in cache.layers]
    return Kept(round(sum(grows for grows, _ in layers)), round(sum(fixed for _, fixed in layers)))


def _layer_bytes(layer: Any) -> tuple[float, float]:
    """Return bytes per token and bytes per text of one layer of one row."""
    if isinstance(layer, RecurrentStore):
        state = sum(_size(part) for part in (layer.conv_BCW, layer.state_BHKV) if part is not None)
        beside = _placed_bytes(layer.placed(), layer.max_undecided) if isinstance(layer, NgramStore) else 0.0
        return 0.0, state + beside
    if not isinstance(layer, AttentionStore) or not layer.is_initialized:
        return 0.0, 0.0
    # Of compressed layers the keys are the values too.
    slots = [layer.keys] if layer.values is layer.keys else [layer.keys, layer.values]
    if isinstance(layer, IndexedStore) and layer.indexer_keys_BSX is not None:
        slots.append(layer.indexer_keys_BSX)
    per_slot = sum(map(_size, slots)) / layer.size
    grows, fixed = (per_slot, 0.0) if layer.sliding_window is None else (0.0, per_slot * layer.sliding_window)
    if isinstance(layer, CompressedStore):
        grows += sum(_size(one) / one.shape[1] for one in layer.entries_BEX.values()) / layer.group_size
        # The group that fills, and the one before, which is read too.
        fixed += sum(2 * layer.group_size * _size(one) / one.shape[1] for one in layer.inputs_BSX.values())
    if isinstance(layer, ConvolvedStore):
        fixed += _placed_bytes(layer.rings.values(), layer.max_undecided)
    if isinstance(layer, KeyPools) and layer.inputs_BSX is not None and layer.pools is not None:
        of_a_pool = sum(_size(one) / one.shape[1] for one in layer.pools)
        grows += _size(layer.inputs_BSX) / layer.size + of_a_pool / layer.pools.slots_BPN.shape[-1]
    return grows, fixed


def _placed_bytes(rings: Iterable[Tensor], max_undecided: int) -> float:
    """Return the bytes of what is kept by place, without the places for drafts that may be rejected."""
    return sum(_size(ring) * (1 - max_undecided / ring.shape[1]) for ring in rings)


def _prefill_rates(
    trunk: Trunk,
    maker: DrafterMaker,
    depth: int,
    num_tokens: int,
    repeats: int,
    max_seconds: float,
    on_run: OnRun | None,
) -> tuple[float, float]:
    """Return prompt tokens per second without what drafts and with it: medians."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(trunk.lm_head_VD.shape[0], (num_tokens,), generator=generator).tolist()
    decoders = [
        SpeculativeDecoder(trunk, None, 0, eos_ids=(), max_batch=1),
        SpeculativeDecoder(trunk, maker, depth, eos_ids=(), max_batch=1),
    ]
    taken = in_turns(decoders, [[prompt]] * repeats, [1], max_seconds=max_seconds, on_run=on_run or _unseen)
    without, with_head = (num_tokens / median(seconds for (seconds,) in runs) for runs in taken)
    return without, with_head


def _unseen() -> None:
    """Stand in for a progress bar."""


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
