"""Start the job of a recipe that is given as a file, a mapping or a ``Recipe``: ``run`` and ``regenerate``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.progress import Progress
from rich.text import Text

from mtp_train.answers.store import ResponseCounts
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.run_export import EXPORT, HEAD
from mtp_train.errors import GateRefusedError, RecipeError
from mtp_train.evaluation.cells import StudyReport
from mtp_train.evaluation.results import REPORT_FILE, RunReport, read_report
from mtp_train.families.engines import engine_commands
from mtp_train.recipe.loading import dump_recipe, load_recipe, parse_yaml, recipe_from_mapping
from mtp_train.recipe.schema import Recipe
from mtp_train.report.study_table import study_summary
from mtp_train.report.table import summary
from mtp_train.report.write import PAGE_FILE
from mtp_train.runs import pipeline
from mtp_train.runs.auto import Choice, settle_values
from mtp_train.runs.display import quiet_progress, rich_to_html
from mtp_train.train.machine import Device, device_named

RecipeLike = Recipe | str | Path | Mapping[str, Any]
Overrides = Mapping[str, Any] | Sequence[str]


class Settled(NamedTuple):
    """A recipe without fields that are ``auto``, and how they were resolved."""

    recipe: Recipe
    choices: tuple[Choice, ...]


def recipe_of(recipe: RecipeLike, overrides: Overrides = ()) -> Recipe:
    """Return a checked recipe from any of its forms; see :func:`settled_recipe`."""
    return settled_recipe(recipe, overrides).recipe


def settled_recipe(
    recipe: RecipeLike, overrides: Overrides = (), *, world_size: int | None = None, device: Device | None = None
) -> Settled:
    """Return a checked recipe from any of its forms, with fields that are ``auto`` resolved.

    Args:
        recipe: A YAML file, the name of a recipe of the package, a mapping of the same shape, or a recipe, which is
            returned as it is.
        overrides: Dotted field to value, ``{"train.lr": 1e-4}``, or strings ``section.field=value`` with YAML values.
        world_size: Processes that will train; None for ``train.processes``, else ``WORLD_SIZE`` of a launcher, else 1.
        device: What they will run on; None for this machine's.

    Raises:
        RecipeError: A field is unknown, out of range or contradicts another one; the message lists all problems.
        MtpError: A field is ``auto``, and the model or the data that it depends on cannot be read.
    """
    choices: tuple[Choice, ...] = ()

    def settle(stood_in: Recipe, fields: Sequence[str]) -> dict[str, int | float]:
        nonlocal choices
        choices = settle_values(
            stood_in,
            fields,
            world_size or stood_in.train.processes or launched_processes(),
            device or device_named(None),
        )
        return {choice.field: choice.value for choice in choices}

    overrides = override_texts(overrides)
    if isinstance(recipe, Recipe):
        if not overrides:
            return Settled(recipe, ())
        plain = parse_yaml(dump_recipe(recipe), "recipe")[0]
        return Settled(recipe_from_mapping(plain, overrides, settle), choices)
    if isinstance(recipe, Mapping):
        return Settled(recipe_from_mapping(recipe, overrides, settle), choices)
    return Settled(load_recipe(recipe, overrides, settle), choices)


def override_texts(overrides: Overrides) -> list[str]:
    """Return overrides as ``section.field=value`` with YAML values."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    texts = {field: json.dumps(value, default=str, ensure_ascii=False) for field, value in overrides.items()}
    return [f"{field}={text}" for field, text in texts.items()]


def require_one_process(command: str) -> None:
    """Refuse a launch of several processes for a command that runs on one.

    Raises:
        RecipeError: There are several.
    """
    if launched_processes() > 1:
        found = f"mtp-train {command}: launched with {launched_processes()} processes"
        raise RecipeError(
            [f"{found}; expected one. For several, write the recipe with mtp-train init, and launch that."]
        )


