"""Tell from a head's own tensors whether it was trained: norms at their initial value, matrices as drawn at random.

Entries that were drawn independently leave two traces in a matrix of shape (m, n) and standard deviation sigma:

- Their excess kurtosis is between -1.2 (uniform) and 0 (normal).
- The largest singular value is sigma (sqrt(m) + sqrt(n)), with the spread of Tracy and Widom's law.

Training adds directions that many rows share, and large entries. The further of both statistics is, in standard
deviations of chance, at least 14 in each of SmolLM2-135M's 211 matrices. In the demo's architecture, the furthest
matrix of a head of random start is at 110 after 10 steps at the demo's learning rate, at 53 after 100 steps at a sixth
of it, and at 3 before any.

Norms tell more: every step moves them, unless bf16 rounds it off. A head is untrained where both tell so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.native import native_head_of
from mtp_train.checkpoints.quantised import require_declared
from mtp_train.checkpoints.suggestions import inspect_command
from mtp_train.checkpoints.values import zero_head
from mtp_train.checkpoints.writing import PendingTensor
from mtp_train.errors import CheckpointError
from mtp_train.heads.diagnose import text_config_of

Initial = frozenset[str]
"""The parts of a head that are as before any training: "norms", "matrices"."""
UNTRAINED: Initial = frozenset({"norms", "matrices"})
INITIAL_NOTES: Mapping[Initial, str] = {
    frozenset({"norms"}): "the head's norms are at their initial value, its matrices are not",
    frozenset({"matrices"}): (
        "the head's matrices look drawn at random, as if it was never trained, its norms do not; --base BASE tells "
        "whether those are the base's"
    ),
}
NEVER_TRAINED = (
    "its head was never trained: its matrices look drawn at random, and its norms are at their initial value or the "
    "base's"
)
_ROWS, _LEAST = 1024, 16
"""The most rows that are read of a matrix, and the least rows and columns of one that is looked at."""
_CHANCE = 6.0
"""How far a statistic of drawn entries may be from its mean, in standard deviations: a head has dozens of matrices."""
_TRACY_WIDOM = (-1.21, 1.27)
"""Mean and standard deviation of the law of the largest eigenvalue."""
_UNIFORM_KURTOSIS = -1.2
_OF_TRUNK = ("lm_head.", "embedding.")
"""Matrices of a head's own that start as the trunk's."""


def norm_value(checkpoint: Checkpoint) -> float:
    """Return the stored weight of a head's norms before training: 0 where norms multiply by 1 + w, else 1."""
    norm = checkpoint.family.classes.make_norm(text_config_of(checkpoint))
    return next(norm.parameters()).detach().flatten()[0].item()


def initial_parts(checkpoint: Checkpoint) -> Initial:
    """Return the parts of a checkpoint's head that are as before training; none where a run wrote that it was trained.

    The head has exactly the tensors that it needs. The search ends at the first matrix that was trained. Of a matrix
    one block is read, of single experts those of the first.
    """
    layout = checkpoint.layout
    head = native_head_of(checkpoint, layout)
    if head.trained:
        return frozenset()
    norms = list[PendingTensor]()
    matrices = dict[tuple[str, int], PendingTensor]()
    for one in head.tensors:
        mapped = layout.map_key(one.key)
        if mapped is None:
            continue
        tail = mapped.ours.split(".", 2)[2]
        if tail.endswith("norm.weight"):
            norms.append(one)
        elif min((0, *one.shape)[-2:]) >= _LEAST and not tail.startswith(_OF_TRUNK):
            matrices.setdefault((mapped.ours, mapped.place), one)
    value = norm_value(checkpoint)
    same = all((one.load() == value).all() for one in norms)
    return frozenset(("norms",) * same) | frozenset(("matrices",) * _all_drawn(matrices.values()))


def _all_drawn(matrices: Iterable[PendingTensor]) -> bool:
    some = False
    for one in matrices:
        block = next(iter(one.blocks()))
        drawn = is_drawn((block[0] if block.ndim > 2 else block)[:_ROWS].float())
        if drawn is False:
            return False
        some = drawn or some
    return some


def is_drawn(block_MN: Tensor) -> bool | None:
    """Return whether the entries of a matrix look drawn independently; None for zeros, which start as zeros too."""
    size = block_MN.square().mean().sqrt()
    if not size:
        return None
    unit_MN = block_MN / size
    count_M, count_N = unit_MN.shape
    kurtosis = float(unit_MN.pow(4).mean()) - 3
    chance = _CHANCE * (24 / unit_MN.numel()) ** 0.5
    if not _UNIFORM_KURTOSIS - chance < kurtosis < chance:
        return False
    gram = unit_MN @ unit_MN.T if count_M < count_N else unit_MN.T @ unit_MN
    edge = count_M**0.5 + count_N**0.5
    spread = (count_M**-0.5 + count_N**-0.5) ** (1 / 3)
    largest = (float(torch.linalg.eigvalsh(gram)[-1]) / edge - edge) / spread
    mean, deviation = _TRACY_WIDOM
    return abs(largest - mean) < _CHANCE * deviation


def require_trained_head(checkpoint: Checkpoint) -> None:
    """Raise a CheckpointError where a checkpoint's whole head drafts nothing: all zeros, or never trained."""
    require_declared(checkpoint)
    zero = zero_head(checkpoint)
    if zero is not None or initial_parts(checkpoint) == UNTRAINED:
        raise CheckpointError(
            f"{checkpoint.path}: {NEVER_TRAINED if zero is None else f'its head drafts nothing, {zero}'}; expected a "
            f"trained head. The command that repairs it is printed by {inspect_command(str(checkpoint.path))}."
        )
