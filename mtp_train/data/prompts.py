"""Make prompts from records: the token ids that the trunk generates a response to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtp_train.data.records import Chat, PlainText, PromptResponse, Record
from mtp_train.data.split import stable_share
from mtp_train.errors import DataError
from mtp_train.trunk.tokenizer import chat_prompt_tokens, raw_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_CONTINUATION_TOKENS = 256
"""Most tokens of a plain text that become its prompt."""


@dataclass(frozen=True)
class Prompt:
    """Hold the tokens before a response.

    Args:
        id: The record's id.
        group: The record's group.
        prompt_ids: The tokens.
    """

    id: str
    group: str
    prompt_ids: tuple[int, ...]


def build_prompts(records: Iterable[Record], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return each record's prompt: a chat without its last assistant turn, or the prompt of a pair.

    Raises:
        DataError: A record is plain text, starts with the assistant, or does not fit the tokenizer.
    """
    return [Prompt(record.id, record.group, tuple(_prompt_ids(record, tokenizer))) for record in records]


def continuation_prompts(records: Iterable[Record], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return the first half of each plain text as a prompt, at most ``MAX_CONTINUATION_TOKENS`` of it.

    Texts of fewer than two tokens are left out.

    Raises:
        DataError: A record is not plain text.
    """
    prompts = []
    for record in records:
        if not isinstance(record.content, PlainText):
            raise DataError(
                f"{record.where}: a chat or a pair; expected plain text to continue. Use the record's own prompt."
            )
        token_ids = raw_tokens(tokenizer, record.content.text)
        half = token_ids[: min(len(token_ids) // 2, MAX_CONTINUATION_TOKENS)]
        if half:
            prompts.append(Prompt(record.id, record.group, tuple(half)))
    return prompts


def choose_prompts(prompts: Sequence[Prompt], num_prompts: int, seed: int) -> list[Prompt]:
    """Return ``num_prompts`` of the prompts (all, if there are fewer), chosen at random by ``seed``.

    A prompt's rank depends on its id and the seed alone, so a larger number only adds prompts.
    """
    return sorted(prompts, key=lambda prompt: (stable_share(prompt.id, seed), prompt.id))[:num_prompts]


def choose_evenly(prompts: Sequence[Prompt], num_prompts: int, seed: int) -> list[Prompt]:
    """Return ``num_prompts`` of the prompts (all, if there are fewer), as evenly over their groups as possible.

    Every group gives one prompt before any gives a second. A larger number only adds prompts.
    """
    taken = Counter[str]()
    turns: list[tuple[int, Prompt]] = []
    for prompt in choose_prompts(prompts, len(prompts), seed):
        turns.append((taken[prompt.group], prompt))
        taken[prompt.group] += 1
    return [prompt for _, prompt in sorted(turns, key=lambda turn: turn[0])[:num_prompts]]


def _prompt_ids(record: Record, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    content = record.content
    if isinstance(content, Chat):
        messages = content.prompt_messages()
        if not messages:
            raise DataError(
                f"{record.where}: the only assistant turn comes first; expected a message before it to answer. Fix or "
                "remove the record."
            )
        prompt_ids = chat_prompt_tokens(tokenizer, messages, record.where)
    elif isinstance(content, PromptResponse):
        prompt_ids = raw_tokens(tokenizer, content.prompt)
    else:
        raise DataError(
            f"{record.where}: plain text has no prompt; expected chats or prompt and response records to answer. "
            "Switch data.regenerate off, or convert the source."
        )
    if not prompt_ids:
        raise DataError(f"{record.where}: the prompt is empty; expected at least one token. Fix or remove the record.")
    return prompt_ids
