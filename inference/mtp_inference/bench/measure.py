"""The measurements: which arms run on which prompts, in turns, and what is made of their times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mtp_inference.bench.acceptance import SetAcceptance
from mtp_inference.bench.arms import Arm, OurArm, Run, Texts, TransformersArm, identical
from mtp_inference.bench.costs import Costs, measure_costs
from mtp_inference.bench.prompts import Group, Prompts
from mtp_inference.bench.subject import Subject
from mtp_inference.capture import release_memory
from mtp_inference.decoder import SpeculativeDecoder
from mtp_inference.draft import DrafterMaker
from mtp_train.acceptance import tau

Row = dict[str, Any]
"""One line of a table, ready for JSON."""
OnRun = Callable[[], None]


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    depths: tuple[int, ...]
    batches: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    new_tokens: int
    repeats: int
    acceptance: float | None
    """Chance that a draft is right; None for the head's own drafts."""
    against_transformers: bool
    prefill: bool
    seed: int

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Batches and prompt lengths."""
        return [(batch, length) for length in self.prompt_lengths for batch in self.batches]


def measure_decoding(
    subject: Subject, plan: Plan, prompts: Prompts, batch: int, length: int, on_run: OnRun
) -> list[Row]:
    """Run every arm on prompts of one length, ``batch`` at a time; return a row for each.

    The arms take turns within every repeat, in another order each time. Figures are medians over the repeats.
    """
    groups = prompts.groups(batch, length)
    drafting, texts = _drafting(subject, plan, groups)
    _free(subject)
    arms: list[Arm] = [_our_arm(subject, drafting if depth else None, depth, batch) for depth in plan.depths]
    if plan.against_transformers:
        arms.append(TransformersArm(subject.trunk, None))
        if batch == 1 and subject.head is not None and TransformersArm.can_draft(subject.trunk):
            arms.append(TransformersArm(subject.trunk, subject.head))

    def run_groups(arm: Arm, some: Sequence[Group]) -> list[Run]:
        runs = []
        for group, expected in zip(some, texts, strict=False):
            if isinstance(drafting, SetAcceptance):
                drafting.expect(expected)
            runs.append(arm.run(group, plan.new_tokens))
        return runs

    for arm in arms:
        for _ in range(_warm_ups(subject)):
            run_groups(arm, groups[:1])
        on_run()
    taken: list[list[list[Run]]] = [[] for _ in arms]
    for repeat in range(plan.repeats):
        for index in _in_turn(len(arms), repeat):
            taken[index].append(run_groups(arms[index], groups))
            on_run()
    head = {"batch": batch, "prompt_tokens": length, "new_tokens": plan.new_tokens}
    rows = [head | _row(arm, repeats) for arm, repeats in zip(arms, taken, strict=True)]
    plain = next((index for index, arm in enumerate(arms) if arm.depth == 0), None)
    compare(rows, [_texts(repeats[0]) for repeats in taken], plain)
    arms.clear()
    _free(subject)
    return rows


def num_runs(plan: Plan, subject: Subject) -> int:
    """Return how often ``on_run`` is called in all, for a progress bar."""
    with_head = TransformersArm.can_draft(subject.trunk) and subject.head is not None
    total = 0
    for batch, _ in plan.cells:
        theirs = (1 + (with_head and batch == 1)) * plan.against_transformers
        total += (len(plan.depths) + theirs) * (plan.repeats + 1) + len(plan.depths)
        total += 2 * plan.prefill * (plan.repeats + 1)
    return total


def _drafting(
    subject: Subject, plan: Plan, groups: Sequence[Group]
) -> tuple[DrafterMaker | None, list[list[list[int]]]]:
    """Return what drafts, and the texts that it must know: prompts and continuations, group by group."""
    drafting = subject.drafting
    if drafting is None:
        return None, [[] for _ in groups]
    if plan.acceptance is None:
        return drafting, [[] for _ in groups]
    batch, length = len(groups[0]), len(groups[0][0])
    # A draft may lie past the limit.
    ahead = plan.new_tokens + max(plan.depths) + 1
    plain = _our_arm(subject, None, 0, batch)
    continued = [plain.run(group, ahead).texts for group in groups]
    texts = [
        [[*prompt, *new] for prompt, new in zip(group, some, strict=True)]
        for group, some in zip(groups, continued, strict=True)
    ]
    weight_VD = subject.trunk.lm_head_VD
    forced = SetAcceptance(
        drafting,
        plan.acceptance,
        num_rows=batch,
        num_positions=length + ahead,
        vocab_size=weight_VD.shape[0],
        device=weight_VD.device,
        seed=plan.seed,
    )
    return forced, texts


def _our_arm(subject: Subject, drafting: DrafterMaker | None, depth: int, batch: int) -> OurArm:
    # A decoder for each depth: each keeps its buffers and captured rounds while the others have their turn.
    return OurArm(SpeculativeDecoder(subject.trunk, drafting, depth, eos_ids=(), max_batch=batch))


def _warm_ups(subject: Subject) -> int:
    # On a GPU a kind of round runs as it is when it first comes, and is captured when it comes again.
    return 2 if subject.trunk.lm_head_VD.device.type == "cuda" else 1


def _in_turn(count: int, repeat: int) -> Iterable[int]:
    return [(index + repeat) % count for index in range(count)]


def _free(subject: Subject) -> None:
    gc.collect()
    if subject.trunk.lm_head_VD.device.type == "cuda":
        release_memory()


def _texts(runs: Sequence[Run]) -> Texts:
    return [text for run in runs for text in run.texts]


def _row(arm: Arm, repeats: Sequence[Sequence[Run]]) -> Row:
    """Return an arm's figures: sums over its groups, medians over the repeats."""
    counts = [count for run in repeats[0] for count in run.counts]
    decode_seconds = [sum(run.decode_seconds for run in runs) for runs in repeats]
    seconds = [sum(run.seconds for run in runs) for runs in repeats]
    first = repeats[0]
    rounds = sum(run.rounds for run in first)
    return {
        "arm": arm.name,
        "depth": arm.depth,
        "texts": len(_texts(first)),
        "tokens_per_second": median(sum(run.decode_tokens for run in first) / one for one in decode_seconds),
        "tokens_per_second_end_to_end": median(sum(run.num_tokens for run in first) / one for one in seconds),
        "prefill_ms": median(1000 * sum(run.seconds_prefill for run in runs) / len(runs) for runs in repeats),
        "tau": tau(counts) if counts else None,
        "round_ms": median(1000 * one / rounds for one in decode_seconds) if rounds else None,
        "captured_rounds": arm.captured_rounds if isinstance(arm, OurArm) else None,
    }


