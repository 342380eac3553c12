"""Read the trunk of a GGUF file, and its head, as a checkpoint: dequantised once, into the cache."""

from __future__ import annotations

import hashlib
import logging
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Stored
from huggingface_hub import constants
from torch import Tensor

from mtp_train.checkpoints.export import add_in_place
from mtp_train.checkpoints.files import SAFETENSORS_DTYPES, open_checkpoint
from mtp_train.checkpoints.gguf.architectures import GGUF_HEADS
from mtp_train.checkpoints.gguf.model_file import GgufModel, dequantised_tensor, open_gguf, torch_shape
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.native import NativeHead
from mtp_train.checkpoints.writing import PendingTensor, new_directory
from mtp_train.errors import UnsupportedModelError

logger = logging.getLogger(__name__)
_EXACT = {Stored.F32, Stored.F16}
_TRUNK_PREFIX = "model."
"""Of the keys of a text model that transformers saves."""


def dequantised(file: Path) -> Path:
    """Return the directory of a checkpoint with the dequantised weights of a GGUF file, written by the first call.

    transformers reads the trunk, its config and its tokenizer. Weights become bf16, or fp32 if none is quantised. The
    directory lies in the hub's cache under a name that follows from the file's path, size and time.

    Raises:
        UnsupportedModelError: The installed transformers does not read the architecture.
        CheckpointError: It is no complete GGUF file.
        FullDiskError: The disk is full or not writable.
    """
    model = open_gguf(file)
    stats = [(str(one.resolve()), one.stat().st_size, one.stat().st_mtime_ns) for one in model.files]
    digest = hashlib.sha256(repr(stats).encode()).hexdigest()[:12]
    target = Path(constants.HF_HOME) / "mtp-train" / f"{file.stem}-{digest}"
    if not target.is_dir():
        types = {one.tensor_type for one in model.tensors.values()}
        dtype = torch.float32 if types <= _EXACT else torch.bfloat16
        logger.warning("%s: dequantising to %s in %s", file, str(dtype).removeprefix("torch."), target)
        _write(model, target, dtype)
    return target


def gguf_tokenizer(file: Path) -> Any:
    """Return the tokenizer of a GGUF file.

    Raises:
        UnsupportedModelError: The installed transformers does not read the architecture.
        CheckpointError: It is no complete GGUF file.
    """
    from transformers import AutoTokenizer

    return _read(open_gguf(file), AutoTokenizer)


def _read(model: GgufModel, reader: Any, **options: Any) -> Any:
    first = model.files[0]
    try:
        return reader.from_pretrained(first.parent, gguf_file=first.name, **options)
    except (ValueError, NotImplementedError, KeyError) as error:
        raise UnsupportedModelError(
            f"{first}: transformers does not read the architecture {model.arch} from GGUF "
            f"({' '.join(str(error).split()):.120}); expected one that it does, as llama, qwen3 or, from 5.23, "
            "qwen35. Use the safetensors checkpoint; mtp-train inspect and graft work with this file."
        ) from error


def _write(model: GgufModel, target: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with new_directory(target, what="the dequantised checkpoint") as directory:
        tokenizer, trunk = _read(model, AutoTokenizer), _read(model, AutoModelForCausalLM, dtype=dtype)
        # transformers keeps the file's quantisation in the config, and then refuses to save.
        trunk.config.__dict__.pop("quantization_config", None)
        trunk.is_quantized, trunk.hf_quantizer = False, None
        trunk.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        if model.head and model.declared_modules:
            _add_head(model, directory, dtype)


def _add_head(model: GgufModel, directory: Path, dtype: torch.dtype) -> None:
    """Add the head to the checkpoint.

    Raises:
        UnsupportedModelError: The record does more than rename the head's tensors.
    """
    trunk = open_checkpoint(directory)
    record = GGUF_HEADS[str(trunk.text_config.get("model_type"))]
    layout = HeadLayout(trunk.family, _TRUNK_PREFIX, model.num_layers)
    tails = {name: tail for tail, name in record.names.items()}
    tensors = []
    for name, stored in model.head.items():
        _, block, rest = name.split(".", 2)
        places = {"trunk": _TRUNK_PREFIX, "layer": block, "module": int(block) - model.num_layers}
        # The shortest root first: a rule of a module's layers takes any name.
        keys = [root.format(**places) + tails[rest] for root in reversed(record.roots)] if rest in tails else []
        key = next((key for key in keys if layout.map_key(key) is not None), None)
        if key is None:
            raise UnsupportedModelError(
                f"{model.files[0]}: {name} is not read back from GGUF here; expected a head whose tensors are only "
                "renamed. Use the safetensors checkpoint; mtp-train inspect and graft work with this file."
            )
        offset = record.norm_offset if name.endswith("norm.weight") else 0.0
        load = partial(_loaded, stored, offset, dtype)
        tensors.append(PendingTensor(key, SAFETENSORS_DTYPES[dtype], torch_shape(stored), load))
    declared = trunk.family.declaring(model.declared_modules, trunk.config)
    add_in_place(trunk, layout, NativeHead(tuple(tensors), (), declared))


def _loaded(stored: gguf.ReaderTensor, offset: float, dtype: torch.dtype) -> Tensor:
    return dequantised_tensor(stored).sub_(offset).to(dtype)
