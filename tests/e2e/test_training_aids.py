"""Hidden states on disk, choosing by acceptance, and LoRA on the head, through a whole run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.errors import GateRefusedError, OutOfMemoryError
from mtp_train.heads.lora import is_lora
from mtp_train.recipe.loading import load_recipe
from mtp_train.train.log import read_metrics
from runs import LEARNS, run_quietly, write_recipe

RUN: dict[str, Any] = {**LEARNS, "train__max_steps": 12, "train__save_steps": 6, "train__log_steps": 3}


def head_of(run_dir: Path) -> dict[str, torch.Tensor]:
    (path,) = (run_dir / "head").glob("*.safetensors")
    return load_file(path)


def run(inputs: Path, directory: Path, **overrides: Any) -> Path:
    recipe = write_recipe(directory / "recipe.yaml", inputs, directory / "run", **{**RUN, **overrides})
    run_quietly(load_recipe(recipe))
    return directory / "run"


def test_states_on_disk_give_the_same_head_and_serve_other_runs(inputs: Path, tmp_path: Path) -> None:
    for name in ("plain", "kept", "again"):
        (tmp_path / name).mkdir()
    expected = head_of(run(inputs, tmp_path / "plain"))
    shared = {"train__hidden_cache": {"directory": str(tmp_path / "shared"), "max_gib": 0.01}}
    found = head_of(run(inputs, tmp_path / "kept", **shared))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=5e-4, rtol=0)
    (cache,) = (tmp_path / "shared").iterdir()
    manifest = json.loads((cache / "manifest.json").read_text())
    assert manifest["stored"] == "float32"
    assert manifest["bytes"] < sum(path.stat().st_size for path in cache.iterdir())

    # Another run of the same text finds them there.
    written = {path: path.stat().st_mtime_ns for path in cache.glob("*.safetensors")}
    other = run(inputs, tmp_path / "again", **shared, objective__loss="ce")
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.safetensors")} == written
    assert read_metrics(other)[-1]["step"] == 12


def test_heads_are_measured_on_the_way_and_decoded(inputs: Path, tmp_path: Path) -> None:
    run_dir = run(inputs, tmp_path, train__select={"every_steps": 4, "share": 0.3, "prompts": 2})
    lines = [line for line in read_metrics(run_dir) if "held_out_tau" in line]
    assert [line["step"] for line in lines] == [4, 8, 12]
    assert all(line["decoded_tau"] >= 1.0 for line in lines)
    best = max(lines, key=lambda line: line["held_out_tau"])
    state = json.loads(max((run_dir / "state").glob("step-*/state.json")).read_text())
    assert state["best"]["score"] == best["held_out_tau"]
    assert lines[-1]["held_out_tau"] > lines[0]["held_out_tau"] - 0.5


def test_a_run_out_of_memory_says_what_to_change_and_goes_on_once_it_is(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", **{**RUN, "train__max_steps": 2})

    def full(*arguments: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8")

    with monkeypatch.context() as patch:
        patch.setattr("mtp_train.train.packed_rows.isolated_hidden", full)
        with pytest.raises(OutOfMemoryError, match=r"stage 'train': .*gradient_checkpointing: true"):
            run_quietly(load_recipe(recipe, ["data.regenerate.enabled=false"]))
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert (outcome["exit_code"], outcome["reason"], outcome["stage"]) == (2, "out_of_memory", "train")
    # Whether so short a training helps is the gate's matter.
    with contextlib.suppress(GateRefusedError):
        run_quietly(load_recipe(recipe, ["data.regenerate.enabled=false"]))
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["stage"] == "done"


@pytest.mark.slow
def test_a_head_that_learns_by_lora_is_exported_like_any_other(inputs: Path, tmp_path: Path) -> None:
    run_dir = run(inputs, tmp_path, **{**LEARNS, "head__lora": {"r": 8, "alpha": 16}})
    base, exported = open_checkpoint(inputs / "base"), open_checkpoint(run_dir / "export")
    assert exported.tensors.keys() == base.tensors.keys()
    trained = head_of(run_dir)
    # LoRA adapts matrices and leaves norms.
    assert all(torch.equal(value, base.read(key)) == (value.ndim == 1) for key, value in trained.items())
    state = max((run_dir / "state").glob("step-*"))
    assert all(map(is_lora, load_file(state / "head.safetensors")))
