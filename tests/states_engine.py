"""A server of a tiny trunk's hidden states that stands in for vLLM with a hidden-states connector."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mtp_train.answers.states import StatesServer
from mtp_train.runs import served_states
from mtp_train.trunk.load import load_trunk
from openai_server import Reply, Served, openai_server
from tiny import family_of


class StatesEngine:
    """Replies with states of the trunk, in files, and with its most probable tokens.

    Each text is computed alone, by hooks on the layers and the final norm of transformers' model.

    Args:
        layers: The states before these layers are served before the last state.
    """

    def __init__(self, checkpoint: Path, family_name: str, directory: Path, layers: Sequence[int] = ()) -> None:
        trunk = load_trunk(checkpoint, family_of(family_name), dtype="float32")
        self.decoder, self.lm_head = trunk.decoder, trunk.causal_lm.lm_head
        self.layers = [*layers, len(self.decoder.layers)]
        self.norm = self.decoder.get_submodule(trunk.family.trunk.final_norm)
        self.directory, self.numbers = directory, itertools.count()
        self.served: Callable[[Tensor], Tensor] = lambda states_TLD: states_TLD
        """From the states to those that are served."""
        self.arrived: Callable[[int], Reply | None] = lambda number: None
        """Called with the number of each request; a reply is sent in place of the states."""
        self.fingerprint, self.release = "vllm-0.32.0-abc", "0.32.0"
        self.computed = cache(self.compute)
        self._lock = threading.Lock()
        self.threads = threading.enumerate()
        """Those that ran before it."""
        directory.mkdir(exist_ok=True)

    @torch.no_grad()
    def compute(self, token_ids: tuple[int, ...]) -> tuple[Tensor, list[int]]:
        """Return the states of a text, (T, L, D), and the most probable token after each of its tokens."""
        found: dict[int, Tensor] = {}
        inputs = [*self.decoder.layers, self.norm]

        def keep(number: int) -> Callable[..., None]:
            def hook(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
                found[number] = (args[0] if args else kwargs["hidden_states"])[0].clone()

            return hook

        with ExitStack() as stack:
            for number in self.layers:
                handle = inputs[number].register_forward_pre_hook(keep(number), with_kwargs=True)
                stack.callback(handle.remove)
            last_1TD = self.decoder(input_ids=torch.tensor([token_ids]), use_cache=False).last_hidden_state
        states_TLD = torch.stack([found[number] for number in self.layers], dim=1)
        return states_TLD, self.lm_head(last_1TD)[0].argmax(-1).tolist()

    def __call__(self, payload: dict[str, Any]) -> Reply:
        number = next(self.numbers)
        instead = self.arrived(number)
        if instead is not None:
            return instead
        with self._lock:
            states_TLD, top_ids = self.computed(tuple(payload["prompt"]))
        path = self.directory / f"{number}.safetensors"
        tensors = {"hidden_states": self.served(states_TLD).contiguous(), "token_ids": torch.tensor(payload["prompt"])}
        path.with_name(f"{path.name}.lock").touch()
        save_file(tensors, path)
        choice: dict[str, Any] = {"text": "", "token_ids": top_ids[-1:], "finish_reason": "length"}
        if "prompt_logprobs" in payload:
            choice["prompt_logprobs"] = [None, *[{str(one): {"logprob": -0.5}} for one in top_ids[:-1]]]
        document = {
            "choices": [choice],
            "usage": {"prompt_tokens": len(payload["prompt"])},
            "kv_transfer_params": {"hidden_states_path": str(path)},
            "system_fingerprint": self.fingerprint,
        }
        return Reply(body=json.dumps(document).encode())

    @contextmanager
    def serving(self) -> Iterator[Served]:
        with openai_server(self, owner="vllm", shows={"/version": lambda: self.release}) as served:
            yield served

    @property
    def left(self) -> list[str]:
        """The files that no client has deleted."""
        return sorted(path.name for path in self.directory.iterdir())


def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client of a run try again at once."""

    class Hasty(StatesServer):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.wait = self.endpoint.wait = lambda seconds: None

    monkeypatch.setattr(served_states, "StatesServer", Hasty)
