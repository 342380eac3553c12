"""An unroll without masks is the unroll with them: what rows see, states, gradients and whole runs.

Shapes: B rows, T tokens, K depths, S keys, H heads, J key heads.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoints import set_fields
from flex_on_cpu import flex_on_cpu
from mtp_train import check
from mtp_train.data.pack import collate, pack_documents
from mtp_train.data.tokenize import Document
from mtp_train.errors import GateRefusedError, RecipeError
from mtp_train.heads import flex
from mtp_train.heads.alignment import PADDING_DOCUMENT, prefix_mask, unroll_mask
from mtp_train.heads.attention import masked_attention
from mtp_train.heads.flex import attend_to_seen, flex_masks, interval_blocks, require_flex_device, why_dense
from mtp_train.train.aligned import Batch
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.log import read_metrics
from runs import run_quietly, tiny_recipe, write_inputs
from tiny import ALL_FAMILIES, VOCAB_SIZE, tiny_head, tiny_trunk

P = PADDING_DOCUMENT
NEED_MASKS = {"deepseek_v32", "glm_moe_dsa", "glm5_next", "hy_v4", "minimax_m3", "qwen4_exp", "inkling"}
"""Heads with an indexer, and one that sees distances."""
NUM_DEPTHS, SEQ_LEN = 3, 16


def documents(*lengths: int, num_rows: int = 300) -> Tensor:
    """Return a row of documents of these lengths, the rest padding."""
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(numbers + [P] * (num_rows - len(numbers)))


# More than two blocks, the last one not whole; documents that end at a block's end, within it, and cover several.
DOCUMENT = torch.stack([documents(128, 20, 100), documents(300), documents(3, 256, 41), documents(10)])
SHORT = torch.tensor([[0] * 5 + [1] * 4 + [P] * 2, [0] * 11])


@pytest.mark.parametrize("window", [None, 1, 2, 40, 128, 200, 1000])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_what_is_seen_without_a_mask_is_what_the_mask_says(depth: int, window: int | None) -> None:
    num_rows = DOCUMENT.shape[1]
    seen = flex_masks(DOCUMENT)(depth, window)
    true_B1TT = create_mask(seen.blocks.mask_mod, len(DOCUMENT), 1, num_rows, num_rows, device="cpu")
    own_TT = torch.eye(num_rows, dtype=torch.bool).expand_as(true_B1TT[:, 0])
    unseen = [torch.zeros_like(own_TT)] * (depth - 1 - seen.num_own)
    found_BTS = torch.cat([true_B1TT[:, 0], *unseen, *[own_TT] * seen.num_own], dim=-1)
    text_BT = DOCUMENT != P
    expected_BTS = unroll_mask(prefix_mask(DOCUMENT), depth, window)
    assert torch.equal(found_BTS[text_BT], expected_BTS[text_BT])
    assert torch.equal(true_B1TT[:, 0][~text_BT], own_TT[~text_BT]) == (window is None or window >= depth)


@pytest.mark.parametrize("window", [None, 2, 128, 256])
def test_blocks_are_those_that_torch_finds_by_looking_at_every_row_and_key(window: int | None) -> None:
    num_rows = DOCUMENT.shape[1]
    found = flex_masks(DOCUMENT)(1, window).blocks
    expected = create_block_mask(found.mask_mod, len(DOCUMENT), None, num_rows, num_rows, device="cpu")
    assert found.shape == expected.shape
    for name in ("", "full_"):
        for side in ("kv", "q"):
            counts, order = (getattr(expected, f"{name}{side}_{part}") for part in ("num_blocks", "indices"))
            assert torch.equal(getattr(found, f"{name}{side}_num_blocks"), counts)
            chosen = torch.arange(order.shape[-1]) < counts[..., None]
            assert torch.equal(getattr(found, f"{name}{side}_indices")[chosen], order[chosen])
    assert found.full_kv_num_blocks is not None
    assert bool(found.full_kv_num_blocks.any()) == (window in (None, 256))


class Largest(TorchDispatchMode):
    """Sees the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            self.numel = max(self.numel, one.numel() if isinstance(one, Tensor) else 0)
        return result


def test_nothing_of_the_size_of_rows_times_keys_is_made() -> None:
    document_1T = documents(1000, 2000, num_rows=4096)[None]
    with Largest() as without:
        flex_masks(document_1T)(3, 512)
    with Largest() as whole:
        unroll_mask(prefix_mask(document_1T), 3, 512)
    assert without.numel == 4096
    assert whole.numel == 3 * 4096**2


class Inputs(NamedTuple):
    """Queries, keys and values of a depth, and sinks."""

    query_BHTW: Tensor
    key_BJSW: Tensor
    value_BJSW: Tensor
    sinks_H: Tensor


