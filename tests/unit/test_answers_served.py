from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from byte_tokenizer import byte_tokenizer
from mtp_train.answers.endpoint import GREEDY, Endpoint
from mtp_train.answers.generate import Answering, missing_prompts
from mtp_train.answers.served import AnswerFit, CheckedStore, ServedCounts, probe, regenerate_served
from mtp_train.answers.store import RegeneratedRow, RegeneratedStore
from mtp_train.data.tokenize import Prompt
from mtp_train.errors import DataError
from openai_server import Reply, ReplyFn, Served, completion, openai_server, served_by
from tiny import tiny_trunk

TOKENIZER = byte_tokenizer()
EOS = int(TOKENIZER.eos_token_id)
VOCAB_SIZE = 259
PROMPTS = [Prompt(f"f#{number:02d}", f"g{number}", (10 + number, 20, 30 + number)) for number in range(12)]


@contextmanager
def connected(reply: ReplyFn, concurrency: int = 4) -> Iterator[tuple[Endpoint, Served]]:
    with openai_server(reply) as served:
        endpoint = Endpoint(
            served.url, TOKENIZER, {EOS}, VOCAB_SIZE, concurrency=concurrency, wait=lambda seconds: None
        )
        endpoint.choose_model(None)
        yield endpoint, served
        endpoint.close()


def believed(rows: Sequence[RegeneratedRow]) -> AnswerFit:
    """Accept any responses as the trunk's."""
    return AnswerFit(len(rows), 1, found=1.0, expected=1.0, allowed=0.0)


def answer(
    store: RegeneratedStore, reply: ReplyFn, concurrency: int = 4, told: list[tuple[int, int]] | None = None
) -> tuple[ServedCounts, Served]:
    told = [] if told is None else told
    missing = missing_prompts(PROMPTS, store, 64)
    with connected(reply, concurrency) as (endpoint, served):
        counts = regenerate_served(
            missing,
            CheckedStore(store, believed, served.url),
            endpoint,
            GREEDY,
            Answering(max_new_tokens=8, seq_len_tokens=64, eos_ids={EOS}),
            lambda done, total: told.append((done, total)),
        )
    return counts, served


def echo(payload: dict[str, Any]) -> Reply:
    return completion(token_ids=[*payload["prompt"], EOS], prompt_tokens=3)


# The probe


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
def test_a_server_of_the_trunk_says_what_the_trunk_would_say(name: str) -> None:
    trunk = tiny_trunk(name, vocab_size=VOCAB_SIZE)
    with connected(served_by(trunk, [EOS])) as (endpoint, served):
        assert probe(endpoint, trunk, PROMPTS[:3], seq_len_tokens=64) == 1.0
    assert endpoint.prompts_as == "token ids"
    assert [payload["max_tokens"] for payload in served.payloads] == [61] * 3
    assert {payload["temperature"] for payload in served.payloads} == {0.0}


def test_a_server_of_another_model_is_refused() -> None:
    trunk, other = (tiny_trunk("glm4_moe", seed=seed, vocab_size=VOCAB_SIZE) for seed in (0, 1))
    with (
        connected(served_by(other, [EOS])) as (endpoint, _),
        pytest.raises(DataError, match=r"does not serve the trunk as trunk: \d+ of \d+ tokens .*expected 95% or more"),
    ):
        probe(endpoint, trunk, PROMPTS[:3], seq_len_tokens=64)


def test_a_server_that_is_close_to_the_trunk_is_refused_below_the_limit() -> None:
    trunk = tiny_trunk("glm4_moe", vocab_size=VOCAB_SIZE)
    exact = served_by(trunk, [EOS])

    def wrong_at(*places: int) -> ReplyFn:
        def reply(payload: dict[str, Any]) -> Reply:
            (choice,) = json.loads(exact(payload).body)["choices"]
            token_ids = [token + (index in places) for index, token in enumerate(choice["token_ids"])]
            return completion(finish_reason=choice["finish_reason"], token_ids=token_ids)

        return reply

    with connected(wrong_at(60)) as (endpoint, _):
        assert 0.95 < probe(endpoint, trunk, PROMPTS[:1], seq_len_tokens=64) < 1.0
    with connected(wrong_at(3, 20, 40)) as (endpoint, _), pytest.raises(DataError, match="does not serve the trunk"):
        probe(endpoint, trunk, PROMPTS[:1], seq_len_tokens=64)


