"""Read a peft adapter: check its config and its files, and find the low-rank matrices of each module.

Nothing here depends on the checkpoint that the adapter is for. :mod:`mtp_train.checkpoints.lora_merge` finds each
module's tensors in the checkpoint.
"""

from __future__ import annotations

import filecmp
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.progress import Progress
from torch import Tensor

from mtp_train.checkpoints.files import (
    TORCH_DTYPES,
    Checkpoint,
    bounded,
    read_json,
    scan_safetensors,
    validated,
)
from mtp_train.checkpoints.identity import TEMPLATE_PATTERNS, TOKENIZER_PATTERNS
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.errors import CheckpointError

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
# The experts of a mixture share one stacked adapter, which is read once for each expert's tensor: both matrices of two
# parameters are kept.
_NUM_KEPT = 4
_ROOT = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+?)(?P<wraps>(?:\.base_layer)*)\."
    r"(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.(?P<field>weight|bias))?\Z"
)
# peft wraps the parameters of one module in the order of their declaration, the first one innermost.
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
# Config fields of adapters that are more than a sum of low-rank products, with the reason why they cannot be merged.
_UNMERGEABLE = {
    "alora_invocation_tokens": "acts only after its invocation tokens",
    "arrow_config": "routes each token to other adapters",
    "kasa_config": "rescales singular values of the base",
    "layer_replication": "repeats layers of the base",
    "monteclora_config": "samples its weights",
    "trainable_token_indices": "replaces single rows of the embedding",
    "use_bdlora": "is block-diagonal",
    "use_qalora": "belongs to a quantised base",
}
# With these, peft subtracts the adapter's initial product from the base's weights: the adapter alone does not contain
# the change.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LoraConfigFile:
    """The fields of a LoRA adapter's ``adapter_config.json`` that determine how its weights are read."""

    r: int = bounded(1, math.inf)
    lora_alpha: int | float = bounded(-1e30, 1e30)
    rank_pattern: dict[str, int] | None = None
    """Regular expressions of module names to ranks."""
    alpha_pattern: dict[str, int | float] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    fan_in_fan_out: bool | None = None
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
    """One pair of matrices that adapts one parameter by ``scale * left @ right``."""

    module: str
    """The module's name in transformers' tree, without peft's prefix."""
    parameter: str
    """``weight``, or the name of a parameter that peft targets directly."""
    shape: tuple[int, int]
    """Rows and columns of the product; of each expert's where the parameter stacks experts."""
    matrices: Callable[[], tuple[Tensor, Tensor]]
    """Loads left (rows, rank) and right (rank, columns) in fp32; for experts, B and A as peft stacks them."""
    num_experts: int | None
    """None for a parameter that is one matrix."""
    scale: float
    magnitude: Tensor | None = None
    """DoRA's magnitude: the norm of each row of the merged weight."""
    bias: Tensor | None = None
    """What ``lora_bias`` adds to the module's bias."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: the parameters that it changes, with its matrices still on disk."""

    stored: Checkpoint
    """Its directory, with the weights opened."""
    pairs: tuple[LowRank, ...]
    replacements: Mapping[str, str]
    """Parameter name in transformers' tree to the key of the tensor that replaces it (``modules_to_save``, biases)."""
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
    own, theirs = _of_tokenizer(checkpoint), _of_tokenizer(adapter)
    if all(name in own and filecmp.cmp(file, own[name], shallow=False) for name, file in theirs.items()):
        return {}
    is_whole = any(fnmatch(name, pattern) for name in theirs for pattern in _VOCABULARIES)
    return theirs if is_whole else own | theirs


def replaced_tokenizer_files(checkpoint: Path) -> set[str]:
    """Return the paths of a checkpoint's own tokenizer and chat template in its directory."""
    return {*_of_tokenizer(checkpoint)}


def _of_tokenizer(directory: Path) -> dict[str, Path]:
    found = (file for pattern in (*TOKENIZER_PATTERNS, *TEMPLATE_PATTERNS) for file in directory.glob(pattern))
    return {file.relative_to(directory).as_posix(): file for file in found if file.is_file()}


def merge_command(checkpoint: str, adapter: str) -> str:
    out = f"{checkpoint.rstrip('/').rsplit(':', 1)[-1]}-merged"
    return f"mtp-train merge {shlex.quote(checkpoint)} --adapter {shlex.quote(adapter)} --out {shlex.quote(out)}"


