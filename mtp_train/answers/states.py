"""A client of a vLLM server that computes the trunk's hidden states.

vLLM with the ``extract_hidden_states`` method and its hidden-states connector runs the trunk over a prompt, writes the
states after some layers to a safetensors file in a directory that server and client share, and returns the path of the
file in ``kv_transfer_params``. A file is a temporary product of one request; it is deleted here once it has been read.

State n is the residual stream after n layers: 0 is the embedding, and the number of layers the last state *before* the
final norm.

Shapes: T tokens, L layers, D hidden, V vocabulary.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtp_inference.requests import Request
from mtp_train.answers.draft_counts import as_object
from mtp_train.answers.endpoint import Endpoint, Refusal, Response
from mtp_train.checkpoints.files import JsonObject

FILE_WAITS, WAITS_A_NOTE = 66, 10
"""Waits for the file of a reply, a minute in all, and how many are reported together. The connector locks a file before
the reply is sent, and writes it in the engine's next step."""
ASKED_AT_MOST = 2
"""A server that ends between a reply and its file is asked again."""
STATES_ATTEMPTS = 14
"""Failures that may pass before a server is given up: after eight minutes, so that it can load the trunk again."""
PROVED_TOKENS = 512
LEAST_AGREEMENT = 0.99
NEAR_TIE = 2.0**-5
"""Largest gap of a near tie, as a part of the best logit: four steps of bfloat16, by which the rounding of the final
norm, of the lm_head's sums and of the logits differs between two programs."""


StatesWithIds = tuple[Tensor, list[int]]
"""The states of a text, and token ids: those that they are of, or the most probable ones after them."""


class StatesServer:
    """The hidden states of texts from a server of the trunk.

    Args:
        layers: The states that the server was started for, in ascending order.
        width: Values of one state.
        command: The command that starts such a server, for messages.
    """

    def __init__(self, endpoint: Endpoint, layers: Sequence[int], width: int, *, command: str) -> None:
        self.endpoint, self.layers, self.width = endpoint, layers, width
        self.dtype: torch.dtype | None = None
        """The dtype of the first states, which all others must have."""
        self.cure = f"Start it as: {command}"
        self.fingerprint: object = None
        # Not the endpoint's wait, which ends at the first failure: files of other requests would be left over.
        self.wait: Callable[[float], object] = time.sleep
        endpoint.max_attempts = STATES_ATTEMPTS

    def identity(self) -> list[str]:
        """Return what the states so far depend on, as far as the server tells: engine, release, model and settings.

        The settings are a hash in vLLM's ``system_fingerprint``: of the model's path, dtype, quantisation and layers,
        and of sizes such as ``--max-num-seqs``. Nothing else tells a quantisation that is made at loading.
        """
        server = self.endpoint
        told = [server.served_with, server.look("/version"), server.checkpoint, self.fingerprint, self.dtype]
        return list(map(str, told))

    def states(self, texts: Iterable[Sequence[int]]) -> Iterator[tuple[int, Tensor]]:
        """Yield the states of texts, (T, L, D), with the number of each text, as they arrive.

        Raises:
            DataError: The server fails for good, refuses a text, or returns states that are not the text's.
        """
        return (
            (number, states_TLD) for number, (states_TLD, _) in self.endpoint.answers(map(_reading, texts), self.answer)
        )

    def top_ids(self, text: Sequence[int]) -> StatesWithIds:
        """Return the states of a text and the server's most probable token after each of its tokens.

        Raises:
            DataError: As :meth:`states`, or the server returns no ``prompt_logprobs``.
        """
        states_TLD, (last_ids, document) = self.answer(_reading(text), prompt_logprobs=1)
        with suppress(KeyError, TypeError, ValueError):
            _, *entries = document["choices"][0]["prompt_logprobs"]
            top_ids = [int(max(entry, key=lambda token: entry[token]["logprob"])) for entry in entries] + last_ids
            if len(top_ids) == len(text):
                return states_TLD, top_ids
        raise self.endpoint.unusable("returns no prompt_logprobs of the text", "vLLM's completions", self.cure)

    def answer(self, request: Request, **more: Any) -> tuple[Tensor, Response]:
        """Return the states of a request's text and the response; ``more`` are further fields of the request's body."""
        for _ in range(ASKED_AT_MOST):
            response = self.endpoint.ask(request, kv_transfer_params={"include_output_tokens": True}, **more)
            if isinstance(response, Refusal):
                found = f"refuses a text of {len(request.prompt_ids)} tokens ({response.reason})"
                raise self.endpoint.unusable(found, "its states", self.cure)
            path = self._path(response.document)
            loaded = self._load(path)
            if loaded is not None:
                sent = list(request.prompt_ids)
                if loaded[1] == sent:
                    # No other file than this request's is deleted, whatever path the server names.
                    path.unlink()
                    _lock(path).unlink(missing_ok=True)
                return self._checked(*loaded, sent), response
        cure = "Check its log, that this directory is the server's, and that one user runs both; then run it again"
        raise self.endpoint.unusable(f"has not written {path}", "it within a minute", cure)

    def _path(self, document: JsonObject) -> Path:
        """Return the path of the file with the states of a completion.

        Raises:
            DataError: There is none, its directory is not here, or another server answers than before.
        """
        named = as_object(document.get("kv_transfer_params"))
        fingerprint = document.get("system_fingerprint")
        path = Path(str(named.get("hidden_states_path")))
        before = self.fingerprint or fingerprint
        self.fingerprint = fingerprint
        if "hidden_states_path" not in named:
            problem = "answers without states", "kv_transfer_params.hidden_states_path"
        elif before != fingerprint:
            problem = f"changed its settings (fingerprint {fingerprint})", f"{before}, as before"
        elif not path.parent.is_dir():
            problem = f"writes to {path.parent}, which is no directory here", "one that both machines share"
        else:
            return path
        raise self.endpoint.unusable(*problem, self.cure)

    def _load(self, path: Path) -> StatesWithIds | None:
        """Return the content of a file once it is complete; None if it does not become so in a minute."""
        for turn in range(FILE_WAITS):
            found = load(path)
            if found is not None:
                return found
            if turn % WAITS_A_NOTE == WAITS_A_NOTE - 1:
                self.endpoint.on_wait(f"{self.endpoint.url}: has not written {path}")
            self.wait(min(0.01 * 2**turn, 1.0))
        return load(path)

    def _checked(self, states_TLD: Tensor, read_ids: list[int], token_ids: list[int]) -> Tensor:
        """Return a copy of the states of a file.

        Raises:
            DataError: They are of other tokens, of another form, or not finite.
        """
        self.dtype = self.dtype or states_TLD.dtype
        form = (list(states_TLD.shape[1:]), states_TLD.dtype)
        expected = ([len(self.layers), self.width], self.dtype)
        # A block that the server never wrote is zero.
        peak_T = states_TLD.flatten(1).abs().amax(-1)
        bad_T = (~peak_T.isfinite() | (peak_T == 0)).nonzero()[:, 0]
        if read_ids != token_ids:
            problem = f"has the states of {len(read_ids)} other tokens", f"the {len(token_ids)} that were sent"
        elif len(states_TLD) != len(token_ids):
            rows = f"{len(token_ids)}: prefix caching omits those it has (--no-enable-prefix-caching)"
            problem = f"returns {len(states_TLD)} states", rows
        elif form != expected:
            problem = "returns states of {} in {}".format(*form), "{} (layers, width) in {}".format(*expected)
        elif len(bad_T):
            found = f"returns states that are NaN, infinite or 0 at positions {bad_T[:8].tolist()} of {len(token_ids)}"
            problem = found, "finite ones"
        else:
            return states_TLD.clone()
        raise self.endpoint.unusable(*problem, self.cure)


