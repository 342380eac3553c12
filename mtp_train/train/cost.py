"""What a run costs, from the config alone: floating-point operations and disk.

Only products with weights are counted, two operations for a weight and a token (six with the backward pass); attention
scores are left out, which at a few thousand tokens are some per cent. A mixture counts the experts that a token uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Size

from mtp_train.recipe import Recipe
from mtp_train.train.plan import Plan

_STATE_BYTES = 12
"""Of a weight in the resume state: itself and AdamW's two moments, in fp32."""
_STATES_AT_ONCE = 2
"""The old state goes when the new one is whole."""
_KEPT_BYTES = {"auto": 4, "bf16": 2, "fp8": 1}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Weights that take part in a product, by what reads them."""

    trunk: int
    """The trunk's layers, of a mixture those that one token uses."""
    head: int
    """One head module, likewise."""
    head_keys: int
    """Those of it that stand before keys and values, where later modules read the text for these alone; else 0."""
    lm_head: int
    """The output matrix."""
    head_stored: int
    """All weights of the head."""
    state: int
    """Numbers of a hidden state."""
    head_trained: int
    """Those that are trained, and lie in the resume state: LoRA's matrices, or all."""


@dataclass(frozen=True)
class Cost:
    """Operations of the whole run on all processes, and the most bytes that it adds to the disk."""

    regenerate_flops: int
    """At most: every answer as long as it may be."""
    trunk_flops: int
    head_flops: int
    loss_flops: int
    """Products with the output matrix: the trunk's once a target, the head's twice a depth."""
    disk_bytes: int
    """Resume state, head and export, whose unchanged shards are links; hidden states and the trunk's layers where they
    are kept there."""

    @property
    def total_flops(self) -> int:
        """Everything together."""
        return self.regenerate_flops + self.trunk_flops + self.head_flops + self.loss_flops


def active_weights(shapes: Mapping[str, Size], experts_per_token: int) -> int:
    """Count the weights of matrices that one token is multiplied with; embeddings are looked up and not counted."""
    total = 0
    for name, shape in shapes.items():
        if len(shape) < 2 or "embed" in name or "lm_head" in name:
            continue
        stacked = ".experts." in name and len(shape) == 3
        total += shape.numel() * experts_per_token // shape[0] if stacked else shape.numel()
    return total


def key_weights(shapes: Mapping[str, Size]) -> int:
    """Count those of a head module's weights that a token is multiplied with before its keys and values are there."""
    after = (".mlp.", ".o_proj.")
    return active_weights({name: shape for name, shape in shapes.items() if not any(one in name for one in after)}, 1)


def estimate_cost(recipe: Recipe, plan: Plan, sizes: Sizes, offloaded_bytes: int = 0) -> Cost:
    """Estimate a run; evaluation is left out.

    Args:
        recipe: The recipe.
        plan: Its numbers for so many processes.
        sizes: What its model has.
        offloaded_bytes: Of the trunk, on disk.
    """
    tokens, depths = plan.total_tokens, recipe.head.num_depths
    per_token = sizes.head * depths + sizes.head_keys * (depths * (depths - 1) // 2)
    regenerate = recipe.data.regenerate
    # A server's work is not this run's.
    is_ours = regenerate is not None and regenerate.enabled and regenerate.endpoint is None
    written = (regenerate.max_prompts or 0) * regenerate.max_new_tokens if regenerate and is_ours else 0
    teacher = 0 if recipe.objective.loss == "ce" else 1
    return Cost(
        regenerate_flops=2 * (sizes.trunk + sizes.lm_head) * written,
        trunk_flops=2 * sizes.trunk * tokens,
        head_flops=6 * per_token * tokens,
        loss_flops=2 * sizes.lm_head * tokens * (teacher + 2 * depths),
        disk_bytes=sizes.head_trained * _STATE_BYTES * _STATES_AT_ONCE
        + sizes.head_stored * 2 * 2
        + _hidden_cache_bytes(recipe, tokens * sizes.state)
        + offloaded_bytes,
    )


def _hidden_cache_bytes(recipe: Recipe, numbers: int) -> int:
    """At most: no token comes twice, and states are computed in fp32."""
    spec = recipe.train.hidden_cache
    return 0 if spec is None else min(numbers * _KEPT_BYTES[spec.dtype], int(spec.max_gib * (1 << 30)))
