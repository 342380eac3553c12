"""Read quantised checkpoints, and declare a head in plain floats as an exception in their quantisation config.

The trunk's bytes are kept. A head in plain floats must be named in the quantisation config, or an engine looks for
scales that do not exist. Each method has a field for exceptions, and its own form of names in it (``leave_alone``).

Weights in FP8 with a scale for each block can be read, and DeepSeek V4's experts in FP4. A head that is packed in
another way is recognised, so that a new head can replace it.
"""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_train.checkpoints.files import Checkpoint, JsonObject, StoredTensors, read_json
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.errors import CheckpointError
from mtp_train.families import RawConfig

QUANTISATION = "quantization_config"
MODELOPT_FILE = "hf_quant_config.json"
SCALE_SUFFIXES = ("weight_scale_inv", "scale")
"""The suffix after a module's name in the key of its weight's scales; DeepSeek V4 uses the second."""
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
_FP4_DTYPE = "I8"
"""A byte contains two values of a row, the first in its lower half. A scale belongs to 32 values of a row."""
_FP4_BLOCK = (1, 32)
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Groups = Mapping[str, Sequence[str]]
# The names that a module's packed weight has instead of "weight": of AWQ, GPTQ, auto-round and FP-Quant; of
# compressed-tensors; of HQQ, AQLM, exl2, exl3 and quanto.
_INSTEAD = ("qweight", "weight_packed", "compressed", "W_q", "codes", "q_weight", "trellis", "weight._data")
_PACKED = re.compile(
    r"(?P<module>.+)\.(?:"
    rf"{'|'.join(_INSTEAD)}"
    # Beside it, whatever its name: AWQ, GPTQ and HIGGS; compressed-tensors and Quark; modelopt; FP8.
    r"|qzeros|scales|g_idx|tables2?"
    r"|weight_(?:scale|shape|zero_point|g_idx|global_scale)|(?:input|output)_(?:scale|global_scale|zero_point)"
    r"|weight_scale_2|pre_quant_scale|[kqv]_scale"
    r"|activation_scale|input_scale_ub"
    # bitsandbytes in 8 and in 4 bits; EETQ; quanto; torchao.
    r"|SCB|weight_format|weight\.(?:nested_)?(?:absmax|quant_map)|weight\.quant_state\..+"
    r"|weight_scales|weight\._(?:scale|shift)|_weight_\w+"
    r")"
)
# The tensors of stacked experts, which have no ".weight": MXFP4's blocks and scales, the scales of FP8 and modelopt.
_PACKED_STACK = re.compile(
    r"(?P<weight>.+\.experts\.\w+_proj)_(?:blocks|scales|(?:weight_|input_|activation_)?scale(?:_inv|_2)?)"
)
# The scales of a KV cache, and AWQ's of an activation function, belong to no weight.
_OF_NO_WEIGHT = re.compile(
    r".+\.(?:(?:self_)?attn\.(?:[kqv]_(?:scale|zero_point|global_scale)|kv_scale)|act\w*\.scales)"
)

_UNPACKED = re.compile(r".+\.weight|.+\.experts\.\w+_proj")
"""The weight of a layer, or of stacked experts."""


class _Method(NamedTuple):
    """How a quantisation method names the modules that it leaves in plain floats."""

    fields: tuple[str, ...]
    """The config fields for the names: the first one that is set, or else the first."""
    form: str | None = None
    """The form of the one entry that covers a head module: ``{name}`` is its name, ``{escaped}`` its prefix in a
    regular expression. None: its name and those of its layers, as vLLM compares whole names, transformers a prefix."""
    by_substring: bool = False
    """Whether an entry covers every name that contains it, and not only whole parts of a name."""

    def entries(self, prefix: str, layers: Sequence[str]) -> list[str]:
        """Return the entries that cover a head module, from its prefix (``mtp.``) and its layers."""
        name = prefix.rstrip(".")
        return [name, *layers] if self.form is None else [self.form.format(name=name, escaped=re.escape(prefix))]


