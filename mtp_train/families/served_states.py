"""Hidden states from vLLM: the trunks that it returns states of, and the command that serves one.

Measured with vLLM 0.32 on CPUs, in fp32 against transformers; in bfloat16 where a trunk has recurrent layers.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from mtp_train.families.engines import quoted_json
from mtp_train.families.spec import Family, RawConfig, raw_text_config

THROUGH_TRANSFORMERS: Mapping[str, str] = {
    **dict.fromkeys(
        ("ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "mixtral", "qwen2_moe"),
        "TransformersMoEForCausalLM",
    ),
    **dict.fromkeys(("cohere", "cohere2", "exaone4", "gemma2", "gemma3_text", "glm4"), "TransformersForCausalLM"),
}
"""Model types whose own class in vLLM returns no states, to vLLM's class that runs transformers' layers.
``--model-impl transformers`` also selects that class, but vLLM refuses it together with these states."""

_NO_INTERFACE = "its class in vLLM returns no states of its layers"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("bailing_hybrid", "glm_ocr_text", "step3p5", "inkling_text"), _NO_INTERFACE),
    **dict.fromkeys(("gemma3", "llava_next", "aya_vision", "internvl"), f"inside its image model, {_NO_INTERFACE}"),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), "its assistant reads keys, and vLLM returns none"),
    **dict.fromkeys(("hy_v3", "longcat_flash"), f"{_NO_INTERFACE}, and it cannot run its layers from transformers"),
}
"""Model types of a whole config or its text part to the reason why vLLM serves no states."""

LEAST_BATCHED_TOKENS, SPARE_TOKENS = 8192, 1024
"""Without chunked prefill, a step has to hold the longest text. Some releases keep slots for drafts in every step."""


def states_refusal(family: Family, config: RawConfig) -> str | None:
    """Return why vLLM serves no hidden states of a trunk, None if it does."""
    if family.trunk.streams is not None:
        return "it has several residual streams, and vLLM returns states of one"
    types = (str(one.get("model_type")) for one in (config, raw_text_config(config)))
    return next((REFUSED[one] for one in types if one in REFUSED), None)


def states_command(path: str, config: RawConfig, layers: Sequence[int], directory: str, seq_len_tokens: int) -> str:
    """Return the command that serves the hidden states of a trunk.

    Prefix caching and chunked prefill shorten states in releases before 0.23 or so.

    Args:
        layers: Numbers of layers; the state after so many is returned.
        directory: For the files of the states, on a disk that server and client share.
        seq_len_tokens: Tokens of the longest text.
    """
    length = seq_len_tokens + 1
    override = THROUGH_TRANSFORMERS.get(str(raw_text_config(config).get("model_type")))
    options = {
        "max-model-len": length,
        "max-num-batched-tokens": max(LEAST_BATCHED_TOKENS, length + SPARE_TOKENS),
        "speculative-config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
        },
        "kv-transfer-config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": directory},
        },
        **({} if override is None else {"hf-overrides": {"architectures": [override]}}),
    }
    words = [f"--{name} {quoted_json(one)}" for name, one in options.items()]
    return " ".join(["vllm serve", shlex.quote(path), "--no-enable-prefix-caching --no-enable-chunked-prefill", *words])
