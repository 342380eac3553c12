"""Each call of a recurrent layer chooses between a package's kernel and torch."""

from __future__ import annotations

import functools
import importlib.util
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtp_train.families.spec import RecurrentKernels
from mtp_train.trunk import recurrent_kernels
from mtp_train.trunk.recurrent_kernels import choose_kernels, missing_kernels
from mtp_train.upstream.transformers_private import torch_function_of

NAMES = RecurrentKernels(chunked="chunked", single="single", rule="gated_delta")
FP32_ON_META = torch.zeros(2, 8, 4, device="meta")


def decorated(_first: Tensor, *, told: str = "torch") -> str:
    """Return a function as transformers decorates it, with a kernel behind it."""
    return told


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a Python module of a model, on a machine with fla whose kernels run on meta tensors."""

    @functools.wraps(decorated)
    def kernel(_first: Tensor) -> str:
        return "kernel"

    module = ModuleType("modeling")
    for name in ("chunked", "single", "causal_conv1d_fn", "causal_conv1d_update"):
        setattr(module, name, kernel)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "fla" else None)
    monkeypatch.setattr(recurrent_kernels, "KERNEL_DEVICES", ("meta",))
    monkeypatch.setattr(metadata, "version", lambda _name: "0.5.2")
    return module


def run(module: ModuleType, given: Tensor) -> dict[str, str]:
    names = ("chunked", "single", "causal_conv1d_fn", "causal_conv1d_update")
    return {name: getattr(module, name)(given) for name in names}


def test_a_cpu_never_takes_a_kernel(model: ModuleType) -> None:
    assert set(run(model, torch.zeros(2, 8, 4, dtype=torch.bfloat16)).values()) == {"kernel"}
    choose_kernels(model, NAMES)
    assert set(run(model, torch.zeros(2, 8, 4, dtype=torch.bfloat16)).values()) == {"torch"}


def test_kernels_of_several_tokens_take_half_precision_only(model: ModuleType) -> None:
    choose_kernels(model, NAMES)
    assert set(run(model, FP32_ON_META.bfloat16()).values()) == {"kernel"}
    in_fp32 = run(model, FP32_ON_META)
    assert in_fp32.pop("chunked") == "torch"
    assert set(in_fp32.values()) == {"kernel"}


def test_a_model_without_a_recurrent_state_chooses_its_convolutions(model: ModuleType) -> None:
    choose_kernels(model, None)
    told = run(model, torch.zeros(2, 8, 4))
    assert (told["chunked"], told["causal_conv1d_fn"]) == ("kernel", "torch")


def test_a_second_model_changes_nothing(model: ModuleType) -> None:
    choose_kernels(model, NAMES)
    before = dict(vars(model))
    choose_kernels(model, NAMES)
    assert vars(model) == before


def test_without_the_packages_a_model_stays_as_it_is(model: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    before = dict(vars(model))
    choose_kernels(model, NAMES)
    assert vars(model) == before


def test_an_fla_without_grouped_heads_is_not_used_and_named(
    model: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: "0.4.2")
    choose_kernels(model, NAMES)
    told = run(model, FP32_ON_META.bfloat16())
    assert (told["chunked"], told["single"]) == ("torch", "kernel")
    assert "flash-linear-attention 0.4.2: " in caplog.text


@pytest.mark.parametrize(
    ("rule", "device", "installed", "is_named"),
    [
        ("gated_delta", "cuda", "", True),
        ("gated_delta", "cuda", "fla", False),
        ("gated_delta", "cpu", "", False),
        ("mamba2", "cuda", "", False),
        (None, "cuda", "", False),
    ],
)
def test_a_missing_fla_is_named_where_its_kernels_would_run(
    rule: Any, device: str, installed: str, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == installed else None)
    found = missing_kernels(rule and RecurrentKernels(chunked="", single="", rule=rule), device)
    assert (found is not None) == is_named
    assert found is None or "pip install flash-linear-attention" in found


def test_the_torch_function_is_found_where_the_package_kernels_wraps_it() -> None:
    func = functools.wraps(decorated)(lambda _first: "kernel")

    class Func(nn.Module):
        def forward(self, *args: Any, **named: Any) -> Any:
            return func(*args, **named)

    assert torch_function_of(Func()) is decorated
    assert torch_function_of(func) is decorated
