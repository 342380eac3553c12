"""The registry of model families, and the choice of a family by a checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.kinds.assistant import GEMMA4
from mtp_train.families.kinds.dspark_inside import DEEPSEEK_V4_DSPARK, describes_drafter
from mtp_train.families.kinds.kind import draft_kind
from mtp_train.families.models import after_the_trunk, beside_the_trunk
from mtp_train.families.models.attached import ATTACHED, transformers_only
from mtp_train.families.spec import Family, RawConfig, raw_text_config

FAMILIES: Sequence[Family] = (*beside_the_trunk.QWEN, *after_the_trunk.FAMILIES, *beside_the_trunk.FAMILIES, *ATTACHED)
"""All families whose trunks have or get an MTP head, in the order in which tables list them."""
_TRUNKS = (*FAMILIES, GEMMA4, DEEPSEEK_V4_DSPARK)
_NONE = "its releases carry no MTP head"
_UNSERVED = "no engine has an MTP head for it"
_DSPARK = "its releases carry no MTP head but a DSpark drafter (mtp_dspark.*)"
_IQUEST_DRAFTER = "external drafter of an IQuest-Q1 trunk, beside which it is served"

HEADLESS: Mapping[str, str] = {
    **dict.fromkeys(("llama4", "llama4_text", "mistral3", "mistral4", "gemma", "gemma3", "starcoder2"), _NONE),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text", "granitemoehybrid"), _NONE),
    **dict.fromkeys(("mistral_large4", "mistral_large4_text"), _DSPARK),
    "deepseek_v41": f"{_NONE} but a DSpark drafter (mtp.*), and transformers has no class",
    "gigachat3_5": "SGLang alone has an MTP head for it, and transformers no class",
    "iquest_q1": f"{_NONE}: its drafter is a separate checkpoint (iquest_q1_mtp), and transformers has no class",
    **dict.fromkeys(("iquest_q1_mtp", "iquest_q1_mtp_recursive"), _IQUEST_DRAFTER),
    "kimi_k3": "vLLM alone has an MTP head for it, and transformers no class",
    **dict.fromkeys(("kimi_k2", "kimi_k25", "kimi_linear", "solar_open", "youtu", "axk1", "AXK1"), _UNSERVED),
}
"""Value of ``model_type`` to the reason why no head is handled."""

WRAPPERS: Mapping[str, str] = {
    "gemma3": "Gemma 3",
    "mistral3": "Mistral 3",
    "llava": "LLaVA",
    "llava_next": "LLaVA-NeXT",
    "aya_vision": "Aya Vision",
    "internvl": "InternVL",
}
"""Vision-language wrappers around a trunk that gets a head attached: ``model_type`` of the whole config to its name.

All of them have one structure: the language model is ``model.language_model`` in transformers, and its tensors are
``language_model.model.*`` in releases. The whole wrapper is loaded, so that an adapter trained on it fits. The head is
trained on text, drafts text, and is stored in the layout of the language model alone. If the language model scales its
logits (Granite, Command R), transformers omits the scale inside of a wrapper; engines and this package apply it.
"""


def family_named(name: str) -> Family:
    """Return the family with this name; raise a KeyError if there is none."""
    return {family.name: family for family in _TRUNKS}[name]


def family_for(config: RawConfig, *, where: str) -> Family:
    """Return the family of a raw ``config.json``.

    Raises:
        UnsupportedModelError: No family has the model type, or the config is a draft model's.
    """
    kind = draft_kind(config)
    if kind is not None:
        raise UnsupportedModelError(
            f"{where}: {kind.title} draft model without a trunk; expected a checkpoint with one. Name it "
            f"beside its trunk: 'mtp-train evaluate TRUNK --head {where} --out evaluation'."
        )
    # Some wrappers' text configs have no model type, others have a text model of another family.
    whole = str(config.get("model_type"))
    model_type = str(raw_text_config(config).get("model_type") or whole)
    if whole in HEADLESS and whole not in WRAPPERS:
        # Refuse such a wrapper even if a family has the type of its text config.
        model_type = whole
    for family in _TRUNKS:
        if {whole, model_type} & set(family.model_types):
            if family.model_types == DEEPSEEK_V4_DSPARK.model_types and describes_drafter(config):
                return DEEPSEEK_V4_DSPARK
            return in_wrapper(family, config, where=where)
    if model_type in HEADLESS:
        raise UnsupportedModelError(
            f"{where}: model_type '{model_type}': {HEADLESS[model_type]}; expected a model that has a head to put back "
            f"or retrain. A head can be attached to {', '.join(family.title for family in ATTACHED)}."
        )
    known = ", ".join(f"{family.title} ({', '.join(family.model_types)})" for family in FAMILIES)
    raise UnsupportedModelError(
        f"{where}: config.json has model_type '{model_type}', an architecture without a known head layout; expected "
        f"one of {known}. Add a family record (mtp_train/families/README.md describes how) or use a supported model."
    )


def in_wrapper(family: Family, config: RawConfig, *, where: str) -> Family:
    """Return the family's record, adapted if the config is a vision-language wrapper's."""
    if not family.attached or raw_text_config(config) is config:
        return family
    wrapper = str(config.get("model_type"))
    reason = None
    if wrapper not in WRAPPERS:
        reason = "the place of its language model in it is not known here"
    elif family.declaration.beside.get("architectures"):
        reason = "engines recognise such a head by the architecture's name, which has to stay the wrapper's"
    if reason is not None:
        raise UnsupportedModelError(
            f"{where}: model_type '{wrapper}' around {family.title}: its releases carry no MTP head, and none is "
            f"attached inside of it ({reason}); expected a text-only model, or one of {', '.join(WRAPPERS)}. Use the "
            "text-only model: mtp-train init writes the recipe that attaches a head."
        )
    return replace(
        family,
        title=f"{family.title} in {WRAPPERS[wrapper]}",
        wrapper=wrapper,
        keys=replace(family.keys, trunk_prefixes=("language_model.model.", "model.language_model.")),
        trunk=replace(family.trunk, only_with_vision=True),
        wiring=replace(family.wiring, conventions={}),
        engines=transformers_only(family.engines["transformers"]),
    )
