"""A client of OpenAI's completions API, for vLLM, SGLang, llama.cpp and servers like them.

:meth:`Endpoint.answers` sends requests of the decoder's form to a server, again after failures that may pass, and
yields the tokens of the responses as they arrive. :meth:`Endpoint.counters` reads the server's counts of drafts.

- A prompt is sent as token ids, which vLLM, SGLang and llama.cpp accept, so that no template or tokenizer of the server
  can change it.
- SGLang is asked by its own API, whose responses have its counts of drafts.
- vLLM and SGLang return responses as token ids (``return_token_ids``). Text from other servers is tokenised here.
- Every sampling setting is sent, because servers have other defaults: vLLM and SGLang read the checkpoint's
  generation_config.json, llama.cpp has its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import httpx

from mtp_inference.requests import Request
from mtp_train.answers.draft_counts import (
    COUNTING,
    Counters,
    as_completion,
    as_object,
    native_payload,
    read_counters,
)
from mtp_train.checkpoints.files import JsonObject
from mtp_train.checkpoints.tokenizer import raw_tokens
from mtp_train.errors import DataError, printable, redacted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_ATTEMPTS = 8
LONGEST_WAIT_SECONDS = 60.0
CONNECT_TIMEOUT_SECONDS = 10.0
RESPONSE_TIMEOUT_SECONDS = 3600.0
"""Longest wait for one response: a server sends nothing until it is complete, and a busy one queues requests first."""
STALL_SECONDS = 600.0
"""A server that finishes no request for so long is given up."""
LIST_TIMEOUT = httpx.Timeout(10.0, connect=CONNECT_TIMEOUT_SECONDS)
"""Of the list of models and the counters, which a server has at hand."""
FINAL = {401, 403, 404, 405, *range(300, 400)}
"""HTTP statuses with which a server refuses every prompt. Redirects are not followed: prompts and key are for the
address that the user named."""
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
"""HTTP statuses after which the same request may succeed."""


T = TypeVar("T")


class Refusal(NamedTuple):
    """Why a server did not answer one prompt."""

    reason: str


class Response(NamedTuple):
    """A server's response to one prompt."""

    token_ids: list[int]
    """The new tokens, with the end-of-text token if the response is finished."""
    document: JsonObject
    """The completion as the server sent it, with its usage and the like."""


def read_api_key(variable: str | None) -> str | None:
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
            f"environment: {variable} is not set; expected the server's key (data.regenerate.api_key_env, "
            "--api-key-env). Set it, or name no variable."
        )
    return key


