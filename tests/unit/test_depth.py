"""The choice of depth against every fixed depth, in simulated rounds with given costs; nothing here waits or times."""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from mtp_inference import depth as depth_module
from mtp_inference.depth import Acceptance, DepthController, RoundCosts, batch_depth

MAX_DEPTH = 7
SEEDS = range(5)
Text = Callable[[int], Sequence[float]]
"""Conditional acceptance of each draft, by position in the text."""


def always(*acceptance: float) -> Text:
    return lambda position: acceptance


PREDICTABLE = always(*(0.9 - 0.05 * draft for draft in range(MAX_DEPTH)))
VERY_PREDICTABLE = always(*[0.95] * MAX_DEPTH)
UNPREDICTABLE = always(*[0.0] * MAX_DEPTH)


def switching(first: Text, second: Text, every: int = 200) -> Text:
    return lambda position: (second if position // every % 2 else first)(position)


@dataclass
class Machine:
    """What rounds take, and the noise in how that is measured. A plain round takes 1."""

    per_draft: float = 0.12
    noise: float = 0.05
    outlier_share: float = 0.03
    rounds_seen_late: int = 0

    def seconds(self, depth: int) -> float:
        return 1.0 + self.per_draft * depth

    def measured(self, depth: int, rng: random.Random) -> float:
        outlier = 10.0 if rng.random() < self.outlier_share else 1.0
        return self.seconds(depth) * max(rng.gauss(1.0, self.noise), 0.5) * outlier


@dataclass
class Decoder:
    """A decoder without a model: it keeps what requests share, and decodes texts of given acceptance."""

    machine: Machine = field(default_factory=Machine)
    seed: int = 0
    costs: RoundCosts = field(default_factory=RoundCosts)
    acceptance: Acceptance = field(default_factory=Acceptance)

    def after(self, texts: Sequence[Text]) -> Decoder:
        for text in texts:
            self.decode(text, 256)
        return self

    def decode(self, text: Text, num_tokens: int) -> PromptRecord:
        rng = random.Random(self.seed)
        self.seed += 1
        controller = DepthController(MAX_DEPTH, self.acceptance)
        unseen: deque[tuple[int, int]] = deque()
        done = PromptRecord(drawn(rng, num_tokens))
        while done.num_tokens < num_tokens:
            depth = next_depth(controller, self.costs)
            unseen.append((depth, done.run_round(text, depth, self.machine)))
            done.settled.append(-1 if controller.settled is None else controller.settled)
            while len(unseen) > self.machine.rounds_seen_late:
                drafted, accepted = unseen.popleft()
                self.costs.observe(1, drafted, self.machine.measured(drafted, rng))
                controller.observe(drafted, accepted)
        return done


@dataclass
class PromptRecord:
    """A text as far as it is decoded. Its luck decides which drafts are right where, independent of earlier drafts."""

    luck: Sequence[float]
    num_tokens: int = 0
    seconds: float = 0.0
    depths: list[int] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)

    def run_round(self, text: Text, depth: int, machine: Machine) -> int:
        chances = text(self.num_tokens)
        accepted = 0
        while accepted < depth and self.luck[self.num_tokens + accepted] < chances[accepted]:
            accepted += 1
        self.num_tokens += 1 + accepted
        self.seconds += machine.seconds(depth)
        self.depths.append(depth)
        return accepted

    @property
    def speed(self) -> float:
        """Tokens per second; plain decoding makes 1."""
        return self.num_tokens / self.seconds


def drawn(rng: random.Random, num_tokens: int) -> list[float]:
    return [rng.random() for _ in range(num_tokens + MAX_DEPTH + 1)]


def fixed(depth: int, luck: Sequence[float], text: Text, num_tokens: int) -> float:
    done = PromptRecord(luck)
    while done.num_tokens < num_tokens:
        done.run_round(text, depth, Machine())
    return done.speed


