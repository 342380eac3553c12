"""What is held out together: chats by their first user turn, near-duplicate prompts, text by its file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from json_files import user
from mtp_train.data.groups import (
    THRESHOLD,
    holdout_of,
    is_held_out,
    join_near_duplicates,
    near_duplicate_groups,
    split_by_group,
)
from mtp_train.data.records import Chat, Content, PlainText, PromptResponse, Record, content_group, normalised
from mtp_train.data.sources import load_records
from mtp_train.errors import DataError
from mtp_train.runs.refusals import require_groups
from runs import tiny_recipe

WORDS = ["".join(random.Random(n).choices("abcdefghijklmnopqrstuvwxyz", k=3 + n % 7)) for n in range(2000)]


def sentence(seed: int, num_words: int = 14) -> str:
    return " ".join(random.Random(f"sentence {seed}").choices(WORDS, k=num_words))


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def records(contents: list[Content]) -> list[Record]:
    return [Record(f"r#{number}", content_group(content), content) for number, content in enumerate(contents)]


def groups(texts: list[str]) -> list[int]:
    return near_duplicate_groups([normalised(text) for text in texts]).tolist()


def test_case_space_punctuation_and_system_turns_do_not_tell_prompts_apart() -> None:
    system = {"role": "system", "content": "Be brief."}
    same: list[Content] = [
        Chat((user("What is a monad?"), assistant("A burrito."))),
        Chat((user("  what is\na MONAD ?! "), assistant("A monoid."))),
        Chat((system, user("What is a monad"))),
        PromptResponse("What is a monad?", "Nothing."),
    ]
    assert len({content_group(content) for content in same}) == 1
    assert content_group(Chat((user("What is a functor?"),))) != content_group(same[0])
    # Nothing is left of these without their punctuation.
    assert content_group(PlainText("?")) != content_group(PlainText("..."))


@pytest.mark.parametrize("edit", ["{} please", "please {}", "{}, thank you", "{}: now"])
def test_near_duplicates_are_on_one_side(edit: str) -> None:
    texts = [sentence(number) for number in range(60)]
    every = [*texts, *(edit.format(text) for text in texts)]
    found = join_near_duplicates(records([PromptResponse(text, "a") for text in every]))
    assert [one.group for one in found[:60]] == [one.group for one in found[60:]]
    assert len({one.group for one in found}) == 60


def test_a_changed_word_in_a_long_prompt_is_a_near_duplicate() -> None:
    words = sentence(0).split()
    assert groups([" ".join(words), " ".join([*words[:6], "otherwise", *words[7:]])]) == [0, 0]


def test_unrelated_prompts_are_not_joined() -> None:
    assert groups([sentence(number) for number in range(2000)]) == list(range(2000))


@pytest.mark.parametrize("count", [40, 400])
def test_an_instruction_that_all_prompts_share_joins_none_of_them(count: int) -> None:
    shared = "You are given a sentence. Say in one word whether its author was pleased or not, and nothing else: "
    texts = [shared + sentence(number, 4) for number in range(count)]
    assert groups(texts) == list(range(count))
    doubled = groups(texts + [f"{text} thanks" for text in texts[:3]])
    assert doubled == [*range(count), 0, 1, 2]


def test_groups_do_not_depend_on_the_order_of_the_records() -> None:
    found = records([PromptResponse(edit.format(sentence(n)), "a") for n in range(40) for edit in ("{}", "{} please")])
    of_id = {one.id: one.group for one in join_near_duplicates(found)}
    assert {one.id: one.group for one in join_near_duplicates(found[::-1])} == of_id


def test_near_duplicates_of_near_duplicates_are_joined() -> None:
    words = [sentence(0, 16).split()]
    for number in range(6):
        words.append([*words[-1][: 2 * number], f"other{number}word", *words[-1][2 * number + 1 :]])
    assert groups([" ".join(one) for one in words]) == [0] * 7
    assert groups([" ".join(words[0]), " ".join(words[-1])]) == [0, 1]
    assert THRESHOLD < 1


def test_a_group_that_the_user_named_is_not_joined_with_another() -> None:
    one, other = (Record(f"r#{n}", f"named {n}", PromptResponse("the very same prompt", "a")) for n in range(2))
    assert join_near_duplicates([one, other]) == [one, other]


def test_the_empty_list_has_no_groups() -> None:
    assert join_near_duplicates([]) == []


@pytest.mark.usefixtures("own_datasets_cache")
def test_paragraphs_of_a_text_file_are_on_one_side_wherever_it_lies(tmp_path: Path) -> None:
    sides = []
    for place in (tmp_path / "here", tmp_path / "there"):
        place.mkdir()
        for number in range(12):
            (place / f"{number}.txt").write_text("\n\n".join(sentence(9 * number + n) for n in range(5)))
        for path in (place, place / "*.txt"):
            found = join_near_duplicates(load_records(str(path)))
            train, held_out = split_by_group(found, 0.4, 0)
            assert len(found) == 60
            assert len({one.group for one in found}) == 12
            assert not {one.group for one in train} & {one.group for one in held_out}
            sides.append([one.content for one in held_out])
    assert all(side == sides[0] for side in sides)


@pytest.mark.usefixtures("own_datasets_cache")
def test_one_text_file_alone_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one\n\ntwo\n\nthree")
    found = load_records(str(tmp_path / "book.txt"))
    recipe = tiny_recipe(tmp_path, tmp_path / "run")
    with pytest.raises(DataError, match=r"3 records of 1 group\(s\); .* Add records of 5 more: .* a \.txt file"):
        require_groups(recipe, [record.group for record in found])


ITEMS = [Record(f"r#{number:03}", f"group {number % 50}", PlainText("")) for number in range(200)]


def test_the_side_depends_on_group_and_seed_alone() -> None:
    train, held_out = split_by_group(ITEMS, 0.2, 0)
    assert split_by_group(ITEMS[::-1], 0.2, 0) == (train[::-1], held_out[::-1])
    assert split_by_group(held_out + train[:1], 0.2, 0) == (train[:1], held_out)
    assert split_by_group(ITEMS, 0.2, 1)[1] != held_out
    assert sorted(train + held_out, key=lambda item: item.id) == ITEMS


@pytest.mark.parametrize(("holdout", "side"), [(1e-9, "held-out"), (1 - 1e-9, "train")])
def test_an_empty_side_is_refused(holdout: float, side: str) -> None:
    with pytest.raises(
        DataError,
        match=rf"leaves the {side} side empty \(200 records in 50 group\(s\)\); expected records on both sides",
    ) as error:
        split_by_group(ITEMS, holdout, 0)
    sides = split_by_group(ITEMS, float(str(error.value).partition("data.holdout=")[2].rstrip(".")), 0)
    assert [len({one.group for one in part}) for part in sides] == [25, 25]


@pytest.mark.parametrize("count", [1, 7, 49])
def test_a_share_holds_out_the_number_of_groups_that_it_is_made_for(count: int) -> None:
    groups = {one.group for one in ITEMS}
    assert sum(is_held_out(group, holdout_of(groups, count, 3), 3) for group in groups) == count
