"""A client of OpenAI's completions API, for vLLM, SGLang, llama.cpp and servers like them.

:class:`Endpoint` builds requests, sends them (again after failures that may pass) and returns response tokens.
:func:`read_streamed` reads a response that arrives in pieces, with the time of each piece.

- A prompt is sent as token ids, which vLLM, SGLang and llama.cpp accept, so that no template or tokenizer of the server
  can change it. A server that accepts only text gets the decoded text.
- vLLM and SGLang return responses as token ids (``return_token_ids``). Text from other servers is tokenised here.
- Every sampling setting is sent, because servers have other defaults: vLLM and SGLang read the checkpoint's
  generation_config.json, llama.cpp has its own.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import httpx

from mtp_train.data.regenerated import Question
from mtp_train.errors import DataError, printable, redacted
from mtp_train.trunk.tokenizer import raw_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DONE = "[DONE]"
LASTING = ("usage", "metrics", "timings", "meta_info", "system_fingerprint")
"""Keys of a piece that describe the whole response; a later piece replaces the value of an earlier one."""


class Arrival(NamedTuple):
    """The arrival of a piece that contained text or tokens."""

    seconds: float
    """Seconds since the request was sent."""
    tokens: int | None
    """Tokens of the response up to and including this piece; None if the server does not report it."""


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """A complete response and the arrival times of its pieces."""

    document: dict[str, Any]
    """The response as the same request would have returned it without streaming."""
    arrivals: tuple[Arrival, ...]
    """One entry per piece; empty if the response was not streamed."""
    seconds: float
    """Seconds from sending the request to the end of the response."""


class OversizedError(Exception):
    """Report a response of more than ``MAX_BODY_BYTES``."""


def _parts(response: httpx.Response) -> Iterator[bytes]:
    """Yield a response as it arrives, unpacked.

    Raises:
        OversizedError: It is too large: a server that sends without end must not fill the memory.
    """
    size = 0
    for part in response.iter_bytes():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise OversizedError(f"answers more than {MAX_BODY_BYTES >> 20} MiB")
        yield part


class BrokenStreamError(Exception):
    """Report a response that ended early, after ``tokens`` tokens."""

    def __init__(self, reason: str, tokens: int) -> None:
        self.tokens = tokens
        super().__init__(reason)


def read_streamed(response: httpx.Response, started: float) -> Streamed:
    """Read a response to its end.

    Args:
        response: Opened by ``httpx.stream``, its body unread.
        started: ``time.perf_counter()`` when the request was sent.

    Raises:
        BrokenStreamError: The response broke off, reports an error, or is no stream of JSON.
    """
    joined = _Joined()
    try:
        if "text/event-stream" not in response.headers.get("Content-Type", ""):
            document = _read_json(response, started)
            return Streamed(document=document, arrivals=(), seconds=time.perf_counter() - started)
        for data in _events(response):
            if data == DONE:
                break
            joined.add(json.loads(data), time.perf_counter() - started)
    except (httpx.HTTPError, ValueError, RecursionError) as error:
        raise BrokenStreamError(f"broke off ({type(error).__name__})", joined.tokens or 0) from None
    if joined.error is not None:
        raise BrokenStreamError(f"answers an error ({joined.error})", joined.tokens or 0)
    return Streamed(document=joined.document(), arrivals=tuple(joined.arrivals), seconds=time.perf_counter() - started)


def _events(response: httpx.Response) -> Iterator[str]:
    """Yield the data of each server-sent event as soon as it arrives."""
    lines: list[str] = []
    for raw in _lines(response):
        line = raw.decode("utf-8")
        if line.startswith("data:"):
            lines.append(line[5:].removeprefix(" "))
        elif not line and lines:
            yield "\n".join(lines)
            lines = []
        elif line.startswith("error:"):  # sent by older llama.cpp, before it used OpenAI's form
            yield json.dumps({"error": line[6:].strip()})
    if lines:
        yield "\n".join(lines)


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Yield lines as they arrive, without their line ends."""
    # httpx's `iter_lines` also splits at U+2028 and U+0085, which JSON strings may contain.
    rest = b""
    for part in _parts(response):
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)
    if rest:
        yield rest


