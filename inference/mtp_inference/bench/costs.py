"""Where a round's time goes, and how little it could be: the bytes that a round must read.

All pieces are timed alone and at one place, on rows out of use: a round works in fixed shapes, so that it costs the
same whatever the rows say. Pieces timed alone need not add up to the round; ``rest`` says by how much they miss it.

Shapes: B rows, T window tokens (K + 1), V vocabulary, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtp_inference.batch import Batch, RoundPlan
from mtp_inference.bench.clock import Piece, time_alone
from mtp_inference.bench.subject import Subject
from mtp_inference.cache import AttentionStore, WindowCache
from mtp_inference.capture import round_up
from mtp_inference.chooser import Chooser, Drafts
from mtp_inference.decoder import Needs, make_batch, rounded_capacity
from mtp_inference.draft import Drafter, Place
from mtp_inference.forward import PREFILL_CHUNK
from mtp_inference.head_drafter import ChainedDrafter, RecursiveDrafter
from mtp_inference.recurrent_cache import RecurrentStore
from mtp_inference.session import PENDING_PLACES
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk

HeadDrafter = RecursiveDrafter | ChainedDrafter
REPEATS = 20
"""Of every piece: they are short."""


class Reads(NamedTuple):
    """Bytes that one round reads at least."""

    trunk: int
    """Weights, once; neither the embedding, of which a few rows are read, nor the output matrix."""
    head: int
    """Weights, once for each draft."""
    lm_head: int
    """The output matrix: once to verify, once for each draft."""
    keys: int
    """Keys and values in use: the trunk's once, the head's once for each draft."""
    states: int
    """Recurrent and convolution states: read once and written once."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def bytes_read(
    trunk: Trunk, head: MtpHead | None, caches: tuple[WindowCache, WindowCache | None], plan: RoundPlan
) -> Reads:
    """Count what a round reads; activations are left out.

    Of a mixture of experts, as many experts count as uniform routing of the window's tokens would reach on average.

    Args:
        trunk: The trunk.
        head: The head; None where nothing is drafted.
        caches: The trunk's and the head's; their buffers are allocated.
        plan: Depth, and positions in use.
    """
    cache, head_cache = caches
    num_rows, depth = cache.num_rows, plan.depth
    output_VD = trunk.lm_head_VD
    embedding_VD = trunk.causal_lm.get_input_embeddings().weight
    left_out = {id(output_VD), id(embedding_VD)}
    own = [(name, one) for name, one in trunk.causal_lm.named_parameters() if id(one) not in left_out]
    reads = Reads(
        trunk=_weights(own, num_rows * (depth + 1), trunk.config),
        head=0,
        lm_head=_size(output_VD) * (1 + depth),
        keys=_keys(cache, plan.used),
        states=_states(cache),
    )
    if head is None or head_cache is None:
        return reads
    of_depths = [
        # The first call runs what was pending, the others one row each.
        _weights(head.module_for(k).named_parameters(), num_rows * (depth + 1 if k == 1 else 1), head.config)
        for k in range(1, depth + 1)
    ]
    return reads._replace(head=sum(of_depths), keys=reads.keys + depth * _keys(head_cache, plan.used))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _weights(parameters: Iterable[tuple[str, Tensor]], num_tokens: int, config: Any) -> int:
    total = 0.0
    for name, parameter in parameters:
        share = 1.0
        # Stacked experts: transformers keeps them as one tensor, expert by expert.
        if "experts" in name.split(".") and parameter.ndim == 3:
            share = 1 - (1 - config.num_experts_per_tok / len(parameter)) ** num_tokens
        total += share * _size(parameter)
    return round(total)


