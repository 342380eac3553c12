"""Vision-language models around a trunk that gets a head attached.

They are all of one build: transformers has the language model as ``model.language_model``, releases call its weights
``language_model.model.*``. It is loaded with all that is around it, so that an adapter of the whole fits; a head is
trained and drafts on text. The head is kept as the language model alone would keep it. Where that one scales its logits
(Granite, Command R), transformers leaves the scale out inside of a wrapper; engines and we do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.attached import transformers_only
from mtp_train.families.spec import Family, RawConfig, raw_text_config

WRAPPERS: Mapping[str, str] = {
    "gemma3": "Gemma 3",
    "mistral3": "Mistral 3",
    "llava": "LLaVA",
    "llava_next": "LLaVA-NeXT",
    "aya_vision": "Aya Vision",
    "internvl": "InternVL",
}
"""Value of the whole config's ``model_type`` to how people call it."""


def in_wrapper(family: Family, config: RawConfig, *, where: str) -> Family:
    """Return a family's record for a checkpoint with this config, which may be that of a vision-language model.

    Raises:
        UnsupportedModelError: A head is attached to the language model on its own, but not inside of this one.
    """
    if not family.attached or raw_text_config(config) is config:
        return family
    wrapper = str(config.get("model_type"))
    reason = None
    if wrapper not in WRAPPERS:
        reason = "how it keeps its language model is not known here"
    elif family.declared_beside.get("architectures"):
        reason = "engines find such a head by the architecture's name, which has to stay the wrapper's"
    if reason is not None:
        raise UnsupportedModelError(
            f"{where}: model_type '{wrapper}' around {family.title}: its releases carry no MTP head, and none is "
            f"attached inside of it ({reason}); expected a text-only model, or one of {', '.join(WRAPPERS)}. Use the "
            "text-only model; recipes/attach.md says how."
        )
    return replace(
        family,
        title=f"{family.title} in {WRAPPERS[wrapper]}",
        wrapper=wrapper,
        trunk_prefixes=("language_model.model.", "model.language_model."),
        only_with_vision=True,
        conventions={},
        engines=transformers_only(family.engines["transformers"]),
    )
