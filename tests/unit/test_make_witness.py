"""The checkpoints that are made for engines to load: complete, readable as text, the same every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from json_files import read_json
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.heads.diagnose import diagnose_head
from mtp_train.trunk.load import load_trunk
from witness_maker.making import make_witness


def make(name: str, directory: Path) -> Any:
    make_witness(name, directory, num_steps=1, seed=0)
    return open_checkpoint(directory)


def test_a_witness_holds_its_whole_head_and_prompts_that_read_back_as_the_same_tokens(tmp_path: Path) -> None:
    checkpoint = make("glm4_moe", tmp_path)
    assert diagnose_head(checkpoint).complete
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompts = read_json(tmp_path / "prompts.json")
    assert len(prompts) == 12
    for prompt_ids in prompts:
        assert tokenizer(tokenizer.decode(prompt_ids))["input_ids"] == prompt_ids


def test_a_witness_of_streams_has_a_release_s_names_and_sends_tokens_to_experts_of_their_own(tmp_path: Path) -> None:
    checkpoint = make("deepseek_v4", tmp_path)
    assert {"embed.weight", "hc_head_fn", "layers.1.attn.compressor.ape", "head.weight"} <= checkpoint.tensors.keys()
    assert diagnose_head(checkpoint).complete
    experts_VK = checkpoint.read("layers.0.ffn.gate.tid2eid")
    assert set(experts_VK.flatten().tolist()) == set(range(8))
    assert bool((experts_VK[:, 0] != experts_VK[:, 1]).all())
    trunk = load_trunk(checkpoint, dtype=torch.float32)
    assert trunk.config.layer_types[1] == "compressed_sparse_attention"
    assert all(checkpoint.read(key).isfinite().all() for key in checkpoint.tensors)
