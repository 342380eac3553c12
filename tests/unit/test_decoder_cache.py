"""Rollback of every kind of state, window by window."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from mtp_inference.cache import RecurrentLayer, RollbackCache
from mtp_inference.recurrent import gated_delta_per_token, per_token_states
from mtp_train.errors import UnsupportedModelError
from mtp_train.families import FAMILIES
from mtp_train.heads.trunk import Trunk
from scripted import STATE_TOLERANCE, random_prompt, state_errors
from tiny import FAMILY_NAMES, tiny_trunk

STATE_KINDS = {"qwen3_5": ["conv", "keys", "recurrent", "values"], "glm4_moe": ["keys", "values"]}


def gated_delta_inputs(key_heads: int) -> dict[str, Tensor]:
    """Two rows of five tokens, four value heads."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "query": draw(2, 5, key_heads, 8),
        "key": draw(2, 5, key_heads, 8),
        "value": draw(2, 5, 4, 6),
        "g": -draw(2, 5, 4).abs(),
        "beta": draw(2, 5, 4).sigmoid(),
        "initial_state": draw(2, 4, 8, 6),
    }


def first_tokens(inputs: dict[str, Tensor], num_tokens: int) -> dict[str, Tensor]:
    return {name: part if name == "initial_state" else part[:, :num_tokens] for name, part in inputs.items()}


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("stock_name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_per_token_kernel_equals_the_stock_kernel_after_every_token(
    stock_name: str, key_heads: int, normalise: bool
) -> None:
    inputs = gated_delta_inputs(key_heads)
    if not normalise:
        inputs["key"] = inputs["key"] / 3
    output, states = gated_delta_per_token(**inputs, use_qk_l2norm_in_kernel=normalise)
    stock = getattr(modeling_qwen3_5, stock_name)
    for num_tokens in range(1, 6):
        given = first_tokens(inputs, num_tokens)
        # transformers 5.17 takes heads that are repeated already.
        for name in ("query", "key"):
            given[name] = given[name].repeat_interleave(4 // key_heads, dim=2)
        expected, state = stock(**given, output_final_state=True, use_qk_l2norm_in_kernel=normalise)
        torch.testing.assert_close(output[:, :num_tokens], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[num_tokens - 1], state, rtol=1e-5, atol=1e-5)


def test_per_token_kernel_keeps_fp32_states_for_bf16_inputs() -> None:
    inputs = {name: part.bfloat16() for name, part in gated_delta_inputs(4).items()}
    output, states = gated_delta_per_token(**inputs, use_qk_l2norm_in_kernel=True)
    assert (output.dtype, states.dtype) == (torch.bfloat16, torch.float32)


def test_the_stock_kernel_is_back_after_an_error() -> None:
    stock = modeling_qwen3_5.torch_chunk_gated_delta_rule
    family = next(family for family in FAMILIES if family.name == "qwen3_5")

    def fail_inside() -> None:
        with per_token_states(family):
            assert modeling_qwen3_5.torch_chunk_gated_delta_rule is gated_delta_per_token
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is stock


def run_window(trunk: Trunk, prompt: list[int], window: list[int]) -> RollbackCache:
    """Prefill a prompt and run a window after it, not yet committed."""
    cache = RollbackCache(trunk.config)
    with torch.inference_mode():
        trunk.hidden(torch.tensor([prompt]), cache=cache)
        cache.commit(num_rejected=0)
        with per_token_states(trunk.family):
            trunk.hidden(torch.tensor([window]), cache=cache)
    return cache


@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 3, 4, 70])
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_commit_leaves_the_state_of_a_plain_forward(family_name: str, num_prompt_tokens: int) -> None:
    trunk = tiny_trunk(family_name)
    prompt, window = random_prompt(num_prompt_tokens), random_prompt(4, seed=1)
    for num_rejected in range(4):
        cache = run_window(trunk, prompt, window)
        cache.commit(num_rejected)
        errors = state_errors(cache, trunk, [*prompt, *window[: 4 - num_rejected]])
        assert sorted(errors) == STATE_KINDS[family_name]
        assert max(errors.values()) < STATE_TOLERANCE, (num_rejected, errors)


@pytest.mark.parametrize("broken", ["conv", "recurrent", "keys"])
def test_a_state_that_is_not_rolled_back_shows(broken: str) -> None:
    trunk = tiny_trunk("qwen3_5")
    prompt, window = random_prompt(6), random_prompt(4, seed=1)
    cache, untouched = (run_window(trunk, prompt, window) for _ in range(2))
    cache.commit(num_rejected=2)
    for layer, stale in zip(cache.layers, untouched.layers, strict=True):
        if isinstance(layer, RecurrentLayer):
            if broken == "conv":
                layer.conv_states[0] = stale.conv_states[0][..., -4:]
            elif broken == "recurrent":
                layer.recurrent_states[0] = stale.recurrent_states[0]
        elif broken == "keys":
            layer.keys, layer.values = stale.keys, stale.values
    errors = state_errors(cache, trunk, [*prompt, *window[:2]])
    assert errors[broken] > 1000 * STATE_TOLERANCE, errors


def test_rejecting_without_per_token_states_is_refused() -> None:
    trunk = tiny_trunk("qwen3_5")
    cache = RollbackCache(trunk.config)
    with torch.inference_mode():
        for tokens in (random_prompt(5), random_prompt(3, seed=1)):
            trunk.hidden(torch.tensor([tokens]), cache=cache)
            if len(tokens) == 5:
                cache.commit(num_rejected=0)
    with pytest.raises(RuntimeError, match=r"1 tokens to drop, 1 states kept; .* per_token_states"):
        cache.commit(num_rejected=1)


def test_a_trunk_with_sliding_windows_is_refused() -> None:
    config = MistralConfig(num_hidden_layers=2, sliding_window=8)
    with pytest.raises(UnsupportedModelError, match=r"trunk layer 0: .*DynamicSlidingWindowLayer"):
        RollbackCache(config)
