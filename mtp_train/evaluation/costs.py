"""Measure the costs of a head: memory for its weights and KV cache, time in prefill, and the time of whole replies.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_inference.batch import choose_widening
from mtp_inference.cache.model_cache import AttentionStore, CompressedStore, ConvolvedStore, IndexedStore, WindowCache
from mtp_inference.cache.ngrams import NgramStore
from mtp_inference.cache.pooled import KeyPools
from mtp_inference.cache.recurrent import RecurrentStore
from mtp_inference.decoder import Needs, layers_on_cpu, make_batch
from mtp_inference.drafters.assistant_drafter import AssistantDrafting
from mtp_inference.drafters.drafter import Drafter, DrafterMaker
from mtp_inference.drafters.head_drafter import ChainedDrafter, ChainedDraftsDrafter, RecursiveDrafter
from mtp_inference.drafters.other_drafters import ModelDrafter, ModelDrafting
from mtp_inference.requests import MAX_DEPTH, Request
from mtp_train.evaluation.cells import ArmCosts, Latency
from mtp_train.evaluation.draft_vocab import DraftHead, sizes_for
from mtp_train.families.drafts.record import parts_of
from mtp_train.head_kinds import find_head_kind
from mtp_train.heads.build import HeadPlan
from mtp_train.heads.module import MtpHead, OutputRows
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.widen import widened

WARM_UP_TOKENS = 8
OnRun = Callable[[], None]
Group = Sequence[Sequence[int]]
"""Token ids of prompts that are decoded in one batch."""


def now(device: torch.device) -> float:
    """Synchronise with the device, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure_latency(
    arm: str,
    trunk: Trunk,
    drafting: MtpHead | DrafterMaker,
    *,
    depth: int,
    prompts: Sequence[Sequence[int]],
    output_tokens: Sequence[int] = (50, 150, 300),
    batches: Sequence[int] = (1, 2, 4, 8, 16),
    repeats: int,
    max_seconds: float = 60.0,
    on_run: OnRun,
) -> tuple[Latency, ...]:
    """Time greedy replies of fixed lengths, prefill included, with drafts and without.

    Both run in the same decoder, in turns. No token ends a reply. Every repeat continues the next prompts of the list,
    since acceptance varies more between prompts than time varies between runs. Figures are medians over repeats.

    One run of the longest reply also gives the shorter ones: a length is reached when every text of the batch has that
    many tokens.

    Args:
        arm: Name of the arm.
        trunk: The trunk.
        drafting: The head, or the maker of another drafter.
        depth: Drafts per round.
        prompts: Prompts to continue; batch sizes above their number are left out.
        output_tokens: Lengths of replies, 1 or more.
        batches: Batch sizes, each of different prompts.
        repeats: The most repeats of a batch size.
        max_seconds: Time limit for all batch sizes together. A batch size is not repeated where that would exceed its
            share of the time; it is measured at least once.
        on_run: Called ``2 * repeats`` times for each batch size that the prompts fill, for a progress bar.
    """
    lengths = sorted(set(output_tokens))
    fitting = [batch for batch in batches if batch <= len(prompts)]
    end = time.perf_counter() + max_seconds
    rows = []
    for number, batch in enumerate(fitting):
        groups = [_group(prompts, batch, repeat) for repeat in range(repeats)]
        decoders = (
            SpeculativeDecoder(trunk, None, 0, eos_ids=(), max_batch=batch),
            SpeculativeDecoder(trunk, drafting, depth, eos_ids=(), max_batch=batch),
        )
        share = (end - time.perf_counter()) / (len(fitting) - number)
        plain, drafted = in_turns(decoders, groups, lengths, max_seconds=share, on_run=on_run)
        used = [len(ids) for group in groups[: len(plain)] for ids in group]
        rows += [
            Latency(
                arm=arm,
                batch=batch,
                prompt_tokens=round(fmean(used)),
                output_tokens=length,
                seconds=median(run[place] for run in drafted),
                plain_seconds=median(run[place] for run in plain),
            )
            for place, length in enumerate(lengths)
        ]
    return tuple(rows)


