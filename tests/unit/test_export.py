from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import (
    all_tensors,
    base_and_finetune,
    holds,
    rewrite,
    save_stripped,
    set_fields,
    shard,
    shared_by_the_head,
    wrap_as_vision_language,
)
from json_files import read_json, write_json
from mtp_train import export, graft, inspect
from mtp_train.checkpoints import export as writing
from mtp_train.checkpoints.export import write_checkpoint
from mtp_train.checkpoints.files import INDEX_FILE, SINGLE_FILE, open_checkpoint
from mtp_train.cli.main import main
from mtp_train.errors import CheckpointError
from mtp_train.heads.build import build_head, fresh_plan, graft_plan, trained_head
from mtp_train.heads.diagnose import diagnose_head, text_config_of
from mtp_train.runs.display import quiet_progress
from tiny import ALL_FAMILIES, FAMILY_NAMES, tiny_trunk


def assert_grafted(out: Path, finetune: Path, base: Path) -> None:
    """Every trunk tensor is the fine-tune's and every own head tensor the base's, bit for bit."""
    written = all_tensors(out)
    tuned = all_tensors(finetune)
    original = all_tensors(base)
    assert written.keys() >= tuned.keys()
    assert holds(written, tuned)
    layout = open_checkpoint(out).layout
    base_layout = open_checkpoint(base).layout
    own = [key for key in original if base_layout.is_head_key(key) and base_layout.shared_key(key) is None]
    assert own
    assert all(torch.equal(written[base_layout.renamed(key, layout)], original[key]) for key in own)
    assert diagnose_head(open_checkpoint(out)).complete


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_graft_puts_the_head_back_and_leaves_the_trunk_alone(
    family_name: str, sharded: bool, tied: bool, tmp_path: Path, out: Path
) -> None:
    base, finetune = base_and_finetune(tmp_path, family_name, tied=tied)
    if sharded:
        shard(base, 2)
        shard(finetune)
    graft(finetune, base, out)
    assert_grafted(out, finetune, base)
    index = read_json(out / INDEX_FILE)
    tensors = all_tensors(out)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    assert not (out / "model.safetensors").exists()
    assert (out / "config.json").read_bytes() == (finetune / "config.json").read_bytes()


def test_an_index_keeps_its_metadata_but_for_the_counts(base: Path, finetune: Path, out: Path) -> None:
    path = shard(finetune) / INDEX_FILE
    index = read_json(path)
    index["metadata"] |= {"total_parameters": 7, "tuned_by": "us"}
    write_json(path, index)
    graft(finetune, base, out)
    metadata = read_json(out / INDEX_FILE)["metadata"]
    assert metadata.keys() == {"total_size", "tuned_by"}


def test_a_wrapped_fine_tune_takes_the_head_of_a_text_only_base(base: Path, finetune: Path, out: Path) -> None:
    wrap_as_vision_language(finetune)
    set_fields(finetune, {"mtp_num_hidden_layers": None})
    graft(finetune, base, out)
    assert_grafted(out, finetune, base)
    config = read_json(out / "config.json")
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    assert "mtp_num_hidden_layers" not in config
    assert config["vision_config"] == read_json(finetune / "config.json")["vision_config"]


def test_unchanged_files_are_links_and_copies_on_request(base: Path, finetune: Path, tmp_path: Path) -> None:
    graft(finetune, base, tmp_path / "linked")
    graft(finetune, base, tmp_path / "copied", copy=True)
    source = (finetune / "model.safetensors").stat().st_ino
    assert (tmp_path / "linked" / "model-00001-of-00002.safetensors").stat().st_ino == source
    assert (tmp_path / "copied" / "model-00001-of-00002.safetensors").stat().st_ino != source
    # An edit of the export's other files leaves the fine-tune's alone.
    before = (finetune / "config.json").read_bytes()
    for file in (tmp_path / "linked").glob("*.json"):
        file.write_text("{}")
    assert (finetune / "config.json").read_bytes() == before
    assert all(file.stat().st_nlink == 1 for file in (tmp_path / "linked").glob("*.json"))


def test_a_head_in_place_is_replaced_without_touching_the_source(tmp_path: Path, out: Path) -> None:
    base, _ = base_and_finetune(tmp_path, "glm4_moe")
    before = all_tensors(base)
    checkpoint = open_checkpoint(base)
    plan = graft_plan(checkpoint, checkpoint, "auto")
    head = build_head(plan, text_config_of(checkpoint), dtype=torch.float32)
    doubled = {name: value * 2 for name, value in head.state_dict().items()}
    write_checkpoint(checkpoint, trained_head(plan, doubled), out, link="hard", progress=quiet_progress())
    written = all_tensors(out)
    assert written.keys() == before.keys()
    for key, value in before.items():
        own = plan.layout.is_head_key(key) and plan.layout.shared_key(key) is None
        assert torch.equal(written[key], value * 2 if own else value), key
    assert holds(before, all_tensors(base))


def test_training_leftovers_and_pickles_are_not_copied(base: Path, finetune: Path, out: Path) -> None:
    (finetune / "optimizer.pt").write_bytes(b"x")
    (finetune / "README.md").write_text("# Mine\n")
    shutil.copytree(finetune, finetune / "checkpoint-10")
    graft(finetune, base, out)
    names = {path.name for path in out.iterdir()}
    # Our card replaces the trunk's; the file that it may be linked to is not written to.
    assert "# Mine" not in (out / "README.md").read_text()
    assert (finetune / "README.md").read_text() == "# Mine\n"
    assert not names & {"optimizer.pt", "checkpoint-10"}