_BY_NAME = _Method(("modules_to_not_convert", "ignored_layers"))
# SGLang looks the fused modules of an MTP head up in the list, and loads none of their weights where it has only single
# names (sglang#35797). vLLM looks up their parts. A pattern covers both.
_COMPRESSED = _Method(("ignore",), "re:.*{escaped}.*")
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_GLOB = _Method(("ignore", "exclude_modules"), "{name}*", by_substring=True)
_METHODS: Mapping[str, _Method] = {
    "fp8": _BY_NAME,
    "fbgemm_fp8": _BY_NAME,
    "mxfp4": _BY_NAME,
    "mxfp8": _BY_NAME,
    "awq": _Method(("modules_to_not_convert",), by_substring=True),
    "gptq": _Method(("dynamic",), "-:.*{escaped}.*"),
    "bitsandbytes": _Method(("llm_int8_skip_modules",)),
    "compressed-tensors": _COMPRESSED,
    "quark": _Method(("exclude",), _COMPRESSED.form),
    "modelopt": _GLOB,
    "modelopt_fp4": _GLOB,
    "modelopt_mixed": _GLOB,
}


def quant_method(config: RawConfig) -> str | None:
    """Return the quantisation method of a raw config, None for plain weights."""
    settings = quant_settings(config)
    # bitsandbytes wrote no method at first.
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return str(settings.get("quant_method")) if settings else None


def packed_weight(key: str, keys: Container[str]) -> str | None:
    """Return the key of the weight that a packed tensor replaces or belongs to, None for any other tensor.

    In a module whose weight has another name (``keys`` contain it), every tensor but the bias belongs to the weight.
    """
    if match := _PACKED_STACK.fullmatch(key):
        return match["weight"]
    if _OF_NO_WEIGHT.fullmatch(key):
        return None
    if match := _PACKED.fullmatch(key):
        return f"{match['module']}.weight"
    module, _, name = key.rpartition(".")
    is_beside = name not in ("weight", "bias") and any(f"{module}.{stored}" in keys for stored in _INSTEAD)
    return f"{module}.weight" if is_beside else None


def unread_weights(tensors: StoredTensors) -> set[str]:
    """Return the keys of weights that are packed in a form that is not read here, and of the tensors beside them."""
    parts = {key: weight for key in tensors if (weight := packed_weight(key, tensors)) is not None}
    return {*parts, *parts.values()}


def undeclared_weights(checkpoint: Checkpoint) -> list[str]:
    """Return the keys of packed weights, and of tensors beside them, of a checkpoint that declares no method."""
    # vLLM reads older checkpoints of compressed-tensors, and modelopt's own file, too.
    declared = quant_settings(checkpoint.config) or checkpoint.config.get("compression_config")
    if declared or (checkpoint.path / MODELOPT_FILE).is_file():
        return []
    return packed_keys(checkpoint.tensors)


def packed_keys(tensors: StoredTensors) -> list[str]:
    """Return the keys of packed weights and of tensors beside them, sorted, whether they are read here or not.

    Weights in FP8 without scales are left out: they are damaged whatever the config declares.
    """
    return [key for key in sorted(tensors) if _shows_packing(key, tensors)]


def _shows_packing(key: str, tensors: StoredTensors) -> bool:
    """Return whether a tensor is packed, in FP8 or instead of a weight, or beside a weight that is no plain one.

    Beside a weight in plain floats, names that begin with its own count: codes that were cast, and left their scales.
    """
    if tensors[key].dtype in FP8_DTYPES and not lacks_scales(key, tensors):
        return True
    weight = packed_weight(key, tensors) or key.removesuffix("_scale_inv")
    plain = weight in tensors and tensors[weight].dtype in PLAIN_DTYPES
    return weight != key and (key.startswith(weight) or not plain)


