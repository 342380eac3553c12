"""Options of a recipe for training a head: attention of depths, rows that count, activations kept in memory.

Shapes: B rows, T tokens, K depths, N target rows, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from test_training import NUM_DEPTHS, SEQ_LEN, training_module
from torch import Tensor

from documents import random_documents
from mtp_train.data.pack import PackedBatch, collate, pack_documents
from mtp_train.heads.step import mtp_step
from mtp_train.losses.chunked import LossTerms
from mtp_train.train.head_training import HeadTraining, MicroBatch
from tiny import VOCAB_SIZE, rows_on

FEW = torch.tensor([5, 9, 20])
"""So few tokens that a random head often drafts the right one."""


def batch_of(*lengths: int, tokens: Tensor | None = None) -> PackedBatch:
    """Return packed documents of random tokens, taken from ``tokens`` or from all."""
    documents = random_documents(lengths, seed=3, prompt_tokens=2, tokens=tokens)
    return collate(pack_documents(documents, SEQ_LEN, pack=True, seed=0, epoch=0))


def loss_and_gradient(module: HeadTraining, batch: PackedBatch) -> tuple[LossTerms, dict[str, Tensor]]:
    terms = module.train()(MicroBatch(batch, torch.tensor([0.5, 0.3, 0.2])))
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
        terms = module(MicroBatch(batch, torch.ones(NUM_DEPTHS)))
    assert terms.total.requires_grad
    return sum(kept.values())


def test_running_the_head_twice_keeps_less() -> None:
    batch = batch_of(16, 16, 16, 16)
    whole = kept_bytes(training_module(), batch)
    assert kept_bytes(training_module(recompute=True), batch) < whole / 3


def states_of(module: HeadTraining, batch: PackedBatch, **options: bool) -> Tensor:
    return rows_on(module.ends, module.head, batch, NUM_DEPTHS, **options).student_KND


@torch.no_grad()
def test_depths_apart_see_rows_of_their_own_depth() -> None:
    """Against each depth by itself, as a model of its own that reads the rows of the depth before."""
    module = training_module()
    batch = batch_of(SEQ_LEN)
    tokens_1T = batch.tokens_BT
    hidden_1TD = module.ends.hidden(tokens_1T)
    found = states_of(module, batch, apart=True)
    for depth in range(1, NUM_DEPTHS + 1):
        step = mtp_step(
            module.head,
            hidden_1TD,
            module.ends.embed(torch.nn.functional.pad(tokens_1T[:, depth:], (0, depth))),
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


# The trunk's output matrix or a part of it, and a head with a matrix of its own for each depth.
OUTPUTS = [("qwen3_5", FEW), ("step3p7", None)]


def output_rows(module: HeadTraining) -> tuple[Tensor, Tensor]:
    """Return the tokens that may be drafted, (R), and their rows of each depth's output matrix, (K, R, D)."""
    vocab_R = torch.arange(VOCAB_SIZE) if module.draft_vocab is None else module.draft_vocab
    own = module.head.own_lm_heads(NUM_DEPTHS) or [module.ends.lm_head_VD] * NUM_DEPTHS
    return vocab_R, torch.stack([matrix_VD[vocab_R] for matrix_VD in own])


@pytest.mark.parametrize(("family_name", "draft_vocab"), OUTPUTS)
@pytest.mark.parametrize("kind", ["kl", "ce", "tv"])
def test_a_head_drafts_by_its_own_output_matrices_or_a_part_of_the_trunk_s(
    kind: str, family_name: str, draft_vocab: Tensor | None
) -> None:
    """Against the loss of a model whose output matrices have no other rows, and which kl softens."""
    batch = batch_of(SEQ_LEN, 9, tokens=FEW)
    heat = 2.0 if kind == "kl" else 1.0
    module = training_module(family_name, kind, temperature=heat, draft_vocab=draft_vocab)
    terms, _ = loss_and_gradient(module, batch)
    vocab_R, output_KRD = output_rows(module)
    rows = rows_on(module.ends, module.head, batch, NUM_DEPTHS)
    q_KNR = torch.softmax(rows.student_KND @ output_KRD.mT / heat, -1)
    p_NR = torch.softmax(rows.teacher_ND @ module.ends.lm_head_VD[vocab_R].T / heat, -1)
    places_N = (rows.targets_N[:, None] == vocab_R).int().argmax(-1)
    loss_KN = {
        "kl": heat**2 * (p_NR * (p_NR.log() - q_KNR.log())).sum(-1),
        "tv": 1 - torch.minimum(q_KNR, p_NR.expand_as(q_KNR)).sum(-1),
        "ce": -q_KNR[:, torch.arange(len(places_N)), places_N].log(),
    }[kind]
    torch.testing.assert_close(terms.sum_K, (loss_KN * rows.valid_KN).sum(1).detach())
    if draft_vocab is not None:
        whole, _ = loss_and_gradient(training_module(family_name, kind, temperature=heat), batch)
        assert (whole.sum_K - terms.sum_K).abs().min() > 0.1


@pytest.mark.parametrize(("family_name", "draft_vocab"), OUTPUTS)
def test_acceptance_is_measured_by_the_same_matrices(family_name: str, draft_vocab: Tensor | None) -> None:
    batch = batch_of(SEQ_LEN, 9, tokens=FEW)
    module = training_module(family_name, draft_vocab=draft_vocab)
    ones_K = torch.ones(NUM_DEPTHS)
    found = module(MicroBatch(batch, ones_K), measures=True)
    vocab_R, output_KRD = output_rows(module)
    rows = rows_on(module.ends, module.head, batch, NUM_DEPTHS)
    best_N = module.ends.project(rows.teacher_ND).argmax(-1)
    logits_KNR = rows.student_KND @ output_KRD.mT
    drafts_KN = vocab_R[logits_KNR.argmax(-1)]
    assert found.agreed_K.tolist() == ((drafts_KN == best_N) & rows.valid_KN).sum(1).tolist()
    p_NR = torch.softmax(module.ends.project(rows.teacher_ND), -1)[:, vocab_R]
    overlap_KN = torch.minimum(torch.softmax(logits_KNR, -1), p_NR).sum(-1)
    torch.testing.assert_close(found.overlapped_K, (overlap_KN * rows.valid_KN).sum(1).detach())


def test_a_trunk_held_in_bf16_is_measured_in_fp32() -> None:
    batch = batch_of(SEQ_LEN, 9, tokens=FEW)
    ones_K = torch.ones(NUM_DEPTHS)
    module = training_module(draft_vocab=FEW)
    module.ends.causal_lm.bfloat16()
    found = module(MicroBatch(batch, ones_K), measures=True)
    module.ends.causal_lm.float()
    expected = module(MicroBatch(batch, ones_K), measures=True)
    torch.testing.assert_close(found.overlapped_K, expected.overlapped_K, atol=1e-4, rtol=0)
