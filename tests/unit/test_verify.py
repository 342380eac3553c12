"""Verify: hand-worked rounds of both rules."""

from __future__ import annotations

import math

import pytest
import torch

from mtp_inference.sampling.chooser import verify_matching, verify_rejection


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
    num_accepted_B, tokens_BK1, _ = verify_matching(drafts_BK, torch.tensor([choices]), torch.tensor([num_drafted]))
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


def test_a_round_without_drafts_draws_from_p() -> None:
    none_BK = torch.empty(1, 0)
    p_BK1V = torch.tensor([P_K1V[:1]])
    verdict = verify_rejection(
        none_BK.long(), none_BK[..., None].expand(1, 0, 3), p_BK1V, none_BK, torch.tensor([[0.6]]), torch.tensor([0])
    )
    assert verdict.num_accepted_B.tolist() == [0]
    assert verdict.tokens_BK1.tolist() == [[1]]


def test_a_draft_that_the_trunk_cannot_say_is_refused_at_every_number() -> None:
    p_BK1V = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    q_BKV = torch.tensor([[[1.0, 0.0]]])
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
    p_BK1V = torch.tensor([P_K1V] * 2)
    q_BKV = torch.tensor([Q_KV] * 2)
    q_BKV[1, 1] = math.nan
    drafts_BK = torch.tensor([[0, 2], [0, 1]])
    u_BK1 = torch.tensor([[0.3, 0.3, 0.3]] * 2)
    verdict = verify_rejection(drafts_BK, q_BKV, p_BK1V, u_BK1[:, :2], u_BK1, torch.tensor([1, 1]))
    assert verdict.num_accepted_B.tolist() == [1, 1]
    assert verdict.tokens_BK1[:, :2].tolist() == [[0, 1]] * 2
