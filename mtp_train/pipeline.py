"""The main job from end to end: check, graft, regenerate, train, evaluate, gate, export.

Every stage leaves something whole in the run directory and is skipped where that is already there, so that a killed run
goes on from the stage it had reached. Training and data know nothing of the decoder: it is handed to them here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from rich.console import Console
from rich.progress import Progress

from mtp_train.data.frequency import frequent_tokens, keep_targets
from mtp_train.data.pack import global_batches
from mtp_train.data.tokenize import Document
from mtp_train.errors import GateRefusedError, MtpError, OutputExistsError, RecipeError, TrainingError
from mtp_train.evaluation import evaluate_run
from mtp_train.heads.attach import build_head, trained_head
from mtp_train.heads.diagnose import layout_of, stored_dtype, text_config_of
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk, load_trunk
from mtp_train.inputs import Inputs, evaluation_dtype, gather_inputs
from mtp_train.losses import LossKind
from mtp_train.recipe import Recipe
from mtp_train.regeneration import regenerate_stage
from mtp_train.report.table import summary
from mtp_train.report.write import write_report
from mtp_train.run_dir import (
    PROVENANCE_FILE,
    Outcome,
    checkpoint_identity,
    claim,
    clear_leftovers,
    environment_facts,
    read_outcome,
    require_ours,
    write_outcome,
)
from mtp_train.train.log import RunLog
from mtp_train.train.loop import train_head
from mtp_train.train.module import HeadTraining
from mtp_train.weights.adapted import write_adapted
from mtp_train.weights.artifact import Artifact, load_artifact, save_artifact
from mtp_train.weights.files import read_json
from mtp_train.weights.writing import full_disk_is_named

HEAD, STATE, EXPORT = "head", "state", "export"
# Evaluation runs on the main process while the others wait; no collective may time out meanwhile.
_PATIENCE = timedelta(hours=24)


def run(recipe: Recipe, console: Console) -> Outcome:
    """Run a recipe to its outcome, and record it in the run directory.

    Returns:
        The outcome; of an earlier run where that one had finished.

    Raises:
        MtpError: The user's input is wrong, or the gate refused; the outcome is recorded first where the run directory
            is ours to write to.
    """
    run_dir = Path(recipe.run_dir)
    require_ours(run_dir, recipe)
    earlier = read_outcome(run_dir)
    if earlier is not None and earlier.finished:
        console.print(f"{run_dir}: finished before ({earlier.reason}); nothing left to do.")
        return earlier
    stage = Stage()
    try:
        accelerator = make_accelerator(recipe)
        quiet = not console.is_terminal or not accelerator.is_main_process
        progress_bars = Progress(console=console, disable=quiet, transient=True)
        with full_disk_is_named(run_dir, what="the run"), progress_bars as progress:
            outcome = run_stages(recipe, run_dir, accelerator, console, progress, stage)
    except MtpError as error:
        refused = isinstance(error, GateRefusedError)
        reason, reached = ("gate_refused", "done") if refused else ("bad_input", stage.name)
        if not isinstance(error, OutputExistsError):
            record_failure(run_dir, Outcome(error.exit_code, reason, str(error), reached))
        raise
    except Exception as error:
        record_failure(run_dir, Outcome(1, "bug", f"{type(error).__name__}: {error}", stage.name))
        raise
    if accelerator.is_main_process:
        write_outcome(run_dir, outcome)
    return outcome


def record_failure(run_dir: Path, outcome: Outcome) -> None:
    """Record how a run failed, from the launcher's first process."""
    # The launcher's rank: processes that do not know one another all take themselves for the main one.
    if os.environ.get("RANK", "0") == "0":
        # A disk without room for the outcome must not hide what the error says.
        with contextlib.suppress(OSError):
            write_outcome(run_dir, outcome)


