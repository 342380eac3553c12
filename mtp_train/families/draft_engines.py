"""Engine support for EAGLE, EAGLE-3 and Medusa heads, which are separate draft models, by trunk.

Sources: vLLM 0.32 and 0.33, SGLang 0.5.23 and llama.cpp 0c1e570.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.engines import EngineSupport, complete, engine_table, no
from mtp_train.families.spec import HeadKind, RawConfig

LEAST_TRUNK_LAYERS = 7
"""Least number of layers with which the three states that an engine passes to an EAGLE-3 head differ: the states after
2 layers, after half of the layers, and after all but 3."""

_EVERYWHERE = {"llama", "mistral", "qwen3", "qwen3_moe", "gpt_oss"}
_HYBRID = {"qwen3_5", "qwen3_5_moe", "qwen3_next"}
# Families that vLLM serves through transformers' own classes.
_BACKEND = {"olmo2", "olmo3", "smollm3", "seed_oss", "hunyuan_v1_dense"}
# Families and vision-language wrappers for which an engine passes the states between the trunk's layers to a head.
_STATES_IN_VLLM = frozenset({*_EVERYWHERE, *_HYBRID, *_BACKEND, "ministral3", "mistral3", "qwen2", "phi3", "granite"})
_STATES_IN_SGLANG = frozenset({*_EVERYWHERE, *_HYBRID, "ministral3", "qwen2", "phi3", "gemma3_text", "gemma3"})
_STATES_IN_LLAMA_CPP = frozenset({*_EVERYWHERE, *_HYBRID, "mixtral"})
# Families for which an engine passes the last hidden state to a head. Trunks that scale their embeddings (Gemma,
# Granite) are left out: an EAGLE head would get them unscaled. EAGLE-3 norms the embeddings first.
_LAST_STATES_IN_SGLANG = frozenset({*_EVERYWHERE, "ministral3", "qwen2", "phi3"})
_LAST_STATES_IN_VLLM = _LAST_STATES_IN_SGLANG | _BACKEND

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
_NO_STATES = no("does not pass the states between this model's layers to a head")
_NO_EAGLE = no("has no EAGLE")
_NO_MEDUSA = no("has no Medusa")


def draft_engines(kind: HeadKind, trunk: str) -> Mapping[str, EngineSupport]:
    """Return the engines' table of a head of this kind.

    In the commands ``{path}`` is the draft model and TRUNK its trunk.

    Args:
        kind: The head's architecture.
        trunk: The family's name, or the wrapper's model type for a trunk inside of a vision-language model.
    """

    def where(names: frozenset[str], served: EngineSupport, otherwise: EngineSupport) -> EngineSupport:
        return served if trunk in names else otherwise

    if kind == "medusa":
        in_vllm = where(_LAST_STATES_IN_VLLM, _MEDUSA_IN_VLLM, _UNVERIFIED)
        return complete(engine_table(vllm=in_vllm, sglang=_NO_MEDUSA, llama_cpp=_NO_MEDUSA, transformers=_NO_MEDUSA))
    if kind == "eagle":
        return complete(
            engine_table(
                vllm=where(_LAST_STATES_IN_VLLM, _EAGLE_IN_VLLM, _UNVERIFIED),
                sglang=where(_LAST_STATES_IN_SGLANG, _EAGLE_IN_SGLANG, _UNVERIFIED),
                llama_cpp=_NO_EAGLE,
                transformers=_NO_EAGLE,
            )
        )
    return complete(
        engine_table(
            vllm=where(_STATES_IN_VLLM, _EAGLE3_IN_VLLM, _NO_STATES),
            sglang=where(_STATES_IN_SGLANG, _EAGLE3_IN_SGLANG, _NO_STATES),
            llama_cpp=where(_STATES_IN_LLAMA_CPP, _EAGLE3_IN_LLAMA_CPP, _NO_STATES),
            transformers=_NO_EAGLE,
        )
    )


def require_trunk_layers(kind: HeadKind, text_config: RawConfig, *, where: str) -> None:
    """Check that a trunk has enough layers for the states that engines pass to a head of this kind.

    Raises:
        UnsupportedModelError: It has too few layers.
    """
    # Other kinds need no number of layers, and some configs lack num_hidden_layers.
    num_layers = int(text_config["num_hidden_layers"]) if kind == "eagle3" else LEAST_TRUNK_LAYERS
    if num_layers < LEAST_TRUNK_LAYERS:
        raise UnsupportedModelError(
            f"{where}: {num_layers} layers; expected {LEAST_TRUNK_LAYERS} or more: with fewer, two of the three states "
            "that engines pass to an EAGLE-3 head are the same. Attach a head of another kind."
        )
