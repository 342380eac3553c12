"""A finished study as a Weights & Biases run: its tables, its figures and the headline's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mtp_train.report.cells import StudyReport
from mtp_train.report.study_write import study_tables
from mtp_train.weights.writing import write_json

TRACKED_FILE = "tracked.json"
"""Says that a study was logged."""
WandbMode = Literal["off", "offline", "online"]


def log_study(report: StudyReport, out: Path, project: str, mode: WandbMode) -> None:
    """Log a study that was written to ``out``, once: a rerun makes up for logging that failed, and for none.

    Args:
        report: What was measured.
        out: The study's directory; its ``figures`` are logged, and the run's own files go beside them.
        project: The Weights & Biases project.
        mode: ``off`` imports and does nothing; ``offline`` needs no network (upload later with ``wandb sync``).
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
