"""Verify: hand-worked rounds, and texts of whole rounds against the exact distribution of plain decoding.

The statistical tests run the real functions over a small Markov model: the trunk's logits are a table over the token
before, the drafter's another table. Each of 20,000 rows is one request with its own seed, drafting again after every
refusal as the decoder does. Their first three tokens are compared with the exact joint distribution, computed in double
from transformers' processors. Seeds are fixed, so that each figure is the same in every run; a right rule lies within
six standard deviations of chance (about 1e-9), and each planted fault must lie outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor

from mtp_inference.sampling.chooser import Verdict, verify_matching, verify_rejection
from mtp_inference.sampling.distributions import (
    ACCEPT,
    DRAFT,
    TOKEN,
    Sampling,
    SamplingRows,
    draw,
    probabilities,
    uniform,
)

ROWS, VOCAB, DEPTH, LENGTH, START = 20_000, 8, 3, 3, 0
FAR_OUT = 6.0
TABLES = torch.Generator().manual_seed(5)
TRUNK_VV = 1.2 * torch.randn(VOCAB, VOCAB, generator=TABLES)
HEAD_VV = TRUNK_VV + torch.randn(VOCAB, VOCAB, generator=TABLES)
OTHER_VV = torch.randn(VOCAB, VOCAB, generator=TABLES)

FILTERS = {
    "plain": Sampling(temperature=1.0),
    "top_k": Sampling(temperature=1.0, top_k=4),
    "top_p": Sampling(temperature=1.0, top_p=0.75),
    "min_p": Sampling(temperature=1.0, min_p=0.15),
}

Round = Callable[[SamplingRows, Tensor, Tensor, Tensor], Verdict]
"""(settings, last token B1, positions BK1, number drafted B) -> verdict."""


def from_table(table_VV: Tensor, window_BT: Tensor, rows: SamplingRows, last: int = 0) -> Tensor:
    """Return the probabilities after each token of a window, or after its ``last`` ones."""
    return probabilities(table_VV[window_BT[:, -last:]], rows)


def greedy_drafts(last_B1: Tensor) -> Tensor:
    tokens = [last_B1]
    for _ in range(DEPTH):
        tokens.append(HEAD_VV.argmax(-1)[tokens[-1]])
    return torch.cat(tokens[1:], dim=1)


def matching_round(
    rows: SamplingRows,
    last_B1: Tensor,
    position_BK1: Tensor,
    num_drafted_B: Tensor,
    drafts: Callable[[Tensor], Tensor] = greedy_drafts,
) -> Verdict:
    drafts_BK = drafts(last_B1)
    p_BK1V = from_table(TRUNK_VV, torch.cat([last_B1, drafts_BK], dim=1), rows)
    return verify_matching(drafts_BK, draw(p_BK1V, uniform(rows.seed_B, position_BK1, TOKEN)), num_drafted_B)


def rejection_round(
    rows: SamplingRows,
    last_B1: Tensor,
    position_BK1: Tensor,
    num_drafted_B: Tensor,
    fault: str = "",
) -> Verdict:
    """Draft by sampling, then verify; a fault changes what the rule is told about the drafts."""
    unfiltered = replace(rows, any_top_k=False, any_top_p=False, any_min_p=False)
    told_VV = OTHER_VV if fault == "another q" else HEAD_VV
    draft_u_BK = uniform(rows.seed_B, position_BK1[:, :DEPTH], DRAFT)
    window_BT, told_q = last_B1, []
    for k in range(DEPTH):
        q_B1V = from_table(HEAD_VV, window_BT, unfiltered if fault == "unfiltered drafts" else rows, last=1)
        told_rows = unfiltered if fault == "unfiltered q" else rows
        told_q.append(from_table(told_VV, window_BT, told_rows, last=1) if fault else q_B1V)
        window_BT = torch.cat([window_BT, draw(q_B1V, draft_u_BK[:, k : k + 1])], dim=1)
    q_BKV = torch.cat(told_q, dim=1)
    return verify_rejection(
        window_BT[:, 1:],
        q_BKV.roll(1, dims=1) if fault == "neighbour's q" else q_BKV,
        from_table(TRUNK_VV, window_BT, rows),
        draft_u_BK if fault == "reused noise" else uniform(rows.seed_B, position_BK1[:, :DEPTH], ACCEPT),
        uniform(rows.seed_B, position_BK1, TOKEN),
        num_drafted_B,
    )


def decode(one_round: Round, rows: SamplingRows, num_drafted_B: Tensor, length: int = LENGTH) -> Tensor:
    """Run rounds until every row has ``length`` tokens after START; return them, (B, length)."""
    num_rows = len(rows.seed_B)
    text_BL = torch.full((num_rows, 1 + length * (DEPTH + 1)), START)
    end_B1 = torch.ones(num_rows, 1, dtype=torch.int64)
    ahead_K1 = torch.arange(DEPTH + 1)
    for _ in range(length):
        # Each round commits a token at least; what it leaves beyond, the next one overwrites.
        num_accepted_B, tokens_BK1 = one_round(rows, text_BL.gather(1, end_B1 - 1), end_B1 + ahead_K1, num_drafted_B)
        text_BL.scatter_(1, end_B1 + ahead_K1, tokens_BK1)
        end_B1 = end_B1 + num_accepted_B[:, None] + 1
    return text_BL[:, 1 : 1 + length]


def many(sampling: Sampling, num_rows: int = ROWS) -> SamplingRows:
    """Return one request per row, which differ in their seeds."""
    return replace(SamplingRows.stack([sampling] * num_rows, "cpu"), seed_B=torch.arange(num_rows))


def depth_of(num_rows: int, depth: int = DEPTH) -> Tensor:
    return torch.full((num_rows,), depth)


def exact_joint(sampling: Sampling) -> Tensor:
    """Return the probability of every text of LENGTH tokens, in double, shape (VOCAB,) * LENGTH."""
    steps = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(sampling.temperature),
            transformers.TopKLogitsWarper(sampling.top_k or VOCAB),
            transformers.TopPLogitsWarper(sampling.top_p),
            transformers.MinPLogitsWarper(sampling.min_p),
        ]
    )
    texts_NL, p_N = torch.tensor([[START]]), torch.ones(1, dtype=torch.float64)
    for _ in range(LENGTH):
        p_NV = steps(texts_NL, TRUNK_VV[texts_NL[:, -1]].double()).softmax(-1)
        p_N = (p_N[:, None] * p_NV).flatten()
        next_N1 = torch.arange(VOCAB).repeat(len(texts_NL))[:, None]
        texts_NL = torch.cat([texts_NL.repeat_interleave(VOCAB, dim=0), next_N1], dim=1)
    return p_N.view((VOCAB,) * LENGTH)


def deviations(tokens_BL: Tensor, joint: Tensor) -> float:
    """Return the largest deviation from chance among texts of 1, 2 and 3 tokens, in standard deviations."""
    cells_B, worst = torch.zeros(len(tokens_BL), dtype=torch.int64), -math.inf
    for length in range(1, LENGTH + 1):
        cells_B = cells_B * VOCAB + tokens_BL[:, length - 1]
        expected_N = joint.flatten(length).sum(-1) if length < LENGTH else joint
        worst = max(worst, deviation(torch.bincount(cells_B, minlength=VOCAB**length), expected_N.flatten()))
    return worst


def deviation(counts_N: Tensor, p_N: Tensor) -> float:
    """Return a chi-square statistic in standard deviations (Wilson and Hilferty, 1931); inf where the impossible came.

    Cells that expect fewer than 5 are counted together, with the smallest of the others where they stay below 5.
    """
    if bool((counts_N[p_N == 0.0] > 0).any()):
        return math.inf
    expected_N, order = (p_N * counts_N.sum()).sort()
    num_pooled = int((expected_N < 5.0).sum())
    while num_pooled and expected_N[:num_pooled].sum() < 5.0 and num_pooled < len(expected_N):
        num_pooled += 1

    def pool(values_N: Tensor) -> Tensor:
        return torch.cat([values_N[:num_pooled].sum()[None], values_N[num_pooled:]])[0 if num_pooled else 1 :]

    expected, counts = pool(expected_N), pool(counts_N.double()[order])
    freedom = len(expected) - 1
    chi_square = float(((counts - expected).square() / expected).sum())
    return ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize(
    ("drafts", "choices", "num_drafted", "accepted", "committed"),
    [
        ([5, 7, 9], [5, 7, 2, 4], 3, 2, [5, 7, 2]),
        ([5, 7, 9], [5, 7, 9, 4], 3, 3, [5, 7, 9, 4]),
        ([5, 7, 9], [1, 7, 9, 4], 3, 0, [1]),
        ([5, 7, 9], [5, 1, 9, 4], 3, 1, [5, 1]),
        ([5, 7, 9], [5, 7, 9, 4], 2, 2, [5, 7, 9]),
        ([5, 7, 9], [5, 7, 9, 4], 0, 0, [5]),
        ([5, 7, 9], [5, 2, 9, 4], 2, 1, [5, 2]),
        ([], [8], 0, 0, [8]),
    ],
)
def test_matching_keeps_the_drafts_that_equal_the_choices(
    drafts: list[int], choices: list[int], num_drafted: int, accepted: int, committed: list[int]
) -> None:
    drafts_BK = torch.tensor([drafts], dtype=torch.int64)
    num_accepted_B, tokens_BK1 = verify_matching(drafts_BK, torch.tensor([choices]), torch.tensor([num_drafted]))
    assert num_accepted_B.tolist() == [accepted]
    assert num_accepted_B.dtype == tokens_BK1.dtype == torch.int64
    assert tokens_BK1[0, : accepted + 1].tolist() == committed
    assert tokens_BK1.shape == (1, len(drafts) + 1)


P_K1V = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.0, 0.5, 0.5]]
Q_KV = [[0.25, 0.7, 0.05], [0.1, 0.6, 0.3]]


@pytest.mark.parametrize(
    ("drafts", "accept_u", "token_u", "num_drafted", "accepted", "committed"),
    [
        # p/q of draft 1 at position 0 is 3/7; the residual there is (0.25, 0, 0.15).
        ([1, 1], [0.42, 0.999], [0.9, 0.9, 0.4], 2, 2, [1, 1, 1]),
        ([1, 1], [0.43, 0.0], [0.62, 0.9, 0.9], 2, 0, [0]),
        ([1, 1], [0.43, 0.0], [0.63, 0.9, 0.9], 2, 0, [2]),
        # Where p exceeds q the draft is always kept; so it is where they are equal.
        ([0, 2], [0.999, 0.999], [0.9, 0.9, 0.6], 2, 2, [0, 2, 2]),
        # After the last draft counted, p and not the residual: its sums are 0.1, 0.7, 1 at position 1.
        ([0, 2], [0.999, 0.0], [0.9, 0.05, 0.6], 1, 1, [0, 0]),
        ([0, 2], [0.0, 0.0], [0.6, 0.9, 0.9], 0, 0, [1]),
    ],
)
def test_rejection_on_tables_worked_by_hand(
    drafts: list[int],
    accept_u: list[float],
    token_u: list[float],
    num_drafted: int,
    accepted: int,
    committed: list[int],
) -> None:
    verdict = verify_rejection(
        torch.tensor([drafts]),
        torch.tensor([Q_KV]),
        torch.tensor([P_K1V]),
        torch.tensor([accept_u]),
        torch.tensor([token_u]),
        torch.tensor([num_drafted]),
    )
    assert verdict.num_accepted_B.tolist() == [accepted]
    assert verdict.num_accepted_B.dtype == verdict.tokens_BK1.dtype == torch.int64
    assert verdict.tokens_BK1[0, : accepted + 1].tolist() == committed


def test_a_draft_that_the_trunk_cannot_say_is_refused_at_every_number() -> None:
    p_BK1V, q_BKV = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]), torch.tensor([[[1.0, 0.0]]])
    for u in (0.0, 1.0 - 2.0**-24):
        u_B1 = torch.tensor([[u]])
        verdict = verify_rejection(torch.tensor([[0]]), q_BKV, p_BK1V, u_B1, u_B1.expand(1, 2), torch.tensor([1]))
        assert verdict.num_accepted_B.tolist() == [0]
        assert verdict.tokens_BK1[:, 0].tolist() == [1]


def test_a_refusal_that_leaves_no_residual_draws_from_p() -> None:
    # p below q by rounding everywhere: 1 - 2**-24 is refused, and max(p - q, 0) is 0.
    q_BKV = torch.tensor([[[0.5, 0.5]]])
    p_BK1V = torch.cat([q_BKV - 2.0**-24, q_BKV], dim=1)
    verdict = verify_rejection(
        torch.tensor([[0]]),
        q_BKV,
        p_BK1V,
        torch.tensor([[1.0 - 2.0**-24]]),
        torch.tensor([[0.7, 0.0]]),
        torch.tensor([1]),
    )
    assert verdict.num_accepted_B.tolist() == [0]
    assert verdict.tokens_BK1[:, 0].tolist() == [1]


def test_what_lies_past_the_drafts_of_a_row_does_not_count() -> None:
    p_BK1V, q_BKV = torch.tensor([P_K1V] * 2), torch.tensor([Q_KV] * 2)
    q_BKV[1, 1] = math.nan
    drafts_BK, u_BK1 = torch.tensor([[0, 2], [0, 1]]), torch.tensor([[0.3, 0.3, 0.3]] * 2)
    verdict = verify_rejection(drafts_BK, q_BKV, p_BK1V, u_BK1[:, :2], u_BK1, torch.tensor([1, 1]))
    assert verdict.num_accepted_B.tolist() == [1, 1]
    assert verdict.tokens_BK1[:, :2].tolist() == [[0, 1]] * 2


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("one_round", [matching_round, rejection_round])
def test_texts_are_distributed_as_without_drafts(one_round: Round, name: str, temperature: float) -> None:
    sampling = replace(FILTERS[name], temperature=temperature)
    tokens_BL = decode(one_round, many(sampling), depth_of(ROWS))
    assert deviations(tokens_BL, exact_joint(sampling)) < FAR_OUT


@pytest.mark.parametrize("one_round", [matching_round, rejection_round])
def test_texts_of_rows_that_draft_differently_are_distributed_as_without_drafts(one_round: Round) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9)
    tokens_BL = decode(one_round, many(sampling), torch.arange(ROWS) % (DEPTH + 1))
    assert deviations(tokens_BL, exact_joint(sampling)) < FAR_OUT


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("another q", "plain"),
        ("unfiltered q", "top_k"),
        ("unfiltered q", "top_p"),
        ("unfiltered q", "min_p"),
        ("unfiltered drafts", "top_k"),
        ("unfiltered drafts", "top_p"),
        ("unfiltered drafts", "min_p"),
        ("neighbour's q", "plain"),
        ("reused noise", "plain"),
    ],
)
def test_a_rule_told_wrongly_about_its_drafts_is_found_out(fault: str, name: str) -> None:
    sampling = FILTERS[name]
    tokens_BL = decode(lambda *state: rejection_round(*state, fault=fault), many(sampling), depth_of(ROWS))
    assert deviations(tokens_BL, exact_joint(sampling)) > FAR_OUT


def test_the_exact_distribution_of_other_settings_is_told_apart() -> None:
    tokens_BL = decode(matching_round, many(FILTERS["plain"]), depth_of(ROWS))
    assert deviations(tokens_BL, exact_joint(Sampling(temperature=1.1))) > FAR_OUT
    assert deviations(tokens_BL, exact_joint(FILTERS["top_k"])) == math.inf
    assert deviations(tokens_BL, exact_joint(FILTERS["top_p"])) > FAR_OUT


def random_drafts(last_B1: Tensor) -> Tensor:
    return torch.randint(VOCAB, (len(last_B1), DEPTH))


@pytest.mark.parametrize("drafts", [greedy_drafts, random_drafts])
@pytest.mark.parametrize("name", FILTERS)
def test_matching_gives_the_text_that_the_seed_gives_without_drafts(
    name: str, drafts: Callable[[Tensor], Tensor]
) -> None:
    rows = many(FILTERS[name], 500)
    plain_BL = decode(matching_round, rows, depth_of(500, 0), length=12)
    drafted_BL = decode(lambda *state: matching_round(*state, drafts=drafts), rows, depth_of(500), length=12)
    assert torch.equal(drafted_BL, plain_BL)
    reseeded = replace(rows, seed_B=rows.seed_B + 500)
    assert not torch.equal(decode(matching_round, reseeded, depth_of(500), length=12), plain_BL)


def test_greedy_rows_among_sampled_ones_say_what_the_trunk_says_first() -> None:
    settings = [Sampling(), Sampling(temperature=1.0, top_p=0.9)] * 50
    rows = replace(SamplingRows.stack(settings, "cpu"), seed_B=torch.arange(100))
    tokens_BL = decode(rejection_round, rows, torch.arange(100) % (DEPTH + 1), length=8)
    expected, token = [], START
    for _ in range(8):
        token = int(TRUNK_VV[token].argmax())
        expected.append(token)
    assert tokens_BL[::2].tolist() == [expected] * 50
    assert tokens_BL[1::2].tolist() != [expected] * 50
