"""Acceptance figures against hand-worked numbers, and the gate against planted effects."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mtp_train.acceptance import (
    PromptCounts,
    accept_greedy,
    acceptance_rate,
    conditional,
    decide_gate,
    delta_tau_interval,
    entropy,
    marginal,
    marginal_intervals,
    min_gate_prompts,
    overlap,
    repeated_ngram_share,
    tau,
    tau_interval,
)


def counts(prompt_id: str, rounds: int, *accepted: int) -> PromptCounts:
    return PromptCounts(
        prompt_id=prompt_id,
        rounds=rounds,
        num_draft_tokens=rounds * len(accepted),
        accepted_per_pos=accepted,
        new_tokens=1 + rounds + sum(accepted),
        seconds=None,
    )


def decoded(shares: np.ndarray, seed: int, rounds: int = 40, depth: int = 3) -> list[PromptCounts]:
    """Simulate prompts whose rounds accept each next draft with the prompt's own chance."""
    rng = np.random.default_rng(seed)
    result = []
    for i, share in enumerate(shares):
        lengths = np.minimum(rng.geometric(1.0 - share, size=rounds) - 1, depth)
        result.append(counts(f"p{i}", rounds, *(int((lengths > pos).sum()) for pos in range(depth))))
    return result


def difficulty(num_prompts: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.2, 0.8, size=num_prompts)


def width(interval: tuple[float, float] | None) -> float:
    assert interval is not None
    return interval[1] - interval[0]


def test_fastmtp_figures_are_marginal_and_sum_to_tau() -> None:
    fastmtp = [counts("a", 60, 50, 36, 24), counts("b", 40, 31, 20, 12)]
    assert marginal(fastmtp) == pytest.approx([0.81, 0.56, 0.36])
    assert conditional(fastmtp) == pytest.approx([0.81, 0.6914, 0.6429], abs=1e-4)
    assert tau(fastmtp) == pytest.approx(2.73)
    assert acceptance_rate(fastmtp) == pytest.approx(1.73 / 3)


def test_tau_pools_rounds_instead_of_averaging_prompts() -> None:
    long_and_hard, short_and_easy = counts("a", 30, 0), counts("b", 10, 10)
    assert tau([long_and_hard, short_and_easy]) == pytest.approx(1.25)


def test_conditional_is_none_where_no_round_arrived() -> None:
    assert conditional([counts("a", 4, 2, 0, 0)]) == [0.5, 0.0, None]


def test_plain_decoding_commits_one_token_and_has_no_rates() -> None:
    plain = [counts("a", 0), counts("b", 0)]
    assert tau(plain) == 1.0
    assert acceptance_rate(plain) is None
    assert marginal(plain) == []
    assert conditional(plain) == []
    assert tau_interval(plain) == (1.0, 1.0)


def test_prompt_that_ended_at_prefill_changes_nothing() -> None:
    assert marginal([counts("a", 4, 3, 1), counts("b", 0)]) == [0.75, 0.25]


def test_mixed_depths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"depths \[1, 2\]; expected one depth"):
        marginal([counts("a", 4, 3), counts("b", 4, 3, 1)])


@pytest.mark.parametrize("accepted", [(5, 1), (1, 2), (1, -1)])
def test_impossible_counts_are_refused(accepted: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"prompt 'a'.*never rise"):
        counts("a", 4, *accepted)


def test_bonus_tokens_among_the_accepted_are_refused() -> None:
    with pytest.raises(ValueError, match="3 accepted of 2 drafted"):
        PromptCounts("a", rounds=4, num_draft_tokens=2, accepted_per_pos=(3,), new_tokens=9, seconds=None)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        tau([])
    with pytest.raises(ValueError, match="no prompts"):
        tau_interval([])


def test_interval_holds_tau_and_is_reproducible() -> None:
    prompts = decoded(difficulty(30), seed=1)
    interval = tau_interval(prompts)
    assert interval is not None
    assert interval[0] < tau(prompts) < interval[1]
    assert tau_interval(prompts) == interval
    assert tau_interval(prompts, seed=1) != interval
    assert width(tau_interval(prompts, confidence=0.5)) < width(interval)


