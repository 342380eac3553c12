from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from byte_tokenizer import byte_tokenizer
from json_files import user, write_rows
from mtp_train.data.records import Chat, PlainText, PromptResponse
from mtp_train.errors import DataError
from mtp_train.evaluation.suites import load_suite, suite_prompts

pytestmark = pytest.mark.usefixtures("own_datasets_cache")
TURNS = {"question_id": 81, "category": "writing", "turns": [" Write. ", "Rewrite."]}


def write(path: Path, *rows: object) -> str:
    write_rows(path, rows)
    return str(path)


def test_a_benchmark_of_several_turns_gives_its_first(tmp_path: Path) -> None:
    file = write(tmp_path / "question.jsonl", TURNS, {**TURNS, "category": "rag", "turns": ["Only one."]})
    for kind in ("mt-bench", "spec-bench", "speed-bench"):
        suite = load_suite(f"{kind}:{file}")
        assert [(one.task, one.id) for one in suite] == [("writing", f"{kind}#1"), ("rag", f"{kind}#2")]
        assert suite[0].content == Chat((user("Write."),))


def test_speed_bench_is_read_from_either_script_and_from_a_directory(tmp_path: Path) -> None:
    row = {"category": "qa", "messages": [user("First."), user("Second.")], "multiturn": True}
    (one,) = load_suite(f"speed-bench:{write(tmp_path / 'qualitative.jsonl', row)}")
    assert (one.task, one.content) == ("qa", Chat((user("First."),)))
    (tmp_path / "prepared").mkdir()
    datasets.Dataset.from_list([TURNS]).to_parquet(str(tmp_path / "prepared" / "test.parquet"))
    (one,) = load_suite(f"speed-bench:{tmp_path / 'prepared'}")
    assert one.content == Chat((user("Write."),))


def test_columns_of_other_names_are_named_in_a_file_of_ones_own(tmp_path: Path) -> None:
    file = write(tmp_path / "own.jsonl", {"question": " Why? ", "answer": "So."})
    (one,) = load_suite(file, columns={"instruction": "question"})
    assert one.content == Chat((user("Why?"),))
    with pytest.raises(DataError, match=r"columns.instruction is 'q'; expected one of 'question', 'answer'"):
        load_suite(file, columns={"instruction": "q"})
    with pytest.raises(DataError, match=r"--columns: given for the suite builtin, which has columns of its own"):
        load_suite("builtin", columns={"instruction": "question"})
    with pytest.raises(DataError, match=r"suite 'nothing': no such suite or file"):
        load_suite("nothing", columns={"instruction": "question"})


def test_a_suite_of_ours_is_not_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = load_suite("demo")
    (tmp_path / "demo").mkdir()
    assert load_suite("demo") == expected


def test_human_eval_is_completed_and_gsm8k_answered(tmp_path: Path) -> None:
    code = "def one():\n    "
    (tmp_path / "h.jsonl.gz").write_bytes(gzip.compress(json.dumps({"task_id": "H/0", "prompt": code}).encode()))
    (one,) = load_suite(f"humaneval:{tmp_path / 'h.jsonl.gz'}")
    assert (one.task, one.content) == ("humaneval", PromptResponse(code))
    (prompt,) = suite_prompts([one], byte_tokenizer())
    assert byte_tokenizer().decode(list(prompt.prompt_ids)) == code
    file = write(tmp_path / "test.jsonl", {"question": "How many?", "answer": "#### 3"})
    (one,) = load_suite(f"gsm8k:{file}")
    assert (one.task, one.content) == ("gsm8k", Chat((user("How many?"),)))


