"""``mtp-train check``: both gates of a recipe, its plan and what it needs, from the configs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Size

from mtp_train.demo import resolve
from mtp_train.families import family_for
from mtp_train.heads.diagnose import head_shapes
from mtp_train.heads.lora import require_lora_targets
from mtp_train.heads.quantization import require_quantizable, trunk_bytes
from mtp_train.heads.trunk import Trunk, empty_trunk, trunk_config
from mtp_train.inputs import require_draft_vocab, require_unroll
from mtp_train.losses import CHUNK_ROWS
from mtp_train.recipe import Recipe
from mtp_train.recipe_io import dump_recipe
from mtp_train.study.material import for_objective
from mtp_train.train.cost import Cost, Sizes, active_weights, estimate_cost
from mtp_train.train.plan import Plan, make_plan
from mtp_train.weights.files import CONFIG_FILE, locate_checkpoint, read_json

GIB = 1 << 30
_FINE_TUNE_BYTES = 16
"""Of each weight of a trunk that is fine-tuned: itself, its gradient and AdamW's two moments, all in fp32."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per process, estimated."""

    trunk_parameters: int
    head_parameters: int
    trained_parameters: int
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
    cost: Cost

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        memory = {**asdict(self.memory), "total_bytes": self.memory.total_bytes}
        plan = {**asdict(self.plan), "total_tokens": self.plan.total_tokens}
        cost = {**asdict(self.cost), "total_flops": self.cost.total_flops}
        return {"recipe": asdict(self.recipe), "family": self.family, "plan": plan, "memory": memory, "cost": cost}

    def to_text(self) -> str:
        """Return the recipe and the plan for a reader."""
        plan, memory, cost = self.plan, self.memory, self.cost
        return (
            f"{dump_recipe(self.recipe)}\n"
            f"# {self.family}: trunk {memory.trunk_parameters / 1e6:.1f} M parameters, head "
            f"{memory.head_parameters / 1e6:.2f} M ({memory.trained_parameters / 1e6:.2f} M trained)\n"
            f"# {plan.max_steps} steps of {plan.sequences_per_step} x {plan.seq_len_tokens} tokens "
            f"({plan.total_tokens / 1e6:.2f} M in all), {plan.world_size} process(es), {plan.accumulation} "
            f"micro-batch(es) each\n# memory per process, about {memory.total_bytes / GIB:.2f} GiB: trunk "
            f"{memory.trunk_bytes / GIB:.2f}, "
            f"head with optimiser {memory.head_and_optimizer_bytes / GIB:.2f}, loss {memory.loss_bytes / GIB:.2f}, "
            f"activations {memory.activation_bytes / GIB:.2f}\n"
            f"# about {cost.total_flops / 1e12:.3g} TFLOP on all processes: trunk {cost.trunk_flops / 1e12:.3g}, head "
            f"{cost.head_flops / 1e12:.3g}, loss {cost.loss_flops / 1e12:.3g}, answers at most "
            f"{cost.regenerate_flops / 1e12:.3g}; disk at most {cost.disk_bytes / GIB:.2f} GiB besides answers"
            f"{self._study_text()}"
        )

    def _study_text(self) -> str:
        study = self.recipe.study
        if study is None:
            return ""
        heads = ", ".join(study.objectives)
        text = f"\n# study: {len(study.objectives)} head(s) ({heads}); operations and disk are of all of them"
        fine_tune = study.drift.fine_tune if study.drift is not None else None
        if fine_tune is not None:
            text += (
                f"\n# drift: a fine-tune of {fine_tune.max_steps} steps on one process, about "
                f"{self.memory.trunk_parameters * _FINE_TUNE_BYTES / GIB:.2f} GiB without activations"
            )
        return text


