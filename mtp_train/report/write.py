"""Write everything that shows a report, and send it to experiment trackers: ``report.json``, tables, figures, the page.

The page is one HTML file without scripts or network, figures included; its template is in ``templates/``.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from mtp_train.acceptance.names import RETRAINED
from mtp_train.checkpoints.writing import write_bytes
from mtp_train.evaluation.results import REPORT_FILE, ArmComparison, Cell, Report, SampleText
from mtp_train.report import wording
from mtp_train.report.figures import ARM_FIGURES, CURVES, FigureFile, render_figures
from mtp_train.report.tables import (
    PER_POSITION,
    TextTable,
    arms_table,
    axis_tables,
    difference_table,
    gate_table,
    position_table,
)
from mtp_train.train.log import Tracking

_RULE_NOTE = "Compare arms within one temperature and rule only: which head is better can depend on both."
_SAMPLE_NOTE = (
    "Held-out prompts (grey) and their texts. Marked: drafts that the trunk accepted; the other tokens are the trunk's "
    "own, one a round."
)
_GATE_NOTE = (
    "The gate passes when the interval of the gain, paired by prompt and over groups of prompts, lies above 0 at one "
    "setting at least (Holm's correction) and below 0 at none. The last column is the gain that it detects with "
    "probability 0.8. Against plain decoding it asks for a speedup above 1, or a tau above gate.break_even_tau."
)


class Section(NamedTuple):
    """A heading and its content, shown in the order of the fields."""

    title: str
    notes: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()
    """Sentences that are content of their own."""
    figures: Sequence[FigureFile] = ()
    table: TextTable | None = None
    samples: Sequence[SampleText] = ()
    rows: Sequence[tuple[str, str]] = ()
    """Names and values."""

    @property
    def is_empty(self) -> bool:
        return not (any(self.statements) or self.figures or self.table or self.samples or self.rows)


def render_page(
    report: Report, figures: Sequence[FigureFile], provenance: Mapping[str, Any], serving: Mapping[str, str]
) -> str:
    """Return the page of a report, with the commands that serve the export; markup in any text is escaped."""
    verdict = wording.headline(report)
    subject = report.title or next((arm.trunk for arm in wording.group_arms(report)[wording.ALIKE].values()), "")
    setting = ""
    if report.headline is not None:
        words = wording.setting_words(report.headline)
        cells = f"All {len(report.cells):,} cells are in acceptance.csv."
        setting = f"Unless a table states another setting: {words}. {cells}"
    sections = [*_sections(report, figures, serving), Section("Provenance", rows=wording.flatten(provenance))]
    environment = Environment(
        loader=PackageLoader("mtp_train.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        subject=subject,
        verdict=verdict,
        key_figures=wording.key_figures(report),
        findings=[one for one in report.findings if one.evidence != verdict.evidence],
        setting_sentence=setting,
        sections=[section for section in sections if not section.is_empty],
        before=report.gate.baseline if report.gate else "",
        after=RETRAINED,
    )


def _sections(report: Report, drawn: Sequence[FigureFile], serving: Mapping[str, str]) -> list[Section]:
    groups = wording.group_arms(report)

    def figures(*stems: str) -> list[FigureFile]:
        return [figure for figure in drawn if figure.stem in stems]

    axes = axis_tables(report)
    gate = report.gate
    real = (
        "First arm minus second, paired by prompt, intervals over groups of prompts. "
        f"{wording.count_real(report)} of the report's comparisons are real, at 5 % over all of them together (Holm). "
        "Other settings and single tasks are in comparisons.csv."
    )
    return [
        Section("Same trunk, same prompts", table=arms_table({"": groups[wording.ALIKE]})),
        Section(
            "Another trunk, shown apart",
            (wording.apart_sentence(groups, report.settings),),
            table=arms_table({"": groups[wording.APART]}),
        ),
        Section("What to serve", statements=tuple(wording.serving_sentences(report)), rows=tuple(serving.items())),
        Section("Figures", figures=figures(*ARM_FIGURES)),
        Section("Training", figures=figures(*CURVES)),
        Section("Differences", (real,), table=difference_table(report)),
        Section("By position in the draft", table=position_table(report)),
        Section("By task", table=axes["task"]),
        Section("By temperature", (_RULE_NOTE,), table=axes["setting"]),
        Section("By depth", figures=figures("depth", "depth_speedup"), table=axes["drafts"]),
        Section("By context", figures=figures("context"), table=axes["context"]),
        Section("The served model", rows=wording.flatten(report.endpoint or {})),
        Section("Sample texts", (_SAMPLE_NOTE,), samples=report.samples),
        Section("Is it lossless?", statements=(wording.lossless_sentence(report.lossless),)),
        Section("Is the text new to the head?", statements=(wording.held_out_sentence(report.settings),)),
        Section("The gate", (wording.power_sentence(gate), _GATE_NOTE), table=gate_table(gate)),
        Section(
            "Recorded, not measured here",
            (wording.recorded_sentence(groups),),
            table=arms_table({"": groups[wording.ELSEWHERE]}),
        ),
        Section("Settings", rows=wording.flatten(report.settings)),
    ]


PAGE_FILE = "report.html"
FIRST_COLUMNS = ("arm", "task", "temperature", "top_p", "top_k", "context_tokens", "depth", "rule")
CELL_COLUMNS = tuple(dict.fromkeys((*FIRST_COLUMNS, *(field.name for field in fields(Cell)))))
COMPARISON_COLUMNS = tuple(dict.fromkeys(("first", "second", "task", *(field.name for field in fields(ArmComparison)))))


def write_report(
    report: Report,
    out: Path,
    provenance: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]] = (),
    serving: Mapping[str, str] | None = None,
) -> None:
    """Write a report to a directory, replacing an earlier one.

    Everything is rendered before the first byte is written, each file is replaced as a whole, ``report.json`` last.
    """
    figures = render_figures(report, metrics)
    files = {f"figures/{figure.stem}.png": figure.png for figure in figures}
    files[PAGE_FILE] = render_page(report, figures, provenance, serving or {}).encode()
    files |= {f"{name}.csv": text.encode() for name, text in csv_tables(report).items()}
    files[REPORT_FILE] = (json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    for name, content in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(out / name, content)


def csv_tables(report: Report) -> dict[str, str]:
    """Return the tables of all cells and all comparisons as CSV, by the stem of their file.

    Arms that were recorded elsewhere are rows without a setting. A run has no comparisons.
    """
    recorded = [
        {**dict.fromkeys(CELL_COLUMNS), "arm": name, **asdict(arm)}
        for name, arm in report.arms.items()
        if not arm.measured_here
    ]
    tables = {"acceptance": csv_table(CELL_COLUMNS, [*map(asdict, report.cells), *recorded])}
    if report.title is not None:
        tables["comparisons"] = csv_table(COMPARISON_COLUMNS, [asdict(row) for row in report.comparisons])
    return tables


def csv_table(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as CSV of scalars: a figure per position has a column per position, an interval two."""
    rows = [[_columns(name, record[name]) for name in names] for record in records]
    # By field: a record may lack the last positions of a figure.
    columns = dict.fromkeys(column for of_field in zip(*rows, strict=True) for pairs in of_field for column, _ in pairs)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(columns or names), lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: value for pairs in row for column, value in pairs} for row in rows)
    return buffer.getvalue()


