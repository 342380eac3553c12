"""Cohere's mixtures of experts: their releases carry no head, llama.cpp drafts with one that is attached after them."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.convention import LLAMA_CPP_POSITIONS, Convention
from mtp_train.families.engines import HEAD_IGNORED, engine_table, no
from mtp_train.families.layouts import (
    AFTER_THE_TRUNK,
    REPEATED_AFTER_THE_TRUNK,
    after_the_trunk,
    expert_rules,
    sparse_full,
)
from mtp_train.families.spec import Borrowed, CountField, Family


class _EitherNorm(Borrowed):
    """Norms are Cohere's own, which subtract the mean, but where the config has an epsilon for the others."""

    def make_norm(self, config: PretrainedConfig, width: int | None = None) -> nn.Module:
        """Build the norm that the trunk's layers have."""
        if config.rms_norm_eps is None:
            return super().make_norm(config, width)
        norm: nn.Module = self.cls("Cohere2MoeRMSNorm")(width or config.hidden_size, eps=config.rms_norm_eps)
        return norm


def _build_layer(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer: Any = borrowed.cls(borrowed.layer)(config, layer_idx)
    # A trunk's layer with full attention knows positions only where it is dense; llama.cpp's head knows them always.
    layer.self_attn.force_rope = True
    built: nn.Module = layer
    return built


COHERE2_MOE = Family(
    name="cohere2_moe",
    title="Command A+ / North",
    model_types=("cohere2_moe",),
    attached=True,
    count=CountField(name="num_nextn_predict_layers"),
    head_config_fields=("num_nextn_predict_layers",),
    trunk_prefixes=("model.",),
    head_prefixes=(AFTER_THE_TRUNK,),
    key_rules=after_the_trunk(*expert_rules(AFTER_THE_TRUNK)),
    shared_keys=REPEATED_AFTER_THE_TRUNK,
    default=Convention(),
    conventions={"llama.cpp": LLAMA_CPP_POSITIONS},
    head_layer_config=sparse_full,
    borrowed=_EitherNorm(
        python_module="transformers.models.cohere2_moe.modeling_cohere2_moe",
        layer="Cohere2MoeDecoderLayer",
        norm="Cohere2MoeLayerNorm",
        rotary="Cohere2MoeRotaryEmbedding",
        norm_eps="layer_norm_eps",
        build_layer=_build_layer,
    ),
    masks_by_layer_type=True,
    logit_divisor=lambda config: 1.0 / config["logit_scale"],
    engines=engine_table(
        transformers=HEAD_IGNORED,
        vllm=no("has no head for this model, and refuses a checkpoint with a layer after the trunk's last"),
        sglang=no("has no head for this model; it loads the trunk and leaves the head's layer out"),
    ),
)
