"""Comparisons of arms: how often equal ones are called different, and an easier text is not a better head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from mtp_train.acceptance.counts import Interval
from mtp_train.acceptance.intervals import (
    Difference,
    holm,
    holm_levels,
    t_quantile,
    tau_difference,
    two_sided_p,
)
from mtp_train.evaluation.prompt_records import PromptRecord, Setting
from mtp_train.evaluation.results import ALL_TASKS, ArmComparison
from mtp_train.evaluation.statistics import MeasuredArm, compare_arms
from simulated_drafters import DEPTH, Floats, Ints, counts_of, decoded, decoded_of, dense_of, rounds_by_accepted

GREEDY = Setting(0.0, None, DEPTH, "greedy")
SAMPLED = Setting(1.0, 2048, DEPTH, "sampled")
PLACE = (GREEDY.temperature, GREEDY.context_tokens)


def arm(name: str, records: Sequence[PromptRecord], trunk: str = "trunk") -> MeasuredArm:
    return MeasuredArm(name, trunk, f"heads/{name}", {GREEDY: records})


def paired_rounds(
    rng: np.random.Generator, shape: tuple[int, int], num_arms: int = 2, gain: float = 0.0, spread: float = 0.5
) -> list[Ints]:
    """Draw arms that find the same prompts easy and differ on each by chance; the first is better by ``gain``."""
    ease_SP = rng.normal(0.8, 0.8, shape)
    return [
        rounds_by_accepted(rng, ease_SP + rng.normal(0, 0.4, shape) + (0 if number else gain), spread=spread)
        for number in range(num_arms)
    ]


def rounds_differ(first_PK1: Ints, second_PK1: Ints) -> bool:
    """Compare as if rounds were drawn one by one: the wrong test."""
    mean = np.zeros(2)
    error = np.zeros(2)
    for index, rounds_PK1 in enumerate((first_PK1, second_PK1)):
        times = rounds_PK1.sum(axis=0)
        mean[index] = times @ np.arange(DEPTH + 1) / times.sum()
        error[index] = times @ (np.arange(DEPTH + 1) - mean[index]) ** 2 / times.sum() ** 2
    return bool(abs(mean[0] - mean[1]) > 1.96 * np.sqrt(error.sum()))


@pytest.mark.parametrize("prompts", [3, 5, 8, 24, 64])
@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_equal_arms_are_called_different_in_5_percent(prompts: int, spread: float) -> None:
    """Of 800 studies, within three standard errors above; fewer where few prompts or few long texts are to tell."""
    rng = np.random.default_rng(prompts)
    studies = list(zip(*paired_rounds(rng, (800, prompts), spread=spread), strict=True))
    found = [tau_difference(counts_of(first), counts_of(second)) for first, second in studies]
    called = np.mean([one.p_value is not None and one.p_value < 0.05 for one in found])
    assert called <= 0.073
    if prompts >= 24 and spread < 0.5:
        assert called >= 0.027
        assert np.mean([rounds_differ(*study) for study in studies]) > 0.2
    for one in found:
        assert one.ci95 is not None
        assert one.p_value is not None
        assert (one.p_value < 0.05) == (one.ci95[0] > 0 or one.ci95[1] < 0)


def study(rng: np.random.Generator, prompts: int, gain: float = 0.0) -> tuple[ArmComparison, ...]:
    """Compare three arms on four tasks; the first is better by ``gain``."""
    arms = [
        arm(f"arm{number}", decoded_of(rounds_PK1[0], ("code", "prose", "qa", "stem")))
        for number, rounds_PK1 in enumerate(paired_rounds(rng, (1, prompts), num_arms=3, gain=gain))
    ]
    return compare_arms(arms)


def test_a_whole_report_of_equal_arms_has_a_finding_in_5_percent() -> None:
    """Of 150 reports with 15 comparisons each; without the correction a third of them would have one."""
    rng = np.random.default_rng(1)
    reports = [study(rng, 32) for _ in range(150)]
    assert {len(report) for report in reports} == {3 * 5}
    assert np.mean([any(one.differs for one in report) for report in reports]) <= 0.05 + 3 * 0.018
    assert np.mean([any((one.p_value or 1.0) < 0.05 for one in report) for report in reports]) > 0.25


def test_a_real_difference_stands_the_correction() -> None:
    report = study(np.random.default_rng(2), 48, gain=1.5)
    over_all = {(one.first, one.second): one for one in report if one.task == ALL_TASKS}
    assert {pair: one.differs for pair, one in over_all.items()} == {
        ("arm0", "arm1"): True,
        ("arm0", "arm2"): True,
        ("arm1", "arm2"): False,
    }
    assert all(one.delta_tau > 0.5 for one in report if one.first == "arm0")
    assert {one.task for one in report if one.differs} > {ALL_TASKS}
    assert all(one.same_trunk for one in report)


@pytest.mark.parametrize(
    ("larger", "p_value", "differs"),
    [([3, 2, 2, 2, 1, 1, 0, 0, 0, -1], 0.032, False), ([2, 2, 2, 1, 1, 1, 1, 0, 0, -1], 0.0187, True)],
)
def test_all_tasks_and_single_tasks_share_the_level(larger: list[int], p_value: float, differs: bool) -> None:
    """Half of 5 % is for all tasks, whatever the single tasks show; t = 2.535 and 2.862 of 9 degrees of freedom."""
    arms = [
        arm(name, decoded_of(np.array([[5 - more, 5 + more, 0, 0] for more in gains]), ("code", "prose")))
        for name, gains in (("first", larger), ("second", [0] * 10))
    ]
    over_all, *single = compare_arms(arms)
    assert over_all.p_value == pytest.approx(p_value, abs=2e-4)
    assert [one.differs for one in (over_all, *single)] == [differs, False, False]


def test_holm_by_hand() -> None:
    """0.012 stands against 0.05 / 4, 0.015 against 0.05 / 3 and 0.04 no longer against 0.05 / 2."""
    assert holm([0.04, 0.012, None, 0.015, 0.9], 0.05) == [False, True, False, True, False]
    assert holm([0.013, 0.001], 0.05) == [True, True]
    assert holm([0.013, 0.014, 0.014, 0.014], 0.05) == [False] * 4
    assert holm([], 0.05) == []
    assert holm_levels([0.04, 0.012, None, 0.015, 0.9], 0.04) == [0.01, 0.01, 0.0, 0.01, 0.01]
    assert holm_levels([0.03, 0.001], 0.04) == [0.04, 0.02]


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (63, 1.998)]
)
def test_students_t_as_in_tables(freedom: int, t: float) -> None:
    assert t_quantile(freedom) == pytest.approx(t, abs=6e-4)
    assert two_sided_p(-t_quantile(freedom), freedom) == pytest.approx(0.05)
    assert two_sided_p(0.0, freedom) == 1.0
    assert 0 <= two_sided_p(1e6, freedom) < 1e-6


def test_prompts_without_spread() -> None:
    """Nothing to tell a spread by; what favours one arm on all of five prompts may be luck, and on 20 is not."""
    same = [counts_of(np.array([[1, 2, 3, 4]] * 20))] * 2
    alike = tau_difference(*same)
    assert (alike.value, alike.ci95, alike.p_value, alike.groups) == (0.0, (0.0, 0.0), 1.0, 20)
    worse = counts_of(np.array([[4, 3, 2, 1]] * 20))
    assert tau_difference(same[0][:5], worse[:5]).p_value == pytest.approx(2 / 32)
    assert tau_difference(same[0], worse).p_value == pytest.approx(2.0**-19)
    assert tau_difference(same[0][:1], worse[:1]) == Difference(pytest.approx(1.0), None, 1)
    silent = counts_of(np.zeros((3, 4), int))
    assert tau_difference(silent, silent) == Difference(0.0, None, 0)
    assert tau_difference(same[0][:5] + silent, worse[:5] + silent).p_value == pytest.approx(2 / 32)


def test_arms_are_compared_where_both_decoded() -> None:
    """A prompt that one arm had no room for is left out of both; so are plain decoding and settings of one arm."""
    more = [decoded([3] * 5, "p9"), decoded([2, 1], "p0"), decoded([0, 3], "p1", "two")]
    first = dataclasses.replace(arm("a", more), decoded={GREEDY.plain: more, GREEDY: more, SAMPLED: more})
    second = arm("b", [decoded([0, 1], "p1", "two"), decoded([1, 1], "p0")], trunk="other")
    found = compare_arms([first, second])
    assert [(one.first, one.second, one.task, one.rule) for one in found] == [
        ("a", "b", task, "greedy") for task in (ALL_TASKS, "one", "two")
    ]
    assert [one.delta_tau for one in found] == pytest.approx([6 / 4 - 3 / 4, 3 / 2 - 2 / 2, 3 / 2 - 1 / 2])
    assert [one.p_value is None for one in found] == [False, True, True]
    assert not any(one.same_trunk for one in found)
    assert all(one.delta_overlap_at_equal_entropy is None for one in found)
    assert compare_arms([first, dataclasses.replace(second, decoded={GREEDY: [decoded([1], "elsewhere")]})]) == ()


def read_text(rng: np.random.Generator, name: str, mean_nats: float, skill: float = 1.0) -> MeasuredArm:
    """Return an arm whose overlap falls with entropy by its skill alone, and the rounds that it gives."""
    entropies: list[Floats] = []
    overlaps: list[Floats] = []
    records = []
    for number in range(40):
        entropy_N = rng.exponential(mean_nats * rng.uniform(0.7, 1.3), 150)
        overlap_N = np.clip(np.exp(-entropy_N / (2 * skill)) + rng.normal(0, 0.05, 150), 0, 1)
        entropies.append(entropy_N)
        overlaps.append(overlap_N)
        passed = rng.random((50, DEPTH)) < overlap_N.reshape(50, DEPTH)
        records.append(
            decoded(passed.cumprod(axis=1).sum(axis=1).tolist(), f"p{number}", ("code", "prose")[number % 2])
        )
    dense = {PLACE: dense_of(entropies, overlaps, ("code", "prose"))}
    return dataclasses.replace(arm(name, records, trunk=name), dense=dense)


def control(first: MeasuredArm, second: MeasuredArm) -> tuple[ArmComparison, float, Interval]:
    """Return the comparison over all tasks, and the difference of overlap in it."""
    comparison = compare_arms([first, second])[0]
    value = comparison.delta_overlap_at_equal_entropy
    interval = comparison.delta_overlap_at_equal_entropy_ci95
    assert value is not None
    assert interval is not None
    return comparison, value, interval


def mean_overlap(measured: MeasuredArm) -> float:
    return float(measured.dense[PLACE].overlap_KN.mean())


def test_easier_text_is_not_a_better_head() -> None:
    """Tau differs, and so does overlap by far; at equal entropy nothing is left of it."""
    rng = np.random.default_rng(3)
    easy = read_text(rng, "easy", 0.6)
    hard = read_text(rng, "hard", 1.2)
    comparison, at_equal, (low, high) = control(easy, hard)
    assert comparison.differs
    assert comparison.delta_tau > 0.3
    assert mean_overlap(easy) - mean_overlap(hard) > 0.12
    assert low < 0 < high
    assert abs(at_equal) < 0.006


def test_a_better_head_is_better_at_equal_entropy() -> None:
    """The reverse: the better head meets harder text, so that its tau is no higher."""
    rng = np.random.default_rng(4)
    comparison, _, (low, _) = control(read_text(rng, "better", 1.2, skill=1.6), read_text(rng, "easy", 0.7))
    assert comparison.delta_tau < 0.1
    assert low > 0.05


def test_on_one_trunk_the_control_changes_nothing() -> None:
    rng = np.random.default_rng(6)
    first = read_text(rng, "a", 1.0)
    rows = first.dense[PLACE]
    worse = dataclasses.replace(rows, overlap_KN=(rows.overlap_KN * rng.uniform(0.6, 1.0, rows.overlap_KN.shape)))
    second = dataclasses.replace(first, name="b", dense={PLACE: worse})
    comparison, at_equal, _ = control(first, second)
    assert comparison.same_trunk
    assert at_equal == pytest.approx(mean_overlap(first) - mean_overlap(second), rel=1e-6)
    code = next(one for one in compare_arms([first, second]) if one.task == "code")
    of_code_N = rows.prompt_N % 2 == 0
    plain = (rows.overlap_KN - worse.overlap_KN)[0, of_code_N].mean()
    assert code.delta_overlap_at_equal_entropy == pytest.approx(plain, rel=1e-6)


def test_texts_with_nothing_in_common_are_not_compared() -> None:
    rng = np.random.default_rng(7)
    found = compare_arms([read_text(rng, "sure", 0.02), read_text(rng, "lost", 9.0)])
    assert found[0].delta_overlap_at_equal_entropy is None
    assert found[0].delta_overlap_at_equal_entropy_ci95 is None
    assert found[0].differs
