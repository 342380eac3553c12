"""The GGUF file of a head holds what llama.cpp's own converter would write, and nothing half written is left."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import pytest
import torch

from byte_tokenizer import byte_tokenizer
from checkpoints import all_tensors, fuse_experts, rewrite
from gguf_files import VOCAB_SIZE, checkpoint_with_head, exported, metadata, values
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.checkpoints.gguf import sidecar
from mtp_train.checkpoints.gguf.architectures import GGUF_HEADS
from mtp_train.checkpoints.gguf.record import NUM_MODULES
from mtp_train.checkpoints.gguf.sidecar import GgufKind, gguf_tensors, stored_type, trunk_names
from mtp_train.checkpoints.native import NativeHead
from mtp_train.checkpoints.writing import PendingTensor, held_tensor
from mtp_train.cli.main import KINDS
from mtp_train.errors import CheckpointError, UnsupportedModelError
from mtp_train.families import FAMILIES
from runs import Capture, refusal
from tiny import ALL_FAMILIES, IS_OLD, MANY_EXPERTS

SERVED = [one.name for one in FAMILIES if set(one.model_types) & GGUF_HEADS.keys() and one.name in ALL_FAMILIES]
OF_A_RELEASE = {
    "proj.weight": "eh_proj.weight",
    "embed_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    # Another norm in a trunk's layer, and a bias that the converter of Hunyuan 3 names without an ending.
    "layers.1.norm.weight": "",
    "mlp.e_score_correction.bias": "",
}
FINAL_NORMS = {
    "nextn.shared_head_norm.weight": "shared_head.norm.weight",
    "layer_output_norm.weight": "final_layernorm.weight",
}


def half(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.half().float().numpy()


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return checkpoint_with_head(tmp_path / "tuned", "qwen3_5")


@pytest.fixture
def glm(tmp_path: Path) -> Path:
    return checkpoint_with_head(tmp_path / "tuned", "glm4_moe")


# Tensors


@pytest.mark.parametrize("family_name", SERVED)
def test_no_weight_is_lost_or_added(family_name: str, tmp_path: Path, out: Path) -> None:
    checkpoint = checkpoint_with_head(tmp_path / "tuned", family_name)
    opened = open_checkpoint(checkpoint)
    offset = GGUF_HEADS[opened.text_config["model_type"]].norm_offset
    layout = opened.layout
    stored = all_tensors(checkpoint)
    expected = [
        value.float() + offset if "norm" in key else value.float()
        for key, value in stored.items()
        if key in trunk_names(layout) or layout.is_head_key(key)
    ]
    found = np.concatenate([value.ravel() for value in values(exported(checkpoint, out)).values()])
    wanted = torch.cat([value.flatten() for value in expected]).numpy()
    assert np.array_equal(np.sort(found.astype(np.float16)), np.sort(wanted.astype(np.float16)))


def test_a_head_kept_beside_the_trunk_becomes_one_more_block(qwen: Path, out: Path) -> None:
    stored = all_tensors(qwen)
    found = values(exported(qwen, out))
    assert found.keys() == {
        "token_embd.weight",
        "output_norm.weight",
        "output.weight",
        *(f"blk.4.nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")),
        *(f"blk.4.attn_{name}.weight" for name in ("norm", "q", "k", "v", "output", "q_norm", "k_norm")),
        *(f"blk.4.{name}.weight" for name in ("post_attention_norm", "ffn_gate", "ffn_up", "ffn_down")),
    }
    for name, key in {
        "blk.4.nextn.eh_proj.weight": "mtp.fc.weight",
        "blk.4.attn_q.weight": "mtp.layers.0.self_attn.q_proj.weight",
        "blk.4.ffn_down.weight": "mtp.layers.0.mlp.down_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
    }.items():
        assert np.array_equal(found[name], half(stored[key])), name


def test_a_head_kept_as_a_layer_stacks_its_experts(glm: Path, out: Path) -> None:
    stored = all_tensors(glm)
    found = values(exported(glm, out))
    layer = "model.layers.3."
    experts = torch.stack([stored[f"{layer}mlp.experts.{expert}.up_proj.weight"] for expert in range(4)])
    assert np.array_equal(found["blk.3.ffn_up_exps.weight"], half(experts))
    assert not np.array_equal(found["blk.3.ffn_up_exps.weight"], half(experts.flip(0)))
    assert np.array_equal(found["blk.3.nextn.eh_proj.weight"], half(stored[f"{layer}eh_proj.weight"]))
    router = stored[f"{layer}mlp.gate.weight"].float().numpy()
    assert np.array_equal(found["blk.3.ffn_gate_inp.weight"], router)
    # What the head shares with the trunk goes along where the checkpoint has it.
    assert np.array_equal(found["blk.3.nextn.embed_tokens.weight"], found["token_embd.weight"])
    assert np.array_equal(found["blk.3.nextn.shared_head_head.weight"], found["output.weight"])


DENSE = ("qwen3_5", "mimo_v2_flash", "step3p7")
"""Families whose heads have no experts."""
STACKED = ("qwen3_5_moe", "qwen3_next")
"""Families whose experts llama.cpp's converter reads stacked too."""
PART_OF = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