class Endpoint:
    """A client of one server.

    Args:
        url: The server's address, up to and including the API version (``http://host:8000/v1``).
        eos_ids: The tokens that end a response.
        api_key: Sent as a bearer token; None sends no token.
        from_cache: Whether the server may take prompts from a cache.
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
        from_cache: bool = True,
    ) -> None:
        self.url = url.rstrip("/")
        self.concurrency = concurrency
        self.model = ""
        # vllm, sglang, llamacpp, ...: `owned_by` of the model.
        self.served_with = ""
        # The files that the server says it loaded, on its machine.
        self.checkpoint: str | None = None
        # The model that an adapter is served on; None for a model itself.
        self.adapted: str | None = None
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = vocab_size
        self._from_cache = from_cache
        self._api_key = api_key
        self._timeout = httpx.Timeout(RESPONSE_TIMEOUT_SECONDS, connect=CONNECT_TIMEOUT_SECONDS)
        self.max_attempts = MAX_ATTEMPTS
        # Called with the reason before every wait.
        self.on_wait: Callable[[str], object] = lambda reason: None
        self._closed = threading.Event()
        # Returns after a number of seconds, or when the client is closed.
        self.wait: Callable[[float], object] = self._closed.wait
        # Returns seconds.
        self.clock: Callable[[], float] = time.perf_counter
        self._client = httpx.Client(
            # As bytes: httpx refuses text that is not ASCII.
            headers={} if api_key is None else {b"Authorization": f"Bearer {api_key}".encode()},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=concurrency),
        )

    def stop_trying(self) -> None:
        """Send no failed request again; those in flight may still be answered."""
        self._closed.set()

    def close(self) -> None:
        self.stop_trying()
        self._client.close()

    def answers(self, requests: Iterable[Request], ask: Callable[[Request], T]) -> Iterator[tuple[int, T]]:
        """Send requests, ``concurrency`` at a time, and yield the answers as they arrive with their requests' numbers.

        At most ``concurrency`` requests are sent ahead of what the caller has taken.

        Args:
            ask: Called from several threads: :meth:`ask`, or a function around it.

        Raises:
            DataError: No request finishes for ten minutes; or one fails for good, after the answers to those in flight.
        """
        waiting, in_flight, failure = enumerate(requests), 0, None
        ended = SimpleQueue[tuple[int, T | BaseException]]()

        def answer(number: int, request: Request) -> None:
            try:
                ended.put((number, ask(request)))
            except BaseException as error:
                ended.put((number, error))

        while True:
            for pair in islice(waiting, 0 if failure is not None else self.concurrency - in_flight):
                # A daemon does not keep the process alive: a server may never answer.
                threading.Thread(target=answer, args=pair, daemon=True).start()
                in_flight += 1
            if not in_flight:
                break
            try:
                number, found = ended.get(timeout=STALL_SECONDS)
            except Empty:
                raise DataError(
                    f"{self.url}: finished none of its requests in {STALL_SECONDS / 60:g} minutes; expected responses. "
                    "Check the server's log, then run the same command again."
                ) from None
            in_flight -= 1
            if isinstance(found, BaseException):
                failure = failure or found
                # The other requests stop retrying.
                self._closed.set()
            else:
                yield number, found
        if failure is not None:
            raise failure

    def ask(self, request: Request, **more: Any) -> Response | Refusal:
        """Send a request, again until it is answered or refused. Thread-safe.

        Args:
            more: Further fields of the request's body.

        Raises:
            DataError: The server cannot be used, or its response is not the trunk's.
        """
        url, payload, is_sglang = f"{self.url}/completions", self._payload(request), self.served_with == "sglang"
        if is_sglang:
            url = self.url.removesuffix("/v1") + "/generate"
            payload = native_payload(payload)
        found = self._request("POST", url, payload | more)
        if isinstance(found, Refusal):
            return found
        return self.response_of(request, as_completion(found) if is_sglang else found)

    def choose_model(self, wanted: str | None) -> None:
        """Select the model that requests name: the wanted one, or the only one that is served.

        Raises:
            DataError: The model is not served, or several are served and none was named.
        """
        document = self._request("GET", self.url + "/models", None, LIST_TIMEOUT)
        if isinstance(document, Refusal):
            raise self.unusable(document.reason, "the list of its models", "Check the address, with its version")
        entries = _entries(document, "data")
        served = [str(entry.get("id")) for entry in entries]
        found = f"serves {', '.join(served) or 'no model'}"
        if wanted is None and len(served) != 1:
            raise self.unusable(found, "one model, or its name", "Name it (data.regenerate.model, --served-model)")
        if wanted is not None and wanted not in served:
            raise self.unusable(f"{found}, not {wanted}", "that model", "Correct the name")
        self.model = wanted if wanted is not None else served[0]
        chosen = entries[served.index(self.model)]
        self.served_with = str(chosen.get("owned_by") or "")
        place = chosen.get("root")
        self.adapted = chosen.get("parent")
        if self.served_with == "llamacpp":
            with contextlib.suppress(ValueError, RecursionError):
                place = as_object(json.loads(self.look("/props") or "{}")).get("model_path")
        self.checkpoint = place if isinstance(place, str) else None

    def _payload(self, request: Request) -> JsonObject:
        """Return the JSON body of a completion request."""
        return {
            "model": self.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_new_tokens,
            **asdict(request.sampling),
            # vLLM, SGLang and llama.cpp all read -1 as "all tokens".
            "top_k": request.sampling.top_k or -1,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "stream": False,
            "stop_token_ids": sorted(self._eos_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
            **({} if self._from_cache else {"cache_salt": secrets.token_hex(8), "cache_prompt": False}),
        }

    def counters(self) -> Counters | None:
        """Return the current counters of the server, which are of all its requests together; None without any."""
        text = self.look("/metrics") if self.served_with in COUNTING else None
        return read_counters(text or "") or None

    def look(self, path: str) -> str | None:
        """Return the text under a path from the server's root; None if there is none."""
        try:
            response = self._client.get(self.url.removesuffix("/v1") + path, timeout=LIST_TIMEOUT)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None

    def response_of(self, request: Request, document: JsonObject) -> Response | Refusal:
        """Return the tokens of a completion, or that the server did not finish it.

        Raises:
            DataError: The server counted other prompt tokens, or returned tokens outside the trunk's vocabulary.
        """
        choices = _entries(document, "choices")
        if not choices or not isinstance(choices[0].get("text"), str):
            raise self.unusable("answers without a text", "OpenAI's completions", "Use a server that has them")
        read = as_object(document.get("usage")).get("prompt_tokens")
        if read is not None and read != len(request.prompt_ids):
            found = f"reads {read} tokens where the prompt has {len(request.prompt_ids)}"
            raise self.unusable(found, "the trunk's tokenizer", "Serve the trunk with its own files")
        choice = choices[0]
        if choice.get("finish_reason") not in ("stop", "length"):
            return Refusal(f"finish_reason {choice.get('finish_reason')!r}")
        token_ids = choice.get("token_ids")
        if token_ids is None:
            token_ids = raw_tokens(self._tokenizer, choice["text"], start=False)
        known = range(self._vocab_size)
        if not isinstance(token_ids, list) or not all(type(one) is int and one in known for one in token_ids):
            raise self.unusable("returns tokens that the trunk does not have", "the trunk", "Serve the trunk itself")
        token_ids = token_ids[: request.max_new_tokens]
        if choice["finish_reason"] == "stop" and self._eos_ids.isdisjoint(token_ids):
            # The token that ended the response, which some servers leave out.
            told = (choice.get("stop_reason"), choice.get("matched_stop"), self._tokenizer.eos_token_id)
            ends = (token for token in told if type(token) is int and token in self._eos_ids)
            token_ids.append(next(ends, min(self._eos_ids)))
        return Response(token_ids, document)

    def _request(
        self,
        method: str,
        url: str,
        payload: JsonObject | None,
        timeout: httpx.Timeout | None = None,
    ) -> JsonObject | Refusal:
        """Send one request, up to ``max_attempts`` times while failures may pass, and return the JSON object."""
        cause = ""
        for attempt in range(self.max_attempts):
            if attempt:
                self.on_wait(f"{self.url}: {cause}")
                self.wait(min(2.0 ** (attempt - 1), LONGEST_WAIT_SECONDS))
            if self._closed.is_set():
                break
            try:
                response = self._client.request(method, url, json=payload, timeout=timeout or self._timeout)
                if response.status_code == 200:
                    document = response.json()
                    if not isinstance(document, dict):
                        raise ValueError("no JSON object")
                    return document
            except (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError) as error:
                cause = f"does not answer ({type(error).__name__})"
                continue
            except (ValueError, RecursionError):
                cause = "answers something else than JSON"
                continue
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                expected = "an address such as http://localhost:8000/v1"
                raise self.unusable(f"cannot be asked ({error})", expected, "Correct it") from None
            detail = " ".join(response.text.split())[:200] or response.reason_phrase
            # Without the key, should the server send that back.
            shown = printable(redacted(detail.replace(self._api_key, "***") if self._api_key else detail))
            cause = f"answers {response.status_code} ({shown})"
            if response.status_code in FINAL:
                cure = "Check the address, with its version, and the key (data.regenerate.api_key_env, --api-key-env)"
                raise self.unusable(cause, "OpenAI's completions there", cure)
            if response.status_code not in PASSING:
                return Refusal(cause)
        cure = "Start it again, then run the same command"
        raise self.unusable(f"{cause}, {self.max_attempts} times", "an answer", cure)

    def unusable(self, found: str, expected: str, cure: str) -> DataError:
        """Return an error about the server."""
        return DataError(f"{self.url}: {found}; expected {expected}. {cure}.")


def _entries(document: JsonObject, name: str) -> list[JsonObject]:
    """Return the objects of a list in a server's response; empty if there is no such list."""
    found = document.get(name)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
