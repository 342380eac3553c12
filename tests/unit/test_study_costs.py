"""Costs of a head, compared with bytes computed by hand and with transformers' caches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assistants import HAS_ASSISTANTS, tiny_assistant, tiny_gemma_trunk
from mtp_inference import AssistantDrafting, HeadDrafting
from mtp_inference.drafters.other_drafters import ModelDrafting, NgramDrafting
from mtp_train.evaluation import decoding
from mtp_train.evaluation.costs import bytes_per_token, head_costs, own_weight_bytes
from mtp_train.evaluation.decoding import Stopwatch
from mtp_train.families.assistants import GEMMA4_ASSISTANT
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from tiny import ALL_FAMILIES, CACHE_KINDS, VOCAB_SIZE, chained_head, tiny_head, tiny_trunk


class WorkClock:
    """Counts ticks for the calls of the modules that it watches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ticks = 0
        monkeypatch.setattr(decoding, "time", SimpleNamespace(perf_counter=self.read))

    def read(self) -> float:
        return float(self.ticks)

    @contextmanager
    def watching(self, module: nn.Module, ticks: int, *, each_token: bool) -> Iterator[None]:
        """Let every call of a module take so long meanwhile, or each token of a call."""

        def work(_module: nn.Module, _inputs: Any, output: Any) -> None:
            state: Tensor = output if isinstance(output, Tensor) else output.last_hidden_state
            self.ticks += ticks * (state.shape[0] * state.shape[1] if each_token else 1)

        with module.register_forward_hook(work):
            yield


