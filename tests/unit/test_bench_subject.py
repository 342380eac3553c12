"""The benchmark measures the given checkpoint, adapter and head directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters import write_adapter
from checkpoints import base_and_finetune
from mtp_inference.bench.__main__ import main
from mtp_inference.bench.subject import checkpoint_subject
from mtp_train.heads.build import native_plan
from mtp_train.weights.artifact import Artifact, save_artifact
from mtp_train.weights.files import open_checkpoint

CPU = torch.device("cpu")
TOKENS = torch.arange(6)[None]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return base_and_finetune(tmp_path, "qwen3_5")[0]


@torch.inference_mode()
def test_a_trunk_wears_the_adapter(base: Path, tmp_path: Path) -> None:
    model = write_adapter(base, tmp_path / "lora", target_modules=["q_proj", "up_proj"], lora_alpha=2)
    bare, worn = (
        checkpoint_subject(str(base), None, adapter=adapter, dtype=None, device=CPU, drafts=True)
        for adapter in (None, str(tmp_path / "lora"))
    )
    hidden = [subject.trunk.hidden(TOKENS) for subject in (bare, worn)]
    assert (hidden[0] - hidden[1]).abs().max() > 1e-3
    torch.testing.assert_close(worn.trunk.logits(hidden[1]), model(TOKENS).logits, atol=1e-5, rtol=0)
    assert (bare.facts["adapter"], worn.facts["adapter"]) == (None, str(tmp_path / "lora"))


def test_a_head_drafts_the_tokens_that_it_was_saved_with(base: Path, tmp_path: Path) -> None:
    plan = native_plan(open_checkpoint(base), "auto")
    vocab = torch.tensor([2, 3, 5], dtype=torch.int32)
    save_artifact(Artifact(plan.family, plan.layout, 1, 3, "auto", plan.template, {}, vocab), tmp_path / "head")
    subject = checkpoint_subject(str(base), str(tmp_path / "head"), adapter=None, dtype=None, device=CPU, drafts=True)
    assert subject.drafting is not None
    assert subject.drafting.draft_vocab_R is not None
    assert subject.drafting.draft_vocab_R.tolist() == [2, 3, 5]
    assert subject.facts["draft_vocab"] == 3
    without = checkpoint_subject(str(base), None, adapter=None, dtype=None, device=CPU, drafts=False)
    assert without.drafting is None


def test_an_adapter_without_a_checkpoint_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shape", "tiny-qwen", "--adapter", "lora"]) == 2
    assert "--adapter: lora, with a shape; expected a checkpoint to put it on" in capsys.readouterr().err
