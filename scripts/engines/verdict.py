"""Compare the traces of an engine and our decoder; the verdict is ``equal``, ``explained`` or ``different``.

- ``equal``: the same tokens, the same drafts, and the same number of accepted drafts in every round.
- ``explained``: not equal, but in our fp32 computation over each side's own texts (``replay.py``), every token and
draft
  is the argmax or a near tie with it; every round accepted all drafts that match; and no text just ends earlier.
- ``different``: anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from engines.traces import Text

Verdict = Literal["equal", "explained", "different"]
RANKING: tuple[Verdict, ...] = ("equal", "explained", "different")
"""From best to worst."""


class Difference(NamedTuple):
    """The first difference between two texts."""

    what: Literal["token", "draft", "round", "end"]
    """``end``: one text has ended, the other one continues."""
    position: int
    """Number of new tokens that both had committed."""
    ours: tuple[int, ...]
    theirs: tuple[int, ...]


class Miss(NamedTuple):
    """A token or draft that is not the argmax in our fp32 computation over the same text."""

    text: int
    position: int
    depth: int
    """0 for a token of the trunk."""
    gap: float
    """Difference between the best logit and its logit."""
    steps: float
    """The same difference in steps of the tested dtype, at the magnitude of the best logit."""


def first_difference(ours: Text, theirs: Text) -> Difference | None:
    """Return the first difference between two texts of one prompt; None if they are equal.

    A round that reaches the token limit may have fewer drafts on one side, since an engine may skip drafts that it
    could not return.
    """
    limit = max(len(ours.token_ids), len(theirs.token_ids))
    for start, our_round, their_round in zip(ours.starts, ours.rounds, theirs.rounds, strict=False):
        room = limit - start
        drafted = room if room <= max(len(our_round.drafts), len(their_round.drafts)) else None
        if _cut(our_round.drafts, their_round.drafts, drafted) != _cut(their_round.drafts, our_round.drafts, drafted):
            return Difference("draft", start, our_round.drafts, their_round.drafts)
        if our_round.committed != their_round.committed:
            together = zip(our_round.committed, their_round.committed, strict=False)
            same = all(our_token == their_token for our_token, their_token in together)
            return Difference("round" if same else "token", start, our_round.committed, their_round.committed)
    if ours.token_ids != theirs.token_ids:
        shorter = min(len(ours.token_ids), len(theirs.token_ids))
        return Difference("end", shorter, ours.token_ids[shorter:], theirs.token_ids[shorter:])
    return None


def _cut(drafts: tuple[int, ...], others: tuple[int, ...], room: int | None) -> tuple[int, ...]:
    """Return the drafts to compare: all drafts, or in a round at the token limit as many as both sides have."""
    return drafts if room is None else drafts[: len(others)]


def wrong_rounds(texts: Sequence[Text]) -> list[tuple[int, int]]:
    """Return (text, start) of rounds that stopped before a wrong draft, except for rounds at the token limit."""
    return [
        (number, start)
        for number, text in enumerate(texts)
        for start, one in list(zip(text.starts, text.rounds, strict=True))[:-1]
        if len(one.committed) != one.num_accepted + 1
    ]


def judge(
    ours: Sequence[Text],
    theirs: Sequence[Text],
    our_misses: Sequence[Miss],
    their_misses: Sequence[Miss],
    *,
    most_steps: float,
) -> dict[str, Any]:
    """Compare two sides over the same prompts.

    Args:
        ours: Our texts.
        theirs: The engine's.
        our_misses: The misses in our texts.
        their_misses: The misses in the engine's texts.
        most_steps: Largest gap that counts as a near tie.

    Returns:
        The verdict with its figures, as JSON.
    """
    differences = {
        number: difference
        for number, pair in enumerate(zip(ours, theirs, strict=True))
        if (difference := first_difference(*pair)) is not None
    }
    widest = max((miss.steps for miss in [*our_misses, *their_misses]), default=0.0)
    verdict: Verdict = "equal"
    if differences:
        ends = any(one.what == "end" for one in differences.values())
        close = widest <= most_steps and not ends and not wrong_rounds([*ours, *theirs])
        verdict = "explained" if close else "different"
    return {
        "verdict": verdict,
        "texts_equal": len(ours) - len(differences),
        "texts": len(ours),
        "first_differences": [{"text": number, **one._asdict()} for number, one in differences.items()],
        "near_ties": {
            "most_steps": most_steps,
            "widest_steps": widest,
            "ours": [miss._asdict() for miss in our_misses],
            "theirs": [miss._asdict() for miss in their_misses],
        },
    }


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the worst of several verdicts."""
    return max(verdicts, key=RANKING.index)


def count_controls(entries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many negative controls a record contains, and how many of them changed the result.

    A control has changed the result where its verdict is ``different``. If none has, the texts and the head cannot tell
    a right wiring from a wrong one, and the record is no evidence (:func:`is_evidence`).

    Args:
        entries: The record's entries by depth.
    """
    verdicts = [one["verdict"] for entry in entries for one in entry.get("controls", {}).values()]
    return {"run": len(verdicts), "changed": verdicts.count(RANKING[-1])}


def is_evidence(record: Mapping[str, Any]) -> bool:
    """Return whether a record shows that an engine and our decoder agree: by verdict, and by a control that differs."""
    return record["verdict"] != RANKING[-1] and count_controls(record["depths"].values())["changed"] > 0
