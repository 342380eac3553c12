"""Triton kernels for the rounds of a decoder: each replaces a chain of small operations by one launch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

TORCH_DEVICES = ("cpu", "meta")
"""Devices on which the operations compute with torch. A round on the meta device has the launches of one on a GPU."""


def run_on_gpus(operation: Any, launch: str) -> None:
    """Make an operation run a function of ``programs.py`` on CUDA and ROCm devices.

    The module is imported by the first call, as it imports Triton.

    Args:
        operation: The result of ``torch.library.custom_op``.
        launch: Name of the function, which takes the operation's arguments.
    """

    def run(*arguments: Any) -> Any:
        return vars(import_module("mtp_inference.kernels.programs"))[launch](*arguments)

    operation.register_kernel("cuda")(run)
