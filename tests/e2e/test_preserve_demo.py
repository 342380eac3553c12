"""A user's fine-tuning script on the demo, with the one added line and without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from mtp_train.demo import demo_path
from mtp_train.preserve import KeepHead
from preserving import trainer_arguments
from runs import document

Capture = pytest.CaptureFixture[str]
PROMPT = "import os\nimport sys\n\n\ndef main("


def code() -> list[str]:
    """Return documents of the kind that the base was trained on."""
    lines = demo_path("code").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines[:16]]


def fine_tune(out: Path, *callbacks: Any) -> None:
    """Fine-tune the demo's base as transformers' own examples do."""
    base = demo_path("base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = [tokenizer(text, truncation=True, max_length=64) for text in code()]
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=TrainingArguments(**trainer_arguments(out, learning_rate=1e-5)),
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    trainer.train()
    trainer.save_model()


def tau(path: Path, capfd: Capture) -> float:
    """Return the mean number of tokens that a round commits."""
    argv = ["generate", path, "--prompt", PROMPT, "--max-new-tokens", "32", "--depth", "3"]
    (request,) = document(argv, capfd)["requests"]
    return 1 + request["num_accepted_tokens"] / request["num_drafts"]


def test_with_the_line_a_trainers_checkpoints_are_healthy_and_draft(tmp_path: Path, capfd: Capture) -> None:
    fine_tune(tmp_path / "out", KeepHead())
    for path in (tmp_path / "out" / "checkpoint-1", tmp_path / "out"):
        found = document(["inspect", path, "--base", "demo:base"], capfd)
        assert (found["status"], found["stale"]) == ("healthy", True)
    # Without a head a round commits one token.
    assert tau(tmp_path / "out", capfd) > 2


def test_without_the_line_inspect_names_what_was_lost(tmp_path: Path, capfd: Capture) -> None:
    fine_tune(tmp_path / "out")
    found = document(["inspect", tmp_path / "out", "--base", "demo:base"], capfd)
    assert found["status"] == "declared_but_missing"
    assert "mtp.fc.weight" in found["missing_keys"]
    assert found["cure"].startswith("mtp-train graft ")


@pytest.mark.parametrize("lora", [False, True])
def test_with_the_line_trl_keeps_the_head(lora: bool, tmp_path: Path, capfd: Capture) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from peft import LoraConfig

    trainer = trl.SFTTrainer(
        model=str(demo_path("base")),
        args=trl.SFTConfig(**trainer_arguments(tmp_path / "out", max_length=64, bf16=False)),
        train_dataset=Dataset.from_list([{"text": text} for text in code()]),
        peft_config=LoraConfig(target_modules=["q_proj", "up_proj"]) if lora else None,
        callbacks=[KeepHead()],
    )
    trainer.train()
    saved = tmp_path / "out" / "checkpoint-2"
    if lora:
        saved = tmp_path / "merged"
        trainer.model.merge_and_unload().save_pretrained(saved)
        trainer.processing_class.save_pretrained(saved)
    found = document(["inspect", saved, "--base", "demo:base"], capfd)
    assert (found["status"], found["stale"]) == ("healthy", True)
    assert tau(saved, capfd) > 2
