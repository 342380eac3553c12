"""The verdict and the figures of planted decoding runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_inference.lossless import CheckVerdict, TextCheck
from mtp_train.acceptance.gate import GateVerdict
from mtp_train.acceptance.names import PLAIN
from mtp_train.data.tokenize import Prompt
from mtp_train.evaluation.grid import greedy
from mtp_train.evaluation.prompt_records import PromptRecord
from mtp_train.evaluation.results import Cell
from mtp_train.evaluation.statistics import MeasuredArm, make_cell
from mtp_train.recipe.schema import Recipe
from mtp_train.runs import evaluate_run
from mtp_train.runs.evaluate_run import NUM_SAMPLES, SAMPLE_PROMPT_CHARS, sample_texts
from runs import tiny_recipe

DEPTH, ROUNDS = 2, 10
GREEDY = greedy(DEPTH)


def recipe(**overrides: Any) -> Recipe:
    return tiny_recipe(Path("in"), Path("run"), **overrides)


def record(
    prompt_id: str, accepted: tuple[int, ...], depth: int = DEPTH, tokens: tuple[int, ...] = (), seconds: float = 1.0
) -> PromptRecord:
    """Return a record of rounds that each drafted ``depth`` tokens."""
    return PromptRecord(
        prompt_id=prompt_id,
        group=prompt_id,
        task="held-out",
        prompt_tokens=3,
        token_ids=tokens,
        drafted=(depth,) * len(accepted),
        accepted=accepted,
        seconds_prefill=0.25 * seconds,
        seconds_decode=0.75 * seconds,
        check=TextCheck(verdict="identical" if depth else "plain"),
    )


def planted(name: str, accepted: list[tuple[int, int]]) -> MeasuredArm:
    """Return an arm of which each prompt accepted so much at each position in ten rounds."""
    if name == PLAIN:
        plain = [record(f"p{number}", (0,) * ROUNDS, depth=0) for number in range(len(accepted))]
        return MeasuredArm(name, "in/finetune", None, {GREEDY.plain: plain})
    records = [
        record(f"p{number}", (2,) * second + (1,) * (first - second) + (0,) * (ROUNDS - first))
        for number, (first, second) in enumerate(accepted)
    ]
    return MeasuredArm(name, "in/finetune", "run/head", {GREEDY: records})


def with_verdicts(arm: MeasuredArm, verdicts: dict[str, CheckVerdict]) -> MeasuredArm:
    """Return an arm whose checks had these results, by prompt."""
    found = {one.prompt_id: verdicts.get(one.prompt_id, "identical") for one in arm.decoded[GREEDY]}
    checks = {name: TextCheck(verdict=one, expected_differences=0.1) for name, one in found.items()}
    records = [replace(one, check=checks[one.prompt_id]) for one in arm.decoded[GREEDY]]
    return replace(arm, decoded={GREEDY: records})


def judge(asked: Recipe, arms: tuple[MeasuredArm, ...], depths: dict[int, Cell] | None = None) -> GateVerdict:
    return evaluate_run.judge(asked, arms, [GREEDY], depths or {})


WEAK = [(3, 0), (2, 1), (4, 1), (3, 1), (2, 0), (3, 0), (4, 2), (3, 1)]
STRONG = [(9, 5), (8, 6), (9, 7), (8, 4), (9, 6), (7, 5), (9, 8), (8, 5)]


def runs(
    retrained: list[tuple[int, int]], baseline: list[tuple[int, int]], name: str = "graft"
) -> tuple[MeasuredArm, ...]:
    return planted(name, baseline), planted("retrained", retrained)


# The gate


@pytest.mark.parametrize(
    ("retrained", "found"),
    [(WEAK, "does not lie above 0"), ([(1, 0)] * 8, "lies below 0")],
    ids=["the same", "worse"],
)
def test_a_head_that_is_no_better_is_refused_with_the_command_for_the_better_one(
    retrained: list[tuple[int, int]], found: str
) -> None:
    verdict = judge(recipe(), runs(retrained, WEAK))
    assert not verdict.passed
    assert f"{found}. The head as it was is not shown to be worse: " in verdict.reason
    assert verdict.reason.endswith("mtp-train graft in/finetune --from in/base --out finetune-mtp")


@pytest.mark.parametrize(
    ("fields", "baseline"),
    [
        ({"head__init": "native", "model__head_from": None, "evaluate__arms": ["native", "retrained"]}, "native"),
        ({"model__head_from": "in/finetune"}, "graft"),
    ],
)
def test_where_the_trunks_own_head_is_no_worse_it_is_served_as_it_is(fields: dict[str, Any], baseline: str) -> None:
    verdict = judge(recipe(**fields), runs(WEAK, STRONG, baseline))
    assert (verdict.passed, verdict.baseline) == (False, baseline)
    assert f"({baseline})" in verdict.reason
    assert verdict.reason.endswith("serve in/finetune as it is")


@pytest.mark.parametrize("arm", ["graft", "retrained", "vanilla"])
def test_an_output_that_decoding_changed_refuses_whatever_the_gain(arm: str) -> None:
    arms = [planted("graft", WEAK), planted("retrained", STRONG), planted("vanilla", WEAK)]
    broken: dict[str, CheckVerdict] = {"p4": "divergence", "p6": "divergence", "p7": "near_tie"}
    verdict = judge(recipe(), tuple(with_verdicts(one, broken) if one.name == arm else one for one in arms))
    assert (verdict.passed, verdict.delta_tau_ci95) == (False, None)
    assert f"{arm}, greedy: 2 of {len(WEAK)} texts differ from plain decoding where the logits differ" in verdict.reason


def test_a_near_tie_refuses_nothing() -> None:
    graft, retrained = runs(STRONG, WEAK)
    assert judge(recipe(), (graft, with_verdicts(retrained, {"p2": "near_tie"}))).passed


def timed(name: str, shares: list[tuple[int, int]], seconds: float) -> MeasuredArm:
    """Return the arm of :func:`planted` with this time per prompt, one new token per round and accepted draft."""
    arm = planted(name, shares)
    texts = [(0,) * (1 + ROUNDS + first + second) for first, second in shares]
    decoded = {
        setting: [
            replace(
                one,
                token_ids=text,
                accepted=one.accepted if setting.depth else (0,) * (len(text) - 1),
                drafted=one.drafted if setting.depth else (0,) * (len(text) - 1),
                seconds_prefill=0.1,
                seconds_decode=seconds * (1 + number / 100),
            )
            for number, (one, text) in enumerate(zip(records, texts, strict=True))
        ]
        for setting, records in arm.decoded.items()
    }
    return replace(arm, decoded=decoded, timed=decoded)


def test_against_plain_decoding_a_slow_head_is_refused_with_the_depth_that_pays() -> None:
    ask = recipe(gate__baseline="none")
    plain = timed(PLAIN, STRONG, 1.0)
    slow = timed("retrained", STRONG, 1.3)
    verdict = judge(ask, (plain, slow))
    assert verdict.outcome == "refused"
    assert "measured speedup 0.7" in verdict.reason
    assert verdict.reason.endswith(
        "Train for longer, or serve without drafts. If another engine will serve the head, set gate.break_even_tau to "
        "that engine's"
    )
    assert judge(ask, (plain, timed("retrained", STRONG, 0.6))).passed
    on_target = judge(recipe(gate__baseline="none", gate__break_even_tau=1.8), (plain, slow))
    assert on_target.passed
    assert "here: measured speedup 0.7" in on_target.reason
    unsure = judge(ask, (plain, timed("retrained", STRONG, 1.0)))
    assert (unsure.outcome, "serve without" in unsure.reason) == ("undecided", False)
    assert "Measure more: raise evaluate.prompts" in unsure.reason

    shallow = replace(GREEDY, depth=1)
    quick = {shallow: timed("retrained", STRONG, 0.5).timed[GREEDY]}
    cured = judge(ask, (plain, slow), {1: make_cell(replace(slow, decoded=quick, timed=quick, plain=plain), shallow)})
    assert cured.reason.endswith("Fewer drafts a round are shown to pay: set evaluate.depth to 1")


class Letters:
    """A tokenizer whose token n is the n-th letter."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(96 + token) for token in tokens)

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(96 + token)


