"""The measurements: arms that decode the same prompts in turns, and the figures computed from their times.

An arm is our decoder at a depth, or transformers' own ``generate`` on the same trunk. Decoding is greedy and no token
ends a text, so all arms generate the same number of tokens.

The gain of drafts depends on how many are accepted; their cost does not. :class:`SetAcceptance` therefore measures with
any head, a random one too: it runs the head and replaces its drafts by right or wrong tokens.

Shapes: B rows of the batch, T tokens, S positions, K drafts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig

from mtp_inference.bench.clock import now
from mtp_inference.bench.round_costs import Costs, measure_costs
from mtp_inference.bench.subject import Subject
from mtp_inference.bench.texts import Group, Prompts
from mtp_inference.capture import release_memory
from mtp_inference.decoder import SpeculativeDecoder
from mtp_inference.drafters.drafter import Drafter, DrafterMaker, Place, Size
from mtp_inference.drafters.head_drafter import HeadDrafting
from mtp_inference.requests import GenerationResult, Request
from mtp_inference.sampling.chooser import Chooser, Drafts
from mtp_train.acceptance.counts import PromptCounts, tau
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from mtp_train.upstream.transformers_private import mtp_model_class

Texts = list[tuple[int, ...]]
Clock = Callable[[torch.device], float]
"""Returns a time in seconds: ``now`` or ``worked`` of ``bench/clock.py``."""


class Run(NamedTuple):
    """Times and texts of one group of prompts."""

    seconds_prefill: float
    """Seconds until the first token of every row is known."""
    seconds: float
    """Seconds in total."""
    texts: Texts
    """New tokens."""
    counts: tuple[PromptCounts, ...] = ()
    """Counts of drafts by prompt; empty for transformers, which does not return them."""

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(len(text) for text in self.texts)

    @property
    def decode_seconds(self) -> float:
        """Seconds after prefill."""
        return self.seconds - self.seconds_prefill

    @property
    def decode_tokens(self) -> int:
        """New tokens without the first of each row, which prefill gives."""
        return self.num_tokens - len(self.texts)

    @property
    def rounds(self) -> int:
        """Rounds of the batch: the largest number of any row."""
        return max((count.rounds for count in self.counts), default=0)


class Arm(Protocol):
    """A decoder to compare."""

    name: str
    depth: int | None
    """Drafts per round; None for transformers' arms."""

    def run(self, group: Group, new_tokens: int) -> Run:
        """Decode a group of prompts."""


class OurArm:
    """Our decoder at its own depth.

    Args:
        decoder: The decoder.
        clock: The clock.
    """

    name = "ours"

    def __init__(self, decoder: SpeculativeDecoder, clock: Clock = now) -> None:
        self.decoder = decoder
        self.clock = clock
        self.depth: int | None = decoder.depth

    @property
    def captured_rounds(self) -> int:
        """Number of CUDA graphs of rounds captured so far."""
        return self.decoder.captured_rounds

    def run(self, group: Group, new_tokens: int) -> Run:
        """See :class:`Arm`."""
        device = self.decoder.trunk.lm_head_VD.device
        requests = [Request(prompt_ids=ids, max_new_tokens=new_tokens) for ids in group]
        results: dict[int, GenerationResult] = {}
        waiting = set(range(len(group)))
        prefilled = started = self.clock(device)
        for chunk in self.decoder.decode_chunks(requests):
            # Prefill ends when every row has its first token.
            if chunk.index in waiting:
                waiting.discard(chunk.index)
                prefilled = self.clock(device)
            if chunk.result is not None:
                results[chunk.index] = chunk.result
        seconds = self.clock(device) - started
        ordered = [results[index] for index in range(len(group))]
        counts = tuple(result.counts(str(index), str(index)) for index, result in enumerate(ordered))
        return Run(prefilled - started, seconds, [result.token_ids for result in ordered], counts)


