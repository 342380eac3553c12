"""The files of a study: those of a run's report, and ``comparisons.csv``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mtp_train.report.cells import ArmComparison, Cell, StudyReport
from mtp_train.report.study_figures import FIGURE_STEM, render_study_figures
from mtp_train.report.study_page import render_study_page
from mtp_train.report.write import FlatTable, flat_table, replace_report

CELL_KEYS = ("arm", "task", "temperature", "context_tokens", "depth", "rule")
CELL_COLUMNS = (*CELL_KEYS, *(field.name for field in fields(Cell) if field.name not in CELL_KEYS))
COMPARISON_COLUMNS = tuple(field.name for field in fields(ArmComparison))


def write_study(report: StudyReport, out: Path, provenance: Mapping[str, Any]) -> None:
    """Write a study's report, replacing the one that is there; whatever fails, an earlier one stays whole.

    ``acceptance.csv`` has one row a cell, ``comparisons.csv`` one row a comparison.

    Args:
        report: What was measured.
        out: The study's directory; created where it is missing.
        provenance: What the page shows of the study's origin, nested as it likes.
    """
    figures = render_study_figures(report)
    page = render_study_page(report, figures, provenance)
    earlier = [path.stem for path in (out / "figures").glob("*.png") if FIGURE_STEM.fullmatch(path.stem)]
    texts = {f"{name}.csv": table.csv() for name, table in study_tables(report).items()}
    replace_report(out, report, page, figures, texts, earlier)


def study_tables(report: StudyReport) -> dict[str, FlatTable]:
    """Return what is too long for the page, by the name of its file."""
    return {
        "acceptance": flat_table(CELL_COLUMNS, [asdict(cell) for cell in report.cells]),
        "comparisons": flat_table(COMPARISON_COLUMNS, [asdict(row) for row in report.comparisons]),
    }
