"""Look at the numbers in checkpoints, a block of a tensor at a time: find NaN, compare trunks, compare heads.

A head in a known wrong form has the right keys and shapes. Engines load it, the text stays right, and no draft is
accepted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from rich.progress import Progress
from torch import Tensor

from mtp_train.checkpoints.files import Checkpoint, all_finite
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.native import native_head_of, plain_tensor, stored_tensor, trunk_tensors
from mtp_train.checkpoints.quantised import is_scale, unread_weights
from mtp_train.checkpoints.writing import PendingTensor
from mtp_train.errors import CheckpointError

_PIECE = 1 << 16
"""Numbers that are compared at once in fp64: few enough for the cache of a processor."""


def find_non_finite(checkpoint: Checkpoint, progress: Progress) -> list[str]:
    keys = progress.track(sorted(checkpoint.tensors), description=f"looking for NaN in {checkpoint.path.name}")
    return [key for key in keys if not all(map(all_finite, checkpoint.read_in_blocks(key)))]


def require_finite_checkpoint(checkpoint: Checkpoint, progress: Progress) -> None:
    """Raise a CheckpointError that names the first tensor with NaN or infinities."""
    found = find_non_finite(checkpoint, progress)
    if found:
        raise CheckpointError(
            f"{checkpoint.path}: {found[0]} holds NaN or infinite values ({len(found)} such tensors); expected finite "
            "weights. Use a checkpoint saved before training diverged."
        )


def common_tensors(checkpoint: Checkpoint, base: Checkpoint) -> dict[str, tuple[str, str]]:
    """Return the trunk tensors that both checkpoints have: name, sorted, to the key in each checkpoint.

    These are all tensors, unless the two checkpoints are quantised differently. Scales are left out, as part of the
    weights that they belong to, and so are weights that are packed in a form that is not read here.
    """
    ours = trunk_tensors(checkpoint)
    theirs = trunk_tensors(base)
    lm_head, of_base = checkpoint.layout.lm_head_key, base.layout.lm_head_key
    if lm_head in checkpoint.tensors and of_base in base.tensors:
        name = checkpoint.family.keys.lm_head
        ours[name] = lm_head
        theirs[name] = of_base
    unread = unread_weights(checkpoint.tensors)
    unread_in_base = unread_weights(base.tensors)
    names = sorted(
        name
        for name in ours.keys() & theirs.keys()
        if not (is_scale(ours[name], checkpoint.tensors) or ours[name] in unread or theirs[name] in unread_in_base)
    )
    return {name: (ours[name], theirs[name]) for name in names}


def squared_change(ours: Iterator[Tensor], theirs: Iterator[Tensor]) -> tuple[float, float, float]:
    """Return ``|W - W0|^2``, ``|W0|^2`` and ``|W|^2`` over the rows that both tensors have, whatever their dtypes.

    An embedding may have been resized. Blocks have the same rows, but for the last one of the shorter tensor.
    """
    change = size = own = 0.0
    for new, old in zip(ours, theirs, strict=False):
        both = min(new.numel(), old.numel())
        for pair in zip(*(torch.split(one.reshape(-1)[:both], _PIECE) for one in (new, old)), strict=True):
            new_X, old_X = (one.double() for one in pair)
            change += float((new_X - old_X).square().sum())
            size += float(old_X.square().sum())
            own += float(new_X.square().sum())
    return change, size, own


def equal_values(checkpoint: Checkpoint, key: str, other: Checkpoint, other_key: str) -> bool:
    """Return whether two stored tensors have one shape and the same values, whatever their dtypes."""
    if checkpoint.tensors[key].shape != other.tensors[other_key].shape:
        return False
    blocks = zip(checkpoint.read_in_blocks(key), other.read_in_blocks(other_key), strict=True)
    return all(torch.equal(mine.float(), theirs.float()) for mine, theirs in blocks)


WrongForm = Literal["zero", "halves swapped", "norms shifted", "transposed"]
_WORDS: Mapping[WrongForm, str] = {
    "zero": "zero everywhere",
    "halves swapped": "the base's with the halves of its input swapped",
    "norms shifted": "the base's shifted by one, as converters store norms that multiply by 1 + w",
    "transposed": "the base's transposed",
}
_FAR = 0.3
"""A relative change that a matrix has to exceed before a swapped or transposed form of it is tried."""
_NEARER = 0.5
"""The form counts if the tensor is this much nearer to it than to the base's own tensor: a head may have been trained
before or after it got the form."""
_UNRELATED = 0.02
"""The largest share of the base's head that matrices contain which were not made from it; less for rounding alone."""
_SHIFT_RMS = 0.1
"""How far a norm's weights may be from the base's weights plus or minus one."""


