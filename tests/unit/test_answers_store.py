from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_train.answers.store import RegeneratedRow, RegeneratedStore, settings_key
from mtp_train.errors import DataError
from mtp_train.runs.regeneration import responses_directory
from mtp_train.runs.run_directory import ADAPTER, TRUNK
from runs import tiny_recipe

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
    documents, counts = store.to_documents(5, dict.fromkeys("abcd", "g"))
    assert [(d.id, d.group, d.input_ids.tolist(), d.loss_mask.tolist()) for d in documents] == [
        ("a", "g", [1, 2, 3, 4, EOS], [False, False, True, True, True]),
        ("c", "g", [1, 2, 5, 6, 7], [False, False, True, True, True]),
    ]
    assert (counts.responses, counts.documents, counts.response_tokens) == (4, 2, 6)
    assert (counts.too_short, counts.truncated, counts.unfinished) == (2, 1, 1)


def test_responses_that_are_all_too_short_are_refused(tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path)
    store.append([row("a", EOS), row("b")])
    with pytest.raises(DataError, match=r"2 responses, 2 of them under 2 tokens; expected .*data.regenerate off"):
        store.to_documents(64, dict.fromkeys("ab", "g"))


def test_other_settings_have_another_key() -> None:
    settings = {"temperature": 0.7, "top_k": 0, "seed": None}
    assert settings_key(settings) == settings_key(dict(reversed(settings.items())))
    assert len({settings_key(settings), *(settings_key({**settings, name: 1}) for name in settings)}) == 4


def test_responses_to_prompts_of_another_split_are_not_learnt_from(tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path)
    store.append([row("a", 3, 4), row("held out now", 5, 6)])
    documents, counts = store.to_documents(64, {"a": "joined", "never answered": "g"})
    assert [(document.id, document.group) for document in documents] == [("a", "joined")]
    assert counts.responses == 1


def test_answers_of_other_settings_have_a_directory_of_their_own(tmp_path: Path) -> None:
    """Every recipe that another trunk, adapter, dtype or sampling answers; not one that only asks in another way."""
    answers: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.5}

    def directory_of(adapter: dict[str, str] | None = None, trunk: str = "a", **fields: Any) -> str:
        recipe = tiny_recipe(tmp_path, tmp_path / "run", **{"data__regenerate": answers, **fields})
        contents = {TRUNK: {"model.safetensors": trunk}, ADAPTER: adapter or {}}
        inputs = SimpleNamespace(contents=contents, adapter=None if adapter is None else tmp_path)
        run: Any = SimpleNamespace(recipe=recipe, inputs=inputs, directory=SimpleNamespace(path=tmp_path))
        assert recipe.data.regenerate is not None
        return responses_directory(run, recipe.data.regenerate)[0].name

    server = {**answers, "endpoint": "http://localhost:8000/v1"}
    others = [
        directory_of(),
        directory_of(trunk="b"),
        directory_of({"adapter_model.safetensors": "a"}),
        directory_of({"adapter_model.safetensors": "b"}),
        directory_of(model__dtype="float32"),
        directory_of(model__dtype="bfloat16"),
        directory_of(model__quantization="8bit"),
        directory_of(model__quantization="4bit"),
        directory_of(data__seq_len_tokens=64),
        directory_of(data__chat_template_kwargs={"enable_thinking": False}),
        directory_of(seed=1),
        directory_of(data__regenerate=server),
        directory_of(data__regenerate={**server, "model": "other"}),
        *(
            directory_of(data__regenerate={**answers, **changed})
            for changed in ({"max_new_tokens": 25}, {"temperature": 0.6}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1})
        ),
    ]
    assert len(set(others)) == len(others)
    assert directory_of() == directory_of(train__max_steps=2) == directory_of(head__num_depths=1)
    greedy = {**answers, "temperature": 0.0}
    assert directory_of(data__regenerate=greedy) == directory_of(data__regenerate=greedy, seed=1) not in others
    elsewhere = {**server, "endpoint": "http://localhost:9000/v1", "concurrency": 3}
    assert directory_of(data__regenerate=server) == directory_of(data__regenerate=elsewhere)
