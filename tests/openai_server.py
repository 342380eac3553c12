"""A server of OpenAI's completions in this process, on localhost: it answers what a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mtp_inference import SpeculativeDecoder
from mtp_train.heads.trunk import Trunk


@dataclass(frozen=True)
class Reply:
    """What is sent back; a length above that of the body makes it a body that is cut off."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """Where the server is, and what it was asked."""

    url: str
    payloads: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


ReplyFn = Callable[[dict[str, Any]], Reply]


def completion(text: str = "", finish_reason: str | None = "stop", **more: Any) -> Reply:
    """Return a completion; ``prompt_tokens`` goes into its usage, everything else into its one choice."""
    usage = {"prompt_tokens": more.pop("prompt_tokens")} if "prompt_tokens" in more else None
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, **more}
    return Reply(body=json.dumps({"choices": [choice], "usage": usage}).encode())


def served_by(trunk: Trunk, eos_ids: Sequence[int]) -> ReplyFn:
    """Return a function that answers as a server of a trunk would: token ids for token ids, greedily."""
    decoder, lock = SpeculativeDecoder(trunk, None, 0, eos_ids), threading.Lock()

    def reply(payload: dict[str, Any]) -> Reply:
        with lock:
            (result,) = decoder.generate([payload["prompt"]], payload["max_tokens"])
        return completion(
            finish_reason=result.finish_reason,
            token_ids=list(result.token_ids),
            prompt_tokens=len(payload["prompt"]),
        )

    return reply


@contextmanager
def openai_server(reply: ReplyFn, models: Sequence[str] = ("trunk",)) -> Iterator[Served]:
    """Serve while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in models]}
            self.answer(Reply(body=json.dumps(listed).encode()))

        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.payloads.append(payload)
            served.headers.append(dict(self.headers.items()))
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
