"""``mtp-train check``: both gates of a recipe, its plan and what it needs, from the configs alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from mtp_train.demo import resolve
from mtp_train.families import family_for
from mtp_train.heads.diagnose import head_shapes
from mtp_train.inputs import require_draft_vocab
from mtp_train.losses import CHUNK_ROWS
from mtp_train.recipe import Recipe
from mtp_train.recipe_io import dump_recipe
from mtp_train.train.plan import Plan, make_plan
from mtp_train.weights.files import CONFIG_FILE, locate_checkpoint, read_json

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per process, estimated; activations assume one micro-batch and no gradient checkpointing."""

    trunk_parameters: int
    head_parameters: int
    trunk_bytes: int
    head_and_optimizer_bytes: int
    loss_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return self.trunk_bytes + self.head_and_optimizer_bytes + self.loss_bytes + self.activation_bytes


@dataclass(frozen=True)
class CheckResult:
    """A recipe that passed both gates."""

    recipe: Recipe
    family: str
    plan: Plan
    memory: MemoryEstimate

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        memory = {**asdict(self.memory), "total_bytes": self.memory.total_bytes}
        plan = {**asdict(self.plan), "total_tokens": self.plan.total_tokens}
        return {"recipe": asdict(self.recipe), "family": self.family, "plan": plan, "memory": memory}

    def to_text(self) -> str:
        """Return the recipe and the plan for a reader."""
        plan, memory = self.plan, self.memory
        return (
            f"{dump_recipe(self.recipe)}\n"
            f"# {self.family}: trunk {memory.trunk_parameters / 1e6:.1f} M parameters, head "
            f"{memory.head_parameters / 1e6:.2f} M\n"
            f"# {plan.max_steps} steps of {plan.sequences_per_step} x {plan.seq_len_tokens} tokens "
            f"({plan.total_tokens / 1e6:.2f} M in all), {plan.world_size} process(es), {plan.accumulation} "
            f"micro-batch(es) each\n# memory per process, about {memory.total_bytes / GIB:.2f} GiB: trunk "
            f"{memory.trunk_bytes / GIB:.2f}, "
            f"head with optimiser {memory.head_and_optimizer_bytes / GIB:.2f}, loss {memory.loss_bytes / GIB:.2f}, "
            f"activations {memory.activation_bytes / GIB:.2f}"
        )


def check(recipe: Recipe, world_size: int) -> CheckResult:
    """Check a recipe against its model's config. Reads no weights.

    Raises:
        MtpError: The step does not divide, or the model is unknown or not to be had.
    """
    path = locate_checkpoint(resolve(recipe.model.trunk))
    family = family_for(read_json(path / CONFIG_FILE), where=str(path))
    family.convention(recipe.head.convention)
    config = AutoConfig.from_pretrained(path, trust_remote_code=recipe.model.trust_remote_code)
    require_draft_vocab(recipe, config.get_text_config().vocab_size)
    plan = make_plan(recipe, world_size)
    return CheckResult(recipe, family.title, plan, estimate_memory(recipe, config, plan))


def estimate_memory(recipe: Recipe, config: PretrainedConfig, plan: Plan) -> MemoryEstimate:
    """Estimate the memory of training from the config alone."""
    with torch.device("meta"):
        trunk = AutoModelForCausalLM.from_config(config, trust_remote_code=recipe.model.trust_remote_code)
    trunk_parameters = sum(parameter.numel() for parameter in trunk.parameters())
    text_config = config.get_text_config()
    shapes = head_shapes(family_for(config.to_dict(), where=recipe.model.trunk), text_config, 1)
    head_parameters = sum(shape.numel() for shape in shapes.values())
    trunk_itemsize = 4 if recipe.model.dtype == "float32" else 2
    rows = plan.micro_batch_sequences * plan.seq_len_tokens
    depths, hidden, vocab = recipe.head.num_depths, text_config.hidden_size, text_config.vocab_size
    return MemoryEstimate(
        trunk_parameters=trunk_parameters,
        head_parameters=head_parameters,
        trunk_bytes=trunk_parameters * trunk_itemsize,
        # Weights, gradients and AdamW's two moments, all in fp32.
        head_and_optimizer_bytes=head_parameters * 16,
        # Teacher, student, gradient and one temporary of a chunk, in fp32.
        loss_bytes=CHUNK_ROWS * vocab * 4 * 4,
        # About 30 hidden-sized states kept per row and depth for the backward pass, and the unroll's masks.
        activation_bytes=rows * depths * hidden * 4 * 30 + rows * plan.seq_len_tokens * depths * (depths + 1) // 2,
    )
