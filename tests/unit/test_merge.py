from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from adapters import assert_like_peft, merged_by_peft, rename_keys, rewrite_config, write_adapter
from byte_tokenizer import byte_tokenizer
from checkpoints import (
    all_tensors,
    base_and_finetune,
    fuse_experts,
    holds,
    same,
    save_tensors,
    save_with_head,
    shard,
    wrap_as_vision_language,
)
from json_files import read_json
from mtp_train.checkpoints import files
from mtp_train.checkpoints.files import INDEX_FILE, SINGLE_FILE, open_checkpoint
from mtp_train.checkpoints.tokenizer import load_tokenizer
from mtp_train.heads.diagnose import diagnose_head
from mtp_train.runs.export import CARD_FILE
from mtp_train.trunk.load import load_trunk
from runs import BYTE_VOCAB_SIZE, Capture, document, paste, refusal as refusal_of, run_command, tree
from tiny import ALL_FAMILIES, tiny_head, tiny_trunk

LINEAR = ["q_proj", "up_proj", "in_proj_qkv"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and change five rows of 32 columns at a time, or one stacked expert: blocks begin within a tensor."""
    monkeypatch.setattr(files, "BLOCK_ELEMENTS", 5 * 32)
    monkeypatch.setattr("mtp_train.checkpoints.adapter._BLOCK_ROWS", 50)


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return tmp_path / "lora"


def with_head(directory: Path, family_name: str = "qwen3_5", *, tied: bool = False) -> Path:
    base, _ = base_and_finetune(directory, family_name, tied=tied)
    return base


def merge(checkpoint: Path, adapter: Path, out: Path) -> None:
    assert run_command("merge", checkpoint, "--adapter", adapter, "--out", out) == 0


def refusal(checkpoint: Path, adapter: Path, out: Path, capfd: Capture) -> str:
    before = tree(checkpoint)
    message = refusal_of(["merge", checkpoint, "--adapter", adapter, "--out", out], capfd)
    assert not out.exists()
    assert tree(checkpoint) == before
    return message


def assert_only_trunk_moved(out: Path, source: Path, names: str) -> None:
    """Exactly the stored tensors that match changed; files, index and all others are the source's, but for the card."""
    old = all_tensors(source)
    new = all_tensors(out)
    assert list(new) == list(old)
    changed = {key for key in old if not torch.equal(old[key], new[key])}
    assert changed == {key for key in old if re.search(names, key)} != set()
    assert all((new[key].dtype, new[key].shape) == (old[key].dtype, old[key].shape) for key in old)
    files = {path.name for path in source.iterdir()}
    assert {path.name for path in out.iterdir()} == files | {CARD_FILE}
    for name in files - {path.name for path in source.glob("*.safetensors")}:
        assert (out / name).read_bytes() == (source / name).read_bytes()


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {r"layers\.3\.self_attn\.q_proj": 2}, "alpha_pattern": {"up_proj": 5}},
    "dora": {"use_dora": True},
}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("single", "plain"),
        ("sharded", "rslora"),
        ("wrapped", "patterns"),
        ("wrapper's names", "dora"),
        ("single", "dora"),
    ],
)
def test_a_merge_is_peft_s_own_in_the_checkpoint_s_layout(
    layout: str, kind: str, base: Path, lora: Path, out: Path
) -> None:
    model = write_adapter(base, lora, target_modules=LINEAR, **SETTINGS[kind])
    if layout == "sharded":
        shard(base)
    elif layout != "single":
        wrap_as_vision_language(base)
    if layout == "wrapper's names":
        rename_keys(lora, "model.model.layers", "model.model.language_model.layers")
    merge(base, lora, out)
    assert_like_peft(out, model)
    assert_only_trunk_moved(out, base, rf"^model.*({'|'.join(LINEAR)})\.weight")
    assert diagnose_head(open_checkpoint(out)).complete


@pytest.mark.parametrize("targets", [EXPERTS, EXPERTS[:1], EXPERTS[1:2]], ids=["all", "gate_up", "down"])
def test_adapters_of_fused_experts_reach_each_expert_s_own_tensor(
    targets: list[str], tmp_path: Path, lora: Path, out: Path
) -> None:
    base = with_head(tmp_path, "glm4_moe")
    model = write_adapter(base, lora, target_parameters=targets)
    merge(base, lora, out)
    assert_like_peft(out, model)
    moved = {EXPERTS[0]: r"experts\.\d\.(gate|up)", EXPERTS[1]: r"experts\.\d\.down", EXPERTS[2]: r"gate\.weight"}
    names = "|".join(["q_proj", *(moved[target] for target in targets)])
    assert_only_trunk_moved(out, base, rf"layers\.[012]\..*({names})")