def against_the_best_fixed_depth(text: Text, num_tokens: int, before: Sequence[Text] = ()) -> list[float]:
    """Return, for each seed, the speed over that of the depth that is best over all seeds, on the same luck."""
    chosen = []
    rivals = []
    for seed in SEEDS:
        done = Decoder(seed=1000 * seed).after(before).decode(text, num_tokens)
        chosen.append(done.speed)
        rivals.append([fixed(depth, done.luck, text, num_tokens) for depth in range(MAX_DEPTH + 1)])
    best = max(range(MAX_DEPTH + 1), key=lambda depth: sum(speeds[depth] for speeds in rivals))
    return [speed / speeds[best] for speed, speeds in zip(chosen, rivals, strict=True)]


def measured_costs(num_rows: int = 1, **seconds: float) -> RoundCosts:
    """Return costs with some depths measured exactly: ``measured_costs(d0=1.0, d3=1.4)``."""
    costs = RoundCosts()
    for name, figure in seconds.items():
        for _ in range(4):
            costs.observe(num_rows, int(name[1:]), figure)
    return costs


def next_depth(controller: DepthController, costs: RoundCosts, num_rows: int = 1) -> int:
    """Return the depth of the next round of a request on its own."""
    return batch_depth([controller], costs, num_rows, controller.max_depth)


def knowing(*acceptance: float, max_depth: int = MAX_DEPTH) -> DepthController:
    """Return a controller that expects this conditional acceptance, 0.4 at least."""
    return DepthController(max_depth, Acceptance(acceptance))


@pytest.mark.parametrize("rounds_seen_late", [0, 1])
@pytest.mark.parametrize(
    "before",
    [(), (PREDICTABLE,) * 4, (VERY_PREDICTABLE,) * 4, (UNPREDICTABLE,) * 4, (UNPREDICTABLE, PREDICTABLE) * 3],
    ids=["first", "after predictable", "after very predictable", "after unpredictable", "mixed"],
)
def test_an_unpredictable_request_loses_at_most_3_percent(before: Sequence[Text], rounds_seen_late: int) -> None:
    for seed in SEEDS:
        decoder = Decoder(Machine(rounds_seen_late=rounds_seen_late), seed=1000 * seed).after(before)
        assert decoder.decode(UNPREDICTABLE, 256).speed >= 0.97


@pytest.mark.parametrize("rounds_seen_late", [0, 1])
@pytest.mark.parametrize("per_draft", [0.12, 2.0])
def test_probes_take_at_most_1_percent_of_the_time(per_draft: float, rounds_seen_late: int) -> None:
    decoder = Decoder(Machine(per_draft, 0.0, 0.0, rounds_seen_late))
    decoder.decode(UNPREDICTABLE, 64)
    decoder.costs = measured_costs(d0=1.0, d3=1.0 + 3 * per_draft)
    done = decoder.decode(UNPREDICTABLE, 500)
    learned = max((index for index, depth in enumerate(done.depths) if depth > 1), default=-1)
    assert 1 <= sum(done.depths[learned + 1 :]) <= 0.01 * len(done.depths) / per_draft


def test_drafts_that_gain_nothing_end_however_little_they_cost() -> None:
    """Hysteresis holds on to a depth, and the cost of plain rounds is old: a tie with them may hide a loss."""
    controller = knowing(0.9, max_depth=1)
    costs = measured_costs(d0=1.0, d1=1.01)
    assert next_depth(controller, costs) == 1
    for _ in range(30):
        controller.observe(1, 0)
    assert next_depth(controller, costs) == 0


@pytest.mark.parametrize("before", [(), (PREDICTABLE,) * 4, (UNPREDICTABLE,) * 4], ids=["first", "warm", "misled"])
@pytest.mark.parametrize("text", [PREDICTABLE, VERY_PREDICTABLE], ids=["predictable", "very"])
def test_requests_on_predictable_text_lose_little_to_learning(text: Text, before: Sequence[Text]) -> None:
    speeds = against_the_best_fixed_depth(text, 1024, before)
    assert statistics.mean(speeds) >= 0.97
    assert min(speeds) >= 0.93


@pytest.mark.parametrize("text", [always(0.5, 0.42, 0.35, *[0.3] * 4), always(*[0.3] * 7)], ids=["2", "1"])
def test_texts_in_between_come_near_the_best_depth(text: Text) -> None:
    assert statistics.mean(against_the_best_fixed_depth(text, 2048)) >= 0.97


