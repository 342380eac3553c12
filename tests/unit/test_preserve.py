from __future__ import annotations

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import mtp_train.checkpoints.export
from checkpoints import all_tensors, base_and_finetune, shared_by_the_head, wrap_as_vision_language
from json_files import read_json
from mtp_train import inspect
from mtp_train.checkpoints.files import INDEX_FILE, open_checkpoint
from mtp_train.errors import CheckpointError, UnsupportedModelError
from mtp_train.hooks.keep_head import KeepHead, keep_head
from preserving import load, make_trainer, told
from runs import paste
from tiny import FAMILY_NAMES


def assert_keeps_the_head(path: Path, base: Path, *, stale: bool = True) -> None:
    """The checkpoint is healthy, its head the base's byte for byte, and transformers loads all of its trunk."""
    found = inspect(path, base)
    assert (found.status, found.stale) == ("healthy", stale)
    saved = open_checkpoint(path)
    original = open_checkpoint(base)
    layout = saved.layout
    base_layout = original.layout
    own = [key for key in original.tensors if base_layout.is_head_key(key) and base_layout.shared_key(key) is None]
    assert own
    for key in own:
        renamed = base_layout.renamed(key, layout)
        assert saved.tensors[renamed].dtype == original.tensors[key].dtype
        assert torch.equal(saved.read(renamed), original.read(key))
    shared_by_the_head(path)
    _, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    index = read_json(path / INDEX_FILE)
    assert index["weight_map"].keys() == all_tensors(path).keys()
    assert {file.name for file in path.glob("*.safetensors")} == set(index["weight_map"].values())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_every_checkpoint_of_a_trainer_and_its_last_save_hold_the_head(
    family_name: str, tied: bool, tmp_path: Path, out: Path
) -> None:
    base, _ = base_and_finetune(tmp_path, family_name, tied=tied)
    trainer = make_trainer(load(base), out, KeepHead())
    trainer.train()
    trainer.save_model()
    for path in (out / "checkpoint-1", out / "checkpoint-2", out):
        assert_keeps_the_head(path, base)


def test_without_the_line_the_head_is_lost(base: Path, out: Path) -> None:
    trainer = make_trainer(load(base), out)
    trainer.train()
    trainer.save_model()
    for path in (out / "checkpoint-2", out):
        assert inspect(path, base).status == "declared_but_missing"


def test_a_model_that_the_trainer_makes_itself_is_taken_hold_of(base: Path, out: Path) -> None:
    trainer = make_trainer(None, out, KeepHead(), model_init=lambda: load(base))
    trainer.train()
    assert_keeps_the_head(out / "checkpoint-2", base)


def test_saving_again_to_the_same_place_leaves_no_file_behind(base: Path, out: Path) -> None:
    model = load(base)
    keep_head(model)
    for size in ("20KB", "1GB", "1GB", "20KB"):
        model.save_pretrained(out, max_shard_size=size)
        assert_keeps_the_head(out, base, stale=False)


def test_saving_over_the_base_keeps_its_head(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "own")
    trainer = make_trainer(load(tmp_path / "own"), tmp_path / "own", KeepHead(), save_strategy="no")
    trainer.train()
    for _ in range(2):
        trainer.save_model()
        assert_keeps_the_head(tmp_path / "own", base)


def test_the_text_model_of_a_wrapper_gets_the_wrappers_head(base: Path, tmp_path: Path, out: Path) -> None:
    wrapped = wrap_as_vision_language(shutil.copytree(base, tmp_path / "wrapped"))
    model = load(base)
    keep_head(model, wrapped)
    model.save_pretrained(out)
    assert_keeps_the_head(out, base, stale=False)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("modules_to_save", [None, ["embed_tokens", "lm_head"]])
