"""The command that serves a trunk's hidden states, and the trunks that vLLM serves no states of."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_train.families.registry import family_for
from mtp_train.families.served_states import states_command, states_refusal
from mtp_train.runs.served_states import StatesSource
from tiny import tiny_trunk

DIRECTORY = "/shared/the states"


def options(model_type: str, seq_len_tokens: int = 9000) -> tuple[list[str], dict[str, str]]:
    words = shlex.split(states_command("a trunk", {"model_type": model_type}, [2, 40], DIRECTORY, seq_len_tokens))
    named = words[words.index("--max-model-len") :]
    return words, dict(zip(named[::2], named[1::2], strict=True))


def test_the_command_names_layers_and_directory_and_holds_the_longest_text_in_one_step() -> None:
    words, named = options("llama")
    assert words[:5] == ["vllm", "serve", "a trunk", "--no-enable-prefix-caching", "--no-enable-chunked-prefill"]
    draft = json.loads(named["--speculative-config"])["draft_model_config"]
    assert draft == {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 40]}}
    transfer = json.loads(named["--kv-transfer-config"])
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": DIRECTORY}
    # One more token than the text: the server has to generate one.
    assert (named["--max-model-len"], named["--max-num-batched-tokens"]) == ("9001", "10025")
    assert options("llama", 100)[1]["--max-num-batched-tokens"] == "8192"
    assert "--hf-overrides" not in named


@pytest.mark.parametrize(
    ("model_type", "runs_as"), [("glm4_moe", "TransformersMoEForCausalLM"), ("glm4", "TransformersForCausalLM")]
)
def test_a_class_without_states_is_served_through_transformers(model_type: str, runs_as: str) -> None:
    assert json.loads(options(model_type)[1]["--hf-overrides"]) == {"architectures": [runs_as]}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama"}, None),
        ({"model_type": "glm4_moe"}, None),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}, None),
        ({"model_type": "deepseek_v4"}, "several residual streams"),
        ({"model_type": "hy_v3"}, "returns no states of its layers"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "inside its image model"),
    ],
    ids=str,
)
def test_a_trunk_without_served_states_is_refused_with_the_reason(
    config: dict[str, object], reason: str | None
) -> None:
    found = states_refusal(family_for(config, where="trunk"), config)
    assert found is None if reason is None else reason in (found or "")


def test_fetched_states_do_not_depend_on_what_training_computes_meanwhile() -> None:
    trunk = tiny_trunk("glm4_moe")
    server: Any = SimpleNamespace(layers=[2])
    source = StatesSource(server, trunk, (), [], trunk.last_norm())
    states_TLD = torch.randn(5, 1, trunk.state_width)
    expected_TD = trunk.of_last_layer(states_TLD[:, 0])
    with trunk.computing_in(torch.bfloat16):
        assert torch.equal(source.hidden(states_TLD), expected_TD)
