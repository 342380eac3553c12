from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback

from checkpoints import all_tensors, base_and_finetune, holds, same, split
from mtp_train import inspect
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.errors import UnsupportedModelError
from mtp_train.heads.build import build_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.hooks import train_beside
from mtp_train.hooks.train_beside import HEAD_DIRECTORY, HeadBeside, batch_of, train_head_beside
from preserving import load, make_trainer, random_rows, told
from tiny import FAMILY_NAMES


def beside(path: Path, out: Path, *callbacks: Any, lr: float = 1e-2, **settings: Any) -> Trainer:
    """Return a trainer of the checkpoint with its head trained beside it."""
    trainer = make_trainer(load(path), out, *callbacks, **settings)
    train_head_beside(trainer, lr=lr, num_depths=2)
    return trainer


def head_of(trainer: Trainer) -> HeadBeside:
    found = trainer.callback_handler.callbacks[0]
    assert isinstance(found, HeadBeside)
    return found


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_the_model_trains_as_without_the_head_and_its_checkpoints_hold_what_the_head_has_learnt(
    family_name: str, tmp_path: Path, out: Path
) -> None:
    base, _ = base_and_finetune(tmp_path, family_name)
    make_trainer(load(base), tmp_path / "alone").train()
    trainer = beside(base, out)
    trainer.train()
    trainer.save_model()
    for name in ("checkpoint-1", "checkpoint-2"):
        trunk, head = split(out / name)
        assert same(trunk, all_tensors(tmp_path / "alone" / name))
        assert not same(head, split(base)[1])
        found = inspect(out / name, base)
        assert (found.status, found.stale) == ("healthy", False)
    assert not same(split(out / "checkpoint-1")[1], split(out / "checkpoint-2")[1])
    assert same(all_tensors(out), all_tensors(out / "checkpoint-2"))


class Writer(TrainerCallback):
    """Keeps what a callback of the user's reads in the logs."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self.seen.append(dict(logs))


def test_its_loss_is_in_the_logs_and_falls(base: Path, out: Path) -> None:
    writer = Writer()
    trainer = beside(
        base, out, writer, max_steps=40, logging_steps=10, save_strategy="no", lr_scheduler_type="constant"
    )
    trainer.train()
    found = [logs for logs in writer.seen if "mtp_loss" in logs]
    assert len(found) == 4
    assert all(logs.keys() >= {"loss", "mtp_loss_1", "mtp_loss_2"} for logs in found)
    assert found[-1]["mtp_loss"] < 0.8 * found[0]["mtp_loss"]
    assert [line["mtp_loss"] for line in trainer.state.log_history if "mtp_loss" in line] == [
        logs["mtp_loss"] for logs in found
    ]


@pytest.mark.parametrize("limit", [1e-3, 1e3], ids=["clipped", "whole"])
def test_micro_batches_make_one_step(limit: float, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has the mean gradient of its micro-batches, clipped once. AdamW's weights would not show its size."""
    monkeypatch.setattr(train_beside, "MAX_GRAD_NORM", limit)
    steps: list[list[dict[str, torch.Tensor]]] = []
    for size in (4, 1):
        gradients: list[dict[str, torch.Tensor]] = []
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        trainer = beside(base, tmp_path / str(size), lr=1e-4, save_strategy="no", **settings)
        named = head_of(trainer).named
        optimizer = head_of(trainer).optimizer

        def keep(*_: Any, named: Any = named, gradients: list[Any] = gradients) -> None:
            gradients.append({name: value.grad.clone() for name, value in named.items()})

        optimizer.register_step_pre_hook(keep)
        trainer.train()
        steps.append(gradients)
    norms = []
    for whole, parts in zip(*steps, strict=True):
        norms.append(float(torch.stack([gradient.norm() for gradient in whole.values()]).norm()))
        torch.testing.assert_close(parts, whole, atol=1e-3 * norms[-1], rtol=0)
    # The second step has the gradient of its own micro-batches alone, of about the size of the first.
    assert norms == pytest.approx([limit] * 2, rel=1e-3) if limit < 1 else 0.75 < norms[1] / norms[0] < 1.33


def test_a_resumed_training_ends_with_the_same_head(base: Path, tmp_path: Path, out: Path, caplog: Any) -> None:
    whole = beside(base, tmp_path / "whole")
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-1", out / "checkpoint-1")
    resumed = beside(base, out)
    resumed.train(resume_from_checkpoint=True)
    theirs = head_of(whole).named
    assert holds(theirs, head_of(resumed).named)
    assert not [record for record in caplog.records if "holds no state" in record.getMessage()]


