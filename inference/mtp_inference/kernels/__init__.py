"""Triton kernels for the rounds of a decoder: each replaces a chain of small operations by one launch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch


def torch_operation(name: str, *, mutates_args: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as an operation that computes with torch on CPUs and on the meta device."""

    def registered(function: Callable[..., Any]) -> Any:
        operation = torch.library.custom_op(name, mutates_args=mutates_args, device_types="cpu")(function)
        # torch 2.11 registers the meta device twice where device_types names it.
        operation.register_fake(function)
        return operation

    return registered


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
