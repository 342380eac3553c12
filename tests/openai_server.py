"""A server of OpenAI's completions API in this process, on localhost, with replies that a test defines."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mtp_inference import Sampling, SpeculativeDecoder
from mtp_train.trunk.load import Trunk


@dataclass(frozen=True)
class Reply:
    """A reply; a ``Content-Length`` above the length of the body makes a body that is cut off."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """The address of a server, and the requests that it got."""

    url: str
    payloads: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    """The path of each payload."""


DECODING = threading.Lock()
"""Held while a server decodes: the decoder replaces functions of transformers meanwhile, for every thread."""

ReplyFn = Callable[[dict[str, Any]], Reply]


def completion(text: str = "", finish_reason: str | None = "stop", **more: Any) -> Reply:
    """Return a completion; ``prompt_tokens`` becomes part of its usage, all other values part of its one choice."""
    usage = {"prompt_tokens": more.pop("prompt_tokens")} if "prompt_tokens" in more else None
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, **more}
    return Reply(body=json.dumps({"choices": [choice], "usage": usage}).encode())


def served_by(trunk: Trunk, eos_ids: Sequence[int]) -> ReplyFn:
    """Return a function that replies like a server of a trunk: token ids for token ids."""
    decoder = SpeculativeDecoder(trunk, None, 0, eos_ids)

    def reply(payload: dict[str, Any]) -> Reply:
        top_k = max(payload["top_k"], 0)
        named = {name: payload[name] for name in ("temperature", "top_p", "min_p", "seed")}
        with DECODING:
            (result,) = decoder.generate(
                [payload["prompt"]], payload["max_tokens"], sampling=Sampling(top_k=top_k, **named)
            )
        return completion(
            finish_reason=result.finish_reason,
            token_ids=list(result.token_ids),
            prompt_tokens=len(payload["prompt"]),
        )

    return reply


@contextmanager
def openai_server(
    reply: ReplyFn,
    models: Sequence[str] = ("trunk",),
    *,
    owner: str = "test",
    shows: Mapping[str, Callable[[], str]] | None = None,
) -> Iterator[Served]:
    """Serve while the block runs; ``shows`` has texts under further paths."""
    shown = shows or {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path in shown:
                return self.answer(Reply(body=shown[self.path]().encode()))
            if self.path != "/v1/models":
                return self.answer(Reply(404))
            listed = [{"id": name, "object": "model", "owned_by": owner} for name in models]
            return self.answer(Reply(body=json.dumps({"object": "list", "data": listed}).encode()))

        def do_POST(self) -> None:
            assert self.path in ("/v1/completions", "/generate")
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.payloads.append(payload)
            served.headers.append(dict(self.headers.items()))
            served.paths.append(self.path)
            self.answer(reply(payload))

        def answer(self, answer: Reply) -> None:
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, *_: Any) -> None:
            """Keep the terminal clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Served(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
