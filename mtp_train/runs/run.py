"""A run in progress, and its trunk: what the stages of runs, studies and regenerations share."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from rich.progress import Progress

from mtp_train.checkpoints.identity import RECORD_FILE, Records
from mtp_train.checkpoints.locations import RECIPE_FILE
from mtp_train.checkpoints.writing import LOCK_FILE
from mtp_train.data.tokenize import Document, Prompt
from mtp_train.errors import OutOfMemoryError, TrainingError
from mtp_train.evaluation.decoding import Processes
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.shipped import accelerate_file
from mtp_train.runs.forecast import Forecast
from mtp_train.runs.inputs import Inputs, gather_inputs
from mtp_train.runs.refusals import require_answers
from mtp_train.runs.resolve import Choice
from mtp_train.runs.run_directory import ADAPTER, TRUNK, Attempt, RunDirectory, checkpoint_identity, environment_facts
from mtp_train.runs.settings import plan_of
from mtp_train.train.launch import RunAccelerator, lost_process_is_named, make_accelerator, require_processes
from mtp_train.train.plan import Plan
from mtp_train.train.shard import give_up_shards
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.precision import resolve_precision

ATTEMPTS, PAUSE_SECONDS = 60, 1.0
"""A network file system may show new files only after its cache's time, by default up to a minute for NFS."""
SMALL_BYTES = 1 << 16
_CPU_ALLOCATOR = "DefaultCPUAllocator"


def join_processes(recipe: Recipe, directory: RunDirectory) -> tuple[RunAccelerator, Recipe]:
    """Join the processes of the launch. Return them, and the recipe with ``precision: auto`` resolved for all."""
    with lost_process_is_named():
        accelerator = make_accelerator()
        require_processes(recipe.train.processes, accelerator)
        # The main process holds the lock. Machines without a common file system are found before any trunk is loaded.
        require_shared(directory.path, [LOCK_FILE], accelerator)
        resolved = directory.with_precision(recipe, resolve_precision("auto", accelerator.device).precision)
        return accelerator, accelerator.said_by_main(resolved)


@dataclass
class HeldTrunk:
    """The trunk in memory, of which there is one at a time."""

    trunk: Trunk | None = None
    form: Literal["whole", "in shards", "spent"] = "spent"
    """``spent``: in shards that a training has wrapped, so that no other one can use them."""
    dtype: torch.dtype | None = None

    @property
    def whole(self) -> Trunk | None:
        return self.trunk if self.form == "whole" else None

    def release(self, accelerator: RunAccelerator) -> None:
        """Let go of the trunk and its memory; the caller has to drop its own references."""
        if self.trunk is not None:
            give_up_shards(self.trunk, accelerator)
        self.trunk = None
        self.form = "spent"
        # Shards and their hooks form reference cycles.
        gc.collect()


@dataclass
class Run:
    """A run in progress, with the trunk that its stages read. Every process has one, and makes the same calls."""

    recipe: Recipe
    directory: RunDirectory
    inputs: Inputs
    accelerator: RunAccelerator
    progress: Progress
    attempt: Attempt = field(default_factory=Attempt)
    records: Records = field(default_factory=dict)
    """Content hashes of the inputs from before they were loaded; of the main process."""
    held: HeldTrunk = field(default_factory=HeldTrunk)
    forecast: Forecast = field(default_factory=Forecast)

    @classmethod
    def begin(
        cls,
        recipe: Recipe,
        directory: RunDirectory,
        accelerator: RunAccelerator,
        progress: Progress,
        attempt: Attempt | None = None,
        *,
        judges: bool = True,
    ) -> Run:
        """Gather, check and hash the inputs of a run. Writes nothing: a corrected recipe can use the directory.

        Args:
            judges: Whether the gate, if the recipe has one, needs its groups of prompts.
        """
        is_main = accelerator.is_main_process
        if is_main:
            directory.require_same_inputs(recipe, progress, anew=True)
        inputs = gather_inputs(recipe, accelerator.num_processes, progress, judges=judges)
        records = directory.hash_inputs(recipe, progress) if is_main else {}
        if is_main:
            adapter = records[ADAPTER].contents if ADAPTER in records else None
            require_answers(recipe, directory.path, (records[TRUNK].contents, adapter))
        return cls(recipe, directory, inputs, accelerator, progress, attempt or Attempt(), records)

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def plan(self) -> Plan:
        return plan_of(self.recipe, self.accelerator.num_processes)

    @property
    def processes(self) -> Processes:
        return processes_of(self.accelerator)

    def settle(self, choices: Sequence[Choice]) -> None:
        """Set fields that were ``auto`` in the recipe and in its record, and print them."""
        self.recipe = self.recipe.replaced({one.field: one.value for one in choices})
        if self.is_main:
            self.directory.record_recipe(self.recipe)
            values = ", ".join(f"{one.field}={one.shown}" for one in choices)
            self.progress.console.print(f"chosen by rule: {values}")

    def claim(self) -> None:
        """Claim the directory for the recipe and its inputs, and give the inputs their recorded identities."""
        inputs = self.inputs
        accelerator = self.accelerator
        if accelerator.num_processes > 1:
            models = [one for one in (inputs.finetune, inputs.donor) if one is not None]
            configs = [checkpoint_identity("", one)["sha256"] for one in models]
            checksum = text_checksum(inputs.text.documents, [*inputs.text.prompts, *inputs.text.held_out])
            require_alike({"model": configs, "data": checksum}, accelerator)
        if self.is_main:
            model = self.recipe.model
            provenance = {
                "trunk": checkpoint_identity(model.trunk, inputs.finetune),
                "head_from": checkpoint_identity(model.head_from or "", inputs.donor) if inputs.donor else None,
                "seed": self.recipe.seed,
                "plan": asdict(self.plan),
                **environment_facts(),
            }
            self.directory.claim(self.recipe, provenance, self.records)
            self.directory.require_same_inputs(self.recipe, self.progress)
        require_shared(self.directory.path, [RECIPE_FILE, RECORD_FILE], accelerator)
        self.inputs = replace(inputs, contents=self.directory.contents)


