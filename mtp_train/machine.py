"""What a job takes from the machine that it starts on: the precision of its products, and its number of threads.

Both follow from the machine's features and the model's size alone, so that equal machines choose alike.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from accelerate.commands.config.config_args import default_config_file
from rich.console import Console

from mtp_train.errors import RecipeError
from mtp_train.heads.precision import resolve_precision
from mtp_train.recipe import Recipe
from mtp_train.recipe_io import load_recipe
from mtp_train.run_dir import RECIPE_FILE
from mtp_train.train.launcher import launch_arguments
from mtp_train.weights.files import Checkpoint

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
OPTION = "num_cpu_threads_per_process"
SHARED_WORK = 512**2
"""Multiplications of a product, rows times hidden size squared, from which threads gain more than they lose by waiting
for each other. On two cores, the demo's step of 1,536 rows took 0.6 times as long, and decoding one row 1.1 times."""
MOST_THREADS = 16
"""More threads than this share one product badly."""


def with_recorded_precision(recipe: Recipe, run_dir: Path) -> Recipe:
    """Return a recipe in the precision that its run directory was begun in, where it leaves the choice to us.

    A run that goes on elsewhere keeps what it resolved: steps in another precision would end in another head.
    """
    recorded = run_dir / RECIPE_FILE
    if recipe.train.precision != "auto" or not recorded.is_file():
        return recipe
    try:
        precision = load_recipe(recorded).train.precision
    except RecipeError:
        # Not ours, or of another version: whoever compares it with this recipe says so.
        return recipe
    return replace(recipe, train=replace(recipe.train, precision=precision))


def with_resolved_precision(recipe: Recipe, device: torch.device) -> Recipe:
    """Return a recipe whose precision is what ``auto`` stands for on a device."""
    precision = resolve_precision(recipe.train.precision, device).precision
    return replace(recipe, train=replace(recipe.train, precision=precision))


def tell_precision(recipe: Recipe, device: torch.device, console: Console) -> None:
    """Print the precision of a resolved recipe, and what the device makes of it."""
    precision, reason = resolve_precision(recipe.train.precision, device)
    console.print(f"training in {precision}: {reason}", highlight=False)


def settle_threads(work: str, rows: int, checkpoint: Checkpoint, device: torch.device, console: Console) -> None:
    """Set the number of threads for a stage that runs on a CPU, and print it.

    Args:
        work: What the stage does.
        rows: Rows of its products: tokens that are computed together.
        checkpoint: The trunk's.
        device: Where the trunk runs.
        console: Where to print.
    """
    if device.type == "cpu":
        console.print(f"{work} with {use_threads(checkpoint.text_config, rows)}", highlight=False)


def use_threads(text_config: Mapping[str, Any], rows: int = 1) -> str:
    """Set the number of threads for a model, unless the user has; return a clause that says what is used.

    Small products are done before threads have met; large ones gain from every core. ``accelerate launch`` sets
    OMP_NUM_THREADS=1 for its processes where nobody names a number, which leaves all cores but one idle.

    Args:
        text_config: The trunk's, as its file has it; whoever opens the trunk checks what it says.
        rows: Rows of its products.
    """
    found = torch.get_num_threads()
    if threads_are_set(os.environ, *_launcher()):
        return f"{found} thread(s), as set"
    cores = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    width = text_config.get("hidden_size")
    threads = threads_for(rows * width**2 if isinstance(width, int) else 0, cores)
    torch.set_num_threads(threads)
    return f"{threads} thread(s) of {max(1, cores)} core(s)"


def threads_for(multiplications: int, cores: int) -> int:
    """Return how many threads are fastest for products of that size on so many cores."""
    return max(1, min(cores, MOST_THREADS)) if multiplications >= SHARED_WORK else 1


def usable_cores() -> int:
    """Return the physical cores that this process may run on."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return min(physical, allowed)


def threads_are_set(environment: Mapping[str, str], command: Sequence[str], launched_from: Mapping[str, str]) -> bool:
    """Whether the user named a number of threads, to us or to the launcher.

    Args:
        environment: This process's.
        command: The command line of the process that started it.
        launched_from: The environment which that one was started with.
    """
    if not any(variable in environment for variable in VARIABLES):
        return False
    if launch_arguments(command) is None:
        return True
    if any(variable in launched_from for variable in VARIABLES):
        return True
    return any(part.lstrip("-").replace("-", "_").startswith(OPTION) for part in command) or _config_names_it(command)


def _launcher() -> tuple[Sequence[str], Mapping[str, str]]:
    """Return command line and environment of the parent; nothing where it cannot be looked at."""
    try:
        parent = psutil.Process(os.getppid())
        return parent.cmdline(), parent.environ()
    except (psutil.Error, OSError):
        return (), {}


def _config_names_it(command: Sequence[str]) -> bool:
    named = default_config_file
    for part, following in zip(command, [*command[1:], ""], strict=True):
        option, _, value = part.partition("=")
        if option == "--config_file":
            named = value or following
    try:
        settings = yaml.safe_load(Path(named).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        # The launcher reads it too, and says what is wrong with it.
        return False
    return isinstance(settings, dict) and OPTION in settings
