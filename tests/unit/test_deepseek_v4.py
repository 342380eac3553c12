"""DeepSeek V4: a release's names and those of transformers' own save, and what the head does with streams."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_quantised import FP8, configure, to_fp8
from torch import Tensor

from adapters import write_adapter
from checkpoints import all_tensors, base_and_finetune, save_with_head
from mtp_inference import HeadDrafting, SpeculativeDecoder, compare, plain_greedy
from mtp_train.checkpoints.files import SINGLE_FILE, open_checkpoint
from mtp_train.cli.main import main
from mtp_train.heads.build import build_head, graft_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import unroll
from mtp_train.trunk.load import Trunk, load_trunk
from runs import document
from scripted import random_prompt
from tiny import tiny_head, tiny_trunk

NAME = "deepseek_v4"
Capture = pytest.CaptureFixture[str]


def as_released(path: Path) -> Path:
    """Rename the trunk's tensors to what releases call them, and vLLM's loader looks for."""
    renamed = {}
    for key, value in load_file(path / SINGLE_FILE).items():
        key = key.removeprefix("model.").replace("embed_tokens.", "embed.")
        renamed[key.replace("hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")] = value
    save_file(renamed, path / SINGLE_FILE, metadata={"format": "pt"})
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
    tensors, plain = all_tensors(as_released(path)), {}
    for key in [key for key in tensors if re.search(r"(_proj|\.w\w+)\.weight$", key)]:
        pack = to_fp4 if ".experts." in key else to_fp8
        tensors[key], tensors[key.removesuffix("weight") + "scale"], plain[key] = pack(tensors[key])
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})
    configure(path, FP8)
    return plain


def loaded(path: Path) -> tuple[Trunk, MtpHead]:
    checkpoint = open_checkpoint(path)
    trunk = load_trunk(path, checkpoint.family, dtype=torch.float32)
    return trunk, build_head(
        graft_plan(checkpoint, checkpoint, "auto"), text_config_of(checkpoint), dtype=torch.float32
    ).eval()


@torch.inference_mode()
def test_a_release_s_head_goes_to_a_fine_tune_that_transformers_saved(tmp_path: Path, capfd: Capture) -> None:
    base, finetune = base_and_finetune(tmp_path, NAME)
    as_released(base)
    assert {"embed.weight", "head.weight", "hc_head_fn", "mtp.0.emb.tok_emb.weight"} <= all_tensors(base).keys()
    healthy = document(["inspect", base], capfd)
    assert (healthy["status"], healthy["runs_here"]) == ("healthy", "yes")
    serves = healthy["serves"]
    assert serves["vllm"].startswith("vllm serve")
    assert "sglang.launch_server" in serves["sglang"]
    assert serves["llama.cpp"].startswith("no: its converter takes routed experts in FP4 alone")
    stripped = document(["inspect", finetune, "--base", base], capfd)
    assert stripped["status"] == "declared_but_missing"
    # Every parameter was moved; a table that routes by token and three biases of routers are none.
    num_tensors = len(all_tensors(finetune))
    assert stripped["trunk_changed"]["share_of_tensors"] == pytest.approx((num_tensors - 4) / num_tensors)
    document(["graft", finetune, "--from", base, "--out", tmp_path / "out"], capfd)
    written, tuned, original = (all_tensors(path) for path in (tmp_path / "out", finetune, base))
    own = {key for key in original if key.startswith("mtp.")}
    serves = document(["inspect", tmp_path / "out"], capfd)["serves"]
    no = "no: transformers saved it under names"
    assert all(serves[name].startswith(no) for name in ("vllm", "sglang", "llama.cpp"))
    assert "KeyError" in serves["vllm"]
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
        assert compare(result.token_ids, plain_greedy(trunk, prompt, 20, ()), trunk, prompt).verdict == "identical"
        texts.append((result.token_ids, result.accepted_per_pos))
    assert texts[0] == texts[1]


def test_a_release_s_experts_in_fp4_and_its_other_matrices_in_fp8_are_read(tmp_path: Path, capfd: Capture) -> None:
    base, finetune = base_and_finetune(tmp_path, NAME)
    plain = packed(base)
    released = document(["inspect", base], capfd)
    assert released["status"] == "healthy"
    assert "convert_hf_to_gguf.py" in released["serves"]["llama.cpp"]
    assert "--mtp" in released["serves"]["llama.cpp"]
    document(["graft", finetune, "--from", base, "--out", tmp_path / "out"], capfd)
    written = all_tensors(tmp_path / "out")
    head = {key: value for key, value in plain.items() if key.startswith("mtp.")}
    assert {"mtp.0.e_proj.weight", "mtp.0.attn.wkv.weight", "mtp.0.ffn.experts.3.w2.weight"} <= head.keys()
    assert all(torch.equal(written[key], value.bfloat16()) for key, value in head.items())
    assert not any(key.endswith(".scale") for key in written)
    assert document(["inspect", tmp_path / "out"], capfd)["status"] == "healthy"


def test_a_retrained_head_on_a_release_s_trunk_is_served_from_our_file(tmp_path: Path, capfd: Capture) -> None:
    base, _ = base_and_finetune(tmp_path, NAME)
    plain = packed(base)
    tensors = {key: value for key, value in all_tensors(base).items() if not re.match(r"mtp\..*\.scale", key)}
    tensors |= {key: value for key, value in plain.items() if key.startswith("mtp.")}
    save_file(tensors, base / SINGLE_FILE, metadata={"format": "pt"})
    command = document(["inspect", base], capfd)["serves"]["llama.cpp"]
    assert f"mtp-train export {base} --out model-head --gguf f16" in command
    assert "-md model-head/mtp-*.gguf" in command
    assert "--mtp " not in command


def test_an_adapter_of_the_lm_head_and_of_an_indexer_is_merged(tmp_path: Path) -> None:
    base, _ = base_and_finetune(tmp_path, NAME)
    write_adapter(as_released(base), tmp_path / "lora", target_modules=["lm_head", "weights_proj"])
    assert main(["merge", str(base), "--adapter", str(tmp_path / "lora"), "--out", str(tmp_path / "out")]) == 0
    before, after = all_tensors(base), all_tensors(tmp_path / "out")
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    indexers = {f"layers.{layer}.attn.indexer.weights_proj.weight" for layer in (1, 3)}
    assert changed == {"head.weight", "mtp.0.head.weight", *indexers}


def spoil_mixer(trunk: Trunk, head: MtpHead) -> None:
    head.blocks[0].mixer = trunk.decoder.hc_head


def spoil_streams(trunk: Trunk, head: MtpHead) -> None:
    fuse = head.blocks[0].fuse
    head.blocks[0].fuse = lambda hidden_BTD, embed_BTD: fuse(hidden_BTD.roll(embed_BTD.shape[-1], -1), embed_BTD)


def spoil_rotary(trunk: Trunk, head: MtpHead) -> None:
    rotary: Any = copy.deepcopy(head.rotary)
    rotary.main_inv_freq = rotary.compress_inv_freq
    head.rotary = rotary


@pytest.mark.parametrize("spoil", [spoil_mixer, spoil_streams, spoil_rotary])
@torch.inference_mode()
def test_the_head_s_own_mixer_streams_in_order_and_plain_positions_all_count(spoil: Any) -> None:
    """What the head must not be confused with gives other states: the trunk's mixer, other streams, other rotations."""
    trunk = tiny_trunk(NAME)
    head = tiny_head(trunk)
    tokens_1T = torch.tensor([random_prompt(11)])

    def states() -> list[Tensor]:
        rows = {"positions_BT": torch.arange(11)[None], "document_BT": torch.zeros_like(tokens_1T)}
        hidden_1TD = trunk.head_input(trunk.hidden(tokens_1T), head.convention)
        assert hidden_1TD.shape[-1] == 2 * trunk.config.hidden_size
        return unroll(head, hidden_1TD, tokens_1T, trunk.embed, num_depths=2, **rows)

    before = states()
    spoil(trunk, head)
    for found, expected in zip(states(), before, strict=True):
        assert found.shape[-1] == trunk.config.hidden_size
        assert (found - expected).abs().max() > 1e-2
