"""Assemble a study's report: comparisons of arms, break-even lengths, advice, settings."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple

import torch
import transformers

from mtp_train.acceptance.intervals import holm, tau_difference
from mtp_train.data.frequency import Counts
from mtp_train.evaluation.cells import ALL_TASKS, Advice, ArmComparison, ArmCosts, BreakEven, Cell, Latency, StudyReport
from mtp_train.evaluation.draft_vocab import CountedText, DraftHead, suggest_draft_vocab
from mtp_train.evaluation.entropy import EntropySums, fine_edges, overlap_difference
from mtp_train.evaluation.grid import Grid
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import ArmResult, DraftVocab, recommended
from mtp_train.evaluation.served import Served
from mtp_train.evaluation.statistics import (
    MeasuredArm,
    arm_result,
    checked_records,
    entropy_bins,
    lossless,
    make_cells,
    position_bins,
)

LEVEL = 0.05
"""Probability of any false finding among all comparisons of a report."""

Sums = dict[tuple[str, float, int | None], EntropySums]


def compare_arms(arms: Sequence[MeasuredArm]) -> tuple[ArmComparison, ...]:
    """Return every pair of arms at every common setting with drafts, all tasks first, then each task.

    Arms are compared on the prompts that both decoded.
    """
    sums = {(arm.name, *key): EntropySums.of(rows, fine_edges()) for arm in arms for key, rows in arm.dense.items()}
    found = [
        comparison
        for first, second in combinations(arms, 2)
        for setting in first.decoded
        if setting.depth and setting in second.decoded
        for comparison in _compare(first, second, setting, sums)
    ]
    return _corrected(found)


def _compare(first: MeasuredArm, second: MeasuredArm, setting: Setting, sums: Sums) -> list[ArmComparison]:
    others = {one.prompt_id: one.counts(setting.depth) for one in second.decoded[setting]}
    pairs = [
        (one.task, one.counts(setting.depth), others[one.prompt_id])
        for one in first.decoded[setting]
        if one.prompt_id in others
    ]
    tasks = dict.fromkeys(task for task, _, _ in pairs)
    place = setting.temperature, setting.context_tokens
    dense = sums.get((first.name, *place)), sums.get((second.name, *place))
    compared = []
    for task in [None, *tasks] if pairs else []:
        chosen = [(mine, theirs) for its_task, mine, theirs in pairs if task in (None, its_task)]
        delta = tau_difference([mine for mine, _ in chosen], [theirs for _, theirs in chosen])
        at_equal = None if dense[0] is None or dense[1] is None else overlap_difference(dense[0], dense[1], task)
        compared.append(
            ArmComparison(
                first=first.name,
                second=second.name,
                task=ALL_TASKS if task is None else task,
                temperature=setting.temperature,
                context_tokens=setting.context_tokens,
                depth=setting.depth,
                rule=setting.rule,
                delta_tau=delta.value,
                delta_tau_ci95=delta.ci95,
                groups=delta.groups,
                p_value=delta.p_value,
                differs=False,
                same_trunk=first.trunk == second.trunk,
                delta_overlap_at_equal_entropy=None if at_equal is None else at_equal.value,
                delta_overlap_at_equal_entropy_ci95=None if at_equal is None else at_equal.ci95,
            )
        )
    return compared


def _corrected(found: Sequence[ArmComparison]) -> tuple[ArmComparison, ...]:
    """Set ``differs`` by Holm's correction, separately for all tasks together and for single tasks."""
    differs = [False] * len(found)
    for of_all in (True, False):
        family = [index for index, one in enumerate(found) if (one.task == ALL_TASKS) == of_all]
        falls = holm([found[index].p_value for index in family], LEVEL / 2)
        for index, fell in zip(family, falls, strict=True):
            differs[index] = fell
    return tuple(replace(one, differs=differs[index]) for index, one in enumerate(found))


PROMPT_LENGTHS = (128, 512, 2048, 8192)
Flags = Callable[[int], Mapping[str, str]]
"""From drafts per round, 0 for none, to the exact flags of each engine."""


class _Compared(NamedTuple):
    """A cell with drafts and the figures of its comparison with plain decoding, none of which is None."""

    cell: Cell
    speedup: float
    tau: float
    break_even_tau: float
    round_seconds: float

    @property
    def figures(self) -> str:
        """Describe the figures that decide."""
        spread = "one prompt, which shows no spread"
        if self.cell.tau_ci95 is not None:
            low, high = self.cell.tau_ci95
            spread = f"95 % interval {low:.2f} to {high:.2f}"
        drafts = "" if self.cell.rule == "greedy" else f", drafts {self.cell.rule}"
        return (
            f"{self.speedup:.2f} times the speed of plain decoding{drafts}, where a round commits {self.tau:.2f} "
            f"tokens ({spread}) and costs as much as {self.break_even_tau:.2f} plain ones"
        )