# Settings of an adapter, and the stored tensors that it moves.
MINIMAX: dict[str, tuple[dict[str, Any], str]] = {
    "linear": (
        {"target_modules": "all-linear"},
        r"self_attn.*proj\.w|mlp\.(gate|up|down)_proj|shared.*proj|fc\d\.w|linear_\d\.w",
    ),
    "dora": ({"target_modules": ["gate_up_proj"], "use_dora": True}, r"(gate|up)_proj"),
    "experts": ({"target_modules": ["o_proj"], "target_parameters": EXPERTS}, r"o_proj|\.w[123]|gate\.weight"),
    "whole": (
        {"target_modules": ["o_proj"], "modules_to_save": ["shared_experts.gate_up_proj", "lm_head"]},
        r"o_proj|shared.*(gate|up)_proj|lm_head",
    ),
}


@pytest.mark.skipif("minimax_m3" not in ALL_FAMILIES, reason="this transformers does not run MiniMax-M3")
@pytest.mark.parametrize(("settings", "moved"), MINIMAX.values(), ids=MINIMAX.keys())
def test_what_transformers_merges_is_cut_into_the_parts_that_a_release_keeps(
    settings: dict[str, Any], moved: str, tmp_path: Path, lora: Path, out: Path
) -> None:
    base = with_head(tmp_path, "minimax_m3")
    model = write_adapter(base, lora, AutoModelForImageTextToText, **settings)
    merge(base, lora, out)
    assert_like_peft(out, model)
    assert_only_trunk_moved(out, base, rf"^(?!.*\.mtp\.).*({moved})")


@pytest.mark.skipif("inkling" not in ALL_FAMILIES, reason="this transformers has no Inkling")
def test_an_adapter_finds_the_released_names_of_a_text_model_inside_a_wrapper(
    tmp_path: Path, lora: Path, out: Path
) -> None:
    base = with_head(tmp_path, "inkling")

    def loaded(path: Path) -> Any:
        return load_trunk(open_checkpoint(path), dtype=torch.float32).causal_lm

    targets = ["q_proj", "r_proj", "o_proj", "down_proj", "lm_head"]
    model = get_peft_model(loaded(base), LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    model.save_pretrained(lora, save_embedding_layers=False)
    merge(base, lora, out)
    expected = merged_by_peft(model)
    for key, value in loaded(out).state_dict().items():
        torch.testing.assert_close(value, expected[key], atol=2e-6, rtol=0, msg=key)
    assert_only_trunk_moved(out, base, r"llm\.(unembed|.*(wq_du|wr_du|wo_ud|w2_md))\.weight")


def test_stacked_experts_stay_stacked(tmp_path: Path, lora: Path, out: Path) -> None:
    base = fuse_experts(with_head(tmp_path, "glm4_moe"))
    model = write_adapter(base, lora, target_modules=None, target_parameters=EXPERTS[:2])
    merge(base, lora, out)
    assert_like_peft(out, model)
    assert_only_trunk_moved(out, base, r"layers\.[12]\.mlp\.experts\.(gate_up|down)_proj$")


def test_bf16_is_rounded_once(base: Path, lora: Path, out: Path) -> None:
    write_adapter(base, lora, target_modules=LINEAR)
    # peft warns of fields that it does not know.
    rewrite_config(lora, of_a_later_release=1)
    halved = {key: value.bfloat16() for key, value in all_tensors(base).items()}
    save_tensors(halved, base / SINGLE_FILE)
    merge(base, lora, out)
    written = all_tensors(out)
    adapter = load_file(lora / "adapter_model.safetensors")
    key = "model.layers.3.self_attn.q_proj.weight"
    name = "base_model.model.model.layers.3.self_attn.q_proj.lora_"
    delta = 3 * adapter[f"{name}B.weight"] @ adapter[f"{name}A.weight"]
    assert torch.equal(written[key], (halved[key].float() + delta).bfloat16())
    assert not torch.equal(written[key], halved[key] + delta.bfloat16())


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["lm_head", "embed_tokens", "norm"]},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    ],
    ids=["modules_to_save", "targets"],
)
@pytest.mark.parametrize("family_name", ["qwen3_5", "glm4_moe"])
def test_embedding_and_lm_head_are_merged_where_they_are_two(
    family_name: str, settings: dict[str, Any], tmp_path: Path, lora: Path, out: Path
) -> None:
    base = with_head(tmp_path, family_name)
    model = write_adapter(base, lora, **settings)
    merge(base, lora, out)
    assert_like_peft(out, model)
    # The copies that some heads keep of them follow, and nothing else of the head moves.
    checkpoint = open_checkpoint(out)
    layout = checkpoint.layout
    written = all_tensors(out)
    old = all_tensors(base)
    for key in filter(layout.is_head_key, written):
        shared = layout.shared_key(key)
        expected = old[key] if shared is None else written[layout.trunk_key(shared, written)]
        assert torch.equal(written[key], expected)


