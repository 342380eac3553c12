"""Estimate disk and memory of a run from shapes alone, and explain errors of memory.

- :func:`estimate_disk`: the most bytes that a run adds to the disk.
- :func:`estimate_footprint` and :func:`in_shards`: bytes per process in training, whole and in shards.
- :func:`memory_is_named`: turns an out-of-memory error into one that names the setting to change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Size

from mtp_train.errors import OutOfMemoryError
from mtp_train.heads.experts import is_stacked
from mtp_train.heads.lora import is_target
from mtp_train.losses.chunked import CHUNK_ROWS, LOGIT_BYTES, chunk_rows
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.shipped import accelerate_file
from mtp_train.train.plan import Plan
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.precision import COMPUTE_DTYPES, held_dtype
from mtp_train.trunk.quantise import trunk_bytes

_MASTER_BYTES = 4
"""Bytes of each of the head's weights, which are in fp32."""
_STATE_BYTES = 12
"""Bytes per weight in a resume state: the weight and AdamW's two moments, in fp32."""
_STATES_AT_ONCE = 3
"""Resume states on disk at a time: two are kept, and the oldest is removed after the new one is complete."""
_KEPT_BYTES = {"auto": 4, "bf16": 2, "fp8": 1}

GIB = 1 << 30


@dataclass(frozen=True)
class Footprint:
    """Estimated bytes per process."""

    trunk_parameters: int
    head_parameters: int
    trained_parameters: int
    trunk_bytes: int
    head_and_optimizer_bytes: int
    loss_bytes: int
    activation_bytes: int
    loss_rows: int = CHUNK_ROWS
    """Target rows of one chunk of the loss."""
    converted_bytes: int = 0
    """Bytes of weights that are held a second time in the dtype of the products: the output matrix, one layer of the
    trunk if products are in fp32, and the head if they are in bf16. Also those of experts' gradients in passing."""
    offloaded_bytes: int = 0
    """Bytes of the trunk's layers in main memory or on disk."""
    loading_bytes: int = 0
    """Bytes of main memory while the trunk is loaded for another device; 0 on a CPU, where they are in the sum."""

    @property
    def total_bytes(self) -> int:
        """Sum of all bytes on the device."""
        weights = self.trunk_bytes + self.converted_bytes + self.head_and_optimizer_bytes
        return weights + self.loss_bytes + self.activation_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "total_bytes": self.total_bytes}

    def to_text(self) -> str:
        """Return total and parts for a reader."""
        elsewhere = f" ({self.offloaded_bytes / GIB:.2f} offloaded)" if self.offloaded_bytes else ""
        elsewhere += f", converted weights {self.converted_bytes / GIB:.2f}" if self.converted_bytes else ""
        return (
            f"about {self.total_bytes / GIB:.2f} GiB: trunk {self.trunk_bytes / GIB:.2f}{elsewhere}, head with "
            f"optimiser {self.head_and_optimizer_bytes / GIB:.2f}, loss {self.loss_bytes / GIB:.2f} in chunks of "
            f"{self.loss_rows} rows, activations {self.activation_bytes / GIB:.2f}"
        )


def estimate_disk(recipe: Recipe, plan: Plan, state_width: int, memory: Footprint) -> int:
    """Estimate the most bytes that training a head adds to the disk: resume states, hidden states, head and export.

    The export's other shards are links to the trunk's.

    Args:
        recipe: The recipe.
        plan: The recipe's numbers for a number of processes.
        state_width: Numbers in a hidden state.
        memory: Weights of the head.
    """
    states = memory.trained_parameters * _STATE_BYTES * _STATES_AT_ONCE
    return states + memory.head_parameters * 2 * 2 + _hidden_cache_bytes(recipe, plan.total_tokens * state_width)


def _hidden_cache_bytes(recipe: Recipe, numbers: int) -> int:
    """Return the most bytes of a hidden-state cache: no token occurs twice, and states are computed in fp32."""
    spec = recipe.train.hidden_cache
    return 0 if spec is None else min(numbers * _KEPT_BYTES[spec.dtype], int(spec.max_gib * (1 << 30)))


