"""Ask a server one prompt after another, or many at a time, with what its counters gained meanwhile."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

from mtp_train.data.endpoint import Endpoint, Refusal
from mtp_train.data.regenerated import Question, ask
from mtp_train.data.streamed import Streamed
from mtp_train.errors import DataError
from mtp_train.study.records import TaskPrompt
from mtp_train.study.served_metrics import PREFIXES, Counters, SpecCounts, read_counters, response_counts

WARM_UP_TOKENS = 8
SETTLE_LOOKS, SETTLE_SECONDS = 20, 0.1
"""How often, and how far apart, counters are read until they hold what was just answered."""
NATIVE_SGLANG = "/generate"
SERVER_INFO = ("/server_info", "/get_server_info")
"""Where SGLang tells its version; the second is the older."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One prompt and its response."""

    prompt: TaskPrompt
    streamed: Streamed
    token_ids: tuple[int, ...]
    tokens: int
    """New tokens, as the server counts them."""
    counts: SpecCounts | None
    """What the server said of its drafts beside the response."""

    @property
    def seconds_first(self) -> float | None:
        """Until the first piece; None where the response came whole."""
        arrivals = self.streamed.arrivals
        return arrivals[0].seconds if arrivals else None

    @property
    def seconds_decode(self) -> float | None:
        """From the first piece to the last."""
        arrivals = self.streamed.arrivals
        return arrivals[-1].seconds - arrivals[0].seconds if arrivals else None

    @property
    def tokens_decode(self) -> int | None:
        """Tokens behind the first piece; None where the server does not say how many that held."""
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
    """Tokens that had come all the same."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Prompts that were asked together, between two looks at the counters."""

    answered: tuple[Answered, ...]
    failed: tuple[Failed, ...]
    seconds: float
    gained: Counters | None
    """What the server counted meanwhile; None where it shows no counters."""

    @property
    def own_tokens(self) -> int:
        """New tokens that we were sent."""
        return sum(one.tokens for one in self.answered) + sum(one.tokens for one in self.failed)

    @property
    def foreign_tokens(self) -> int | None:
        """New tokens that the server counted and we were not sent, below 0 where it counted too few; None unknown."""
        generated = None if self.gained is None else self.gained.generated
        return None if generated is None else generated - self.own_tokens


