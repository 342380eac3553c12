"""Batches that are prepared ahead are those of the step, in order, and their errors come at their step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from test_training import (
    NUM_DEPTHS,
    SEQ_LEN,
    make_documents,
    recipe,
    run_training,
    sequences_of,
    training_module,
    weights_of,
)
from torch import Tensor

from mtp_train.data.pack import PackedSequence, count_targets, global_batches
from mtp_train.errors import DataError
from mtp_train.losses.chunked import depth_weights
from mtp_train.runs.settings import plan_of, train_options
from mtp_train.train import feed
from mtp_train.train.feed import Feed, MicroBatch, Preparation, Prepared
from mtp_train.train.log import read_metrics
from mtp_train.train.loop import train_head
from mtp_train.train.packed_rows import Forwards, aligned_rows, isolated_hidden
from mtp_train.train.plan import Plan
from mtp_train.train.state import newest_whole_step

STEPS, EACH = 4, 2
TIMED = {"seconds", "tokens_per_second"}
ELSEWHERE = torch.device("meta")


@dataclass(frozen=True)
class Named:
    """A micro-batch that is only a name; ``seen`` notes what is done with it."""

    name: str
    seen: list[str]
    tensors: tuple[Tensor, ...] = ()

    def mapped(self, _change: Any) -> Named:
        self.seen.append(f"send {self.name}")
        return self


class Streams:
    """torch's module of a device with streams."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def Stream(self, _device: torch.device) -> str:
        return "copies"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.seen.append(f"on {stream}")
        yield

    def current_stream(self, _device: torch.device) -> Streams:
        return self

    def wait_stream(self, stream: str) -> None:
        self.seen.append(f"wait for {stream}")


def named_steps(seen: list[str], fails_at: str | None = None) -> Iterator[Prepared]:
    """Yield named micro-batches, two to a step."""
    for step in range(STEPS):
        for micro in range(EACH):
            name = f"{step}.{micro}"
            is_ahead = threading.current_thread() is not threading.main_thread()
            seen.append(f"make {name}{' ahead' if is_ahead else ''}")
            if name == fails_at:
                raise DataError(f"{name}: no data")
            yield Prepared(Named(name, seen), [step])  # type: ignore[arg-type, list-item]


