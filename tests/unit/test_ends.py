"""The ends of a trunk are the trunk's own, and no tensor of a layer is read for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adapters import write_adapter
from calls import calls_of
from checkpoints import holds, save_stripped, save_tensors
from mtp_train.checkpoints.files import SINGLE_FILE, Checkpoint, open_checkpoint
from mtp_train.errors import CheckpointError
from mtp_train.trunk.ends import Ends
from mtp_train.trunk.load import load_ends, load_trunk
from tiny import ALL_FAMILIES, tiny_trunk


def outputs(ends: Ends) -> dict[str, Tensor]:
    """Return all that a head reads of the ends, for random states."""
    draw = torch.Generator().manual_seed(0)
    states_BTD = torch.randn(2, 5, ends.state_width, generator=draw)
    tokens_BT = torch.randint(len(ends.lm_head_VD), (2, 5), generator=draw)
    wired = ends.head_input(states_BTD, ends.family.wiring.default)
    return {"embed": ends.embed(tokens_BT), "input": wired, "logits": ends.logits(states_BTD), "head": ends.lm_head_VD}


def assert_equal(ends: Ends, whole: Ends) -> None:
    found = outputs(ends)
    expected = outputs(whole)
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
    assert not [key for _, key in read if key.startswith(f"{checkpoint.layout.trunk_prefix}layers.")]


@torch.no_grad()
def test_an_adapter_s_embedding_replaces_the_trunk_s(tmp_path: Path) -> None:
    path = save_stripped(tiny_trunk("qwen3_5"), tmp_path / "trunk")
    checkpoint = open_checkpoint(path)
    plain = tmp_path / "plain"
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
