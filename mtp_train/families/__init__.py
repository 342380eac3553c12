"""The families mtp-train knows, one record each, and how a checkpoint's config picks one."""

from __future__ import annotations

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.assistants import Assistant as Assistant
from mtp_train.families.assistants import assistant_for as assistant_for
from mtp_train.families.attached import ATTACHED
from mtp_train.families.convention import Convention as Convention
from mtp_train.families.deepseek import DEEPSEEK_V3, DEEPSEEK_V32
from mtp_train.families.deepseek_v4 import DEEPSEEK_V4
from mtp_train.families.dots import DOTS3_NOTE
from mtp_train.families.drafts import draft_kind as draft_kind
from mtp_train.families.drafts import draft_title as draft_title
from mtp_train.families.drafts import of_kind as of_kind
from mtp_train.families.glm import GLM4_MOE, GLM4_MOE_LITE, GLM5_NEXT, GLM_MOE_DSA, GLM_OCR
from mtp_train.families.headless import HEADLESS, NOT_ATTACHED
from mtp_train.families.headless import refuse_unserved_heads as refuse_unserved_heads
from mtp_train.families.hunyuan import HY_V3, HY_V4
from mtp_train.families.inkling import INKLING
from mtp_train.families.longcat import LONGCAT_FLASH
from mtp_train.families.mimo import MIMO, MIMO_V2
from mtp_train.families.minimax import MINIMAX_M3
from mtp_train.families.nemotron import NEMOTRON_H
from mtp_train.families.others import BAILING_HYBRID, ERNIE4_5_MOE, EXAONE4_5, EXAONE_MOE, MELLUM
from mtp_train.families.qwen import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from mtp_train.families.qwen4 import QWEN4_EXP
from mtp_train.families.spec import Family as Family
from mtp_train.families.spec import HeadKind as HeadKind
from mtp_train.families.spec import KeyRule as KeyRule
from mtp_train.families.spec import RawConfig as RawConfig
from mtp_train.families.spec import RecurrentKernels as RecurrentKernels
from mtp_train.families.spec import SharedKey as SharedKey
from mtp_train.families.spec import raw_text_config as raw_text_config
from mtp_train.families.step import STEP3P7
from mtp_train.families.wrappers import WRAPPERS as WRAPPERS
from mtp_train.families.wrappers import in_wrapper

FAMILIES: tuple[Family, ...] = (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    QWEN4_EXP,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    GLM5_NEXT,
    GLM_OCR,
    MIMO,
    MIMO_V2,
    NEMOTRON_H,
    HY_V3,
    HY_V4,
    BAILING_HYBRID,
    EXAONE_MOE,
    EXAONE4_5,
    ERNIE4_5_MOE,
    STEP3P7,
    LONGCAT_FLASH,
    MINIMAX_M3,
    INKLING,
    DOTS3_NOTE,
    MELLUM,
    *ATTACHED,
)
"""In the order in which tables show them."""


def family_for(config: RawConfig, *, where: str) -> Family:
    """Return the family of a raw ``config.json``.

    Args:
        config: The parsed file, vision-language wrapper or text-only.
        where: The checkpoint's path, for the message.

    Raises:
        UnsupportedModelError: No family claims the model type, or it is an external drafter's, or a draft model's.
    """
    assistant = assistant_for(config)
    if assistant is not None:
        raise UnsupportedModelError(
            f"{where}: a {assistant.title}, an external drafter for {assistant.trunk.title} trunks without a head in "
            "it; expected a checkpoint that has a head to put back or retrain. Serve it beside its trunk as it is: "
            f"'mtp-train inspect {where}' prints the flags."
        )
    kind = draft_kind(config)
    if kind is not None:
        raise UnsupportedModelError(
            f"{where}: {draft_title(kind)} draft model without a trunk; expected a checkpoint with one. Name it "
            f"beside its trunk: 'mtp-train evaluate TRUNK --head {where}'."
        )
    # Some wrappers leave it to themselves to say what is in them, some have another family's text in them.
    whole = str(config.get("model_type"))
    model_type = str(raw_text_config(config).get("model_type") or whole)
    if whole in HEADLESS and whole not in WRAPPERS:
        # Whatever the text in it is.
        model_type = whole
    for family in FAMILIES:
        if {whole, model_type} & set(family.model_types):
            return in_wrapper(family, config, where=where)
    if model_type in HEADLESS:
        raise UnsupportedModelError(
            f"{where}: model_type '{model_type}': {HEADLESS[model_type]}; expected a model that has a head to put back "
            f"or retrain. {NOT_ATTACHED}"
        )
    known = ", ".join(f"{family.title} ({', '.join(family.model_types)})" for family in FAMILIES)
    raise UnsupportedModelError(
        f"{where}: config.json has model_type '{model_type}', an architecture without a known head layout; expected "
        f"one of {known}. Add a family record (CONTRIBUTING.md says how) or use a supported model."
    )