class Asking:
    """Asks a server, each engine in the way in which it tells most.

    Args:
        endpoint: The server, its model chosen.
        seed: With a prompt's id it makes the seed of its noise.
    """

    def __init__(self, endpoint: Endpoint, seed: int) -> None:
        self.endpoint = endpoint
        self.version: str | None = None
        self._seed = seed
        # Nobody else's prompt, and none of ours asked before, is found in a prefix cache under this.
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
        """Ask once without counting: what is slow the first time, and whether token ids are taken.

        Raises:
            DataError: The server refuses, whichever way it is asked.
        """
        first = self.ask(prompt, 0.0, WARM_UP_TOKENS)
        if isinstance(first, Failed) and not self._native:
            self.endpoint.prompts_as = "text"
            first = self.ask(prompt, 0.0, WARM_UP_TOKENS)
        if isinstance(first, Failed):
            raise DataError(
                f"{self.endpoint.url}: {first.reason}, asked for {prompt.id}; expected a response. Check the server's "
                "log, and that its context holds the prompts."
            )
        self.version = self.version or first.streamed.document.get("system_fingerprint")

    def ask(self, prompt: TaskPrompt, temperature: float, max_new_tokens: int) -> Answered | Failed:
        """Ask one prompt. May be called from several threads.

        Raises:
            DataError: The server cannot be asked at all; says which prompt.
        """
        length = len(prompt.prompt_ids)
        question = ask(prompt, max_new_tokens=max_new_tokens, seq_len_tokens=length + max_new_tokens, seed=self._seed)
        try:
            response = self._respond(question, temperature)
        except DataError as error:
            raise DataError(f"prompt {prompt.id} ({prompt.task}, temperature {temperature:g}): {error}") from None
        if isinstance(response, Refusal):
            return Failed(prompt=prompt, temperature=temperature, reason=response.reason, tokens=response.tokens)
        streamed, token_ids = response
        tokens = (streamed.document.get("usage") or {}).get("completion_tokens") or len(token_ids)
        counts = response_counts(streamed.document, tokens)
        return Answered(prompt=prompt, streamed=streamed, token_ids=tuple(token_ids), tokens=tokens, counts=counts)

    def _respond(self, question: Question, temperature: float) -> tuple[Streamed, list[int]] | Refusal:
        path = NATIVE_SGLANG if self._native else None
        streamed = self.endpoint.stream(self._payload(question, temperature), path)
        if isinstance(streamed, Refusal):
            return streamed
        token_ids = self.endpoint.response_ids(question, streamed.document)
        return token_ids if isinstance(token_ids, Refusal) else (streamed, token_ids)

    def block(
        self,
        prompts: Sequence[TaskPrompt],
        temperature: float,
        max_new_tokens: int,
        on_prompt: Callable[[], None],
    ) -> Block:
        """Ask prompts, as many at a time as the endpoint says.

        Raises:
            DataError: The server fails for good, was started again, or hides its counters meanwhile.
        """
        before, started = self.counters(), time.perf_counter()
        with ThreadPoolExecutor(self.endpoint.concurrency) as pool:
            futures = [pool.submit(self.ask, prompt, temperature, max_new_tokens) for prompt in prompts]
            try:
                done = []
                for future in futures:
                    done.append(future.result())
                    on_prompt()
            except BaseException:
                # The others need not go on trying.
                self.endpoint.close()
                pool.shutdown(cancel_futures=True)
                raise
        block = Block(
            answered=tuple(one for one in done if isinstance(one, Answered)),
            failed=tuple(one for one in done if isinstance(one, Failed)),
            seconds=time.perf_counter() - started,
            gained=None,
        )
        return block if before is None else self._settled(block, before)

    def counters(self) -> Counters | None:
        """Return the server's counters now; None where it shows none."""
        if self.server not in PREFIXES:
            return None
        text = self.endpoint.look("/metrics")
        counters = None if text is None else read_counters(text, self.server)
        return counters if counters is not None and counters.series else None

    def _settled(self, block: Block, before: Counters) -> Block:
        """Return the block with what the counters gained, once they hold all that we were sent."""
        for number in range(SETTLE_LOOKS):
            if number:
                self.endpoint.wait(SETTLE_SECONDS)
            now = self.counters()
            if now is None:
                raise DataError(
                    f"{self.endpoint.url}: shows its counters no longer; expected them after {len(block.answered)} "
                    "responses as before. Look whether the server still runs, and run the command again."
                )
            gained = now.since(before)
            block = Block(answered=block.answered, failed=block.failed, seconds=block.seconds, gained=gained)
            if (block.foreign_tokens or 0) >= 0:
                break
        return block

    def _payload(self, question: Question, temperature: float) -> dict[str, Any]:
        """Return the request for a streamed response, drawn from the trunk's whole distribution."""
        sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        payload = self.endpoint.payload(question, sampling)
        if self._native:
            return _native_payload(payload)
        payload |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if self.server == "vllm":
            payload["cache_salt"] = f"{self._run}-{next(self._number)}"
        elif self.server == "llamacpp":
            payload |= {"cache_prompt": False, "timings_per_token": True}
        return payload


def _native_payload(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the same request as SGLang's own interface takes it."""
    same = ("temperature", "top_p", "top_k", "min_p", "stop_token_ids", "skip_special_tokens")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    sampling = {name: payload[name] for name in (*same, *penalties)}
    sampling |= {"max_new_tokens": payload["max_tokens"], "sampling_seed": payload["seed"]}
    return {"input_ids": payload["prompt"], "sampling_params": sampling, "stream": True}


def _json_of(text: str | None) -> dict[str, Any]:
    """Return an object out of a text; an empty one where it is none."""
    try:
        found = json.loads(text or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
