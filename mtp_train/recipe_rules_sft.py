"""What the fields of a recipe may not say together where it fine-tunes the trunk, each with its cure."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from mtp_train.recipe import Recipe
from mtp_train.recipe_hints import shown

# Settings of a retrained head, the value that says nothing, and why anything else would be passed over in silence.
_WITHOUT_MEANING: dict[str, tuple[Any, str]] = {
    "model.adapter": (None, "the trunk that is trained wears none"),
    "model.quantization": (None, "packed weights cannot be trained"),
    "model.offload": (None, "what is trained lies on the device"),
    "head.kind": ("mtp", "only such a head lies in the trunk's own checkpoint"),
    "head.lora": (None, "LoRA on the trunk is sft.lora"),
    "head.draft_vocab": (None, "the head drafts from all tokens"),
    "head.convention": ("auto", "the head is read in its family's usual way"),
    "data.regenerate": (None, "the trunk learns the sources' own responses"),
    "data.pack": (False, "a row of the Trainer's holds one document"),
    "objective.loss": ("auto", "the trunk learns by cross-entropy, a head beside it by KL"),
    "objective.temperature": (1.0, "no loss here has one"),
    "objective.unroll": ("exact", "a head beside the trunk is unrolled as in decoding"),
    "objective.on_policy": (False, "a head beside the trunk reads the text that the trunk reads"),
    "objective.vocab": ("all", "the head drafts from all tokens"),
    "objective.rows": ("torch", "a head beside the trunk learns from rows in torch"),
    "train.attention": ("dense", "a head beside the trunk is unrolled with masks"),
    "train.hidden_cache": (None, "the trunk's states change with every step"),
    "train.select": (None, "the last checkpoint is taken"),
    "gate.baseline": ("auto", "the head beside the trunk is compared with the one that it started from"),
    "export.enabled": (True, "the fine-tuned checkpoint is what the run is for"),
    "study": (None, "a run is one or the other"),
}
# Those of the head that is trained beside the trunk.
_OF_THE_HEAD_BESIDE: dict[str, Any] = {"sft.head_lr": 1e-4, "objective.depth_decay": 0.6, "gate.confidence": 0.95}


def unused_settings(recipe: Recipe) -> Iterator[str]:
    """Name every setting that a fine-tune has no use for."""
    if recipe.sft is None:
        return
    for path, (unset, reason) in _WITHOUT_MEANING.items():
        found = attrgetter(path)(recipe)
        if found != unset:
            yield f"{path}: {shown(found)} with sft: {reason}; expected {shown(unset)}. Write {path}: {shown(unset)}."
    if recipe.sft.head == "beside":
        return
    for path, unset in _OF_THE_HEAD_BESIDE.items():
        found = attrgetter(path)(recipe)
        if found != unset:
            yield (
                f"{path}: {shown(found)} with sft.head: kept, which trains no head; expected {shown(unset)}. Leave it "
                "out, or write sft.head: beside."
            )


def head_is_there(recipe: Recipe) -> Iterator[str]:
    """Check where the head comes from: it is one that a checkpoint has."""
    if recipe.sft is None:
        return
    if recipe.attaches:
        yield (
            f"head.init: {recipe.head.init!r} with sft, which keeps a head that is there; expected native (of "
            "model.trunk) or graft (of model.head_from). Train a new one afterwards, with recipes/attach_head.yaml."
        )
    if recipe.head.init == "native" and recipe.model.head_from is not None:
        yield (
            f"model.head_from: {recipe.model.head_from!r} with head.init: native, the head of model.trunk; expected "
            "null. Write model.head_from: null, or head.init: graft."
        )


def arms_are_of_the_tuned_trunk(recipe: Recipe) -> Iterator[str]:
    """Check that the arms are those that a fine-tune has, and that they say what became of the head."""
    if recipe.sft is None:
        return
    arms = recipe.evaluate.arms
    beside = recipe.sft.head == "beside"
    for arm in ("graft", *(("retrained",) if beside else ())):
        if arm not in arms:
            yield (
                f"evaluate.arms: no {arm!r} with sft.head: {recipe.sft.head}; expected what says how the head drafts "
                f"for the tuned trunk. Add {arm!r}."
            )
    if "retrained" in arms and not beside:
        yield (
            "evaluate.arms: 'retrained' with sft.head: kept, which trains no head; expected none of it. Remove it, or "
            "write sft.head: beside."
        )
    if "native" in arms:
        yield (
            "evaluate.arms: 'native' with sft; expected 'graft', the head as it was before, on the tuned trunk. Write "
            "that."
        )


SFT_RULES = (
    ((*_WITHOUT_MEANING, *_OF_THE_HEAD_BESIDE, "sft"), unused_settings),
    (("sft", "head.init", "model.head_from"), head_is_there),
    (("sft", "evaluate.arms"), arms_are_of_the_tuned_trunk),
)
"""What each reads, and the check."""
