"""A checkpoint is read from the files that it names inside its directory. Copies follow no other links."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters import write_adapter
from checkpoints import all_tensors, holds, same, save_tensors, set_fields, shard
from json_files import read_json, write_json
from left_over import into_hub_cache
from mtp_train import export, graft, inspect
from mtp_train.checkpoints.files import INDEX_FILE, SINGLE_FILE, open_checkpoint
from mtp_train.errors import CheckpointError
from mtp_train.trunk.load import load_trunk
from runs import Capture, document, refusal, run_command, tree

SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture
def base(pristine: Path, tmp_path: Path) -> Path:
    """A base in three shards."""
    return shard(Path(shutil.copytree(pristine / "base", tmp_path / "base")))


def rename_in_index(path: Path, rename: Callable[[str], Any]) -> None:
    index = read_json(path / INDEX_FILE)
    index["weight_map"] = {key: rename(file) for key, file in index["weight_map"].items()}
    write_json(path / INDEX_FILE, index)


def nest(path: Path, directory: str = "weights/fp32") -> Path:
    """Move the shards into a subdirectory, and leave decoys under their old names."""
    (path / directory).mkdir(parents=True)
    for name in SHARDS:
        decoy = {key: value + 1 for key, value in load_file(path / name).items()}
        (path / name).rename(path / directory / name)
        save_tensors(decoy, path / name)
    rename_in_index(path, lambda file: f"{directory}/{file}")
    return path


def generated(path: Path, capfd: Capture) -> Any:
    return document(["generate", path, "--prompt", "say 1", "--max-new-tokens", "6"], capfd)["requests"]


# Names


@pytest.mark.parametrize("directory", ["weights/fp32", "checkpoint-1"])
def test_a_shard_in_a_subdirectory_is_read_as_named_by_us_and_by_transformers(
    directory: str, base: Path, capfd: Capture
) -> None:
    expected = all_tensors(base)
    text = generated(base, capfd)
    nest(base, directory)
    assert same(all_tensors(base), expected)
    embedding = load_trunk(open_checkpoint(base), dtype="auto").causal_lm.get_input_embeddings().weight
    assert torch.equal(embedding, expected["model.embed_tokens.weight"])
    assert document(["inspect", base], capfd)["status"] == "healthy"
    assert generated(base, capfd) == text
    # A decoy that is not finite is not read either.
    decoy = load_file(base / SHARDS[0])
    save_tensors({key: value * float("nan") for key, value in decoy.items()}, base / SHARDS[0])
    assert document(["inspect", base], capfd)["non_finite_keys"] == []


@pytest.mark.parametrize("directory", ["weights/fp32", "checkpoint-1"])
def test_copies_keep_the_layout_of_subdirectories(directory: str, base: Path, pristine: Path, tmp_path: Path) -> None:
    expected = all_tensors(nest(base, directory))
    # Beside another model's config a directory is left out, but for the weights that are named.
    (base / directory / "config.json").write_text("{}")
    assert run_command("export", base, "--out", tmp_path / "export") == 0
    fine_tune = nest(shard(Path(shutil.copytree(pristine / "finetune", tmp_path / "tuned"))), directory)
    trunk = all_tensors(fine_tune)
    assert run_command("graft", fine_tune, "--from", base, "--out", tmp_path / "graft") == 0
    write_adapter(pristine / "base", tmp_path / "lora")
    words = ["merge", base, "--adapter", tmp_path / "lora", "--out", tmp_path / "merge"]
    assert run_command(*words) == 0
    for name in ("export", "graft", "merge"):
        assert {file.name for file in (tmp_path / name / directory).glob("*.safetensors")} == set(SHARDS)
    assert same(all_tensors(tmp_path / "export"), expected)
    grafted = all_tensors(tmp_path / "graft")
    assert holds(grafted, trunk)
    merged = all_tensors(tmp_path / "merge")
    changed = {key for key, value in merged.items() if not torch.equal(value, expected[key])}
    assert changed == {key for key in merged if key.endswith("q_proj.weight") and not key.startswith("mtp.")}


def commands(base: Path, pristine: Path, tmp_path: Path) -> dict[str, list[Any]]:
    out = tmp_path / "out"
    return {
        "inspect": ["inspect", base],
        "graft": ["graft", pristine / "finetune", "--from", base, "--out", out],
        "merge": ["merge", base, "--adapter", tmp_path / "lora", "--out", out],
        "export": ["export", base, "--out", out],
        "gguf": ["export", base, "--gguf", "f16", "--out", out],
        "generate": ["generate", base, "--prompt", "say 1"],
        "evaluate": ["evaluate", base, "--out", out],
    }


OUTSIDE: dict[str, Callable[[Path, str], Any]] = {
    "a parent": lambda path, file: f"../outside/{file}",
    "a way back in": lambda path, file: f"../{path.name}/{file}",
    "an absolute path": lambda path, file: str(path / file),
    "no name": lambda path, file: None,
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leads_outside_of_the_checkpoint_is_refused_by_every_command(
    name: str, base: Path, pristine: Path, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    shutil.copytree(base, tmp_path / "outside")
    write_adapter(pristine / "base", tmp_path / "lora")
    rename_in_index(base, lambda file: OUTSIDE[name](base, file))
    for argv in commands(base, pristine, tmp_path).values():
        message = refusal(argv, capfd)
        assert f"{INDEX_FILE}: names " in message
        assert f"expected the path of a file inside {base}, without '..'" in message
    assert not out.exists()


def copied_to(path: Path, key: str, to: str) -> torch.Tensor:
    """Add a changed copy of a tensor to another shard of an index that names the original, which is returned."""
    value = all_tensors(path)[key]
    save_tensors(load_file(path / to) | {key: value + 1}, path / to)
    return value


def test_of_a_tensor_in_two_shards_the_index_decides(base: Path, pristine: Path, tmp_path: Path) -> None:
    trunk = "model.norm.weight"
    head = "mtp.fc.weight"
    weight_map = read_json(base / INDEX_FILE)["weight_map"]
    originals = all_tensors(base)
    for number, (key, other) in enumerate(itertools.product((trunk, head), SHARDS)):
        path = Path(shutil.copytree(base, tmp_path / str(number)))
        holder = weight_map[key]
        if other == holder:
            continue
        copied_to(path, key, other)
        named = f"{key} in {other}"
        found = inspect(path)
        assert found.superseded == (named,)
        assert f"superseded by the index: {named}" in str(found)
        assert torch.equal(open_checkpoint(path).read(key), originals[key])
        if key == trunk and other > holder:
            # Engines and transformers read the later copy.
            assert (found.status, found.serves["vllm"][:3]) == ("damaged", "no:")
            with pytest.raises(CheckpointError, match=f"transformers loads from a later shard than .*: {key}"):
                export(path, path / "out")
            continue
        assert (found.status, found.serves["vllm"].startswith("no: reads a copy")) == ("healthy", other > holder)
        assert found.cure == (f"mtp-train export {path} --out {path}-mtp" if other > holder else None)
        written = export(path, path / "out")
        assert written.notes == (f"Left out, as the index names another copy: {named} (1 in all).",)
        assert same(all_tensors(path / "out"), originals)
        assert inspect(path / "out").superseded == ()
        grafted = graft(path, pristine / "base", path / "grafted")
        assert written.notes[0] in grafted.notes
        assert same(all_tensors(path / "grafted"), originals)


@pytest.mark.parametrize("found", ["transformers_weights", "distributed save"])
def test_weights_that_transformers_alone_would_load_are_refused(found: str, base: Path) -> None:
    if found == "transformers_weights":
        set_fields(base, {found: SHARDS[0]})
    else:
        shutil.copyfile(base / SHARDS[0], base / "shard-00000-model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=f"{found}.*, which transformers loads instead of the other weights"):
        open_checkpoint(base)


# Links


@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_in_the_hub_s_cache_is_read_and_copied(
    nested: bool, base: Path, pristine: Path, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    expected = all_tensors(nest(base) if nested else base)
    (base / "assets").mkdir()
    (base / "assets" / "figure.png").write_text("a curve")
    snapshot = into_hub_cache(base, tmp_path / "hub")
    assert all(file.is_symlink() for file in snapshot.rglob("*") if not file.is_dir())
    assert same(all_tensors(snapshot), expected)
    assert document(["inspect", snapshot], capfd)["status"] == "healthy"
    assert generated(snapshot, capfd) == generated(base, capfd)
    argv = ["graft", pristine / "finetune", "--from", snapshot, "--out", tmp_path / "graft"]
    assert run_command(*argv) == 0
    assert run_command("export", snapshot, "--out", out) == 0
    assert not any(file.is_symlink() for file in out.rglob("*"))
    assert (out / "assets" / "figure.png").read_text() == "a curve"
    assert same(all_tensors(out), expected)


def link_of_a_file(base: Path, outside: Path) -> str:
    (base / "notes.txt").symlink_to(outside / "secret")
    return r"notes\.txt: a link, which could bring in files from anywhere"


def link_of_a_directory(base: Path, outside: Path) -> str:
    (base / "more").symlink_to(outside)
    return r"more: a link to a directory, which could bring in files from anywhere"


def loop_of_directories(base: Path, outside: Path) -> str:
    (base / "more").symlink_to(base)
    return r"more: a link to a directory, which could bring in files from anywhere"


def loop_of_a_link(base: Path, outside: Path) -> str:
    (base / "tokenizer.model").symlink_to(base / "tokenizer.model")
    return r"tokenizer\.model: a link, which could bring in files from anywhere"


LINKS = [link_of_a_file, link_of_a_directory, loop_of_directories, loop_of_a_link]


@pytest.mark.parametrize("add", LINKS)
def test_any_other_link_is_refused_where_files_are_copied_and_does_not_hinder_reading(
    add: Callable[[Path, Path], str], base: Path, pristine: Path, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    write_adapter(pristine / "base", tmp_path / "lora")
    message = add(base, tmp_path / "outside")
    before = tree(tmp_path)
    graft = ["graft", base, "--from", pristine / "base", "--out", out]
    head_only = ["export", base, "--head-only", "--out", out]
    argvs = commands(base, pristine, tmp_path)
    for argv in (argvs["export"], argvs["merge"], head_only, graft):
        assert re.search(message, refusal(argv, capfd))
    assert tree(tmp_path) == before
    assert document(["inspect", base], capfd)["status"] == "healthy"


@pytest.mark.parametrize("name", ["config.json", INDEX_FILE, SHARDS[1]])
def test_a_link_that_leads_nowhere_is_refused_by_its_name(name: str, base: Path, capfd: Capture) -> None:
    for target in (base / name, "nowhere"):
        (base / name).unlink(missing_ok=True)
        (base / name).symlink_to(target)
        message = refusal(["inspect", base], capfd)
        assert f"{base / name}: no such file" in message or f"{base}: no weights; expected {SINGLE_FILE}" in message
