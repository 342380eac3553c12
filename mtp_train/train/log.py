"""Log a run's numbers: to ``metrics.jsonl`` always, to Weights & Biases if the recipe asks for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from mtp_train.checkpoints.writing import write_text

METRICS_FILE = "metrics.jsonl"


class RunLog:
    """One ``log(step, metrics)`` for all sinks; only the main process should hold one.

    Args:
        run_dir: The run directory.
        wandb: ``off``, ``offline`` (needs no network; upload later with ``wandb sync``) or ``online``.
        project: The Weights & Biases project.
        config: The resolved recipe, for Weights & Biases.
        resume_step: Lines after this step are dropped: a killed run may have logged steps that will be repeated.
        on_log: Called with the numbers of every step that is logged.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        wandb: Literal["off", "offline", "online"],
        project: str,
        config: Mapping[str, Any],
        resume_step: int,
        on_log: Callable[[Mapping[str, Any]], None] = lambda metrics: None,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / METRICS_FILE
        kept = [line for line in read_metrics(run_dir) if line["step"] <= resume_step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._on_log = on_log
        self._wandb: Any = None
        if wandb != "off":
            import wandb as wandb_package

            self._wandb = wandb_package.init(
                project=project,
                name=run_dir.name,
                dir=run_dir,
                mode=wandb,
                config=dict(config),
                reinit="create_new",
                settings={"silent": True},
            )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record numbers of an optimiser step (counted from 1)."""
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps({"step": step, **metrics}) + "\n")
        self._on_log(metrics)
        if self._wandb is not None:
            self._wandb.log({name: value for name, value in metrics.items() if not isinstance(value, str)}, step=step)

    def close(self) -> None:
        """Flush and end the Weights & Biases run, if any."""
        if self._wandb is not None:
            self._wandb.finish()


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
