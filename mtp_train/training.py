"""Train the head of a run on its trunk, and save it as the run's artifact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.progress import Progress

from mtp_train.data.frequency import frequent_tokens, keep_targets
from mtp_train.data.pack import global_batches
from mtp_train.data.tokenize import Document
from mtp_train.heads.attach import build_head, trained_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.trunk import Trunk
from mtp_train.inputs import Inputs
from mtp_train.losses import LossKind
from mtp_train.recipe import Recipe
from mtp_train.train.log import RunLog
from mtp_train.train.loop import train_head
from mtp_train.train.module import HeadTraining
from mtp_train.weights.artifact import Artifact, save_artifact

HEAD, STATE = "head", "state"


def train_stage(
    recipe: Recipe,
    run_dir: Path,
    inputs: Inputs,
    trunk: Trunk,
    documents: Sequence[Document],
    accelerator: Accelerator,
    progress: Progress,
) -> None:
    """Train the head and save it as the run's artifact. Where the trunk is sharded, only shards are left of it."""
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
        compute_dtype=torch.bfloat16 if recipe.train.precision == "bf16" else None,
    )
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

    weights = train_head(
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
        save_artifact(trained_artifact(recipe, inputs, weights, draft_vocab), run_dir / HEAD)


def chosen_vocab(recipe: Recipe, inputs: Inputs, documents: Sequence[Document], vocab_size: int) -> torch.Tensor | None:
    """Return the tokens that the head may draft, int32 and ascending; None for all."""
    if recipe.head.draft_vocab is None:
        return None
    return torch.tensor(
        frequent_tokens(documents, recipe.head.draft_vocab, vocab_size, inputs.eos_ids), dtype=torch.int32
    )


def trained_artifact(
    recipe: Recipe, inputs: Inputs, weights: dict[str, torch.Tensor], draft_vocab: torch.Tensor | None
) -> Artifact:
    """Put the trained weights into the head directory's form."""
    plan = inputs.head_plan
    return Artifact(
        family=plan.family,
        layout=plan.layout,
        num_modules=plan.num_modules,
        num_depths=recipe.head.num_depths,
        convention=plan.convention,
        head=trained_head(plan, weights),
        notes={"trunk": recipe.model.trunk, "head_from": recipe.model.head_from, "steps": recipe.train.max_steps},
        draft_vocab=draft_vocab,
    )


def loss_kind(recipe: Recipe) -> LossKind:
    """Resolve ``objective.loss: auto``.

    On the trunk's own responses ``kl`` drafts as well as ``ce`` under greedy verification and overlaps more with p,
    which counts once drafts are sampled. Corpus text is not the trunk's own: there p says more than the next token.
    """
    return "kl" if recipe.objective.loss == "auto" else recipe.objective.loss
