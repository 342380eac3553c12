"""Read a peft adapter, and merge a LoRA adapter into a checkpoint's own layout without building the model.

``W + scale * left @ right`` is computed in fp32, a block of rows at a time, and rounded once to the stored dtype. Key
names, shards, dtypes and every byte of the other tensors stay the same.
"""

from __future__ import annotations

import filecmp
import itertools
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.progress import Progress
from torch import Tensor

from mtp_train.checkpoints.files import (
    CONFIG_FILE,
    PICKLE_SUFFIXES,
    REJECTIONS,
    TORCH_DTYPES,
    Checkpoint,
    all_finite,
    read_json,
    scan_safetensors,
)
from mtp_train.checkpoints.identity import TEMPLATE_PATTERNS, TOKENIZER_PATTERNS, matching_files
from mtp_train.checkpoints.quantised import quant_method
from mtp_train.checkpoints.suggestions import command, output_of
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.checkpoints.writing import PendingTensor
from mtp_train.errors import CheckpointError, one_line
from mtp_train.families import RawConfig

# Commands that read no adapter start without peft.
if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
# What trainers save beside an adapter to go on from; and the adapter again, which peft reads only without safetensors.
_STATE = re.compile(
    r"(?:optimizer|scheduler|scaler|sampler|rng_state|random_states|training_args|recipe_state)(?:_\d+)?\.\w+"
    r"|adapter_model\.bin"
)
_TOKENIZER = (*TOKENIZER_PATTERNS, *TEMPLATE_PATTERNS)
_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
# The experts of a mixture share one stacked adapter, which is read once for each expert's tensor: both matrices of two
# parameters are kept.
_NUM_KEPT = 4
_ROOT = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+?)(?P<wraps>(?:\.base_layer)*)\."
    r"(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?\Z"
)
_COPY = re.compile(r"\.(?:modules_to_save|original_module)\.")
# Config fields of adapters that are more than a sum of low-rank products.
_UNMERGEABLE = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
# With these, peft subtracts the adapter's initial product from the base's weights: the adapter alone does not contain
# the change.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


_OF_A_LAYER = re.compile(r"layers\.(?P<layer>\d+)\.(?P<tail>.+)\Z")
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")
_WRAPPERS = re.compile(r"\A(?:(?:model|language_model)\.)+")
# The fused parameters of experts in the order of their declaration, with their parts in the order of their rows.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
LM_HEAD = "lm_head.weight"
_BLOCK_ROWS = 4096
Step = Callable[[int, Tensor], Tensor]
"""From the number of a block's first row, and the block in fp32, to the block that replaces it."""


class LowRank(NamedTuple):
    """The matrices that adapt one parameter by ``scale * left @ right``, a pair for each expert that it stacks."""

    module: str
    """The module's name in transformers' tree, without peft's prefix."""
    parameter: str
    """``weight``, or the name of a parameter that peft targets directly."""
    shape: tuple[int, int]
    """Rows and columns of the product; of each expert's where the parameter stacks experts."""
    num_experts: int
    """How many matrices the parameter stacks; 0 for a parameter that is a matrix."""
    matrices: Callable[[int], tuple[Tensor, Tensor]]
    """Loads left (rows, rank) and right (rank, columns) of an expert in fp32; of the only matrix for 0."""
    scale: float
    magnitude: Tensor | None = None
    """DoRA's magnitude: the norm of each row of the merged weight."""


class Adapter(NamedTuple):
    """A LoRA adapter: the parameters that it changes, with its matrices still on disk."""

    stored: Checkpoint
    """Its directory, with the weights opened."""
    pairs: tuple[LowRank, ...]
    replacements: Mapping[str, str]
    """Parameter name in transformers' tree to the key of the tensor that replaces it (``modules_to_save``, biases)."""
    saved: tuple[str, ...]
    """Names of ``modules_to_save``."""
    keeps_tied: bool
    """Whether it was trained with embedding and lm_head tied to each other."""

    @property
    def path(self) -> Path:
        return self.stored.path


