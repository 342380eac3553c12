"""Families that another package registers: recognised, mapped, run and served like built-in ones, until removed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints import base_and_finetune
from mtp_train.errors import UnsupportedModelError
from mtp_train.families import (
    FAMILIES,
    family_for,
    family_named,
    register,
    registry,
)
from mtp_train.families.engines import Convention, no
from mtp_train.families.layouts import with_layers
from mtp_train.families.registry import HEADLESS
from mtp_train.families.spec import (
    Declaration,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    TrunkClass,
    TrunkTraits,
    Wiring,
)
from runs import document

_MODULE = "toy_head.{module}."
TOY = Family(
    name="toy",
    title="Toy",
    model_types=("toy_model",),
    declaration=Declaration(count="num_toy_modules", others=("toy_flavour",)),
    keys=Keys(
        trunk_prefixes=("model.",),
        head_prefixes=("toy_head.",),
        rules=(
            KeyRule(native=f"{_MODULE}join.weight", ours="proj.weight"),
            KeyRule(native=f"{_MODULE}norm_e.weight", ours="embed_norm.weight"),
            KeyRule(native=f"{_MODULE}norm_h.weight", ours="hidden_norm.weight"),
            KeyRule(native=f"{_MODULE}norm_o.weight", ours="final_norm.weight"),
            KeyRule(native=f"{_MODULE}{{rest}}", ours="layer.{rest}"),
        ),
    ),
    wiring=Wiring(concat="hidden_first", conventions={"vllm": Convention(zero_first_embedding=True)}),
    layer=HeadLayer("llama", "Llama", config=with_layers),
    trunk=TrunkTraits(stand_in=TrunkClass(model_type="llama")),
    engines={"transformers": no("has no class for it")},
)
"""All of a family of a known shape: this record, and one call that registers it."""


@pytest.fixture
def toy() -> Iterator[Family]:
    register(TOY)
    yield TOY
    registry._FAMILIES.remove(TOY)


def test_a_registered_family_is_found(toy: Family) -> None:
    assert family_for({"model_type": "toy_model"}, where="x") is toy
    assert family_named("toy") is toy
    assert FAMILIES[-1] is toy


def test_the_commands_know_it(toy: Family, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base, finetune = base_and_finetune(tmp_path, "toy")
    assert document(["inspect", base], capfd)["status"] == "healthy"
    assert document(["inspect", finetune, "--base", base], capfd)["status"] == "declared_but_missing"
    document(["graft", finetune, "--from", base, "--out", tmp_path / "grafted"], capfd)
    found = document(["inspect", tmp_path / "grafted"], capfd)
    assert (found["family"], found["status"]) == ("toy", "healthy")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "llama"}, r"name 'llama' is that of Llama"),
        (
            {"name": "other", "model_types": ("new", "qwen3_next")},
            r"model_type 'qwen3_next' belongs to Qwen3-Next",
        ),
        ({"name": "other"}, r"model_type 'toy_model' belongs to Toy"),
        ({"name": "other", "model_types": ("gemma4_assistant",)}, r"belongs to Gemma 4 assistant"),
        (
            {"name": "other", "model_types": ("new",), "engines": {"x": no("")}},
            r"engine 'x' is none of vllm",
        ),
    ],
)
def test_names_and_model_types_that_are_taken_are_refused(changes: dict[str, Any], message: str, toy: Family) -> None:
    before = tuple(FAMILIES)
    with pytest.raises(UnsupportedModelError, match=message):
        register(replace(toy, **changes))
    assert tuple(FAMILIES) == before


@pytest.mark.parametrize("model_type", HEADLESS)
def test_a_model_without_heads_is_recognised(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no MTP head|external drafter|has an MTP head for it"):
        family_for({"model_type": model_type}, where="here")
    assert model_type not in {one for family in FAMILIES for one in family.model_types}


@pytest.mark.parametrize("says", ["text_config", "wrapper", "both"])
def test_a_wrapper_or_its_text_config_says_what_it_is(says: str) -> None:
    section = {"num_nextn_predict_layers": 8}
    config: dict[str, Any] = {"text_config": {}, "mtp_config": section}
    if says != "wrapper":
        config["text_config"]["model_type"] = "inkling_text"
    if says != "text_config":
        config["model_type"] = "inkling_mm_model"
    family = family_for(config, where="here")
    assert (family.name, family.declared_modules(config)) == ("inkling", 8)
