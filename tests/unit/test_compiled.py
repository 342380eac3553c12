"""What runs compiled on a GPU gives what it gives eagerly; here traced only, or compiled by Inductor for the CPU."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from mtp_inference.batch import Batch
from mtp_inference.compiled_layers import CompiledLayers
from mtp_inference.drafters.drafter import BatchSize, RoundPlan
from mtp_inference.round import prefill, run_round
from mtp_inference.sampling.distributions import Sampling
from mtp_train.losses.chunked import frozen_head_loss
from mtp_train.trunk.load import Trunk
from mtp_train.upstream import compiled
from mtp_train.upstream.compiled import (
    compilable,
    compiles_on,
    fused,
    num_graphs,
    replace_forwards,
    replaced_forwards,
    row_norms,
)
from mtp_train.upstream.transformers_private import replacing
from tiny import ALL_FAMILIES, tiny_head, tiny_trunk
from tolerances import assert_differs, assert_same, num_terms

CPU = torch.device("cpu")
PROMPT, DEPTH, ROUNDS = [5, 9, 2, 11, 3], 3, 3
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
TRIED = ("qwen3_5", "bailing_hybrid", "nemotron_h", "deepseek_v4", "gpt_oss", "hy_v4")
"""Families with recurrent layers, MLPs that choose experts and norms of another width; the slow tier has all."""
KIMI = [("bailing_hybrid", 0)] if "bailing_hybrid" in ALL_FAMILIES else []
"""A family with Kimi Delta Attention, whose layers change their convolutions' inputs in place."""
Compiler = Callable[..., Callable[..., Any]]


