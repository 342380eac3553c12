"""The frozen trunk: load it, and take from it only what the head needs.

Shapes: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Cache, PretrainedConfig

from mtp_train.errors import CheckpointError, UnsupportedModelError
from mtp_train.families import Convention, Family
from mtp_train.heads.adapter import put_on
from mtp_train.heads.quantization import Quantization, packing
from mtp_train.heads.sdpa import without_cudnn_attention
from mtp_train.weights.adapter import refuse_embedded_adapter
from mtp_train.weights.files import open_checkpoint


class Trunk(nn.Module):
    """A decoder whose tokens count, with its hidden states open to the head.

    Args:
        model: A transformers causal language model, possibly wrapped by peft.
        family: Its record.
        is_view: Leave the model as it is, for one that somebody else trains or runs. A view cannot run the layers over
            windows. It has hidden states only of the model's own forwards, between :meth:`listen` and :meth:`release`,
            and calls parts of the model without the hooks that others put on them.
    """

    def __init__(self, model: Any, family: Family, *, is_view: bool = False) -> None:
        super().__init__()
        self.model: Any = model
        self.family = family
        self.calls_together: Callable[[int], int] = int
        """From the forwards that this process needs to those that it must make: where the trunk is in shards, every
        process lends its own in each of them."""
        self.offloaded = False
        """Whether the layers' weights are elsewhere until they run, see :mod:`mtp_train.heads.offload`."""

        self._logit_bound = None if family.logit_bound is None else self.config.to_dict().get(family.logit_bound)
        self.shown_layers: tuple[int, ...] = ()
        """See :meth:`show_layers`."""
        self._of_layers: dict[int, Tensor] = {}
        self._last_width = family.state_width(self.config)
        self._before_norm: Tensor | None = None
        self._is_view = is_view
        self._hooks: list[RemovableHandle] = []
        if not is_view:
            self.listen()
            family.prepare_trunk(self.decoder)
        self._logit_divisor = family.divisor(self.config)
        self._real_vocab = None if family.real_vocab is None else self.config.to_dict()[family.real_vocab]

    @property
    def causal_lm(self) -> Any:
        """The transformers model itself, also where peft wraps it."""
        return self.model.base_model.model if hasattr(self.model, "peft_config") else self.model

    @property
    def decoder(self) -> Any:
        """The language model without its lm_head."""
        return self.causal_lm.get_decoder()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers."""
        layers: nn.ModuleList = self.decoder.layers
        return layers

    def drop_layers(self) -> None:
        """Let go of the decoder's layers, and of their memory: embedding, final norm and output matrix are left."""
        self.decoder.layers = nn.ModuleList()
        self.offloaded = False

    def _apply(self, fn: Any, recurse: bool = True) -> Trunk:
        # What offloaded layers have between forwards can be neither moved nor cast; the rest is where it belongs.
        return self if self.offloaded else super()._apply(fn, recurse)

    @property
    def _final_norm(self) -> nn.Module:
        name = self.family.trunk_final_norm
        return nn.Identity() if name is None else self.decoder.get_submodule(name)

    @property
    def _mixer(self) -> nn.Module | None:
        streams = self.family.streams
        return None if streams is None else self.decoder.get_submodule(streams.trunk_mixer)

    def _keep_norm_input(self, _norm: nn.Module, inputs: tuple[Tensor]) -> None:
        (state,) = inputs
        # Streams are joined, where they are not yet: (B, T, streams, D) becomes (B, T, width).
        self._before_norm = state if self._mixer is None else state.flatten(2)

    def listen(self) -> None:
        """Keep what :meth:`last_state` needs of the decoder's forwards from now on."""
        if self.family.reads_before_norm:
            norm = self._final_norm if self._mixer is None else self._mixer
            self._hooks.append(norm.register_forward_pre_hook(self._keep_norm_input))

    def release(self) -> None:
        """Remove every hook from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.shown_layers = ()
        self._before_norm = None
        self._of_layers.clear()

    def _call(self, part: Any, given: Tensor) -> Tensor:
        """Call a part of the model."""
        # Hooks may add noise (NEFTune) or count calls: those of a view's model are for its own forwards.
        result: Tensor = part.forward(given) if self._is_view else part(given)
        return result

    def show_layers(self, layers: tuple[int, ...]) -> None:
        """Have hidden states hold the input of these layers too, behind the last state, for a head that reads it.

        For good: other heads on the trunk leave out what they don't read.

        Raises:
            UnsupportedModelError: It shows others already.
        """
        if not layers or layers == self.shown_layers:
            return
        if self.shown_layers:
            raise UnsupportedModelError(
                f"trunk: a head reads it after {layers} layers, another after {self.shown_layers}; expected heads that "
                "read the same ones. Measure them one by one."
            )
        self.shown_layers = layers
        for index in set(layers):
            hook = self.layers[index].register_forward_pre_hook(partial(self._keep_layer_input, index))
            self._hooks.append(hook)

    def _keep_layer_input(self, index: int, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._of_layers[index] = inputs[0]

    def last_state(self, output: Any) -> Tensor:
        """Return the hidden state of a forward of the decoder: before its final norm where a head may read that."""
        state: Tensor = output.last_hidden_state if self._before_norm is None else self._before_norm
        self._before_norm = None
        if self.shown_layers:
            # A model in parts on several devices hands on each layer's input where that layer is.
            shown = [self._of_layers[index].to(state.device) for index in self.shown_layers]
            state = torch.cat([state, *shown], dim=-1)
            self._of_layers.clear()
        return state

    @property
    def state_width(self) -> int:
        """D of :meth:`hidden`."""
        return self._last_width + len(self.shown_layers) * int(self.config.hidden_size)

    @property
    def config(self) -> PretrainedConfig:
        """The text config."""
        config: PretrainedConfig = self.causal_lm.config.get_text_config()
        return config

    @property
    def lm_head_VD(self) -> Tensor:
        """The output matrix, shape (V, D), without rows that pad it."""
        weight: Tensor = self.causal_lm.get_output_embeddings().weight
        return weight if self._real_vocab is None else weight[: self._real_vocab]

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the input embedding of tokens, shape (B, T, D)."""
        return self._call(self.causal_lm.get_input_embeddings(), tokens_BT)

    @without_cudnn_attention()
    def hidden(self, tokens_BT: Tensor, *, cache: Cache | None = None) -> Tensor:
        """Return the last hidden state, which :meth:`logits` and :meth:`head_input` read. Shape (B, T, D).

        Of a trunk with streams D is the width of all of them; states of shown layers are behind it.

        Args:
            tokens_BT: int tokens.
            cache: Earlier tokens' state; updated in place.
        """
        output = self.decoder(input_ids=tokens_BT, past_key_values=cache, use_cache=cache is not None)
        return self.last_state(output)

    @without_cudnn_attention()
    def window_hidden(
        self, tokens_BT: Tensor, *, positions_BT: Tensor, masks: Mapping[str, Tensor | None], cache: Cache
    ) -> Tensor:
        """Return the hidden states of tokens at given positions, each row at its own. Shape (B, T, D).

        Args:
            tokens_BT: int tokens.
            positions_BT: int, their positions.
            masks: Layer type to a bool mask (B, 1, T, S), True where a token sees a key; None is plain causal.
            cache: Earlier tokens' state; it knows where the window goes.
        """
        by_type = self.family.masks_by_layer_type
        with self.family.running_windows():
            output = self.decoder(
                input_ids=tokens_BT,
                position_ids=positions_BT,
                attention_mask=masks if by_type else next(iter(masks.values())),
                past_key_values=cache,
                use_cache=True,
            )
        return self.last_state(output)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return what the lm_head reads of hidden states of any leading shape."""
        state = self._after_norm(hidden)
        return state if self._logit_divisor is None else state / self._logit_divisor

    def _split(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last state, and those of shown layers."""
        return hidden[..., : self._last_width], hidden[..., self._last_width :]

    def _after_norm(self, hidden: Tensor) -> Tensor:
        hidden, _ = self._split(hidden)
        streams = self.family.streams
        if self._mixer is not None and streams is not None:
            rows_1NW = hidden.reshape(1, -1, hidden.shape[-1])
            joined = rows_1NW if streams.joined else rows_1NW.unflatten(-1, (-1, self.config.hidden_size))
            mixed = self._call(self._mixer, joined)
            hidden = mixed.reshape(*hidden.shape[:-1], -1)
        return self._call(self._final_norm, hidden) if self.family.reads_before_norm else hidden

    def head_input(self, hidden: Tensor, convention: Convention) -> Tensor:
        """Return what a head wired by ``convention`` reads of hidden states."""
        if convention.hidden == "after_final_norm":
            return self._after_norm(hidden)
        last, of_layers = self._split(hidden)
        return last if convention.hidden == "before_final_norm" else of_layers

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states of any leading shape."""
        return self.project(self.normed(hidden))

    def project(self, state: Tensor) -> Tensor:
        """Return the logits of states that are normed already: a head's, or :meth:`normed`."""
        logits: Tensor = self.causal_lm.lm_head(state)[..., : self._real_vocab]
        bound = self._logit_bound
        return logits if bound is None else bound * torch.tanh(logits / bound)


