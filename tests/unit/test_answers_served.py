"""A server answers prompts, and a sample of its answers is checked before they are stored: they are the trunk's."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from byte_tokenizer import byte_tokenizer
from mtp_inference import Sampling
from mtp_train.answers import served as checked
from mtp_train.answers.endpoint import Endpoint
from mtp_train.answers.generate import Answering, missing_prompts
from mtp_train.answers.served import AnswerFit, Judge, allowance, fit_of, regenerate_served
from mtp_train.answers.store import RegeneratedStore
from mtp_train.data.tokenize import Prompt
from mtp_train.errors import CheckpointError, DataError
from mtp_train.trunk.load import Trunk
from openai_server import DECODING, Reply, ReplyFn, Served, completion, openai_server, served_by
from tiny import tiny_trunk

TOKENIZER = byte_tokenizer()
EOS = int(TOKENIZER.eos_token_id)
VOCAB_SIZE = 259
PROMPTS = [Prompt(f"f#{number:02d}", f"g{number}", (10 + number, 20, 30)) for number in range(18)]
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.4, top_p=0.95)
EVERY = 6


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "FIRST_CHECK", EVERY)
    monkeypatch.setattr(checked, "CHECK_EVERY", EVERY)
    monkeypatch.setattr(checked, "SAMPLE", 5)


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return tiny_trunk("llama", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def other() -> Trunk:
    return tiny_trunk("llama", seed=1, vocab_size=VOCAB_SIZE)


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand for a trunk of which any responses are accepted."""
    monkeypatch.setattr(checked, "fit_of", lambda *_: AnswerFit(1, 1, found=1.0, expected=1.0, allowed=0.0))


@pytest.fixture(autouse=True)
def one_decodes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def guarded(*given: Any) -> AnswerFit:
        with DECODING:
            return fit_of(*given)

    monkeypatch.setattr(checked, "fit_of", guarded)


def answer(
    store: RegeneratedStore,
    reply: ReplyFn,
    trunk: Any = None,
    *,
    sampling: Sampling = GREEDY,
    concurrency: int = 1,
    told: list[tuple[int, int]] | None = None,
) -> tuple[tuple[int, list[str]], Served]:
    told = [] if told is None else told
    answering = Answering(max_new_tokens=32, seq_len_tokens=64, eos_ids={EOS}, sampling=sampling)
    with openai_server(reply) as served:
        endpoint = Endpoint(served.url, TOKENIZER, {EOS}, VOCAB_SIZE, concurrency=concurrency)
        endpoint.wait = lambda seconds: None
        with closing(endpoint):
            endpoint.choose_model(None)
            found = regenerate_served(
                missing_prompts(PROMPTS, store, 64),
                store,
                endpoint,
                answering,
                Judge.of(trunk),
                lambda done, total: told.append((done, total)),
            )
    return found, served


def echo(payload: dict[str, Any]) -> Reply:
    return completion(token_ids=[*payload["prompt"], EOS], prompt_tokens=3)


# The check


def switching(first: ReplyFn, second: ReplyFn, after: int) -> ReplyFn:
    """Answer as one model, and after so many requests as another."""
    asked: list[None] = []

    def reply(payload: dict[str, Any]) -> Reply:
        asked.append(None)
        return (first if len(asked) <= after else second)(payload)

    return reply


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_server_that_switches_its_model_is_noticed(
    sampling: Sampling, trunk: Trunk, other: Trunk, tmp_path: Path
) -> None:
    own = served_by(trunk, [EOS])
    others = served_by(other, [EOS])
    store = RegeneratedStore(tmp_path)
    with pytest.raises(
        DataError,
        match=r"answers that are not the trunk's: over 5 of its last 6 .*mean probability of 0\.\d+; expected \d\.\d+ "
        r"within 0\.\d+\. These 6 are dropped\.",
    ):
        answer(store, switching(own, others, 2 * EVERY), trunk, sampling=sampling)
    assert len(list(store)) == 2 * EVERY
    assert answer(store, own, trunk, sampling=sampling)[0][0] == EVERY, "the same command goes on from there"
    assert len(list(store)) == 3 * EVERY


def test_a_server_of_another_model_is_refused_at_once(trunk: Trunk, other: Trunk, tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path)
    asked = list[dict[str, Any]]()
    others = served_by(other, [EOS])

    def reply(payload: dict[str, Any]) -> Reply:
        asked.append(payload)
        return others(payload)

    with pytest.raises(DataError, match="answers that are not the trunk's"):
        answer(store, reply, trunk)
    assert list(store) == []
    # One more may be on its way.
    assert EVERY <= len(asked) <= EVERY + 1


