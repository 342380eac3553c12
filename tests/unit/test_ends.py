"""The ends of a trunk are the trunk's own, and no tensor of a layer is read for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file
from torch import Tensor

from adapters import write_adapter
from calls import calls_of
from checkpoints import holds, save_stripped, save_tensors
from json_files import write_json
from launching import metrics
from mtp_train.checkpoints.files import INDEX_FILE, SINGLE_FILE, Checkpoint, open_checkpoint
from mtp_train.errors import CheckpointError
from mtp_train.heads.diagnose import layout_of
from mtp_train.runs import pipeline
from mtp_train.runs.regeneration import data_stage
from mtp_train.runs.run import Run, join_processes
from mtp_train.runs.run_directory import RunDirectory
from mtp_train.runs.training import train_stage
from mtp_train.runs.trunks import states_of
from mtp_train.trunk.ends import Ends
from mtp_train.trunk.load import load_ends, load_trunk
from runs import tiny_recipe, write_inputs
from tiny import ALL_FAMILIES, tiny_trunk


def outputs(ends: Ends) -> dict[str, Tensor]:
    """Return all that a head reads of the ends, for random states."""
    draw = torch.Generator().manual_seed(0)
    states_BTD = torch.randn(2, 5, ends.state_width, generator=draw)
    tokens_BT = torch.randint(len(ends.lm_head_VD), (2, 5), generator=draw)
    wired = ends.head_input(states_BTD, ends.family.wiring.default)
    return {"embed": ends.embed(tokens_BT), "input": wired, "logits": ends.logits(states_BTD), "head": ends.lm_head_VD}


def assert_equal(ends: Ends, whole: Ends) -> None:
    found, expected = outputs(ends), outputs(whole)
    assert holds(found, expected)
    assert not list(ends.layers.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family_name", ALL_FAMILIES)
@torch.no_grad()
def test_ends_are_those_of_the_whole_trunk(
    family_name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_stripped(tiny_trunk(family_name, tied=tied), tmp_path / "trunk")
    checkpoint = open_checkpoint(path)
    whole = load_trunk(checkpoint, dtype=torch.float32)
    read = calls_of(monkeypatch, Checkpoint, "read")
    assert_equal(load_ends(checkpoint, dtype=torch.float32), whole)
    assert not [key for _, key in read if key.startswith(f"{layout_of(checkpoint).trunk_prefix}layers.")]


@torch.no_grad()
def test_an_adapter_s_embedding_replaces_the_trunk_s(tmp_path: Path) -> None:
    path = save_stripped(tiny_trunk("qwen3_5"), tmp_path / "trunk")
    checkpoint, plain = open_checkpoint(path), tmp_path / "plain"
    write_adapter(path, plain)
    write_adapter(path, tmp_path / "saved", modules_to_save=["embed_tokens", "lm_head"])
    without = outputs(load_ends(checkpoint, dtype=torch.float32))
    assert torch.equal(outputs(load_ends(checkpoint, dtype=torch.float32, adapter=plain))["embed"], without["embed"])
    adapter = tmp_path / "saved"
    whole = load_trunk(checkpoint, dtype=torch.float32, adapter=adapter)
    found = outputs(load_ends(checkpoint, dtype=torch.float32, adapter=adapter))
    assert not torch.equal(found["embed"], without["embed"])
    assert holds(found, outputs(whole))


def test_an_lm_head_that_is_packed_is_named(tmp_path: Path) -> None:
    path = save_stripped(tiny_trunk("qwen3_5"), tmp_path / "trunk")
    tensors = load_file(path / SINGLE_FILE)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    tensors["lm_head.weight_scale_inv"] = torch.ones(1, 1)
    save_tensors(tensors, path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is packed; expected a plain embedding and lm_head"):
        load_ends(open_checkpoint(path), dtype=torch.float32)


def part(path: Path) -> Path:
    """Give the layers of a checkpoint a file of their own, and return it."""
    tensors = load_file(path / SINGLE_FILE)
    files = {key: "layers.safetensors" if "layers." in key else "ends.safetensors" for key in tensors}
    for file in set(files.values()):
        save_tensors({key: tensors[key] for key in tensors if files[key] == file}, path / file)
    write_json(path / INDEX_FILE, {"metadata": {}, "weight_map": files})
    (path / SINGLE_FILE).unlink()
    return path / "layers.safetensors"


def test_a_head_is_trained_from_a_complete_cache_without_a_layer_of_the_trunk(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "in")
    layers = part(inputs / "finetune")
    asked = {"gate__enabled": False, "train__select": {"every_steps": 2, "share": 0.3}}
    pipeline.run(tiny_recipe(inputs, tmp_path / "whole", **asked))
    recipe = tiny_recipe(inputs, tmp_path / "run", train__hidden_cache={}, **asked)
    directory = RunDirectory(tmp_path / "run")
    with Progress(disable=True) as progress:
        accelerator, recipe = join_processes(recipe, directory)
        run = Run.begin(recipe, directory, accelerator, progress)
        run.claim()
        documents = data_stage(run)
        states_of(run, documents)
        layers.unlink()
        train_stage(run, documents)
    found, expected = (
        [line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("run", "whole")
    )
    assert found == pytest.approx(expected, rel=1e-6)
