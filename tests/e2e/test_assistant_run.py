"""A fine-tune of a trunk with an assistant: the assistant is measured, retrained, judged and exported as heads are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from assistants import HAS_ASSISTANTS, tiny_assistant, tiny_gemma_trunk
from byte_tokenizer import byte_tokenizer
from json_files import read_json
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import pipeline
from runs import BYTE_VOCAB_SIZE, LEARNS, Capture, document, tree, write_inputs, write_recipe

pytestmark = pytest.mark.skipif(not HAS_ASSISTANTS, reason="this transformers has no external drafters")
RUN: dict[str, Any] = {
    **LEARNS,
    "head__kind": "assistant",
    "gate__break_even_tau": 1.0,
    "evaluate__arms": ["none", "graft", "retrained"],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write chats, a trunk as ``finetune``, and its assistant as ``base``."""
    directory = write_inputs(tmp_path_factory.mktemp("assistant") / "in")
    for name, model in (
        ("finetune", tiny_gemma_trunk(vocab_size=BYTE_VOCAB_SIZE).causal_lm),
        ("base", tiny_assistant(vocab_size=BYTE_VOCAB_SIZE)),
    ):
        shutil.rmtree(directory / name)
        model.save_pretrained(directory / name)
    byte_tokenizer().save_pretrained(directory / "finetune")
    return directory


@pytest.fixture(scope="module")
def run_dir(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    recipe = write_recipe(directory / "recipe.yaml", inputs, directory / "run", **RUN)
    before = tree(inputs)
    assert pipeline.run(load_recipe(recipe)).stage == "done"
    assert tree(inputs) == before
    return directory / "run"


def test_it_is_retrained_for_the_trunk_and_passes_the_gate(run_dir: Path) -> None:
    report = read_json(run_dir / "report.json")
    assert (report["gate"]["passed"], report["gate"]["baseline"]) == (True, "graft")
    stale, retrained = (report["arms"][arm]["tau_ci95"] for arm in ("graft", "retrained"))
    assert retrained[0] > stale[1]
    assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0


def test_the_export_is_an_assistant_that_differs_in_what_was_trained(
    run_dir: Path, inputs: Path, capfd: Capture
) -> None:
    export, base = open_checkpoint(run_dir / "export"), open_checkpoint(inputs / "base")
    assert export.tensors == base.tensors
    assert export.config == base.config
    same = {key for key in base.tensors if torch.equal(export.read(key), base.read(key))}
    assert same == {key for key in base.tensors if "embed_tokens" in key or "layer_scalar" in key}
    found = document(["inspect", run_dir / "export", "--base", inputs / "finetune"], capfd)
    assert (found["family"], found["status"]) == ("assistant", "healthy")
    ask = ["generate", inputs / "finetune", "--chat", "--prompt", "say 3", "--max-new-tokens", 24]
    plain = document([*ask, "--depth", 0], capfd)["requests"][0]
    (drafted,) = document([*ask, "--head", run_dir / "export", "--depth", 3], capfd)["requests"]
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["num_accepted_tokens"] > 0
    assert document([*ask, "--head", run_dir / "head", "--depth", 3], capfd)["requests"] == [drafted]


def test_transformers_drafts_the_same_with_the_export(run_dir: Path, inputs: Path) -> None:
    trunk = AutoModelForCausalLM.from_pretrained(inputs / "finetune", dtype=torch.float32)
    drafter = AutoModelForCausalLM.from_pretrained(run_dir / "export", dtype=torch.float32)
    prompt = torch.tensor([byte_tokenizer()("say 3")["input_ids"]])
    plain = trunk.generate(prompt, max_new_tokens=16, do_sample=False)
    assert torch.equal(trunk.generate(prompt, assistant_model=drafter, max_new_tokens=16, do_sample=False), plain)
