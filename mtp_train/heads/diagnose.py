"""Compare the head tensors of a checkpoint with those that its family and config need, from file headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from mtp_train.checkpoints.files import (
    REJECTIONS,
    TORCH_DTYPES,
    Checkpoint,
    head_under_other_names,
    unnamed_weights,
)
from mtp_train.checkpoints.keymap import Mapped
from mtp_train.checkpoints.quantised import is_packed, is_scale, lacks_scales, method_of, packed_weight, plain_shape
from mtp_train.errors import CheckpointError, first_of, one_line
from mtp_train.families import Family
from mtp_train.upstream.transformers_private import quiet_loading, set_attention

DSPARK_BLOCK = "dspark_block_size"
DSPARK_PREFIX = "mtp_dspark."
_DSPARK = re.compile(r"\.(?:markov_head|main_norm|main_proj|confidence_head)\.")
# Errors with a text of their own, and those that Python raises in code that did not expect such a config.
_WORDED = (ValueError, OSError, StrictDataclassError)
_REJECTIONS = (*REJECTIONS, StrictDataclassError, AssertionError, RuntimeError)


@dataclass(frozen=True)
class HeadDiagnosis:
    """The tensor keys of a head in a checkpoint, compared with those that its config needs."""

    declared_modules: int = 0
    present_modules: int = 0
    """Number of modules with at least one key in the checkpoint."""
    found_keys: tuple[str, ...] = ()
    """Every key under the head's prefixes, including keys that repeat trunk tensors."""
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    shape_errors: tuple[str, ...] = ()
    """``key: found [..], expected [..]``."""
    dtype_errors: tuple[str, ...] = ()
    """``key: found DTYPE, expected ..``, for tensors that cannot be read as floating-point weights."""
    packed_keys: tuple[str, ...] = ()
    """Quantised weights in a format that we do not read, with their scales; the weights count as present."""
    method: str | None = None
    """The quantisation method of ``packed_keys``."""
    unnamed_in: tuple[str, ...] = ()
    """Files with head tensors that a checkpoint without a head has in its directory and does not name."""
    other_names: tuple[str, ...] = ()
    """Stored keys of a complete head under other names than its family's, in a checkpoint without a head."""
    foreign: str | None = None
    """What shows that the blocks under the head's prefixes are those of another kind of drafter; None for a head."""
    conflict: str | None = None
    """Declarations in config.json that differ from one another, of which engines read one or the other."""

    @property
    def complete(self) -> bool:
        """Whether every needed key is present, readable and of the right shape, and there are no other keys."""
        return self.comparable and not self.shape_errors

    @property
    def comparable(self) -> bool:
        """Whether the head has exactly the tensors that it needs, readable here, whatever their shapes."""
        return bool(self.found_keys) and not (
            self.missing_keys or self.unexpected_keys or self.dtype_errors or self.packed_keys
        )

    @property
    def quantised(self) -> bool:
        """Whether the only problem of the head is a quantisation format that we do not read."""
        damage = self.missing_keys or self.unexpected_keys or self.shape_errors or self.dtype_errors
        return bool(self.packed_keys) and not damage

    def describe(self) -> str:
        """Return one phrase that describes the first problem of the head, for an error message."""
        if not self.found_keys:
            missing = f"holds no head tensors (config declares {self.declared_modules} module(s))"
            if self.other_names:
                return f"{missing}; the {len(self.other_names)} tensors of one have other names ({self.other_names[0]})"
            named = ", ".join(self.unnamed_in[:3])
            return f"{missing}; {named} has some and is no part of the checkpoint" if named else missing
        if self.foreign is not None:
            return f"{self.foreign}: another kind of drafter than an MTP head"
        if self.shape_errors:
            return f"head shape mismatch: {first_of(self.shape_errors)}"
        if self.dtype_errors:
            return f"head dtype: {first_of(self.dtype_errors)}"
        if self.unexpected_keys:
            return f"unknown head keys {', '.join(self.unexpected_keys[:3])} ({len(self.unexpected_keys)} in all)"
        if self.quantised:
            return f"head quantised with {self.method}, which is not read here ({self.packed_keys[0]})"
        return f"head keys missing: {', '.join(self.missing_keys[:3])} ({len(self.missing_keys)} in all)"


