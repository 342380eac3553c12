"""Send prompts to a server, one by one or concurrently, and read the increase of its counters."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

from mtp_inference import Sampling
from mtp_train.data.endpoint import Endpoint, Refusal, Streamed, in_thread
from mtp_train.data.regenerated import Question, ask
from mtp_train.errors import DataError
from mtp_train.evaluation.prompt_records import TaskPrompt
from mtp_train.evaluation.served.metrics import PREFIXES, Counters, SpecCounts, read_counters, response_counts

WARM_UP_TOKENS = 8
SETTLE_LOOKS, SETTLE_SECONDS = 20, 0.1
"""Retries, and seconds between them, until the counters include the responses that were just received."""
NATIVE_SGLANG = "/generate"
SERVER_INFO = ("/server_info", "/get_server_info")
"""Paths of SGLang's version; the second is for older releases."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One prompt and its response."""

    prompt: TaskPrompt
    streamed: Streamed
    token_ids: tuple[int, ...]
    tokens: int
    """Number of new tokens, as counted by the server."""
    counts: SpecCounts | None
    """Draft counts in the response; None where it has none."""

    @property
    def seconds_first(self) -> float | None:
        """Seconds until the first chunk of the stream; None where the response was not streamed."""
        arrivals = self.streamed.arrivals
        return arrivals[0].seconds if arrivals else None

    @property
    def seconds_decode(self) -> float | None:
        """Seconds from the first chunk to the last; None where the response was not streamed."""
        arrivals = self.streamed.arrivals
        return arrivals[-1].seconds - arrivals[0].seconds if arrivals else None

    @property
    def tokens_decode(self) -> int | None:
        """Tokens after the first chunk; None where the server does not report the tokens of that chunk."""
        arrivals = self.streamed.arrivals
        first = arrivals[0].tokens if arrivals else None
        return None if first is None else self.tokens - first


@dataclass(frozen=True, kw_only=True)
class Failed:
    """One prompt without a response."""

    prompt: TaskPrompt
    temperature: float
    reason: str
    tokens: int
    """Tokens received before the failure."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Prompts that were sent together, between two reads of the counters."""

    answered: tuple[Answered, ...]
    failed: tuple[Failed, ...]
    seconds: float
    gained: Counters | None
    """Increase of the server's counters; None where it exposes none."""

    @property
    def own_tokens(self) -> int:
        """Number of new tokens that we received."""
        return sum(one.tokens for one in self.answered) + sum(one.tokens for one in self.failed)

    @property
    def foreign_tokens(self) -> int | None:
        """Tokens that the server counted and did not send to us; below 0 if it counted too few, None if unknown."""
        generated = None if self.gained is None else self.gained.generated
        return None if generated is None else generated - self.own_tokens


