"""Cohere's mixtures of experts: releases carry no head; llama.cpp drafts with one attached after the trunk's layers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.engines import HEAD_IGNORED, LLAMA_CPP_POSITIONS, engine_table, no
from mtp_train.families.layouts import EXPERTS_AFTER_THE_TRUNK, sparse_full
from mtp_train.families.spec import Borrowed, Family, HeadLayer, TrunkTraits, Wiring


class _EitherNorm(Borrowed):
    """Cohere's LayerNorm, or an RMSNorm if the config has ``rms_norm_eps``."""

    def make_norm(self, config: PretrainedConfig, width: int | None = None) -> nn.Module:
        """Build the norm of the trunk's layers."""
        if config.rms_norm_eps is None:
            return super().make_norm(config, width)
        norm: nn.Module = self.cls("Cohere2MoeRMSNorm")(width or config.hidden_size, eps=config.rms_norm_eps)
        return norm


def _build_layer(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer: Any = borrowed.cls(borrowed.layer)(config, layer_idx)
    # In the trunk, layers with full attention use rotary embeddings only if they are dense. llama.cpp's head always
    # does.
    layer.self_attn.force_rope = True
    built: nn.Module = layer
    return built


COHERE2_MOE = Family(
    name="cohere2_moe",
    title="Command A+ / North",
    model_types=("cohere2_moe",),
    attached=True,
    keys=EXPERTS_AFTER_THE_TRUNK,
    wiring=Wiring(conventions={"llama.cpp": LLAMA_CPP_POSITIONS}),
    layer=HeadLayer(
        config=sparse_full,
        borrowed=_EitherNorm.of(
            "cohere2_moe", "Cohere2Moe", norm="LayerNorm", norm_eps="layer_norm_eps", build_layer=_build_layer
        ),
    ),
    trunk=TrunkTraits(masks_by_layer_type=True, logit_divisor=lambda config: 1.0 / config["logit_scale"]),
    engines=engine_table(
        transformers=HEAD_IGNORED,
        vllm=no("has no head for this model, and refuses a checkpoint with a layer after the trunk's last"),
        sglang=no("has no head for this model; it loads the trunk and leaves the head's layer out"),
    ),
)
