"""Inkling: relative-distance attention and short convolutions in every layer; each head module feeds the next one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.families.engines import USE_MTP, Convention, EngineSupport, engine_table, no
from mtp_train.families.layouts import AFTER_THE_TRUNK, end_rules, weight_rules, with_layers
from mtp_train.families.mechanisms.relative_positions import LogScaling, RelativeProfiles, ShortConvolution
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    TrunkClass,
    TrunkTraits,
    Wiring,
)

_HEAD = "model.mtp.layers.{module}."
_LAYER_NAMES = {
    "attn.wq_du": "self_attn.q_proj",
    "attn.wk_dv": "self_attn.k_proj",
    "attn.wv_dv": "self_attn.v_proj",
    "attn.wr_du": "self_attn.r_proj",
    "attn.wo_ud": "self_attn.o_proj",
    "attn.k_sconv": "self_attn.k_sconv.conv1d",
    "attn.v_sconv": "self_attn.v_sconv.conv1d",
    "attn_sconv": "attn_sconv.conv1d",
    "mlp_sconv": "mlp_sconv.conv1d",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.w13_dn": "mlp.gate_up_proj",
    "mlp.w2_md": "mlp.down_proj",
}
"""Parts of a layer: name in a release, to name in transformers; for the MLP, name in :class:`_InterleavedMlp`."""


def _layer_rules(layer: str) -> tuple[KeyRule, ...]:
    rest = KeyRule(native=f"{layer}attn.{{rest}}", ours="layer.self_attn.{rest}")
    return (*weight_rules(layer, _LAYER_NAMES, "layer."), rest)


class _InterleavedMlp(nn.Module):
    """A gated MLP with gate and up in alternate rows of one matrix, as releases store them: gate first."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(stock.hidden_size, 2 * stock.intermediate_size, bias=False)
        self.down_proj = stock.down_proj
        self.global_scale = stock.global_scale
        self.act_fn = stock.act_fn

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(hidden_states)
        output: Tensor = self.down_proj(self.act_fn(gate_up[..., ::2]) * gate_up[..., 1::2]) * self.global_scale
        return output


def _head_layer_config(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    local = text_config.mtp_local_layer_ids or ()
    return with_layers(
        text_config,
        num_modules,
        layer_types=["hybrid_sliding" if module in local else "hybrid" for module in range(num_modules)],
        mlp_layer_types=["dense"] * num_modules,
        # None: the head's attention scores are not scaled. vLLM scales the trunk's only, transformers the head's too.
        # The result differs only in texts longer than the floor, which is 128,000 tokens in releases.
        log_scaling_n_floor=None,
    )


def _build_layer(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer: Any = borrowed.stock_layer(config, layer_idx)
    attention = layer.self_attn
    attention.rel_logits_proj = RelativeProfiles(attention.rel_logits_proj, None)
    attention.k_sconv, attention.v_sconv = ShortConvolution(attention.k_sconv), ShortConvolution(attention.v_sconv)
    layer.attn_sconv, layer.mlp_sconv = ShortConvolution(layer.attn_sconv), ShortConvolution(layer.mlp_sconv)
    layer.mlp = _InterleavedMlp(layer.mlp)
    built: nn.Module = layer
    return built


def _prepare_trunk(decoder: Any) -> None:
    """Make attention accept masks with the distance of each key; see ``mechanisms/relative_positions.py``.

    Layers without a sliding window scale their scores, if the config has a floor. A second call changes nothing.
    """
    config = decoder.config
    scaling = None
    if config.log_scaling_n_floor is not None:
        scaling = LogScaling(config.log_scaling_n_floor, config.log_scaling_alpha)
    for layer in decoder.layers:
        attention = layer.self_attn
        if not isinstance(attention.rel_logits_proj, RelativeProfiles):
            attention.rel_logits_proj = RelativeProfiles(
                attention.rel_logits_proj, None if attention.is_sliding else scaling
            )


INKLING = Family(
    name="inkling",
    title="Inkling",
    # The releases' text config has no model_type; their outer config has the second one.
    model_types=("inkling_text", "inkling_mm_model"),
    declaration=Declaration(section="mtp_config", repeated_as="num_mtp_layers"),
    keys=Keys(
        trunk_prefixes=("model.llm.", "model."),
        embed="{trunk}embed.weight",
        lm_head="model.llm.unembed.weight",
        embed_norm="{trunk}embed_norm.weight",
        head_prefixes=("model.mtp.",),
        rules=(
            *end_rules(_HEAD, proj="input_proj", embed_norm="embed_norm", hidden_norm="hidden_norm", final_norm=None),
            KeyRule(native="model.mtp.chain_norm.weight", ours="final_norm.weight"),
            *_layer_rules(f"{_HEAD}transformer_block."),
            KeyRule(native=f"{_HEAD}transformer_block.mlp.{{rest}}", ours="layer.mlp.{rest}"),
        ),
        trunk_rules=_layer_rules(AFTER_THE_TRUNK),
    ),
    wiring=Wiring(
        concat="hidden_first",
        final_norm=False,
        chain_norm="chain_hidden_post_norm",
        conventions={"vllm": Convention(), "sglang": Convention()},
    ),
    layer=HeadLayer(
        config=_head_layer_config,
        borrowed=Borrowed("inkling", "Inkling", rotary=None, build_layer=_build_layer),
        masks_of_distances=True,
    ),
    trunk=TrunkTraits(
        masks_by_layer_type=True,
        stand_in=TrunkClass(model_type="inkling_text", wrapper="inkling_mm_model"),
        prepare=_prepare_trunk,
        logit_divisor=lambda config: config["logits_mup_width_multiplier"],
        real_vocab="unpadded_vocab_size",
        needs_transformers="5.23",
    ),
    engines=engine_table(
        transformers=EngineSupport(
            True,
            f"{USE_MTP.text}; 5.23 leaves out the trunk's norm of the embedding, which costs accepted drafts",
        ),
        llama_cpp=no("has no graph for this model"),
    ),
)
