"""LongCat-Flash: a trunk of double layers; the head is one latent attention and one dense MLP (``model.mtp``)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.engines import HEAD_IGNORED, Convention, engine_table, no
from mtp_train.families.layouts import AttentionThenMlp, end_rules, with_layers
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    SharedKey,
    TrunkTraits,
    Wiring,
)

_LAYER = "model.mtp.layers.{module}."


def _head_layer_config(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # One layer of the trunk counts as two.
    return with_layers(text_config, 2 * num_modules)


def _build_layer(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    return AttentionThenMlp(
        borrowed.cls(borrowed.layer)(config, layer_idx),
        borrowed.cls("LongcatFlashMLP")(config),
        (borrowed.make_norm(config), borrowed.make_norm(config)),
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

    experts.__init__ = smaller
    try:
        yield
    finally:
        experts.__init__ = stock


def _last_expert(keys: Collection[str], part: str) -> int | None:
    found = (re.search(rf"\.mlp\.experts\.(\d+)\.{part}_proj\.weight$", key) for key in keys)
    return max((int(match[1]) for match in found if match), default=None)


LONGCAT_FLASH = Family(
    name="longcat_flash",
    title="LongCat-Flash",
    model_types=("longcat_flash",),
    declaration=Declaration(count="num_nextn_predict_layers", implied=1),
    keys=Keys(
        head_prefixes=("model.mtp.",),
        rules=(
            *end_rules(_LAYER, embed_norm="enorm.m", hidden_norm="hnorm.m", final_norm=None),
            KeyRule(native="model.mtp.norm.weight", ours="final_norm.weight"),
            KeyRule(native=f"{_LAYER}transformer_layer.mlp.{{rest}}", ours="layer.mlp.{rest}"),
            KeyRule(native=f"{_LAYER}{{rest}}", ours="layer.{rest}"),
        ),
        shared=(SharedKey(native="model.mtp.embed_tokens.weight", trunk="{trunk}embed_tokens.weight"),),
    ),
    wiring=Wiring(conventions={"vllm": Convention(), "sglang": Convention()}),
    layer=HeadLayer(
        config=_head_layer_config,
        borrowed=Borrowed.of("longcat_flash", "LongcatFlash", layer="MLA", build_layer=_build_layer),
    ),
    trunk=TrunkTraits(loading=_without_idle_gates),
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=no("has no graph for this model")),
)