@pytest.mark.parametrize(
    ("row", "content", "written"),
    [
        ({"messages": [user(" Hi. ")], "prompt": "Hi."}, Chat((user("Hi."),)), None),
        ({"prompt": "raw "}, PromptResponse("raw "), "raw "),
        ({"text": "a text"}, PlainText("a text"), "a t"),
    ],
)
def test_a_file_of_ones_own_holds_chats_prompts_or_texts_and_names_tasks(
    row: dict[str, Any], content: object, written: str | None, tmp_path: Path
) -> None:
    suite = load_suite(write(tmp_path / "mine.test.jsonl", row | {"task": "chat"}, row | {"category": 7}, row))
    assert [(one.task, one.id) for one in suite] == [
        ("chat", "mine#1"),
        ("7", "mine#2"),
        ("mine", "mine#3"),
    ]
    assert [one.content for one in suite] == [content] * 3
    prompts = suite_prompts(suite, byte_tokenizer(), tasks=["mine", "7"])
    texts = {byte_tokenizer().decode(list(prompt.prompt_ids)) for prompt in prompts}
    assert len(prompts) == 2
    assert written is None or texts == {written}


def test_the_paragraphs_of_a_text_are_groups_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert len({one.group for one in load_suite(str(tmp_path / "a.txt"))}) == 2


def test_a_dataset_of_the_hub_is_asked_for_its_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hub(path: str, config: str | None, *, split: str) -> datasets.Dataset:
        asked.append((path, config, split))
        return datasets.Dataset.from_list([{**TURNS, "prompt": "x", "question": "y"}])

    monkeypatch.setattr(datasets, "load_dataset", hub)
    for kind in ("mt-bench", "speed-bench", "humaneval", "gsm8k"):
        assert len(load_suite(f"{kind}:some/where")) == 1
    assert len(load_suite("some/chats.of-mine")) == 1
    configs = [None, "qualitative", None, "main"]
    splits = ["train", "test", "test", "test"]
    assert asked == [
        *(("some/where", *pair) for pair in zip(configs, splits, strict=True)),
        ("some/chats.of-mine", None, "train"),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bultin", r"suite 'bultin': no such suite or file; expected builtin, demo, mt-bench:LOCATION"),
        ("mt_bench:q.jsonl", r"suite 'mt_bench:q\.jsonl': no such suite"),
        ("gsm8k", r"suite 'gsm8k': no such suite or file.*Write gsm8k: and its file, or the id"),
        ("none/mine.jsonl", r"none/mine\.jsonl: no such file; expected a \.json"),
        ("mt-bench:none.jsonl", r"mt-bench:none\.jsonl: no such file; expected a \.json"),
        ("gsm8k:nobody/nothing", r"gsm8k:nobody/nothing: cannot be read .*or a dataset of the hub"),
    ],
)
def test_an_unknown_suite_or_a_missing_file_is_refused(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_suite(name)


PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("mt-bench:", {"prompt": "x"}, "record 2: turns are missing; expected a list of texts"),
        ("mt-bench:", {**TURNS, "turns": []}, "record 2: turns are .*; expected a list of texts"),
        ("speed-bench:", {**TURNS, "turns": [PLACEHOLDER]}, "record 2: a placeholder instead .*licence.*prepare.py"),
        ("humaneval:", {"task_id": "H/1"}, "record 2: prompt is missing; expected text"),
        ("gsm8k:", {"answer": "3"}, "record 2: instruction is missing; expected text"),
        ("", {"question": "x"}, "record 2: text is missing; expected text"),
        ("", {"text": "x", "task": "all"}, "record 2: the task 'all'; expected another name"),
        ("", {"messages": []}, "columns of several formats .messages, text.; expected one"),
    ],
)
def test_a_record_of_another_form_is_named(tmp_path: Path, kind: str, row: object, message: str) -> None:
    good = {"": {"text": "x"}, "humaneval:": {"prompt": "x"}, "gsm8k:": {"question": "x"}}.get(kind, TURNS)
    with pytest.raises(DataError, match=message):
        load_suite(kind + write(tmp_path / "a.jsonl", good, row))


def test_records_of_one_group_are_one_group_for_the_intervals(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "group": "one"}, {"prompt": "b", "group": "one"}, {"prompt": "c", "group": 7}]
    location = write(tmp_path / "own.jsonl", *rows, {"prompt": "d"})
    first, second, third, fourth = (one.group for one in load_suite(location))
    assert (first, second, third) == ("one", "one", "7")
    assert fourth not in (first, third)
