"""Bring a prompt to a length with other text of its suite, its own content unchanged.

Acceptance at two lengths can then be compared prompt by prompt: the question is the same, token for token, and a longer
context holds all of a shorter one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle
from typing import TYPE_CHECKING

from mtp_train.data.chat import raw_tokens
from mtp_train.data.records import Chat, Content, PromptResponse
from mtp_train.data.split import stable_share
from mtp_train.errors import DataError
from mtp_train.study.suite_files import SuiteRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEPARATOR = "\n\n"


class Filler:
    """Hold the texts of a suite to put before its prompts, each tokenised once and only when it is needed.

    Args:
        records: All of the suite's, whichever of them are asked about: what is put before a prompt does not depend on
            which others were chosen.
        tokenizer: The trunk's.
        seed: Another seed gives another order.
    """

    def __init__(self, records: Sequence[SuiteRecord], tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        first_with = {content_text(one.record.content): one for one in reversed(records)}
        self._records = sorted(
            (one for text, one in first_with.items() if text.strip()),
            key=lambda one: (stable_share(one.record.id, seed), one.record.id),
        )
        self._tokenizer = tokenizer
        self._seed = seed
        self._tokens: dict[str, list[int]] = {}

    def before(self, asked: SuiteRecord, num_tokens: int) -> tuple[int, ...]:
        """Return exactly ``num_tokens`` tokens of other records' prompts and texts to put before a record's own.

        Records of its group are left out. Those of its task stand nearest, and a text comes a second time only when all
        others were used. Where to start in the order depends on the record's id and the seed. The text is filled up
        from its end: the tokens of a smaller number are the last ones of a larger number, and only the first text can
        be cut.

        Raises:
            DataError: The suite has no other text.
        """
        pieces: list[list[int]] = []
        missing = num_tokens
        for other in cycle(self._others(asked)):
            if missing <= 0:
                break
            pieces.append(self._piece(other))
            missing -= len(pieces[-1])
        if missing > 0:
            raise DataError(
                f"{asked.record.where}: the suite has no other text to put before it; expected at least one record of "
                "another group. Add records, or leave contexts out."
            )
        tokens = tuple(chain.from_iterable(reversed(pieces)))
        return tokens[len(tokens) - num_tokens :]

    def _others(self, asked: SuiteRecord) -> Iterator[SuiteRecord]:
        start = int(stable_share(asked.record.id, self._seed) * len(self._records))
        rotated = self._records[start:] + self._records[:start]
        own_text = content_text(asked.record.content)
        for other in sorted(rotated, key=lambda one: one.task != asked.task):
            if other.record.group != asked.record.group and content_text(other.record.content) != own_text:
                yield other

    def _piece(self, one: SuiteRecord) -> list[int]:
        if one.record.id not in self._tokens:
            text = content_text(one.record.content) + SEPARATOR
            self._tokens[one.record.id] = raw_tokens(self._tokenizer, text, start=False)
        return self._tokens[one.record.id]


def content_text(content: Content) -> str:
    """Return what a record says before it is to be answered, as plain text."""
    if isinstance(content, Chat):
        return SEPARATOR.join(message["content"] for message in content.prompt_messages())
    return content.prompt if isinstance(content, PromptResponse) else content.text
