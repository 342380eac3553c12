"""Steps that runs, studies and fine-tunes share: load the trunk, claim the run directory, make the documents."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from rich.progress import Progress
from torch import nn

from mtp_train.checkpoints.identity import RECORD_FILE, Records
from mtp_train.checkpoints.quantised import quant_method
from mtp_train.checkpoints.run_export import RECIPE_FILE
from mtp_train.data.tokenize import Document
from mtp_train.errors import RecipeError, TrainingError
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.shipped import accelerate_file
from mtp_train.runs.input_identity import record_run_inputs, require_run_inputs, run_contents
from mtp_train.runs.inputs import Inputs, decoding_problem
from mtp_train.runs.regeneration import regenerate_stage, stored_documents
from mtp_train.runs.run_dir import FIRST_STAGE, checkpoint_identity, claim, environment_facts
from mtp_train.runs.shared_files import checkpoints_checksum, require_alike, require_shared, text_checksum
from mtp_train.runs.training import part_documents
from mtp_train.train.launch import RunAccelerator
from mtp_train.train.machine import device_named
from mtp_train.train.shard import give_up_shards, layer_sharder, shards_trunk
from mtp_train.trunk.load import Trunk, empty_trunk_at, load_trunk
from mtp_train.trunk.offload import offload_layers
from mtp_train.trunk.precision import COMPUTE_DTYPES, trunk_dtype
from mtp_train.trunk.progress import shown_loading


class Stage:
    """The stage that the run has reached, for the outcome of a failure."""

    name = FIRST_STAGE
    joined = False
    """Whether this process has joined the others of its launch."""


def load_run_trunk(
    recipe: Recipe,
    inputs: Inputs,
    accelerator: RunAccelerator,
    progress: Progress,
    *,
    to_shard: bool = False,
) -> Trunk:
    """Load the trunk on the process's device, or into main memory if it is offloaded.

    Args:
        recipe: The recipe.
        inputs: The gathered inputs.
        accelerator: The accelerator.
        progress: Shows the progress of loading.
        to_shard: Load a trunk that is only going to be sharded: in shards under FSDP2 (:func:`layer_sharder`), else
            into main memory. Every process must call it.

    Raises:
        TrainingError: The recipe offloads the trunk, and the launcher asks for a wrapper.
        CheckpointError: The trunk cannot be loaded; with ``to_shard``, by this process or another.
    """
    device, on_layer = accelerator.device, None
    if to_shard:
        device, on_layer = torch.device("cpu"), _sharder_while_loading(recipe, inputs, accelerator)
    if recipe.model.offload is not None:
        if accelerator.distributed_type is not DistributedType.NO:
            raise TrainingError(
                f"model.offload: {recipe.model.offload}, and the launcher asks for "
                f"{accelerator.distributed_type.value}; expected one process without a wrapper. Launch with "
                f"{accelerate_file('single')}, or write model.offload: null."
            )
        device = torch.device("cpu")
    finetune = inputs.finetune
    dtype = trunk_dtype(finetune, finetune.family, accelerator.device, recipe.model.dtype)
    if shards_trunk(accelerator):
        # Shards are gathered in the dtype that they are held in, and no hook can convert them.
        dtype = COMPUTE_DTYPES[recipe.train.precision]
    together = accelerator.failing_together() if to_shard else nullcontext()
    with together, shown_loading(progress, recipe.model.trunk, inputs.finetune.num_bytes):
        return load_trunk(
            inputs.finetune.path,
            inputs.finetune.family,
            dtype=dtype,
            device=device,
            adapter=inputs.adapter,
            quantization=recipe.model.quantization,
            trust_remote_code=recipe.model.trust_remote_code,
            on_layer=on_layer,
        )


def _sharder_while_loading(
    recipe: Recipe, inputs: Inputs, accelerator: Accelerator
) -> Callable[[nn.Module], object] | None:
    """Return the function that shards a layer while the trunk is loaded; None if all of it has to be loaded first."""
    # peft adapts modules of a whole trunk, and quantised trunks are refused once their dtypes are known.
    is_plain = recipe.model.quantization is None and quant_method(inputs.finetune.config) is None
    return layer_sharder(accelerator) if is_plain and inputs.adapter is None else None


def offload_run_trunk(recipe: Recipe, run_dir: Path, trunk: Trunk, accelerator: Accelerator) -> None:
    """Offload the layers of a loaded trunk if the recipe asks for it."""
    if recipe.model.offload is not None:
        offload_layers(trunk, recipe.model.offload, accelerator.device, run_dir)


def require_room(recipe: Recipe, inputs: Inputs, accelerator: Accelerator) -> None:
    """Check, before a trunk is loaded, that the GPU of each process holds the trunk that a run decodes with.

    Raises:
        RecipeError: It does not.
    """
    model, checkpoint = recipe.model, inputs.finetune
    if accelerator.device.type != "cuda" or not recipe.decodes or model.offload or model.quantization:
        return
    itemsize = trunk_dtype(checkpoint, checkpoint.family, accelerator.device, model.dtype).itemsize
    if quant_method(checkpoint.config) is not None:
        trunk_bytes = checkpoint.num_bytes
    else:
        trunk = empty_trunk_at(checkpoint.path, checkpoint.family, trust_remote_code=model.trust_remote_code)
        trunk_bytes = itemsize * sum(parameter.numel() for parameter in trunk.parameters())
    head_bytes = itemsize * sum(math.prod(tensor.shape) for tensor in inputs.head_plan.template.tensors)
    problem = decoding_problem(trunk_bytes, head_bytes, device_named(None).memory_bytes)
    if problem is not None:
        raise RecipeError([f"{problem}."])


class RunTrunks:
    """Loads the trunk of a run, and loads it again where a stage needs another form. One is in memory at a time.

    Args:
        recipe: The recipe.
        run_dir: The run directory.
        inputs: The run's inputs.
        accelerator: The processes; all of them must make the same calls.
        progress: Shows loading.
    """

    def __init__(
        self, recipe: Recipe, run_dir: Path, inputs: Inputs, accelerator: RunAccelerator, progress: Progress
    ) -> None:
        self._recipe, self._run_dir, self._inputs = recipe, run_dir, inputs
        self._accelerator, self._progress = accelerator, progress
        self._trunk: Trunk | None = None
        self._in_shards = False
        self._evaluates = False
        """Whether the trunk in memory is in the form that evaluation needs."""

    @property
    def trunk(self) -> Trunk:
        """The trunk in memory.

        Raises:
            ValueError: None was loaded.
        """
        if self._trunk is None:
            raise ValueError("no trunk in memory; expected load() before.")
        return self._trunk

    @property
    def evaluates(self) -> bool:
        """Whether the trunk in memory can decode: it is whole."""
        return self._evaluates

    def load(self, *, decodes: bool) -> None:
        """Load the trunk to decode with it, or to train a head on it.

        Raises:
            MtpError: It cannot be loaded, or the GPUs are too small to decode with it.
        """
        require_room(self._recipe, self._inputs, self._accelerator)
        to_shard = not decodes and shards_trunk(self._accelerator)
        arguments = self._recipe, self._inputs, self._accelerator, self._progress
        self._trunk = load_run_trunk(*arguments, to_shard=to_shard)
        self._evaluates = not to_shard

    def offload(self) -> None:
        """Offload the layers of the trunk in memory if the recipe asks for it."""
        if self._trunk is not None:
            offload_run_trunk(self._recipe, self._run_dir, self._trunk, self._accelerator)

    def prepare_training(self) -> None:
        """Load the trunk again if its shards have checked a server's responses, as they cannot train after that."""
        if self._recipe.regenerates and not self._evaluates:
            self.drop()
            self.load(decodes=False)
        self._in_shards = shards_trunk(self._accelerator)
        # Sharding changes the trunk in place, and a hidden-state cache replaces its layers.
        self._evaluates &= not self._in_shards and self._recipe.train.hidden_cache is None

    def prepare_decoding(self) -> None:
        """Load the trunk again if it is not in the form that evaluation needs."""
        if not self._evaluates:
            self.drop()
            self.load(decodes=True)
            self.offload()

    def drop(self) -> None:
        """Free the trunk."""
        if self._trunk is not None and self._in_shards:
            give_up_shards(self._trunk, self._accelerator)
        self._trunk, self._in_shards = None, False
        gc.collect()


