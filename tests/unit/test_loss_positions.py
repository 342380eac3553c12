"""Losses of some start rows are the dense losses with all other rows masked: values, gradients, counts, and memory.

Shapes: B rows, T tokens, K depths, P start rows, N rows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from test_micro_batches import prepared_by
from test_training import NUM_DEPTHS, make_documents, training_module
from torch import Tensor

from assistants import HAS_ASSISTANTS, assistant_head, tiny_assistant, tiny_gemma_trunk
from documents import random_documents
from mtp_train.data.pack import PackedBatch, collate, count_targets, global_batches, pack_documents, with_starts
from mtp_train.errors import RecipeError
from mtp_train.heads import query_blocks
from mtp_train.heads.head import Head
from mtp_train.losses.chunked import align_to_targets
from mtp_train.runs.check import check
from mtp_train.train.head_training import HeadTraining, MicroBatch
from mtp_train.train.packed_rows import aligned_rows
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.states import TrunkStates
from tiny import ALL_FAMILIES, CHAININGS, draft_head, head_of, tiny_head, tiny_trunk
from tolerances import assert_same, num_terms

SEQ_LEN = 20
STARTS = torch.tensor([[0, 3, 4, 12, 16], [-1, -1, 2, 9, 10]])
"""Of these 16 has a target at depth 1 and 2 alone, and 9 of the second row begins where a document ends."""
SCALE = torch.tensor([0.5, 0.3, 0.2])


def batch() -> PackedBatch:
    documents = random_documents((20, 11, 7), seed=3)
    return collate(
        [pack_documents(part, SEQ_LEN, pack=True, seed=0, epoch=0)[0] for part in (documents[:1], documents[1:])]
    )


def module_of(trunk: Trunk, head: Head, **options: Any) -> HeadTraining:
    settings = {"num_depths": NUM_DEPTHS, "kind": "kl", "temperature": 1.0}
    return HeadTraining(TrunkStates(trunk), head, **{**settings, **options}).train()


def stepped(module: HeadTraining, terms: Any) -> tuple[Tensor, Tensor]:
    """Return loss, sums and counts in one vector, and all gradients in one."""
    module.head.zero_grad()
    terms.total.backward()
    found = [one.grad.flatten() for one in module.head.parameters() if one.grad is not None]
    return torch.cat([terms.total.detach()[None], terms.sum_K, terms.count_K]), torch.cat(found)


def at_starts_alone(module: HeadTraining, starts_BP: Tensor = STARTS) -> tuple[Tensor, Tensor]:
    return stepped(module, module(MicroBatch(batch(), SCALE, starts_BP=starts_BP)))


def masked(module: HeadTraining, starts_BP: Tensor = STARTS) -> tuple[Tensor, Tensor]:
    """Return what training on all rows gives if the targets of other start rows have no weight."""
    given = batch()
    chosen_BT = torch.zeros_like(given.loss_mask_BT)
    for row, starts_P in enumerate(starts_BP.tolist()):
        chosen_BT[row, [start for start in starts_P if start >= 0]] = True
    hidden_BTD = module.states(given.tokens_BT, given.document_BT)
    options = {"apart": module.apart, "recompute": module.recompute}
    rows = aligned_rows(module.ends, module.head, given, hidden_BTD, NUM_DEPTHS, **options)
    kept_KN = rows.valid_KN & align_to_targets([chosen_BT] * NUM_DEPTHS).flatten(1, 2)
    return stepped(module, module._loss(rows._replace(valid_KN=kept_KN), SCALE, None))


def assert_are_the_masked_ones(module: HeadTraining) -> None:
    terms = 4 * num_terms(module.head)
    other = STARTS.clone()
    other[0, 3] = 11
    for found, expected, wrong in zip(at_starts_alone(module), masked(module), masked(module, other), strict=True):
        assert_same(found, expected, terms)
        assert not torch.allclose(wrong, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_losses_and_gradients_are_the_dense_ones_in_every_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name_of_size in ("BLOCK_QUERIES", "SPREAD_QUERIES"):
        monkeypatch.setattr(query_blocks, name_of_size, 2)
    trunk = tiny_trunk(name)
    assert_are_the_masked_ones(module_of(trunk, tiny_head(trunk)))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chaining", CHAININGS)
def test_losses_and_gradients_are_the_dense_ones_however_depths_chain(chaining: Any, recompute: bool) -> None:
    trunk = tiny_trunk("qwen3_5")
    assert_are_the_masked_ones(module_of(trunk, head_of(trunk, chaining, NUM_DEPTHS), recompute=recompute))


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa"])
def test_losses_and_gradients_are_the_dense_ones_of_draft_models(kind: str) -> None:
    trunk = tiny_trunk("llama")
    head = draft_head(trunk, kind, NUM_DEPTHS if kind == "medusa" else 1)
    assert_are_the_masked_ones(module_of(trunk, head, draft_vocab=torch.arange(0, 67, 2) if kind == "eagle3" else None))


@pytest.mark.skipif(not HAS_ASSISTANTS, reason="transformers has no assistants")
def test_losses_and_gradients_are_the_dense_ones_of_an_assistant() -> None:
    assert_are_the_masked_ones(module_of(tiny_gemma_trunk(), assistant_head(tiny_assistant())))


@pytest.mark.parametrize(
    "options", [{"kind": "ce"}, {"kind": "e2e_tv"}, {"kind": "lk", "temperature": 2.0}, {"apart": True}]
)
def test_losses_and_gradients_are_the_dense_ones_of_every_objective(options: dict[str, Any]) -> None:
    assert_are_the_masked_ones(training_module(**options).train())


def test_a_row_without_a_target_gives_no_loss() -> None:
    nothing = torch.full_like(STARTS, -1)
    values, gradient = at_starts_alone(training_module().train(), nothing)
    assert not values.any()
    assert not gradient.any()


LENGTHS = (20, 17, 9, 14, 5, 12, 16)


def sequences(num_starts: int | None, step: int = 0, seed: int = 0, count: int = 4) -> list[Any]:
    return global_batches(
        make_documents(*LENGTHS),
        seq_len_tokens=SEQ_LEN,
        pack=True,
        sequences_per_step=count,
        seed=seed,
        num_depths=NUM_DEPTHS,
        num_starts=num_starts,
    )(step)


def test_starts_depend_on_seed_epoch_and_row_alone() -> None:
    def starts(step: int, seed: int = 0, count: int = 4) -> list[list[int]]:
        return [one.starts_P.tolist() for one in sequences(3, step, seed, count)]

    whole = starts(0, count=20)
    # A resumed run asks for one step alone.
    assert starts(3) == whole[12:16]
    assert starts(0, seed=1, count=20) != whole
    by_row: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for one in sequences(3, count=60):
        by_row.setdefault(one.members, set()).add(tuple(one.starts_P.tolist()))
    assert max(map(len, by_row.values())) > 1, "the same row in other epochs"


def test_every_stretch_has_a_start_and_every_row_the_same_chance() -> None:
    (long,) = pack_documents(random_documents((200,), prompt_tokens=20), 200, pack=True, seed=0, epoch=0)
    found: Counter[int] = Counter()
    for index in range(4000):
        starts_P = with_starts(long, 7, NUM_DEPTHS, 0, index).starts_P
        assert starts_P is not None
        # Depth 3 of start 16 has the first target, depth 1 of start 197 the last token.
        assert [(int(start) - 16) * 7 // 182 for start in starts_P] == [*range(7)]
        found.update(starts_P.tolist())
    assert {*found} == {*range(16, 198)}
    assert max(found.values()) < 2 * min(found.values())


def test_a_row_of_few_targets_counts_whole() -> None:
    for row in sequences(None):
        kept = with_starts(row, SEQ_LEN, NUM_DEPTHS, 0, 0)
        assert count_targets(kept, NUM_DEPTHS) == count_targets(row, NUM_DEPTHS)
        assert kept.starts_P is not None
        assert np.all(np.diff(kept.starts_P) >= 0)


@pytest.mark.parametrize("world", [1, 2])
def test_losses_are_divided_by_the_counted_targets_of_all_processes(world: int) -> None:
    given = sequences(3)
    made = [one for rank in range(world) for one in prepared_by(rank, world, given)]
    module = training_module().train()
    found = [module(one) for one in made]
    count_K = torch.stack([one.count_K for one in found]).sum(0)
    assert count_K.tolist() == np.sum([count_targets(one, NUM_DEPTHS) for one in given], axis=0).tolist()
    assert count_K.tolist() != np.sum([count_targets(one, NUM_DEPTHS) for one in sequences(None)], axis=0).tolist()
    weight_K = torch.tensor([1, 0.6, 0.36]) / 1.96
    sum_K = torch.stack([one.sum_K for one in found]).sum(0)
    # Averages over micro-batches and over processes undo the factor.
    mean = torch.stack([one.total for one in found]).mean()
    torch.testing.assert_close(mean.detach(), (weight_K * sum_K / count_K).sum())
    for one in made:
        looked_for = module(MicroBatch(one.batch, one.scale_K, starts_BP=one.starts_BP))
        assert torch.equal(module(one).total, looked_for.total)


def test_all_positions_of_a_sequence_are_no_choice() -> None:
    def checked(count: int) -> Any:
        return check("retrain_head", {"data.loss_positions": count})

    # Lengths that are chosen by rule are known here.
    with pytest.raises(RecipeError, match=r"data\.loss_positions: 512 of the 512 tokens of a sequence"):
        checked(512)
    found = checked(64)
    assert "at 64 positions of each 512" in str(found)
    whole = check("retrain_head")
    assert found.memory.activation_bytes < whole.memory.activation_bytes / 2
    assert "positions of each" not in str(whole)
