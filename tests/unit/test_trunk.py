from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from checkpoints import (
    WRAPPER_CONFIG,
    WRAPPER_CONFIG_4,
    all_tensors,
    base_and_finetune,
    holds,
    own_head,
    save_tensors,
    save_with_head,
    set_fields,
    wrap_as_vision_language,
)
from json_files import read_json, write_json
from mtp_inference import SpeculativeDecoder
from mtp_train import inspect
from mtp_train.checkpoints.files import Checkpoint, open_checkpoint
from mtp_train.errors import CheckpointError, UnsupportedModelError
from mtp_train.families import Convention, family_named
from mtp_train.heads.diagnose import text_config_of, trunk_config
from mtp_train.trunk.load import Trunk, load_trunk
from plain_decoding import plain_greedy
from tiny import ALL_FAMILIES, tiny_head, tiny_trunk
from tolerances import rounding

TOKENS_1T = torch.arange(9)[None]


def load(path: Path, adapter: Path | None = None) -> Trunk:
    return load_trunk(open_checkpoint(path), dtype=torch.float32, adapter=adapter)


def test_a_transformers_too_old_for_a_family_is_named_before_it_reads_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = family_named("hy_v4")
    newer = replace(family, trunk=replace(family.trunk, needs_transformers="99.1"))
    monkeypatch.setattr(Checkpoint, "family", newer)
    with pytest.raises(UnsupportedModelError, match=r"expected 99\.1 or later, which Hunyuan 4 needs"):
        trunk_config(Checkpoint(tmp_path, {}, None, {}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family_name", "wrapper"),
    [("qwen3_5", WRAPPER_CONFIG), *([("qwen4_exp", WRAPPER_CONFIG_4)] if "qwen4_exp" in ALL_FAMILIES else [])],
)
def test_a_vision_language_wrapper_gives_its_text_model(
    family_name: str, wrapper: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    base, _ = base_and_finetune(tmp_path, family_name, tied=tied)
    shutil.copytree(base, tmp_path / "wrapped")
    plain = load(base)
    wrapped = load(wrap_as_vision_language(tmp_path / "wrapped", wrapper))
    expected = plain.logits(plain.hidden(TOKENS_1T))
    assert torch.equal(wrapped.logits(wrapped.hidden(TOKENS_1T)), expected)
    assert not any(parameter.requires_grad for parameter in plain.parameters())
    assert not any(module.training for module in plain.modules())


def test_an_adapter_is_applied_unmerged_and_frozen(base: Path, tmp_path: Path) -> None:
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False)
    )
    model.save_pretrained(tmp_path / "adapter")
    expected = model.eval()(TOKENS_1T).logits
    bare = load(base)
    adapted = load(base, tmp_path / "adapter")
    logits = adapted.logits(adapted.hidden(TOKENS_1T))
    torch.testing.assert_close(logits, expected)
    assert not torch.allclose(bare.logits(bare.hidden(TOKENS_1T)), expected)
    assert torch.equal(adapted.lm_head_VD, bare.lm_head_VD)
    assert torch.equal(adapted.embed(TOKENS_1T), bare.embed(TOKENS_1T))
    assert not any(parameter.requires_grad for parameter in adapted.parameters())


@pytest.mark.skipif("longcat_flash" not in ALL_FAMILIES, reason="this transformers does not run LongCat-Flash")
@pytest.mark.parametrize("as_released", [False, True])
@torch.inference_mode()
def test_experts_that_do_nothing_need_no_weights(as_released: bool, tmp_path: Path) -> None:
    trunk = tiny_trunk("longcat_flash")
    save_with_head(trunk, tiny_head(trunk), tmp_path)
    tensors = all_tensors(tmp_path)
    idle = [f".experts.{trunk.config.n_routed_experts + number}." for number in range(trunk.config.zero_expert_num)]
    kept = {key: value for key, value in tensors.items() if not any(name in key for name in idle)}
    assert len(kept) < len(tensors)
    save_tensors(kept if as_released else tensors, tmp_path / "model.safetensors")
    loaded = load(tmp_path)
    assert torch.equal(loaded.logits(loaded.hidden(TOKENS_1T)), trunk.logits(trunk.hidden(TOKENS_1T)))


@pytest.mark.skipif("nemotron_h" not in ALL_FAMILIES, reason="this transformers does not run Nemotron-H")
@torch.inference_mode()
def test_time_steps_have_no_bound_that_engines_do_not_know() -> None:
    free = tiny_trunk("nemotron_h")
    config = copy.deepcopy(free.config)
    config.time_step_min = 0.5
    stock = AutoModelForCausalLM.from_config(config).eval()
    stock.load_state_dict(free.causal_lm.state_dict())
    expected = free.logits(free.hidden(TOKENS_1T))
    assert not torch.allclose(stock(TOKENS_1T).logits, expected, atol=1e-3)
    trunk = Trunk(stock, free.family)
    assert torch.equal(trunk.logits(trunk.hidden(TOKENS_1T)), expected)