def compare(rows: Sequence[Row], texts: Sequence[Texts], plain: int | None) -> None:
    """Add to the rows of one cell what only a comparison says, None where there is nothing to compare with.

    ``speedup`` is over our own plain decoding; ``over_transformers`` and ``over_transformers_mtp`` over transformers'.
    ``identical_texts`` counts the texts that equal those of our plain decoding.
    """
    theirs = {row["arm"]: row["tokens_per_second"] for row in rows if row["depth"] is None}
    base = None if plain is None else rows[plain]["tokens_per_second"]
    for row, own in zip(rows, texts, strict=True):
        ours = row["depth"] is not None
        speed = row["tokens_per_second"]
        row["speedup"] = _ratio(speed, base) if ours else None
        row["over_transformers"] = _ratio(speed, theirs.get("transformers")) if ours else None
        row["over_transformers_mtp"] = _ratio(speed, theirs.get("transformers use_mtp")) if ours else None
        row["identical_texts"] = None if plain is None else identical(own, texts[plain])


def _ratio(above: float, below: float | None) -> float | None:
    return above / below if below else None


def measure_rounds(subject: Subject, plan: Plan, rows: Sequence[Row], bandwidth: float, on_run: OnRun) -> list[Row]:
    """Take apart a round of every depth of a cell, half way through its texts, and set it against the roofline.

    Args:
        subject: Trunk and head.
        plan: What is measured.
        rows: What :func:`measure_decoding` returned for the cell.
        bandwidth: Bytes per second of a copy.
        on_run: Called for each depth.
    """
    found = []
    for row in rows:
        if row["depth"] is not None:
            used = row["prompt_tokens"] + plan.new_tokens // 2 + row["depth"] + 1
            found.append(cost_row(row, measure_costs(subject, row["batch"], used, row["depth"]), bandwidth))
            _free(subject)
            on_run()
    return found


def cost_row(row: Row, costs: Costs, bandwidth: float) -> Row:
    """Return a round's pieces, what it reads, and how much of the roofline decoding reaches.

    ``cost_ratio`` is how many plain rounds it costs, both timed alone. ``speedup_share`` is the speedup over what
    acceptance and that cost allow, ``tau / cost_ratio``. ``roofline_share`` is tokens per second over
    ``ideal_tokens_per_second``, which are had where a round takes as long as a copy takes to move as many bytes.
    """
    ideal_seconds = costs.reads.total / bandwidth
    ideal = row["batch"] * row["tau"] / ideal_seconds
    ratio = costs.round_ms / costs.plain_ms
    return {
        "batch": row["batch"],
        "prompt_tokens": row["prompt_tokens"],
        "depth": row["depth"],
        "verify_ms": costs.verify_ms,
        "head_ms": costs.head_ms,
        "lm_head_ms": costs.lm_head_ms,
        "commit_ms": costs.commit_ms,
        "rest_ms": costs.rest_ms,
        "round_alone_ms": costs.round_ms,
        "round_ms": row["round_ms"],
        "bytes_read": {**costs.reads._asdict(), "total": costs.reads.total},
        "ideal_round_ms": 1000 * ideal_seconds,
        "ideal_tokens_per_second": ideal,
        "roofline_share": row["tokens_per_second"] / ideal,
        "cost_ratio": ratio,
        "speedup_share": row["speedup"] * ratio / row["tau"] if row["speedup"] is not None else None,
    }


def measure_prefill(subject: Subject, plan: Plan, prompts: Prompts, batch: int, length: int, on_run: OnRun) -> Row:
    """Time prefill without the head and with it, in turns: a call for one token."""
    group = prompts.groups(batch, length)[0]
    depth = max(plan.depths)
    arms = [_our_arm(subject, None, 0, batch), _our_arm(subject, subject.drafting, depth, batch)]
    taken: list[list[float]] = [[], []]
    for repeat in range(plan.repeats + 1):
        for index in _in_turn(2, repeat):
            seconds = arms[index].run(group, 1).seconds
            if repeat:
                taken[index].append(seconds)
            on_run()
    arms.clear()
    _free(subject)
    without, with_head = (batch * length / median(seconds) for seconds in taken)
    return {
        "batch": batch,
        "prompt_tokens": length,
        "depth": depth,
        "tokens_per_second_without_head": without,
        "tokens_per_second_with_head": with_head,
        "ratio": with_head / without,
    }