def _keys(cache: WindowCache, used: int) -> int:
    stores = [layer for layer in cache.layers if isinstance(layer, AttentionStore)]
    return sum((_size(store.keys) + _size(store.values)) // store.size * min(used, store.size) for store in stores)


def _states(cache: WindowCache) -> int:
    both = [(store.conv_BCW, store.state_BHKV) for store in cache.layers if isinstance(store, RecurrentStore)]
    return sum(2 * _size(part) for parts in both for part in parts if part is not None)


class Costs(NamedTuple):
    """A round, taken apart. Times in ms, each piece timed alone."""

    round_ms: float
    """The whole round, without the host."""
    plain_ms: float
    """A round without drafts, without the host."""
    verify_ms: float
    """The trunk and its output matrix over the window."""
    head_ms: float
    """All depths of the head, and choosing tokens from given logits."""
    lm_head_ms: float
    """The output matrix, once for each draft."""
    commit_ms: float
    """Acceptance, rollback and bookkeeping: a round with given drafts, less ``verify_ms``."""
    reads: Reads

    @property
    def rest_ms(self) -> float:
        """What the pieces leave of the round; below 0 where they cost more alone."""
        return self.round_ms - self.verify_ms - self.head_ms - self.lm_head_ms - self.commit_ms


def measure_costs(subject: Subject, num_rows: int, used: int, depth: int) -> Costs:
    """Take apart a round of a depth with ``used`` positions in use.

    Args:
        subject: Trunk and head.
        num_rows: B.
        used: Positions in use after the round.
        depth: K; at 0 the head has no part in it.
    """
    device = subject.trunk.lm_head_VD.device
    batch, drafter = idle_batch(subject, num_rows, used, depth)
    plan = RoundPlan(depth, used, depth + 1, PENDING_PLACES, None)
    pieces = _pieces(batch, drafter, as_run(plan, batch), as_run(dataclasses.replace(plan, depth=0), batch))
    seconds = time_alone(pieces, device, REPEATS)
    milliseconds = {name: 1000 * seconds[name] for name in pieces}
    head = subject.head if drafter is not None else None
    caches = (batch.cache, drafter.cache if drafter is not None else None)
    return Costs(
        round_ms=milliseconds["round"],
        plain_ms=milliseconds["plain"],
        verify_ms=milliseconds["verify"],
        head_ms=milliseconds.get("head", 0.0),
        lm_head_ms=milliseconds.get("lm_head", 0.0),
        commit_ms=milliseconds["given drafts"] - milliseconds["verify"],
        reads=bytes_read(subject.trunk, head, caches, plan),
    )


def as_run(plan: RoundPlan, batch: Batch) -> RoundPlan:
    """Return the plan as decoding has it: what a graph reads is rounded up, what must be read is not."""
    if batch.last_B.is_cuda:
        return round_up(plan, batch.cache.capacity)
    # Rows that stand at one place, known on the host, share a mask or need none.
    stand_together = plan.depth == 0 or batch.cache.num_rows == 1
    return dataclasses.replace(plan, start=plan.used - plan.depth - 1) if stand_together else plan


def idle_batch(subject: Subject, num_rows: int, used: int, depth: int) -> tuple[Batch, HeadDrafter | None]:
    """Return a batch whose buffers are allocated and whose rows are out of use, and its drafter."""
    trunk = subject.trunk
    device = trunk.lm_head_VD.device
    needs = Needs(
        num_rows=num_rows,
        capacity=rounded_capacity(used + depth + 1, device.type == "cuda"),
        max_window=PREFILL_CHUNK,
        depth=depth,
        num_stops=0,
        penalises=False,
    )
    batch = make_batch(trunk, subject.drafting, needs, "argmax", PREFILL_CHUNK)
    # What a head's maker made.
    drafter: Any = batch.drafter
    prompt_RT = torch.zeros(num_rows, 2, dtype=torch.long, device=device)
    room_R = torch.full((num_rows,), 2, device=device)
    batch.prefill(slice(0, num_rows), prompt_RT, room_R, prompt_RT[:, :0])
    batch.reset()
    return batch, drafter


def _pieces(batch: Batch, drafter: HeadDrafter | None, plan: RoundPlan, plain_plan: RoundPlan) -> dict[str, Piece]:
    trunk = batch.trunk
    weight_VD = trunk.lm_head_VD
    generator = torch.Generator().manual_seed(0)
    num_rows, num_tokens = batch.cache.num_rows, plan.depth + 1
    window_BT = torch.randint(len(weight_VD), (num_rows, num_tokens), generator=generator).to(weight_VD.device)
    # Other batches over the same buffers.
    parts = batch.chooser, batch.cache, batch.prefill_chunk
    given = Batch(trunk, _GivenDrafts(drafter, window_BT[:, 1:]), *parts, num_stops=0)
    plain = Batch(trunk, None, *parts, num_stops=0)
    pieces: dict[str, Piece] = {
        "round": lambda: batch.run_round(plan),
        "plain": lambda: plain.run_round(plain_plan),
        "verify": lambda: batch.run_window(plan, window_BT),
        "given drafts": lambda: given.run_round(plan),
    }
    if drafter is None:
        return pieces
    hidden_B1D = weight_VD.new_zeros(num_rows, 1, weight_VD.shape[1])
    logits_B1V = trunk.project(hidden_B1D)
    place = Place(plan.used, plan.pending, batch.last_B, batch.length_B, batch.cache)

    def head_alone() -> None:
        stock = drafter.logits
        drafter.logits = lambda _: logits_B1V
        drafter.draft(plan.depth, place, batch.chooser)
        drafter.logits = stock

    def lm_head_alone() -> None:
        for _ in range(plan.depth):
            drafter.logits(hidden_B1D)

    return pieces | {"head": head_alone, "lm_head": lm_head_alone}


class _GivenDrafts:
    """Stands in for the drafter, so that a round can be timed without it."""

    def __init__(self, drafter: Drafter | None, tokens_BK: Tensor) -> None:
        self.drafter = drafter
        self.tokens_BK = tokens_BK

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """See :class:`Drafter`; never asked."""

    def extend(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        """See :class:`Drafter`; this is a part of committing."""
        if self.drafter is not None:
            self.drafter.extend(hidden_BTD, tokens_BT, num_kept_B)

    def draft(self, depth: int, place: Place, chooser: Chooser) -> Drafts:
        """See :class:`Drafter`."""
        return Drafts(self.tokens_BK)

    def settle(self, place: Place) -> None:
        """See :class:`Drafter`; never asked."""