def read_adapter(path: Path) -> Adapter:
    """Read an adapter directory."""
    stored = open_weights(path)
    _require_mergeable(stored)
    hint = "Restore the original, or save the adapter again."
    config = validated(LoraConfigFile, stored.config, path / ADAPTER_CONFIG_FILE, hint)
    load = lru_cache(maxsize=_NUM_KEPT)(lambda key: stored.read(key).float())
    groups, replacements = _group(stored)
    names = _parameter_names(stored, config, groups)
    pairs = tuple(_pair(stored, load, config, group[0], names[group], parts) for group, parts in groups.items())
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
    stored = Checkpoint(path, config, None, scan_safetensors(file))
    if not stored.tensors:
        raise CheckpointError(f"{file}: holds no tensor; expected an adapter's weights. Save it again.")
    whole = next((key for key, info in stored.tensors.items() if not TORCH_DTYPES[info.dtype].is_floating_point), None)
    if whole is not None:
        raise CheckpointError(
            f"{file}: {whole} is stored as {stored.tensors[whole].dtype}; expected floating-point weights. Save the "
            "adapter again."
        )
    require_finite_checkpoint(stored, Progress(disable=True))
    return stored


def _group(stored: Checkpoint) -> tuple[dict[_Wrapped, _Parts], dict[str, str]]:
    """Return low-rank tensors by module and depth of peft's wrapping, and the tensors that replace a parameter."""
    groups: dict[_Wrapped, _Parts] = {}
    replacements: dict[str, str] = {}
    for key in stored.tensors:
        name = key.removeprefix(_ROOT)
        match = _PART.match(name)
        if match is None:
            replacements[name.replace(".base_layer", "")] = key
            continue
        parts = groups.setdefault((match["module"], match["wraps"].count(".base_layer")), {})
        parts[match["part"] + ("_bias" if match["field"] == "bias" else "")] = key
    return groups, replacements


def _require_mergeable(stored: Checkpoint) -> None:
    where, config = stored.path / ADAPTER_CONFIG_FILE, stored.config
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{where}: peft_type {config.get('peft_type')!r}; expected LORA, the only kind merged here. Merge it with "
            "peft's merge_and_unload if it has one, save the model, and put the head back with mtp-train graft."
        )
    for name, reason in _UNMERGEABLE.items():
        if config.get(name):
            raise CheckpointError(
                f"{where}: {name} is set, and such an adapter {reason}; expected one that adds a low-rank product to "
                "each weight. Serve it unmerged."
            )
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(_CHANGES_THE_BASE):
        raise CheckpointError(
            f"{where}: init_lora_weights {config['init_lora_weights']!r} changed the base's weights before training; "
            "expected an adapter relative to the base as it is. Save it with peft's "
            "path_initial_model_for_weight_conversion."
        )


def _parameter_names(stored: Checkpoint, config: LoraConfigFile, groups: Iterable[_Wrapped]) -> dict[_Wrapped, str]:
    """Return the parameter that each group of tensors adapts, from the depth of peft's wrapping."""
    depths: dict[str, list[int]] = {}
    for module, depth in groups:
        depths.setdefault(module, []).append(depth)
    named: dict[_Wrapped, str] = {}
    for module, found in depths.items():
        experts = EXPERT_PARAMETERS if module.endswith("experts") else ()
        ordered = [name for name in experts if config.targets(f"{module}.{name}")] or ["weight"]
        if sorted(found) != list(range(len(ordered))):
            raise CheckpointError(
                f"{stored.path}: {module} is adapted {len(found)} times, while target_parameters lists "
                f"{', '.join(ordered)}; expected one adapter for each. Save it again with the peft that made it."
            )
        named |= {(module, len(ordered) - 1 - place): name for place, name in enumerate(ordered)}
    return named


def _pair(
    stored: Checkpoint,
    load: Callable[[str], Tensor],
    config: LoraConfigFile,
    module: str,
    parameter: str,
    parts: _Parts,
) -> LowRank:
    file, magnitude = stored.path / ADAPTER_FILE, parts.get("lora_magnitude_vector")
    embedding = any(part.startswith("lora_embedding") for part in parts)
    a, b = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    if not {a, b} <= parts.keys() or bool(config.use_dora) != (magnitude is not None):
        raise CheckpointError(
            f"{file}: holds {', '.join(parts)} of {module}; expected {a} and {b}, and lora_magnitude_vector exactly "
            f"with use_dora, which is {config.use_dora!r}. Save the adapter again."
        )
    transposed = embedding or (parameter == "weight" and bool(config.fan_in_fan_out))
    if magnitude is not None and transposed:
        raise CheckpointError(
            f"{file}: DoRA on {module}, whose norms run along the other axis of the stored weight; expected DoRA on "
            "linear layers. Merge it with peft's merge_and_unload, and put the head back with mtp-train graft."
        )
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

    def matrices() -> tuple[Tensor, Tensor]:
        right, left = load(parts[a]), load(parts[b])
        return (right.T, left.T) if transposed else (left, right)

    return LowRank(
        module=module,
        parameter=parameter,
        shape=(down[1], up[0]) if transposed else (up[0], down[1]),
        matrices=matrices,
        num_experts=down[0] // rank if stacked else None,
        scale=config.scale(name),
        magnitude=None if magnitude is None else load(magnitude),
        bias=config.scale(name) * load(parts["lora_B_bias"]) if "lora_B_bias" in parts else None,
    )
