"""Write a head as a separate GGUF file, which llama.cpp loads beside the GGUF file of the trunk.

Tensors are computed from the checkpoint's, one block at a time.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Stored, ReaderTensor
from rich.progress import Progress
from torch import Tensor

from mtp_train.checkpoints.files import Checkpoint, read_json, require_finite
from mtp_train.checkpoints.gguf.architectures import gguf_head_for
from mtp_train.checkpoints.gguf.record import EMBEDDING_NAME, LM_HEAD_NAME, NUM_MODULES, GgufHead, Value
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.native import NativeHead, exact_tensor, shared_tensors
from mtp_train.checkpoints.tokenizer import load_tokenizer
from mtp_train.checkpoints.writing import PendingTensor, held_tensor
from mtp_train.errors import CheckpointError
from mtp_train.families import RawConfig

GgufKind = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
"""Types that the gguf package writes. K-quants are llama-quantize's: it takes the file of a head alone."""
# Texts of control tokens without the special flag, by the rule of llama.cpp's converter.
_CONTROL = re.compile(r"(?s:<\|(?:.*\|)?>|<\uff5c(?:.*\uff5c)?>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\])")
_MAX_ELEMENTS = 1 << 24
# llama.cpp reads routers, the indexer's weights and the mixers of streams in fp32, like norms and vectors.
_FULL_PRECISION = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "indexer.proj.weight",
    "hc_attn_fn.weight",
    "hc_ffn_fn.weight",
    "output_hc_fn.weight",
)


def write_gguf(
    path: Path, trunk: Checkpoint, head: NativeHead, config: RawConfig, kind: GgufKind, progress: Progress
) -> None:
    """Write a head to a GGUF file, one block of one tensor in memory at a time.

    ``config`` is the trunk's text config with defaults filled in.
    """
    record = gguf_head_for(trunk)
    tensors = gguf_tensors(trunk, head, record, config)
    writer = gguf.GGUFWriter(path, record.arch)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(path.stem)
    blocks = {tensor.key.split(".")[1] for tensor in tensors if tensor.key.startswith("blk.")}
    writer.add_block_count(int(config["num_hidden_layers"]) + len(blocks))
    writer.add_nextn_predict_layers(len(blocks))
    for name, field in record.fields.items():
        add_value(writer, f"{record.arch}.{name}", field({**config, NUM_MODULES: len(blocks)}))
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, trunk.path, load_tokenizer(trunk), record, int(config["vocab_size"]))
    write_tensors(writer, tensors, kind, progress)


def write_tensors(
    writer: gguf.GGUFWriter, tensors: Sequence[PendingTensor | ReaderTensor], kind: GgufKind, progress: Progress
) -> None:
    """Write the metadata and these tensors, and close the file. Tensors of another GGUF file keep their bytes.

    ``GGUFWriter`` writes whole tensors only, and an embedding has gigabytes: blocks go into its open file instead.
    """
    for one in tensors:
        if isinstance(one, ReaderTensor):
            writer.add_tensor_info(one.name, one.data.shape, one.data.dtype, one.data.nbytes, raw_dtype=one.tensor_type)
        else:
            stored = stored_type(one, kind)
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[stored]
            num_bytes = math.prod(one.shape) // block_size * block_bytes
            # With any dtype but uint8 the writer takes the shape as it is.
            writer.add_tensor_info(one.key, one.shape, np.dtype("float32"), num_bytes, raw_dtype=stored)
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for handle in writer.fout or ():
            writer.write_padding(handle, handle.tell())
            for one in progress.track(tensors, description=f"writing {writer.path}"):
                blocks = [one.data] if isinstance(one, ReaderTensor) else encoded(one, kind)
                writer.write_padding(handle, sum(handle.write(block.data) for block in blocks))
            handle.flush()
            os.fsync(handle.fileno())


def stored_type(tensor: PendingTensor, kind: GgufKind) -> Stored:
    """Return a tensor's storage type: fp32 for vectors, norms and routers, f16 if rows do not fill blocks."""
    if tensor.dtype == "I64":
        return Stored.I64
    vector_or_router = len(tensor.shape) < 2 or tensor.key.endswith(_FULL_PRECISION)
    if kind == "f32" or vector_or_router or not tensor.key.endswith(".weight"):
        return Stored.F32
    wanted = Stored[kind.upper()]
    return wanted if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0 else Stored.F16


