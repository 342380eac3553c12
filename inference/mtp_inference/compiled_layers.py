"""Parts of layers that rounds run compiled on a GPU: see :mod:`mtp_train.upstream.compiled`.

Norms and MLPs run over rows. A recurrent layer of a delta rule runs whole, with its projections, from the states that
its cache shows to those that the cache stores. Of attention only the rotary embedding is compiled: a window's keys are
as many as positions are in use, which changes with every thousand tokens.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import Cache

from mtp_inference.cache.recurrent import RecurrentStore
from mtp_train.families import Family
from mtp_train.upstream.compiled import (
    Replaced,
    by_rows,
    compilable,
    fused,
    replaced_forwards,
    row_norms,
    subclass,
)
from mtp_train.upstream.transformers_private import replacing

_ROTARY = "apply_rotary_pos_emb"
"""The function of every model's Python module that rotates queries and keys."""


class CompiledLayers:
    """The layers of models that rounds run compiled.

    Args:
        models: The trunk's model, and the head of its drafter.
        family: The trunk's.
    """

    def __init__(self, models: Sequence[nn.Module], family: Family) -> None:
        modules: list[Any] = list(nn.ModuleList(models).modules())
        others = {module: other for module in modules if (other := _compiled_class(module)) is not None}
        self._device = next(models[0].parameters()).device
        self.replaced: Replaced = compilable(row_norms(modules) | others, self._device)
        self._python_module = importlib.import_module(family.classes.python_module)

    def refresh(self) -> None:
        """Do nothing: weights are read where they are."""

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run the layers compiled inside this context."""
        rotary = getattr(self._python_module, _ROTARY, None)
        parts = {} if rotary is None else {_ROTARY: fused(rotary, self._device)}
        with replaced_forwards(self.replaced), replacing(self._python_module, **parts):
            yield


def _compiled_class(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward a module runs in rounds; None for its own."""
    name = type(module).__name__
    if name.endswith("MLP") and all(map(_is_elementary, module.children())):
        return by_rows(module.__class__)
    if name.endswith("RotaryEmbedding"):
        return _whole(module.__class__)
    if name.endswith(("DeltaNet", "DeltaAttention")):
        return _between_states(module.__class__)
    return None


def _is_elementary(layer: nn.Module) -> bool:
    """Return whether a layer is linear, in whatever form, or an activation: a mixture, or its router, is neither."""
    return hasattr(layer, "in_features") or not list(layer.parameters())


@functools.cache
def _whole(stock: type[Any]) -> type[nn.Module]:
    def forward(module: nn.Module, hidden: Tensor, *args: Any, **named: Any) -> Any:
        return fused(stock.forward, hidden.device)(module, hidden, *args, **named)

    return subclass(stock, forward)


class _ShownStates:
    """The states before a window, and those after it, with the cache interface of transformers' recurrent layers.

    Older releases ask :attr:`layers` for the states, later ones the methods. All layers give the same number.
    """

    record_past = True

    def __init__(self, inputs_BCW: Tensor, state_BHKV: Tensor) -> None:
        self.conv_states = [inputs_BCW]
        self.recurrent_states = [state_BHKV]
        self.window_inputs: Tensor | None = None
        self.result: Any = None

    @property
    def layers(self) -> _ShownStates:
        return self

    def __getitem__(self, _layer: int) -> _ShownStates:
        return self

    def has_previous_state(self, _layer: int, state_idx: int = 0) -> bool:
        return True

    def get_conv_state(self, _layer: int, state_idx: int = 0) -> Tensor:
        return self.conv_states[state_idx]

    def get_recurrent_state(self, _layer: int, state_idx: int = 0) -> Tensor:
        return self.recurrent_states[state_idx]

    def is_recording_past(self, _layer: int) -> bool:
        return self.record_past

    def update_conv_state(self, inputs_BCT: Tensor, _layer: int, **_unused: object) -> Tensor:
        self.window_inputs = RecurrentStore.joined(self.conv_states[0], inputs_BCT)
        return self.window_inputs

    def update_recurrent_state(self, result: Any, _layer: int) -> None:
        self.result = result


@functools.cache
def _between_states(stock: type[Any]) -> type[nn.Module]:
    """Return a class of recurrent layers that runs another's forward compiled, for windows after earlier ones."""

    def run(layer: nn.Module, hidden_BTD: Tensor, inputs_BCW: Tensor, state_BHKV: Tensor) -> tuple[Any, ...]:
        shown = _ShownStates(inputs_BCW, state_BHKV)
        output_BTD = stock.forward(layer, hidden_BTD, shown)
        return output_BTD, shown.window_inputs, shown.result

    def forward(layer: Any, hidden_states: Tensor, *args: Any, **named: Any) -> Tensor:
        # Its name is another one in older releases of transformers.
        cache = next((one for one in (*args, *named.values()) if isinstance(one, Cache)), None)
        store = None if cache is None else cache.layers[layer.layer_idx]
        if type(store) is not RecurrentStore:
            # No cache, or one of further states.
            return stock.forward(layer, hidden_states, *args, **named)
        # One number for all: a compiled layer would be compiled for its own.
        with replacing(layer, layer_idx=0):
            output_BTD, *after = fused(run, hidden_states.device)(
                layer, hidden_states, store.conv_states[0], store.recurrent_states[0]
            )
        store.put_window(*after)
        return output_BTD

    return subclass(stock, forward)
