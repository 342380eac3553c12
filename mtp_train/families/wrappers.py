"""Vision-language wrappers around a trunk that gets a head attached.

All of them have one structure: the language model is ``model.language_model`` in transformers, and its tensors are
``language_model.model.*`` in releases. The whole wrapper is loaded, so that an adapter trained on it fits. The head is
trained on text, drafts text, and is stored in the layout of the language model alone. If the language model scales its
logits (Granite, Command R), transformers omits the scale inside of a wrapper; engines and this package apply it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.models.attached import transformers_only
from mtp_train.families.spec import Engines, Family, RawConfig, raw_text_config

WRAPPERS: Mapping[str, str] = {
    "gemma3": "Gemma 3",
    "mistral3": "Mistral 3",
    "llava": "LLaVA",
    "llava_next": "LLaVA-NeXT",
    "aya_vision": "Aya Vision",
    "internvl": "InternVL",
}
"""Value of ``model_type`` in the whole config to the name in messages."""


def in_wrapper(family: Family, config: RawConfig, *, where: str) -> Family:
    """Return the family's record, adapted if the config is a vision-language wrapper's.

    Raises:
        UnsupportedModelError: A head can be attached to the language model alone, but not inside of this wrapper.
    """
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
        engines=Engines(support=transformers_only(family.engines.support["transformers"])),
    )
