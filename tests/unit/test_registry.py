"""Families that another package registers: recognised, mapped, run and served like built-in ones, until removed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import base_and_finetune, save_with_head
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.errors import UnsupportedModelError
from mtp_train.families import (
    FAMILIES,
    family_for,
    family_named,
    of_kind,
    register,
    register_engine,
    registry,
    unregister,
    unregister_engine,
)
from mtp_train.families.engines import Convention, EngineSupport, ServingEngine, engine_table, no
from mtp_train.families.layouts import with_layers
from mtp_train.families.registry import HEADLESS
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    TrunkClass,
    TrunkTraits,
    Wiring,
)
from mtp_train.heads.build import build_head, graft_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.step import unroll
from runs import document, tiny_recipe
from tiny import VOCAB_SIZE, tiny_head, tiny_trunk

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
    layer=HeadLayer(
        config=with_layers,
        borrowed=Borrowed("llama", "Llama"),
    ),
    trunk=TrunkTraits(stand_in=TrunkClass(model_type="llama")),
    engines=engine_table(transformers=no("has no class for it")),
)
"""All of a family of a known shape: this record, and one call that registers it."""


@pytest.fixture
def toy() -> Iterator[Family]:
    register(TOY)
    yield TOY
    unregister(TOY.name)


def test_a_registered_family_is_found_until_it_is_removed(toy: Family) -> None:
    assert family_for({"model_type": "toy_model"}, where="x") is toy
    assert family_named("toy") is toy
    assert FAMILIES[-1] is toy
    unregister("toy")
    with pytest.raises(UnsupportedModelError, match="model_type 'toy_model', an architecture without a known head"):
        family_for({"model_type": "toy_model"}, where="x")
    assert toy not in FAMILIES


@torch.inference_mode()
def test_its_head_is_read_from_a_checkpoint_and_runs(toy: Family, tmp_path: Path) -> None:
    trunk = tiny_trunk("toy")
    written = tiny_head(trunk)
    checkpoint = open_checkpoint(save_with_head(trunk, written, tmp_path / "toy"))
    assert {"toy_head.0.join.weight", "toy_head.0.mlp.up_proj.weight"} <= set(checkpoint.tensors)
    read = build_head(
        graft_plan(checkpoint, checkpoint, "auto"), text_config_of(checkpoint), dtype=torch.float32
    ).eval()
    tokens_BT = torch.randint(VOCAB_SIZE, (2, 7), generator=torch.Generator().manual_seed(3))
    hidden_BTD = trunk.head_input(trunk.hidden(tokens_BT), read.convention)
    states = [
        unroll(
            head,
            hidden_BTD,
            tokens_BT,
            trunk.embed,
            num_depths=2,
            positions_BT=torch.arange(7).expand(2, -1),
            document_BT=torch.zeros_like(tokens_BT),
        )
        for head in (written, read)
    ]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*states, strict=True))
    assert not torch.equal(*states[0])


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
        ({"name": "llama"}, r"name 'llama' is taken"),
        ({"name": "toy"}, r"name 'toy' is taken"),
        ({"name": "other", "model_types": ("new", "qwen3_next")}, r"'qwen3_next' of 'other' belongs to Qwen3-Next"),
        ({"name": "other"}, r"model_type 'toy_model' of 'other' belongs to Toy"),
        ({"name": "other", "model_types": ("gemma4_assistant",)}, r"belongs to Gemma 4 assistant"),
        (
            {"name": "other", "model_types": ("new",), "engines": {"x": no("")}},
            r"engine 'x' of 'other'",
        ),
    ],
)
def test_names_and_model_types_that_are_taken_are_refused(changes: dict[str, Any], message: str, toy: Family) -> None:
    before = tuple(FAMILIES)
    with pytest.raises(UnsupportedModelError, match=message):
        register(replace(toy, **changes))
    assert tuple(FAMILIES) == before


def test_an_installed_package_adds_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("toy", f"{__name__}:TOY", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "mtp_train.families" else [])
    registry.register_installed.cache_clear()
    try:
        found = family_for({"model_type": "toy_model"}, where="x")
        assert (found.name, family_for({"model_type": "toy_model"}, where="x")) == ("toy", found)
    finally:
        unregister("toy")
        registry.register_installed.cache_clear()


def test_a_package_whose_family_cannot_be_loaded_is_named_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    good = EntryPoint("toy", f"{__name__}:TOY", registry.ENTRY_POINTS)
    bad = EntryPoint("broken", "no_such_module:FAMILY", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [good, bad])
    registry.register_installed.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(
                UnsupportedModelError, match=r"entry point broken of mtp_train\.families: no_such_module"
            ):
                family_for({"model_type": "toy_model"}, where="x")
    finally:
        unregister("toy")
        registry.register_installed.cache_clear()


TOY_ENGINE = ServingEngine(
    name="toy engine",
    default=no("has no MTP"),
    support={"llama": EngineSupport(True, "toy serve {path} --drafts {depth}")},
    conventions={"llama": Convention(position_offset=7)},
)
"""All of an engine: this record, and one call that registers it."""


@pytest.fixture
def toy_engine() -> Iterator[ServingEngine]:
    register_engine(TOY_ENGINE)
    yield TOY_ENGINE
    unregister_engine(TOY_ENGINE.name)


def test_a_registered_engine_is_in_every_table_until_it_is_removed(
    toy_engine: ServingEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    llama, qwen = family_named("llama"), family_named("qwen3_5")
    assert list(qwen.serving)[-1] == "toy engine"
    assert qwen.serving["toy engine"] == of_kind(llama, "eagle3").serving["toy engine"] == no("has no MTP")
    assert llama.convention("toy engine").position_offset == 7
    assert tiny_recipe(tmp_path, tmp_path / "run", head={"convention": "toy engine"}).head.convention == "toy engine"
    with pytest.raises(UnsupportedModelError, match=r"head\.convention: 'toy engine'; expected one of auto, vllm"):
        qwen.convention("toy engine")
    base, _ = base_and_finetune(tmp_path, "llama")
    serves = document(["inspect", base], capfd)["serves"]
    assert serves["toy engine"].startswith(f"toy serve {base} --drafts ")
    unregister_engine("toy engine")
    assert "toy engine" not in qwen.serving


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
