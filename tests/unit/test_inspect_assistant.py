"""``mtp-train inspect`` of an external drafter, and its refusal where a head is needed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from assistants import HAS_ASSISTANTS, ORDERED_VOCAB_SIZE, TRUNK_HIDDEN, tiny_assistant
from checkpoints import Tensors, all_tensors, rewrite
from mtp_train.cli.main import main
from runs import Capture, document

pytestmark = pytest.mark.skipif(not HAS_ASSISTANTS, reason="this transformers has no external drafters")
LOST = "model.layers.1.self_attn.q_norm.weight"
Edit = Callable[[Tensors], object]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_assistant().save_pretrained(tmp_path / "assistant")
    return tmp_path / "assistant"


def test_a_whole_one_is_healthy_and_every_engine_gets_its_flags(saved: Path, capfd: Capture) -> None:
    found = document(["inspect", saved], capfd)
    assert (found["family"], found["status"], found["cure"]) == ("assistant", "healthy", None)
    assert (found["missing_keys"], found["unexpected_keys"], found["shape_errors"]) == ([], [], [])
    assert f"hidden size {TRUNK_HIDDEN}" in found["note"]
    vllm = shlex.split(found["serves"]["vllm"])
    assert vllm[:4] == ["vllm", "serve", "TRUNK", "--speculative-config"]
    assert json.loads(vllm[4]) == {"model": str(saved), "num_speculative_tokens": 3}
    sglang = shlex.split(found["serves"]["sglang"])
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == str(saved)
    assert "NEXTN" in sglang
    assert "-md assistant.gguf" in found["serves"]["llama.cpp"]
    assert f"assistant_model=AutoModelForCausalLM.from_pretrained('{saved}')" in found["serves"]["transformers"]


def test_a_tied_matrix_may_be_stored_twice(saved: Path, capfd: Capture) -> None:
    def store(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert "lm_head.weight" not in all_tensors(saved)
    assert document(["inspect", rewrite(saved, store)], capfd)["status"] == "healthy"


@pytest.mark.parametrize(
    ("edit", "field", "expected"),
    [
        (lambda tensors: tensors.pop(LOST), "missing_keys", LOST),
        (lambda tensors: tensors.update(spare=torch.zeros(1)), "unexpected_keys", "spare"),
        (lambda tensors: tensors.update({LOST: torch.zeros(3)}), "shape_errors", f"{LOST}: found [3], expected [8]"),
    ],
)
def test_damage_is_partial_and_no_engine_gets_it(
    edit: Edit, field: str, expected: str, saved: Path, capfd: Capture
) -> None:
    found = document(["inspect", rewrite(saved, edit)], capfd)
    assert (found["status"], found[field]) == ("partial", [expected])
    assert all(text.startswith("no: ") for text in found["serves"].values())
    assert str(saved) in found["cure"]


def test_centroids_are_wanted_where_the_config_says_so(tmp_path: Path, capfd: Capture) -> None:
    tiny_assistant(vocab_size=ORDERED_VOCAB_SIZE, ordered=True).save_pretrained(tmp_path / "ordered")
    assert document(["inspect", tmp_path / "ordered"], capfd)["status"] == "healthy"
    lacking = rewrite(tmp_path / "ordered", lambda tensors: tensors.pop("masked_embedding.token_ordering"))
    assert document(["inspect", lacking], capfd)["missing_keys"] == ["masked_embedding.token_ordering"]


def test_whatever_needs_a_head_says_what_it_is_instead(saved: Path, capfd: Capture) -> None:
    out = str(saved.parent / "out")
    for command in (
        ["graft", str(saved), "--from", str(saved), "--out", out],
        ["export", str(saved), "--out", out],
        ["generate", str(saved), "--prompt", "a"],
        ["inspect", str(saved), "--base", str(saved)],
    ):
        assert main(command) == 2
        assert "Gemma 4 assistant" in capfd.readouterr().err
    assert not Path(out).exists()
