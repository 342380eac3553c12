"""Read a peft adapter: check its config and its files, and find the low-rank matrices of each module.

Nothing here depends on the checkpoint that the adapter is for. :mod:`mtp_train.checkpoints.lora_merge` finds each
module's tensors in the checkpoint.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.progress import Progress
from torch import Tensor

from mtp_train.checkpoints.files import TORCH_DTYPES, Checkpoint, locate_checkpoint, read_json, scan_safetensors
from mtp_train.checkpoints.finite import require_finite_checkpoint
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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_rank(value: Any) -> bool:
    return _is_number(value) and value == int(value) and value > 0


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_pattern(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check for mappings from regular expressions to values."""

    def holds(value: Any) -> bool:
        if not isinstance(value, dict):
            return value is None
        try:
            return all(re.compile(pattern) and of(one) for pattern, one in value.items())
        except re.error:
            return False

    return holds


# The fields of a LoRA adapter's config that we read: name, check, and the expected value for messages.
_FIELDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("r", _is_rank, "a rank, 1 or more"),
    ("lora_alpha", _is_number, "a number"),
    ("rank_pattern", _is_pattern(_is_rank), "a mapping from patterns of module names to ranks"),
    ("alpha_pattern", _is_pattern(_is_number), "a mapping from patterns of module names to numbers"),
    *((name, _is_flag, "true or false") for name in ("use_rslora", "use_dora", "fan_in_fan_out")),
    (
        "target_parameters",
        lambda value: value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value)),
        "a list of parameter names",
    ),
)


class AdapterWeights:
    """Read an adapter's stored tensors on demand, and keep the last few, which neighbouring modules share.

    Args:
        stored: The adapter's file, opened.
    """

    def __init__(self, stored: Checkpoint) -> None:
        self.stored = stored
        self._kept: dict[str, Tensor] = {}

    def load(self, key: str) -> Tensor:
        """Return a tensor in fp32."""
        if key not in self._kept:
            if len(self._kept) == _NUM_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = self.stored.read(key).float()
        return self._kept[key]


@dataclass(frozen=True, kw_only=True)
class StoredMatrix:
    """A matrix of an adapter that is not loaded yet."""

    weights: AdapterWeights
    key: str
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape after the transposition."""
        shape = self.weights.stored.tensors[self.key].shape
        return shape[::-1] if self.transposed else shape

    def load(self) -> Tensor:
        """Return the matrix in fp32."""
        value = self.weights.load(self.key)
        return value.T if self.transposed else value


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

    path: Path
    weights: AdapterWeights
    pairs: tuple[LowRank, ...]
    bias_steps: Mapping[str, Tensor]
    """Parameter name in transformers' tree to the values that are added to it."""
    replacements: Mapping[str, str]
    """Parameter name in transformers' tree to the key of the tensor that replaces it (``modules_to_save``, biases)."""
    keeps_tied: bool
    """Whether it was trained with embedding and lm_head tied to each other."""


@dataclass
class _Parts:
    keys: dict[str, str] = field(default_factory=dict)
    """``lora_A``, ``lora_B`` and so on to the stored key."""


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
    config = _read_config(path)
    weights = _open_weights(path, config)
    keys = weights.stored.tensors
    wrapped = next((key for key in keys if "language_model." in key or ".visual." in key), None)
    if wrapped is not None:
        raise CheckpointError(
            f"{location}: adapts {wrapped}, a module of the vision-language model; expected modules of the text model, "
            f"which alone is loaded. Run '{merge_command(trunk, location)}' and use the result."
        )
    # Adapters of other kinds are checked when peft applies them, by the names that it gives their tensors.
    if config["peft_type"] == "LORA":
        for (module, _), parts in _group(weights)[0].items():
            _require_whole(weights, config, module, parts)
    return path


def read_adapter(path: Path) -> Adapter:
    """Read an adapter directory.

    Raises:
        CheckpointError: It is no LoRA adapter; its weights are missing, damaged, not finite or of another rank than the
            config declares; or it has an effect that merged weights cannot have.
    """
    config = _read_config(path)
    _require_mergeable(path, config)
    weights = _open_weights(path, config)
    groups, replacements = _group(weights)
    names = _parameter_names(path, config, groups)
    pairs, steps = [], {}
    for place, parts in groups.items():
        _require_whole(weights, config, place[0], parts)
        pair = _pair(weights, config, place[0], names[place], parts)
        pairs.append(pair)
        if "lora_B_bias" in parts.keys:
            steps[f"{pair.module}.bias"] = pair.scale * weights.load(parts.keys["lora_B_bias"])
    return Adapter(path, weights, tuple(pairs), steps, replacements, bool(config.get("ensure_weight_tying")))


def _read_config(path: Path) -> dict[str, Any]:
    """Read an adapter's config, and check the fields that determine how its weights are read."""
    file = path / ADAPTER_CONFIG_FILE
    config = read_json(file)
    if not isinstance(config.get("peft_type"), str):
        raise CheckpointError(
            f"{file}: peft_type {config.get('peft_type')!r}; expected the kind of a peft adapter, such as LORA. "
            "Restore the original, or save the adapter again."
        )
    for name, holds, expected in _FIELDS if config["peft_type"] == "LORA" else ():
        if not holds(config.get(name)):
            raise CheckpointError(
                f"{file}: {name} is {config.get(name)!r}; expected {expected}. Restore the original, or save the "
                "adapter again."
            )
    return config


