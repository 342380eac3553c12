from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import save_file

from mtp_train.checkpoints.files import TORCH_DTYPES, Checkpoint, scan_safetensors
from mtp_train.checkpoints.values import find_non_finite

FLOATS = [dtype for dtype in TORCH_DTYPES.values() if dtype.is_floating_point and dtype != torch.float8_e8m0fnu]


def opened(path: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, path / "model.safetensors")
    return Checkpoint(path, {}, None, scan_safetensors(path / "model.safetensors"))


def found(path: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    return find_non_finite(opened(path, tensors), Progress(disable=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 37, -1])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(
    place: int, value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensor = torch.randn(13, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert found(tmp_path, {"w": tensor}) == []
    # E4M3 has no infinity.
    tensor.view(-1)[place] = float("nan") if dtype == torch.float8_e4m3fn else value
    assert found(tmp_path, {"w": tensor}) == ["w"]


def test_huge_values_integers_and_empty_tensors_are_finite(tmp_path: Path) -> None:
    tensors = {
        "huge": torch.full((64,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16),
        "whole": torch.full((3, 2), -(2**31), dtype=torch.int32),
        "nothing": torch.zeros(0, 4),
        "rows of nothing": torch.zeros(4, 0),
        "scalar": torch.tensor(1.5),
    }
    assert found(tmp_path, tensors) == []
    assert found(tmp_path, tensors | {"scalar": torch.tensor(float("nan"))}) == ["scalar"]


@pytest.mark.parametrize("max_elements", [1, 7, 11, 30, 1000])
def test_blocks_make_up_the_tensor(max_elements: int, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, {"before": torch.randn(3), "w": torch.randn(5, 2, 3), "after": torch.randn(2)})
    blocks = list(checkpoint.read_in_blocks("w", max_elements))
    assert torch.equal(torch.cat(blocks), checkpoint.read("w"))
    assert max(block.numel() for block in blocks) <= max(max_elements, 6)