def taken(one: Feed, count: int = EACH) -> list[str]:
    return [batch.name for batch in one.micro_batches(count)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", [torch.device("cpu"), ELSEWHERE], ids=str)
def test_every_micro_batch_is_made_and_sent_once_in_order(device: torch.device) -> None:
    seen: list[str] = []
    names = [f"{step}.{micro}" for step in range(STEPS) for micro in range(EACH)]
    steps, found = list[Any](), list[str]()
    with Feed(named_steps(seen), device) as one:
        for _ in range(STEPS):
            steps += one.sequences()
            found += taken(one)
    assert (steps, found) == (list(range(STEPS)), names)
    ahead = " ahead" if device == ELSEWHERE else ""
    made = [what for what in seen if what.startswith("make")]
    assert made == ["make 0.0", *(f"make {name}{ahead}" for name in names[1:])]
    assert [what for what in seen if what.startswith("send")] == [f"send {name}" for name in names]


def test_on_a_cpu_nothing_is_made_before_it_is_needed() -> None:
    seen: list[str] = []
    with Feed(named_steps(seen), torch.device("cpu")) as one:
        for batch in one.micro_batches(2):
            seen.append(f"compute {batch.name}")  # type: ignore[attr-defined]
    assert seen == [what for name in ("0.0", "0.1") for what in (f"make {name}", f"send {name}", f"compute {name}")]


def ready(one: Feed) -> None:
    """Wait until the next micro-batch is made."""
    assert one._making is not None
    wait([one._making])


def test_copies_overlap_the_work_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(feed, "streams_of", lambda _device: Streams(seen))
    with Feed(named_steps([]), ELSEWHERE) as one:
        one.sequences()
        for step in range(2):
            for batch in one.micro_batches(EACH):
                seen.append(f"compute {batch.name}")  # type: ignore[attr-defined]
                ready(one)
            seen.append(f"wait for step {step}")
    # The stream that computes waits for a copy right before the work that needs it. The copy of the next step's first
    # micro-batch begins before the host waits for this step.
    copied, arrived = "on copies", "wait for copies"
    assert seen[:3] == [copied, arrived, "compute 0.0"]
    assert seen[3:8] == [copied, arrived, "compute 0.1", copied, "wait for step 0"]
    assert seen[8:] == [arrived, "compute 1.0", copied, arrived, "compute 1.1", copied, "wait for step 1"]


@pytest.mark.parametrize("device", [torch.device("cpu"), ELSEWHERE], ids=str)
@pytest.mark.parametrize("fails_at", ["1.0", "1.1"])
def test_an_error_is_raised_where_its_micro_batch_is_needed(fails_at: str, device: torch.device) -> None:
    with Feed(named_steps([], fails_at), device) as one:
        assert taken(one) == ["0.0", "0.1"]
        if device == ELSEWHERE and fails_at == "1.0":
            ready(one)
        with pytest.raises(DataError, match=f"{fails_at}: no data"):
            taken(one)


def test_the_thread_ends_with_the_context() -> None:
    before = threading.active_count()
    one = Feed(named_steps([]), ELSEWHERE)
    taken(one, 1)
    assert threading.active_count() == before + 1
    one.__exit__()
    assert threading.active_count() == before


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
    preparation = Preparation(plan_of(used, world), weights_of(used), rank, None, in_shards, pins=False)
    return [one.micro_batch for one in preparation.step(sequences)]


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
        rows = aligned_rows(module.trunk, module.head, one.batch, NUM_DEPTHS)
        assert torch.equal(one.known.used_N, rows.valid_KN.any(dim=0).nonzero().squeeze(1))
        assert one.known.forwards is not None
        hidden = [
            isolated_hidden(module.trunk, one.batch.tokens_BT, one.batch.document_BT, forwards=forwards)
            for forwards in (one.known.forwards, None)
        ]
        assert torch.equal(*hidden)
        known, looked_for = (
            module(*one.batch, one.scale_K, one.hidden_BTD, known=known) for known in (one.known, None)
        )
        assert all(torch.equal(*pair) for pair in zip(known, looked_for, strict=True))
    less = replace(one.known, used_N=one.known.used_N[1:])
    assert not torch.equal(module(*one.batch, one.scale_K, None, known=less).total, known.total)


def passes(made: list[MicroBatch]) -> list[Forwards]:
    return [one.known.forwards for one in made if one.known.forwards is not None]


def test_processes_that_share_a_trunk_make_as_many_passes_each() -> None:
    made = [passes(prepared_by(rank, 2, four_sequences(), in_shards=True)) for rank in range(2)]
    assert [[len(one.groups) for one in each] for each in made] == [[1, 2], [2, 2]]
    assert [[one.num_calls for one in each] for each in made] == [[2, 2], [2, 2]]
    alone = passes(prepared_by(0, 2, four_sequences()))
    assert [one.num_calls for one in alone] == [1, 2]


def test_every_tensor_is_put_into_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)

    class Cache:
        def rows(self, sequences: list[PackedSequence], *, pins: bool) -> Tensor:
            assert pins
            return torch.zeros(len(sequences), SEQ_LEN, 4)

    used = recipe()
    plan = plan_of(used, 1)
    preparation = Preparation(plan, weights_of(used), 0, Cache(), False, pins=True)  # type: ignore[arg-type]
    made = [one.micro_batch for one in preparation.step(batches(plan)(0))]
    tensors = [tensor for one in made for tensor in one.tensors]
    assert len(made[0].tensors) == 7
    assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in pinned]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare steps ahead on the CPU too."""
    monkeypatch.setattr(feed, "works_ahead", lambda _device: True)


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in TIMED} for line in read_metrics(directory)]


def test_a_run_that_is_fed_ahead_is_the_run_that_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, also where it is killed between two steps and resumed."""
    used = recipe(train__max_steps=5, train__save_steps=2, train__micro_batch_sequences=2)
    for name in ("in turn", "ahead", "killed"):
        (tmp_path / name).mkdir()
    expected = run_training(tmp_path / "in turn", used).head.state_dict()
    monkeypatch.setattr(feed, "works_ahead", lambda _device: True)
    found = run_training(tmp_path / "ahead", used).head.state_dict()
    with pytest.raises(KeyboardInterrupt):
        run_training(tmp_path / "killed", used, stop_after=3)
    resumed = run_training(tmp_path / "killed", used).head.state_dict()
    for name, value in expected.items():
        assert torch.equal(found[name], value)
        assert torch.equal(resumed[name], value)
    assert lines_of(tmp_path / "in turn") == lines_of(tmp_path / "ahead") == lines_of(tmp_path / "killed")


def train(directory: Path, batch_fn: Any, on_step: Any) -> None:
    used = recipe(train__max_steps=6, train__save_steps=1)
    plan = plan_of(used, 1)
    train_head(
        training_module(),
        options=train_options(used),
        plan=plan,
        batch_fn=batch_fn or batches(plan),
        accelerator=Accelerator(cpu=True, gradient_accumulation_steps=plan.accumulation),
        state_dir=directory / "state",
        make_log=lambda _step: None,
        on_step=on_step,
    )


@pytest.mark.usefixtures("ahead")
def test_data_that_fail_end_the_run_at_their_step(tmp_path: Path) -> None:
    error = DataError("broken")

    def batch_fn(step: int) -> list[PackedSequence]:
        if step == 3:
            raise error
        return list(batches(plan_of(recipe(), 1))(step))

    done: list[int] = []
    with pytest.raises(DataError) as raised:
        train(tmp_path, batch_fn, done.append)
    assert raised.value is error
    assert done == [0, 1, 2, 3]
    assert newest_whole_step(tmp_path / "state")[0] == 3
