from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st

from checkpoints import Tensors, same
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.families import Family
from mtp_train.heads.diagnose import empty_head
from mtp_train.heads.experts import is_stacked
from tiny import ALL_FAMILIES, MANY_EXPERTS, family_of, tiny_trunk
from tiny_configs import tiny_config


def test_glm_experts_are_one_key_each_gate_before_up() -> None:
    layout = HeadLayout(family_of("glm4_moe"), "model.", 46)
    fused = torch.arange(2 * 6 * 1.0).reshape(2, 6, 1)
    parts = dict(layout.split("blocks.0.layer.mlp.experts.gate_up_proj", fused))
    assert parts["model.layers.46.mlp.experts.1.gate_proj.weight"].flatten().tolist() == [6, 7, 8]
    assert parts["model.layers.46.mlp.experts.1.up_proj.weight"].flatten().tolist() == [9, 10, 11]
    assert torch.equal(layout.join(parts)["blocks.0.layer.mlp.experts.gate_up_proj"], fused)


@pytest.mark.parametrize("family_name", ["mixtral", "minimax_m2"])
def test_an_attached_layer_has_the_names_of_the_trunk_s_release(family_name: str) -> None:
    layout = HeadLayout(family_of(family_name), "model.", 3)
    parts = dict(layout.split("blocks.0.layer.mlp.experts.gate_up_proj", torch.zeros(2, 6, 1)))
    experts = "mtp.layers.0.block_sparse_moe.experts"
    assert parts.keys() == {f"{experts}.{expert}.{part}.weight" for expert in range(2) for part in ("w1", "w3")}
    ((bias, _),) = layout.split("blocks.0.layer.mlp.e_score_correction_bias", torch.zeros(2))
    assert bias == "mtp.layers.0.block_sparse_moe.e_score_correction_bias"


EXPERT_BITS = 20


def numbered_state(family: Family, num_experts: int, num_modules: int) -> Tensors:
    """Return random integers in the shapes of a head; those of a stacked expert are its number above 20 random bits."""
    state = {}
    config = tiny_config(family.name, num_experts=num_experts).get_text_config()
    for name, value in empty_head(family, config, num_modules).items():
        state[name] = torch.randint(1 << EXPERT_BITS, value.shape, dtype=torch.int32)
        if is_stacked(name, value.shape):
            state[name] += torch.arange(num_experts, dtype=torch.int32)[:, None, None] << EXPERT_BITS
    return state


def native_keys(layout: HeadLayout, state: Tensors) -> Tensors:
    pieces = [(key, part) for name, value in state.items() for key, part in layout.split(name, value)]
    assert len(dict(pieces)) == len(pieces), "no two tensors share a key"
    return dict(pieces)


def shuffled(native: Tensors, order: random.Random) -> Tensors:
    return dict(order.sample(list(native.items()), len(native)))


@pytest.mark.parametrize("family_name", ALL_FAMILIES)
def test_native_keys_to_ours_and_back_is_the_identity(family_name: str) -> None:
    """In whatever order a file has them: safetensors sorts keys by name, expert 10 before expert 2."""
    family = family_of(family_name)
    several = all("{module}" in rule.native or "{layer}" in rule.native for rule in family.keys.rules)

    @settings(max_examples=8, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(
        st.sampled_from(family.keys.trunk_prefixes),
        st.integers(1, 100),
        st.booleans(),
        st.sampled_from((2, MANY_EXPERTS)),
        st.integers(1, 3 if several else 1),
        st.randoms(use_true_random=False),
    )
    def check(
        prefix: str, num_layers: int, fused: bool, num_experts: int, num_modules: int, order: random.Random
    ) -> None:
        state = numbered_state(family, num_experts, num_modules)
        num_sublayers = 2 if family_name == "nemotron_h" else 1
        layout = HeadLayout(family, prefix, num_layers, num_sublayers=num_sublayers, fused_experts=fused)
        native = native_keys(layout, state)
        assert all(layout.is_head_key(key) and layout.shared_key(key) is None for key in native)
        numbers = {key: int(match[1]) for key in native if (match := re.search(r"\.experts\.(\d+)\.", key))}
        assert not (fused and numbers)
        assert all((native[key] >> EXPERT_BITS == number).all() for key, number in numbers.items())
        joined = layout.join(shuffled(native, order))
        assert same(joined, state)
        assert same(native_keys(layout, joined), native)
        for target in (replace(layout, trunk_prefix=one) for one in family.keys.trunk_prefixes):
            renamed = {layout.renamed(key, target): part for key, part in native.items()}
            assert same(renamed, native_keys(target, state))

    check()


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


def test_a_trunk_layers_tensors_are_found_by_their_released_names() -> None:
    layout = HeadLayout(family_of("minimax_m3"), "language_model.model.", 46)
    layer = "language_model.model.layers.7."
    for ours, native in {
        "self_attn.indexer.k_norm.weight": ["self_attn.index_k_norm.weight"],
        "mlp.gate_up_proj.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "mlp.experts.gate_up_proj": [f"block_sparse_moe.experts.{{expert}}.{part}.weight" for part in ("w1", "w3")],
    }.items():
        assert layout.trunk_layer_keys(7, ours) == [layer + name for name in native]
    assert HeadLayout(family_of("qwen3_5"), "model.", 46).trunk_layer_keys(7, "self_attn.k_norm.weight") == []


@pytest.mark.skipif("inkling" not in ALL_FAMILIES, reason="this transformers has no Inkling")
def test_inkling_keys_are_those_of_the_releases() -> None:
    """Twenty a module, by the names and shapes that others read off the released files."""
    trunk = tiny_trunk("inkling")
    native = HeadLayout(trunk.family, "model.llm.", 3).native_shapes(empty_head(trunk.family, trunk.config, 3))
    names = [key.removeprefix("model.mtp.layers.1.") for key in native if key.startswith("model.mtp.layers.1.")]
    assert len(native) == 3 * len(names) == 60
    block = "transformer_block."
    attention = ["wq_du", "wk_dv", "wv_dv", "wr_du", "wo_ud", "q_norm", "k_norm", "k_sconv", "v_sconv"]
    assert set(names) == {
        *("input_proj.weight", "embed_norm.weight", "hidden_norm.weight"),
        *(f"{block}attn.{part}.weight" for part in attention),
        *(f"{block}{part}.weight" for part in ("attn_norm", "mlp_norm", "attn_sconv", "mlp_sconv")),
        *(f"{block}attn.rel_logits_proj.proj", f"{block}mlp.global_scale"),
        *(f"{block}mlp.w13_dn.weight", f"{block}mlp.w2_md.weight"),
    }
    # Modules of both kinds: a profile reaches as far as its module sees.
    assert [native[f"model.mtp.layers.{module}.{block}attn.rel_logits_proj.proj"][1] for module in range(3)] == [
        8,
        12,
        8,
    ]


def test_renaming_follows_the_decoder_prefix_only_where_keys_carry_it() -> None:
    glm = family_of("glm4_moe")
    qwen = family_of("qwen3_5")
    plain = HeadLayout(glm, "model.", 46)
    wrapped = HeadLayout(glm, "model.language_model.", 46)
    assert plain.renamed("model.layers.46.enorm.weight", wrapped) == "model.language_model.layers.46.enorm.weight"
    plain = HeadLayout(qwen, "model.", 4)
    wrapped = HeadLayout(qwen, "model.language_model.", 4)
    assert plain.renamed("mtp.fc.weight", wrapped) == "mtp.fc.weight"