@pytest.mark.parametrize(
    ("family_name", "store"),
    [
        *((name, lambda path: path) for name in SERVED if name not in DENSE),
        *((name, fuse_experts) for name in STACKED),
    ],
)
def test_experts_are_stacked_by_their_numbers(
    family_name: str, store: Callable[[Path], Path], tmp_path: Path, out: Path
) -> None:
    checkpoint = checkpoint_with_head(tmp_path / "tuned", family_name, MANY_EXPERTS)
    layout = open_checkpoint(checkpoint).layout
    stored = all_tensors(checkpoint)
    first = [key for key in stored if layout.is_head_key(key) and ".experts.0." in key]
    assert len(first) > 1
    found = values(exported(store(checkpoint), out))
    for key in first:
        keys = [key.replace(".experts.0.", f".experts.{number}.") for number in range(MANY_EXPERTS)]
        part = PART_OF[key.split(".")[-2]]
        (stack,) = (value for name, value in found.items() if name.endswith(f"ffn_{part}_exps.weight"))
        assert np.array_equal(stack, half(torch.stack([stored[key] for key in keys]))), key


def test_q8_0_is_near_and_spares_what_it_cannot_hold(qwen: Path, tmp_path: Path) -> None:
    exact = values(exported(qwen, tmp_path / "f16"))
    reader = exported(qwen, tmp_path / "q8_0", "q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["token_embd.weight"] == kinds["blk.4.attn_q.weight"] == "Q8_0"
    assert kinds["blk.4.ffn_down.weight"] == "F16"  # rows of 48 do not fill blocks of 32
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}
    for name, value in values(reader).items():
        # Half a step of the largest block, and what its fp16 scale and the fp16 reference round.
        step = np.abs(exact[name]).max() / 127
        assert np.abs(value - exact[name]).max() <= step * 0.6, name
    assert not np.array_equal(values(reader)["blk.4.attn_q.weight"], exact["blk.4.attn_q.weight"])


def hand_made(path: Path, family_name: str, tensors: dict[str, torch.Tensor], record: str) -> dict[str, PendingTensor]:
    """Name a head of these native tensors on a tiny trunk."""
    checkpoint = open_checkpoint(checkpoint_with_head(path, family_name))
    head = NativeHead(tuple(held_tensor(key, "F32", value) for key, value in tensors.items()), (), {})
    layers = checkpoint.text_config["num_hidden_layers"]
    config = {"qk_nope_head_dim": 3, "v_head_dim": 2, "num_hidden_layers": layers}
    found = gguf_tensors(checkpoint, head, GGUF_HEADS[record], config)
    return {tensor.key: tensor for tensor in found}


def test_latent_attention_is_cut_into_keys_and_values(tmp_path: Path) -> None:
    heads = 2
    latent = 4
    kv_b = torch.randn(heads * 5, latent)
    key = "model.layers.3.self_attn.kv_b_proj.weight"
    found = hand_made(tmp_path / "tuned", "glm4_moe", {key: kv_b}, "glm4_moe_lite")
    keys = found["blk.3.attn_k_b.weight"].load()
    its_values = found["blk.3.attn_v_b.weight"].load()
    assert (keys.shape, its_values.shape) == ((heads, latent, 3), (heads, 2, latent))
    assert torch.equal(keys[1, :, 2], kv_b[5 + 2])
    assert torch.equal(its_values[1, 0], kv_b[5 + 3])


