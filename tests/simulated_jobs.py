"""What is done on the simulated device.

``python simulated_jobs.py DIR '{"refusals": [], "waits": [], "decode": [KIND, ...], "job": SETTINGS}'``

A process of its own does what is named and prints what came of it as JSON: torch counts the devices there are once, at
its first gradient, and what follows in the process would find one more.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from documents import random_documents
from json_files import read_json
from mtp_inference import HeadDrafting, Request, Sampling, SpeculativeDecoder
from mtp_inference.drafters.ngram_drafter import NgramDrafting
from mtp_train.cli.main import main as command_line
from mtp_train.data.pack import global_batches
from mtp_train.errors import GateRefusedError
from mtp_train.evaluation import run as study_run
from mtp_train.runs import decode, pipeline
from mtp_train.runs.settings import plan_of, train_options
from mtp_train.train import loop
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.loop import train_head
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.states import PackedRow, StoredStates, TrunkStates
from runs import tiny_recipe, write_inputs
from simulated_device import DEVICE, SimulatedTensor, simulated_device
from tiny import CACHE_KINDS, VOCAB_SIZE, tiny_head, tiny_trunk

_aten = torch.ops.aten
_WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique2",
    "_unique2",
    "unique_dim",
    "equal",
    "is_nonzero",
}
_COPYING = {"_to_copy", "copy_", "_copy_from"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_OTHERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class Waits:
    """The places of a block at which the host waits, in order, as ``module.function``."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self._modes = (_Operations(self), _Calls(self))

    def __enter__(self) -> Waits:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def note(self, what: str) -> None:
        """Record the innermost function that is not torch's or of these tests."""
        place = [one for one in traceback.extract_stack() if not one.filename.startswith(_OTHERS)][-1]
        self.places.append(f"{Path(place.filename).stem}.{place.name}: {what}")


class _Operations(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(isinstance(one, SimulatedTensor) for one in given)
        if name in _COPYING:
            ends = (given[0], result) if name == "_to_copy" else (given[1], given[0])
            if self._blocks(*ends, kwargs, args):
                self._waits.note(name)
        elif there and (name in _WAITING or (name in _INDEXED and _has_mask(args[1]))):
            self._waits.note(name)
        return result

    @staticmethod
    def _blocks(source: Tensor, target: Tensor, kwargs: dict[str, Any], args: tuple[Any, ...]) -> bool:
        from_there, to_there = (isinstance(one, SimulatedTensor) for one in (source, target))
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        return source.numel() > 0 and from_there != to_there and (from_there or not non_blocking)


def _has_mask(indices: Any) -> bool:
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices)


class _Calls(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist and isinstance(args[0], SimulatedTensor):
            self._waits.note("tolist")
        return func(*args, **(kwargs or {}))


SHORT = {"train__max_steps": 2, "evaluate__prompts": 2, "gate__confidence": 0.6, "evaluate__max_new_tokens": 6}
WAITS = {
    **{"head__num_depths": 3, "data__seq_len_tokens": 16, "train__tokens_per_step": 64, "train__log_steps": 2},
    **{"train__micro_batch_sequences": 2, "train__max_steps": 3, "train__save_steps": 100},
}
_SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=3)


@contextlib.contextmanager
def everything_there() -> Iterator[torch.device]:
    """Have training and measuring choose the device."""
    with simulated_device() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate.Accelerator, "device", property(lambda self: device))
        for module in (decode, study_run):
            patch.setattr(module, "local_device", lambda: device)
        yield device


def refusals(device: torch.device) -> dict[str, Any]:
    """Return the errors for tensors of both devices, and the results of operations that take both."""
    there = torch.ones(3, device=device)
    said = []
    for operation in (lambda: there + torch.ones(3), lambda: there.index_select(0, torch.tensor([1]))):
        try:
            operation()
        except RuntimeError as error:
            said.append(str(error))
    allowed = (there + torch.tensor(1.0))[torch.tensor([0])]
    return {"refused": said, "allowed": allowed.tolist(), "devices": [there.device.type, there.cpu().device.type]}


def texts(trunk: Trunk, drafting: HeadDrafting | NgramDrafting, sampled_drafts: bool) -> list[list[int]]:
    """Return the texts of a batch of requests of all kinds."""
    requests = [
        Request(prompt_ids=range(5), max_new_tokens=10),
        Request(prompt_ids=range(3, 20), max_new_tokens=9, sampling=_SAMPLED),
        Request(prompt_ids=[7], max_new_tokens=8, mtp="auto"),
        Request(prompt_ids=[7], max_new_tokens=8, mtp="off"),
    ]
    sampling = "sampled" if sampled_drafts else "argmax"
    decoder = SpeculativeDecoder(trunk, drafting, 3, (), draft_sampling=sampling, max_batch=4)
    return [list(result.token_ids) for result in decoder.generate(requests)]


