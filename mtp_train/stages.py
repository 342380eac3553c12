"""What the stages of a run and of a study share: where a run is, its trunk, its text, and where all of it came from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.progress import Progress

from mtp_train.data.tokenize import Document
from mtp_train.heads.diagnose import stored_dtype
from mtp_train.heads.trunk import Trunk, load_trunk
from mtp_train.inputs import Inputs, evaluation_dtype
from mtp_train.recipe import Recipe
from mtp_train.regeneration import regenerate_stage
from mtp_train.run_dir import checkpoint_identity, environment_facts


class Stage:
    """Where the run is, for the outcome of a failure."""

    name = "check"


def load_run_trunk(
    recipe: Recipe, inputs: Inputs, accelerator: Accelerator, device: torch.device | str | None = None
) -> Trunk:
    """Load the whole trunk, on the process's own device if no other is given."""
    return load_trunk(
        inputs.finetune.path,
        inputs.finetune.family,
        dtype=evaluation_dtype(recipe, accelerator.device, stored_dtype(inputs.finetune)),
        device=accelerator.device if device is None else device,
        adapter=inputs.adapter,
        quantization=recipe.model.quantization,
        trust_remote_code=recipe.model.trust_remote_code,
    )


def provenance(recipe: Recipe, inputs: Inputs) -> dict[str, object]:
    """Say where everything came from."""
    return {
        "trunk": checkpoint_identity(recipe.model.trunk, inputs.finetune),
        "head_from": checkpoint_identity(recipe.model.head_from or "", inputs.base) if inputs.base else None,
        "seed": recipe.seed,
        "plan": asdict(inputs.plan),
        **environment_facts(),
    }


def make_documents(
    recipe: Recipe, run_dir: Path, inputs: Inputs, trunk: Trunk, accelerator: Accelerator, progress: Progress
) -> list[Document]:
    """Return what to train on: the trunk's own responses, or the sources' text as it is."""
    if recipe.data.regenerate is None or not recipe.data.regenerate.enabled:
        return list(inputs.documents)
    documents, _ = regenerate_stage(recipe, recipe.data.regenerate, run_dir, inputs, trunk, accelerator, progress)
    return documents