_Group = Sequence[_Compared]


def advise(cells: Iterable[Cell], arm: str, flags: Flags) -> tuple[Advice, ...]:
    """Return the depth to serve with, for each task, all tasks together, and temperature.

    The result is :func:`recommended`: the depth with the best measured speedup among those that are shown to pay
    (``acceptance.speed.pays``), and 0 where none is. Drafts and plain decoding take turns, so that a machine that slows
    down slows both. A single prompt has no interval and is never shown to pay.

    Only measured depths count, on prompts as they are, or on the shortest contexts where no such prompts were measured.

    Args:
        cells: The report's cells; cells of other arms are ignored.
        arm: Name of the arm.
        flags: For example ``partial(engine_commands, trunk.family.engines, path)``.
    """
    return tuple(
        _advice(arm, task, temperature, _shortest_context(group), flags)
        for (_, task, temperature), group in _groups(cell for cell in cells if cell.arm == arm).items()
    )


def break_even(
    cells: Iterable[Cell], costs: Iterable[ArmCosts], prompt_lengths: Sequence[int] = PROMPT_LENGTHS
) -> tuple[BreakEven, ...]:
    """Return the output length from which drafts pay, for every arm, task, temperature and prompt length.

    A prompt of P tokens with a reply of n tokens takes ``P / prefill rate + (n - 1) * seconds per token``, with and
    without drafts: prefill makes the first token. A token takes ``round_seconds / tau`` with drafts and
    ``round_seconds / break_even_tau`` without. The prefill times differ by the head's work alone. A head computes only
    keys and values for the rows of the prompt, so that the difference grows linearly in P, from the value measured at
    ``prefill_tokens``. (Heads with several modules attend in prefill, and it grows a little faster.) Speeds are assumed
    to be the same at every n. For prompts decoded in a batch, every time is one text's share. Where several contexts
    were measured, speeds are taken from the context nearest to P, at the depth that :func:`recommended` chooses there.
    Where it chooses none, no length is stated, at the depth that comes nearest.

    Args:
        cells: The report's cells.
        costs: Costs of its arms; an arm whose prefill was not timed gets no rows.
        prompt_lengths: The values of P.
    """
    rates = {one.arm: one for one in costs}
    rows = []
    for (arm, task, temperature), group in _groups(cells).items():
        if arm not in rates:
            continue
        for prompt_tokens in prompt_lengths:
            best, is_paying = _chosen(_nearest_context(group, prompt_tokens))
            extra = _extra_prefill_seconds(rates[arm], prompt_tokens)
            if extra is not None:
                rows.append(
                    BreakEven(
                        arm=arm,
                        task=task,
                        temperature=temperature,
                        depth=best.cell.depth,
                        prompt_tokens=prompt_tokens,
                        output_tokens=_output_tokens(best, extra) if is_paying else None,
                    )
                )
    return tuple(rows)


def _groups(cells: Iterable[Cell]) -> dict[tuple[str, str, float], list[_Compared]]:
    """Return the cells that have all figures of a comparison, by arm, task and temperature."""
    groups: dict[tuple[str, str, float], list[_Compared]] = {}
    for cell in cells:
        speedup, tau, needed, seconds = cell.speedup, cell.tau, cell.break_even_tau, cell.round_seconds
        if cell.depth and speedup is not None and tau is not None and needed is not None and seconds is not None:
            group = groups.setdefault((cell.arm, cell.task, cell.temperature), [])
            group.append(_Compared(cell, speedup, tau, needed, seconds))
    return groups


def _shortest_context(group: _Group) -> list[_Compared]:
    shortest = min((one.cell.context_tokens for one in group), key=lambda tokens: tokens or 0)
    return [one for one in group if one.cell.context_tokens == shortest]


def _nearest_context(group: _Group, prompt_tokens: int) -> list[_Compared]:
    nearest = min(group, key=lambda one: abs(math.log(prompt_tokens / one.cell.mean_prompt_tokens))).cell
    return [one for one in group if one.cell.context_tokens == nearest.context_tokens]


def _chosen(group: _Group) -> tuple[_Compared, bool]:
    """Return the cell to serve and True; where none is shown to pay, the fastest one and False."""
    best = recommended(one.cell for one in group)
    if best is None:
        return max(group, key=lambda one: one.speedup), False
    return next(one for one in group if one.cell is best), True