_Parts = dict[str, str]
"""``lora_A``, ``lora_B`` and so on to the stored key."""
_Wrapped = tuple[str, int]
"""A module's name, and how many times peft has wrapped it."""


def is_adapter(path: Path) -> bool:
    return (path / ADAPTER_CONFIG_FILE).is_file() and not (path / "config.json").is_file()


def refuse_embedded_adapter(path: Path) -> None:
    """Raise a CheckpointError for an adapter in a model's directory: transformers applies it, engines do not."""
    if (path / ADAPTER_CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{path}: has {ADAPTER_CONFIG_FILE} beside the model, which transformers applies silently and engines "
            "ignore; expected a model alone. Move the adapter to a directory of its own, and pass that as the adapter."
        )


def tokenizer_files(checkpoint: Path, adapter: Path) -> dict[str, Path]:
    """Return the files of the tokenizer and chat template of an adapter on a checkpoint, by path in the directory.

    An adapter with a vocabulary has been trained with a tokenizer of its own, which replaces the checkpoint's as a
    whole. Other files of an adapter, such as a chat template, replace those of the same name. Empty for an adapter that
    changes nothing.
    """
    own = matching_files(checkpoint, _TOKENIZER)
    theirs = matching_files(adapter, _TOKENIZER)
    if all(name in own and filecmp.cmp(file, own[name], shallow=False) for name, file in theirs.items()):
        return {}
    is_whole = any(fnmatch(name, pattern) for name in theirs for pattern in _VOCABULARIES)
    return theirs if is_whole else own | theirs


def merge_command(checkpoint: str, adapter: str) -> str:
    return command("merge", checkpoint, "--adapter", adapter, "--out", output_of(checkpoint, "-merged"))


def read_adapter(path: Path) -> Adapter:
    """Read an adapter directory."""
    from peft import LoraConfig

    stored = open_weights(path)
    _require_mergeable(stored)
    load = lru_cache(maxsize=_NUM_KEPT)(lambda key: stored.read(key).float())
    groups, replacements = _group(stored)
    try:
        with warnings.catch_warnings():
            # Of fields that do not matter here.
            warnings.simplefilter("ignore")
            config = LoraConfig.from_pretrained(str(path))
        saved = tuple(map(str, stored.config.get("modules_to_save") or ()))
        pairs = tuple(_pair(stored, load, config, module, depth, parts) for (module, depth), parts in groups.items())
    except (*REJECTIONS, re.error) as error:
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG_FILE}: peft cannot read it ({type(error).__name__}: {one_line(error):.300}); "
            "expected the config of a LoRA adapter. Restore the original, or save the adapter again."
        ) from error
    return Adapter(stored, pairs, replacements, saved, stored.config.get("ensure_weight_tying", False))


def open_weights(path: Path) -> Checkpoint:
    config = read_json(path / ADAPTER_CONFIG_FILE)
    file = path / ADAPTER_FILE
    if not isinstance(config.get("peft_type"), str):
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG_FILE}: peft_type {config.get('peft_type')!r}; expected the kind of a peft "
            "adapter, such as LORA. Restore the original, or save the adapter again."
        )
    if not file.is_file() and (path / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"{path}: its weights are a pickle (adapter_model.bin), which can run code when read; expected "
            f"{ADAPTER_FILE}. Save it once with safetensors in a place you trust."
        )
    # Of a model in the same directory, the safetensors are the model's.
    weights = () if (path / CONFIG_FILE).is_file() else path.glob("*.safetensors")
    pickles = (one for one in path.iterdir() if one.suffix in PICKLE_SUFFIXES and not _STATE.fullmatch(one.name))
    if beside := {*weights, *pickles} - {file}:
        raise CheckpointError(
            f"{min(beside)}: weights beside the adapter, which peft does not load; expected every trained weight in "
            f"{ADAPTER_FILE}. {_MERGE_WITH_PEFT}"
        )
    stored = Checkpoint(path, config, None, scan_safetensors(file))
    if not stored.tensors:
        raise CheckpointError(f"{file}: holds no tensor; expected an adapter's weights. Save it again.")
    require_finite_checkpoint(stored, Progress(disable=True))
    return stored


