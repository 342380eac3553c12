"""Open ``model.head_from``: a checkpoint with a head, or the trained head of a run that has exported no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mtp_train.acceptance.names import VANILLA
from mtp_train.checkpoints.artifact import Artifact, load_artifact
from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.locations import head_directory, open_location
from mtp_train.errors import RecipeError
from mtp_train.heads.build import HeadPlan, graft_artifact_plan, graft_plan
from mtp_train.recipe.schema import Recipe


@dataclass(frozen=True)
class RunHead:
    """An opened head directory; its trunk is not opened."""

    path: Path
    artifact: Artifact


def open_head_source(location: str) -> Checkpoint | RunHead:
    """Open the source of a head.

    Raises:
        CheckpointError: It is neither a checkpoint nor a run with a trained head, or it is damaged.
    """
    directory = head_directory(location)
    return open_location(location) if directory is None else RunHead(directory, load_artifact(directory))


def source_plan(recipe: Recipe, finetune: Checkpoint, source: Checkpoint | RunHead) -> HeadPlan:
    """Plan to start from the head of ``model.head_from``.

    Raises:
        CheckpointError: The source has no complete head, or it does not fit the trunk.
        UnsupportedModelError: The family has no convention of the recipe's name.
    """
    convention = recipe.head.convention
    if isinstance(source, Checkpoint):
        return graft_plan(finetune, source, convention)
    trusts = recipe.model.trust_remote_code
    return graft_artifact_plan(finetune, source.artifact, source.path, convention, trust_remote_code=trusts)


def require_source_model(recipe: Recipe) -> None:
    """Check that ``model.head_from`` is a model where the recipe uses its trunk or its files, and not a head alone.

    Raises:
        RecipeError: It is a head alone.
    """
    location, arms = recipe.model.head_from, recipe.evaluate.arms
    if location is None or head_directory(location) is None:
        return
    found = f"model.head_from: {location} has a head and no exported checkpoint"
    if recipe.study is not None:
        raise RecipeError(f"{found}, with study; expected a checkpoint. Name the base in model.head_from.")
    if VANILLA in arms:
        kept = ", ".join(arm for arm in arms if arm != VANILLA)
        raise RecipeError(
            f"{found}, with the arm vanilla, the model of model.head_from; expected a checkpoint. Write "
            f"evaluate.arms: [{kept}], or name the base in model.head_from."
        )