def compare_shapes(
    found: Mapping[str, Sequence[int]], needed: Mapping[str, Sequence[int]]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the missing keys, the unexpected keys, and the shape errors of tensors that a drafter needs."""
    both = (key for key in found if key in needed and list(found[key]) != list(needed[key]))
    errors = tuple(f"{key}: found {list(found[key])}, expected {list(needed[key])}" for key in both)
    return tuple(sorted(needed.keys() - found.keys())), tuple(sorted(found.keys() - needed.keys())), errors


def stored_dtype(checkpoint: Checkpoint) -> str:
    """Return the stored dtype of the trunk's embedding, in safetensors' spelling, as the trunk's dtype."""
    return checkpoint.tensors[checkpoint.layout.embed_key].dtype


def text_config_of(checkpoint: Checkpoint) -> PretrainedConfig:
    return trunk_config(checkpoint).get_text_config()


def empty_head(family: Family, text_config: PretrainedConfig, num_modules: int) -> dict[str, Tensor]:
    """Return the state dict of a head for a config, on the meta device."""
    with torch.device("meta"):
        head = family.kind.make_head(family, text_config, num_modules=num_modules, convention=family.wiring.default)
    return head.state_dict()


def _dtype_errors(
    checkpoint: Checkpoint, mapped: Mapping[str, Mapped | None], head: Mapping[str, Tensor], packed: Set[str]
) -> tuple[str, ...]:
    """Return errors for integer tensors and for FP8 tensors without scales in the head; packed tensors are skipped."""
    tensors = checkpoint.tensors
    errors = []
    for key, entry in sorted(mapped.items()):
        dtype = tensors[key].dtype
        known = None if entry is None else head.get(entry.ours)
        is_whole = known is not None and not known.is_floating_point()
        if key in packed or is_packed(key, tensors) or is_whole:
            continue
        if not TORCH_DTYPES[dtype].is_floating_point:
            errors.append(f"{key}: found {dtype}, expected a floating-point dtype")
        elif lacks_scales(key, tensors):
            errors.append(f"{key}: found {dtype} without scales, expected scales beside it")
    return tuple(errors)


def foreign_drafter(checkpoint: Checkpoint, head_keys: Sequence[str]) -> str | None:
    """Return what shows that a checkpoint holds a DSpark drafter: under the head's prefixes or its own; None without.

    DSpark drafts a block of tokens in one pass, and corrects them with a small Markov head (DeepSeek V4, Qwen3).
    """
    beside = [key for key in checkpoint.tensors if key.startswith(DSPARK_PREFIX)]
    signs = [*beside, *filter(_DSPARK.search, head_keys)]
    fields = checkpoint.text_config
    if not (signs or (head_keys and fields.get(DSPARK_BLOCK))):
        return None
    # The size of a block, the layers that are read, the mask token and the rank of the Markov head.
    declared = [f"{name} {value}" for name, value in fields.items() if name.startswith("dspark_")]
    return f"the blocks of a DSpark drafter ({', '.join([*signs[:1], *declared])})"


def diagnose_head(checkpoint: Checkpoint) -> HeadDiagnosis:
    """Compare the head keys of a checkpoint with those that its family and config need."""
    if checkpoint.family.layer is None:
        return HeadDiagnosis()
    layout = checkpoint.layout
    declared = layout.family.declared_modules(checkpoint.config)
    found = tuple(key for key in checkpoint.tensors if layout.is_head_key(key))
    own = (key for key in found if layout.shared_key(key) is None and not is_scale(key, checkpoint.tensors))
    mapped = {key: layout.map_key(key) for key in own}
    present = {entry.ours.split(".")[1] for entry in mapped.values() if entry is not None}
    # The declared number of modules; where the config lost that count, the number that is present.
    with named_rejections(checkpoint.path):
        head = empty_head(checkpoint.family, text_config_of(checkpoint), max(1, declared, len(present)))
    needed = layout.native_shapes(head)
    packed = {key: weight for key in mapped if (weight := packed_weight(key, checkpoint.tensors)) in needed}
    weights = set(packed.values())
    shapes = {key: plain_shape(key, checkpoint.tensors) for key in mapped if key not in packed}
    beside = {} if found else unnamed_weights(checkpoint)
    unnamed = tuple(file for file, tensors in beside.items() if any(map(layout.is_head_key, tensors)))
    return HeadDiagnosis(
        declared,
        len(present),
        found,
        *compare_shapes({**shapes, **{key: needed[key] for key in weights}}, needed),
        dtype_errors=_dtype_errors(checkpoint, mapped, head, packed.keys() | weights),
        packed_keys=tuple(sorted(packed)),
        method=method_of(checkpoint) if packed else None,
        unnamed_in=unnamed,
        other_names=() if found or unnamed else head_under_other_names(checkpoint, needed),
        foreign=foreign_drafter(checkpoint, found) if layout.family.kind.starts else None,
        conflict=layout.family.conflicting_counts(checkpoint.config),
    )


def trunk_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """Return transformers' config of a checkpoint; for a wrapper, the whole config and not only the text config."""
    path = checkpoint.path
    family = checkpoint.family
    family.require_transformers()
    with named_rejections(path):
        stand_in = family.trunk.stand_in
        if stand_in is None:
            config = AutoConfig.from_pretrained(path, trust_remote_code=checkpoint.trusts_code)
        else:
            # Of a wrapper's config, the language model's part.
            config = CONFIG_MAPPING[stand_in.wrapper or stand_in.model_type].from_pretrained(path).get_text_config()
        for part in (config, config.get_text_config()):
            # A stored choice may need a package and a GPU. The default of the model's class computes the same function.
            set_attention(part, None)
    return config


@contextmanager
def named_rejections(path: Path) -> Iterator[None]:
    """Raise a CheckpointError for the errors with which transformers and torch reject a config, and for no others.

    Inside it, configs are read, and models built on the meta device: the config is the only input. The classes check
    few fields themselves: a width that the number of heads does not divide surfaces as whatever Python raises.
    """
    try:
        with quiet_loading():
            yield
    except _REJECTIONS as error:
        kind = "" if isinstance(error, _WORDED) else f"{type(error).__name__}: "
        raise CheckpointError(
            f"{path}/config.json: transformers rejects it ({kind}{one_line(error):.500}); expected a config that it "
            "can read. Restore the original."
        ) from error