@pytest.mark.parametrize("order", [1, -1], ids=["hard first", "easy first"])
def test_text_that_switches_beats_plain_decoding_and_every_fixed_depth(order: int) -> None:
    speeds = against_the_best_fixed_depth(switching(*(UNPREDICTABLE, PREDICTABLE)[::order]), 2000)
    assert min(speeds) >= 0.97
    assert statistics.mean(speeds) >= 1.05


def test_text_that_becomes_predictable_is_noticed_by_probes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = switching(UNPREDICTABLE, PREDICTABLE, every=250)
    for seed in SEEDS:
        assert statistics.mean(Decoder(seed=seed).decode(text, 500).depths[-40:]) >= 3
    # Negative control.
    monkeypatch.setattr(depth_module, "_PROBE_GAP_ROUNDS", 10**9)
    for seed in SEEDS:
        assert Decoder(seed=seed).decode(text, 500).depths[-250:] == [0] * 250


def rounds_until_drafts_end(seed: int) -> int:
    settled = Decoder(seed=seed).decode(switching(PREDICTABLE, UNPREDICTABLE, every=600), 800).settled
    # The last 200 tokens take a round each, less the drafts of the round that straddles the change.
    return next(index for index, depth in enumerate(settled[-195:]) if depth == 0)


def test_a_change_for_the_worse_is_noticed_sooner_than_the_memory_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert statistics.mean(rounds_until_drafts_end(seed) for seed in SEEDS) <= 12
    # Negative control.
    monkeypatch.setattr(depth_module, "_SURPRISE", 0.0)
    assert statistics.mean(rounds_until_drafts_end(seed) for seed in SEEDS) >= 30


def switches(text: Text) -> float:
    """Return the changes of the settled depth in 2000 tokens."""
    settled = [Decoder(seed=seed).decode(text, 2000).settled for seed in SEEDS]
    return statistics.mean(sum(a != b for a, b in pairwise(depths) if a >= 0) for depths in settled)


@pytest.mark.parametrize(
    ("text", "factor"),
    [(always(0.12, *[0.0] * 6), 1.1), (always(0.9, 0.85, 0.8, 0.75, 0.66, 0.5, 0.4), 2.0), (always(*[0.5] * 7), 2.0)],
    ids=["0 or 1", "4 or 5", "1 to 3"],
)
def test_where_two_are_as_good_it_rarely_changes(monkeypatch: pytest.MonkeyPatch, text: Text, factor: float) -> None:
    steady = switches(text)
    assert steady <= 30
    # Negative control. Between 0 and 1 probes limit the changes, too.
    monkeypatch.setattr(depth_module, "HYSTERESIS", 0.0)
    assert switches(text) >= factor * steady


def test_costs_are_measured_before_depths_are_compared() -> None:
    costs = RoundCosts()
    controller = DepthController(MAX_DEPTH, Acceptance())
    for expected in [0] * 4 + [3] * 4:
        assert next_depth(controller, costs) == expected
        costs.observe(1, expected, 1.0 + 0.1 * expected)
    assert costs.curve(1, 5)[5] == pytest.approx(1.5)
    # The next request does not measure again, only another batch size does.
    assert next_depth(DepthController(MAX_DEPTH, Acceptance()), costs) > 3
    assert next_depth(DepthController(MAX_DEPTH, Acceptance()), costs, 2) == 0
    assert next_depth(DepthController(2, Acceptance()), measured_costs(d0=1.0)) == 2
    assert next_depth(DepthController(0, Acceptance()), RoundCosts()) == 0


def test_costs_that_changed_are_measured_again() -> None:
    costs = measured_costs(d0=10.0, d3=11.0)
    for _ in range(600):
        costs.observe(1, 3, 1.1)
    assert next_depth(DepthController(MAX_DEPTH, Acceptance()), costs) == 0


def test_a_batch_takes_the_depth_that_is_best_for_all_rows_together() -> None:
    """Tokens of one row 1, 1.9, 2.71, of the other 1, 1.45, 1.63, of both 2, 3.35, 4.34; seconds 1, 1.5, 2."""
    costs = measured_costs(num_rows=2, d0=1.0, d2=2.0)
    easy = (0.9, 0.9)
    hard = (0.45, 0.4)
    assert batch_depth([knowing(*easy)], costs, 2, 2) == 2
    assert batch_depth([knowing(*hard)], costs, 2, 2) == 0
    assert batch_depth([knowing(*easy), knowing(*hard)], costs, 2, 2) == 1


