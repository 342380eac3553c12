"""Gather a study's further inputs: a recipe per head, and prompts with tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtp_train.checkpoints.demo import GROUP_FIELD, PREFIX, resolve
from mtp_train.data.groups import join_near_duplicates
from mtp_train.data.records import Record, content_group, with_variables
from mtp_train.data.sources import load_records
from mtp_train.data.tokenize import build_prompts, choose_evenly
from mtp_train.errors import DataError
from mtp_train.evaluation.prompt_records import HELD_OUT_TASK, TaskPrompt
from mtp_train.evaluation.suites import load_suite, suite_prompts
from mtp_train.losses.catalogue import find_loss
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.sections import StudySection
from mtp_train.runs.inputs import Inputs, split_records
from mtp_train.runs.training import HIDDEN

HOME_TASK = "vanilla's own"


@dataclass(frozen=True)
class StudyInputs:
    """Checked inputs of a study, besides the inputs that every run has."""

    prompts: list[TaskPrompt]
    """Prompts that all arms decode."""
    home: list[TaskPrompt]
    """Prompts that only vanilla decodes, in addition; may be empty."""


def gather_study(recipe: Recipe, study: StudySection, inputs: Inputs) -> StudyInputs:
    """Read and check the further inputs of a study. Writes nothing and does not load the trunk.

    Raises:
        MtpError: An input is missing, malformed, or does not fit the recipe.
    """
    if inputs.base is None:
        raise DataError("model.head_from: null; expected the vanilla model of the study. Name it.")
    training, _ = split_records(recipe)
    prompts = [TaskPrompt.of(prompt, HELD_OUT_TASK) for prompt in inputs.held_out]
    return StudyInputs(
        prompts=prompts if study.suite is None else untrained_prompts(recipe, study, study.suite, training, inputs),
        home=home_prompts(recipe, study, inputs),
    )


def untrained_prompts(
    recipe: Recipe, study: StudySection, suite: str, training: Sequence[Record], inputs: Inputs
) -> list[TaskPrompt]:
    """Return a suite's prompts by task, without prompts that share a group with training text or nearly repeat it.

    Raises:
        DataError: There is no such suite, or fewer than two prompts are left.
    """
    groups = {record.group for record in training}
    known = {prompt.prompt_ids for prompt in build_prompts(training, inputs.tokenizer)}
    loaded = load_suite(suite, recipe.data.chat_template_kwargs)
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
    """Return the ids of the records whose prompt equals a training record's, or is a near-duplicate of it."""
    by_content = [replace(record, group=content_group(record.content)) for record in (*training, *records)]
    joined = join_near_duplicates(by_content)
    trained = {record.group for record in joined[: len(training)]}
    return {record.id for record in joined[len(training) :] if record.group in trained}


def home_prompts(recipe: Recipe, study: StudySection, inputs: Inputs) -> list[TaskPrompt]:
    """Return prompts of the kind of text that the vanilla model was made for. They are not trained on.

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
    variables = recipe.data.chat_template_kwargs
    records = [with_variables(record, variables) for records in sources for record in records]
    prompts = choose_evenly(build_prompts(records, inputs.tokenizer), recipe.evaluate.prompts, recipe.seed)
    if records and not prompts:
        raise DataError(
            f"study.vanilla_sources: {len(records)} texts, none long enough to continue; expected at least one of two "
            "tokens. Use longer texts."
        )
    return [TaskPrompt.of(prompt, HOME_TASK) for prompt in prompts]


def for_objective(recipe: Recipe, objective: str) -> Recipe:
    """Return the recipe of one head, which differs in its loss alone."""
    temperature = recipe.objective.temperature if find_loss(objective).distils else 1.0
    values: dict[str, object] = {"objective.loss": objective, "objective.temperature": temperature}
    cache = recipe.train.hidden_cache
    if cache is not None and cache.directory is None:
        values["train.hidden_cache.directory"] = str(Path(recipe.run_dir) / HIDDEN)
    return recipe.replaced(values)