def test_a_server_that_takes_text_alone_gets_text() -> None:
    trunk = tiny_trunk("glm4_moe", vocab_size=VOCAB_SIZE)
    exact = served_by(trunk, [EOS])

    def reply(payload: dict[str, Any]) -> Reply:
        if not isinstance(payload["prompt"], str):
            return Reply(400, b"prompt: expected a string")
        return exact({**payload, "prompt": TOKENIZER(payload["prompt"], add_special_tokens=False)["input_ids"]})

    text_prompts = [Prompt("a", "g", tuple(TOKENIZER("<|im_start|>hi")["input_ids"])), PROMPTS[0]]
    with connected(reply) as (endpoint, served):
        assert probe(endpoint, trunk, text_prompts, seq_len_tokens=64) == 1.0
    assert [isinstance(payload["prompt"], str) for payload in served.payloads] == [False, True, True]
    assert endpoint.prompts_as == "text"


def test_a_server_that_refuses_or_says_nothing_is_refused() -> None:
    trunk = tiny_trunk("glm4_moe", vocab_size=VOCAB_SIZE)
    with (
        connected(lambda payload: Reply(400, b"no")) as (endpoint, _),
        pytest.raises(DataError, match=r"answers 400 \(no\); expected a response to f#00\. Check the server's log"),
    ):
        probe(endpoint, trunk, PROMPTS, seq_len_tokens=64)
    with (
        connected(lambda payload: completion(finish_reason="length")) as (endpoint, _),
        pytest.raises(DataError, match="0 of 0 tokens"),
    ):
        probe(endpoint, trunk, PROMPTS, seq_len_tokens=64)


# The answers


def test_every_prompt_is_answered_and_stored(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    store = RegeneratedStore(tmp_path)
    counts, served = answer(store, echo, told=told)
    assert counts == ServedCounts(generated=12, refused=0, refusal=None)
    assert [(row.id, row.prompt_ids, row.response_ids, row.finished) for row in store.rows()] == [
        (prompt.id, prompt.prompt_ids, (*prompt.prompt_ids, EOS), True) for prompt in PROMPTS
    ]
    assert {row.seed for row in store.rows()} == {payload["seed"] for payload in served.payloads}
    assert len({row.seed for row in store.rows()}) == 12
    assert told[-1] == (12, 12)


def test_prompts_are_asked_side_by_side(tmp_path: Path) -> None:
    together = threading.Barrier(3)

    def reply(payload: dict[str, Any]) -> Reply:
        # Broken, and then an error, unless three requests are here at once.
        together.wait(timeout=60)
        return echo(payload)

    counts, served = answer(RegeneratedStore(tmp_path), reply, concurrency=3)
    assert counts.generated == len(served.payloads) == 12


def test_processes_part_the_prompts_whatever_is_done_already(tmp_path: Path) -> None:
    parts = [missing_prompts(PROMPTS, RegeneratedStore(tmp_path, rank=rank, world=2), 64) for rank in (0, 1)]
    assert sorted((prompt for part in parts for prompt in part), key=lambda prompt: prompt.id) == PROMPTS
    answer(RegeneratedStore(tmp_path), lambda payload: echo(payload) if payload["prompt"][0] != 13 else Reply(400))
    assert missing_prompts(PROMPTS, RegeneratedStore(tmp_path, rank=0, world=2), 64) == []
    assert missing_prompts(PROMPTS, RegeneratedStore(tmp_path, rank=1, world=2), 64) == [PROMPTS[3]]


def test_refused_prompts_are_counted_and_asked_again_later(tmp_path: Path) -> None:
    def reply(payload: dict[str, Any]) -> Reply:
        return Reply(400, b"too long") if payload["prompt"][0] % 2 else echo(payload)

    store = RegeneratedStore(tmp_path)
    counts, _ = answer(store, reply)
    assert counts == ServedCounts(generated=6, refused=6, refusal="answers 400 (too long)")
    assert len(missing_prompts(PROMPTS, store, 64)) == 6
    # Prompts that are always refused do not prevent training on the other responses.
    assert answer(store, reply)[0] == ServedCounts(generated=0, refused=6, refusal="answers 400 (too long)")
    with pytest.raises(DataError, match=r"refuses all of 12 prompts \(answers 400 \(no\)\); expected responses"):
        answer(RegeneratedStore(tmp_path / "none"), lambda payload: Reply(400, b"no"))
