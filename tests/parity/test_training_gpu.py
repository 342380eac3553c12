"""On a GPU: attention that no kernel spoils, and training as on the CPU.

Shapes: B rows, T tokens, S keys, H heads, J key heads, W width.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from gpu_jobs import two_steps_on
from launching import DEADLINE_SECONDS, environment, start
from mtp_train.heads.attention import masked_attention, without_cudnn_attention
from repository import REPOSITORY
from tiny import ALL_FAMILIES

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
WIDTHS = (64, 128, 256)
NUM_HEADS, NUM_KEY_HEADS = 4, 2
JOBS = REPOSITORY / "tests" / "gpu_jobs.py"
TRAINED = ("qwen3_5", "glm4_moe", "mimo_v2_flash", "nemotron_h")
BF16 = 2e-2
"""Relative to the norm, of results that are rounded to bf16 on the way."""


def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attend as heads do, (B, H, T, W) and (B, J, S, W); return (B, T, H, W)."""
    repeated = (one.repeat_interleave(NUM_HEADS // NUM_KEY_HEADS, dim=1) for one in (key, value))
    result, _ = masked_attention(torch.nn.Identity(), query, *repeated, mask, scaling=query.shape[-1] ** -0.5)
    return result


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attend by the formula."""
    key, value = (one.repeat_interleave(NUM_HEADS // NUM_KEY_HEADS, dim=1) for one in (key, value))
    scores = (query @ key.transpose(2, 3) * query.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def with_gradients(result: Tensor, read: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the rows that are read, and the gradients of a function of them."""
    rows = result[read]
    return [rows.detach(), *torch.autograd.grad(rows.float().sin().sum(), inputs)]


def apart(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return how far each is from the other, relative to its norm; NaN where one is not finite."""
    pairs = zip(found, expected, strict=True)
    return [float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_tokens", [192, 576, 512, 300])
def test_attention_with_a_mask_has_gradients_at_every_length(num_tokens: int, width: int) -> None:
    """cuDNN's are NaN at 64 modulo 128 where all scores of a row are far below 0 (pytorch#196678)."""
    generator = torch.Generator().manual_seed(0)

    def drawn(num_heads: int) -> Tensor:
        return 0.1 * torch.randn(2, num_heads, num_tokens, width, generator=generator)

    inputs = [drawn(NUM_HEADS), drawn(NUM_KEY_HEADS), drawn(NUM_KEY_HEADS)]
    inputs[0][..., 0], inputs[1][..., 0] = 1.0, -120 * width**0.5
    inputs = [one.to(DEVICE, torch.bfloat16).requires_grad_() for one in inputs]
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=DEVICE).tril()[None, None]
    read = torch.ones(2, num_tokens, dtype=torch.bool, device=DEVICE)
    with without_cudnn_attention():
        keys = [one.repeat_interleave(NUM_HEADS // NUM_KEY_HEADS, dim=1) for one in inputs[1:]]
        chosen = torch._fused_sdp_choice(inputs[0], *keys, mask)
        found = with_gradients(attended(*inputs, mask), read, inputs)
    assert chosen not in (SDPBackend.CUDNN_ATTENTION.value, SDPBackend.MATH.value)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    expected = with_gradients(plain(*exact, mask), read, exact)
    assert all(torch.isfinite(one).all() for one in found)
    # The gradient of a query's large entry is the sum over keys of numbers that cancel out: rounding alone.
    found[1], expected[1] = found[1][..., 1:], expected[1][..., 1:]
    assert max(apart(found, expected)) < BF16


@pytest.mark.parametrize("family", [name for name in TRAINED if name in ALL_FAMILIES])
@pytest.mark.parametrize("recompute", [False, True])
def test_two_training_steps_are_those_of_a_cpu(family: str, recompute: bool) -> None:
    expected = two_steps_on(family, on_cpu=True)
    found = two_steps_on(family, on_cpu=False, recompute=recompute)
    assert found["device"].startswith(DEVICE)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-2)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Let torch raise where the host would wait for the GPU."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("bf16", [False, True])
def test_a_training_step_does_not_wait_for_the_gpu(bf16: bool) -> None:
    expected = two_steps_on("qwen3_5", on_cpu=False, bf16=bf16)
    found = two_steps_on("qwen3_5", on_cpu=False, bf16=bf16, second=waiting_is_an_error())
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_is_an_error():
        torch.ones(2, device=DEVICE).nonzero()


def test_two_training_steps_in_bf16_lose_about_what_they_do_in_fp32() -> None:
    expected = two_steps_on("qwen3_5", on_cpu=True)
    found = two_steps_on("qwen3_5", on_cpu=False, bf16=True)
    assert found["losses"] == pytest.approx(expected["losses"], rel=0.05)
    assert found["losses"] != expected["losses"]


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what a job has printed."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def on_the_gpu() -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}


def test_a_trunk_in_shards_over_nccl_trains_as_a_whole_one() -> None:
    """One process: all that a single GPU can have of FSDP2."""
    expected = two_steps_on("qwen3_5", on_cpu=True)
    found = answer(start("fsdp2.yaml", JOBS, "steps", "qwen3_5", flags=("--num_processes", "1"), **on_the_gpu()))
    assert (found["distributed_type"], found["backend"], found["world_size"]) == ("FSDP", "nccl", 1)
    assert found["device"].startswith(DEVICE)
    assert found["sharded"] > 0 == expected["sharded"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-2)


def test_a_process_goes_on_after_a_capture_that_failed() -> None:
    """In a process of its own, as it captures nothing more."""
    done = subprocess.run(
        [sys.executable, JOBS, "failed-capture"],
        env=environment(**on_the_gpu()),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SECONDS,
    )
    found = answer(done)
    assert found["captured"] == [0, 0, 0]
    assert [len(warned) for warned in found["warned"]] == [0, 1, 0]
    assert found["texts"][1:] == found["texts"][:1] * 2
    assert found["on_the_stream_before"]
    assert found["still_computes"] == 3.0
