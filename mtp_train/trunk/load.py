"""Load the frozen trunk, and compute hidden states at the place where the head reads them.

:func:`load_trunk` loads a checkpoint, with an adapter put on by peft (:func:`put_on`) or packed by bitsandbytes where
the recipe asks for it; :func:`load_ends` loads it without its layers, and :func:`empty_trunk` builds the model on the
meta device.

Shapes: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Cache, PretrainedConfig

from mtp_train.checkpoints.adapter import (
    Adapter,
    merge_command,
    plan_merge,
    read_adapter,
    refuse_embedded_adapter,
)
from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.quantised import (
    QUANTISATION,
    SCALE_SUFFIXES,
    method_of,
    packed_keys,
    quant_method,
    quant_settings,
    require_whole_blocks,
)
from mtp_train.checkpoints.writing import PendingTensor
from mtp_train.errors import CheckpointError, UnsupportedModelError, first_of, one_line
from mtp_train.families import Family
from mtp_train.families.mechanisms.trained_length import keep_trained_length
from mtp_train.families.spec import has_layer_types
from mtp_train.heads.attention import without_cudnn_attention
from mtp_train.heads.diagnose import trunk_config
from mtp_train.trunk.ends import Ends
from mtp_train.trunk.precision import HALF_DTYPES
from mtp_train.trunk.quantise import Quantization, avoid_cpu_kernel, packing
from mtp_train.trunk.recurrent_kernels import choose_kernels
from mtp_train.upstream.transformers_private import (
    CACHE,
    AutoHfQuantizer,
    loading_layer_by_layer,
    quiet_loading,
    replacing,
    without_packed_rows,
)

OnLayer = Callable[[nn.Module], object] | None
"""Called with each decoder layer of a trunk as soon as it is loaded; None for a trunk that is loaded as it is."""


def put_on(model: Any, adapter: Path) -> Any:
    """Return a model with an adapter applied by peft.

    peft skips tensors without a module, and modules without a tensor, with at most a warning. Here both are errors.

    Args:
        adapter: The adapter's directory, see :func:`mtp_train.checkpoints.locations.locate_adapter`.
    """
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            # peft warns of mismatches, which are errors below.
            warnings.simplefilter("ignore")
            wrapped: Any = PeftModel.from_pretrained(model, str(adapter))
            # Loaded a second time, because from_pretrained does not return the keys that did not match.
            result: Any = wrapped.load_adapter(str(adapter), wrapped.active_adapter)
    # peft raises these for a config or a shape that does not fit the model.
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, re.error) as error:
        if isinstance(error, RuntimeError) and "size mismatch" not in str(error):
            raise
        reason = one_line(error)
        if re.search(r"size mismatch for \S*(?:embed|lm_head)", reason):
            raise CheckpointError(
                f"{adapter}: was trained on a vocabulary of another size than the trunk's ({reason:.200}); expected "
                f"the trunk's. Run '{merge_command(model.name_or_path, str(adapter))}', which resizes it."
            ) from None
        raise CheckpointError(
            f"{adapter}: peft cannot apply it to the trunk ({type(error).__name__}: {reason}); expected an adapter of "
            "this model. Use the base that the adapter was trained on."
        ) from None
    for problem, keys in (
        ("contains {}, for which the trunk has no adapted module", result.unexpected_keys),
        ("has no tensor for {}, which its config adapts", result.missing_keys),
    ):
        if keys:
            raise CheckpointError(
                f"{adapter}: {problem.format(min(keys))} ({len(keys)} such tensors); expected a tensor for every "
                "adapted module of this trunk, and no others. Use the base that the adapter was trained on, or save "
                "the adapter again."
            )
    return wrapped


class Trunk(Ends):
    """A whole trunk: the ends, and the layers whose hidden states the head reads.

    Args:
        model: A transformers causal language model, possibly wrapped by peft.
        is_view: Leave the model unchanged, for a model that another program trains or runs. A view cannot run the
            layers over windows. It has hidden states only of the model's own forwards, between :meth:`listen` and
            :meth:`release`, and it calls parts of the model without the hooks of other programs.
    """

    def __init__(self, model: Any, family: Family, *, is_view: bool = False) -> None:
        super().__init__(model, family, is_view=is_view)
        self.offloaded = False
        """Whether the layers' weights are in main memory between forwards, see :meth:`offload_layers`."""
        self._kept: dict[int | None, Tensor] = {}
        """Inputs of a forward's parts: of layers by their number, and under None of the final norm."""
        self._hooks: list[RemovableHandle] = []
        if not is_view:
            self.listen()
            family.trunk.prepare(self.decoder)
            keep_trained_length(self.decoder)
            choose_kernels(sys.modules[type(self.decoder).__module__], family.trunk.recurrent)

    def offload_layers(self, device: torch.device) -> None:
        """Move the trunk to a device that cannot hold it: its layers stay in main memory, and each is loaded to run.

        Embedding, output matrix and norms move, because they are also read outside of their modules' forward.
        """
        from accelerate import cpu_offload

        layers = self.layers
        self.decoder.layers = nn.ModuleList()
        self.to(device)
        self.decoder.layers = layers
        for layer in layers:
            # Load each layer as a whole: some layers read the weights of a submodule without calling it.
            cpu_offload(layer, execution_device=device, preload_module_classes=[type(layer).__name__])
        self.offloaded = True

    def _apply(self, fn: Any, recurse: bool = True) -> Trunk:
        # Between forwards, the parameters of offloaded layers have no data to move or cast. The other parts are on the
        # device already.
        return self if self.offloaded else super()._apply(fn, recurse)

    def _keep_input(self, place: int | None, _part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        state = inputs[0]
        if self._mixer is not None:
            # Drafters read the mean of a layer's residual streams. Before the norm, streams are concatenated where they
            # are not yet: (B, T, streams, D) becomes (B, T, width).
            state = state.flatten(2) if place is None else state.mean(dim=2)
        self._kept[place] = state

    def listen(self) -> None:
        """Register the hooks that record the inputs of :meth:`last_state` in the decoder's forwards."""
        if self.family.reads_before_norm:
            norm = self._final_norm if self._mixer is None else self._mixer
            self._hooks.append(norm.register_forward_pre_hook(partial(self._keep_input, None)))

    def show_before_norm(self) -> None:
        """Make :meth:`last_state` return the input of the final norm, for any family: both states follow from it."""
        wiring = self.family.wiring
        if not self.family.reads_before_norm:
            reading = replace(wiring, default=replace(wiring.default, hidden="before_final_norm"))
            self.family = replace(self.family, wiring=reading)
            self.listen()

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.shown_layers = ()
        self._kept.clear()

    def show_layers(self, layers: tuple[int, ...]) -> None:
        new = set(layers).difference(self.shown_layers)
        super().show_layers(layers)
        # What follows the last layer reads its output.
        readers = [*self.layers, self._mixer]
        for index in new:
            self._hooks.append(readers[index].register_forward_pre_hook(partial(self._keep_input, index)))

    def last_state(self, output: Any) -> Tensor:
        """Return the hidden state of a forward of the decoder.

        It is the input of the final norm where the family's heads may read that, and its output otherwise.
        """
        kept = self._kept
        self._kept = {}
        state: Tensor = kept.get(None, output.last_hidden_state)
        # A model on several devices leaves each layer's input on that layer's device.
        shown = [kept[index].to(state.device) for index in self.shown_layers]
        return torch.cat([state, *shown], dim=-1) if shown else state

    @without_cudnn_attention()
    @without_packed_rows()
    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Return the last hidden state, the input of :meth:`logits` and :meth:`head_input`. Shape (B, T, D).

        In a trunk with residual streams, D is the width of all streams. The states of :meth:`show_to` come after it.
        """
        if not self.shows_keys:
            return self.last_state(self.decoder(input_ids=tokens_BT, use_cache=False))
        output = self.decoder(input_ids=tokens_BT, use_cache=False, return_shared_kv_states=True)
        keys = output.shared_kv_states or {}
        kinds = self.family.trunk.key_shapes(self.config)
        if not keys.keys() >= kinds.keys():
            raise UnsupportedModelError(
                f"transformers: release {transformers.__version__} returns no keys of a trunk whose layers share none; "
                "expected those of its last layers, which the head reads. Run pip install 'transformers>=5.24'."
            )
        shown = [one.transpose(1, 2).flatten(2) for kind in kinds for one in keys[kind]]
        state = self.last_state(output)
        return torch.cat([state, *(one.to(state.device) for one in shown)], dim=-1)

    @without_cudnn_attention()
    def window_hidden(
        self, tokens_BT: Tensor, *, positions_BT: Tensor, masks: Mapping[str, Tensor | None], cache: Cache
    ) -> Tensor:
        """Return the hidden states of tokens at given positions, which may differ between rows. Shape (B, T, D).

        Args:
            masks: Layer type to a bool mask (B, 1, T, S), True where a query attends to a key; None is plain causal
                attention.
            cache: The state of earlier tokens, which also stores where the window goes.
        """
        with self.family.trunk.running_windows():
            output = self.decoder(
                input_ids=tokens_BT,
                position_ids=positions_BT,
                attention_mask=masks if has_layer_types(self.config) else next(iter(masks.values())),
                use_cache=True,
                **{CACHE: cache},
            )
        return self.last_state(output)


def _trunk_class(family: Family) -> Any:
    if family.trunk.stand_in is not None:
        return family.trunk.stand_in.model_class()
    return AutoModelForImageTextToText if family.trunk.only_with_vision else AutoModelForCausalLM


def empty_trunk(config: PretrainedConfig, checkpoint: Checkpoint) -> Trunk:
    """Return the trunk of a checkpoint without its weights, by a config that may be another one."""
    family = checkpoint.family
    with torch.device("meta"):
        if family.trunk.stand_in is not None:
            model = _trunk_class(family)(config)
        else:
            model = _trunk_class(family).from_config(config, trust_remote_code=checkpoint.trusts_code)
    return Trunk(model, family)


def _require_all_loaded(path: Path, info: Mapping[str, Any]) -> None:
    problems = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    problems += [
        f"{key} is {list(found)}, by config.json it is {list(expected)}"
        for key, found, expected in sorted(info["mismatched_keys"])
    ]
    if problems:
        raise CheckpointError(
            f"{path}: trunk weight {first_of(problems)}; expected every weight of the decoder, in "
            "its config's shape. Restore the original files, or point at the complete checkpoint."
        )


@contextmanager
def _loading(checkpoint: Checkpoint, device: torch.device, on_layer: OnLayer) -> Iterator[None]:
    """Prepare transformers' loader for a checkpoint, and name damaged files."""
    method = quant_method(checkpoint.config)
    _require_quantizer(checkpoint)
    if device.type == "cpu" and method == "fp8":
        is_head = checkpoint.layout.is_head_key
        require_whole_blocks(checkpoint, (key for key in checkpoint.tensors if not is_head(key)))
    handing_over: AbstractContextManager[None] = nullcontext()
    if on_layer is not None:
        handing_over = loading_layer_by_layer(lambda layer: on_layer(layer.requires_grad_(False)))
    with checkpoint.family.trunk.loading(checkpoint.tensors), handing_over:
        try:
            yield
        except ImportError as error:
            if method is None:
                raise
            raise CheckpointError(
                f"{checkpoint.path}: transformers cannot load weights packed with {method} ({one_line(error):.300}); "
                "expected its package. Install it, or use the unquantised checkpoint."
            ) from error
        except SafetensorError as error:
            raise CheckpointError(
                f"{checkpoint.path}: a file of the trunk cannot be read ({error}); expected whole safetensors files. "
                "Restore the original files."
            ) from error


def _require_quantizer(checkpoint: Checkpoint) -> None:
    """Check that transformers reads a trunk's packed weights: it takes those of methods it lacks for plain ones."""
    settings = quant_settings(checkpoint.config)
    is_head = checkpoint.layout.is_head_key
    if settings and AutoHfQuantizer.supports_quant_method(settings):
        return
    if packed := [key for key in packed_keys(checkpoint.tensors) if not is_head(key)]:
        raise CheckpointError(
            f"{checkpoint.path}: {packed[0]} is packed with {method_of(checkpoint)}, which transformers does not read "
            f"({len(packed)} such tensors); expected one of its methods, or plain weights. Use the unquantised "
            "checkpoint, or serve this one: mtp-train inspect prints the commands."
        )


def _cast_beside_fp8(model: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype | str) -> None:
    """Cast the unquantised weights of an FP8 checkpoint: transformers leaves them in their stored dtype.

    Without this, a trunk in fp32 on a CPU has a bf16 embedding before its dequantised layers. Weights of
    compressed-tensors are unpacked to the dtype of their scales.
    """
    if not isinstance(dtype, torch.dtype) or quant_method(checkpoint.config) not in ("fp8", "compressed-tensors"):
        return
    for name, parameter in model.named_parameters():
        if parameter.dtype in HALF_DTYPES and not name.endswith(SCALE_SUFFIXES):
            parameter.data = parameter.data.to(dtype)


def load_trunk(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str = "cpu",
    adapter: Path | None = None,
    quantization: Quantization | None = None,
    on_layer: OnLayer = None,
) -> Trunk:
    """Load the language model of a checkpoint, frozen and in eval mode.

    Args:
        checkpoint: Of a vision-language wrapper, the text model is loaded.
        dtype: A torch dtype, or ``"auto"`` for the checkpoint's own.
        adapter: A peft adapter directory, applied unmerged.
        quantization: Quantise the linear layers, see :mod:`mtp_train.trunk.quantise`.
        on_layer: Called with each decoder layer as soon as it is loaded, frozen and in main memory, before the next one
            is read. It may shard the layer; layers stay on the device where it leaves them. For plain weights on
            ``device`` "cpu", without an adapter.
    """
    family, path, trusts = checkpoint.family, checkpoint.path, checkpoint.trusts_code
    refuse_embedded_adapter(path)
    config = trunk_config(checkpoint)
    given: dict[str, Any] = {"config": config, "dtype": dtype, "trust_remote_code": trusts}
    # Only when set: transformers treats an explicit None as "unquantised" and skips the packed weights.
    if quantization is not None:
        empty = empty_trunk(config, checkpoint).causal_lm
        given["quantization_config"] = packing(quantization, dtype, empty, where=str(path))
        # bitsandbytes quantises on the device where the weights will run, and they are not moved afterwards.
        given["device_map"] = {"": device}
    with quiet_loading(), _loading(checkpoint, torch.device(device), on_layer):
        model, info = _trunk_class(family).from_pretrained(
            path,
            output_loading_info=True,
            # Mismatched shapes are reported below, as missing keys are.
            ignore_mismatched_sizes=True,
            low_cpu_mem_usage=True,
            **given,
        )
    _require_all_loaded(path, info)
    if hasattr(model, "ct_decompress_hook"):
        # compressed-tensors unpacks the weights in the first forward of the whole model, which we do not run.
        model.hf_quantizer.compressor.decompress_model(model)
    _cast_beside_fp8(model, checkpoint, dtype)
    avoid_cpu_kernel(model)
    if adapter is not None:
        model = put_on(model, adapter)
    model.requires_grad_(False)
    if quantization is None and on_layer is None:
        model = model.to(device)
    return Trunk(model, family).eval()


def load_ends(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    adapter: Path | None = None,
) -> Ends:
    """Load embedding, final norm and lm_head of a trunk, frozen and in eval mode; no tensor of a layer is read.

    Args:
        adapter: A peft adapter directory, of which what changes the ends is merged.

    Raises:
        CheckpointError: A tensor is missing, or has another shape than by the config; or the lm_head is packed.
    """
    family = checkpoint.family
    path = checkpoint.path
    layout = checkpoint.layout
    config = as_plain(trunk_config(checkpoint))
    of_layer = re.compile(re.escape(layout.trunk_prefix) + r"layers\.\d+\.")
    changed = {} if adapter is None else _changed_ends(checkpoint, read_adapter(adapter))
    state = {
        key: changed[key].load() if key in changed else checkpoint.read(key)
        for key in checkpoint.tensors
        if not of_layer.match(key) and not layout.is_head_key(key)
    }
    if packed := [key for key in packed_keys(checkpoint.tensors) if key in state]:
        raise CheckpointError(
            f"{path}: {packed[0]} is packed; expected a plain embedding and lm_head. Use a quantised checkpoint that "
            "keeps them, as most do."
        )
    whole: Any = type(empty_trunk(config, checkpoint).causal_lm)
    initialise = whole.__init__

    def without_layers(self: Any, *args: Any, **named: Any) -> None:
        initialise(self, *args, **named)
        self.get_decoder().layers = nn.ModuleList()

    with quiet_loading(), replacing(whole, __init__=without_layers):
        model, info = whole.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    _require_all_loaded(path, info)
    return Ends(model.requires_grad_(False).to(device), family).eval()


def as_plain(config: PretrainedConfig) -> PretrainedConfig:
    """Drop the quantisation from a config: its method may need a package or a device that is absent."""
    for part in (config, config.get_text_config()):
        if hasattr(part, QUANTISATION):
            delattr(part, QUANTISATION)
    return config


def _changed_ends(checkpoint: Checkpoint, adapter: Adapter) -> Mapping[str, PendingTensor]:
    """Return the merged tensors of an adapter that changes more than layers; empty for the others."""
    names = [*adapter.replacements, *(pair.module for pair in adapter.pairs)]
    if all(re.search(r"\blayers\.\d", name) for name in names):
        return {}
    return plan_merge(checkpoint, adapter).tensors
