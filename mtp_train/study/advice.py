"""What to serve with, out of what was measured: the depth for each task, and the reply from which drafts pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from mtp_train.report.cells import Advice, ArmCosts, BreakEven, Cell

PROMPT_LENGTHS = (128, 512, 2048, 8192)
ENGINE_CAVEAT = (
    "Speeds and depths are the built-in decoder's. Acceptance carries over to an engine that wires the head alike; "
    "what a round costs does not, so try one draft more and one less there before settling."
)
Flags = Callable[[int], Mapping[str, str]]
"""From drafts per round, 0 for none, to the exact flags of each engine."""


class _Compared(NamedTuple):
    """A cell with drafts whose speed was compared with plain decoding, and the figures that it surely has."""

    cell: Cell
    speedup: float
    tau: float
    break_even_tau: float
    round_seconds: float

    @property
    def pays_beyond_doubt(self) -> bool:
        """See :func:`advise`."""
        interval = self.cell.tau_ci95
        return self.speedup > 1.0 and interval is not None and interval[0] > self.break_even_tau

    @property
    def figures(self) -> str:
        """What decides, in words."""
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
    """Return the depth to serve with, for each task (all of them together too) and temperature.

    It is the depth with the best measured speedup among those that pay beyond doubt, and 0 where none does. A depth
    pays beyond doubt where it was faster, prefill included, and its rounds commit more tokens than they cost plain
    ones also at the lower bound of tau's interval: ``tau_ci95[0] > break_even_tau``. Round times are means
    over all rounds of a cell, taken in turns with plain decoding, and vary little; what could have come out otherwise
    is which prompts were asked, and that interval says how much. A single prompt proves nothing.

    Only depths that were measured count, on prompts as they are, or on the shortest contexts where these were not.

    Args:
        cells: The report's; those of other arms are passed over.
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
    """Return from which output length on drafts pay, for every arm, task, temperature and prompt length.

    A prompt of P tokens and a reply of n take ``P / prefill rate + (n - 1) * seconds of a token``, with drafts and
    without: prefill makes the first token. A token takes ``round_seconds / tau`` with drafts and ``round_seconds /
    break_even_tau`` without. Of prefill only the difference counts, which the head makes: rows of the prompt need no
    more of it than keys and values, so that it grows with P as measured at ``prefill_tokens`` (of a head with several
    modules, which attend in prefill, a little faster). Speeds are taken as the same at every n; of prompts that were
    decoded together, all times are one text's share. Where several contexts were measured, speeds are those of the one
    nearest to P, at the depth of the best speedup there.

    Args:
        cells: The report's.
        costs: Of its arms; an arm whose prefill was not timed gets no rows.
        prompt_lengths: P.
    """
    rates = {one.arm: one for one in costs}
    rows = []
    for (arm, task, temperature), group in _groups(cells).items():
        if arm not in rates:
            continue
        for prompt_tokens in prompt_lengths:
            best = _fastest(_nearest_context(group, prompt_tokens))
            extra = _extra_prefill_seconds(rates[arm], prompt_tokens)
            if extra is not None:
                rows.append(
                    BreakEven(
                        arm=arm,
                        task=task,
                        temperature=temperature,
                        depth=best.cell.depth,
                        prompt_tokens=prompt_tokens,
                        output_tokens=_output_tokens(best, extra),
                    )
                )
    return tuple(rows)


def _groups(cells: Iterable[Cell]) -> dict[tuple[str, str, float], list[_Compared]]:
    """Return what was compared, by arm, task and temperature."""
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


def _fastest(group: _Group) -> _Compared:
    return max(group, key=lambda one: one.speedup)


def _advice(arm: str, task: str, temperature: float, group: _Group, flags: Flags) -> Advice:
    paying = [one for one in group if one.pays_beyond_doubt]
    best = _fastest(paying or group)
    depths = ", ".join(str(depth) for depth in sorted({one.cell.depth for one in group}))
    if paying:
        verdict = f"Of the depths measured ({depths}), {best.cell.depth} is the fastest of those that pay"
    else:
        verdict = f"None of the depths measured ({depths}) is shown to pay; {best.cell.depth} comes nearest"
    depth = best.cell.depth if paying else 0
    return Advice(
        arm=arm,
        task=task,
        temperature=temperature,
        depth=depth,
        speedup=best.speedup if paying else 1.0,
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
