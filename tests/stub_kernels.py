"""Stand-ins for flash-linear-attention, causal-conv1d and mamba-ssm that refuse wrong arguments.

:func:`install` puts them where transformers imports the packages from; no model may be imported before. Parameters and
checks are those of fla-core 0.5 and 0.6, causal-conv1d 1.7 and mamba-ssm 2.3: of the functions, of their documentation
and of the CUDA code behind them. A name that is no parameter is an error. Tensors have to be on the simulated device.
Results are those of transformers' torch functions, to the bit.

Shapes as the packages have them: B sequences of T tokens, H key heads and HV value heads, K and V their widths.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtp_train.trunk.recurrent_kernels import ByTensor
from mtp_train.upstream.transformers_private import torch_function_of
from simulated_device import DEVICE

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
GDN = "transformers.models.qwen3_5.modeling_qwen3_5"
KDA = "transformers.models.bailing_hybrid.modeling_bailing_hybrid"
MAMBA = "transformers.models.nemotron_h.modeling_nemotron_h"
Arguments = dict[str, Any]


class Call(NamedTuple):
    """A call of a kernel."""

    name: str
    num_tokens: int
    continues: bool
    """Whether it was given an earlier state."""
    gives_state: bool
    """Whether it was asked for the state after its tokens."""


class Kernels:
    """The calls so far, and an error to make on purpose."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.forgets = False
        """Whether kernels ignore the state that they are given: a control that must be found."""

    def note(self, name: str, num_tokens: int, before: Tensor | None, gives_state: bool) -> Tensor | None:
        """Record a call, and return the state that it starts from."""
        self.calls.append(Call(name, num_tokens, before is not None, gives_state))
        return None if self.forgets else before


KERNELS = Kernels()


