"""Write a head as a separate GGUF file, which llama.cpp loads beside the GGUF file of the trunk."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Stored
from rich.progress import Progress
from torch import Tensor

from mtp_train.checkpoints.files import read_json, require_finite
from mtp_train.checkpoints.gguf.record import NUM_MODULES, GgufHead, Value
from mtp_train.checkpoints.writing import PendingTensor
from mtp_train.errors import CheckpointError

GgufKind = Literal["f32", "f16", "bf16", "q8_0"]
_CONTAINERS = {Stored.F32: "float32", Stored.F16: "float16", Stored.BF16: "uint8", Stored.Q8_0: "uint8"}
_Q8_BLOCK = 32
_MAX_ELEMENTS = 1 << 24
# llama.cpp reads routers, the indexer's weights and the mixers of streams in fp32, like norms and vectors.
_FULL_PRECISION = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "indexer.proj.weight"),
    *("hc_attn_fn.weight", "hc_ffn_fn.weight", "output_hc_fn.weight"),
)


def write_gguf(
    path: Path,
    record: GgufHead,
    tensors: Sequence[PendingTensor],
    *,
    kind: GgufKind,
    trunk: Path,
    config: Mapping[str, Any],
    tokenizer: Any,
    progress: Progress,
) -> None:
    """Write a GGUF file, one block of one tensor in memory at a time.

    ``trunk`` is the checkpoint's directory, for its model card and tokenizer files; ``config`` its text config with
    defaults filled in.
    """
    writer = gguf.GGUFWriter(path, record.arch)
    for tensor in tensors:
        add_info(writer, tensor, kind)
    _add_description(writer, trunk)
    _add_fields(writer, record, tensors, config)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, trunk, tokenizer, record, int(config["vocab_size"]))
    write_values(writer, (encoded(one, kind) for one in progress.track(tensors, description=f"writing {path.name}")))


def add_info(writer: gguf.GGUFWriter, tensor: PendingTensor, kind: GgufKind) -> None:
    stored = stored_type(tensor, kind)
    dtype = np.dtype(_CONTAINERS[stored])
    shape = gguf.quant_shape_to_byte_shape(tensor.shape, stored) if dtype == np.uint8 else tensor.shape
    writer.add_tensor_info(tensor.key, shape, dtype, math.prod(shape) * dtype.itemsize, raw_dtype=stored)


def stored_type(tensor: PendingTensor, kind: GgufKind) -> Stored:
    """Return a tensor's storage type: fp32 for vectors, norms and routers, f16 if rows do not fill Q8_0 blocks."""
    vector_or_router = len(tensor.shape) < 2 or tensor.key.endswith(_FULL_PRECISION)
    if kind == "f32" or vector_or_router or not tensor.key.endswith(".weight"):
        return Stored.F32
    return Stored.F16 if kind == "q8_0" and tensor.shape[-1] % _Q8_BLOCK else Stored[kind.upper()]


def _add_description(writer: gguf.GGUFWriter, trunk: Path) -> None:
    """Add the description from the model card and the directory's name, and the size."""
    counts = writer.get_total_parameter_count()
    try:
        metadata = gguf.Metadata.load(None, trunk, None, counts[0])
    # gguf does not check the card's fields, which may come from any source. None of our code runs in it.
    except Exception as error:
        raise CheckpointError(
            f"{trunk / 'README.md'}: cannot be read as a model card ({type(error).__name__}: "
            f"{' '.join(str(error).split()):.200}); expected UTF-8 text that may begin with YAML fields. Correct or "
            "remove it."
        ) from error
    metadata.name = metadata.name or trunk.name
    metadata.size_label = metadata.size_label or gguf.size_label(*counts)
    writer.add_type(gguf.GGUFType.MODEL)
    metadata.set_gguf_meta_model(writer)


def _add_fields(
    writer: gguf.GGUFWriter, record: GgufHead, tensors: Sequence[PendingTensor], config: Mapping[str, Any]
) -> None:
    num_layers = int(config["num_hidden_layers"])
    blocks = {int(tensor.key.split(".")[1]) for tensor in tensors if tensor.key.startswith("blk.")}
    writer.add_block_count(num_layers + len(blocks))
    writer.add_nextn_predict_layers(len(blocks))
    for name, field in record.fields.items():
        value = field({**config, NUM_MODULES: len(blocks)})
        if value is not None:
            add_value(writer, f"{record.arch}.{name}", value)


