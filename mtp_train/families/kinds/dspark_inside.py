"""The DSpark drafter in a checkpoint of DeepSeek V4 (``mtp.*``). It is decoded with, and not trained.

DeepSeek-V4-Flash-DSpark's ``inference/model.py`` defines it, and vLLM 0.33 and SGLang 0.5.23 draft alike. Its layers
are of the trunk's own type, with residual streams. :mod:`mtp_train.heads.dspark` runs it. DeepSeek V4.1 and Mistral
Large 4 have other ones, see ``heads/diagnose.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.engines import DSPARK, Convention
from mtp_train.families.kinds.dflash import SLIDING, BlockMask
from mtp_train.families.kinds.kind import KindParts
from mtp_train.families.layouts import key_rules, layers_of, weights
from mtp_train.families.models.after_the_trunk import DEEPSEEK_V4
from mtp_train.families.spec import RawConfig, Wiring
from mtp_train.head_kinds import DSPARK_INSIDE

BLOCK_SIZE = "dspark_block_size"
LAYERS_READ = "dspark_target_layer_ids"
FIELDS = (BLOCK_SIZE, LAYERS_READ, "dspark_noise_token_id", "dspark_markov_rank")


def describes_drafter(config: RawConfig) -> bool:
    """Return whether a config of DeepSeek V4 describes such a drafter."""
    return {*FIELDS} <= config.keys() and isinstance(config[LAYERS_READ], list)


@dataclass(frozen=True, kw_only=True)
class InsideParts(KindParts):
    """The parts of a drafter that the trunk's config describes."""

    def most_drafts(self, config: RawConfig) -> int:
        return config[BLOCK_SIZE]


PARTS = InsideParts(head="mtp_train.heads.dspark:InsideHead")


def _stages(config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    read = config.dspark_target_layer_ids
    mask = config.dspark_noise_token_id
    if not read or not {*read} <= {*range(config.num_hidden_layers)} or mask not in range(config.vocab_size):
        raise UnsupportedModelError(
            f"config.json: {LAYERS_READ} {read} and dspark_noise_token_id {mask}; expected layers and a token of the "
            "trunk. Restore the original."
        )
    make = layers_of(
        layer_types=SLIDING,
        mlp_layer_types="moe",
        block_size=config.dspark_block_size,
        mask_token_id=mask,
        markov_rank=config.dspark_markov_rank,
        # Every token of the block attends to the last tokens before it, as many as in a window, and to the whole block.
        block_masks={SLIDING: BlockMask(window=config.sliding_window, from_anchor=True)},
        sample_from_anchor=True,
    )
    # As many as the layers that are read; releases declare one module.
    return make(config, len(read))


DEEPSEEK_V4_DSPARK = replace(
    DEEPSEEK_V4,
    name="deepseek_v4_dspark",
    config_types=DEEPSEEK_V4.model_types,
    title="DeepSeek V4 with DSpark",
    kind=DSPARK_INSIDE,
    declaration=replace(DEEPSEEK_V4.declaration, others=FIELDS),
    keys=replace(
        DEEPSEEK_V4.keys,
        num_sublayers=lambda config: len(config[LAYERS_READ]),
        rules=(
            *key_rules("mtp.0.", weights({"main_proj": "fc", "main_norm": "hidden_norm"})),
            *key_rules(
                "mtp.{last}.",
                {
                    **weights({"norm": "norm.1", "confidence_head.proj": "confidence_head.proj"}),
                    **weights({f"markov_head.{one}": f"markov_head.{one}" for one in ("markov_w1", "markov_w2")}),
                    **{f"hc_head_{one}": f"norm.0.hc_{one}" for one in ("fn", "base", "scale")},
                },
            ),
            *(
                replace(
                    rule,
                    native=rule.native.replace("{module}", "{sub}"),
                    ours=rule.ours.replace("layer.", "layers.{sub}.", 1),
                )
                for rule in DEEPSEEK_V4.keys.rules
                if rule.ours.startswith("layer.")
            ),
        ),
    ),
    wiring=Wiring(
        # The states after these layers.
        trunk_layers=lambda config: tuple(layer + 1 for layer in config.dspark_target_layer_ids),
        default=Convention(hidden="of_layers"),
    ),
    layer=replace(DEEPSEEK_V4.require_layer(), config=_stages),
    engines=DSPARK,
)
