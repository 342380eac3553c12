"""Texts of a decoder and of an engine, compared: what is equal, what a near tie explains, what differs."""

from __future__ import annotations

from typing import Any

from engines.traces import after_first_round, count, cut, make_text
from engines.verdict import Miss, judge

A, B, C = 5, 6, 7


def text(*rounds: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    return make_text([1, 2], [((), (A,)), *rounds])


def miss(steps: float) -> Any:
    return Miss(text=0, position=1, depth=1, gap=0.1, steps=steps)


def judged(ours: Any, theirs: Any, *misses: Any) -> dict[str, Any]:
    return judge([ours], [theirs], [], misses, most_steps=4.0)


def test_the_same_rounds_are_equal_whatever_was_close() -> None:
    one = text(((B, C), (B, A)), ((A, A), (A, A, B)))
    assert judged(one, one, miss(100.0))["verdict"] == "equal"


def test_a_draft_that_differs_at_a_near_tie_is_explained() -> None:
    ours = text(((B, C), (B, A)))
    theirs = text(((B, B), (B, A)))
    found = judged(ours, theirs, miss(3.9))
    assert found["verdict"] == "explained"
    assert found["first_differences"] == [{"text": 0, "what": "draft", "position": 1, "ours": (B, C), "theirs": (B, B)}]


def test_a_draft_that_differs_at_a_wide_gap_is_different() -> None:
    assert judged(text(((B, C), (B, A))), text(((B, B), (B, A))), miss(4.1))["verdict"] == "different"


def test_a_token_that_differs_is_named_as_one() -> None:
    found = judged(text(((B,), (A,))), text(((B,), (C,))), miss(1.0))
    assert (found["verdict"], found["first_differences"][0]["what"]) == ("explained", "token")


def test_a_right_draft_that_was_refused_is_different() -> None:
    ours = text(((B, C), (B, C, A)), ((A, A), (A, A)))
    theirs = text(((B, C), (B,)), ((C, A), (C, A, A)), ((A, A), (A,)))
    found = judged(ours, theirs)
    assert (found["verdict"], found["first_differences"][0]["what"]) == ("different", "round")


def test_a_round_at_the_limit_may_draft_less() -> None:
    ours = text(((B, C), (B, A)), ((A, C), (A,)))
    theirs = text(((B, C), (B, A)), ((A,), (A,)))
    assert judged(ours, theirs)["verdict"] == "equal"
    longer = [text(*one.rounds[1:], ((C,), (C, C))) for one in (ours, theirs)]
    assert judged(*longer)["verdict"] != "equal"


def test_a_text_that_ends_early_is_different() -> None:
    found = judged(text(((B,), (B, A)), ((C,), (C,))), text(((B,), (B, A))))
    assert (found["verdict"], found["first_differences"][0]["what"]) == ("different", "end")


def test_counts_are_taken_over_the_rounds_that_drafted() -> None:
    texts = [text(((B, C), (B, A)), ((A, A), (A, A, B))), text(((B, C), (C,)))]
    assert count(texts, 2) == {
        "new_tokens": 8,
        "rounds": 3,
        "draft_tokens": 6,
        "accepted_tokens": 3,
        "accepted_per_pos": [2, 1],
    }


def test_a_text_is_cut_at_its_limit_and_after_the_token_that_ends_it() -> None:
    whole = text(((B, C), (B, A)), ((A, A), (A, A, B)))
    assert cut(whole, 4, ()).token_ids == (A, B, A, A)
    assert cut(whole, 9, {B}).token_ids == (A, B)
    assert cut(whole, 9, ()) == whole


def test_drafts_before_the_first_token_become_part_of_the_prompt() -> None:
    early = make_text([1, 2], [((A, C), (A, B)), ((C,), (C, C))])
    assert after_first_round(early) == make_text([1, 2, A], [((), (B,)), ((C,), (C, C))])
