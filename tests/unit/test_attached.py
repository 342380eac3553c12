"""What trunks that a head can be attached to have of their own: scales, bounds, frequencies, layers of many kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from checkpoints import holds, save_stripped, save_tensors, set_fields
from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_train.checkpoints.files import SINGLE_FILE, open_checkpoint
from mtp_train.errors import UnsupportedModelError
from mtp_train.families.mechanisms.trained_length import short_factors
from mtp_train.heads.attention import masked_attention
from mtp_train.heads.build import FreshStart, build_head, fresh_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk, load_trunk
from plain_decoding import plain_greedy
from tiny import random_tokens, tiny_head, tiny_trunk
from tiny_configs import tiny_config

SCALED = ("granite", "cohere", "cohere2")
BOUNDED = ("gemma2", "gemma3_text")
LIMIT = 1024
"""Where the tiny Phi's frequencies change."""


def random_head(name: str, path: Path) -> MtpHead:
    checkpoint = open_checkpoint(save_stripped(tiny_trunk(name), path))
    config = text_config_of(checkpoint)
    return build_head(fresh_plan(checkpoint, config, "auto", seed=1), config, dtype=torch.float32)


@pytest.mark.parametrize("family_name", [*SCALED, *BOUNDED])
@torch.inference_mode()
def test_logits_are_the_models_own(family_name: str) -> None:
    trunk = tiny_trunk(family_name)
    tokens_1T = random_tokens(9)
    expected = trunk.causal_lm(tokens_1T).logits
    hidden = trunk.hidden(tokens_1T)
    torch.testing.assert_close(trunk.logits(hidden), expected, atol=1e-5, rtol=1e-5)
    # The losses compute these logits, without the bound of Trunk.project.
    if family_name in SCALED:
        torch.testing.assert_close(trunk.normed(hidden) @ trunk.lm_head_VD.T, expected, atol=1e-5, rtol=1e-5)
    raw = hidden @ trunk.lm_head_VD.T
    assert (raw - expected).abs().max() > 0.5, "the scale or bound does nothing here, and proves nothing"


@pytest.mark.parametrize("mask", ["causal", "window", None])
def test_scores_are_bounded_as_gemma_2_bounds_them(mask: str | None) -> None:
    trunk = tiny_trunk("gemma2")
    attention = trunk.layers[0].self_attn
    query, key, value = (
        torch.randn(2, heads, 5, 16, generator=torch.Generator().manual_seed(heads + offset))
        for heads, offset in ((2, 0), (1, 0), (1, 1))
    )
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    if mask == "window":
        seen = seen.triu(-1)
    added = torch.zeros(5, 5).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    expected, _ = eager_attention_forward(attention, query, key, value, added, scaling=0.7, softcap=1.5)
    given = None if mask is None else seen[None, None]
    ours, _ = masked_attention(attention, query, key, value, given, scaling=0.7, softcap=1.5)
    torch.testing.assert_close(ours, expected)
    unbounded, _ = masked_attention(attention, query, key, value, given, scaling=0.7)
    assert (unbounded - expected).abs().max() > 1e-2


@torch.inference_mode()
def test_a_trunk_with_bounded_scores_never_runs_without_the_bounds() -> None:
    trunk = tiny_trunk("gemma2")
    for implementation in ("eager", "sdpa"):
        model = AutoModelForCausalLM.from_config(tiny_config("gemma2"))
        model.load_state_dict(trunk.causal_lm.state_dict())
        model.config._attn_implementation = implementation
        loaded = Trunk(model.eval(), trunk.family)
        assert torch.equal(loaded.hidden(random_tokens(9)), trunk.hidden(random_tokens(9)))


def test_a_random_start_leaves_biases_at_zero_and_norms_at_one(tmp_path: Path) -> None:
    experts = random_head("gpt_oss", tmp_path / "gpt_oss").blocks[0].layer.mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        assert experts.get_parameter(f"{name}_bias").ndim == 2
        assert not experts.get_parameter(f"{name}_bias").any()
        assert experts.get_parameter(name).std() > 0
    attention = random_head("cohere", tmp_path / "cohere").blocks[0].layer.self_attn
    assert attention.q_norm.weight.ndim == 2
    assert torch.equal(attention.q_norm.weight, torch.ones_like(attention.q_norm.weight))


