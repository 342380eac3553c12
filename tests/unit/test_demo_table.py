"""The static n-gram table that the demo's head is compared with."""

from __future__ import annotations

from demo_maker.table import TableDrafting, make_table
from mtp_inference import GenerationResult, SpeculativeDecoder
from mtp_train.data.tokenize import Document
from tiny import tiny_trunk


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


def test_a_table_of_the_trunk_s_own_text_drafts_it_and_changes_nothing() -> None:
    trunk, prompt = tiny_trunk("qwen3_5"), [1, 2, 3, 4]

    def decode(drafting: TableDrafting | None) -> GenerationResult:
        (result,) = SpeculativeDecoder(trunk, drafting, 3 if drafting else 0, []).decode([prompt], 20)
        return result

    plain = decode(None)
    drafted = decode(TableDrafting(make_table([document([*prompt, *plain.token_ids])], 20), 20))
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_accepted_tokens > 10
    # A table of another text has none of these contexts.
    other = decode(TableDrafting(make_table([document([0, 0])])))
    assert other.token_ids == plain.token_ids
    assert other.num_accepted_tokens < drafted.num_accepted_tokens
