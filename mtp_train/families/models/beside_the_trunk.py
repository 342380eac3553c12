"""Heads beside their trunk, under a prefix of their own: Qwen, EXAONE, Mellum 2, ERNIE-4.5, LongCat-Flash, MiniMax-M3,
MiMo, Nemotron, Inkling.

Most are one module around a layer of the trunk's own class. Qwen's have full attention, for Gated DeltaNet hybrids.
ERNIE-4.5's is dense, has no final norm, and its keys are
``model.mtp_*``. LongCat-Flash's trunk has double layers, its head one latent attention and one dense MLP. MiniMax-M3's
trunk and head attend to selected blocks of keys. Nemotron's head is a short pattern of layers, for a Mamba-2 hybrid.
Inkling has relative-distance attention and short convolutions in every layer; each head module feeds the next one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.families import engines, layouts
from mtp_train.families.engines import Convention, no, remarked
from mtp_train.families.layouts import AFTER_THE_TRUNK, BESIDE_THE_TRUNK, INDEXER, WRAPPED
from mtp_train.families.mechanisms.key_blocks import BlockIndexer
from mtp_train.families.mechanisms.key_pools import AveragedPools, choose_pools
from mtp_train.families.mechanisms.relative_positions import RelativeProfiles, ShortConvolution
from mtp_train.families.spec import (
    Declaration,
    Family,
    HeadLayer,
    Keys,
    RawConfig,
    RecurrentKernels,
    Streams,
    TrunkClass,
    TrunkTraits,
    Wiring,
)
from mtp_train.upstream.transformers_private import replacing

# A field of the trunk and the head, without which SGLang does not start. transformers' save_pretrained replaces it by
# layer_types, so a graft restores it from the base.
_INTERVAL = "full_attention_interval"
_QWEN_DECLARATION = Declaration(count="mtp_num_hidden_layers", others=("mtp_use_dedicated_embeddings", _INTERVAL))
_DELTA_KERNELS = RecurrentKernels(
    chunked="torch_chunk_gated_delta_rule",
    single="torch_recurrent_gated_delta_rule",
    rule="gated_delta",
)

QWEN3_5 = Family(
    name="qwen3_5",
    title="Qwen3.5 / 3.6 / 3.8 dense",
    config_types=("qwen3_5_text",),
    declaration=_QWEN_DECLARATION,
    keys=layouts.beside_the_trunk(trunk_prefixes=WRAPPED),
    # All three engines: the head reads the state after the trunk's final norm and recycles the state after its own.
    wiring=Wiring(conventions=engines.ALIKE),
    layer=HeadLayer("qwen3_5", "Qwen3_5", config=layouts.full, rotary="TextRotaryEmbedding", rotary_axes=3),
    trunk=TrunkTraits(recurrent=_DELTA_KERNELS),
    engines={"transformers": engines.NO_RECURRENT_ROLLBACK},
)


# transformers' own indexer loops over the queries of a text.
_POOLS = partial(choose_pools, kind=AveragedPools)

QWEN = (
    QWEN3_5,
    replace(
        QWEN3_5,
        name="qwen3_5_moe",
        title="Qwen3.5 / 3.6 / 3.8 MoE",
        config_types=("qwen3_5_moe_text",),
        keys=replace(layouts.EXPERTS_BESIDE_THE_TRUNK, trunk_prefixes=WRAPPED),
        layer=HeadLayer("qwen3_5_moe", "Qwen3_5Moe", config=layouts.full, rotary="TextRotaryEmbedding", rotary_axes=3),
    ),
    replace(
        QWEN3_5,
        name="qwen3_next",
        title="Qwen3-Next",
        config_types=("qwen3_next",),
        declaration=Declaration(
            # Releases lack the field. SGLang and llama.cpp assume 1; vLLM takes the depth from its command line.
            implied=1,
            others=(_INTERVAL,),
        ),
        keys=layouts.EXPERTS_BESIDE_THE_TRUNK,
        # A mixture of experts even if the trunk's first layers are dense.
        layer=HeadLayer("qwen3_next", "Qwen3Next", config=layouts.every_layer_sparse),
    ),
    Family(
        name="qwen4_exp",
        title="Qwen4-Exp (Qwen3.8 Flash-Next)",
        config_types=("qwen4_exp_text",),
        declaration=_QWEN_DECLARATION,
        keys=Keys(
            trunk_prefixes=WRAPPED,
            head_prefixes=("mtp.",),
            rules=(
                *layouts.key_rules(
                    "mtp.",
                    {
                        "fc_embedding.weight": "token_proj.weight",
                        "fc_hidden.weight": "hidden_proj.weight",
                        "pre_fc_norm_embedding.weight": "embed_norm.weight",
                        "pre_fc_norm_hidden.weight": "hidden_norm.weight",
                        "hyper_connection_mixer.{rest}": "mixer.{rest}",
                    },
                ),
                *layouts.key_rules(BESIDE_THE_TRUNK, {**layouts.experts(), **layouts.LAYER}),
            ),
        ),
        # In all engines the head reads the streams before they are mixed, and recycles the streams of its layer. With
        # index_share_for_mtp_iteration in the config, engines select keys at depth 1 and reuse them at all depths. The
        # result differs only in texts longer than indexer_budget.
        wiring=Wiring(
            concat="sum",
            final_norm=False,
            default=engines.BEFORE_NORM,
            conventions={"vllm": engines.BEFORE_NORM, "sglang": engines.BEFORE_NORM},
        ),
        layer=HeadLayer(
            "qwen4_exp",
            "Qwen4ExpText",
            config=layouts.layers_of(layer_types="indexed_attention", ple_layer_ids=[]),
            prepare=_POOLS,
            frozen=INDEXER,
            rotary_axes=3,
        ),
        trunk=TrunkTraits(
            final_norm=None,
            streams=Streams(
                count="hc_count",
                mixer="Qwen4ExpTextGatedResidual",
                trunk_mixer="hyper_connection_mixer",
                mixer_options={"use_combine": False},
                joined=True,
            ),
            prepare=_POOLS,
            recurrent=_DELTA_KERNELS,
            needs_transformers="5.23",
        ),
        engines={"transformers": engines.NO_RECURRENT_ROLLBACK, "llama.cpp": no("its converter drops this head")},
    ),
)
"""Listed in front of all other families."""


def _dense_with_rotary(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # As in engines: without mtp_layer_types the head has the type of the trunk's first layer, as a rule a sliding one.
    # In this trunk only sliding layers use rotary embeddings, but the head always does. Full attention in the head is
    # therefore a sliding layer whose window covers every position. All modules share a window; releases have one.
    fields = text_config.to_dict()
    kind = (fields.get("mtp_layer_types") or fields["layer_types"])[0]
    window = (fields.get("mtp_sliding_windows") or [None])[0] or fields["sliding_window"]
    if kind == "full_attention":
        window = fields["max_position_embeddings"]
    return layouts.dense_sliding(layouts.with_layers(text_config, num_modules, sliding_window=window), num_modules)


def _as_declared(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # The defaults are transformers'.
    fields = text_config.to_dict()
    return layouts.with_layers(
        text_config,
        num_modules,
        layer_types=list(fields.get("mtp_layer_types") or ["sliding_attention"] * num_modules),
        mlp_layer_types=list(fields.get("mtp_mlp_layer_types") or ["sparse"] * num_modules),
    )


@contextmanager
def _without_idle_gates(keys: Collection[str]) -> Iterator[None]:
    """Load a trunk without gate matrices for its zero-computation experts, if the checkpoint has none.

    transformers allocates these matrices, never reads them, and refuses a checkpoint without them. Releases lack them.
    """
    last = _last_expert(keys, "gate")
    if last is None or last != _last_expert(keys, "down"):
        yield
        return
    experts = LONGCAT_FLASH.classes.cls("LongcatFlashExperts")
    stock = experts.__init__

    def smaller(self: Any, config: PretrainedConfig) -> None:
        stock(self, config)
        self.gate_up_proj = nn.Parameter(self.gate_up_proj[: self.num_routed_experts].detach().clone())

    with replacing(experts, __init__=smaller):
        yield


def _last_expert(keys: Collection[str], part: str) -> int | None:
    found = (re.search(rf"\.mlp\.experts\.(\d+)\.{part}_proj\.weight$", key) for key in keys)
    return max((int(match[1]) for match in found if match), default=None)


LONGCAT_FLASH = Family(
    name="longcat_flash",
    title="LongCat-Flash",
    declaration=Declaration(implied=1),
    keys=Keys(
        head_prefixes=("model.mtp.",),
        rules=layouts.key_rules(
            "model.mtp.",
            {
                "layers.{module}.eh_proj.weight": "proj.weight",
                "layers.{module}.enorm.m.weight": "embed_norm.weight",
                "layers.{module}.hnorm.m.weight": "hidden_norm.weight",
                "norm.weight": "final_norm.weight",
                "layers.{module}.transformer_layer.mlp.{rest}": "layer.mlp.{rest}",
                "layers.{module}.{rest}": "layer.{rest}",
            },
        ),
        shared={"model.mtp.embed_tokens.weight": "{trunk}embed_tokens.weight"},
    ),
    wiring=Wiring(conventions={"vllm": Convention(), "sglang": Convention()}),
    layer=HeadLayer(
        "longcat_flash",
        "LongcatFlash",
        # One layer of the trunk counts as two.
        config=lambda config, num_modules: layouts.with_layers(config, 2 * num_modules),
        build_layer=layouts.attention_then_mlp("MLA", "MLP"),
    ),
    trunk=TrunkTraits(loading=_without_idle_gates),
    engines={"llama.cpp": no("has no graph for this model")},
)


_MINIMAX = "{trunk}mtp.layers.{module}."
# vLLM's head reads the trunk's state after the final norm and recycles the layer's own output.
_RAW_STATE = Convention(recycle="before_final_norm", zero_first_embedding=True)


_MINIMAX_LAYER = {
    **layouts.experts("block_sparse_moe.experts", ("w1", "w3", "w2")),
    # transformers merges these two matrices into one.
    "block_sparse_moe.shared_experts.gate_proj.weight": "layer.mlp.shared_experts.gate_up_proj.weight",
    "block_sparse_moe.shared_experts.up_proj.weight": "layer.mlp.shared_experts.gate_up_proj.weight",
    "block_sparse_moe.e_score_correction_bias": "layer.mlp.gate.e_score_correction_bias",
    "block_sparse_moe.{rest}": "layer.mlp.{rest}",
    **{
        f"self_attn.index_{part}.{{rest}}": f"layer.self_attn.indexer.{part}.{{rest}}"
        for part in ("q_proj", "k_proj", "q_norm", "k_norm")
    },
    **layouts.LAYER,
}
# Only the trunk has layers without experts.
_MINIMAX_DENSE = {
    "mlp.gate_proj.weight": "layer.mlp.gate_up_proj.weight",
    "mlp.up_proj.weight": "layer.mlp.gate_up_proj.weight",
}


def _with_block_indexer(classes: HeadLayer, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer = classes.stock_layer(config, layer_idx)
    layer.self_attn.indexer = BlockIndexer(layer.self_attn.indexer, config, classes.cls("apply_rotary_pos_emb"))
    return layer


MIMO = Family(
    name="mimo",
    title="MiMo-7B",
    keys=Keys(
        head_prefixes=("model.mtp_layers.",),
        rules=layouts.key_rules(
            "model.mtp_layers.{module}.",
            {
                "input_proj.weight": "proj.weight",
                "token_layernorm.weight": "embed_norm.weight",
                "hidden_layernorm.weight": "hidden_norm.weight",
                **layouts.FINAL_NORM,
                **layouts.LAYER,
            },
        ),
    ),
    wiring=Wiring(
        concat="hidden_first",
        # SGLang's trunk returns the state after its final norm. The head was trained on the state before it, which
        # vLLM reads.
        default=Convention(hidden="before_final_norm"),
        conventions={
            "vllm": Convention(hidden="before_final_norm", zero_first_embedding=True),
            "sglang": engines.ZERO_FIRST,
        },
    ),
    layer=HeadLayer("qwen2", "Qwen2", config=layouts.full),
    trunk=TrunkTraits(stand_in=TrunkClass(model_type="qwen2")),
    engines={
        "transformers": no("has no class for MiMo-7B; its own code, with trust_remote_code, ignores the head"),
        "llama.cpp": no("has no graph for this head"),
    },
)


_PATTERN = ("mtp_layers_block_type", "mtp_hybrid_override_pattern")


def _num_sublayers(text_config: RawConfig) -> int:
    """Return the length of the head's layer pattern, a list or one letter per layer; default: attention, experts."""
    return next((len(text_config[field]) for field in _PATTERN if text_config.get(field)), 2)


