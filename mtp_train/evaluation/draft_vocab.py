"""Suggest a reduced draft vocabulary from measured rounds: what it would save, and which accepted drafts it would lose.

A head that may draft R of V tokens reads R rows of the output matrix for each draft. A draft outside of the vocabulary
cannot be made: the round ends at the draft before it, and the trunk commits that token itself. A draft inside stays the
head's first choice. So of a measured round those accepted drafts remain that come before the first one outside. Not
counted are right drafts that a smaller vocabulary would make in place of wrong ones. Rounds that have to be added are
taken to be like the measured ones.

A vocabulary must not be counted on the text that it is judged by. It is counted on a run's training text, by which a
recipe would choose it, or else on the trunk's answers to the other groups of prompts (:data:`FOLDS` parts).

Shapes: V vocabulary, X sizes, K depths, G groups.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mtp_train.acceptance.counts import FloatArray
from mtp_train.acceptance.intervals import ratio_interval, sum_by_group
from mtp_train.data.frequency import Counts, ranks
from mtp_train.evaluation.prompt_records import Decoded, Setting
from mtp_train.evaluation.results import DraftVocab, DraftVocabSize
from mtp_train.evaluation.statistics import MeasuredArm

SIZES = (8_192, 16_384, 32_768, 65_536)
"""Sizes to consider: those of at most half of the vocabulary."""
FOLDS = 5
MIN_GROUPS, MIN_ACCEPTED = 8, 500
"""Fewest groups of prompts, and fewest accepted drafts, that an estimate is made from."""
LEAST_GAIN = 1.05
"""Smallest lower bound of the speed that is suggested: the interval does not contain the spread of measured times."""


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """What is known of a head that drafts."""

    vocab_size: int
    num_drafted: int | None
    """Number of tokens that it drafts from; None for all."""
    own_output: bool
    """Whether it has an output matrix of its own, which a draft vocabulary does not make smaller."""
    readers: tuple[str, ...]
    """Engines that draft from a reduced vocabulary with this kind of head, besides the built-in decoder."""
    output_times: Mapping[int, float]
    """Time of a draft in the output matrix, over that of a plain round, by number of rows; with V for the whole one."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> DraftHead:
        """Read what :meth:`to_json` returned."""
        times = {int(rows): one for rows, one in raw["output_times"].items()}
        return cls(**{**raw, "readers": tuple(raw["readers"]), "output_times": times})


@dataclass(frozen=True)
class CountedText:
    """The text that vocabularies are counted on."""

    name: str
    num_tokens: int
    """Number of tokens; of the shortest text, where groups have texts of their own."""
    ranks: Mapping[str, Counts]
    """Group of prompts to the ranks (V,) of the tokens in the text that is counted for it."""

    @classmethod
    def apart(cls, counts_V: Counts, name: str, groups: Collection[str], always: Collection[int]) -> CountedText:
        """Return a text that does not contain the measured answers."""
        ranks_V = ranks(counts_V, always)
        return cls(name, int(counts_V.sum()), dict.fromkeys(groups, ranks_V))

    @classmethod
    def across_groups(cls, answers: Sequence[Decoded], vocab_size: int, always: Collection[int]) -> CountedText:
        """Return for each group the answers of the groups in other parts."""
        groups = list(dict.fromkeys(one.group for one in answers))
        part_of = {group: index % FOLDS for index, group in enumerate(groups)}
        counts_FV = np.zeros((FOLDS, vocab_size), dtype=np.int64)
        for one in answers:
            np.add.at(counts_FV[part_of[one.group]], list(one.token_ids), 1)
        others_FV = counts_FV.sum(axis=0) - counts_FV
        by_part = [ranks(others_V, always) for others_V in others_FV]
        num_tokens = min((int(others_FV[part].sum()) for part in part_of.values()), default=0)
        name = "the trunk's answers to the other groups of prompts"
        return cls(name, num_tokens, {group: by_part[part] for group, part in part_of.items()})


def suggest_draft_vocab(head: DraftHead, arm: MeasuredArm, setting: Setting, text: CountedText) -> DraftVocab:
    """Return the draft vocabulary that is expected to decode fastest, if one is expected to pay, with the reason.

    Args:
        head: The head.
        arm: Its records, and those of plain decoding.
        setting: The setting to estimate at.
        text: The text that vocabularies are counted on.
    """
    reason, size = _why_not(head, arm.decoded[setting], text), None
    estimates: tuple[DraftVocabSize, ...] = ()
    if reason is None:
        estimates = _estimates(head, arm, setting, text)
        best = max(estimates, key=lambda one: one.speed)
        paying = [one for one in estimates if one.speed_ci95 is not None and one.speed_ci95[0] > LEAST_GAIN]
        if paying:
            best = max(paying, key=lambda one: one.speed)
            size = best.size
        reason = _sentences(head, text, best, pays=bool(paying))
    return DraftVocab(
        arm=arm.name,
        temperature=setting.temperature,
        depth=setting.depth,
        rule=setting.rule,
        size=size,
        override=None if size is None else f"head.draft_vocab={size}",
        reason=reason,
        counted_on=text.name,
        counted_tokens=text.num_tokens,
        sizes=estimates,
    )


def sizes_for(vocab_size: int) -> tuple[int, ...]:
    """Return the sizes to consider for a vocabulary; none for a small one."""
    return tuple(size for size in SIZES if 2 * size <= vocab_size)


