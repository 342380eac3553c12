"""Choose the fused kernels of a decoder, and put them in the place of transformers' functions while rounds run.

Modules keep their class and their weights. Inside :meth:`FusedKernels.used`, norms have another ``forward``, and the
Python modules that define the layers have another ``apply_rotary_pos_emb``. The kernels of recurrent layers are chosen
in ``cache/recurrent.py``, the attention of windows in ``cache/window.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from torch import Tensor, nn

from mtp_inference.kernels.norms import fused_norm
from mtp_inference.kernels.rotary import Rotary, fused_rotary

_ROTARY = "apply_rotary_pos_emb"
"""The name under which transformers' models define their rotation."""


class FusedKernels:
    """The norms and rotations of models that have a fused kernel.

    Args:
        models: The models whose rounds to run; a module in several of them is replaced once.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = dict.fromkeys(module for model in models for module in model.modules())
        norms = {module: fused_norm(module) for module in modules}
        self._norms: dict[nn.Module, Callable[..., Tensor]] = {
            module: forward for module, forward in norms.items() if forward is not None
        }
        self._is_used = False
        sources = dict.fromkeys(sys.modules[type(module).__module__] for module in modules)
        rotations = {source: fused_rotary(vars(source)[_ROTARY]) for source in sources if _ROTARY in vars(source)}
        self._rotations: dict[ModuleType, Rotary] = {
            source: rotation for source, rotation in rotations.items() if rotation is not None
        }

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run norms and rotations in fused kernels inside this context.

        Rotations are replaced as attributes of Python modules, so the replacement affects every thread. A context
        inside another one has no further effect.
        """
        if self._is_used:
            yield
            return
        self._is_used = True
        stock = {source: vars(source)[_ROTARY] for source in self._rotations}
        # Past nn.Module's own slow assignment: a context is entered in every round.
        for module, forward in self._norms.items():
            module.__dict__["forward"] = forward
        for source, rotation in self._rotations.items():
            setattr(source, _ROTARY, rotation)
        try:
            yield
        finally:
            self._is_used = False
            for module in self._norms:
                del module.__dict__["forward"]
            for source, rotation in stock.items():
                setattr(source, _ROTARY, rotation)