# Another order than the records', and one prompt longer than the report shows.
HELD_OUT = (Prompt("p3", "p3", (6,)), Prompt("p1", "p1", (1,) * 500 + (2,)), Prompt("p0", "p0", (5, 6)))


def test_sample_texts_are_the_retrained_heads_first_at_the_first_setting() -> None:
    records = [record("p0", (1,), tokens=(1, 2, 3)), record("p1", (0,), tokens=(4,))]
    other = replace(GREEDY, temperature=0.5)
    arm = MeasuredArm(
        "retrained", "in/finetune", "run/head", {other: [record("p3", (0,), tokens=(9,))], GREEDY: records}
    )
    first, second = sample_texts([planted("graft", WEAK), arm], GREEDY, HELD_OUT, Letters(), "native")
    assert (first.prompt_id, first.prompt) == ("p0", "ef")
    assert first.pieces == (("a", False), ("b", True), ("c", False))
    assert first.before == second.before == ()
    # The same text, drafted for by the head that the gate compares with.
    graft = MeasuredArm("graft", "in/finetune", "in/base", {GREEDY: [record("p0", (0, 0), tokens=(1, 2, 3))]})
    before = sample_texts([graft, arm], GREEDY, HELD_OUT, Letters(), "graft")
    assert [one.before for one in before] == [(("abc", False),), ()]
    assert [one.pieces for one in before] == [first.pieces, second.pieces]
    # The end of a long prompt is shown.
    assert (second.prompt_id, second.prompt) == ("p1", "a" * (SAMPLE_PROMPT_CHARS - 1) + "b")
    many = replace(arm, decoded={GREEDY: records * NUM_SAMPLES})
    assert len(sample_texts([many], GREEDY, HELD_OUT, Letters(), "native")) == NUM_SAMPLES
    assert sample_texts([planted("graft", WEAK)], GREEDY, HELD_OUT, Letters(), "graft") == ()


