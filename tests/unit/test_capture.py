"""Captured rounds, without a GPU: a graph that records every operation of a round and runs them again.

A round that keeps Python state, or that builds a tensor from values it has seen, says at every replay what it said when
it was recorded (see ``recorded_graph.py``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import mtp_inference.capture
import mtp_inference.decoder
import mtp_inference.drafters.drafter
import mtp_inference.session
import scripted
from mtp_inference import GenerationResult, HeadDrafting, Request, Sampling, SpeculativeDecoder
from mtp_inference.batch import Batch
from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.capture import Rounds, round_up
from mtp_inference.drafters.drafter import BatchSize, Drafter, Drafting, RoundPlan
from mtp_inference.rule import first_broken
from mtp_inference.sampling import distributions
from mtp_inference.sampling.chooser import Chooser, DraftChoice, Drafts
from mtp_train.trunk.load import Trunk
from plain_decoding import plain_greedy
from recorded_graph import DEFAULT_STREAM, RecordedDevice, RecordedGraph, stand_in
from scripted import RereadingDrafter, RereadingDrafting, random_prompt
from tiny import FAMILY_NAMES, VOCAB_SIZE, nearly_tiny, tiny_head, tiny_trunk


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedDevice:
    """Put the stand-ins in place; return the device."""

    # An outcome is copied at once, as a GPU's is: the next replay writes over the original.
    monkeypatch.setattr(mtp_inference.session, "read_later", lambda outcome: outcome.clone().tolist)
    return stand_in(monkeypatch)


@pytest.fixture
def graphs(recorded: RecordedDevice) -> list[RecordedGraph]:
    """Return the graphs that are made."""
    return RecordedGraph.made


@pytest.fixture
def as_on_a_gpu(graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Make decoders go the way they go on a GPU, with smaller steps; return the graphs they make."""
    monkeypatch.setattr(SpeculativeDecoder, "_on_gpu", True)
    monkeypatch.setattr(distributions, "reads_values", lambda _device: False)
    for module, step in (("capture", "FINE_STEP"), ("capture", "COARSE_STEP"), ("decoder", "GPU_CAPACITY_STEP")):
        monkeypatch.setattr(getattr(mtp_inference, module), step, 32)
    return graphs


trunk_of = functools.cache(tiny_trunk)


def prompt(num_tokens: int) -> list[int]:
    return random_prompt(num_tokens, num_tokens)


SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01)


def requests_of(depth: int, sampling: Sampling, lengths: tuple[int, ...] = (11, 4, 7)) -> list[Request]:
    return [
        Request(
            prompt_ids=prompt(length),
            max_new_tokens=13 + 2 * index,
            depth=max(depth - index, 0),
            sampling=dataclasses.replace(sampling, seed=index),
        )
        for index, length in enumerate(lengths)
    ]


def counts(results: list[GenerationResult]) -> list[tuple[tuple[int, ...], int, int, tuple[int, ...]]]:
    return [
        (result.token_ids, result.num_drafts, result.num_draft_tokens, result.accepted_per_pos) for result in results
    ]


def decoded(
    trunk: Trunk, drafting: Drafting | None, requests: list[Request], *, captures: bool
) -> list[GenerationResult]:
    """Decode on two rows, so that rows are filled again."""
    return SpeculativeDecoder(
        trunk, drafting, 3, (), draft_sampling="sampled", max_batch=2, captures=captures
    ).generate(requests)


def assert_replays_as_it_runs(
    trunk: Trunk, drafting: Drafting | None, requests: list[Request], graphs: list[RecordedGraph]
) -> None:
    """Compare a decoder that captures with one that does not."""
    eager = decoded(trunk, drafting, requests, captures=False)
    assert graphs == []
    decoder = SpeculativeDecoder(trunk, drafting, 3, (), draft_sampling="sampled", max_batch=2, records=True)
    replayed = decoder.generate(requests)
    assert counts(replayed) == counts(eager)
    assert [one.record and first_broken(one.token_ids, one.record) for one in replayed] == [None] * len(requests)
    assert sum(graph.num_replays for graph in graphs) >= 8
    assert decoder.captured_rounds == len(graphs)
    for request, result in zip(requests, replayed, strict=True):
        if request.sampling.temperature == 0.0:
            assert list(result.token_ids) == plain_greedy(trunk, request.prompt_ids, request.max_new_tokens, ())