def require_declared(checkpoint: Checkpoint) -> None:
    """Raise a CheckpointError for packed weights that loaders take for plain ones, as no method is declared."""
    if found := undeclared_weights(checkpoint):
        raise CheckpointError(
            f"{checkpoint.path}: {found[0]} is of a packed weight ({len(found)} such tensors), and config.json has no "
            f"{QUANTISATION}; expected the method that packed it. Restore the config.json that was saved with these "
            "weights: that of the unquantised model does not fit them."
        )


def method_of(checkpoint: Checkpoint) -> str:
    """Return the quantisation method of a checkpoint with packed weights, for messages."""
    if (method := quant_method(checkpoint.config)) is not None:
        return method
    return "modelopt" if (checkpoint.path / MODELOPT_FILE).is_file() else "a method that config.json does not name"


def quant_settings(config: RawConfig) -> JsonObject:
    """Return the quantisation settings of a config, of its top level or of the text config; empty without any."""
    candidates = (config, config.get("text_config"))
    return next((part[QUANTISATION] for part in candidates if isinstance(part, dict) and part.get(QUANTISATION)), {})


def leave_alone(config: RawConfig, groups: Groups, *, where: str) -> JsonObject | None:
    """Return a config whose quantisation leaves the head's modules in plain floats, None where it lists them already.

    ``groups`` maps the key prefix of each head module to the layers under it that are in plain floats.
    """
    name = quant_method(config)
    if name is None:
        return None
    method = _METHODS.get(name)
    if method is None:
        raise CheckpointError(
            f"{where}: quantised with {name}, whose list of exceptions is not supported; expected one of "
            f"{', '.join(_METHODS)}, as the head in plain floats has to be on that list. Export the unquantised model "
            "and quantise the export."
        )
    changed = copy.deepcopy(dict(config))
    return changed if _extend(quant_settings(changed), method, groups) else None


def leave_alone_in_modelopt(document: RawConfig, groups: Groups) -> JsonObject | None:
    """Do the same for modelopt's own file beside the config, whose list is under ``quantization``."""
    changed = copy.deepcopy(dict(document))
    method = _Method(("exclude_modules",), _GLOB.form)
    return changed if _extend(changed.setdefault("quantization", {}), method, groups) else None


def unmatched_by_sglang(checkpoint: Checkpoint) -> str | None:
    """Return a fused module of a head in plain floats that SGLang reads as quantised, None without one.

    vLLM reads such a head as it is: the exceptions of compressed-tensors name the parts of the module.
    """
    layout = checkpoint.layout
    # Under other prefixes SGLang finds the layers that it has fused.
    if quant_method(checkpoint.config) != "compressed-tensors" or "mtp." not in layout.family.keys.head_prefixes:
        return None
    listed = quant_settings(checkpoint.config).get("ignore") or []
    patterns = [entry.removeprefix("re:") for entry in listed if entry.startswith("re:")]
    for module in listed:
        stem, _, name = module.rpartition(".")
        fused = f"{stem}.{_FUSED.get(name)}"
        # SGLang looks single experts up as they are stored.
        is_part = name in _FUSED and ".experts." not in module and layout.is_head_key(module)
        if is_part and fused not in listed and not any(re.match(pattern, fused) for pattern in patterns):
            return fused
    return None


def unlisted_layers(checkpoint: Checkpoint) -> list[str]:
    """Return the head's layers in plain floats that engines read as quantised, as no exception covers them.

    Layers count that the trunk has packed ones of: engines build others, a projection or a router, without the method.
    """
    own = checkpoint.path / MODELOPT_FILE
    settings = quant_settings(checkpoint.config) or (read_json(own).get("quantization") if own.is_file() else None)
    method = _METHODS.get(quant_method(checkpoint.config) or "modelopt")
    if not settings or method is None:
        return []
    tensors, layout = checkpoint.tensors, checkpoint.layout
    of_trunk = (key for key in packed_keys(tensors) if not layout.is_head_key(key))
    packed = {_kind(packed_weight(key, tensors) or key) for key in of_trunk}
    layers = (layer for group in plain_modules(tensors, layout).values() for layer in group)
    return [layer for layer in layers if _kind(layer) in packed and not _is_listed(layer, settings, method)]