FP32 = 4
# Values per token of the trunk and of the head, from the sizes of the tiny configs.
BY_HAND: dict[str, tuple[int, int]] = {
    # Three layers of a key and a value of 16.
    "full": (3 * 32, 32),
    # One full layer; three with states of one size.
    "recurrent": (32, 32),
    # An attached head has full attention, independent of its trunk's layers.
    "sliding": (0, 32),
    "mixed": (32, 32),
    # The latent of 16 and the rotary key of 8, not the two heads' keys and values made of them.
    "latent": (3 * 24, 24),
    # Plus the keys of the indexer.
    "indexed": (3 * (24 + 16), 24 + 16),
    "channels": (24, 24),
    # Keys of 16 and values of 10; the head sees a window in each of its modules.
    "sinks": (26, 0),
    "mamba": (32, 32),
    # The head's indexer counts by position, in int64.
    "blocks": (64 + 2 * (64 + 16), 64 + 16 + 2),
    # Entries of two compressors for each 2 tokens, twice, of one for each 4.
    "compressed": (2 * (16 + 16) // 2 + 16 // 4, 0),
    # Latents of two layers. In the layer with the indexer: keys and gates, and per 2 tokens a key and two int64 slots.
    "pools": (2 * 16 + 32 + (16 + 2 * 2) // 2, 16 + 32 + (16 + 2 * 2) // 2),
    # Keys with their cosines and sines here.
    "ngrams": (32 + 32 + (16 + 2 * 2) // 2, 32 + 32 + (16 + 2 * 2) // 2),
    # A full layer between two windows.
    "convolved": (32, 32),
}


def own_head(trunk: Trunk) -> MtpHead | None:
    return tiny_head(trunk) if trunk.family.name in ALL_FAMILIES else None


def kept(trunk: Trunk, head: MtpHead | None) -> tuple[int, int]:
    depth = 0 if head is None else len(head.blocks)
    return bytes_per_token(trunk, None if head is None else HeadDrafting(head), depth)


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_what_caches_keep_is_as_by_hand(kind: str) -> None:
    trunk = tiny_trunk(CACHE_KINDS[kind])
    of_trunk, of_head = BY_HAND[kind]
    assert kept(trunk, own_head(trunk)) == (FP32 * of_trunk, FP32 * of_head)


def test_keys_are_counted_in_the_dtype_that_runs() -> None:
    trunk = tiny_trunk("glm4_moe").to(torch.bfloat16)
    # A head may be in another.
    assert kept(trunk, tiny_head(trunk)) == (2 * 3 * 32, FP32 * 32)


@pytest.mark.parametrize("drafts_only", [False, True])
def test_each_module_of_a_chained_head_has_keys_of_its_own(drafts_only: bool) -> None:
    trunk = tiny_trunk("glm4_moe")
    assert kept(trunk, chained_head(trunk, 3, drafts_only=drafts_only))[1] == 3 * FP32 * 32


def test_weights_of_a_head_are_counted_as_by_hand_and_turned_into_context() -> None:
    trunk = tiny_trunk("qwen3_5", tied=True)
    # Queries with their gate, keys and values, output, norms of queries and keys.
    attention = 32 * (2 * 2 * 16) + 2 * 32 * 16 + 32 * 32 + 2 * 16
    # Norms of both inputs, the projection; the layer, its norms; the final norm. No embedding, no output matrix.
    weights = 2 * 32 + 64 * 32 + attention + 3 * 32 * 48 + 2 * 32 + 32
    costs = head_costs("own", trunk, tiny_head(trunk), prefill_tokens=8)
    assert costs.head_bytes == FP32 * weights
    assert (costs.trunk_kv_bytes_per_token, costs.head_kv_bytes_per_token) == (FP32 * 32, FP32 * 32)
    assert costs.context_tokens_lost == math.ceil(weights / 32)


def test_an_output_matrix_counts_where_it_is_the_heads_own() -> None:
    trunk = tiny_trunk("step3p7")
    head = tiny_head(trunk)
    own = own_weight_bytes(trunk, HeadDrafting(head))
    assert own == sum(FP32 * weight.numel() for weight in head.state_dict().values())
    for block in head.blocks:
        block.lm_head.weight = torch.nn.Parameter(trunk.lm_head_VD, requires_grad=False)
    assert own - own_weight_bytes(trunk, HeadDrafting(head)) == 3 * FP32 * VOCAB_SIZE * 32


def test_a_reduced_vocabulary_is_a_copy() -> None:
    trunk = tiny_trunk("glm4_moe")
    head = tiny_head(trunk)
    reduced = HeadDrafting(head, torch.arange(10))
    assert own_weight_bytes(trunk, reduced) - own_weight_bytes(trunk, HeadDrafting(head)) == FP32 * 10 * 32


def test_other_drafters_cost_what_they_hold() -> None:
    trunk, model = tiny_trunk("qwen3_5"), tiny_trunk("glm4_moe", seed=1)
    own = sum(FP32 * weight.numel() for weight in model.causal_lm.state_dict().values())
    costs = head_costs("model", trunk, ModelDrafting(model), prefill_tokens=8)
    assert (costs.head_bytes, costs.head_kv_bytes_per_token) == (own, FP32 * 3 * 32)
    # Weights shared with the trunk do not count.
    assert own_weight_bytes(trunk, ModelDrafting(trunk)) == 0
    lookup = head_costs("ngram", trunk, NgramDrafting(), prefill_tokens=8)
    assert (lookup.head_bytes, lookup.head_kv_bytes_per_token, lookup.context_tokens_lost) == (0, 0, 0)
    assert lookup.prefill_ratio is not None


@pytest.mark.skipif(not HAS_ASSISTANTS, reason="this transformers has no external drafters")
def test_an_external_drafter_has_weights_and_reads_the_trunks_keys() -> None:
    trunk, model = tiny_gemma_trunk(), tiny_assistant()
    once = {id(weight): FP32 * weight.numel() for weight in model.parameters()}
    costs = head_costs("assistant", trunk, AssistantDrafting(model, GEMMA4_ASSISTANT), prefill_tokens=8)
    buffers = costs.head_bytes - sum(once.values())
    assert 0 <= buffers < FP32 * VOCAB_SIZE
    assert costs.head_kv_bytes_per_token == 0
    # Six layers in turn sliding and full; the last two read the keys of those before.
    assert costs.trunk_kv_bytes_per_token == FP32 * 2 * 2 * (2 * 16)


def test_plain_decoding_costs_nothing_more_and_a_trunk_without_keys_loses_no_context() -> None:
    plain = head_costs("none", tiny_trunk("qwen3_5"), None)
    assert (plain.head_bytes, plain.head_kv_bytes_per_token, plain.context_tokens_lost) == (0, 0, 0)
    assert (plain.prefill_ratio, plain.prefill_tokens) == (None, None)
    assert head_costs("none", tiny_trunk("mistral"), None).context_tokens_lost is None


def test_prefill_is_timed_with_the_head_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk("qwen3_5")
    head = tiny_head(trunk)
    clock = WorkClock(monkeypatch)
    projection: Any = head.blocks[0].proj
    with (
        clock.watching(trunk.decoder, 10, each_token=True),
        clock.watching(projection, 1, each_token=True),
    ):
        costs = head_costs("own", trunk, head, prefill_tokens=41, max_seconds=1e9)
    # The head reads a prompt's rows but the last, which waits for the first draft.
    assert costs.prefill_ratio == 410 / (410 + 40)
    assert costs.prefill_tokens == 41


def test_the_prompt_fits_the_model() -> None:
    trunk = tiny_trunk("qwen3_5")
    trunk.config.max_position_embeddings = 20
    assert head_costs("own", trunk, tiny_head(trunk)).prefill_tokens == 19


@pytest.mark.parametrize(("max_seconds", "passes"), [(0.0, 1), (1e9, 3)])
def test_a_slow_prompt_is_timed_once(monkeypatch: pytest.MonkeyPatch, max_seconds: float, passes: int) -> None:
    taken, stock = list[str](), Stopwatch._decode

    def noted(self: Stopwatch, prompt: Any, lane: Any) -> Any:
        taken.append(lane[0])
        return stock(self, prompt, lane)

    monkeypatch.setattr(Stopwatch, "_decode", noted)
    trunk = tiny_trunk("qwen3_5")
    head_costs("own", trunk, tiny_head(trunk), prefill_tokens=8, max_seconds=max_seconds)
    # A warm-up of each, then each goes first in turn.
    order = ["none", "head", "head", "none", "none", "head"]
    assert taken == ["none", "head", *order[: 2 * passes]]
