"""Measure the drift curve: the acceptance of an untouched head as its trunk is fine-tuned further.

The head is from ``model.head_from`` of the recipe and is never trained here. The trunks are checkpoints saved along a
fine-tune (:func:`drift_along_checkpoints`) or points of a fine-tune made here (:func:`drift_along_fine_tune`). Every
trunk decodes the same held-out prompts greedily with the head. Its text changes as it is fine-tuned, so the entropy of
the text is recorded beside the acceptance.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from mtp_inference import HeadDrafting
from mtp_train.acceptance.counts import num_groups, tau
from mtp_train.acceptance.intervals import tau_interval
from mtp_train.data.tokenize import Document
from mtp_train.data.trainer_rows import document_row, pad_rows
from mtp_train.evaluation.cells import DriftPoint
from mtp_train.evaluation.decoding import DecodingOptions, decode_prompts
from mtp_train.evaluation.results import build, read_report
from mtp_train.evaluation.settings import draft_depth, greedy
from mtp_train.heads.attention import without_cudnn_attention
from mtp_train.heads.build import build_head, graft_plan, native_plan
from mtp_train.heads.diagnose import layout_of, text_config_of
from mtp_train.heads.experts import following_autocast
from mtp_train.heads.module import MtpHead
from mtp_train.job.evaluate_run import dense_batches, held_out_prompts
from mtp_train.job.inputs import Inputs, trunk_dtype
from mtp_train.recipe.schema import FineTuneSpec, Recipe
from mtp_train.train.teacher_forced import dense_metrics
from mtp_train.trunk.load import Trunk, load_trunk
from mtp_train.upstream.accelerate_private import shared_states
from mtp_train.upstream.transformers_private import use_one_gpu
from mtp_train.weights.change import shared_tensors, squared_change
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.writing import write_json

_OF_THE_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OF_ACCELERATE = ("ACCELERATE_", "FSDP_")

OnPoint = Callable[[int, int], None]
"""Called with the number of steps done and of tokens seen, without padding."""


def measured_steps(spec: FineTuneSpec) -> list[int]:
    """Return the steps after which the head is measured, in ascending order; 0 is before the first step."""
    return sorted({0, *(max(1, round(share * spec.max_steps)) for share in spec.points)})


def fine_tune(
    trunk: Trunk,
    documents: Sequence[Document],
    spec: FineTuneSpec,
    *,
    precision: str,
    seed: int,
    on_step: Callable[[int], None],
    on_point: OnPoint,
) -> None:
    """Train all weights of a trunk on documents, in place; the trunk is in eval mode at every point.

    Args:
        trunk: The trunk, with weights in fp32.
        documents: The documents, one per row; only tokens of their loss mask are targets.
        spec: Steps, learning rate and measured points.
        precision: ``bf16`` computes matrix products in bfloat16.
        seed: Seed of the order of the documents.
        on_step: Called with the number of steps done.
        on_point: Called at each of :func:`measured_steps`.
    """
    model = trunk.causal_lm
    trunk.requires_grad_(True)
    on_point(0, 0)
    with (
        alone(),
        without_cudnn_attention(),
        following_autocast(model.config),
        tempfile.TemporaryDirectory() as unused,
    ):
        trainer = Trainer(
            model=model,
            args=_arguments(spec, unused, on_cpu=trunk.lm_head_VD.device.type == "cpu", precision=precision, seed=seed),
            train_dataset=[document_row(document.input_ids, document.loss_mask) for document in documents],
            data_collator=pad_rows,
            callbacks=[_Points(trunk, measured_steps(spec), on_step, on_point)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    trunk.requires_grad_(False).eval()


class _Points(TrainerCallback):
    """Calls a function at given steps of the training."""

    def __init__(self, trunk: Trunk, steps: Sequence[int], on_step: Callable[[int], None], on_point: OnPoint) -> None:
        self.trunk, self.steps, self.on_step, self.on_point = trunk, frozenset(steps), on_step, on_point

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Call ``on_point`` if a point is reached; the Trainer sets train mode again afterwards."""
        self.on_step(state.global_step)
        if state.global_step in self.steps:
            self.trunk.eval()
            self.on_point(state.global_step, int(state.num_input_tokens_seen))


