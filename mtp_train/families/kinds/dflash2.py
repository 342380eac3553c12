"""DFlash 2 drafters: DFlash drafters with convolutions along the block, and a selector of the best tokens.

:mod:`mtp_train.heads.dflash2` runs them. The formats are those of DFlash. They are decoded with, and not trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtp_train.families.kinds.dflash import DFLASH, DFlashParts
from mtp_train.families.spec import RawConfig


@dataclass(frozen=True, kw_only=True)
class DFlash2Parts(DFlashParts):
    """A drafter, built from the config of its own checkpoint."""

    def details(self, config: RawConfig) -> str:
        return f"{super().details(config)}, with a selector of {config['selector_top_k']} tokens"


DFLASH2 = DFlash2Parts(
    **{
        **vars(DFLASH),
        "head": "mtp_train.heads.dflash2:DFlash2Head",
        "format": replace(
            DFLASH.format,
            written_as=("DFlash2DraftModel",),
            read_as=(),
            plain_settings={
                **DFLASH.format.plain_settings,
                "speculators_model_type": ("dflash2", None),
                "input_embedding_scale": (None, 1.0),
                "output_multiplier": (None, 1.0),
                "final_logit_softcapping": (None, 0.0),
            },
        ),
    }
)