def in_turns(
    decoders: Sequence[SpeculativeDecoder],
    groups: Sequence[Group],
    lengths: Sequence[int],
    *,
    max_seconds: float,
    on_run: OnRun,
) -> list[list[list[float]]]:
    """Time every decoder on every group, in turns that start with another decoder for each group.

    Args:
        decoders: Decoders of one trunk.
        groups: Groups of one size.
        lengths: Numbers of new tokens, ascending.
        max_seconds: Time limit: a group that would end later is left out, except for the first one.
        on_run: Called for each decoder and group, including those left out.

    Returns:
        By decoder, by group that was decoded: the seconds until each length was reached.
    """
    begun = time.perf_counter()
    room = max(len(ids) for group in groups for ids in group) + lengths[-1]
    on_gpu = decoders[0].trunk.lm_head_VD.device.type == "cuda"
    for decoder in decoders:
        # The first call includes lazy initialisation; on a GPU, rounds are captured at their second use.
        for _ in range(2 if on_gpu else 1):
            reply_seconds(decoder, groups[0], lengths if on_gpu else [min(WARM_UP_TOKENS, lengths[-1])], room)
    taken: list[list[list[float]]] = [[] for _ in decoders]
    for turn, group in enumerate(groups):
        num_done = len(taken[0])
        is_late = num_done > 0 and (time.perf_counter() - begun) * (num_done + 1) / num_done > max_seconds
        for place in range(len(decoders)):
            index = (place + turn) % len(decoders)
            if not is_late:
                taken[index].append(reply_seconds(decoders[index], group, lengths, room))
            on_run()
    return taken


def reply_seconds(decoder: SpeculativeDecoder, group: Group, lengths: Sequence[int], room: int) -> list[float]:
    """Return the seconds until every text of a group has each number of new tokens.

    Args:
        decoder: The decoder to time, made without EOS ids.
        group: Prompts that fill its batch.
        lengths: Numbers of new tokens, ascending.
        room: Length limit of a text, prompt included: the same for all groups, so that they share buffers and captured
            rounds.
    """
    stream = decoder.decode_chunks([Request(prompt_ids=ids, max_new_tokens=room - len(ids)) for ids in group])
    have = [0] * len(group)
    reached: list[float] = []
    started = now(decoder.trunk.lm_head_VD.device)
    for chunk in stream:
        have[chunk.index] += len(chunk.token_ids)
        # The tokens are on the host by now. A device synchronisation here would delay the round in progress.
        seconds = time.perf_counter() - started
        reached += [seconds for length in lengths[len(reached) :] if min(have) >= length]
        if len(reached) == len(lengths):
            break
    return reached


def _group(prompts: Sequence[Sequence[int]], batch: int, repeat: int) -> Group:
    return [prompts[(repeat * batch + place) % len(prompts)] for place in range(batch)]


_KEEPING = (RecursiveDrafter, ChainedDrafter, ChainedDraftsDrafter, ModelDrafter)
"""Drafters with a KV cache of their own."""
PROBE_TOKENS = 16
"""Length of the probe: longer than any head has modules, so that every layer of the cache holds something."""


class Kept(NamedTuple):
    """Size of a cache for one text, in bytes."""

    per_token: int
    """Bytes that grow with the length of the text."""
    per_text: int
    """Bytes that do not: recurrent states, inputs of convolutions and compressors, full sliding windows."""


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
    """Return the memory of an arm's weights and caches, and the ratio of prefill speed with its drafter and without.

    Bytes are counted in the decoder's caches, in their dtype: the latent for latent attention, the window for a sliding
    layer. For a head with several modules, the KV caches of all drafting modules count. A draft model counts as a head;
    an n-gram drafter has neither weights nor keys.

    Args:
        arm: Name of the arm.
        trunk: The trunk.
        drafting: The head, or the maker of another drafter; None for plain decoding.
        prefill_tokens: Length of the prompt of random tokens; limited by the model's ``max_position_embeddings``.
        repeats: The most timed prompts.
        max_seconds: Time limit; one prompt is timed at least.
        on_run: Called ``2 * repeats`` times where the arm drafts, for a progress bar.
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
    """Return the bytes of a drafter's weights, each tensor once, without tensors shared with the trunk."""
    shared = {tensor.data_ptr() for tensor in trunk.causal_lm.state_dict().values()}
    own = {tensor.data_ptr(): _size(tensor) for tensor in _tensors(maker) if tensor.data_ptr() not in shared}
    if isinstance(maker, HeadDrafting) and maker.draft_vocab_R is not None:
        # A reduced draft vocabulary holds a copy of its rows of the output matrix.
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
    """Return the smallest depth at which every module of the drafter is used; 0 for plain decoding."""
    if isinstance(maker, HeadDrafting) and maker.head.unroll in ("chained", "chained_drafts"):
        return min(len(maker.head.blocks), MAX_DEPTH)
    return 0 if maker is None else 1


def probe_caches(trunk: Trunk, maker: DrafterMaker | None, depth: int) -> tuple[Kept, Kept]:
    """Run a short prompt and return the cache sizes of the trunk and of the drafter for one text."""
    needs = Needs(1, PROBE_TOKENS, PROBE_TOKENS, depth, num_stops=0, penalises=False)
    batch = make_batch(trunk, maker, needs, "argmax", PROBE_TOKENS)
    prompt_BT = torch.zeros(1, PROBE_TOKENS - depth - 1, dtype=torch.long, device=trunk.lm_head_VD.device)
    batch.prefill(slice(0, 1), prompt_BT, torch.ones_like(prompt_BT[:, 0]), prompt_BT[:, :0])
    cache = _cache_of(batch.drafter)
    return kept_of(batch.cache), Kept(0, 0) if cache is None else kept_of(cache)


