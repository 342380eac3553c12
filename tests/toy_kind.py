"""A kind of head that another package adds: one Llama layer that reads the sum of embedding and hidden state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.families.drafts.llama import PLAIN_SETTINGS, llama_draft_config, llama_layer
from mtp_train.families.drafts.record import Block, DraftFormat, DraftParts
from mtp_train.families.engines import EngineSupport, no
from mtp_train.families.spec import Family, HeadLayer, KeyRule, RawConfig
from mtp_train.head_kinds import HeadKind


class ToyModule(Block):
    """``z = layer(W e + U h)``, ``o = norm(z)``."""

    def __init__(self, family: Family, layer_config: PretrainedConfig, module_idx: int) -> None:
        super().__init__()
        size = layer_config.hidden_size
        self.of_token, self.of_state = (nn.Linear(size, size, bias=False) for _ in range(2))
        self.layer = family.classes.make_layer(layer_config, module_idx)
        self.final_norm = family.classes.make_norm(layer_config)

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        summed_BTD: Tensor = self.of_token(embed_BTD) + self.of_state(hidden_BTD)
        return summed_BTD


def build_layer(borrowed: HeadLayer, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer: nn.Module = borrowed.stock_layer(config, layer_idx)
    return layer


def toy_config(
    layer_config: PretrainedConfig, _num_modules: int, trunk: RawConfig, _num_drafted: int | None
) -> dict[str, Any]:
    return llama_draft_config(layer_config, trunk)


def serving(trunk: str) -> Mapping[str, EngineSupport]:
    vllm = EngineSupport(True, "vllm serve TRUNK --speculative-config {vllm_toy}")
    return {"vllm": vllm, "transformers": no(f"has no toy for {trunk}")}


PARTS = DraftParts(
    prefixes=("token.", "state.", "layer.", "norm."),
    rules=(
        KeyRule(native="token.weight", ours="of_token.weight"),
        KeyRule(native="state.weight", ours="of_state.weight"),
        KeyRule(native="norm.weight", ours="final_norm.weight"),
        KeyRule(native="layer.{rest}", ours="layer.{rest}"),
    ),
    module=ToyModule,
    layer=llama_layer(build_layer),
    final_norm=True,
    serving=serving,
    format=DraftFormat(written_as=("ToyDraft",), config=toy_config, plain_settings=PLAIN_SETTINGS),
)
TOY = HeadKind("toy", "Toy", "toy_kind:PARTS")