def test_one_prompt_has_no_interval() -> None:
    alone = decoded(difficulty(1), seed=1)
    assert tau_interval(alone) is None
    assert marginal_intervals(alone) == [None] * 3
    assert delta_tau_interval(alone, alone) is None


def test_interval_of_a_mean_is_students() -> None:
    """With one round each, tau is a mean: its interval is mean +- t * s / sqrt(n); t = 2.262 for 10 prompts."""
    accepted = [0, 3, 1, 2, 2, 1, 3, 0, 2, 1]
    prompts = [counts(f"p{i}", 1, *(int(length > pos) for pos in range(3))) for i, length in enumerate(accepted)]
    half = 2.262 * float(np.std(accepted, ddof=1)) / math.sqrt(10)
    assert tau_interval(prompts, resamples=20_000) == pytest.approx((2.5 - half, 2.5 + half), abs=0.06)


def test_clustering_by_prompt_widens_the_interval_over_naive_rounds() -> None:
    prompts = decoded(difficulty(30), seed=1)
    rounds_as_prompts = []
    for prompt in prompts:
        lengths = [sum(count > i for count in prompt.accepted_per_pos) for i in range(prompt.rounds)]
        for i, length in enumerate(lengths):
            rounds_as_prompts.append(counts(f"{prompt.prompt_id}.{i}", 1, *(int(length > pos) for pos in range(3))))
    assert tau(rounds_as_prompts) == pytest.approx(tau(prompts))
    assert width(tau_interval(prompts)) > 1.5 * width(tau_interval(rounds_as_prompts))


def test_clustering_costs_nothing_where_prompts_are_alike() -> None:
    alike = decoded(np.full(30, 0.5), seed=1)
    varied = decoded(difficulty(30), seed=1)
    assert width(tau_interval(alike)) < 0.5 * width(tau_interval(varied))


def test_pairing_narrows_the_interval_of_the_gain() -> None:
    shares = difficulty(30)
    before, after = decoded(shares, seed=1), decoded(shares + 0.05, seed=2)
    unpaired = math.hypot(width(tau_interval(before)), width(tau_interval(after)))
    assert width(delta_tau_interval(after, before)) < 0.6 * unpaired


def test_pairing_follows_prompt_names_not_order() -> None:
    before, after = decoded(difficulty(12), seed=1), decoded(difficulty(12), seed=2)
    assert delta_tau_interval(after, before[::-1]) == delta_tau_interval(after, before)


@pytest.mark.parametrize(
    ("a", "b"),
    [("xy", "xz"), ("xy", "x"), ("xx", "xx"), ("xy", "xyy")],
    ids=["other prompt", "missing prompt", "twice in both", "twice in one"],
)
def test_unlike_prompts_are_not_paired(a: str, b: str) -> None:
    with pytest.raises(ValueError, match="Decode both arms on the same prompts"):
        delta_tau_interval([counts(name, 4, 2) for name in a], [counts(name, 4, 2) for name in b])


def test_marginal_intervals_hold_the_marginals() -> None:
    prompts = [*decoded(difficulty(30), seed=1), counts("ended", 0)]
    intervals = marginal_intervals(prompts)
    assert len(intervals) == 3
    for share, interval in zip(marginal(prompts), intervals, strict=True):
        assert interval is not None
        assert interval[0] < share < interval[1]


def test_gate_passes_a_planted_gain() -> None:
    shares = difficulty(30)
    verdict = decide_gate(decoded(shares + 0.1, seed=2), decoded(shares, seed=1), "graft", 0.95)
    assert verdict.passed
    assert verdict.baseline == "graft"
    assert verdict.delta_tau_ci95 is not None
    assert verdict.delta_tau_ci95[0] > 0
    assert "lies above 0" in verdict.reason


@pytest.mark.parametrize("gain", [0.0, -0.1], ids=["no effect", "worse"])
def test_gate_refuses_without_a_gain(gain: float) -> None:
    shares = difficulty(30)
    verdict = decide_gate(decoded(shares + gain, seed=2), decoded(shares, seed=1), "graft", 0.95)
    assert not verdict.passed
    assert "does not lie above 0" in verdict.reason