def estimate_footprint(
    recipe: Recipe,
    trunk: Trunk,
    head: Mapping[str, Size],
    plan: Plan,
    device: torch.device,
    gpu_bytes: int | None,
    lora_parameters: int | None = None,
) -> Footprint:
    """Estimate the memory of training from shapes alone.

    Args:
        recipe: The recipe, its precision resolved.
        trunk: The trunk, possibly on the meta device.
        head: Shapes of the head's weights.
        plan: The recipe's numbers.
        device: The device of a process.
        gpu_bytes: Its memory; None for any device but a CUDA or ROCm one.
        lora_parameters: Number of LoRA's weights; None if all of the head is trained.
    """
    trunk_parameters = sum(parameter.numel() for parameter in trunk.parameters())
    head_parameters = sum(shape.numel() for shape in head.values())
    trained = head_parameters if lora_parameters is None else lora_parameters
    trunk_itemsize = _held_itemsize(recipe, trunk_parameters, device)
    rows = plan.micro_batch_tokens
    hidden, vocab = trunk.family.state_width(trunk.config), trunk.config.vocab_size
    if recipe.objective.vocab == "draft":
        vocab = recipe.head.draft_vocab or vocab
    quantization, where = recipe.model.quantization, recipe.model.trunk
    on_device, offloaded = trunk_bytes(trunk.causal_lm, quantization, trunk_itemsize, where=where), 0
    if recipe.model.offload is not None:
        layers = _layer_bytes(trunk, trunk_itemsize)
        on_device, offloaded = on_device - sum(layers) + max(layers), sum(layers)
    loss_rows = chunk_rows(vocab, gpu_bytes)
    return Footprint(
        trunk_parameters=trunk_parameters,
        head_parameters=head_parameters,
        trained_parameters=trained,
        trunk_bytes=on_device,
        # Weights, gradients and AdamW's two moments, all in fp32.
        head_and_optimizer_bytes=(head_parameters + (lora_parameters or 0)) * 4 + trained * 12,
        loss_bytes=loss_rows * vocab * LOGIT_BYTES,
        activation_bytes=activation_bytes(recipe, hidden, rows, plan.seq_len_tokens),
        loss_rows=loss_rows,
        converted_bytes=_converted_bytes(recipe, trunk, trunk_itemsize, vocab)
        + converted_head_bytes(recipe, head)
        + passing_expert_bytes(recipe, head),
        offloaded_bytes=offloaded,
        loading_bytes=0 if device.type == "cpu" else _loading_bytes(recipe, trunk, trunk_itemsize),
    )


def _loading_bytes(recipe: Recipe, trunk: Trunk, itemsize: int) -> int:
    sizes = [parameter.numel() for parameter in trunk.parameters()]
    # bitsandbytes packs each matrix on the device, as soon as it is read.
    return itemsize * (sum(sizes) if recipe.model.quantization is None else max(sizes))


def activation_bytes(recipe: Recipe, hidden: int, rows: int, seq_len_tokens: int) -> int:
    """Estimate the bytes that training keeps between forward and backward pass.

    Args:
        recipe: The recipe.
        hidden: Width of the head's states.
        rows: Tokens of a micro-batch.
        seq_len_tokens: Length of a sequence.
    """
    depths = recipe.head.num_depths
    # The backward pass needs about 30 hidden-sized states per row and depth. With checkpointing, all but two of these
    # and the keys and values are recomputed, one depth at a time.
    states = 30 + 4 * depths if recipe.train.gradient_checkpointing else 30 * depths
    # One number per row and key of each depth.
    masks = rows * seq_len_tokens * depths * (depths + 1) // 2
    return rows * hidden * 4 * states + masks


def _held_itemsize(recipe: Recipe, trunk_parameters: int, device: torch.device) -> int:
    if recipe.model.dtype != "auto":
        return 4 if recipe.model.dtype == "float32" else 2
    # Nearly all releases are in bf16. The dtype of a model that is not downloaded yet is unknown here.
    return held_dtype(torch.bfloat16, trunk_parameters, device).itemsize