@pytest.mark.skipif("inkling" not in ALL_FAMILIES, reason="this transformers has no Inkling")
@pytest.mark.parametrize("real_vocab", [None, 50])
@torch.inference_mode()
def test_states_are_scaled_for_the_lm_head_alone_and_rows_that_pad_it_are_left_out(real_vocab: int | None) -> None:
    model = tiny_trunk("inkling").causal_lm
    model.config.unpadded_vocab_size = real_vocab
    trunk = Trunk(model, tiny_trunk("inkling").family)
    hidden = trunk.hidden(TOKENS_1T)
    expected = model(TOKENS_1T).logits
    torch.testing.assert_close(trunk.logits(hidden), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(trunk.normed(hidden) @ trunk.lm_head_VD.T, expected, atol=1e-5, rtol=0)
    assert torch.equal(trunk.head_input(hidden, Convention()), trunk.decoder(TOKENS_1T).last_hidden_state)
    (result,) = SpeculativeDecoder(trunk, tiny_head(trunk), 3, ()).generate([[1, 2, 3]], 12)
    assert list(result.token_ids) == plain_greedy(trunk, [1, 2, 3], 12, ())


@torch.inference_mode()
def test_the_last_states_of_several_prompts_read_the_lm_head_once() -> None:
    trunk = tiny_trunk("qwen3_5")
    last_31D = trunk.hidden(torch.arange(12).view(3, 4))[:, -1:]
    with FlopCounterMode(display=False) as counter:
        logits_31V = trunk.logits(last_31D)
    assert set(counter.get_flop_counts()["Global"]) == {torch.ops.aten.mm}
    with FlopCounterMode(display=False) as control:
        expected_31V = torch.nn.functional.linear(last_31D, trunk.lm_head_VD)
    assert set(control.get_flop_counts()["Global"]) == {torch.ops.aten.bmm}
    torch.testing.assert_close(logits_31V, expected_31V, atol=rounding(expected_31V, last_31D.shape[-1]), rtol=0)


@pytest.mark.skipif("qwen4_exp" not in ALL_FAMILIES, reason="this transformers has no Qwen4-Exp")
@torch.inference_mode()
def test_a_whole_text_chooses_the_pools_of_keys_that_transformers_chooses() -> None:
    trunk = tiny_trunk("qwen4_exp")
    stock = AutoModelForCausalLM.from_config(trunk.config).eval()
    stock.load_state_dict(trunk.causal_lm.state_dict())
    mask_BT = torch.ones(2, 9, dtype=torch.int64)
    mask_BT[1, 6:] = 0
    tokens_BT = TOKENS_1T.expand(2, -1)
    kept_BT = mask_BT.bool()
    expected = stock(tokens_BT, attention_mask=mask_BT).logits[kept_BT]
    found = trunk.logits(trunk.hidden(tokens_BT))[kept_BT]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for layer in trunk.decoder.layers:
        if layer.layer_type == "indexed_attention":
            layer.self_attn.indexer.token_budget = 99
    assert (trunk.logits(trunk.hidden(tokens_BT))[kept_BT] - expected).abs().max() > 1e-3


@pytest.mark.skipif("dots3_note" not in ALL_FAMILIES, reason="this transformers has no dots3-note")
@torch.inference_mode()
def test_a_release_may_keep_the_text_model_s_fields_beside_those_of_its_other_parts(tmp_path: Path) -> None:
    trunk = tiny_trunk("dots3_note")
    save_with_head(trunk, tiny_head(trunk), tmp_path)
    config = read_json(tmp_path / "config.json")
    for part in ("vision", "audio"):
        config[f"{part}_config"] = {"model_type": f"dots3_note_{part}_encoder", "adapter_out_dim": 32}
    sliding = {f"swa_{name}": value for name, value in config.pop("per_layer_config")["0"].items()}
    write_json(tmp_path / "config.json", {**config, **sliding, "model_type": "dots3_note"})
    loaded = load(tmp_path)
    assert torch.equal(loaded.logits(loaded.hidden(TOKENS_1T)), trunk.logits(trunk.hidden(TOKENS_1T)))
    head = own_head(open_checkpoint(tmp_path))
    assert holds(head.state_dict(), tiny_head(trunk).state_dict())


def test_a_config_that_transformers_refuses_is_named(base: Path) -> None:
    set_fields(base, {"rms_norm_eps": "wide"})
    with pytest.raises(CheckpointError, match=r"config\.json: transformers rejects it \(.*Restore the"):
        text_config_of(open_checkpoint(base))


@pytest.mark.parametrize("name", ["flash_attention_2", "nobody/kernel", 5])
def test_a_stored_choice_of_attention_is_not_followed(name: object, tmp_path: Path) -> None:
    """Such a field is left over from the machine that trained the model; what is computed is the same."""
    base, _ = base_and_finetune(tmp_path, "glm4_moe")
    expected = load(base).hidden(TOKENS_1T)
    set_fields(base, {"_attn_implementation": name})
    assert torch.equal(load(base).hidden(TOKENS_1T), expected)
    assert inspect(base).status == "healthy"
