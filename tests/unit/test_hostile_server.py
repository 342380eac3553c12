"""A server that redirects, echoes the key or answers any JSON: a right answer, or one message."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from byte_tokenizer import byte_tokenizer
from mtp_inference import Request
from mtp_train.answers.draft_counts import as_completion
from mtp_train.answers.endpoint import Endpoint, Refusal, Response
from mtp_train.errors import DataError, MtpError
from openai_server import Reply, openai_server

TOKENIZER = byte_tokenizer()
EOS = int(TOKENIZER.eos_token_id)
VOCAB_SIZE = 259
REQUEST = Request(prompt_ids=(10, 20, 30), max_new_tokens=8)
KEY = "the-servers-key-1234"


def asked(reply: Reply, **settings: Any) -> Response | Refusal:
    with openai_server(lambda payload: reply) as served:
        endpoint = Endpoint(served.url, TOKENIZER, {EOS}, VOCAB_SIZE, **settings)
        endpoint.choose_model(None)
        return endpoint.ask(REQUEST)


def test_a_redirect_is_not_followed_as_prompts_and_key_are_for_the_address_that_was_named() -> None:
    with pytest.raises(DataError, match=r"answers 307 \(.*\); expected OpenAI's completions there\. Check the address"):
        asked(Reply(status=307, headers={"Location": "http://other.example/v1/completions"}), api_key=KEY)


def test_an_error_that_echoes_the_key_or_steers_the_terminal_is_shown_without() -> None:
    refused = asked(Reply(status=400, body=f"\x1b]0;title\x07 Bearer {KEY} \u202e is unknown".encode()), api_key=KEY)
    assert isinstance(refused, Refusal)
    assert refused.reason == r"answers 400 (\x1b]0;title\x07 Bearer *** \u202e is unknown)"


# Any JSON


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"choices": {}},
        {"choices": [7]},
        {"choices": [{"text": None, "token_ids": ["a"]}]},
        {"choices": [{"token_ids": [1, 10**9], "finish_reason": "stop"}], "usage": 3},
        {"choices": [{"token_ids": [True, -1], "finish_reason": []}], "usage": {"completion_tokens": "2"}},
        {"text": [], "output_ids": 5, "meta_info": []},
        {"output_ids": [0.5], "meta_info": {"completion_tokens": None, "finish_reason": {"type": 1}}},
        {"error": {"code": []}, "timings": "x"},
    ],
    ids=str,
)
def test_odd_json_is_one_message_or_a_refusal(document: dict[str, Any]) -> None:
    endpoint = Endpoint("http://localhost/v1", TOKENIZER, {EOS}, VOCAB_SIZE)
    for one in (document, as_completion(document)):
        with suppress(DataError):
            assert isinstance(endpoint.response_of(REQUEST, one), Refusal)


# Messages


def test_a_message_shows_no_credentials_and_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "0123456789")
    monkeypatch.setenv("SHORT_TOKEN", "false")
    text = "https://me:pw@host/v1?api_key=abc&x=1 has 0123456789; false \x1b[2J\x9b\u202etab\t\n"
    shown = r"https://***@host/v1?api_key=***&x=1 has ***; false \x1b[2J\x9b\u202etab" + "\t\n"
    assert str(MtpError(text)) == shown
