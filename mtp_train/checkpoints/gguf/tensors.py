"""The tensors of a head's GGUF file, computed from the checkpoint's tensors one block at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.gguf.record import Cut, GgufHead
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.native import NativeHead
from mtp_train.checkpoints.quantised import plain_shape, read_plain_in_blocks
from mtp_train.checkpoints.writing import PendingTensor
from mtp_train.errors import CheckpointError

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor under its GGUF name, or a native one on the way to it, in the shape torch would give it."""

    name: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[Tensor]]
    """Returns its values in consecutive slices along the first axis."""


def gguf_tensors(
    trunk: Checkpoint, layout: HeadLayout, head: NativeHead, record: GgufHead, config: Mapping[str, Any]
) -> list[GgufTensor]:
    """Return the head's tensors and the trunk's tensors that llama.cpp's loader requires, without loading them.

    Raises:
        CheckpointError: The record has no name for a tensor of the head.
    """
    of_trunk = [_with_offset(tensor, record.norm_offset) for tensor in _of_trunk(trunk, layout)]
    return [*of_trunk, *head_tensors(trunk, layout, head, record, config), *_generated(record, config)]


def head_tensors(
    trunk: Checkpoint, layout: HeadLayout, head: NativeHead, record: GgufHead, config: Mapping[str, Any]
) -> list[GgufTensor]:
    """Return the head's tensors alone.

    Raises:
        CheckpointError: The record has no name for a tensor of the head.
    """
    return [_with_offset(one, record.norm_offset) for one in _of_head(trunk, layout, head, record, config)]


def trunk_names(layout: HeadLayout) -> Mapping[str, str]:
    """Return the keys of the trunk's tensors that llama.cpp's loader requires, with their GGUF names.

    Checkpoints with tied embeddings lack the lm_head, which the loader accepts.
    """
    family = layout.family
    norm = f"{layout.trunk_prefix}{family.trunk.final_norm}.weight"
    return {layout.embed_key: "token_embd.weight", norm: "output_norm.weight", layout.lm_head_key: "output.weight"}


def _of_trunk(trunk: Checkpoint, layout: HeadLayout) -> Iterator[GgufTensor]:
    for key, name in trunk_names(layout).items():
        if key in trunk.tensors:
            yield GgufTensor(name, plain_shape(key, trunk.tensors), _stored_blocks(trunk, key))


def _generated(record: GgufHead, config: Mapping[str, Any]) -> list[GgufTensor]:
    made = {name: make(config) for name, make in record.generated.items()}
    return [
        GgufTensor(name, (len(values),), _one_block(partial(torch.tensor, values)))
        for name, values in made.items()
        if values is not None
    ]


def _stored_blocks(trunk: Checkpoint, key: str) -> Callable[[], Iterator[Tensor]]:
    return lambda: read_plain_in_blocks(trunk, key)


def _of_head(
    trunk: Checkpoint, layout: HeadLayout, head: NativeHead, record: GgufHead, config: Mapping[str, Any]
) -> Iterator[GgufTensor]:
    """Yield the head's tensors; experts stored as one tensor each are stacked in the order of their indices."""
    stacks: dict[str, dict[int, GgufTensor]] = {}
    parts: dict[str, dict[str, GgufTensor]] = {}
    part_of = {tail: name for name, join in record.joined.items() for tail in join.parts}
    num_layers = int(config["num_hidden_layers"])
    for native in _native_tensors(trunk, layout, head):
        block, tail = _place(native.name, layout, record, num_layers)
        if tail in record.outside:
            if block != num_layers:
                raise CheckpointError(
                    f"{native.name}: llama.cpp's {record.arch} has one tensor for all modules; expected a head of one "
                    "module. Export without --gguf."
                )
            yield replace(native, name=record.outside[tail])
            continue
        if tail in part_of:
            parts.setdefault(f"blk.{block}.{part_of[tail]}", {})[tail] = native
            continue
        expert = _EXPERT.search(tail)
        for piece in _named(native, _EXPERT.sub("{expert}", tail), record, config):
            name = f"blk.{block}.{piece.name}"
            if expert is None:
                yield replace(piece, name=name)
            else:
                stacks.setdefault(name, {})[int(expert[0])] = piece
    for name, experts in stacks.items():
        pieces = [experts[number] for number in sorted(experts)]
        yield GgufTensor(name, (len(pieces), *pieces[0].shape), _stacked(pieces))
    for name, found in parts.items():
        join = record.joined[name.split(".", 2)[2]]
        yield _joined(name, [found[tail] for tail in join.parts], join.axis)