def processes_of(accelerator: RunAccelerator) -> Processes:
    return Processes(accelerator.process_index, accelerator.num_processes, accelerator.gather_items)


def require_shared(directory: Path, names: Sequence[str], accelerator: RunAccelerator) -> None:
    """Wait until every process sees the same files of a directory; every process must call it."""
    for _ in range(ATTEMPTS):
        first, *others = accelerator.gather_items([files_in(directory, names)])
        odd = [rank for rank, seen in enumerate(others, start=1) if seen != first]
        if not odd:
            return
        time.sleep(PAUSE_SECONDS)
    differing = sorted({path for path, _ in first.items() ^ others[odd[0] - 1].items()})
    raise TrainingError(
        f"run_dir: {directory}: processes 0 and {odd[0]} see different files ({', '.join(differing[:3])}); expected "
        "one directory for all machines. Put run_dir on a file system that they share."
    )


def files_in(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the size of every file by its path, and of small ones a hash of the content."""
    found = {}
    for name in names:
        top = directory / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file():
                size = path.stat().st_size
                content = hashlib.sha256(path.read_bytes()).hexdigest() if size <= SMALL_BYTES else ""
                found[str(path.relative_to(directory))] = f"{size} {content}"
    return found


def require_alike(read: Mapping[str, object], accelerator: RunAccelerator) -> None:
    """Check that all processes read the same inputs, given checksums by name; every process must call it."""
    (first, _), *others = accelerator.gather_items([(read, socket.gethostname())])
    for rank, (other, host) in enumerate(others, start=1):
        for what in (name for name, checksum in other.items() if checksum != first[name]):
            raise TrainingError(
                f"{what}: the files of process {rank} on {host} differ from those of process 0; expected the same on "
                "all machines. Put them on a file system that the machines share, or copy them again."
            )


def text_checksum(documents: Iterable[Document], prompts: Iterable[Prompt]) -> str:
    """Return a checksum of tokens, targets and groups of documents, and of tokens and groups of prompts."""
    checksum = hashlib.sha256()
    for document in documents:
        checksum.update(repr((document.id, document.group, len(document.input_ids))).encode())
        checksum.update(document.input_ids.tobytes())
        checksum.update(document.loss_mask.tobytes())
    for prompt in prompts:
        checksum.update(repr((prompt.id, prompt.group, list(prompt.prompt_ids))).encode())
    return checksum.hexdigest()


@contextlib.contextmanager
def memory_is_named(stage: Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error of the device or the machine into one with a hint for the stage of the run."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _CPU_ALLOCATOR in str(error)
        if not is_full:
            raise
        found = str(error).strip().partition("\n")[0].partition(" GPU ")[0] or "no memory left"
        raise OutOfMemoryError(
            f"stage '{stage()}': out of memory ({found.rstrip('. ')}); expected it to suffice. "
            f"{f'{_CURES[stage()]}. ' if stage() in _CURES else ''}{_LESS_OF_THE_TRUNK}"
        ) from error


_CURES = {
    "data": "Lower data.regenerate.batch_size or data.regenerate.max_new_tokens",
    "train": "Write train.micro_batch_sequences: 1, then train.gradient_checkpointing: true; neither changes a result",
    "evaluate": "Lower evaluate.dense_tokens, evaluate.max_new_tokens or study.batch",
}
_LESS_OF_THE_TRUNK = (
    f"Write model.dtype: bfloat16, or model.offload: cpu; or launch with {accelerate_file('fsdp2')} on several GPUs, "
    "which puts the trunk in shards."
)