def check(recipe: Recipe, world_size: int) -> CheckResult:
    """Check a recipe against its model's config. Reads no weights.

    Raises:
        MtpError: The step does not divide, or the model is unknown, not to be had or not to be run.
    """
    path = locate_checkpoint(resolve(recipe.model.trunk))
    raw = read_json(path / CONFIG_FILE)
    family = family_for(raw, where=str(path))
    num_modules = family.declared_modules(raw) or 1
    if recipe.model.quantization is not None:
        require_quantizable(recipe.model.quantization, raw, where=path)
    convention = family.convention(recipe.head.convention)
    require_unroll(recipe, convention, num_modules)
    # Raises where the head cannot be run.
    _ = family.classes
    config = trunk_config(path, family, trust_remote_code=recipe.model.trust_remote_code)
    text_config = config.get_text_config()
    require_draft_vocab(recipe, text_config.vocab_size)
    plan = make_plan(recipe, world_size)
    trunk = empty_trunk(config, family, trust_remote_code=recipe.model.trust_remote_code)
    head = head_shapes(family, text_config, num_modules)
    trained = None
    if recipe.head.lora is not None:
        trained = require_lora_targets(recipe.head.lora, family, text_config, num_modules, convention)
    memory = estimate_memory(recipe, trunk, head, plan, trained)
    experts = int(text_config.num_experts_per_tok) if any(".experts." in name for name in head) else 1
    sizes = Sizes(
        trunk=active_weights({name: value.shape for name, value in trunk.decoder.named_parameters()}, experts),
        head=active_weights({name: shape for name, shape in head.items() if name.startswith("blocks.0.")}, experts),
        lm_head=text_config.vocab_size * text_config.hidden_size,
        head_stored=memory.head_parameters,
        state=family.state_width(text_config),
        head_trained=memory.trained_parameters,
    )
    return CheckResult(recipe, family.title, plan, memory, whole_cost(recipe, plan, sizes))


def whole_cost(recipe: Recipe, plan: Plan, sizes: Sizes) -> Cost:
    """Estimate the operations and the disk of all heads of a recipe; the answers are written once."""
    if recipe.study is None:
        return estimate_cost(recipe, plan, sizes)
    costs = [estimate_cost(for_objective(recipe, objective), plan, sizes) for objective in recipe.study.objectives]
    return replace(
        costs[0],
        trunk_flops=sum(cost.trunk_flops for cost in costs),
        head_flops=sum(cost.head_flops for cost in costs),
        loss_flops=sum(cost.loss_flops for cost in costs),
        disk_bytes=sum(cost.disk_bytes for cost in costs),
    )


def estimate_memory(
    recipe: Recipe, trunk: Trunk, head: Mapping[str, Size], plan: Plan, lora_parameters: int | None = None
) -> MemoryEstimate:
    """Estimate the memory of training from shapes alone; without LoRA all of the head is trained."""
    trunk_parameters = sum(parameter.numel() for parameter in trunk.parameters())
    head_parameters = sum(shape.numel() for shape in head.values())
    trained = head_parameters if lora_parameters is None else lora_parameters
    trunk_itemsize = 4 if recipe.model.dtype == "float32" else 2
    rows = plan.micro_batch_sequences * plan.seq_len_tokens
    depths, hidden, vocab = recipe.head.num_depths, trunk.family.state_width(trunk.config), trunk.config.vocab_size
    if recipe.objective.vocab == "draft":
        vocab = recipe.head.draft_vocab or vocab
    # The backward pass needs about 30 hidden-sized states per row and depth, of which all but two and the keys and
    # values can be made again, depth by depth.
    states = 30 + 4 * depths if recipe.train.gradient_checkpointing else 30 * depths
    return MemoryEstimate(
        trunk_parameters=trunk_parameters,
        head_parameters=head_parameters,
        trained_parameters=trained,
        trunk_bytes=trunk_bytes(trunk.causal_lm, recipe.model.quantization, trunk_itemsize),
        # Weights, gradients and AdamW's two moments, all in fp32.
        head_and_optimizer_bytes=(head_parameters + (lora_parameters or 0)) * 4 + trained * 12,
        # Teacher, student, gradient and one temporary of a chunk, in fp32.
        loss_bytes=CHUNK_ROWS * vocab * 4 * 4,
        # With the unroll's masks.
        activation_bytes=rows * hidden * 4 * states + rows * plan.seq_len_tokens * depths * (depths + 1) // 2,
    )
