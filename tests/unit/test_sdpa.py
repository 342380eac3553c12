"""Our forwards run without cuDNN's attention, leave the process's setting as they found it, and use blocks on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_query_blocks import DOCUMENTS, attended, drawn
from torch import Tensor

import mtp_train.heads.step
from assistants import HAS_ASSISTANTS, assistant_head, tiny_assistant, tiny_gemma_trunk
from mtp_inference import AssistantDrafting, HeadDrafting, SpeculativeDecoder
from mtp_inference.drafters.drafter import Drafting
from mtp_train.data.pack import PackedBatch
from mtp_train.heads import attention
from mtp_train.heads.alignment import UnrollMask
from mtp_train.heads.attention import without_cudnn_attention
from mtp_train.train.head_training import HeadTraining, MicroBatch
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.states import TrunkStates
from tiny import VOCAB_SIZE, tiny_head, tiny_trunk
from tolerances import rounding

enabled = torch.backends.cuda.cudnn_sdp_enabled
PROMPT = list(range(1, 12))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether cuDNN was allowed in each call of torch's attention; it is allowed before the test and after it."""
    allowed: list[bool] = []
    stock = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **options: Any) -> Tensor:
        allowed.append(enabled())
        return stock(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    assert enabled()
    yield allowed
    assert enabled()


def train_a_step(family_name: str) -> None:
    """Run a step whose backward pass runs the head's forward again."""
    trunk = tiny_trunk(family_name)
    module = HeadTraining(
        TrunkStates(trunk), tiny_head(trunk), num_depths=2, kind="kl", temperature=1.0, recompute=True
    ).train()
    tokens_BT = torch.randint(VOCAB_SIZE, (2, 9))
    zeros_BT = torch.zeros_like(tokens_BT)
    batch = PackedBatch(tokens_BT, torch.arange(9).expand(2, -1), zeros_BT, zeros_BT == 0)
    terms = module(MicroBatch(batch, torch.ones(2)))
    terms.total.backward()


@pytest.mark.parametrize("family_name", ["glm4_moe", "qwen3_5", "deepseek_v3", "mimo_v2_flash"])
def test_a_training_step_and_what_it_recomputes_run_without_cudnn(family_name: str, seen: list[bool]) -> None:
    train_a_step(family_name)
    assert set(seen) == {False}


def test_a_forward_that_is_not_ours_is_seen(seen: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the tests here, for forwards and for forwards that the backward pass repeats."""
    tiny_trunk("glm4_moe").causal_lm(torch.tensor([PROMPT]))
    assert set(seen) == {True}
    seen.clear()
    monkeypatch.setattr(mtp_train.heads.step, "mtp_step", mtp_train.heads.step.mtp_step.__wrapped__)
    monkeypatch.setattr(attention, "without_cudnn_attention", lambda: lambda attend: attend)
    train_a_step("glm4_moe")
    assert set(seen) == {True, False}


def heads(name: str) -> tuple[Trunk, Drafting]:
    trunk = tiny_trunk(name)
    return trunk, HeadDrafting(tiny_head(trunk))


MODELS: dict[str, Callable[[], tuple[Trunk, Drafting]]] = {
    "full": lambda: heads("glm4_moe"),
    "recurrent": lambda: heads("qwen3_5"),
    "latent": lambda: heads("deepseek_v3"),
    "assistant": lambda: (tiny_gemma_trunk("shared"), AssistantDrafting(assistant_head(tiny_assistant("shared")))),
}


@pytest.mark.parametrize("name", MODELS)
def test_decoding_runs_without_cudnn_and_streams_leave_the_setting_alone(name: str, seen: list[bool]) -> None:
    if name == "assistant" and not HAS_ASSISTANTS:
        pytest.skip("this transformers has no external drafters")
    trunk, drafting = MODELS[name]()
    decoder = SpeculativeDecoder(trunk, drafting, 2, ())
    decoder.generate([PROMPT], 6)
    trunk.hidden(torch.tensor([PROMPT]))
    assert set(seen) == {False}
    assert len(seen) > 10


def test_a_users_own_choice_comes_back() -> None:
    for choice in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(choice)
        with without_cudnn_attention():
            assert not enabled()
        assert enabled() == choice
        with pytest.raises(ZeroDivisionError), without_cudnn_attention():
            raise ZeroDivisionError
        assert enabled() == choice
    torch.backends.cuda.enable_cudnn_sdp(True)


def test_threads_whose_forwards_overlap_leave_the_setting_as_the_first_found_it() -> None:
    first_is_in = threading.Event()
    second_is_in = threading.Event()
    found = []

    def second() -> None:
        first_is_in.wait()
        with without_cudnn_attention():
            second_is_in.set()
            first.join()
            found.append(enabled())

    def enter_and_leave() -> None:
        with without_cudnn_attention():
            first_is_in.set()
            second_is_in.wait()

    first = threading.Thread(target=enter_and_leave)
    other = threading.Thread(target=second)
    first.start()
    other.start()
    other.join()
    assert found == [False]
    assert enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_key_heads", [4, 2])
def test_blocks_of_queries_on_a_cpu_attend_to_all_their_keys_and_read_no_others(
    num_key_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = drawn(dtype, 3, num_key_heads)
    mask = UnrollMask(torch.tensor(DOCUMENTS), 3).whole()[:, None]

    def in_blocks(block_queries: int) -> list[Tensor]:
        monkeypatch.setattr(attention, "BLOCK_QUERIES", block_queries)
        return attended(inputs, mask)

    whole = in_blocks(10)
    blocks = in_blocks(4)
    for found, expected in zip(blocks, whole, strict=True):
        # In bf16 a bound of 30 terms would allow anything.
        terms = 30 if dtype == torch.float32 else 1
        torch.testing.assert_close(found, expected, atol=rounding(expected, terms), rtol=0)
    # The last block has rows 8 and 9. A NaN in keys that it does not attend to spoils what its kernel sums over them.
    with torch.no_grad():
        unread_S = ~mask[0, 0, 8:].any(0)
        for one in inputs[1:]:
            one[0, :, unread_S] = torch.nan
    assert torch.equal(in_blocks(4)[0][0, 8:], blocks[0][0, 8:])
    assert in_blocks(10)[0][0, 8:].isnan().any()


def test_a_mask_of_each_head_is_kept_for_many_queries_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK_QUERIES", 4)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 10, 8, generator=generator) for _ in range(3))
    mask = torch.rand(2, 4, 10, 10, generator=generator) < 0.5
    mask |= torch.eye(10, dtype=torch.bool)
    found, _ = attention.masked_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3, dropout=0.0)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=rounding(expected, 10), rtol=0)
