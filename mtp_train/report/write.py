"""The report's files: ``report.json``, ``report.html``, ``acceptance.csv`` and ``figures/``."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mtp_train.report.figures import FIGURE_STEMS, MarginalIntervals, render_figures
from mtp_train.report.page import render_page
from mtp_train.report.schema import ArmResult, RunReport

PER_POSITION = ("marginal", "conditional", "dense", "overlap")


def write_report(
    report: RunReport,
    run_dir: Path,
    *,
    provenance: Mapping[str, Any] | None = None,
    marginal_ci95: MarginalIntervals | None = None,
) -> None:
    """Write the report into a run directory, replacing the one that is there.

    Everything is rendered before the first byte is written, and every file is written aside before the first is
    renamed, ``report.json`` last: whatever fails, an earlier report stays whole.

    Args:
        report: What was measured.
        run_dir: The run directory; created where it is missing.
        provenance: What the page shows of the run's origin, nested as it likes.
        marginal_ci95: By arm, the interval of the marginal acceptance at each position, for the figure.
    """
    figures = render_figures(report, marginal_ci95 or {})
    files = {Path("figures") / f"{figure.stem}.png": figure.png for figure in figures}
    files[Path("report.html")] = render_page(report, figures, provenance or {}).encode()
    files[Path("acceptance.csv")] = csv_text(report).encode()
    encoded = json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    files[Path("report.json")] = f"{encoded}\n".encode()
    _replace_files(run_dir, files)
    for stem in FIGURE_STEMS:
        stale = Path("figures") / f"{stem}.png"
        if stale not in files:
            (run_dir / stale).unlink(missing_ok=True)


def csv_text(report: RunReport) -> str:
    """Return one row per arm, empty cells where a figure has no meaning.

    A figure per position has a column for each (``marginal_1``, ``marginal_2``, ...), an interval one for each bound.
    """
    rows = [{"arm": name, **asdict(arm)} for name, arm in report.arms.items()]
    depth = max((len(row[name] or ()) for row in rows for name in PER_POSITION), default=0)
    parts = {name: [f"{name}_{k}" for k in range(1, depth + 1)] for name in PER_POSITION}
    parts["tau_ci95"] = ["tau_ci95_low", "tau_ci95_high"]
    names = ["arm", *(field.name for field in fields(ArmResult))]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [c for name in names for c in parts.get(name, [name])], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        for name, columns in parts.items():
            row.update(zip(columns, row.pop(name) or (), strict=False))
        writer.writerow(row)
    return buffer.getvalue()


def _replace_files(run_dir: Path, files: Mapping[Path, bytes]) -> None:
    aside = {run_dir / path: run_dir / path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in files}
    try:
        for (target, temporary), content in zip(aside.items(), files.values(), strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as handle:
                handle.write(content)
                handle.flush()
                os.fsync(handle.fileno())
        for target, temporary in aside.items():
            temporary.replace(target)
    finally:
        for temporary in aside.values():
            temporary.unlink(missing_ok=True)