def _why_not(head: DraftHead, records: Sequence[Decoded], text: CountedText) -> str | None:
    """Return why nothing can be estimated; None if it can."""
    sizes = sizes_for(head.vocab_size)
    if head.own_output:
        return (
            "None suggested: the head has an output matrix of its own, which a draft vocabulary does not make smaller."
        )
    if head.num_drafted is not None:
        return f"None suggested: the head drafts from {head.num_drafted:,} of {head.vocab_size:,} tokens already."
    if not sizes:
        return (
            f"None suggested: the vocabulary of {head.vocab_size:,} tokens is small. The smallest draft vocabulary to "
            f"consider has {SIZES[0]:,}."
        )
    if text.num_tokens < sizes[0]:
        return (
            f"Not estimated: {text.num_tokens:,} tokens ({text.name}) are too few to choose {sizes[0]:,} by. Decode "
            "more prompts, or longer answers."
        )
    accepted, num_groups = sum(sum(one.accepted) for one in records), len({one.group for one in records})
    if accepted < MIN_ACCEPTED or num_groups < MIN_GROUPS:
        return (
            f"Not estimated: {accepted:,} accepted drafts on {num_groups:,} groups of prompts are too few; expected "
            f"{MIN_ACCEPTED:,} on {MIN_GROUPS:,}. Decode more prompts."
        )
    return None


def _estimates(head: DraftHead, arm: MeasuredArm, setting: Setting, text: CountedText) -> tuple[DraftVocabSize, ...]:
    """Return an estimate for each size that the text is long enough for."""
    records, plain = arm.decoded[setting], arm.decoded[setting.plain]
    sizes = [size for size in sizes_for(head.vocab_size) if size <= text.num_tokens]
    kept_PXK = np.stack([kept_drafts(one, text.ranks[one.group], sizes, setting.depth) for one in records])
    groups = [one.group for one in records]
    rounds_G, accepted_G = (
        sum_by_group(np.array(values, dtype=np.float64), groups)
        for values in ([len(one.accepted) for one in records], [sum(one.accepted) for one in records])
    )
    kept_GXK = sum_by_group(kept_PXK, groups)
    num_rounds = float(rounds_G.sum())
    drafts_a_round = sum(sum(one.drafted) for one in records) / num_rounds
    round_seconds, plain_seconds = _round_seconds(records), _round_seconds(plain)
    found = []
    for index, size in enumerate(sizes):
        saved = drafts_a_round * plain_seconds * (head.output_times[head.vocab_size] - head.output_times[size])
        # No round is faster than a plain one, which has the same output matrix to verify with.
        round_time = max(round_seconds - saved, plain_seconds) / round_seconds
        kept_G = kept_GXK[:, index].sum(axis=-1)
        share = ratio_interval(rounds_G + kept_G, rounds_G + accepted_G, 1.0)
        found.append(
            DraftVocabSize(
                size=size,
                kept=float(kept_G.sum() / accepted_G.sum()),
                marginal=tuple((kept_GXK[:, index].sum(axis=0) / num_rounds).tolist()),
                tau=1.0 + float(kept_G.sum()) / num_rounds,
                round_time=round_time,
                speed=float((rounds_G + kept_G).sum() / (rounds_G + accepted_G).sum()) / round_time,
                speed_ci95=None if share is None else (share[0] / round_time, share[1] / round_time),
            )
        )
    return tuple(found)


def kept_drafts(one: Decoded, ranks_V: Counts, sizes: Sequence[int], depth: int) -> FloatArray:
    """Return the rounds that keep the draft at each position, for each size, (X, K).

    Accepted drafts after the end of the text are not in the record. They count as kept where those before them are.

    Args:
        one: A record.
        ranks_V: Rank of each token in the text that vocabularies are counted on.
        sizes: Sizes of vocabularies, ascending.
        depth: K.
    """
    kept_XK = np.zeros((len(sizes), depth))
    start = 1
    for accepted in one.accepted:
        worst = -1
        for position in range(accepted):
            if start + position < len(one.token_ids):
                worst = max(worst, int(ranks_V[one.token_ids[start + position]]))
            kept_XK[bisect_right(sizes, worst) :, position] += 1
        start += accepted + 1
    return kept_XK


def _round_seconds(records: Sequence[Decoded]) -> float:
    return sum(one.seconds_decode for one in records) / sum(len(one.accepted) for one in records)


def _sentences(head: DraftHead, text: CountedText, best: DraftVocabSize, *, pays: bool) -> str:
    low, high = best.speed_ci95 or (best.speed, best.speed)
    speed = f"{best.speed:.2f} [{low:.2f}, {high:.2f}] times the speed"
    basis = (
        f"{100 * best.kept:.1f} % of the accepted drafts are among the {best.size:,} most frequent tokens of "
        f"{text.name} ({text.num_tokens:,} tokens), and a round takes {best.round_time:.2f} times as long"
    )
    if not pays:
        return (
            f"None suggested: no size is shown to gain {LEAST_GAIN - 1:.0%}. {best.size:,} tokens come nearest, with "
            f"{speed}: {basis}."
        )
    used_by = (
        f"{', '.join(head.readers)} draft from these tokens too."
        if head.readers
        else "Only the built-in decoder drafts from fewer tokens with a head of this kind; engines draft from all."
    )
    return f"head.draft_vocab={best.size} is expected to decode at {speed}: {basis}. {used_by}"
