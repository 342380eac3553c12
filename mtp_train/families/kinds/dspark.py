"""DSpark drafters: DFlash drafters with a small head that corrects each draft by the one before it.

:mod:`mtp_train.heads.dspark` runs them. Two formats are read: that of the authors (DeepSeek's ``Qwen3DSparkModel``) and
that of the speculators package. They are decoded with, and not trained. The blocks that DeepSeek V4 and Mistral Large 4
have in the trunk's checkpoint are other ones, see ``heads/diagnose.py``.
"""

from dataclasses import replace

from mtp_train.families.kinds.dflash import DFLASH, served_as

DSPARK = replace(
    DFLASH,
    head="mtp_train.heads.dspark:DSparkHead",
    serving=served_as("dspark"),
    format=replace(
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
)
