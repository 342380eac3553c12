"""Quantise a trunk to 8 or 4 bits while it is loaded, with bitsandbytes through transformers.

Linear layers are packed, in 4 bits those of suitable sizes. Embedding, norms and stacked experts stay as they are, and
so does the output matrix, which is read outside of its module's forward. Packed weights are never written: an export
copies the checkpoint's own bytes.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, Literal

import torch
from torch import nn

from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.quantised import quant_method
from mtp_train.errors import CheckpointError, RecipeError

_LOG = logging.getLogger(__name__)

Quantization = Literal["8bit", "4bit"]
_BLOCK = 64
# bitsandbytes' 4-bit kernel for CPUs with AVX512_BF16 takes rows (out_features) in groups of 32 and whole blocks of 64
# columns, and fails for other sizes. Such layers are left unpacked on every machine, so that a result does not depend
# on the CPU.
_ROWS = 32
# The output matrix and LongCat's router are read outside of their modules' forward. Indexers cast their input to the
# dtype of weights_proj, which is an integer dtype once it is packed. bitsandbytes multiplies 8-bit weights only with
# inputs of two or three dimensions, while latent attention expands keys in four.
_KEPT = {
    "8bit": ("lm_head", "classifier", "weights_proj", "kv_b_proj"),
    "4bit": ("lm_head", "classifier", "weights_proj"),
}


def require_quantizable(quantization: Quantization, checkpoint: Checkpoint) -> None:
    method = quant_method(checkpoint.config)
    if method is not None:
        raise CheckpointError(
            f"{checkpoint.path}: quantised with {method} already, while model.quantization is {quantization}; expected "
            "plain weights. Write model.quantization: null, or point model.trunk at the unquantised checkpoint."
        )


def require_bitsandbytes(quantization: Quantization, where: str = "model.quantization") -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(
            f"{where}: {quantization}, but bitsandbytes is not installed; expected the package. Run 'pip install "
            "bitsandbytes', or use the unquantised weights."
        )


def layers_to_pack(model: nn.Module, quantization: Quantization, *, where: str) -> dict[str, nn.Linear]:
    """Return the linear layers of a model that are packed, by name."""
    found = {
        name: part
        for name, part in model.named_modules()
        if type(part) is nn.Linear and not name.endswith(_KEPT[quantization])
        if quantization == "8bit" or not (part.out_features % _ROWS or part.in_features % _BLOCK)
    }
    if not found:
        sizes = f" with rows in multiples of {_ROWS} and columns in multiples of {_BLOCK}" * (quantization == "4bit")
        raise CheckpointError(
            f"{where}: no linear layer that can be packed into {quantization}; expected one{sizes}. Use the "
            "unquantised weights" + (", or 8bit." if quantization == "4bit" else ".")
        )
    return found


def packing(quantization: Quantization, dtype: torch.dtype | str, model: nn.Module, *, where: str) -> Any:
    """Return transformers' quantisation config, and log the number of layers that stay unpacked because of their size.

    Args:
        dtype: The dtype of products with 4-bit weights, or ``"auto"`` for the input's dtype.
    """
    from transformers import BitsAndBytesConfig

    packed = layers_to_pack(model, quantization, where=where)
    misfits = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and name not in packed and not name.endswith(_KEPT[quantization])
    ]
    if misfits:
        _LOG.warning(
            "%s: %d of %d linear layers stay unpacked, such as %s: 4 bits take rows in multiples of %d and columns in "
            "multiples of %d",
            where,
            len(misfits),
            len(misfits) + len(packed),
            misfits[0],
            _ROWS,
            _BLOCK,
        )
    kept = [*_KEPT[quantization], *misfits]
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_no_cast)
    return BitsAndBytesConfig(
        **{f"load_in_{quantization}": True},
        # By default, bitsandbytes computes a column with an outlier in any row of the batch in another way, for all
        # rows. A token's state would depend on the other rows, and decoding would not be lossless.
        llm_int8_threshold=0.0,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype if isinstance(dtype, torch.dtype) else None,
        llm_int8_skip_modules=kept,
    )


def avoid_cpu_kernel(model: nn.Module) -> None:
    """Choose bitsandbytes' general kernel for the layers, stored in 4 bits, whose sizes its CPU kernel fails for."""
    layers: list[Any] = [part for part in model.modules() if getattr(part, "support_avx512bf16_for_cpu", False)]
    for part in layers:
        if part.out_features % _ROWS or part.in_features % part.weight.quant_state.blocksize:
            part.support_avx512bf16_for_cpu = False


def _is_no_cast(record: logging.LogRecord) -> bool:
    """Filter bitsandbytes' warning of each 8-bit product whose input is not in fp16, thousands in a short text."""
    return not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")


def trunk_bytes(model: nn.Module, quantization: Quantization | None, itemsize: int) -> int:
    total = sum(parameter.numel() for parameter in model.parameters()) * itemsize
    if quantization is not None:
        for part in layers_to_pack(model, quantization, where="model.trunk").values():
            total += _packed_bytes(part, quantization) - part.weight.numel() * itemsize
    return total


def _packed_bytes(part: nn.Linear, quantization: Quantization) -> int:
    """Return the bytes of the packed numbers and of their fp32 scales: one scale a row, or one for each block of 64."""
    numbers = part.weight.numel()
    if quantization == "8bit":
        return numbers + 4 * part.out_features
    return numbers // 2 + 4 * (-(-numbers // _BLOCK))
