"""Attention of an unroll in blocks of queries is attention with its whole mask, in memory linear in a row's length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_train.checkpoints.demo import demo_path
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.data.pack import PackedBatch
from mtp_train.heads import attention, query_blocks
from mtp_train.heads.alignment import UnrollMask
from mtp_train.heads.module import MtpHead
from mtp_train.train.head_training import HeadTraining, MicroBatch
from mtp_train.train.plan import MemoryOptions, estimate_footprint, make_plan
from mtp_train.trunk.load import Trunk, load_trunk
from mtp_train.trunk.states import TrunkStates
from peak_memory import PeakMemory
from tolerances import FAR, rounding

DOCUMENTS = [[0] * 7 + [1] * 3, [0] * 2 + [1] * 8]
KEPT: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {},
    "bounded": {"softcap": 2.0},
    "sinks": {"s_aux": torch.tensor([0.3, -1.0, 2.0, 0.0])},
}


def drawn(dtype: torch.dtype, depth: int, num_key_heads: int = 2) -> list[Tensor]:
    """Return queries of four heads, keys and values."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 10, 8), *[(2, num_key_heads, depth * 10, 8)] * 2)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def attended(inputs: list[Tensor], mask: Any, **options: Any) -> list[Tensor]:
    """Return output and gradients."""
    module = torch.nn.Module()
    module.num_key_value_groups = 4 // inputs[1].shape[1]
    result, _ = attention.masked_attention(module, *inputs[:3], mask, scaling=0.3, dropout=0.0, **options)
    return [result.detach(), *torch.autograd.grad(result.sin().sum(), inputs)]


def in_blocks(block: int, name: str, dtype: torch.dtype, depth: int, spoilt: Any = 0) -> list[Tensor]:
    """Attend in blocks of so many queries; some spoil the mask's border between documents."""
    inputs = drawn(dtype, depth)
    options = dict(KEPT[name])
    if "s_aux" in options:
        options["s_aux"] = options["s_aux"].clone().requires_grad_()
        inputs.append(options["s_aux"])
    mask = UnrollMask(torch.tensor(DOCUMENTS) + spoilt, depth, 5 if name == "window" else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_blocks, "BLOCK_QUERIES", block)
        return attended(inputs, mask, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("depth", [1, 3])
def test_blocks_of_queries_give_the_values_and_gradients_of_the_whole_mask(
    name: str, depth: int, dtype: torch.dtype
) -> None:
    whole = in_blocks(10, name, dtype, depth)
    blocks = in_blocks(4, name, dtype, depth)
    one_document = in_blocks(4, name, dtype, depth, spoilt=torch.tensor([[0] * 7 + [-1] * 3, [0] * 2 + [-1] * 8]))
    # In bf16 a bound of 30 terms would allow anything.
    terms = 30 if dtype == torch.float32 else 1
    for found, expected, other in zip(blocks, whole, one_document, strict=True):
        torch.testing.assert_close(found, expected, atol=rounding(expected, terms, dtype), rtol=0)
        if dtype == torch.float32:
            assert (other - expected).abs().max() > FAR * rounding(expected, terms)


def batch_of(num_tokens: int, num_documents: int, vocab: int) -> PackedBatch:
    tokens_1T = torch.randint(vocab, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    length = -(-num_tokens // num_documents)
    rows_T = torch.arange(num_tokens)
    return PackedBatch(tokens_1T, rows_T[None] % length, rows_T[None] // length, torch.ones_like(tokens_1T).bool())


def peak_of(trunk: Trunk, num_tokens: int, num_documents: int, num_starts: int | None = None) -> int:
    """Return the most bytes that a training step of a row holds beside weights and states."""
    torch.manual_seed(0)
    head = MtpHead(trunk.family, trunk.config, num_modules=1, convention=trunk.family.wiring.default).float()
    module = HeadTraining(TrunkStates(trunk), head, num_depths=3, kind="kl", temperature=1.0).train()
    batch = batch_of(num_tokens, num_documents, trunk.config.vocab_size)
    states_BTD = torch.randn(1, num_tokens, trunk.state_width)
    module.states.forward = lambda *_args, **_named: states_BTD  # type: ignore[method-assign]
    scale_K = torch.full((3,), 1 / num_tokens)
    starts_BP = None if num_starts is None else torch.arange(0, num_tokens, num_tokens // num_starts)[None]
    with PeakMemory([*module.parameters(), *module.buffers(), *batch, states_BTD]) as memory:
        module(MicroBatch(batch, scale_K, starts_BP=starts_BP)).total.backward()
    return memory.peak_bytes


@pytest.fixture(scope="module")
def demo() -> Trunk:
    path = demo_path("base")
    return load_trunk(open_checkpoint(path), dtype=torch.float32)


@pytest.mark.parametrize("num_starts", [None, 256])
@pytest.mark.parametrize("shorter", [1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_memory_of_a_row_is_linear_in_its_length_and_as_planned(
    shorter: int, num_starts: int | None, demo: Trunk
) -> None:
    options = MemoryOptions(num_depths=3, compute_dtype=torch.float32, recompute=False, num_starts=num_starts)
    found = {}
    for num_tokens in (shorter, 4 * shorter):
        plan = make_plan(
            max_steps=1,
            tokens_per_step=num_tokens,
            seq_len_tokens=num_tokens,
            micro_batch_sequences=1,
            world_size=1,
        )
        head = MtpHead(demo.family, demo.config, num_modules=1, convention=demo.family.wiring.default)
        shapes = {name: value.shape for name, value in head.named_parameters()}
        memory = estimate_footprint(options, demo, shapes, plan, torch.device("cpu"), None)
        gradients = 4 * memory.head_parameters
        planned = memory.loss_bytes + memory.activation_bytes + gradients
        found[num_tokens] = peak_of(demo, num_tokens, 1, num_starts)
        assert found[num_tokens] == pytest.approx(planned, rel=0.25)
    assert found[4 * shorter] < 4 * found[shorter]


def test_packed_documents_take_no_more_memory_than_one(demo: Trunk) -> None:
    assert peak_of(demo, 2048, 7) <= 1.02 * peak_of(demo, 2048, 1)