class Stage:
    """Where the run is, for the outcome of a failure."""

    name = "check"


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Build the accelerator that the launcher's settings and the recipe ask for.

    Raises:
        TrainingError: The launcher started several processes that do not know each other: each would train alone.
    """
    accelerator = Accelerator(
        mixed_precision="bf16" if recipe.train.precision == "bf16" else "no",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)],
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise TrainingError(
            f"launcher: started {launched} processes, of which accelerate joins {accelerator.num_processes}; expected "
            "one group. On CPUs set ACCELERATE_USE_CPU=true and use recipes/accelerate/cpu_ddp.yaml."
        )
    return accelerator


def run_stages(
    recipe: Recipe, run_dir: Path, accelerator: Accelerator, console: Console, progress: Progress, stage: Stage
) -> Outcome:
    """Go through the stages. Only the main process evaluates, exports and prints."""
    inputs = gather_inputs(recipe, accelerator.num_processes, progress)
    trunk = load_run_trunk(recipe, inputs, accelerator)
    main = accelerator.is_main_process
    # Nothing is written before all inputs have proved good: a cured recipe may then use the same directory.
    if main:
        clear_leftovers(run_dir)
        claim(run_dir, recipe, provenance(recipe, inputs))
    accelerator.wait_for_everyone()
    if not (run_dir / HEAD).is_dir():
        stage.name = "data"
        documents = make_documents(recipe, run_dir, inputs, trunk, accelerator, progress)
        stage.name = "train"
        train_stage(recipe, run_dir, inputs, trunk, documents, accelerator, progress)
    accelerator.wait_for_everyone()
    if not main:
        return Outcome(0, "done", "", "done")
    stage.name = "evaluate"
    evaluation = evaluate_run(recipe, run_dir, inputs, trunk, progress)
    report = evaluation.report
    write_report(
        report, run_dir, provenance=read_json(run_dir / PROVENANCE_FILE), marginal_ci95=evaluation.marginal_ci95
    )
    console.print(summary(report))
    if not evaluation.gate.passed:
        raise GateRefusedError(evaluation.gate.reason)
    stage.name = "export"
    message = f"{evaluation.gate.reason}."
    if recipe.export.enabled and not (run_dir / EXPORT).exists():
        head = load_artifact(run_dir / HEAD).head
        layout, link = layout_of(inputs.finetune), recipe.export.link
        write_adapted(
            inputs.finetune, layout, head, run_dir / EXPORT, adapter=inputs.adapter, link=link, progress=progress
        )
    if recipe.export.enabled:
        message += f" Exported to {run_dir / EXPORT}."
    return Outcome(0, "done", message, "done")


def load_run_trunk(recipe: Recipe, inputs: Inputs, accelerator: Accelerator) -> Trunk:
    """Load the trunk once for all stages."""
    return load_trunk(
        inputs.finetune.path,
        inputs.finetune.family,
        dtype=evaluation_dtype(recipe, accelerator.device, stored_dtype(inputs.finetune)),
        device=accelerator.device,
        adapter=inputs.adapter,
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


def regenerate_only(recipe: Recipe, progress: Progress) -> dict[str, int]:
    """Do the regeneration of a recipe and nothing else; a later ``run`` of the recipe goes on from it.

    Raises:
        RecipeError: The recipe does not regenerate.
    """
    if recipe.data.regenerate is None or not recipe.data.regenerate.enabled:
        raise RecipeError(["data.regenerate: off; expected it enabled. Write data.regenerate.enabled: true."])
    run_dir = Path(recipe.run_dir)
    require_ours(run_dir, recipe)
    accelerator = make_accelerator(recipe)
    inputs = gather_inputs(recipe, accelerator.num_processes, progress)
    trunk = load_run_trunk(recipe, inputs, accelerator)
    if accelerator.is_main_process:
        claim(run_dir, recipe, provenance(recipe, inputs))
    accelerator.wait_for_everyone()
    _, counts = regenerate_stage(recipe, recipe.data.regenerate, run_dir, inputs, trunk, accelerator, progress)
    return asdict(counts)


def train_stage(
    recipe: Recipe,
    run_dir: Path,
    inputs: Inputs,
    trunk: Trunk,
    documents: Sequence[Document],
    accelerator: Accelerator,
    progress: Progress,
) -> None:
    """Train the head and save it as the run's artifact."""
    accelerator.gradient_accumulation_steps = inputs.plan.accumulation
    head = build_head(inputs.head_plan, text_config_of(inputs.finetune), dtype=torch.float32)
    draft_vocab = chosen_vocab(recipe, inputs, documents, len(trunk.lm_head_VD))
    if draft_vocab is not None and recipe.objective.vocab == "draft":
        documents = keep_targets(documents, set(draft_vocab.tolist()))
    module = HeadTraining(
        trunk,
        head,
        num_depths=recipe.head.num_depths,
        kind=loss_kind(recipe),
        temperature=recipe.objective.temperature,
        on_policy=recipe.objective.on_policy,
        apart=recipe.objective.unroll == "fastmtp",
        recompute=recipe.train.gradient_checkpointing,
        draft_vocab=draft_vocab if recipe.objective.vocab == "draft" else None,
    ).to(accelerator.device)
    task = progress.add_task("training the head", total=inputs.plan.max_steps)

    def make_log(resume_step: int) -> RunLog | None:
        if not accelerator.is_main_process:
            return None
        return RunLog(
            run_dir,
            wandb=recipe.track.wandb,
            project=recipe.track.project,
            config=asdict(recipe),
            resume_step=resume_step,
        )

    train_head(
        module,
        recipe=recipe,
        plan=inputs.plan,
        batch_fn=global_batches(
            documents,
            seq_len_tokens=recipe.data.seq_len_tokens,
            pack=recipe.data.pack,
            sequences_per_step=inputs.plan.sequences_per_step,
            seed=recipe.seed,
        ),
        accelerator=accelerator,
        state_dir=run_dir / STATE,
        make_log=make_log,
        on_step=lambda done: progress.update(task, completed=done),
    )
    if accelerator.is_main_process:
        save_artifact(trained_artifact(recipe, inputs, head, draft_vocab), run_dir / HEAD)


def chosen_vocab(recipe: Recipe, inputs: Inputs, documents: Sequence[Document], vocab_size: int) -> torch.Tensor | None:
    """Return the tokens that the head may draft, int32 and ascending; None for all."""
    if recipe.head.draft_vocab is None:
        return None
    return torch.tensor(
        frequent_tokens(documents, recipe.head.draft_vocab, vocab_size, inputs.eos_ids), dtype=torch.int32
    )


def trained_artifact(recipe: Recipe, inputs: Inputs, head: MtpHead, draft_vocab: torch.Tensor | None) -> Artifact:
    """Put the trained weights into the head directory's form."""
    plan = inputs.head_plan
    return Artifact(
        family=plan.family,
        layout=plan.layout,
        num_modules=plan.num_modules,
        num_depths=recipe.head.num_depths,
        convention=plan.convention,
        head=trained_head(plan, head.state_dict()),
        notes={"trunk": recipe.model.trunk, "head_from": recipe.model.head_from, "steps": recipe.train.max_steps},
        draft_vocab=draft_vocab,
    )


def loss_kind(recipe: Recipe) -> LossKind:
    """Resolve ``objective.loss: auto``.

    On the trunk's own responses ``kl`` drafts as well as ``ce`` under greedy verification and overlaps more with p,
    which counts once drafts are sampled. Corpus text is not the trunk's own: there p says more than the next token.
    """
    return "kl" if recipe.objective.loss == "auto" else recipe.objective.loss
