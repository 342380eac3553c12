"""Read a peft adapter, and merge a LoRA adapter into a checkpoint's own layout without building the model.

``W + scale * left @ right`` is computed in fp32, a block of rows at a time, and rounded once to the stored dtype. Key
names, shards, dtypes and every byte of the other tensors stay the same.
"""

from __future__ import annotations

import filecmp
import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, PositiveInt
from rich.progress import Progress
from torch import Tensor

from mtp_train.checkpoints.files import (
    CONFIG_FILE,
    INDEX_FILE,
    PICKLE_SUFFIXES,
    SINGLE_FILE,
    TORCH_DTYPES,
    Checkpoint,
    Number,
    TensorInfo,
    all_finite,
    indexed_files,
    read_json,
    scan_safetensors,
    validated,
)
from mtp_train.checkpoints.identity import TEMPLATE_PATTERNS, TOKENIZER_PATTERNS, matching_files
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.quantised import quant_method
from mtp_train.checkpoints.suggestions import output_of
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.checkpoints.writing import PendingTensor
from mtp_train.errors import CheckpointError

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
# Config fields of adapters that are more than a sum of low-rank products, with the reason why they cannot be merged.
_UNMERGEABLE = {
    "alora_invocation_tokens": "acts only after its invocation tokens",
    "arrow_config": "routes each token to other adapters",
    "kasa_config": "rescales singular values of the base",
    "layer_replication": "repeats layers of the base",
    "lora_bias": "adds to biases as well",
    "monteclora_config": "samples its weights",
    "trainable_token_indices": "replaces single rows of the embedding",
    "use_bdlora": "is block-diagonal",
    "use_qalora": "belongs to a quantised base",
}
# With these, peft subtracts the adapter's initial product from the base's weights: the adapter alone does not contain
# the change.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


_OF_A_LAYER = re.compile(r"layers\.(?P<layer>\d+)\.(?P<tail>.+)\Z")
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")
_WRAPPERS = re.compile(r"\A(?:(?:model|language_model)\.)+")
_ONE_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\Z")
# The fused parameters of experts in the order of their declaration, with their parts in the order of their rows.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
LM_HEAD = "lm_head.weight"
_BLOCK_ROWS = 4096
Step = Callable[[int, Tensor], Tensor]
"""From the number of a block's first row, and the block in fp32, to the block that replaces it."""


