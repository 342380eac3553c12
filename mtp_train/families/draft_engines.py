"""Which engines draft with a head that stands in a directory of its own, and for which trunks.

Read in the sources of vLLM 0.32, SGLang 0.5.23 and llama.cpp 0c1e570.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mtp_train.families.engines import EngineSupport, engine_table, no

DraftKind = Literal["eagle", "eagle3", "medusa"]
LEAST_TRUNK_LAYERS = 7
"""With fewer, two of the three states that engines give an EAGLE-3 head (after 2 layers, half of them and all but 3)
are one and the same."""

_EVERYWHERE = {"llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"}
_LATENT = {"deepseek_v3", "deepseek_v32", "glm_moe_dsa"}
# Families, the states between whose layers an engine hands to a head.
_STATES_IN_VLLM = frozenset({*_EVERYWHERE, *_LATENT, "qwen2", "olmo2", "mimo", "mimo_v2", "nemotron_h"})
_STATES_IN_SGLANG = frozenset(
    {*_EVERYWHERE, *_LATENT, "qwen2", "gemma3_text", "glm4_moe", "glm4_moe_lite", "exaone_moe"}
    | {"longcat_flash", "minimax_m3"}
)
_STATES_IN_LLAMA_CPP = frozenset({*_EVERYWHERE, "mimo_v2", "nemotron_h"})
# Families whose last states suit EAGLE and Medusa heads in vLLM, and EAGLE's in SGLang. Gemma 3 scales its embeddings,
# which an EAGLE head would be given as they are stored.
_LAST_STATES_IN_VLLM = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "olmo2", *_LATENT, "mimo", "nemotron_h"}
)
_LAST_STATES_IN_SGLANG = _LAST_STATES_IN_VLLM - {"olmo2"}

_VLLM = "vllm serve TRUNK"
_SGLANG = "python -m sglang.launch_server --model-path TRUNK"
_SGLANG_DRAFTS = (
    "--speculative-draft-model-path {path} --speculative-num-steps {depth} --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens {depth_plus_1}"
)
_EAGLE_IN_VLLM = EngineSupport(True, f"{_VLLM} --speculative-config {{vllm_eagle}}", plain=_VLLM)
_EAGLE_IN_SGLANG = EngineSupport(True, f"{_SGLANG} --speculative-algorithm EAGLE {_SGLANG_DRAFTS}", plain=_SGLANG)
_EAGLE3_IN_VLLM = EngineSupport(True, f"{_VLLM} --speculative-config {{vllm_eagle3}}", plain=_VLLM)
_EAGLE3_IN_SGLANG = EngineSupport(True, f"{_SGLANG} --speculative-algorithm EAGLE3 {_SGLANG_DRAFTS}", plain=_SGLANG)
_EAGLE3_IN_LLAMA_CPP = EngineSupport(
    True,
    "python convert_hf_to_gguf.py {path} --target-model-dir TRUNK --outfile draft.gguf && "
    "llama-server -m TRUNK.gguf -md draft.gguf --spec-type draft-eagle3 --spec-draft-n-max {depth}",
    plain="llama-server -m TRUNK.gguf",
)
_MEDUSA_IN_VLLM = EngineSupport(
    True, f"{_VLLM} --speculative-config {{vllm_medusa}}  # vLLM 0.32; 0.33 has no Medusa", plain=_VLLM
)
_UNVERIFIED = EngineSupport(None, "not verified for this model")
_NO_STATES = no("hands no head the states between this model's layers")
_NO_EAGLE = no("has no EAGLE")
_NO_MEDUSA = no("has no Medusa")


def draft_engines(kind: DraftKind, family_name: str) -> Mapping[str, EngineSupport]:
    """Return the engines' table of a head of this kind, for trunks of a family.

    ``{path}`` in the commands is the draft model, TRUNK its trunk.
    """

    def where(names: frozenset[str], served: EngineSupport, otherwise: EngineSupport) -> EngineSupport:
        return served if family_name in names else otherwise

    if kind == "medusa":
        in_vllm = where(_LAST_STATES_IN_VLLM, _MEDUSA_IN_VLLM, _UNVERIFIED)
        return engine_table(vllm=in_vllm, sglang=_NO_MEDUSA, llama_cpp=_NO_MEDUSA, transformers=_NO_MEDUSA)
    if kind == "eagle":
        return engine_table(
            vllm=where(_LAST_STATES_IN_VLLM, _EAGLE_IN_VLLM, _UNVERIFIED),
            sglang=where(_LAST_STATES_IN_SGLANG, _EAGLE_IN_SGLANG, _UNVERIFIED),
            llama_cpp=_NO_EAGLE,
            transformers=_NO_EAGLE,
        )
    return engine_table(
        vllm=where(_STATES_IN_VLLM, _EAGLE3_IN_VLLM, _NO_STATES),
        sglang=where(_STATES_IN_SGLANG, _EAGLE3_IN_SGLANG, _NO_STATES),
        llama_cpp=where(_STATES_IN_LLAMA_CPP, _EAGLE3_IN_LLAMA_CPP, _NO_STATES),
        transformers=_NO_EAGLE,
    )
