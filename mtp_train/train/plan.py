"""Plan a run's steps, and estimate their memory and disk from shapes alone.

- :class:`Plan`: how an optimiser step is divided into micro-batches and processes.
- :class:`TrainOptions`: the settings of AdamW, of its learning rate and of the loop.
- :func:`estimate_footprint` and :func:`in_shards`: bytes per process in training, whole and in shards.
- :func:`estimate_disk`: the most bytes that a run adds to the disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Size

from mtp_train.errors import RecipeError
from mtp_train.heads.experts import is_stacked
from mtp_train.heads.lora import LoraSettings, is_target
from mtp_train.heads.query_blocks import WHOLE_TOKENS
from mtp_train.losses.chunked import CHUNK_ROWS, LOGIT_BYTES, chunk_rows
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.precision import held_dtype
from mtp_train.trunk.quantise import Quantization, trunk_bytes

GIB = 1 << 30
_MASTER_BYTES = 4
"""Bytes of each of the head's weights, which are in fp32."""
_STATE_BYTES = 16
"""Bytes per weight in a resume state: the weight, AdamW's two moments and the best head, in fp32."""
_FP32_STATES, _COMPUTED_STATES = 11, 25
"""Hidden-sized states per row and depth, in fp32 and in the dtype of the products."""
_TEXT_FP32, _TEXT_COMPUTED = 6, 12
"""The same per row whose drafts do not count: up to its keys and values, with their gradients."""
NUM_HEADS = 2
"""Heads in memory while a run decodes: the retrained head and its baseline."""
_STATES_AT_ONCE = 3
"""Resume states on disk at a time: two are kept, and the oldest is removed after the new one is complete."""


@dataclass(frozen=True)
class Plan:
    """How an optimiser step is divided into micro-batches. The optimisation is the same for every world size."""

    max_steps: int
    seq_len_tokens: int
    sequences_per_step: int
    micro_batch_sequences: int
    world_size: int
    accumulation: int
    """Micro-batches per rank and step."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run, padding included."""
        return self.max_steps * self.sequences_per_step * self.seq_len_tokens

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one micro-batch of one rank, padding included: the rows of its matrix products."""
        return self.micro_batch_sequences * self.seq_len_tokens

    def share(self, micro: int, rank: int) -> slice:
        """Return the slice of a step's sequences in micro-batch ``micro`` of a rank."""
        start = (micro * self.world_size + rank) * self.micro_batch_sequences
        return slice(start, start + self.micro_batch_sequences)


