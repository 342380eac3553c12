"""Which engines draft with a head that stands in a directory of its own, and for which trunks.

Read in the sources of vLLM 0.32 and 0.33, SGLang 0.5.23 and llama.cpp 0c1e570.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtp_train.families.engines import EngineSupport, engine_table, no
from mtp_train.families.spec import HeadKind

LEAST_TRUNK_LAYERS = 7
"""With fewer, two of the three states that engines give an EAGLE-3 head (after 2 layers, half of them and all but 3)
are one and the same."""

_EVERYWHERE = {"llama", "mistral", "qwen3", "qwen3_moe"}
_HYBRID = {"qwen3_5", "qwen3_5_moe", "qwen3_next"}
# Families, the states between whose layers an engine hands to a head.
_STATES_IN_VLLM = frozenset({*_EVERYWHERE, *_HYBRID, "qwen2", "olmo2"})
_STATES_IN_SGLANG = frozenset({*_EVERYWHERE, *_HYBRID, "qwen2", "gemma3_text"})
_STATES_IN_LLAMA_CPP = frozenset({*_EVERYWHERE, *_HYBRID})
# Families whose last states an engine hands to a head. Gemma 3 scales its embeddings: an EAGLE head gets them unscaled.
_LAST_STATES_IN_VLLM = frozenset({*_EVERYWHERE, "qwen2", "olmo2"})
_LAST_STATES_IN_SGLANG = frozenset({*_EVERYWHERE, "qwen2"})

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


def draft_engines(kind: HeadKind, family_name: str) -> Mapping[str, EngineSupport]:
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
