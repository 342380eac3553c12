"""The GGUF file of a head holds what llama.cpp's own converter would write, and nothing half written is left."""

from __future__ import annotations

import re
import shutil
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import pytest
import torch

from byte_tokenizer import byte_tokenizer
from checkpoints import all_tensors, rewrite
from gguf_files import VOCAB_SIZE, checkpoint_with_head, exported, metadata, values
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.checkpoints.gguf import sidecar
from mtp_train.checkpoints.gguf.architectures import GGUF_HEADS
from mtp_train.checkpoints.gguf.sidecar import GgufKind, gguf_tensors, stored_type, trunk_names, write_tensors
from mtp_train.checkpoints.native import NativeHead
from mtp_train.checkpoints.writing import PendingTensor, held_tensor
from mtp_train.cli.main import KINDS
from mtp_train.errors import CheckpointError, UnsupportedModelError
from mtp_train.families import FAMILIES
from mtp_train.heads.diagnose import layout_of
from mtp_train.runs.display import quiet_progress
from runs import refusal
from tiny import ALL_FAMILIES, IS_OLD

SERVED = [one.name for one in FAMILIES if set(one.model_types) & GGUF_HEADS.keys() and one.name in ALL_FAMILIES]
# Which means another norm in a trunk's layer.
NORMS_OF_THE_HEAD = ("norm.weight", "layers.1.norm.weight")
Capture = pytest.CaptureFixture[str]


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
def test_no_weight_is_lost_or_added(family_name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_with_head(tmp_path / "tuned", family_name)
    opened = open_checkpoint(checkpoint)
    offset = GGUF_HEADS[opened.text_config["model_type"]].norm_offset
    layout, stored = layout_of(opened), all_tensors(checkpoint)
    expected = [
        value.float() + offset if "norm" in key else value.float()
        for key, value in stored.items()
        if key in trunk_names(layout) or layout.is_head_key(key)
    ]
    found = np.concatenate([value.ravel() for value in values(exported(checkpoint, tmp_path / "out")).values()])
    wanted = torch.cat([value.flatten() for value in expected]).numpy()
    assert np.array_equal(np.sort(found.astype(np.float16)), np.sort(wanted.astype(np.float16)))


def test_a_head_kept_beside_the_trunk_becomes_one_more_block(qwen: Path, tmp_path: Path) -> None:
    stored, found = all_tensors(qwen), values(exported(qwen, tmp_path / "out"))
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


def test_a_head_kept_as_a_layer_stacks_its_experts(glm: Path, tmp_path: Path) -> None:
    stored, found = all_tensors(glm), values(exported(glm, tmp_path / "out"))
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
    found = gguf_tensors(checkpoint, layout_of(checkpoint), head, GGUF_HEADS[record], config)
    return {tensor.key: tensor for tensor in found}


def test_latent_attention_is_cut_into_keys_and_values(tmp_path: Path) -> None:
    heads, latent = 2, 4
    kv_b = torch.randn(heads * 5, latent)
    key = "model.layers.3.self_attn.kv_b_proj.weight"
    found = hand_made(tmp_path / "tuned", "glm4_moe", {key: kv_b}, "glm4_moe_lite")
    keys, its_values = found["blk.3.attn_k_b.weight"].load(), found["blk.3.attn_v_b.weight"].load()
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
    for native, ours in record.names.items():
        key = native.replace("{expert}.", "").replace("_correction_bias", "_correction.bias")
        # Nemotron's sublayers are layers of their own elsewhere.
        layer = "backbone.layers.7." if key.startswith("layers.") else "model.layers.7."
        name = theirs.get_name(layer + re.sub(r"^layers\.\d\.", "", key), try_suffixes=(".weight", ".bias"))
        if name is not None and native not in NORMS_OF_THE_HEAD and key.endswith((".weight", ".bias")):
            assert name == f"blk.7.{ours}", native
            checked += 1
    assert checked >= 9


# Metadata


@pytest.mark.skipif(IS_OLD, reason="an older transformers saves a second share of rotated dimensions")
def test_metadata_of_a_hybrid_trunk(qwen: Path, tmp_path: Path) -> None:
    found = metadata(exported(qwen, tmp_path / "out"))
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


def test_the_vocabulary_fills_the_embedding(glm: Path, tmp_path: Path) -> None:
    found, tokenizer = metadata(exported(glm, tmp_path / "out")), byte_tokenizer()
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
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


def test_a_head_that_llama_cpp_does_not_draft_with_is_refused_with_the_reason(tmp_path: Path, capfd: Capture) -> None:
    checkpoint = checkpoint_with_head(tmp_path / "tuned", "exaone_moe")
    message = refusal(["export", checkpoint, "--out", tmp_path / "out", "--gguf", "f16"], capfd)
    assert "llama.cpp does not draft with a head of K-EXAONE: keeps the head's tensors and has no graph" in message
    assert not (tmp_path / "out").exists()


def test_every_head_that_llama_cpp_drafts_with_has_a_record_and_no_other() -> None:
    served = {name for family in FAMILIES if family.serving["llama.cpp"].supported for name in family.model_types}
    assert served == GGUF_HEADS.keys()


@pytest.mark.parametrize(
    ("kind", "error"), list(zip(get_args(GgufKind)[5:], (0.02, 0.04, 0.08, 0.1, 0.1, 0.16, 0.35), strict=True))
)
def test_llama_cpp_quantises_what_the_gguf_package_only_reads(kind: GgufKind, error: float, tmp_path: Path) -> None:
    """Where it is installed. Blocks have 256 columns, IQ4_NL's 32."""
    assert get_args(GgufKind) == KINDS
    matrix = torch.randn(8, 512)
    tensors = [held_tensor(f"{size}.weight", "F32", matrix[:, :size]) for size in (512, 64, 48)]
    narrow = "IQ4_NL" if kind == "iq4_nl" else "Q8_0"
    assert [stored_type(one, kind).name for one in tensors] == [kind.upper(), narrow, "F16"]
    if not (shutil.which("llama-quantize") or find_spec("llama_cpp") or find_library("ggml-base")):
        pytest.skip("no llama.cpp is installed")
    path = tmp_path / "new.gguf"
    write_tensors(gguf.GGUFWriter(path, "qwen35"), tensors, kind, quiet_progress())
    found = values(gguf.GGUFReader(path))
    assert 0 < np.square(found["512.weight"] - matrix.numpy()).mean() ** 0.5 < error


def test_without_llama_cpp_its_kinds_are_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for finder in ("shutil.which", "importlib.util.find_spec", "ctypes.util.find_library"):
        monkeypatch.setattr(finder, lambda _name: None)
    monkeypatch.setattr(sidecar, "_quantiser", sidecar._quantiser.__wrapped__)
    path, tensor = tmp_path / "new.gguf", held_tensor("512.weight", "F32", torch.randn(8, 512))
    with pytest.raises(CheckpointError, match=r"neither beside llama-quantize .* pip install llama-cpp-python"):
        write_tensors(gguf.GGUFWriter(path, "qwen35"), [tensor], "q4_k", quiet_progress())
    assert not path.exists()


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
    qwen: Path, tmp_path: Path, capfd: Capture, value: float, kind: str, reason: str
) -> None:
    rewrite(qwen, lambda tensors: tensors["mtp.fc.weight"][0, :1].fill_(value))
    message = refusal(["export", qwen, "--out", tmp_path / "out", "--gguf", kind], capfd)
    assert re.search(reason, message), message
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]
    if "Use --gguf q8_0" in message:
        exported(qwen, tmp_path / "out", "q8_0")


def test_a_tokenizer_larger_than_the_embedding_is_refused(qwen: Path, tmp_path: Path, capfd: Capture) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<more{number}>" for number in range(20)])
    tokenizer.save_pretrained(qwen)
    message = refusal(["export", qwen, "--out", tmp_path / "out", "--gguf", "f16"], capfd)
    assert f"has token 278; expected ids below the embedding's {VOCAB_SIZE} rows" in message
