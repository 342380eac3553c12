"""A server that speaks OpenAI's completions API: what is sent, what comes back, and what is done when nothing does.

A prompt is sent as token ids, which vLLM, SGLang and llama.cpp take: neither a template nor a tokenizer on the other
side can then read it differently. A server that takes text alone gets the text of these tokens. Responses come back as
token ids from vLLM and SGLang (``return_token_ids``), as text from others, which is then tokenised.

Every setting with a default on the other side is sent: vLLM and SGLang take theirs from the checkpoint's
generation_config.json, llama.cpp has its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import requests
from requests.adapters import HTTPAdapter

from mtp_train.data.chat import raw_tokens
from mtp_train.data.regenerated import Question
from mtp_train.data.streamed import BrokenStreamError, Streamed, read_streamed
from mtp_train.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_ATTEMPTS = 8
LONGEST_WAIT_SECONDS = 60.0
CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS, LOOK_TIMEOUT_SECONDS = 10.0, 3600.0, 30.0
"""Nothing is read before a response is whole, and a busy server lets a request wait."""
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses that the same request may not meet again."""

Answer = TypeVar("Answer")

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


class SettingNames(NamedTuple):
    """What the user calls the settings of a server, for messages."""

    url: str
    model: str
    api_key_env: str
    restart: str
    """What to do once a server that was lost is there again."""


RECIPE_NAMES = SettingNames(
    "data.regenerate.endpoint",
    "data.regenerate.model",
    "data.regenerate.api_key_env",
    "then the same command goes on from here",
)


class Refusal(NamedTuple):
    """Why a server did not answer one prompt."""

    reason: str
    tokens: int = 0
    """Tokens of the response that had come all the same."""


def read_api_key(variable: str | None, names: SettingNames = RECIPE_NAMES) -> str | None:
    """Return the server's key, which an environment variable holds; None where none is named.

    Raises:
        DataError: The variable holds none.
    """
    if variable is None:
        return None
    # A line end would not fit into a header, and be told with the key.
    key = os.environ.get(variable, "").strip()
    if not key:
        raise DataError(
            f"{names.api_key_env}: the variable {variable} is not set; expected the server's key in it. Set it, or "
            f"leave {names.api_key_env.rpartition('.')[2]} out."
        )
    return key


