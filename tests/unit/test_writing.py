from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from json_files import read_json
from mtp_train.checkpoints import writing
from mtp_train.checkpoints.files import SAFETENSORS_DTYPES, TORCH_DTYPES, scan_safetensors
from mtp_train.checkpoints.writing import (
    PendingTensor,
    new_directory,
    write_json,
    write_safetensors,
    write_text,
)
from mtp_train.errors import CheckpointError, OutputExistsError


def pending(key: str, value: Tensor) -> PendingTensor:
    return PendingTensor(key, SAFETENSORS_DTYPES[value.dtype], tuple(value.shape), lambda: [value])


def bits(value: Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def one_of_each_dtype() -> dict[str, Tensor]:
    """Return a tensor of every dtype, an odd number of bytes first, so that nothing is aligned by luck."""
    values = torch.tensor([[0, 1, 2], [0, 1, 4]])
    tensors = {"odd": torch.tensor([True, False, True])}
    return tensors | {name: values.to(torch.float32).to(dtype) for name, dtype in TORCH_DTYPES.items()}


def test_safetensors_reads_every_dtype_as_it_was_given(tmp_path: Path) -> None:
    tensors = one_of_each_dtype()
    write_safetensors(tmp_path / "all.safetensors", [pending(key, value) for key, value in tensors.items()])
    loaded = load_file(tmp_path / "all.safetensors")
    assert loaded.keys() == tensors.keys()
    for key, value in tensors.items():
        assert (loaded[key].dtype, loaded[key].shape) == (value.dtype, value.shape), key
        assert bits(loaded[key]) == bits(value), key
    infos = scan_safetensors(tmp_path / "all.safetensors")
    assert {key: info.dtype for key, info in infos.items()} == {"odd": "BOOL"} | {name: name for name in TORCH_DTYPES}
    with safe_open(tmp_path / "all.safetensors", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}  # transformers refuses a file without it


@pytest.mark.parametrize(
    "value",
    [torch.tensor(3.5), torch.empty(0, 4), torch.arange(12.0).view(3, 4).T, torch.arange(12.0).view(3, 4)[:, 1:3]],
    ids=["scalar", "empty", "transposed", "slice"],
)
def test_any_shape_and_stride_is_written(value: Tensor, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", [pending("before", torch.ones(1)), pending("it", value)])
    loaded = load_file(tmp_path / "one.safetensors")["it"]
    assert loaded.shape == value.shape
    assert torch.equal(loaded, value)


def test_a_tensor_of_another_shape_than_announced_is_refused(tmp_path: Path) -> None:
    wrong = PendingTensor("it", "F32", (2, 3), lambda: [torch.ones(2, 3), torch.ones(1, 3)])
    with pytest.raises(CheckpointError, match=r"it: 9 values; expected shape \[2, 3\]"):
        write_safetensors(tmp_path / "one.safetensors", [wrong])


def test_text_replaces_a_file_in_one_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "it.json", {"old": 1})
    assert read_json(tmp_path / "it.json") == {"old": 1}

    def pull_the_plug(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", pull_the_plug)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "it.json", "new")
    assert read_json(tmp_path / "it.json") == {"old": 1}


def test_a_new_directory_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with new_directory(target, what="the thing") as directory:
        (directory / "file").write_text("x")
        assert not target.exists()
        assert directory.parent == target.parent, "a rename must not cross file systems"
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert (target / "file").read_text() == "x"
    assert target.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_an_existing_target_is_refused(kind: str, tmp_path: Path, out: Path) -> None:
    if kind == "directory":
        out.mkdir()
    elif kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "nowhere")
    with (
        pytest.raises(OutputExistsError, match="out: already exists; expected a new path for the thing"),
        new_directory(out, what="the thing"),
    ):
        pytest.fail("the block ran")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt(), OSError(errno.EIO, "a broken disk")])
def test_a_failed_block_leaves_nothing_behind(error: BaseException, tmp_path: Path) -> None:
    def write_half() -> None:
        with new_directory(tmp_path / "out", what="the thing") as directory:
            (directory / "half").write_text("x")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_the_users_to_mend_and_leaves_nothing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(writing.os, "fsync", full)
    with (
        pytest.raises(
            CheckpointError,
            match=rf"out: writing the thing failed \({os.strerror(code)}\); expected space and permission",
        ),
        new_directory(tmp_path / "out", what="the thing") as directory,
    ):
        write_safetensors(directory / "it.safetensors", [pending("it", torch.ones(4))])
    assert list(tmp_path.iterdir()) == []