_MERGE_WITH_PEFT = "Merge it with peft's merge_and_unload, save the model, and put the head back with mtp-train graft."


def _group(stored: Checkpoint) -> tuple[dict[_Wrapped, _Parts], dict[str, str]]:
    """Return low-rank tensors by module and depth of peft's wrapping, and the tensors that replace a parameter."""
    groups: dict[_Wrapped, _Parts] = {}
    replacements: dict[str, str] = {}
    for key in stored.tensors:
        name = key.removeprefix(_ROOT)
        match = _PART.match(name)
        if match is None:
            # Of a resized layer in modules_to_save, peft stores the replaced original too, and the replacement twice.
            whole = _COPY.sub(".", key)
            if whole == key or whole not in stored.tensors:
                replacements[name.replace(".base_layer", "")] = key
            continue
        parts = groups.setdefault((match["module"], match["wraps"].count(".base_layer")), {})
        parts[match["part"]] = key
    return groups, replacements


def _require_mergeable(stored: Checkpoint) -> None:
    found = {name: value for name, value in stored.config.items() if name in _UNMERGEABLE and value}
    kind = stored.config["peft_type"]
    start = stored.config.get("init_lora_weights")
    if kind != "LORA":
        found = {"peft_type": kind}
    elif str(start).lower().startswith(_CHANGES_THE_BASE):
        found = {"init_lora_weights": start}
    for name, value in found.items():
        raise CheckpointError(
            f"{stored.path / ADAPTER_CONFIG_FILE}: {name} is {value!r:.60}; expected a LoRA adapter that adds a "
            f"low-rank product to each weight of its base, and changes nothing else. {_MERGE_WITH_PEFT}"
        )


def _pair(
    stored: Checkpoint, load: Callable[[str], Tensor], config: LoraConfig, module: str, depth: int, parts: _Parts
) -> LowRank:
    """Return the matrices of a parameter; each pair is loaded when it is used.

    Args:
        depth: How many further adapters of the module peft has put around this one.
    """
    targets = tuple(f".{target}" for target in config.target_parameters or ())
    fused = [name for name in _FUSED if module.endswith("experts") and f".{module}.{name}".endswith(targets)]
    # peft wraps the parameters of one module in the order of their declaration, the first one innermost.
    parameter = fused[-1 - depth] if fused else "weight"
    # peft looks ranks up by the module's name, or by the parameter's name for target_parameters.
    name = f"{module}.{parameter}" if f".{module}.{parameter}".endswith(targets) else module
    rank = _of_pattern(config.rank_pattern, name, config.r)
    alpha = _of_pattern(config.alpha_pattern, name, config.lora_alpha)
    embedding = "lora_embedding_A" in parts
    a, b = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    shapes = {part: list(stored.tensors[key].shape) for part, key in parts.items()}
    down = shapes.get(a, [0, 0])
    up = shapes.get(b, [0, 0])
    # Norms of an embedding's DoRA run along the other axis of the stored weight.
    expected = [a, b, "lora_magnitude_vector"] if config.use_dora and not embedding else [a, b]
    if {*parts} != {*expected} or down[0] != up[1] or down[0] % rank or not (fused or down[0] == rank):
        raise CheckpointError(
            f"{stored.path / ADAPTER_FILE}: holds {shapes} of {module}; expected {', '.join(expected)} of rank {rank}, "
            f"by {ADAPTER_CONFIG_FILE}, and no DoRA of an embedding. {_MERGE_WITH_PEFT}"
        )
    count = down[0] // rank if fused else 0

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        if embedding:
            return load(parts[a]).T, load(parts[b]).T
        if fused:
            # The rank axis stacks the experts: rank by rank in B, expert by expert in A.
            return load(parts[b])[:, expert::count], load(parts[a])[expert * rank : (expert + 1) * rank]
        return load(parts[b]), load(parts[a])

    return LowRank(
        module=module,
        parameter=parameter,
        shape=(down[1], up[0]) if embedding else (up[0], down[1]),
        num_experts=count,
        matrices=matrices,
        scale=alpha / (math.sqrt(rank) if config.use_rslora else rank),
        magnitude=load(parts["lora_magnitude_vector"]) if config.use_dora else None,
    )


