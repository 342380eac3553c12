"""Arms at the settings that are served: lossless as greedy ones are, and counted by group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtp_inference import HeadDrafting
from mtp_train.arms import PLAIN, ArmRun, compare_with_plain, run_arms
from mtp_train.data.prompts import Prompt
from mtp_train.evaluation import judge, lossless, run_cell
from mtp_train.heads.trunk import Trunk
from mtp_train.serving import GREEDY, ServedSetting
from tiny import tiny_head, tiny_trunk

WARM = ServedSetting(temperature=0.8, top_p=0.9, top_k=40, rule="argmax")
DRAWN = ServedSetting(temperature=0.8, rule="sampled")
DEPTH, TOKENS = 2, 16


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return tiny_trunk("qwen3_5")


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    return [
        Prompt(
            f"p{number}", f"g{number // 2}", tuple(torch.randint(0, 60, (5 + number,), generator=generator).tolist())
        )
        for number in range(4)
    ]


def decode(trunk: Trunk, setting: ServedSetting, seed: int = 0) -> dict[str, ArmRun]:
    return run_arms(
        trunk,
        {"retrained": HeadDrafting(tiny_head(trunk))},
        prompts(),
        depth=DEPTH,
        setting=setting,
        max_new_tokens=TOKENS,
        eos_ids=(),
        seed=seed,
        on_prompt=lambda: None,
    )


@pytest.fixture(scope="module")
def served(trunk: Trunk) -> dict[ServedSetting, dict[str, ArmRun]]:
    return {setting: decode(trunk, setting) for setting in (GREEDY, WARM, DRAWN)}


def test_every_setting_decodes_every_prompt_with_its_group(served: dict[ServedSetting, dict[str, ArmRun]]) -> None:
    for runs in served.values():
        for run in runs.values():
            assert [(one.prompt_id, one.group) for one in run.counts] == [(one.id, one.group) for one in prompts()]
    texts = [tuple(runs[PLAIN].outputs) for runs in served.values()]
    assert len(set(texts)) == 3


def test_sampled_texts_are_compared_with_plain_sampling_of_the_same_seed(
    trunk: Trunk, served: dict[ServedSetting, dict[str, ArmRun]]
) -> None:
    for setting in (GREEDY, WARM):
        run = served[setting]["retrained"]
        assert (run.identical + run.near_ties, run.divergences, run.checked) == (4, [], 4)
    # Drafts that are sampled give another text of the same distribution: there is nothing to compare.
    assert served[DRAWN]["retrained"].checked == 0
    assert lossless([runs["retrained"] for runs in served.values()]).checked == 8
    # The control: plain sampling with another seed is another text, and no near tie.
    other = decode(trunk, WARM, seed=1)[PLAIN].outputs
    verdicts = [
        compare_with_plain(mine, theirs, trunk, prompt.prompt_ids, WARM.sampling(5)).verdict
        for mine, theirs, prompt in zip(served[WARM][PLAIN].outputs, other, prompts(), strict=True)
    ]
    assert "divergence" in verdicts


def test_a_divergence_at_a_served_setting_refuses_the_export(served: dict[ServedSetting, dict[str, ArmRun]]) -> None:
    recipe: Any = Recipe()
    broken = ArmRun(divergences=["p3"])
    every = [runs["retrained"] for runs in served.values()]
    verdict = judge(recipe, served, [*every, broken])
    assert not verdict.passed
    assert "changed the output of 1 prompts (p3 first)" in verdict.reason


def test_a_cell_is_what_an_arm_did_at_a_setting(served: dict[ServedSetting, dict[str, ArmRun]]) -> None:
    recipe: Any = Recipe()
    cell = run_cell(recipe, WARM, "retrained", "run/head", served[WARM])
    assert (cell.temperature, cell.top_p, cell.top_k, cell.rule, cell.depth) == (0.8, 0.9, 40, "argmax", DEPTH)
    assert (cell.prompts, cell.groups, cell.overlap, cell.dense) == (4, 2, None, None)
    plain = run_cell(recipe, WARM, PLAIN, None, served[WARM])
    assert (plain.tau, plain.speedup, plain.depth, plain.tau_ci95) == (1.0, 1.0, 0, None)


class Recipe:
    """What judging and counting read of a recipe."""

    gate_baseline = "none"

    class model:
        trunk = "finetune"
        head_from = None

    class evaluate:
        depth = DEPTH