@dataclass
class _Joined:
    """The pieces of one response that have arrived, joined."""

    text: str = ""
    token_ids: list[int] | None = None
    tokens: int | None = None
    ending: dict[str, Any] = field(default_factory=dict)
    lasting: dict[str, Any] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)
    error: str | None = None

    def add(self, piece: object, seconds: float) -> None:
        """Add a piece that arrived after ``seconds``."""
        if not isinstance(piece, dict):
            raise ValueError("a piece that is no object")
        if piece.get("error"):
            self.error = " ".join(json.dumps(piece["error"]).split())[:200]
            return
        self.lasting |= {name: piece[name] for name in LASTING if piece.get(name) is not None}
        if "meta_info" in piece:
            self._add_native(piece, seconds)
            return
        choices = _entries(piece, "choices")
        if not choices:
            return
        choice = choices[0]
        text, token_ids = choice.get("text") or "", choice.get("token_ids")
        if not isinstance(text, str) or not isinstance(token_ids, list | None):
            raise ValueError("a piece without text")
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
        """Add a piece of SGLang's ``/generate``.

        A piece holds the whole response so far, or only the new tokens if the server was started that way.
        """
        told, new = _object(piece["meta_info"]), piece.get("output_ids") or []
        if not isinstance(new, list) or not isinstance(piece.get("text", ""), str):
            raise ValueError("a piece without text")
        before, self.tokens = self.tokens or 0, _count(told.get("completion_tokens"))
        whole = self.tokens is None or len(new) == self.tokens
        self.token_ids = new if whole else (self.token_ids or []) + new
        self.text = piece.get("text", "") if whole else self.text + piece.get("text", "")
        reason = _object(told.get("finish_reason"))
        self.ending |= {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}
        self.lasting["usage"] = {name: told.get(name) for name in ("prompt_tokens", "completion_tokens")}
        if (self.tokens or 0) > before:
            self.arrivals.append(Arrival(seconds, self.tokens))

    def document(self) -> dict[str, Any]:
        """Return the response as if it had not been streamed."""
        choice = {"index": 0, "text": self.text, "finish_reason": None, **self.ending}
        if self.token_ids is not None:
            choice["token_ids"] = self.token_ids
        return {"choices": [choice], **self.lasting}


def _tokens_told(piece: Mapping[str, Any], token_ids: list[int] | None) -> int | None:
    """Return the server's count of tokens up to and including a piece."""
    told = _count(_object(piece.get("usage")).get("completion_tokens"))
    if told is None:
        told = _count(_object(piece.get("timings")).get("predicted_n"))
    return len(token_ids) if told is None and token_ids is not None else told


def _count(value: object) -> int | None:
    """Return a server's count; None in place of anything else."""
    return value if type(value) is int else None


MAX_ATTEMPTS = 8
LONGEST_WAIT_SECONDS = 60.0
CONNECT_TIMEOUT_SECONDS = 10.0
RESPONSE_TIMEOUT_SECONDS = 3600.0
STALL_SECONDS = 600.0
"""A server that finishes no request for so long is given up."""
LIST_TIMEOUT = httpx.Timeout(10.0, connect=CONNECT_TIMEOUT_SECONDS)
"""Of the list of models, which a server has at hand."""
LOOK_TIMEOUT = httpx.Timeout(30.0, connect=CONNECT_TIMEOUT_SECONDS)
MAX_BODY_BYTES = 2**26
"""The largest response, unpacked: 64 MiB, above any response of text."""
_DETAIL_BYTES = 2**12
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed."""

Answer = TypeVar("Answer")

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


class SettingNames(NamedTuple):
    """Names of the user's settings of a server, for messages."""

    url: str
    model: str
    api_key_env: str
    restart: str
    """What the user can do once a lost server is back."""


RECIPE_NAMES = SettingNames(
    "data.regenerate.endpoint",
    "data.regenerate.model",
    "data.regenerate.api_key_env",
    "then the same command resumes from here",
)


class StalledError(DataError):
    """Report a server that finishes nothing; its requests are not waited for."""


def in_thread(work: Callable[[], Answer]) -> Future[Answer]:
    """Do some work in a thread of its own, which does not keep the process alive: a server may never answer."""
    future: Future[Answer] = Future()

    def complete() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=complete, daemon=True).start()
    return future


class _LeavesHostError(Exception):
    """Report a redirect to another host."""


class Refusal(NamedTuple):
    """Why a server did not answer one prompt."""

    reason: str
    tokens: int = 0
    """Tokens of the response that arrived before the failure."""


def read_api_key(variable: str | None, names: SettingNames = RECIPE_NAMES) -> str | None:
    """Return the server's API key from an environment variable; None if no variable is named.

    Raises:
        DataError: The variable is not set, or is empty.
    """
    if variable is None:
        return None
    # A line end is not allowed in a header, and the error about it would print the key.
    key = os.environ.get(variable, "").strip()
    if not key:
        raise DataError(
            f"{names.api_key_env}: the variable {variable} is not set; expected the server's key in it. Set it, or "
            f"leave {names.api_key_env.rpartition('.')[2]} out."
        )
    return key


