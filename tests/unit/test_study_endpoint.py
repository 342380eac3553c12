"""A served model gets the same figures as the same model in this process, unless its counters include other work."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from rich.progress import Progress

from byte_tokenizer import byte_tokenizer
from drafting_server import Dialect, DraftingServer
from mtp_inference import Request, SpeculativeDecoder
from mtp_train.answers import endpoint as endpoint_module
from mtp_train.answers.generate import noise_seed
from mtp_train.data.tokenize import Prompt
from mtp_train.errors import DataError
from mtp_train.evaluation.decoding import record_of
from mtp_train.evaluation.grid import EvaluationGrid, greedy
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import ALL_TASKS, Cell, Report
from mtp_train.evaluation.served import Server, connect, measure_endpoints
from mtp_train.evaluation.statistics import MeasuredArm, Measurements, Served, assemble, make_cells
from mtp_train.report.tables import task_matrices
from mtp_train.report.wording import format_estimate, serving_sentences
from mtp_train.trunk.load import Trunk
from openai_server import Reply, ReplyFn, completion, openai_server
from scripted import ScriptedDrafting, plain_texts, random_prompt
from tiny import tiny_trunk

TOKENIZER = byte_tokenizer()
VOCAB_SIZE = 259
DEPTH, NEW_TOKENS, SEED = 3, 10, 7
NUM_RIGHT = (3, 0, 2, 1, 3)
PROMPTS = [
    Prompt(
        id=f"p{number}",
        group=f"g{number}",
        prompt_ids=tuple(random_prompt(4 + number, number)),
        task="math" * (number % 2) or "code",
    )
    for number in range(5)
]


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return tiny_trunk("glm4_moe", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def drafting(trunk: Trunk) -> ScriptedDrafting:
    texts = plain_texts(trunk, [prompt.prompt_ids for prompt in PROMPTS], 2 * NEW_TOKENS)
    return ScriptedDrafting(texts, NUM_RIGHT)


@pytest.fixture(scope="module")
def eos_ids(drafting: ScriptedDrafting) -> list[int]:
    """One text ends within a round, in front of accepted drafts."""
    return [drafting.texts[PROMPTS[0].prompt_ids][5]]


def measure(
    url: str,
    eos_ids: Sequence[int],
    *,
    concurrency: int = 1,
    api_key_env: str | None = None,
    **grid: Any,
) -> Served:
    server = Server(
        url=url,
        checkpoint="",
        model=None,
        api_key_env=api_key_env,
        concurrency=concurrency,
    )
    settings = EvaluationGrid(**{"temperatures": [0.0], "max_new_tokens": NEW_TOKENS, "seed": SEED} | grid)
    client = connect(server, TOKENIZER, eos_ids, VOCAB_SIZE)
    client.wait = lambda seconds: None
    with Progress(disable=True) as progress, closing(client) as endpoint:
        (found,) = measure_endpoints({server: endpoint}, PROMPTS, settings, progress).values()
        return found


@contextmanager
def serving(server: DraftingServer, reply: ReplyFn | None = None) -> Iterator[str]:
    with openai_server(reply or server.reply, owner=server.dialect, shows=server.shows) as served:
        yield served.url


def in_process(trunk: Trunk, drafting: ScriptedDrafting, eos_ids: Sequence[int]) -> list[Cell]:
    """Return the cells of the same prompts, decoded here."""
    decoder = SpeculativeDecoder(trunk, drafting, DEPTH, eos_ids)
    decoded = {}
    for setting in (Setting(0.0, None, DEPTH, "greedy"), Setting(0.8, None, DEPTH, "argmax")):
        records = []
        for prompt in PROMPTS:
            sampling = setting.sampling(noise_seed(prompt.id, SEED))
            request = Request(prompt_ids=prompt.prompt_ids, max_new_tokens=NEW_TOKENS, sampling=sampling)
            records += [record_of(prompt, result) for result in decoder.generate([request])]
        decoded[setting] = records
    return list(make_cells(MeasuredArm("served", "trunk", "head", decoded)))


COUNTED = (
    *("arm", "task", "temperature", "depth", "tau", "tau_ci95", "acceptance_rate", "marginal", "conditional"),
    *("rounds", "new_tokens", "prompts"),
)


@pytest.mark.parametrize(("dialect", "concurrency"), [("vllm", 1), ("llamacpp", 1), ("sglang", 4)])
def test_figures_are_those_of_the_same_decoder_in_this_process(
    trunk: Trunk,
    drafting: ScriptedDrafting,
    eos_ids: list[int],
    dialect: Dialect,
    concurrency: int,
) -> None:
    server = DraftingServer(trunk, drafting, DEPTH, eos_ids, dialect)
    with serving(server) as url:
        found = measure(url, eos_ids, temperatures=[0.0, 0.8], concurrency=concurrency)
    assert (found.document["warnings"], found.document["failures"]) == ([], [])
    expected = in_process(trunk, drafting, eos_ids)
    assert [(cell.task, cell.temperature) for cell in expected] == [
        (task, temperature) for temperature in (0.0, 0.8) for task in (ALL_TASKS, "code", "math")
    ]
    # llama-server sends text only.
    compared = COUNTED if dialect == "llamacpp" else (*COUNTED, "repeated_8gram_share")
    for cell, own in zip(found.cells, expected, strict=True):
        assert {name: getattr(cell, name) for name in compared} == {name: getattr(own, name) for name in compared}
        assert cell.rule == ("served" if cell.temperature else "greedy")
    assert (found.cells[0].tau or 0.0) > 1.5


def test_counters_of_requests_side_by_side_tell_the_acceptance_of_all(
    trunk: Trunk, drafting: ScriptedDrafting, eos_ids: list[int]
) -> None:
    server = DraftingServer(trunk, drafting, DEPTH, eos_ids, "vllm")
    with serving(server) as url:
        found = measure(url, eos_ids, concurrency=2)
    document = found.document
    cell = found.cells[0]
    assert (document["server"], document["drafts"], document["counts"]) == ("vllm", None, "responses")
    assert document["model"] == "trunk"
    assert ["no interval, above --concurrency 1" in one for one in document["warnings"]] == [True]
    assert cell.new_tokens == sum(len(result.token_ids) for result in server.results[1:])
    assert (cell.prompts, (cell.tokens_per_second or 0.0) > 0.0) == (len(PROMPTS), True)
    own = in_process(trunk, drafting, eos_ids)[0]
    assert (cell.tau, cell.rounds, cell.accepted_tokens) == (own.tau, own.rounds, own.accepted_tokens)
    assert (cell.tau_ci95, [one.tau for one in found.cells[1:]]) == (None, [None, None])


def test_no_prompt_is_found_in_a_cache(trunk: Trunk, drafting: ScriptedDrafting, eos_ids: list[int]) -> None:
    server = DraftingServer(trunk, drafting, DEPTH, eos_ids, "vllm")
    with openai_server(server.reply, owner="vllm", shows=server.shows) as served:
        measure(served.url, eos_ids, temperatures=[0.0, 0.8])
    salts = {payload["cache_salt"] for payload in served.payloads}
    assert len(salts) == len(served.payloads) == 2 * len(PROMPTS) + 1


# Counters that include other work


def test_counters_with_others_drafts_in_them_are_refused(
    trunk: Trunk, drafting: ScriptedDrafting, eos_ids: list[int]
) -> None:
    server = DraftingServer(trunk, drafting, DEPTH, eos_ids, "vllm", foreign_tokens=3)
    with (
        serving(server) as url,
        pytest.raises(DataError, match=r"generated \d+ tokens, \d+ of them for us \(5 prompts\)"),
    ):
        measure(url, eos_ids)


def test_counters_that_go_away_are_missed(trunk: Trunk, drafting: ScriptedDrafting, eos_ids: list[int]) -> None:
    server = DraftingServer(trunk, drafting, DEPTH, eos_ids, "vllm")
    shows = server.shows
    shows["/metrics"] = lambda: server.metrics() if len(server.results) < 3 else ""
    with (
        openai_server(server.reply, owner="vllm", shows=shows) as served,
        pytest.raises(DataError, match="no counters at /metrics after its responses; expected them as before"),
    ):
        measure(served.url, eos_ids)


# Servers that report less


@pytest.mark.parametrize(
    ("dialect", "drafts"), [("silent", None), ("vllm", False), ("llamacpp", False), ("sglang", False)]
)
def test_a_server_without_drafts_is_told_from_one_that_counts_none(
    trunk: Trunk, drafting: ScriptedDrafting, dialect: Dialect, drafts: bool | None
) -> None:
    head = drafting if drafts is None else None
    server = DraftingServer(trunk, head, DEPTH if head else 0, [], dialect)
    with serving(server) as url:
        found = measure(url, [], max_new_tokens=8)
    assert found.document["drafts"] is drafts
    assert [("does not count its drafts" in one) for one in found.document["warnings"]] == [True] * (drafts is None)
    cell = found.cells[0]
    assert (cell.tau, cell.rule, cell.head) == ((None, "greedy", url) if head else (1.0, "none", None))
    assert (cell.new_tokens, cell.draft_tokens, cell.acceptance_rate) == (8 * len(PROMPTS), 0, None)


# Speed


class Clock:
    """Stands still but while servers answer: a second for each prefill and each plain round."""

    def __init__(self) -> None:
        self.now = 0.0

    def timed(self, server: DraftingServer, seconds_per_round: float) -> ReplyFn:
        def reply(payload: dict[str, Any]) -> Reply:
            answer = server.reply(payload)
            self.now += 1.0 + server.results[-1].rounds * (seconds_per_round if server.drafting else 1.0)
            return answer

        return reply


def measure_beside_plain(
    trunk: Trunk, drafting: ScriptedDrafting, *loads: int, seconds_per_round: float = 1.25
) -> tuple[Report, list[str]]:
    """Return the report of a server that drafts and of one that does not, and the order of their requests."""
    clock, order = Clock(), list[str]()
    grid = EvaluationGrid(temperatures=[0.0], max_new_tokens=NEW_TOKENS, seed=SEED)
    measured: dict[str, Served] = {}

    def logged(name: str, server: DraftingServer) -> ReplyFn:
        timed = clock.timed(server, seconds_per_round)
        return lambda payload: (order.append(name), timed(payload))[1]

    for load in loads:
        with ExitStack() as stack:
            running = {}
            for name, of in (("plain", None), ("drafts", drafting)):
                server = DraftingServer(trunk, of, DEPTH if of else 0, [], "vllm")
                url = stack.enter_context(serving(server, logged(name, server)))
                arm = Server(name=f"{name}@{load}", url=url, checkpoint="trunk", concurrency=load)
                running[arm] = stack.enter_context(closing(connect(arm, TOKENIZER, [], VOCAB_SIZE)))
                running[arm].clock = lambda: clock.now
            with Progress(disable=True) as progress:
                measured |= measure_endpoints(running, PROMPTS, grid, progress)
    return assemble(Measurements(served=measured), greedy(DEPTH), {}, title="two servers"), order


def test_a_server_s_speed_is_that_of_its_requests_over_those_of_a_server_without_drafts(
    trunk: Trunk, drafting: ScriptedDrafting
) -> None:
    report, order = measure_beside_plain(trunk, drafting, 1)
    cells = {(one.arm, one.task): one for one in report.cells}
    for task in (ALL_TASKS, "code", "math"):
        cell = cells["drafts@1", task]
        assert cell.speedup == pytest.approx(cell.new_tokens / (cell.prompts + 1.25 * cell.rounds))
        assert cells["plain@1", task].speedup == 1.0
    cell = cells["drafts@1", ALL_TASKS]
    assert cell.speedup_ci95[0] < cell.speedup < cell.speedup_ci95[1]
    # Prefill is not told apart.
    plain_rounds = cell.new_tokens - cell.prompts
    assert cell.break_even_tau == pytest.approx((cell.prompts / cell.rounds + 1.25) * plain_rounds / cell.new_tokens)
    assert report.gate.settings[0].speedup == cell.speedup
    by_task = task_matrices(report)["Speedup by task"].groups[""]
    assert by_task == [
        (task, format_estimate(one.speedup, one.speedup_ci95))
        for task in ("code", "math")
        for one in [cells["drafts@1", task]]
    ]
    # One request each to warm up, then turns of four.
    assert order == ["plain", "drafts", *["plain"] * 4, *["drafts"] * 4, "drafts", "plain"]


@pytest.mark.parametrize(("seconds", "outcome"), [(1.0, "passed"), (4.0, "refused")])
def test_the_gate_judges_drafts_by_the_times_of_requests(
    trunk: Trunk, drafting: ScriptedDrafting, seconds: float, outcome: str
) -> None:
    report, _ = measure_beside_plain(trunk, drafting, 1, seconds_per_round=seconds)
    assert (report.gate.baseline, report.gate.outcome) == ("none", outcome)
    (told,) = serving_sentences(report)
    assert told.startswith("drafts pay: " if outcome == "passed" else "drafts do not pay: ")


def test_requests_side_by_side_have_a_speed_though_no_counts(trunk: Trunk, drafting: ScriptedDrafting) -> None:
    with pytest.raises(DataError, match="ask vLLM for one answer at a time first: --concurrency 1 4"):
        measure_beside_plain(trunk, drafting, 4)
    report, _ = measure_beside_plain(trunk, drafting, 1, 4)
    assert (report.gate.baseline, report.arms["plain@4"].speedup) == ("none", 1.0)
    arm = report.arms["drafts@4"]
    assert None not in (arm.speedup, arm.speedup_ci95)
    assert arm.break_even_tau is None
    assert [one.partition(":")[0] for one in serving_sentences(report)] == ["drafts@1", "drafts@4"]
    assert task_matrices(report)["Speedup by task"].columns == ("task", "drafts@1", "drafts@4")


# Failures


def test_failed_requests_are_counted_and_told(trunk: Trunk, drafting: ScriptedDrafting, eos_ids: list[int]) -> None:
    server = DraftingServer(trunk, drafting, DEPTH, eos_ids, "vllm")

    def reply(payload: dict[str, Any]) -> Reply:
        return Reply(400, b"no") if payload["prompt"] == list(PROMPTS[1].prompt_ids) else server.reply(payload)

    with serving(server, reply) as url:
        found = measure(url, eos_ids)
    reasons = {failure["prompt"]: failure["reason"] for failure in found.document["failures"]}
    assert reasons == {"p1": "answers 400 (no)"}
    assert found.cells[0].prompts == 4
    assert found.document["warnings"] == ["1 requests failed, p1 first: answers 400 (no)."]


def test_a_server_that_refuses_everything_is_an_error() -> None:
    with (
        openai_server(lambda payload: Reply(400, b"context of 4 tokens")) as served,
        pytest.raises(DataError, match=r"refuses all of 5 prompts .*p0: answers 400 \(context of 4 tokens\)\)"),
    ):
        measure(served.url, [0])


def test_a_key_that_is_not_there_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEY_OF_THE_TEST", raising=False)
    with pytest.raises(DataError, match=r"KEY_OF_THE_TEST is not set; expected .*--api-key-env"):
        measure("http://localhost/v1", [0], api_key_env="KEY_OF_THE_TEST")


def test_a_server_that_finishes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "STALL_SECONDS", 0.2)
    ended = threading.Event()
    answers = iter([completion("a")])

    def reply(payload: dict[str, Any]) -> Reply:
        # The warm-up is answered, then nothing.
        return next(answers, None) or (ended.wait(), completion())[1]

    with openai_server(reply) as served:
        try:
            with pytest.raises(DataError, match=r"finished none of its requests in .*; expected responses"):
                measure(served.url, [0], concurrency=2)
            with pytest.raises(DataError, match=r"finished none of its requests"):
                measure(served.url, [0])
        finally:
            ended.set()
