"""Select the cells of a report that are shown: the headline setting, and one line through it along each axis.

A full grid has thousands of cells; all of them are in ``acceptance.csv``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import ALL_TASKS, ArmComparison, Cell, Report

RULES = ("greedy", "sampled", "argmax")
"""Verify rules by preference, for temperatures that have several; the rule of a server comes last."""


@dataclass(frozen=True)
class Slices:
    """A report indexed by the axes of its grid; arms and tasks keep the report's order."""

    report: Report
    headline: Setting | None
    """The setting that ``report.arms`` states; None where no arm drafts."""
    arms: tuple[str, ...]
    """Arms that draft."""
    tasks: tuple[str, ...]
    cells: dict[tuple[str, str, Setting], Cell]

    def drafting(self, task: str, setting: Setting) -> dict[str, Cell]:
        """Return the cells of the drafting arms, by arm; arms without this setting are left out."""
        found = {arm: self.cells.get((arm, task, setting)) for arm in self.arms}
        return {arm: cell for arm, cell in found.items() if cell is not None}

    def pooled(self) -> dict[str, Cell]:
        """Return the cells over all tasks at the headline setting, by arm."""
        return self.drafting(ALL_TASKS, self.headline) if self.headline else {}

    def ranked(self) -> list[tuple[str, Cell, float]]:
        """Return (arm, cell at the headline setting, tau) of the drafting arms, the highest tau first."""
        known = [(name, cell, cell.tau) for name, cell in self.pooled().items() if cell.tau is not None]
        return sorted(known, key=lambda entry: -entry[2])

    def temperatures(self) -> list[Setting]:
        """Return every temperature, filter and rule at the headline's context and depth."""
        line = self._line("temperature", "top_p", "top_k", "rule")
        return sorted(line, key=lambda s: (s.temperature, (*RULES, s.rule).index(s.rule), -s.top_p, s.top_k))

    def depths(self) -> list[Setting]:
        """Return every depth at the headline's temperature, context and rule."""
        return sorted(self._line("depth"), key=lambda s: s.depth)

    def by_depth(self, arm: str) -> dict[int, Cell]:
        """Return an arm's cells by number of drafts, at the headline's temperature, context and rule."""
        cells = {one.depth: self.cells.get((arm, ALL_TASKS, one)) for one in self.depths()}
        return {depth: cell for depth, cell in cells.items() if cell is not None}

    def contexts(self) -> list[Setting]:
        """Return every context length at the headline's temperature, depth and rule; unchanged prompts first."""
        return sorted(self._line("context_tokens"), key=lambda s: s.context_tokens or 0)

    def comparisons(self) -> list[ArmComparison]:
        """Return the comparisons at the headline setting, over all tasks and on single ones."""
        return [row for row in self.report.comparisons if row.setting == self.headline]

    def _line(self, *free: str) -> set[Setting]:
        """Return the measured settings with drafts that differ from the headline in these fields at most."""
        headline = self.headline
        if headline is None:
            return set()
        of_headline: dict[str, Any] = {name: getattr(headline, name) for name in free}
        every = {setting for _, task, setting in self.cells if task == ALL_TASKS and setting.rule != "none"}
        return {setting for setting in every if replace(setting, **of_headline) == headline}


def slice_report(report: Report) -> Slices:
    drafting = [cell for cell in report.cells if cell.rule != "none"]
    names = [cell.arm for cell in drafting]
    settings = [cell.setting for cell in drafting if cell.task == ALL_TASKS]
    stated = report.settings.get("headline")
    headline = None if stated is None else Setting(**stated)
    return Slices(
        report=report,
        # A server is measured with its own number of drafts.
        headline=headline if headline in settings else next(iter(settings), None),
        arms=tuple(sorted(dict.fromkeys(names), key=[*report.arms, *names].index)),
        tasks=tuple(dict.fromkeys(cell.task for cell in report.cells if cell.task != ALL_TASKS)),
        cells={(cell.arm, cell.task, cell.setting): cell for cell in report.cells},
    )
