"""The memory of a process in training, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Size

from mtp_train.heads.precision import COMPUTE_DTYPES, held_dtype
from mtp_train.heads.quantization import trunk_bytes
from mtp_train.heads.trunk import Trunk
from mtp_train.losses import CHUNK_ROWS
from mtp_train.recipe import Recipe
from mtp_train.train.plan import Plan

GIB = 1 << 30


@dataclass(frozen=True)
class Footprint:
    """Bytes per process, estimated."""

    trunk_parameters: int
    head_parameters: int
    trained_parameters: int
    trunk_bytes: int
    head_and_optimizer_bytes: int
    loss_bytes: int
    activation_bytes: int
    converted_bytes: int = 0
    """Of weights in the dtype that they are multiplied in, beside those held in another: the output matrix, and for
    products in fp32 one layer."""
    offloaded_bytes: int = 0
    """Of the trunk, in main memory or on disk."""

    @property
    def total_bytes(self) -> int:
        """Everything together, on the device."""
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
            f"optimiser {self.head_and_optimizer_bytes / GIB:.2f}, loss {self.loss_bytes / GIB:.2f}, activations "
            f"{self.activation_bytes / GIB:.2f}"
        )


def estimate_footprint(
    recipe: Recipe,
    trunk: Trunk,
    head: Mapping[str, Size],
    plan: Plan,
    device: torch.device,
    lora_parameters: int | None = None,
) -> Footprint:
    """Estimate the memory of training from shapes alone; without LoRA all of the head is trained."""
    trunk_parameters = sum(parameter.numel() for parameter in trunk.parameters())
    head_parameters = sum(shape.numel() for shape in head.values())
    trained = head_parameters if lora_parameters is None else lora_parameters
    trunk_itemsize = _held_itemsize(recipe, trunk_parameters, device)
    rows = plan.micro_batch_sequences * plan.seq_len_tokens
    depths, hidden, vocab = recipe.head.num_depths, trunk.family.state_width(trunk.config), trunk.config.vocab_size
    if recipe.objective.vocab == "draft":
        vocab = recipe.head.draft_vocab or vocab
    # The backward pass needs about 30 hidden-sized states per row and depth, of which all but two and the keys and
    # values can be made again, depth by depth.
    states = 30 + 4 * depths if recipe.train.gradient_checkpointing else 30 * depths
    # A number for each row and key of each depth.
    masks = 0 if recipe.train.attention == "flex" else rows * plan.seq_len_tokens * depths * (depths + 1) // 2
    on_device, offloaded = trunk_bytes(trunk.causal_lm, recipe.model.quantization, trunk_itemsize), 0
    if recipe.model.offload is not None:
        layers = _layer_bytes(trunk, trunk_itemsize)
        on_device, offloaded = on_device - sum(layers) + max(layers), sum(layers)
    return Footprint(
        trunk_parameters=trunk_parameters,
        head_parameters=head_parameters,
        trained_parameters=trained,
        trunk_bytes=on_device,
        # Weights, gradients and AdamW's two moments, all in fp32.
        head_and_optimizer_bytes=(head_parameters + (lora_parameters or 0)) * 4 + trained * 12,
        # Teacher, student, gradient and one temporary of a chunk, in fp32.
        loss_bytes=CHUNK_ROWS * vocab * 4 * 4,
        activation_bytes=rows * hidden * 4 * states + masks,
        converted_bytes=_converted_bytes(recipe, trunk, trunk_itemsize, vocab),
        offloaded_bytes=offloaded,
    )


def _held_itemsize(recipe: Recipe, trunk_parameters: int, device: torch.device) -> int:
    if recipe.model.dtype != "auto":
        return 4 if recipe.model.dtype == "float32" else 2
    # Nearly all releases are in bf16; the config says so too late for a model that is not downloaded yet.
    return held_dtype(torch.bfloat16, trunk_parameters, device).itemsize


def _converted_bytes(recipe: Recipe, trunk: Trunk, held: int, vocab: int) -> int:
    computed = COMPUTE_DTYPES[recipe.train.precision].itemsize
    if held == computed:
        return 0
    matrix = vocab * int(trunk.config.hidden_size)
    layer = max(_layer_bytes(trunk, 1), default=0) if computed > held else 0
    return (matrix + layer) * computed


def _layer_bytes(trunk: Trunk, itemsize: int) -> list[int]:
    return [sum(parameter.numel() for parameter in layer.parameters()) * itemsize for layer in trunk.layers]


def in_shards(whole: Footprint, trunk: Trunk, plan: Plan) -> Footprint | None:
    """Return what stays of it where trunk and head are in shards (FSDP2, ZeRO-3); None where nobody shares.

    Two of the trunk's layers are whole at a time. The rest of the trunk is whole during a step, and so are the head's
    weights and their gradients.

    Args:
        whole: A process's own, with all of the trunk, unquantised.
        trunk: The trunk, perhaps on the meta device.
        plan: Says how many processes there are.
    """
    if plan.world_size == 1:
        return None
    layers = _layer_bytes(trunk, whole.trunk_bytes // whole.trunk_parameters)
    beside = whole.trunk_bytes - sum(layers) + sum(sorted(layers)[-2:])
    in_step = 4 * (whole.head_parameters + whole.trained_parameters)
    return replace(
        whole,
        trunk_bytes=whole.trunk_bytes // plan.world_size + beside,
        head_and_optimizer_bytes=whole.head_and_optimizer_bytes // plan.world_size + in_step,
    )
