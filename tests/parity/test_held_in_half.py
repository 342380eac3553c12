"""A trunk held in bf16 on a CPU without native bf16: prompts run in fp32, all rounds of a decoder in one precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_inference import GenerationResult, SpeculativeDecoder, compare, fault_of, round
from mtp_inference.batch import WIDE_ROWS, Batch
from mtp_inference.drafters.drafter import RoundPlan
from mtp_train.train.packed_rows import PackedBatch as Rows
from mtp_train.trunk.load import Trunk
from products import Products
from summed_metrics import dense_metrics
from tiny import CACHE_KINDS, tiny_head, tiny_trunk

PROMPT = [5, 9, 2, 11, 3, 7, 1, 8, 4]
NEW_TOKENS = 24
CONVERTING = [kind for kind in ("full", "recurrent", "sliding", "mixed", "mamba") if kind in CACHE_KINDS]
"""Caches whose buffers may be kept in another dtype than the prompt's."""


@pytest.fixture(params=[False, True], ids=["slow", "native"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    # Only the choice is set: every CPU runs both paths, with its own products.
    monkeypatch.setattr("mtp_train.trunk.precision.bf16_support", lambda _device: (request.param, "a stand-in"))
    return bool(request.param)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_train.trunk.precision.bf16_support", lambda _device: (False, "a stand-in"))


def half_and_full(kind: str) -> tuple[Trunk, Trunk]:
    name = CACHE_KINDS[kind]
    return tiny_trunk(name).to(torch.bfloat16), tiny_trunk(name).to(torch.bfloat16).float()


def results(trunk: Trunk, rows: int, depth: int = 0) -> list[GenerationResult]:
    head = tiny_head(trunk).to(trunk.lm_head_VD.dtype) if depth else None
    decoder = SpeculativeDecoder(trunk, head, depth, eos_ids=(), records=True)
    return decoder.generate([[*PROMPT, row] for row in range(rows)], NEW_TOKENS)


def decode(trunk: Trunk, rows: int, depth: int = 0) -> list[tuple[int, ...]]:
    return [one.token_ids for one in results(trunk, rows, depth)]


QUICK = ("full", "recurrent", "sliding", "latent", "compressed")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in CACHE_KINDS]
)
@pytest.mark.usefixtures("slow")
def test_a_wide_batch_decodes_as_in_fp32(kind: str) -> None:
    half, full = half_and_full(kind)
    expected = decode(full, WIDE_ROWS)
    assert decode(half, WIDE_ROWS) == expected
    assert decode(half, WIDE_ROWS, depth=2) == expected
    assert {weight.dtype for weight in half.parameters() if weight.is_floating_point()} != {torch.float32}


@pytest.mark.parametrize("kind", CONVERTING)
def test_prompts_run_in_fp32_and_few_rows_in_bf16_where_bf16_is_slow(
    kind: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, _ = half_and_full(kind)
    prompts = Products()
    rounds = Products()
    run_prompts = round.prefill_chunks
    run_window = Batch.run_window

    def noted_prompts(*args: Any) -> list[Tensor]:
        with prompts:
            return list(run_prompts(*args))

    def noted_round(batch: Batch, plan: RoundPlan, window_BT: Tensor) -> tuple[Tensor, Tensor]:
        with rounds:
            return run_window(batch, plan, window_BT)

    monkeypatch.setattr(round, "prefill_chunks", noted_prompts)
    monkeypatch.setattr(Batch, "run_window", noted_round)
    plain = results(half, 1)
    drafted = results(half, 1, depth=2)
    # Routers multiply in fp32 in any case.
    assert (torch.bfloat16 in prompts.dtypes) is native
    assert torch.bfloat16 in rounds.dtypes
    assert fault_of(compare(drafted, plain, half)) is None


@pytest.mark.usefixtures("slow")
def test_teacher_forced_figures_are_those_of_fp32() -> None:
    half, full = half_and_full("recurrent")
    tokens_BT = torch.tensor([PROMPT])
    zeros_BT = torch.zeros_like(tokens_BT)
    rows = Rows(tokens_BT, torch.arange(len(PROMPT))[None], zeros_BT, zeros_BT == 0)
    head = tiny_head(half).to(torch.bfloat16)
    found = dense_metrics(half, head, [rows], 2)
    expected = dense_metrics(full, tiny_head(full).to(torch.bfloat16).float(), [rows], 2)
    assert found == expected
    assert next(head.parameters()).dtype is torch.bfloat16
