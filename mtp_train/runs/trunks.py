"""Load the trunk of a run in the form that a stage needs: whole to decode with, or as hidden states to train on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from mtp_train.answers.served import Judge
from mtp_train.checkpoints.quantised import quant_method
from mtp_train.data.tokenize import Document
from mtp_train.errors import RecipeError, TrainingError
from mtp_train.heads.diagnose import stored_dtype, text_config_of
from mtp_train.progress import shown_loading
from mtp_train.recipe.sections import StatesSpec
from mtp_train.recipe.shipped import accelerate_file
from mtp_train.runs.check import Shapes
from mtp_train.runs.refusals import HeadOnTrunk
from mtp_train.runs.run import Run
from mtp_train.runs.run_directory import ADAPTER, TRUNK
from mtp_train.runs.served_states import StatesSource, open_source, recorded_identity
from mtp_train.train.hidden_cache import CachedStates, HiddenCache, cache_digest
from mtp_train.train.machine import device_named
from mtp_train.train.shard import ShardedStates, gather_in, layer_sharder, shards_trunk
from mtp_train.trunk.ends import Ends
from mtp_train.trunk.load import OnLayer, Trunk, load_ends, load_trunk
from mtp_train.trunk.precision import COMPUTE_DTYPES, slow_halves, trunk_dtype
from mtp_train.trunk.states import States, TrunkStates

HIDDEN = "hidden"


def decoding_trunk(run: Run, dtype: str | None = None) -> Trunk:
    """Return the whole trunk, loaded in place of another form of it.

    Args:
        dtype: Replaces ``model.dtype``.
    """
    held = run.held
    wanted = _held_dtype(run, dtype)
    trunk = held.whole
    if trunk is None or held.dtype is not wanted:
        # One is in memory at a time.
        del trunk
        held.release(run.accelerator)
        require_room(run)
        trunk = load_run_trunk(run, wanted)
        if run.recipe.model.offload is not None:
            trunk.offload_layers(run.accelerator.device)
        held.trunk, held.form, held.dtype = trunk, "whole", wanted
    return trunk


def trunk_in_shards(run: Run) -> Trunk:
    """Return the trunk for one use in shards, loaded in shards under FSDP2; every process must call it."""
    # Shards are gathered in the dtype that they are held in, and no hook can convert them.
    held = run.held
    wanted = COMPUTE_DTYPES[run.recipe.train.precision]
    trunk = held.trunk
    if trunk is None or held.form == "spent" or held.dtype is not wanted:
        del trunk
        held.release(run.accelerator)
        trunk = load_run_trunk(run, wanted, to_shard=True)
    held.trunk, held.form, held.dtype = trunk, "spent", wanted
    return trunk


def answering_dtype(run: Run) -> str | None:
    """Return bf16 for a trunk stored in it, on a CPU that decodes batches faster in bf16; None to answer as held."""
    model, source, device = run.recipe.model, run.inputs.finetune, run.accelerator.device
    is_stored = stored_dtype(source) == "BF16" and quant_method(source.config) is None
    is_free = model.dtype == "auto" and model.quantization is None and model.offload is None
    is_faster = device.type == "cpu" and not slow_halves(torch.bfloat16, device)
    return "bfloat16" if is_stored and is_free and is_faster else None


def load_to_train(run: Run) -> None:
    """Load the trunk in the form that computes states to train on."""
    if shards_trunk(run.accelerator):
        trunk_in_shards(run)
        run.held.form = "in shards"
    else:
        decoding_trunk(run)


def states_of(
    run: Run,
    documents: Sequence[Document],
    layers: tuple[int, ...] = (),
    *,
    kept: Collection[int] = (),
    is_read_once: bool = False,
) -> States:
    """Return the states of documents to train a head on; every process must call it.

    A hidden-state cache that is complete takes the trunk's ends alone, and no server.

    Args:
        layers: The trunk layers whose inputs the head reads, see ``Ends.show_layers``.
        kept: Numbers of the documents that are read in every measurement.
        is_read_once: Whether training reads each of the others once at most.
    """
    cached = run.recipe.train.hidden_cache
    served = run.recipe.train.states
    if served is None and cached is None:
        return _computed(run)
    dtype = COMPUTE_DTYPES[run.recipe.train.precision]
    source = None
    is_online = cached is None and is_read_once
    identity = None if served is None else run.accelerator.said_by_main(recorded_identity(run))
    if served is not None and (is_online or identity is None or cache_of(run, documents, layers, identity)[1]):
        run.held.release(run.accelerator)
        texts = [document.input_ids.tolist() for document in documents]
        source = open_source(run, served, _ends(run), texts, layers)
        identity = source.identity
        if is_online:
            return source.states(documents, dtype, kept)
    cache, missing = cache_of(run, documents, layers, identity)
    if missing:
        _build(run, cache, missing, layers, source)
    if source is not None:
        source.server.endpoint.close()
        return CachedStates(source.ends, cache, dtype)
    run.held.release(run.accelerator)
    return CachedStates(_ends(run), cache, dtype)


@contextmanager
def served_judge(run: Run, spec: StatesSpec, texts: Sequence[Sequence[int]]) -> Iterator[Judge]:
    """Yield the judge of texts by the states of the recipe's server; every process must call it."""
    config = text_config_of(run.inputs.finetune)
    layers = run.inputs.head_plan.family.wiring.trunk_layers(config)
    ends = _ends(run)
    source = open_source(run, spec, ends, texts, tuple(layers))

    def hidden(token_ids: Sequence[int]) -> Tensor:
        ((_, states_TD),) = source.fetch([token_ids])
        return states_TD.to(ends.lm_head_VD)

    with closing(source.server.endpoint):
        yield Judge(ends, hidden)


