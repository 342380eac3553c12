"""Heads of other kinds as engines read them: keys, the lm_head's rows, tokens, config, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from checkpoints import rewrite, shard
from draft_models import CHOSEN, NUM_DEPTHS, DraftModelToWrite
from mtp_train.checkpoints import files
from mtp_train.checkpoints.files import SINGLE_FILE, Checkpoint, open_checkpoint
from mtp_train.errors import CheckpointError
from tiny import VOCAB_SIZE

LAYER = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
}
LAYER_OF_TWO = LAYER | {"input_layernorm.weight", "hidden_norm.weight"}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab", [None, CHOSEN])
def test_eagle3_goes_out_as_its_authors_keep_it(
    vocab: Tensor | None, tied: bool, sharded: bool, tmp_path: Path
) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3", vocab, tied=tied)
    if sharded:
        written.source = open_checkpoint(shard(written.source.path))
    tensors, config = written.write()
    own = {"fc.weight", "norm.weight", *(f"midlayer.{name}" for name in LAYER_OF_TWO)}
    assert tensors.keys() == own | {"lm_head.weight"} | (set() if vocab is None else {"d2t", "t2d"})
    assert all(torch.equal(tensors[pending.key], pending.load()) for pending in written.artifact.head.tensors)
    rows = slice(None) if vocab is None else vocab.long()
    assert torch.equal(tensors["lm_head.weight"], written.trunk.lm_head_VD[rows])
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["num_hidden_layers"], config["vocab_size"]) == (1, VOCAB_SIZE)
    assert config["draft_vocab_size"] == len(tensors["lm_head.weight"])
    # Engines would tie a tied config's lm_head to an embedding that is not there.
    assert config["tie_word_embeddings"] is config["norm_before_residual"] is False
    # Where engines disagree on what a number means, none is given.
    assert not any("aux" in name or name == "eagle_config" for name in config)
    assert sorted(path.name for path in written.out.iterdir()) == ["config.json", SINGLE_FILE]


def test_tokens_are_kept_as_offsets_from_their_rows(tmp_path: Path) -> None:
    tensors, _ = DraftModelToWrite(tmp_path, "eagle3", CHOSEN).write()
    assert tensors["d2t"].dtype == torch.int64
    assert (tensors["d2t"] + torch.arange(len(CHOSEN))).tolist() == CHOSEN.tolist()
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == CHOSEN.tolist()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_config_is_one_of_the_layer_for_old_and_new_readers(kind: str, tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, kind)
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    written.head.config = LlamaConfig(**{**written.head.config.to_dict(), "rope_parameters": rope})
    _, config = written.write()
    assert (config["rope_theta"], config["rope_scaling"]["rope_type"], config["rope_scaling"]["factor"]) == (
        5e5,
        "llama3",
        8.0,
    )
    found = AutoConfig.from_pretrained(written.out)
    assert isinstance(found, LlamaConfig)
    assert found.rope_parameters == rope
    for name in ("hidden_size", "intermediate_size", "head_dim", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(found, name) == getattr(written.head.config, name)
    assert found.dtype == torch.float32
    # The tokens of the trunk's tokenizer, and not Llama's defaults.
    assert (found.bos_token_id, found.eos_token_id) == (None, None)


def test_a_large_lm_head_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3", CHOSEN)
    sizes = []
    monkeypatch.setattr(files, "BLOCK_ELEMENTS", 5 * 32)

    def in_blocks(checkpoint: Checkpoint, key: str, whole: object = Checkpoint.read_in_blocks) -> object:
        for block in whole(checkpoint, key):  # type: ignore[operator]
            sizes.append(len(block))
            yield block

    monkeypatch.setattr(Checkpoint, "read_in_blocks", in_blocks)
    tensors, _ = written.write()
    assert (max(sizes), sum(sizes)) == (5, VOCAB_SIZE)
    assert torch.equal(tensors["lm_head.weight"], written.trunk.lm_head_VD[CHOSEN.long()])


def test_eagle_has_no_lm_head_and_a_bias_that_does_nothing(tmp_path: Path) -> None:
    # Engines draft from all tokens with an EAGLE head, also if it was trained for a part of them.
    written = DraftModelToWrite(tmp_path, "eagle", CHOSEN)
    tensors, config = written.write()
    assert tensors.keys() == {"fc.weight", "fc.bias", *(f"layers.0.{name}" for name in LAYER)}
    assert torch.equal(tensors["fc.bias"], torch.zeros(len(tensors["fc.weight"])))
    assert config["architectures"] == ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"]
    assert "draft_vocab_size" not in config


def test_medusa_keeps_its_blocks_and_the_whole_lm_head(tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "medusa", CHOSEN)
    tensors, config = written.write()
    blocks = {f"blocks.{depth}.layers.0.{name}" for depth in range(NUM_DEPTHS) for name in ("weight", "bias")}
    assert tensors.keys() == blocks | {"lm_head.weight"}
    last = written.head.state_dict()["blocks.2.layer.linear.weight"]
    assert torch.equal(tensors["blocks.2.layers.0.weight"], last)
    assert torch.equal(tensors["lm_head.weight"], written.trunk.lm_head_VD)
    assert (config["num_heads"], config["original_lm_head"], config["medusa_fc_bias"]) == (NUM_DEPTHS, True, True)
    assert config["truncated_vocab_size"] == VOCAB_SIZE


def test_an_lm_head_that_is_packed_is_refused_by_name(tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3")
    packed = torch.zeros(4, 4, dtype=torch.int32)
    rewrite(written.source.path, lambda tensors: tensors.update({"lm_head.qweight": packed}))
    rewrite(written.source.path, lambda tensors: tensors.pop("lm_head.weight"))
    written.source = open_checkpoint(written.source.path)
    with pytest.raises(CheckpointError, match=r"lm_head\.qweight; expected lm_head\.weight in plain floats or FP8"):
        written.write()
    assert not written.out.exists()


def test_an_lm_head_in_fp8_becomes_plain(tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3", CHOSEN)
    weight_VD = written.trunk.lm_head_VD
    stored = {
        "lm_head.weight": (weight_VD / 2).to(torch.float8_e4m3fn),
        "lm_head.weight_scale_inv": torch.tensor([[2.0]]),
    }
    written.source = open_checkpoint(rewrite(written.source.path, lambda tensors: tensors.update(stored)))
    tensors, _ = written.write()
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    expected = stored["lm_head.weight"].float() * 2
    assert torch.equal(tensors["lm_head.weight"].float(), expected[CHOSEN.long()].bfloat16().float())