def check(name: str, given: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse anything but a tensor on the device of this shape, and of one of these dtypes."""
    if not isinstance(given, Tensor) or given.device.type != DEVICE:
        raise TypeError(f"{name}: {given!r}; expected a tensor of {DEVICE}")
    if given.shape != shape or given.dtype not in dtypes:
        raise ValueError(f"{name}: {given.dtype} {tuple(given.shape)}; expected {shape} in one of {dtypes}")


def check_state(given: Any, shape: tuple[int, ...]) -> None:
    """Refuse an initial state of another shape, dtype or layout; None is no state."""
    if given is None:
        return
    check("initial state", given, shape, (torch.float32,))
    if not given.is_contiguous():
        raise ValueError("initial state: not contiguous")


def require_none(given: Arguments, names: str) -> None:
    """Refuse arguments that recurrent layers have no use for."""
    found = [name for name in names.split() if given[name] is not None]
    if found:
        raise ValueError(f"{', '.join(found)}: given; expected None")


def plain(module: str, name: str) -> Any:
    """Return transformers' torch function."""
    found = getattr(importlib.import_module(module), name)
    return found.plain if isinstance(found, ByTensor) else torch_function_of(found)


def delta(torch_name: str, module: str) -> Callable[[str, Arguments], Any]:
    """Return what checks the arguments of a delta rule and computes it; ``g`` has a number per head, or per channel."""

    def run(name: str, given: Arguments) -> Any:
        query, key, value = given["q"], given["k"], given["v"]
        num_rows, num_tokens, key_heads, width = query.shape
        heads, value_width = value.shape[2:]
        # The kernels of several tokens would round fp32 to TF32.
        check("q", query, (num_rows, num_tokens, key_heads, width), FLOATS if name.startswith("fused") else HALVES)
        check("k", key, tuple(query.shape), (query.dtype,))
        check("v", value, (num_rows, num_tokens, heads, value_width), (query.dtype,))
        gates = (num_rows, num_tokens, heads)
        check("g", given["g"], (*gates, width) if module == KDA else gates, FLOATS)
        check("beta", given["beta"], gates, FLOATS)
        check_state(given["initial_state"], (num_rows, heads, width, value_width))
        if heads % key_heads or width > 256:
            raise ValueError(f"{heads} value heads for {key_heads} key heads of width {width}")
        require_none(given, " ".join({"scale", "cu_seqlens", "gk", "gv", "A_log", "dt_bias"} & given.keys()))
        if given["use_qk_l2norm_in_kernel"] is not True:
            raise ValueError("use_qk_l2norm_in_kernel: not set; the layers do not normalise keys themselves")
        before = KERNELS.note(name, num_tokens, given["initial_state"], bool(given["output_final_state"]))
        # transformers 5.17 takes heads that are repeated already.
        query, key = (one.repeat_interleave(heads // key_heads, dim=2) for one in (query, key))
        return plain(module, torch_name)(
            *(query, key, value),
            g=given["g"],
            beta=given["beta"],
            initial_state=before,
            output_final_state=given["output_final_state"],
            use_qk_l2norm_in_kernel=True,
        )

    return run


def check_convolution(given: Arguments) -> None:
    """Refuse what both convolutions refuse."""
    inputs, weight, bias = given["x"], given["weight"], given["bias"]
    num_channels, width = weight.shape
    check("x", inputs, (len(inputs), num_channels, inputs.shape[2]), FLOATS)
    check("weight", weight, (num_channels, width), FLOATS)
    if bias is not None:
        check("bias", bias, (num_channels,), (weight.dtype,))
    if not 2 <= width <= 4 or given["activation"] not in (None, "silu", "swish"):
        raise ValueError(f"width {width}, activation {given['activation']}")


def convolve(name: str, given: Arguments) -> Any:
    """Stand in for ``causal_conv1d_fn``."""
    check_convolution(given)
    require_none(given, "seq_idx initial_states return_final_states final_states_out")
    inputs = given["x"]
    strides = inputs.stride()
    if strides[1] == 1 < strides[2] and (inputs.shape[1] % 8 or strides[0] % 8 or strides[2] % 8):
        raise ValueError(f"x: {tuple(inputs.shape)}, strides {strides}; expected multiples of 8 with channels last")
    KERNELS.note(name, inputs.shape[2], None, gives_state=False)
    return plain(GDN, name)(inputs, given["weight"], given["bias"], given["activation"])


def convolve_one(name: str, given: Arguments) -> Any:
    """Stand in for ``causal_conv1d_update``, which changes the inputs before in place."""
    check_convolution(given)
    require_none(given, "cache_seqlens conv_state_indices")
    inputs, before, weight = given["x"], given["conv_state"], given["weight"]
    check("conv_state", before, (*inputs.shape[:2], max(before.shape[-1], weight.shape[1] - 1)), (inputs.dtype,))
    KERNELS.note(name, inputs.shape[2], before, gives_state=True)
    return plain(GDN, name)(inputs, before, weight, given["bias"], given["activation"])


def scan(name: str, given: Arguments) -> Any:
    """Stand in for ``mamba_chunk_scan_combined``."""
    inputs, written = given["x"], given["B"]
    num_rows, num_tokens, heads, width = inputs.shape
    check("x", inputs, (num_rows, num_tokens, heads, width), HALVES)
    check("dt", given["dt"], (num_rows, num_tokens, heads), FLOATS)
    for part in ("A", "D", "dt_bias"):
        check(part, given[part], (heads,), FLOATS)
    for part in ("B", "C"):
        check(part, given[part], (num_rows, num_tokens, *written.shape[2:]), (inputs.dtype,))
    check_state(given["initial_states"], (num_rows, heads, width, written.shape[-1]))
    require_none(given, "z seq_idx cu_seqlens return_varlen_states state_dtype")
    if heads % written.shape[2] or given["dt_softplus"] is not True:
        raise ValueError(f"{written.shape[2]} groups of {heads} heads, dt_softplus {given['dt_softplus']}")
    before = KERNELS.note(name, num_tokens, given["initial_states"], bool(given["return_final_states"]))
    given |= {"hidden_states": given.pop("x"), "initial_states": before}
    return plain(MAMBA, "mamba2_chunk_scan")(**given)


def scan_one(name: str, given: Arguments) -> Any:
    """Stand in for ``selective_state_update``, which changes the state in place."""
    state, written = given["state"], given["B"]
    num_rows, heads, width, num_states = state.shape
    check("state", state, (num_rows, heads, width, num_states), (torch.float32,))
    for part in ("x", "dt"):
        check(part, given[part], (num_rows, heads, width), FLOATS)
    check("A", given["A"], (heads, width, num_states), FLOATS)
    for part in ("B", "C"):
        check(part, given[part], (num_rows, written.shape[1], num_states), (given["x"].dtype,))
    for part in ("D", "dt_bias"):
        check(part, given[part], (heads, width), FLOATS)
    require_none(given, "z state_batch_indices")
    KERNELS.note(name, 1, state, gives_state=True)
    given["hidden_states"] = given.pop("x")
    return plain(MAMBA, "mamba2_selective_state_update")(**given)


def stand_in(name: str, required: str, optional: str, run: Callable[[str, Arguments], Any]) -> Any:
    """Return a function with these parameters; those that the packages default to False are None here."""
    names = [Parameter(one, Parameter.POSITIONAL_OR_KEYWORD) for one in required.split()]
    names += [Parameter(one, Parameter.POSITIONAL_OR_KEYWORD, default=None) for one in optional.split()]
    signature = Signature(names)

    def function(*args: Any, **named: Any) -> Any:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        return run(name, dict(bound.arguments))

    function.__name__, function.__signature__ = name, signature  # type: ignore[attr-defined]
    return function


_DELTA = "scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens"
_SCAN = "D z dt_bias initial_states seq_idx cu_seqlens dt_softplus dt_limit return_final_states return_varlen_states"
KDA_SINGLE, GDN_SINGLE = "recurrent_kimi_delta_attention", "torch_recurrent_gated_delta_rule"
PLACES = {
    "fla.ops.gated_delta_rule": (
        stand_in("chunk_gated_delta_rule", "q k v g beta", _DELTA, delta("torch_chunk_gated_delta_rule", GDN)),
        stand_in("fused_recurrent_gated_delta_rule", "q k v", f"g gk gv beta {_DELTA}", delta(GDN_SINGLE, GDN)),
    ),
    "fla.ops.kda": (
        stand_in("chunk_kda", "q k v g beta", _DELTA, delta("chunk_kimi_delta_attention", KDA)),
        stand_in("fused_recurrent_kda", "q k v g beta", f"A_log dt_bias {_DELTA}", delta(KDA_SINGLE, KDA)),
    ),
    "causal_conv1d": (
        stand_in(
            *("causal_conv1d_fn", "x weight"),
            "bias seq_idx initial_states return_final_states final_states_out activation",
            convolve,
        ),
        stand_in(
            *("causal_conv1d_update", "x conv_state weight"),
            "bias activation cache_seqlens conv_state_indices",
            convolve_one,
        ),
    ),
    "mamba_ssm.ops.triton.ssd_combined": (
        stand_in("mamba_chunk_scan_combined", "x dt A B C chunk_size", f"{_SCAN} state_dtype", scan),
    ),
    "mamba_ssm.ops.triton.selective_state_update": (
        stand_in("selective_state_update", "state x dt A B C", "D z dt_bias dt_softplus state_batch_indices", scan_one),
    ),
}


def install() -> None:
    """Make the packages importable in this process."""
    if any(name in sys.modules for name in (GDN, KDA, MAMBA)):
        raise RuntimeError("a model was imported before its kernels; expected none")
    for place, functions in PLACES.items():
        parts = place.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            made = sys.modules.setdefault(name, ModuleType(name))
            made.__spec__, made.__path__ = ModuleSpec(name, None, is_package=True), []
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], made)
        for function in functions:
            setattr(made, function.__name__, function)
