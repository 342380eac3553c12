"""Reading a peft LoRA adapter: which modules it changes, by what, and at which scale.

Nothing here knows the checkpoint; :mod:`mtp_train.weights.merge` finds each module's tensors in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from mtp_train.errors import CheckpointError
from mtp_train.weights.files import TensorInfo, read_json, scan_safetensors

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
_ROOT = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+?)(?P<wraps>(?:\.base_layer)*)\."
    r"(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?:\.(?P<field>weight|bias))?\Z"
)
# peft wraps the parameters of one module in the order in which the module declares them, the first one innermost.
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
# What makes an adapter more than a sum of low-rank products, and why that cannot be written into the weights here.
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
# peft subtracts the adapter's start from the base's weights for these: the adapter alone does not say what was trained.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

Kind = Literal["linear", "embedding", "experts"]


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """One pair of matrices that adapts one parameter: ``scale * B @ A``."""

    module: str
    """The module's name in transformers' tree, without peft's prefix."""
    parameter: str
    """``weight``, or the name of a parameter that peft targets directly."""
    kind: Kind
    """``linear``, ``embedding``, or ``experts`` (one pair an expert, stacked as peft stacks them)."""
    left: Tensor
    """What peft stores as B, or as A of an embedding, transposed: shape (rows, rank); for experts B as stored."""
    right: Tensor
    """Shape (rank, columns); for experts A as stored."""
    rank: int
    scale: float
    magnitude: Tensor | None = None
    """DoRA's: the norm of each row of the merged weight."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, read into memory: it is small beside its base."""

    path: Path
    pairs: tuple[LowRank, ...]
    bias_steps: Mapping[str, Tensor]
    """Parameter name in transformers' tree to what is added to it."""
    replacements: Mapping[str, Tensor]
    """Parameter name in transformers' tree to the tensor that takes its place (``modules_to_save``, biases)."""
    keeps_tied: bool
    """Whether it was trained with the embedding and the lm_head tied to each other."""


@dataclass
class _Parts:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)


def is_adapter(path: Path) -> bool:
    """Whether a directory holds an adapter and no model."""
    return (path / ADAPTER_CONFIG_FILE).is_file() and not (path / "config.json").is_file()


def read_adapter(path: Path) -> Adapter:
    """Read an adapter directory.

    Raises:
        CheckpointError: It is no LoRA adapter, its weights are missing, damaged, not finite or of another rank than it
            says, or it does something that a merged weight cannot do.
    """
    config = read_json(path / ADAPTER_CONFIG_FILE)
    _require_mergeable(path, config)
    tensors = _read_tensors(path)
    groups: dict[tuple[str, int], _Parts] = {}
    replacements: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name = key.removeprefix(_ROOT)
        match = _PART.match(name)
        if match is None:
            replacements[name.replace(".base_layer", "")] = value
            continue
        depth = match["wraps"].count(".base_layer")
        parts = groups.setdefault((match["module"], depth), _Parts())
        parts.keys.append(key)
        parts.tensors[match["part"] + ("_bias" if match["field"] == "bias" else "")] = value
    names = _parameter_names(path, config, groups)
    pairs, steps = [], {}
    for place, parts in groups.items():
        pair = _pair(path, config, place[0], names[place], parts)
        pairs.append(pair)
        if "lora_B_bias" in parts.tensors:
            steps[f"{pair.module}.bias"] = pair.scale * parts.tensors["lora_B_bias"].float()
    if not pairs and not replacements:
        raise CheckpointError(f"{path}: holds no tensor; expected a LoRA adapter. Save it again.")
    return Adapter(path, tuple(pairs), steps, replacements, bool(config.get("ensure_weight_tying")))


def _require_mergeable(path: Path, config: Mapping[str, Any]) -> None:
    where = path / ADAPTER_CONFIG_FILE
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{where}: peft_type {config.get('peft_type')!r}; expected LORA, the only kind merged here. Merge it with "
            "peft's merge_and_unload where peft can, save the model, and put the head back with mtp-train graft."
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