def test_tied_embedding_and_lm_head_move_together_or_not_at_all(tmp_path: Path, out: Path, capfd: Capture) -> None:
    base = with_head(tmp_path, tied=True)
    settings: dict[str, Any] = {"modules_to_save": ["embed_tokens"]}
    model = write_adapter(base, tmp_path / "tied", **settings, ensure_weight_tying=True)
    merge(base, tmp_path / "tied", out)
    assert_like_peft(out, model)
    write_adapter(base, tmp_path / "loose", **settings)
    message = refusal(base, tmp_path / "loose", tmp_path / "out2", capfd)
    assert "ties lm_head and embedding to one tensor, which cannot hold two" in message
    write_adapter(base, tmp_path / "head", target_modules=["lm_head"])
    assert "adapts lm_head.weight" in refusal(base, tmp_path / "head", tmp_path / "out3", capfd)


def test_an_adapter_of_one_expert_s_own_layer_finds_it(tmp_path: Path, lora: Path, out: Path, capfd: Capture) -> None:
    """As engines and older peft store them, where a release stores experts apart."""
    base = with_head(tmp_path, "glm4_moe")
    write_adapter(base, lora)
    adapter = lora / "adapter_model.safetensors"
    down = torch.randn(4, 32)
    up = torch.randn(16, 4)
    name = "base_model.model.model.layers.1.mlp.experts.2.up_proj"
    own = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_tensors({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, adapter)
    expected = all_tensors(base)[own] + 3 * up @ down
    merge(base, lora, out)
    torch.testing.assert_close(all_tensors(out)[own], expected)
    assert_only_trunk_moved(out, base, r"layers\.1\.mlp\.experts\.2\.up_proj\.weight$")
    fuse_experts(base)
    assert f"adapts {own}, for which" in refusal(base, lora, tmp_path / "out2", capfd)


def test_trained_biases_are_merged(tmp_path: Path, lora: Path, out: Path) -> None:
    trunk = tiny_trunk("glm4_moe")
    trunk.causal_lm.config.attention_bias = True
    biased = type(trunk.causal_lm)(trunk.causal_lm.config)
    biased.load_state_dict(trunk.causal_lm.state_dict(), strict=False)
    biased.save_pretrained(tmp_path / "base")
    model = write_adapter(tmp_path / "base", lora, bias="all")
    merge(tmp_path / "base", lora, out)
    assert_like_peft(out, model)
    assert_only_trunk_moved(out, tmp_path / "base", r"q_proj\.weight|[qkv]_proj\.bias$")


@pytest.mark.parametrize("file", ["full.safetensors", "non_lora_state_dict.bin", "trainable_params.pt"])
def test_full_weights_beside_an_adapter_are_refused_and_what_a_trainer_resumes_from_is_not(
    file: str, base: Path, lora: Path, out: Path, capfd: Capture
) -> None:
    write_adapter(base, lora)
    for name in ("optimizer.pt", "rng_state_3.pth", "training_args.bin", "adapter_model.bin"):
        torch.save({}, lora / name)
    merge(base, lora, tmp := out.with_name("alone"))
    assert holds(all_tensors(tmp), {"model.norm.weight": all_tensors(base)["model.norm.weight"]})
    norm = {"base_model.model.model.norm.weight": torch.ones(32)}
    (save_file if file.endswith(".safetensors") else torch.save)(norm, lora / file)
    message = refusal(base, lora, out, capfd)
    assert f"{lora / file}: weights beside the adapter, which peft does not load" in message
    assert message in refusal_of(["generate", base, "--adapter", lora, "--prompt", "x"], capfd)


def test_an_adapter_without_a_tensor_is_refused(base: Path, lora: Path, out: Path, capfd: Capture) -> None:
    write_adapter(base, lora)
    save_file({}, lora / "adapter_model.safetensors")
    assert f"{lora / 'adapter_model.safetensors'}: holds no tensor" in refusal(base, lora, out, capfd)


def test_shards_without_a_change_are_links(tmp_path: Path, lora: Path, out: Path, capfd: Capture) -> None:
    base = shard(with_head(tmp_path), 8)
    write_adapter(base, lora)
    report = document(["merge", base, "--adapter", lora, "--out", out], capfd)
    key = "model.layers.3.self_attn.q_proj.weight"
    touched = read_json(base / INDEX_FILE)["weight_map"][key]
    for file in base.glob("*.safetensors"):
        assert (out / file.name).samefile(file) == (file.name != touched)
    assert report["content"] == f"1 tensors of {base} adapted, in 1 of 8 files"
    assert report["trunk"] == f"{len(all_tensors(base)) - 15} tensors, all bytes of {len(all_tensors(base)) - 16} equal"


def test_the_head_is_kept_and_a_probe_proposed(base: Path, lora: Path, out: Path, capfd: Capture) -> None:
    write_adapter(base, lora, target_modules=LINEAR)
    merge(base, lora, out)
    assert "with the adapter `lora` merged into them" in (out / CARD_FILE).read_text()
    printed = capfd.readouterr().out
    assert "bit for bit, and was not trained for the merged trunk" in printed
    probing = f"mtp-train probe {out} --from {base}"
    assert probing in printed
    found = document(["inspect", out, "--base", base], capfd)
    assert (found["status"], found["stale"], found["cure"]) == ("healthy", True, probing)


def test_a_stripped_checkpoint_is_merged_and_told_to_graft(
    finetune: Path, lora: Path, out: Path, capfd: Capture
) -> None:
    write_adapter(finetune, lora, target_modules=LINEAR)
    report = document(["merge", finetune, "--adapter", lora, "--out", out], capfd)
    assert report["notes"] == [f"It has no head, like {finetune}."]
    assert report["cure"] == f"mtp-train graft {out} --from BASE --out {out}-mtp"
    assert not diagnose_head(open_checkpoint(out)).found_keys
    assert "head" not in (out / CARD_FILE).read_text()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "peft_type is 'IA3'; expected a LoRA adapter"),
    "activated": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is [1]; expected"),
    "no number": ({"r": "4"}, "adapter_config.json: peft cannot read it (TypeError"),
    "wrong rank": ({"r": 3}, "expected lora_A, lora_B of rank 3"),
}