def _native_tensors(trunk: Checkpoint, layout: HeadLayout, head: NativeHead) -> Iterator[GgufTensor]:
    for pending in head.tensors:
        # Read in parts, an FP8 weight is dequantised to fp32, like in the converter; read whole, it is rounded to bf16.
        yield GgufTensor(pending.key, pending.shape, _one_block(partial(_whole, pending)))
    for key in head.shared_keys:
        shared = layout.shared_key(key)
        if shared is not None:
            stored = layout.trunk_key(shared, trunk.tensors)
            yield GgufTensor(key, plain_shape(stored, trunk.tensors), _stored_blocks(trunk, stored))


def _one_block(load: Callable[[], Tensor]) -> Callable[[], Iterator[Tensor]]:
    return lambda: iter((load(),))


def _stacked(pieces: Iterable[GgufTensor]) -> Callable[[], Iterator[Tensor]]:
    return lambda: (block[None] for piece in pieces for block in piece.blocks())


def _joined(name: str, pieces: Sequence[GgufTensor], axis: int) -> GgufTensor:
    shape = list(pieces[0].shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)

    def blocks() -> Iterator[Tensor]:
        parts = (torch.cat(list(piece.blocks())) for piece in pieces)
        return parts if axis == 0 else iter((torch.cat(list(parts), dim=axis),))

    return GgufTensor(name, tuple(shape), blocks)


def _whole(pending: PendingTensor) -> Tensor:
    return torch.cat(list(pending.parts()))


def _place(key: str, layout: HeadLayout, record: GgufHead, num_layers: int) -> tuple[int, str]:
    """Return the index of the GGUF block of a native head key, and the key without its root."""
    for root in record.roots:
        pattern = re.escape(root.replace("{trunk}", layout.trunk_prefix))
        for number in ("layer", "module"):
            pattern = pattern.replace(rf"\{{{number}\}}", rf"(?P<{number}>\d+)")
        match = re.match(pattern, key)
        if match is not None:
            numbers = match.groupdict()
            block = int(numbers.get("layer") or num_layers + int(numbers.get("module") or 0))
            return block, key[match.end() :]
    raise _no_name(key, record)


def _named(native: GgufTensor, tail: str, record: GgufHead, config: Mapping[str, Any]) -> Iterator[GgufTensor]:
    """Yield a native tensor, or the parts that it is cut into, under names within the block."""
    if tail in record.cuts:
        cut = record.cuts[tail]
        for name, (shape, change) in zip(cut.names, _cut(cut, native.shape, config), strict=True):
            yield GgufTensor(name, shape, _changed(native, change))
    elif tail in record.names:
        yield replace(native, name=record.names[tail])
    else:
        raise _no_name(native.name, record)


def _no_name(key: str, record: GgufHead) -> CheckpointError:
    return CheckpointError(
        f"{key}: llama.cpp's {record.arch} has no tensor for it; expected the head's keys alone. Export without --gguf."
    )


def _changed(tensor: GgufTensor, change: Callable[[Tensor], Tensor]) -> Callable[[], Iterator[Tensor]]:
    return lambda: map(change, tensor.blocks())


def _cut(
    cut: Cut, shape: tuple[int, ...], config: Mapping[str, Any]
) -> tuple[tuple[tuple[int, ...], Callable[[Tensor], Tensor]], ...]:
    """Return, per part of a tensor, its shape and the function of a block that returns the part."""
    if cut.how in ("query_pairs", "key_pairs"):
        count = int(config["num_attention_heads" if cut.how == "query_pairs" else "num_key_value_heads"])
        return ((shape, lambda block: paired(block, count)),)
    if cut.how == "halves":
        *outer, rows, columns = shape
        half = (*outer, rows // 2, columns)
        return (half, lambda block: block[..., : rows // 2, :]), (half, lambda block: block[..., rows // 2 :, :])
    key_dims, value_dims = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    heads, latent = shape[0] // (key_dims + value_dims), shape[1]

    def by_head(block: Tensor) -> Tensor:
        return block.view(heads, key_dims + value_dims, latent)

    return (
        ((heads, latent, key_dims), lambda block: by_head(block)[:, :key_dims].transpose(1, 2)),
        ((heads, value_dims, latent), lambda block: by_head(block)[:, key_dims:]),
    )


def paired(block: Tensor, num_heads: int) -> Tensor:
    return block.view(num_heads, 2, -1, block.shape[1]).transpose(1, 2).reshape(block.shape)


def _with_offset(tensor: GgufTensor, offset: float) -> GgufTensor:
    """Add the offset to a norm's weight, in fp32 like the converter."""
    if not offset or not tensor.name.endswith("norm.weight"):
        return tensor
    return replace(tensor, blocks=_changed(tensor, lambda block: block.float() + offset))