def test_the_head_of_the_best_checkpoint_is_taken_with_it(base: Path, out: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    # The loss falls: the first checkpoint is the best one.
    trainer = beside(base, out, greater_is_better=True, metric_for_best_model="eval_loss", **settings)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint or "")
    assert best.name == "checkpoint-1"
    trainer.save_model()
    assert same(all_tensors(out), all_tensors(best))


def test_an_adapters_checkpoint_has_the_head_beside_it_and_the_merged_model_holds_it(
    base: Path, tmp_path: Path, out: Path
) -> None:
    model = get_peft_model(load(base), LoraConfig(target_modules=["q_proj", "up_proj"]))
    trainer = make_trainer(model, out)
    train_head_beside(trainer, lr=1e-2)
    trainer.train()
    artifact = load_artifact(out / "checkpoint-2" / HEAD_DIRECTORY)
    head = build_head(artifact, text_config_of(open_checkpoint(base)), dtype=torch.float32)
    theirs = head_of(trainer).head.state_dict()
    assert holds(theirs, head.state_dict())
    trainer.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert inspect(tmp_path / "merged", base).status == "healthy"
    assert same(split(tmp_path / "merged")[1], {pending.key: pending.load() for pending in artifact.head.tensors})


def test_a_model_in_bf16_trains_its_head_in_fp32(base: Path, out: Path) -> None:
    trainer = make_trainer(load(base).bfloat16(), out, max_steps=1)
    train_head_beside(trainer)
    trainer.train()
    assert {value.dtype for value in head_of(trainer).named.values()} == {torch.float32}
    assert not same(split(out / "checkpoint-1")[1], split(base)[1])


SUCH = "The head is not trained by such batches."
NO_TOKENS = f"no input_ids, or images. {SUCH}"


def test_a_forward_that_names_no_tokens_is_told_and_changes_nothing(base: Path, out: Path, caplog: Any) -> None:
    trainer = beside(base, out)
    head = head_of(trainer)
    head.on_train_begin(trainer.args, trainer.state, trainer.control)
    before = [value.clone() for value in head.native_values()]
    for _ in range(2):
        trainer.model.train()(inputs_embeds=torch.randn(1, 6, 32))
        head.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control, optimizer=trainer.create_optimizer())
    assert all(map(torch.equal, head.native_values(), before))
    assert told(caplog, "train_beside") == [f"Step 1: no batch had a target for the head: {NO_TOKENS}"]


def test_labels_that_are_all_ignored_are_told_once(base: Path, tmp_path: Path, out: Path, caplog: Any) -> None:
    """As a template without its assistant's turn masks them."""
    trainer = beside(base, out)
    trainer.train_dataset = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in random_rows()]
    trainer.train()
    (said,) = told(caplog, "train_beside")
    assert said == f"Step 1: no batch had a target for the head: labels of -100 alone. {SUCH}"
    caplog.clear()
    beside(base, tmp_path / "labelled").train()
    assert not [record for record in caplog.records if "target" in record.getMessage()]


def test_a_model_in_shards_is_refused(base: Path, out: Path) -> None:
    trainer = beside(base, out)
    head_of(trainer).accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(UnsupportedModelError, match=r"the model is in shards \(FSDP\); expected it whole"):
        head_of(trainer).on_train_begin(trainer.args, trainer.state, trainer.control)


def test_padding_and_packed_documents_are_told_apart() -> None:
    tokens = torch.arange(1, 7)[None]
    plain = batch_of(tokens, None, None, None)
    assert plain.document_BT.tolist() == [[0] * 6]
    assert plain.positions_BT.tolist() == [[0, 1, 2, 3, 4, 5]]
    packed = batch_of(tokens, None, torch.tensor([[0, 1, 2, 0, 1, 0]]), torch.tensor([[-100, 1, 1, -100, 1, 1]]))
    assert packed.document_BT.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert packed.loss_mask_BT.tolist() == [[False, True, True, False, True, True]]
    right = batch_of(tokens, torch.tensor([[1, 1, 1, 1, 0, 0]]), None, None)
    assert right.document_BT.tolist() == [[0, 0, 0, 0, -1, -1]]
    left = batch_of(tokens, torch.tensor([[0, 0, 1, 1, 1, 1]]), None, None)
    assert left.document_BT.tolist() == [[-1, -1, 0, 0, 0, 0]]
    assert left.positions_BT[0, 2:].tolist() == [0, 1, 2, 3]
