"""Train the head of a run on its trunk, and save it as the run's artifact."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.progress import Progress

from mtp_train.data.frequency import frequent_tokens, keep_targets
from mtp_train.data.pack import global_batches
from mtp_train.data.tokenize import Document
from mtp_train.heads.attach import build_head, trained_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.isolate import isolated_hidden
from mtp_train.heads.lora import merged_weights, put_on_lora
from mtp_train.heads.module import MtpHead
from mtp_train.heads.precision import COMPUTE_DTYPES
from mtp_train.heads.trunk import Trunk
from mtp_train.inputs import Inputs
from mtp_train.losses import LossKind
from mtp_train.machine import settle_threads
from mtp_train.measuring import make_selection, part_documents, renumbered
from mtp_train.recipe import Recipe
from mtp_train.run_inputs import ADAPTER, TRUNK
from mtp_train.train.hidden_cache import (
    HiddenCache,
    HiddenFn,
    build_cache,
    cache_identity,
    digest_of,
    layout_for,
    require_room,
    write_manifest,
)
from mtp_train.train.log import RunLog
from mtp_train.train.loop import train_head
from mtp_train.train.module import HeadTraining
from mtp_train.train.shard import HiddenInShards, shards_trunk
from mtp_train.weights.artifact import Artifact, save_artifact

HEAD, STATE, HIDDEN = "head", "state", "hidden"


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
    rows = recipe.train.micro_batch_sequences * recipe.data.seq_len_tokens
    settle_threads("training", rows, inputs.finetune, accelerator.device, progress.console)
    accelerator.gradient_accumulation_steps = inputs.plan.accumulation
    head = build_head(inputs.head_plan, text_config_of(inputs.finetune), dtype=torch.float32)
    if recipe.head.lora is not None:
        put_on_lora(head, recipe.head.lora, seed=recipe.seed)
    draft_vocab = chosen_vocab(recipe, inputs, documents, len(trunk.lm_head_VD))
    if draft_vocab is not None and recipe.objective.vocab == "draft":
        documents = keep_targets(documents, set(draft_vocab.tolist()))
    module = head_training(recipe, trunk, head, draft_vocab)
    training, measured = part_documents(recipe, documents)
    cache = hidden_cache(recipe, run_dir, inputs, module, documents, accelerator, progress)
    batches = global_batches(
        [documents[index] for index in training],
        seq_len_tokens=recipe.data.seq_len_tokens,
        pack=recipe.data.pack,
        sequences_per_step=inputs.plan.sequences_per_step,
        seed=recipe.seed,
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
        batch_fn=lambda step: renumbered(batches(step), training),
        accelerator=accelerator,
        cache=cache,
        selection=make_selection(recipe, inputs, trunk, documents, measured, cache, run_dir / STATE, accelerator),
        state_dir=run_dir / STATE,
        make_log=make_log,
        on_step=lambda done: progress.update(task, completed=done),
    )
    if accelerator.is_main_process:
        save_artifact(trained_artifact(recipe, inputs, weights, draft_vocab), run_dir / HEAD)


def head_training(recipe: Recipe, trunk: Trunk, head: MtpHead, draft_vocab: torch.Tensor | None) -> HeadTraining:
    """Put trunk and head together as the recipe says."""
    return HeadTraining(
        trunk,
        head,
        num_depths=recipe.head.num_depths,
        kind=loss_kind(recipe),
        temperature=recipe.objective.temperature,
        on_policy=recipe.objective.on_policy,
        apart=recipe.objective.unroll == "fastmtp",
        recompute=recipe.train.gradient_checkpointing,
        attention=recipe.train.attention,
        draft_vocab=draft_vocab if recipe.objective.vocab == "draft" else None,
        rows_in=recipe.objective.rows,
        compute_dtype=COMPUTE_DTYPES[recipe.train.precision],
    )


def hidden_cache(
    recipe: Recipe,
    run_dir: Path,
    inputs: Inputs,
    module: HeadTraining,
    documents: Sequence[Document],
    accelerator: Accelerator,
    progress: Progress,
) -> HiddenCache | None:
    """Return the trunk's states of all documents, once they are on the disk; the trunk is left without its layers.

    Raises:
        TrainingError: There is no room, or the trunk is quantised and to be in shards.
    """
    spec, trunk, device = recipe.train.hidden_cache, module.trunk, accelerator.device
    if spec is None:
        return None
    hidden_fn: HiddenFn
    if shards_trunk(accelerator):
        hidden_fn = HiddenInShards(trunk, accelerator)
    else:
        hidden_fn = partial(isolated_hidden, trunk.to(device))
    with module.computing():
        layout = layout_for(hidden_fn, documents, spec.dtype, device)
        precision, quantization = recipe.train.precision, recipe.model.quantization
        adapter = inputs.contents[ADAPTER] if inputs.adapter else None
        identity = cache_identity(inputs.contents[TRUNK], adapter, documents, layout, precision, quantization)
        directory = Path(spec.directory or run_dir / HIDDEN) / digest_of(identity)
        require_room(layout, directory, int(spec.max_gib * (1 << 30)))
        task = progress.add_task("keeping hidden states", total=None)
        if accelerator.is_main_process:
            progress.console.print(f"{directory}: {layout.num_bytes / (1 << 30):.2f} GiB of hidden states")
            write_manifest(directory, identity, layout)
        build_cache(
            hidden_fn,
            documents,
            layout,
            directory,
            device=device,
            max_tokens=recipe.train.micro_batch_sequences * recipe.data.seq_len_tokens,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            on_shard=lambda done, total: progress.update(task, completed=done, total=total),
        )
    accelerator.wait_for_everyone()
    trunk.drop_layers()
    # Shards and what gathers them refer to one another.
    del hidden_fn
    gc.collect()
    return HiddenCache(directory, layout)


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
    """Put the trained weights into the head directory's form, LoRA's matrices merged."""
    plan = inputs.head_plan
    if recipe.head.lora is not None:
        head = build_head(plan, text_config_of(inputs.finetune), dtype=torch.float32)
        weights = merged_weights(head, recipe.head.lora, weights)
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
    """Resolve ``objective.loss: auto``: of six losses none drafts better than ``kl`` both greedily and sampled
    (``inference/benchmarks/objectives.md``)."""
    return "kl" if recipe.objective.loss == "auto" else recipe.objective.loss
