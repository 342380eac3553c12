"""DSpark drafters: DFlash drafters with a small head that corrects each draft by the one before it.

:mod:`mtp_train.heads.dspark` runs them. Two formats are read: that of the authors (DeepSeek's ``Qwen3DSparkModel``) and
that of the speculators package. They are decoded with, and not trained. The blocks that DeepSeek V4 and Mistral Large 4
have in the trunk's checkpoint are other ones, see ``heads/diagnose.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtp_train.families.engines import EngineSupport, no
from mtp_train.families.kinds.dflash import DFLASH, DFlashParts, in_llama_cpp, in_sglang, in_vllm
from mtp_train.families.kinds.llama import STATES_IN_LLAMA_CPP, STATES_IN_SGLANG, STATES_IN_VLLM
from mtp_train.families.spec import RawConfig


def markov_type(config: RawConfig) -> str:
    return str(config.get("markov_head_type", "vanilla")) if config.get("markov_rank") else "no"


@dataclass(frozen=True, kw_only=True)
class DSparkParts(DFlashParts):
    """A drafter, built from the config of its own checkpoint."""

    def refusing(self, config: RawConfig) -> Mapping[str, EngineSupport]:
        if markov_type(config) == "vanilla":
            return {}
        return dict.fromkeys(("vllm", "llama.cpp"), no("has vanilla Markov heads alone"))

    def details(self, config: RawConfig) -> str:
        kind = markov_type(config)
        rank = f" of rank {config['markov_rank']}" if kind != "no" else ""
        confident = (
            "; its confidence head is not used here: it cuts drafts short, and changes no token"
            if config.get("enable_confidence_head")
            else ""
        )
        return f"{super().details(config)}, with {kind} Markov head{rank}{confident}"


DSPARK = DSparkParts(
    **{
        **vars(DFLASH),
        "head": "mtp_train.heads.dspark:DSparkHead",
        "serving": {
            "vllm": (in_vllm("dspark"), STATES_IN_VLLM),
            "sglang": (in_sglang("DSPARK"), STATES_IN_SGLANG),
            "llama.cpp": (in_llama_cpp("dspark"), STATES_IN_LLAMA_CPP),
        },
        "format": replace(
            DFLASH.format,
            written_as=("Qwen3DSparkModel", "DSparkDraftModel"),
            read_as=("DSparkSpeculator",),
            unread=("confidence_head.",),
            plain_settings={
                **DFLASH.format.plain_settings,
                "speculators_model_type": ("dspark", None),
                "markov_head_type": ("vanilla", "gated", "rnn"),
            },
        ),
    }
)
