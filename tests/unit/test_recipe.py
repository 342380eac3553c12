"""Check the limits of single fields and the rules between fields of a recipe."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from mtp_train.errors import RecipeError
from mtp_train.recipe.json_schema import dotted, sections
from mtp_train.recipe.loading import load_recipe

SMALLEST: dict[str, Any] = {
    "run_dir": "runs/x",
    "model": {"trunk": "finetune", "head_from": "base"},
    "data": {"sources": [{"path": "chats.jsonl"}]},
    "train": {"max_steps": 10, "tokens_per_step": 1024, "lr": 0.001},
    "evaluate": {"arms": ["none", "graft", "retrained"]},
}

FIELDS = {
    dotted(path, name).replace("data.sources.", "data.sources.0."): node
    for path, section in sections()
    for name, node in section.model_json_schema()["properties"].items()
}


def problems_of(*overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(SMALLEST, overrides)
    return caught.value.problems


def only_problem_of(*overrides: str) -> str:
    (problem,) = problems_of(*overrides)
    return problem


def test_plain_values_given_are_left_as_they_are() -> None:
    before = copy.deepcopy(SMALLEST)
    load_recipe(SMALLEST, ["train.lr=1.0", "data.sources.0.path=other.jsonl"])
    assert before == SMALLEST


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("head.num_depths=8", "head.num_depths: 8 with head.kind: mtp; expected 7 or less. Write head.num_depths: 7."),
        ("data.holdout=0", "data.holdout: 0; expected greater than 0. Correct it."),
        ("objective.temperature=0", "objective.temperature: 0; expected greater than 0."),
        ("gate.confidence=0.5", "gate.confidence: 0.5; expected greater than 0.5."),
        ("evaluate.temperature=-1", "evaluate.temperature.0: -1; expected greater than or equal to 0."),
        ("evaluate.temperature=[]", "evaluate.temperature: []; expected at least 1 item"),
        ("evaluate.temperature=[0, hot]", "evaluate.temperature.1: 'hot'; expected a valid number."),
        ("evaluate.temperature=0.0001", "evaluate.temperature: 0.0001; expected 0 or a number from 0.001."),
        ("evaluate.temperature=[1, 1.0]", "evaluate.temperature: [1.0, 1.0] has a value twice; expected each value"),
        ("evaluate.rule=greedy", "evaluate.rule.0: 'greedy'; expected 'argmax' or 'sampled'."),
        ("train.betas=[0.9]", "train.betas: [0.9]; expected at least 2 items"),
        ("data.sources=[]", "data.sources: []; expected at least 1 item"),
        ("seed=-1", "seed: -1; expected greater than or equal to 0."),
        ("objective.unroll=fast", "objective.unroll: 'fast'; expected 'exact' or 'fastmtp'."),
    ],
)
def test_values_outside_the_limits_are_refused(override: str, expected: str) -> None:
    assert any(problem.startswith(expected) for problem in problems_of(override))


STUDIED = ["study={}", "export.enabled=false", "evaluate.arms=[graft, retrained, vanilla]"]
RANDOM = ["model.head_from=null", "head.init=random", "evaluate.arms=[none, retrained]"]
MEDUSA = [*RANDOM, "head.kind=medusa"]


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["model.head_from=null", "evaluate.arms=[none, retrained]", "gate.baseline=none"], "head.init"),
        (["model.head_from=null", "head.init=random"], "evaluate.arms"),
        (["model.head_from=null", "head.init=native", "evaluate.arms=[native, retrained, vanilla]"], "evaluate.arms"),
        (["head.lora={}", *RANDOM], "head.lora"),
        (["head.init=random", "evaluate.arms=[none, retrained]", "gate.baseline=none"], "model.head_from"),
        (["head.init=random", "evaluate.arms=[none, retrained]"], "gate.baseline"),
        (["evaluate.arms=[none, graft, retrained, graft]"], "evaluate.arms"),
        (["evaluate.arms=[none, graft]"], "evaluate.arms"),
        (["evaluate.arms=[none, retrained]"], "gate.baseline"),
        (["gate.baseline=native"], "gate.baseline"),
        (["gate.baseline=graft", "head.init=native", "evaluate.arms=[native, graft, retrained]"], "gate.baseline"),
        (["gate.baseline=graft", "head.init=native"], "gate.baseline"),
        (["model.offload=cpu", "model.quantization=4bit"], "model.offload"),
        ([*STUDIED, "model.offload=cpu"], "model.offload"),
        (["train.warmup_steps=10"], "train.warmup_steps"),
        (["data.seq_len_tokens=4"], "data.seq_len_tokens"),
        (["objective.loss=ce", "objective.temperature=2"], "objective.temperature"),
        (["data.regenerate={temperature: 0, top_p: 0.9}"], "data.regenerate.top_p"),
        (["data.regenerate={endpoint: 'localhost:8000'}"], "data.regenerate.endpoint"),
        (["data.regenerate={concurrency: 4}"], "data.regenerate.concurrency"),
        (["data.regenerate={endpoint: 'http://me:word@a/v1'}"], "data.regenerate.endpoint"),
        ([*STUDIED, "gate.enabled=false"], "gate.enabled"),
        (["study={}", "export.enabled=false"], "evaluate.arms"),
        ([*STUDIED, "export.enabled=true"], "export.enabled"),
        ([*STUDIED, "head.convention=sglang"], "head.convention"),
        ([*STUDIED, "study.depths=[3, 3]"], "study.depths"),
        ([*STUDIED, "study.rules=[greedy]"], "study.rules"),
        ([*STUDIED, "study.rules=[argmax]"], "study.rules"),
        ([*MEDUSA, "evaluate.depth=4"], "evaluate.depth"),
        ([*MEDUSA, "objective.unroll=fastmtp"], "objective.unroll"),
    ],
)
def test_contradictions_are_refused_with_a_hint(overrides: list[str], path: str) -> None:
    problem = only_problem_of(*overrides)
    assert re.fullmatch(rf"{re.escape(path)}: .+; expected .+\. [A-Z].+\.", problem)
    for field, value, arm in re.findall(r"\. Write ([\w.]+): (\S+?)(?:, and add (\w+) to evaluate\.arms)?\.$", problem):
        arms = [*SMALLEST["evaluate"]["arms"], arm]
        load_recipe(
            SMALLEST, [*overrides, f"{field}={value}", *([f"evaluate.arms=[{', '.join(arms)}]"] if arm else [])]
        )


@pytest.mark.parametrize(
    "overrides",
    [
        RANDOM,
        [*RANDOM, "head.kind=eagle3"],
        [*RANDOM, "head.kind=eagle", "objective.unroll=fastmtp", "evaluate.depth=7"],
        [*MEDUSA, "evaluate.depth=3"],
        ["head.lora={}", "head.init=native", "evaluate.arms=[native, retrained, vanilla]"],
        ["model.head_from=null", "head.init=native", "evaluate.arms=[native, retrained]"],
        ["head.init=native", "evaluate.arms=[native, retrained, vanilla]"],
        ["head.init=random", "gate.baseline=graft"],
        ["evaluate.arms=[none, graft]", "export.enabled=false"],
        ["model.offload=cpu"],
        ["train.warmup_steps=9"],
        ["data.seq_len_tokens=5"],
        ["objective.loss=kl", "objective.temperature=2"],
        [*RANDOM, "head.kind=eagle3", "head.draft_vocab=100"],
        ["data.sources.0.columns={text: text}"],
        ["data.regenerate={temperature: 0.7, top_p: 0.9, top_k: 20, min_p: 0.1}"],
        ["data.regenerate={endpoint: 'https://a/v1', concurrency: 4, model: a, api_key_env: KEY}"],
        ["model.adapter=lora", "objective.loss=ce"],
        ["gate.enabled=false"],
        STUDIED,
        [*STUDIED, "study.temperatures=[0.0]", "study.rules=[greedy]"],
    ],
)
def test_recipes_next_to_a_contradiction_are_accepted(overrides: list[str]) -> None:
    assert load_recipe(SMALLEST, overrides) != load_recipe(SMALLEST)


@pytest.mark.parametrize(
    ("overrides", "baseline"),
    [
        ([], "graft"),
        (["head.init=native", "evaluate.arms=[native, graft, retrained]"], "native"),
        (["head.init=random"], "graft"),
        (["head.init=random", "model.head_from=null", "evaluate.arms=[none, retrained]"], "none"),
        (["gate.baseline=none"], "none"),
    ],
)
def test_automatic_baseline_is_the_best_head_without_training(overrides: list[str], baseline: str) -> None:
    assert load_recipe(SMALLEST, overrides).gate_baseline == baseline


# Values that pydantic would convert if it were not strict.
CONVERTIBLE = {"string": "1", "integer": "1.0", "number": "'1'", "boolean": "1", "array": "!!set {1}", "object": "[]"}


@pytest.mark.parametrize("path", FIELDS)
def test_an_unusable_value_is_the_only_problem(path: str) -> None:
    whole = ["data.regenerate={}"]
    if path.startswith("study."):
        whole += STUDIED
    if path.startswith("train.states."):
        whole += ["train.states.endpoint=http://localhost:8000/v1"]
    node = FIELDS[path]
    *_, inner = (arm for arm in node.get("anyOf", [node]) if arm != {"type": "null"})
    for value in ("[{}]", CONVERTIBLE[inner.get("type", "object")]):
        problems = problems_of(*whole, f"{path}={value}")
        assert all(problem.startswith(path) for problem in problems), problems