def _arguments(spec: FineTuneSpec, directory: str, *, on_cpu: bool, precision: str, seed: int) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=spec.max_steps,
        learning_rate=spec.lr,
        warmup_steps=spec.max_steps // 10,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=spec.documents_per_step,
        train_sampling_strategy="group_by_length",
        bf16=precision == "bf16",
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        include_num_input_tokens_seen="non_padding",
        seed=seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    # By default the Trainer uses all visible GPUs in one process (DataParallel), with a batch for each.
    use_one_gpu(arguments)
    return arguments


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hide the launch within the block, so that a Trainer built there does not wait for the other processes.

    accelerate keeps its state in class attributes and in environment variables; both are restored afterwards.
    """
    states = shared_states()
    kept, environment = [dict(state) for state in states], dict(os.environ)
    for state in states:
        state.clear()
    for name in environment:
        if name in _OF_THE_LAUNCH or name.startswith(_OF_ACCELERATE):
            del os.environ[name]
    try:
        yield
    finally:
        for state, before in zip(states, kept, strict=True):
            state.clear()
            state.update(before)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


DRIFT_FILE = "drift.json"
DRIFT_ARM, DRIFT_BATCH = "graft", 16


class DriftLog:
    """The measured points of the curve, written to disk after each.

    Args:
        run_dir: The run directory; it belongs to one recipe, and so do the points.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / DRIFT_FILE
        rows = read_report(self.path) if self.path.is_file() else []
        self.points = [build(DriftPoint, row, f"{self.path}: {number}") for number, row in enumerate(rows)]

    def add(self, point: DriftPoint) -> None:
        """Add a point and write all points to disk."""
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
    """Measure the base's head on the base and on checkpoints, given by name; points on disk are not measured again."""
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
    """Fine-tune the base's trunk and measure its head at the points.

    The fine-tune saves no resume state: one that was interrupted starts again from the base.
    """
    log = DriftLog(run_dir)
    if [point.step for point in log.points] == measured_steps(spec):
        return tuple(log.points)
    if log.points:
        progress.console.print(f"{log.path}: interrupted at step {log.points[-1].step}; fine-tuning starts again.")
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
    """Decode the held-out prompts greedily, and take teacher-forced metrics on the output."""
    setting = greedy(draft_depth(recipe))
    options = DecodingOptions(
        max_new_tokens=recipe.evaluate.max_new_tokens, eos_ids=inputs.eos_ids, seed=recipe.seed, batch=DRIFT_BATCH
    )
    drafting = {DRIFT_ARM: HeadDrafting(head)}
    table = decode_prompts(trunk, drafting, held_out_prompts(inputs), [setting], options, plain_arm=None)
    records = table.decoded[DRIFT_ARM][setting]
    counts = [one.counts(setting.depth) for one in records]
    batches = dense_batches(recipe, inputs, [one.token_ids for one in records], trunk)
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
    """Return the relative change ``|W - W0| / |W0|`` over all weights of a trunk."""
    pairs = [(parameter.detach(), before[name]) for name, parameter in trunk.named_parameters()]
    return _relative((float((new - old).square().sum()), float(old.square().sum())) for new, old in pairs)


def stored_change(checkpoint: Checkpoint, base: Checkpoint) -> float:
    """Return the relative change between two trunks on disk, over the tensors that both have."""
    shared = shared_tensors(checkpoint, layout_of(checkpoint), base, layout_of(base))
    return _relative(squared_change(checkpoint, key, base, base_key) for key, base_key in shared.values())


def _relative(squares: Iterable[tuple[float, float]]) -> float:
    """Return ``sqrt(sum of squared changes / sum of squared weights)``."""
    pairs = list(squares)
    size = sum(size for _, size in pairs)
    return (sum(change for change, _ in pairs) / size) ** 0.5 if size else 0.0
