from __future__ import annotations

import pytest
import torch

from mtp_train.families import FAMILIES, Family
from mtp_train.heads.diagnose import head_shapes
from mtp_train.weights.keymap import HeadLayout
from tiny import FAMILY_NAMES, tiny_head, tiny_trunk


def family_of(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


@pytest.mark.parametrize(("family_name", "num_modules"), [*((name, 1) for name in FAMILY_NAMES), ("glm4_moe", 2)])
def test_native_to_ours_and_back_is_the_identity(family_name: str, num_modules: int) -> None:
    trunk = tiny_trunk(family_name)
    state = tiny_head(trunk, num_modules=num_modules).state_dict()
    layout = HeadLayout(trunk.family, trunk.family.trunk_prefixes[-1], trunk.config.num_hidden_layers)
    native = {key: part for name, value in state.items() for key, part in layout.split(name, value)}
    joined = layout.join(native)
    assert joined.keys() == state.keys()
    assert all(torch.equal(joined[name], value) for name, value in state.items())
    again = {key: part for name, value in joined.items() for key, part in layout.split(name, value)}
    assert all(torch.equal(again[key], part) for key, part in native.items())


def test_qwen_keys_are_those_of_the_releases() -> None:
    trunk = tiny_trunk("qwen3_5")
    layout = HeadLayout(trunk.family, "model.", 4)
    native = layout.native_shapes(head_shapes(trunk.family, trunk.config, 1))
    assert sorted(native) == [
        "mtp.fc.weight",
        "mtp.layers.0.input_layernorm.weight",
        "mtp.layers.0.mlp.down_proj.weight",
        "mtp.layers.0.mlp.gate_proj.weight",
        "mtp.layers.0.mlp.up_proj.weight",
        "mtp.layers.0.post_attention_layernorm.weight",
        "mtp.layers.0.self_attn.k_norm.weight",
        "mtp.layers.0.self_attn.k_proj.weight",
        "mtp.layers.0.self_attn.o_proj.weight",
        "mtp.layers.0.self_attn.q_norm.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
        "mtp.layers.0.self_attn.v_proj.weight",
        "mtp.norm.weight",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
    ]
    assert native["mtp.fc.weight"] == (32, 64)


def test_glm_experts_are_one_key_each_gate_before_up() -> None:
    layout = HeadLayout(family_of("glm4_moe"), "model.", 46)
    fused = torch.arange(2 * 6 * 1.0).reshape(2, 6, 1)
    parts = dict(layout.split("blocks.0.layer.mlp.experts.gate_up_proj", fused))
    assert parts["model.layers.46.mlp.experts.1.gate_proj.weight"].flatten().tolist() == [6, 7, 8]
    assert parts["model.layers.46.mlp.experts.1.up_proj.weight"].flatten().tolist() == [9, 10, 11]
    assert torch.equal(layout.join(parts)["blocks.0.layer.mlp.experts.gate_up_proj"], fused)


def test_experts_beyond_nine_keep_their_order() -> None:
    layout = HeadLayout(family_of("glm4_moe"), "model.", 46)
    stacked = torch.arange(12.0).reshape(12, 1, 1)
    parts = dict(layout.split("blocks.0.layer.mlp.experts.down_proj", stacked))
    assert torch.equal(layout.join(parts)["blocks.0.layer.mlp.experts.down_proj"], stacked)


@pytest.mark.parametrize(
    ("family_name", "key", "is_head"),
    [
        ("qwen3_5", "mtp.fc.weight", True),
        ("qwen3_5", "mtp.something.new", True),
        ("qwen3_5", "model.layers.0.mlp.up_proj.weight", False),
        ("glm4_moe", "model.layers.46.enorm.weight", True),
        ("glm4_moe", "model.layers.45.mlp.gate.weight", False),
        ("glm4_moe", "model.layers.460.enorm.weight", True),
        ("glm4_moe", "lm_head.weight", False),
    ],
)
def test_head_keys_are_told_from_the_trunks(family_name: str, key: str, is_head: bool) -> None:
    assert HeadLayout(family_of(family_name), "model.", 46).is_head_key(key) is is_head


def test_glm_shared_keys_repeat_the_trunk() -> None:
    layout = HeadLayout(family_of("glm4_moe"), "model.", 46)
    embed, head = "model.layers.46.embed_tokens.weight", "model.layers.46.shared_head.head.weight"
    assert layout.shared_key("model.layers.46.shared_head.norm.weight") is None
    shared_embed, shared_head = layout.shared_key(embed), layout.shared_key(head)
    assert shared_embed is not None
    assert shared_head is not None
    assert layout.trunk_key(shared_embed, ["model.embed_tokens.weight"]) == "model.embed_tokens.weight"
    assert layout.trunk_key(shared_head, ["lm_head.weight", "model.embed_tokens.weight"]) == "lm_head.weight"
    assert layout.trunk_key(shared_head, ["model.embed_tokens.weight"]) == "model.embed_tokens.weight"


def test_renaming_follows_the_decoder_prefix_only_where_keys_carry_it() -> None:
    glm, qwen = family_of("glm4_moe"), family_of("qwen3_5")
    plain, wrapped = HeadLayout(glm, "model.", 46), HeadLayout(glm, "model.language_model.", 46)
    assert plain.renamed("model.layers.46.enorm.weight", wrapped) == "model.language_model.layers.46.enorm.weight"
    plain, wrapped = HeadLayout(qwen, "model.", 4), HeadLayout(qwen, "model.language_model.", 4)
    assert plain.renamed("mtp.fc.weight", wrapped) == "mtp.fc.weight"