def add_value(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    """Write a metadata field, none for None."""
    if value is not None:
        kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)


def encoded(tensor: PendingTensor, kind: GgufKind) -> Iterator[np.ndarray[Any, Any]]:
    stored = stored_type(tensor, kind)
    for block in tensor.parts():
        # Quantising needs several times the memory of a block in fp32.
        for part in torch.split(block, max(1, _MAX_ELEMENTS // max(1, block[0].numel()))):
            yield _encode(tensor.key, part, stored)


def _encode(name: str, block: Tensor, stored: Stored) -> np.ndarray[Any, Any]:
    if stored is Stored.I64:
        return block.numpy()
    block = block.detach().float().contiguous()
    require_finite(name, block)
    values = block.numpy()
    # An overflow is reported below by tensor name, so numpy's warning is off.
    with np.errstate(over="ignore"):
        data = gguf.quants.quantize(values, stored)
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
    entries = (_entry(tokenizer, texts.get(number), number, added) for number in range(vocab_size))
    tokens, kinds = zip(*entries, strict=True)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(record.pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    of_family = {kind: added[text] for kind, text in record.special_tokens.items() if text in added}
    special.special_token_ids = of_family | special.special_token_ids
    last_step = read_json(path / "tokenizer.json").get("post_processor") or {}
    if any(step.get("type") == "ByteLevel" for step in last_step.get("processors", [last_step])):
        # It adds no tokens at either end. gguf 0.19 omits these fields; llama.cpp's own copy of gguf writes them.
        special.add_special_token = {"bos": False, "eos": False, **special.add_special_token}
    special.add_to_gguf(writer, quiet=True)


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
    if token.special or _CONTROL.fullmatch(text):
        return text, gguf.TokenType.CONTROL
    return text.replace("\u2581", " "), gguf.TokenType.USER_DEFINED


def gguf_tensors(trunk: Checkpoint, head: NativeHead, record: GgufHead, config: RawConfig) -> list[PendingTensor]:
    """Return the head's tensors and the trunk's tensors that llama.cpp's loader requires, without loading them."""
    of_trunk = (
        exact_tensor(trunk, key, name) for key, name in trunk_names(trunk.layout).items() if key in trunk.tensors
    )
    generated = {name: make(config) for name, make in record.generated.items()}
    return [
        *(_with_offset(one, record.norm_offset) for one in of_trunk),
        *head_tensors(trunk, head, record, config),
        *(held_tensor(name, "F32", torch.tensor(one)) for name, one in generated.items() if one is not None),
    ]


def head_tensors(trunk: Checkpoint, head: NativeHead, record: GgufHead, config: RawConfig) -> list[PendingTensor]:
    """Return the head's tensors alone."""
    return [_with_offset(one, record.norm_offset) for one in _of_head(trunk, head, record, config)]


def trunk_names(layout: HeadLayout) -> Mapping[str, str]:
    """Return the keys of the trunk's tensors that llama.cpp's loader requires, with their GGUF names.

    Checkpoints with tied embeddings lack the lm_head, which the loader accepts.
    """
    return {
        layout.embed_key: "token_embd.weight",
        layout.final_norm_key: "output_norm.weight",
        layout.lm_head_key: "output.weight",
    }


def _of_head(trunk: Checkpoint, head: NativeHead, record: GgufHead, config: RawConfig) -> Iterator[PendingTensor]:
    """Yield the head's tensors; experts stored as one tensor each are stacked in the order of their indices."""
    layout = trunk.layout
    groups: dict[str, dict[int, PendingTensor]] = {}
    part_of = {ours: (name, place) for name, join in record.joined.items() for place, ours in enumerate(join.parts)}
    num_layers = int(config["num_hidden_layers"])
    for native in (*head.tensors, *shared_tensors(trunk, head, exact_tensor)):
        mapped = layout.map_key(native.key)
        shared = layout.shared_key(native.key)
        if shared is not None:
            name = LM_HEAD_NAME if shared == layout.family.keys.lm_head else EMBEDDING_NAME
            yield replace(native, key=f"blk.{num_layers + layout.shared_module(native.key)}.{name}")
            continue
        if mapped is None:
            raise _no_name(native.key, record)
        _, module, ours = mapped.ours.split(".", 2)
        block = f"blk.{num_layers + int(module)}"
        if ours in record.outside:
            if int(module):
                raise CheckpointError(
                    f"{native.key}: llama.cpp's {record.arch} has one tensor for all modules; expected a head of one "
                    "module. Export without --gguf."
                )
            yield replace(native, key=record.outside[ours])
        elif ours in part_of:
            name, place = part_of[ours]
            groups.setdefault(f"{block}.{name}", {})[place] = native
        else:
            for piece in _named(native, ours, layout.parts_of(mapped), record, config):
                if mapped.expert is None:
                    yield replace(piece, key=f"{block}.{piece.key}")
                else:
                    groups.setdefault(f"{block}.{piece.key}", {})[mapped.expert] = piece
    for name, group in groups.items():
        pieces = [group[number] for number in sorted(group)]
        join = record.joined.get(name.split(".", 2)[2])
        yield _stacked(name, pieces) if join is None else _joined(name, pieces, join.axis)


def _stacked(name: str, pieces: Sequence[PendingTensor]) -> PendingTensor:
    shape = (len(pieces), *pieces[0].shape)
    return replace(pieces[0], key=name, shape=shape, blocks=lambda: (piece.load()[None] for piece in pieces))


def _joined(name: str, pieces: Sequence[PendingTensor], axis: int) -> PendingTensor:
    shape = list(pieces[0].shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)
    return replace(
        pieces[0],
        key=name,
        shape=tuple(shape),
        blocks=lambda: [torch.cat([piece.load() for piece in pieces], dim=axis)],
    )


def _named(
    native: PendingTensor, ours: str, part: tuple[int, int], record: GgufHead, config: RawConfig
) -> Iterator[PendingTensor]:
    """Yield a tensor of a parameter, or the parts that it is cut into, under names within the block.

    Args:
        part: The number of the tensor among those of its parameter, and their count.
    """
    name = record.names.get(ours)
    number, count = part
    if name is None:
        raise _no_name(native.key, record)
    if isinstance(name, str) or count > 1:
        yield replace(native, key=name if isinstance(name, str) else name.names[number])
        return

    def cut(place: int) -> list[Tensor]:
        return [_cut(name.how, native.load(), config)[place]]

    shapes = [one.shape for one in _cut(name.how, torch.empty(native.shape, device="meta"), config)]
    for place, (its_name, shape) in enumerate(zip(name.names, shapes, strict=True)):
        yield replace(native, key=its_name, shape=shape, blocks=partial(cut, place))


def _no_name(key: str, record: GgufHead) -> CheckpointError:
    return CheckpointError(
        f"{key}: llama.cpp's {record.arch} has no tensor for it; expected the head's keys alone. Export without --gguf."
    )


def _cut(how: str, block: Tensor, config: RawConfig) -> tuple[Tensor, ...]:
    """Return the parts of a tensor that GGUF stores."""
    if how == "halves":
        return block.chunk(2, dim=-2)
    if how != "latent_kv":
        return (paired(block, int(config[how])),)
    key_dims = int(config["qk_nope_head_dim"])
    value_dims = int(config["v_head_dim"])
    by_head = block.view(-1, key_dims + value_dims, block.shape[1])
    return by_head[:, :key_dims].transpose(1, 2), by_head[:, key_dims:]


def paired(block: Tensor, num_heads: int) -> Tensor:
    return block.view(num_heads, 2, -1, block.shape[1]).transpose(1, 2).reshape(block.shape)


def _with_offset(tensor: PendingTensor, offset: float) -> PendingTensor:
    """Add the offset to a norm's weight, in fp32 like the converter."""
    if not offset or not tensor.key.endswith("norm.weight"):
        return tensor
    return replace(tensor, blocks=lambda: (block.float() + offset for block in tensor.parts()))
