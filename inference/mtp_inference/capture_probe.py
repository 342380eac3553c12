"""Ask a process of its own whether rounds of a trunk can be captured.

A capture that fails harms its process: torch 2.11 leaves the allocator believing that the capture goes on
(pytorch#180395), so that it never captures again, cannot give memory back, and asserts where it is asked to. The child
process pays for that, or dies of it, instead of the decoder's.

The child rebuilds the trunk from its config, all layers in their shapes and dtypes, but with weights that share one
buffer, so that it takes the memory of the largest tensor. It captures rounds without drafts and with them, greedy and
sampled. That shows what the trunk's own operations do; a failure for lack of memory, of a drafter's operations, or of
kernels chosen for other lengths is not seen there. Adapters, packed weights and code of a checkpoint's own are not
rebuilt. What the child cannot answer is tried in the decoder's process.

A child costs an import of torch and transformers and a CUDA context, some ten seconds, once a process and trunk.
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
from mtp_train.heads.trunk import Trunk

SECONDS = 300.0
"""Until a child that does not answer is given up."""
CHILD = "from mtp_inference.capture_child import main; main()"
GREEDY, SAMPLED = "greedy", "sampled"
_refusals: dict[str, dict[str, str]] = {}
logger = logging.getLogger(__name__)

Weights = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name to shape and dtype, tied weights under each of their names."""


class ProbeSubject(NamedTuple):
    """What a child needs to know of a trunk, and of the batch."""

    config: PretrainedConfig
    family: str
    weights: Weights
    buffers: Mapping[str, Tensor]
    """On the CPU. They are few and small, and integers in them are divided by and looked up with."""
    device: torch.device
    num_rows: int

    def to_bytes(self) -> bytes:
        """Return everything as a line of JSON, and the buffers behind it as safetensors."""
        kind = type(self.config)
        told = {
            "class": [kind.__module__, kind.__qualname__],
            "config": self.config.to_dict(),
            "family": self.family,
            "weights": {name: [shape, str(dtype)] for name, (shape, dtype) in self.weights.items()},
            "device": str(self.device),
            "num_rows": self.num_rows,
        }
        # Tied buffers are one memory under several names.
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
    """Return why rounds of a trunk cannot be captured; None where they can, or where no child could tell.

    Args:
        trunk: The trunk, on a GPU.
        num_rows: Rows of the batch.
        samples: Whether rounds sample.
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
    """Describe a trunk."""
    model = trunk.causal_lm
    buffers = {name: value.cpu().contiguous() for name, value in model.named_buffers(remove_duplicate=False)}
    device = trunk.lm_head_VD.device
    return ProbeSubject(model.config, trunk.family.name, described(trunk), buffers, device, num_rows)


def described(trunk: Trunk) -> Weights:
    """Return the shape and dtype of every weight."""
    named = trunk.causal_lm.named_parameters(remove_duplicate=False)
    return {name: (tuple(value.shape), value.dtype) for name, value in named}


def ask_child(subject: ProbeSubject) -> dict[str, str]:
    """Return why rounds of a kind, ``greedy`` or ``sampled``, cannot be captured; nothing where they can."""
    # The modules that this process found, wherever it found them.
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
    """Read what a child left behind.

    Args:
        code: Its exit code, negative where a signal ended it.
        output: Lines of JSON: what it was about to capture, and in the end what cannot be.
        errors: What it said besides.
    """
    lines = [line for line in output.splitlines() if line.startswith(('{"capturing"', '{"refused"'))]
    last = json.loads(lines[-1]) if lines else {}
    if "refused" in last:
        refused: dict[str, str] = last["refused"]
        return refused
    if code < 0 and "capturing" in last:
        return {last["capturing"]: f"a process that tried died of signal {-code}"}
    reason = errors.strip().splitlines()[-1] if errors.strip() else f"exit code {code}"
    logger.info("capture probe: no answer (%s); rounds are captured without one.", reason)
    return {}
