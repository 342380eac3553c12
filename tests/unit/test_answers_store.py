from __future__ import annotations

from pathlib import Path

import pytest

import mtp_train.answers.store as responses_module
from mtp_train.answers.store import RegeneratedRow, RegeneratedStore, settings_key
from mtp_train.errors import DataError

EOS = 0


def row(name: str, *response_ids: int, prompt_ids: tuple[int, ...] = (1, 2), finished: bool = True) -> RegeneratedRow:
    return RegeneratedRow(name, "g", prompt_ids, response_ids, finished, seed=5)


def test_rows_come_back_whole(tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path / "new" / "data")
    rows = [row("b", 3, 4), row("a\n\u00e9", 5, finished=False)]
    store.append(rows[:1])
    store.append(rows[1:])
    assert store.path.name == "regenerated-00000-of-00001.jsonl"
    assert list(RegeneratedStore(store.directory)) == rows


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path)
    store.append([row("a", 3, 4), row("b", 5, 6)])
    content = store.path.read_bytes()
    for torn in range(1, len(content)):
        store.path.write_bytes(content[:torn])
        reopened = RegeneratedStore(tmp_path)
        whole = content[:torn].count(b"\n")
        assert {row.id for row in reopened} == {"a", "b"} - ({"b"} if whole < 2 else set()) - (
            {"a"} if whole < 1 else set()
        )
        reopened.append([row("c", 7, 8)])
        assert "c" in {row.id for row in reopened}


def test_a_torn_line_may_be_longer_than_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RegeneratedStore(tmp_path)
    store.append([row("a", 3, 4), row("b", *range(200))])
    content = store.path.read_bytes()
    for block in (1, 7, len(content) - 1):
        monkeypatch.setattr(responses_module, "BLOCK_BYTES", block)
        for left, kept in ((content[:-1], {"a", "c"}), (content, {"a", "b", "c"})):
            store.path.write_bytes(left)
            store.append([row("c", 5)])
            assert {row.id for row in store} == kept


def test_a_reader_leaves_out_a_line_that_another_process_is_writing(tmp_path: Path) -> None:
    other = RegeneratedStore(tmp_path, rank=1, world=2)
    other.append([row("a", 3, 4)])
    with other.path.open("ab") as file:
        file.write(b'{"id": "b", "gro')
    store = RegeneratedStore(tmp_path, rank=0, world=2)
    assert {row.id for row in store} == {"a"}
    assert other.path.read_bytes().endswith(b'"gro')


@pytest.mark.parametrize("line", ["nonsense", '{"id": "a"}', "[1]", '{"id": "a", "group": "g", "prompt_ids": 1}'])
def test_a_line_that_is_not_ours_is_named(tmp_path: Path, line: str) -> None:
    store = RegeneratedStore(tmp_path)
    store.append([row("a", 3, 4)])
    with store.path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"00001\.jsonl, line 2: cannot be read \(.+\); expected a response of"):
        list(store)


def test_documents_learn_the_response_alone(tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path)
    store.append([row("a", 3, 4, EOS), row("b", EOS), row("c", 5, 6, 7, 8, finished=False), row("d")])
    documents, counts = store.to_documents(5)
    assert [(d.id, d.group, d.input_ids.tolist(), d.loss_mask.tolist()) for d in documents] == [
        ("a", "g", [1, 2, 3, 4, EOS], [False, False, True, True, True]),
        ("c", "g", [1, 2, 5, 6, 7], [False, False, True, True, True]),
    ]
    assert (counts.responses, counts.documents, counts.response_tokens) == (4, 2, 6)
    assert (counts.too_short, counts.truncated, counts.unfinished) == (2, 1, 1)


def test_responses_that_are_all_too_short_are_refused(tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path)
    store.append([row("a", EOS), row("b")])
    with pytest.raises(
        DataError, match=r"2 responses, 2 of them under 2 tokens and 0 repetitive; expected .*data.regenerate off"
    ):
        store.to_documents(64)


def test_repetitive_responses_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path)
    # 23 tokens have 16 8-grams, of which a loop of 4 repeats 12, and one of 12 repeats 4.
    store.append([row("loop", *range(3, 7), *[3, 4, 5, 6] * 4, 3, 4, 5), row("less", *range(3, 15), *range(3, 14))])
    store.append([row("none", *range(3, 26))])
    for limit, kept in ((None, 3), (0.75, 3), (0.74, 2), (0.25, 2), (0.24, 1)):
        documents, counts = store.to_documents(64, max_repeated=limit)
        assert (counts.responses, counts.documents, counts.repetitive) == (3, kept, 3 - kept)
        assert counts.response_tokens == 23 * kept == sum(int(document.loss_mask.sum()) for document in documents)
    only = RegeneratedStore(tmp_path / "only")
    only.append([row("loop", *[3] * 20)])
    with pytest.raises(DataError, match=r"1 responses, 0 of them under 2 tokens and 1 repetitive"):
        only.to_documents(64, max_repeated=0.5)


def test_responses_that_go_on_past_their_turn_are_counted(tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path)
    turn, end, tool = 90, 91, 92
    prompt_ids = (turn, 5, end, turn)
    store.append([row("well", 7, end, prompt_ids=prompt_ids), row("tool", 7, tool, 8, end, prompt_ids=prompt_ids)])
    store.append([row("on", 7, end, turn, 5, prompt_ids=prompt_ids, finished=False)])
    counts = store.to_documents(64, special_ids={turn, end, tool})[1]
    assert (counts.past_the_turn, counts.documents) == (1, 3)
    assert store.to_documents(64)[1].past_the_turn == 0


def test_other_settings_have_another_key() -> None:
    settings = {"temperature": 0.7, "top_k": 0, "seed": None}
    assert settings_key(settings) == settings_key(dict(reversed(settings.items())))
    assert len({settings_key(settings), *(settings_key({**settings, name: 1}) for name in settings)}) == 4


def test_responses_to_prompts_of_another_split_are_not_learnt_from(tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path)
    store.append([row("a", 3, 4), row("held out now", 5, 6)])
    documents, counts = store.to_documents(64, groups={"a": "joined", "never answered": "g"})
    assert [(document.id, document.group) for document in documents] == [("a", "joined")]
    assert counts.responses == 1
    assert len(store.to_documents(64)[0]) == 2
