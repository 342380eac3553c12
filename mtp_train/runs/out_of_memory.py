"""Explain errors of memory: name the setting to change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from mtp_train.errors import OutOfMemoryError
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.shipped import accelerate_file

_CPU_ALLOCATOR = "DefaultCPUAllocator"


@contextlib.contextmanager
def memory_is_named(recipe: Recipe, stage: Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error of the device or the machine into one with a hint.

    Args:
        recipe: The recipe.
        stage: Returns the stage that the run has reached.

    Raises:
        OutOfMemoryError: A memory allocation failed.
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
    """Return the hint for a stage that ran out of memory; settings that change no result come first."""
    train, regenerate = recipe.train, recipe.data.regenerate
    if stage == "data" and regenerate is not None:
        return f"Lower data.regenerate.batch_size, or data.regenerate.max_new_tokens ({regenerate.max_new_tokens})."
    if stage == "evaluate" and recipe.study is not None:
        return f"Lower study.batch ({recipe.study.batch}), or evaluate.max_new_tokens."
    if stage == "evaluate":
        return f"Lower evaluate.dense_tokens ({recipe.evaluate.dense_tokens}), or write model.dtype: bfloat16."
    if stage == "train" and train.micro_batch_sequences > 1:
        return f"Write train.micro_batch_sequences: 1; it is {train.micro_batch_sequences}, and changes no result."
    if stage == "train" and not train.gradient_checkpointing:
        return "Write train.gradient_checkpointing: true; it changes no result."
    shards = f"launch with {accelerate_file('fsdp2')} on several GPUs, which puts the trunk in shards"
    if stage == "train" and train.hidden_cache is None:
        return f"Write train.hidden_cache: {{}}, which trains without the trunk, or {shards}."
    if stage == "train":
        return f"Lower data.seq_len_tokens ({recipe.data.seq_len_tokens}), or {shards}."
    offload = "" if recipe.model.offload or recipe.model.quantization else " or model.offload: cpu"
    return f"Write model.dtype: bfloat16{offload}, or {shards}."
