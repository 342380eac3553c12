"""Pieces of a streamed response are joined and timed as they arrive; tokens are counted as the server reports them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from mtp_train.data.endpoint import BrokenStreamError, Streamed, read_streamed
from openai_server import Reply, completion, openai_server, streamed

Read = Callable[[Reply], Streamed]


@pytest.fixture
def read() -> Iterator[Read]:
    with ExitStack() as stack:

        def read_reply(reply: Reply) -> Streamed:
            served = stack.enter_context(openai_server(lambda payload: reply))
            url = f"{served.url}/completions"
            return read_streamed(stack.enter_context(httpx.stream("POST", url, json={}, timeout=10)), 0.0)

        yield read_reply


def piece(text: str, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {name: more.pop(name) for name in ("token_ids", "stop_reason") if name in more}
    return {"choices": [{"text": text, "finish_reason": finish_reason, **choice}], **more}


def tokens_of(found: Streamed) -> list[int | None]:
    return [arrival.tokens for arrival in found.arrivals]


def test_pieces_are_joined_and_their_tokens_counted(read: Read) -> None:
    first, second = piece("a", token_ids=[1]), piece("bcd", token_ids=[2, 3, 4])
    last = piece("", "stop", token_ids=[], stop_reason=9)
    found = read(streamed(first, second, last, {"choices": [], "usage": {"completion_tokens": 4}}))
    (choice,) = found.document["choices"]
    assert choice == {"index": 0, "text": "abcd", "finish_reason": "stop", "stop_reason": 9, "token_ids": [1, 2, 3, 4]}
    assert found.document["usage"] == {"completion_tokens": 4}
    assert tokens_of(found) == [1, 4]
    times = [arrival.seconds for arrival in found.arrivals]
    assert times == sorted(times)
    assert times[-1] <= found.seconds


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([{"usage": {"completion_tokens": 2}}, {"usage": {"completion_tokens": 5}}], [2, 5]),
        ([{"timings": {"predicted_n": 1}}, {"timings": {"predicted_n": 3}}], [1, 3]),
        # A piece of several tokens is not taken for one where the server is silent.
        ([{}, {}], [None, None]),
    ],
)
def test_tokens_are_those_that_the_server_tells(read: Read, told: list[dict[str, Any]], expected: list[int]) -> None:
    found = read(streamed(*(piece("text", **more) for more in told)))
    assert tokens_of(found) == expected
    assert "token_ids" not in found.document["choices"][0]


def test_a_token_without_text_is_an_arrival_and_an_empty_piece_is_none(read: Read) -> None:
    special = piece("", token_ids=[7])
    found = read(streamed(piece("", token_ids=[]), special, piece("", "length", token_ids=[])))
    assert tokens_of(found) == [1]


def test_events_are_read_however_they_are_cut(read: Read) -> None:
    body = (
        f": ping\r\n\r\ndata: {json.dumps(piece('ä'))}\r\n\r\ndata:{json.dumps(piece('b', 'stop'))}\n\ndata: [DONE]\n\n"
    )
    whole = body.encode()
    pieces = tuple(whole[start : start + 3] for start in range(0, len(whole), 3))
    found = read(Reply(headers={"Content-Type": "text/event-stream; charset=utf-8"}, pieces=pieces))
    assert found.document["choices"][0]["text"] == "äb"
    assert len(found.arrivals) == 2


def test_line_separators_inside_json_are_no_line_ends(read: Read) -> None:
    text = "a\u2028b\x85c"
    event = f"data: {json.dumps(piece(text, 'stop'), ensure_ascii=False)}\n\n"
    assert read(streamed(event)).document["choices"][0]["text"] == text


def test_a_stream_without_chunks_is_read(read: Read) -> None:
    body = f"data: {json.dumps(piece('a', 'stop'))}\n\n".encode()
    found = read(Reply(body=body, headers={"Content-Type": "text/event-stream"}))
    assert found.document["choices"][0]["text"] == "a"


def test_an_answer_in_one_piece_has_no_arrivals(read: Read) -> None:
    whole = completion("yes", prompt_tokens=3)
    found = read(Reply(body=whole.body, headers={"Content-Type": "application/json"}))
    assert (found.document, found.arrivals) == (json.loads(whole.body), ())


@pytest.mark.parametrize("incremental", [False, True])
def test_sglangs_own_pieces_become_those_of_completions(read: Read, incremental: bool) -> None:
    whole = [[4], [4, 5, 6], [4, 5, 6, 9]]
    sent = [[4], [5, 6], [9]] if incremental else whole
    pieces = [
        {"text": "x" * len(new), "output_ids": new, "meta_info": {"prompt_tokens": 2, "completion_tokens": len(so_far)}}
        for new, so_far in zip(sent, whole, strict=True)
    ]
    last: dict[str, Any] = pieces[-1]["meta_info"]  # type: ignore[assignment]
    last |= {"finish_reason": {"type": "stop", "matched": 9}, "spec_verify_ct": 2}
    found = read(streamed(*pieces))
    (choice,) = found.document["choices"]
    assert choice == {"index": 0, "text": "xxxx", "finish_reason": "stop", "matched_stop": 9, "token_ids": [4, 5, 6, 9]}
    assert tokens_of(found) == [1, 3, 4]
    assert found.document["usage"] == {"prompt_tokens": 2, "completion_tokens": 4}
    assert found.document["meta_info"]["spec_verify_ct"] == 2


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (streamed(piece("a", token_ids=[1, 2]), cut_off=True), "broke off"),
        (streamed(piece("a", token_ids=[1, 2]), "data: not json\n\n"), "broke off"),
        (streamed(piece("a", token_ids=[1, 2]), {"error": {"message": "no memory"}}), "answers an error .*no memory"),
        (streamed(piece("a", token_ids=[1, 2]), 'error: {"code": 500}\n\n'), "answers an error .*500"),
    ],
)
def test_a_response_without_its_end_says_how_far_it_came(read: Read, reply: Reply, reason: str) -> None:
    with pytest.raises(BrokenStreamError, match=reason) as caught:
        read(reply)
    assert caught.value.tokens == 2