class TransformersArm:
    """transformers' ``generate`` on the trunk that our decoder runs.

    Its prefill is timed as a separate call for one token. With a head, transformers processes the prompt with the head
    in the first round; our decoder does so in prefill.

    Args:
        trunk: The trunk; its generation config is replaced.
        head: Weights to draft with (``use_mtp=True``), one draft per module; None for plain decoding.
        clock: The clock.
    """

    depth: int | None = None

    def __init__(self, trunk: Trunk, head: MtpHead | None, clock: Clock = now) -> None:
        self.clock = clock
        self.name = "transformers" if head is None else "transformers use_mtp"
        self.model = trunk.causal_lm
        self.device = trunk.lm_head_VD.device
        # generate would take stop tokens and sampling settings that ours leaves unset from the checkpoint's config.
        self.model.generation_config = GenerationConfig()
        self.drafter = None if head is None else their_head(trunk, head)

    @staticmethod
    def can_draft(trunk: Trunk) -> bool:
        """Whether transformers drafts with a head of this family, one text at a time."""
        return bool(trunk.family.serving["transformers"].supported)

    def run(self, group: Group, new_tokens: int) -> Run:
        """See :class:`Arm`."""
        prompt_BT = torch.tensor(group, device=self.device)
        started = self.clock(self.device)
        self._generate(prompt_BT, 1)
        prefilled = self.clock(self.device)
        output_BT = self._generate(prompt_BT, new_tokens)
        ended = self.clock(self.device)
        texts: Texts = [tuple(row) for row in output_BT[:, prompt_BT.shape[1] :].tolist()]
        return Run(prefilled - started, ended - prefilled, texts)

    def _generate(self, prompt_BT: Tensor, new_tokens: int) -> Tensor:
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            use_mtp=self.drafter is not None,
        )
        mask_BT = torch.ones_like(prompt_BT)
        with _reading_no_file(self.drafter):
            output: Tensor = self.model.generate(prompt_BT, attention_mask=mask_BT, generation_config=config)
        return output


def their_head(trunk: Trunk, head: MtpHead) -> Any:
    """Return transformers' own model of a head, with our head's weights.

    Build it from modules in memory: loading from files depends on layer numbers that transformers has only for released
    sizes.
    """
    names = {
        "embed_norm": "enorm",
        "hidden_norm": "hnorm",
        "proj": "eh_proj",
        "layer": "mtp_block",
        "final_norm": "post_norm",
    }
    weight = trunk.lm_head_VD
    with torch.device(weight.device):
        model = mtp_model_class()(trunk.causal_lm, len(head.blocks))
    state = {}
    for name, value in head.state_dict().items():
        _, module, part, *rest = name.split(".")
        state[".".join(["layers", module, names[part], *rest])] = value
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    # The embedding and the output matrix are the trunk's.
    own = [key for key in missing if key.startswith("layers.")]
    if own or unexpected:
        raise RuntimeError(f"transformers' head: {[*own, *unexpected]} do not fit ours; expected the same parts.")
    model.tie_with_main_model(trunk.causal_lm)
    return model.eval()


@contextmanager
def _reading_no_file(drafter: Any | None) -> Iterator[None]:
    """Make ``generate`` use a loaded head: it would read the head from files in every call, which takes time."""
    if drafter is None:
        yield
        return
    of_heads = mtp_model_class()
    stock = of_heads.__dict__["from_pretrained"]
    of_heads.from_pretrained = lambda *_unused, **_also_unused: drafter
    try:
        yield
    finally:
        of_heads.from_pretrained = stock


