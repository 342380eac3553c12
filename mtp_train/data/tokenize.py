"""Records to documents: token ids, and which of them may be targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtp_train.data.chat import chat_tokens, eos_token, raw_tokens
from mtp_train.data.records import Chat, PromptResponse, Record
from mtp_train.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_TARGET = 2
"""Index of the first token that any depth can predict: depth 1 at row 0 predicts token 2."""


@dataclass(frozen=True)
class Document:
    """Hold tokens that attend to one another and to nothing else.

    Args:
        input_ids: The tokens.
        loss_mask: True where the token may be a target.
        group: Documents of one group are held out together.
        id: The record's id; pieces of a split text add ``/0``, ``/1``, ...
    """

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    group: str
    id: str

    def has_target(self) -> bool:
        """Say whether depth 1 has at least one target."""
        return any(self.loss_mask[FIRST_TARGET:])


@dataclass(frozen=True, kw_only=True)
class TokenizeCounts:
    """Say what became of the records."""

    records: int
    documents: int
    tokens: int
    target_tokens: int
    truncated: int
    """Chats and responses cut at ``seq_len_tokens``."""
    split: int
    """Plain texts parted into several documents."""
    dropped: int
    """Records without a single target (no assistant turn, or none left after the cut)."""


def tokenize_records(
    records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, seq_len_tokens: int
) -> tuple[list[Document], TokenizeCounts]:
    """Turn records into documents of at most ``seq_len_tokens`` tokens.

    Chats: only the assistant's tokens are targets. Prompt and response: the response and the end-of-text token after
    it. Plain text: every token, and end of text. Too long chats and responses are truncated, too long texts split.

    Raises:
        DataError: A record does not fit the tokenizer, or no record has a target.
    """
    documents: list[Document] = []
    num_records = truncated = split = dropped = 0
    for record in records:
        num_records += 1
        token_ids, mask = _tokenize(record, tokenizer)
        too_long = len(token_ids) > seq_len_tokens
        if isinstance(record.content, (Chat, PromptResponse)):
            pieces = _split(token_ids[:seq_len_tokens], mask[:seq_len_tokens], record, seq_len_tokens)
            truncated += too_long
        else:
            pieces = _split(token_ids, mask, record, seq_len_tokens)
            split += too_long
        kept = [piece for piece in pieces if piece.has_target()]
        dropped += not kept
        documents += kept
    counts = TokenizeCounts(
        records=num_records,
        documents=len(documents),
        tokens=sum(len(document.input_ids) for document in documents),
        target_tokens=sum(sum(document.loss_mask[FIRST_TARGET:]) for document in documents),
        truncated=truncated,
        split=split,
        dropped=dropped,
    )
    if not documents:
        raise DataError(
            f"data: no token left after masking ({num_records} records, {truncated} truncated at {seq_len_tokens} "
            f"tokens, {dropped} dropped); expected at least one assistant, response or text token from the third token "
            "on. Raise data.seq_len_tokens, or check that the records have assistant turns."
        )
    return documents, counts


def _tokenize(record: Record, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    content = record.content
    if isinstance(content, Chat):
        return chat_tokens(tokenizer, content.messages, record.where)
    eos = eos_token(tokenizer)
    if isinstance(content, PromptResponse):
        prompt_ids = raw_tokens(tokenizer, content.prompt)
        response_ids = _closed(raw_tokens(tokenizer, content.response, start=False), eos)
        return prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids)
    token_ids = _closed(raw_tokens(tokenizer, content.text), eos)
    return token_ids, [True] * len(token_ids)


def _closed(token_ids: list[int], eos: int) -> list[int]:
    """Return the tokens ending in end of text, once: the data may write it out."""
    return token_ids if token_ids[-1:] == [eos] else [*token_ids, eos]


def _split(token_ids: list[int], mask: list[bool], record: Record, seq_len_tokens: int) -> list[Document]:
    if len(token_ids) <= seq_len_tokens:
        return [Document(tuple(token_ids), tuple(mask), record.group, record.id)]
    starts = range(0, len(token_ids), seq_len_tokens)
    return [
        Document(
            tuple(token_ids[start : start + seq_len_tokens]),
            tuple(mask[start : start + seq_len_tokens]),
            record.group,
            f"{record.id}/{piece}",
        )
        for piece, start in enumerate(starts)
    ]
