"""The arms that take too long for the recipe, measured once: a control on the old data, and a ceiling of more steps.

Both start from the grafted head and are measured on the recipe's own held-out prompts, like the arms beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.progress import Progress

from demo_maker.texts import Texts
from mtp_inference import HeadDrafting
from mtp_train.data.records import PlainText, Record
from mtp_train.data.tokenize import Document, tokenize_records
from mtp_train.evaluation import arm_result, evaluation_settings, measure
from mtp_train.heads.attach import artifact_plan, build_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.trunk import Trunk
from mtp_train.inputs import Inputs, gather_inputs
from mtp_train.recipe import Recipe
from mtp_train.recipe_io import load_recipe
from mtp_train.stages import load_run_trunk, make_documents
from mtp_train.train.launch import make_accelerator
from mtp_train.training import train_stage
from mtp_train.weights.artifact import load_artifact
from mtp_train.weights.writing import write_json

CEILING_FACTOR = 10
CONTROL_FILES_EVERY, CONTROL_CHARS = 2, 4000
DATA = {
    "control": "the code that the base was trained on",
    "ceiling": "the trunk's own answers to the recipe's prompts",
}


def record_arms(texts: Texts, recipe_path: Path, work: Path, out: Path) -> None:
    """Train and measure both arms on the installed demo, and write them to ``out``.

    Args:
        texts: Where the control's code comes from.
        recipe_path: The recipe whose arms these stand beside.
        work: For the run directories.
        out: The file.
    """
    arms: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    steps = load_recipe(recipe_path).train.max_steps
    changes = {
        "control": ["data.regenerate.enabled=false"],
        "ceiling": [f"train.max_steps={CEILING_FACTOR * steps}"],
    }
    with Progress() as progress:
        for arm, overrides in changes.items():
            recipe = load_recipe(recipe_path, [f"run_dir={work / arm}", "track.wandb=off", *overrides])
            arms[arm], settings[arm] = _record(arm, recipe, texts, progress)
    write_json(out, {"settings": settings, "arms": arms})


def _record(arm: str, recipe: Recipe, texts: Texts, progress: Progress) -> tuple[dict[str, Any], dict[str, Any]]:
    accelerator = make_accelerator()
    inputs = gather_inputs(recipe, accelerator.num_processes, progress)
    trunk = load_run_trunk(recipe, inputs, accelerator)
    run_dir = Path(recipe.run_dir)
    run_dir.mkdir(parents=True)
    documents = _documents(arm, recipe, inputs, trunk, texts, accelerator, progress)
    train_stage(recipe, run_dir, inputs, trunk, documents, accelerator, progress)
    plan = artifact_plan(load_artifact(run_dir / "head"))
    head = build_head(plan, text_config_of(inputs.finetune), dtype=trunk.lm_head_VD.dtype).eval()
    runs, dense = measure(recipe, inputs, trunk, {arm: HeadDrafting(head)}, progress)
    result = arm_result(runs[arm], recipe.model.trunk, f"recorded:{arm}", dense[arm], runs["none"])
    # Speed is of the machine and the moment: recorded, it would stand beside figures it does not compare with.
    recorded = replace(result, measured_here=False, tokens_per_second=None, speedup=None)
    facts = {"documents": len(documents), "tokens": sum(len(document.input_ids) for document in documents)}
    return asdict(recorded), {**evaluation_settings(recipe, inputs, trunk), "data": DATA[arm], **facts}


def _documents(
    arm: str,
    recipe: Recipe,
    inputs: Inputs,
    trunk: Trunk,
    texts: Texts,
    accelerator: Accelerator,
    progress: Progress,
) -> Sequence[Document]:
    if arm == "ceiling":
        return make_documents(recipe, Path(recipe.run_dir), inputs, trunk, accelerator, progress)
    records = [
        Record(f"code#{number}", file.top, PlainText(file.text[:CONTROL_CHARS]))
        for number, file in enumerate(texts.code[::CONTROL_FILES_EVERY], start=1)
    ]
    documents, _ = tokenize_records(records, inputs.tokenizer, recipe.data.seq_len_tokens)
    return documents