def _group(weights: AdapterWeights) -> tuple[dict[tuple[str, int], _Parts], dict[str, str]]:
    """Return low-rank tensors by module and depth of peft's wrapping, and the tensors that replace a parameter."""
    groups: dict[tuple[str, int], _Parts] = {}
    replacements: dict[str, str] = {}
    for key in weights.stored.tensors:
        name = key.removeprefix(_ROOT)
        match = _PART.match(name)
        if match is None:
            replacements[name.replace(".base_layer", "")] = key
            continue
        depth = match["wraps"].count(".base_layer")
        parts = groups.setdefault((match["module"], depth), _Parts())
        parts.keys[match["part"] + ("_bias" if match["field"] == "bias" else "")] = key
    return groups, replacements


def _require_mergeable(path: Path, config: Mapping[str, Any]) -> None:
    where = path / ADAPTER_CONFIG_FILE
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


def _open_weights(path: Path, config: Mapping[str, Any]) -> AdapterWeights:
    file = path / ADAPTER_FILE
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
    return AdapterWeights(stored)


def _parameter_names(
    path: Path, config: Mapping[str, Any], groups: Iterable[tuple[str, int]]
) -> dict[tuple[str, int], str]:
    """Return the parameter that each group of tensors adapts, from the depth of peft's wrapping."""
    depths: dict[str, list[int]] = {}
    for module, depth in groups:
        depths.setdefault(module, []).append(depth)
    named: dict[tuple[str, int], str] = {}
    for module, found in depths.items():
        experts = EXPERT_PARAMETERS if module.endswith("experts") else ()
        ordered = [name for name in experts if _is_targeted(config, f"{module}.{name}")] or ["weight"]
        if sorted(found) != list(range(len(ordered))):
            raise CheckpointError(
                f"{path}: {module} is adapted {len(found)} times, while target_parameters lists "
                f"{', '.join(ordered)}; expected one adapter for each. Save it again with the peft that made it."
            )
        named |= {(module, len(ordered) - 1 - place): name for place, name in enumerate(ordered)}
    return named


def _is_targeted(config: Mapping[str, Any], name: str) -> bool:
    """Return whether ``target_parameters`` names a parameter."""
    return any(f".{name}".endswith(f".{target}") for target in config.get("target_parameters") or ())


def _matrices(parts: _Parts) -> tuple[str, str]:
    embedding = any(part.startswith("lora_embedding") for part in parts.keys)
    return ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")


def _require_whole(weights: AdapterWeights, config: Mapping[str, Any], module: str, parts: _Parts) -> None:
    """Check that a module's adapter has both matrices, and DoRA's magnitude exactly if the config sets DoRA."""
    file, (a, b) = weights.stored.path / ADAPTER_FILE, _matrices(parts)
    if not {a, b} <= parts.keys.keys():
        alone = next(iter(parts.keys.values()))
        raise CheckpointError(
            f"{file}: {alone} has no counterpart; expected both {a} and {b} of {module}. Save the adapter again."
        )
    if bool(config.get("use_dora")) != ("lora_magnitude_vector" in parts.keys):
        found = "no lora_magnitude_vector" if config.get("use_dora") else "a lora_magnitude_vector"
        raise CheckpointError(
            f"{file}: {found} for {module}, while {ADAPTER_CONFIG_FILE} sets use_dora = {config.get('use_dora')!r}; "
            "expected magnitudes for every module with DoRA, and none without. Save the adapter again."
        )


def _pair(weights: AdapterWeights, config: Mapping[str, Any], module: str, parameter: str, parts: _Parts) -> LowRank:
    path, infos = weights.stored.path, weights.stored.tensors
    a, b = _matrices(parts)
    embedding = a == "lora_embedding_A"
    down, up = infos[parts.keys[a]].shape, infos[parts.keys[b]].shape
    if len(down) != 2 or len(up) != 2:
        raise CheckpointError(
            f"{path / ADAPTER_FILE}: {module} is a convolution ({a} has {len(down)} axes); expected matrices. Merge it "
            "with peft's merge_and_unload, and put the head back with mtp-train graft."
        )
    kind: Literal["linear", "embedding", "experts"] = (
        "embedding" if embedding else "linear" if parameter == "weight" else "experts"
    )
    # peft looks ranks up by the module's name, or by the parameter's name for target_parameters.
    name = f"{module}.{parameter}" if _is_targeted(config, f"{module}.{parameter}") else module
    rank = int(_pattern_value(config.get("rank_pattern"), name, config["r"]))
    alpha = float(_pattern_value(config.get("alpha_pattern"), name, config["lora_alpha"]))
    if down[0] % rank or (kind != "experts" and down[0] != rank) or down[0] != up[1]:
        raise CheckpointError(
            f"{path / ADAPTER_FILE}: {module} has {a} {list(down)} and {b} {list(up)}; expected rank "
            f"{rank}, as {ADAPTER_CONFIG_FILE} declares. Save the adapter again."
        )
    transposed = embedding or (bool(config.get("fan_in_fan_out")) and kind == "linear")
    magnitude = parts.keys.get("lora_magnitude_vector")
    if magnitude is not None and transposed:
        raise CheckpointError(
            f"{path}: DoRA on {module}, whose norms run along the other axis of the stored weight; expected DoRA on "
            "linear layers. Merge it with peft's merge_and_unload, and put the head back with mtp-train graft."
        )
    return LowRank(
        module=module,
        parameter=parameter,
        kind=kind,
        left=StoredMatrix(weights=weights, key=parts.keys[a if transposed else b], transposed=transposed),
        right=StoredMatrix(weights=weights, key=parts.keys[b if transposed else a], transposed=transposed),
        rank=rank,
        scale=alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank,
        magnitude=None if magnitude is None else weights.load(magnitude),
    )


def _pattern_value(patterns: Mapping[str, Any] | None, name: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as peft looks it up."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return otherwise
