"""Outputs that commands propose: beside a checkpoint, and never in a cache, in the package or over the user's files."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from checkpoints import base_and_finetune, set_fields
from mtp_train import inspect
from mtp_train.checkpoints.adapter import merge_command
from mtp_train.checkpoints.demo import demo_path
from mtp_train.checkpoints.suggestions import (
    download_command,
    graft_command,
    output_of,
    retrain_command,
    train_command,
)
from runs import tree

SNAPSHOT = "hub/models--owner--my-27b/snapshots/0123abcd"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("work/runs/a", ".cache/owner/other", SNAPSHOT):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("my-27b", "my-27b-mtp"),
        ("./my-27b/", "my-27b-mtp"),
        ("runs/a", "runs/a-mtp"),
        # What a run has yet to write.
        ("new", "new-mtp"),
        ("demo:finetune", "finetune-mtp"),
        (str(demo_path("finetune")), "finetune-mtp"),
        ("owner/my-27b", "my-27b-mtp"),
        (f"../{SNAPSHOT}", "my-27b-mtp"),
        ("../.cache/owner/other", "other-mtp"),
    ],
)
def test_outputs_are_proposed_where_a_user_writes(location: str, expected: str) -> None:
    assert output_of(location, "-mtp") == expected
    assert shlex.split(graft_command(location, "BASE"))[-1] == expected
    name = expected.removesuffix("-mtp")
    assert shlex.split(retrain_command(location, "BASE"))[-1] == f"{name}-rescued"
    assert shlex.split(merge_command(location, "LORA"))[-1] == f"{name}-merged"
    assert shlex.split(train_command(location))[2] == f"{Path(name).name}.yaml"


def test_the_directory_itself_is_written_beside() -> None:
    assert output_of(".", "-mtp") == f"{Path.cwd()}-mtp"


def test_a_download_spares_what_is_there(tmp_path: Path) -> None:
    assert download_command(Path("my-27b"), "CHECKPOINT").split(" ")[2:] == [
        *("CHECKPOINT", "--local-dir", "my-27b-original", "--force-download")
    ]
    # The hub's cache has the id.
    assert download_command(tmp_path / SNAPSHOT, "CHECKPOINT").split(" ")[2:5] == [
        *("owner/my-27b", "--local-dir", "my-27b-original")
    ]


@pytest.mark.parametrize("cached", [False, True])
def test_a_config_is_corrected_in_a_copy_of_a_cached_model(cached: bool, tmp_path: Path) -> None:
    base, _ = base_and_finetune(tmp_path / "made", "qwen3_5")
    set_fields(base, {"tie_word_embeddings": True})
    place = tmp_path / SNAPSHOT if cached else Path("mine")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(base, place)
    before = tree(place)
    command = inspect(place).cure
    assert command is not None
    subprocess.run(command, shell=True, check=True)
    assert (tree(place) == before) is cached
    assert inspect("my-27b" if cached else place).status == "healthy"