def _read_tensors(path: Path) -> dict[str, Tensor]:
    file = path / ADAPTER_FILE
    if not file.is_file() and (path / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"{path}: its weights are a pickle (adapter_model.bin), which can run code when read; expected "
            f"{ADAPTER_FILE}. Save it once with safetensors in a place you trust."
        )
    infos: Mapping[str, TensorInfo] = scan_safetensors(file)
    with safe_open(file, framework="pt") as handle:
        tensors: dict[str, Tensor] = {key: handle.get_tensor(key) for key in infos}
    for key, value in tensors.items():
        if value.is_floating_point() and not torch.isfinite(value.float()).all():
            raise CheckpointError(
                f"{file}: {key} holds NaN or infinite values; expected finite weights. Use an adapter saved before "
                "training diverged."
            )
    return tensors


def _parameter_names(
    path: Path, config: Mapping[str, Any], groups: Iterable[tuple[str, int]]
) -> dict[tuple[str, int], str]:
    """Say which parameter of its module each group adapts, from how deep peft wrapped it."""
    depths: dict[str, list[int]] = {}
    for module, depth in groups:
        depths.setdefault(module, []).append(depth)
    named: dict[tuple[str, int], str] = {}
    for module, found in depths.items():
        experts = EXPERT_PARAMETERS if module.endswith("experts") else ()
        ordered = [name for name in experts if _is_targeted(config, f"{module}.{name}")] or ["weight"]
        if sorted(found) != list(range(len(ordered))):
            raise CheckpointError(
                f"{path}: {module} is adapted {len(found)} times, while target_parameters asks for "
                f"{', '.join(ordered)}; expected one adapter for each. Save it again with the peft that made it."
            )
        named |= {(module, len(ordered) - 1 - place): name for place, name in enumerate(ordered)}
    return named


def _is_targeted(config: Mapping[str, Any], name: str) -> bool:
    """Whether ``target_parameters`` names a parameter."""
    return any(f".{name}".endswith(f".{target}") for target in config.get("target_parameters") or ())


def _pair(path: Path, config: Mapping[str, Any], module: str, parameter: str, parts: _Parts) -> LowRank:
    embedding = "lora_embedding_A" in parts.tensors
    a, b = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    if not {a, b} <= parts.tensors.keys():
        raise CheckpointError(
            f"{path / ADAPTER_FILE}: {parts.keys[0]} stands alone; expected both {a} and {b} of {module}. Save the "
            "adapter again."
        )
    down, up = parts.tensors[a], parts.tensors[b]
    if down.ndim != 2 or up.ndim != 2:
        raise CheckpointError(
            f"{path / ADAPTER_FILE}: {module} is a convolution ({a} has {down.ndim} axes); expected matrices. Merge it "
            "with peft's merge_and_unload, and put the head back with mtp-train graft."
        )
    kind: Literal["linear", "embedding", "experts"] = (
        "embedding" if embedding else "linear" if parameter == "weight" else "experts"
    )
    # peft looks ranks up by the module's name, or by the parameter's where that was targeted itself.
    name = f"{module}.{parameter}" if _is_targeted(config, f"{module}.{parameter}") else module
    rank = int(_pattern_value(config.get("rank_pattern"), name, config["r"]))
    alpha = float(_pattern_value(config.get("alpha_pattern"), name, config.get("lora_alpha", rank)))
    if down.shape[0] % rank or (kind != "experts" and down.shape[0] != rank) or down.shape[0] != up.shape[1]:
        raise CheckpointError(
            f"{path / ADAPTER_FILE}: {module} has {a} {list(down.shape)} and {b} {list(up.shape)}; expected rank "
            f"{rank}, as {ADAPTER_CONFIG_FILE} says. Save the adapter again."
        )
    transposed = embedding or (bool(config.get("fan_in_fan_out")) and kind == "linear")
    magnitude = parts.tensors.get("lora_magnitude_vector")
    if magnitude is not None and transposed:
        raise CheckpointError(
            f"{path}: DoRA on {module}, whose norms run along the other axis of the stored weight; expected DoRA on "
            "linear layers. Merge it with peft's merge_and_unload, and put the head back with mtp-train graft."
        )
    return LowRank(
        module=module,
        parameter=parameter,
        kind=kind,
        left=down.float().T if transposed else up.float(),
        right=up.float().T if transposed else down.float(),
        rank=rank,
        scale=alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank,
        magnitude=None if magnitude is None else magnitude.float(),
    )


def _pattern_value(patterns: Mapping[str, Any] | None, name: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that a module's name ends with, as peft looks it up."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return otherwise
