"""``mtp-train evaluate`` and ``compare``: acceptance over a grid of settings, of one arm or of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress

from mtp_inference import MAX_DEPTH
from mtp_train.demo import PREFIX
from mtp_train.errors import DataError
from mtp_train.inputs import open_location
from mtp_train.report.cells import StudyReport
from mtp_train.report.schema import REPORT_FILE
from mtp_train.report.study_tracking import WandbMode, log_study
from mtp_train.report.study_write import write_study
from mtp_train.run_dir import checkpoint_identity, environment_facts
from mtp_train.study.arms import ArmSpec, open_arm
from mtp_train.study.beside import Server
from mtp_train.study.measure import Grid
from mtp_train.study.run import run_study

DEPTHS = (1, 2, 3, 5)
WANDB_PROJECT = "mtp-train"


def study_arms(
    specs: Sequence[ArmSpec],
    grid: Grid,
    out: Path,
    progress: Progress,
    costs: bool,
    wandb: WandbMode,
    server: Server | None,
) -> StudyReport:
    """Measure arms, write the report and return it.

    Args:
        specs: The arms.
        grid: The settings.
        out: Where measurements and report go.
        progress: Shows how far it is.
        costs: Whether latency and prefill are timed as well.
        wandb: Whether Weights & Biases gets the report, and when.
        server: A server that is asked the same prompts.

    Raises:
        MtpError: The grid is empty or out of range, an arm cannot be measured, or ``out`` holds something else.
    """
    require_grid(grid)
    names = [one.name for one in specs] + ([] if server is None else [server.url])
    title = f"{'evaluation' if len(names) == 1 else 'comparison'} of {', '.join(names)}"
    report = run_study(specs, grid, out, progress, title=title, costs=costs, server=server)
    if not (out / REPORT_FILE).is_file():
        identities = {one.name: checkpoint_identity(one.trunk, open_location(one.trunk)) for one in specs}
        write_study(report, out, {"arms": identities, **environment_facts()})
    log_study(report, out, WANDB_PROJECT, wandb)
    return report


def default_suite(trunks: Sequence[str]) -> str:
    """Return the suite of trunks that none was named for: the demo's own for its trunks, which know nothing else."""
    return "demo" if all(trunk.startswith(PREFIX) for trunk in trunks) else "builtin"


def default_depths(specs: Sequence[ArmSpec]) -> tuple[int, ...]:
    """Return the depths of arms that none were named for: those that all of them can draft.

    Raises:
        MtpError: The files of an arm are not what they should be.
    """
    deepest = min((open_arm(spec).deepest for spec in specs), default=MAX_DEPTH)
    return tuple(depth for depth in DEPTHS if depth <= deepest)


def require_grid(grid: Grid) -> None:
    """Check the numbers of a grid.

    Raises:
        DataError: One is out of range, or no setting is left.
    """
    contexts = [one for one in grid.contexts if one is not None]
    checks: tuple[tuple[str, Sequence[float], float, float, str], ...] = (
        ("--depths", grid.depths, 1, MAX_DEPTH, f"1 to {MAX_DEPTH}"),
        ("--temperatures", grid.temperatures, 0.0, math.inf, "0 or more"),
        ("--contexts", contexts, 1, math.inf, "1 or more, or own"),
        ("--prompts-per-task", [grid.prompts_per_task], 1, math.inf, "1 or more"),
        ("--max-new-tokens", [grid.max_new_tokens], 2, math.inf, "2 or more, as the first token needs no round"),
        ("--batch", [grid.batch], 1, math.inf, "1 or more"),
    )
    for flag, values, low, high, expected in checks:
        for value in values:
            if not low <= value <= high:
                raise DataError(f"{flag}: {value:g}; expected {expected}. Correct it, or leave the flag out.")
    for temperature in grid.temperatures:
        if not grid.drafted(temperature, None):
            wanted = "greedy" if temperature == 0.0 else "argmax or sampled"
            raise DataError(
                f"--rules: {' '.join(grid.rules)}, none of them for temperature {temperature:g}; expected {wanted}. "
                "Add it, or leave the temperature out."
            )
