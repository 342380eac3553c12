"""The arms that take too long for the recipe, measured once.

``control`` trains on the old data, ``ceiling`` for more steps, ``random`` from random weights with the recipe's
budget; ``ngram`` drafts from a static table of the recipe's own training text. All are measured on the recipe's own
held-out prompts, like the arms beside them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.progress import Progress

from demo_maker.table import LONGEST, TableDrafting, make_table
from demo_maker.texts import Texts
from mtp_inference import HeadDrafting
from mtp_train.arms import PLAIN
from mtp_train.data.records import PlainText, Record
from mtp_train.data.tokenize import Document, tokenize_records
from mtp_train.evaluation import arm_result, decode, evaluation_settings, measure
from mtp_train.heads.attach import artifact_plan, build_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.trunk import Trunk
from mtp_train.inputs import Inputs, gather_inputs
from mtp_train.machine import with_resolved_precision
from mtp_train.recipe import Recipe
from mtp_train.recipe_io import load_recipe
from mtp_train.report.schema import ArmResult
from mtp_train.run_inputs import hash_run_inputs
from mtp_train.serving import GREEDY
from mtp_train.stages import claim_run, load_run_trunk, make_documents
from mtp_train.train.dense import DenseMetrics
from mtp_train.train.launch import make_accelerator
from mtp_train.training import train_stage
from mtp_train.weights.artifact import load_artifact
from mtp_train.weights.writing import write_json

CEILING_FACTOR = 10
CONTROL_FILES_EVERY, CONTROL_CHARS = 2, 4000
CONTROL, CEILING, RANDOM_HEAD, NGRAM = "control", "ceiling", "random", "ngram"
ANSWERS = "the trunk's own answers to the recipe's prompts"
DATA = {
    CONTROL: "the code that the base was trained on",
    CEILING: ANSWERS,
    RANDOM_HEAD: ANSWERS,
    NGRAM: f"{ANSWERS}, counted after contexts of up to {LONGEST} tokens",
}


@dataclass
class Recording:
    """What the arms share: the trunk, its held-out prompts, and its answers, which are generated once."""

    texts: Texts
    accelerator: Accelerator
    progress: Progress
    answers: Sequence[Document] | None = None
    target_entropy: float | None = None


def record_arms(texts: Texts, recipe_path: Path, work: Path, out: Path) -> None:
    """Train and measure the recorded arms on the installed demo, and write them to ``out``.

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
        CONTROL: ["data.regenerate.enabled=false"],
        CEILING: [f"train.max_steps={CEILING_FACTOR * steps}"],
        RANDOM_HEAD: ["head.init=random"],
        NGRAM: [],
    }
    # Same heads, in half the time: the texts are read for several epochs.
    shared = ["track.wandb=off", "train.hidden_cache={}"]
    with Progress() as progress:
        recording = Recording(texts, make_accelerator(), progress)
        for arm, overrides in changes.items():
            asked = load_recipe(recipe_path, [*shared, f"run_dir={work / arm}", *overrides])
            recipe = with_resolved_precision(asked, recording.accelerator.device)
            started = time.perf_counter()
            arms[arm], settings[arm] = _record(arm, recipe, recording)
            progress.console.print(f"{arm}: tau {arms[arm]['tau']:.3f}, {time.perf_counter() - started:.0f} s")
    write_json(out, {"settings": settings, "arms": arms})


def _record(arm: str, recipe: Recipe, recording: Recording) -> tuple[dict[str, Any], dict[str, Any]]:
    accelerator, progress, run_dir = recording.accelerator, recording.progress, Path(recipe.run_dir)
    inputs = gather_inputs(recipe, accelerator.num_processes, progress)
    contents = hash_run_inputs(recipe, run_dir, progress)
    trunk = load_run_trunk(recipe, inputs, accelerator)
    inputs = claim_run(recipe, run_dir, inputs, contents, accelerator, progress)
    documents = _documents(arm, recipe, inputs, trunk, recording)
    if arm == NGRAM:
        result = _measure_table(recipe, inputs, trunk, documents, recording)
    else:
        train_stage(recipe, run_dir, inputs, trunk, documents, accelerator, progress)
        # The cache of hidden states has taken the trunk's layers.
        trunk = load_run_trunk(recipe, inputs, accelerator)
        plan = artifact_plan(load_artifact(run_dir / "head"))
        head = build_head(plan, text_config_of(inputs.finetune), dtype=trunk.lm_head_VD.dtype).eval()
        runs, dense = measure(recipe, inputs, trunk, {arm: HeadDrafting(head)}, GREEDY, progress)
        recording.target_entropy = dense[arm].target_entropy
        result = arm_result(runs[arm], recipe.model.trunk, f"recorded:{arm}", dense[arm], runs[PLAIN])
    # Speed is of the machine and the moment: recorded, it would stand beside figures it does not compare with.
    recorded = replace(result, measured_here=False, tokens_per_second=None, speedup=None)
    facts = {"documents": len(documents), "tokens": sum(len(document.input_ids) for document in documents)}
    told = {**evaluation_settings(recipe, inputs, trunk, [GREEDY]), "data": DATA[arm], **facts}
    return asdict(recorded), told


def _measure_table(
    recipe: Recipe, inputs: Inputs, trunk: Trunk, documents: Sequence[Document], recording: Recording
) -> ArmResult:
    """Decode with a static n-gram table of the documents; the text is the trunk's, whatever drafts it."""
    table = TableDrafting(make_table(documents))
    runs = decode(recipe, inputs, trunk, {NGRAM: table}, GREEDY, recording.progress)
    dense = DenseMetrics([], [], recording.target_entropy, [])
    return arm_result(runs[NGRAM], recipe.model.trunk, f"recorded:{NGRAM}", dense, runs[PLAIN])


def _documents(arm: str, recipe: Recipe, inputs: Inputs, trunk: Trunk, recording: Recording) -> Sequence[Document]:
    if arm != CONTROL:
        if recording.answers is None:
            run_dir, accelerator = Path(recipe.run_dir), recording.accelerator
            recording.answers = make_documents(recipe, run_dir, inputs, trunk, accelerator, recording.progress)
        return recording.answers
    records = [
        Record(f"code#{number}", file.top, PlainText(file.text[:CONTROL_CHARS]))
        for number, file in enumerate(recording.texts.code[::CONTROL_FILES_EVERY], start=1)
    ]
    documents, _ = tokenize_records(records, inputs.tokenizer, recipe.data.seq_len_tokens)
    return documents