def random_inputs(depth: int, num_key_heads: int = 2, value_width: int = 6) -> Inputs:
    generator = torch.Generator().manual_seed(depth)
    rows, num_rows = SHORT.shape
    shapes = [
        (rows, 4, num_rows, 8),
        (rows, num_key_heads, depth * num_rows, 8),
        (rows, num_key_heads, depth * num_rows, value_width),
        (4,),
    ]
    return Inputs(*(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes))


def results(attended_BTHW: Tensor, inputs: Inputs) -> list[Tensor]:
    """Return the attention of the rows of text, without padding, and the gradient of a function of it."""
    read = attended_BTHW[SHORT != P]
    gradient = torch.autograd.grad(read.sin().sum(), inputs, materialize_grads=True)
    return [read, *gradient]


@pytest.mark.parametrize(
    ("settings", "window", "num_key_heads"),
    [
        ({}, None, 2),
        ({}, 1, 4),
        ({}, 2, 1),
        ({"softcap": 1.5}, 3, 2),
        ({"s_aux": True}, None, 1),
        ({"s_aux": True}, 2, 4),
    ],
)
def test_states_and_gradients_are_those_with_masks(
    settings: dict[str, Any], window: int | None, num_key_heads: int
) -> None:
    """Values are narrower than keys throughout; with the smallest windows later depths see no row of depth 1."""
    with flex_on_cpu():
        for depth in (1, 2, 3):
            inputs = random_inputs(depth, num_key_heads)
            sinks_H = inputs.sinks_H if "s_aux" in settings else None
            softcap = settings.get("softcap")
            seen = flex_masks(SHORT)(depth, window)
            found = attend_to_seen(*inputs[:3], seen, scaling=0.4, softcap=softcap, sinks_H=sinks_H)
            mask_B1TS = unroll_mask(prefix_mask(SHORT), depth, window)[:, None]
            expected, _ = masked_attention(
                torch.nn.Identity().requires_grad_(False),
                *(inputs.query_BHTW, *(one.repeat_interleave(4 // num_key_heads, 1) for one in inputs[1:3])),
                mask_B1TS,
                s_aux=sinks_H,
                softcap=softcap,
                scaling=0.4,
            )
            torch.testing.assert_close(results(found, inputs), results(expected, inputs), atol=2e-6, rtol=1e-5)


def batch_of(*lengths: int) -> Batch:
    generator = torch.Generator().manual_seed(3)
    packed = [
        Document(
            tuple(torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()), (True,) * length, "g", str(index)
        )
        for index, length in enumerate(lengths)
    ]
    return Batch(*collate(pack_documents(packed, SEQ_LEN, pack=True, seed=0, epoch=0)).values())


def training(family_name: str, **options: Any) -> HeadTraining:
    trunk = tiny_trunk(family_name)
    return HeadTraining(trunk, tiny_head(trunk), num_depths=NUM_DEPTHS, kind="kl", temperature=1.0, **options).train()


def loss_and_gradient(module: HeadTraining, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    module.head.zero_grad()
    terms = module(*batch, torch.tensor([0.5, 0.3, 0.2]))
    terms.total.backward()
    gradient = {name: value.grad for name, value in module.head.named_parameters() if value.grad is not None}
    return terms.sum_K, gradient


BATCH = batch_of(16, 9, 6, 12)


def assert_same(family_name: str, **options: Any) -> None:
    """Check losses and gradients of a head against those with masks."""
    expected = loss_and_gradient(training(family_name, **options), BATCH)
    with flex_on_cpu():
        for recompute in (True, False):
            module = training(family_name, attention="flex", recompute=recompute, **options)
            torch.testing.assert_close(loss_and_gradient(module, BATCH), expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family_name", "options"),
    [
        ("qwen3_5", {}),  # groups of heads share keys
        ("qwen3_5", {"apart": True}),
        ("deepseek_v3", {}),  # latent attention, values narrower than keys
        ("gemma2", {}),  # bounded scores
        ("mimo_v2_flash", {}),  # three windows with sinks, one after the other
        ("step3p7", {}),  # a chain of windows
    ],
)
def test_a_head_learns_the_same(family_name: str, options: dict[str, Any]) -> None:
    assert_same(family_name, **options)


def test_documents_that_leak_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: a leak between documents fails it."""
    monkeypatch.setattr(flex, "interval_blocks", lambda first_BT: interval_blocks(torch.zeros_like(first_BT)))
    with pytest.raises(AssertionError, match="not close"):
        assert_same("qwen3_5")


def test_all_depths_and_batches_are_compiled_once() -> None:
    """A row by itself is what torch takes for contiguous wherever it was cut from."""
    with flex_on_cpu() as counter:
        module = training("qwen3_5", attention="flex")
        for lengths in ((16,), (9, 6), (3, 4)):
            loss_and_gradient(module, batch_of(*lengths))
        assert counter.frame_count == 1


def test_half_precision_is_that_of_the_weights_products() -> None:
    """Norms and rotations give keys in fp32 beside values in bf16, which flex_attention does not take."""
    exact, _ = loss_and_gradient(training("qwen3_5"), BATCH)
    with flex_on_cpu():
        half, _ = loss_and_gradient(training("qwen3_5", attention="flex", compute_dtype=torch.bfloat16), BATCH)
    torch.testing.assert_close(half, exact, rtol=0.02, atol=0)


def dense_kernel(
    query: Tensor, key: Tensor, value: Tensor, *, score_mod: Callable[[Tensor], Tensor] | None, **rest: Any
) -> tuple[Tensor, Any]:
    """Compute what flex_attention does, for a caller who needs no compiler."""
    num_rows = query.shape[2]
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    mask_B1TT = create_mask(rest["block_mask"].mask_mod, len(query), 1, num_rows, num_rows, device="cpu")
    scores_BHTT = query @ key.transpose(2, 3) * rest["scale"]
    scores_BHTT = scores_BHTT if score_mod is None else score_mod(scores_BHTT)
    scores_BHTT = scores_BHTT.masked_fill(~mask_B1TT, -torch.inf)
    return scores_BHTT.softmax(-1) @ value, SimpleNamespace(lse=scores_BHTT.logsumexp(-1))


@pytest.mark.parametrize("family_name", ALL_FAMILIES)
@torch.no_grad()
def test_every_head_can_do_without_masks_or_says_why_not(family_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda: dense_kernel)
    module = training(family_name)
    reason = why_dense(module.head.family, module.head.config)
    assert (reason is not None) == (family_name in NEED_MASKS)
    if reason is None:
        expected = module(*BATCH, torch.ones(NUM_DEPTHS)).sum_K
        module.attention = "flex"
        torch.testing.assert_close(module(*BATCH, torch.ones(NUM_DEPTHS)).sum_K, expected, atol=2e-4, rtol=0)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("flex") / "in")


def test_a_run_without_masks_learns_and_measures_as_one_with_them(inputs: Path, tmp_path: Path) -> None:
    """Held-out text is measured in the training's shape: every other one would be compiled."""
    select = {"every_steps": 2, "share": 0.2, "prompts": 0}
    settings = {"train__select": select, "train__micro_batch_sequences": 2}
    lines, arms = [], []
    with flex_on_cpu() as counter, pytest.MonkeyPatch.context() as patch:
        shapes, compiled = set(), flex._compiled()

        def spy(query: Tensor, *rest: Any, **options: Any) -> Any:
            shapes.add((query.shape[0], query.shape[2]))
            return compiled(query, *rest, **options)

        patch.setattr(flex, "_compiled", lambda: spy)
        for attention in ("dense", "flex"):
            run_dir = tmp_path / attention
            recipe = tiny_recipe(inputs, run_dir, train__attention=attention, **settings)
            with contextlib.suppress(GateRefusedError):
                run_quietly(recipe)
            lines.append([(line["step"], line["loss"]) for line in read_metrics(run_dir) if "loss" in line])
            held_out = [line["held_out_overlap_depth_1"] for line in read_metrics(run_dir) if "held_out_tau" in line]
            arms.append(json.loads((run_dir / "report.json").read_text())["arms"]["retrained"] | {"held_out": held_out})
    assert shapes == {(2, recipe.data.seq_len_tokens)}
    # With gradients, without, and in inference mode.
    assert 0 < counter.frame_count <= 3
    (dense, found), (expected_arm, arm) = lines, arms
    assert [step for step, _ in found] == [1, 2, 3, 4]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in dense], abs=1e-5)
    for figure in ("dense", "overlap", "held_out"):
        assert arm[figure] == pytest.approx(expected_arm[figure], abs=1e-4)


def test_a_run_says_at_once_where_it_cannot_do_without_masks(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.attention: 'flex' on cpu, where torch has no backward pass"):
        run_quietly(tiny_recipe(inputs, tmp_path / "run", train__attention="flex"))
    require_flex_device("flex", torch.device("cuda"))
    require_flex_device("dense", torch.device("cpu"))


@pytest.mark.parametrize(
    ("family_name", "fields", "reason"),
    [
        ("deepseek_v32", {}, "DeepSeek V3.2, whose layers choose the keys that a query attends to; expected dense"),
        ("deepseek_v4", {"head_dim": 512}, r"DeepSeek V4, whose heads are 512 wide, too wide .*\(256 at most\)"),
        ("granite", {"attention_dropout": 0.1}, "Granite 3, whose config sets attention_dropout: 0.1"),
    ],
)
def test_check_names_heads_that_need_masks(
    family_name: str, fields: dict[str, float], reason: str, tmp_path: Path
) -> None:
    if family_name not in ALL_FAMILIES:
        pytest.skip(f"this transformers has no {family_name}")
    directory = write_inputs(tmp_path, family_name)
    set_fields(directory / "finetune", fields)
    for attention in ("dense", "flex"):
        recipe = tiny_recipe(directory, tmp_path / "run", train__attention=attention, export__enabled=False)
        with contextlib.nullcontext() if attention == "dense" else pytest.raises(RecipeError, match=reason):
            check(recipe, processes=1)
