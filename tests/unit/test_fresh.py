"""A head for a trunk that has none: what it starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import fuse_experts, save_stripped
from mtp_train.errors import CheckpointError
from mtp_train.heads.attach import build_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.fresh import FreshStart, fresh_plan
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk
from mtp_train.weights.files import open_checkpoint
from tiny import tiny_trunk

# Family to the layer of its tiny trunk that is the last of the head's kind.
LAST = {
    "llama": 2,
    "qwen2": 0,
    "qwen3_moe": 2,
    "olmo2": 2,
    "gemma3_text": 2,
    # Full attention after three recurrent layers.
    "qwen3_5": 3,
    "deepseek_v3": 2,
    # Dense, where all layers but the first are mixtures.
    "exaone_moe": 0,
}


def fresh_head(path: Path, start: FreshStart) -> MtpHead:
    checkpoint = open_checkpoint(path)
    config = text_config_of(checkpoint)
    return build_head(fresh_plan(checkpoint, config, "auto", seed=1, start=start), config, dtype=torch.float32)


def num_equal(head: MtpHead, trunk: Trunk, layer: int) -> tuple[int, int]:
    """Count the head's layer's tensors, and those that a layer of the trunk, as transformers loads it, has too."""
    theirs = trunk.layers[layer].state_dict()
    ours = head.blocks[0].layer.state_dict()
    assert ours.keys() == theirs.keys()
    return len(ours), sum(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("family_name", LAST)
def test_the_layer_starts_as_the_trunks_last_of_its_kind(family_name: str, tmp_path: Path) -> None:
    trunk = tiny_trunk(family_name)
    head = fresh_head(save_stripped(trunk, tmp_path / "trunk"), "copy_last_layer")
    count, equal = num_equal(head, trunk, LAST[family_name])
    assert equal == count > 0
    assert torch.equal(head.blocks[0].final_norm.weight, trunk.decoder.norm.weight)


def test_a_random_start_has_nothing_of_the_trunk(tmp_path: Path) -> None:
    trunk = tiny_trunk("llama")
    head = fresh_head(save_stripped(trunk, tmp_path / "trunk"), "random")
    assert num_equal(head, trunk, LAST["llama"])[1] == 0
    assert not torch.equal(head.blocks[0].final_norm.weight, trunk.decoder.norm.weight)


def test_experts_are_copied_however_they_are_stored(tmp_path: Path) -> None:
    trunk = tiny_trunk("qwen3_moe")
    path = fuse_experts(save_stripped(trunk, tmp_path / "trunk"))
    count, equal = num_equal(fresh_head(path, "copy_last_layer"), trunk, LAST["qwen3_moe"])
    assert equal == count


def test_a_head_whose_layer_no_layer_of_the_trunk_is_like_is_refused(tmp_path: Path) -> None:
    path = save_stripped(tiny_trunk("nemotron_h"), tmp_path / "trunk")
    with pytest.raises(CheckpointError, match=r"no layer of the trunk .* Write head\.init: random"):
        fresh_head(path, "copy_last_layer")