def provenance(recipe: Recipe, inputs: Inputs) -> dict[str, object]:
    """Return the content of ``provenance.json``: identities of the checkpoints, versions, command line and hardware."""
    return {
        "trunk": checkpoint_identity(recipe.model.trunk, inputs.finetune),
        "head_from": checkpoint_identity(recipe.model.head_from or "", inputs.donor) if inputs.donor else None,
        "seed": recipe.seed,
        "plan": asdict(inputs.plan),
        **environment_facts(),
    }


def claim_run(
    recipe: Recipe, run_dir: Path, inputs: Inputs, records: Records, accelerator: RunAccelerator, progress: Progress
) -> Inputs:
    """Claim the run directory for a recipe and its inputs, and return the inputs with their identities.

    Args:
        recipe: The recipe.
        run_dir: The run directory.
        inputs: The gathered inputs.
        records: Content hashes of the inputs from before they were loaded; used by the main process.
        accelerator: The accelerator; its main process writes.
        progress: Shows the progress of hashing.

    Raises:
        ChangedInputError: An input changed while it was loaded.
        TrainingError: The processes do not share the directory, or read other inputs than the main process.
    """
    if accelerator.num_processes > 1:
        require_alike("model", checkpoints_checksum([inputs.finetune, inputs.donor]), accelerator)
        text = text_checksum(inputs.documents, [*inputs.prompts, *inputs.held_out])
        require_alike("data", text, accelerator)
    if accelerator.is_main_process:
        record_run_inputs(run_dir, records)
        claim(run_dir, recipe, provenance(recipe, inputs))
        require_run_inputs(recipe, run_dir, progress)
    require_shared(run_dir, [RECIPE_FILE, RECORD_FILE], accelerator)
    return replace(inputs, contents=run_contents(run_dir))


def make_documents(
    recipe: Recipe,
    run_dir: Path,
    inputs: Inputs,
    trunk: Trunk,
    accelerator: RunAccelerator,
    progress: Progress,
    *,
    in_shards: bool = False,
) -> list[Document]:
    """Return the documents to train on: the trunk's own responses, or the sources' text.

    See :func:`regenerate_stage` for ``in_shards``.
    """
    if recipe.data.regenerate is None or not recipe.data.regenerate.enabled:
        return list(inputs.documents)
    settings = recipe.data.regenerate
    return regenerate_stage(recipe, settings, run_dir, inputs, trunk, accelerator, progress, in_shards=in_shards)[0]


def trained_documents(recipe: Recipe, run_dir: Path, inputs: Inputs) -> list[Document]:
    """Return the documents that a head was trained on, without the text held out for ``train.select``."""
    if recipe.data.regenerate is None or not recipe.data.regenerate.enabled:
        documents = list(inputs.documents)
    else:
        documents = stored_documents(recipe, recipe.data.regenerate, run_dir, inputs)
    training, _ = part_documents(recipe, documents)
    return [documents[index] for index in training]
