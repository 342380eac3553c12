"""Damaged and hostile data files and recipes: one message each, and the good record beside them is read."""

from __future__ import annotations

import gzip
import io
import json
import logging
import lzma
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from json_files import write_rows
from mtp_train.data.sources import load_records
from mtp_train.errors import DataError, OutputExistsError
from mtp_train.evaluation.suites import load_suite
from mtp_train.runs.check import check
from mtp_train.runs.pipeline import run

GOOD = {"text": "a good record"}
LINE = json.dumps(GOOD).encode() + b"\n"
NESTED = b'{"text": "a", "other": ' + b"[" * 10_000 + b"]" * 10_000 + b"}\n"


def chat(content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]}


def parquet_of(table: pa.Table) -> bytes:
    stream = io.BytesIO()
    pq.write_table(table, stream)
    return stream.getvalue()


def invalid_text() -> pa.Array:
    offsets = pa.py_buffer(b"\0\0\0\0\2\0\0\0")
    content = pa.py_buffer(b"\xff\xfe")
    return pa.Array.from_buffers(pa.string(), 1, [None, offsets, content])


PACKED = gzip.compress(LINE * 200 + os.urandom(2000).hex().encode())
HOSTILE = {
    "null.jsonl": LINE + b"null\n",
    "utf16.jsonl": LINE.decode().encode("utf-16"),
    "latin1.jsonl": b'{"text": "caf\xe9"}\n',
    "nested.jsonl": LINE + NESTED,
    "open.jsonl": b"[" * 100_000,
    "cut.jsonl.gz": PACKED[: len(PACKED) // 2],
    "damaged.jsonl.gz": PACKED[:60] + bytes(4) + PACKED[64:],
    "cut.jsonl.xz": lzma.compress(LINE * 50)[:60],
    "other.jsonl.xz": b"garbage!",
    "cut.parquet": parquet_of(pa.table({"text": ["a"] * 100}))[:60],
    "invalid.parquet": parquet_of(pa.table({"text": invalid_text()})),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_file_is_refused_with_one_message(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(HOSTILE[name])
    with pytest.raises(DataError, match=rf"{name}.*cannot be read \(.*\); expected .*\. Repair"):
        load_records(str(tmp_path / name))


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio"])
def test_records_with_other_parts_are_skipped_and_counted(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = chat([{"type": kind, kind: "x"}, {"type": "text", "text": "what is it?"}])
    path = tmp_path / "a.jsonl"
    write_rows(path, (other, chat("hi"), other))
    with caplog.at_level(logging.WARNING):
        assert [record.id for record in load_records(str(path))] == [f"{path}#2"]
        assert [one.id for one in load_suite(str(path))] == ["a#2"]
    assert len(caplog.messages) == 2
    assert all("skipped 2 of 3 records" in message and "record 1, message 1" in message for message in caplog.messages)
    path.write_text(json.dumps(other) + "\n")
    for read in (load_records, load_suite):
        with pytest.raises(DataError, match=r"all 1 records have parts that are not text; expected one of text"):
            read(str(path))


RECIPE = """
run_dir: runs/a
model: {trunk: "demo:finetune", head_from: "demo:base"}
data: {sources: [{path: "demo:prompts"}]}
train: {max_steps: 10, tokens_per_step: 512, lr: 0.1, warmup_steps: 0}
evaluate: {arms: [graft, retrained]}
"""


@pytest.mark.parametrize("where", ["/", "trunk", "trunk/new", "file", "file/new"])
def test_check_refuses_the_run_directories_that_run_refuses(where: str, tmp_path: Path) -> None:
    (tmp_path / "trunk").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "a.yaml").write_text(RECIPE)
    overrides = {"run_dir": str(tmp_path / where), "model.trunk": str(tmp_path / "trunk")}
    said = []
    for command in (check, run):
        with pytest.raises(OutputExistsError, match=r"run_dir: .*; expected .* Choose another run_dir") as found:
            command(tmp_path / "a.yaml", overrides)
        said.append(str(found.value))
    assert said[0] == said[1]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.yaml", "file", "trunk"]
