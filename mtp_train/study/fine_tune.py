"""Fine-tune a trunk as its users do, with transformers' Trainer, and stop at points on the way to look at it.

Only to watch an untouched head go stale: nothing is saved, and nothing is resumed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from mtp_train.data.rows import document_row, pad_rows
from mtp_train.data.tokenize import Document
from mtp_train.heads.sdpa import without_cudnn_attention
from mtp_train.heads.trunk import Trunk
from mtp_train.recipe_study import FineTuneSpec

_OF_THE_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OF_ACCELERATE = ("ACCELERATE_", "FSDP_")

OnPoint = Callable[[int, int], None]
"""Given the steps done and the tokens seen, padding left out."""


def measured_steps(spec: FineTuneSpec) -> list[int]:
    """Return the steps after which the head is measured, ascending; 0 stands for before the first."""
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
    """Train all of a trunk's weights on documents, in place; it is left in eval mode at every point.

    Args:
        trunk: Its weights in fp32.
        documents: Each is a row of its own; only the tokens of its loss mask are learnt.
        spec: How long and how fast.
        precision: ``bf16`` multiplies matrices in bfloat16.
        seed: Of the order of the documents.
        on_step: Called with the steps done.
        on_point: Called at each of :func:`measured_steps`.
    """
    model = trunk.causal_lm
    trunk.requires_grad_(True)
    on_point(0, 0)
    with alone(), without_cudnn_attention(), tempfile.TemporaryDirectory() as unused:
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
    """Stops at points on the way."""

    def __init__(self, trunk: Trunk, steps: Sequence[int], on_step: Callable[[int], None], on_point: OnPoint) -> None:
        self.trunk, self.steps, self.on_step, self.on_point = trunk, frozenset(steps), on_step, on_point

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure where a point is reached; the Trainer itself goes back to train mode."""
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
    if arguments.n_gpu > 1:
        # The Trainer would spread every batch over all the GPUs that it sees, and take a batch for each.
        arguments._n_gpu = 1
    return arguments


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hide the launch from what is built meanwhile: the other processes of it take no part, and would be waited for.

    accelerate keeps its state in class attributes and in the environment; both are as they were afterwards.
    """
    states: list[dict[str, Any]] = [cls._shared_state for cls in (PartialState, AcceleratorState, GradientState)]
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