# The figures


PLAIN_TEXTS = [
    record("a", (0,) * 5, depth=0, tokens=(1,) * 6, seconds=0.5),
    record("b", (0,) * 3, depth=0, tokens=(2, 3, 4, 5), seconds=0.5),
]
DRAFTED = [
    record("a", (2, 1, 1, 0), tokens=(1,) * 9, seconds=0.25),
    record("b", (2, 0), tokens=(2,) * 5, seconds=0.25),
]


def test_rounds_are_of_all_prompts_and_their_times_of_the_timed_ones() -> None:
    """The other prompts were decoded in a batch, whose rows have no times."""
    plain = MeasuredArm("none", "in/finetune", None, {GREEDY.plain: PLAIN_TEXTS}, {GREEDY.plain: PLAIN_TEXTS[:1]})
    arm = MeasuredArm("retrained", "in/finetune", "run/head", {GREEDY: DRAFTED}, {GREEDY: DRAFTED[:1]}, plain=plain)
    cell = make_cell(arm, GREEDY)
    assert (cell.prompts, cell.tau) == (2, 2.0)
    # Prefill of .0625 s and rounds of .1875 / 4 s; plain: .125 s and rounds of .375 / 5 s.
    assert cell.tokens_per_second == pytest.approx(14 / (2 * 0.0625 + 6 * 0.1875 / 4))
    assert cell.speedup == pytest.approx(cell.tokens_per_second / (10 / (2 * 0.125 + 8 * 0.075)))
    assert cell.speedup_ci95 is None
    assert cell.round_seconds == 0.1875 / 4
    untimed = make_cell(replace(arm, timed={}), GREEDY)
    assert (untimed.tau, untimed.tokens_per_second, untimed.speedup, untimed.pays) == (2.0, None, None, None)