def test_an_unknown_head_tensor_is_refused_not_dropped(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"mtp\.extra\.weight: llama\.cpp's qwen35 has no tensor for it"):
        hand_made(tmp_path / "tuned", "qwen3_5", {"mtp.extra.weight": torch.zeros(2)}, "qwen3_5_text")


# Of DeepSeek V4's names the package's map knows three: the converter has a map of its own for them.
@pytest.mark.parametrize("model_type", [name for name in GGUF_HEADS if name != "deepseek_v4"])
def test_names_are_those_of_the_gguf_package(model_type: str) -> None:
    record = GGUF_HEADS[model_type]
    archs = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    # A release of the package has an architecture some time after llama.cpp does.
    theirs = gguf.get_tensor_name_map(archs.get(record.arch, gguf.MODEL_ARCH.GLM_DSA), 8)
    checked = 0
    for parameter, ours in record.names.items():
        key = parameter.replace("_correction_bias", "_correction.bias").removeprefix("layer.")
        # Nemotron's sublayers are layers of their own elsewhere.
        layer = "backbone.layers.7." if key.startswith("layers.") else "model.layers.7."
        key = FINAL_NORMS.get(str(ours)) or OF_A_RELEASE.get(key, re.sub(r"^layers\.\d\.", "", key))
        name = theirs.get_name(layer + key, try_suffixes=(".weight", ".bias"))
        if name is not None and isinstance(ours, str) and key.endswith((".weight", ".bias")):
            assert name == f"blk.7.{ours}", parameter
            checked += 1
    assert checked >= 9


# Metadata


