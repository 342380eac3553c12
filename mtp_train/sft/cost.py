"""What a fine-tune needs and costs, from shapes alone: memory of a process, operations, disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Size

from mtp_train.heads.trunk import Trunk
from mtp_train.losses import CHUNK_ROWS
from mtp_train.recipe import Recipe
from mtp_train.recipe_sft import SftSection
from mtp_train.sft.model import lora_weights
from mtp_train.train.cost import Cost, Sizes
from mtp_train.train.footprint import GIB, Footprint
from mtp_train.train.plan import Plan

KEPT_CHECKPOINTS = 2
"""Of the training, the newest ones."""
_MOMENTS_BYTES = 8
"""AdamW's two of a weight, in fp32."""
_LAYER_BYTES = 100
"""Kept of a token and a hidden number by one layer for its backward pass: what autograd saves of Qwen3 in transformers,
in either precision."""
_RECURRENT_BYTES = 260
"""The same of a layer with a recurrent state, by transformers' torch path; kernels for CUDA keep less."""
_RECURRENT = ("linear_attention", "mamba")
_LOGIT_BYTES = 16
"""Of a token and a word: logits as computed, in fp32, their softmax and its gradient."""


@dataclass(frozen=True)
class TuningFootprint(Footprint):
    """Bytes per process of a fine-tune, estimated."""

    learning_bytes: int = 0
    """Gradients and AdamW's moments of the trunk's weights; of LoRA its matrices, too."""

    @property
    def total_bytes(self) -> int:
        """Everything together, on the device."""
        return super().total_bytes + self.learning_bytes

    def to_text(self) -> str:
        """Return total and parts for a reader."""
        return (
            f"about {self.total_bytes / GIB:.2f} GiB: trunk {self.trunk_bytes / GIB:.2f}, its gradients and moments "
            f"{self.learning_bytes / GIB:.2f}, head with optimiser {self.head_and_optimizer_bytes / GIB:.2f}, logits "
            f"{self.loss_bytes / GIB:.2f}, activations {self.activation_bytes / GIB:.2f}"
        )


def tuning_footprint(
    recipe: Recipe, sft: SftSection, trunk: Trunk, head: Mapping[str, Size], plan: Plan
) -> TuningFootprint:
    """Estimate the memory of a fine-tune; rows are taken for full."""
    parameters = sum(parameter.numel() for parameter in trunk.parameters())
    head_parameters = sum(shape.numel() for shape in head.values())
    beside = head_parameters if sft.head == "beside" else 0
    itemsize = 2 if recipe.model.dtype == "bfloat16" or (recipe.model.dtype == "auto" and sft.lora) else 4
    if sft.lora is None:
        trained, learning = parameters, parameters * 3 * itemsize
    else:
        trained = lora_weights(trunk, sft.lora)
        learning = trained * 16
    rows, config = plan.micro_batch_sequences * plan.seq_len_tokens, trunk.config
    layers = [_RECURRENT_BYTES if kind in _RECURRENT else _LAYER_BYTES for kind in layer_kinds(trunk)]
    # What checkpointing keeps is each layer's input, and one layer whole.
    bytes_each = max(layers) + 4 * len(layers) if recipe.train.gradient_checkpointing else sum(layers)
    activations = rows * config.hidden_size * bytes_each
    # As in the training of a head on a frozen trunk, see ``train/footprint.py``.
    of_head = rows * trunk.family.state_width(config) * 4 * 30 * recipe.head.num_depths if beside else 0
    return TuningFootprint(
        trunk_parameters=parameters,
        head_parameters=head_parameters,
        trained_parameters=trained + beside,
        trunk_bytes=parameters * itemsize,
        head_and_optimizer_bytes=beside * 16,
        loss_bytes=rows * config.vocab_size * _LOGIT_BYTES + (CHUNK_ROWS * config.vocab_size * 16 if beside else 0),
        activation_bytes=activations + of_head,
        learning_bytes=learning,
    )


def layer_kinds(trunk: Trunk) -> list[str]:
    """Return what each layer of a trunk is, as its config calls it; a config that says nothing has but one kind."""
    config = trunk.config.to_dict()
    return config.get("layer_types") or ["full_attention"] * int(config["num_hidden_layers"])


def tuning_cost(recipe: Recipe, sft: SftSection, plan: Plan, sizes: Sizes, memory: Footprint) -> Cost:
    """Estimate a fine-tune; evaluation is left out, rows are taken for full."""
    tokens, depths = plan.total_tokens, recipe.head.num_depths
    beside = memory.head_parameters if sft.head == "beside" else 0
    # Forward, gradient of the inputs, gradient of the weights: two operations each. Frozen weights need none.
    each = 6 if sft.lora is None else 4
    weights = memory.trained_parameters - beside
    saved = weights * (4 + _MOMENTS_BYTES) + beside * (4 + _MOMENTS_BYTES)
    # The checkpoint in the trunk's own layout, in 16 bits; the export is linked to it.
    written = 2 * (memory.trunk_parameters + 2 * memory.head_parameters)
    of_head = 2 * sizes.lm_head * tokens * (1 + 2 * depths) if beside else 0
    return Cost(
        regenerate_flops=0,
        trunk_flops=each * sizes.trunk * tokens,
        head_flops=6 * sizes.head * tokens * depths if beside else 0,
        loss_flops=each * sizes.lm_head * tokens + of_head,
        disk_bytes=saved * KEPT_CHECKPOINTS + written,
    )
