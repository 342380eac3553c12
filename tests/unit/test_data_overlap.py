"""How much of the held-out text was trained on."""

from __future__ import annotations

import random

import pytest

from mtp_train.runs.evaluate_run import SEEN_SHARE, measure_overlap

SPECIAL = 1
MARKER = [SPECIAL, 7, 8, SPECIAL]


def text(seed: int, length: int = 60) -> list[int]:
    return random.Random(f"text {seed}").choices(range(10, 5000), k=length)


def test_the_share_is_that_of_the_eight_grams() -> None:
    # Half of the text was seen: 53 8-grams, of which 23 lie in the first 30 tokens.
    found = measure_overlap([text(0)], [text(0)[:30]])
    assert found.overlap_8gram == pytest.approx(23 / 53)
    assert found.prompts_seen == 0
    assert 23 / 53 < SEEN_SHARE < 1


def test_chat_markers_do_not_count() -> None:
    def chat(seed: int) -> list[int]:
        return [*MARKER, *text(seed), *MARKER, *text(seed + 1000), SPECIAL]

    held_out, training = [chat(n) for n in range(4)], [chat(n) for n in range(100, 140)]
    assert measure_overlap(held_out, training, [SPECIAL]).overlap_8gram == 0.0
    leaked = measure_overlap(held_out, [*training, *held_out], [SPECIAL])
    assert (leaked.overlap_8gram, leaked.prompts_seen) == (1.0, 4)


def test_a_system_prompt_that_all_share_is_a_template() -> None:
    system = text(-1, 200)
    found = measure_overlap([[*system, *text(n)] for n in range(4)], [[*system, *text(n)] for n in range(100, 140)])
    assert found.overlap_8gram == 0.0
    assert found.template_8gram == pytest.approx(193 / 253)
    # With so few texts nothing can be told to be a template.
    assert measure_overlap([[*system, *text(0)]], [[*system, *text(1)]]).overlap_8gram == pytest.approx(193 / 253)


def test_texts_that_are_too_short_say_nothing() -> None:
    assert measure_overlap([text(0, 7)], [text(0)]).overlap_8gram is None
    assert measure_overlap([], []).template_8gram is None
