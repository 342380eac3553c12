"""Records made of a server's counts have the figures of the rounds that the server decoded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_train.evaluation.served.metrics import SpecCounts
from mtp_train.evaluation.served.rounds import Starts, rounds_of


def test_rounds_are_rebuilt_from_the_counts_of_each_position() -> None:
    # Four rounds of three drafts accepted 3, 1, 0 and 0; two steps had no drafts.
    counts = SpecCounts(rounds=4, draft_tokens=12, accepted_tokens=4, accepted_per_pos=(2, 1, 1))
    drafted, accepted = rounds_of(counts, tokens=1 + 4 + 4 + 2, depth=3)
    assert accepted == (3, 1, 0, 0, 0, 0)
    assert drafted == (3, 3, 3, 3, 0, 0)


def test_a_round_with_fewer_drafts_keeps_those_it_accepted() -> None:
    counts = SpecCounts(rounds=3, draft_tokens=6, accepted_tokens=3, accepted_per_pos=(1, 1, 1))
    assert rounds_of(counts, tokens=7, depth=3) == ((3, 1, 2), (3, 0, 0))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted), max_size=30), st.integers(0, 5))
def test_any_rounds_keep_their_sums_and_their_accepted_positions(pairs: list[list[int]], plain_steps: int) -> None:
    """Without the order, which no figure of a run reads."""
    accepted, drafted = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    per_pos = tuple(sum(one > position for one in accepted) for position in range(4))
    counts = SpecCounts(
        rounds=len(pairs), draft_tokens=sum(drafted), accepted_tokens=sum(accepted), accepted_per_pos=per_pos
    )
    tokens = 1 + len(pairs) + sum(accepted) + plain_steps
    found_drafted, found_accepted = rounds_of(counts, tokens, 4)
    assert sum(found_drafted) == sum(drafted)
    assert sorted(found_accepted) == sorted(accepted + [0] * plain_steps)
    assert all(0 <= a <= d <= 4 for a, d in zip(found_accepted, found_drafted, strict=True))


def test_beginnings_are_compared_on_common_prompts() -> None:
    mine = Starts({"a": (1, 2), "b": (3, 4), "c": (5,)})
    assert mine.same_share(Starts({"a": (1, 2), "b": (3, 9)})) == pytest.approx(0.5)
    assert mine.same_share(Starts({})) == 1.0
