"""Arms at the settings that a trunk is served with: lossless as greedy ones are, and counted by group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress

from mtp_inference import HeadDrafting
from mtp_train.evaluation.decoding import (
    PLAIN,
    DecodingOptions,
    compare_records,
    decode_prompts,
    num_decodings,
    sampling_of,
)
from mtp_train.evaluation.prompt_records import Setting, TaskPrompt
from mtp_train.evaluation.settings import greedy
from mtp_train.evaluation.statistics import MeasuredArm, checked_records, lossless, run_cell
from mtp_train.runs.evaluate_run import DEPTH_PROMPTS, MeasuredRun, judge, measure_depths
from mtp_train.runs.inputs import Inputs
from mtp_train.train.launch import RunAccelerator
from mtp_train.train.teacher_forced import DenseMetrics
from mtp_train.trunk.load import Trunk
from runs import tiny_recipe
from tiny import tiny_head, tiny_trunk

DEPTH, TOKENS = 2, 16
GREEDY = greedy(DEPTH)
WARM = Setting(0.8, None, DEPTH, "argmax", top_p=0.9, top_k=40)
DRAWN_WARM = replace(WARM, rule="sampled")
DRAWN = Setting(0.8, None, DEPTH, "sampled")
SETTINGS = (GREEDY, WARM, DRAWN_WARM, DRAWN)


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return tiny_trunk("qwen3_5")


def prompts() -> list[TaskPrompt]:
    generator = torch.Generator().manual_seed(3)
    return [
        TaskPrompt(
            id=f"p{number}",
            group=f"g{number // 2}",
            prompt_ids=tuple(torch.randint(0, 60, (5 + number,), generator=generator).tolist()),
            task="held-out",
        )
        for number in range(4)
    ]


def decode(trunk: Trunk, settings: tuple[Setting, ...], seed: int = 0) -> MeasuredRun:
    drafting = {"retrained": HeadDrafting(tiny_head(trunk))}
    options = DecodingOptions(max_new_tokens=TOKENS, eos_ids=(), seed=seed)
    done: list[None] = []
    table = decode_prompts(trunk, drafting, {None: prompts()}, settings, options, on_prompt=lambda: done.append(None))
    assert len(done) == num_decodings(1, {None: prompts()}, settings)
    plain = table.decoded[PLAIN]
    arms = (
        MeasuredArm(PLAIN, "finetune", None, plain),
        MeasuredArm("retrained", "finetune", "run/head", {**plain, **table.decoded["retrained"]}),
    )
    return MeasuredRun(arms, settings, dict.fromkeys((PLAIN, "retrained"), DenseMetrics([], [], None, [])), {})


@pytest.fixture(scope="module")
def served(trunk: Trunk) -> MeasuredRun:
    return decode(trunk, SETTINGS)


def test_every_setting_decodes_every_prompt_with_its_group(served: MeasuredRun) -> None:
    plain, retrained = served.arms
    for arm in served.arms:
        for records in arm.decoded.values():
            assert [(one.prompt_id, one.group) for one in records] == [(one.id, one.group) for one in prompts()]
    # Settings that differ in the rule alone share one plain decoding.
    assert list(plain.decoded) == [GREEDY.plain, WARM.plain, DRAWN.plain]
    assert retrained.settings == list(SETTINGS)
    texts = [tuple(one.token_ids for one in records) for records in plain.decoded.values()]
    assert len(set(texts)) == 3


def test_sampled_texts_are_compared_with_plain_sampling_of_the_same_seed(trunk: Trunk, served: MeasuredRun) -> None:
    plain, retrained = served.arms
    for setting in (GREEDY, WARM):
        found = lossless(checked_records([retrained], [setting]))
        assert (found.checked, found.faults) == (4, 0)
    # Drafts that are sampled give another text of the same distribution: there is nothing to compare.
    assert checked_records([retrained], [DRAWN_WARM, DRAWN]) == []
    assert lossless(served.checked).checked == 8
    # The control: plain sampling with another seed is another text, and no near tie.
    other = decode(trunk, (WARM,), seed=1).arms[0]
    verdicts = [
        compare_records(mine, theirs, trunk, prompt, sampling_of(WARM, 5)).verdict
        for mine, theirs, prompt in zip(plain.decoded[WARM.plain], other.decoded[WARM.plain], prompts(), strict=True)
    ]
    assert "divergence" in verdicts


def test_a_divergence_at_a_served_setting_refuses_the_export(served: MeasuredRun) -> None:
    recipe: Any = Recipe()
    plain, retrained = served.arms
    broken = [
        replace(one, same_as_plain="divergence" if one.prompt_id == "p3" else "identical")
        for one in retrained.decoded[WARM]
    ]
    arms = (plain, replace(retrained, decoded={**retrained.decoded, WARM: broken}))
    verdict = judge(recipe, replace(served, arms=arms))
    assert not verdict.passed
    assert "changed the output of 1 prompts (p3 first)" in verdict.reason
    assert "changed the output" not in judge(recipe, served).reason


def test_a_cell_is_what_an_arm_did_at_a_setting(served: MeasuredRun) -> None:
    plain, retrained = served.arms
    cell = run_cell(retrained, WARM)
    assert (cell.temperature, cell.top_p, cell.top_k, cell.rule, cell.depth) == (0.8, 0.9, 40, "argmax", DEPTH)
    assert (cell.prompts, cell.groups, cell.overlap, cell.dense) == (4, 2, None, None)
    for setting in SETTINGS:
        beside = run_cell(plain, setting)
        assert (beside.tau, beside.speedup, beside.depth, beside.tau_ci95) == (1.0, 1.0, 0, None)
        assert (beside.temperature, beside.rule) == (setting.temperature, setting.rule)
    # The first setting is the table of arms; every other one has a cell for each arm.
    assert [(one.arm, one.rule) for one in served.cells] == [
        (arm, setting.rule) for setting in SETTINGS[1:] for arm in (PLAIN, "retrained")
    ]


def test_shallower_depths_are_measured_on_some_prompts_of_the_retrained_head(trunk: Trunk) -> None:
    nothing: Any = None
    held_out = [replace(one, id=f"{one.id}-{n}") for n in range(5) for one in prompts()]
    inputs = Inputs(nothing, nothing, nothing, nothing, nothing, nothing, frozenset(), (), (), held_out)
    assert len(held_out) > DEPTH_PROMPTS
    recipe = tiny_recipe(Path("in"), Path("run"), evaluate__max_new_tokens=4)
    heads = {name: HeadDrafting(tiny_head(trunk)) for name in ("graft", "retrained")}
    names, deep, quiet = {"retrained": "run/head"}, replace(WARM, depth=3), Progress(disable=True)
    alone = RunAccelerator()
    found = measure_depths(recipe, inputs, trunk, heads, names, deep, alone, quiet)
    assert [setting for _, setting in found] == [replace(WARM, depth=1), replace(WARM, depth=2)]
    for arm, setting in found:
        assert (arm.name, arm.head) == ("retrained", "run/head")
        assert [one.prompt_id for one in arm.decoded[setting]] == [one.id for one in held_out[:DEPTH_PROMPTS]]
        assert {drafts for one in arm.decoded[setting] for drafts in one.drafted} == {setting.depth}
        # Speedups by depth need the plain texts of the same prompts.
        assert len(arm.decoded[setting.plain]) == DEPTH_PROMPTS
    # Nothing is measured below one draft a round, or without a retrained head.
    assert measure_depths(recipe, inputs, trunk, heads, names, replace(WARM, depth=1), alone, quiet) == []
    assert measure_depths(recipe, inputs, trunk, {"graft": heads["graft"]}, names, deep, alone, quiet) == []


class Recipe:
    """The fields of a recipe that :func:`judge` reads."""

    gate_baseline = PLAIN

    class gate:
        confidence = 0.95
        break_even_tau = 1.01
