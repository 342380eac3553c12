"""The drift curve: what an untouched head is still worth, the further its trunk was fine-tuned.

The head is that of the recipe's ``model.head_from``, in memory: on checkpoints that were kept along a fine-tune, or
along one that is made here. Every trunk decodes the same held-out prompts with it, greedily, and says other things the
further it went: the entropy of its text stands beside its acceptance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor

from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_train.acceptance import num_groups, tau
from mtp_train.acceptance_intervals import tau_interval
from mtp_train.data.tokenize import Document
from mtp_train.evaluation import dense_batches, draft_depth
from mtp_train.heads.attach import build_head, graft_plan, native_plan
from mtp_train.heads.diagnose import layout_of, text_config_of
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk, load_trunk
from mtp_train.inputs import Inputs, trunk_dtype
from mtp_train.recipe import Recipe
from mtp_train.recipe_study import FineTuneSpec
from mtp_train.report.cells import DriftPoint
from mtp_train.report.schema import build, read_report
from mtp_train.study.fine_tune import fine_tune, measured_steps
from mtp_train.train.dense import dense_metrics
from mtp_train.weights.change import shared_tensors, squared_change
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.writing import write_json

DRIFT_FILE = "drift.json"


class DriftLog:
    """The points that were measured so far, on disk after each.

    Args:
        run_dir: The run directory; it belongs to one recipe, and so do the points.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / DRIFT_FILE
        rows = read_report(self.path) if self.path.is_file() else []
        self.points = [build(DriftPoint, row, f"{self.path}: {number}") for number, row in enumerate(rows)]

    def add(self, point: DriftPoint) -> None:
        """Keep a point."""
        self.points.append(point)
        write_json(self.path, [asdict(one) for one in self.points])


def drift_along_checkpoints(
    recipe: Recipe,
    run_dir: Path,
    inputs: Inputs,
    base: Checkpoint,
    checkpoints: Mapping[str, Checkpoint],
    device: torch.device,
    progress: Progress,
) -> tuple[DriftPoint, ...]:
    """Measure the base's head on the base and on checkpoints, by their names; points measured before are kept."""
    log = DriftLog(run_dir)
    task = progress.add_task("drift along checkpoints", total=1 + len(checkpoints))
    for name, checkpoint in {str(recipe.model.head_from): base, **checkpoints}.items():
        if name not in {point.label for point in log.points}:
            trunk = load_trunk(
                checkpoint.path,
                checkpoint.family,
                dtype=trunk_dtype(recipe, device, checkpoint),
                device=device,
                quantization=recipe.model.quantization,
                trust_remote_code=recipe.model.trust_remote_code,
            )
            plan = graft_plan(checkpoint, base, recipe.head.convention)
            weight = trunk.lm_head_VD
            head = build_head(plan, text_config_of(checkpoint), dtype=weight.dtype).to(weight.device).eval()
            change = stored_change(checkpoint, base)
            log.add(measure_point(recipe, inputs, trunk, head, label=name, step=None, tokens=None, change=change))
        progress.advance(task)
    return tuple(log.points)


def drift_along_fine_tune(
    recipe: Recipe,
    spec: FineTuneSpec,
    run_dir: Path,
    inputs: Inputs,
    base: Checkpoint,
    documents: Sequence[Document],
    device: torch.device,
    progress: Progress,
) -> tuple[DriftPoint, ...]:
    """Fine-tune the base's trunk and measure its head on the way.

    A fine-tune leaves no state to go on from, so that one that was broken off starts again from the base.
    """
    log = DriftLog(run_dir)
    if [point.step for point in log.points] == measured_steps(spec):
        return tuple(log.points)
    if log.points:
        progress.console.print(f"{log.path}: broken off at step {log.points[-1].step}; fine-tuning starts again.")
        log.points.clear()
    trunk = load_trunk(
        base.path,
        base.family,
        dtype=torch.float32,
        device=device,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    plan = native_plan(base, recipe.head.convention)
    head = build_head(plan, text_config_of(base), dtype=torch.float32).to(device).eval()
    before = {name: parameter.detach().clone() for name, parameter in trunk.named_parameters()}
    task = progress.add_task("fine-tuning for the drift curve", total=spec.max_steps)

    def on_point(step: int, tokens: int) -> None:
        measured = partial(measure_point, recipe, inputs, trunk, head)
        log.add(measured(label=f"step {step}", step=step, tokens=tokens, change=change_of(trunk, before)))

    fine_tune(
        trunk,
        documents,
        spec,
        precision=recipe.train.precision,
        seed=recipe.seed,
        on_step=lambda done: progress.update(task, completed=done),
        on_point=on_point,
    )
    return tuple(log.points)


def measure_point(
    recipe: Recipe,
    inputs: Inputs,
    trunk: Trunk,
    head: MtpHead,
    *,
    label: str,
    step: int | None,
    tokens: int | None,
    change: float,
) -> DriftPoint:
    """Decode the held-out prompts greedily and look at every target of what was said."""
    depth = draft_depth(recipe)
    decoder = SpeculativeDecoder(trunk, HeadDrafting(head), depth, inputs.eos_ids)
    results = decoder.generate([list(one.prompt_ids) for one in inputs.held_out], recipe.evaluate.max_new_tokens)
    counts = [result.counts(prompt.id, prompt.group) for prompt, result in zip(inputs.held_out, results, strict=True)]
    batches = dense_batches(recipe, inputs, [tuple(result.token_ids) for result in results], trunk)
    dense = dense_metrics(trunk, head, batches, 1)
    return DriftPoint(
        label=label,
        step=step,
        tokens=tokens,
        trunk_change=change,
        tau=tau(counts),
        tau_ci95=tau_interval(counts),
        groups=num_groups(counts),
        overlap=dense.overlap[0] if dense.overlap else None,
        target_entropy=dense.target_entropy,
    )


def change_of(trunk: Trunk, before: Mapping[str, Tensor]) -> float:
    """Return ``|W - W0| / |W0|`` over all weights together."""
    pairs = [(parameter.detach(), before[name]) for name, parameter in trunk.named_parameters()]
    return _relative((float((new - old).square().sum()), float(old.square().sum())) for new, old in pairs)


def stored_change(checkpoint: Checkpoint, base: Checkpoint) -> float:
    """Return the same of two trunks on disk, over what both have."""
    shared = shared_tensors(checkpoint, layout_of(checkpoint), base, layout_of(base))
    return _relative(squared_change(checkpoint, key, base, base_key) for key, base_key in shared.values())


def _relative(squares: Iterable[tuple[float, float]]) -> float:
    """Return the root of the sum of squared changes over that of squared sizes."""
    pairs = list(squares)
    size = sum(size for _, size in pairs)
    return (sum(change for change, _ in pairs) / size) ** 0.5 if size else 0.0
