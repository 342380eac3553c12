"""Which tokens a head may draft."""

from __future__ import annotations

from mtp_train.data.tokenize import Document, frequent_tokens
from mtp_train.runs.training import keep_targets


def document(*tokens: int, targets: str) -> Document:
    return Document(tokens, tuple(mark == "x" for mark in targets), "g", "d")


def test_the_most_frequent_targets_are_taken_and_what_is_no_target_does_not_count() -> None:
    text = [document(7, 7, 7, 3, 3, 5, targets="...xxx"), document(5, 5, 9, targets="x.x")]
    # Targets: 3 twice, 5 twice, 9 once; 7 never.
    assert frequent_tokens(text, 2, 12, always=()) == [3, 5]
    assert frequent_tokens(text, 3, 12, always=()) == [3, 5, 9]


def test_ties_and_places_left_go_to_the_lower_ids() -> None:
    text = [document(6, 4, 8, targets="xxx")]
    assert frequent_tokens(text, 2, 10, always=()) == [4, 6]
    assert frequent_tokens(text, 5, 10, always=()) == [0, 1, 4, 6, 8]


def test_tokens_that_end_a_text_are_always_in() -> None:
    text = [document(6, 6, 6, 4, 4, targets="xxxxx")]
    assert frequent_tokens(text, 2, 10, always={9}) == [6, 9]


def test_only_kept_tokens_stay_targets_and_what_has_none_left_goes() -> None:
    text = [
        document(1, 2, 3, 4, 3, targets="..xxx"),
        document(1, 2, 4, 4, targets="..xx"),
        document(3, 3, 4, targets="xx."),
    ]
    (kept,) = keep_targets(text, {2, 3})
    assert (tuple(kept.input_ids), tuple(kept.loss_mask)) == ((1, 2, 3, 4, 3), (False, False, True, False, True))
    assert len(keep_targets(text, {3, 4})) == 2
