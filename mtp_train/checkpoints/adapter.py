"""Read a peft adapter: check its config and its files, and find the low-rank matrices of each module.

Nothing here depends on the checkpoint that the adapter is for. :mod:`mtp_train.checkpoints.lora_merge` finds each
module's tensors in the checkpoint.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from rich.progress import Progress
from torch import Tensor

from mtp_train.checkpoints.files import (
    TORCH_DTYPES,
    Checkpoint,
    bounded,
    locate_checkpoint,
    read_json,
    scan_safetensors,
    validated,
)
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.errors import CheckpointError

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
# The experts of a mixture share one stacked adapter, which is read once for each expert's tensor: both matrices of two
# parameters are kept.
_NUM_KEPT = 4
_ROOT = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+?)(?P<wraps>(?:\.base_layer)*)\."
    r"(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?:\.(?P<field>weight|bias))?\Z"
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

Kind = Literal["linear", "embedding", "experts"]


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
        """Return the rank of a module or parameter."""
        return _of_pattern(self.rank_pattern, name) or self.r

    def scale(self, name: str) -> float:
        """Return the factor of the low-rank product of a module or parameter."""
        alpha, rank = _of_pattern(self.alpha_pattern, name), self.rank(name)
        return (self.lora_alpha if alpha is None else alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _of_pattern(patterns: Mapping[str, Any] | None, name: str) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as peft looks it up."""
    return next((value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", name)), None)


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of an adapter that is not loaded yet."""

    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    """Returns the matrix in fp32."""


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """One pair of matrices that adapts one parameter by ``scale * B @ A``."""

    module: str
    """The module's name in transformers' tree, without peft's prefix."""
    parameter: str
    """``weight``, or the name of a parameter that peft targets directly."""
    kind: Kind
    """``linear``, ``embedding``, or ``experts`` (one pair for each expert, stacked in peft's order)."""
    left: StoredMatrix
    """B, or for an embedding A transposed: shape (rows, rank). For experts, B as peft stores it."""
    right: StoredMatrix
    """A, or for an embedding B transposed: shape (rank, columns). For experts, A as peft stores it."""
    rank: int
    scale: float
    magnitude: Tensor | None = None
    """DoRA's magnitude: the norm of each row of the merged weight."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: the parameters that it changes, with its matrices still on disk."""

    stored: Checkpoint
    """Its directory, with the weights opened."""
    pairs: tuple[LowRank, ...]
    bias_steps: Mapping[str, Tensor]
    """Parameter name in transformers' tree to the values that are added to it."""
    replacements: Mapping[str, str]
    """Parameter name in transformers' tree to the key of the tensor that replaces it (``modules_to_save``, biases)."""
    keeps_tied: bool
    """Whether it was trained with embedding and lm_head tied to each other."""

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.stored.path


_Parts = dict[str, str]
"""``lora_A``, ``lora_B`` and so on to the stored key."""
_Wrapped = tuple[str, int]
"""A module's name, and how many times peft has wrapped it."""


def is_adapter(path: Path) -> bool:
    """Return whether a directory contains an adapter and no model."""
    return (path / ADAPTER_CONFIG_FILE).is_file() and not (path / "config.json").is_file()


def refuse_embedded_adapter(path: Path) -> None:
    """Raise a CheckpointError for an adapter in a model's directory: transformers applies it, engines do not."""
    if (path / ADAPTER_CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{path}: has {ADAPTER_CONFIG_FILE} beside the model, which transformers applies silently and engines "
            "ignore; expected a model alone. Move the adapter to a directory of its own, and pass that as the adapter."
        )


def merge_command(checkpoint: str, adapter: str) -> str:
    """Return the command that merges a LoRA adapter into a checkpoint."""
    out = f"{checkpoint.rstrip('/').rsplit(':', 1)[-1]}-merged"
    return f"mtp-train merge {shlex.quote(checkpoint)} --adapter {shlex.quote(adapter)} --out {shlex.quote(out)}"


def locate_adapter(location: str, trunk: str) -> Path:
    """Return the directory of an adapter to apply unmerged.

    Raises:
        CheckpointError: There is no adapter; its config or weights are damaged, incomplete or not finite; or it adapts
            modules of a vision-language model, which the text model that we load does not have.
    """
    path = locate_checkpoint(location)
    if not (path / ADAPTER_CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{location}: no {ADAPTER_CONFIG_FILE}; expected a peft adapter directory or a hub id. Check the spelling."
        )
    stored = _open_weights(path)
    wrapped = next((key for key in stored.tensors if "language_model." in key or ".visual." in key), None)
    if wrapped is not None:
        raise CheckpointError(
            f"{location}: adapts {wrapped}, a module of the vision-language model; expected modules of the text model, "
            f"which alone is loaded. Run '{merge_command(trunk, location)}' and use the result."
        )
    # Adapters of other kinds are checked when peft applies them, by the names that it gives their tensors.
    if stored.config["peft_type"] == "LORA":
        config = _lora_config(stored)
        for (module, _), parts in _group(stored)[0].items():
            _require_whole(stored, config, module, parts)
    return path


def read_adapter(path: Path) -> Adapter:
    """Read an adapter directory.

    Raises:
        CheckpointError: It is no LoRA adapter; its weights are missing, damaged, not finite or of another rank than the
            config declares; or it has an effect that merged weights cannot have.
    """
    stored = _open_weights(path)
    _require_mergeable(stored)
    config = _lora_config(stored)
    load = lru_cache(maxsize=_NUM_KEPT)(lambda key: stored.read(key).float())
    groups, replacements = _group(stored)
    names = _parameter_names(stored, config, groups)
    pairs, steps = [], {}
    for group, parts in groups.items():
        _require_whole(stored, config, group[0], parts)
        pair = _pair(stored, load, config, group[0], names[group], parts)
        pairs.append(pair)
        if "lora_B_bias" in parts:
            steps[f"{pair.module}.bias"] = pair.scale * load(parts["lora_B_bias"])
    return Adapter(stored, tuple(pairs), steps, replacements, bool(config.ensure_weight_tying))


def _open_weights(path: Path) -> Checkpoint:
    """Open an adapter's weights, with its raw config."""
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


def _lora_config(stored: Checkpoint) -> LoraConfigFile:
    file, hint = stored.path / ADAPTER_CONFIG_FILE, "Restore the original, or save the adapter again."
    config = validated(LoraConfigFile, stored.config, file, hint)
    for patterns in (config.rank_pattern, config.alpha_pattern):
        for pattern, value in (patterns or {}).items():
            if not _is_regex(pattern) or (patterns is config.rank_pattern and value < 1):
                raise CheckpointError(f"{file}: {pattern!r}: {value}; expected a pattern and a rank, 1 or more. {hint}")
    return config


def _is_regex(pattern: str) -> bool:
    try:
        return bool(re.compile(pattern))
    except re.error:
        return False


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


def _matrices(parts: _Parts) -> tuple[str, str]:
    embedding = any(part.startswith("lora_embedding") for part in parts)
    return ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")


def _require_whole(stored: Checkpoint, config: LoraConfigFile, module: str, parts: _Parts) -> None:
    """Check that a module's adapter has both matrices, and DoRA's magnitude exactly if the config sets DoRA."""
    file, (a, b) = stored.path / ADAPTER_FILE, _matrices(parts)
    if not {a, b} <= parts.keys():
        raise CheckpointError(
            f"{file}: {next(iter(parts.values()))} has no counterpart; expected both {a} and {b} of {module}. Save the "
            "adapter again."
        )
    if bool(config.use_dora) != ("lora_magnitude_vector" in parts):
        found = "no lora_magnitude_vector" if config.use_dora else "a lora_magnitude_vector"
        raise CheckpointError(
            f"{file}: {found} for {module}, while {ADAPTER_CONFIG_FILE} sets use_dora = {config.use_dora!r}; "
            "expected magnitudes for every module with DoRA, and none without. Save the adapter again."
        )


def _pair(
    stored: Checkpoint,
    load: Callable[[str], Tensor],
    config: LoraConfigFile,
    module: str,
    parameter: str,
    parts: _Parts,
) -> LowRank:
    (a, b), path = _matrices(parts), stored.path
    kind: Kind = "embedding" if a == "lora_embedding_A" else "linear" if parameter == "weight" else "experts"
    down, up = stored.tensors[parts[a]].shape, stored.tensors[parts[b]].shape
    if len(down) != 2 or len(up) != 2:
        raise CheckpointError(
            f"{path / ADAPTER_FILE}: {module} is a convolution ({a} has {len(down)} axes); expected matrices. Merge it "
            "with peft's merge_and_unload, and put the head back with mtp-train graft."
        )
    # peft looks ranks up by the module's name, or by the parameter's name for target_parameters.
    name = f"{module}.{parameter}" if config.targets(f"{module}.{parameter}") else module
    rank = config.rank(name)
    if down[0] % rank or (kind != "experts" and down[0] != rank) or down[0] != up[1]:
        raise CheckpointError(
            f"{path / ADAPTER_FILE}: {module} has {a} {list(down)} and {b} {list(up)}; expected rank "
            f"{rank}, as {ADAPTER_CONFIG_FILE} declares. Save the adapter again."
        )
    transposed = kind == "embedding" or (kind == "linear" and bool(config.fan_in_fan_out))
    magnitude = parts.get("lora_magnitude_vector")
    if magnitude is not None and transposed:
        raise CheckpointError(
            f"{path}: DoRA on {module}, whose norms run along the other axis of the stored weight; expected DoRA on "
            "linear layers. Merge it with peft's merge_and_unload, and put the head back with mtp-train graft."
        )

    def matrix(key: str) -> StoredMatrix:
        shape = stored.tensors[key].shape
        if transposed:
            return StoredMatrix(shape[::-1], lambda: load(key).T)
        return StoredMatrix(shape, lambda: load(key))

    return LowRank(
        module=module,
        parameter=parameter,
        kind=kind,
        left=matrix(parts[a if transposed else b]),
        right=matrix(parts[b if transposed else a]),
        rank=rank,
        scale=config.scale(name),
        magnitude=None if magnitude is None else load(magnitude),
    )