def make_plan(
    *, max_steps: int, tokens_per_step: int, seq_len_tokens: int, micro_batch_sequences: int, world_size: int
) -> Plan:
    """Derive the accumulation from the tokens of a step.

    Raises:
        RecipeError: A step is not a whole number of micro-batches; the message names the nearest values.
    """
    unit = seq_len_tokens * micro_batch_sequences * world_size
    accumulation, rest = divmod(tokens_per_step, unit)
    if rest:
        below = max(1, accumulation) * unit
        raise RecipeError(
            f"train.tokens_per_step: {tokens_per_step}; expected a multiple of {unit} (data.seq_len_tokens "
            f"{seq_len_tokens} x train.micro_batch_sequences {micro_batch_sequences} x {world_size} process(es)). "
            f"Write {below} or {below + unit}."
        )
    sequences = accumulation * micro_batch_sequences * world_size
    return Plan(max_steps, seq_len_tokens, sequences, micro_batch_sequences, world_size, accumulation)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The settings of AdamW, of its learning rate and of the loop, as the recipe's ``train`` describes them."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    schedule: Literal["constant", "cosine"]
    warmup_steps: int
    max_steps: int
    log_steps: int
    save_steps: int
    depth_decay: float
    """The weight of depth k is proportional to this to the power k - 1."""

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a 0-based step: linear warm-up, then constant or a cosine down to 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        progress = (step - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


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
    decoding_bytes: int = 0
    """Bytes of the trunk and of two heads, all that decoding holds besides keys, values and activations. On a CPU the
    trunk counts twice: its matrices are held again in the layout of their products."""
    loss_rows: int = CHUNK_ROWS
    converted_bytes: int = 0
    """Bytes of weights that are held a second time in the dtype of the products: the output matrix and one layer of
    the trunk, and the head if products are in bf16. Also those of experts' gradients in passing."""
    offloaded_bytes: int = 0
    """Bytes of the trunk's layers in main memory or on disk."""
    loading_bytes: int = 0
    """Bytes of main memory while the trunk is loaded for another device; 0 on a CPU, where they are in the sum."""
    state_bytes: int = 0
    """Bytes of the hidden states of a token."""

    @property
    def total_bytes(self) -> int:
        weights = self.trunk_bytes + self.converted_bytes + self.head_and_optimizer_bytes
        return weights + self.loss_bytes + self.activation_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total_bytes": self.total_bytes}

    def to_text(self) -> str:
        elsewhere = f" ({self.offloaded_bytes / GIB:.2f} offloaded)" if self.offloaded_bytes else ""
        elsewhere += f", converted weights {self.converted_bytes / GIB:.2f}" if self.converted_bytes else ""
        return (
            f"{self.total_bytes / GIB:.2f} GiB: trunk {self.trunk_bytes / GIB:.2f}{elsewhere}, head with optimiser "
            f"{self.head_and_optimizer_bytes / GIB:.2f}, loss {self.loss_bytes / GIB:.2f} in chunks of "
            f"{self.loss_rows} rows, activations {self.activation_bytes / GIB:.2f}"
        )


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """The settings that decide how much memory training takes."""

    num_depths: int
    compute_dtype: torch.dtype
    recompute: bool
    """Whether the head's activations are recomputed in the backward pass."""
    held: str = "auto"
    """``model.dtype``."""
    quantization: Quantization | None = None
    offloads: bool = False
    is_served: bool = False
    """Whether a server or a cache gives the hidden states, so that no process loads the trunk's layers."""
    loss_vocab: int | None = None
    """Tokens that p and q are distributions over; None for the whole vocabulary."""
    lora: LoraSettings | None = None
    num_starts: int | None = None
    """Positions of each sequence whose drafts count; None for all."""

    def adapts_experts(self, name: str, shape: Size) -> bool:
        return self.lora is not None and is_target(name, self.lora.targets) and is_stacked(name, shape)


def estimate_disk(memory: Footprint) -> int:
    """Estimate the most bytes that training a head adds to the disk: resume states, head and export.

    The export's other shards are links to the trunk's.
    """
    return memory.trained_parameters * _STATE_BYTES * _STATES_AT_ONCE + memory.head_parameters * 2 * 2


def estimate_footprint(
    options: MemoryOptions,
    trunk: Trunk,
    head: Mapping[str, Size],
    plan: Plan,
    device: torch.device,
    gpu_bytes: int | None,
    *,
    lora_parameters: int | None = None,
    stored: torch.dtype = torch.bfloat16,
    packed_bytes: int | None = None,
) -> Footprint:
    """Estimate the memory of training and of decoding from shapes alone.

    Args:
        gpu_bytes: Its memory; None for any device but a CUDA or ROCm one.
        lora_parameters: Number of LoRA's weights; None if all of the head is trained.
        stored: The dtype of the checkpoint. Nearly all releases are in bf16.
        packed_bytes: Size of a trunk that is stored quantised; None for plain weights.
    """
    sizes = [parameter.numel() for parameter in trunk.parameters()]
    head_parameters = sum(shape.numel() for shape in head.values())
    trained = head_parameters if lora_parameters is None else lora_parameters
    held = held_dtype(options.held, stored, sum(sizes), device).itemsize
    vocab = options.loss_vocab or trunk.config.vocab_size
    layers = _layer_bytes(trunk, held)
    on_device = packed_bytes
    offloaded = 0
    if on_device is None:
        on_device = trunk_bytes(trunk.causal_lm, options.quantization, held)
    if options.offloads:
        on_device = on_device - sum(layers) + max(layers)
        offloaded = sum(layers)
    loading = 0
    if device.type != "cpu":
        # bitsandbytes packs each matrix on the device, as soon as it is read.
        loading = held * (sum(sizes) if options.quantization is None else max(sizes))
    if options.is_served:
        on_device = held * sum(sizes) - sum(layers)
        loading = min(loading, on_device)
    loss_rows = chunk_rows(vocab, gpu_bytes)
    return Footprint(
        trunk_parameters=sum(sizes),
        head_parameters=head_parameters,
        trained_parameters=trained,
        trunk_bytes=on_device,
        # Weights, gradients and AdamW's two moments, all in fp32.
        head_and_optimizer_bytes=(head_parameters + (lora_parameters or 0)) * 4 + trained * 12,
        loss_bytes=loss_rows * vocab * LOGIT_BYTES,
        activation_bytes=_activations_on(trunk, options, head, plan, device),
        decoding_bytes=on_device * (2 if device.type == "cpu" else 1) + NUM_HEADS * held * head_parameters,
        loss_rows=loss_rows,
        converted_bytes=_converted_bytes(options, trunk, held, vocab)
        + converted_head_bytes(options, head)
        + passing_expert_bytes(options, head),
        offloaded_bytes=offloaded,
        loading_bytes=loading,
        state_bytes=trunk.state_width * options.compute_dtype.itemsize,
    )


def _activations_on(
    trunk: Trunk, options: MemoryOptions, head: Mapping[str, Size], plan: Plan, device: torch.device
) -> int:
    width = trunk.family.state_width(trunk.config)
    layer = trunk.family.layer
    # Layers that read masks themselves: to choose keys, or for their distances.
    keeps_masks = layer is not None and (layer.frozen is not None or layer.masks_of_distances)
    if keeps_masks or (_num_modules(head) > 1 and not trunk.family.kind.parallel):
        # Such heads run whole at all positions.
        options = replace(options, num_starts=None)
    rows = plan.micro_batch_tokens
    length = plan.seq_len_tokens
    return activation_bytes(options, width, rows, length, device.type, keeps_masks=keeps_masks)


def activation_bytes(
    options: MemoryOptions, hidden: int, rows: int, seq_len_tokens: int, device: str, *, keeps_masks: bool = False
) -> int:
    """Estimate the bytes that training keeps between forward and backward pass.

    Args:
        device: torch's type of the device.
        keeps_masks: Whether the head's layer reads masks of all queries, at any length.
    """
    depths = options.num_depths
    computed = options.compute_dtype.itemsize
    # The backward pass needs about 36 hidden-sized states per row and depth, of which 11 are in fp32. With
    # checkpointing, all but six of these (the keys and values, and those around the loss) are recomputed, one depth at
    # a time.
    states = _FP32_STATES * 4 + _COMPUTED_STATES * computed
    states = states + (4 + 5 * computed) * depths if options.recompute else states * depths
    starts = rows
    kept = 0
    if options.num_starts is not None:
        starts = rows // seq_len_tokens * options.num_starts
        kept = rows * hidden * (_TEXT_FP32 * 4 + _TEXT_COMPUTED * computed)
    if keeps_masks or (device != "cpu" and seq_len_tokens <= WHOLE_TOKENS):
        # torch keeps one number per row and key of each depth.
        kept += starts * seq_len_tokens * depths * (depths + 1) // 2 * computed
    return starts * hidden * states + kept


def _converted_bytes(options: MemoryOptions, trunk: Trunk, held: int, vocab: int) -> int:
    computed = options.compute_dtype.itemsize
    if held == computed:
        return 0
    return (vocab * int(trunk.config.hidden_size) + max(_layer_bytes(trunk, 1), default=0)) * computed


def converted_head_bytes(options: MemoryOptions, head: Mapping[str, Size]) -> int:
    """Return the bytes of the copies of a head's matrices that a backward pass needs.

    autocast makes one copy of a trained matrix for all depths. Experts, and with LoRA all frozen matrices, are copied
    for each depth that their module computes. Experts with LoRA are copied in fp32 too: peft adds the product of LoRA's
    matrices to them. With checkpointing, the backward pass makes the copies again for one depth at a time.
    """
    computed = options.compute_dtype.itemsize
    depths = 1 if options.recompute else max(1, options.num_depths // max(1, _num_modules(head)))
    return computed * sum(
        shape.numel() * (depths if options.lora is not None or is_stacked(name, shape) else 1)
        for name, shape in head.items()
        if len(shape) > 1 and "embed" not in name
        if computed < _MASTER_BYTES or options.adapts_experts(name, shape)
    )


def _num_modules(head: Mapping[str, Size]) -> int:
    return len({name.split(".")[1] for name in head if name.startswith("blocks.")})


def passing_expert_bytes(options: MemoryOptions, head: Mapping[str, Size]) -> int:
    """Return the bytes of tensors that are as large as all experts, and soon freed.

    Trained experts: the gradient of one depth, and its transpose. Experts with LoRA: the product of LoRA's matrices, in
    fp32, of which peft keeps one for each tensor during a forward pass.
    """
    if options.lora is not None:
        return _MASTER_BYTES * sum(shape.numel() for name, shape in head.items() if options.adapts_experts(name, shape))
    largest = max((shape.numel() for name, shape in head.items() if is_stacked(name, shape)), default=0)
    return 2 * largest * options.compute_dtype.itemsize


def _layer_bytes(trunk: Trunk, itemsize: int) -> list[int]:
    return [sum(parameter.numel() for parameter in layer.parameters()) * itemsize for layer in trunk.layers]


def in_shards(
    whole: Footprint, options: MemoryOptions, trunk: Trunk, head: Mapping[str, Size], plan: Plan, *, is_adapted: bool
) -> Footprint | None:
    """Return the footprint of a process with trunk and head in shards (FSDP2, ZeRO-3); None for one process.

    Two of the trunk's layers are whole at a time, and the rest of the trunk all the time. The head's weights are whole
    during a step, and so are their gradients, in fp32. These bytes are FSDP2's: ZeRO-3 loads the whole trunk first,
    and gathers the head in fp32.

    Args:
        whole: The footprint of a process with the whole trunk, unquantised.
        is_adapted: Whether an adapter is put on the trunk, which is loaded whole then.
    """
    if plan.world_size == 1:
        return None
    layers = [] if options.is_served else _layer_bytes(trunk, whole.trunk_bytes // whole.trunk_parameters)
    beside = whole.trunk_bytes - sum(layers)
    gathered, gradients, converted = 4 * whole.head_parameters, 4 * whole.trained_parameters, whole.converted_bytes
    in_step = gathered + gradients
    if options.compute_dtype.itemsize < _MASTER_BYTES and options.lora is None:
        # Gathered in bf16 already. Beside the sum of gradients there is that of one micro-batch, as large.
        gathered //= 2
        converted -= converted_head_bytes(options, head)
    loading = whole.loading_bytes
    if layers and loading and not is_adapted:
        # One layer, and copies of its experts while they are merged.
        loading = beside + 2 * max(layers)
    return replace(
        whole,
        loading_bytes=loading,
        trunk_bytes=beside + sum(layers) // plan.world_size + sum(sorted(layers)[-2:]),
        head_and_optimizer_bytes=whole.head_and_optimizer_bytes // plan.world_size + in_step,
        converted_bytes=converted,
    )
