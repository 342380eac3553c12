"""Say which setting would have saved the memory that did not suffice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from mtp_train.errors import OutOfMemoryError
from mtp_train.recipe import Recipe

_CPU_ALLOCATOR = "DefaultCPUAllocator"


@contextlib.contextmanager
def memory_is_named(recipe: Recipe, stage: Callable[[], str]) -> Iterator[None]:
    """Turn a device or a machine that is full into an error with a cure.

    Args:
        recipe: The recipe.
        stage: Returns the stage that the run has reached.

    Raises:
        OutOfMemoryError: Memory did not suffice.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _CPU_ALLOCATOR in str(error)
        if not is_full:
            raise
        found = str(error).strip().partition("\n")[0].partition(" GPU ")[0] or "no memory left"
        raise OutOfMemoryError(
            f"stage '{stage()}': out of memory ({found.rstrip('. ')}); expected it to suffice. {cure(recipe, stage())}"
        ) from error


def cure(recipe: Recipe, stage: str) -> str:
    """Return what to change for a stage that ran out of memory; what changes no result comes first."""
    train, regenerate = recipe.train, recipe.data.regenerate
    if stage == "data" and regenerate is not None:
        return f"Lower data.regenerate.batch_size, or data.regenerate.max_new_tokens ({regenerate.max_new_tokens})."
    if stage == "drift":
        return (
            "Write study.drift: null, or name checkpoints of a fine-tune that ran elsewhere in study.drift.checkpoints."
        )
    if stage == "evaluate" and recipe.study is not None:
        return f"Lower study.batch ({recipe.study.batch}), or evaluate.max_new_tokens."
    if stage == "evaluate":
        return f"Lower evaluate.dense_tokens ({recipe.evaluate.dense_tokens}), or write model.dtype: bfloat16."
    if stage == "train" and train.micro_batch_sequences > 1:
        return f"Write train.micro_batch_sequences: 1; it is {train.micro_batch_sequences}, and changes no result."
    if stage == "train" and not train.gradient_checkpointing:
        return "Write train.gradient_checkpointing: true; it changes no result."
    if stage == "train" and recipe.sft is not None:
        smaller = "'sft.lora={r: 16}', which trains few weights" if recipe.sft.lora is None else "model.dtype: bfloat16"
        return f"Write {smaller}, or lower data.seq_len_tokens ({recipe.data.seq_len_tokens})."
    shards = "launch with recipes/accelerate/fsdp2.yaml on several GPUs, which puts the trunk in shards"
    if stage == "train" and train.hidden_cache is None:
        return f"Write train.hidden_cache: {{}}, which trains without the trunk, or {shards}."
    if stage == "train":
        return f"Lower data.seq_len_tokens ({recipe.data.seq_len_tokens}), or {shards}."
    offload = "" if recipe.model.offload or recipe.model.quantization else " or model.offload: cpu"
    return f"Write model.dtype: bfloat16{offload}, or {shards}."
