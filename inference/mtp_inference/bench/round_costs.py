"""Measure the parts of a round's time, and count the bytes that a round has to read, which bound it from below.

Each part is timed alone, at one position, on inactive rows. A round works in fixed shapes, so its cost does not depend
on the rows' tokens. The parts need not add up to the round; ``rest`` is the difference.

Shapes: B rows, T window tokens (K + 1), V vocabulary, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtp_inference.batch import Batch, RoundPlan
from mtp_inference.bench.clock import Piece, time_alone
from mtp_inference.bench.subject import Subject
from mtp_inference.cache.model_cache import AttentionStore, WindowCache
from mtp_inference.cache.recurrent import RecurrentStore
from mtp_inference.capture import round_up
from mtp_inference.decoder import Needs, fused_kernels, layers_on_cpu, make_batch, rounded_capacity
from mtp_inference.drafters.drafter import Drafter, Place
from mtp_inference.drafters.head_drafter import ChainedDrafter, RecursiveDrafter
from mtp_inference.forward import PREFILL_CHUNK
from mtp_inference.sampling.chooser import Chooser, Drafts
from mtp_inference.session import PENDING_PLACES
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk

HeadDrafter = RecursiveDrafter | ChainedDrafter
REPEATS = 20
"""Number of timed repeats of each piece, as pieces are short."""


class Reads(NamedTuple):
    """Smallest number of bytes that one round reads."""

    trunk: int
    """Weights, once, without the output matrix and without the embedding, of which only a few rows are read."""
    head: int
    """Weights, once for each draft."""
    lm_head: int
    """The output matrix: once to verify, and once for each draft."""
    keys: int
    """Keys and values in use: once for the trunk, and once for each draft for the head."""
    states: int
    """Recurrent and convolution states, read once and written once."""

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return sum(self)


def bytes_read(
    trunk: Trunk, head: MtpHead | None, caches: tuple[WindowCache, WindowCache | None], plan: RoundPlan
) -> Reads:
    """Count the bytes that a round reads, without activations.

    For a mixture of experts, the expected number of experts under uniform routing of the window's tokens is counted.

    Args:
        trunk: The trunk.
        head: The head; None for plain decoding.
        caches: The caches of the trunk and of the head, with allocated buffers.
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
        # The first call runs the pending rows, the others one row each.
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
        # transformers stacks the weights of all experts in one 3-D tensor.
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
    """Costs of the parts of a round, in ms, each part timed alone."""

    round_ms: float
    """The whole round, without the host."""
    plain_ms: float
    """A round without drafts, without the host."""
    verify_ms: float
    """The trunk and its output matrix over the window."""
    head_ms: float
    """All depths of the head, with the choice of tokens from given logits."""
    lm_head_ms: float
    """The output matrix, once for each draft."""
    commit_ms: float
    """Acceptance, rollback and bookkeeping: a round with given drafts, less ``verify_ms``."""
    reads: Reads

    @property
    def rest_ms(self) -> float:
        """Time of the round minus its parts; negative if the parts take longer alone."""
        return self.round_ms - self.verify_ms - self.head_ms - self.lm_head_ms - self.commit_ms


def measure_costs(subject: Subject, num_rows: int, used: int, depth: int) -> Costs:
    """Time the parts of a round.

    Args:
        subject: Trunk and head.
        num_rows: B.
        used: Positions in use after the round.
        depth: K; at 0 the head is not used.
    """
    device = subject.trunk.lm_head_VD.device
    batch, drafter = idle_batch(subject, num_rows, used, depth)
    plan = RoundPlan(depth, used, depth + 1, PENDING_PLACES, None)
    plans = as_run(plan, batch), as_run(dataclasses.replace(plan, depth=0), batch)
    pieces = _pieces(batch, drafter, *plans, position=used - depth - 1)
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
    """Return the plan as decoding runs it: rounded up for a graph, with a known start on other devices if possible."""
    if batch.last_B.is_cuda:
        return round_up(plan, batch.cache.capacity, batch.reads_lengths)
    # Rows at one position that is known on the host share a mask or need none.
    stand_together = plan.depth == 0 or batch.cache.num_rows == 1
    return dataclasses.replace(plan, start=plan.used - plan.depth - 1) if stand_together else plan