class Asking:
    """Sends prompts to a server, through the interface of each engine that reports the most.

    Args:
        endpoint: The server, with a model chosen.
        seed: Combined with a prompt's id to the sampling seed of its request.
    """

    def __init__(self, endpoint: Endpoint, seed: int) -> None:
        self.endpoint = endpoint
        self.version: str | None = None
        self._seed = seed
        # A new salt per request: no earlier prompt can be found in the prefix cache.
        self._run, self._number = secrets.token_hex(8), count()
        self.server = endpoint.served_with
        info = self._server_info() if self.server == "sglang" else None
        self._native = info is not None
        if info is not None:
            self.version = info.get("version")
        elif self.server == "vllm":
            self.version = _json_of(endpoint.look("/version")).get("version")

    def _server_info(self) -> dict[str, Any] | None:
        for path in SERVER_INFO:
            text = self.endpoint.look(path)
            if text is not None:
                return _json_of(text)
        return None

    def warm_up(self, prompt: TaskPrompt) -> None:
        """Send one uncounted request, to warm up the server and to find out whether it accepts token ids.

        Raises:
            DataError: The server refuses the prompt both as token ids and as text.
        """
        ask_briefly = partial(self.ask, prompt, Sampling(), WARM_UP_TOKENS)
        first = self.endpoint.finish(ask_briefly)
        if isinstance(first, Failed) and not self._native:
            self.endpoint.prompts_as = "text"
            first = self.endpoint.finish(ask_briefly)
        if isinstance(first, Failed):
            raise DataError(
                f"{self.endpoint.url}: {first.reason}, for prompt {prompt.id}; expected a response. Check the server's "
                "log, and that its context length fits the prompts."
            )
        self.version = self.version or first.streamed.document.get("system_fingerprint")

    def ask(self, prompt: TaskPrompt, sampling: Sampling, max_new_tokens: int) -> Answered | Failed:
        """Send one prompt. May be called from several threads.

        Args:
            prompt: The prompt; its id and the seed of all prompts make the seed of its request.
            sampling: Temperature and filters; the seed in it is not used.
            max_new_tokens: Limit of the response.

        Raises:
            DataError: The server cannot be reached; the message names the prompt.
        """
        length = len(prompt.prompt_ids)
        question = ask(prompt, max_new_tokens=max_new_tokens, seq_len_tokens=length + max_new_tokens, seed=self._seed)
        try:
            response = self._respond(question, sampling)
        except DataError as error:
            place = f"{prompt.task}, temperature {sampling.temperature:g}"
            raise DataError(f"prompt {prompt.id} ({place}): {error}") from None
        if isinstance(response, Refusal):
            told = response.reason, response.tokens
            return Failed(prompt=prompt, temperature=sampling.temperature, reason=told[0], tokens=told[1])
        streamed, token_ids = response
        tokens = (streamed.document.get("usage") or {}).get("completion_tokens") or len(token_ids)
        counts = response_counts(streamed.document, tokens)
        return Answered(prompt=prompt, streamed=streamed, token_ids=tuple(token_ids), tokens=tokens, counts=counts)

    def _respond(self, question: Question, sampling: Sampling) -> tuple[Streamed, list[int]] | Refusal:
        path = NATIVE_SGLANG if self._native else None
        streamed = self.endpoint.stream(self._payload(question, sampling), path)
        if isinstance(streamed, Refusal):
            return streamed
        token_ids = self.endpoint.response_ids(question, streamed.document)
        return token_ids if isinstance(token_ids, Refusal) else (streamed, token_ids)

    def block(
        self,
        prompts: Sequence[TaskPrompt],
        sampling: Sampling,
        max_new_tokens: int,
        on_prompt: Callable[[], None],
    ) -> Block:
        """Send prompts, ``endpoint.concurrency`` at a time.

        Raises:
            DataError: The server fails permanently, finishes nothing for ten minutes, was restarted, or no longer shows
                its counters.
        """
        before, started = self.counters(), time.perf_counter()
        found: dict[int, Answered | Failed] = {}
        waiting: dict[Future[Answered | Failed], int] = {}
        queue = iter(enumerate(prompts))
        try:
            while len(found) < len(prompts):
                for number, prompt in islice(queue, self.endpoint.concurrency - len(waiting)):
                    waiting[in_thread(partial(self.ask, prompt, sampling, max_new_tokens))] = number
                for future in self.endpoint.first_finished(waiting):
                    found[waiting.pop(future)] = future.result()
                    on_prompt()
        except BaseException:
            # Stop the retries of the other requests.
            self.endpoint.close()
            raise
        done = [found[number] for number in range(len(prompts))]
        block = Block(
            answered=tuple(one for one in done if isinstance(one, Answered)),
            failed=tuple(one for one in done if isinstance(one, Failed)),
            seconds=time.perf_counter() - started,
            gained=None,
        )
        return block if before is None else self._settled(block, before)

    def counters(self) -> Counters | None:
        """Return the current counters of the server; None where it exposes none."""
        if self.server not in PREFIXES:
            return None
        text = self.endpoint.look("/metrics")
        counters = None if text is None else read_counters(text, self.server)
        return counters if counters is not None and counters.series else None

    def _settled(self, block: Block, before: Counters) -> Block:
        """Return the block with the increase of the counters, read until they include all tokens that we received."""
        for number in range(SETTLE_LOOKS):
            if number:
                self.endpoint.wait(SETTLE_SECONDS)
            now = self.counters()
            if now is None:
                raise DataError(
                    f"{self.endpoint.url}: no counters at /metrics after {len(block.answered)} responses; expected "
                    "them as before. Check that the server is still running, and run the command again."
                )
            gained = now.since(before)
            block = Block(answered=block.answered, failed=block.failed, seconds=block.seconds, gained=gained)
            if (block.foreign_tokens or 0) >= 0:
                break
        return block

    def _payload(self, question: Question, sampling: Sampling) -> dict[str, Any]:
        """Return the request for a streamed response."""
        names = ("temperature", "top_p", "top_k", "min_p")
        payload = self.endpoint.payload(question, {name: getattr(sampling, name) for name in names})
        if self._native:
            return _native_payload(payload)
        payload |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if self.server == "vllm":
            payload["cache_salt"] = f"{self._run}-{next(self._number)}"
        elif self.server == "llamacpp":
            payload |= {"cache_prompt": False, "timings_per_token": True}
        return payload


def _native_payload(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the same request in the format of SGLang's native interface."""
    same = ("temperature", "top_p", "top_k", "min_p", "stop_token_ids", "skip_special_tokens")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    sampling = {name: payload[name] for name in (*same, *penalties)}
    sampling |= {"max_new_tokens": payload["max_tokens"], "sampling_seed": payload["seed"]}
    return {"input_ids": payload["prompt"], "sampling_params": sampling, "stream": True}


def _json_of(text: str | None) -> dict[str, Any]:
    """Return the JSON object in a text; an empty one where the text is none."""
    try:
        found = json.loads(text or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
