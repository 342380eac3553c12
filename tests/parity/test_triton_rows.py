"""Kernels of the losses against the same losses in torch: interpreted, compiled for devices elsewhere, in a run.

Interpreted kernels cut bf16 off where a device rounds it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launching import COMMAND_LINE, DEADLINE_SECONDS, environment, metrics, told_by

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton: not installed")
INTERPRETED = {"TRITON_INTERPRET": "1"}
SAME, SAME_BF16 = 2e-5, 2**-7
"""Relative to the largest value; a temperature off by a hundredth, or a token less, is off by more than 5e-4."""


def of_kernels(*words: object, env: dict[str, str]) -> Any:
    """Return what ``triton_jobs.py`` found."""
    return told_by("triton_jobs.py", *words, env=env)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    found: dict[str, Any] = of_kernels("agree", "cpu", env=environment(**INTERPRETED))
    return found


def beyond(found: dict[str, list[float]], bound: float) -> dict[str, list[float]]:
    return {name: apart for name, apart in found.items() if not max(apart) < bound}


def test_losses_and_gradients_are_those_of_torch(interpreted: dict[str, Any]) -> None:
    assert interpreted["device"] == "cpu"
    assert len(interpreted["float32"]) == 20
    assert beyond(interpreted["float32"], SAME) == {}
    assert len(interpreted["bfloat16"]) == 5
    assert beyond(interpreted["bfloat16"], SAME_BF16) == {}
    assert max(loss for loss, _ in interpreted["bfloat16"].values()) < SAME


def test_a_kernel_that_is_told_something_else_is_found(interpreted: dict[str, Any]) -> None:
    assert len(interpreted["wrong"]) == 9
    assert min(interpreted["wrong"].values()) > 5e-4


def test_the_edges_of_a_loss_hold(interpreted: dict[str, Any]) -> None:
    edges = interpreted["edges"]
    assert not any(edges["equal"])
    assert edges["lacking kl"]
    assert max(edges["lacking tv"]) < SAME
    # A loss that is not finite ends a run, so none may be lost.
    assert all(edges["broken"] + edges["taught badly"])


def test_whole_losses_are_those_of_torch(interpreted: dict[str, Any]) -> None:
    assert interpreted["whole"].keys() == {"e2e_tv", "lk", "ce", "kl"}
    for kind, (total, *apart) in interpreted["whole"].items():
        assert total > 1
        assert max(apart) < (SAME_BF16 if kind == "kl" else SAME), kind


@pytest.mark.parametrize(
    ("backend", "arch", "dtype", "width"),
    [
        ("cuda", "90", "bf16", 248_320),
        *(
            pytest.param(*target, marks=pytest.mark.slow)
            for target in (
                ("cuda", "90", "fp32", 248_320),
                ("cuda", "80", "bf16", 248_320),
                ("cuda", "80", "bf16", 151_643),
                ("hip", "gfx942", "bf16", 248_320),
            )
        ),
    ],
)
def test_kernels_compile_for_devices_that_are_not_here(
    backend: str, arch: str, dtype: str, width: int, tmp_path: Path
) -> None:
    kernels = of_kernels("compile", backend, arch, dtype, width, env=environment(TRITON_CACHE_DIR=str(tmp_path)))
    assert kernels.pop("device") is None
    assert len(kernels) == 6
    for name, kernel in kernels.items():
        assert kernel["spilled"] == 0, name
        if backend == "cuda":
            # Two programs of 256 threads on a multiprocessor at the least, with 65,536 registers.
            assert 0 < kernel["registers"] <= 128 or width % 16, name
            # Sixteen bytes at a time where rows begin at multiples of that, and else one number.
            assert (kernel["wide"] == 0) == (width % 16 != 0), name
            assert (kernel["narrow"] > 0) == (width % 16 != 0), name
            assert (kernel["rounded"] > 0) == (dtype == "bf16" and name != "measure"), name


@pytest.mark.slow
def test_a_run_with_kernels_loses_what_a_run_with_torch_loses(inputs: Path, tmp_path: Path) -> None:
    # Here: a machine that only measures lacks packages which it imports.
    from runs import write_recipe

    lost = []
    for rows in ("torch", "triton"):
        settings = {"objective__rows": rows, "train__max_steps": 2, "train__tokens_per_step": 96}
        recipe = write_recipe(tmp_path / f"{rows}.yaml", inputs, tmp_path / rows, **settings)
        command = [sys.executable, *COMMAND_LINE, recipe]
        env = environment(**INTERPRETED, ACCELERATE_USE_CPU="true")
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=DEADLINE_SECONDS)
        assert done.returncode in (0, 3), done.stderr
        lost.append([line["loss"] for line in metrics(tmp_path / rows)])
    assert len(lost[0]) == 2
    assert lost[1] == pytest.approx(lost[0], rel=SAME)


@pytest.mark.gpu
def test_kernels_on_a_device_are_those_of_torch() -> None:
    env = environment(CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    found = of_kernels("agree", "cuda", env=env)
    assert found["device"] == "cuda"
    assert beyond(found["float32"], SAME) == {}
    assert beyond(found["bfloat16"], SAME_BF16) == {}
    assert min(found["wrong"].values()) > 5e-4
    assert all(found["edges"]["broken"] + found["edges"]["taught badly"])
