"""Measure how the time of training divides among the parts of a step, without a wait of its own for the device."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


class StepTimer:
    """The ends of the parts of a step, on the device's own time line.

    A GPU runs behind the host, so events in its stream end the parts, and fetching counts only while the GPU has no
    work. Other devices have the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        """End a part, which began at the mark before."""
        at: Any = time.perf_counter()
        if self._device.type == "cuda":
            at = torch.Event(self._device, enable_timing=True)
            at.record()
        self._marks.append((part, at))

    def read(self, seconds: dict[str, float]) -> None:
        """Add the seconds of all marked parts but the first one; the caller has waited for the device."""
        for (_, start), (part, end) in pairwise(self._marks):
            seconds[part] += end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
        self._marks.clear()
