"""Take a head in native keys from a checkpoint, for another checkpoint or a head directory, without loading it.

:func:`require_same_trunk_shape` checks that the head of one checkpoint fits another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from mtp_train.checkpoints.files import TORCH_DTYPES, Checkpoint, JsonObject, read_metadata
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.quantised import (
    FP8_DTYPES,
    PLAIN_DTYPES,
    is_packed,
    is_scale,
    packed_weight,
    plain_shape,
    read_plain_in_blocks,
    require_declared,
)
from mtp_train.checkpoints.writing import PendingTensor
from mtp_train.errors import CheckpointError
from mtp_train.families import RawConfig
from mtp_train.upstream.transformers_private import convert_moe_packed_tensors

_LAYER = re.compile(r"layers\.\d+\.")


@dataclass(frozen=True)
class NativeHead:
    """The tensors and config fields that a checkpoint with a head has in addition to its trunk.

    ``tensors`` are the head's own, under the keys of the checkpoint that they are written to. ``shared_keys`` repeat
    trunk tensors, and get the values of that checkpoint's trunk. ``config_fields`` belong in its text config; a
    family's section for the head, where it has one, belongs in the whole config.
    """

    tensors: tuple[PendingTensor, ...]
    shared_keys: tuple[str, ...]
    config_fields: RawConfig
    trained: bool = False
    """Whether it was trained here: what is written with it says so in its metadata."""


_TRAINED = "mtp_train.head"
"""Field in the metadata of a file with a head that was trained here."""


def marked(metadata: Mapping[str, str], head: NativeHead) -> dict[str, str]:
    """Return the metadata of a file of weights with the mark of a trained head, or without."""
    others = {name: value for name, value in metadata.items() if name != _TRAINED}
    return others | ({_TRAINED: "trained"} if head.trained else {})


def is_marked(file: Path) -> bool:
    # A file is gone where a model was saved over its base.
    return file.is_file() and _TRAINED in read_metadata(file)


def head_config_fields(source: Checkpoint) -> JsonObject:
    """Return the text-config fields that describe the head, and the head's section, with the checkpoint's values."""
    fields = source.family.declaration.fields
    section = source.family.declaration.section
    found = {field: source.text_config[field] for field in fields if field in source.text_config}
    if section is not None and section in source.config:
        found[section] = source.config[section]
    return found


def stored_tensor(source: Checkpoint, key: str, new_key: str) -> PendingTensor:
    """Return a tensor of a checkpoint, to be written unchanged under another key."""
    info = source.tensors[key]
    return PendingTensor(
        new_key,
        info.dtype,
        info.shape,
        blocks=lambda: source.read_in_blocks(key),
        origin=(source.path, key),
    )


def plain_tensor(source: Checkpoint, key: str, new_key: str, *, dtype: str = "BF16") -> PendingTensor:
    """Return a tensor of a checkpoint, unchanged, or in bf16 (``dtype``) where it is stored in FP8 or FP4."""
    if source.tensors[key].dtype not in FP8_DTYPES and not is_packed(key, source.tensors):
        return stored_tensor(source, key, new_key)
    shape = plain_shape(key, source.tensors)
    wanted = TORCH_DTYPES[dtype]
    return PendingTensor(
        new_key, dtype, shape, lambda: (block.to(wanted) for block in read_plain_in_blocks(source, key))
    )


exact_tensor = partial(plain_tensor, dtype="F32")
"""As :func:`plain_tensor`, in fp32 and without rounding: llama.cpp's converter reads FP8 and FP4 so."""
Take = Callable[[Checkpoint, str, str], PendingTensor]
"""From a checkpoint, a key and the key to write, to the tensor."""


def native_head_of(source: Checkpoint, target: HeadLayout, *, take: Take = plain_tensor) -> NativeHead:
    """Return the head of one checkpoint with its keys renamed for another. Loads nothing yet.

    Args:
        take: :func:`plain_tensor`, :func:`exact_tensor`, or :func:`stored_tensor` for a head that stays in its own
            checkpoint.
    """
    layout = source.layout
    keys = [key for key in source.tensors if layout.is_head_key(key)]
    shared = [key for key in keys if layout.shared_key(key) is not None]
    stored = take is stored_tensor
    own = [key for key in keys if key not in shared and (stored or not is_scale(key, source.tensors))]
    return NativeHead(
        tensors=tuple(take(source, key, layout.renamed(key, target)) for key in own),
        shared_keys=tuple(layout.renamed(key, target) for key in shared),
        config_fields=head_config_fields(source),
        trained=any(is_marked(source.path / file) for file in {source.tensors[key].file for key in own}),
    )