def unchanged(function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
    return function


@functools.cache
def traced(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    """Compile up to the kernels, in one graph."""
    return torch.compile(function, dynamic=dynamic, backend="aot_eager", fullgraph=True)


@contextmanager
def compiling(compiler: Compiler) -> Iterator[None]:
    """Compile on every device, by this compiler."""
    with replacing(compiled, compiles_on=lambda _device: True, compiled=compiler):
        yield


def decided(trunk: Trunk, depth: int, layers: CompiledLayers | None = None) -> tuple[list[Any], Tensor]:
    """Return the outcomes of rounds, and the hidden states of a window after them."""
    drafting = trunk.family.kind.draft_with(tiny_head(trunk), None) if depth else None
    used = len(PROMPT) + (ROUNDS + 1) * (depth + 1)
    size = BatchSize(1, used, depth, max_window=len(PROMPT), num_stops=1)
    batch = Batch(trunk, drafting, size, layers=layers)
    batch.set_rows(slice(0, 1), [Sampling()], [100], [frozenset()])
    plan = RoundPlan(depth, used, depth + 1, None)
    outcomes = [prefill(batch, slice(0, 1), torch.tensor([PROMPT])).tolist()]
    outcomes += [run_round(batch, plan).tolist() for _ in range(ROUNDS)]
    with torch.inference_mode(), batch.layers.used():
        hidden_BTD, _ = batch.run_window(plan, torch.arange(depth + 1)[None])
    return outcomes, hidden_BTD


def assert_as_eager(trunk: Trunk, depth: int, compiler: Compiler) -> None:
    outcomes, hidden_BTD = decided(trunk, depth)
    with compiling(compiler):
        found, found_BTD = decided(trunk, depth, CompiledLayers([trunk.causal_lm], trunk.family))
    assert found == outcomes
    assert_same(found_BTD, hidden_BTD, num_terms(trunk.causal_lm))


@pytest.mark.parametrize(
    "name", [name if name in TRIED else pytest.param(name, marks=pytest.mark.slow) for name in ALL_FAMILIES]
)
def test_rounds_of_replaced_layers_decide_the_same(name: str) -> None:
    """Rows of norms and MLPs, and recurrent layers between shown states, are the layers' own results."""
    assert_as_eager(tiny_trunk(name), DEPTH, unchanged)


@pytest.mark.parametrize(("name", "depth"), [("qwen3_5", DEPTH), ("qwen3_5", 0), *KIMI])
def test_the_layers_of_a_round_are_traced_in_one_piece(name: str, depth: int) -> None:
    assert_as_eager(tiny_trunk(name), depth, traced)


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("name", [name for name in ("qwen3_5", "bailing_hybrid", "glm4_moe") if name in ALL_FAMILIES])
@pytest.mark.parametrize("depth", [0, DEPTH])
def test_rounds_by_inductor_decide_the_same(name: str, depth: int) -> None:
    assert_as_eager(tiny_trunk(name), depth, compiled.compiled)


def test_a_recurrent_layer_is_compiled_once_for_all_layers() -> None:
    trunk = tiny_trunk("qwen3_5", num_layers=8)
    layers = [one for one in trunk.causal_lm.modules() if type(one).__name__.endswith("GatedDeltaNet")]
    calls = list[Any]()

    @functools.cache
    def counting(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        def backend(graph: Any, _inputs: Any) -> Any:
            calls.append(function.__qualname__)
            return graph

        return torch.compile(function, dynamic=dynamic, backend=backend, fullgraph=True)

    before = num_graphs()
    with compiling(counting):
        decided(trunk, 0, CompiledLayers([trunk.causal_lm], trunk.family))
    assert num_graphs() - before == len(calls)
    assert len(layers) == 6
    assert sum("_between_states" in name for name in calls) == 1


def test_layers_are_themselves_again_after_a_round_and_a_copy_has_its_own_weights() -> None:
    norm = Qwen3_5RMSNorm(8)
    rows = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    expected = norm(rows).detach()
    with compiling(unchanged):
        found = compilable(row_norms([norm]), CPU)
        with replaced_forwards(found):
            assert type(norm) is not Qwen3_5RMSNorm
            assert isinstance(norm, Qwen3_5RMSNorm)
            assert type(norm).__name__ == "Qwen3_5RMSNorm"
        assert type(norm) is Qwen3_5RMSNorm
        replace_forwards(found)
        other = copy.deepcopy(norm)
        with torch.no_grad():
            norm.weight.fill_(3.0)
            assert_same(other(rows), expected, 8)
            assert_differs(norm(rows), expected, 8)


def test_adapted_offloaded_and_other_layers_are_left_alone() -> None:
    trunk = tiny_trunk("qwen3_5")
    replaced = {type(module).__name__ for module in _replaced(trunk)}
    assert replaced == {
        f"Qwen3_5{name}" for name in ("RMSNorm", "RMSNormGated", "MLP", "TextRotaryEmbedding", "GatedDeltaNet")
    }
    trunk = Trunk(get_peft_model(trunk.causal_lm, LoraConfig(target_modules=["down_proj"])), trunk.family)
    norm = trunk.decoder.norm
    norm.forward = norm.forward
    with pytest.warns(UserWarning, match="norms, MLPs and the like are quantised, adapted or offloaded"):
        left = _replaced(trunk)
    assert norm not in left
    assert {type(module).__name__ for module in left} == replaced - {"Qwen3_5MLP"}


def _replaced(trunk: Trunk) -> dict[nn.Module, Any]:
    with compiling(unchanged):
        return CompiledLayers([trunk.causal_lm], trunk.family).replaced


@NEEDS_COMPILER
def test_a_compiled_loss_has_the_value_and_the_gradient_of_an_eager_one() -> None:
    random = torch.Generator().manual_seed(0)
    student_KND, teacher_ND = torch.randn(2, 5, 6, generator=random), torch.randn(5, 6, generator=random)
    lm_head_VD, targets_N = torch.randn(19, 6, generator=random), torch.arange(5)

    def loss_and_gradient(temperature: float) -> tuple[Tensor, Tensor]:
        student = student_KND.clone().requires_grad_()
        terms = frozen_head_loss(
            student, teacher_ND, lm_head_VD, targets_N, torch.ones(2, 5), kind="lk", temperature=temperature
        )
        terms.total.backward()
        assert student.grad is not None
        return terms.total.detach(), student.grad

    expected = loss_and_gradient(2.0)
    with replacing(compiled, compiles_on=lambda _device: True):
        found = loss_and_gradient(2.0)
    other = loss_and_gradient(1.0)
    for one, eager, wrong in zip(found, expected, other, strict=True):
        assert_same(one, eager, 6 + 19)
        assert_differs(one, wrong, 6 + 19)


@NEEDS_COMPILER
def test_a_compiled_norm_trains_as_an_eager_one() -> None:
    norm = Qwen3_5RMSNorm(8)
    other = copy.deepcopy(norm)
    rows = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    norm(rows).square().sum().backward()
    with replacing(compiled, compiles_on=lambda _device: True):
        replace_forwards(compilable(row_norms([other]), CPU))
        other(rows).square().sum().backward()
    assert norm.weight.grad is not None
    assert other.weight.grad is not None
    assert_same(other.weight.grad, norm.weight.grad, 8)


def test_a_machine_that_cannot_compile_says_so_once_and_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_args: Any, **_options: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")

    monkeypatch.setattr(torch, "compile", failing)
    monkeypatch.setattr(torch, "ones", lambda *_size, **_options: None)
    compiled._can_compile.cache_clear()
    gpu = torch.device("cuda", 0)
    with pytest.warns(UserWarning, match="Failed to find C compiler") as warned:
        assert not compiles_on(gpu)
    assert fused(len, gpu) is len
    assert len(warned) == 1
    compiled._can_compile.cache_clear()
