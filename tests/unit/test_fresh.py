"""A head for a trunk that has none: what it starts from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoints import fuse_experts, save_stripped, set_fields
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.errors import CheckpointError, UnsupportedModelError
from mtp_train.heads.build import FreshStart, build_head, fresh_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import unroll
from mtp_train.trunk.load import Trunk
from tiny import ALL_FAMILIES, MANY_EXPERTS, tiny_trunk

# Family to the layer of its tiny trunk that is the last of the head's kind.
LAST = {
    "llama": 2,
    "qwen2": 0,
    "qwen3_moe": 2,
    "olmo2": 2,
    "gemma3_text": 2,
    "gemma2": 1,
    "phi3": 2,
    "gpt_oss": 1,
    "olmo3": 1,
    # The last that rotates.
    "smollm3": 1,
    "mixtral": 2,
    "qwen2_moe": 2,
    "cohere2": 2,
    # Full attention after three recurrent layers.
    "qwen3_5": 3,
    "deepseek_v3": 2,
    # Dense, where all layers but the first are mixtures.
    "exaone_moe": 0,
}


TRUNK_STEPS, HEAD_STEPS = 150, 20


def fresh_head(path: Path, start: FreshStart, kind: str = "mtp", num_modules: int = 1) -> MtpHead:
    checkpoint = open_checkpoint(path)
    config = text_config_of(checkpoint)
    plan = fresh_plan(checkpoint, config, "auto", seed=1, start=start, kind=kind, num_modules=num_modules)
    return build_head(plan, config, dtype=torch.float32)


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


@pytest.mark.skipif("dots3_note" not in ALL_FAMILIES, reason="this transformers does not run dots3-note")
def test_a_heads_own_embedding_starts_as_the_trunks(tmp_path: Path) -> None:
    trunk = tiny_trunk("dots3_note")
    head = fresh_head(save_stripped(trunk, tmp_path / "trunk"), "random")
    assert torch.equal(head.blocks[0].embedding.weight, trunk.causal_lm.get_input_embeddings().weight)


def test_eagle3_starts_with_a_projection_that_does_not_drown_the_token(tmp_path: Path) -> None:
    trunk = tiny_trunk("llama")
    (block,) = fresh_head(save_stripped(trunk, tmp_path / "trunk"), "random", "eagle3").blocks
    assert torch.equal(block.final_norm.weight, torch.ones(trunk.config.hidden_size))
    for linear, size in ((block.fc, 0.2), (block.layer.self_attn.q_proj, 1.0)):
        assert linear.weight.std().item() == pytest.approx(size * linear.in_features**-0.5, rel=0.05)


def test_medusa_starts_as_the_trunk_itself(tmp_path: Path) -> None:
    trunk = tiny_trunk("llama")
    head = fresh_head(save_stripped(trunk, tmp_path / "trunk"), "random", "medusa", num_modules=2)
    tokens_BT = torch.arange(6).view(2, 3)
    hidden_BTD = trunk.hidden(tokens_BT)
    rows = {"positions_BT": torch.arange(3).expand(2, 3), "document_BT": torch.zeros_like(tokens_BT)}
    for state_BTD in unroll(head, hidden_BTD, tokens_BT, trunk.embed, num_depths=2, **rows):
        assert torch.equal(state_BTD, hidden_BTD)


def test_a_trunk_with_too_few_layers_gets_no_eagle3(tmp_path: Path) -> None:
    path = save_stripped(tiny_trunk("llama"), tmp_path / "trunk")
    set_fields(path, {"num_hidden_layers": 2})
    with pytest.raises(UnsupportedModelError, match="a trunk of 2 layers; expected at least 3"):
        fresh_head(path, "random", "eagle3")


@pytest.mark.parametrize("store", [fuse_experts, lambda path: path], ids=["stacked", "one by one"])
def test_experts_are_copied_however_they_are_stored(store: Callable[[Path], Path], tmp_path: Path) -> None:
    trunk = tiny_trunk("qwen3_moe", num_experts=MANY_EXPERTS)
    path = store(save_stripped(trunk, tmp_path / "trunk"))
    count, equal = num_equal(fresh_head(path, "copy_last_layer"), trunk, LAST["qwen3_moe"])
    assert equal == count


@pytest.mark.skipif("nemotron_h" not in ALL_FAMILIES, reason="this transformers does not run Nemotron-H")
def test_a_head_whose_layer_no_layer_of_the_trunk_is_like_is_refused(tmp_path: Path) -> None:
    path = save_stripped(tiny_trunk("nemotron_h"), tmp_path / "trunk")
    with pytest.raises(CheckpointError, match=r"no layer of the trunk .* Write head\.init: random"):
        fresh_head(path, "copy_last_layer")