def decoded(device: torch.device, kinds: list[str]) -> dict[str, Any]:
    """Return the text with every kind of cache on the CPU and on the device."""
    found: dict[str, Any] = {}
    for kind in kinds:
        trunk = tiny_trunk(CACHE_KINDS[kind])
        head = tiny_head(trunk)
        for where in ("cpu", device):
            drafting = HeadDrafting(head.to(where))
            said = [texts(trunk.to(where), drafting, sampled) for sampled in (False, True)]
            # Greedy texts are the same, whatever drafts.
            looked_up = texts(trunk, NgramDrafting(), False)
            found.setdefault(kind, []).append([*said, looked_up])
    return found


class KeptStates(StoredStates):
    """Hidden states in place of a trunk's."""

    def prepare(self, shares: Sequence[Sequence[PackedRow]], rank: int, max_tokens: int | None = None) -> Tensor:
        return torch.ones(len(shares[rank]), len(shares[rank][0].document_T), self.width)


def steps_waits(
    directory: Path,
    name: str = "qwen3_5",
    *,
    keeps: bool = False,
    knows: bool = True,
    pins: bool = True,
    num_starts: int | None = None,
) -> list[list[str]]:
    """Train, and return where the host waits in each step between the first and the last one.

    ``keeps``: with hidden states that are given. The controls: forwards that are not told what the host ``knows``, and
    copies of memory that is not page-locked.
    """
    used = tiny_recipe(directory, directory, **WAITS)
    plan = plan_of(used, 1)
    trunk = tiny_trunk(name)
    settings: dict[str, Any] = {"draft_vocab": torch.arange(0, VOCAB_SIZE, 2)} if keeps else {}
    states = KeptStates(trunk, width=trunk.state_width, dtype=torch.float32) if keeps else TrunkStates(trunk)
    module = HeadTraining(states, tiny_head(trunk), num_depths=3, kind="lk", temperature=1.0, **settings)
    sizes: dict[str, int] = {"seq_len_tokens": plan.seq_len_tokens, "sequences_per_step": plan.sequences_per_step}
    chosen: dict[str, Any] = {"num_depths": 3, "num_starts": num_starts}
    forward = HeadTraining.forward
    marks = list[int]()
    with pytest.MonkeyPatch.context() as patch, Waits() as waits:
        pinned = list[Tensor]()
        patch.setattr(loop, "_PINNING", (DEVICE,) if pins else ())
        patch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
        patch.setattr(Tensor, "is_pinned", lambda tensor: any(tensor is one for one in pinned))
        if not knows:
            unknown = {"prepared": None, "used_N": None}
            patch.setattr(HeadTraining, "forward", lambda self, micro: forward(self, replace(micro, **unknown)))
        train_head(
            module,
            options=train_options(used),
            plan=plan,
            batch_fn=global_batches(random_documents((16, 9, 14, 7, 5, 11)), **sizes, **chosen, pack=True, seed=0),
            accelerator=accelerate.Accelerator(gradient_accumulation_steps=plan.accumulation),
            state_dir=directory / "state",
            make_log=lambda _step: None,
            on_step=lambda _done: marks.append(len(waits.places)),
        )
    return [waits.places[begun:ended] for begun, ended in pairwise(marks[1:-1])]


def waits(directory: Path) -> dict[str, list[list[str]]]:
    """Return where the host waits in steps of training, and in the controls' steps."""
    return {
        "with the trunk": steps_waits(directory / "trunk"),
        "with states": steps_waits(directory / "states", keeps=True),
        "with experts": steps_waits(directory / "experts", "qwen3_5_moe"),
        "with positions": steps_waits(directory / "positions", keeps=True, num_starts=4),
        "unknown": steps_waits(directory / "unknown", knows=False),
        "in order": steps_waits(directory / "order", pins=False),
    }


def job(device: torch.device, directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run a job up to its report, then decode and evaluate with its head; the gate may refuse such a short one."""
    inputs = write_inputs(directory / "in")
    run_dir = directory / "run"
    with contextlib.suppress(GateRefusedError):
        pipeline.run(tiny_recipe(inputs, run_dir, **{**SHORT, **settings}))
    given = [str(inputs / "finetune"), "--head", str(run_dir / "head"), "--max-new-tokens", "6"]
    grid = ["--suite", "demo", "--prompts-per-task", "2", "--temperatures", "1", "--depths", "2"]
    codes = [
        command_line(["generate", *given, "--prompt", "say 1"]),
        command_line(["evaluate", *given, *grid, "--out", str(directory / "evaluated")]),
    ]
    report = read_json(run_dir / "report.json")
    settings = read_json(directory / "evaluated" / "report.json")["settings"]
    return {
        "codes": codes,
        "rounds": report["arms"]["retrained"]["rounds"],
        "devices": [report["settings"]["device"], settings["device"], str(device)],
    }


def main() -> None:
    """Do what the command line names."""
    directory = Path(sys.argv[1])
    asked = json.loads(sys.argv[2])
    with everything_there() as device:
        do: dict[str, Callable[[Any], Any]] = {
            "refusals": lambda _: refusals(device),
            "waits": lambda _: waits(directory),
            "decode": lambda kinds: decoded(device, kinds),
            "job": lambda settings: job(device, directory, settings),
        }
        found = {what: do[what](details) for what, details in asked.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