class Endpoint:
    """A server, and how to talk to it.

    Args:
        url: Its address up to and with the version.
        tokenizer: The trunk's.
        eos_ids: The tokens that end a response.
        vocab_size: Tokens that the trunk knows.
        api_key: Sent as a bearer token, where there is one.
        concurrency: Requests at a time.
        wait: What waits some seconds; by default until that time is over or :meth:`close` is called.
        names: What messages call the settings.
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
        wait: Callable[[float], object] | None = None,
        names: SettingNames = RECIPE_NAMES,
    ) -> None:
        self.url = url.rstrip("/")
        self.concurrency = concurrency
        self.model = ""
        # vllm, sglang, llamacpp, ...: told with the model.
        self.served_with = ""
        self.prompts_as: Literal["token ids", "text"] = "token ids"
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = vocab_size
        self._names = names
        self._closed = threading.Event()
        self.wait = wait or self._closed.wait
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=concurrency))
        if api_key is not None:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def close(self) -> None:
        """End all waiting and all connections."""
        self._closed.set()
        self._session.close()

    def choose_model(self, wanted: str | None) -> None:
        """Set the model that answers: the one that is wanted, or the only one served.

        Raises:
            DataError: It is not served, or there are several to choose from.
        """
        document = self._request("GET", self.url + "/models", None, _read_json)
        if isinstance(document, Refusal):
            raise self._unusable(document.reason, "the list of its models", "Check the address, with its version")
        entries = _entries(document, "data")
        served = [str(entry.get("id")) for entry in entries]
        if wanted is None and len(served) != 1:
            found = f"serves {', '.join(served) or 'no model'}"
            raise self._unusable(found, "one model, or to be told which", f"Name it in {self._names.model}")
        if wanted is not None and wanted not in served:
            found = f"serves {', '.join(served) or 'no model'}, not {wanted}"
            raise self._unusable(found, f"{self._names.model} among them", "Correct the name")
        self.model = wanted if wanted is not None else served[0]
        self.served_with = str(entries[served.index(self.model)].get("owned_by") or "")

    def payload(self, question: Question, sampling: Mapping[str, float]) -> dict[str, Any]:
        """Return the request for a response.

        Args:
            question: What is asked.
            sampling: ``temperature``, ``top_p``, ``top_k`` (0 takes all tokens) and ``min_p``.
        """
        as_text = self.prompts_as == "text"
        return {
            "model": self.model,
            "prompt": self._text(question.prompt_ids) if as_text else list(question.prompt_ids),
            "max_tokens": question.max_new_tokens,
            "seed": question.seed,
            **sampling,
            # The one value that all three take for "all tokens".
            "top_k": sampling["top_k"] or -1,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "stream": False,
            "stop_token_ids": sorted(self._eos_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
            # The text has them already.
            **({"add_special_tokens": False} if as_text else {}),
        }

    def complete(self, payload: Mapping[str, Any]) -> dict[str, Any] | Refusal:
        """Send a request until it is answered or refused. May be called from several threads.

        Raises:
            DataError: The server cannot be reached, or does not let us in.
        """
        return self._request("POST", self.url + "/completions", payload, _read_json)

    def stream(self, payload: Mapping[str, Any], path: str | None = None) -> Streamed | Refusal:
        """Send a request whose answer comes in pieces. May be called from several threads.

        One that broke off is a refusal, and not sent again: the server may have counted what it did for it.

        Args:
            payload: The request, which asks for a stream.
            path: Where to send it, from the server's root; the completions where it is None.

        Raises:
            DataError: The server cannot be reached, or does not let us in.
        """
        url = self.url + "/completions" if path is None else self.root + path
        try:
            return self._request("POST", url, payload, read_streamed)
        except BrokenStreamError as error:
            return Refusal(str(error), error.tokens)

    @property
    def root(self) -> str:
        """The server's address without OpenAI's version."""
        return self.url.removesuffix("/v1")

    def look(self, path: str) -> str | None:
        """Return what the server shows under a path from its root; None where it shows nothing."""
        try:
            response = self._session.get(self.root + path, timeout=(CONNECT_TIMEOUT_SECONDS, LOOK_TIMEOUT_SECONDS))
        except requests.RequestException:
            return None
        return response.text if response.status_code == 200 else None

    def response_ids(self, question: Question, document: Mapping[str, Any]) -> list[int] | Refusal:
        """Return the tokens of a response, ending in end-of-text where it came to its end.

        Raises:
            DataError: The server read another prompt, or has other tokens.
        """
        choices = _entries(document, "choices")
        if not choices or not isinstance(choices[0].get("text"), str):
            raise self._unusable("answers without a text", "OpenAI's completions", "Use a server that has them")
        read = (document.get("usage") or {}).get("prompt_tokens")
        if read is not None and read != len(question.prompt_ids):
            found = f"reads {read} tokens where the prompt has {len(question.prompt_ids)}"
            raise self._unusable(found, "the trunk's tokenizer", "Serve the trunk with its own files")
        choice = choices[0]
        if choice.get("finish_reason") not in ("stop", "length"):
            return Refusal(f"finish_reason {choice.get('finish_reason')!r}")
        token_ids = choice.get("token_ids")
        if token_ids is None:
            token_ids = raw_tokens(self._tokenizer, choice["text"], start=False)
        if any(not isinstance(token, int) or not 0 <= token < self._vocab_size for token in token_ids):
            raise self._unusable("says tokens that the trunk does not have", "the trunk", "Serve the trunk itself")
        token_ids = token_ids[: question.max_new_tokens]
        if choice["finish_reason"] == "stop" and self._eos_ids.isdisjoint(token_ids):
            token_ids.append(self._end(choice))
        return token_ids

    def _end(self, choice: Mapping[str, Any]) -> int:
        """Return the token that ended a response which comes without it."""
        told = (choice.get("stop_reason"), choice.get("matched_stop"), self._tokenizer.eos_token_id)
        return next((token for token in told if token in self._eos_ids), min(self._eos_ids))

    def _text(self, token_ids: Collection[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def _request(
        self,
        method: str,
        url: str,
        payload: Mapping[str, Any] | None,
        read: Callable[[requests.Response, float], Answer],
    ) -> Answer | Refusal:
        """Send one request, again and again where the failure may pass; ``read`` is told when it was sent."""
        cause, wanted_seconds = "", 0.0
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                self.wait(min(max(2.0 ** (attempt - 1), wanted_seconds), LONGEST_WAIT_SECONDS))
            if self._closed.is_set():
                break
            try:
                timeout = (CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS)
                started = time.perf_counter()
                with self._session.request(method, url, json=payload, timeout=timeout, stream=True) as response:
                    if response.status_code == 200:
                        return read(response, started)
                    detail = _detail(response)
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
                cause = f"does not answer ({type(error).__name__})"
                continue
            except requests.JSONDecodeError:
                cause = "answers something else than JSON"
                continue
            except requests.RequestException as error:
                raise self._unusable(f"cannot be asked ({error})", "an address", "Correct it") from None
            cause = f"answers {response.status_code} ({detail})"
            if response.status_code not in PASSING:
                return self._refusal(response.status_code, cause)
            wanted_seconds = _retry_after(response)
        raise self._unusable(f"{cause}, {MAX_ATTEMPTS} times", "an answer", f"Start it again; {self._names.restart}")

    def _refusal(self, status: int, cause: str) -> Refusal:
        if status in (401, 403):
            raise self._unusable(cause, "to be let in", f"Name the variable with its key in {self._names.api_key_env}")
        if status in (404, 405):
            raise self._unusable(cause, "OpenAI's completions there", "Check the address, with its version")
        return Refusal(cause)

    def _unusable(self, found: str, expected: str, cure: str) -> DataError:
        return DataError(f"{self._names.url}: {self.url} {found}; expected {expected}. {cure}.")


def _entries(document: object, name: str) -> list[dict[str, Any]]:
    """Return a list of objects out of a server's answer; an empty one where there is none."""
    found = document.get(name) if isinstance(document, dict) else None
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _read_json(response: requests.Response, _: float) -> dict[str, Any]:
    """Return an answer that comes whole."""
    document: dict[str, Any] = response.json()
    return document


def _detail(response: requests.Response) -> str:
    """Return what a server says about a failure, in one short line."""
    return " ".join(response.text.split())[:200] or response.reason


def _retry_after(response: requests.Response) -> float:
    """Return the seconds that a server wants us to wait; 0 where it does not say (or gives a date)."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0
