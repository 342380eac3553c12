"""Write an EAGLE-3 draft model as a GGUF file, for a trunk that is a GGUF file: its vocabulary is the trunk's.

The source is llama.cpp's converter for drafts of its architecture ``eagle3`` (``--target-model-dir``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Stored
from rich.progress import Progress
from torch import Tensor

from mtp_train.checkpoints.draft_checkpoint import CHOSEN_KEY, OFFSETS_KEY, OUTPUT_KEY
from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.gguf.model_file import GgufModel, copy_field
from mtp_train.checkpoints.gguf.record import ATTENTION, BEFORE_FFN, DECODER, DENSE, Value, flag, whole
from mtp_train.checkpoints.gguf.sidecar import GgufKind, add_info, add_value, encoded, write_values
from mtp_train.checkpoints.gguf.tensors import paired
from mtp_train.checkpoints.native import stored_tensor
from mtp_train.checkpoints.writing import PendingTensor

ARCH = "eagle3"
_LAYER = "midlayer."
_NAMES = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    OUTPUT_KEY: "output.weight",
    **{_LAYER + key: f"blk.0.{name}" for key, name in {**ATTENTION, **BEFORE_FFN, **DENSE}.items()},
    f"{_LAYER}hidden_norm.weight": "blk.0.attn_norm_2.weight",
}
"""Of the format of EAGLE-3's authors."""
_FIELDS = {
    **{name: field for name, field in DECODER.items() if not name.startswith("rope.dimension_sections")},
    "vocab_size": whole("vocab_size"),
    "rope.dimension_count": whole("head_dim"),
    "target_hidden_size": whole("target_hidden_size"),
    "norm_before_residual": flag("norm_before_residual", default=False),
    "norm_before_fc": flag("norm_before_fc", default=False),
}


def write_draft_gguf(draft: Checkpoint, trunk: GgufModel, path: Path, kind: GgufKind, progress: Progress) -> None:
    """Write a draft model that :func:`write_draft_checkpoint` wrote as a GGUF file.

    Args:
        trunk: The GGUF file of its trunk, whose vocabulary is copied.
    """
    config = draft.config
    tensors = [_tensor(draft, key, config) for key in draft.tensors if key not in (OFFSETS_KEY, CHOSEN_KEY)]
    offsets = draft.read(OFFSETS_KEY).numpy() if OFFSETS_KEY in draft.tensors else None
    writer = gguf.GGUFWriter(path, ARCH)
    writer.add_type(gguf.GGUFType.MODEL)
    for name, value in _fields(config, trunk.num_layers).items():
        add_value(writer, name, value)
    for name, field in trunk.readers[0].fields.items():
        if name.startswith("tokenizer."):
            copy_field(writer, field)
    for tensor in tensors:
        add_info(writer, tensor, kind)
    if offsets is not None:
        writer.add_tensor_info("d2t", offsets.shape, offsets.dtype, offsets.nbytes, raw_dtype=Stored.I64)
    values = (encoded(one, kind) for one in progress.track(tensors, description=f"writing {path.name}"))
    # Its readers want the tokens themselves.
    tokens = [] if offsets is None else [offsets + np.arange(offsets.size)]
    write_values(writer, itertools.chain(values, [tokens]))


def _fields(config: Mapping[str, Any], num_layers: int) -> dict[str, Value]:
    values: dict[str, Value | None] = {name: field(config) for name, field in _FIELDS.items()}
    # The layers that engines read where a draft model names none, as ours do not.
    values |= {"block_count": 1, "target_layers": [2, num_layers // 2, num_layers - 3]}
    return {f"{ARCH}.{name}": value for name, value in values.items() if value is not None}


def _tensor(draft: Checkpoint, key: str, config: Mapping[str, Any]) -> PendingTensor:
    """Return a tensor under its GGUF name; rows of queries and keys in the order of llama.cpp's rotary embedding."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    num_heads = next((int(config[field]) for part, field in heads.items() if f".{part}." in key), None)

    def blocks() -> list[Tensor]:
        value = draft.read(key)
        return [value if num_heads is None else paired(value, num_heads)]

    return replace(stored_tensor(draft, key, _NAMES[key]), blocks=blocks)
