"""The verdict and the figures of planted decoding runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtp_train.acceptance import PromptCounts
from mtp_train.arms import ArmRun, own_text
from mtp_train.data.prompts import Prompt
from mtp_train.evaluation import arm_result, draft_depth, judge, lossless
from mtp_train.recipe import Recipe
from mtp_train.report.schema import ArmResult, Lossless
from mtp_train.serving import GREEDY
from mtp_train.train.dense import DenseMetrics
from runs import tiny_recipe

DENSE = DenseMetrics(agreement=[0.75, 0.5], overlap=[0.5, 0.25], target_entropy=1.5, num_targets=[8, 4])
NO_DENSE = DenseMetrics([], [], 1.5, [])


def recipe(**overrides: Any) -> Recipe:
    return tiny_recipe(Path("in"), Path("run"), **overrides)


def counts(prompt_id: str, rounds: int, accepted: tuple[int, ...], seconds: float = 1.0) -> PromptCounts:
    drafted, committed = rounds * len(accepted), 1 + rounds + sum(accepted)
    return PromptCounts(prompt_id, rounds, drafted, accepted, committed, seconds, group=prompt_id)


def planted(accepted: list[tuple[int, int]], rounds: int = 10) -> ArmRun:
    """Return the run of a head of which each prompt accepted this much in ``rounds`` rounds."""
    pairs = enumerate(accepted)
    run = ArmRun(counts=[counts(f"p{number}", rounds, pair) for number, pair in pairs])
    run.outputs = [tuple(range(count.new_tokens)) for count in run.counts]
    run.identical = len(accepted)
    return run


WEAK = [(3, 0), (2, 1), (4, 1), (3, 1), (2, 0), (3, 0), (4, 2), (3, 1)]
STRONG = [(9, 5), (8, 6), (9, 7), (8, 4), (9, 6), (7, 5), (9, 8), (8, 5)]


def runs(retrained: list[tuple[int, int]], baseline: list[tuple[int, int]], name: str = "graft") -> dict[str, ArmRun]:
    return {name: planted(baseline), "retrained": planted(retrained)}


# The gate


def test_a_better_head_passes() -> None:
    arms = runs(STRONG, WEAK)
    verdict = judge(recipe(), {GREEDY: arms}, list(arms.values()))
    assert (verdict.passed, verdict.baseline) == (True, "graft")
    assert verdict.delta_tau_ci95 is not None
    assert verdict.delta_tau_ci95[0] > 0
    assert "mtp-train graft" not in verdict.reason


@pytest.mark.parametrize(
    ("retrained", "found"),
    [(WEAK, "does not lie above 0"), ([(1, 0)] * 8, "lies below 0")],
    ids=["the same", "worse"],
)
def test_a_head_that_is_no_better_is_refused_with_the_command_for_the_better_one(
    retrained: list[tuple[int, int]], found: str
) -> None:
    arms = runs(retrained, WEAK)
    verdict = judge(recipe(), {GREEDY: arms}, list(arms.values()))
    assert not verdict.passed
    assert f"{found}. The base's own head is not shown to be worse: " in verdict.reason
    assert verdict.reason.endswith("mtp-train graft in/finetune --from in/base --out in/finetune-mtp")


def test_other_baselines_have_no_command_to_name() -> None:
    native = recipe(head__init="native", model__head_from=None, evaluate__arms=["none", "native", "retrained"])
    arms = runs(WEAK, STRONG, "native")
    verdict = judge(native, {GREEDY: arms}, list(arms.values()))
    assert (verdict.passed, verdict.baseline) == (False, "native")
    assert "(native)" in verdict.reason
    assert "mtp-train" not in verdict.reason


@pytest.mark.parametrize(
    ("overrides", "baseline"),
    [
        ({}, "graft"),
        ({"head__init": "random"}, "graft"),
        ({"head__init": "native", "evaluate__arms": ["native", "graft", "retrained"]}, "native"),
        ({"head__init": "random", "model__head_from": None, "evaluate__arms": ["none", "retrained"]}, "none"),
        ({"gate__baseline": "none"}, "none"),
    ],
)
def test_the_automatic_baseline_is_the_best_head_without_training(overrides: dict[str, Any], baseline: str) -> None:
    arms = {name: planted(WEAK) for name in ("none", "graft", "native")} | {"retrained": planted(STRONG)}
    assert judge(recipe(**overrides), {GREEDY: arms}, []).baseline == baseline


@pytest.mark.parametrize("arm", ["graft", "retrained", "vanilla"])
def test_an_output_that_decoding_changed_refuses_whatever_the_gain(arm: str) -> None:
    arms = runs(STRONG, WEAK)
    checked = [*arms.values(), planted(WEAK)]
    broken = checked[["graft", "retrained", "vanilla"].index(arm)]
    broken.divergences = ["chats.jsonl#4", "chats.jsonl#9"]
    verdict = judge(recipe(), {GREEDY: arms}, checked)
    assert (verdict.passed, verdict.delta_tau_ci95) == (False, None)
    assert "changed the output of 2 prompts (chats.jsonl#4 first), and no near tie explains it" in verdict.reason


def test_a_near_tie_refuses_nothing() -> None:
    arms = runs(STRONG, WEAK)
    arms["retrained"].identical, arms["retrained"].near_ties = 7, 1
    assert judge(recipe(), {GREEDY: arms}, list(arms.values())).passed


def test_too_few_prompts_are_refused_however_good_they_look() -> None:
    arms = runs(STRONG[:4], WEAK[:4])
    verdict = judge(recipe(), {GREEDY: arms}, list(arms.values()))
    assert not verdict.passed
    assert "needs prompts of at least 5 groups. Raise evaluate.prompts" in verdict.reason


# The figures


def test_figures_of_an_arm_are_pooled_over_its_prompts() -> None:
    plain = ArmRun(counts=[counts("a", 5, (), 0.5), counts("b", 3, (), 0.5)], outputs=[(1,) * 6, (2, 3, 4, 5)])
    run = ArmRun(counts=[counts("a", 4, (3, 1), 0.25), counts("b", 2, (1, 1), 0.25)], outputs=[(1,) * 9, (2,) * 5])
    result = arm_result(run, "in/finetune", "run/head", DENSE, plain)
    interval = result.tau_ci95
    assert interval is not None
    assert interval[0] <= 2.0 <= interval[1]
    assert result == ArmResult(
        trunk="in/finetune",
        head="run/head",
        tau=1 + 6 / 6,
        tau_ci95=interval,
        acceptance_rate=6 / 12,
        marginal=(4 / 6, 2 / 6),
        conditional=(4 / 6, 2 / 4),
        dense=(0.75, 0.5),
        overlap=(0.5, 0.25),
        target_entropy=1.5,
        # Of the nine equal tokens, the second 8-gram repeats the first; five tokens have none.
        repeated_8gram_share=1 / 2,
        tokens_per_second=14 / 0.5,
        speedup=(14 / 0.5) / (10 / 1.0),
        rounds=6,
        prompts=2,
        groups=2,
        measured_here=True,
    )


def test_plain_decoding_has_no_figures_of_drafts() -> None:
    plain = ArmRun(counts=[counts("a", 5, ()), counts("b", 3, ())], outputs=[(1, 2, 3, 4, 5, 6), (1, 2, 3, 4)])
    result = arm_result(plain, "in/finetune", None, NO_DENSE, plain)
    assert (result.tau_ci95, result.acceptance_rate, result.marginal, result.conditional) == (None,) * 4
    assert (result.dense, result.overlap) == (None, None)
    assert (result.tau, result.speedup, result.tokens_per_second, result.rounds) == (1.0, 1.0, 5.0, 8)


def test_a_depth_without_a_target_is_left_out_of_the_dense_figures() -> None:
    short = DenseMetrics([0.5, None], [0.25, None], 1.0, [3, 0])
    result = arm_result(planted(WEAK), "in/finetune", "run/head", short, planted(WEAK))
    assert (result.dense, result.overlap) == ((0.5,), (0.25,))


def test_lossless_adds_up_every_checked_arm() -> None:
    first, second = planted(WEAK), planted(STRONG)
    second.identical, second.near_ties, second.divergences = 6, 1, ["p3"]
    summed = lossless([first, second])
    assert summed == Lossless(checked=16, identical=14, near_tie_divergences=1)
    assert summed.faults == 1


def test_arms_draft_as_deep_as_the_head_was_trained_unless_told() -> None:
    assert draft_depth(recipe()) == 2
    assert draft_depth(recipe(evaluate__depth=5)) == 5


def test_dense_figures_are_taken_on_the_output_and_not_on_the_prompt() -> None:
    prompts = [Prompt("a", "g", (1, 2, 3)), Prompt("b", "g", (4,))]
    documents = own_text(prompts, [(5, 6, 7), (8, 9)], seq_len_tokens=5)
    assert [document.input_ids.tolist() for document in documents] == [[1, 2, 3, 5, 6], [4, 8, 9]]
    assert [document.loss_mask.tolist() for document in documents] == [[False] * 3 + [True] * 2, [False, True, True]]