def _cache_of(drafter: Drafter | None) -> WindowCache | None:
    return drafter.cache if isinstance(drafter, _KEEPING) else None


def kept_of(cache: WindowCache) -> Kept:
    """Return the size of a cache with one row."""
    layers = [_layer_bytes(layer) for layer in cache.layers]
    return Kept(round(sum(grows for grows, _ in layers)), round(sum(fixed for _, fixed in layers)))


def _layer_bytes(layer: Any) -> tuple[float, float]:
    """Return bytes per token and bytes per text of one layer with one row."""
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
        fixed += _placed_bytes(layer.rings.values(), layer.max_undecided)
    if isinstance(layer, KeyPools) and layer.inputs_BSX is not None and layer.pools is not None:
        of_a_pool = sum(_size(one) / one.shape[1] for one in layer.pools)
        grows += _size(layer.inputs_BSX) / layer.size + of_a_pool / layer.pools.slots_BPN.shape[-1]
    return grows, fixed


def _placed_bytes(rings: Iterable[Tensor], max_undecided: int) -> float:
    """Return the bytes of ring buffers, without the slots that are reserved for undecided drafts."""
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
    """Return the median prompt tokens per second without the drafter and with it."""
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
    """Do nothing: the default for ``on_run``."""


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


OUTPUT_REPEATS, OUTPUT_ROUNDS = 5, 3
"""Turns that the output matrix is timed in, after one more, and plain rounds of each."""


def draft_head(trunk: Trunk, maker: HeadDrafting, plan: HeadPlan, prompts: Group) -> DraftHead:
    """Return what a suggestion of a draft vocabulary needs, and time the output matrix of a draft.

    Args:
        trunk: The trunk.
        maker: The head.
        plan: The plan that the head was built from.
        prompts: As many prompts as the measured rounds had rows.
    """
    vocab_size, num_drafted = len(trunk.lm_head_VD), maker.draft_vocab_R
    own_output = maker.head.module_for(1).lm_head is not None
    is_fixed = own_output or num_drafted is not None
    kind = find_head_kind(plan.family.kind)
    reads = kind.draft_parts is not None and parts_of(kind).format.draft_vocab
    return DraftHead(
        vocab_size=vocab_size,
        num_drafted=None if num_drafted is None else len(num_drafted),
        own_output=own_output,
        readers=tuple(name for name, one in plan.family.serving.items() if one.supported) if reads else (),
        output_times={} if is_fixed else output_times(trunk, maker, sizes_for(vocab_size), prompts),
    )


def output_times(trunk: Trunk, maker: HeadDrafting, sizes: Sequence[int], prompts: Group) -> dict[int, float]:
    """Time the output matrix of one draft, whole and with fewer rows, as a round multiplies with it.

    It takes turns with plain rounds, whose time is the unit: a busy machine slows both down. On a GPU launches count
    too, so that parts of the matrix seem a little slower than in a captured round.

    Returns:
        Times by number of rows; empty if there are no sizes.
    """
    if not sizes:
        return {}
    weight_VD, batch = trunk.lm_head_VD, len(prompts)
    hidden_B1D = weight_VD.new_zeros(batch, 1, weight_VD.shape[1])
    pieces: dict[int, Callable[[], object]] = {len(weight_VD): partial(trunk.project, hidden_B1D)}
    for size in sizes:
        # Which rows does not matter for the time.
        rows = OutputRows(weight_VD[:size].detach(), torch.arange(size), len(weight_VD))
        pieces[size] = partial(rows, hidden_B1D)
    plain, cpu_layers = SpeculativeDecoder(trunk, None, 0, eos_ids=(), max_batch=batch), layers_on_cpu(trunk, maker)
    taken: dict[int, list[float]] = {size: [] for size in pieces}
    for _ in range(OUTPUT_REPEATS + 1):
        unit = _plain_round_seconds(plain, prompts)
        with torch.inference_mode(), ExitStack() as stack:
            if choose_widening(trunk, batch).rounds:
                stack.enter_context(widened(trunk))
            stack.enter_context(cpu_layers.used())
            for size, piece in pieces.items():
                started = now(weight_VD.device)
                piece()
                taken[size].append((now(weight_VD.device) - started) / unit)
    return {size: median(times[1:]) for size, times in taken.items()}


def _plain_round_seconds(decoder: SpeculativeDecoder, prompts: Group) -> float:
    results = decoder.decode([Request(prompt_ids=ids, max_new_tokens=1 + OUTPUT_ROUNDS) for ids in prompts])
    # Prompts of other lengths are prefilled one after the other; rounds begin after the last one.
    return min(one.seconds_decode for one in results) / OUTPUT_ROUNDS
