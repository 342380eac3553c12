"""DFlash drafters (arXiv:2602.06036): a few Qwen3 layers that draft a block of tokens in one pass.

A drafter reads the states of several trunk layers, and its input is the last committed token followed by mask tokens.
:mod:`mtp_train.heads.dflash` runs it. Two formats are read: that of the authors (``dflash_config``) and that of the
speculators package (``transformer_layer_config``). They are decoded with, and not trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig, Qwen3Config

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.engines import UNVERIFIED, Convention, EngineSupport
from mtp_train.families.kinds.kind import DraftFormat, DraftParts
from mtp_train.families.kinds.llama import STATES_IN_SGLANG, STATES_IN_VLLM
from mtp_train.families.layouts import key_rules
from mtp_train.families.spec import Family, HeadLayer, RawConfig, Wiring

_IN_VLLM = EngineSupport(None, "not verified: vllm serve TRUNK --speculative-config {vllm_dflash}")
_IN_SGLANG = EngineSupport(
    None,
    "not verified: python -m sglang.launch_server --model-path TRUNK --speculative-algorithm DFLASH "
    "--speculative-draft-model-path {path}",
)


def _layers_read(config: RawConfig) -> tuple[int, ...]:
    """Return the trunk's layers whose input is read: speculators counts these, the authors the layers before them."""
    ids = config.get("aux_hidden_state_layer_ids")
    return tuple(ids) if ids is not None else tuple(layer + 1 for layer in config["target_layer_ids"])


def _sizes(config: RawConfig, trunk: PretrainedConfig) -> Mapping[str, tuple[Any, Any]]:
    layers, count = _layers_read(config), trunk.num_hidden_layers
    return {
        **{name: (config.get(name), getattr(trunk, name)) for name in ("hidden_size", "vocab_size")},
        "num_target_layers": (config.get("num_target_layers", count), count),
        "mask_token_id": (config["mask_token_id"], min(config["mask_token_id"], trunk.vocab_size - 1)),
        # The output of the last layer is not read: implementations differ in whether it is normed.
        "the list of layers whose input it reads": (layers, tuple(layer for layer in layers if layer < count)),
    }


@dataclass(frozen=True, kw_only=True)
class DFlashParts(DraftParts):
    """A drafter, built from the config of its own checkpoint."""

    def described(self, family: Family, config: RawConfig) -> Family:
        if "sliding_attention" in (config.get("layer_types") or ()):
            raise UnsupportedModelError(
                "layer_types: has sliding_attention, a form of DFlash that we do not support; expected full_attention "
                "alone. Measure it with the engine that it was made for."
            )
        layers = _layers_read(config)
        fields = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
        return replace(
            family,
            layer=replace(family.classes, config=lambda text_config, num_modules: Qwen3Config.from_dict(fields)),
            wiring=replace(family.wiring, trunk_layers=lambda text_config: layers),
        )

    def most_drafts(self, config: RawConfig) -> int:
        """Return the number of tokens of a block but the first, which is committed."""
        return int(config["block_size"]) - 1

    def details(self, config: RawConfig) -> str:
        return (
            f", which reads the input of layers {', '.join(map(str, _layers_read(config)))}, drafts blocks of "
            f"{config['block_size']} tokens with mask token {config['mask_token_id']}, from "
            f"{config.get('draft_vocab_size') or config['vocab_size']} of {config['vocab_size']} tokens"
        )


DFLASH = DFlashParts(
    head="mtp_train.heads.dflash:DFlashHead",
    prefixes=("",),
    rules=key_rules("", {"{rest}": "{rest}"}),
    layer=HeadLayer("qwen3", "Qwen3"),
    wiring=Wiring(default=Convention(hidden="of_layers")),
    serving={"vllm": (_IN_VLLM, STATES_IN_VLLM), "sglang": (_IN_SGLANG, STATES_IN_SGLANG)},
    other_trunks=UNVERIFIED,
    other_engines=UNVERIFIED,
    format=DraftFormat(
        written_as=("DFlashDraftModel",),
        read_as=("DFlashSpeculator",),
        nested="dflash_config",
        sizes=_sizes,
        drafted_field="draft_vocab_size",
        draft_vocab=True,
        plain_settings={
            "speculators_model_type": ("dflash", None),
            "sample_from_anchor": (False, None),
            "shift_label": (False, None),
            "is_causal": (False, None),
            "causal": (False, None),
            "use_swa": (False, None),
            "attention_value_scale": (None, 1.0),
            "is_neox_style": (True, None),
        },
    ),
)
