"""Measure the arms that take too long for the demo's recipe, and record them.

``control`` trains on the base's data, ``ceiling`` for more steps, ``random`` from random weights with the recipe's
number of steps. ``table`` drafts from a static table of the recipe's training text. All are measured on the recipe's
held-out prompts, like its own arms.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from demo_maker.table import LONGEST, TableDrafting, make_table
from demo_maker.texts import Texts
from mtp_inference import HeadDrafting
from mtp_inference.drafters.drafter import Drafting
from mtp_train.acceptance.names import CEILING, CONTROL, RANDOM, TABLE
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.writing import write_json
from mtp_train.data.records import PlainText, Record
from mtp_train.data.tokenize import Document, tokenize_records
from mtp_train.evaluation.grid import greedy
from mtp_train.evaluation.statistics import make_cell
from mtp_train.heads.build import build_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs.evaluate_run import evaluation_settings, measure
from mtp_train.runs.regeneration import data_stage
from mtp_train.runs.run import Run
from mtp_train.runs.run_directory import RunDirectory
from mtp_train.runs.training import train_stage
from mtp_train.runs.trunks import decoding_trunk
from mtp_train.train.launch import RunAccelerator, make_accelerator
from mtp_train.train.machine import device_name
from mtp_train.trunk.precision import resolve_precision

CEILING_FACTOR = 10
CONTROL_FILES_EVERY, CONTROL_CHARS = 2, 4000
ANSWERS = "the trunk's own answers to the recipe's prompts"
DATA = {
    CONTROL: "the code that the base was trained on",
    CEILING: ANSWERS,
    RANDOM: ANSWERS,
    TABLE: f"{ANSWERS}, counted after contexts of up to {LONGEST} tokens",
}


@dataclass
class Recording:
    """The trunk, its held-out prompts, and its answers, which all recorded arms share."""

    texts: Texts
    accelerator: RunAccelerator
    progress: Progress
    answers: Sequence[Document] | None = None
    target_entropy: float | None = None


def record_arms(texts: Texts, recipe_path: Path, work: Path, out: Path) -> None:
    """Train and measure the recorded arms on the installed demo, and write them to ``out``.

    Args:
        texts: The texts; ``control`` trains on their code.
        recipe_path: The recipe whose report shows these arms.
        work: Parent of the run directories.
        out: The file to write.
    """
    arms: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    steps = load_recipe(recipe_path).train.max_steps
    changes = {
        CONTROL: ["data.regenerate=null"],
        CEILING: [f"train.max_steps={CEILING_FACTOR * steps}"],
        RANDOM: ["head.init=random"],
        TABLE: [],
    }
    # The cache of hidden states halves the time over several epochs, with the same heads.
    shared = ["track.wandb=off", "train.hidden_cache={}"]
    with Progress() as progress:
        recording = Recording(texts, make_accelerator(), progress)
        for arm, overrides in changes.items():
            asked = load_recipe(recipe_path, [*shared, f"run_dir={work / arm}", *overrides])
            automatic = resolve_precision("auto", recording.accelerator.device).precision
            directory = RunDirectory(work / arm)
            recipe = directory.with_precision(asked, automatic)
            started = time.perf_counter()
            run = Run.begin(recipe, directory, recording.accelerator, progress)
            arms[arm], settings[arm] = _record(arm, run, recording)
            progress.console.print(f"{arm}: tau {arms[arm]['tau']:.3f}, {time.perf_counter() - started:.0f} s")
    write_json(out, {"settings": settings, "arms": arms})


def _record(arm: str, run: Run, recording: Recording) -> tuple[dict[str, Any], dict[str, Any]]:
    decoding_trunk(run)
    run.claim()
    documents, setting = _documents(arm, run, recording), greedy(run.recipe.draft_depth)
    drafting: Drafting = TableDrafting(make_table(documents))
    if arm != TABLE:
        train_stage(run, documents)
        plan, dtype = load_artifact(run.directory.path / "head"), decoding_trunk(run).lm_head_VD.dtype
        head = build_head(plan, text_config_of(run.inputs.finetune), dtype=dtype).eval()
        drafting = HeadDrafting(head)
    trunk = decoding_trunk(run)
    _, drafted = measure(run, trunk, {arm: drafting}, [setting])
    result = make_cell(drafted, setting).result
    # A table has no distribution to measure the entropy of the text with, which is the other arms'.
    recording.target_entropy = result.target_entropy or recording.target_entropy
    # Speeds are not recorded, since they do not compare with speeds of another machine.
    no_speed = dict.fromkeys(("tokens_per_second", "speedup", "speedup_ci95", "break_even_tau"))
    own = {"head": f"recorded:{arm}", "measured_here": False, "target_entropy": recording.target_entropy}
    facts = {"documents": len(documents), "tokens": sum(len(document.input_ids) for document in documents)}
    told = evaluation_settings(run.recipe, run.inputs, [setting])
    told |= {"dtype": trunk.dtype_name, "device": device_name(trunk.lm_head_VD.device)}
    return {**asdict(result), **no_speed, **own}, {**told, "data": DATA[arm], **facts}


def _documents(arm: str, run: Run, recording: Recording) -> Sequence[Document]:
    if arm != CONTROL:
        if recording.answers is None:
            recording.answers = data_stage(run)
        return recording.answers
    records = [
        Record(f"code#{number}", file.top, PlainText(file.text[:CONTROL_CHARS]))
        for number, file in enumerate(recording.texts.code[::CONTROL_FILES_EVERY], start=1)
    ]
    documents, _ = tokenize_records(records, run.inputs.tokenizer, run.recipe.data.seq_len_tokens)
    return documents