def _ends(run: Run) -> Ends:
    inputs = run.inputs
    device = run.accelerator.device
    return load_ends(inputs.finetune, dtype=_held_dtype(run), device=device, adapter=inputs.adapter)


def _computed(run: Run) -> TrunkStates:
    if shards_trunk(run.accelerator):
        return ShardedStates(trunk_in_shards(run))
    return TrunkStates(decoding_trunk(run))


def cache_of(
    run: Run, documents: Sequence[Document], layers: tuple[int, ...], identity: list[str] | None
) -> tuple[HiddenCache, list[int]]:
    """Return the cache of documents' states, and the shards that it lacks; every process must call it.

    The name of its directory depends on everything that the states depend on.

    Args:
        identity: Of the server that computes them, with the dtype of its states at the end; None for the trunk here.
    """
    recipe = run.recipe
    inputs = run.inputs
    config = text_config_of(inputs.finetune)
    width = inputs.finetune.family.state_width(config) + len(layers) * int(config.hidden_size)
    width += inputs.finetune.family.keys_width(config) if inputs.head_plan.family.reads_keys else 0
    adapter = inputs.contents[ADAPTER] if inputs.adapter else None
    settings: tuple[object, ...]
    if identity is None:
        dtype = COMPUTE_DTYPES[recipe.train.precision]
        held = str(_held_dtype(run)).removeprefix("torch.")
        settings = (recipe.train.precision, recipe.model.quantization, held, *layers)
    else:
        dtype = getattr(torch, identity[-1].removeprefix("torch."))
        settings = (identity, *layers)
    digest = cache_digest(inputs.contents[TRUNK], adapter, documents, *settings, dtype=dtype, width=width)
    asked = recipe.train.hidden_cache
    place = None if asked is None else asked.directory
    cache = HiddenCache(Path(place or run.directory.path / HIDDEN) / digest, documents, width=width, dtype=dtype)
    return cache, run.accelerator.said_by_main(cache.missing())


def _build(
    run: Run, cache: HiddenCache, missing: Sequence[int], layers: tuple[int, ...], source: StatesSource | None
) -> None:
    """Write what a cache lacks; every process must call it."""
    accelerator = run.accelerator
    progress = run.progress
    cache.require_room()
    states: States
    if source is not None:
        states = source.states(cache.documents, cache.dtype)
    else:
        states = _computed(run)
        states.ends.show_layers(layers)
        states.ends.shows_keys |= run.inputs.head_plan.family.reads_keys
    if isinstance(states, ShardedStates):
        gather_in(states, states.ends, accelerator)
    task = progress.add_task("keeping hidden states", total=None)
    if run.is_main:
        size = cache.num_bytes / (1 << 30)
        progress.console.print(f"{cache.directory}: {size:.2f} GiB of hidden states")
    with closing(states), states.computing_in(cache.dtype):
        cache.build(
            states,
            missing,
            device=accelerator.device,
            max_tokens=run.plan.micro_batch_tokens,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            on_shard=lambda done, total: progress.update(task, completed=done, total=total),
        )
    accelerator.wait_for_everyone()


def _held_dtype(run: Run, asked: str | None = None) -> torch.dtype:
    """Return the dtype in which a run holds the trunk's weights, as its recipe says or as asked for."""
    return trunk_dtype(run.inputs.finetune, run.accelerator.device, asked or run.recipe.model.dtype)


def load_run_trunk(run: Run, dtype: torch.dtype, *, to_shard: bool = False) -> Trunk:
    """Load the trunk on the process's device, or into main memory if it is offloaded.

    A trunk ``to_shard`` is loaded in shards under FSDP2 (:func:`layer_sharder`), else into main memory; every process
    must call it.
    """
    model, inputs, accelerator = run.recipe.model, run.inputs, run.accelerator
    device = accelerator.device
    on_layer: OnLayer = None
    if to_shard:
        device = torch.device("cpu")
        # peft adapts modules of a whole trunk, and quantised trunks are refused once their dtypes are known.
        if inputs.adapter is model.quantization is quant_method(inputs.finetune.config) is None:
            on_layer = layer_sharder(accelerator)
    if model.offload is not None:
        if accelerator.distributed_type is not DistributedType.NO:
            raise TrainingError(
                f"model.offload: {model.offload}, and the launcher asks for {accelerator.distributed_type.value}; "
                f"expected one process without a wrapper. Launch with {accelerate_file('single')}, or write "
                "model.offload: null."
            )
        device = torch.device("cpu")
    together = accelerator.failing_together() if to_shard else nullcontext()
    with together, shown_loading(run.progress, model.trunk, inputs.finetune.num_bytes):
        return load_trunk(
            inputs.finetune,
            dtype=dtype,
            device=device,
            adapter=inputs.adapter,
            quantization=model.quantization,
            on_layer=on_layer,
        )


def require_room(run: Run) -> None:
    """Check, before a trunk is loaded, that the GPU of each process holds the trunk that a run decodes with."""
    recipe, inputs, count = run.recipe, run.inputs, run.accelerator.num_processes
    if run.accelerator.device.type != "cuda" or not recipe.decodes or recipe.study is not None:
        return
    model = HeadOnTrunk(inputs.finetune, inputs.head_plan.family, inputs.head_plan.num_modules)
    machine = device_named(None)
    shapes = Shapes(model)
    problem = shapes.room(recipe, count, machine).decoding_problem
    if problem is not None:
        fitting = [arguments for arguments, _ in shapes.alternatives(recipe, count, machine, recipe)]
        cure = f"Add {', or '.join(fitting)}." if fitting else "Use a larger GPU."
        raise RecipeError(f"model.trunk: {problem}; expected room for it. {cure}")