def identical(texts: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> int:
    """Count the texts that are the same, token for token."""
    return sum(one == other for one, other in zip(texts, others, strict=True))


class SetAcceptance(HeadDrafting):
    """Draft with a head like ``drafting``, so that every draft is right with a given probability.

    Whether a draft is right is decided once for each position of each row. The draft of a position is verified at most
    once after drafts that are all right, so rounds accept ``a + a^2 + ... + a^K`` drafts on average.

    Args:
        drafting: The maker whose drafters run, at their real cost. This maker has its head, so that rounds treat the
            head alike.
        chance: Probability a, 0 to 1; one for all rows, or one for each row.
        num_rows: B.
        num_positions: S.
        vocab_size: Vocabulary size of the trunk.
        device: Device of the trunk.
        seed: Seed of the decisions.
    """

    def __init__(
        self,
        drafting: HeadDrafting,
        chance: float | Sequence[float],
        *,
        num_rows: int,
        num_positions: int,
        vocab_size: int,
        device: torch.device,
        seed: int,
    ) -> None:
        super().__init__(drafting.head, drafting.draft_vocab_R)
        self.vocab_size = vocab_size
        generator = torch.Generator().manual_seed(seed)
        chance_B1 = torch.tensor(chance).reshape(-1, 1)
        is_right_BS = torch.rand(num_rows, num_positions, generator=generator) < chance_B1
        self.is_right_BS = is_right_BS.to(device)
        self.text_BS = torch.zeros(num_rows, num_positions, dtype=torch.long, device=device)

    def expect(self, texts: Sequence[Sequence[int]]) -> None:
        """Set the texts to decode next, prompts included: one for each row, in order."""
        # In place: captured rounds refer to the tensor by address.
        self.text_BS.copy_(torch.tensor(texts))

    def make(self, trunk: Trunk, size: Size, depth: int) -> Drafter:
        """See :class:`DrafterMaker`."""
        return _SetDrafter(self, super().make(trunk, size, depth))


class _SetDrafter:
    def __init__(self, maker: SetAcceptance, drafter: Drafter) -> None:
        self.maker = maker
        self.drafter = drafter
        self.reads_lengths = drafter.reads_lengths
        self.text_rows_B = torch.arange(len(maker.text_BS), device=maker.text_BS.device)
        """Row of each batch row in the maker's tensors."""

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """See :class:`Drafter`."""
        self.drafter.start(rows, hidden_RTD, prompt_RT, first_R)

    def extend(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        """See :class:`Drafter`."""
        self.drafter.extend(hidden_BTD, tokens_BT, num_kept_B)

    def draft(self, depth: int, place: Place, chooser: Chooser) -> Drafts:
        """See :class:`Drafter`."""
        self.drafter.draft(depth, place, chooser)
        maker = self.maker
        ahead_K = torch.arange(1, depth + 1, device=place.length_B.device)
        # A row whose text has ended keeps drafting; its drafts are ignored.
        places_BK = (place.length_B[:, None] + ahead_K).clamp(max=maker.text_BS.shape[1] - 1)
        rows_B1 = self.text_rows_B[: len(places_BK), None]
        right_BK = maker.text_BS[rows_B1, places_BK]
        is_right_BK = maker.is_right_BS[rows_B1, places_BK]
        return Drafts(torch.where(is_right_BK, right_BK, (right_BK + 1) % maker.vocab_size))

    def settle(self, place: Place) -> None:
        """See :class:`Drafter`."""
        self.drafter.settle(place)

    def keep_rows(self, rows_R: Tensor) -> None:
        """See :class:`Drafter`."""
        self.drafter.keep_rows(rows_R)
        self.text_rows_B = self.text_rows_B[rows_R]


Row = dict[str, Any]
"""One line of a table, ready for JSON."""
OnRun = Callable[[], None]


@dataclass(frozen=True)
class Plan:
    """Settings of a measurement."""

    depths: tuple[int, ...]
    batches: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    new_tokens: int
    repeats: int
    acceptance: float | None
    """Probability that a draft is right; None for the head's own drafts."""
    against_transformers: bool
    prefill: bool
    seed: int
    clock: Clock = now

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Pairs of batch size and prompt length."""
        return [(batch, length) for length in self.prompt_lengths for batch in self.batches]


def measure_decoding(
    subject: Subject,
    plan: Plan,
    prompts: Prompts,
    batch: int,
    length: int,
    on_run: OnRun,
    others: Sequence[Arm] = (),
) -> list[Row]:
    """Run every arm on prompts of one length, ``batch`` at a time; return a table row per arm.

    The arms take turns within every repeat, in another order each time. Figures are medians over the repeats.

    Args:
        subject: Trunk and head.
        plan: Settings of the measurement.
        prompts: Source of the prompts.
        batch: B.
        length: T.
        on_run: Called after each warm-up and each run of an arm.
        others: Arms of other decoders of the same model.
    """
    groups = prompts.groups(batch, length)
    drafting, texts = _drafting(subject, plan, groups)
    _free(subject)
    arms = _arms(subject, plan, drafting, batch) + list(others)

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
    add_paired_speedups(rows, [_decode_speeds(repeats) for repeats in taken], plain)
    arms.clear()
    _free(subject)
    return rows


def num_runs(plan: Plan, subject: Subject) -> int:
    """Return the total number of calls of ``on_run``, for a progress bar."""
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
    """Return the maker of drafters, and the texts that forced drafts need: prompt plus continuation, by group."""
    drafting = subject.drafting
    if drafting is None:
        return None, [[] for _ in groups]
    if plan.acceptance is None:
        return drafting, [[] for _ in groups]
    batch, length = len(groups[0]), len(groups[0][0])
    # Drafts may go past the limit.
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


def _arms(subject: Subject, plan: Plan, drafting: DrafterMaker | None, batch: int) -> list[Arm]:
    arms: list[Arm] = [
        _our_arm(subject, drafting if depth else None, depth, batch, plan.clock) for depth in plan.depths
    ]
    if plan.against_transformers:
        arms.append(TransformersArm(subject.trunk, None, plan.clock))
        if batch == 1 and subject.head is not None and TransformersArm.can_draft(subject.trunk):
            arms.append(TransformersArm(subject.trunk, subject.head, plan.clock))
    return arms


def _our_arm(subject: Subject, drafting: DrafterMaker | None, depth: int, batch: int, clock: Clock = now) -> OurArm:
    # One decoder per depth, so that each keeps its buffers and captured rounds between turns.
    decoder = SpeculativeDecoder(subject.trunk, drafting, depth, eos_ids=(), max_batch=batch, fuses=subject.fuses)
    return OurArm(decoder, clock)


def _warm_ups(subject: Subject) -> int:
    # On a GPU a kind of round runs uncaptured the first time, and is captured the second time.
    return 2 if subject.trunk.lm_head_VD.device.type == "cuda" else 1


def _in_turn(count: int, repeat: int) -> Iterable[int]:
    return [(index + repeat) % count for index in range(count)]


def _free(subject: Subject) -> None:
    gc.collect()
    if subject.trunk.lm_head_VD.device.type == "cuda":
        release_memory()


def _texts(runs: Sequence[Run]) -> Texts:
    return [text for run in runs for text in run.texts]


def _decode_seconds(repeats: Sequence[Sequence[Run]]) -> list[float]:
    return [sum(run.decode_seconds for run in runs) for runs in repeats]


def _decode_speeds(repeats: Sequence[Sequence[Run]]) -> list[float]:
    """Return the tokens per second of each repeat, prefill apart."""
    num_tokens = sum(run.decode_tokens for run in repeats[0])
    return [num_tokens / seconds for seconds in _decode_seconds(repeats)]


def _row(arm: Arm, repeats: Sequence[Sequence[Run]]) -> Row:
    """Return an arm's figures: sums over its groups, medians over the repeats."""
    counts = [count for run in repeats[0] for count in run.counts]
    decode_seconds = _decode_seconds(repeats)
    seconds = [sum(run.seconds for run in runs) for runs in repeats]
    first = repeats[0]
    rounds = sum(run.rounds for run in first)
    return {
        "arm": arm.name,
        "depth": arm.depth,
        "texts": len(_texts(first)),
        "tokens_per_second": median(_decode_speeds(repeats)),
        "tokens_per_second_by_repeat": _decode_speeds(repeats),
        "tokens_per_second_end_to_end": median(sum(run.num_tokens for run in first) / one for one in seconds),
        "prefill_ms": median(1000 * sum(run.seconds_prefill for run in runs) / len(runs) for runs in repeats),
        "tau": tau(counts) if counts else None,
        "round_ms": median(1000 * one / rounds for one in decode_seconds) if rounds else None,
        "captured_rounds": arm.captured_rounds if isinstance(arm, OurArm) else None,
    }


def compare(rows: Sequence[Row], texts: Sequence[Texts], plain: int | None) -> None:
    """Add the comparisons to the rows of one cell; a comparison with an arm that did not run is None.

    ``speedup`` is relative to our own plain decoding; ``over_transformers`` and ``over_transformers_mtp`` are relative
    to transformers' arms. ``identical_texts`` counts the texts that equal our plain decoding.
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


class PairedRatios(NamedTuple):
    """Ratios of two arms, one for each repeat in which both ran."""

    median: float
    least: float
    most: float


def paired_ratios(above: Sequence[float], below: Sequence[float]) -> PairedRatios:
    """Return the median and the range of the ratios of two arms, repeat by repeat.

    Arms of one repeat run shortly after each other, so a machine that slows down for a while changes both alike.
    """
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    return PairedRatios(median(ratios), min(ratios), max(ratios))


def add_paired_speedups(rows: Sequence[Row], speeds: Sequence[Sequence[float]], plain: int | None) -> None:
    """Add the speedup over our own plain decoding, paired by repeat: its median, and its range over the repeats.

    Args:
        rows: Rows of one cell; ``speedup``, the ratio of their medians, stays as it is.
        speeds: Tokens per second of each row in each repeat.
        plain: Index of plain decoding; None if it did not run, for which the speedups are None.
    """
    for row, own in zip(rows, speeds, strict=True):
        paired: PairedRatios | tuple[None, None, None] = (None, None, None)
        if plain is not None and row["depth"] is not None:
            paired = paired_ratios(own, speeds[plain])
        row["speedup_paired"], row["speedup_least"], row["speedup_most"] = paired


def _ratio(above: float, below: float | None) -> float | None:
    return above / below if below else None


def measure_rounds(subject: Subject, plan: Plan, rows: Sequence[Row], bandwidth: float, on_run: OnRun) -> list[Row]:
    """Time the parts of a round at every depth of a cell, half way through its texts, and compare with the roofline.

    Args:
        subject: Trunk and head.
        plan: Settings of the measurement.
        rows: Rows of the cell from :func:`measure_decoding`.
        bandwidth: Bytes per second of a copy.
        on_run: Called after each depth.
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
    """Return the parts of a round, the bytes that it reads, and the share of the roofline that decoding reaches.

    ``cost_ratio`` is the time of the round over the time of a plain round, both timed alone. ``speedup_share`` is the
    measured speedup over ``tau / cost_ratio``, the speedup that acceptance and cost allow. ``roofline_share`` is tokens
    per second over ``ideal_tokens_per_second``, at which a round takes as long as a copy of as many bytes.
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
    """Time prefill without and with the head, in turns, as calls for one token."""
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