def add_value(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_values(writer: gguf.GGUFWriter, tensors: Iterable[Iterable[np.ndarray[Any, Any]]]) -> None:
    """Write the metadata and the values of the declared tensors, and close the file.

    ``GGUFWriter`` writes whole tensors only, and an embedding has gigabytes: blocks go into its open file instead.

    Args:
        tensors: The blocks of each tensor's stored values, in the order of their declarations.
    """
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for handle in writer.fout or ():
            writer.write_padding(handle, handle.tell())
            for blocks in tensors:
                writer.write_padding(handle, sum(handle.write(block.data) for block in blocks))
            handle.flush()
            os.fsync(handle.fileno())


def encoded(tensor: PendingTensor, kind: GgufKind) -> Iterator[np.ndarray[Any, Any]]:
    stored = stored_type(tensor, kind)
    for block in tensor.parts():
        # Quantising needs several times the memory of a block in fp32.
        for part in torch.split(block, max(1, _MAX_ELEMENTS // max(1, block[0].numel()))):
            yield _encode(tensor.key, part, stored)


def _encode(name: str, block: Tensor, stored: Stored) -> np.ndarray[Any, Any]:
    block = block.detach().float().contiguous()
    require_finite(name, block)
    values = block.numpy()
    # An overflow is reported below by tensor name, so numpy's warning is off.
    with np.errstate(over="ignore"):
        data: np.ndarray[Any, Any] = gguf.quants.quantize(values, stored)
    if stored is Stored.F16 and not np.isfinite(data).all():
        raise CheckpointError(
            f"{name}: holds {np.abs(values).max():.3g}, too large for f16; expected at most 65504. Use --gguf q8_0."
        )
    return data


def add_vocabulary(writer: gguf.GGUFWriter, path: Path, tokenizer: Any, record: GgufHead, vocab_size: int) -> None:
    """Write a byte-level BPE vocabulary, padded to the embedding's number of rows."""
    texts = {token_id: text for text, token_id in tokenizer.get_vocab().items()}
    if max(texts) >= vocab_size:
        raise CheckpointError(
            f"{path}: its tokenizer has token {max(texts)}; expected ids below the embedding's {vocab_size} rows. "
            "Restore the tokenizer that the model was trained with."
        )
    special = gguf.SpecialVocab(path, load_merges=True)
    if not special.merges:
        raise CheckpointError(
            f"{path}/tokenizer.json: has no merges; expected a byte-level BPE tokenizer, as in this family's releases. "
            "Restore it from the base."
        )
    added = tokenizer.get_added_vocab()
    entries = [_entry(tokenizer, texts.get(number), number, added) for number in range(vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(record.pre_tokenizer)
    writer.add_token_list([text for text, _ in entries])
    writer.add_token_types([kind for _, kind in entries])
    of_family = {kind: added[text] for kind, text in record.special_tokens.items() if text in added}
    special.special_token_ids = of_family | special.special_token_ids
    for kind in ("bos", "eos") if _is_byte_level(path) else ():
        # gguf 0.19 omits these fields; llama.cpp's own copy of gguf writes them.
        special.add_special_token.setdefault(kind, False)
    special.add_to_gguf(writer, quiet=True)


def _is_byte_level(path: Path) -> bool:
    """Return whether the tokenizer's post-processor is byte-level, which adds no tokens at either end."""
    step = read_json(path / "tokenizer.json").get("post_processor") or {}
    return any(one.get("type") == "ByteLevel" for one in step.get("processors", [step]))


def _entry(tokenizer: Any, text: str | None, number: int, added: dict[str, int]) -> tuple[str, int]:
    """Return one token as llama.cpp stores it: text and type."""
    if text is None:
        return f"[PAD{number}]", gguf.TokenType.UNUSED
    if text not in added:
        return text, gguf.TokenType.NORMAL
    token = tokenizer.added_tokens_decoder[number]
    if not token.normalized:
        # llama.cpp searches added tokens in normalised text.
        text = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    if token.special or _looks_special(text):
        return text, gguf.TokenType.CONTROL
    return text.replace("\u2581", " "), gguf.TokenType.USER_DEFINED


def _looks_special(text: str) -> bool:
    """Return whether a token without the special flag is a control token, by the rule of llama.cpp's converter."""
    marks = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    marked = any(text.startswith(left) and text.endswith(right) for left, right in marks)
    return marked or text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
