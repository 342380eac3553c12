"""A kind of head from another package is one record: it trains, decodes, passes the gate and is exported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train import head_kinds
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.errors import RecipeError
from mtp_train.families import Family
from mtp_train.families.engines import no
from mtp_train.families.kinds.kind import Block, DraftFormat, DraftParts
from mtp_train.families.kinds.llama import draft_config, draft_layer
from mtp_train.families.layouts import key_rules
from mtp_train.families.spec import Wiring
from mtp_train.head_kinds import HeadKind, register_kind
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import pipeline
from runs import ATTACH, Capture, document, drafted_by, passed_report, refusal, write_headless, write_recipe

DEEPEST = 9


class Linear(nn.Module):
    """``x + W x``, of every row on its own."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size, config.hidden_size))

    def forward(self, hidden: Tensor, **_of_attention: Any) -> Tensor:
        return hidden + hidden @ self.weight.T


class ToyModule(Block):
    """One linear layer over the sum of the last state and the token's embedding."""

    def __init__(self, family: Family, layer_config: PretrainedConfig, module_idx: int) -> None:
        super().__init__()
        self.layer = family.classes.make_layer(layer_config, module_idx)

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        return hidden_BTD + embed_BTD


TOY = DraftParts(
    prefixes=("toy.",),
    rules=key_rules("toy.", {"weight": "layer.weight"}),
    module=ToyModule,
    layer=draft_layer(build_layer=lambda classes, config, layer_idx: Linear(config), rotary=None),
    wiring=Wiring(final_norm=False),
    serving={},
    other_trunks=no("is a toy"),
    other_engines=no("is a toy"),
    format=DraftFormat(
        written_as=("ToyModel",),
        config=lambda layer_config, num_modules, trunk, num_drafted: draft_config(layer_config, trunk),
        has_output=False,
    ),
)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_kind(HeadKind("toy", "Toy", f"{__name__}:TOY", deepest=DEEPEST))
    yield
    del head_kinds._KINDS["toy"]


def test_it_takes_one_record_to_train_decode_judge_and_export_another_kind(tmp_path: Path, capfd: Capture) -> None:
    inputs = write_headless(tmp_path / "in", "qwen3").parent
    settings = {**ATTACH, "head__init": "random", "head__kind": "toy", "train__max_steps": 60}
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", **settings)
    assert "head.kind=toy" not in str(document(["check", recipe], capfd))
    assert pipeline.run(load_recipe(recipe)).stage == "done"
    passed_report(tmp_path / "run", "none")
    trained = load_artifact(tmp_path / "run/head")
    assert (trained.family.kind.name, [one.key for one in trained.head.tensors]) == ("toy", ["toy.weight"])

    export = tmp_path / "run/export"
    trunk = inputs / "finetune"
    assert document(["inspect", export, "--base", trunk], capfd)["status"] == "healthy"
    ask = ["generate", trunk, "--prompt", "say 3", "--max-new-tokens", 24]
    drafted_by(export, DEEPEST, ask, capfd)
    assert f"expected 0 to {DEEPEST}." in refusal([*ask, "--head", export, "--depth", DEEPEST + 1], capfd)
    with pytest.raises(RecipeError, match=r"head\.num_depths: 10 with head\.kind: toy; expected 9 or less"):
        load_recipe(recipe, ["head.num_depths=10"])