def launched_processes() -> int:
    """Return the number of processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def open_report(source: str | Path) -> RunReport | StudyReport:
    """Read the report of a run, an evaluation or a comparison.

    Args:
        source: Its directory, or its ``report.json``.

    Raises:
        DataError: There is no report, or another version of mtp-train wrote it.

    Example:
        >>> import mtp_train as mtp
        >>> report = mtp.open_report("runs/retrain_head")
        >>> gain = report.arms["retrained"].tau - report.arms["graft"].tau
    """
    path = Path(source)
    path = path / REPORT_FILE if path.is_dir() else path
    raw = read_report(path)
    # Only studies have a title.
    is_study = isinstance(raw, dict) and "title" in raw
    return StudyReport.from_json(raw, str(path)) if is_study else RunReport.from_json(raw, str(path))


def report_table(report: RunReport | StudyReport) -> RenderableType:
    """Return the verdict and the tables of a report, ready for a rich console."""
    return study_summary(report) if isinstance(report, StudyReport) else summary(report)


@dataclass(frozen=True)
class RunResult:
    """Outcome of a finished run, as :func:`run` returns it. In a notebook it shows the table of the arms."""

    run_dir: Path
    exit_code: int
    """0; 1 for a study or a fine-tune whose drafts changed a text, which is a bug of the decoder."""
    reason: str
    """``done``, or ``not_lossless`` with exit code 1."""
    message: str
    """The verdict, and where the checkpoint was exported."""
    stage: str
    """The stage that the run reached: ``done``."""

    @property
    def report(self) -> RunReport | StudyReport:
        """The report in the run directory; see :func:`open_report`."""
        return open_report(self.run_dir)

    @property
    def export(self) -> Path | None:
        """The exported checkpoint; None for a recipe that exports nothing."""
        path = self.run_dir / EXPORT
        return path if path.is_dir() else None

    @property
    def page(self) -> str | None:
        """URI of the report for people, which terminals open; None where there is no report."""
        path = self.run_dir / PAGE_FILE
        return path.resolve().as_uri() if path.is_file() else None

    @property
    def serves(self) -> dict[str, str]:
        """Engine to the command that serves the export, or ``no: REASON``; empty without an export."""
        if self.export is None or not (self.run_dir / HEAD).is_dir():
            return {}
        head = load_artifact(self.run_dir / HEAD)
        return engine_commands(head.family.serving, str(self.export), head.num_depths)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as ``mtp-train run --json`` prints them."""
        return {**asdict(self), "run_dir": str(self.run_dir)}

    def __str__(self) -> str:
        lines = [self.message, *([] if self.page is None else [f"report: {self.page}"])]
        lines += [f"{engine}: {text}" for engine, text in self.serves.items()]
        return "\n".join(lines)

    def __rich__(self) -> RenderableType:
        return Group(report_table(self.report), Text(f"\n{self.message}"))

    def _repr_html_(self) -> str:
        return rich_to_html(self.__rich__())


def run(recipe: RecipeLike, overrides: Overrides = (), *, console: Console | None = None) -> RunResult:
    """Run a recipe: regenerate responses, train the head, evaluate, apply the gate, export.

    A run directory with the same recipe and inputs is resumed at the stage it reached; a finished one is returned.
    Runs in this process. For several GPUs, use ``accelerate launch -m mtp_train RECIPE``.

    Args:
        recipe: A YAML file, the name of a recipe of the package (see :func:`recipes`), or a mapping of the same shape.
        overrides: Dotted field to value, ``{"train.lr": 1e-4, "data.sources.0.path": "chats.jsonl"}``; a list is
            replaced as a whole. Strings ``"train.lr=1e-4"`` work too.
        console: Where progress bars and the table of results are printed; None prints nothing.

    Raises:
        RecipeError: The recipe is wrong; the message lists all problems.
        GateRefusedError: The trained head is not better than its baseline. Its ``run_dir`` holds the report.
        MtpError: A checkpoint or data cannot be used, the run directory holds something else, or memory ran out.

    Example:
        >>> import mtp_train as mtp
        >>> done = mtp.run("retrain_head", {"run_dir": "runs/a", "train.max_steps": 50})
        >>> done.report.arms["retrained"].tau
        3.21
        >>> done.export
        PosixPath('runs/a/export')
    """
    checked, choices = settled_recipe(recipe, overrides)
    console = console or Console(quiet=True)
    run_dir = Path(checked.run_dir)
    try:
        outcome = pipeline.run(checked, console, choices)
        # A finished run returns the outcome that it recorded, which may be the gate's refusal.
        if outcome.exit_code == GateRefusedError.exit_code:
            raise GateRefusedError(outcome.message)
    except GateRefusedError as error:
        error.run_dir = run_dir
        raise
    return RunResult(run_dir, outcome.exit_code, outcome.reason, outcome.message, outcome.stage)


@dataclass(frozen=True)
class RegenerateResult:
    """Directory and counts of the responses that :func:`regenerate` wrote."""

    run_dir: Path
    """The responses are in ``run_dir/data``."""
    counts: ResponseCounts
    """Responses, the documents made of them, their tokens, and the responses that were left out or cut."""

    def to_json(self) -> dict[str, int]:
        """Return plain JSON values, as ``mtp-train regenerate --json`` prints them."""
        return asdict(self.counts)

    def __str__(self) -> str:
        return "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in asdict(self.counts).items())


def regenerate(recipe: RecipeLike, overrides: Overrides = (), *, progress: Progress | None = None) -> RegenerateResult:
    """Let the trunk answer a recipe's prompts and stop. A later :func:`run` of the recipe resumes from the responses.

    Args:
        recipe: As for :func:`run`; ``data.regenerate`` must be enabled.
        overrides: As for :func:`run`.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        RecipeError: The recipe is wrong, or does not regenerate.
        MtpError: The trunk or the prompts cannot be read, or the run directory holds something else.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.regenerate("retrain_head", {"data.regenerate.max_prompts": 40}).counts.responses
        40
    """
    checked = recipe_of(recipe, overrides)
    counts = pipeline.regenerate_only(checked, progress or quiet_progress())
    return RegenerateResult(Path(checked.run_dir), ResponseCounts(**counts))
