"""Every use of an undocumented part of transformers, except the model classes that families borrow.

The imports, and ``SYMBOLS`` for other names, state why the documented API does not do. tests/unit/test_upstream.py
looks ``SYMBOLS`` up in the installed version and reports the one that moved. The classes of decoder layers, norms and
rotary embeddings in ``transformers.models`` are named in the family records and tested with them.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import nn
from transformers import masking_utils

# A replaced convolution gets its activation as a name, which only this table resolves.
from transformers.activations import ACT2FN as ACT2FN
from transformers.cache_utils import (
    # Layers with an indexer write their indexer keys to a cache layer of this class.
    DynamicIndexedLayer as DynamicIndexedLayer,
    # DynamicCache builds it from a config; only its class states which layers slide, and by how much.
    DynamicSlidingWindowLayer as DynamicSlidingWindowLayer,
    # Recurrent layers read their state from a cache layer of this class.
    LinearAttentionLayer as LinearAttentionLayer,
)

# The registry of functions for a mixture's experts has no public name.
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as ALL_EXPERTS_FUNCTIONS

# gpt-oss's own quantiser unpacks its experts by it, and no argument of from_pretrained unpacks them alone.
from transformers.integrations.mxfp4 import convert_moe_packed_tensors as convert_moe_packed_tensors

# The registry of attention functions returns it by name only to models; we call it with masks of our own.
from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa_attention_forward

# An attention function of our own has to be registered with a mask function, and no other one is public.
from transformers.masking_utils import sdpa_mask as sdpa_mask

# The frequencies of a scaled rotary embedding are computed by this table, or inside of a model.
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS as ROPE_INIT_FUNCTIONS

# from_pretrained skips a stored quantisation that it lacks, with a warning, and reads packed weights as plain ones.
from transformers.quantizers import AutoHfQuantizer as AutoHfQuantizer
from transformers.utils import logging as transformers_logging

CACHE = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"
"""Name of the argument that passes a cache to a model or layer. Releases before 5.24 have the old name only, 5.40 drops
it."""

SYMBOLS = (
    # It reads a value from the device in every forward, and no argument tells that rows are not packed.
    "transformers.masking_utils.find_packed_sequence_indices",
    # A head has a config and layers, but no model with the method set_attn_implementation.
    "transformers:PretrainedConfig._attn_implementation",
    "transformers:PretrainedConfig._experts_implementation",
    # It chooses a kernel by the packages that are installed, and no argument of a model asks for torch.
    "transformers.integrations.hub_kernels.use_kernel_func_from_hub_with_fallback",
    # The config can be set and unset, but not read back: deepspeed_config() returns a dict that cannot be set.
    "transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref",
    "transformers.integrations.deepspeed.set_hf_deepspeed_config",
    # Accelerate sets the config for the whole process, while we load several models and partition only one.
    "transformers.integrations.deepspeed.unset_hf_deepspeed_config",
    # No argument of from_pretrained gives a wrapper's prefix of its language model.
    "transformers.conversion_mapping.get_checkpoint_conversion_mapping",
    "transformers.conversion_mapping.register_checkpoint_conversion_mapping",
    "transformers.conversion_mapping.WeightRenaming",
    # There is no hook for a loaded layer; the loader's own sharding cuts tensors before it joins or splits them.
    "transformers.core_model_loading.set_param_for_module",
    # A model class does not document which of its parameters stay in fp32.
    "transformers:PreTrainedModel._keep_in_fp32_modules_strict",
    # Its notices of kernels that are not installed come with every model, and no setting leaves them out alone.
    "transformers.integrations.hub_kernels.logger",
    # No argument of from_pretrained accepts the tensors of a head that the model class does not have.
    "transformers:PreTrainedModel._keys_to_ignore_on_load_unexpected",
)


@contextmanager
def replacing(owner: Any, **parts: Any) -> Iterator[None]:
    """Replace attributes of a module or a class inside this context, for every thread."""
    stock = {name: getattr(owner, name) for name in parts}
    for name, part in parts.items():
        setattr(owner, name, part)
    try:
        yield
    finally:
        for name, part in stock.items():
            setattr(owner, name, part)


def attention_of(config: Any) -> str | None:
    return config._attn_implementation


def attending_by(config: Any, name: str) -> AbstractContextManager[None]:
    """Make models of a config use the attention function that is registered under a name, inside this context."""
    return replacing(config, _attn_implementation=name)


def set_attention(config: Any, name: str | None) -> None:
    """Make models of a config use the attention function that is registered under a name."""
    config._attn_implementation = name


def set_experts(config: Any, name: str | None) -> None:
    """Make models of a config compute a mixture's experts with the function that is registered under a name."""
    config._experts_implementation = name


def kept_in_fp32(model: nn.Module) -> tuple[str, ...]:
    """Return parts of the names of parameters that stay in fp32 in a model that is loaded in half precision."""
    return tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())


def forget_deepspeed() -> None:
    """Make transformers load models whole, although a DeepSpeed config asks for partitions."""
    from transformers.integrations import deepspeed

    deepspeed.unset_hf_deepspeed_config()


