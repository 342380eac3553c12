"""Train the head of a run on its trunk, and save it as the run's artifact.

:func:`train_stage` sets up what a recipe asks for: threads, LoRA, the draft vocabulary, the hidden-state cache, text
held out to select the best head, and the log. :func:`mtp_train.train.loop.train_head` runs the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mtp_train.checkpoints.artifact import Artifact, save_artifact
from mtp_train.checkpoints.locations import HEAD
from mtp_train.data.groups import stable_share
from mtp_train.data.pack import PackedSequence, assign, global_batches, pack_documents, token_counts
from mtp_train.data.tokenize import Document, frequent_tokens
from mtp_train.errors import DataError
from mtp_train.families.kinds.kind import serves_draft_vocab
from mtp_train.heads.build import build_head, trained_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.head import Head
from mtp_train.heads.lora import merged_weights, put_on_lora
from mtp_train.losses.catalogue import find_loss
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.forecast import training_units
from mtp_train.runs.resolve import lr_choice
from mtp_train.runs.run import Run
from mtp_train.runs.settings import MEASURES, STATE, tracking_of, train_options
from mtp_train.runs.trunks import states_of
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.log import RunLog
from mtp_train.train.loop import train_head
from mtp_train.train.machine import set_threads
from mtp_train.train.select import Selection
from mtp_train.trunk.precision import COMPUTE_DTYPES
from mtp_train.trunk.states import States


def keep_targets(documents: Sequence[Document], vocab: Collection[int]) -> list[Document]:
    """Return the documents with targets in ``vocab`` only, as a head with that vocabulary cannot draft other tokens.

    Documents without a target left are dropped.
    """
    kept = [
        replace(document, loss_mask=document.loss_mask & np.isin(document.input_ids, list(vocab)))
        for document in documents
    ]
    return [document for document in kept if document.has_target()]


def is_read_once(run: Run, text: Sequence[Document]) -> bool:
    """Return whether training takes one epoch at most."""
    data = run.recipe.data
    plan = run.plan
    epoch = assign(token_counts(text), data.seq_len_tokens, pack=data.pack, seed=run.recipe.seed, epoch=0)
    return plan.max_steps * plan.sequences_per_step <= len(epoch)


SELECTED = "selected"
"""The note of an artifact with its step and the held-out tau (teacher-forced) of that step and of the start."""


def part_documents(recipe: Recipe, documents: Sequence[Document]) -> tuple[list[int], list[int]]:
    """Return the indices of the documents to train on, and of the documents to select the best head by."""
    spec = recipe.train.select
    if spec is None:
        return list(range(len(documents))), []
    groups: dict[str, list[int]] = {}
    for index, document in enumerate(documents):
        groups.setdefault(document.group, []).append(index)
    if len(groups) < 2:
        raise DataError(
            f"train.select: {len(documents)} training texts in one group ({documents[0].group}), which cannot be "
            "trained on and measured with; expected two groups or more. Add data, or write train.select: null."
        )
    # Use another seed: by the recipe's own, all of these groups lie above its share `data.holdout`.
    seed = (recipe.seed + 1) % (1 << 32)
    measured = set[int]()
    tokens = 0
    for group in sorted(groups, key=lambda name: stable_share(name, seed))[: max(1, int(spec.share * len(groups)))]:
        if tokens < spec.tokens:
            measured.update(groups[group])
            tokens += sum(len(documents[index].input_ids) for index in groups[group])
    return [index for index in range(len(documents)) if index not in measured], sorted(measured)


def renumbered(sequences: Sequence[PackedSequence], indices: Sequence[int]) -> list[PackedSequence]:
    """Return packed sequences whose members are indices into all documents, instead of the packed subset."""
    return [replace(one, members=tuple(indices[member] for member in one.members)) for one in sequences]


def make_selection(
    run: Run, documents: Sequence[Document], measured: Sequence[int], *, chooses_lr: bool
) -> Selection | None:
    """Return the selection of the best head; None if the recipe takes the last head."""
    spec = run.recipe.train.select
    data = run.recipe.data
    if spec is None:
        return None
    text = [documents[index] for index in measured]
    sequences = pack_documents(text, data.seq_len_tokens, pack=data.pack, seed=run.recipe.seed, epoch=0)
    kept = renumbered(sequences[: max(1, spec.tokens // data.seq_len_tokens)], measured)
    every = spec.every_steps or math.ceil(run.recipe.train.max_steps / MEASURES)
    return Selection(every, spec.patience, kept, partial(record_lr, run) if chooses_lr else None)


def train_stage(run: Run, documents: Sequence[Document], *, chooses_lr: bool = False) -> None:
    """Train the head and save it as the run's artifact.

    ``chooses_lr``: the learning rate is automatic. It depends on how good the starting head is.
    """
    recipe, inputs, accelerator, progress = run.recipe, run.inputs, run.accelerator, run.progress
    set_threads("training", run.plan.micro_batch_tokens, inputs.finetune, accelerator.device, progress.console)
    accelerator.gradient_accumulation_steps = run.plan.accumulation
    head = build_head(inputs.head_plan, text_config_of(inputs.finetune), dtype=torch.float32)
    if recipe.head.lora is not None:
        put_on_lora(head, recipe.head.lora, seed=recipe.seed)
    draft_vocab = chosen_vocab(run, documents)
    own = inputs.head_plan.output
    served_vocab = draft_vocab if serves_draft_vocab(recipe.head.kind) else None
    trained_vocab = served_vocab if own is None else own.token_ids_R
    if trained_vocab is not None:
        documents = keep_targets(documents, set(trained_vocab.tolist()))
    training, measured = part_documents(recipe, documents)
    text = [documents[index] for index in training]
    states = states_of(run, documents, head.trunk_layers, kept=measured, is_read_once=is_read_once(run, text))
    batches = global_batches(
        text,
        seq_len_tokens=recipe.data.seq_len_tokens,
        pack=recipe.data.pack,
        sequences_per_step=run.plan.sequences_per_step,
        seed=recipe.seed,
        num_depths=recipe.head.num_depths,
        num_starts=recipe.data.loss_positions,
    )
    selection = make_selection(run, documents, measured, chooses_lr=chooses_lr)
    task = progress.add_task("training the head", total=run.plan.max_steps)
    run.forecast.begin("training")
    units = training_units(recipe) / run.plan.max_steps

    def on_step(done: int) -> None:
        progress.update(task, completed=done)
        run.forecast.update(units * done, units * (run.plan.max_steps - done))

    try:
        weights = train_head(
            head_training(recipe, states, head, trained_vocab),
            options=train_options(recipe),
            plan=run.plan,
            batch_fn=lambda step: renumbered(batches(step), training),
            accelerator=accelerator,
            selection=selection,
            state_dir=run.directory.path / STATE,
            make_log=partial(open_log, run, lambda metrics: progress.update(task, description=described(metrics))),
            on_step=on_step,
        )
    finally:
        said = states.close()
    if run.is_main:
        if said:
            progress.console.print(said)
        save_artifact(trained_artifact(run, weights, draft_vocab, selection), run.directory.path / HEAD)


def open_log(run: Run, on_log: Callable[[Mapping[str, Any]], None], resume_step: int) -> RunLog | None:
    """Open the log to resume at a step; None for processes that do not log."""
    if not run.is_main:
        return None
    return RunLog(
        run.directory.path,
        resume_step,
        tracking=tracking_of(run.recipe),
        config=run.recipe.model_dump(mode="json"),
        on_log=on_log,
    )


def record_lr(run: Run, overlap: float) -> float:
    """Return the automatic learning rate for a head that starts with an overlap at depth 1, and record it."""
    choice = lr_choice(run.recipe, text_config_of(run.inputs.finetune).hidden_size, overlap)
    run.settle([choice])
    return run.recipe.train.lr


def described(metrics: Mapping[str, Any]) -> str:
    shown = {"loss": "loss {:.3f}", "held_out_tau": "held-out tau {:.2f}", "tokens_per_second": "{:,.0f} tokens/s"}
    found = (text.format(metrics[name]) for name, text in shown.items() if metrics.get(name) is not None)
    return ", ".join(["training the head", *found])


def head_training(recipe: Recipe, states: States, head: Head, draft_vocab: torch.Tensor | None) -> HeadTraining:
    return HeadTraining(
        states,
        head,
        num_depths=recipe.head.num_depths,
        kind=find_loss(recipe.objective.loss).name,
        temperature=recipe.objective.temperature,
        apart=recipe.objective.unroll == "fastmtp",
        recompute=recipe.train.gradient_checkpointing,
        draft_vocab=draft_vocab,
        compute_dtype=COMPUTE_DTYPES[recipe.train.precision],
    )


def chosen_vocab(run: Run, documents: Sequence[Document]) -> torch.Tensor | None:
    """Return the tokens that the head may draft, int32 and ascending; None for all."""
    asked = run.recipe.head.draft_vocab
    plan = run.inputs.head_plan
    if asked is None:
        # The exported draft model has rows for these tokens alone.
        return plan.draft_vocab if plan.kind.has_file else None
    vocab_size = plan.family.vocab_size(text_config_of(run.inputs.finetune))
    return torch.tensor(frequent_tokens(documents, asked, vocab_size, run.inputs.eos_ids), dtype=torch.int32)


def trained_artifact(
    run: Run, weights: dict[str, torch.Tensor], draft_vocab: torch.Tensor | None, selection: Selection | None
) -> Artifact:
    """Return the trained weights as an artifact, with LoRA's matrices merged."""
    recipe = run.recipe
    plan = run.inputs.head_plan
    if recipe.head.lora is not None:
        head = build_head(plan, text_config_of(run.inputs.finetune), dtype=torch.float32)
        weights = merged_weights(head, recipe.head.lora, weights)
    if plan.output is not None:
        weights = {name: value for name, value in weights.items() if not name.endswith(".lm_head.weight")}
    trained = replace(plan, head=trained_head(plan, weights), draft_vocab=draft_vocab)
    notes = {
        "trunk": recipe.model.trunk,
        "head_from": recipe.model.head_from,
        "steps": recipe.train.max_steps,
        SELECTED: None if selection is None else asdict(selection.best),
    }
    return Artifact(**vars(trained), num_depths=recipe.head.num_depths, notes=notes)