DRAFTING: dict[str, Callable[[Trunk], Drafting | None]] = {
    **scripted.DRAFTING,
    "plain": lambda _: None,
    "reduced": lambda trunk: HeadDrafting(tiny_head(trunk), torch.arange(0, VOCAB_SIZE, 2)),
    "model": lambda trunk: RereadingDrafting(nearly_tiny(trunk.family.name)),
}


@pytest.mark.parametrize(
    ("name", "drafting", "sampling"),
    [
        *((name, drafting, Sampling()) for name in FAMILY_NAMES for drafting in DRAFTING),
        *((name, drafting, SAMPLED) for name, drafting in (("qwen3_5", "recursive"), ("qwen3_5", "model"))),
        *(("glm4_moe", drafting, SAMPLED) for drafting in ("chained", "ngram", "plain")),
        # Sliding windows and compressed keys.
        *((name, "model", Sampling()) for name in ("mistral", "qwen2", "deepseek_v4")),
    ],
)
def test_a_replayed_round_does_what_python_did(
    name: str, drafting: str, sampling: Sampling, as_on_a_gpu: list[RecordedGraph]
) -> None:
    trunk = trunk_of(name)
    assert_replays_as_it_runs(trunk, DRAFTING[drafting](trunk), requests_of(3, sampling), as_on_a_gpu)


