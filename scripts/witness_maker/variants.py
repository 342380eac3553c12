"""Change the shape of a family for another kind of head, or for an engine that supports few sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from witness_maker.chain import TRAINED_DEPTHS
from witness_maker.shapes import WitnessShape


def beside_a_trunk(shape: WitnessShape, kind: str) -> WitnessShape:
    """Return a shape for a head of another kind than ``mtp``: enough layers for EAGLE-3, and a block for each depth."""
    return replace(
        shape,
        fields={**shape.fields, "num_hidden_layers": 8},
        num_modules=TRAINED_DEPTHS if kind == "medusa" else 1,
    )


_MANY_EXPERTS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 128),
        **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), 8),
        **dict.fromkeys(("moe_intermediate_size", "expert_hidden_dim", "expert_ffn_hidden_size"), 64),
    }
)
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def for_sglang(shape: WitnessShape) -> WitnessShape:
    """Return a shape that SGLang's CPU kernels can run: 128 experts, the same 8 for every token, and scaled latents.

    With a correction bias, its router supports no fewer experts. It computes in bf16, where rounding would route tokens
    to other experts if the scores chose them. A mixture in which every token uses all experts is not changed.
    """
    if shape.fields.get("num_experts", 0) == shape.fields.get("num_experts_per_tok"):
        return shape
    fields, released = (
        {name: value if value is None else _MANY_EXPERTS.get(name, value) for name, value in said.items()}
        for said in (shape.fields, shape.released)
    )
    if "kv_lora_rank" in fields:
        fields["rope_parameters"] = _YARN
        # In the config of releases, but not of transformers.
        released["moe_layer_freq"] = 1
    return replace(shape, fields=fields, released=released, always_chosen=8)