def test_a_server_with_a_temperature_of_its_own_is_noticed(
    trunk: Trunk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_CHECK", "SAMPLE"):
        monkeypatch.setattr(checked, name, 12)
    own = served_by(trunk, [EOS])
    warm = Sampling(temperature=0.6, top_p=0.95)
    with pytest.raises(DataError, match="answers that are not the trunk's"):
        answer(
            RegeneratedStore(tmp_path),
            lambda payload: own({**payload, "temperature": 0.0}),
            trunk,
            sampling=warm,
        )


def test_which_of_several_tokens_ended_a_response_does_not_count(trunk: Trunk) -> None:
    own = int(trunk.logits(trunk.hidden(torch.tensor([[1, 2]])))[0, -1].argmax())

    def fit(ended_by: int, *eos_ids: int) -> AnswerFit:
        return fit_of(Judge.of(trunk), [((1, 2), (ended_by,))], GREEDY, eos_ids)

    assert fit(own, own, own + 1).found == fit(own + 1, own, own + 1).found == 1.0
    assert fit(own + 1, own).found == 0.0


def test_logits_that_are_not_finite_are_the_trunks_fault() -> None:
    broken = tiny_trunk("llama", vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        broken.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match="trunk: its logits after 4 tokens are NaN"):
        fit_of(Judge.of(broken), [((1, 2), (3, 4))], GREEDY, [EOS])


@pytest.mark.parametrize("rate", [0.2, 0.01])
def test_the_false_alarm_rate_holds(rate: float) -> None:
    """Over 20,000 texts of 50 tokens from sharp and flat distributions; half the allowance is too little."""
    generator = torch.Generator().manual_seed(0)
    p_TV = (torch.randn(50, 20, generator=generator) * torch.linspace(0, 6, 50)[:, None]).softmax(-1).double()
    mean_T = p_TV.square().sum(-1)
    variance = float((p_TV.pow(3).sum(-1) - mean_T.square()).sum())
    said_TN = torch.multinomial(p_TV, 20_000, replacement=True, generator=generator)
    off_N = (p_TV.gather(1, said_TN) - mean_T[:, None]).sum(0).abs()
    assert float((off_N > allowance(variance, rate)).double().mean()) <= rate
    assert float((off_N > 0.4 * allowance(variance, rate)).double().mean()) > rate


# The answers


@pytest.mark.usefixtures("believed")
def test_every_prompt_is_answered_and_stored(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    store = RegeneratedStore(tmp_path)
    together = threading.Barrier(3)

    def reply(payload: dict[str, Any]) -> Reply:
        # Broken, and then an error, unless three requests are here at once.
        together.wait(timeout=60)
        return echo(payload)

    found, served = answer(store, reply, concurrency=3, told=told)
    assert found == (18, [])
    rows = sorted(store, key=lambda row: row.id)
    assert [(row.id, row.prompt_ids, row.response_ids, row.finished) for row in rows] == [
        (prompt.id, prompt.prompt_ids, (*prompt.prompt_ids, EOS), True) for prompt in PROMPTS
    ]
    assert {row.seed for row in rows} == {payload["seed"] for payload in served.payloads}
    assert len({row.seed for row in rows}) == len(served.payloads) == 18
    assert told[-1] == (18, 18)


@pytest.mark.usefixtures("believed")
def test_processes_part_the_prompts_whatever_is_done_already(tmp_path: Path) -> None:
    parts = [missing_prompts(PROMPTS, RegeneratedStore(tmp_path, rank=rank, world=2), 64) for rank in (0, 1)]
    assert sorted((prompt for part in parts for prompt in part), key=lambda prompt: prompt.id) == PROMPTS
    answer(RegeneratedStore(tmp_path), lambda payload: echo(payload) if payload["prompt"][0] != 13 else Reply(400))
    assert missing_prompts(PROMPTS, RegeneratedStore(tmp_path, rank=0, world=2), 64) == []
    assert missing_prompts(PROMPTS, RegeneratedStore(tmp_path, rank=1, world=2), 64) == [PROMPTS[3]]


@pytest.mark.usefixtures("believed")
def test_refused_prompts_are_counted_and_asked_again_later(tmp_path: Path) -> None:
    def reply(payload: dict[str, Any]) -> Reply:
        return Reply(400, b"too long") if payload["prompt"][0] % 2 else echo(payload)

    store = RegeneratedStore(tmp_path)
    assert answer(store, reply)[0] == (9, ["answers 400 (too long)"] * 9)
    assert len(missing_prompts(PROMPTS, store, 64)) == 9
    # Prompts that are always refused do not prevent training on the other responses.
    assert answer(store, reply)[0] == (0, ["answers 400 (too long)"] * 9)
    with pytest.raises(DataError, match=r"refuses all of 18 prompts \(answers 400 \(no\)\); expected responses"):
        answer(RegeneratedStore(tmp_path / "none"), lambda payload: Reply(400, b"no"))


@pytest.mark.usefixtures("believed")
def test_what_was_answered_before_a_failure_is_stored(tmp_path: Path) -> None:
    left = iter(range(4))
    store = RegeneratedStore(tmp_path)
    with pytest.raises(DataError, match=r"answers 500 \(dead\), 8 times"):
        answer(store, lambda payload: echo(payload) if next(left, None) is not None else Reply(500, b"dead"))
    assert len(list(store)) == 4
