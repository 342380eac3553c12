"""The static n-gram table that the demo's head is compared with."""

from __future__ import annotations

from demo_maker.table import TableDrafting, make_table
from mtp_train.data.tokenize import Document


def document(tokens: list[int], first_target: int = 0) -> Document:
    return Document(tokens, [index >= first_target for index in range(len(tokens))], "g", "d")


def test_the_table_holds_what_most_often_followed_a_target_s_context() -> None:
    table = make_table([document([1, 2, 3, 2, 3, 2, 4], first_target=1)], longest=2)
    assert table[(2,)] == 3
    assert table[(3, 2)] == 3  # as often as 4, and lower
    assert (1,) in table
    assert (4,) not in table


def test_the_longest_known_context_counts() -> None:
    drafting = TableDrafting(make_table([document([1, 5, 2]), document([9, 5, 3]), document([9, 5, 3])]), longest=2)
    assert drafting.next_token([1, 5]) == 2
    assert drafting.next_token([4, 5]) == 3
    assert drafting.next_token([4]) is None
