from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import shlex
from pathlib import Path
from typing import Any

import datasets
import pytest

from json_files import user, write_rows
from mtp_train.data.records import Chat, Content, PlainText, PromptResponse, text_group
from mtp_train.data.sources import load_records, local_files
from mtp_train.errors import DataError

pytestmark = pytest.mark.usefixtures("own_datasets_cache")
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def write_lines(path: Path, rows: list[Any]) -> str:
    write_rows(path, rows)
    return str(path)


def write_table(path: Path, rows: list[Any]) -> None:
    if path.suffix == ".jsonl":
        write_rows(path, rows)
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)


def contents(source: Path | str, **options: Any) -> list[Content]:
    return [record.content for record in load_records(str(source), **options)]


@pytest.mark.parametrize(
    ("row", "content"),
    [
        ({"messages": CHAT}, Chat(tuple(CHAT))),
        ({"conversations": CHAT}, Chat(tuple(CHAT))),
        ({"prompt": "a", "response": "b", "score": 1}, PromptResponse("a", "b")),
        ({"prompt": "a", "completion": "b"}, PromptResponse("a", "b")),
        ({"prompt": "a", "chosen": "b"}, PromptResponse("a")),
        ({"messages": CHAT, "prompt": "hi"}, Chat(tuple(CHAT))),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, Chat(tuple(CHAT))),
        ({"prompt": CHAT[:1]}, Chat(tuple(CHAT[:1]))),
        ({"instruction": "hi", "input": "", "output": "hello"}, Chat(tuple(CHAT))),
        ({"instruction": "hi", "input": "you", "output": "b"}, Chat((user("hi\nyou"), {**CHAT[1], "content": "b"}))),
        ({"conversations": CHAT, "system": "Be brief."}, Chat(({"role": "system", "content": "Be brief."}, *CHAT))),
        ({"text": "a"}, PlainText("a")),
        ({"turns": ["hi", "Rewrite."], "category": "x"}, Chat(tuple(CHAT[:1]))),
    ],
)
def test_the_format_is_found_from_the_columns(tmp_path: Path, row: dict[str, Any], content: object) -> None:
    assert contents(write_lines(tmp_path / "a.jsonl", [row])) == [content]


@pytest.mark.parametrize(
    ("columns", "content"),
    [
        ({"prompt": "question", "response": "answer"}, PromptResponse("hi", "hello")),
        ({"prompt": "question"}, PromptResponse("hi")),
        ({"instruction": "question", "output": "answer"}, Chat(tuple(CHAT))),
        ({"instruction": "question"}, Chat(tuple(CHAT[:1]))),
        ({"instruction": "question", "system": "hint"}, Chat(({"role": "system", "content": "short"}, CHAT[0]))),
        ({"text": "answer"}, PlainText("hello")),
        # One of our names, under which the source has something else.
        ({"messages": "text"}, Chat(tuple(CHAT))),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_columns_of_other_names_are_named(
    tmp_path: Path, suffix: str, columns: dict[str, str], content: object
) -> None:
    row = {"question": "hi", "answer": "hello", "hint": "short", "text": CHAT}
    path = tmp_path / f"a{suffix}"
    write_table(path, [row])
    (record,) = load_records(str(path), columns=columns)
    assert record.content == content
    read = {*columns.values()}
    assert set(record.unread) == set(row) - read
    with pytest.raises(DataError, match=r"columns.prompt is 'x'; expected one of 'question', 'answer', "):
        load_records(str(path), columns={"prompt": "x"})
    with pytest.raises(DataError, match=r"columns.promt: unknown; expected messages, prompt, response, "):
        load_records(str(path), columns={"promt": "question"})


def test_a_dataset_saved_to_disk_is_read(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_dict({"text": list("abcd")})
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=whole, test=whole.select([2])).save_to_disk(tmp_path / "both")
    before = sorted(tmp_path.rglob("*"))

    def found(directory: str, **options: Any) -> str:
        return "".join(one.text for one in contents(tmp_path / directory, **options) if isinstance(one, PlainText))

    assert found("one") == found("both") == "abcd"
    assert found("one", split="train[:2]") == "ab"
    assert found("both", split="test") == "c"
    assert found("both", split="train[1:3]+test") == "bcc"
    with pytest.raises(DataError, match=r"one: cannot be read \(Unknown split"):
        found("one", split="test")
    assert sorted(tmp_path.rglob("*")) == before
    files = local_files(str(tmp_path / "one"), "one")
    assert files is not None
    assert {file.suffix for file in files} == {".json", ".arrow"}


def test_the_cells_of_a_table_stay_text(tmp_path: Path) -> None:
    """A number, a date, a line break, a quote, an empty cell and a cell longer than csv's own limit."""
    table = tmp_path / "a.csv"
    long = "word " * 40_000
    table.write_text(f'\ufeffprompt,response\n007,2024-01-02\n"say ""hi""\nnow",\nwhy,{long}\n', encoding="utf-8")
    expected = [PromptResponse("007", "2024-01-02"), PromptResponse('say "hi"\nnow'), PromptResponse("why", long)]
    assert contents(table) == expected
    assert contents(tmp_path) == expected


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("prompt,response\na,b\nc,d,e", "line 3: .*more or fewer cells"),
        ("prompt,response\na", "line 2"),
        ('prompt\n"a"b', "cannot be"),
    ],
)
def test_a_broken_table_is_named(tmp_path: Path, lines: str, told: str) -> None:
    (tmp_path / "a.csv").write_text(lines)
    with pytest.raises(DataError, match=f"a.csv.*{told}"):
        contents(tmp_path / "a.csv")