@pytest.mark.parametrize("num_tokens", [80, 50])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_a_trunk_with_more_or_fewer_tokens_gets_the_head_and_repeats_its_own_embedding(
    family_name: str, tied: bool, num_tokens: int, tmp_path: Path, out: Path
) -> None:
    base, finetune = base_and_finetune(tmp_path, family_name, tied=tied)
    trunk = tiny_trunk(family_name, tied=tied)
    trunk.causal_lm.resize_token_embeddings(num_tokens)
    shutil.rmtree(finetune)
    save_stripped(trunk, finetune)
    graft(finetune, base, out)
    assert_grafted(out, finetune, base)
    found = inspect(out, base)
    assert (found.status, found.stale) == ("healthy", False)
    assert len(shared_by_the_head(out)) == (0 if family_name == "qwen3_5" else 2)


def test_a_head_with_an_output_matrix_of_its_own_does_not_follow_added_tokens(tmp_path: Path, out: Path) -> None:
    base, finetune = base_and_finetune(tmp_path, "step3p7")
    trunk = tiny_trunk("step3p7")
    trunk.causal_lm.resize_token_embeddings(80)
    shutil.rmtree(finetune)
    save_stripped(trunk, finetune)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is \[67, 32\], in .* \[80, 32\]; .* of its own"):
        graft(finetune, base, out)


def test_a_misspelt_head_key_is_named(base: Path, finetune: Path, out: Path) -> None:
    gate = "mtp.layers.0.mlp.gate_{}.weight"
    rewrite(base, lambda tensors: tensors.update({gate.format("porj"): tensors.pop(gate.format("proj"))}))
    with pytest.raises(CheckpointError, match=r"unknown head keys mtp\.layers\.0\.mlp\.gate_porj\.weight"):
        graft(finetune, base, out)


@pytest.mark.parametrize("family_name", ["qwen3_5", "qwen3_next"])
def test_a_fine_tune_gets_back_the_interval_that_transformers_does_not_save(
    family_name: str, tmp_path: Path, out: Path
) -> None:
    base, finetune = base_and_finetune(tmp_path, family_name)
    set_fields(base, {"full_attention_interval": 2})
    assert "full_attention_interval" not in read_json(finetune / "config.json")
    graft(finetune, base, out)
    assert read_json(out / "config.json")["full_attention_interval"] == 2


@pytest.mark.skipif("inkling" not in ALL_FAMILIES, reason="this transformers has no Inkling")
@pytest.mark.parametrize("repeated", [False, True])
def test_a_fresh_head_is_declared_in_the_section_that_its_family_has(repeated: bool, tmp_path: Path, out: Path) -> None:
    """The trunk's config declares a longer head, and in one case the count is repeated, as transformers saves it."""
    _, finetune = base_and_finetune(tmp_path, "inkling")
    config = read_json(finetune / "config.json")
    config["mtp_config"]["num_nextn_predict_layers"] = 3
    if repeated:
        config["text_config"]["num_mtp_layers"] = 3
    write_json(finetune / "config.json", config)
    checkpoint = open_checkpoint(finetune)
    plan = fresh_plan(checkpoint, text_config_of(checkpoint), "auto", seed=1)
    write_checkpoint(checkpoint, plan.head, out, link="hard", progress=quiet_progress())
    written = read_json(out / "config.json")
    assert written["mtp_config"] == {**config["mtp_config"], "num_nextn_predict_layers": 1}
    assert written["text_config"].get("num_mtp_layers") == (1 if repeated else None)
    diagnosis = diagnose_head(open_checkpoint(out))
    assert (diagnosis.complete, diagnosis.declared_modules, diagnosis.present_modules) == (True, 1, 1)


@pytest.mark.parametrize("link", ["hard", "copy"])
def test_the_trunk_s_bytes_are_compared_after_a_copy_and_the_result_says_so(
    link: str,
    base: Path,
    finetune: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = ["--copy"] if link == "copy" else []
    count = len(load_file(finetune / SINGLE_FILE))
    for argv in (["graft", finetune, "--from", base], ["export", base]):
        assert main([*map(str, argv), "--out", str(tmp_path / argv[0]), *copy]) == 0
        assert f"\ntrunk: {count} tensors, all bytes equal\n" in capfd.readouterr().out
    place = writing.place_file

    def flip_a_byte(file: Path, target: Path, mode: Any) -> None:
        place(file, target, "copy")
        if target.suffix == ".safetensors":
            data = bytearray(target.read_bytes())
            data[-1] ^= 1
            target.write_bytes(data)

    monkeypatch.setattr(writing, "place_file", flip_a_byte)
    with pytest.raises(CheckpointError, match=r"has other bytes than in .*; expected a copy"):
        graft(finetune, base, tmp_path / "flipped")
    assert not (tmp_path / "flipped").exists()


def test_export_without_a_head_names_the_cure(finetune: Path, out: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no head tensors .* Use mtp-train graft"):
        export(finetune, out)
