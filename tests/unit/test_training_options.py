"""Options of a recipe for training a head: attention of depths, rows that count, activations kept in memory.

Shapes: B rows, T tokens, K depths, N target rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_train.data.pack import collate, pack_documents
from mtp_train.data.tokenize import Document
from mtp_train.heads.step import mtp_step
from mtp_train.losses.chunked import LossTerms
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.packed_rows import PackedBatch, aligned_rows
from tiny import VOCAB_SIZE, tiny_head, tiny_trunk

NUM_DEPTHS, SEQ_LEN = 3, 16
FEW = torch.tensor([5, 9, 20])
"""So few tokens that a random head often drafts the right one."""


def training_module(family_name: str = "qwen3_5", kind: str = "kl", **options: Any) -> HeadTraining:
    trunk = tiny_trunk(family_name)
    return HeadTraining(trunk, tiny_head(trunk), num_depths=NUM_DEPTHS, kind=kind, temperature=1.0, **options)


def batch_of(*lengths: int, tokens: Tensor | None = None) -> PackedBatch:
    """Return packed documents of random tokens, taken from ``tokens`` or from all."""
    generator = torch.Generator().manual_seed(3)
    choice = torch.arange(VOCAB_SIZE) if tokens is None else tokens
    documents = [
        Document(
            tuple(choice[torch.randint(len(choice), (length,), generator=generator)].tolist()),
            tuple(index >= 2 for index in range(length)),
            "g",
            str(number),
        )
        for number, length in enumerate(lengths)
    ]
    return PackedBatch(*collate(pack_documents(documents, SEQ_LEN, pack=True, seed=0, epoch=0)).values())


def loss_and_gradient(module: HeadTraining, batch: PackedBatch) -> tuple[LossTerms, dict[str, Tensor]]:
    terms = module.train()(*batch, torch.tensor([0.5, 0.3, 0.2]))
    terms.total.backward()
    return terms, {name: value.grad for name, value in module.head.named_parameters() if value.grad is not None}


def kept_bytes(module: HeadTraining, batch: PackedBatch) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, parameters left out."""
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        terms = module(*batch, torch.ones(NUM_DEPTHS))
    assert terms.total.requires_grad
    return sum(kept.values())


def test_running_the_head_twice_keeps_less() -> None:
    batch = batch_of(16, 16, 16, 16)
    whole = kept_bytes(training_module(), batch)
    assert kept_bytes(training_module(recompute=True), batch) < whole / 3


def states_of(module: HeadTraining, batch: PackedBatch, **options: bool) -> Tensor:
    return aligned_rows(module.trunk, module.head, batch, NUM_DEPTHS, **options).student_KND


