"""GGUF files of DeepSeek V4's head, whose streams have a mixer of its own, and of heads stored in FP8 or FP4.

What is expected was read from files that llama.cpp's converter wrote for such checkpoints.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_deepseek_v4 import NAME, as_released, packed
from test_quantised import quantise

from checkpoints import all_tensors, set_fields
from gguf_files import checkpoint_with_head, exported, metadata, values
from mtp_train.checkpoints import files
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.checkpoints.gguf.architectures import GGUF_HEADS
from mtp_train.checkpoints.gguf.sidecar import gguf_tensors
from mtp_train.checkpoints.native import NativeHead
from mtp_train.checkpoints.writing import held_tensor
from mtp_train.errors import CheckpointError
from mtp_train.runs.checkpoint_tools import write

NATIVE_NAMES = {
    **{f"blk.4.nextn.{ours}.weight": f"{theirs}.weight" for ours, theirs in (("enorm", "enorm"), ("hnorm", "hnorm"))},
    "blk.4.nextn.shared_head_norm.weight": "norm.weight",
    "blk.4.nextn.embed_tokens.weight": "emb.tok_emb.weight",
    "blk.4.nextn.shared_head_head.weight": "head.weight",
    "blk.4.attn_norm.weight": "attn_norm.weight",
    "blk.4.attn_q_a.weight": "attn.wq_a.weight",
    "blk.4.attn_q_a_norm.weight": "attn.q_norm.weight",
    "blk.4.attn_q_b.weight": "attn.wq_b.weight",
    "blk.4.attn_kv.weight": "attn.wkv.weight",
    "blk.4.attn_kv_a_norm.weight": "attn.kv_norm.weight",
    "blk.4.attn_output_a.weight": "attn.wo_a.weight",
    "blk.4.attn_output_b.weight": "attn.wo_b.weight",
    "blk.4.attn_sinks.weight": "attn.attn_sink",
    "blk.4.ffn_norm.weight": "ffn_norm.weight",
    "blk.4.ffn_gate_inp.weight": "ffn.gate.weight",
    "blk.4.exp_probs_b.bias": "ffn.gate.bias",
    "blk.4.ffn_gate_shexp.weight": "ffn.shared_experts.w1.weight",
    "blk.4.ffn_down_shexp.weight": "ffn.shared_experts.w2.weight",
    "blk.4.ffn_up_shexp.weight": "ffn.shared_experts.w3.weight",
    **{
        f"blk.4.hc_{part}_{one}.weight": f"hc_{part}_{one}"
        for part in ("attn", "ffn")
        for one in ("fn", "base", "scale")
    },
    **{f"output_hc_{one}.weight": f"hc_head_{one}" for one in ("fn", "base", "scale")},
}
EXPERTS = {"gate": "w1", "down": "w2", "up": "w3"}
FIELDS: dict[str, Any] = {
    "block_count": 5,
    "nextn_predict_layers": 1,
    "embedding_length": 32,
    "embedding_length_out": 64,
    "feed_forward_length": None,
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "attention.key_length": 16,
    "attention.sliding_window": 8,
    "attention.q_lora_rank": 24,
    "attention.output_group_count": 2,
    "attention.output_lora_rank": 8,
    "attention.compress_ratios": [0, 4, 128, 4, 0],
    "attention.compress_rope_freq_base": 160000.0,
    "attention.indexer.head_count": 16,
    "attention.indexer.key_length": 16,
    "attention.indexer.top_k": 3,
    "rope.dimension_count": 8,
    "rope.freq_base": 10000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 512,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_attn_factor": None,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 48,
    "expert_gating_func": 4,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "swiglu_clamp_exp": [10.0] * 5,
    "swiglu_clamp_shexp": [10.0] * 5,
    "hyper_connection.count": 2,
    "hyper_connection.sinkhorn_iterations": 20,
    "hyper_connection.epsilon": pytest.approx(1e-6),
    "hash_layer_count": 1,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1}
OURS = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor")
RELEASED = {
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_hash_layers": 1,
    "qk_rope_head_dim": 8,
    "rope_scaling": {"type": "yarn", **YARN},
}


@pytest.fixture
def v4(tmp_path: Path) -> Path:
    return checkpoint_with_head(tmp_path / "tuned", NAME)


def test_every_tensor_stands_where_llama_cpp_looks_for_it(v4: Path, out: Path) -> None:
    stored = all_tensors(as_released(v4))
    found = values(exported(v4, out, "f32"))
    expected = {ours: stored[f"mtp.0.{theirs}"] for ours, theirs in NATIVE_NAMES.items()}
    expected |= {
        f"blk.4.ffn_{ours}_exps.weight": torch.stack(
            [stored[f"mtp.0.ffn.experts.{expert}.{theirs}.weight"] for expert in range(4)]
        )
        for ours, theirs in EXPERTS.items()
    }
    expected["blk.4.nextn.eh_proj.weight"] = torch.cat(
        [stored["mtp.0.e_proj.weight"], stored["mtp.0.h_proj.weight"]], dim=1
    )
    trunk = {"token_embd.weight": "embed.weight", "output.weight": "head.weight", "output_norm.weight": "norm.weight"}
    expected |= {ours: stored[theirs] for ours, theirs in trunk.items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value.float().numpy()), name
    assert not np.array_equal(found["output_hc_fn.weight"], stored["hc_head_fn"].numpy())


@pytest.mark.parametrize("fields", [RELEASED | dict.fromkeys(OURS), {"rope_parameters": {"rope_type": "yarn", **YARN}}])
def test_a_release_is_described_as_transformers_own_config_of_it(
    fields: dict[str, Any], v4: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tiny trunk's compressors are made for other rates.
    monkeypatch.setattr(write, "require_whole_trunk", lambda trunk: None)
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    set_fields(v4, {"compress_rates": rates, **fields})
    found = metadata(exported(v4, out))
    assert (found["general.architecture"], found["tokenizer.ggml.pre"]) == ("deepseek4", "joyai-llm")
    assert {key: found.get(f"deepseek4.{key}") for key in FIELDS} == FIELDS


def test_what_mixes_streams_stays_in_fp32(v4: Path, out: Path) -> None:
    kinds = {tensor.name: tensor.tensor_type.name for tensor in exported(v4, out, "q8_0").tensors}
    assert {kind for name, kind in kinds.items() if "hc_" in name} == {"F32"}
    assert kinds["blk.4.nextn.eh_proj.weight"] == "Q8_0"


def test_a_release_s_head_in_fp4_and_fp8_is_written_as_what_it_stands_for(
    v4: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = packed(v4)
    monkeypatch.setattr(files, "BLOCK_ELEMENTS", 5 * 32)
    found = values(exported(v4, out, "f32"))
    halves = [plain[f"mtp.0.{one}_proj.weight"] for one in "eh"]
    assert np.array_equal(found["blk.4.nextn.eh_proj.weight"], torch.cat(halves, dim=1).numpy())
    assert np.array_equal(found["blk.4.attn_output_a.weight"], plain["mtp.0.attn.wo_a.weight"].numpy())
    up = plain["mtp.0.ffn.experts.2.w3.weight"].numpy()
    assert np.array_equal(found["blk.4.ffn_up_exps.weight"][2], up)
    assert np.abs(up).max() > 0


def test_a_head_in_fp8_keeps_what_bf16_would_round(tmp_path: Path, out: Path) -> None:
    checkpoint = checkpoint_with_head(tmp_path / "tuned", "glm4_moe")
    plain = quantise(checkpoint, r"model\.layers\.3\..*_proj\.weight|lm_head")
    found = values(exported(checkpoint, out, "f32"))
    for name, key in {
        "output.weight": "lm_head.weight",
        "blk.3.nextn.eh_proj.weight": "model.layers.3.eh_proj.weight",
        "blk.3.attn_q.weight": "model.layers.3.self_attn.q_proj.weight",
    }.items():
        assert np.array_equal(found[name], plain[key].numpy()), name
        assert not torch.equal(plain[key], plain[key].bfloat16().float())


def test_two_mixers_have_no_place_in_one_file(v4: Path) -> None:
    checkpoint = open_checkpoint(v4)
    keys = [f"mtp.{module}.hc_head_base" for module in range(2)]
    head = NativeHead(tuple(held_tensor(key, "F32", torch.ones(2)) for key in keys), (), {})
    with pytest.raises(CheckpointError, match=re.escape("mtp.1.hc_head_base: llama.cpp's deepseek4 has one tensor")):
        gguf_tensors(checkpoint, head, GGUF_HEADS[NAME], {"num_hidden_layers": 4})
