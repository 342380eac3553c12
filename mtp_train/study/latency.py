"""How long a reply of a length takes with drafts and without, by how many are decoded together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median

from mtp_inference import SpeculativeDecoder
from mtp_inference.bench.clock import now
from mtp_inference.draft import DrafterMaker
from mtp_inference.requests import Request
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk
from mtp_train.report.cells import Latency

WARM_UP_TOKENS = 8
OnRun = Callable[[], None]
Group = Sequence[Sequence[int]]
"""Prompts that are decoded together."""


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
    """Time greedy replies of exactly so many tokens, prefill included, with drafts and without.

    Both go through the same decoder and take turns. No token ends a reply. Every repeat continues the next prompts of
    the list, as acceptance differs more from prompt to prompt than times do from run to run; figures are medians.

    One run of the longest reply gives the shorter ones too: a length has been reached when every text of the batch has
    so many tokens, and until then the run is the same.

    Args:
        arm: Name of the arm.
        trunk: The trunk.
        drafting: What drafts.
        depth: Drafts per round.
        prompts: What is continued; a batch that they do not fill is left out.
        output_tokens: Lengths of replies, 1 or more.
        batches: How many different prompts are decoded together.
        repeats: Times that count, at most.
        max_seconds: What all of it should take. A batch size is not repeated where that would take more than its
            share; it is measured once in any case.
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
    """Let every decoder continue every group; they take turns, in another order for each group.

    Args:
        decoders: Decoders of one trunk.
        groups: Groups of one size.
        lengths: New tokens, ascending.
        max_seconds: No further group is begun that would end later; the first one is continued in any case.
        on_run: Called for each decoder and group, those left out too.

    Returns:
        For each decoder, for each group that was continued, the seconds until each length was reached.
    """
    begun = time.perf_counter()
    room = max(len(ids) for group in groups for ids in group) + lengths[-1]
    on_gpu = decoders[0].trunk.lm_head_VD.device.type == "cuda"
    for decoder in decoders:
        # The first call pays for lazy initialisation; on a GPU rounds are captured when they come again.
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
    """Return the seconds until every text of a group had so many new tokens.

    Args:
        decoder: Whose own depth is measured; it knows no token that ends a text.
        group: Prompts that fill its batch.
        lengths: New tokens, ascending.
        room: Tokens that a text may reach, prompt included: the same for all groups, so that buffers and captured
            rounds serve them all.
    """
    stream = decoder.stream([Request(prompt_ids=ids, max_new_tokens=room - len(ids)) for ids in group])
    have = [0] * len(group)
    reached: list[float] = []
    started = now(decoder.trunk.lm_head_VD.device)
    for chunk in stream:
        have[chunk.index] += len(chunk.token_ids)
        # The host knows the tokens now; waiting for the device would hold up the round that is under way.
        seconds = time.perf_counter() - started
        reached += [seconds for length in lengths[len(reached) :] if min(have) >= length]
        if len(reached) == len(lengths):
            break
    return reached


def _group(prompts: Sequence[Sequence[int]], batch: int, repeat: int) -> Group:
    return [prompts[(repeat * batch + place) % len(prompts)] for place in range(batch)]