def shared_tensors(source: Checkpoint, head: NativeHead, take: Take = stored_tensor) -> Iterator[PendingTensor]:
    """Yield the head's copies of trunk tensors, with the values of a trunk."""
    layout = source.layout
    for key in head.shared_keys:
        shared = layout.shared_key(key)
        if shared is None:
            raise CheckpointError(
                f"{key}: not a key that {layout.family.title} shares with its trunk; expected a head of this family. "
                "Write the head again."
            )
        yield take(source, layout.trunk_key(shared, source.tensors), key)


def plain_experts(source: Checkpoint, key: str, new_key: str) -> PendingTensor | None:
    """Return stacked experts in bf16 that are stored in MXFP4, as gpt-oss is released; None for another format.

    The stored blocks have shape (experts, out, blocks, 16), with two values in each byte and a scale for each block.
    The result has shape (experts, in, out).
    """
    packed = f"{key}_blocks"
    scales = f"{key}_scales"
    if not {packed, scales} <= source.tensors.keys():
        return None
    num_experts, num_out, *inward = source.tensors[packed].shape

    def experts() -> Iterator[Tensor]:
        for expert in range(num_experts):
            blocks, exponents = (source.read_rows(part, expert, expert + 1) for part in (packed, scales))
            yield convert_moe_packed_tensors(blocks, exponents)

    return PendingTensor(new_key, "BF16", (num_experts, 2 * math.prod(inward), num_out), experts)


def trunk_tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the decoder's tensors: the release's name without its prefix, to the full key.

    The lm_head is left out, because it may be tied.
    """
    layout = checkpoint.layout
    prefix = layout.trunk_prefix
    found = {}
    for key in checkpoint.tensors:
        name = key.removeprefix(prefix)
        # A head under the decoder's prefix is a head under another name.
        is_head = layout.is_head_key(key) or layout.is_head_key(name)
        if key.startswith(prefix) and not is_head and key != layout.lm_head_key:
            for saved, released in layout.family.keys.saved_names.items():
                name = name.replace(saved, released)
            found[name] = key
    return found


def require_same_trunk_shape(finetune: Checkpoint, base: Checkpoint) -> None:
    """Check that a head of ``base`` fits ``finetune``: the same family, and a trunk with the same tensors and shapes.

    Their modules are compared, and the shapes of tensors that both store alike: the two may be quantised differently,
    or only one may stack its experts. A pruned trunk, which declares fewer layers, has other layers under the same
    numbers: of these only the modules are compared. The embedding may have more or fewer rows (added tokens), unless
    the head has weights of that size: heads otherwise use the embedding and the output matrix of the trunk that they
    are on.
    """
    require_declared(base)
    if finetune.family.name != base.family.name:
        raise CheckpointError(
            f"{base.path}: is {base.family.title}, but {finetune.path} is {finetune.family.title}; expected the base "
            "that the fine-tune came from. Point at that base."
        )
    ours = trunk_tensors(finetune)
    theirs = trunk_tensors(base)
    shared, own, others = ours.keys() & theirs.keys(), trunk_modules(ours), trunk_modules(theirs)
    if finetune.layout.num_hidden_layers < base.layout.num_hidden_layers:
        shared = {name for name in shared if not _LAYER.match(name)}
        own, others = ({_LAYER.sub("layers.", module) for module in modules} for modules in (own, others))
    missing = own ^ others
    if missing:
        lacking, whole = (base, finetune) if min(missing) in own else (finetune, base)
        raise CheckpointError(
            f"{lacking.path}: lacks trunk module {min(missing)}, which {whole.path} has; expected the same trunk. If "
            "it lost weights, restore its files; else point at the base that the fine-tune came from."
        )
    wiring = finetune.family.wiring
    for name in sorted(shared):
        mine = finetune.tensors[ours[name]]
        other = base.tensors[theirs[name]]
        alike = mine.dtype == other.dtype or {mine.dtype, other.dtype} <= {*PLAIN_DTYPES}
        if mine.shape == other.shape or not alike:
            continue
        resized = mine.shape[1:] == other.shape[1:] and ours[name] == finetune.layout.embed_key
        if resized and not (wiring.own_lm_head or wiring.own_embedding):
            continue
        because = f": a {finetune.family.title} head has a matrix of its own over the vocabulary" if resized else ""
        raise CheckpointError(
            f"{base.path}: trunk tensor {name} is {list(other.shape)}, in {finetune.path} it is {list(mine.shape)}; "
            f"expected the same trunk shape{because}. Point at the base that the fine-tune came from."
        )


def trunk_modules(names: Iterable[str]) -> set[str]:
    """Return the modules that tensors belong to, whatever the storage format; experts count as one module."""
    keys = {*names}
    weights = (packed_weight(key, keys) or key for key in keys if not is_scale(key, keys))
    return {re.sub(r"\.experts\..*", ".experts.", weight).rpartition(".")[0] for weight in weights}