def _columns(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the columns of a field, and the scalar in each."""
    if name == "marginal_ci95":
        return [
            pair for k, interval in enumerate(value or (), start=1) for pair in _columns(f"marginal_{k}_ci95", interval)
        ]
    if name.endswith("_ci95"):
        low, high = value or (None, None)
        return [(f"{name}_low", low), (f"{name}_high", high)]
    if name in PER_POSITION:
        return [(f"{name}_{k}", share) for k, share in enumerate(value or (), start=1)]
    return [(name, value)]


def log_report(report: Report, out: Path, tracking: Tracking, config: Mapping[str, Any] | None = None) -> None:
    """Log a report that was written to ``out`` to each tracker.

    All trackers get the numbers; Weights & Biases gets the page too. A run's go to the tracked run of its training;
    ``config`` is shown with it.
    """
    records = {f"arms/{name}": asdict(arm) for name, arm in report.arms.items()}
    if report.gate is not None:
        records["gate"] = {"passed": report.gate.passed, "delta_tau_ci95": report.gate.delta_tau_ci95}
    with tracking.opened(out, config or report.settings) as trackers:
        for name, tracker in trackers.items():
            # Named as the columns of acceptance.csv.
            numbers: dict[str, Any] = {
                f"{where}/{column}": value
                for where, record in records.items()
                for field in record.items()
                for column, value in _columns(*field)
                if isinstance(value, int | float)
            }
            # Of a run, the numbers belong to its last step, which wandb and trackio know.
            page = out / PAGE_FILE
            if name == "wandb" and page.is_file():
                import wandb

                numbers |= {"report": wandb.Html(page.read_text(encoding="utf-8"))}
            tracker.log(numbers)
