"""What a recipe may not say of heads that are not of the trunk's own kind, each with its cure."""

from __future__ import annotations

from collections.abc import Iterator

from mtp_train.recipe import Recipe


def other_kinds_are_new(recipe: Recipe) -> Iterator[str]:
    if recipe.head.kind != "mtp" and recipe.head.init != "random":
        yield (
            f"head.init: {recipe.head.init!r} with head.kind: {recipe.head.kind}; expected 'random', as no layer of a "
            "trunk is like one of such a head. Write head.init: random."
        )


def each_depth_has_a_block(recipe: Recipe) -> Iterator[str]:
    if recipe.head.kind == "medusa" and (recipe.evaluate.depth or 0) > recipe.head.num_depths:
        yield (
            f"evaluate.depth: {recipe.evaluate.depth} of a medusa head with head.num_depths: {recipe.head.num_depths}; "
            "expected no more, as each depth has a block of its own. Lower it, or raise head.num_depths."
        )


def what_sees_nothing_is_unrolled_exactly(recipe: Recipe) -> Iterator[str]:
    if recipe.head.kind == "medusa" and recipe.objective.unroll != "exact":
        yield (
            f"objective.unroll: {recipe.objective.unroll!r} with head.kind: medusa, whose depths see no rows at all; "
            "expected exact. Write objective.unroll: exact."
        )


KIND_RULES = (
    (("head.kind", "head.init"), other_kinds_are_new),
    (("head.kind", "head.num_depths", "evaluate.depth"), each_depth_has_a_block),
    (("head.kind", "objective.unroll"), what_sees_nothing_is_unrolled_exactly),
)
"""What each check reads, and the check."""