@torch.no_grad()
def test_depths_apart_see_rows_of_their_own_depth() -> None:
    """Against each depth by itself, as a model of its own that reads the rows of the depth before."""
    module = training_module()
    batch = batch_of(SEQ_LEN)
    tokens_1T = batch.tokens_BT
    hidden_1TD = module.trunk.hidden(tokens_1T)
    found = states_of(module, batch, apart=True)
    for depth in range(1, NUM_DEPTHS + 1):
        step = mtp_step(
            module.head,
            hidden_1TD,
            module.trunk.embed(torch.nn.functional.pad(tokens_1T[:, depth:], (0, depth))),
            depth=depth,
            positions_BT=torch.arange(SEQ_LEN)[None],
            mask_BTS=torch.ones(1, SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril(),
            cache=None,
        )
        hidden_1TD = step.recycled_BTD
        expected_TD = step.logit_hidden_BTD[0, :-depth]
        torch.testing.assert_close(found[depth - 1, depth:], expected_TD, atol=1e-5, rtol=0)
    exact = states_of(module, batch)
    torch.testing.assert_close(found[0], exact[0], atol=1e-5, rtol=0)
    assert (found[1] - exact[1]).abs().max() > 1e-2


def reached_by_hand(module: HeadTraining, batch: PackedBatch, vocab: Tensor) -> Tensor:
    """Return where a target row is reached by its start's own drafts: bool, (K, N), start by start."""
    rows = aligned_rows(module.trunk, module.head, batch, NUM_DEPTHS)
    drafts_KN = vocab[(rows.student_KND @ module.trunk.lm_head_VD[vocab].T).argmax(-1)]
    num_rows = len(rows.targets_N)
    reached_KN = torch.zeros(NUM_DEPTHS, num_rows, dtype=torch.bool)
    for start in range(num_rows):
        for depth in range(1, min(NUM_DEPTHS, num_rows - 1 - start) + 1):
            row = start + depth
            reached_KN[depth - 1, row] = True
            if not rows.valid_KN[depth - 1, row] or drafts_KN[depth - 1, row] != rows.targets_N[row]:
                break
    return reached_KN & rows.valid_KN


@pytest.mark.parametrize("kind", ["kl", "ce", "e2e_tv"])
def test_on_policy_leaves_out_what_comes_after_a_wrong_draft(kind: str) -> None:
    batch = batch_of(SEQ_LEN, 9, 6, tokens=FEW)
    module = training_module(kind=kind, on_policy=True, draft_vocab=FEW)
    terms, gradient = loss_and_gradient(module, batch)
    with torch.no_grad():
        reached_KN = reached_by_hand(module, batch, FEW)
        valid_KN = aligned_rows(module.trunk, module.head, batch, NUM_DEPTHS).valid_KN
    assert (reached_KN[0] == valid_KN[0]).all()
    assert 0 < reached_KN[1].sum() < valid_KN[1].sum()

    def masked_rows(*inputs: Any, **options: Any) -> Any:
        rows = aligned_rows(*inputs, **options)
        return rows._replace(valid_KN=reached_KN)

    other = training_module(kind=kind, draft_vocab=FEW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtp_train.train.head_training.aligned_rows", masked_rows)
        expected, expected_gradient = loss_and_gradient(other, batch)
    torch.testing.assert_close(terms[:-1], expected[:-1])
    torch.testing.assert_close(gradient, expected_gradient)
    all_rows, _ = loss_and_gradient(training_module(kind=kind, draft_vocab=FEW), batch)
    assert all_rows.sum_K[1] > 1.1 * terms.sum_K[1]
    # The log divides by all targets: rows that are left out count as 0, as in the loss that is minimised.
    assert terms.targets_K.tolist() == all_rows.targets_K.tolist() == valid_KN.sum(1).tolist()
    assert terms.count_K.tolist() == reached_KN.sum(1).tolist()
    assert all_rows.count_K.tolist() == valid_KN.sum(1).tolist()
    assert terms.count_K[1] < all_rows.count_K[1]


@torch.no_grad()
def test_a_right_draft_reads_as_the_text_does_and_a_wrong_one_does_not() -> None:
    """The reason why leaving rows out is the same as reading the drafts."""
    module = training_module()
    batch = batch_of(SEQ_LEN, tokens=FEW)
    start = 4
    drafted = batch.tokens_BT.clone()
    same = states_of(module, batch._replace(tokens_BT=drafted))
    torch.testing.assert_close(same, states_of(module, batch))
    drafted[0, start + 2] = (drafted[0, start + 2] + 1) % VOCAB_SIZE
    other = states_of(module, batch._replace(tokens_BT=drafted))
    assert (other[1, start + 2] - same[1, start + 2]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["kl", "ce", "tv"])
def test_a_draft_vocabulary_is_all_there_is(kind: str) -> None:
    """Against the loss of a model whose output matrix has no other rows."""
    batch = batch_of(SEQ_LEN, 9, tokens=FEW)
    module = training_module(kind=kind, draft_vocab=FEW)
    terms, _ = loss_and_gradient(module, batch)
    rows = aligned_rows(module.trunk, module.head, batch, NUM_DEPTHS)
    kept_VD = module.trunk.lm_head_VD[FEW]
    q_KNV, p_NV = (torch.softmax(state @ kept_VD.T, -1) for state in (rows.student_KND, rows.teacher_ND))
    places_N = (rows.targets_N[:, None] == FEW).int().argmax(-1)
    loss_KN = {
        "kl": (p_NV * (p_NV.log() - q_KNV.log())).sum(-1),
        "tv": 1 - torch.minimum(q_KNV, p_NV.expand_as(q_KNV)).sum(-1),
        "ce": -q_KNV[:, torch.arange(len(places_N)), places_N].log(),
    }[kind]
    torch.testing.assert_close(terms.sum_K, (loss_KN * rows.valid_KN).sum(1).detach())
    whole, _ = loss_and_gradient(training_module(kind=kind), batch)
    assert (whole.sum_K - terms.sum_K).abs().min() > 0.1