def idle_batch(subject: Subject, num_rows: int, used: int, depth: int) -> tuple[Batch, HeadDrafter | None]:
    """Return a batch with allocated buffers and inactive rows, and its drafter; ``used`` as for :func:`measure_costs`.

    A round leaves inactive rows at position 0: time it with :func:`at_position`.
    """
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
    cpu_layers = layers_on_cpu(trunk, subject.drafting)
    fused = fused_kernels(trunk, subject.drafting) if subject.fuses else None
    batch = make_batch(trunk, subject.drafting, needs, "argmax", PREFILL_CHUNK, cpu_layers, fused)
    # Any: HeadDrafting builds a HeadDrafter, which the protocol's type does not show.
    drafter: Any = batch.drafter
    prompt_RT = torch.zeros(num_rows, 2, dtype=torch.long, device=device)
    room_R = torch.full((num_rows,), 2, device=device)
    batch.prefill(slice(0, num_rows), prompt_RT, room_R, prompt_RT[:, :0])
    batch.reset()
    if drafter is not None:
        drafter.pending.first_B.fill_(used - depth - 1)
    return batch, drafter


def at_position(batch: Batch, position: int, piece: Piece) -> Piece:
    """Return a piece of work that moves the rows to a position first, as attention reads only the keys before it."""

    def moved() -> None:
        batch.length_B.fill_(position)
        piece()

    return moved


def _pieces(
    batch: Batch, drafter: HeadDrafter | None, plan: RoundPlan, plain_plan: RoundPlan, position: int
) -> dict[str, Piece]:
    trunk = batch.trunk
    weight_VD = trunk.lm_head_VD
    generator = torch.Generator().manual_seed(0)
    num_rows, num_tokens = batch.cache.num_rows, plan.depth + 1
    window_BT = torch.randint(len(weight_VD), (num_rows, num_tokens), generator=generator).to(weight_VD.device)
    # Further batches that share the buffers.
    parts = batch.chooser, batch.cache, batch.prefill_chunk
    given = Batch(trunk, _GivenDrafts(drafter, window_BT[:, 1:]), *parts, num_stops=0, fused=batch.fused)
    plain = Batch(trunk, None, *parts, num_stops=0, fused=batch.fused)
    pieces: dict[str, Piece] = {
        "round": at_position(batch, position, lambda: batch.run_round(plan)),
        "plain": at_position(plain, position, lambda: plain.run_round(plain_plan)),
        "verify": at_position(batch, position, lambda: batch.run_window(plan, window_BT)),
        "given drafts": at_position(given, position, lambda: given.run_round(plan)),
    }
    if drafter is None:
        return pieces
    hidden_B1D = weight_VD.new_zeros(num_rows, 1, weight_VD.shape[1])
    logits_B1V = trunk.project(hidden_B1D)

    def head_alone() -> None:
        stock = drafter.logits
        drafter.logits = lambda _: logits_B1V
        with nullcontext() if batch.fused is None else batch.fused.used():
            drafter.draft(plan.depth, batch.place(plan), batch.chooser)
        drafter.logits = stock

    def lm_head_alone() -> None:
        for _ in range(plan.depth):
            drafter.logits(hidden_B1D)

    return pieces | {"head": head_alone, "lm_head": lm_head_alone}


class _GivenDrafts:
    """Return given drafts, to time a round without the drafter."""

    reads_lengths = True

    def __init__(self, drafter: Drafter | None, tokens_BK: Tensor) -> None:
        self.drafter = drafter
        self.tokens_BK = tokens_BK

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """See :class:`Drafter`; never called."""

    def extend(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        """See :class:`Drafter`; counts as part of the commit."""
        if self.drafter is not None:
            self.drafter.extend(hidden_BTD, tokens_BT, num_kept_B)

    def draft(self, depth: int, place: Place, chooser: Chooser) -> Drafts:
        """See :class:`Drafter`."""
        return Drafts(self.tokens_BK)

    def settle(self, place: Place) -> None:
        """See :class:`Drafter`; never called."""

    def keep_rows(self, rows_R: Tensor) -> None:
        """See :class:`Drafter`; never called."""
