"""Parts of ``gpu.py`` for head training as runs do it: steps over packed documents, the hidden cache, and offload."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from accelerate import Accelerator
from cpu import Row, now
from gpu_kernels import peak_bytes

from mtp_inference import HeadDrafting
from mtp_train.data.pack import pack_documents
from mtp_train.data.tokenize import Document
from mtp_train.losses import chunked
from mtp_train.losses.chunked import gpu_bytes_of
from mtp_train.train import plan
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.hidden_cache import CachedStates, HiddenCache
from mtp_train.train.loop import train_head
from mtp_train.train.plan import MemoryOptions, TrainOptions, estimate_footprint, make_plan
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.recurrent_kernels import ByTensor
from mtp_train.trunk.states import States, TrunkStates
from mtp_train.upstream import compiled

CHUNK_ROWS = (384, 768, 1536)


class EnoughError(Exception):
    """Ends the loop of a run once enough steps are timed."""


def uncompiled() -> AbstractContextManager[object]:
    """Return the patch that runs every compiled function as it is."""
    return patch.object(compiled, "compiled", lambda function, **_options: function)


def patches(trunk: Trunk) -> dict[str, list[AbstractContextManager[object]]]:
    """Return the changes of a step, each as the patches that make it; without packages of kernels, none of these."""
    module = sys.modules[type(trunk.decoder).__module__]
    kernels = {name: one for name, one in vars(module).items() if isinstance(one, ByTensor)}
    in_torch = [patch.object(module, name, ByTensor(one.kernel, one.plain, ())) for name, one in kernels.items()]
    found: dict[str, list[AbstractContextManager[object]]] = {"nothing compiled": [uncompiled()]}
    if in_torch:
        found["recurrent layers in torch"] = in_torch
    for rows in CHUNK_ROWS:
        # Of the loss, and of the plan of its memory.
        found[f"chunks of {rows} rows"] = [
            patch.object(one, "chunk_rows", lambda *_, r=rows: r) for one in (chunked, plan)
        ]
    return found


class Steps:
    """Steps of a run over packed documents of random tokens.

    Args:
        tokens: Tokens of a step.
        seq_len: T.
        depth: K.
        repeats: Timed steps, after one that is not counted.
    """

    def __init__(
        self, trunk: Trunk, drafting: HeadDrafting, *, tokens: int, seq_len: int, depth: int, repeats: int
    ) -> None:
        self.trunk, self.head = trunk, drafting.head.float().requires_grad_(True)
        self.repeats = repeats
        self.device, rows = trunk.lm_head_VD.device, tokens // seq_len
        self.plan = make_plan(
            max_steps=repeats + 2,
            tokens_per_step=tokens,
            seq_len_tokens=seq_len,
            micro_batch_sequences=rows,
            world_size=1,
        )
        draw = torch.Generator().manual_seed(0)
        self.documents = []
        for number, length in enumerate(
            torch.randint(seq_len // 16 + 4, seq_len // 2, (16 * rows,), generator=draw).tolist()
        ):
            drawn = torch.randint(len(trunk.lm_head_VD), (length,), generator=draw).tolist()
            self.documents.append(Document(drawn, [True] * length, str(number), str(number)))
        self.sequences = pack_documents(self.documents, seq_len, pack=True, seed=0, epoch=0)[:rows]
        self.settings = {"num_depths": depth, "compute_dtype": torch.bfloat16}

    def timed(self, states: States | None = None) -> Row:
        """Return the median time of a step, and the peak memory beside what ``mtp-train check`` plans."""
        ended = []

        def on_step(done: int) -> None:
            ended.append(time.perf_counter())
            if done > self.repeats:
                raise EnoughError

        # Before the last step, which saves the state.
        with tempfile.TemporaryDirectory() as directory, suppress(EnoughError):
            train_head(
                HeadTraining(states or TrunkStates(self.trunk), self.head, kind="kl", temperature=1.0, **self.settings),
                options=TrainOptions(
                    **{"lr": 1e-6, "betas": (0.9, 0.95), "weight_decay": 0.0, "max_grad_norm": 1.0, "depth_decay": 0.6},
                    **{"schedule": "constant", "warmup_steps": 0, "log_steps": 1000, "save_steps": 1000},
                    max_steps=self.plan.max_steps,
                ),
                plan=self.plan,
                batch_fn=lambda _step: self.sequences,
                accelerator=Accelerator(cpu=self.device.type == "cpu"),
                state_dir=Path(directory),
                make_log=lambda _step: None,
                on_step=on_step,
            )
        seconds = median(second - first for first, second in pairwise(ended[1:]))
        head = {name: one.shape for name, one in self.head.named_parameters()}
        options = MemoryOptions(**self.settings, recompute=False)
        planned = estimate_footprint(options, self.trunk, head, self.plan, self.device, gpu_bytes_of(self.device))
        return {
            "seconds": round(seconds, 4),
            "tokens_per_second": round(sum(int((one.document_T >= 0).sum()) for one in self.sequences) / seconds, 1),
            "chunk_rows": planned.loss_rows,
            "peak_bytes": peak_bytes(self.device),
            "planned_bytes": planned.total_bytes,
        }

    def changed(self, change: list[AbstractContextManager[object]]) -> Row:
        with ExitStack() as stack:
            for one in change:
                stack.enter_context(one)
            return self.timed()

    def cells(self, work: Path) -> Row:
        """Return cells for the step as shipped, for each change of it, and for the hidden cache in a directory."""
        states, width = TrunkStates(self.trunk), self.trunk.state_width
        cache = HiddenCache(work / "states", self.documents, width=width, dtype=self.trunk.lm_head_VD.dtype)

        def build() -> Row:
            started = now(self.device)
            most = {"max_tokens": self.plan.micro_batch_tokens, "rank": 0, "world": 1}
            cache.build(states, cache.missing(), device=self.device, on_shard=lambda *_: None, **most)
            seconds = now(self.device) - started
            rates = {"tokens_per_second": cache.num_tokens / seconds, "gb_per_second": cache.num_bytes / seconds / 1e9}
            return {name: round(rate, 3) for name, rate in rates.items()}

        return {
            "as shipped": self.timed,
            **{name: partial(self.changed, change) for name, change in patches(self.trunk).items()},
            "hidden cache, written": build,
            "step from the hidden cache": partial(self.timed, CachedStates(self.trunk, cache, torch.bfloat16)),
        }


def offloaded(trunk: Trunk, device: torch.device, tokens: int) -> Row:
    """Return the rate at which layers are loaded from main memory, each as it runs."""
    num_bytes = sum(one.nbytes for one in trunk.layers.parameters())
    trunk.to("cpu").offload_layers(device)
    taken = []
    for _ in range(4):
        started = now(device)
        with torch.no_grad():
            trunk.hidden(torch.zeros(1, tokens, dtype=torch.long, device=device))
        taken.append(now(device) - started)
    return {"seconds": round(median(taken[1:]), 4), "gb_per_second": round(num_bytes / median(taken[1:]) / 1e9, 2)}
