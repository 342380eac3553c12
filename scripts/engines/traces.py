"""Traces of greedy decoding, round by round: the common format in which engines and our decoder are compared.

A round drafts some tokens, and commits the accepted ones plus one more. The first round of a text is its prefill: no
drafts, one token. Tokens committed past the end of a text are not part of a trace. So the last round may have fewer
accepted drafts than in the engine's own counters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple


class Round(NamedTuple):
    """Drafts and committed tokens of a round."""

    drafts: tuple[int, ...]
    committed: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        """Number of leading drafts that were committed."""
        pairs = zip(self.drafts, self.committed, strict=False)
        return next((place for place, (draft, token) in enumerate(pairs) if draft != token), min(map(len, self)))


class Text(NamedTuple):
    """A prompt and the rounds that continue it."""

    prompt_ids: tuple[int, ...]
    rounds: tuple[Round, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All new tokens."""
        return tuple(token for one in self.rounds for token in one.committed)

    @property
    def starts(self) -> tuple[int, ...]:
        """Number of new tokens committed before each round."""
        starts = [0]
        for one in self.rounds:
            starts.append(starts[-1] + len(one.committed))
        return tuple(starts[:-1])


def make_text(prompt_ids: Sequence[int], rounds: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Text:
    """Return a text from lists: the prompt, and (drafts, committed tokens) of every round."""
    return Text(tuple(prompt_ids), tuple(Round(tuple(drafts), tuple(committed)) for drafts, committed in rounds))


def read_texts(document: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> list[Text]:
    """Return the texts of an engine program's document, in the order of the prompts.

    Raises:
        ValueError: The document has another number of texts.
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
    """Return a text with the tokens of its first round, except the last one, moved to the prompt.

    For an engine that drafts before the first token of the answer is known. From then on, it behaves like an engine
    with the longer prompt. The drafts of the first round are dropped.
    """
    first = text.rounds[0].committed
    rounds = (Round((), first[-1:]), *text.rounds[1:])
    return Text((*text.prompt_ids, *first[:-1]), rounds)


def cut(text: Text, max_new_tokens: int, eos_ids: Collection[int]) -> Text:
    """Return a text cut at a number of new tokens, or after its first EOS token."""
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
