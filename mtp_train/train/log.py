"""Log a run's numbers: to ``metrics.jsonl`` always, to experiment trackers if the recipe asks for them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from mtp_train.checkpoints.files import read_json
from mtp_train.checkpoints.writing import write_json, write_text
from mtp_train.errors import RecipeError

METRICS_FILE = "metrics.jsonl"
STEP_PARTS = ("fetch", "forward", "backward", "optimiser")
"""Parts of a step whose seconds are logged, beside those of waiting."""
TRACKED_FILE = "tracked.json"
"""The id of a directory's Weights & Biases run, under which a resumed run and its report go on."""
WandbMode = Literal["off", "offline", "online"]


@dataclass(frozen=True)
class Tracking:
    """Experiment trackers, opened through accelerate; by default none."""

    wandb: WandbMode = "off"
    """``offline`` needs no network; upload later with ``wandb sync``."""
    tensorboard: bool = False
    trackio: bool = False
    project: str = "mtp-train"

    @property
    def names(self) -> list[str]:
        """Names of the trackers, which their packages share."""
        asked = {"wandb": self.wandb != "off", "tensorboard": self.tensorboard, "trackio": self.trackio}
        return [name for name, is_on in asked.items() if is_on]

    def require(self, where: str = "track.") -> None:
        """Raise a RecipeError that names the packages that are not installed, if there are any."""
        missing = [name for name in self.names if importlib.util.find_spec(name) is None]
        if missing:
            told = "the package is not installed; expected it, to track there"
            raise RecipeError(*(f"{where}{name}: {told}. Run 'pip install {name}'." for name in missing))

    @contextlib.contextmanager
    def opened(
        self, directory: Path, config: Mapping[str, Any], *, resume_step: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Open the trackers, and end their runs at the end of the block.

        Args:
            directory: The run directory, whose name is the run's; wandb and TensorBoard write into it.
            resume_step: Steps after it will be logged again; None keeps all steps.

        Yields:
            accelerate's trackers, by name.
        """
        trackers: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            for name in self.names:
                trackers[name] = self._open(name, directory, dict(config), resume_step)
                stack.callback(trackers[name].finish)
            yield trackers

    def _open(self, name: str, directory: Path, config: dict[str, Any], resume_step: int | None) -> Any:
        from accelerate import PartialState, tracking

        # The trackers ask it which process is the main one.
        PartialState()
        if name == "tensorboard":
            purge = {} if resume_step is None else {"purge_step": resume_step + 1}
            tracker: Any = tracking.TensorBoardTracker(name, directory, **purge)
        elif name == "trackio":
            tracker = tracking.TrackioTracker(self.project, name=directory.name, config=config, resume="allow")
        else:
            path = directory / TRACKED_FILE
            if not path.is_file():
                write_json(path, {"wandb": secrets.token_hex(4)})
            tracker = tracking.WandBTracker(
                self.project,
                name=directory.name,
                dir=directory,
                mode=self.wandb,
                config=config,
                id=read_json(path)["wandb"],
                resume="allow",
                reinit="create_new",
                settings={"silent": True},
            )
        # Earlier versions of accelerate open a tracker as they make it.
        if hasattr(tracker, "start"):
            tracker.start()
        return tracker


class RunLog:
    """One ``log(step, metrics)`` for all sinks; only the main process should hold one.

    Args:
        resume_step: Lines after this step are dropped: a killed run may have logged steps that will be repeated.
        config: The resolved recipe, for the trackers.
        on_log: Called with the numbers of every step that is logged.
    """

    def __init__(
        self,
        run_dir: Path,
        resume_step: int,
        *,
        tracking: Tracking = Tracking(),
        config: Mapping[str, Any] = MappingProxyType({}),
        on_log: Callable[[Mapping[str, Any]], None] = lambda metrics: None,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / METRICS_FILE
        kept = [line for line in read_metrics(run_dir) if line["step"] <= resume_step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._on_log = on_log
        self._open = contextlib.ExitStack()
        self._trackers = self._open.enter_context(tracking.opened(run_dir, config, resume_step=resume_step))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record numbers of an optimiser step (counted from 1)."""
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps({"step": step, **metrics}) + "\n")
        self._on_log(metrics)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        for tracker in self._trackers.values():
            tracker.log(numbers, step=step)

    def close(self) -> None:
        self._open.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the logged lines of a run, without lines that a kill or an edit damaged."""
    path = run_dir / METRICS_FILE
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    parsed = []
    for line in lines:
        try:
            found = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(found, dict) and type(found.get("step")) is int:
            parsed.append(found)
    return parsed