def _reading(text: Sequence[int]) -> Request:
    return Request(prompt_ids=tuple(text), max_new_tokens=1)


def _lock(path: Path) -> Path:
    return Path(f"{path}.lock")


def load(path: Path) -> StatesWithIds | None:
    """Return the states and the token ids of a server's file; None while it is not complete."""
    with ExitStack() as stack:
        try:
            # Older releases write the file before they reply, without a lock.
            with suppress(FileNotFoundError):
                fcntl.flock(stack.enter_context(_lock(path).open()), fcntl.LOCK_SH | fcntl.LOCK_NB)
            file = stack.enter_context(safe_open(path, framework="pt"))
            return file.get_tensor("hidden_states"), file.get_tensor("token_ids").tolist()
        except (BlockingIOError, FileNotFoundError, SafetensorError):
            return None


@torch.no_grad()
def prove(
    server: StatesServer, texts: Iterable[Sequence[int]], logits_of: Callable[[Tensor], Tensor]
) -> tuple[int, int]:
    """Check a server's last states against its own most probable tokens, without the trunk.

    This finds states that are not those before the final norm, and a server with another final norm or lm_head. It
    does not find other layers below the same final norm and lm_head, such as an adapter's.

    Args:
        texts: Their first :data:`PROVED_TOKENS` tokens are sent.
        logits_of: From last states before the final norm, (T, D), to logits, (T, V).

    Returns:
        The number of positions, and at how many of them the server prefers the token of lm_head(norm(state)), or one
        that is at most one step of the states' dtype below it: logits are rounded to that dtype.

    Raises:
        DataError: They disagree in more than 1 % of the positions, or otherwise than by a near tie.
    """
    positions, agreeing, far = 0, 0, list[str]()
    for number, text in enumerate(texts):
        states_TLD, top_ids = server.top_ids(text[:PROVED_TOKENS])
        step = torch.finfo(states_TLD.dtype).eps
        logits_TV = logits_of(states_TLD[:, -1]).float().cpu()
        best_T, best_ids_T = logits_TV.max(-1)
        top_T = torch.tensor(top_ids).clamp(0, logits_TV.shape[-1] - 1)
        gap_T = best_T - logits_TV.gather(-1, top_T[:, None])[:, 0]
        positions += len(gap_T)
        agreeing += int((gap_T <= step * best_T.abs()).sum())
        far += [
            f"{number}:{at} {top_ids[at]}, not {best_ids_T[at]}"
            for at in (gap_T > NEAR_TIE * best_T.abs()).nonzero()[:, 0].tolist()
        ]
    if far or agreeing < LEAST_AGREEMENT * positions:
        raise server.endpoint.unusable(
            f"prefers the token of lm_head(norm(state)) at {agreeing / positions:.1%} of {positions} positions, and a "
            f"far one at {len(far)} (text:position {'; '.join(far[:3])})",
            f"{LEAST_AGREEMENT:.0%}, and near ties elsewhere",
            f"Serve the trunk itself. {server.cure}",
        )
    return positions, agreeing