def trunk_config(path: Path, family: Family, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return transformers' config of a checkpoint, that of a wrapper whole.

    Raises:
        CheckpointError: transformers refuses it.
    """
    stand_in = family.trunk_class
    try:
        if stand_in is not None:
            return stand_in.read_config(path)
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        return config
    except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path}/config.json: transformers refuses it ({reason}); expected one that it reads. Restore the original."
        ) from None


def _trunk_class(family: Family) -> Any:
    if family.trunk_class is not None:
        return family.trunk_class.model_class()
    return AutoModelForImageTextToText if family.only_with_vision else AutoModelForCausalLM


def empty_trunk(config: PretrainedConfig, family: Family, *, trust_remote_code: bool = False) -> Trunk:
    """Return a trunk without weights, on the meta device."""
    with torch.device("meta"):
        if family.trunk_class is not None:
            model = _trunk_class(family)(config)
        else:
            model = _trunk_class(family).from_config(config, trust_remote_code=trust_remote_code)
    return Trunk(model, family)


def load_trunk(
    path: Path,
    family: Family,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str = "cpu",
    adapter: Path | None = None,
    quantization: Quantization | None = None,
    trust_remote_code: bool = False,
) -> Trunk:
    """Load the language model of a checkpoint, frozen and in eval mode.

    Args:
        path: A checkpoint directory; a vision-language wrapper gives its text model.
        family: The record that ``family_for`` picked.
        dtype: A torch dtype, or ``"auto"`` for the checkpoint's own.
        device: A torch device name.
        adapter: A peft adapter directory, applied unmerged.
        quantization: Pack its linear layers, see :mod:`mtp_train.heads.quantization`.
        trust_remote_code: Whether code beside the weights may run.

    Raises:
        CheckpointError: Weights of the trunk are missing or do not fit, or the adapter does not.
    """
    refuse_embedded_adapter(path)
    # Not named in vain: transformers takes a None for what the checkpoint says, and leaves its packed weights out.
    packed: dict[str, Any] = {}
    if quantization is not None:
        # What is packed is packed on the device that it is for, and not moved afterwards.
        packed = {"quantization_config": packing(quantization, dtype), "device_map": {"": device}}
    with nullcontext() if family.loading is None else family.loading(open_checkpoint(path).tensors):
        model, info = _trunk_class(family).from_pretrained(
            path,
            config=None if family.trunk_class is None else trunk_config(path, family),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            # Named below, with the missing ones.
            ignore_mismatched_sizes=True,
            low_cpu_mem_usage=True,
            **packed,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{path}: trunk weights {', '.join(missing[:5])} are missing ({len(missing)} in all); expected every "
            "weight of the decoder. Point model.trunk at the complete checkpoint."
        )
    misshapen = sorted(info["mismatched_keys"])
    if misshapen:
        key, found, expected = misshapen[0]
        raise CheckpointError(
            f"{path}: trunk weight {key} is {list(found)}, config.json makes it {list(expected)} ({len(misshapen)} in "
            "all); expected weights and config of one save. Restore the original files."
        )
    if adapter is not None:
        model = put_on(model, adapter)
    model.requires_grad_(False)
    return Trunk(model if quantization else model.to(device), family).eval()
