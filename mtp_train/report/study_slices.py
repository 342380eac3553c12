"""What is shown of a grid: the headline setting, and one line through it along each axis.

A full grid has thousands of cells; all of them are in ``acceptance.csv``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from mtp_train.report.cells import ALL_TASKS, ArmComparison, Cell, StudyReport
from mtp_train.study.records import Rule, Setting

RULES = ("greedy", "sampled", "argmax")
"""In the order of choice where a temperature has several; rules that only a server knows come last."""


@dataclass(frozen=True)
class Slices:
    """A report by the axes of its grid; rows of arms and tasks keep the report's order.

    Attributes:
        headline: The setting of ``report.arms``; None where nothing drafted.
        arms: Arms that draft.
    """

    report: StudyReport
    headline: Setting | None
    arms: tuple[str, ...]
    tasks: tuple[str, ...]
    cells: dict[tuple[str, str, Setting], Cell]

    def drafting(self, task: str, setting: Setting) -> dict[str, Cell]:
        """Return the cells of the arms that draft, by arm; arms that lack the setting are missing."""
        found = {arm: self.cells.get((arm, task, setting)) for arm in self.arms}
        return {arm: cell for arm, cell in found.items() if cell is not None}

    def pooled(self) -> dict[str, Cell]:
        """Return the headline cells of all tasks together, by arm."""
        return self.drafting(ALL_TASKS, self.headline) if self.headline else {}

    def temperatures(self) -> list[Setting]:
        """Return every temperature and rule at the headline's context and depth."""
        line = [s for s, h in self._settings() if replace(s, temperature=h.temperature, rule=h.rule) == h]
        return sorted(line, key=lambda s: (s.temperature, (*RULES, s.rule).index(s.rule)))

    def main_temperatures(self) -> list[Setting]:
        """Return one setting a temperature: the headline's rule where it has it, else the first of :data:`RULES`."""
        chosen: dict[float, Setting] = {}
        for setting in self.temperatures():
            if setting.temperature not in chosen or (self.headline and setting.rule == self.headline.rule):
                chosen[setting.temperature] = setting
        return list(chosen.values())

    def depths(self) -> list[Setting]:
        """Return every depth at the headline's temperature, context and rule."""
        line = [s for s, h in self._settings() if replace(s, depth=h.depth) == h]
        return sorted(line, key=lambda s: s.depth)

    def contexts(self) -> list[Setting]:
        """Return every context length at the headline's temperature, depth and rule; the prompts' own first."""
        line = [s for s, h in self._settings() if replace(s, context_tokens=h.context_tokens) == h]
        return sorted(line, key=lambda s: s.context_tokens or 0)

    def comparisons(self) -> list[ArmComparison]:
        """Return the comparisons at the headline setting, all tasks and single ones."""
        return [row for row in self.report.comparisons if setting_of(row) == self.headline]

    def _settings(self) -> list[tuple[Setting, Setting]]:
        """Return each setting that drafts, beside the headline's."""
        every = {setting for _, task, setting in self.cells if task == ALL_TASKS and setting.rule != "none"}
        return [(setting, self.headline) for setting in every] if self.headline else []


def slice_report(report: StudyReport) -> Slices:
    """Index a report by the axes of its grid."""
    drafting = [cell for cell in report.cells if cell.rule != "none"]
    names = [cell.arm for cell in drafting]
    return Slices(
        report=report,
        headline=_headline(report, drafting),
        arms=tuple(sorted({cell.arm for cell in drafting}, key=[*report.arms, *names].index)),
        tasks=tuple(dict.fromkeys(cell.task for cell in report.cells if cell.task != ALL_TASKS)),
        cells={(cell.arm, cell.task, setting_of(cell)): cell for cell in report.cells},
    )


def setting_of(row: Cell | ArmComparison) -> Setting:
    """Return the point of the grid that a row belongs to."""
    return Setting(row.temperature, row.context_tokens, row.depth, cast(Rule, row.rule))


def _headline(report: StudyReport, drafting: Iterable[Cell]) -> Setting | None:
    """Return the setting at which most arms have the figures that ``report.arms`` states."""
    agreeing: Counter[Setting] = Counter()
    for cell in drafting:
        if cell.task == ALL_TASKS:
            arm = report.arms.get(cell.arm)
            stated = arm is not None and (arm.tau, arm.rounds, arm.speedup) == (cell.tau, cell.rounds, cell.speedup)
            agreeing[setting_of(cell)] += int(stated)
    return max(
        agreeing, key=lambda s: (agreeing[s], -s.temperature, s.context_tokens is None, s.depth, s.rule), default=None
    )
