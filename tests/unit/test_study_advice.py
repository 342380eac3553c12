"""What to serve with, from cells whose answer is known."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from mtp_train.acceptance.counts import Interval
from mtp_train.evaluation.assemble import advise, break_even
from mtp_train.evaluation.cells import ALL_TASKS, Advice, ArmCosts, BreakEven, Cell
from mtp_train.evaluation.results import TeacherForced
from mtp_train.families import FAMILIES, Family
from mtp_train.families.assistants import GEMMA4_ASSISTANT
from mtp_train.families.engines import engine_commands
from mtp_train.job.checkpoints.inspect import SUGGESTED_DEPTH

PLAIN = Cell(
    trunk="models/finetune",
    head=None,
    tau=None,
    tau_ci95=None,
    acceptance_rate=None,
    marginal=None,
    conditional=None,
    teacher_forced=TeacherForced(dense=None, overlap=None, target_entropy=0.4),
    repeated_8gram_share=0.0,
    tokens_per_second=100.0,
    speedup=1.0,
    rounds=900,
    prompts=20,
    measured_here=True,
    arm="none",
    task=ALL_TASKS,
    temperature=0.0,
    context_tokens=None,
    depth=0,
    rule="none",
    tau_macro=None,
    accepted_histogram=None,
    draft_tokens=0,
    accepted_tokens=0,
    new_tokens=1000,
    mean_prompt_tokens=128.0,
    seconds_prefill=0.1,
    round_seconds=0.5,
    break_even_tau=None,
    break_even_acceptance=None,
)
COSTS = ArmCosts(
    arm="head",
    head_bytes=1000,
    head_kv_bytes_per_token=10,
    trunk_kv_bytes_per_token=100,
    trunk_state_bytes=0,
    context_tokens_lost=10,
    prefill_ratio=0.8,
    prefill_tokens=2048,
    plain_prefill_tokens_per_second=64.0,
)


def cell(depth: int, speedup: float, tau: float, low: float | None, needed: float, **more: object) -> Cell:
    """Return a cell of the arm ``head``; a plain token takes half a second."""
    interval: Interval | None = None if low is None else (low, 2 * tau - low)
    drafted = replace(
        PLAIN,
        arm="head",
        head="models/base",
        depth=depth,
        rule="greedy",
        speedup=speedup,
        tau=tau,
        tau_ci95=interval,
        break_even_tau=needed,
        round_seconds=0.5 * needed,
    )
    return replace(drafted, **more)  # type: ignore[arg-type]


def flags(depth: int) -> dict[str, str]:
    return {"engine": f"--drafts {depth}"}


def only(*cells: Cell) -> Advice:
    (advice,) = advise([PLAIN, *cells], "head", flags)
    return advice


THREE = (cell(1, 1.4, 1.8, 1.7, 1.25), cell(3, 1.6, 2.4, 2.25, 1.5), cell(5, 1.5, 2.7, 2.5, 1.75))


def test_the_fastest_depth_is_advised_with_its_flags_and_its_figures() -> None:
    assert only(*THREE) == Advice(
        arm="head",
        task=ALL_TASKS,
        temperature=0.0,
        depth=3,
        speedup=1.6,
        reason="Of the depths measured (1, 3, 5), 3 is the fastest of those that pay: 1.60 times the speed of plain "
        "decoding, where a round commits 2.40 tokens (95 % interval 2.25 to 2.55) and costs as much as 1.50 plain "
        "ones.",
        flags={"engine": "--drafts 3"},
    )


def test_a_depth_that_was_not_measured_is_not_advised() -> None:
    assert only(THREE[0]).depth == 1
    assert {only(*THREE[:count]).depth for count in (1, 2, 3)} == {1, 3}


@pytest.mark.parametrize(
    "doubtful",
    [
        # Rounds may commit fewer tokens than they cost.
        cell(3, 1.1, 1.65, 1.45, 1.5),
        # Faster by the mean of one prompt.
        cell(3, 1.6, 2.4, None, 1.5),
        # Rounds pay, and prefill eats it.
        cell(3, 0.97, 1.6, 1.55, 1.5),
        # Slower.
        cell(3, 0.8, 1.2, 1.1, 1.5),
    ],
)
def test_drafts_that_are_not_shown_to_pay_are_left_off(doubtful: Cell) -> None:
    advice = only(doubtful)
    assert (advice.depth, advice.speedup, advice.flags) == (0, 1.0, {"engine": "--drafts 0"})
    assert advice.reason.startswith("None of the depths measured (3) is shown to pay; 3 comes nearest: ")
    assert f"{doubtful.speedup:.2f} times" in advice.reason
    # The same with a narrower interval, and without what prefill takes, pays.
    assert only(replace(doubtful, speedup=1.1, tau=1.65, tau_ci95=(1.55, 1.75))).depth == 3


def test_one_prompt_is_said_to_show_no_spread() -> None:
    assert "2.40 tokens (one prompt, which shows no spread)" in only(cell(3, 1.6, 2.4, None, 1.5)).reason


def test_a_surer_depth_is_preferred_to_a_faster_one_in_doubt() -> None:
    advice = only(cell(1, 1.2, 1.5, 1.4, 1.25), cell(3, 1.3, 1.9, 1.4, 1.5))
    assert (advice.depth, advice.speedup) == (1, 1.2)


def test_every_task_and_temperature_has_its_own_advice_and_other_arms_none() -> None:
    cells = [
        replace(one, task=task, temperature=temperature, arm=arm, rule="greedy" if temperature == 0 else "sampled")
        for task, temperature, arm, one in (
            (ALL_TASKS, 0.0, "head", THREE[1]),
            ("coding", 0.0, "head", THREE[2]),
            ("coding", 1.0, "head", THREE[0]),
            ("writing", 0.0, "head", cell(3, 0.9, 1.3, 1.2, 1.5)),
            ("coding", 0.0, "other", THREE[0]),
        )
    ]
    found = advise(cells, "head", flags)
    assert [(one.task, one.temperature, one.depth) for one in found] == [
        (ALL_TASKS, 0.0, 3),
        ("coding", 0.0, 5),
        ("coding", 1.0, 1),
        ("writing", 0.0, 0),
    ]
    assert "plain decoding, drafts sampled, where" in found[2].reason
    assert advise([PLAIN], "none", flags) == ()
    assert advise([replace(THREE[0], speedup=None, break_even_tau=None)], "head", flags) == ()


def test_prompts_as_they_are_decide_then_the_shortest_context() -> None:
    long = replace(THREE[2], context_tokens=8192, speedup=1.9)
    assert only(THREE[0], long).depth == 1
    assert only(replace(THREE[0], context_tokens=512), long).depth == 1
    assert only(long).depth == 5


def even(*cells: Cell, costs: ArmCosts = COSTS, prompt_tokens: int = 128) -> BreakEven:
    (row,) = break_even([PLAIN, *cells], [costs], [prompt_tokens])
    return row


def test_the_reply_that_pays_for_prefill_is_found_by_hand() -> None:
    # 128 tokens take 2 s without the head and 2.5 s with it. A token takes 0.5 s, and 0.75 / 3 = 0.25 s with drafts:
    # two tokens after the first win the 0.5 s back.
    best = cell(3, 1.8, 3.0, 2.9, 1.5)
    assert even(best) == BreakEven(
        arm="head", task=ALL_TASKS, temperature=0.0, depth=3, prompt_tokens=128, output_tokens=3
    )
    assert even(best, prompt_tokens=1280).output_tokens == 1 + 20
    # With one token less, drafts are slower.
    assert 2.5 + (3 - 1) * 0.25 <= 2.0 + (3 - 1) * 0.5
    assert 2.5 + (2 - 1) * 0.25 > 2.0 + (2 - 1) * 0.5


def test_drafts_may_pay_at_once_or_never() -> None:
    best = cell(3, 1.8, 3.0, 2.9, 1.5)
    assert even(best, costs=replace(COSTS, prefill_ratio=1.0)).output_tokens == 0
    assert even(best, costs=replace(COSTS, prefill_ratio=1.02)).output_tokens == 0
    assert even(cell(3, 0.9, 1.5, 1.4, 1.5)).output_tokens is None
    assert even(cell(3, 0.9, 1.4, 1.3, 1.5), costs=replace(COSTS, prefill_ratio=1.02)).output_tokens is None


def test_a_break_even_is_of_the_fastest_depth_at_the_nearest_context() -> None:
    near = [replace(one, mean_prompt_tokens=100.0) for one in THREE]
    far = [replace(one, context_tokens=8192, mean_prompt_tokens=8192.0) for one in (THREE[0], THREE[2])]
    rows = break_even([*near, *far], [COSTS])
    assert [(row.prompt_tokens, row.depth) for row in rows] == [(128, 3), (512, 3), (2048, 5), (8192, 5)]


def test_an_arm_whose_prefill_was_not_timed_has_no_break_even() -> None:
    assert break_even(THREE, []) == ()
    untimed = replace(COSTS, prefill_ratio=None, plain_prefill_tokens_per_second=None)
    assert break_even(THREE, [untimed]) == ()


def test_flags_are_those_of_inspect_at_any_depth() -> None:
    family = next(family for family in FAMILIES if family.name == "qwen3_5")
    commands = partial(engine_commands, family.serving, "my model")
    assert commands(5)["vllm"] == (
        """vllm serve 'my model' --speculative-config '{"method":"mtp","num_speculative_tokens":5}'"""
    )
    assert commands(5)["sglang"].endswith(
        "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6"
    )
    assert commands(5)["llama.cpp"].endswith("llama-server -m model.gguf --spec-type draft-mtp --spec-draft-n-max 5")
    assert commands(5)["transformers"].startswith("no: ")
    assert commands(SUGGESTED_DEPTH).keys() == family.serving.keys()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_depth_0_serves_the_same_checkpoint_without_drafts_wherever_it_could_draft(family: Family) -> None:
    off = engine_commands(family.serving, "model", 0)
    assert off.keys() == {name for name, support in family.serving.items() if support.supported}
    # Every command that drafts says so by one of these words, and by nothing else.
    words = ("spec", "use_mtp")
    assert [command for command in off.values() if any(word in command for word in words)] == []
    assert all(any(word in family.serving[name].text for word in words) for name in off)


def test_an_external_drafter_is_advised_like_a_head() -> None:
    config = {"backbone_hidden_size": 64, "text_config": {"hidden_size": 32}}
    commands = partial(GEMMA4_ASSISTANT.commands, config, "helper")
    assert commands(2)["vllm"] == (
        """vllm serve TRUNK --speculative-config '{"model":"helper","num_speculative_tokens":2}'"""
    )
    assert commands(2)["llama.cpp"].endswith("--spec-type draft-mtp --spec-draft-n-max 2")
    assert commands(0)["vllm"] == "vllm serve TRUNK"
    # llama.cpp refuses one as wide as its trunk, and serves the trunk.
    wide = partial(GEMMA4_ASSISTANT.commands, {**config, "backbone_hidden_size": 32}, "helper")
    assert wide(2)["llama.cpp"].startswith("no: its loader refuses")
    assert wide(0)["llama.cpp"] == "llama-server -m TRUNK.gguf"