def _kind(name: str) -> str:
    """Return what layers of all blocks have in common: the last parts of their name, or that they are experts."""
    parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
    return "experts" if "experts" in parts else ".".join(parts[-2:])


def _is_listed(layer: str, settings: RawConfig, method: _Method) -> bool:
    """Return whether an exception covers a layer or the module it is fused in, or the method is for others alone."""
    stem, _, last = layer.rpartition(".")
    names = [layer, *(f"{stem}.{name}" for pair in _FUSED.items() if last in pair for name in pair)]
    groups = (settings.get("config_groups") or {}).values()
    only = [*(settings.get("quantized_layers") or ()), *(one for group in groups for one in group.get("targets", ()))]
    # Of compressed-tensors' targets, the name of a class, such as Linear, is for all layers.
    if only and not any(one.istitle() or _covers(one, names, method) for one in only):
        return True
    return any(_covers(entry, names, method) for field in method.fields for entry in settings.get(field) or ())


def _covers(entry: str, names: Iterable[str], method: _Method) -> bool:
    prefix, _, pattern = entry.partition(":")
    if prefix not in ("re", "-"):
        name = re.escape(entry)
        plain = f".*{name}" if method.by_substring else rf"(.*\.)?{name}(\..*)?$"
        pattern = fnmatch.translate(entry) if "*" in entry else plain
    return any(re.match(pattern, one) for one in names)


def plain_modules(tensors: StoredTensors, layout: HeadLayout) -> Groups:
    """Return the layers of a head that the method would quantise but that are in plain floats, by head module."""
    keys = [
        key
        for key, info in tensors.items()
        if len(info.shape) > 1 and info.dtype in PLAIN_DTYPES
        if not is_scale(key, tensors) and packed_weight(key, tensors) is None
    ]
    groups: dict[str, list[str]] = {}
    for template in layout.family.keys.head_prefixes:
        for module in range(len(keys)):
            numbers = {"module": module, "layer": layout.num_hidden_layers + module}
            prefix = template.format(trunk=layout.trunk_prefix, **numbers)
            layers = sorted({key.rsplit(".", 1)[0] for key in keys if key.startswith(prefix)})
            if not layers or prefix in groups:
                break
            groups[prefix] = layers
    return groups


def _extend(settings: JsonObject, method: _Method, groups: Groups) -> bool:
    """Add the entries that a list of exceptions lacks; return whether there were any."""
    field = next((name for name in method.fields if settings.get(name)), method.fields[0])
    listed = settings.get(field)
    entries = [entry for prefix, modules in groups.items() for entry in method.entries(prefix, modules)]
    if entries and method.form is None and listed is None:
        # Without a list transformers leaves the output matrix alone, with one only what it names.
        entries.append("lm_head")
    added = [entry for entry in entries if entry not in (listed or ())]
    if added:
        # GPTQ stores exceptions as the keys of a mapping, all other methods as a list.
        mapping = field == "dynamic"
        settings[field] = {**(listed or {}), **{entry: {} for entry in added}} if mapping else [*(listed or ()), *added]
    return bool(added)


def scale_of(key: str, tensors: Container[str]) -> str | None:
    """Return the key of the block scales of a weight, None for a weight without scales."""
    module = key.removesuffix("weight")
    scales = (module + suffix for suffix in SCALE_SUFFIXES if key.endswith(".weight"))
    return next((scale for scale in scales if scale in tensors), None)


def is_scale(key: str, tensors: Container[str]) -> bool:
    """Return whether a key contains the block scales of a weight in the checkpoint, or scales that are of no weight."""
    return _OF_NO_WEIGHT.fullmatch(key) is not None or any(
        key.endswith(f".{suffix}") and key.removesuffix(suffix) + "weight" in tensors for suffix in SCALE_SUFFIXES
    )