@pytest.mark.parametrize(("suffix", "module"), [(".gz", gzip), (".xz", lzma), (".bz2", bz2)])
def test_compressed_files_are_read(tmp_path: Path, suffix: str, module: Any) -> None:
    (tmp_path / f"a.jsonl{suffix}").write_bytes(module.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    (tmp_path / f"a.txt{suffix}").write_bytes(module.compress(b"one\n\ntwo\n"))
    for kind in ("jsonl", "txt"):
        assert contents(tmp_path / f"a.{kind}{suffix}") == [PlainText("one"), PlainText("two")]


def test_a_file_whose_compression_needs_a_package_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x04")
    with pytest.raises(DataError, match=r"a\.jsonl\.zst: (compressed by Zstandard.*pip install|cannot be read)"):
        load_records(str(tmp_path / "a.jsonl.zst"))


def test_directories_and_globs_are_one_source_in_the_order_of_the_names(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        write_lines(tmp_path / f"part-{number}.jsonl", [{"text": f"{number}"}])
    (tmp_path / ".part-3.jsonl").write_text("hidden")
    (tmp_path / "README.md").write_text("what this is")
    for path in (tmp_path, tmp_path / "*.jsonl", tmp_path / "**" / "part-*.jsonl"):
        records = load_records(str(path))
        assert [record.content for record in records] == [PlainText(f"{number}") for number in range(3)]
        assert [record.id for record in records] == [f"{path}#{number}" for number in (1, 2, 3)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("column", "held", "empty"), [("image", "a.png", None), ("images", ["a.png", "b.png"], []), ("videos", [1], None)]
)
def test_records_with_media_in_a_column_of_their_own_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, column: str, held: object, empty: object
) -> None:
    path = tmp_path / f"a{suffix}"
    chat = [{"role": "user", "content": "what is <image>?"}, {"role": "assistant", "content": "a cat"}]
    rows = [{"messages": chat, column: held}, *({"messages": chat, column: empty} for _ in range(2))]
    write_table(path, rows)
    assert [record.id for record in load_records(str(path))] == [f"{path}#2", f"{path}#3"]
    assert (
        f"skipped 1 of 3 records, which have image, audio or other parts that are not text. The first is {path}, "
        in (caplog.text)
    )
    assert f"record 1: {column} has a value" in caplog.text


def test_images_are_not_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"text": "a", "image": {"bytes": b"no image", "path": None}}, {"text": "b", "image": None}]
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    assert contents(path) == [PlainText("b")]


def test_the_splits_of_a_directory_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        write_lines(tmp_path / "data" / f"{split}-00000-of-00001.jsonl", [{"text": split}])
    assert contents(tmp_path) == [PlainText("train")]
    assert contents(tmp_path, split="test") == [PlainText("test")]


