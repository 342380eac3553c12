"""A server of hidden states that stands in for vLLM with a hidden-states connector."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.trunk.load import load_trunk
from openai_server import Reply

Edit = Callable[[Any], Any]
Compute = Callable[[list[int]], tuple[Tensor, list[int]]]
"""From tokens to their states, (T, L, D), and the most probable token after each of them."""


def same(value: Any) -> Any:
    return value


class Engine:
    """Replies with states in files. Each edit breaks one thing.

    Args:
        answer: The response to a request for more than one token.
    """

    def __init__(self, directory: Path, compute: Compute, answer: Sequence[int] = ()) -> None:
        self.directory, self.compute, self.answer, self.numbers = directory, compute, list(answer), itertools.count()
        self.states: Edit = same
        self.tensors: Edit = same
        self.reply: Edit = same
        self.write: Callable[[dict[str, Tensor], Path], None] = save_file
        self.fingerprints: Iterator[str | None] = itertools.repeat("vllm-0.32.0-abc")
        self.lock = threading.Lock()
        directory.mkdir(exist_ok=True)

    def __call__(self, payload: dict[str, Any]) -> Reply:
        prompt = payload["prompt"]
        answers = payload["max_tokens"] > 1
        token_ids = [*prompt, *self.answer[:-1]] if answers else prompt
        path = self.directory / f"{next(self.numbers)}.safetensors"
        with self.lock:
            states_TLD, top_ids = self.compute(token_ids)
        tensors = {"hidden_states": self.states(states_TLD), "token_ids": torch.tensor(token_ids)}
        # The real connector locks a file before it replies, and leaves the lock's file there.
        path.with_name(f"{path.name}.lock").touch()
        self.write(self.tensors(tensors), path)
        new, reason = (self.answer, "stop") if answers else (top_ids[-1:], "length")
        choice: dict[str, Any] = {"text": "", "token_ids": new, "finish_reason": reason}
        if "prompt_logprobs" in payload:
            tops = [{str(one): {"logprob": -0.5}, "0": {"logprob": -9.0}} for one in top_ids[: len(prompt) - 1]]
            choice["prompt_logprobs"] = [None, *tops]
        document = {
            "choices": [choice],
            "usage": {"prompt_tokens": len(prompt)},
            "kv_transfer_params": {"hidden_states_path": str(path)},
            "system_fingerprint": next(self.fingerprints),
        }
        return Reply(body=json.dumps(self.reply(document)).encode())


def states_of(checkpoint: Path, layers: Sequence[int], num_fewer: int = 0) -> Compute:
    """Return the states of a trunk: before some layers, and before the final norm or a layer above."""
    trunk = load_trunk(open_checkpoint(checkpoint), dtype="float32")
    decoder = trunk.decoder
    found = dict[int, Tensor]()
    inputs = [*decoder.layers, decoder.get_submodule(trunk.family.trunk.final_norm)]
    numbers = [*layers, len(inputs) - 1 - num_fewer]

    def keep(number: int, _: Any, args: tuple[Tensor, ...]) -> None:
        found[number] = args[0][0].clone()

    for number in numbers:
        inputs[number].register_forward_pre_hook(partial(keep, number))

    @torch.no_grad()
    def compute(token_ids: list[int]) -> tuple[Tensor, list[int]]:
        last_1TD = decoder(input_ids=torch.tensor([token_ids]), use_cache=False).last_hidden_state
        top_ids = trunk.causal_lm.lm_head(last_1TD)[0].argmax(-1).tolist()
        return torch.stack([found[number] for number in numbers], dim=1), top_ids

    return compute
