"""Open ``model.head_from``: a checkpoint with a head, or a head alone.

A head alone is the trained head of a run, a head directory, or a draft model of ours or of a third party.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mtp_train.acceptance.names import VANILLA
from mtp_train.checkpoints.artifact import Artifact, OwnOutput, load_artifact
from mtp_train.checkpoints.demo import resolve
from mtp_train.checkpoints.files import CONFIG_FILE, Checkpoint, is_gguf, read_config
from mtp_train.checkpoints.locations import RECIPE_FILE, head_directory, is_run, locate_checkpoint, open_location
from mtp_train.checkpoints.writing import held_tensor
from mtp_train.errors import RecipeError, UnsupportedModelError
from mtp_train.families import draft_kind, of_kind
from mtp_train.head_kinds import find_head_kind
from mtp_train.heads.build import HeadPlan, deepest, graft_artifact_plan, graft_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.draft_model import DraftModel, draft_model, draft_plan
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.schema import Recipe

SAME_ROWS = 0.1
"""Largest relative distance between a draft model's output matrix and rows of its trunk's before a fine-tune of it."""


@dataclass(frozen=True)
class LoneHead:
    """An opened head without a trunk: a head directory, or a draft model."""

    path: Path
    stored: Artifact | DraftModel

    @property
    def kind(self) -> str:
        return self.stored.kind.name if isinstance(self.stored, DraftModel) else self.stored.family.kind

    @property
    def num_modules(self) -> int:
        return self.stored.num_modules


def open_head_source(location: str) -> Checkpoint | LoneHead:
    directory = head_directory(location)
    if directory is not None:
        return LoneHead(directory, load_artifact(directory))
    checkpoint = open_location(location)
    draft = draft_model(checkpoint)
    return checkpoint if draft is None else LoneHead(checkpoint.path, draft)


def source_plan(recipe: Recipe, finetune: Checkpoint, source: Checkpoint | LoneHead) -> HeadPlan:
    head, found = recipe.head, "mtp" if isinstance(source, Checkpoint) else source.kind
    if found != head.kind:
        raise RecipeError(
            f"head.kind: {head.kind}, and {source.path} has a head of kind {found}; expected the same kind. Write "
            f"head.kind: {found}, or head.init: random for a new head."
        )
    if isinstance(source, Checkpoint):
        return graft_plan(finetune, source, head.convention)
    if isinstance(source.stored, DraftModel):
        plan = _of_draft(source.stored, finetune)
    else:
        trusts = recipe.model.trust_remote_code
        plan = graft_artifact_plan(finetune, source.stored, source.path, head.convention, trust_remote_code=trusts)
    if plan.output is not None and head.draft_vocab is not None:
        raise RecipeError(
            f"head.draft_vocab: {head.draft_vocab}, and {source.path} has an output matrix of its own; expected its "
            "tokens. Write head.draft_vocab: null."
        )
    most = deepest(plan)
    if find_head_kind(head.kind).parallel and most is not None and head.num_depths > most:
        raise RecipeError(
            f"head.num_depths: {head.num_depths}, and {source.path} has {most} block(s), one for each depth; expected "
            f"at most {most}. Write head.num_depths: {most}."
        )
    return plan


def _of_draft(draft: DraftModel, trunk: Checkpoint) -> HeadPlan:
    """Return the plan of a draft model. Where its output matrix is a copy of the trunk's rows, those rows are used."""
    plan, text_config = draft_plan(draft, trunk), text_config_of(trunk)
    usual = of_kind(trunk.family, draft.kind.name).wiring.trunk_layers(text_config)
    if draft.trunk_layers not in (None, usual):
        raise UnsupportedModelError(
            f"{draft.checkpoint.path}: reads the trunk's layers {draft.trunk_layers}; expected {usual}, which all "
            "engines agree on. Start a new head with head.init: random."
        )
    if plan.output is None:
        return plan
    layout, weight, ids_R = plan.layout, plan.output.weight, plan.output.token_ids_R
    own_RD = weight.load()
    rows_RD = trunk.read(layout.lm_head_key if layout.lm_head_key in trunk.tensors else layout.embed_key)
    if ids_R is not None:
        # Ascending, as vocabularies are here.
        ids_R, order_R = ids_R.sort()
        own_RD, rows_RD = own_RD[order_R], rows_RD[ids_R]
    distance = torch.linalg.norm(own_RD.float() - rows_RD.float()) / torch.linalg.norm(own_RD.float())
    if distance <= SAME_ROWS:
        return replace(plan, output=None, draft_vocab=None if ids_R is None else ids_R.int())
    return replace(plan, output=OwnOutput(held_tensor(weight.key, weight.dtype, own_RD), ids_R))


def require_source_model(recipe: Recipe) -> None:
    """Check that ``model.head_from`` is a model where the recipe uses its trunk or its files, and not a head alone."""
    location, arms = recipe.model.head_from, recipe.evaluate.arms
    if location is None or (VANILLA not in arms and recipe.study is None) or not is_lone(location):
        return
    found = f"model.head_from: {location} has a head and no exported checkpoint with its trunk"
    if recipe.study is not None:
        raise RecipeError(f"{found}, with study; expected a checkpoint. Name the base in model.head_from.")
    kept = ", ".join(arm for arm in arms if arm != VANILLA)
    raise RecipeError(
        f"{found}, with the arm vanilla, the model of model.head_from; expected a checkpoint. Write "
        f"evaluate.arms: [{kept}], or name the base in model.head_from."
    )


def is_lone(location: str) -> bool:
    """Return whether a location is a head without a trunk; reads no weights."""
    if head_directory(location) is not None:
        return True
    path = locate_checkpoint(resolve(location))
    return not is_gguf(path) and draft_kind(read_config(path / CONFIG_FILE)) is not None


def trunk_of(location: str) -> str | None:
    """Return the trunk that the head of a run was trained on; None for any other head without a trunk."""
    run = Path(location).expanduser()
    if not is_run(run):
        return None
    model = load_recipe(run / RECIPE_FILE).model
    return model.trunk if model.adapter is None else None