def pack_experts(path: Path) -> Path:
    """Put experts in MXFP4 into the place of a tiny gpt-oss's own."""
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(path / SINGLE_FILE)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_in, num_out = tensors.pop(key).shape
        size = (num_experts, num_out, num_in // 32)
        tensors[f"{key}_blocks"] = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(122, 126, size, generator=generator, dtype=torch.uint8)
    save_tensors(tensors, path / SINGLE_FILE)
    set_fields(path, {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}})
    return path


@pytest.mark.parametrize("start", ["copy_last_layer", "random"])
def test_a_gpt_oss_as_released_gets_a_head(start: FreshStart, tmp_path: Path) -> None:
    trunk = tiny_trunk("gpt_oss")
    trunk.config.intermediate_size = 32
    trunk = Trunk(AutoModelForCausalLM.from_config(trunk.config), trunk.family)
    checkpoint = open_checkpoint(pack_experts(save_stripped(trunk, tmp_path / "trunk")))
    config = text_config_of(checkpoint)
    loaded = load_trunk(checkpoint, dtype=torch.float32)
    head = build_head(fresh_plan(checkpoint, config, "auto", seed=1, start=start), config, dtype=torch.float32)
    theirs = loaded.layers[1].state_dict()
    ours = head.blocks[0].layer.state_dict()
    assert holds(ours, theirs) == (start == "copy_last_layer")
    (result,) = SpeculativeDecoder(loaded, HeadDrafting(head.eval()), 2, ()).generate([[1, 2, 3]], 12)
    assert list(result.token_ids) == plain_greedy(loaded, [1, 2, 3], 12, ())


@torch.inference_mode()
def test_short_texts_have_the_frequencies_that_transformers_gives_them() -> None:
    trunk = tiny_trunk("phi3")
    tokens_1T = random_tokens(LIMIT)
    stock = Trunk(tiny_trunk("phi3").model, trunk.family)
    stock.decoder.rotary_emb.config = stock.config
    stock.decoder._forward_pre_hooks.clear()
    assert torch.equal(trunk.hidden(tokens_1T), stock.hidden(tokens_1T))
    # One token more, and transformers takes the other set for all of them.
    longer_1T = random_tokens(LIMIT + 1)
    assert (stock.hidden(longer_1T)[:, :9] - trunk.hidden(longer_1T[:, :LIMIT])[:, :9]).abs().max() > 1e-2


@torch.inference_mode()
def test_texts_beyond_the_switch_are_refused_wherever_they_are_read() -> None:
    trunk = tiny_trunk("phi3")
    with pytest.raises(UnsupportedModelError, match=rf"{LIMIT + 1} tokens; expected at most {LIMIT} .*seq_len_tokens"):
        trunk.hidden(random_tokens(LIMIT + 1))
    prompt = random_tokens(LIMIT - 20).flatten().tolist()
    decoder = SpeculativeDecoder(trunk, HeadDrafting(tiny_head(trunk)), 3, ())
    (result,) = decoder.generate([prompt], 20)
    assert list(result.token_ids) == plain_greedy(trunk, prompt, 20, ())
    with pytest.raises(UnsupportedModelError, match="rotary frequencies"):
        decoder.generate([prompt], 40)


def test_a_head_has_the_same_frequencies_wherever_it_drafts() -> None:
    trunk = tiny_trunk("phi3")
    head = tiny_head(trunk)
    assert head.rotary is not None
    near, far = (head.rotary(torch.zeros(1), torch.tensor([[5, last]]))[0][0, 0] for last in (6, LIMIT + 7))
    assert torch.equal(near, far)
    stock = trunk.family.classes.cls("Phi3RotaryEmbedding")(config=trunk.config)
    near, far = (stock(torch.zeros(1), torch.tensor([[5, last]]))[0][0, 0] for last in (6, LIMIT + 7))
    assert not torch.equal(near, far)
    plain = tiny_trunk("llama").config
    assert short_factors(plain) is plain
