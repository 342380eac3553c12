"""The choice of a family by a checkpoint's config."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_train.errors import UnsupportedModelError
from mtp_train.families import FAMILIES, family_for
from mtp_train.families.engines import complete
from mtp_train.families.registry import HEADLESS


def test_names_and_model_types_have_one_family() -> None:
    for owned in ([family.name for family in FAMILIES], [one for family in FAMILIES for one in family.model_types]):
        assert len(set(owned)) == len(owned)


def test_records_name_engines_that_are_known() -> None:
    for family in FAMILIES:
        assert {*family.engines, *family.wiring.conventions} <= complete({}).keys(), family.name


@pytest.mark.parametrize("model_type", [*HEADLESS, "gpt2"])
def test_a_model_without_heads_is_recognised(model_type: str) -> None:
    reason = "no MTP head|external drafter|has an MTP head for it|without a known head layout"
    with pytest.raises(UnsupportedModelError, match=reason):
        family_for({"model_type": model_type}, where="here")
    assert model_type not in {one for family in FAMILIES for one in family.model_types}


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gigachat3_5", "SGLang alone has an MTP head for it, and transformers no class"),
        ("iquest_q1", r"its drafter is a separate checkpoint \(iquest_q1_mtp\)"),
        ("iquest_q1_mtp", "external drafter of an IQuest-Q1 trunk"),
        ("mistral_large4", r"a DSpark drafter \(mtp_dspark\.\*\)"),
    ],
)
def test_a_drafter_that_is_served_elsewhere_is_refused_with_the_reason(model_type: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        family_for({"model_type": model_type, "text_config": {"model_type": f"{model_type}_text"}}, where="here")


@pytest.mark.parametrize("says", ["text_config", "wrapper", "both"])
@pytest.mark.parametrize(
    ("name", "of_text", "of_wrapper"),
    [("inkling", "inkling_text", "inkling_mm_model"), ("hy_v4_vl", "hy_v4_vl_text", "hy_v4_vl")],
)
def test_a_wrapper_or_its_text_config_says_what_it_is(name: str, of_text: str, of_wrapper: str, says: str) -> None:
    section = {"num_nextn_predict_layers": 8}
    config: dict[str, Any] = {"text_config": {**section}, "mtp_config": section}
    if says != "wrapper":
        config["text_config"]["model_type"] = of_text
    if says != "text_config":
        config["model_type"] = of_wrapper
    family = family_for(config, where="here")
    assert (family.name, family.declared_modules(config)) == (name, 8)
