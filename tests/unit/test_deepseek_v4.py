"""DeepSeek V4: a release's names and those of transformers' own save, and what the head does with streams."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_quantised import FP8, to_fp8
from torch import Tensor

from adapters import write_adapter
from checkpoints import all_tensors, base_and_finetune, holds, own_head, save_tensors, save_with_head, set_fields
from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_train.checkpoints import files
from mtp_train.checkpoints.files import SINGLE_FILE, open_checkpoint
from mtp_train.checkpoints.quantised import read_plain_in_blocks
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk, load_trunk
from plain_decoding import plain_greedy
from runs import Capture, document, run_command
from scripted import random_prompt
from tiny import tiny_head, tiny_trunk

NAME = "deepseek_v4"


def as_released(path: Path) -> Path:
    """Rename the trunk's tensors to what releases call them, and vLLM's loader looks for."""
    renamed = {}
    for key, value in load_file(path / SINGLE_FILE).items():
        key = key.removeprefix("model.").replace("embed_tokens.", "embed.")
        renamed[key.replace("hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")] = value
    save_tensors(renamed, path / SINGLE_FILE)
    return path


def to_fp4(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix with two values in a byte, a scale for 32 values of a row, and what both stand for."""
    grid_16 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid_16 = torch.cat([grid_16, -grid_16])
    parts = []
    for block in value.split(32, dim=1):
        scale = torch.exp2((block.abs().amax(1, keepdim=True) / 6).log2().ceil())
        codes = ((block / scale)[..., None] - grid_16).abs().argmin(-1)
        parts.append((codes[:, 0::2] | codes[:, 1::2] << 4, scale, grid_16[codes] * scale))
    packed, scales, plain = (torch.cat(one, dim=1) for one in zip(*parts, strict=True))
    return packed.to(torch.uint8).view(torch.int8), scales.to(torch.float8_e8m0fnu), plain


def packed(path: Path) -> dict[str, Tensor]:
    """Store experts in FP4 and other matrices in FP8, as releases have them; return what they stand for."""
    tensors = all_tensors(as_released(path))
    plain = {}
    for key in [key for key in tensors if re.search(r"(_proj|\.w\w+)\.weight$", key)]:
        pack = to_fp4 if ".experts." in key else to_fp8
        tensors[key], tensors[key.removesuffix("weight") + "scale"], plain[key] = pack(tensors[key])
    save_tensors(tensors, path / SINGLE_FILE)
    set_fields(path, {"quantization_config": FP8})
    return plain


def loaded(path: Path) -> tuple[Trunk, MtpHead]:
    checkpoint = open_checkpoint(path)
    trunk = load_trunk(checkpoint, dtype=torch.float32)
    return trunk, own_head(checkpoint)


@torch.inference_mode()
def test_a_release_s_head_goes_to_a_fine_tune_that_transformers_saved(
    tmp_path: Path, out: Path, capfd: Capture
) -> None:
    base, finetune = base_and_finetune(tmp_path, NAME)
    as_released(base)
    assert {"embed.weight", "head.weight", "hc_head_fn", "mtp.0.emb.tok_emb.weight"} <= all_tensors(base).keys()
    healthy = document(["inspect", base], capfd)
    assert (healthy["status"], healthy["runs_here"]) == ("healthy", "yes")
    serves = healthy["serves"]
    assert serves["vllm"].startswith("vllm serve")
    assert "sglang.launch_server" in serves["sglang"]
    assert "in FP4 alone" in serves["llama.cpp"]
    stripped = document(["inspect", finetune, "--base", base], capfd)
    assert stripped["status"] == "declared_but_missing"
    # Every parameter was moved; a table that routes by token and three biases of routers are none.
    num_tensors = len(all_tensors(finetune))
    assert stripped["trunk_changed"]["share_of_tensors"] == pytest.approx((num_tensors - 4) / num_tensors)
    document(["graft", finetune, "--from", base, "--out", out], capfd)
    written, tuned, original = (all_tensors(path) for path in (out, finetune, base))
    own = {key for key in original if key.startswith("mtp.")}
    assert written.keys() == tuned.keys() | own
    shared = {"mtp.0.emb.tok_emb.weight": "model.embed_tokens.weight", "mtp.0.head.weight": "head.weight"}
    for key, value in written.items():
        assert torch.equal(value, tuned[shared.get(key, key)] if key not in own - shared.keys() else original[key]), key


@torch.inference_mode()
def test_a_release_decodes_and_says_what_transformers_save_says(tmp_path: Path) -> None:
    random_trunk = tiny_trunk(NAME)
    save_with_head(random_trunk, tiny_head(random_trunk), tmp_path / "base")
    texts = []
    for names in (lambda path: path, as_released):
        trunk, head = loaded(names(tmp_path / "base"))
        prompt = random_prompt(9)
        (result,) = SpeculativeDecoder(trunk, HeadDrafting(head), 2, ()).generate([prompt], 20)
        assert list(result.token_ids) == plain_greedy(trunk, prompt, 20, ())
        texts.append((result.token_ids, result.accepted_per_pos))
    assert texts[0] == texts[1]


def test_every_block_of_a_packed_weight_is_read_with_its_own_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In FP8 and in FP4, of which a byte stands for two elements."""
    base, _ = base_and_finetune(tmp_path, NAME)
    plain = packed(base)
    monkeypatch.setattr(files, "BLOCK_ELEMENTS", 5 * 32)
    checkpoint = open_checkpoint(base)
    for key, value in plain.items():
        blocks = [*read_plain_in_blocks(checkpoint, key)]
        assert len(blocks) > 3
        assert max(block.numel() for block in blocks) <= 5 * 32
        assert torch.equal(torch.cat(blocks), value), key


def test_a_release_s_experts_in_fp4_and_its_other_matrices_in_fp8_are_read(
    tmp_path: Path, out: Path, capfd: Capture
) -> None:
    base, finetune = base_and_finetune(tmp_path, NAME)
    plain = packed(base)
    released = document(["inspect", base], capfd)
    assert released["status"] == "healthy"
    assert f"mtp-train export {base} --out model-head --gguf f16" in released["serves"]["llama.cpp"]
    document(["graft", finetune, "--from", base, "--out", out], capfd)
    written = all_tensors(out)
    head = {key: value for key, value in plain.items() if key.startswith("mtp.")}
    assert {"mtp.0.e_proj.weight", "mtp.0.attn.wkv.weight", "mtp.0.ffn.experts.3.w2.weight"} <= head.keys()
    assert holds(written, {key: value.bfloat16() for key, value in head.items()})
    assert not any(key.endswith(".scale") for key in written)
    assert document(["inspect", out], capfd)["status"] == "healthy"


def test_an_adapter_of_the_lm_head_and_of_an_indexer_is_merged(tmp_path: Path, out: Path) -> None:
    base, _ = base_and_finetune(tmp_path, NAME)
    write_adapter(as_released(base), tmp_path / "lora", target_modules=["lm_head", "weights_proj"])
    assert run_command("merge", base, "--adapter", tmp_path / "lora", "--out", out) == 0
    before = all_tensors(base)
    after = all_tensors(out)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    indexers = {f"layers.{layer}.attn.indexer.weights_proj.weight" for layer in (1, 3)}
    assert changed == {"head.weight", "mtp.0.head.weight", *indexers}
