"""Compute RMSNorm on a CPU, with or without a gate, in fewer calls than transformers' classes make.

transformers' norms differ in four ways: the weight is stored as a factor or as its difference from 1, the normalised
value is rounded to the input's dtype before the weight or after it, the epsilon has one of two names, and a gate may
follow. :func:`norm_formula` finds the formula of a module by running it.

Shapes: R rows, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import silu

EPSILON_NAMES = ("variance_epsilon", "eps")
"""Attributes in which transformers' norms store their epsilon."""
_GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": torch.sigmoid}
_PROBE_ROWS = 8


class NormFormula(NamedTuple):
    """What distinguishes transformers' RMSNorm classes."""

    offset: float
    """Added to the stored weight: 1 where the weight is stored as its difference from 1."""
    rounds_first: bool
    """Whether the normalised value is rounded to the input's dtype before it is multiplied by the weight."""
    activation: str
    """Activation of the gate; empty for a norm without a gate."""


FORMULAS = tuple(NormFormula(*one, "") for one in ((0.0, True), (0.0, False), (1.0, False)))
GATED_FORMULAS = tuple(NormFormula(0.0, *one) for one in product((True, False), _GATES))


def rms_norm_in_torch(x: Tensor, weight_D: Tensor, gate: Tensor | None, eps: float, formula: NormFormula) -> Tensor:
    """Return the norm of ``x`` (..., D), computed by torch operations, in the order of transformers' classes."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if formula.rounds_first:
        scaled = weight_D * normed.to(x.dtype)
    else:
        scaled = (normed * (weight_D.float() + formula.offset)).to(x.dtype if gate is None else torch.float32)
    if gate is None:
        return scaled
    return (scaled * _GATES[formula.activation](gate.float())).to(x.dtype)


def brief_norm(module: nn.Module) -> Callable[..., Tensor] | None:
    """Return a forward that computes a module on a CPU with few calls; None if it is no norm of a known formula.

    A norm of a few rows takes the time of its calls, of which transformers' classes make eight or more. The forward
    reads the module's weight at each call, and rounds where the module rounds.
    """
    if not _may_be_norm(module) or any(weight.device.type != "cpu" for weight in module.parameters()):
        return None
    formula = norm_formula(module)
    return None if formula is None else partial(brief_forward, module._parameters, _epsilon(module), formula)


def brief_forward(
    parameters: Mapping[str, Any], eps: float, formula: NormFormula, x: Tensor, gate: Tensor | None = None
) -> Tensor:
    """Compute the norm of a module with these parameters; see :func:`rms_norm_in_torch` for the other arguments."""
    weight_D = parameters["weight"]
    if weight_D.dtype is not x.dtype:
        return rms_norm_in_torch(x, weight_D, gate, eps, formula)
    shape = weight_D.shape
    if formula.rounds_first and x.dtype is not torch.float32:
        scaled = weight_D * torch_rms_norm(x.float(), shape, None, eps).to(x.dtype)
    else:
        weight_D = weight_D.float()
        scaled = torch_rms_norm(x.float(), shape, weight_D + formula.offset if formula.offset else weight_D, eps)
    if gate is None:
        return scaled.to(x.dtype)
    return (scaled * _GATES[formula.activation](gate.float())).to(x.dtype)


def _may_be_norm(module: nn.Module) -> bool:
    """Return whether a module has the parts of an RMSNorm: one weight vector, an epsilon, and its class's own forward.

    Weights that are sharded over processes are empty, or of another class.
    """
    weights = dict(module.named_parameters())
    return (
        "RMSNorm" in type(module).__name__
        and "forward" not in vars(module)
        and list(weights) == ["weight"]
        and all(type(weight) is nn.Parameter and weight.ndim == 1 for weight in weights.values())
        and all(len(weight) > 0 for weight in weights.values())
        and any(name in vars(module) for name in EPSILON_NAMES)
    )


def _epsilon(module: nn.Module) -> float:
    return float(next(vars(module)[name] for name in EPSILON_NAMES if name in vars(module)))


_formulas: dict[tuple[Any, ...], NormFormula | None] = {}
"""Formulas found so far, by :func:`_traits`: a model has hundreds of norms of one kind."""


def norm_formula(module: nn.Module) -> NormFormula | None:
    """Return the formula that gives the module's output bit for bit; None if there is none."""
    traits = _traits(module)
    if traits not in _formulas:
        _formulas[traits] = _find_formula(module)
    return _formulas[traits]


def _traits(module: nn.Module) -> tuple[Any, ...]:
    """Return what a norm's output depends on, besides its input and its weight: its class and its settings."""
    (stored_D,) = module.parameters()
    settings = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    return type(module), stored_D.dtype, len(stored_D), *sorted(settings.items())


@torch.no_grad()
def _find_formula(module: nn.Module) -> NormFormula | None:
    """Return the formula that gives the output of the module.

    A copy of the module with a random weight is run on the CPU, so that the result does not depend on the weight. It
    is run in bf16, where formulas differ that are the same in fp32, and in the weight's dtype.
    """
    generator = torch.Generator().manual_seed(0)
    (stored_D,) = module.parameters()
    weight_D = nn.Parameter(torch.randn(len(stored_D), generator=generator).to(stored_D.dtype))
    # A shallow copy: a deep one would copy what its hooks refer to, such as the whole trunk.
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = {"weight": weight_D}
    is_gated = type(module).__name__.endswith("Gated")
    remaining = list(GATED_FORMULAS if is_gated else FORMULAS)
    for dtype in (torch.bfloat16, weight_D.dtype):
        x_RD, gate_RD = (torch.randn(_PROBE_ROWS, len(weight_D), generator=generator).to(dtype) for _ in range(2))
        gate = gate_RD if is_gated else None
        try:
            # Without the module's hooks, which would record the input.
            expected_RD = twin.forward(x_RD) if gate is None else twin.forward(x_RD, gate)
        # Another package's norm, which runs on a GPU only.
        except Exception:
            return None
        found = [rms_norm_in_torch(x_RD, weight_D, gate, _epsilon(module), formula) for formula in remaining]
        remaining = [formula for formula, one in zip(remaining, found, strict=True) if _is_equal(one, expected_RD)]
    return remaining[0] if remaining else None


def _is_equal(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)
