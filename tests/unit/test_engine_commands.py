"""Commands that serve a head, at any number of drafts."""

from __future__ import annotations

from functools import partial

from mtp_train.families.engines import engine_commands
from mtp_train.runs.checkpoint_tools.inspect import SUGGESTED_DEPTH
from mtp_train.runs.display import wiring_note
from tiny import family_of


def test_commands_draft_as_many_tokens_as_asked() -> None:
    family = family_of("qwen3_5")
    commands = partial(engine_commands, family.serving, "my model")
    assert commands(5)["vllm"] == (
        """vllm serve 'my model' --speculative-config '{"method":"mtp","num_speculative_tokens":5}'"""
    )
    assert commands(5)["sglang"].endswith(
        "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6"
    )
    assert commands(5)["llama.cpp"].endswith("llama-server -m model.gguf --spec-type draft-mtp --spec-draft-n-max 5")
    assert commands(5)["transformers"].startswith("no: ")
    assert commands(SUGGESTED_DEPTH).keys() == family.serving.keys()


def test_engines_that_wire_a_head_otherwise_are_named_beside_their_commands() -> None:
    glm = family_of("glm4_moe")
    serves = engine_commands(glm.serving, "model", 3)
    said = wiring_note(glm, "auto", serves)
    assert said is not None
    assert said.startswith("wired in another way on vllm than it is trained and measured here")
    assert said.endswith("; head.convention=vllm trains and measures for vllm")
    # llama.cpp only counts positions from one higher.
    assert "llama.cpp" not in said
    assert wiring_note(glm, "auto", serves | {"vllm": "no: has none"}) is None
    qwen = family_of("qwen3_5")
    assert wiring_note(qwen, "auto", engine_commands(qwen.serving, "model", 3)) is None
