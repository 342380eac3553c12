"""Decode tokens to text incrementally.

A token's text depends on its neighbours: a character may span several tokens, and a word may start with a space only
after another word. Each new token is therefore decoded behind the tokens before it. Its text is the difference to the
text without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Character that a tokenizer decodes incomplete or invalid bytes to."""
_CONTEXT_TOKENS = 8
"""Number of tokens of the prompt to decode the first new token behind."""


class TextStream:
    """The text of one request, released as soon as its characters are complete.

    The return values of :meth:`push` and :meth:`finish`, joined, are the text that the new tokens add to the prompt's,
    without special tokens. In a run of byte tokens (``<0xE2>``), an invalid byte does not change the characters before
    it, as it does where the run is decoded at once.

    Args:
        prompt_ids: Token ids of the prompt. Its text is only context.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._known = list(prompt_ids[-_CONTEXT_TOKENS:])
        """The last tokens whose text is released, or part of the prompt."""
        self._waiting: list[int] = []
        """Tokens behind them without text so far, or with an incomplete character."""
        self.text = ""

    def push(self, token: int) -> str:
        """Add a token; return the text that became certain, which may be empty or longer than the token's own."""
        self._waiting.append(token)
        added = self._added()
        if not added or added.endswith(REPLACEMENT):
            return ""
        return self._release(added)

    def finish(self) -> str:
        """End the text; return the text held back so far, with incomplete characters as the tokenizer decodes them."""
        return self._release(self._added())

    def _added(self) -> str:
        """Return the text of the waiting tokens."""
        return self._decode([*self._known, *self._waiting])[len(self._decode(self._known)) :]

    def _release(self, text: str) -> str:
        self._known = self._waiting or self._known
        self._waiting = []
        self.text += text
        return text

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def marked_pieces(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    from_drafts: Sequence[bool],
) -> tuple[tuple[str, bool], ...]:
    """Return a text in pieces of accepted drafts (True) and of the trunk's own tokens (False).

    A character of several tokens belongs to the piece of its last token.
    """
    stream = TextStream(tokenizer, prompt_ids)
    shown = [
        *((stream.push(token), flag) for token, flag in zip(token_ids, from_drafts, strict=True)),
        (stream.finish(), False),
    ]
    runs = groupby(filter(itemgetter(0), shown), key=itemgetter(1))
    return tuple(("".join(text for text, _ in run), flag) for flag, run in runs)
