"""Responses that come in pieces: what a server sends while it works, and when each piece was there.

Server-sent events: OpenAI's completions, and SGLang's own ``/generate``, whose pieces say what its OpenAI pieces leave
out. A piece may hold several tokens (a round of drafts commits several at once, a busy server joins pieces), one or
none: tokens are counted by what the server says of them, never by the piece.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import requests

DONE = "[DONE]"
LASTING = ("usage", "metrics", "timings", "meta_info", "system_fingerprint")
"""What one piece says of the whole; a later one replaces it."""


class Arrival(NamedTuple):
    """A piece that held something."""

    seconds: float
    """Since the request was sent."""
    tokens: int | None
    """Tokens of the response up to here, this piece's among them; None where the server does not say."""


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """A whole response and how it came."""

    document: dict[str, Any]
    """What the same request would have returned in one piece."""
    arrivals: tuple[Arrival, ...]
    """Empty where it came in one piece."""
    seconds: float
    """Until its end."""


class BrokenStreamError(Exception):
    """Report a response that did not come to its end; ``tokens`` of it had come."""

    def __init__(self, reason: str, tokens: int) -> None:
        self.tokens = tokens
        super().__init__(reason)


def read_streamed(response: requests.Response, started: float) -> Streamed:
    """Read a response to its end.

    Args:
        response: Opened with ``stream=True``.
        started: ``time.perf_counter()`` when the request was sent.

    Raises:
        BrokenStreamError: It broke off, reports an error, or is no stream of JSON.
    """
    joined = _Joined()
    try:
        if "text/event-stream" not in response.headers.get("Content-Type", ""):
            return Streamed(document=response.json(), arrivals=(), seconds=time.perf_counter() - started)
        for data in _events(response):
            if data == DONE:
                break
            joined.add(json.loads(data), time.perf_counter() - started)
    except (requests.RequestException, ValueError) as error:
        raise BrokenStreamError(f"broke off ({type(error).__name__})", joined.tokens or 0) from None
    if joined.error is not None:
        raise BrokenStreamError(f"answers an error ({joined.error})", joined.tokens or 0)
    return Streamed(document=joined.document(), arrivals=tuple(joined.arrivals), seconds=time.perf_counter() - started)


def _events(response: requests.Response) -> Iterator[str]:
    """Yield the data of each event as soon as it is there."""
    lines: list[str] = []
    for raw in _lines(response):
        line = raw.decode("utf-8")
        if line.startswith("data:"):
            lines.append(line[5:].removeprefix(" "))
        elif not line and lines:
            yield "\n".join(lines)
            lines = []
        elif line.startswith("error:"):  # llama.cpp's, before it had OpenAI's form
            yield json.dumps({"error": line[6:].strip()})
    if lines:
        yield "\n".join(lines)


def _lines(response: requests.Response) -> Iterator[bytes]:
    """Yield lines without their ends, as they come."""
    # Without chunks any larger read would wait until it is full.
    size = None if response.raw.chunked else 1
    rest = b""
    for part in response.iter_content(chunk_size=size):
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)
    if rest:
        yield rest


@dataclass
class _Joined:
    """The pieces of one response so far."""

    text: str = ""
    token_ids: list[int] | None = None
    tokens: int | None = None
    ending: dict[str, Any] = field(default_factory=dict)
    lasting: dict[str, Any] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)
    error: str | None = None

    def add(self, piece: object, seconds: float) -> None:
        """Join a piece that came after ``seconds``."""
        if not isinstance(piece, dict):
            raise ValueError("a piece that is no object")
        if piece.get("error"):
            self.error = " ".join(json.dumps(piece["error"]).split())[:200]
            return
        self.lasting |= {name: piece[name] for name in LASTING if piece.get(name) is not None}
        if "meta_info" in piece:
            self._add_native(piece, seconds)
            return
        choices = [choice for choice in piece.get("choices") or [] if isinstance(choice, dict)]
        if not choices:
            return
        choice = choices[0]
        text, token_ids = choice.get("text") or "", choice.get("token_ids")
        self.text += text
        if token_ids is not None:
            self.token_ids = (self.token_ids or []) + list(token_ids)
        self.ending |= {
            name: choice[name]
            for name in ("finish_reason", "stop_reason", "matched_stop")
            if choice.get(name) is not None
        }
        before = self.tokens
        self.tokens = _tokens_told(piece, self.token_ids)
        if text or token_ids or (self.tokens or 0) > (before or 0):
            self.arrivals.append(Arrival(seconds, self.tokens))

    def _add_native(self, piece: Mapping[str, Any], seconds: float) -> None:
        """Join a piece of SGLang's ``/generate``: each tells the whole so far, or, where it is so started, the new."""
        told, new = piece["meta_info"], list(piece.get("output_ids") or [])
        before, self.tokens = self.tokens or 0, told.get("completion_tokens")
        whole = self.tokens is None or len(new) == self.tokens
        self.token_ids = new if whole else (self.token_ids or []) + new
        self.text = piece.get("text", "") if whole else self.text + piece.get("text", "")
        reason = told.get("finish_reason") or {}
        self.ending |= {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}
        self.lasting["usage"] = {name: told.get(name) for name in ("prompt_tokens", "completion_tokens")}
        if (self.tokens or 0) > before:
            self.arrivals.append(Arrival(seconds, self.tokens))

    def document(self) -> dict[str, Any]:
        """Return the response in one piece."""
        choice = {"index": 0, "text": self.text, "finish_reason": None, **self.ending}
        if self.token_ids is not None:
            choice["token_ids"] = self.token_ids
        return {"choices": [choice], **self.lasting}


def _tokens_told(piece: Mapping[str, Any], token_ids: list[int] | None) -> int | None:
    """Return the tokens up to and with a piece, as its server counts them."""
    told = (piece.get("usage") or {}).get("completion_tokens")
    if told is None:
        told = (piece.get("timings") or {}).get("predicted_n")
    if told is None and token_ids is not None:
        told = len(token_ids)
    return told
