"""What a greedy decoder did with its prompts, round by round; the one form in which engines and we are compared.

A round drafts some tokens and commits the accepted ones and one more. The first round of a text is its prefill: no
drafts, one token. Tokens that a round committed past the end of the text are not part of the trace, on either side, so
that the last round may show fewer accepted drafts than an engine's own counters do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple


class Round(NamedTuple):
    """One round of one text."""

    drafts: tuple[int, ...]
    committed: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        """Leading drafts that were committed."""
        pairs = zip(self.drafts, self.committed, strict=False)
        return next((place for place, (draft, token) in enumerate(pairs) if draft != token), min(map(len, self)))


class Text(NamedTuple):
    """One prompt and what was said after it."""

    prompt_ids: tuple[int, ...]
    rounds: tuple[Round, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All new tokens."""
        return tuple(token for one in self.rounds for token in one.committed)

    @property
    def starts(self) -> tuple[int, ...]:
        """New tokens committed before each round."""
        starts = [0]
        for one in self.rounds:
            starts.append(starts[-1] + len(one.committed))
        return tuple(starts[:-1])


def make_text(prompt_ids: Sequence[int], rounds: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Text:
    """Return a text from plain lists: its prompt, and drafts and committed tokens of every round."""
    return Text(tuple(prompt_ids), tuple(Round(tuple(drafts), tuple(committed)) for drafts, committed in rounds))


def read_texts(document: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> list[Text]:
    """Return the texts of an engine program's document, in the order of the prompts.

    Raises:
        ValueError: It holds another number of texts.
    """
    texts = document["texts"]
    if len(texts) != len(prompts):
        raise ValueError(
            f"{document['engine']}: {len(texts)} texts; expected {len(prompts)}, one for each prompt. Read the log of "
            "the engine's program."
        )
    return [
        make_text(prompt_ids, [(one["drafts"], one["committed"]) for one in rounds])
        for prompt_ids, rounds in zip(prompts, texts, strict=True)
    ]


def after_first_round(text: Text) -> Text:
    """Return a text as if all that its first round committed but the last token had been in the prompt.

    For an engine that drafts before it knows any token of the answer: what follows is what another engine does whose
    prompt is the longer one. The first drafts are no part of it.
    """
    first = text.rounds[0].committed
    rounds = (Round((), first[-1:]), *text.rounds[1:])
    return Text((*text.prompt_ids, *first[:-1]), rounds)


def cut(text: Text, max_new_tokens: int, eos_ids: Collection[int]) -> Text:
    """Return a text up to a limit, or up to the first token that ends it."""
    rounds: list[Round] = []
    room = max_new_tokens
    for one in text.rounds:
        ends = [place + 1 for place, token in enumerate(one.committed) if token in eos_ids]
        kept = one.committed[: min([room, *ends])]
        rounds.append(Round(one.drafts, kept))
        room = 0 if kept and kept[-1] in eos_ids else room - len(kept)
        if room == 0:
            break
    return Text(text.prompt_ids, tuple(rounds))


def count(texts: Sequence[Text], depth: int) -> dict[str, Any]:
    """Count rounds, drafts and accepted drafts, over the rounds that drafted."""
    rounds = [one for text in texts for one in text.rounds if one.drafts]
    accepted = [one.num_accepted for one in rounds]
    return {
        "new_tokens": sum(len(text.token_ids) for text in texts),
        "rounds": len(rounds),
        "draft_tokens": sum(len(one.drafts) for one in rounds),
        "accepted_tokens": sum(accepted),
        "accepted_per_pos": [sum(number > place for number in accepted) for place in range(depth)],
    }
