"""A fine-tune of a trunk with an assistant: the assistant is measured, retrained, judged and exported as heads are."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from assistants import HAS_ASSISTANTS, tiny_assistant, tiny_gemma_trunk
from byte_tokenizer import byte_tokenizer
from json_files import read_json
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.cli.main import main
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import pipeline
from runs import (
    BYTE_VOCAB_SIZE,
    GETS_NO_BETTER,
    LEARNS,
    Capture,
    document,
    drafted_by,
    passed_report,
    refusal,
    tree,
    write_inputs,
    write_recipe,
)

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
    arms = passed_report(run_dir, "graft")["arms"]
    assert arms["retrained"]["tau_ci95"][0] > arms["graft"]["tau_ci95"][1]


def test_the_export_is_an_assistant_that_differs_in_what_was_trained(
    run_dir: Path, inputs: Path, capfd: Capture
) -> None:
    export = open_checkpoint(run_dir / "export")
    base = open_checkpoint(inputs / "base")
    assert export.tensors == base.tensors
    assert export.config == base.config
    same = {key for key in base.tensors if torch.equal(export.read(key), base.read(key))}
    assert same == {key for key in base.tensors if "embed_tokens" in key or "layer_scalar" in key}
    found = document(["inspect", run_dir / "export", "--base", inputs / "finetune"], capfd)
    assert (found["family"], found["status"]) == ("assistant", "healthy")
    ask = ["generate", inputs / "finetune", "--chat", "--prompt", "say 3", "--max-new-tokens", 24]
    drafted = drafted_by(run_dir / "export", 3, ask, capfd)
    assert drafted["num_accepted_tokens"] > 0
    assert document([*ask, "--head", run_dir / "head", "--depth", 3], capfd)["requests"] == [drafted]


def lora_on_keys(inputs: Path, out: Path, scale: float) -> Path:
    """Write an adapter of the trunk's layers that make the keys and values which the assistant reads."""
    model = AutoModelForCausalLM.from_pretrained(inputs / "finetune", dtype=torch.float32)
    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules=["k_proj", "v_proj"]))
    generator = torch.Generator().manual_seed(3)
    for name, matrix in adapted.named_parameters():
        if "lora_B" in name:
            matrix.data = scale * torch.randn(matrix.shape, generator=generator)
    adapted.save_pretrained(out)
    return out


def test_an_adapter_on_the_keys_makes_it_stale_and_retraining_heals_it(
    run_dir: Path, inputs: Path, tmp_path: Path
) -> None:
    before = read_json(run_dir / "report.json")["arms"]["retrained"]["tau"]
    adapter = lora_on_keys(inputs, tmp_path / "lora", 1.0)
    healed = {**RUN, "model__adapter": str(adapter), "model__head_from": str(run_dir / "export")}
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", **healed)
    assert pipeline.run(load_recipe(recipe)).stage == "done"
    arms = read_json(tmp_path / "run/report.json")["arms"]
    assert arms["graft"]["tau_ci95"][1] < min(before, arms["retrained"]["tau_ci95"][0])


def test_after_a_mild_adapter_the_assistant_stays_as_it_was(
    run_dir: Path, inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    adapter = lora_on_keys(inputs, tmp_path / "lora", 1e-3)
    kept = {**RUN, **GETS_NO_BETTER, "model__adapter": str(adapter), "model__head_from": str(run_dir / "export")}
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", **kept)
    assert main(["run", str(recipe)]) == 3
    assert f"is not shown to be worse: {run_dir / 'export'}" in capfd.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "run/export").exists()


@pytest.mark.parametrize(
    ("variant", "fields", "fact"),
    [
        ("shared", {"vocab_size": 300}, "vocab_size is 259, in {} it is 300"),
        (
            "values_are_keys",
            {},
            "by type of layer is {{'full_attention': (2, 16), 'sliding_attention': (2, 8)}}, in {}",
        ),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_with_what_differs(
    variant: str, fields: dict[str, int], fact: str, inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    other = tmp_path / "other"
    tiny_gemma_trunk(variant, **{"vocab_size": BYTE_VOCAB_SIZE, **fields}).causal_lm.save_pretrained(other)
    byte_tokenizer().save_pretrained(other)
    for command in (
        ["generate", other, "--prompt", "a", "--head", inputs / "base"],
        ["rescue", other, "--from", inputs / "base", "--out", tmp_path / "out"],
        ["inspect", inputs / "base", "--base", other],
    ):
        assert fact.format(other) in refusal(command, capfd).replace("\n", " ")


def test_one_command_rescues_a_pair_and_what_is_asked_without_its_assistant_is_told(
    inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    trunk = inputs / "finetune"
    out = tmp_path / "rescued"
    cure = document(["inspect", trunk], capfd)["cure"].replace("ASSISTANT", shlex.quote(str(inputs / "base")))
    words = shlex.split(cure)[1:]
    assert words[:2] == ["rescue", str(trunk)]
    settings = ["gate.break_even_tau=1.0", "train.max_steps=4", "data.seq_len_tokens=96", "train.tokens_per_step=192"]
    shorter = [*words[:-1], str(out), "--data", str(inputs / "chats.jsonl"), "--set", *settings]
    found = document(shorter, capfd)
    assert "TRUNK" in found["serves"]["vllm"]
    assert open_checkpoint(out / "export").tensors == open_checkpoint(inputs / "base").tensors
    for command in (
        ["init", tmp_path / "x.yaml", "--trunk", trunk],
        ["graft", trunk, "--from", trunk, "--out", tmp_path / "y"],
    ):
        assert "the assistant. Pass it to generate as --head, and to rescue as --from" in refusal(command, capfd)