class _LayersInTurn(nn.Module):
    """Several layers that run one after the other as one layer; none of them takes position embeddings."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden_states: Tensor, position_embeddings: None, **of_layers: Any) -> Tensor:
        """Run the layers, (B, T, D) to (B, T, D); arguments as in transformers' decoder layers."""
        for layer in self.layers:
            hidden_states = layer(hidden_states, **of_layers)
        return hidden_states


def _unlimited_time_steps(decoder: Any) -> None:
    """Remove the bound that transformers puts on time steps in a forward of several tokens.

    transformers' step of one token has no such bound, nor have the kernels of mamba_ssm, vLLM and llama.cpp.
    """
    for layer in decoder.layers:
        if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = (0.0, math.inf)


_INKLING_LAYER = {
    **layouts.weights(
        {
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
        },
        "layer.",
    ),
    "attn.{rest}": "layer.self_attn.{rest}",
}
"""Parts of a layer: name in a release, to name in transformers; for the MLP, name in :class:`_InterleavedMlp`."""


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
        return self.down_proj(self.act_fn(gate_up[..., ::2]) * gate_up[..., 1::2]) * self.global_scale


def _inkling_head_layer_config(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    local = text_config.mtp_local_layer_ids or ()
    return layouts.with_layers(
        text_config,
        num_modules,
        layer_types=["hybrid_sliding" if module in local else "hybrid" for module in range(num_modules)],
        mlp_layer_types=["dense"] * num_modules,
        # None: the head's attention scores are not scaled. vLLM scales the trunk's only, transformers the head's too.
        # The result differs only in texts longer than the floor, which is 128,000 tokens in releases.
        log_scaling_n_floor=None,
    )


def _prepare_layer(layer: Any) -> None:
    attention = layer.self_attn
    attention.rel_logits_proj = RelativeProfiles(attention.rel_logits_proj)
    attention.k_sconv = ShortConvolution(attention.k_sconv)
    attention.v_sconv = ShortConvolution(attention.v_sconv)
    layer.attn_sconv = ShortConvolution(layer.attn_sconv)
    layer.mlp_sconv = ShortConvolution(layer.mlp_sconv)
    layer.mlp = _InterleavedMlp(layer.mlp)


def _prepare_trunk(decoder: Any) -> None:
    """Make attention accept masks with the distance of each key; see ``mechanisms/relative_positions.py``.

    Layers without a sliding window scale their scores, if the config has a floor. A second call changes nothing.
    """
    config = decoder.config
    for layer in decoder.layers:
        attention = layer.self_attn
        stock = layer.self_attn.rel_logits_proj
        if not isinstance(stock, RelativeProfiles):
            floor = None if attention.is_sliding else config.log_scaling_n_floor
            attention.rel_logits_proj = RelativeProfiles(stock, floor, config.log_scaling_alpha)


FAMILIES = (
    MIMO,
    Family(
        name="mimo_v2_flash",
        title="MiMo-V2-Flash",
        declaration=Declaration(
            # Engines hard-code the number: llama.cpp and SGLang run 3 modules, vLLM runs the first one.
            count=None,
            implied=3,
        ),
        keys=Keys(
            head_prefixes=("model.mtp.",),
            rules=layouts.key_rules(
                "model.mtp.layers.{module}.",
                {
                    **layouts.ENDS,
                    **layouts.FINAL_NORM,
                    "pre_mlp_layernorm.weight": "layer.post_attention_layernorm.weight",
                    "self_attn.attention_sink_bias": "layer.self_attn.sinks",
                    **layouts.LAYER,
                },
            ),
        ),
        wiring=Wiring(
            # The three engines differ in every field; two of them read the state before the norm. Measure acceptance in
            # the engine that serves. vLLM's window, in trunk and head, is one key narrower: it includes the row itself.
            default=engines.BEFORE_NORM,
            conventions={
                "vllm": Convention(modules="first"),
                "sglang": Convention(hidden="before_final_norm", recycle="trunk"),
                "llama.cpp": replace(engines.BEFORE_NORM, prefix="trunk"),
            },
        ),
        layer=HeadLayer("mimo_v2_flash", "MiMoV2Flash", config=layouts.dense_sliding),
        # llama.cpp's converter writes separate query, key and value matrices; its graph of the head aborts on these.
        engines={"llama.cpp": engines.LLAMA_CPP_SIDECAR},
    ),
    Family(
        name="nemotron_h",
        title="Nemotron-H / Nemotron 3",
        declaration=Declaration(others=_PATTERN),
        keys=Keys(
            trunk_prefixes=("backbone.", "model."),
            embed="{trunk}embeddings.weight",
            head_prefixes=("mtp.",),
            rules=(
                *layouts.key_rules("mtp.layers.0.", layouts.ENDS),
                *layouts.key_rules("mtp.layers.{last}.", layouts.FINAL_NORM),
                *layouts.key_rules(
                    "mtp.layers.{sub}.",
                    {
                        "mixer.experts.{expert}.up_proj.weight": "layer.layers.{sub}.mixer.experts.up_proj",
                        "mixer.experts.{expert}.down_proj.weight": "layer.layers.{sub}.mixer.experts.down_proj",
                        "{rest}": "layer.layers.{sub}.{rest}",
                    },
                ),
            ),
            num_sublayers=_num_sublayers,
        ),
        wiring=Wiring(
            # llama.cpp computes the final norm as a LayerNorm, the other engines like the layers' RMSNorm.
            conventions={**engines.ALIKE, "llama.cpp": Convention(centred=True)},
        ),
        layer=HeadLayer(
            "nemotron_h",
            "NemotronH",
            config=lambda config, num_modules: layouts.with_layers(
                config, num_modules, layers_block_type=list(config.mtp_layers_block_type)
            ),
            layer="Block",
            rotary=None,
            build_layer=lambda classes, config, layer_idx: _LayersInTurn(
                [classes.stock_layer(config, number) for number in range(len(config.layers_block_type))]
            ),
        ),
        trunk=TrunkTraits(
            final_norm="norm_f",
            prepare=_unlimited_time_steps,
            recurrent=RecurrentKernels(
                chunked="mamba2_chunk_scan",
                single="mamba2_selective_state_update",
                rule="mamba2",
            ),
            needs_transformers="5.23",
        ),
        engines={"transformers": engines.NO_RECURRENT_ROLLBACK},
    ),
    Family(
        name="exaone_moe",
        title="K-EXAONE",
        declaration=Declaration(others=("mtp_layer_types", "mtp_sliding_windows")),
        keys=layouts.beside_the_trunk(),
        wiring=Wiring(conventions={"vllm": Convention(), "sglang": Convention()}),
        layer=HeadLayer("exaone_moe", "ExaoneMoe", config=_dense_with_rotary),
        engines={"llama.cpp": engines.LLAMA_CPP_KEEPS},
    ),
    Family(
        name="exaone4_5",
        title="EXAONE 4.5",
        declaration=Declaration(
            # Releases have the count in the text config. vLLM reads it from the whole config, which lacks it, and takes
            # 1.
            implied=1,
            others=("mtp_share_layers",),
        ),
        keys=layouts.beside_the_trunk(trunk_prefixes=("model.language_model.",)),
        wiring=Wiring(conventions={"vllm": Convention()}),
        layer=HeadLayer(
            "exaone4",
            "Exaone4",
            # As in vLLM: the types of the trunk's first layers. In releases these are sliding, and only sliding layers
            # use rotary embeddings.
            config=lambda config, num_modules: layouts.with_layers(
                config, num_modules, layer_types=config.layer_types[:num_modules]
            ),
        ),
        trunk=TrunkTraits(only_with_vision=True),
        engines={"sglang": no("has no class for this model"), "llama.cpp": engines.LLAMA_CPP_KEEPS},
    ),
    Family(
        name="ernie4_5_moe",
        title="ERNIE-4.5 MoE",
        keys=Keys(
            head_prefixes=("model.mtp_",),
            rules=layouts.key_rules(
                "model.mtp_",
                {
                    "linear_proj.{module}.weight": "proj.weight",
                    "emb_norm.{module}.weight": "embed_norm.weight",
                    "hidden_norm.{module}.weight": "hidden_norm.weight",
                    "block.{module}.{rest}": "layer.{rest}",
                },
            ),
        ),
        wiring=Wiring(
            final_norm=False,
            # vLLM's head rotates halves like Llama, vLLM's trunk rotates neighbouring channels, as both do here. vLLM's
            # drafts differ from ours for this reason alone.
            default=engines.ZERO_FIRST,
            conventions={"vllm": engines.ZERO_FIRST, "sglang": engines.ZERO_FIRST},
        ),
        layer=HeadLayer(
            "ernie4_5_moe",
            "Ernie4_5_Moe",
            # No layer of the head is sparse.
            config=lambda config, num_modules: layouts.with_layers(
                config, num_modules, moe_layer_start_index=num_modules
            ),
        ),
        engines={"llama.cpp": no("its converter drops this head")},
    ),
    LONGCAT_FLASH,
    Family(
        name="minimax_m3",
        title="MiniMax-M3",
        config_types=("minimax_m3_vl_text",),
        declaration=Declaration(count="num_mtp_modules"),
        keys=Keys(
            trunk_prefixes=("language_model.model.", "model.language_model.", "model."),
            head_prefixes=("{trunk}mtp.",),
            rules=(
                *layouts.key_rules(_MINIMAX, {**layouts.ENDS, **layouts.FINAL_NORM}),
                *layouts.key_rules(f"{_MINIMAX}transformer_layer.", _MINIMAX_LAYER),
            ),
            trunk_rules=layouts.key_rules(AFTER_THE_TRUNK, {**_MINIMAX_DENSE, **_MINIMAX_LAYER}),
            wrapper_names={
                "vision_tower.layers.": "vision_tower.vision_model.encoder.layers.",
                "multi_modal_projector.merge_linear_": "patch_merge_mlp.linear_",
            },
        ),
        wiring=Wiring(default=_RAW_STATE, conventions={"vllm": _RAW_STATE}),
        layer=HeadLayer(
            "minimax_m3_vl",
            "MiniMaxM3VL",
            config=layouts.layers_of(layer_types="minimax_m3_sparse", mlp_layer_types="sparse"),
            build_layer=_with_block_indexer,
            frozen=INDEXER,
        ),
        trunk=TrunkTraits(only_with_vision=True, needs_transformers="5.23"),
        engines={"sglang": no("has no MTP for this model"), "llama.cpp": no("has no graph for this head")},
    ),
    Family(
        name="inkling",
        title="Inkling",
        # The releases' text config has no model_type; their outer config has the second one.
        config_types=("inkling_text", "inkling_mm_model"),
        declaration=Declaration(section="mtp_config", repeated_as="num_mtp_layers"),
        keys=Keys(
            trunk_prefixes=("model.llm.", "model."),
            embed="{trunk}embed.weight",
            lm_head="model.llm.unembed.weight",
            embed_norm="{trunk}embed_norm.weight",
            head_prefixes=("model.mtp.",),
            rules=(
                *layouts.key_rules(
                    "model.mtp.",
                    {
                        "layers.{module}.input_proj.weight": "proj.weight",
                        "layers.{module}.embed_norm.weight": "embed_norm.weight",
                        "layers.{module}.hidden_norm.weight": "hidden_norm.weight",
                        "chain_norm.weight": "final_norm.weight",
                    },
                ),
                *layouts.key_rules(
                    "model.mtp.layers.{module}.transformer_block.",
                    {**_INKLING_LAYER, "mlp.{rest}": "layer.mlp.{rest}"},
                ),
            ),
            trunk_rules=layouts.key_rules(AFTER_THE_TRUNK, _INKLING_LAYER),
        ),
        wiring=Wiring(
            concat="hidden_first",
            final_norm=False,
            chain_norm="chain_hidden_post_norm",
            conventions={"vllm": Convention(), "sglang": Convention()},
        ),
        layer=HeadLayer(
            "inkling",
            "Inkling",
            config=_inkling_head_layer_config,
            rotary=None,
            prepare=_prepare_layer,
            masks_of_distances=True,
        ),
        trunk=TrunkTraits(
            stand_in=TrunkClass(model_type="inkling_text", wrapper="inkling_mm_model"),
            prepare=_prepare_trunk,
            logit_divisor=lambda config: config["logits_mup_width_multiplier"],
            real_vocab="unpadded_vocab_size",
            needs_transformers="5.23",
        ),
        engines={
            "transformers": remarked(
                engines.USE_MTP, "; 5.23 leaves out the trunk's norm of the embedding, which costs accepted drafts"
            ),
            "llama.cpp": no("has no graph for this model"),
        },
    ),
    Family(
        name="mellum",
        title="Mellum 2",
        declaration=Declaration(others=("mtp_layer_types", "mtp_mlp_layer_types")),
        keys=layouts.EXPERTS_BESIDE_THE_TRUNK,
        # vLLM runs transformers' own head.
        wiring=Wiring(conventions={"vllm": Convention()}),
        layer=HeadLayer("mellum", "Mellum", config=_as_declared),
        engines={
            "transformers": engines.USE_MTP,
            "sglang": no("loads the trunk and has no MTP for this model"),
            "llama.cpp": no("has no graph for this head, and its converter refuses the head's keys"),
        },
    ),
)
