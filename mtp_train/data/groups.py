"""Group records, and hold groups out.

Whether a group is held out depends on its name and the seed alone, so records, documents and prompts of one group are
always on the same side.

:func:`join_near_duplicates` gives near-duplicate prompts one group. MinHash over character shingles finds candidate
pairs (locality-sensitive hashing by bands); pairs whose sketches agree in at least ``THRESHOLD`` of the hashes are
joined, transitively. Shingles that many texts share are left out first.

Shapes: N texts, H hashes, P pairs, B bands, S shingles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from mtp_train.data.records import Record, grouping_text, text_group
from mtp_train.errors import DataError

THRESHOLD = 0.6
"""Texts with at least this Jaccard similarity of shingles are near-duplicates: for example, one word in eight
differs."""
SHINGLE_CHARS = 5
MAX_CHARS = 8192
"""Only the first characters of a text are compared, which bounds the time per text."""
NUM_HASHES = 128
"""32 bands of 4 hashes, each of 16 bits: a pair of similarity 0.6 agrees in at least one band with probability 0.99."""
SHIFTS = 8
"""Texts with the same band value that each text is compared with. Similar texts mostly agree in several bands."""
SHARED_BY, SHARED_AT_LEAST, SAMPLE_TEXTS = 0.2, 20, 4096
"""A shingle in at least this share of a sample of texts, and in at least so many of them, is part of a shared
instruction and is left out. Otherwise all prompts with the same long instruction would be one group."""

Hashes = NDArray[np.uint32]
Sketches = NDArray[np.uint16]
Indices = NDArray[np.int64]


def near_duplicate_groups(texts: Sequence[str], progress: Progress | None = None) -> Indices:
    """Join texts with their near-duplicates, transitively. The result depends on the texts alone.

    Returns:
        For each text the lowest index of its group, (N,).
    """
    if not texts:
        return np.zeros(0, dtype=np.int64)
    sketches_NH = _sketches(texts, _shared_shingles(texts), progress)
    # The four hashes of a band, side by side, are one number.
    bands_NB = sketches_NH.view(np.uint64)
    parent_N = np.arange(len(texts))
    for band in range(bands_NB.shape[1]):
        order_N = np.argsort(bands_NB[:, band], kind="stable")
        sorted_N = bands_NB[order_N, band]
        for shift in range(1, SHIFTS + 1):
            meet_P = np.flatnonzero(sorted_N[shift:] == sorted_N[:-shift])
            if not len(meet_P):
                break
            _join(parent_N, sketches_NH, order_N[meet_P], order_N[meet_P + shift])
    return np.array([_root(parent_N, index) for index in range(len(texts))], dtype=np.int64)


def _join(parent_N: Indices, sketches_NH: Sketches, one_P: Indices, other_P: Indices) -> None:
    for start in range(0, len(one_P), 1 << 16):
        ones = one_P[start : start + (1 << 16)]
        others = other_P[start : start + (1 << 16)]
        alike = (sketches_NH[ones] == sketches_NH[others]).mean(axis=1) >= THRESHOLD
        for one, other in zip(ones[alike].tolist(), others[alike].tolist(), strict=True):
            low, high = sorted((_root(parent_N, one), _root(parent_N, other)))
            parent_N[high] = low


def _root(parent_N: Indices, index: int) -> int:
    while parent_N[index] != index:
        parent_N[index] = parent_N[parent_N[index]]
        index = int(parent_N[index])
    return index


def _sketches(texts: Sequence[str], shared: Hashes, progress: Progress | None) -> Sketches:
    """Return the MinHash sketch of each text, its values folded to 16 bits, (N, H)."""
    generator = np.random.default_rng(0)
    factors_H, offsets_H = generator.integers(0, 1 << 32, (2, NUM_HASHES), dtype=np.uint32)
    factors_H |= np.uint32(1)
    sketches_NH = np.empty((len(texts), NUM_HASHES), dtype=np.uint16)
    shown = texts if progress is None else progress.track(texts, description="looking for near-duplicate prompts")
    for index, text in enumerate(shown):
        shingles_S = _without(shingle_hashes(text), shared)
        lowest_H = (shingles_S[:, None] * factors_H + offsets_H).min(axis=0)
        # The lowest of many hashes has mostly zeros at the top: mix before taking the top 16 bits.
        sketches_NH[index] = (lowest_H * np.uint32(0x9E3779B1)) >> np.uint32(16)
    return sketches_NH


def shingle_hashes(text: str) -> Hashes:
    """Return the hash of every run of ``SHINGLE_CHARS`` characters, with marks at both ends of the text."""
    marked = f"\x02{text[:MAX_CHARS]}\x03".ljust(SHINGLE_CHARS, "\x03")
    codes = np.frombuffer(marked.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    hashes = np.zeros(len(codes) - SHINGLE_CHARS + 1, dtype=np.uint64)
    for offset in range(SHINGLE_CHARS):
        hashes = hashes * np.uint64(0x100000001B3) + codes[offset : offset + len(hashes)]
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    return (hashes >> np.uint64(32)).astype(np.uint32)


def _without(shingles: Hashes, shared: Hashes) -> Hashes:
    """Return the shingles that are not shared, or all of them if all are shared."""
    own = shingles[~np.isin(shingles, shared)]
    return own if len(own) else shingles


def _shared_shingles(texts: Sequence[str]) -> Hashes:
    """Return the shingles of instructions that many texts share, sorted."""
    sample = texts[:: -(-len(texts) // SAMPLE_TEXTS)]
    if len(sample) < SHARED_AT_LEAST:
        return np.zeros(0, dtype=np.uint32)
    found, counts = np.unique(np.concatenate([np.unique(shingle_hashes(text)) for text in sample]), return_counts=True)
    return found[counts >= max(SHARED_AT_LEAST, SHARED_BY * len(sample))]


def join_near_duplicates(records: Sequence[Record], progress: Progress | None = None) -> list[Record]:
    """Return the records with the groups of near-duplicate prompts joined.

    Groups that do not come from a record's content (a file, a value of the group field) stay as they are. The order of
    the records does not matter.
    """
    # The first record of each group.
    contents = {record.group: record.content for record in reversed(records)}
    texts = {group: text for group, content in contents.items() if text_group(text := grouping_text(content)) == group}
    # Sorted by digest, so that the order of the records does not matter.
    groups = sorted(texts)
    found = near_duplicate_groups([texts[group] for group in groups], progress)
    other = {group: groups[first] for group, first in zip(groups, found, strict=True) if group != groups[first]}
    return [replace(record, group=other[record.group]) if record.group in other else record for record in records]


def stable_share(text: str, seed: int) -> float:
    """Return a number in [0, 1) that depends on ``text`` and ``seed`` alone (unlike ``hash``, also between runs)."""
    digest = hashlib.sha256(f"{seed}:{text}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def is_held_out(group: str, holdout: float, seed: int) -> bool:
    """Return whether a group is held out.

    The result depends on the arguments alone, also when items were dropped or more data was added.
    """
    return stable_share(group, seed) < holdout


def split_by_group(records: Sequence[Record], holdout: float, seed: int) -> tuple[list[Record], list[Record]]:
    """Split records into records to train on and held-out records. Groups are held out as a whole.

    Args:
        records: Of two groups or more.
        holdout: Expected share of the groups that is held out, between 0 and 1.

    Raises:
        DataError: One of the sides is empty.
    """
    train = [one for one in records if not is_held_out(one.group, holdout, seed)]
    held_out = [one for one in records if is_held_out(one.group, holdout, seed)]
    if not train or not held_out:
        groups = {one.group for one in records}
        side = "train" if not train else "held-out"
        raise DataError(
            f"data.holdout: {holdout} leaves the {side} side empty ({len(records)} records in {len(groups)} group(s)); "
            f"expected records on both sides. Add data.holdout={holdout_of(groups, len(groups) // 2, seed)}."
        )
    return train, held_out


def holdout_of(groups: Collection[str], count: int, seed: int) -> float:
    """Return the share that holds out ``count`` of more groups."""
    shares = sorted(stable_share(group, seed) for group in groups)
    return round((shares[count - 1] + shares[count]) / 2, 6)
