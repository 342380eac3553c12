"""Bytes and operations of a benchmark's round, compared with figures computed by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mtp_inference.batch import RoundPlan
from mtp_inference.bench import round_costs as costs
from mtp_inference.bench.measurements import SetAcceptance, _SetDrafter, cost_row
from mtp_inference.bench.round_costs import Costs, Reads, bytes_read, idle_batch, measure_costs
from mtp_inference.bench.subject import shape_subject
from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.cache.window import Window
from mtp_inference.capture import round_up
from mtp_inference.drafters.drafter import Place
from mtp_inference.session import PENDING_PLACES
from mtp_train.families import FAMILIES
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import mtp_step
from mtp_train.trunk.load import Trunk
from recorded_graph import Recorder

FP32_BYTES = 4


def small_trunk(family_name: str, **fields: Any) -> tuple[Trunk, MtpHead]:
    family = next(family for family in FAMILIES if family.name == family_name)
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "head_dim": 4, "tie_word_embeddings": False}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model(family.model_types[0], **sizes, **heads, **fields)
    trunk = Trunk(AutoModelForCausalLM.from_config(config), family).eval()
    return trunk, MtpHead(family, trunk.config, num_modules=1, convention=family.wiring.default).eval()


def used_cache(config: Any, run: Any, *, rows: int, capacity: int) -> WindowCache:
    """Return a cache whose buffers a window of two tokens has allocated."""
    cache = WindowCache(config, num_rows=rows, capacity=capacity, max_window=2)
    positions_BT = torch.arange(2).expand(rows, -1)
    masks = cache.begin(Window(slice(0, rows), positions_BT, 2, 0))
    run(torch.zeros(rows, 2, dtype=torch.long), positions_BT, masks, cache)
    cache.commit(None)
    return cache


def caches_of(trunk: Trunk, head: MtpHead, *, rows: int, capacity: int) -> tuple[WindowCache, WindowCache]:
    def run_trunk(tokens: Any, positions: Any, masks: Any, cache: Any) -> None:
        trunk.window_hidden(tokens, positions_BT=positions, masks=masks, cache=cache)

    def run_head(tokens: Any, positions: Any, masks: Any, cache: Any) -> None:
        hidden = trunk.embed(tokens)
        mtp_step(head, hidden, hidden, depth=1, positions_BT=positions, mask_BTS=None, cache=cache)

    return (
        used_cache(trunk.config, run_trunk, rows=rows, capacity=capacity),
        used_cache(head.config, run_head, rows=rows, capacity=capacity),
    )


@torch.no_grad()
def test_bytes_of_a_hybrid_trunk_are_counted_as_by_hand() -> None:
    trunk, head = small_trunk(
        "qwen3_5",
        **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4},
        linear_value_head_dim=3,
    )
    rows, used = 3, 10
    caches = caches_of(trunk, head, rows=rows, capacity=32)
    mlp, norms = 3 * 8 * 12, 2 * 8
    # Queries with their gate, keys, values, output, norms of queries and keys.
    attention = 8 * 16 + 8 * 4 + 8 * 4 + 8 * 8 + 4 + 4
    channels = 4 + 4 + 6
    # Channels, gate, write strength and decay, convolution, two vectors of the heads, norm, output.
    recurrent = 8 * channels + 8 * 6 + 8 * 2 + 8 * 2 + channels * 4 + 2 + 2 + 3 + 6 * 8
    trunk_weights = attention + recurrent + 2 * (mlp + norms) + 8
    # Two norms, the projection, a layer, a norm.
    head_weights = 8 + 8 + 16 * 8 + attention + mlp + norms + 8
    keys_and_values = rows * used * 2 * 4
    states = rows * (channels * 4 + 2 * 4 * 3)
    plain = bytes_read(trunk, None, (caches[0], None), RoundPlan(0, used, 1, 1, None))
    by_hand = Reads(trunk_weights, 0, 20 * 8, keys_and_values, 2 * states)
    assert plain == Reads(*(FP32_BYTES * part for part in by_hand))
    deep = bytes_read(trunk, head, caches, RoundPlan(2, used, 3, 3, None))
    by_hand = Reads(trunk_weights, 2 * head_weights, 3 * 20 * 8, (1 + 2) * keys_and_values, 2 * states)
    assert deep == Reads(*(FP32_BYTES * part for part in by_hand))
    assert deep.total == sum(FP32_BYTES * part for part in by_hand)


@torch.no_grad()
def test_of_a_mixture_as_many_experts_count_as_the_window_reaches() -> None:
    trunk, head = small_trunk(
        "glm4_moe",
        **{"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 4, "n_group": 1, "topk_group": 1},
    )
    caches = caches_of(trunk, head, rows=1, capacity=16)
    expert = 3 * 8 * 4
    reads = {
        depth: bytes_read(trunk, head if depth else None, caches, RoundPlan(depth, 8, depth + 1, 9, None))
        for depth in (0, 1, 2)
    }
    # One token reaches 2 of 4; a token misses an expert half of the time: two reach 3, three 3.5.
    assert reads[1].trunk - reads[0].trunk == FP32_BYTES * expert
    assert reads[2].trunk - reads[1].trunk == FP32_BYTES * expert / 2
    # At depth 2 the head runs three pending rows, then one.
    assert reads[2].head - 2 * reads[1].head == FP32_BYTES * expert * (3.5 + 2 - 2 * 3)


def test_the_pieces_of_a_round_are_those_of_its_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "REPEATS", 1)
    subject = shape_subject("tiny-qwen", dtype=None, device=torch.device("cpu"), seed=0)
    plain, deep = (measure_costs(subject, num_rows=2, used=20, depth=depth) for depth in (0, 2))
    assert (plain.head_ms, plain.lm_head_ms) == (0.0, 0.0)
    assert min(deep.head_ms, deep.lm_head_ms, deep.verify_ms, deep.plain_ms) > 0.0
    assert deep.reads.lm_head == 3 * plain.reads.lm_head


@pytest.mark.parametrize("depth", [0, 3])
def test_no_piece_of_a_round_waits_for_the_device(depth: int) -> None:
    """On a GPU every piece is captured, the drafts of a set acceptance too."""
    subject = shape_subject("tiny-qwen", dtype=torch.bfloat16, device=torch.device("cpu"), seed=0)
    batch, drafter = idle_batch(subject, num_rows=2, used=20, depth=depth)
    plan = round_up(RoundPlan(depth, 20, depth + 1, PENDING_PLACES, None), batch.cache.capacity, batch.reads_lengths)
    pieces = costs._pieces(batch, drafter, plan, dataclasses.replace(plan, depth=0), position=19 - depth)
    if drafter is not None and subject.drafting is not None:
        size = {"num_rows": 2, "num_positions": 30, "vocab_size": 512, "device": torch.device("cpu"), "seed": 0}
        forced = _SetDrafter(SetAcceptance(subject.drafting, 0.8, **size), drafter)
        place = Place(plan.used, plan.pending, batch.last_B, batch.length_B, batch.cache)
        pieces["set drafts"] = lambda: forced.draft(depth, place, batch.chooser)
    for name, piece in pieces.items():
        with torch.inference_mode(), Recorder() as recorder:
            piece()
        assert recorder.operations, name


def test_a_piece_that_waits_is_found() -> None:
    with pytest.raises(RuntimeError, match="not permitted"), Recorder():
        torch.ones(2).sum().item()


def test_shares_are_taken_of_what_acceptance_and_bandwidth_allow() -> None:
    row = {"batch": 2, "prompt_tokens": 8, "depth": 3, "tau": 3.0, "tokens_per_second": 300.0, "speedup": 1.8}
    taken_apart = Costs(16.0, 10.0, 11.0, 2.0, 1.0, 1.0, Reads(600, 200, 100, 50, 50))
    found = cost_row({**row, "round_ms": 20.0}, taken_apart, bandwidth=100_000.0)
    assert found["rest_ms"] == 1.0
    # 1000 bytes take 10 ms, for two rows of three tokens.
    assert found["ideal_tokens_per_second"] == pytest.approx(600.0)
    assert found["roofline_share"] == pytest.approx(0.5)
    # A round costs 1.6 plain ones and makes three tokens: 1.875 times as fast at best.
    assert found["speedup_share"] == pytest.approx(1.8 / 1.875)
