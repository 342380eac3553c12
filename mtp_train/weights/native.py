"""A head in the checkpoint's own layout, on its way from one checkpoint or artifact to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_train.errors import CheckpointError
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.writing import PendingTensor


@dataclass(frozen=True)
class NativeHead:
    """Everything that makes a checkpoint one with a head.

    ``tensors`` are the head's own, under the keys of the checkpoint they go to. ``shared_keys`` repeat trunk tensors
    and are written from the trunk they go to. ``config_fields`` belong into its text config.
    """

    tensors: tuple[PendingTensor, ...]
    shared_keys: tuple[str, ...]
    config_fields: Mapping[str, Any]


def native_head_of(source: Checkpoint, source_layout: HeadLayout, target_layout: HeadLayout) -> NativeHead:
    """Take the head of one checkpoint, its keys renamed for another. Loads nothing yet.

    Args:
        source: A checkpoint whose head is complete (``diagnose_head``).
        source_layout: Its layout.
        target_layout: The layout of the checkpoint it goes to.
    """
    keys = [key for key in source.tensors if source_layout.is_head_key(key)]
    own = [key for key in keys if source_layout.shared_key(key) is None]
    return NativeHead(
        tensors=tuple(stored_tensor(source, key, source_layout.renamed(key, target_layout)) for key in own),
        shared_keys=tuple(source_layout.renamed(key, target_layout) for key in keys if key not in own),
        config_fields=head_config_fields(source),
    )


def head_config_fields(source: Checkpoint) -> dict[str, Any]:
    """Return the text-config fields that describe the head, as the checkpoint has them."""
    fields = source.family.head_config_fields
    return {field: source.text_config[field] for field in fields if field in source.text_config}


def stored_tensor(source: Checkpoint, key: str, new_key: str) -> PendingTensor:
    """Return a tensor of a checkpoint, to be written verbatim under another key."""
    info = source.tensors[key]
    return PendingTensor(
        new_key,
        info.dtype,
        info.shape,
        load=lambda: source.read(key),
        blocks=lambda: source.read_in_blocks(key),
        origin=(source.path, key),
    )


def trunk_tensors(checkpoint: Checkpoint, layout: HeadLayout) -> dict[str, str]:
    """Return the decoder's tensors, key without its prefix to the full key. Leaves out the lm_head: it may be tied."""
    prefix = layout.trunk_prefix
    return {
        key[len(prefix) :]: key for key in checkpoint.tensors if key.startswith(prefix) and not layout.is_head_key(key)
    }


def require_same_trunk_shape(
    finetune: Checkpoint, finetune_layout: HeadLayout, base: Checkpoint, base_layout: HeadLayout
) -> None:
    """Check that a head of ``base`` fits ``finetune``: the same family, and a trunk of the same tensors and shapes.

    Raises:
        CheckpointError: They differ; the message names the first tensor.
    """
    if finetune.family.name != base.family.name:
        raise CheckpointError(
            f"{base.path}: is {base.family.title}, but {finetune.path} is {finetune.family.title}; expected the base "
            "that the fine-tune came from. Point at that base."
        )
    ours, theirs = trunk_tensors(finetune, finetune_layout), trunk_tensors(base, base_layout)
    for name in sorted(ours.keys() | theirs.keys()):
        mine = finetune.tensors[ours[name]].shape if name in ours else None
        other = base.tensors[theirs[name]].shape if name in theirs else None
        if mine != other:
            raise CheckpointError(
                f"{base.path}: trunk tensor {name} is {_shape_text(other)}, in {finetune.path} it is "
                f"{_shape_text(mine)}; "
                "expected the same trunk shape. Point at the base that the fine-tune came from."
            )


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
