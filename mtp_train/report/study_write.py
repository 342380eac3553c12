"""Write the files of a study (a run's files plus ``comparisons.csv``), and log a study to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

from mtp_train.checkpoints.writing import write_json
from mtp_train.evaluation.cells import ArmComparison, Cell, StudyReport
from mtp_train.evaluation.results import json_keys
from mtp_train.report.figures import STUDY_FIGURE_STEM, render_study_figures
from mtp_train.report.page import render_study_page
from mtp_train.report.write import FlatTable, flat_table, replace_report

CELL_KEYS = ("arm", "task", "temperature", "context_tokens", "depth", "rule")
CELL_COLUMNS = (*CELL_KEYS, *(key for key in json_keys(Cell) if key not in CELL_KEYS))
COMPARISON_COLUMNS = tuple(field.name for field in fields(ArmComparison))


def write_study(report: StudyReport, out: Path, provenance: Mapping[str, Any]) -> None:
    """Write a study's report, replacing an earlier report, which stays intact when something fails.

    ``acceptance.csv`` has one row per cell, ``comparisons.csv`` one row per comparison.

    Args:
        report: The report of the study.
        out: The study's directory; created where it is missing.
        provenance: Origin of the study for the page; nested values are flattened.
    """
    figures = render_study_figures(report)
    page = render_study_page(report, figures, provenance)
    earlier = [path.stem for path in (out / "figures").glob("*.png") if STUDY_FIGURE_STEM.fullmatch(path.stem)]
    texts = {f"{name}.csv": table.csv() for name, table in study_tables(report).items()}
    replace_report(out, report, page, figures, texts, earlier)


def study_tables(report: StudyReport) -> dict[str, FlatTable]:
    """Return the tables of all cells and all comparisons, by the stem of their file."""
    return {
        "acceptance": flat_table(CELL_COLUMNS, [cell.to_json() for cell in report.cells]),
        "comparisons": flat_table(COMPARISON_COLUMNS, [asdict(row) for row in report.comparisons]),
    }


TRACKED_FILE = "tracked.json"
"""Written after a study was logged, with the project and the mode."""
WandbMode = Literal["off", "offline", "online"]


def log_study(report: StudyReport, out: Path, project: str, mode: WandbMode) -> None:
    """Log a study that was written to ``out`` to Weights & Biases, once: :data:`TRACKED_FILE` marks a logged study.

    A rerun of the command logs a study whose logging failed or was off.

    Args:
        report: The report of the study.
        out: The study's directory; its ``figures`` are logged, and wandb writes its files there.
        project: The Weights & Biases project.
        mode: ``off`` does not import wandb; ``offline`` needs no network (upload later with ``wandb sync``).
    """
    if mode == "off" or (out / TRACKED_FILE).is_file():
        return
    import wandb

    run = wandb.init(
        project=project, name=out.name, dir=out, mode=mode, config=dict(report.settings), reinit="create_new"
    )
    try:
        logged: dict[str, object] = {}
        for name, table in study_tables(report).items():
            logged[f"tables/{name}"] = wandb.Table(columns=[*table.columns], data=table.rows)
        for path in sorted((out / "figures").glob("*.png")):
            logged[f"figures/{path.stem}"] = wandb.Image(str(path))
        for name, arm in report.arms.items():
            numbers = {"tau": arm.tau, "acceptance_rate": arm.acceptance_rate, "speedup": arm.speedup}
            logged |= {f"arms/{name}/{key}": value for key, value in numbers.items() if value is not None}
        run.log(logged)
    finally:
        run.finish()
    write_json(out / TRACKED_FILE, {"project": project, "mode": mode})
