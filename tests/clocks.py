"""A clock that only work moves, so that what is timed can be known to the tick."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from mtp_train.evaluation import costs


class WorkClock:
    """Counts ticks for the calls of the modules that it watches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ticks = 0
        monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=self.read))
        monkeypatch.setattr(costs, "now", self.read)

    def read(self, *_device: Any) -> float:
        return float(self.ticks)

    @contextmanager
    def watching(self, module: nn.Module, ticks: int, *, each_token: bool) -> Iterator[None]:
        """Let every call of a module take so long meanwhile, or each token of a call."""

        def work(_module: nn.Module, _inputs: Any, output: Any) -> None:
            state: Tensor = output if isinstance(output, Tensor) else output.last_hidden_state
            self.ticks += ticks * (state.shape[0] * state.shape[1] if each_token else 1)

        with module.register_forward_hook(work):
            yield