@dataclass(frozen=True)
class HeadDifference:
    """How the head of a checkpoint differs from the head of its base."""

    kind: Literal["equal", "retrained", "unrelated"] | WrongForm
    relative_change: float | None = None
    """``norm(new - old) / norm(old)`` over all tensors of the head; None without a base."""
    keys: Mapping[WrongForm, Sequence[str]] = field(default_factory=dict)
    """Tensors in a wrong form; empty for a head that is equal, retrained or unrelated."""
    same_norms: bool = False
    """Whether all vectors are the base's, whatever the matrices are."""

    def __str__(self) -> str:
        if self.kind == "equal":
            return "equal to the base's"
        if self.kind == "unrelated":
            return f"has nothing of the base's{', but its norms' if self.same_norms else ''}: correlation near 0"
        if self.kind == "retrained":
            return f"differs from the base's by {self.relative_change:.2g} (relative)"
        return "; ".join(
            f"{keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''} {'is' if len(keys) == 1 else 'are'} "
            f"{_WORDS[form]}"
            for form, keys in self.keys.items()
        )


def zero_head(checkpoint: Checkpoint) -> HeadDifference | None:
    """Return the difference of a head that drafts nothing, whatever its base: its matrices, or its projections, are 0.

    The search of a tensor ends at its first block with another value.
    """
    layout = checkpoint.layout
    head = native_head_of(checkpoint, layout, take=stored_tensor).tensors
    matrices = [one for one in head if len(one.shape) > 1]
    zeros = [one.key for one in matrices if not any(block.float().any() for block in one.parts())]
    if not zeros or (len(zeros) < len(matrices) and not any(_is_projection(layout, key) for key in zeros)):
        return None
    return HeadDifference("zero", keys={"zero": tuple(zeros)})


def compare_heads(checkpoint: Checkpoint, base: Checkpoint, norm_value: float) -> HeadDifference | None:
    """Compare the head of a checkpoint with its base's; None where the two store other tensors.

    Matrices may have swapped axes. Every tensor is read once, and once more as a whole where it is far from the base's.

    Args:
        norm_value: The stored weight of a norm before training, which is no wrong form: 0 where norms multiply by
            1 + w.
    """
    change = size = inner = moved_norms = 0.0
    wrong: dict[WrongForm, list[str]] = {}
    for old in native_head_of(base, checkpoint.layout).tensors:
        if old.key not in checkpoint.tensors:
            return None
        new = plain_tensor(checkpoint, old.key, old.key)
        if new.shape == old.shape:
            moved, before, own = squared_change(new.parts(), old.parts())
            change += moved
            size += before
            is_vector = len(old.shape) < 2
            moved_norms += moved * is_vector
            inner += (own + before - moved) / 2 * (not is_vector)
            form = None
            if not (is_vector and (new.load() == norm_value).all()):
                form = _wrong_form(moved, before, own, new, old, projection=_is_projection(checkpoint.layout, old.key))
        elif new.shape == old.shape[::-1] and _distance(new.load().T, old.load()) < _NEARER:
            form = "transposed"
        else:
            return None
        if form is not None:
            wrong.setdefault(form, []).append(old.key)
    relative = math.sqrt(change / size) if size else 0.0
    if wrong:
        ordered = {form: tuple(wrong[form]) for form in _WORDS if form in wrong}
        return HeadDifference(next(iter(ordered)), relative, ordered)
    if change and abs(inner) < _UNRELATED * size:
        return HeadDifference("unrelated", relative, same_norms=not moved_norms)
    return HeadDifference("retrained" if change else "equal", relative)


def _wrong_form(
    change: float, size: float, own: float, new: PendingTensor, old: PendingTensor, *, projection: bool
) -> WrongForm | None:
    if not change or not size:
        return None
    if not own:
        return "zero"
    if len(old.shape) < 2:
        difference_D = new.load().double() - old.load().double()
        rest_D = difference_D - difference_D.mean().round().clamp(-1, 1)
        shifted = abs(float(difference_D.mean())) > 0.5 and float(rest_D.square().mean().sqrt()) < _SHIFT_RMS
        return "norms shifted" if shifted else None
    relative = math.sqrt(change / size)
    if len(old.shape) != 2 or relative < _FAR:
        return None
    rows, columns = old.shape
    if projection and columns % 2 == 0:
        first, second = new.load().chunk(2, dim=1)
        if _distance(torch.cat([second, first], dim=1), old.load()) < _NEARER * relative:
            return "halves swapped"
    if rows == columns and _distance(new.load().T, old.load()) < _NEARER * relative:
        return "transposed"
    return None


def _is_projection(layout: HeadLayout, key: str) -> bool:
    """Return whether a head key is the matrix that reads embedding and hidden state, or one of the two matrices."""
    mapped = layout.map_key(key)
    return mapped is not None and mapped.ours.split(".", 2)[2] in (
        "proj.weight",
        "token_proj.weight",
        "hidden_proj.weight",
    )


def _distance(new: Tensor, old: Tensor) -> float:
    return float((new.double() - old.double()).norm() / old.double().norm())