def test_rounds_of_changing_depth_replay(as_on_a_gpu: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    depths = [3, 3, 0, 0, 3, 1, 1, 0, *[0] * 20, 3, 3, 1]
    for module in (mtp_inference.session, mtp_inference.drafters.drafter, mtp_inference.capture):
        monkeypatch.setattr(module, "PENDING_PLACES", 8)
    requests = [dataclasses.replace(one, mtp="auto", max_new_tokens=50) for one in requests_of(3, Sampling(), (9, 5))]
    results = []
    for captures in (False, True):
        schedule = iter(depths * 10)
        monkeypatch.setattr(mtp_inference.session, "batch_depth", lambda *_unused: next(schedule))  # noqa: B023
        results.append(
            decoded(trunk_of("qwen3_5"), RereadingDrafting(nearly_tiny("qwen3_5")), requests, captures=captures)
        )
    assert counts(results[0]) == counts(results[1])
    assert sum(graph.num_replays for graph in as_on_a_gpu) > 15


class FaultyDrafting(RereadingDrafting):
    """Draft with a model, and do something that a captured round must not do."""

    def __init__(self, model: Trunk, fault: str) -> None:
        super().__init__(model)
        self.fault = fault

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        return FaultyDrafter(self.model, size, self.fault)


class FaultyDrafter(RereadingDrafter):
    def __init__(self, model: Trunk, size: BatchSize, fault: str) -> None:
        super().__init__(model, size)
        self.fault = fault
        self.num_rounds = 0
        self.shift_B = torch.zeros(size.num_rows, dtype=torch.long)

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        tokens_BK = super().draft(plan, choice).tokens_BK
        self.num_rounds += 1
        if self.fault == "item":
            tokens_BK = tokens_BK + 0 * int(tokens_BK[0, 0].item())
        elif self.fault == "counter" and self.num_rounds % 2:
            tokens_BK = (tokens_BK + 1) % VOCAB_SIZE
        elif self.fault == "new tensor":
            # Every other draft is wrong, by a tensor that is replaced and not written.
            self.shift_B = 1 - self.shift_B
            tokens_BK = (tokens_BK + self.shift_B[:, None]) % VOCAB_SIZE
        return Drafts(tokens_BK)


def test_a_round_that_waits_for_the_device_is_named_and_the_process_goes_on_without_capturing(
    as_on_a_gpu: list[RecordedGraph], recorded: RecordedDevice
) -> None:
    """torch 2.11 leaves the capture's stream as the current one, and an allocator that must not be asked again."""
    trunk = trunk_of("qwen3_5")
    requests = requests_of(3, Sampling())
    plain = decoded(trunk, None, requests, captures=False)
    decoder = SpeculativeDecoder(trunk, FaultyDrafting(trunk, "item"), 3, ())
    # The reason, and not that ending the capture failed too.
    with pytest.warns(UserWarning, match=r"cannot be captured \(item: not permitted while a stream is capturing"):
        found = decoder.generate(requests)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert [graph.num_replays for graph in as_on_a_gpu] == [0]
    assert recorded.stream == DEFAULT_STREAM
    assert decoder.captured_rounds == 0
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
        torch.cuda.empty_cache()
    # Another decoder would capture, as its drafter has no fault. It warns no second time.
    found = decoded(trunk, RereadingDrafting(nearly_tiny("qwen3_5")), requests, captures=True)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert len(as_on_a_gpu) == 1


def test_captured_rounds_are_counted_over_all_batches_of_a_decoder(as_on_a_gpu: list[RecordedGraph]) -> None:
    decoder = SpeculativeDecoder(trunk_of("qwen3_5"), None, 0, ())
    decoder.generate([prompt(5)], 6)
    first = len(as_on_a_gpu)
    assert decoder.captured_rounds == first > 0
    # Other needs: another batch, whose rounds are captured anew, into memory of their own.
    as_on_a_gpu.clear()
    decoder.generate([prompt(5), prompt(6)], 6)
    assert decoder.captured_rounds == first + len(as_on_a_gpu) > first


@pytest.mark.parametrize("fault", ["counter", "new tensor"])
def test_a_drafter_that_keeps_python_state_is_found_out(fault: str, as_on_a_gpu: list[RecordedGraph]) -> None:
    trunk = trunk_of("qwen3_5")
    requests = requests_of(3, Sampling())
    eager, replayed = (
        decoded(trunk, FaultyDrafting(trunk, fault), requests, captures=captures) for captures in (False, True)
    )
    assert counts(replayed) != counts(eager)
    # Whatever is drafted, the text is the trunk's.
    assert [result.token_ids for result in replayed] == [result.token_ids for result in eager]


PLAN = RoundPlan(depth=3, used=100, pending=4, start=96)


@pytest.mark.parametrize(
    ("plan", "used", "pending"),
    [
        (PLAN, 1024, 4),
        # Less is pending where the round before drafted less deeply; more after rounds without drafts.
        (dataclasses.replace(PLAN, pending=1), 1024, 4),
        (dataclasses.replace(PLAN, pending=5), 1024, 32),
        (dataclasses.replace(PLAN, depth=0, pending=1), 1024, 1),
        (dataclasses.replace(PLAN, depth=0, pending=2), 1024, 32),
        (dataclasses.replace(PLAN, used=1024), 1024, 4),
        (dataclasses.replace(PLAN, used=1025), 2048, 4),
        (dataclasses.replace(PLAN, used=8192), 8192, 4),
        (dataclasses.replace(PLAN, used=8193), 12288, 4),
        (dataclasses.replace(PLAN, used=19000), 19500, 4),
    ],
)
def test_plans_are_rounded_up_to_few(plan: RoundPlan, used: int, pending: int) -> None:
    assert round_up(plan, 19500) == RoundPlan(plan.depth, used, pending, start=None)


class CountingBatch(Batch):
    """A batch that counts its rounds in Python and on the device."""

    def __init__(self) -> None:
        self.runs: list[RoundPlan] = []
        self.errors: list[BaseException] = []
        """Raised by the rounds to come, from the last one on."""
        self.counter = torch.zeros(1, 1, dtype=torch.long)
        self.cache = type("Capacity", (), {"capacity": 5000})()
        settings = [Sampling()]
        device = torch.device("cpu")
        self.chooser = Chooser(settings, "argmax", device)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> CountingBatch:
    """Return a batch whose rounds count, and do nothing else."""

    @torch.inference_mode()
    def count(batch: CountingBatch, plan: RoundPlan) -> Tensor:
        batch.runs.append(plan)
        if len(batch.runs) > 1 and batch.errors:
            raise batch.errors.pop()
        return batch.counter.add_(1) + 0

    monkeypatch.setattr(mtp_inference.capture, "run_round", count)
    return CountingBatch()


def test_a_round_runs_then_is_captured_then_replayed(counting: CountingBatch, graphs: list[RecordedGraph]) -> None:
    rounds = Rounds(counting, captures=True)
    rounded = round_up(PLAN, 5000)
    history = []
    for _ in range(4):
        outcome = rounds.run(PLAN).tolist()
        history.append((outcome, len(counting.runs), len(graphs), sum(graph.num_replays for graph in graphs)))
    # The counter on the device counts every round once, a captured one too.
    assert history == [([[1]], 1, 0, 0), ([[2]], 2, 1, 1), ([[3]], 2, 1, 2), ([[4]], 2, 1, 3)]
    assert counting.runs == [rounded, rounded]


def test_plans_that_round_up_alike_share_a_graph_and_others_do_not(
    counting: CountingBatch, graphs: list[RecordedGraph]
) -> None:
    rounds = Rounds(counting, captures=True)
    same = [PLAN, dataclasses.replace(PLAN, used=900), dataclasses.replace(PLAN, pending=2, start=None)]
    others = [
        dataclasses.replace(PLAN, depth=2),
        dataclasses.replace(PLAN, used=1025),
        dataclasses.replace(PLAN, pending=9),
        dataclasses.replace(PLAN, depth=0),
    ]
    for plan in same:
        rounds.run(plan)
    assert (len(counting.runs), len(graphs)) == (2, 1)
    for number, plan in enumerate(others, start=2):
        for _ in range(3):
            rounds.run(plan)
        assert (len(counting.runs), len(graphs)) == (2 * number, number)
    # The settings of the rows belong to the key as far as they choose what runs, not by their values.
    for sampling, number in (
        (SAMPLED, 6),
        (dataclasses.replace(SAMPLED, temperature=0.5, top_k=3, seed=8), 6),
        (Sampling(temperature=0.5), 7),
        (Sampling(), 7),
    ):
        counting.chooser.set_rows(slice(0, 1), [sampling])
        for _ in range(2):
            rounds.run(PLAN)
        assert len(graphs) == number
    assert counting.counter.item() == len(same) + 3 * len(others) + 8


def test_whatever_ends_a_capture_puts_the_stream_back(counting: CountingBatch, recorded: RecordedDevice) -> None:
    counting.errors = [KeyboardInterrupt()]
    rounds = Rounds(counting, captures=True)
    rounds.run(PLAN)
    with pytest.raises(KeyboardInterrupt):
        rounds.run(PLAN)
    assert recorded.stream == DEFAULT_STREAM


@pytest.mark.parametrize("num_errors", [1, 2])
def test_a_capture_without_memory_is_tried_once_more(
    num_errors: int, counting: CountingBatch, recorded: RecordedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: graph.recorder)
    counting.errors = [torch.OutOfMemoryError("no memory") for _ in range(num_errors)]
    rounds = Rounds(counting, captures=True)
    rounds.run(PLAN)
    warned = pytest.warns(UserWarning, match=r"captured \(no memory\)") if num_errors > 1 else nullcontext()
    with warned:
        rounds.run(PLAN)
    assert rounds.num_captured == 2 - num_errors
    assert rounds.captures == (num_errors == 1)
