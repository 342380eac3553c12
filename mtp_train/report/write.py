"""Write the files of a report: ``report.json``, ``report.html``, ``acceptance.csv`` and ``figures/``."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.evaluation.results import REPORT_FILE, ArmResult, RunReport, json_keys
from mtp_train.report.figures import FIGURE_STEMS, FigureFile, MarginalIntervals, render_figures
from mtp_train.report.page import render_page

MARGINAL_CI95 = "marginal_ci95"
PAGE_FILE = "report.html"
SAMPLING = ("temperature", "top_p", "top_k", "draft_sampling")
PER_POSITION = ("marginal", "conditional", "dense", "overlap")


def write_report(
    report: RunReport,
    run_dir: Path,
    *,
    provenance: Mapping[str, Any] | None = None,
    marginal_ci95: MarginalIntervals | None = None,
    metrics: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the report into a run directory, replacing an earlier report.

    Everything is rendered before the first byte is written. Every file is written under a temporary name before the
    first is renamed, and ``report.json`` is renamed last. So an earlier report stays intact when something fails.

    Args:
        report: The report of the run.
        run_dir: The run directory; created where it is missing.
        provenance: Origin of the run for the page; nested values are flattened.
        marginal_ci95: By arm, the interval of the marginal acceptance at each position, for the figure.
        metrics: The lines of the run's ``metrics.jsonl``, for the curves of training.
    """
    figures = render_figures(report, marginal_ci95 or {}, metrics)
    page = render_page(report, figures, provenance or {})
    replace_report(run_dir, report, page, figures, {"acceptance.csv": csv_text(report)}, FIGURE_STEMS)


def replace_report(
    run_dir: Path,
    report: RunReport,
    page: str,
    figures: Sequence[FigureFile],
    tables: Mapping[str, str],
    stems: Iterable[str],
) -> None:
    """Write the files of a rendered report over an earlier one, ``report.json`` last.

    Args:
        run_dir: The run directory.
        report: The report, for ``report.json``.
        page: The HTML, for ``report.html``.
        figures: Figures, for ``figures/``.
        tables: CSV texts by file name.
        stems: Stems of figures that an earlier report may have; files that this report does not write are removed.
    """
    files = {Path("figures") / f"{figure.stem}.png": figure.png for figure in figures}
    files[Path(PAGE_FILE)] = page.encode()
    files |= {Path(name): text.encode() for name, text in tables.items()}
    encoded = json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    files[Path(REPORT_FILE)] = f"{encoded}\n".encode()
    _replace_files(run_dir, files)
    for stem in stems:
        stale = Path("figures") / f"{stem}.png"
        if stale not in files:
            (run_dir / stale).unlink(missing_ok=True)


def csv_text(report: RunReport) -> str:
    """Return CSV with one row per arm, then one per arm and further setting, with the columns of :func:`flat_table`."""
    # Recorded arms were measured with other settings, which older reports do not state.
    first = {name: report.settings.get(name) for name in SAMPLING}
    first["rule"] = "greedy" if report.settings.get("verify_rule") == "greedy" else first["draft_sampling"]
    of_arms = [
        {"arm": name, **(first if arm.measured_here else dict.fromkeys(first)), **arm.to_json()}
        for name, arm in report.arms.items()
    ]
    columns = ["arm", *json_keys(ArmResult), "temperature", "top_p", "top_k", "rule"]
    return flat_table(columns, [*of_arms, *(cell.to_json() for cell in report.cells)]).csv()


@dataclass(frozen=True)
class FlatTable:
    """A table with one value per column, None where a figure has no meaning."""

    columns: list[str]
    rows: list[list[Any]]

    def csv(self) -> str:
        """Return the table as CSV."""
        buffer = io.StringIO()
        rows = ([_plain_text(value) for value in row] for row in (self.columns, *self.rows))
        csv.writer(buffer, lineterminator="\n").writerows(rows)
        return buffer.getvalue()


def _plain_text(value: Any) -> Any:
    """Return a cell so that a spreadsheet shows its text, and does not run it as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def flat_table(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> FlatTable:
    """Return records as a table with scalar columns.

    A figure per position becomes a column per position (``marginal_1``, ``marginal_2``, ...), an interval (``*_ci95``)
    a column per bound, a histogram a column per count from 0.
    """
    depth = max((len(record[name] or ()) for record in records for name in PER_POSITION if name in record), default=0)
    parts = {name: [f"{name}_{k}" for k in range(1, depth + 1)] for name in names if name in PER_POSITION}
    parts |= {name: [f"{name}_{k}" for k in range(depth + 1)] for name in names if name.endswith("_histogram")}
    parts |= {name: [f"{name}_low", f"{name}_high"] for name in names if name.endswith("_ci95")}
    if MARGINAL_CI95 in names:
        parts[MARGINAL_CI95] = [f"marginal_{k}_ci95_{end}" for k in range(1, depth + 1) for end in ("low", "high")]
    table = FlatTable([column for name in names for column in parts.get(name, [name])], [])
    for record in records:
        values: list[Any] = []
        for name in names:
            if name not in parts:
                values.append(record[name])
                continue
            found = record[name] or ()
            if name == MARGINAL_CI95:
                found = [bound for interval in found for bound in interval or (None, None)]
            values += [*found, *[None] * len(parts[name])][: len(parts[name])]
        table.rows.append(values)
    return table


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
