"""Regeneration by a server of the trunk gives what the built-in decoder gives, and by another model nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from byte_tokenizer import byte_tokenizer
from json_files import read_json
from launching import CPU_SHARDS, metrics, outcome, start
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.trunk.load import load_trunk
from openai_server import Served, openai_server, served_by
from runs import Capture, document, overrides_of, refusal, write_recipe

EOS = int(byte_tokenizer().eos_token_id)
# Greedily: a server draws its own random numbers.
WRITTEN = {"max_new_tokens": 6, "temperature": 0.0}


@contextmanager
def serving(checkpoint: Path) -> Iterator[Served]:
    with openai_server(served_by(load_trunk(open_checkpoint(checkpoint), dtype="float32"), [EOS])) as served:
        yield served


def rows(run_dir: Path) -> list[dict[str, Any]]:
    (file,) = run_dir.glob("data/*/regenerated-*.jsonl")
    return sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda row: str(row["id"]))


def test_a_server_of_the_trunk_answers_as_the_built_in_decoder_does(
    inputs: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_THE_TEST", "secret\n")
    here = write_recipe(tmp_path / "here.yaml", inputs, tmp_path / "here", data__regenerate=WRITTEN)
    expected = document(["regenerate", here], capfd)
    with serving(inputs / "finetune") as served:
        asking = {**WRITTEN, "endpoint": served.url, "concurrency": 3, "api_key_env": "KEY_OF_THE_TEST"}
        there = write_recipe(tmp_path / "there.yaml", inputs, tmp_path / "there", data__regenerate=asking)
        assert document(["regenerate", there], capfd) == expected
        assert rows(tmp_path / "there") == rows(tmp_path / "here")
        asked = len(served.payloads)
        # Every prompt once; then nothing is left to ask for.
        assert asked == expected["responses"]
        assert document(["regenerate", there], capfd) == expected
        assert len(served.payloads) == asked
    assert {headers["Authorization"] for headers in served.headers} == {"Bearer secret"}
    (facts,) = (read_json(path) for path in (tmp_path / "there").glob("data/*/server-*.json"))
    assert facts["model"] == "trunk"
    assert (facts["generated"], facts["refused"]) == (expected["responses"], 0)
    written = "".join(path.read_text() for path in (tmp_path / "there").rglob("*") if path.is_file())
    assert "secret" not in written


def test_responses_are_kept_where_the_server_moved_and_not_where_it_serves_another_name(
    inputs: Path, tmp_path: Path, new_run: Path, capfd: Capture
) -> None:
    asking = {**WRITTEN, "endpoint": "http://localhost:1/v1"}
    path = write_recipe(tmp_path / "recipe.yaml", inputs, new_run, data__regenerate=asking)

    def moved(url: str | None, **others: Any) -> list[Any]:
        return ["regenerate", path, *overrides_of(data__regenerate={**WRITTEN, "endpoint": url, **others})]

    with serving(inputs / "finetune") as first:
        expected = document(moved(first.url, concurrency=2), capfd)
    recorded = (new_run / "recipe.yaml").read_bytes()
    with serving(inputs / "finetune") as second:
        kept = rows(new_run)
        (file,) = new_run.glob("data/*/regenerated-*.jsonl")
        # Killed behind its third answer.
        file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:3]))
        assert second.url != first.url
        assert document(moved(second.url, concurrency=3), capfd) == expected
        assert rows(new_run) == kept
        assert len(second.payloads) == expected["responses"] - 3
    assert (new_run / "recipe.yaml").read_bytes() == recorded
    for other in (moved(second.url, model="another"), moved(second.url, max_new_tokens=7), moved(None)):
        assert "holds the run of another recipe" in refusal(other, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("served_model", ["finetune", "base"])
def test_processes_with_shards_of_the_trunk_check_the_responses_together(
    served_model: str, inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    """The first one asks the server, all train the shards; the error of a server of another model ends both."""
    here = write_recipe(tmp_path / "here.yaml", inputs, tmp_path / "here", data__regenerate=WRITTEN)
    document(["regenerate", here], capfd)
    with serving(inputs / served_model) as served:
        changes = {"data__regenerate": {**WRITTEN, "endpoint": served.url}, "gate__enabled": False}
        there = write_recipe(tmp_path / "there.yaml", inputs, tmp_path / "shards", **changes)
        done = start("fsdp2.yaml", CPU_SHARDS, there, flags=("--num_processes", "2"), ACCELERATE_USE_CPU="true")
        asked = len(served.payloads)
    shards = tmp_path / "shards"
    if served_model == "base":
        assert "gives answers that are not the trunk's" in outcome(shards)["message"], done.stderr
        assert list(shards.glob("data/*/regenerated-*.jsonl")) == []
        return
    assert outcome(shards)["reason"] == "unjudged", done.stderr
    assert {line["wrapper"] for line in metrics(shards)} == {"FSDPHeadTraining"}
    assert rows(shards) == rows(tmp_path / "here")
    # As often as one process asks.
    assert asked == len(rows(shards))
    (facts,) = (read_json(path) for path in shards.glob("data/*/server-00000-of-00001.json"))
    assert facts["generated"] == len(rows(shards))
