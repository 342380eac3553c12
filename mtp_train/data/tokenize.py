"""Tokenise records into documents: token ids, and a mask of the tokens that may be targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mtp_train.data.chat import chat_documents, eos_token
from mtp_train.data.records import Chat, PromptResponse, Record
from mtp_train.errors import DataError
from mtp_train.trunk.tokenizer import raw_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Tokens = tuple[list[int], list[bool]]
"""Token ids, and a mask of the tokens that may be targets."""

FIRST_TARGET = 2
"""Index of the first token that any depth can predict: depth 1 at row 0 predicts token 2."""


@dataclass(frozen=True, eq=False, init=False, slots=True)
class Document:
    """Tokens that attend only to one another; 5 bytes per token.

    Args:
        input_ids: The tokens, kept as int32.
        loss_mask: True where the token may be a target.
        group: Documents of one group are held out together.
        id: The record's id. The documents of a split text or of a chat with several documents append ``/0``, ``/1``,
            ...
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    group: str
    id: str

    def __init__(self, input_ids: Sequence[int], loss_mask: Sequence[bool], group: str, id: str) -> None:
        object.__setattr__(self, "input_ids", np.array(input_ids, dtype=np.int32))
        object.__setattr__(self, "loss_mask", np.array(loss_mask, dtype=np.bool_))
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "id", id)

    def has_target(self) -> bool:
        """Return whether depth 1 has at least one target."""
        return bool(self.loss_mask[FIRST_TARGET:].any())


@dataclass(frozen=True, kw_only=True)
class TokenizeCounts:
    """Records, counted by what tokenisation did with them."""

    records: int
    documents: int
    tokens: int
    target_tokens: int
    truncated: int
    """Chats and responses cut at ``seq_len_tokens``."""
    split: int
    """Plain texts split into several documents."""
    parted: int
    """Chats that gave several documents, because the template drops the thinking of earlier turns."""
    dropped: int
    """Records without a single target (no assistant turn, or none left after the cut)."""


def tokenize_records(
    records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, seq_len_tokens: int
) -> tuple[list[Document], TokenizeCounts]:
    """Turn records into documents of at most ``seq_len_tokens`` tokens.

    - Chat: the assistant's tokens are targets. A chat that is too long is truncated.
    - Prompt and response: the response and the end-of-text token after it are targets. A pair that is too long is
      truncated.
    - Plain text: every token and the end-of-text token are targets. A text that is too long is split.

    Raises:
        DataError: A record does not fit the tokenizer, or no record has a target.
    """
    documents: list[Document] = []
    num_records = truncated = split = parted = dropped = 0
    for record in records:
        num_records += 1
        texts = _tokenize(record, tokenizer)
        too_long = sum(len(token_ids) > seq_len_tokens for token_ids, _ in texts)
        if isinstance(record.content, (Chat, PromptResponse)):
            truncated += too_long
            parted += len(texts) > 1
            pieces = [(token_ids[:seq_len_tokens], mask[:seq_len_tokens]) for token_ids, mask in texts]
        else:
            split += too_long
            pieces = [piece for token_ids, mask in texts for piece in _split(token_ids, mask, seq_len_tokens)]
        kept = [document for document in _documents(pieces, record) if document.has_target()]
        dropped += not kept
        documents += kept
    counts = TokenizeCounts(
        records=num_records,
        documents=len(documents),
        tokens=sum(len(document.input_ids) for document in documents),
        target_tokens=sum(int(document.loss_mask[FIRST_TARGET:].sum()) for document in documents),
        truncated=truncated,
        split=split,
        parted=parted,
        dropped=dropped,
    )
    if not documents:
        raise DataError(
            f"data: no token left after masking ({num_records} records, {truncated} truncated at {seq_len_tokens} "
            f"tokens, {dropped} dropped); expected at least one assistant, response or text token from the third token "
            "on. Raise data.seq_len_tokens, or check that the records have assistant turns."
        )
    return documents, counts


def _tokenize(record: Record, tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    content = record.content
    if isinstance(content, Chat):
        return chat_documents(tokenizer, content.messages, record.where)
    eos = eos_token(tokenizer)
    if isinstance(content, PromptResponse):
        prompt_ids = raw_tokens(tokenizer, content.prompt)
        response_ids = _closed(raw_tokens(tokenizer, content.response, start=False), eos)
        return [(prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids))]
    token_ids = _closed(raw_tokens(tokenizer, content.text), eos)
    return [(token_ids, [True] * len(token_ids))]


def _closed(token_ids: list[int], eos: int) -> list[int]:
    """Return the tokens with one end-of-text token at the end; the data may contain it already."""
    return token_ids if token_ids[-1:] == [eos] else [*token_ids, eos]


def _split(token_ids: list[int], mask: list[bool], seq_len_tokens: int) -> list[Tokens]:
    starts = range(0, len(token_ids), seq_len_tokens)
    return [(token_ids[start : start + seq_len_tokens], mask[start : start + seq_len_tokens]) for start in starts]


def _documents(pieces: list[Tokens], record: Record) -> list[Document]:
    """Return one document per piece, numbered if there are several."""
    if len(pieces) == 1:
        return [Document(*pieces[0], record.group, record.id)]
    return [Document(*piece, record.group, f"{record.id}/{number}") for number, piece in enumerate(pieces)]
