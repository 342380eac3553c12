"""Kernels of the decoder's rounds against torch: interpreted alone and in whole rounds, compiled for devices elsewhere.

Interpreted kernels cut bf16 off where a device rounds it.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from launching import environment, told_by
from tiny import ALL_FAMILIES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton: not installed")
INTERPRETED = {"TRITON_INTERPRET": "1"}
SAME = {"fp32": 1e-6, "bf16": 2**-6}
"""Relative to the largest value. In bf16 a value may be cut off twice."""
WRONG = 2**-6
"""How far the kernels are from torch with another epsilon, earlier input, decay, direction or last key, at least."""
SHARED_BYTES = {"cuda": 99 << 10, "hip": 64 << 10}
"""Shared memory that a program may take: on sm_86 and sm_89, which have the least, and on gfx942."""


def of_kernels(*words: object, env: dict[str, str]) -> Any:
    """Return what ``fused_jobs.py`` found."""
    return told_by("fused_jobs.py", *words, env=env)


def check_agreement(found: dict[str, Any]) -> None:
    """Check every comparison, and that a wrong one beside it is seen in fp32."""
    for dtype, kinds in found.items():
        assert {kind: len(compared) for kind, compared in kinds.items()} == NUM_COMPARED
        for kind, compared in kinds.items():
            for name, (difference, control) in compared.items():
                assert difference < SAME[dtype], (dtype, kind, name)
                assert dtype == "bf16" or control > WRONG, (kind, name)


NUM_COMPARED = {"norm": 14, "convolution": 3, "delta": 7, "rotation": 2, "attention": 9}


def test_kernels_compute_what_torch_computes() -> None:
    found = of_kernels("agree", "cpu", env=environment(**INTERPRETED))
    assert found.keys() == SAME.keys()
    check_agreement(found)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("bailing_hybrid", {"launch_conv_window"}),
        pytest.param(
            "qwen3_5",
            {"launch_rotate", "launch_conv_window", "launch_delta_window", "launch_delta_token"},
            marks=pytest.mark.slow,
        ),
        pytest.param("glm4_moe", {"launch_rotate"}, marks=pytest.mark.slow),
        pytest.param("nemotron_h", {"launch_conv_window"}, marks=pytest.mark.slow),
        # Sliding windows and sinks.
        pytest.param("mimo_v2_flash", {"launch_rotate"}, marks=pytest.mark.slow),
    ],
)
def test_rounds_of_interpreted_kernels_have_the_same_text(name: str, kernels: set[str]) -> None:
    if name not in ALL_FAMILIES:
        pytest.skip(f"this transformers has no {name}")
    found = of_kernels("decode", name, env=environment(**INTERPRETED))
    assert found["fused"] == found["torch"]
    assert found["launches"].keys() == kernels | {"launch_rms_norm", "launch_attend_window"}


@pytest.mark.parametrize(
    ("backend", "arch", "dtype"),
    [
        ("cuda", "90", "bf16"),
        *(
            pytest.param(*target, marks=pytest.mark.slow)
            for target in (("cuda", "90", "fp32"), ("cuda", "80", "bf16"), ("hip", "gfx942", "bf16"))
        ),
    ],
)
def test_kernels_compile_for_devices_that_are_not_here(backend: str, arch: str, dtype: str, tmp_path: Path) -> None:
    kernels = of_kernels("compile", backend, arch, dtype, env=environment(TRITON_CACHE_DIR=str(tmp_path)))
    assert len(kernels) == 16
    for name, kernel in kernels.items():
        assert kernel["spilled"] == 0, name
        assert kernel["shared"] <= SHARED_BYTES[backend], name
        if backend == "cuda":
            # Two programs on a multiprocessor at the least, with 65,536 registers.
            assert 0 < kernel["registers"] * kernel["threads"] <= 32768, name


@pytest.mark.gpu
def test_kernels_on_a_device_compute_what_torch_computes() -> None:
    env = environment(CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    check_agreement(of_kernels("agree", "cuda", env=env))
