"""A step's micro-batches: shared out over processes, weighed by its targets, planned as the device would."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_training import NUM_DEPTHS, SEQ_LEN, make_documents, recipe, sequences_of, training_module, weights_of

from mtp_train.data.pack import PackedSequence, count_targets, global_batches
from mtp_train.losses.chunked import depth_weights
from mtp_train.runs.settings import plan_of
from mtp_train.train.head_training import MicroBatch
from mtp_train.train.loop import micro_batches
from mtp_train.train.plan import Plan
from mtp_train.train.shard import ShardedStates
from mtp_train.trunk.states import Forwards, TrunkStates
from tiny import rows_on, tiny_trunk


def batches(plan: Plan) -> Any:
    return global_batches(
        make_documents(16, 9, 14, 11, 7, 12, 5, 8),
        seq_len_tokens=SEQ_LEN,
        pack=True,
        sequences_per_step=plan.sequences_per_step,
        seed=0,
    )


def prepared_by(rank: int, world: int, sequences: list[PackedSequence], *, in_shards: bool = False) -> list[MicroBatch]:
    """Return a process's micro-batches of one sequence each."""
    used = recipe(train__micro_batch_sequences=1)
    accelerator: Any = SimpleNamespace(process_index=rank, device=torch.device("cpu"))
    states = (ShardedStates if in_shards else TrunkStates)(tiny_trunk("qwen3_5"))
    return list(micro_batches(sequences, plan_of(used, world), weights_of(used), accelerator, states))


def four_sequences() -> list[PackedSequence]:
    """Return a sequence of one document, and three of two that do not fit one pass."""
    (long,) = sequences_of(make_documents(SEQ_LEN), pack=True)
    (pair,) = sequences_of(make_documents(9, 7), pack=True)
    return [long, pair, pair, pair]


@pytest.mark.parametrize("world", [1, 2])
def test_the_micro_batches_of_all_processes_are_the_step(world: int) -> None:
    sequences = four_sequences()
    made = [prepared_by(rank, world, sequences) for rank in range(world)]
    rows = [one.batch.tokens_BT[0].tolist() for together in zip(*made, strict=True) for one in together]
    assert rows == [sequence.input_ids_T.tolist() for sequence in sequences]
    targets_K = np.sum([count_targets(one, NUM_DEPTHS) for one in sequences], axis=0)
    weights = np.array(depth_weights(NUM_DEPTHS, 0.6))
    for one in made[0]:
        # Undone by averages over micro-batches and over processes.
        assert one.scale_K.tolist() == pytest.approx((len(sequences) * weights / targets_K).tolist(), rel=1e-6)


def test_what_the_host_knows_is_what_the_device_would_find() -> None:
    module = training_module()
    for one in prepared_by(0, 1, four_sequences()):
        rows = rows_on(module.ends, module.head, one.batch, NUM_DEPTHS)
        assert one.used_N is not None
        assert torch.equal(one.used_N, rows.valid_KN.any(dim=0).nonzero().squeeze(1))
        assert one.prepared is not None
        hidden = [module.states(one.batch.tokens_BT, one.batch.document_BT, given) for given in (one.prepared, None)]
        assert torch.equal(*hidden)
        known, looked_for = (module(given) for given in (one, MicroBatch(one.batch, one.scale_K)))
        assert all(torch.equal(*pair) for pair in zip(known, looked_for, strict=True))
    assert one.used_N is not None
    assert not torch.equal(module(replace(one, used_N=one.used_N[1:])).total, known.total)


def passes(made: list[MicroBatch]) -> list[Forwards]:
    return [one.prepared for one in made if isinstance(one.prepared, list)]


def test_processes_that_share_a_trunk_make_as_many_passes_each() -> None:
    made = [passes(prepared_by(rank, 2, four_sequences(), in_shards=True)) for rank in range(2)]
    assert [[sum(map(bool, one)) for one in each] for each in made] == [[1, 2], [2, 2]]
    assert [[len(one) for one in each] for each in made] == [[2, 2], [2, 2]]
    alone = passes(prepared_by(0, 2, four_sequences()))
    assert [len(one) for one in alone] == [1, 2]
