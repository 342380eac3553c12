"""What a study needs besides the inputs of a run: a recipe a head, prompts with their tasks, what drift is drawn on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import Progress

from mtp_train.data.groups import join_near_duplicates
from mtp_train.data.prompts import Prompt, choose_evenly
from mtp_train.data.records import Record, content_group
from mtp_train.data.sources import load_records
from mtp_train.data.tokenize import Document, tokenize_records
from mtp_train.demo import GROUP_FIELD, PREFIX, resolve
from mtp_train.errors import DataError
from mtp_train.heads.attach import graft_plan
from mtp_train.heads.whole import require_whole_trunk
from mtp_train.inputs import Inputs, open_location, prompts_of, split_records
from mtp_train.recipe import Recipe
from mtp_train.recipe_study import Objective, StudySection
from mtp_train.study.records import TaskPrompt
from mtp_train.study.suites import load_suite, suite_prompts
from mtp_train.training import HIDDEN
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.finite import require_finite_checkpoint

HELD_OUT_TASK, HOME_TASK = "held-out", "vanilla's own"


@dataclass(frozen=True)
class StudyInputs:
    """What a study reads besides the inputs of a run, checked before anything is written."""

    prompts: list[TaskPrompt]
    """What all arms decode."""
    home: list[TaskPrompt]
    """What vanilla alone decodes besides; may be empty."""
    base: Checkpoint
    checkpoints: dict[str, Checkpoint]
    """For the drift curve, by the names that the recipe gives them."""
    documents: list[Document]
    """What a fine-tune for the drift curve learns; empty without one."""


def gather_study(recipe: Recipe, study: StudySection, inputs: Inputs) -> StudyInputs:
    """Read and check what a study needs besides. Writes nothing, loads no trunk.

    Raises:
        MtpError: Something does not fit; the message says what.
    """
    if inputs.base is None:
        raise DataError("model.head_from: null; expected the vanilla model of the study. Name it.")
    drift = study.drift
    checkpoints = {name: open_location(name) for name in (drift.checkpoints if drift is not None else ())}
    for checkpoint in checkpoints.values():
        # Raises where the base's head does not fit.
        graft_plan(checkpoint, inputs.base, recipe.head.convention)
        require_whole_trunk(checkpoint, trust_remote_code=recipe.model.trust_remote_code)
        require_finite_checkpoint(checkpoint, Progress(disable=True))
    training, _ = split_records(recipe)
    documents: list[Document] = []
    if drift is not None and drift.fine_tune is not None:
        documents, _ = tokenize_records(training, inputs.tokenizer, recipe.data.seq_len_tokens)
    prompts = [of_task(prompt, HELD_OUT_TASK) for prompt in inputs.held_out]
    return StudyInputs(
        prompts=prompts if study.suite is None else untrained_prompts(recipe, study, study.suite, training, inputs),
        home=home_prompts(recipe, study, inputs),
        base=inputs.base,
        checkpoints=checkpoints,
        documents=documents,
    )


def untrained_prompts(
    recipe: Recipe, study: StudySection, suite: str, training: Sequence[Record], inputs: Inputs
) -> list[TaskPrompt]:
    """Return a suite's prompts, task by task, without those that are trained on, nearly trained on, or share a group
    with what is.

    Raises:
        DataError: There is no such suite, or too little is left of it.
    """
    groups = {record.group for record in training}
    known = {prompt.prompt_ids for prompt in prompts_of(training, inputs.tokenizer)}
    loaded = load_suite(suite)
    near = near_trained([one.record for one in loaded.records], training)
    every = suite_prompts(loaded, inputs.tokenizer, seed=recipe.seed)
    unseen = [
        prompt
        for prompt in every
        if prompt.group not in groups and prompt.id not in near and prompt.prompt_ids not in known
    ]
    if len(unseen) < 2:
        raise DataError(
            f"study.suite: {suite} has {len(every)} prompts, {len(unseen)} of them not trained on; expected at least "
            "2, as intervals are over groups of prompts. Name another suite, or null for the held-out prompts."
        )
    by_task: dict[str, list[TaskPrompt]] = {}
    for prompt in unseen:
        by_task.setdefault(prompt.task, []).append(prompt)
    return [prompt for some in by_task.values() for prompt in some[: study.prompts_per_task]]


def near_trained(records: Sequence[Record], training: Sequence[Record]) -> set[str]:
    """Return the ids of the records whose prompt is that of a training record, or nearly."""
    by_content = [replace(record, group=content_group(record.content)) for record in (*training, *records)]
    joined = join_near_duplicates(by_content)
    trained = {record.group for record in joined[: len(training)]}
    return {record.id for record in joined[len(training) :] if record.group in trained}


def of_task(prompt: Prompt, task: str) -> TaskPrompt:
    """Give a prompt its task."""
    return TaskPrompt(id=prompt.id, group=prompt.group, prompt_ids=prompt.prompt_ids, task=task)


def home_prompts(recipe: Recipe, study: StudySection, inputs: Inputs) -> list[TaskPrompt]:
    """Return prompts of the kind that the vanilla model was made for. Nothing here is trained on them.

    Raises:
        DataError: A source is missing or malformed, or gives no prompt.
    """
    sources = [
        load_records(
            resolve(path),
            group_field=GROUP_FIELD if path.startswith(PREFIX) else None,
            name=f"study.vanilla_sources.{number} ({path})",
        )
        for number, path in enumerate(study.vanilla_sources)
    ]
    records = [record for records in sources for record in records]
    prompts = choose_evenly(prompts_of(records, inputs.tokenizer), recipe.evaluate.prompts, recipe.seed)
    if records and not prompts:
        raise DataError(
            f"study.vanilla_sources: {len(records)} texts, none long enough to continue; expected at least one of two "
            "tokens. Use longer texts."
        )
    return [of_task(prompt, HOME_TASK) for prompt in prompts]


def for_objective(recipe: Recipe, objective: Objective) -> Recipe:
    """Return the recipe of one of the heads: all the same but the loss."""
    temperature = 1.0 if objective == "ce" else recipe.objective.temperature
    cache = recipe.train.hidden_cache
    if cache is not None and cache.directory is None:
        cache = replace(cache, directory=str(Path(recipe.run_dir) / HIDDEN))
    return replace(
        recipe,
        objective=replace(recipe.objective, loss=objective, temperature=temperature),
        train=replace(recipe.train, hidden_cache=cache),
    )
