"""The numbers of a checkpoint: NaN is found, and how far one trunk on disk is from another."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import save_file

from checkpoints import all_tensors, base_and_finetune, save_stripped
from mtp_train.checkpoints.files import TORCH_DTYPES, Checkpoint, open_checkpoint, scan_safetensors
from mtp_train.checkpoints.quantised import read_plain_in_blocks
from mtp_train.checkpoints.values import common_tensors, find_non_finite, squared_change
from tiny import tiny_trunk


def stored(folder: Path, tensor: torch.Tensor) -> Checkpoint:
    folder.mkdir()
    save_file({"w": tensor}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return open_checkpoint(folder)


def blocks(checkpoint: Checkpoint, key: str = "w") -> Iterator[torch.Tensor]:
    return read_plain_in_blocks(checkpoint, key)


def test_nan_is_seen_and_equal_tensors_have_no_change(tmp_path: Path) -> None:
    old = torch.full((300, 7), 3.0)
    new = old.clone()
    new[5, 2] = torch.nan
    base = stored(tmp_path / "old", old)
    assert squared_change(blocks(base), blocks(base)) == (0.0, 9.0 * 2100, 9.0 * 2100)
    change, size, _ = squared_change(blocks(stored(tmp_path / "new", new)), blocks(base))
    assert (math.isnan(change), size) == (True, 9.0 * 2100)


@pytest.mark.parametrize("tied", [False, True])
def test_all_of_a_trunk_counts_but_its_head(tied: bool, tmp_path: Path) -> None:
    base, finetune = (open_checkpoint(path) for path in base_and_finetune(tmp_path, "qwen3_5", tied=tied))
    shared = common_tensors(finetune, base)
    assert {key for key, _ in shared.values()} == all_tensors(finetune.path).keys()
    assert [key for key, _ in shared.values()] == [key for _, key in shared.values()]


def test_added_tokens_do_not_count_as_change(base: Path, finetune: Path) -> None:
    def changes() -> list[float]:
        ours = open_checkpoint(finetune)
        theirs = open_checkpoint(base)
        shared = common_tensors(ours, theirs).values()
        return [squared_change(blocks(ours, key), blocks(theirs, base_key))[0] for key, base_key in shared]

    assert sum(changes()) > 0
    trunk = tiny_trunk("qwen3_5")
    trunk.causal_lm.resize_token_embeddings(80)
    shutil.rmtree(finetune)
    save_stripped(trunk, finetune)
    assert sum(changes()) == 0.0


FLOATS = [dtype for dtype in TORCH_DTYPES.values() if dtype.is_floating_point and dtype != torch.float8_e8m0fnu]


def opened(path: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, path / "model.safetensors")
    return Checkpoint(path, {}, None, scan_safetensors(path / "model.safetensors"))


def keys_with_nan(path: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    return find_non_finite(opened(path, tensors), Progress(disable=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 37, -1])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(
    place: int, value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensor = torch.randn(13, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert keys_with_nan(tmp_path, {"w": tensor}) == []
    # E4M3 has no infinity.
    tensor.view(-1)[place] = float("nan") if dtype == torch.float8_e4m3fn else value
    assert keys_with_nan(tmp_path, {"w": tensor}) == ["w"]


def test_huge_values_integers_and_empty_tensors_are_finite(tmp_path: Path) -> None:
    tensors = {
        "huge": torch.full((64,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16),
        "whole": torch.full((3, 2), -(2**31), dtype=torch.int32),
        "nothing": torch.zeros(0, 4),
        "rows of nothing": torch.zeros(4, 0),
        "scalar": torch.tensor(1.5),
    }
    assert keys_with_nan(tmp_path, tensors) == []
    assert keys_with_nan(tmp_path, tensors | {"scalar": torch.tensor(float("nan"))}) == ["scalar"]