def test_a_row_that_accepts_nothing_decides_if_it_ends_last() -> None:
    """Three rows accept 3 drafts of 3 and one none, and a round with drafts takes twice as long."""
    costs = measured_costs(num_rows=4, d0=1.0, d3=2.0)
    rows = [knowing(1.0, max_depth=3) for _ in range(3)] + [DepthController(3, Acceptance())]
    for _ in range(40):
        rows[-1].observe(3, 0)
    assert batch_depth(rows, costs, 4, 3, [100] * 4) == 0
    # It ends after 20 rounds of 25: 50 seconds instead of 100.
    assert batch_depth(rows, costs, 4, 3, [100, 100, 100, 20]) == 3
    # While requests wait, tokens per second count: 13 in 2 seconds instead of 4 in 1.
    assert batch_depth(rows, costs, 4, 3) == 3
    # A smaller batch is not measured again, and a larger one is.
    assert costs.depth_to_measure(3, 3) is None
    assert costs.depth_to_measure(5, 3) == 0


def test_a_row_with_a_cap_counts_with_what_it_may_draft() -> None:
    costs = measured_costs(num_rows=4, d0=1.0, d3=1.6)
    free = knowing(1.0)
    capped = knowing(1.0, max_depth=1)
    plain = knowing(1.0, max_depth=0)
    assert capped.expected_tokens(3) == [1.0, 2.0, 2.0, 2.0]
    assert plain.expected_tokens(3) == [1.0] * 4
    assert batch_depth([free, capped], costs, 4, 7) == 7
    assert batch_depth([free, capped], costs, 4, 2) == 2
    assert batch_depth([free, capped], costs, 4, 0) == 0
    # Three rows that may draft once, one that may go on: 4, 8, 9, ... 14 tokens at 1, 1.2, 1.4, ... 2.4.
    assert batch_depth([knowing(1.0), *(knowing(1.0, max_depth=1) for _ in range(3))], costs, 4, 7) == 1
    assert batch_depth([plain, plain], costs, 4, 7) == 0


@pytest.mark.parametrize("rounds_stayed", [400, 25], ids=["same rows", "one row changes"])
def test_one_probe_serves_all_rows_and_no_newcomer_forces_one(rounds_stayed: int) -> None:
    costs = measured_costs(num_rows=4, d0=1.0, d3=1.36)
    rows = [knowing(0.0) for _ in range(4)]
    for _ in range(20):
        for row in rows:
            row.observe(1, 0)
    depths = []
    for number in range(1, 401):
        depths.append(batch_depth(rows, costs, 4, MAX_DEPTH))
        for row in rows:
            row.observe(depths[-1], 0)
        if number % rounds_stayed == 0:
            rows[3] = knowing(0.0)
    assert set(depths) == {0, 1}
    assert 4 <= sum(depths) <= 16


def test_a_batch_of_unlike_rows_loses_little_to_the_best_fixed_depth() -> None:
    """Four rows share rounds; the speed of the batch is tokens of all rows per second."""
    texts = [PREDICTABLE, PREDICTABLE, always(*[0.4] * 7), UNPREDICTABLE]
    for seed in SEEDS:
        rng = random.Random(seed)
        costs, shared, machine = RoundCosts(), Acceptance(), Machine()
        controllers = [DepthController(MAX_DEPTH, shared) for _ in texts]
        rows = [PromptRecord(drawn(rng, 8000)) for _ in texts]
        for _ in range(800):
            depth = batch_depth(controllers, costs, len(texts), MAX_DEPTH)
            for text, controller, row in zip(texts, controllers, rows, strict=True):
                controller.observe(depth, row.run_round(text, depth, machine))
            costs.observe(len(texts), depth, machine.measured(depth, rng))
        speed = sum(row.num_tokens for row in rows) / rows[0].seconds
        # Best is a depth of 4, at which rounds of these texts make 3.736, 3.736, 1.65 and 1 tokens on average.
        assert speed >= 0.97 * 10.122 / machine.seconds(4)
