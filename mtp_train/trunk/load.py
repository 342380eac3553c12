"""Load the frozen trunk, and compute the states and logits that a head needs.

:func:`load_trunk` loads a checkpoint, with an adapter put on by peft (:func:`put_on`) or packed by bitsandbytes where
the recipe asks for it; :func:`empty_trunk` builds the model on the meta device. :class:`Trunk` wraps transformers'
model: hidden states at the place where the head reads them, embeddings and logits.

Shapes: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Cache, PretrainedConfig

from mtp_train.checkpoints.adapter import merge_command, refuse_embedded_adapter
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.checkpoints.quantised import (
    MODELOPT_FILE,
    SCALE_SUFFIXES,
    method_of,
    packed_keys,
    quant_method,
    quant_settings,
    require_whole_blocks,
)
from mtp_train.errors import CheckpointError, UnsupportedModelError, one_line
from mtp_train.families import Convention, Family
from mtp_train.families.spec import has_layer_types
from mtp_train.heads.attention import without_cudnn_attention
from mtp_train.heads.diagnose import layout_of, trunk_config
from mtp_train.heads.module import OutputRows
from mtp_train.trunk.precision import HALF_DTYPES, Scratch, computing_in
from mtp_train.trunk.quantise import Quantization, avoid_cpu_kernel, packing
from mtp_train.trunk.recurrent_kernels import choose_kernels
from mtp_train.upstream.transformers_private import (
    CACHE,
    AutoHfQuantizer,
    kept_in_fp32,
    loading_layer_by_layer,
    quiet_loading,
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


class Trunk(nn.Module):
    """The decoder whose tokens are the output, with its hidden states accessible to the head.

    Args:
        model: A transformers causal language model, possibly wrapped by peft.
        is_view: Leave the model unchanged, for a model that another program trains or runs. A view cannot run the
            layers over windows. It has hidden states only of the model's own forwards, between :meth:`listen` and
            :meth:`release`, and it calls parts of the model without the hooks of other programs.
    """

    def __init__(self, model: Any, family: Family, *, is_view: bool = False) -> None:
        super().__init__()
        self.model: Any = model
        self.family = family
        self.calls_together: Callable[[int], int] = int
        """From the number of forwards that this process needs to the number that it must make. Where the trunk is
        sharded, every process takes part in each forward of the others.
        """
        self.in_shards = False
        """Whether each process holds a part of the layers' weights."""
        self.offloaded = False
        """Whether the layers' weights are in main memory between forwards, see :meth:`offload_layers`."""

        # The c of "c tanh(logits / c)"; Gemma has one.
        self._logit_bound = self.config.to_dict().get("final_logit_softcapping")
        self._fp32_lm_head = any("lm_head" in name for name in kept_in_fp32(self.causal_lm))
        self.shown_layers: tuple[int, ...] = ()
        """See :meth:`show_layers`."""
        self._of_layers: dict[int, Tensor] = {}
        self._last_width = family.state_width(self.config)
        self._before_norm: Tensor | None = None
        self._is_view = is_view
        self._hooks: list[RemovableHandle] = []
        if not is_view:
            self.listen()
            family.trunk.prepare(self.decoder)
            choose_kernels(sys.modules[type(self.decoder).__module__], family.trunk.recurrent)
        self._logit_divisor = family.divisor(self.config)
        self._real_vocab = None if family.trunk.real_vocab is None else self.config.to_dict()[family.trunk.real_vocab]

    @property
    def causal_lm(self) -> Any:
        """transformers' model, without peft's wrapper."""
        return self.model.base_model.model if hasattr(self.model, "peft_config") else self.model

    @property
    def decoder(self) -> Any:
        """The language model without its lm_head."""
        return self.causal_lm.get_decoder()

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers

    def drop_layers(self) -> None:
        """Release the decoder's layers and their memory; embedding, final norm and output matrix stay."""
        self.decoder.layers = nn.ModuleList()
        self.offloaded = False

    def offload_layers(self, device: torch.device) -> None:
        """Move the trunk to a device that cannot hold it: its layers stay in main memory, and each is loaded to run.

        Embedding, output matrix and norms move, because they are also read outside of their modules' forward.
        """
        from accelerate import cpu_offload

        layers = self.layers
        self.drop_layers()
        self.to(device)
        self.decoder.layers = layers
        for layer in layers:
            # Load each layer as a whole: some layers read the weights of a submodule without calling it.
            cpu_offload(layer, execution_device=device, preload_module_classes=[type(layer).__name__])
        self.offloaded = True

    def computing_in(self, dtype: torch.dtype, scratch: Scratch | None = None) -> AbstractContextManager[None]:
        """Make the trunk multiply in a dtype and return it inside this context, whatever dtype it is held in.

        The same trunk loaded in that dtype gives equal results. Weights of that dtype and packed weights stay
        unchanged, and so does a trunk in shards, which are gathered in the dtype that they are held in. Weights that
        are read outside of their module's forward (``lm_head_VD``) keep their dtype.

        Args:
            scratch: A buffer to reuse. Share it only among callers that are always, or never, in inference mode.
        """
        return nullcontext() if self.in_shards else computing_in(self.causal_lm, set(self.layers), dtype, scratch)

    def _apply(self, fn: Any, recurse: bool = True) -> Trunk:
        # Between forwards, the parameters of offloaded layers have no data to move or cast. The other parts are on the
        # device already.
        return self if self.offloaded else super()._apply(fn, recurse)

    @property
    def _final_norm(self) -> nn.Module:
        name = self.family.trunk.final_norm
        return nn.Identity() if name is None else self.decoder.get_submodule(name)

    @property
    def _mixer(self) -> nn.Module | None:
        streams = self.family.trunk.streams
        return None if streams is None else self.decoder.get_submodule(streams.trunk_mixer)

    def _keep_norm_input(self, _norm: nn.Module, inputs: tuple[Tensor]) -> None:
        (state,) = inputs
        # Residual streams are concatenated where they are not yet: (B, T, streams, D) becomes (B, T, width).
        self._before_norm = state if self._mixer is None else state.flatten(2)

    def listen(self) -> None:
        """Register the hooks that record the inputs of :meth:`last_state` in the decoder's forwards."""
        if self.family.reads_before_norm:
            norm = self._final_norm if self._mixer is None else self._mixer
            self._hooks.append(norm.register_forward_pre_hook(self._keep_norm_input))

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.shown_layers = ()
        self._before_norm = None
        self._of_layers.clear()

    def _call(self, part: Any, given: Tensor) -> Tensor:
        # Hooks may add noise (NEFTune) or count calls. In a view they belong to the model's own forwards only.
        return part.forward(given) if self._is_view else part(given)

    def show_layers(self, layers: tuple[int, ...]) -> None:
        """Append the input of these layers to the hidden states, after the last state, for a head that reads it.

        There is no way back: heads that do not read these states ignore them.
        """
        if not layers or layers == self.shown_layers:
            return
        if self.shown_layers:
            raise UnsupportedModelError(
                f"trunk: a head reads the states before layers {layers}, another before layers {self.shown_layers}; "
                "expected heads that read the same layers. Measure them one by one."
            )
        self.shown_layers = layers
        for index in set(layers):
            hook = self.layers[index].register_forward_pre_hook(partial(self._keep_layer_input, index))
            self._hooks.append(hook)

    def _keep_layer_input(self, index: int, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._of_layers[index] = inputs[0]

    def last_state(self, output: Any) -> Tensor:
        """Return the hidden state of a forward of the decoder.

        It is the input of the final norm where the family's heads may read that, and its output otherwise.
        """
        state: Tensor = output.last_hidden_state if self._before_norm is None else self._before_norm
        self._before_norm = None
        if self.shown_layers:
            # A model on several devices leaves each layer's input on that layer's device.
            shown = [self._of_layers[index].to(state.device) for index in self.shown_layers]
            state = torch.cat([state, *shown], dim=-1)
            self._of_layers.clear()
        return state

    @property
    def state_width(self) -> int:
        """The width D of the result of :meth:`hidden`."""
        return self._last_width + len(self.shown_layers) * int(self.config.hidden_size)

    @property
    def config(self) -> PretrainedConfig:
        return self.causal_lm.config.get_text_config()

    @property
    def lm_head_VD(self) -> Tensor:
        """The output matrix, shape (V, D), without padding rows."""
        weight: Tensor = self.causal_lm.get_output_embeddings().weight
        return weight if self._real_vocab is None else weight[: self._real_vocab]

    @property
    def dtype_name(self) -> str:
        """The dtype of the output matrix, as messages and reports name it: ``bfloat16``."""
        return str(self.lm_head_VD.dtype).removeprefix("torch.")

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the input embedding of tokens, shape (B, T, D)."""
        return self._call(self.causal_lm.get_input_embeddings(), tokens_BT)

    @without_cudnn_attention()
    @without_packed_rows()
    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Return the last hidden state, the input of :meth:`logits` and :meth:`head_input`. Shape (B, T, D).

        In a trunk with residual streams, D is the width of all streams. The states of :meth:`show_layers` come after
        it.
        """
        return self.last_state(self.decoder(input_ids=tokens_BT, use_cache=False))

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

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the input of the lm_head for hidden states of any leading shape."""
        state = self._after_norm(hidden)
        return state if self._logit_divisor is None else state / self._logit_divisor

    def _after_norm(self, hidden: Tensor) -> Tensor:
        hidden = hidden[..., : self._last_width]
        streams = self.family.trunk.streams
        if streams is not None:
            rows_1NW = hidden.reshape(1, -1, hidden.shape[-1])
            joined = rows_1NW if streams.joined else rows_1NW.unflatten(-1, (-1, self.config.hidden_size))
            mixed = self._call(self._mixer, joined)
            hidden = mixed.reshape(*hidden.shape[:-1], -1)
        return self._call(self._final_norm, hidden) if self.family.reads_before_norm else hidden

    def head_input(self, hidden: Tensor, convention: Convention) -> Tensor:
        """Return the states that a head wired by ``convention`` reads, from hidden states of :meth:`hidden`."""
        if convention.hidden == "after_final_norm":
            return self._after_norm(hidden)
        if convention.hidden == "before_final_norm":
            return hidden[..., : self._last_width]
        # The states of :meth:`show_layers`.
        return hidden[..., self._last_width :]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.project(self.normed(hidden))

    def project(self, state: Tensor) -> Tensor:
        """Return the logits of states after the norm: a head's states, or the result of :meth:`normed`."""
        # As a matrix of rows: of a part of longer rows, such as the last token of a prompt, torch makes one product per
        # row, each with a copy of the whole matrix.
        rows = (state.float() if self._fp32_lm_head else state).reshape(-1, state.shape[-1])
        logits: Tensor = self.causal_lm.lm_head(rows)[:, : self._real_vocab]
        logits = logits.reshape(*state.shape[:-1], logits.shape[-1])
        bound = self._logit_bound
        return logits if bound is None else bound * torch.tanh(logits / bound)


def draft_logits(trunk: Trunk, token_ids_R: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the function from a head's states in a dtype to logits, of some tokens alone; None for all tokens."""
    if token_ids_R is None:
        return trunk.project
    weight_VD = trunk.lm_head_VD
    return OutputRows(weight_VD[token_ids_R.to(weight_VD.device)].to(dtype), token_ids_R, len(weight_VD))


def non_finite_error(source: str, trunk: Trunk, num_tokens: int) -> CheckpointError:
    """Return the error for logits that are NaN or infinite, of the trunk or a drafter, after so many tokens."""
    return CheckpointError(
        f"{source}: its logits after {num_tokens} tokens are NaN or infinite ({trunk.dtype_name}); expected finite "
        "logits. Load the model in a dtype of larger range; if that does not help, restore its weights: mtp-train "
        "inspect names those that are not finite."
    )


def _trunk_class(family: Family) -> Any:
    if family.trunk.stand_in is not None:
        return family.trunk.stand_in.model_class()
    return AutoModelForImageTextToText if family.trunk.only_with_vision else AutoModelForCausalLM


def empty_trunk(config: PretrainedConfig, family: Family, *, trust_remote_code: bool = False) -> Trunk:
    with torch.device("meta"):
        if family.trunk.stand_in is not None:
            model = _trunk_class(family)(config)
        else:
            model = _trunk_class(family).from_config(config, trust_remote_code=trust_remote_code)
    return Trunk(model, family)


def _require_all_loaded(path: Path, info: Mapping[str, Any]) -> None:
    problems = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    problems += [
        f"{key} is {list(found)}, by config.json it is {list(expected)}"
        for key, found, expected in sorted(info["mismatched_keys"])
    ]
    if problems:
        raise CheckpointError(
            f"{path}: trunk weight {problems[0]} ({len(problems)} in all); expected every weight of the decoder, in "
            "its config's shape. Restore the original files, or point at the complete checkpoint."
        )


@contextmanager
def _loading(
    path: Path,
    family: Family,
    config: PretrainedConfig,
    device: torch.device,
    on_layer: OnLayer,
) -> Iterator[None]:
    """Prepare transformers' loader for a checkpoint of a family, and name damaged files."""
    _require_quantizer(path, family, config)
    if device.type == "cpu" and quant_method(config.to_dict()) == "fp8":
        checkpoint = open_checkpoint(path)
        layout = layout_of(checkpoint, family)
        require_whole_blocks(checkpoint, (key for key in checkpoint.tensors if not layout.is_head_key(key)))
    with ExitStack() as stack:
        if family.trunk.loading is not None:
            stack.enter_context(family.trunk.loading(open_checkpoint(path).tensors))
        if on_layer is not None:
            stack.enter_context(loading_layer_by_layer(lambda layer: on_layer(layer.requires_grad_(False))))
        try:
            yield
        except ImportError as error:
            if (method := quant_method(config.to_dict())) is None:
                raise
            raise CheckpointError(
                f"{path}: transformers cannot load weights packed with {method} ({one_line(error):.300}); "
                "expected its package. Install it, or use the unquantised checkpoint."
            ) from error
        except SafetensorError as error:
            raise CheckpointError(
                f"{path}: a file of the trunk cannot be read ({error}); expected whole safetensors files. Restore the "
                "original files."
            ) from error


def _require_quantizer(path: Path, family: Family, config: PretrainedConfig) -> None:
    """Check that transformers reads a trunk's packed weights: it takes those of methods it lacks for plain ones."""
    fields = config.to_dict()
    settings = quant_settings(fields)
    is_declared = settings or "compression_config" in fields or (path / MODELOPT_FILE).is_file()
    if not is_declared or (settings and AutoHfQuantizer.supports_quant_method(settings)):
        return
    checkpoint = open_checkpoint(path)
    layout = layout_of(checkpoint, family)
    packed = [key for key in packed_keys(checkpoint.tensors) if not layout.is_head_key(key)]
    if packed:
        raise CheckpointError(
            f"{path}: {packed[0]} is packed with {method_of(checkpoint)}, which transformers does not read "
            f"({len(packed)} such tensors); expected one of its methods, or plain weights. Use the unquantised "
            "checkpoint, or serve this one: mtp-train inspect prints the commands."
        )


def _cast_beside_fp8(model: nn.Module, config: PretrainedConfig, dtype: torch.dtype | str) -> None:
    """Cast the unquantised weights of an FP8 checkpoint: transformers leaves them in their stored dtype.

    Without this, a trunk in fp32 on a CPU has a bf16 embedding before its dequantised layers. Weights of
    compressed-tensors are unpacked to the dtype of their scales.
    """
    if not isinstance(dtype, torch.dtype) or quant_method(config.to_dict()) not in ("fp8", "compressed-tensors"):
        return
    for name, parameter in model.named_parameters():
        if parameter.dtype in HALF_DTYPES and not name.endswith(SCALE_SUFFIXES):
            parameter.data = parameter.data.to(dtype)


def load_trunk(
    path: Path,
    family: Family,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str = "cpu",
    adapter: Path | None = None,
    quantization: Quantization | None = None,
    trust_remote_code: bool = False,
    on_layer: OnLayer = None,
) -> Trunk:
    """Load the language model of a checkpoint, frozen and in eval mode.

    Args:
        path: A checkpoint directory; of a vision-language wrapper, the text model is loaded.
        dtype: A torch dtype, or ``"auto"`` for the checkpoint's own.
        adapter: A peft adapter directory, applied unmerged.
        quantization: Quantise the linear layers, see :mod:`mtp_train.trunk.quantise`.
        on_layer: Called with each decoder layer as soon as it is loaded, frozen and in main memory, before the next one
            is read. It may shard the layer; layers stay on the device where it leaves them. For plain weights on
            ``device`` "cpu", without an adapter.
    """
    refuse_embedded_adapter(path)
    config = trunk_config(path, family, trust_remote_code=trust_remote_code)
    given: dict[str, Any] = {"config": config, "dtype": dtype, "trust_remote_code": trust_remote_code}
    # Only when set: transformers treats an explicit None as "unquantised" and skips the packed weights.
    if quantization is not None:
        empty = empty_trunk(config, family, trust_remote_code=trust_remote_code).causal_lm
        given["quantization_config"] = packing(quantization, dtype, empty, where=str(path))
        # bitsandbytes quantises on the device where the weights will run, and they are not moved afterwards.
        given["device_map"] = {"": device}
    with quiet_loading(), _loading(path, family, config, torch.device(device), on_layer):
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
    _cast_beside_fp8(model, config, dtype)
    avoid_cpu_kernel(model)
    if adapter is not None:
        model = put_on(model, adapter)
    model.requires_grad_(False)
    is_placed = quantization is not None or on_layer is not None
    return Trunk(model if is_placed else model.to(device), family).eval()
