"""Select the cells of a grid that the report shows: the headline setting, and one line through it along each axis.

A full grid has thousands of cells; all of them are in ``acceptance.csv``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from mtp_train.evaluation.cells import ALL_TASKS, ArmComparison, Cell, StudyReport
from mtp_train.evaluation.prompt_records import Rule, Setting

RULES = ("greedy", "sampled", "argmax")
"""Verify rules by preference, for temperatures that have several; the rule of a server comes last."""


@dataclass(frozen=True)
class Slices:
    """A report indexed by the axes of its grid; arms and tasks keep the report's order.

    Attributes:
        headline: The setting that ``report.arms`` states; None where no arm drafts.
        arms: Arms that draft.
    """

    report: StudyReport
    headline: Setting | None
    arms: tuple[str, ...]
    tasks: tuple[str, ...]
    cells: dict[tuple[str, str, Setting], Cell]

    def drafting(self, task: str, setting: Setting) -> dict[str, Cell]:
        """Return the cells of the drafting arms, by arm; arms without this setting are left out."""
        found = {arm: self.cells.get((arm, task, setting)) for arm in self.arms}
        return {arm: cell for arm, cell in found.items() if cell is not None}

    def pooled(self) -> dict[str, Cell]:
        """Return the cells over all tasks at the headline setting, by arm."""
        return self.drafting(ALL_TASKS, self.headline) if self.headline else {}

    def temperatures(self) -> list[Setting]:
        """Return every temperature and rule at the headline's context and depth."""
        line = [s for s, h in self._settings() if replace(s, temperature=h.temperature, rule=h.rule) == h]
        return sorted(line, key=lambda s: (s.temperature, (*RULES, s.rule).index(s.rule)))

    def main_temperatures(self) -> list[Setting]:
        """Return one setting per temperature: the headline's rule where measured, else the first of :data:`RULES`."""
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
        """Return every context length at the headline's temperature, depth and rule; unchanged prompts first."""
        line = [s for s, h in self._settings() if replace(s, context_tokens=h.context_tokens) == h]
        return sorted(line, key=lambda s: s.context_tokens or 0)

    def comparisons(self) -> list[ArmComparison]:
        """Return the comparisons at the headline setting, over all tasks and on single ones."""
        return [row for row in self.report.comparisons if setting_of(row) == self.headline]

    def _settings(self) -> list[tuple[Setting, Setting]]:
        """Return (setting, headline setting) for each setting with drafts."""
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
    """Return the setting of a cell or a comparison."""
    return Setting(row.temperature, row.context_tokens, row.depth, cast(Rule, row.rule))


def _headline(report: StudyReport, drafting: Iterable[Cell]) -> Setting | None:
    """Return the setting whose cells match the figures of the most arms in ``report.arms``."""
    agreeing: Counter[Setting] = Counter()
    for cell in drafting:
        if cell.task == ALL_TASKS:
            arm = report.arms.get(cell.arm)
            stated = arm is not None and (arm.tau, arm.rounds, arm.speedup) == (cell.tau, cell.rounds, cell.speedup)
            agreeing[setting_of(cell)] += int(stated)
    return max(
        agreeing, key=lambda s: (agreeing[s], -s.temperature, s.context_tokens is None, s.depth, s.rule), default=None
    )
