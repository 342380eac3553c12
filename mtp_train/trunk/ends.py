"""The ends of a trunk: embedding, final norm and lm_head, all that a head needs beside hidden states.

:class:`Ends` wraps transformers' model, whose layers may be absent: :func:`mtp_train.trunk.load.load_ends` reads the
tensors of the ends alone. :class:`mtp_train.trunk.load.Trunk` has the layers.

Shapes: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.errors import CheckpointError, UnsupportedModelError
from mtp_train.families import Convention, Family
from mtp_train.heads.head import Head
from mtp_train.heads.module import OutputRows
from mtp_train.trunk.precision import Scratch, computing_in
from mtp_train.upstream.transformers_private import kept_in_fp32


class Ends(nn.Module):
    """Embedding, final norm and lm_head of the decoder whose tokens are the output.

    Args:
        model: A transformers causal language model, possibly wrapped by peft.
        is_view: See :class:`mtp_train.trunk.load.Trunk`.
    """

    def __init__(self, model: Any, family: Family, *, is_view: bool = False) -> None:
        super().__init__()
        self.model: Any = model
        self.family = family
        self.logit_bound: float | None = self.config.to_dict().get("final_logit_softcapping")
        """The c of ``c tanh(logits / c)``; Gemma has one."""
        self._fp32_lm_head = any("lm_head" in name for name in kept_in_fp32(self.causal_lm))
        self.shown_layers: tuple[int, ...] = ()
        """See :meth:`show_layers`."""
        self.shows_keys = False
        """See :meth:`show_to`."""
        self._last_width = family.state_width(self.config)
        self._is_view = is_view
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

    def computing_in(self, dtype: torch.dtype, scratch: Scratch | None = None) -> AbstractContextManager[None]:
        """Make the trunk multiply in a dtype and return it inside this context, whatever dtype it is held in.

        The same trunk loaded in that dtype gives equal results. Weights of that dtype and packed weights stay
        unchanged. Weights that are read outside of their module's forward (``lm_head_VD``) keep their dtype.

        Args:
            scratch: A buffer to reuse. Share it only among callers that are always, or never, in inference mode.
        """
        return computing_in(self.causal_lm, set(self.layers), dtype, scratch)

    @property
    def _final_norm(self) -> nn.Module:
        name = self.family.trunk.final_norm
        return nn.Identity() if name is None else self.decoder.get_submodule(name)

    @property
    def _mixer(self) -> nn.Module | None:
        streams = self.family.trunk.streams
        return None if streams is None else self.decoder.get_submodule(streams.trunk_mixer)

    def _call(self, part: Any, given: Tensor) -> Tensor:
        # Hooks may add noise (NEFTune) or count calls. In a view they belong to the model's own forwards only.
        return part.forward(given) if self._is_view else part(given)

    def show_to(self, head: Head) -> None:
        """Append what a head reads to the hidden states: inputs of layers (:meth:`show_layers`), then keys and values.

        Keys (after the rotary embedding) and values are those of ``TrunkTraits.key_shapes``: of each type of layers the
        keys, then the values, flattened. Hidden states of windows lack them, as drafters read the decoder's cache.
        """
        self.show_layers(head.trunk_layers)
        self.shows_keys |= head.reads_keys

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

    @property
    def state_width(self) -> int:
        """The width D of the result of :meth:`hidden`."""
        return self._keys_start + (self.family.keys_width(self.config) if self.shows_keys else 0)

    @property
    def _keys_start(self) -> int:
        return self._last_width + len(self.shown_layers) * self.config.hidden_size

    @property
    def config(self) -> PretrainedConfig:
        return self.causal_lm.config.get_text_config()

    @property
    def lm_head_VD(self) -> Tensor:
        """The output matrix, shape (V, D), without padding rows."""
        weight = self.causal_lm.get_output_embeddings().weight
        return weight if self._real_vocab is None else weight[: self._real_vocab]

    @property
    def dtype_name(self) -> str:
        """The dtype of the output matrix, as messages and reports name it: ``bfloat16``."""
        return str(self.lm_head_VD.dtype).removeprefix("torch.")

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the input embedding of tokens, shape (B, T, D)."""
        return self._call(self.causal_lm.get_input_embeddings(), tokens_BT)

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
            hidden = self._call(self._mixer, joined).reshape(*hidden.shape[:-1], -1)
        return self._call(self._final_norm, hidden) if self.family.reads_before_norm else hidden

    def of_last_layer(self, state: Tensor) -> Tensor:
        """Return the hidden state for the residual stream after the last layer, before the final norm."""
        return state if self.family.reads_before_norm else self._call(self._final_norm, state)

    def last_norm(self) -> nn.Module:
        """Return a copy in fp32 of the module of :meth:`of_last_layer`, for a thread beside :meth:`computing_in`."""
        return nn.Identity() if self.family.reads_before_norm else deepcopy(self._final_norm).float()

    def head_input(self, hidden: Tensor, convention: Convention) -> Tensor:
        """Return the states that a head wired by ``convention`` reads, from hidden states of :meth:`hidden`."""
        if convention.hidden == "after_final_norm":
            return self._after_norm(hidden)
        if convention.hidden == "before_final_norm":
            return hidden[..., : self._last_width]
        if convention.hidden == "with_keys":
            return torch.cat([self._after_norm(hidden), hidden[..., self._keys_start :]], dim=-1)
        # The states of :meth:`show_layers`.
        return hidden[..., self._last_width : self._keys_start]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.project(self.normed(hidden))

    def project(self, state: Tensor) -> Tensor:
        """Return the logits of states after the norm: a head's states, or the result of :meth:`normed`."""
        # As a matrix of rows: of a part of longer rows, such as the last token of a prompt, torch makes one product per
        # row, each with a copy of the whole matrix.
        rows = (state.float() if self._fp32_lm_head else state).reshape(-1, state.shape[-1])
        logits = self.causal_lm.lm_head(rows)[:, : self._real_vocab]
        logits = logits.reshape(*state.shape[:-1], logits.shape[-1])
        bound = self.logit_bound
        return logits if bound is None else bound * torch.tanh(logits / bound)


def draft_logits(ends: Ends, token_ids_R: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the function from a head's states in a dtype to logits, of some tokens alone; None for all tokens."""
    if token_ids_R is None:
        return ends.project
    weight_VD = ends.lm_head_VD
    return OutputRows(weight_VD[token_ids_R.to(weight_VD.device)].to(dtype), token_ids_R, len(weight_VD))


def non_finite_error(source: str, ends: Ends, num_tokens: int) -> CheckpointError:
    """Return the error for logits that are NaN or infinite, of the trunk or a drafter, after so many tokens."""
    return CheckpointError(
        f"{source}: its logits after {num_tokens} tokens are NaN or infinite ({ends.dtype_name}); expected finite "
        "logits. Load the model in a dtype of larger range; if that does not help, restore its weights: mtp-train "
        "inspect names those that are not finite."
    )