def test_splits_and_slices_of_text_files_keep_their_opening(tmp_path: Path) -> None:
    for split, letters in (("train", "ab"), ("test", "c")):
        (tmp_path / split).mkdir()
        for letter in letters:
            (tmp_path / split / f"{letter}.txt").write_text(f"{letter}1\n\n\n{letter}2\r\nmore\n\n")

    def found(split: str, path: Path = tmp_path) -> list[tuple[object, str]]:
        records = load_records(str(path), split=split)
        return [(record.content, record.group) for record in records]

    whole = [(PlainText(f"{letter}{end}"), text_group(f"{letter}1")) for letter in "ab" for end in ("1", "2\nmore")]
    test = [(PlainText("c1"), text_group("c1")), (PlainText("c2\nmore"), text_group("c1"))]
    assert found("train") == whole
    assert found("test") == test
    assert found("train[1:3]") == whole[1:3]
    assert found("train[:1]+test") == [whole[0], *test]
    assert found("train[-1:]", tmp_path / "train" / "*.txt") == whole[-1:]
    with pytest.raises(DataError, match=r"cannot be read .*validation"):
        found("validation")


LOOKS_LIKE_JSON = [
    '"hello"',
    '{"a":1}',
    "4",
    "null",
    "true",
    "[1, 2]",
    "1e5",
    "2024-05-01",
    "2024-05-01T10:00:00Z",
    " x ",
]


@pytest.mark.parametrize("layout", ["a.jsonl", "a.json", "train.jsonl"])
def test_text_is_never_reinterpreted(tmp_path: Path, layout: str) -> None:
    """A column of strings that look like something else, beside contents in parts."""
    held: list[Any] = [*LOOKS_LIKE_JSON, [{"type": "text", "text": "in parts"}]]
    rows: list[Any] = [{"messages": [{"role": "user", "content": content}]} for content in held]
    path = tmp_path / layout
    path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)))
    # A directory is read by a builder of its own.
    found = contents(tmp_path if path.stem == "train" else path)
    texts = [one.messages[0]["content"] for one in found if isinstance(one, Chat)]
    assert texts == [*LOOKS_LIKE_JSON, "in parts"]


@pytest.mark.parametrize("wrong", [4, {"a": 1}, [4], None, True])
def test_what_is_no_text_is_refused_under_its_own_number(tmp_path: Path, wrong: object) -> None:
    """The control of the tests above: the same values without quotes."""
    rows = [{"messages": [{"role": "user", "content": content}]} for content in ("1", [{"type": "text", "text": "a"}])]
    rows += [{"messages": [{"role": "user", "content": wrong}]}, rows[0]]
    with pytest.raises(DataError, match=r"a\.jsonl, record 3, message 1: content is .*; expected text"):
        load_records(write_lines(tmp_path / "a.jsonl", rows))


def test_half_of_a_surrogate_pair_is_refused_under_its_own_number(tmp_path: Path) -> None:
    for odd, told in (
        ({"text": "a\ud83d"}, "a value has half of a surrogate pair at character 12;"),
        (
            {"text": "a", "task": "\ud800"},
            "task has half of a surrogate pair",
        ),
    ):
        path = write_lines(tmp_path / "a.jsonl", [{"text": "\U0001f600"}, odd])
        with pytest.raises(DataError, match=rf"a\.jsonl, record 2: {told}"):
            load_records(path, task="a")


def test_slices_count_records_and_not_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"text": "a"}\n\n{"text": "b"}\r\n{"text": "\u2028c"}\n{"text": "d"}')
    assert contents(tmp_path / "a.jsonl", split="train[25%:75%]") == [PlainText("b"), PlainText("\u2028c")]
    (tmp_path / "b.json").write_text(json.dumps([{"text": letter} for letter in "abcd"], indent=1))
    assert contents(tmp_path / "b.json", split="train[:1]+train[-1:]") == [PlainText("a"), PlainText("d")]


def test_files_of_several_kinds_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(DataError, match=r"files of several kinds \(a\.jsonl, b\.txt\); expected one.*by a glob"):
        load_records(str(tmp_path))
    assert len(load_records(str(tmp_path / "*.txt"))) == 1
    with pytest.raises(DataError, match=r"none\*\.txt: no such file"):
        load_records(str(tmp_path / "none*.txt"))


def test_a_configuration_is_that_of_a_dataset(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match="config 'en' of local files; expected null"):
        load_records(path, config="en")
    header = "---\nconfigs:\n- config_name: en\n  data_files: a.jsonl\n- config_name: de\n  data_files: b.jsonl\n---\n"
    (tmp_path / "README.md").write_text(header)
    write_lines(tmp_path / "b.jsonl", [{"text": "b"}])
    assert contents(tmp_path, config="de") == [PlainText("b")]


