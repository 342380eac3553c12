"""Estimate a fine-tune from shapes alone: memory of a process, disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Size

from mtp_train.job.sft.tuned_model import lora_weights
from mtp_train.losses.chunked import LOGIT_BYTES, chunk_rows
from mtp_train.recipe.schema import Recipe, SftSection
from mtp_train.train.estimate import GIB, Footprint, converted_head_bytes, passing_expert_bytes
from mtp_train.train.plan import Plan
from mtp_train.trunk.load import Trunk

KEPT_CHECKPOINTS = 2
"""Number of newest training checkpoints on disk."""
_MOMENTS_BYTES = 8
"""Bytes per weight of AdamW's two moments, in fp32."""
_LAYER_BYTES = 100
"""Bytes per token and hidden dimension that a layer keeps for its backward pass, as autograd saves for Qwen3 in
transformers, in either precision."""
_RECURRENT_BYTES = 260
"""The same for a layer with a recurrent state, on transformers' torch path; kernels for CUDA keep less."""
_RECURRENT = ("linear_attention", "mamba")
_LOGIT_BYTES = 16
"""Bytes per token and vocabulary entry: logits as computed, logits in fp32, their softmax and its gradient."""


@dataclass(frozen=True)
class TuningFootprint(Footprint):
    """Estimated bytes per process of a fine-tune."""

    learning_bytes: int = 0
    """Gradients and AdamW's moments of the trunk's weights; with LoRA, of its matrices, and the matrices themselves."""

    @property
    def total_bytes(self) -> int:
        """Sum of all bytes on the device."""
        return super().total_bytes + self.learning_bytes

    def to_text(self) -> str:
        """Return total and parts for a reader."""
        return (
            f"about {self.total_bytes / GIB:.2f} GiB: trunk {self.trunk_bytes / GIB:.2f}, copied for its products "
            f"{self.converted_bytes / GIB:.2f}, its gradients and moments {self.learning_bytes / GIB:.2f}, head with "
            f"optimiser {self.head_and_optimizer_bytes / GIB:.2f}, logits {self.loss_bytes / GIB:.2f}, activations "
            f"{self.activation_bytes / GIB:.2f}"
        )


def tuning_footprint(
    recipe: Recipe, sft: SftSection, trunk: Trunk, head: Mapping[str, Size], plan: Plan, gpu_bytes: int | None
) -> TuningFootprint:
    """Estimate the memory of a fine-tune, for rows without padding; ``gpu_bytes`` as for a head on a frozen trunk."""
    parameters = sum(parameter.numel() for parameter in trunk.parameters())
    head_parameters = sum(shape.numel() for shape in head.values())
    beside = head_parameters if sft.head == "beside" else 0
    itemsize = 2 if recipe.model.dtype == "bfloat16" or (recipe.model.dtype == "auto" and sft.lora) else 4
    if sft.lora is None:
        trained, learning = parameters, parameters * 3 * itemsize
    else:
        trained = lora_weights(trunk, sft.lora)
        learning = trained * 16
    rows, config = plan.micro_batch_tokens, trunk.config
    # autocast copies every matrix in a forward pass, but not an embedding that only looks up.
    embedded = 0 if config.tie_word_embeddings else trunk.causal_lm.get_input_embeddings().weight.numel()
    copied = 2 * (parameters - embedded) if itemsize == 4 and recipe.train.precision == "bf16" else 0
    copied += converted_head_bytes(recipe, head) + passing_expert_bytes(recipe, head) if beside else 0
    layers = [_RECURRENT_BYTES if kind in _RECURRENT else _LAYER_BYTES for kind in layer_kinds(trunk)]
    # Checkpointing keeps each layer's input, and all activations of one layer.
    bytes_each = max(layers) + 4 * len(layers) if recipe.train.gradient_checkpointing else sum(layers)
    activations = rows * config.hidden_size * bytes_each
    # As for a head on a frozen trunk, see ``train/estimate.py``.
    of_head = rows * trunk.family.state_width(config) * 4 * 30 * recipe.head.num_depths if beside else 0
    loss_rows = chunk_rows(config.vocab_size, gpu_bytes)
    return TuningFootprint(
        trunk_parameters=parameters,
        head_parameters=head_parameters,
        trained_parameters=trained + beside,
        trunk_bytes=parameters * itemsize,
        head_and_optimizer_bytes=beside * 16,
        loss_bytes=rows * config.vocab_size * _LOGIT_BYTES
        + (loss_rows * config.vocab_size * LOGIT_BYTES if beside else 0),
        activation_bytes=activations + of_head,
        converted_bytes=copied,
        learning_bytes=learning,
    )


def layer_kinds(trunk: Trunk) -> list[str]:
    """Return the kind of each layer of a trunk by its config; without ``layer_types`` all layers are of one kind."""
    config = trunk.config.to_dict()
    return config.get("layer_types") or ["full_attention"] * int(config["num_hidden_layers"])


def tuning_disk(memory: Footprint) -> int:
    """Estimate the most bytes that a fine-tune adds to the disk."""
    saved = memory.trained_parameters * (4 + _MOMENTS_BYTES)
    # The checkpoint in the trunk's own layout, in 16 bits; the export is linked to it.
    return saved * KEPT_CHECKPOINTS + 2 * (memory.trunk_parameters + 2 * memory.head_parameters)
