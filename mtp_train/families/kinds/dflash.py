"""DFlash drafters (arXiv:2602.06036): a few Qwen3 layers that draft a block of tokens in one pass.

A drafter reads the states of several trunk layers, and its input is the last committed token followed by mask tokens.
:mod:`mtp_train.heads.dflash` runs it. Three formats are read: that of the authors (``dflash_config``), that of the
speculators package (``transformer_layer_config``) and that of transformers. They are decoded with, and not trained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers import PretrainedConfig, Qwen3Config

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.engines import UNVERIFIED, Convention, Engines, EngineSupport, no, remarked
from mtp_train.families.kinds.kind import DraftFormat, DraftParts, own_sizes
from mtp_train.families.kinds.llama import STATES_IN_LLAMA_CPP, STATES_IN_SGLANG, STATES_IN_VLLM, in_llama_cpp, in_vllm
from mtp_train.families.layouts import key_rules
from mtp_train.families.spec import Family, HeadLayer, RawConfig, Wiring

FULL = "full_attention"
SLIDING = "sliding_attention"
_OF_SPECULATORS = "aux_hidden_state_layer_ids"
"""A field that the configs of the speculators package alone have."""
_OF_TRANSFORMERS = "muse_glimmer_assistant"
_OTHERWISE = "; it masks some layers otherwise than in training, and may draft other tokens"


def served_as(method: str) -> dict[str, tuple[EngineSupport, Collection[str]]]:
    """Return the engines' commands for a kind of block drafter, none of which was run."""
    sglang = (
        f"python -m sglang.launch_server --model-path TRUNK --speculative-algorithm {method.upper()} "
        "--speculative-draft-model-path {path}"
    )
    commands = {
        "vllm": (in_vllm(method).text, STATES_IN_VLLM),
        "sglang": (sglang, STATES_IN_SGLANG),
        "llama.cpp": (in_llama_cpp(method).text, STATES_IN_LLAMA_CPP),
    }
    return {name: (EngineSupport(None, f"not verified: {text}"), trunks) for name, (text, trunks) in commands.items()}


class BlockMask(NamedTuple):
    """The keys to which the tokens of a block attend in one type of layers. The first token is the anchor."""

    causal: bool = False
    """Whether a token attends to no later token of its block."""
    window: int | None = None
    """Largest distance between a token and a key; None if there is no limit."""
    from_anchor: bool = False
    """Whether distances are those of the anchor: every token attends to the same keys before the block."""


def samples_anchor(config: RawConfig) -> bool:
    """Return whether the block's first row gives the first draft, and not the second one.

    Engines take a missing field in the speculators package's format for false, and for true in a DSpark drafter's own.
    """
    return bool(config.get("sample_from_anchor", "markov_rank" in config and _OF_SPECULATORS not in config))


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
    types = layer_types(config)
    window = config.get("swa_window_size") or config.get("sliding_window")
    if SLIDING in types and not isinstance(window, int):
        raise UnsupportedModelError(
            f"sliding_window: {window!r}; expected the window of the drafter's sliding layers. Restore the original."
        )
    declared = config.get("is_causal", config.get("causal"))
    if _OF_SPECULATORS in config:
        bidirectional = config.get("sliding_window_non_causal", config.get("speculators_model_type") == "dflash2")
        return {FULL: BlockMask(), SLIDING: BlockMask(not bidirectional, window, from_anchor=True)}
    if config.get("model_type") == _OF_TRANSFORMERS:
        return {FULL: BlockMask(), SLIDING: BlockMask(window=window)}
    causal = config.get("layer_types") == types if declared is None else bool(declared)
    return {FULL: BlockMask(bool(declared)), SLIDING: BlockMask(causal, (window or 1) - 1)}


def _layers_read(config: RawConfig) -> tuple[int, ...]:
    """Return the trunk's layers whose input is read: speculators counts these, the authors the layers before them."""
    if _OF_SPECULATORS in config:
        return tuple(config[_OF_SPECULATORS])
    return tuple(layer + 1 for layer in config["target_layer_ids"])


def _sizes(config: RawConfig, trunk: PretrainedConfig) -> Mapping[str, tuple[Any, Any]]:
    layers = _layers_read(config)
    count = trunk.num_hidden_layers
    return {
        **own_sizes(config, trunk),
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
            engines={**family.engines, **self.unlike(config, family.engines)},
        )

    def unlike(self, config: RawConfig, engines: Engines) -> dict[str, EngineSupport]:
        """Return the engines that do not draft like the package that trained this very drafter, by their sources."""
        if config.get("markov_head_type", "vanilla") != "vanilla":
            return dict.fromkeys(("vllm", "llama.cpp"), no("has vanilla Markov heads alone"))
        found, slides, is_spark = {}, SLIDING in layer_types(config), "markov_rank" in config
        if _OF_SPECULATORS in config:
            if not is_spark:
                found["llama.cpp"] = no("its converter reads the authors' format of such a drafter")
            # vLLM 0.32 measures a window from each token, and makes full layers of DFlash causal too, not of DSpark.
            if slides or not (is_spark or config.get("sliding_window_non_causal", True)):
                found["vllm"] = remarked(engines["vllm"], _OTHERWISE)
        elif slides and block_masks(config)[SLIDING].causal:
            found["llama.cpp"] = remarked(engines["llama.cpp"], _OTHERWISE)
        return found

    def most_drafts(self, config: RawConfig) -> int:
        """Return the number of the block's rows that give drafts."""
        return config["block_size"] - (not samples_anchor(config))

    def details(self, config: RawConfig) -> str:
        types, mask, text = layer_types(config), block_masks(config)[SLIDING], ""
        if SLIDING in types:
            kind = ", causal" * mask.causal
            text = f", with sliding layers ({types.count(SLIDING)}{kind}) that reach {mask.window} tokens back"
        if "selector_top_k" in config:
            text += f", with a selector of {config['selector_top_k']} tokens"
        if "markov_rank" in config:
            text += (
                f", with a Markov head ({config.get('markov_head_type', 'vanilla')}) of rank {config['markov_rank']}"
            )
        if config.get("enable_confidence_head"):
            text += "; its confidence head, which only cuts drafts short, is not used here"
        return (
            f", which reads the input of layers {', '.join(map(str, _layers_read(config)))}, drafts blocks of "
            f"{config['block_size']} tokens with mask token {config['mask_token_id']}, from "
            f"{config.get('draft_vocab_size') or config['vocab_size']} of {config['vocab_size']} tokens{text}"
        )


DFLASH = DFlashParts(
    head="mtp_train.heads.dflash:DFlashHead",
    prefixes=("",),
    rules=key_rules("", {"{rest}": "{rest}"}),
    layer=HeadLayer("qwen3", "Qwen3"),
    wiring=Wiring(default=Convention(hidden="of_layers")),
    serving=served_as("dflash"),
    other_trunks=UNVERIFIED,
    other_engines=no("drafts with MuseGlimmerAssistantModel alone"),
    format=DraftFormat(
        written_as=("DFlashDraftModel",),
        read_as=("DFlashSpeculator", "MuseGlimmerAssistantModel"),
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
