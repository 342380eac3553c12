"""The tensors of a head's GGUF file, computed from the checkpoint's tensors one block at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.gguf.record import Cut, GgufHead
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.native import NativeHead, exact_tensor, shared_tensors
from mtp_train.checkpoints.writing import PendingTensor, held_tensor
from mtp_train.errors import CheckpointError

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def gguf_tensors(
    trunk: Checkpoint, layout: HeadLayout, head: NativeHead, record: GgufHead, config: Mapping[str, Any]
) -> list[PendingTensor]:
    """Return the head's tensors and the trunk's tensors that llama.cpp's loader requires, without loading them."""
    of_trunk = (exact_tensor(trunk, key, name) for key, name in trunk_names(layout).items() if key in trunk.tensors)
    generated = [
        held_tensor(name, "F32", torch.tensor(values))
        for name, make in record.generated.items()
        if (values := make(config)) is not None
    ]
    return [
        *(_with_offset(one, record.norm_offset) for one in of_trunk),
        *head_tensors(trunk, layout, head, record, config),
        *generated,
    ]


def head_tensors(
    trunk: Checkpoint, layout: HeadLayout, head: NativeHead, record: GgufHead, config: Mapping[str, Any]
) -> list[PendingTensor]:
    """Return the head's tensors alone."""
    return [_with_offset(one, record.norm_offset) for one in _of_head(trunk, layout, head, record, config)]


def trunk_names(layout: HeadLayout) -> Mapping[str, str]:
    """Return the keys of the trunk's tensors that llama.cpp's loader requires, with their GGUF names.

    Checkpoints with tied embeddings lack the lm_head, which the loader accepts.
    """
    family = layout.family
    norm = f"{layout.trunk_prefix}{family.trunk.final_norm}.weight"
    return {layout.embed_key: "token_embd.weight", norm: "output_norm.weight", layout.lm_head_key: "output.weight"}


def _of_head(
    trunk: Checkpoint, layout: HeadLayout, head: NativeHead, record: GgufHead, config: Mapping[str, Any]
) -> Iterator[PendingTensor]:
    """Yield the head's tensors; experts stored as one tensor each are stacked in the order of their indices."""
    stacks: dict[str, dict[int, PendingTensor]] = {}
    parts: dict[str, dict[str, PendingTensor]] = {}
    part_of = {tail: name for name, join in record.joined.items() for tail in join.parts}
    num_layers = int(config["num_hidden_layers"])
    for native in (*head.tensors, *shared_tensors(trunk, layout, head, exact_tensor)):
        block, tail = _place(native.key, layout, record, num_layers)
        if tail in record.outside:
            if block != num_layers:
                raise CheckpointError(
                    f"{native.key}: llama.cpp's {record.arch} has one tensor for all modules; expected a head of one "
                    "module. Export without --gguf."
                )
            yield replace(native, key=record.outside[tail])
            continue
        if tail in part_of:
            parts.setdefault(f"blk.{block}.{part_of[tail]}", {})[tail] = native
            continue
        expert = _EXPERT.search(tail)
        for piece in _named(native, _EXPERT.sub("{expert}", tail), record, config):
            name = f"blk.{block}.{piece.key}"
            if expert is None:
                yield replace(piece, key=name)
            else:
                stacks.setdefault(name, {})[int(expert[0])] = piece
    for name, experts in stacks.items():
        pieces = [experts[number] for number in sorted(experts)]
        yield _stacked(name, pieces)
    for name, found in parts.items():
        join = record.joined[name.split(".", 2)[2]]
        yield _joined(name, [found[tail] for tail in join.parts], join.axis)


def _stacked(name: str, pieces: Sequence[PendingTensor]) -> PendingTensor:
    shape = (len(pieces), *pieces[0].shape)
    return replace(pieces[0], key=name, shape=shape, blocks=lambda: (piece.load()[None] for piece in pieces))


def _joined(name: str, pieces: Sequence[PendingTensor], axis: int) -> PendingTensor:
    shape = list(pieces[0].shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)

    def blocks() -> Iterator[Tensor]:
        parts = (piece.load() for piece in pieces)
        return parts if axis == 0 else iter((torch.cat(list(parts), dim=axis),))

    return replace(pieces[0], key=name, shape=tuple(shape), blocks=blocks)


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


def _named(native: PendingTensor, tail: str, record: GgufHead, config: Mapping[str, Any]) -> Iterator[PendingTensor]:
    """Yield a native tensor, or the parts that it is cut into, under names within the block."""
    if tail in record.cuts:
        cut = record.cuts[tail]
        for name, (shape, change) in zip(cut.names, _cut(cut, native.shape, config), strict=True):
            yield replace(native, key=name, shape=shape, blocks=_whole_changed(native, change))
    elif tail in record.names:
        yield replace(native, key=record.names[tail])
    else:
        raise _no_name(native.key, record)


def _no_name(key: str, record: GgufHead) -> CheckpointError:
    return CheckpointError(
        f"{key}: llama.cpp's {record.arch} has no tensor for it; expected the head's keys alone. Export without --gguf."
    )


def _whole_changed(tensor: PendingTensor, change: Callable[[Tensor], Tensor]) -> Callable[[], list[Tensor]]:
    return lambda: [change(tensor.load())]


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


def _with_offset(tensor: PendingTensor, offset: float) -> PendingTensor:
    """Add the offset to a norm's weight, in fp32 like the converter."""
    if not offset or not tensor.key.endswith("norm.weight"):
        return tensor
    return replace(tensor, blocks=lambda: (block.float() + offset for block in tensor.parts()))
