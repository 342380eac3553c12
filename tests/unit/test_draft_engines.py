"""What people are told, before they train, of who will draft with a head of another kind."""

from __future__ import annotations

import pytest

from mtp_train.errors import UnsupportedModelError
from mtp_train.families import FAMILIES, kinds_served, of_kind
from mtp_train.families.engines import engine_commands
from mtp_train.head_kinds import find_head_kind
from tiny import family_of

KINDS: tuple[str, ...] = ("eagle", "eagle3", "medusa")
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
    engines = find_head_kind(kind).load_parts().engines
    names = {frozenset(engines(family)) for family in trunks(kind)}
    assert names == {frozenset(FAMILIES[0].serving)}
    for family in trunks(kind):
        commands = engine_commands(engines(family), OUT, DEPTH)
        assert all("{" not in text or engine == "vllm" for engine, text in commands.items())
        assert commands["transformers"].startswith("no: ")


def test_a_dense_llama_gets_an_eagle3_head_from_three_engines() -> None:
    assert kinds_served(family_of("llama"))["eagle3"] == ("vllm", "sglang", "llama.cpp")
