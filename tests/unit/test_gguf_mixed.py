"""GGUF files of heads whose trunks mix kinds of layers, described by the fields of the released configs.

What is expected was read from files that llama.cpp's converter wrote for the same checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import all_tensors
from gguf_files import checkpoint_with_head, exported, metadata, values
from json_files import read_json, write_json
from mtp_train.runs.checkpoint_tools import write
from tiny import ALL_FAMILIES

SLIDING = "sliding_attention"
RELEASED: dict[str, tuple[list[str], dict[str, Any]]] = {
    # Fields of transformers' own that releases do not have, and those that they have instead.
    "mimo_v2_flash": (
        ["rope_parameters", "layer_types", "mlp_layer_types", "rms_norm_eps"],
        {
            "hybrid_layer_pattern": [0, 1, 1],
            "swa_num_key_value_heads": 2,
            "layernorm_epsilon": 1e-6,
            "rope_theta": 5000000,
            "swa_rope_theta": 20000,
            "partial_rotary_factor": 0.5,
            "sliding_window": 8,
            "sliding_window_size": 8,
            "scoring_func": "sigmoid",
        },
    ),
    "step3p7": (
        [
            *("mtp_layer_types", "mtp_mlp_layer_types", "mlp_layer_types", "num_sliding_attention_heads"),
            *("rope_parameters", "per_layer_config", "num_key_value_heads"),
        ],
        {
            "num_attention_groups": 1,
            "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 1},
            "layer_types": ["full_attention", *[SLIDING] * 5],
            "moe_layers_enum": "1,2",
            "moe_router_activation": "sigmoid",
            "norm_expert_weight": True,
            "rope_theta": [5000000.0, *[10000.0] * 5],
            "partial_rotary_factors": [0.5, *[1.0] * 5],
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 2.0,
                "original_max_position_embeddings": 4096,
                "low_freq_factor": 1.0,
                "high_freq_factor": 32.0,
            },
            "swiglu_limits": [None, None, 7, None, None, None],
        },
    ),
    "nemotron_h": (
        ["layers_block_type", "mtp_layers_block_type"],
        {
            "hybrid_override_pattern": "M*EM-",
            "mtp_hybrid_override_pattern": "*E",
            "norm_eps": 1e-6,
            "rope_theta": 10000,
        },
    ),
    "bailing_hybrid": (
        ["layer_types", "linear_head_dim", "model_max_length", "moe_renormalize", "num_experts_per_token"],
        {
            "head_dim": 12,
            "max_position_embeddings": 4096,
            "norm_topk_prob": False,
            "num_experts_per_tok": 2,
            "score_function": "sigmoid",
            "expert_swiglu_limit_list": [None, 7.0],
        },
    ),
    "cohere2_moe": (["mlp_layer_types"], {"first_k_dense_replace": 1}),
}
EXPECTED: dict[str, dict[str, Any]] = {
    "mimo_v2_flash": {
        "block_count": 6,
        "nextn_predict_layers": 3,
        "attention.head_count_kv": [1, 2, 2, 2, 2, 2],
        "attention.key_length": 16,
        "attention.value_length": 10,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [0, 1, 1, 1, 1, 1],
        "attention.value_scale": pytest.approx(0.707),
        "rope.freq_base": 5e6,
        "rope.freq_base_swa": 2e4,
        "rope.dimension_count": 8,
        "expert_gating_func": 2,
    },
    "step3p7": {
        "block_count": 6,
        "nextn_predict_layers": 3,
        "attention.head_count": [2, 4, 4, 4, 4, 4],
        "attention.head_count_kv": [1] * 6,
        "attention.sliding_window_pattern": [False, *[True] * 5],
        "rope.freq_base": 5e6,
        "rope.freq_base_swa": 1e4,
        "rope.scaling.type": None,
        "leading_dense_block_count": 1,
        "moe_every_n_layers": 1,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "swiglu_clamp_exp": [0, 0, 7, 0, 0, 0],
        "swiglu_clamp_shexp": None,
    },
    "nemotron_h": {
        "block_count": 6,
        "nextn_predict_layers": 1,
        "context_length": 1 << 20,
        "feed_forward_length": [0, 0, 16, 0, 0, 16],
        "attention.head_count_kv": [0, 1, 0, 0, 0, 1],
        "attention.layer_norm_epsilon": pytest.approx(1e-5),
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": 1e4,
        "rope.scaling.finetuned": False,
        "ssm.inner_size": 32,
        "ssm.time_step_rank": 4,
    },
    "bailing_hybrid": {
        "block_count": 4,
        "nextn_predict_layers": 1,
        "context_length": 4096,
        "attention.head_count_kv": [0, 0, 1, 1],
        "attention.key_length": 24,
        "attention.value_length": 12,
        "attention.key_length_mla": 20,
        "attention.value_length_mla": 14,
        "attention.q_lora_rank": None,
        "kda.head_dim": 12,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
        "expert_used_count": 2,
        "expert_group_count": 2,
        "expert_shared_feed_forward_length": 16,
        "expert_weights_norm": False,
        "expert_gating_func": 2,
        "swiglu_clamp_exp": [0, 7, 0, 0],
    },
    "cohere2_moe": {
        "block_count": 4,
        "nextn_predict_layers": 1,
        "feed_forward_length": 48,
        "logit_scale": pytest.approx(0.3),
        "attention.layer_norm_epsilon": pytest.approx(1e-5),
        "attention.layer_norm_rms_epsilon": None,
        "attention.sliding_window_pattern": [False, True, False],
        "rope.dimension_count": 16,
        "rope.scaling.type": "none",
        "leading_dense_block_count": 1,
        "expert_feed_forward_length": 16,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": 16,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    },
}
NAMES = [name for name in RELEASED if name in ALL_FAMILIES]


def as_released(path: Path, family_name: str) -> Path:
    checkpoint_with_head(path, family_name)
    config = read_json(path / "config.json")
    text_config = config.get("text_config", config)
    theirs, released = RELEASED[family_name]
    for field in theirs:
        text_config.pop(field)
    text_config.update(released)
    write_json(path / "config.json", config)
    return path


@pytest.mark.parametrize("family_name", NAMES)
def test_a_released_config_is_described_block_by_block(
    family_name: str, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some released fields are of other sizes than the tiny trunk.
    monkeypatch.setattr(write, "require_whole_trunk", lambda trunk: None)
    found = metadata(exported(as_released(tmp_path / "tuned", family_name), out))
    arch = found["general.architecture"]
    expected = EXPECTED[family_name]
    assert {key: found.get(f"{arch}.{key}") for key in expected} == expected


@pytest.mark.skipif("mimo_v2_flash" not in NAMES, reason="this transformers does not run MiMo-V2-Flash")
def test_query_key_and_value_become_one_matrix(tmp_path: Path, out: Path) -> None:
    checkpoint = checkpoint_with_head(tmp_path / "tuned", "mimo_v2_flash")
    stored = all_tensors(checkpoint)
    found = values(exported(checkpoint, out))
    for module in range(3):
        attention = f"model.mtp.layers.{module}.self_attn."
        joined = torch.cat([stored[f"{attention}{part}_proj.weight"] for part in "qkv"])
        assert np.array_equal(found[f"blk.{3 + module}.attn_qkv.weight"], joined.half().float().numpy())
        assert np.array_equal(
            found[f"blk.{3 + module}.attn_sinks.weight"], stored[f"{attention}attention_sink_bias"].numpy()
        )
    assert not any(".attn_q." in name for name in found)


@pytest.mark.skipif("nemotron_h" not in NAMES, reason="this transformers does not run Nemotron-H")
def test_a_head_of_two_sublayers_is_one_block(tmp_path: Path, out: Path) -> None:
    checkpoint = checkpoint_with_head(tmp_path / "tuned", "nemotron_h")
    stored = all_tensors(checkpoint)
    found = values(exported(checkpoint, out))
    query = stored["mtp.layers.0.mixer.q_proj.weight"].half().float().numpy()
    # Of a head's 16 rows, row 0, then 8, then 1: what llama.cpp's converter makes of each.
    assert np.array_equal(found["blk.5.attn_q.weight"][16:19], query[[16, 24, 17]])
    assert np.array_equal(
        found["blk.5.ffn_up_exps.weight"][3],
        stored["mtp.layers.1.mixer.experts.3.up_proj.weight"].half().float().numpy(),
    )
    assert np.array_equal(found["blk.5.post_attention_norm.weight"], stored["mtp.layers.1.norm.weight"].numpy())
    assert np.array_equal(found["token_embd.weight"], stored["backbone.embeddings.weight"].half().float().numpy())


@pytest.mark.skipif("step3p7" not in NAMES, reason="this transformers does not run Step-3.5")
def test_stretched_frequencies_are_written_as_what_divides_them(tmp_path: Path, out: Path) -> None:
    checkpoint = as_released(tmp_path / "tuned", "step3p7")
    factors = values(exported(checkpoint, out))["rope_freqs.weight"]
    # Half of the 16 dimensions rotate: wavelengths 2 pi 5e6^(0, 1/4, 1/2, 3/4). The first is left as it is, the last
    # two are longer than the old context; 4096 / wavelength is 13.8 turns for the second.
    between = 1 / ((1 - (13.8 - 1) / 31) / 2 + (13.8 - 1) / 31)
    assert factors.tolist() == pytest.approx([1, between, 2, 2, 1, 1, 1, 1], rel=1e-3)
    assert "rope_freqs.weight" not in values(
        exported(checkpoint_with_head(tmp_path / "plain", "step3p7"), tmp_path / "of-plain")
    )