@pytest.mark.parametrize("resized", [False, True])
def test_a_merged_adapter_keeps_the_head_and_its_checkpoints_say_where_it_is(
    modules_to_save: list[str] | None,
    resized: bool,
    base: Path,
    tmp_path: Path,
    out: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = load(base)
    if resized:
        plain.resize_token_embeddings(80)
    model = get_peft_model(plain, LoraConfig(target_modules=["q_proj", "up_proj"], modules_to_save=modules_to_save))
    trainer = make_trainer(model, out, KeepHead())
    trainer.train()
    adapter = out / "checkpoint-1"
    assert not list(adapter.glob("model*"))
    (said,) = told(caplog, "keep_head")
    command = f"mtp-train merge {base} --adapter {adapter} --out {base}-merged"
    assert command in said
    assert inspect(paste(command), base).status == "healthy"
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_keeps_the_head(tmp_path / "merged", base)


def test_a_checkpoint_in_the_trainers_own_shards_is_named(
    base: Path, tmp_path: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class SavesElsewhere(type(make_trainer(load(base), tmp_path / "none"))):  # type: ignore[misc]
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            """As with FSDP's SHARDED_STATE_DICT: the weights are saved beside the optimiser's state."""
            Path(output_dir or "").mkdir(parents=True)

    trainer = make_trainer(load(base), out, KeepHead())
    trainer.__class__ = SavesElsewhere
    trainer.train()
    (said,) = told(caplog, "keep_head")
    assert f"mtp-train graft MERGED --from {base}" in said


def test_a_copy_of_the_model_saves_itself(base: Path, out: Path) -> None:
    model = load(base)
    keep_head(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_output_embeddings().weight.zero_()
    other.save_pretrained(out)
    assert not all_tensors(out)["lm_head.weight"].any()
    assert inspect(out).status == "healthy"


def test_only_the_main_process_writes(base: Path, tmp_path: Path, out: Path) -> None:
    model = load(base)
    keep_head(model)
    model.save_pretrained(out, is_main_process=False)
    assert not list(out.glob("*mtp*"))
    model.save_pretrained(tmp_path / "empty", state_dict={})
    assert not (tmp_path / "empty" / INDEX_FILE).exists()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("step", range(4))
def test_a_kill_at_any_step_leaves_a_checkpoint_that_loads(
    step: int, sharded: bool, base: Path, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    model = load(base)
    size = "20KB" if sharded else "1GB"
    model.save_pretrained(tmp_path / "plain", max_shard_size=size)
    keep_head(model)
    left = [step]
    replace = Path.replace

    def replace_or_die(source: Path, target: Any) -> Path:
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace_or_die)
        try:
            model.save_pretrained(out, max_shard_size=size)
        except Killed:
            assert step < 3
        else:
            assert inspect(out).status == "healthy"
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    found = open_checkpoint(out)
    plain = all_tensors(tmp_path / "plain")
    assert all(torch.equal(found.read(key), value) for key, value in plain.items())
    # The same save once more cures it.
    model.save_pretrained(out, max_shard_size=size)
    assert_keeps_the_head(out, base, stale=False)


def test_a_full_disk_is_told_and_training_goes_on(
    base: Path, out: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mtp_train.checkpoints.export, "write_safetensors", full)
    trainer = make_trainer(load(base), out, KeepHead())
    trainer.train()
    assert trainer.state.global_step == 2
    saved = out / "checkpoint-1"
    said, _ = told(caplog, "keep_head")
    assert {record.levelno for record in caplog.records if record.getMessage() == said} == {logging.WARNING}
    assert f"{saved}: saved without its MTP head: {saved}: writing the head failed" in said
    command = f"mtp-train graft {saved} --from {base} --out {saved}-mtp"
    assert command in said
    assert inspect(saved).status == "declared_but_missing"
    monkeypatch.undo()
    assert_keeps_the_head(paste(command), base)


def test_a_base_that_cannot_give_a_head_is_refused_before_training(base: Path, tmp_path: Path, out: Path) -> None:
    finetune = tmp_path / "finetune"
    with pytest.raises(CheckpointError, match=r"finetune: holds no head tensors .*; expected a complete head\. Name"):
        make_trainer(load(finetune), out, KeepHead())
    make_trainer(load(finetune), out, KeepHead(base))
    other, _ = base_and_finetune(tmp_path / "glm", "glm4_moe")
    with pytest.raises(CheckpointError, match=r"base: family GLM.*, but the model has Qwen3\.5.*; expected the base"):
        keep_head(load(base), other)
    small = load(base)
    small.config.num_hidden_layers = 1
    with pytest.raises(CheckpointError, match=r"base: num_hidden_layers 4, but the model has 1; expected the base"):
        keep_head(small)
    unnamed = load(base)
    unnamed.config._name_or_path = ""
    with pytest.raises(CheckpointError, match=r"not loaded from a checkpoint; expected a checkpoint with the head"):
        keep_head(unnamed)
    with pytest.raises(UnsupportedModelError, match="the model is a Linear; expected a transformers model"):
        keep_head(torch.nn.Linear(2, 2))