def test_gate_refuses_equal_heads_exactly() -> None:
    same = decoded(difficulty(10), seed=1)
    verdict = decide_gate(same, same, "graft", 0.95)
    assert verdict.delta_tau_ci95 == (0.0, 0.0)
    assert not verdict.passed


def test_interval_of_no_gain_misses_zero_as_often_as_it_says() -> None:
    """At 95 %, 10 of 200 miss 0 by luck, and over 20 with a chance of 1 in 1000."""
    missed = 0
    for seed in range(200):
        shares = difficulty(12, seed=seed)
        before, after = (decoded(shares, seed=10_000 + 2 * seed + i) for i in range(2))
        interval = delta_tau_interval(after, before, resamples=500)
        assert interval is not None
        missed += interval[0] > 0 or interval[1] < 0
    assert 2 <= missed <= 20


def test_gate_needs_enough_prompts() -> None:
    assert [min_gate_prompts(c) for c in (0.9, 0.95, 0.99)] == [4, 5, 7]
    shares = difficulty(5)
    after, before = decoded(shares + 0.2, seed=2), decoded(shares, seed=1)
    assert decide_gate(after, before, "graft", 0.95).passed
    few = decide_gate(after[:4], before[:4], "graft", 0.95)
    assert not few.passed
    assert "needs at least 5 prompts. Raise evaluate.prompts" in few.reason


def test_gate_against_no_drafts_and_without_rounds() -> None:
    after = decoded(difficulty(8), seed=1)
    plain = [counts(prompt.prompt_id, 0) for prompt in after]
    assert decide_gate(after, plain, "none", 0.95).passed
    empty = decide_gate(plain, after, "graft", 0.95)
    assert not empty.passed
    assert empty.delta_tau_ci95 is None


def test_gate_reports_a_95_interval_at_any_confidence() -> None:
    shares = difficulty(20)
    after, before = decoded(shares + 0.1, seed=2), decoded(shares, seed=1)
    loose = decide_gate(after, before, "graft", 0.8)
    assert loose.delta_tau_ci95 == decide_gate(after, before, "graft", 0.95).delta_tau_ci95
    assert "80 % interval" in loose.reason


def test_confidence_outside_0_to_1_is_refused() -> None:
    with pytest.raises(ValueError, match="confidence: 95; expected"):
        tau_interval([counts("a", 4, 2)], confidence=95)


def test_repeated_ngrams_count_within_one_output_only() -> None:
    assert repeated_ngram_share([[1, 2, 3, 1, 2, 3]], n=3) == pytest.approx(1 / 4)
    assert repeated_ngram_share([[1, 2, 3], [1, 2, 3]], n=3) == 0.0
    assert repeated_ngram_share([[7] * 10], n=8) == pytest.approx(2 / 3)
    assert repeated_ngram_share([[1, 2, 3]], n=8) is None


@pytest.mark.parametrize(
    ("draft", "target", "expected"),
    [
        ([5, 7, 9], [5, 7, 9, 4], 3),
        ([5, 7, 9], [5, 7, 2, 4], 2),
        ([5, 7, 9], [1, 7, 9, 4], 0),  # a later match does not count
        ([5, 7, 9], [9, 5, 7, 9], 0),  # off by one
        ([], [4], 0),
    ],
)
def test_accept_greedy_counts_the_longest_matching_prefix(draft: list[int], target: list[int], expected: int) -> None:
    accepted = accept_greedy(torch.tensor(draft, dtype=torch.long), torch.tensor(target))
    assert accepted.shape == ()
    assert int(accepted) == expected


def test_accept_greedy_takes_rows() -> None:
    draft_BK = torch.tensor([[5, 7], [5, 7]])
    target_BK1 = torch.tensor([[5, 7, 1], [5, 1, 7]])
    assert accept_greedy(draft_BK, target_BK1).tolist() == [2, 1]


def test_overlap_is_the_acceptance_of_rejection_sampling() -> None:
    p_NV = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    q_NV = torch.tensor([[0.25, 0.25, 0.5], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    assert overlap(p_NV, q_NV).tolist() == pytest.approx([0.5, 0.0, 1.0])


def test_entropy_is_in_nats_and_survives_zeros() -> None:
    p_NV = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    assert entropy(p_NV).tolist() == pytest.approx([math.log(4), 0.0])