@pytest.mark.skipif(IS_OLD, reason="an older transformers saves a second share of rotated dimensions")
def test_metadata_of_a_hybrid_trunk(qwen: Path, out: Path) -> None:
    found = metadata(exported(qwen, out))
    expected = {
        "general.architecture": "qwen35",
        "general.type": "model",
        "general.file_type": 1,
        "qwen35.block_count": 5,
        "qwen35.nextn_predict_layers": 1,
        "qwen35.embedding_length": 32,
        "qwen35.feed_forward_length": 48,
        "qwen35.attention.head_count": 2,
        "qwen35.attention.head_count_kv": 1,
        "qwen35.attention.key_length": 16,
        "qwen35.attention.recurrent_layers": [True, True, True, False, False],
        "qwen35.rope.dimension_count": 8,
        "qwen35.rope.dimension_sections": [11, 11, 10, 0],
        "qwen35.rope.freq_base": 10000.0,
        "qwen35.ssm.inner_size": 16,
        "qwen35.full_attention_interval": 4,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert found["qwen35.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert not any("expert" in key or "scaling" in key for key in found)


SIZES: dict[str, Any] = {
    **{"num_hidden_layers": 4, NUM_MODULES: 1, "vocab_size": 1000, "max_position_embeddings": 4096},
    **{
        "hidden_size": 320,
        "intermediate_size": 640,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 32,
    },
    **{"rms_norm_eps": 1e-5, "num_experts_per_tok": 6, "moe_intermediate_size": 96},
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
DESCRIBED: dict[str, Any] = {
    **{"context_length": 4096, "embedding_length": 320, "feed_forward_length": 640, "rope.freq_base": 5e5},
    **{"attention.head_count": 10, "attention.head_count_kv": 5, "attention.layer_norm_rms_epsilon": 1e-5},
    **{"attention.key_length": 32, "attention.value_length": 32},
    **{"expert_count": 64, "expert_used_count": 6, "expert_feed_forward_length": 96},
}
"""What every architecture has of these sizes."""
GROUPED: dict[str, Any] = {
    **{"n_routed_experts": 64, "n_shared_experts": 2, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    **{"first_k_dense_replace": 3, "norm_topk_prob": True},
}
OF_GROUPS: dict[str, Any] = {
    **{"expert_shared_count": 2, "expert_group_count": 8, "expert_group_used_count": 4, "expert_weights_scale": 2.5},
    **{"leading_dense_block_count": 3, "expert_weights_norm": True},
}
LATENT: dict[str, Any] = {
    **{"kv_lora_rank": 256, "q_lora_rank": 200, "qk_nope_head_dim": 48, "qk_rope_head_dim": 24, "v_head_dim": 40},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 5e5, "factor": 40.0, "original_max_position_embeddings": 2048},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707},
    },
}
OF_LATENT: dict[str, Any] = {
    # One key-value head of the latent and the rotated dimensions; the heads' own sizes are those of MLA.
    **{"vocab_size": 1000, "attention.head_count_kv": 1, "attention.kv_lora_rank": 256, "attention.q_lora_rank": 200},
    **{"attention.key_length": 280, "attention.value_length": 256, "rope.dimension_count": 24},
    **{"attention.key_length_mla": 72, "attention.value_length_mla": 40},
    **{"rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 2048},
    **{"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
    # llama.cpp's converter writes a tenth of mscale_all_dim.
    "rope.scaling.yarn_log_multiplier": pytest.approx(0.0707),
}
INDEXER: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 128, "index_topk": 2048}
OF_INDEXER: dict[str, Any] = {
    **{"attention.indexer.head_count": 16, "attention.indexer.key_length": 128, "attention.indexer.top_k": 2048}
}
SIGMOID: dict[str, Any] = {"expert_gating_func": 2}
QWEN: dict[str, Any] = {
    **{"num_experts": 64, "shared_expert_intermediate_size": 72, "layer_types": ["linear_attention", "full_attention"]},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 8},
    "linear_conv_kernel_dim": 4,
}
OF_QWEN: dict[str, Any] = {
    **{"expert_shared_feed_forward_length": 72, "attention.recurrent_layers": [True, False, False]},
    **{"full_attention_interval": 4, "rope.dimension_count": 8},
    **{"ssm.conv_kernel": 4, "ssm.group_count": 2, "ssm.inner_size": 48, "ssm.state_size": 16, "ssm.time_step_rank": 6},
}


@pytest.mark.parametrize(
    ("model_type", "config", "described"),
    [
        ("glm4_moe", GROUPED, OF_GROUPS | SIGMOID | {"rope.dimension_count": 16}),
        ("deepseek_v3", GROUPED | LATENT, OF_GROUPS | OF_LATENT | SIGMOID),
        (
            "deepseek_v3",
            GROUPED | LATENT | {"scoring_func": "softmax"},
            OF_GROUPS | OF_LATENT | {"expert_gating_func": 1},
        ),
        ("deepseek_v32", GROUPED | LATENT | INDEXER, OF_GROUPS | OF_LATENT | SIGMOID | OF_INDEXER),
        ("glm4_moe_lite", GROUPED | LATENT, OF_GROUPS | OF_LATENT),
        (
            "glm_moe_dsa",
            GROUPED | LATENT | INDEXER | {"indexer_types": ["full", "shared"]},
            OF_GROUPS | OF_LATENT | OF_INDEXER | {"attention.indexer.types": [True, False]},
        ),
        (
            "hy_v3",
            {"num_experts": 64, "num_shared_experts": 2, "router_scaling_factor": 2.8, "route_norm": False},
            SIGMOID
            | {"expert_shared_feed_forward_length": 192, "expert_weights_scale": 2.8, "expert_weights_norm": False},
        ),
        ("qwen3_5_moe_text", QWEN, OF_QWEN | {"rope.dimension_sections": [11, 11, 10, 0]}),
        ("qwen3_next", QWEN, OF_QWEN),
    ],
)
def test_a_mixture_is_described_by_all_of_its_sizes(
    model_type: str, config: dict[str, Any], described: dict[str, Any]
) -> None:
    """Each size is another number, so that none stands for another."""
    found = {name: field(SIZES | config) for name, field in GGUF_HEADS[model_type].fields.items()}
    assert {name: value for name, value in found.items() if value is not None} == DESCRIBED | described


def test_the_vocabulary_fills_the_embedding(glm: Path, out: Path) -> None:
    found = metadata(exported(glm, out))
    tokenizer = byte_tokenizer()
    tokens = found["tokenizer.ggml.tokens"]
    kinds = found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == VOCAB_SIZE
    assert tokens[tokenizer.convert_tokens_to_ids("<|im_end|>")] == "<|im_end|>"
    assert kinds[tokenizer.convert_tokens_to_ids("<|im_end|>")] == gguf.TokenType.CONTROL
    assert (tokens[-1], kinds[-1]) == (f"[PAD{VOCAB_SIZE - 1}]", gguf.TokenType.UNUSED)
    assert kinds[0] == gguf.TokenType.NORMAL
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", "glm4")
    assert tokens[found["tokenizer.ggml.bos_token_id"]] == "[gMASK]"
    assert len(found["tokenizer.ggml.merges"]) == 1


@pytest.mark.parametrize(
    ("field", "config", "message"),
    [
        ("rope.scaling.type", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' cannot be written"),
        ("expert_gating_func", {"scoring_func": "cubic"}, "router function 'cubic' is unknown to GGUF"),
    ],
)
def test_what_gguf_cannot_describe_is_refused(field: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        GGUF_HEADS["glm4_moe_lite"].fields[field](config)


# The command


def test_a_head_that_llama_cpp_does_not_draft_with_is_refused_with_the_reason(
    tmp_path: Path, out: Path, capfd: Capture
) -> None:
    checkpoint = checkpoint_with_head(tmp_path / "tuned", "exaone_moe")
    message = refusal(["export", checkpoint, "--out", out, "--gguf", "f16"], capfd)
    assert "llama.cpp does not draft with a head of K-EXAONE: keeps the head's tensors and has no graph" in message
    assert not out.exists()


def test_every_head_that_llama_cpp_drafts_with_has_a_record_and_no_other() -> None:
    served = {name for family in FAMILIES if family.serving["llama.cpp"].supported for name in family.model_types}
    assert served == GGUF_HEADS.keys()


@pytest.mark.parametrize("kind", get_args(GgufKind))
def test_rows_that_fill_no_blocks_are_stored_in_f16(kind: GgufKind) -> None:
    assert get_args(GgufKind) == KINDS
    wide, narrow = (held_tensor("a.weight", "F32", torch.randn(8, size)) for size in (64, 48))
    assert stored_type(wide, kind).name == kind.upper()
    assert stored_type(narrow, kind).name == ("F16" if kind in ("q8_0", "q4_0") else kind.upper())


# Rows of 32 numbers; wider rows than may be held come one by one.
@pytest.mark.parametrize(("most", "rows"), [(3, [1] * 5), (70, [2, 2, 1])])
def test_a_tensor_is_quantised_a_few_rows_at_a_time(
    most: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = held_tensor("weight", "F32", torch.randn(5, 32))
    (whole,) = sidecar.encoded(tensor, "q8_0")
    monkeypatch.setattr(sidecar, "_MAX_ELEMENTS", most)
    parts = list(sidecar.encoded(tensor, "q8_0"))
    assert [len(part) for part in parts] == rows
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [(float("nan"), "q8_0", "holds NaN or infinite values"), (1e5, "f16", r"too large for f16; .* Use --gguf q8_0")],
)
def test_a_weight_that_cannot_be_written_leaves_nothing_behind(
    qwen: Path, tmp_path: Path, out: Path, capfd: Capture, value: float, kind: str, reason: str
) -> None:
    rewrite(qwen, lambda tensors: tensors["mtp.fc.weight"][0, :1].fill_(value))
    message = refusal(["export", qwen, "--out", out, "--gguf", kind], capfd)
    assert re.search(reason, message), message
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]
    if "Use --gguf q8_0" in message:
        exported(qwen, out, "q8_0")


def test_a_tokenizer_larger_than_the_embedding_is_refused(qwen: Path, out: Path, capfd: Capture) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<more{number}>" for number in range(20)])
    tokenizer.save_pretrained(qwen)
    message = refusal(["export", qwen, "--out", out, "--gguf", "f16"], capfd)
    assert f"has token 278; expected ids below the embedding's {VOCAB_SIZE} rows" in message
