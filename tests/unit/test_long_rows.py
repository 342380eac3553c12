"""The study of long rows writes its pages: those that are trained on, and others."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import long_rows
from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.tokenizer import load_tokenizer


def test_pages_fill_a_row_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_rows, "MODULES", "shlex calendar keyword bisect")
    monkeypatch.setattr(long_rows, "LONG", 256)
    monkeypatch.setattr(long_rows, "PAGES", 2)
    long_rows.text(argparse.Namespace(model="demo:base", out=tmp_path))
    trained, more = (
        [*map(json.loads, (tmp_path / name).read_text().splitlines())] for name in (long_rows.TEXT, long_rows.MORE)
    )
    groups = [one["group"] for one in (*trained, *more)]
    assert (len(trained), groups) == (2, [one for one in ("shlex", "calendar", "keyword", "bisect") if one in groups])
    tokenizer = load_tokenizer(open_location("demo:base"))
    assert {len(tokenizer.encode(one["text"])) for one in trained} == {255}
