from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from byte_tokenizer import OPENS, adding_tokenizer, byte_tokenizer
from mtp_inference import Request, Sampling
from mtp_train.answers.endpoint import MAX_ATTEMPTS, Endpoint, Refusal, Response
from mtp_train.errors import DataError
from openai_server import Reply, ReplyFn, Served, completion, openai_server

TOKENIZER = byte_tokenizer()
TURN, EOS = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
REQUEST = Request(
    prompt_ids=tuple(TOKENIZER("<|im_start|>hi")["input_ids"]), max_new_tokens=8, sampling=Sampling(seed=5)
)
GOOD = completion("yes", prompt_tokens=3)

Connect = Callable[..., tuple[Endpoint, Served, list[float]]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Start a server and open it; waiting is noted down and not done."""
    with ExitStack() as stack:

        def opened(
            reply: ReplyFn, models: tuple[str, ...] = ("trunk",), **settings: Any
        ) -> tuple[Endpoint, Served, list[float]]:
            served = stack.enter_context(openai_server(reply, models))
            waits = []
            # A tokenizer that opens raw text must not open a response.
            endpoint = Endpoint(served.url, adding_tokenizer(OPENS), {EOS}, 259, **settings)
            endpoint.wait = waits.append
            stack.callback(endpoint.close)
            return endpoint, served, waits

        yield opened


def in_turn(*replies: Reply) -> ReplyFn:
    left = iter(replies)
    return lambda payload: next(left)


def test_a_prompt_goes_as_token_ids_with_every_setting_that_a_server_has_a_default_for(connect: Connect) -> None:
    endpoint, served, _ = connect(lambda payload: GOOD, api_key="secret")
    endpoint.choose_model(None)
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
    endpoint.ask(replace(REQUEST, sampling=Sampling(**sampling, seed=5)))
    endpoint.ask(REQUEST)
    sampled, greedy = served.payloads
    assert sampled["prompt"] == list(REQUEST.prompt_ids)
    assert (sampled["model"], sampled["max_tokens"], sampled["seed"]) == ("trunk", 8, 5)
    assert sampled.items() >= sampling.items()
    assert sampled["stop_token_ids"] == [EOS]
    assert [sampled[f"{name}_penalty"] for name in ("repetition", "presence", "frequency")] == [1.0, 0.0, 0.0]
    assert (sampled["return_token_ids"], sampled["skip_special_tokens"], sampled["stream"]) == (True, False, False)
    assert [greedy[name] for name in sampling] == [0.0, 1.0, -1, 0.0]
    assert served.headers[0]["Authorization"] == "Bearer secret"


CUT_OFF = Reply(body=GOOD.body, headers={"Content-Length": str(len(GOOD.body) + 1)})


@pytest.mark.parametrize("failure", [Reply(500), Reply(503), Reply(429), CUT_OFF, Reply(body=b"<html>")])
def test_failures_that_may_pass_are_tried_again(connect: Connect, failure: Reply) -> None:
    endpoint, served, waits = connect(in_turn(failure, GOOD))
    answer = endpoint.ask(REQUEST)
    assert isinstance(answer, Response)
    assert answer.token_ids == [*ids("yes"), EOS]
    assert waits == [1.0]
    assert served.payloads[0] == served.payloads[1]


def test_waits_grow_until_it_gives_up(connect: Connect) -> None:
    endpoint, served, waits = connect(lambda payload: Reply(500, b"out  of\nmemory"))
    with pytest.raises(DataError, match=r"answers 500 \(out of memory\), 8 times; expected an answer\. .*same command"):
        endpoint.ask(REQUEST)
    assert waits == [1, 2, 4, 8, 16, 32, 60]
    assert len(served.payloads) == MAX_ATTEMPTS


def test_a_failed_request_is_not_sent_again_once_trying_is_stopped(connect: Connect) -> None:
    endpoint, served, _ = connect(lambda payload: Reply(503))
    endpoint.wait = lambda seconds: endpoint.stop_trying()
    with pytest.raises(DataError, match="answers 503"):
        endpoint.ask(REQUEST)
    assert len(served.payloads) == 1


def test_a_server_that_is_not_there_is_named() -> None:
    with openai_server(lambda payload: GOOD) as gone:
        pass
    waits: list[float] = []
    endpoint = Endpoint(gone.url, TOKENIZER, {EOS}, 259)
    endpoint.wait = waits.append
    with pytest.raises(DataError, match=rf"{gone.url}: does not answer \(ConnectError\), 8 times"):
        endpoint.choose_model(None)
    assert len(waits) == 7
    endpoint.close()


def test_a_request_that_fails_for_good_lets_those_in_flight_end_and_sends_nothing_more(connect: Connect) -> None:
    asked = threading.Event()
    failed = threading.Event()

    def reply(payload: dict[str, Any]) -> Reply:
        if payload["seed"]:
            assert asked.wait(10)
            failed.set()
            return Reply(404)
        asked.set()
        assert failed.wait(10)
        return GOOD

    endpoint, served, _ = connect(reply, concurrency=2)
    requests = [replace(REQUEST, sampling=Sampling(seed=seed)) for seed in (0, 1)]
    ended: list[Any] = []
    with pytest.raises(DataError, match="answers 404"):
        ended.extend(endpoint.answers(requests, endpoint.ask))
    assert [(number, answer.token_ids) for number, answer in ended] == [(0, [*ids("yes"), EOS])]
    assert len(served.payloads) == 2
    with pytest.raises(DataError, match="expected an answer"):
        endpoint.ask(REQUEST)
    assert len(served.payloads) == 2


@pytest.mark.parametrize("url", ["gopher://localhost/v1", "nowhere/v1", "http://[::1/v1"])
def test_an_address_that_cannot_be_asked_is_refused_at_once(url: str) -> None:
    endpoint = Endpoint(url, TOKENIZER, {EOS}, 259)
    endpoint.wait = lambda seconds: pytest.fail("waits")
    found = rf"^{re.escape(url)}: cannot be asked \(.*\); expected an address such as http://localhost:8000/v1\."
    with pytest.raises(DataError, match=found):
        endpoint.choose_model(None)
    endpoint.close()


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_server_that_cannot_be_used_is_refused_at_once(connect: Connect, status: int) -> None:
    endpoint, served, waits = connect(lambda payload: Reply(status, b"no"), api_key="secret")
    with pytest.raises(
        DataError, match=rf"answers {status} \(no\); expected .*Check the address, .* and the key"
    ) as caught:
        endpoint.ask(REQUEST)
    assert "secret" not in str(caught.value)
    assert (len(served.payloads), waits) == (1, [])


def test_a_prompt_that_is_not_taken_is_a_refusal(connect: Connect) -> None:
    endpoint, served, waits = connect(lambda payload: Reply(400, b'{"message": "context of 4 tokens"}'))
    assert endpoint.ask(REQUEST) == Refusal('answers 400 ({"message": "context of 4 tokens"})')
    assert (len(served.payloads), waits) == (1, [])


def test_the_model_is_the_one_that_is_wanted_or_the_only_one(connect: Connect) -> None:
    one, _, _ = connect(lambda payload: GOOD)
    one.choose_model(None)
    assert one.model == "trunk"
    two, _, _ = connect(lambda payload: GOOD, ("base", "lora"))
    two.choose_model("lora")
    assert two.model == "lora"
    with pytest.raises(DataError, match=r"serves base, lora; expected one model, or its name\. Name it"):
        two.choose_model(None)
    with pytest.raises(DataError, match=r"serves base, lora, not trunk; expected that model"):
        two.choose_model("trunk")


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (completion("yes", token_ids=[1, 2, EOS]), [1, 2, EOS]),
        (completion("yes", token_ids=[1, 2]), [1, 2, EOS]),
        (completion("yes", "length", token_ids=[1, 2]), [1, 2]),
        (completion("yes"), [*ids("yes"), EOS]),
        (completion("yes<|im_end|>"), [*ids("yes"), EOS]),
        (completion("", prompt_tokens=3), [EOS]),
        (completion("a long text", "length"), ids("a long t")),
        (completion("yes", stop_reason=TURN), [*ids("yes"), EOS]),
        (completion("yes", "abort"), Refusal("finish_reason 'abort'")),
        (completion("yes", None), Refusal("finish_reason None")),
    ],
)
def test_a_response_is_read_to_its_end(connect: Connect, reply: Reply, expected: object) -> None:
    endpoint, _, _ = connect(lambda payload: reply)
    answer = endpoint.ask(REQUEST)
    assert (answer.token_ids if isinstance(answer, Response) else answer) == expected


def test_the_end_is_the_token_that_the_server_tells() -> None:
    endpoint = Endpoint("http://localhost", TOKENIZER, {EOS, TURN}, 259)
    for told, ended_by in (("stop_reason", TURN), ("matched_stop", TURN), ("another", EOS)):
        choice = {"text": "", "finish_reason": "stop", told: TURN}
        answer = endpoint.response_of(REQUEST, {"choices": [choice]})
        assert isinstance(answer, Response)
        assert answer.token_ids == [ended_by]
    endpoint.close()


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (Reply(body=b"{}"), "answers without a text"),
        (Reply(body=b'{"choices": [{"message": {"content": "yes"}}]}'), "answers without a text"),
        (completion("yes", prompt_tokens=4), "reads 4 tokens where the prompt has 3; expected the trunk's tokenizer"),
        (completion("yes", token_ids=[1, 259]), "returns tokens that the trunk does not have"),
    ],
)
def test_answers_that_cannot_be_the_trunks_are_refused(connect: Connect, reply: Reply, found: str) -> None:
    endpoint, _, _ = connect(lambda payload: reply)
    with pytest.raises(DataError, match=found):
        endpoint.ask(REQUEST)