@pytest.mark.parametrize(("fields", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_merged_is_refused(
    fields: dict[str, Any], reason: str, base: Path, lora: Path, out: Path, capfd: Capture
) -> None:
    write_adapter(base, lora, target_modules=LINEAR)
    rewrite_config(lora, **fields)
    assert reason in refusal(base, lora, out, capfd)


def test_an_adapter_that_does_not_fit_is_refused_by_the_tensor_s_name(
    base: Path, tmp_path: Path, lora: Path, out: Path, capfd: Capture
) -> None:
    write_adapter(base, lora)
    for number, (old, new, reason) in enumerate(
        [
            ("layers.3", "layers.7", "adapts model.layers.7.self_attn.q_proj.weight, for which"),
            ("q_proj", "k_proj", "adapts model.layers.3.self_attn.k_proj.weight as [64, 32], but in"),
            ("model.model.layers.3", "model.mtp.layers.0", "adapts mtp.layers.0.self_attn.q_proj.weight, which"),
        ]
    ):
        shutil.copytree(lora, tmp_path / f"lora{number}")
        rename_keys(tmp_path / f"lora{number}", old, new)
        assert reason in refusal(base, tmp_path / f"lora{number}", out, capfd)


def test_weights_that_overflow_are_refused(base: Path, tmp_path: Path, lora: Path, out: Path, capfd: Capture) -> None:
    write_adapter(base, lora, target_modules=LINEAR)
    trunk = tiny_trunk("qwen3_5")
    half = save_with_head(trunk, tiny_head(trunk), tmp_path / "half")
    tensors = {key: value.half() for key, value in load_file(half / SINGLE_FILE).items()}
    save_tensors(tensors, half / SINGLE_FILE)
    rewrite_config(lora, lora_alpha=1e8)
    assert "would contain NaN or infinite values in F16" in refusal(half, lora, out, capfd)


def with_tokens(adapter: Path, *tokens: str, template: str | None = None) -> Any:
    """Save a tokenizer with more tokens beside an adapter, as trainers do; return it."""
    tokenizer = byte_tokenizer() if template is None else byte_tokenizer(template)
    tokenizer.add_tokens([*tokens])
    tokenizer.save_pretrained(adapter)
    return tokenizer


@pytest.mark.parametrize(("tied", "whole"), [(False, None), (True, None), (False, ["embed_tokens", "lm_head"])])
def test_a_vocabulary_resized_before_training_is_resized_as_peft_does(
    tied: bool, whole: list[str] | None, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    base, _ = base_and_finetune(tmp_path, "qwen3_5", tied=tied, vocab_size=BYTE_VOCAB_SIZE)
    shard(base)
    byte_tokenizer().save_pretrained(base)
    before = tree(base)
    rows = BYTE_VOCAB_SIZE + 2
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(rows)
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=whole, init_lora_weights=False)
    wrapped = get_peft_model(model, lora)
    wrapped.save_pretrained(tmp_path / "lora", save_embedding_layers=True)
    tokenizer = with_tokens(tmp_path / "lora", "<step>", "<|call|>")
    merge(base, tmp_path / "lora", out)
    assert "Its tokenizer is the adapter's: " in capfd.readouterr().out
    assert_like_peft(out, wrapped)
    config = read_json(out / "config.json")
    assert config == read_json(base / "config.json") | {"vocab_size": rows}
    assert AutoTokenizer.from_pretrained(out)("<step><|call|>")["input_ids"] == [rows - 2, rows - 1]
    assert tokenizer("<step><|call|>")["input_ids"] == [rows - 2, rows - 1]
    written = open_checkpoint(out)
    old = all_tensors(base)
    assert written.index is not None
    assert written.index["metadata"]["total_size"] == written.num_bytes
    unchanged = {key for key, value in all_tensors(out).items() if torch.equal(value, old[key])}
    ends = {"model.embed_tokens.weight"} if tied else {"model.embed_tokens.weight", "lm_head.weight"}
    assert old.keys() - unchanged == {*ends, "model.layers.3.self_attn.q_proj.weight"}
    assert tree(base) == before
    # Unmerged it does not fit, and the message names the command above.
    message = refusal_of(["generate", base, "--adapter", tmp_path / "lora", "--prompt", "x"], capfd)
    command = f"mtp-train merge {base} --adapter {tmp_path / 'lora'} --out {base}-merged"
    assert command in message
    assert same(all_tensors(paste(command)), all_tensors(out))


def test_tokens_without_an_embedding_are_refused(tmp_path: Path, lora: Path, out: Path, capfd: Capture) -> None:
    base, _ = base_and_finetune(tmp_path, "qwen3_5", vocab_size=BYTE_VOCAB_SIZE)
    byte_tokenizer().save_pretrained(base)
    write_adapter(base, lora)
    with_tokens(lora, "<step>")
    for argv in (
        ["merge", base, "--adapter", lora, "--out", out],
        ["generate", base, "--adapter", lora, "--prompt", "x"],
    ):
        message = refusal_of(argv, capfd)
        assert f"has the id {BYTE_VOCAB_SIZE} for '<step>' (1 such tokens), and {base} has {BYTE_VOCAB_SIZE}" in message
    # A matrix over the vocabulary that the adapter lacks cannot be resized with the other.
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(BYTE_VOCAB_SIZE + 1)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    wrapped.save_pretrained(tmp_path / "half", save_embedding_layers=True)
    file = tmp_path / "half" / "adapter_model.safetensors"
    save_tensors({key: value for key, value in load_file(file).items() if "lm_head" not in key}, file)
    assert "has another matrix over it" in refusal(base, tmp_path / "half", out, capfd)


@pytest.mark.parametrize("part", ["tokenizer", "template alone", "the base's own"])
def test_the_adapter_s_tokenizer_and_template_are_used_and_said(
    part: str, lora: Path, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    base, _ = base_and_finetune(tmp_path, "qwen3_5", vocab_size=BYTE_VOCAB_SIZE + 2)
    byte_tokenizer().save_pretrained(base)
    write_adapter(base, lora)
    template = "{{ messages[0].content }}!"
    if part == "tokenizer":
        with_tokens(lora, "<step>", "<|call|>", template=template)
    elif part == "template alone":
        (lora / "chat_template.jinja").write_text(template)
    else:
        byte_tokenizer().save_pretrained(lora)
    merge(base, lora, out)
    assert ("Its tokenizer is the adapter's" in capfd.readouterr().out) == (part != "the base's own")
    text = "<step><|call|>"
    merged = AutoTokenizer.from_pretrained(out)
    unmerged = load_tokenizer(open_checkpoint(base), lora)
    num_tokens = 2 if part == "tokenizer" else len(text)
    assert len(merged(text)["input_ids"]) == len(unmerged(text)["input_ids"]) == num_tokens
    assert merged.chat_template == unmerged.chat_template
    assert (merged.chat_template == template) == (part != "the base's own")
