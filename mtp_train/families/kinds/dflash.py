"""DFlash drafters (arXiv:2602.06036): a few Qwen3 layers that draft a block of tokens in one pass.

A drafter reads the states of several trunk layers, and its input is the last committed token followed by mask tokens.
:mod:`mtp_train.heads.dflash` runs it. Three formats are read: that of the authors (``dflash_config``), that of the
speculators package (``transformer_layer_config``) and that of transformers. They are decoded with, and not trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers import PretrainedConfig, Qwen3Config

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.engines import Convention, EngineSupport, no
from mtp_train.families.kinds.kind import DraftFormat, DraftParts
from mtp_train.families.kinds.llama import STATES_IN_SGLANG, STATES_IN_VLLM
from mtp_train.families.layouts import key_rules
from mtp_train.families.spec import Family, HeadLayer, RawConfig, Wiring

FULL, SLIDING = "full_attention", "sliding_attention"
_OF_TRANSFORMERS = "muse_glimmer_assistant"


def in_vllm(method: str) -> EngineSupport:
    return EngineSupport(None, f"not verified: vllm serve TRUNK --speculative-config {{vllm_{method}}}")


def in_sglang(algorithm: str) -> EngineSupport:
    return EngineSupport(
        None,
        f"not verified: python -m sglang.launch_server --model-path TRUNK --speculative-algorithm {algorithm} "
        "--speculative-draft-model-path {path}",
    )


def in_llama_cpp(drafting: str) -> EngineSupport:
    return EngineSupport(
        None,
        "not verified: python convert_hf_to_gguf.py {path} --target-model-dir TRUNK --outfile draft.gguf && "
        f"llama-server -m TRUNK.gguf -md draft.gguf --spec-type draft-{drafting} --spec-draft-n-max {{depth}}",
    )


class BlockMask(NamedTuple):
    """The keys to which the tokens of a block attend in one type of layers. The first token is the anchor."""

    causal: bool = False
    """Whether a token attends to no later token of its block."""
    window: int | None = None
    """Largest distance between a token and a key; None if there is no limit."""
    from_anchor: bool = False
    """Whether distances are those of the anchor: every token attends to the same keys before the block."""


def is_of_speculators(config: RawConfig) -> bool:
    return "aux_hidden_state_layer_ids" in config


def samples_anchor(config: RawConfig) -> bool:
    """Return whether the block's first row gives the first draft, and not the second one.

    Engines take a missing field in the speculators package's format for false, and for true in a DSpark drafter's own.
    """
    return bool(config.get("sample_from_anchor", "markov_rank" in config and not is_of_speculators(config)))


def layer_types(config: RawConfig) -> list[str]:
    types = list(config.get("layer_types") or [FULL] * config["num_hidden_layers"])
    return [SLIDING] * len(types) if config.get("use_swa") and SLIDING not in types else types


def block_masks(config: RawConfig) -> dict[str, BlockMask]:
    """Return the mask of each type of layers.

    - speculators (``models/dflash/attention.py``): full layers are bidirectional. Sliding ones have a window before the
      anchor, and are causal unless ``sliding_window_non_causal``, which DFlash 2 sets.
    - transformers (``muse_glimmer_assistant``): bidirectional, up to a distance of ``sliding_window`` inclusive.
    - The authors' format: sliding layers are causal and others not, unless one field declares it for all. A window
      counts the token itself. So vLLM 0.32 and SGLang read it; their measurements for z-lab's Gemma 4 drafter agree.
    """
    window = config.get("swa_window_size") or config.get("sliding_window")
    if SLIDING not in layer_types(config):
        window = None
    elif not isinstance(window, int):
        raise UnsupportedModelError(
            f"sliding_window: {window!r}; expected the window of the drafter's sliding layers. Restore the original."
        )
    if is_of_speculators(config):
        bidirectional = config.get("sliding_window_non_causal", config.get("speculators_model_type") == "dflash2")
        return {FULL: BlockMask(), SLIDING: BlockMask(not bidirectional, window, from_anchor=True)}
    if config.get("model_type") == _OF_TRANSFORMERS:
        return {FULL: BlockMask(), SLIDING: BlockMask(window=window)}
    declared = next((config[name] for name in ("is_causal", "causal") if config.get(name) is not None), None)
    slides = SLIDING in (config.get("layer_types") or ())
    return {
        FULL: BlockMask(bool(declared)),
        SLIDING: BlockMask(slides if declared is None else bool(declared), window and window - 1),
    }


def _layers_read(config: RawConfig) -> tuple[int, ...]:
    """Return the trunk's layers whose input is read: speculators counts these, the authors the layers before them."""
    if is_of_speculators(config):
        return tuple(config["aux_hidden_state_layer_ids"])
    return tuple(layer + 1 for layer in config["target_layer_ids"])


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
        layers = _layers_read(config)
        masks = block_masks(config)
        fields = {
            **{name: value for name, value in config.items() if name not in ("architectures", "model_type")},
            "layer_types": layer_types(config),
            "use_sliding_window": True,
            "sliding_window": masks[SLIDING].window,
            "block_masks": masks,
            "sample_from_anchor": samples_anchor(config),
        }
        return replace(
            family,
            layer=replace(family.classes, config=lambda text_config, num_modules: Qwen3Config.from_dict(fields)),
            wiring=replace(family.wiring, trunk_layers=lambda text_config: layers),
            engines={**family.engines, **self.refusing(config)},
        )

    def refusing(self, config: RawConfig) -> Mapping[str, EngineSupport]:
        """Return the engines that do not draft with this very drafter, by their sources."""
        refusing: dict[str, EngineSupport] = {}
        if is_of_speculators(config) and "markov_rank" not in config:
            refusing["llama.cpp"] = no("its converter reads the authors' format of such a drafter")
        return refusing

    def most_drafts(self, config: RawConfig) -> int:
        """Return the number of the block's rows that give drafts."""
        return int(config["block_size"]) - (not samples_anchor(config))

    def details(self, config: RawConfig) -> str:
        masks, num_sliding = block_masks(config), layer_types(config).count(SLIDING)
        causal = ", causal" if masks[SLIDING].causal else ""
        return (
            f", which reads the input of layers {', '.join(map(str, _layers_read(config)))}, drafts blocks of "
            f"{config['block_size']} tokens with mask token {config['mask_token_id']}, from "
            f"{config.get('draft_vocab_size') or config['vocab_size']} of {config['vocab_size']} tokens"
            + (f", with {num_sliding} sliding layers of window {masks[SLIDING].window}{causal}" if num_sliding else "")
        )


DFLASH = DFlashParts(
    head="mtp_train.heads.dflash:DFlashHead",
    prefixes=("",),
    rules=key_rules("", {"{rest}": "{rest}"}),
    layer=HeadLayer("qwen3", "Qwen3"),
    wiring=Wiring(default=Convention(hidden="of_layers")),
    serving={
        "vllm": (in_vllm("dflash"), STATES_IN_VLLM),
        "sglang": (in_sglang("DFLASH"), STATES_IN_SGLANG),
    },
    other_trunks=EngineSupport(None, "not verified by this project"),
    other_engines=EngineSupport(None, "not verified by this project"),
    format=DraftFormat(
        written_as=("DFlashDraftModel",),
        read_as=("DFlashSpeculator", "MuseGlimmerAssistantModel"),
        nested="dflash_config",
        sizes=_sizes,
        drafted_field="draft_vocab_size",
        draft_vocab=True,
        renames={"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."},
        plain_settings={
            "speculators_model_type": ("dflash", None),
            "shift_label": (False, None),
            "attention_value_scale": (None, 1.0),
            "is_neox_style": (True, None),
        },
    ),
)