def test_the_group_field_groups(tmp_path: Path) -> None:
    rows = [{"text": "a", "module": 1}, {"text": "b", "module": 1}, {"text": "b", "module": 2}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert [record.group for record in load_records(path, group_field="module")] == ["1", "1", "2"]
    by_content = [record.group for record in load_records(path)]
    assert by_content[1] == by_content[2] != by_content[0]


def test_a_column_may_hold_both_group_and_content(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "response": "b"}])
    assert load_records(path, group_field="prompt")[0].group == "a"


def test_columns_of_several_formats_are_settled_by_naming_one(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT, "text": "a"}])
    with pytest.raises(DataError, match=r"columns of several formats \(messages, text\); expected one"):
        load_records(path)
    assert load_records(path, columns={"text": "text"})[0].content == PlainText("a")


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: no such file; expected a \.json"):
        load_records(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"no such file; expected a \.json"):
        load_records(str(tmp_path))
    (tmp_path / "a.tsv").write_text("text\na\n")
    with pytest.raises(DataError, match=r"a\.tsv: a file of an unknown kind; expected a \.json"):
        load_records(str(tmp_path / "a.tsv"))


@pytest.mark.parametrize(("file", "content"), [("a.jsonl", ""), ("a.json", "[]"), ("a.txt", "")])
def test_an_empty_source_is_refused(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match="no record; expected at least one"):
        load_records(str(tmp_path / file))


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"question": "a", "answer": "b"}, {"instruction": "question", "output": "answer"}),
        (
            {"id": "7", "Query": "a", "model_response": "b", "x": 1},
            {"instruction": "Query", "output": "model_response"},
        ),
        ({"input": "a", "output": "b"}, {"instruction": "input", "output": "output"}),
        # No column looks like an answer.
        ({"title": "a", "context": "b", "question": "c", "answers": {"text": ["d"]}}, {"instruction": "question"}),
    ],
)
def test_unknown_columns_are_listed_with_names_that_make_a_chat_of_them(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str]
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [row])
    listed = re.escape(", ".join(map(repr, row)))
    with pytest.raises(
        DataError, match=rf"columns are {listed}; expected `messages`.*`turns`, or `text`\. Add "
    ) as refused:
        load_records(path, name="data.sources.1 (a.jsonl)")
    field, _, named = shlex.split(str(refused.value).partition(" Add ")[2])[0].removesuffix(",").partition("=")
    assert (field, json.loads(named)) == ("data.sources.1.columns", columns)
    assert [type(one) for one in contents(path, columns=columns)] == [Chat]


def test_a_missing_group_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a", "module": "m"}, {"text": "b"}])
    with pytest.raises(
        DataError, match="no column 'file'; expected one of 'text', 'module'\\. Correct data\\.group_field"
    ):
        load_records(path, group_field="file")
    with pytest.raises(DataError, match=r"record 2: module is missing; expected a value"):
        load_records(path, group_field="module")


BROKEN: dict[str, tuple[bytes, str]] = {
    "a.jsonl": (b'{"text": "a"}\n\n{"text": 5}\n', ", record 2: text is 5"),
    "b.jsonl": (b'{"text": "a"}\n{"text"\n', ": cannot be read (Expecting ':' delimiter: line 3"),
    "c.jsonl": (b'{"text": "a"}\n[1]\n', ": cannot be read (no object: line 2)"),
    "d.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}\n', ": cannot be read ('utf-8' codec can't decode"),
    "e.jsonl": (b'{"text": "a"}\n\n{"text": "b\n', ": cannot be read (Invalid control character at: line 3"),
    "a.json": (b'[{"text": "a"}, 5]', ": cannot be read (no object: line 1)"),
    "b.csv": (b'text\na\n"b\n', ": cannot be read (line 3: unexpected end of data)"),
    "c.csv": (b'text,more\na,b\n"",c\n', ", record 2: text is missing"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("place", ["{}", ".", "*"])
def test_a_broken_record_is_named_by_its_file_and_its_place_there(name: str, place: str, tmp_path: Path) -> None:
    content, expected = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    if place != "{}":
        # A file before it in the directory has records of its own.
        text = {".jsonl": '{"text": "x"}\n' * 3, ".json": '[{"text": "x"}]', ".csv": content.split(b"\n")[0].decode()}
        (tmp_path / f"0{Path(name).suffix}").write_text(text.get(Path(name).suffix, "x\n\ny\n"))
    with pytest.raises(DataError) as refused:
        load_records(str(tmp_path / place.format(name)))
    assert str(refused.value).startswith(f"{tmp_path / name}{expected}")