def _converted_bytes(recipe: Recipe, trunk: Trunk, held: int, vocab: int) -> int:
    computed = COMPUTE_DTYPES[recipe.train.precision].itemsize
    if held == computed:
        return 0
    matrix = vocab * int(trunk.config.hidden_size)
    layer = max(_layer_bytes(trunk, 1), default=0) if computed > held else 0
    return (matrix + layer) * computed


def converted_head_bytes(recipe: Recipe, head: Mapping[str, Size]) -> int:
    """Return the bytes of the copies of a head's matrices that a backward pass needs.

    autocast makes one copy of a trained matrix for all depths. Experts, and with LoRA all frozen matrices, are copied
    for each depth that their module computes. Experts with LoRA are copied in fp32 too: peft adds the product of LoRA's
    matrices to them. With checkpointing, the backward pass makes the copies again for one depth at a time.

    Args:
        recipe: The recipe.
        head: Shapes of the head's weights.
    """
    computed, is_adapted = COMPUTE_DTYPES[recipe.train.precision].itemsize, recipe.head.lora is not None
    num_modules = len({name.split(".")[1] for name in head if name.startswith("blocks.")})
    depths = 1 if recipe.train.gradient_checkpointing else max(1, recipe.head.num_depths // max(1, num_modules))
    copied = 0
    for name, shape in head.items():
        if len(shape) < 2 or "embed" in name:
            continue
        if computed < _MASTER_BYTES or _is_adapted_expert(recipe, name, shape):
            copied += shape.numel() * (depths if is_adapted or is_stacked(name, shape) else 1)
    return computed * copied


def passing_expert_bytes(recipe: Recipe, head: Mapping[str, Size]) -> int:
    """Return the bytes of tensors that are as large as those of all experts, and soon freed.

    Trained experts: the gradient of one depth, and its transpose. Experts with LoRA: the product of LoRA's matrices, in
    fp32, of which peft keeps one for each tensor during a forward pass.

    Args:
        recipe: The recipe.
        head: Shapes of the head's weights.
    """
    experts = {name: shape for name, shape in head.items() if is_stacked(name, shape)}
    if recipe.head.lora is not None:
        adapted = (shape.numel() for name, shape in experts.items() if _is_adapted_expert(recipe, name, shape))
        return _MASTER_BYTES * sum(adapted)
    largest = max((shape.numel() for shape in experts.values()), default=0)
    return 2 * largest * COMPUTE_DTYPES[recipe.train.precision].itemsize


def _is_adapted_expert(recipe: Recipe, name: str, shape: Size) -> bool:
    lora = recipe.head.lora
    return lora is not None and is_target(name, lora.targets) and is_stacked(name, shape)


def _layer_bytes(trunk: Trunk, itemsize: int) -> list[int]:
    return [sum(parameter.numel() for parameter in layer.parameters()) * itemsize for layer in trunk.layers]


def in_shards(whole: Footprint, trunk: Trunk, plan: Plan, *, is_adapted: bool) -> Footprint | None:
    """Return the footprint of a process with trunk and head in shards (FSDP2, ZeRO-3); None for one process.

    Two of the trunk's layers are whole at a time. The rest of the trunk is whole during a step, and so are the head's
    weights and their gradients. ``loading_bytes`` is that of FSDP2: ZeRO-3 loads the whole trunk first.

    Args:
        whole: The footprint of a process with the whole trunk, unquantised.
        trunk: The trunk, possibly on the meta device.
        plan: Gives the number of processes.
        is_adapted: Whether an adapter is put on the trunk, which is loaded whole then.
    """
    if plan.world_size == 1:
        return None
    layers = _layer_bytes(trunk, whole.trunk_bytes // whole.trunk_parameters)
    beside = whole.trunk_bytes - sum(layers) + sum(sorted(layers)[-2:])
    in_step = 4 * (whole.head_parameters + whole.trained_parameters)
    loading = whole.loading_bytes
    if loading and not is_adapted:
        # One layer, and copies of its experts while they are merged.
        loading = whole.trunk_bytes - sum(layers) + 2 * max(layers)
    return replace(
        whole,
        loading_bytes=loading,
        trunk_bytes=whole.trunk_bytes // plan.world_size + beside,
        head_and_optimizer_bytes=whole.head_and_optimizer_bytes // plan.world_size + in_step,
    )


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