class Endpoint:
    """A client of one server.

    Args:
        url: The server's address, up to and including the API version (``http://host:8000/v1``).
        tokenizer: The trunk's tokenizer.
        eos_ids: The tokens that end a response.
        vocab_size: Size of the trunk's vocabulary.
        api_key: Sent as a bearer token; None sends no token.
        concurrency: Most requests at a time.
        timeout_seconds: Longest wait for a part of a response. A server sends nothing until a response is complete, and
            a busy one queues requests first.
        wait: Called to wait a number of seconds. The default returns after that time, or when :meth:`close` is called.
        names: Names of the settings in messages.
    """

    def __init__(
        self,
        url: str,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Collection[int],
        vocab_size: int,
        *,
        api_key: str | None = None,
        concurrency: int = 1,
        timeout_seconds: float = RESPONSE_TIMEOUT_SECONDS,
        wait: Callable[[float], object] | None = None,
        names: SettingNames = RECIPE_NAMES,
    ) -> None:
        self.url = url.rstrip("/")
        self.concurrency = concurrency
        self.model = ""
        # vllm, sglang, llamacpp, ...: `owned_by` of the model.
        self.served_with = ""
        self.prompts_as: Literal["token ids", "text"] = "token ids"
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = vocab_size
        self._names = names
        self._api_key = api_key
        self._timeout = httpx.Timeout(timeout_seconds, connect=CONNECT_TIMEOUT_SECONDS)
        self._closed = threading.Event()
        self.wait = wait or self._closed.wait
        self._lock = threading.Lock()
        self._in_flight = 0
        self._client = httpx.Client(
            # As bytes: httpx refuses text that is not ASCII.
            headers={} if api_key is None else {b"Authorization": f"Bearer {api_key}".encode()},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=concurrency),
            follow_redirects=True,
            event_hooks={"request": [self._stays]},
        )

    def _stays(self, request: httpx.Request) -> None:
        """Check a request, which a redirect may have made: prompts and key are for the host that the user named."""
        if request.url.host != httpx.URL(self.url).host:
            raise _LeavesHostError(f"redirects to {request.url.host}")

    def _shown(self, text: str) -> str:
        """Return text of the server for messages: without the key, should it send that back."""
        return printable(redacted(text.replace(self._api_key, "***") if self._api_key else text))

    def close(self) -> None:
        """End all waits and send nothing more. Requests in flight are read to their end, then connections close."""
        with self._lock:
            self._closed.set()
            if not self._in_flight:
                self._client.close()

    @contextmanager
    def _sending(
        self, method: str, url: str, payload: Mapping[str, Any] | None, timeout: httpx.Timeout
    ) -> Iterator[httpx.Response]:
        """Send one request and yield its response, whose body is still unread.

        Raises:
            httpx.HTTPError: The request failed, or the endpoint is closed.
        """
        with self._lock:
            if self._closed.is_set():
                raise httpx.CloseError("the endpoint is closed")
            self._in_flight += 1
        try:
            with self._client.stream(method, url, json=payload, timeout=timeout) as response:
                yield response
        finally:
            with self._lock:
                self._in_flight -= 1
                # The last request in flight closes the client: closing it earlier would break off the others.
                if self._closed.is_set() and not self._in_flight:
                    self._client.close()

    def first_finished(self, waiting: Collection[Future[Answer]]) -> Collection[Future[Answer]]:
        """Wait for requests that :func:`in_thread` has sent, and return those that are finished, at least one.

        Raises:
            StalledError: None of them finishes for ten minutes.
        """
        done, _ = wait(waiting, timeout=STALL_SECONDS, return_when=FIRST_COMPLETED)
        if not done:
            raise StalledError(
                f"{self._names.url}: {self.url} finished none of its requests in {STALL_SECONDS / 60:g} minutes; "
                f"expected responses. Check the server's log, {self._names.restart}."
            )
        return done

    def finish(self, work: Callable[[], Answer]) -> Answer:
        """Do the work of one request, within the same limit as :meth:`first_finished`."""
        (future,) = self.first_finished([in_thread(work)])
        return future.result()

    def models(self) -> list[str] | None:
        """Ask once for the names of the served models; None where no server answers.

        Raises:
            DataError: The server refuses access, or leads to another host.
        """
        try:
            with self._sending("GET", self.url + "/models", None, LIST_TIMEOUT) as response:
                if response.status_code in PASSING:
                    return None
                if response.status_code != 200:
                    self._refusal(response.status_code, f"answers {response.status_code}")
                    return []
                return [str(entry.get("id")) for entry in _entries(_read_json(response, 0.0), "data")]
        except _LeavesHostError as error:
            raise self._unusable(str(error), "no other host", "Write the address that it leads to") from None
        except (httpx.HTTPError, httpx.InvalidURL, OversizedError, ValueError, RecursionError):
            return None

    def choose_model(self, wanted: str | None) -> None:
        """Select the model that requests name.

        Args:
            wanted: Its name; None selects the only model that is served.

        Raises:
            DataError: The model is not served, or several are served and none was named.
        """
        document = self._request("GET", self.url + "/models", None, _read_json, LIST_TIMEOUT)
        if isinstance(document, Refusal):
            raise self._unusable(document.reason, "the list of its models", "Check the address, with its version")
        entries = _entries(document, "data")
        served = [str(entry.get("id")) for entry in entries]
        if wanted is None and len(served) != 1:
            found = f"serves {', '.join(served) or 'no model'}"
            raise self._unusable(found, "one model, or its name", f"Name it in {self._names.model}")
        if wanted is not None and wanted not in served:
            found = f"serves {', '.join(served) or 'no model'}, not {wanted}"
            raise self._unusable(found, f"{self._names.model} among them", "Correct the name")
        self.model = wanted if wanted is not None else served[0]
        self.served_with = str(entries[served.index(self.model)].get("owned_by") or "")

    def payload(self, question: Question, sampling: Mapping[str, float]) -> dict[str, Any]:
        """Return the JSON body of a completion request.

        Args:
            question: The prompt, the limit of new tokens and the seed.
            sampling: ``temperature``, ``top_p``, ``top_k`` (0 takes all tokens) and ``min_p``.
        """
        as_text = self.prompts_as == "text"
        return {
            "model": self.model,
            "prompt": self._text(question.prompt_ids) if as_text else list(question.prompt_ids),
            "max_tokens": question.max_new_tokens,
            "seed": question.seed,
            **sampling,
            # vLLM, SGLang and llama.cpp all read -1 as "all tokens".
            "top_k": sampling["top_k"] or -1,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "stream": False,
            "stop_token_ids": sorted(self._eos_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
            # The decoded text contains the special tokens already.
            **({"add_special_tokens": False} if as_text else {}),
        }

    def complete(self, payload: Mapping[str, Any]) -> dict[str, Any] | Refusal:
        """Send a request, again until it is answered or refused. Thread-safe.

        Raises:
            DataError: The server cannot be reached, or refuses access.
        """
        return self._request("POST", self.url + "/completions", payload, _read_json)

    def stream(self, payload: Mapping[str, Any], path: str | None = None) -> Streamed | Refusal:
        """Send a request whose response is streamed. Thread-safe.

        A stream that breaks off is returned as a refusal and not sent again: the server's counters may already include
        it.

        Args:
            payload: The request, with ``stream`` set.
            path: Path from the server's root; None is the completions path.

        Raises:
            DataError: The server cannot be reached, or refuses access.
        """
        url = self.url + "/completions" if path is None else self.root + path
        try:
            return self._request("POST", url, payload, read_streamed)
        except BrokenStreamError as error:
            return Refusal(self._shown(str(error)), error.tokens)

    @property
    def root(self) -> str:
        """The server's address without the API version."""
        return self.url.removesuffix("/v1")

    def look(self, path: str) -> str | None:
        """Return the text under a path from the server's root; None if there is none."""
        try:
            with self._sending("GET", self.root + path, None, LOOK_TIMEOUT) as response:
                body = b"".join(_parts(response))
                return body.decode("utf-8", errors="replace") if response.status_code == 200 else None
        except (httpx.HTTPError, OversizedError, _LeavesHostError):
            return None

    def response_ids(self, question: Question, document: Mapping[str, Any]) -> list[int] | Refusal:
        """Return the tokens of a response, with the end-of-text token if the response is finished.

        Raises:
            DataError: The server counted other prompt tokens, or returned tokens outside the trunk's vocabulary.
        """
        choices = _entries(document, "choices")
        if not choices or not isinstance(choices[0].get("text"), str):
            raise self._unusable("answers without a text", "OpenAI's completions", "Use a server that has them")
        read = _object(document.get("usage")).get("prompt_tokens")
        if read is not None and read != len(question.prompt_ids):
            found = f"reads {read} tokens where the prompt has {len(question.prompt_ids)}"
            raise self._unusable(found, "the trunk's tokenizer", "Serve the trunk with its own files")
        choice = choices[0]
        if choice.get("finish_reason") not in ("stop", "length"):
            return Refusal(f"finish_reason {choice.get('finish_reason')!r}")
        token_ids = choice.get("token_ids")
        if token_ids is None:
            token_ids = raw_tokens(self._tokenizer, choice["text"], start=False)
        if not isinstance(token_ids, list) or not all(self._is_token(token) for token in token_ids):
            raise self._unusable("returns tokens that the trunk does not have", "the trunk", "Serve the trunk itself")
        token_ids = token_ids[: question.max_new_tokens]
        if choice["finish_reason"] == "stop" and self._eos_ids.isdisjoint(token_ids):
            token_ids.append(self._end(choice))
        return token_ids

    def _is_token(self, value: object) -> bool:
        return type(value) is int and 0 <= value < self._vocab_size

    def _end(self, choice: Mapping[str, Any]) -> int:
        """Return the token that ended a response, for servers that leave it out of the response."""
        told = (choice.get("stop_reason"), choice.get("matched_stop"), self._tokenizer.eos_token_id)
        return next((token for token in told if type(token) is int and token in self._eos_ids), min(self._eos_ids))

    def _text(self, token_ids: Collection[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def _request(
        self,
        method: str,
        url: str,
        payload: Mapping[str, Any] | None,
        read: Callable[[httpx.Response, float], Answer],
        timeout: httpx.Timeout | None = None,
    ) -> Answer | Refusal:
        """Send one request, up to ``MAX_ATTEMPTS`` times while failures may pass, and read the response by ``read``.

        ``read`` gets the response and ``time.perf_counter()`` from when the request was sent.
        """
        cause, wanted_seconds = "", 0.0
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                self.wait(min(max(2.0 ** (attempt - 1), wanted_seconds), LONGEST_WAIT_SECONDS))
            if self._closed.is_set():
                break
            try:
                started = time.perf_counter()
                with self._sending(method, url, payload, timeout or self._timeout) as response:
                    if response.status_code == 200:
                        return read(response, started)
                    detail = self._shown(_detail(response))
            except OversizedError as error:
                raise self._unusable(str(error), "a response to one prompt", "Check the address") from None
            except _LeavesHostError as error:
                raise self._unusable(str(error), "no other host", "Write the address that it leads to") from None
            except (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL) as error:
                raise self._unusable(f"cannot be asked ({error})", "an address", "Correct it") from None
            except httpx.TransportError as error:
                cause = f"does not answer ({type(error).__name__})"
                continue
            except (ValueError, RecursionError):
                cause = "answers something else than JSON"
                continue
            except httpx.HTTPError as error:
                raise self._unusable(f"cannot be asked ({error})", "an address", "Correct it") from None
            cause = f"answers {response.status_code} ({detail})"
            if response.status_code not in PASSING:
                return self._refusal(response.status_code, cause)
            wanted_seconds = _retry_after(response)
        raise self._unusable(f"{cause}, {MAX_ATTEMPTS} times", "an answer", f"Start it again; {self._names.restart}")

    def _refusal(self, status: int, cause: str) -> Refusal:
        if status in (401, 403):
            raise self._unusable(cause, "access", f"Name the variable with its key in {self._names.api_key_env}")
        if status in (404, 405):
            raise self._unusable(cause, "OpenAI's completions there", "Check the address, with its version")
        return Refusal(cause)

    def _unusable(self, found: str, expected: str, cure: str) -> DataError:
        return DataError(f"{self._names.url}: {self.url} {found}; expected {expected}. {cure}.")


def _entries(document: object, name: str) -> list[dict[str, Any]]:
    """Return the objects of a list in a server's response; empty if there is no such list."""
    found = document.get(name) if isinstance(document, dict) else None
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _read_json(response: httpx.Response, _: float) -> dict[str, Any]:
    """Return a response that is one JSON object.

    Raises:
        ValueError: It is something else.
    """
    document = json.loads(b"".join(_parts(response)))
    if not isinstance(document, dict):
        raise ValueError("no JSON object")
    return document


def _object(value: object) -> Mapping[str, Any]:
    """Return a JSON object; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def _detail(response: httpx.Response) -> str:
    """Return the start of a server's error text as one short line."""
    body = b""
    for part in response.iter_bytes():
        body += part
        if len(body) >= _DETAIL_BYTES:
            break
    return " ".join(body.decode("utf-8", errors="replace").split())[:200] or response.reason_phrase


def _retry_after(response: httpx.Response) -> float:
    """Return the seconds of a ``Retry-After`` header; 0 if it is missing or a date."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0
