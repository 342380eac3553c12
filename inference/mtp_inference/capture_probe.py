"""Test in a child process whether rounds of a trunk can be captured.

A failed capture damages its process: in torch 2.11 the allocator still assumes that the capture is running
(pytorch#180395). The process can then neither capture again nor free memory; it raises an assertion when it has to. The
child process takes this damage, or crashes, instead of the decoder's process.

The child rebuilds the trunk from its config, all layers in their shapes and dtypes. All weights share one buffer, so it
needs the memory of the largest tensor only. It captures rounds without and with drafts, greedy and sampled. This tests
the trunk's own operations. It does not find failures from lack of memory, from a drafter's operations, or from kernels
chosen for other lengths. Adapters, packed weights and a checkpoint's own code are not rebuilt. If the child gives no
answer, the capture is tried in the decoder's process.

A child imports torch and transformers and creates a CUDA context. This takes about ten seconds, once per process and
trunk.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import PretrainedConfig

from mtp_train.families import FAMILIES
from mtp_train.trunk.load import Trunk

SECONDS = 300.0
"""Time limit of a child."""
CHILD = "from mtp_inference.capture_child import main; main()"
GREEDY, SAMPLED = "greedy", "sampled"
_refusals: dict[str, dict[str, str]] = {}
logger = logging.getLogger(__name__)

Weights = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name to shape and dtype; tied weights are listed under each name."""


class ProbeSubject(NamedTuple):
    """Description of a trunk and a batch for the child."""

    config: PretrainedConfig
    family: str
    weights: Weights
    buffers: Mapping[str, Tensor]
    """Buffers with their values, on the CPU. They are small, and integers in them serve as divisors and indices."""
    device: torch.device
    num_rows: int

    def to_bytes(self) -> bytes:
        """Return a line of JSON, followed by the buffers as safetensors."""
        kind = type(self.config)
        told = {
            "class": [kind.__module__, kind.__qualname__],
            "config": self.config.to_dict(),
            "family": self.family,
            "weights": {name: [shape, str(dtype)] for name, (shape, dtype) in self.weights.items()},
            "device": str(self.device),
            "num_rows": self.num_rows,
        }
        # Clone: safetensors refuses tied buffers, which share memory.
        return json.dumps(told).encode() + b"\n" + save({name: value.clone() for name, value in self.buffers.items()})

    @classmethod
    def from_bytes(cls, sent: bytes) -> ProbeSubject:
        """Read what :meth:`to_bytes` returned."""
        line, _, buffers = sent.partition(b"\n")
        told = json.loads(line)
        module, name = told["class"]
        weights = {
            weight: (tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
            for weight, (shape, dtype) in told["weights"].items()
        }
        config = getattr(import_module(module), name).from_dict(told["config"])
        return cls(config, told["family"], weights, load(buffers), torch.device(told["device"]), told["num_rows"])


def why_not_captured(trunk: Trunk, num_rows: int, samples: bool) -> str | None:
    """Return the reason why rounds of a trunk cannot be captured; None if they can, or if the child gave no answer.

    Args:
        trunk: The trunk, on a GPU.
        num_rows: Number of batch rows.
        samples: Whether rounds sample tokens.
    """
    device = trunk.lm_head_VD.device
    if trunk.family.name not in {family.name for family in FAMILIES} or device.type != "cuda":
        return None
    key = f"{trunk.causal_lm.config.to_json_string()} {sorted(described(trunk).items())} {device}"
    if key not in _refusals:
        _refusals[key] = ask_child(probe_subject(trunk, num_rows))
    refused = _refusals[key]
    return refused.get(GREEDY) or (refused.get(SAMPLED) if samples else None)


def probe_subject(trunk: Trunk, num_rows: int) -> ProbeSubject:
    """Return the description of a trunk."""
    model = trunk.causal_lm
    buffers = {name: value.cpu().contiguous() for name, value in model.named_buffers(remove_duplicate=False)}
    device = trunk.lm_head_VD.device
    return ProbeSubject(model.config, trunk.family.name, described(trunk), buffers, device, num_rows)


def described(trunk: Trunk) -> Weights:
    """Return the shape and dtype of every weight."""
    named = trunk.causal_lm.named_parameters(remove_duplicate=False)
    return {name: (tuple(value.shape), value.dtype) for name, value in named}


def ask_child(subject: ProbeSubject) -> dict[str, str]:
    """Return the kinds of rounds, ``greedy`` or ``sampled``, that cannot be captured, with the reason."""
    # The child must import the same modules as this process.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD],
            input=subject.to_bytes(),
            env=env,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired, TypeError, ValueError) as error:
        logger.info("capture probe: no answer (%s); rounds are captured without one.", error)
        return {}
    return verdict(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def verdict(code: int, output: str, errors: str) -> dict[str, str]:
    """Return the refused kinds of rounds from a child's exit code and output.

    Args:
        code: Exit code of the child; negative if a signal ended it.
        output: JSON lines: each kind before its capture, and at the end the kinds that cannot be captured.
        errors: The child's stderr.
    """
    lines = [line for line in output.splitlines() if line.startswith(('{"capturing"', '{"refused"'))]
    last = json.loads(lines[-1]) if lines else {}
    if "refused" in last:
        refused: dict[str, str] = last["refused"]
        return refused
    if code < 0 and "capturing" in last:
        return {last["capturing"]: f"a process that tried was ended by signal {-code}"}
    reason = errors.strip().splitlines()[-1] if errors.strip() else f"exit code {code}"
    logger.info("capture probe: no answer (%s); rounds are captured without one.", reason)
    return {}