@contextmanager
def without_deepspeed() -> Iterator[None]:
    """Keep transformers from partitioning a model as DeepSpeed's ZeRO-3 config asks for, inside this context."""
    from transformers.integrations import deepspeed

    config = None if deepspeed._hf_deepspeed_config_weak_ref is None else deepspeed._hf_deepspeed_config_weak_ref()
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            deepspeed.set_hf_deepspeed_config(config)


@contextmanager
def without_packed_rows() -> Iterator[None]:
    """Keep models from looking for packed sequences in the positions of their rows, which waits for the device."""
    with replacing(masking_utils, find_packed_sequence_indices=lambda _position_ids: None):
        yield


@contextmanager
def unpacking_gguf_in_fp32() -> Iterator[None]:
    """Make ``from_pretrained`` round the values of a GGUF file once, at the end, instead of computing them in bf16.

    The reader of 5.23 and later computes blocks in the dtype of the model, and no argument changes that. The older
    reader, which still reads most architectures, computes them in fp32. Both cast each tensor as it is read, so only
    one tensor is in fp32 at a time.
    """
    if importlib.util.find_spec("transformers.integrations.gguf") is None:
        yield
        return
    reader = importlib.import_module("transformers.integrations.gguf.gguf_conversion_mapping")
    stock = reader.dequantize_blocks
    with replacing(reader, dequantize_blocks=lambda *blocks: stock(*blocks[:-1], torch.float32)):
        yield


@contextmanager
def loading_layer_by_layer(on_layer: Callable[[Any], object]) -> Iterator[None]:
    """Make ``from_pretrained`` call a function with each decoder layer of which all parameters are loaded.

    Inside this context, tensors are read when they are needed, layer after layer. The function may replace the layer's
    parameters. It is not called for a layer with a parameter that the checkpoint lacks, or has in another shape.

    Args:
        on_layer: Called once per layer. Buffers that no checkpoint has are still on the meta device then.
    """
    from transformers import core_model_loading

    stock = core_model_loading.set_param_for_module
    pending: _Pending = {}

    def set_and_tell(model: Any, name: str, *given: Any) -> None:
        nonlocal pending
        pending = pending or _pending_parameters(model)
        stock(model, name, *given)
        layer, missing = pending.get(name, (None, set()))
        if name in missing and not model.get_parameter(name).is_meta:
            missing.remove(name)
            if not missing:
                on_layer(layer)
                _mark_as_loaded(layer)

    # Without the variable, threads read tensors ahead without a limit.
    in_turn = patch_environment(HF_DEACTIVATE_ASYNC_LOAD=1)
    with in_turn, replacing(core_model_loading, set_param_for_module=set_and_tell):
        yield


def _mark_as_loaded(layer: Any) -> None:
    """Keep transformers from initialising a layer at random, except for buffers that no checkpoint has."""
    for parameter in layer.parameters():
        parameter._is_hf_initialized = True
    for module in layer.modules():
        # Some families compute initial values before they look at the parameter's mark, which fails in shards.
        if not any(buffer.is_meta for buffer in module.buffers()):
            module._is_hf_initialized = True


_Pending = dict[str, tuple[Any, set[str]]]
"""Names of parameters in a model's decoder layers, to their layer and its parameters that are not loaded."""


def _pending_parameters(model: Any) -> _Pending:
    pending: _Pending = {}
    layers = model.get_decoder().layers
    prefix = next(name for name, module in model.named_modules() if module is layers)
    for index, layer in enumerate(layers):
        missing = {f"{prefix}.{index}.{name}" for name, _ in layer.named_parameters()}
        pending |= dict.fromkeys(missing, (layer, missing))
    return pending


def torch_function_of(function: Any) -> Any:
    """Return the torch function of a model that ``use_kernel_func_from_hub_with_fallback`` has replaced by a kernel."""
    if isinstance(function, nn.Module):
        # The package `kernels` makes a module of the function.
        function = inspect.getclosurevars(type(function).forward).nonlocals["func"]
    return function.__wrapped__


def load_from_wrapper(language_model: Any, wrapper: str) -> None:
    """Make a language model's class load its weights from a wrapper's checkpoint, which has other tensor keys.

    Args:
        wrapper: The ``model_type`` of the wrapper.
    """
    from transformers import conversion_mapping

    of_wrapper = conversion_mapping.get_checkpoint_conversion_mapping(wrapper)
    inside = conversion_mapping.WeightRenaming(r"model\.language_model\.", "model.")
    conversion_mapping.register_checkpoint_conversion_mapping(
        language_model.__name__, [*of_wrapper, inside], overwrite=True
    )


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Build or load a model without transformers' bars, its notices of kernels unless its verbosity is info, and
    torch's warning of empty matrices: their config is refused by the shapes of stored tensors."""
    from transformers.integrations import hub_kernels

    hub_kernels.logger.addFilter(_is_wanted)
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _is_wanted(_: logging.LogRecord) -> bool:
    return transformers_logging.get_verbosity() <= logging.INFO


def listed_head_keys(model_class: Any) -> list[str]:
    """Return the patterns of tensor keys that ``generate(use_mtp=True)`` takes for a head of the model class."""
    return list(model_class._keys_to_ignore_on_load_unexpected or ())
