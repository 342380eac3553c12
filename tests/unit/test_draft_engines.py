"""What people are told, before they train, of who will draft with a head of another kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_train.cli.main import main
from mtp_train.errors import UnsupportedModelError
from mtp_train.families import FAMILIES, draft_engines, of_kind
from mtp_train.families.engines import engine_commands
from tiny import tiny_trunk

KINDS: tuple[str, ...] = ("eagle", "eagle3", "medusa")
RECIPE = Path(__file__).parents[2] / "recipes" / "attach_head.yaml"
OUT, DEPTH = "my runs/export", 3


def trunks(kind: str) -> list[str]:
    found = []
    for family in FAMILIES:
        try:
            of_kind(family, kind)
        except UnsupportedModelError:
            continue
        found.append(family.name)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_trunk_has_an_answer_for_every_engine(kind: str) -> None:
    names = {frozenset(draft_engines(kind, family)) for family in trunks(kind)}
    assert names == {frozenset(FAMILIES[0].serving)}
    for family in trunks(kind):
        commands = engine_commands(draft_engines(kind, family), OUT, DEPTH)
        assert all("{" not in text or engine == "vllm" for engine, text in commands.items())
        assert commands["transformers"].startswith("no: ")


def test_a_trunk_of_few_layers_is_refused_before_training_but_for_our_own_decoder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny_trunk("llama", num_layers=6).causal_lm.save_pretrained(tmp_path / "model")
    settings = [f"model.trunk={tmp_path / 'model'}", "head.kind=eagle3", "head.init=random"]
    settings.append("data.sources.0.path=chats.jsonl")
    check = ["check", str(RECIPE), *settings]
    assert main(check) == 2
    assert "model: 6 layers; expected 7 or more" in capfd.readouterr().err
    assert main([*check, "export.enabled=false"]) == 0