def _of_pattern(patterns: Mapping[str, int] | None, name: str, default: int) -> int:
    """Return the value of the first pattern that matches the end of a module's name, as peft looks it up."""
    matching = (value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", name))
    return next(matching, default)


@dataclass(frozen=True)
class Merge:
    """What a merge changes in a checkpoint."""

    tensors: Mapping[str, PendingTensor] = field(default_factory=dict)
    """Key of a stored tensor to the tensor that replaces it."""
    files: Mapping[str, Path | None] = field(default_factory=dict)
    """Path in the directory to the file of the adapter's tokenizer or chat template that is written there; None for a
    file that is left out."""
    config_fields: RawConfig = field(default_factory=dict)
    """``vocab_size``, where the adapter's training resized the vocabulary."""


def plan_merge(source: Checkpoint, adapter: Adapter) -> Merge:
    """Return what merging an adapter changes in a checkpoint, without reading any tensor.

    The adapter's tokenizer and chat template replace the checkpoint's.

    Raises:
        CheckpointError: The adapter does not fit, adapts the head or one of two tied tensors, or the checkpoint is
            quantised.
    """
    method = quant_method(source.config)
    if method is not None:
        raise CheckpointError(
            f"{source.path}: quantised ({method}); expected plain weights, as the sum of quantised weights and an "
            "adapter would have to be quantised again. Merge into the checkpoint from which this one was quantised."
        )
    plan = _Plan(source, adapter)
    plan.require_tied()
    for name, key in adapter.replacements.items():
        plan.replace(name, key)
    for pair in adapter.pairs:
        plan.add(pair)
    plan.repeat_in_shared_keys()
    plan.require_one_vocabulary()
    tokenizer = tokenizer_files(source.path, adapter.path)
    # Beside a model, transformers would apply the adapter a second time.
    left_out = {ADAPTER_CONFIG_FILE, *(matching_files(source.path, _TOKENIZER) if tokenizer else ())}
    rows = plan.rows.get(plan.layout.embed_key)
    return Merge(
        {key: plan.changed(key) for key in {**plan.replaced, **plan.steps}},
        {**dict.fromkeys(left_out), **tokenizer},
        {} if rows is None else {"vocab_size": rows},
    )


class _Plan:
    """The change of each stored tensor: other values in its place, and the steps that add to them."""

    def __init__(self, source: Checkpoint, adapter: Adapter) -> None:
        self.source, self.adapter = source, adapter
        self.layout = layout = source.layout
        self.replaced: dict[str, tuple[str, int]] = {}
        """Stored key to the key in the adapter of the values that replace it, and their first row there."""
        self.steps: dict[str, list[Step]] = defaultdict(list)
        self.rows: dict[str, int] = {}
        """Numbers of rows of the tensors whose vocabulary the adapter's training resized."""
        self._ends = (layout.embed_key, layout.lm_head_key)
        tied = source.config.get("tie_word_embeddings", source.text_config.get("tie_word_embeddings"))
        self._tied = tied or self.home(LM_HEAD) is None
        names = [*adapter.replacements, *(f"{pair.module}.weight" for pair in adapter.pairs)]
        self._embedding_is_adapted = any(self.home(name) == layout.embed_key for name in names)

    def require_tied(self) -> None:
        """Check that an adapter keeps embedding and lm_head equal where they are one tensor."""
        trained = [f"{pair.module}.weight" for pair in self.adapter.pairs]
        # peft also stores a resized embedding that it did not train.
        trained += [
            name for name in self.adapter.replacements if name.removesuffix(".weight").endswith(self.adapter.saved)
        ]
        for name in trained:
            is_end = self.home(name) in self._ends or name.endswith(LM_HEAD)
            if is_end and self._tied and not self.adapter.keeps_tied:
                raise CheckpointError(
                    f"{self.adapter.path}: adapts {name}, while {self.source.path} ties lm_head and embedding to one "
                    "tensor, which cannot hold two; expected an adapter that leaves both alone or keeps them tied. "
                    "Train it with ensure_weight_tying=True, or serve it unmerged."
                )

    def home(self, name: str) -> str | None:
        """Return the stored key of a parameter, None where there is none or its parts are stored separately.

        Keys may differ from transformers' names: wrappers add another prefix than text-only models have, and some
        releases name the embedding, or parts of a wrapper or of a layer, differently.
        """
        bare = _WRAPPERS.sub("", name)
        of_rules = self._of_rules(name)
        candidates = [name, self.layout.trunk_prefix + bare, bare]
        if len(of_rules) == 1:
            candidates += of_rules
        if bare in _EMBEDDINGS:
            candidates.append(self.layout.embed_key)
        if bare == LM_HEAD:
            candidates.append(self.layout.lm_head_key)
        for ours, native in self.layout.family.keys.wrapper_names.items():
            if bare.startswith(ours):
                candidates.append(native + bare.removeprefix(ours))
        return next((key for key in candidates if key in self.source.tensors), None)

    def _of_rules(self, name: str) -> list[str]:
        of_layer = _OF_A_LAYER.match(_WRAPPERS.sub("", name))
        return [] if of_layer is None else self.layout.trunk_layer_keys(int(of_layer["layer"]), of_layer["tail"])

    def _rows_of(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, slice]]:
        """Yield the stored tensors of a parameter's rows, several where a release stores its parts separately."""
        # The two adapters of a tied pair are equal. The embedding's is merged, into both tensors where both are stored.
        if self._tied and self._embedding_is_adapted and name.endswith(LM_HEAD):
            return
        parts = [] if self.home(name) is not None else self._of_rules(name)
        names = parts if parts and all(key in self.source.tensors for key in parts) else [name]
        for one, rows in zip(names, _equal_parts(shape[0], len(names)), strict=True):
            yield self._stored_key(one, (rows.stop - rows.start, *shape[1:])), rows

    def replace(self, name: str, key: str) -> None:
        shape = self.adapter.stored.tensors[key].shape
        whole = self.home(name)
        if whole in self._ends and shape[0] != self.source.tensors[whole].shape[0]:
            self.rows[whole] = shape[0]
        for home, rows in self._rows_of(name, shape):
            self.replaced[home] = key, rows.start

    def add(self, pair: LowRank) -> None:
        name = f"{pair.module}.{pair.parameter}"
        if not pair.num_experts:
            for key, rows in self._rows_of(name, pair.shape):
                self.steps[key].append(partial(_add_product, pair, 0, rows))
            return
        # Experts are stored stacked, or one by one.
        if self.home(name) is not None:
            key = self._stored_key(name, (pair.num_experts, *pair.shape))
            self.steps[key].append(partial(_add_to_experts, pair))
            return
        parts = self._of_rules(name) or [f"{pair.module}.{{expert}}.{part}.weight" for part in _FUSED[pair.parameter]]
        if self.home(parts[0].format(expert=pair.num_experts)) is not None:
            raise CheckpointError(
                f"{self.adapter.path}: adapts {pair.num_experts} experts of {pair.module}, but {self.source.path} has "
                "more; expected the same number. Merge into the base that the adapter was trained on."
            )
        places = zip(parts, _equal_parts(pair.shape[0], len(parts)), strict=True)
        for expert, (part, rows) in itertools.product(range(pair.num_experts), places):
            key = self._stored_key(part.format(expert=expert), (rows.stop - rows.start, pair.shape[1]))
            self.steps[key].append(partial(_add_product, pair, expert, rows))

    def _stored_key(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the stored key of a parameter, or of a part of one, of which an adapter has this shape."""
        key = self.home(name)
        if key is None:
            raise CheckpointError(
                f"{self.adapter.path}: adapts {name}, for which {self.source.path} has no tensor; expected every "
                "adapted module in the checkpoint. Merge into the base that the adapter was trained on."
            )
        if self.layout.is_head_key(key):
            raise CheckpointError(
                f"{self.adapter.path}: adapts {key}, which belongs to the head; expected an adapter of the trunk. "
                "Merge without it, and retrain the head."
            )
        if self._shape(key) != shape:
            raise CheckpointError(
                f"{self.adapter.path}: adapts {key} as {list(shape)}, but in {self.source.path} it is "
                f"{list(self._shape(key))}; expected the same shape. Merge into the base that the adapter was trained "
                "on."
            )
        return key

    def _shape(self, key: str) -> tuple[int, ...]:
        rows, *others = self.source.tensors[key].shape
        return (self.rows.get(key, rows), *others)

    def repeat_in_shared_keys(self) -> None:
        """Repeat the changes of trunk tensors in the head's copies of them."""
        tensors = self.source.tensors
        shared = {key: self.layout.shared_key(key) for key in self.source.tensors}
        copies = {key: self.layout.trunk_key(one, tensors) for key, one in shared.items() if one is not None}
        embedding, lm_head = self._ends
        if self._tied and lm_head in tensors:
            copies[lm_head] = embedding
        changes: list[dict[str, Any]] = [self.replaced, self.steps, self.rows]
        for (copy, key), of_keys in itertools.product(copies.items(), changes):
            if key in of_keys:
                of_keys[copy] = of_keys[key]

    def require_one_vocabulary(self) -> None:
        """Check that embedding, lm_head and head have the adapter's number of tokens after the merge."""
        if not self.rows:
            return
        rows = {self._shape(key)[0] for key in self._ends if key in self.source.tensors}
        wiring = self.layout.family.wiring
        if len(rows) > 1 or wiring.own_lm_head or wiring.own_embedding:
            raise CheckpointError(
                f"{self.adapter.path}: resizes the vocabulary of {', '.join(sorted(self.rows))}, and "
                f"{self.source.path} has another matrix over it; expected all of them in the adapter, and a head "
                "without one. Save the adapter with peft's save_embedding_layers=True."
            )

    def changed(self, key: str) -> PendingTensor:
        """Return a stored tensor after its change, which is computed in fp32 and rounded once."""
        dtype = self.source.tensors[key].dtype

        def blocks() -> Iterator[Tensor]:
            first = 0
            for block in self._before(key):
                value = block.float()
                for step in self.steps.get(key, ()):
                    value = step(first, value)
                first += len(block)
                value = value.to(TORCH_DTYPES[dtype])
                if not all_finite(value):
                    raise CheckpointError(
                        f"{self.source.path}: {key} would contain NaN or infinite values in {dtype}; expected "
                        "finite weights. Use an adapter that was trained on this base."
                    )
                yield value

        return PendingTensor(key, dtype, self._shape(key), blocks)

    def _before(self, key: str) -> Iterable[Tensor]:
        """Return the values to which the steps of a tensor add, in blocks of rows."""
        if key not in self.replaced:
            return self.source.read_in_blocks(key)
        other, start = self.replaced[key]
        stop = start + self._shape(key)[0]
        places = range(start, stop, _BLOCK_ROWS)
        return (self.adapter.stored.read_rows(other, one, min(one + _BLOCK_ROWS, stop)) for one in places)


def _equal_parts(num_rows: int, count: int) -> list[slice]:
    size = num_rows // count
    return [slice(place * size, (place + 1) * size) for place in range(count)]


def _add_product(pair: LowRank, expert: int, rows: slice, first: int, block: Tensor) -> Tensor:
    """Return ``W + scale * left @ right``, where DoRA's magnitude then sets the norm of each row."""
    left, right = pair.matrices(expert)
    of_block = slice(first, first + len(block))
    merged = block + pair.scale * (left[rows][of_block] @ right)
    if pair.magnitude is None:
        return merged
    return merged * (pair.magnitude[rows][of_block] / torch.linalg.vector_norm(merged, dim=1))[:, None]


def _add_to_experts(pair: LowRank, first: int, block: Tensor) -> Tensor:
    """Add to each expert of a block of stacked experts its product."""
    return torch.stack([_add_product(pair, expert, slice(None), 0, one) for expert, one in enumerate(block, first)])