class LoraConfigFile(BaseModel):
    """The fields of a LoRA adapter's ``adapter_config.json`` that determine how its weights are read."""

    r: PositiveInt
    lora_alpha: Number
    rank_pattern: dict[str, int] | None = None
    """Regular expressions of module names to ranks."""
    alpha_pattern: dict[str, Number] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    ensure_weight_tying: bool | None = None
    target_parameters: list[str] | None = None

    def targets(self, name: str) -> bool:
        """Return whether ``target_parameters`` names a parameter."""
        return any(f".{name}".endswith(f".{target}") for target in self.target_parameters or ())

    def rank(self, name: str) -> int:
        return _of_pattern(self.rank_pattern, name) or self.r

    def scale(self, name: str) -> float:
        alpha, rank = _of_pattern(self.alpha_pattern, name), self.rank(name)
        return (self.lora_alpha if alpha is None else alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _of_pattern(patterns: Mapping[str, Any] | None, name: str) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as peft looks it up."""
    return next((value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", name)), None)


@dataclass(frozen=True, kw_only=True)
class LowRank:
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


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: the parameters that it changes, with its matrices still on disk."""

    stored: Checkpoint
    """Its directory, with the weights opened."""
    pairs: tuple[LowRank, ...]
    replacements: Mapping[str, str]
    """Parameter name in transformers' tree to the key of the tensor that replaces it (``modules_to_save``, biases, and
    the weights that a trainer saved in files of their own)."""
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
    own, theirs = matching_files(checkpoint, _TOKENIZER), matching_files(adapter, _TOKENIZER)
    if all(name in own and filecmp.cmp(file, own[name], shallow=False) for name, file in theirs.items()):
        return {}
    is_whole = any(fnmatch(name, pattern) for name in theirs for pattern in _VOCABULARIES)
    return theirs if is_whole else own | theirs


def merge_command(checkpoint: str, adapter: str) -> str:
    out = output_of(checkpoint, "-merged")
    return shlex.join(["mtp-train", "merge", checkpoint, "--adapter", adapter, "--out", out])


def read_adapter(path: Path) -> Adapter:
    """Read an adapter directory."""
    stored = open_weights(path)
    _require_mergeable(stored)
    hint = "Restore the original, or save the adapter again."
    config = validated(LoraConfigFile, stored.config, path / ADAPTER_CONFIG_FILE, hint)
    load = lru_cache(maxsize=_NUM_KEPT)(lambda key: stored.read(key).float())
    groups, replacements = _group(stored)
    names = _parameter_names(stored, config, groups.keys())
    pairs = tuple(_pair(stored, load, config, group[0], names[group], parts) for group, parts in groups.items())
    for name in replacements.keys() & {f"{pair.module}.{pair.parameter}" for pair in pairs}:
        # peft saves an adapted embedding beside its adapter.
        if (file := stored.tensors[replacements[name]].file) != ADAPTER_FILE:
            raise CheckpointError(
                f"{path / file}: replaces {name}, which {ADAPTER_FILE} adapts; expected one of the two, as the order "
                "counts. Save the adapter again without one."
            )
    return Adapter(stored, pairs, replacements, bool(config.ensure_weight_tying))


def open_weights(path: Path) -> Checkpoint:
    config, file = read_json(path / ADAPTER_CONFIG_FILE), path / ADAPTER_FILE
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
    stored = Checkpoint(path, config, None, _scan_all(path))
    if not stored.tensors:
        raise CheckpointError(f"{file}: holds no tensor; expected an adapter's weights. Save it again.")
    require_finite_checkpoint(stored, Progress(disable=True))
    return stored


def _scan_all(path: Path) -> dict[str, TensorInfo]:
    """List the tensors of an adapter, and of the weights that a trainer saved whole beside it (norms, embeddings)."""
    found, others = scan_safetensors(path / ADAPTER_FILE), {ADAPTER_FILE}
    if (path / CONFIG_FILE).is_file():
        # The weight files of a model in the adapter's directory, which its config declares.
        index = read_json(path / INDEX_FILE) if (path / INDEX_FILE).is_file() else {}
        others |= {SINGLE_FILE, *indexed_files(index)}
    for file in sorted(path.iterdir()):
        if file.suffix in PICKLE_SUFFIXES and not _STATE.fullmatch(file.name):
            raise CheckpointError(
                f"{file}: weights beside the adapter, in a pickle, which is not read; expected every trained weight in "
                f"safetensors, where it is merged too. Convert it: {_convert_command(file)}"
            )
        if file.suffix == ".safetensors" and file.name not in others:
            more = scan_safetensors(file)
            if twice := more.keys() & found.keys():
                raise CheckpointError(
                    f"{file}: has {min(twice)}, like {found[min(twice)].file}; expected each weight of the adapter "
                    "once. Keep one of the two files."
                )
            found |= more
    return found


def _convert_command(file: Path) -> str:
    """Return the command that writes a pickle's tensors as safetensors, and moves it out of its directory."""
    code = (
        "import sys, torch; from safetensors.torch import save_file; "
        "save_file({k: v.clone() for k, v in torch.load(sys.argv[1], weights_only=True).items()}, sys.argv[2])"
    )
    convert = shlex.join(["python", "-c", code, str(file), f"{file}.safetensors"])
    return f"{convert} && {shlex.join(['mv', str(file), f'{file.parent.absolute()}-{file.name}'])}"


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
    config = stored.config
    kind, start = config.get("peft_type"), config.get("init_lora_weights")
    found = next(
        (f"{name} is set, and such an adapter {reason}" for name, reason in _UNMERGEABLE.items() if config.get(name)),
        None,
    )
    if kind != "LORA":
        found = f"peft_type {kind!r}, which is not LORA"
    elif str(start).lower().startswith(_CHANGES_THE_BASE):
        found = f"init_lora_weights {start!r} changed the base's weights before training"
    if found is not None:
        raise _not_mergeable(stored, found)


def _not_mergeable(stored: Checkpoint, found: str) -> CheckpointError:
    return CheckpointError(
        f"{stored.path / ADAPTER_CONFIG_FILE}: {found}; expected an adapter that adds a low-rank product to each "
        "weight of its base. Merge it with peft's merge_and_unload, save the model, and put the head back with "
        "mtp-train graft."
    )


def _parameter_names(stored: Checkpoint, config: LoraConfigFile, groups: Set[_Wrapped]) -> dict[_Wrapped, str]:
    """Return the parameter that each group of tensors adapts, from the depth of peft's wrapping."""
    named: dict[_Wrapped, str] = {}
    for module, count in Counter(module for module, _ in groups).items():
        experts = _FUSED if module.endswith("experts") else ()
        ordered = [name for name in experts if config.targets(f"{module}.{name}")] or ["weight"]
        # peft wraps the parameters of one module in the order of their declaration, the first one innermost.
        wanted = {(module, depth): name for depth, name in enumerate(reversed(ordered))}
        if count != len(wanted) or not wanted.keys() <= groups:
            raise CheckpointError(
                f"{stored.path}: {module} is adapted {count} times, while target_parameters lists "
                f"{', '.join(ordered)}; expected one adapter for each. Save it again with the peft that made it."
            )
        named |= wanted
    return named


def _pair(
    stored: Checkpoint,
    load: Callable[[str], Tensor],
    config: LoraConfigFile,
    module: str,
    parameter: str,
    parts: _Parts,
) -> LowRank:
    """Return the matrices of a parameter; each pair is loaded when it is used."""
    file, magnitude = stored.path / ADAPTER_FILE, parts.get("lora_magnitude_vector")
    embedding = any(part.startswith("lora_embedding") for part in parts)
    a, b = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    if not {a, b} <= parts.keys() or bool(config.use_dora) != (magnitude is not None):
        raise CheckpointError(
            f"{file}: holds {', '.join(parts)} of {module}; expected {a} and {b}, and lora_magnitude_vector exactly "
            f"with use_dora, which is {config.use_dora!r}. Save the adapter again."
        )
    if magnitude is not None and embedding:
        raise _not_mergeable(stored, f"DoRA on {module}, whose norms run along the other axis of the stored weight")
    # peft looks ranks up by the module's name, or by the parameter's name for target_parameters.
    name = f"{module}.{parameter}" if config.targets(f"{module}.{parameter}") else module
    rank, stacked = config.rank(name), parameter != "weight"
    down, up = stored.tensors[parts[a]].shape, stored.tensors[parts[b]].shape
    fits = len(down) == len(up) == 2 and down[0] == up[1] and down[0] % rank == 0
    if not fits or not (stacked or down[0] == rank):
        raise CheckpointError(
            f"{file}: {module} has {a} {list(down)} and {b} {list(up)}; expected matrices of rank {rank}, as "
            f"{ADAPTER_CONFIG_FILE} declares. Save the adapter again."
        )

    count = down[0] // rank if stacked else 0

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        if embedding:
            return load(parts[a]).T, load(parts[b]).T
        if stacked:
            # The rank axis stacks the experts: rank by rank in B, expert by expert in A.
            return load(parts[b])[:, expert::count], load(parts[a])[expert * rank : (expert + 1) * rank]
        return load(parts[b]), load(parts[a])

    return LowRank(
        module=module,
        parameter=parameter,
        shape=(down[1], up[0]) if embedding else (up[0], down[1]),
        num_experts=count,
        matrices=matrices,
        scale=config.scale(name),
        magnitude=None if magnitude is None else load(magnitude),
    )


@dataclass(frozen=True)
class Merge:
    """What a merge changes in a checkpoint."""

    tensors: Mapping[str, PendingTensor] = field(default_factory=dict)
    """Key of a stored tensor to the tensor that replaces it."""
    files: Mapping[str, Path | None] = field(default_factory=dict)
    """Path in the directory to the file of the adapter's tokenizer or chat template that is written there; None for a
    file that is left out."""
    config_fields: Mapping[str, Any] = field(default_factory=dict)
    """``vocab_size``, where the adapter's training resized the vocabulary."""


def plan_merge(source: Checkpoint, layout: HeadLayout, adapter: Adapter) -> Merge:
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
    plan = _Plan(source, layout, adapter)
    for name, key in adapter.replacements.items():
        plan.replace(name, key)
    for pair in adapter.pairs:
        plan.add(pair)
    plan.repeat_in_shared_keys()
    plan.require_one_vocabulary()
    tokenizer = tokenizer_files(source.path, adapter.path)
    # Beside a model, transformers would apply the adapter a second time.
    left_out = {ADAPTER_CONFIG_FILE, *(matching_files(source.path, _TOKENIZER) if tokenizer else ())}
    rows = plan.rows.get(layout.embed_key)
    return Merge(
        {key: plan.changed(key) for key in plan.steps},
        {**dict.fromkeys(left_out), **tokenizer},
        {} if rows is None else {"vocab_size": rows},
    )


class _Plan:
    """The steps of the change of each stored tensor, and the stored keys of the modules in transformers' tree."""

    def __init__(self, source: Checkpoint, layout: HeadLayout, adapter: Adapter) -> None:
        self.source, self.layout, self.adapter = source, layout, adapter
        self.steps: dict[str, list[Step]] = {}
        self.rows: dict[str, int] = {}
        """Numbers of rows of the tensors whose vocabulary the adapter's training resized."""
        self._embedding = layout.embed_key
        self._tied = bool(source.config.get("tie_word_embeddings", source.text_config.get("tie_word_embeddings")))
        self._lm_head = layout.lm_head_key
        self._tied |= self.home(LM_HEAD) is None
        self._ends = (self._embedding, self._lm_head)
        adapted = [f"{pair.module}.weight" for pair in adapter.pairs]
        self._embedding_is_adapted = any(
            self.home(name) == self._embedding for name in (*adapter.replacements, *adapted)
        )
        saved = tuple(adapter.stored.config.get("modules_to_save") or ())
        for name, key in adapter.replacements.items():
            # peft also stores a resized embedding that it did not train.
            of_file = adapter.stored.tensors[key].file != ADAPTER_FILE and name.endswith(LM_HEAD)
            if of_file or name.removesuffix(".weight").endswith(saved):
                adapted.append(name)
        self._trains_ends = any(self.home(name) in self._ends or name.endswith(LM_HEAD) for name in adapted)

    def home(self, name: str) -> str | None:
        """Return the stored key of a parameter, None where there is none or its parts are stored separately.

        Keys may differ from transformers' names: wrappers add another prefix than text-only models have, and some
        releases name the embedding, or parts of a wrapper or of a layer, differently.
        """
        bare, of_rules = _WRAPPERS.sub("", name), self._of_rules(name)
        candidates = [name, self.layout.trunk_prefix + bare, bare]
        if len(of_rules) == 1:
            candidates += of_rules
        if bare in _EMBEDDINGS:
            candidates.append(self._embedding)
        if bare == LM_HEAD:
            candidates.append(self._lm_head)
        for ours, native in self.layout.family.keys.wrapper_names.items():
            if bare.startswith(ours):
                candidates.append(native + bare.removeprefix(ours))
        return next((key for key in candidates if key in self.source.tensors), None)

    def _rows_of(self, name: str, num_rows: int) -> Iterable[tuple[str, slice]]:
        """Return the stored tensors of a parameter's rows.

        This is the parameter's name with all rows, or the key of each part with its rows where a release stores parts
        separately.
        """
        parts = [] if self.home(name) is not None else self._of_rules(name)
        keys = parts if parts and all(key in self.source.tensors for key in parts) else [name]
        return zip(keys, _equal_parts(num_rows, len(keys)), strict=True)

    def _of_rules(self, name: str) -> list[str]:
        of_layer = _OF_A_LAYER.match(_WRAPPERS.sub("", name))
        return [] if of_layer is None else self.layout.trunk_layer_keys(int(of_layer["layer"]), of_layer["tail"])

    def replace(self, name: str, key: str) -> None:
        stored = self.adapter.stored
        num_rows, *columns = stored.tensors[key].shape
        whole = self.home(name)
        if whole in self._ends and num_rows != self.source.tensors[whole].shape[0]:
            self.rows[whole] = num_rows
        for home, rows in self._rows_of(name, num_rows):
            self.step(home, (rows.stop - rows.start, *columns), partial(_read_rows, stored, key, rows.start))

    def add(self, pair: LowRank) -> None:
        name = f"{pair.module}.{pair.parameter}"
        num_rows, num_columns = pair.shape
        if pair.num_experts:
            self._add_experts(name, pair)
            return
        single = _ONE_EXPERT.match(pair.module)
        if single is None or self.home(name) is not None:
            for home, rows in self._rows_of(name, num_rows):
                self.step(home, (rows.stop - rows.start, num_columns), partial(_add_product, pair, 0, rows))
            return
        # The adapter of one expert's own layer, as engines and older peft store it, of stacked experts.
        expert, part = int(single["expert"]), single["part"]
        parameter, parts = next((name, parts) for name, parts in _FUSED.items() if part in parts)
        stack = f"{single['experts']}.{parameter}"
        stored = self.home(stack)
        count = 0 if stored is None else self.source.tensors[stored].shape[0]
        shape = (max(count, expert + 1), num_rows * len(parts), num_columns)
        rows = _equal_parts(num_rows * len(parts), len(parts))[parts.index(part)]
        self.step(stack, shape, partial(_add_to_experts, pair, {expert: 0}, rows))

    def _add_experts(self, name: str, pair: LowRank) -> None:
        """Add the matrices of a parameter that stacks experts, which are stored stacked or one by one."""
        num_rows, num_columns = pair.shape
        if self.home(name) is not None:
            of_experts = {expert: expert for expert in range(pair.num_experts)}
            self.step(name, (pair.num_experts, *pair.shape), partial(_add_to_experts, pair, of_experts, slice(None)))
            return
        parts = self._of_rules(name) or [f"{pair.module}.{{expert}}.{part}.weight" for part in _FUSED[pair.parameter]]
        if self.home(parts[0].format(expert=pair.num_experts)) is not None:
            raise CheckpointError(
                f"{self.adapter.path}: adapts {pair.num_experts} experts of {pair.module}, but {self.source.path} has "
                "more; expected the same number. Merge into the base that the adapter was trained on."
            )
        places = zip(parts, _equal_parts(num_rows, len(parts)), strict=True)
        for expert, (part, rows) in itertools.product(range(pair.num_experts), places):
            shape = (rows.stop - rows.start, num_columns)
            self.step(part.format(expert=expert), shape, partial(_add_product, pair, expert, rows))

    def step(self, name: str, shape: tuple[int, ...], step: Step) -> None:
        key = self.home(name)
        if self._tied and (key == self._embedding or name.endswith(LM_HEAD)):
            if self._trains_ends and not self.adapter.keeps_tied:
                raise CheckpointError(
                    f"{self.adapter.path}: adapts {name}, while {self.source.path} ties lm_head and embedding to one "
                    "tensor, which cannot hold two; expected an adapter that leaves both alone or keeps them tied. "
                    "Train it with ensure_weight_tying=True, or serve it unmerged."
                )
            # The two adapters of a tied pair are equal. The embedding's is merged, into both tensors where both are
            # stored.
            if name.endswith(LM_HEAD) and self._embedding_is_adapted:
                return
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
        stored = self.source.tensors[key]
        if (self.rows.get(key, stored.shape[0]), *stored.shape[1:]) != shape:
            raise CheckpointError(
                f"{self.adapter.path}: adapts {key} as {list(shape)}, but in {self.source.path} it is "
                f"{list(stored.shape)}; expected the same shape. Merge into the base that the adapter was trained on."
            )
        self.steps.setdefault(key, []).append(step)

    def repeat_in_shared_keys(self) -> None:
        """Repeat the steps of trunk tensors in the head's copies of them."""
        tensors, shared = self.source.tensors, {key: self.layout.shared_key(key) for key in self.source.tensors}
        copies = {key: self.layout.trunk_key(one, tensors) for key, one in shared.items() if one is not None}
        if self._tied and self._lm_head in tensors:
            copies[self._lm_head] = self._embedding
        for copy, key in copies.items():
            if key in self.steps:
                self.steps[copy] = self.steps[key]
                if key in self.rows:
                    self.rows[copy] = self.rows[key]

    def require_one_vocabulary(self) -> None:
        """Check that embedding, lm_head and head have the adapter's number of tokens after the merge."""
        if not self.rows:
            return
        tensors = self.source.tensors
        rows = {self.rows.get(key, tensors[key].shape[0]) for key in self._ends if key in tensors}
        wiring = self.layout.family.wiring
        if len(rows) > 1 or wiring.own_lm_head or wiring.own_embedding:
            raise CheckpointError(
                f"{self.adapter.path}: resizes the vocabulary of {', '.join(sorted(self.rows))}, and "
                f"{self.source.path} has another matrix over it; expected all of them in the adapter, and a head "
                "without one. Save the adapter with peft's save_embedding_layers=True."
            )

    def changed(self, key: str) -> PendingTensor:
        """Return a stored tensor after its steps, which are computed in fp32 and rounded once."""
        stored, steps = self.source.tensors[key], self.steps[key]
        shape = (self.rows.get(key, stored.shape[0]), *stored.shape[1:])

        def blocks() -> Iterator[Tensor]:
            # The adapter's rows replace all rows of a resized tensor.
            before = torch.split(torch.zeros(()).expand(shape), _BLOCK_ROWS) if key in self.rows else ()
            first = 0
            for block in before or self.source.read_in_blocks(key):
                value = block.float()
                for step in steps:
                    value = step(first, value)
                first += len(block)
                value = value.to(TORCH_DTYPES[stored.dtype])
                if not all_finite(value):
                    raise CheckpointError(
                        f"{self.source.path}: {key} would contain NaN or infinite values in {stored.dtype}; expected "
                        "finite weights. Use an adapter that was trained on this base."
                    )
                yield value

        return PendingTensor(key, stored.dtype, shape, blocks)


def _equal_parts(num_rows: int, count: int) -> list[slice]:
    size = num_rows // count
    return [slice(place * size, (place + 1) * size) for place in range(count)]


def _read_rows(stored: Checkpoint, key: str, start: int, first: int, block: Tensor) -> Tensor:
    return stored.read_rows(key, start + first, start + first + len(block)).float()


def _add_product(pair: LowRank, expert: int, rows: slice, first: int, block: Tensor) -> Tensor:
    """Return ``W + scale * left @ right``, where DoRA's magnitude then sets the norm of each row."""
    left, right = pair.matrices(expert)
    of_block = slice(first, first + len(block))
    merged = block + pair.scale * (left[rows][of_block] @ right)
    if pair.magnitude is None:
        return merged
    return merged * (pair.magnitude[rows][of_block] / torch.linalg.vector_norm(merged, dim=1))[:, None]


def _add_to_experts(pair: LowRank, products: Mapping[int, int], rows: slice, first: int, block: Tensor) -> Tensor:
    """Add products to rows of their experts in a block of stacked experts, in place.

    ``products`` maps the number of an expert to the number of its product.
    """
    for expert, matrix in enumerate(block, first):
        if expert in products:
            matrix[rows] = _add_product(pair, products[expert], slice(None), 0, matrix[rows])
    return block