def _advice(arm: str, task: str, temperature: float, group: _Group, flags: Flags) -> Advice:
    best, is_paying = _chosen(group)
    depths = ", ".join(str(depth) for depth in sorted({one.cell.depth for one in group}))
    if is_paying:
        verdict = f"Of the depths measured ({depths}), {best.cell.depth} is the fastest of those that pay"
    else:
        verdict = f"None of the depths measured ({depths}) is shown to pay; {best.cell.depth} comes nearest"
    depth = best.cell.depth if is_paying else 0
    return Advice(
        arm=arm,
        task=task,
        temperature=temperature,
        depth=depth,
        speedup=best.speedup if is_paying else 1.0,
        reason=f"{verdict}: {best.figures}.",
        flags=flags(depth),
    )


def _extra_prefill_seconds(costs: ArmCosts, prompt_tokens: int) -> float | None:
    rate, ratio = costs.plain_prefill_tokens_per_second, costs.prefill_ratio
    if rate is None or ratio is None:
        return None
    return prompt_tokens / rate * (1.0 / ratio - 1.0)


def _output_tokens(best: _Compared, extra_prefill_seconds: float) -> int | None:
    saved_per_token = best.round_seconds / best.break_even_tau - best.round_seconds / best.tau
    if saved_per_token <= 0.0:
        return None
    if extra_prefill_seconds <= 0.0:
        return 0
    return 1 + math.ceil(extra_prefill_seconds / saved_per_token)


@dataclass(frozen=True)
class VocabBasis:
    """What a suggestion of a draft vocabulary for an arm is computed from, besides records."""

    head: DraftHead
    eos_ids: frozenset[int]
    counts_V: Counts | None
    """Counts of the text that the head was trained on; None where they are not known."""


@dataclass
class Measured:
    """The measurements of all arms."""

    arms: list[MeasuredArm] = field(default_factory=list)
    costs: list[ArmCosts] = field(default_factory=list)
    latency: list[Latency] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Dtype and device."""
    flags: dict[str, Flags] = field(default_factory=dict)
    """Engine flags by arm; arms that no engine serves are missing."""
    vocab: dict[str, VocabBasis] = field(default_factory=dict)
    """By arm; arms without a head, and those whose times were not measured, are missing."""
    served: Served | None = None
    """Measurements of a server, its answers compared with the trunk's; None where that trunk was not measured."""


def assemble(found: Measured, grid: Grid, title: str) -> StudyReport:
    """Compute every figure of a report."""
    drafted = [arm for arm in found.arms if arm.head is not None]
    cells = tuple(cell for arm in found.arms for cell in make_cells(arm))
    own = [cell for cell in cells if cell.context_tokens == grid.headline.context_tokens]
    return StudyReport(
        title=title,
        arms=_headline(found.arms, grid),
        cells=cells,
        comparisons=compare_arms(drafted),
        positions=tuple(one for arm in drafted for one in position_bins(arm)),
        entropy=tuple(one for arm in drafted for one in entropy_bins(arm)),
        costs=tuple(found.costs),
        latency=tuple(found.latency),
        break_even=break_even(own, found.costs),
        advice=tuple(one for arm in drafted for one in advise(own, arm.name, found.flags.get(arm.name, _no_flags))),
        lossless=lossless([record for arm in found.arms for record in checked_records([arm], arm.settings)]),
        gate=None,
        settings=_settings(found, grid),
        draft_vocab=_draft_vocab(found, grid.headline),
    )


def _draft_vocab(found: Measured, setting: Setting) -> tuple[DraftVocab, ...]:
    """Return a suggestion for every arm with a head whose times were measured."""
    suggested = []
    for arm in found.arms:
        basis = found.vocab.get(arm.name)
        if basis is None:
            continue
        if basis.counts_V is not None:
            groups = {one.group for one in arm.decoded[setting]}
            text = CountedText.apart(basis.counts_V, "the head's training text", groups, basis.eos_ids)
        else:
            # Plain decoding at every temperature. With another context a prompt has nearly the same answer.
            plain = [at for at in arm.decoded if not at.depth and at.context_tokens == setting.context_tokens]
            answers = [one for at in plain for one in arm.decoded[at]]
            text = CountedText.across_groups(answers, basis.head.vocab_size, basis.eos_ids)
        suggested.append(suggest_draft_vocab(basis.head, arm, setting, text))
    return tuple(suggested)


def _no_flags(depth: int) -> dict[str, str]:
    return {}


def _headline(arms: Sequence[MeasuredArm], grid: Grid) -> dict[str, ArmResult]:
    headline = grid.headline
    return {arm.name: arm_result(arm, arm.own(headline)) for arm in arms}


def _settings(found: Measured, grid: Grid) -> dict[str, Any]:
    """Return how everything was measured; figures measured with other settings are not comparable."""
    shown = asdict(grid)
    headline = grid.headline
    return {
        **{key: list(value) if isinstance(value, tuple) else value for key, value in shown.items()},
        "contexts": ["own" if one is None else one for one in grid.contexts],
        "headline": {key: getattr(headline, key) for key in ("temperature", "context_tokens", "depth", "rule")},
        **found.facts,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
    }