def lacks_scales(key: str, tensors: StoredTensors) -> bool:
    """Return whether a weight is stored in FP8 and no scales for it are in the checkpoint."""
    if tensors[key].dtype not in FP8_DTYPES or not _UNPACKED.fullmatch(key):
        return False
    # "weight_scale" is one number for the tensor or for each row, "weight_scale_inv" one for each block.
    of_weight = (f"{key}_{suffix}" for suffix in ("scale_inv", "scale", "scales"))
    return scale_of(key, tensors) is None and not any(scale in tensors for scale in of_weight)


def is_packed(key: str, tensors: StoredTensors) -> bool:
    """Return whether a weight is stored in FP4, with two values in a byte."""
    return tensors[key].dtype == _FP4_DTYPE and scale_of(key, tensors) is not None


def plain_shape(key: str, tensors: StoredTensors) -> tuple[int, ...]:
    shape = tensors[key].shape
    return (*shape[:-1], 2 * shape[-1]) if is_packed(key, tensors) else shape


def read_plain_in_blocks(checkpoint: Checkpoint, key: str) -> Iterator[Tensor]:
    """Yield a weight in blocks of rows; FP8 and FP4 weights are multiplied with their block scales, in fp32."""
    tensors = checkpoint.tensors
    scale = scale_of(key, tensors)
    packed = is_packed(key, tensors)
    if scale is None or not (packed or tensors[key].dtype in FP8_DTYPES):
        yield from checkpoint.read_in_blocks(key)
        return
    scales = checkpoint.read(scale).float()
    shape = plain_shape(key, tensors)
    block_rows, block_columns = _FP4_BLOCK if packed else _declared_block(checkpoint)
    if len(shape) != 2 or scales.shape != (-(-shape[0] // block_rows), -(-shape[1] // block_columns)):
        raise CheckpointError(
            f"{checkpoint.path}: {key} is {list(shape)} with scales {list(scales.shape)}; expected one for each block "
            f"of {block_rows} x {block_columns}. Restore weight_block_size in config.json."
        )
    first = 0
    for block in checkpoint.read_in_blocks(key, shape[1]):
        values = fp4_values(block) if packed else block.float()
        rows = torch.arange(first, first + len(values)) // block_rows
        columns = torch.arange(values.shape[1]) // block_columns
        yield values * scales[rows][:, columns]
        first += len(values)


def fp4_values(block: Tensor) -> Tensor:
    """Return the values of a tensor in FP4, two for each byte of its last axis."""
    halves = torch.stack([block.view(torch.uint8) & 15, block.view(torch.uint8) >> 4], dim=-1).flatten(-2)
    values = torch.tensor(_FP4_VALUES)
    return torch.cat([values, -values])[halves.long()]


def require_whole_blocks(checkpoint: Checkpoint, keys: Iterable[str]) -> None:
    """Check that transformers can dequantise FP8 weights: it divides a weight into equal blocks, one for each scale."""
    tensors = checkpoint.tensors
    for key in keys:
        scale = scale_of(key, tensors)
        if scale is None or tensors[key].dtype not in FP8_DTYPES:
            continue
        shape = tensors[key].shape[-2:]
        counts = tensors[scale].shape[-2:]
        block = _declared_block(checkpoint)
        if any(count > 1 and size != count * length for size, count, length in zip(shape, counts, block, strict=False)):
            raise CheckpointError(
                f"{checkpoint.path}: {key} is {list(shape)} in FP8, in blocks of {block[0]} x {block[1]}; expected "
                "whole blocks, as transformers dequantises other weights wrongly. Use a GPU that multiplies FP8 "
                "(compute capability 8.9), or the unquantised checkpoint."
            )


def _declared_block(checkpoint: Checkpoint) -> tuple[int, int]:
    rows, columns = quant_settings(checkpoint.config).get("weight_block_size") or (128, 128)
    return rows, columns
