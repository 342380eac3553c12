"""Text from tokens as they come: what is certain at once, and an end at a stop string.

A token's text depends on its neighbours: a character may span several tokens, and a word may start with a space that is
only there after another word. So each new token is decoded behind the few before it, and what that adds is its text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtp_train.errors import MtpError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoding puts in the place of bytes that are no character, or not yet one."""

_CONTEXT_TOKENS = 8
"""Tokens that a new one is decoded behind: a character has at most four bytes."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TextStream:
    """The text of one request, released as it becomes certain.

    What :meth:`push` and :meth:`finish` return adds up to what decoding prompt and tokens at once adds to the prompt's
    own text, special tokens skipped; without a prompt that is ``tokenizer.decode(tokens, skip_special_tokens=True)``.
    The work for a token does not grow with the text. Only a run of byte-fallback tokens (``<0xE2>``) is decoded and
    held back as a whole, as one byte that does not fit turns all of its characters into replacement characters.

    The text ends before the stop string that is complete first; of two that become complete with the same character,
    the longer one counts. So the end does not depend on how the text is cut into tokens.

    Args:
        tokenizer: The trunk's tokenizer.
        prompt_ids: The prompt. Its text is context only: a stop string that begins in it does not count.
        stop: Strings that end the text.

    Raises:
        MtpError: ``stop`` is a string or holds an empty one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        _require_stop_strings(stop)
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window = self._context(prompt_ids)
        self._window_text = self._decode(self._window)
        self._seen = self._window_text
        """The part of the window's text that is certain: passed on, or the prompt's."""
        self._waiting = ""
        """Certain text that may yet become a stop string."""
        self._released: list[str] = []
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text; later tokens are ignored."""
        return self._stopped

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    def push(self, token: int) -> str:
        """Add a token; return the text that became certain: none, the token's own, or more."""
        if self._stopped:
            return ""
        text = self._decode([*self._window, token])
        if text == self._window_text:
            self._add_silent(token)
            return ""
        self._window.append(token)
        self._window_text = text
        fresh = ""
        if not self._is_byte(token):
            certain = text.removesuffix(REPLACEMENT)
            fresh, self._seen = _added(self._seen, certain), certain
        # A stop string ends the text at once, also in what later tokens could still change: none come.
        released = self._release(fresh, held=_added(self._seen, text).rstrip(REPLACEMENT))
        self._shorten_window()
        return released

    def finish(self) -> str:
        """Return what was held back, incomplete characters as they decode: no more tokens come."""
        if self._stopped:
            return ""
        rest, self._seen = _added(self._seen, self._window_text), self._window_text
        released = self._release(rest)
        waiting, self._waiting = self._waiting, ""
        self._released.append(waiting)
        return released + waiting

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the end of the prompt that the text of the first new tokens depends on."""
        for num_tokens in range(_CONTEXT_TOKENS, len(prompt_ids), _CONTEXT_TOKENS):
            context = list(prompt_ids[-num_tokens:])
            if self._decode(context) and not self._is_byte(context[0]):
                return context
        return list(prompt_ids)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _is_byte(self, token: int) -> bool:
        """Say whether a token stands for one byte in a tokenizer that falls back to bytes."""
        # Models often have more ids than their tokenizer, which has no name for these.
        return _BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens(token) or "") is not None

    def _add_silent(self, token: int) -> None:
        """Take in a token that adds nothing, or not yet: keep it where what follows may depend on it."""
        settled = self._seen == self._window_text and not self._window_text.endswith(REPLACEMENT)
        if not settled or not self._window_text:
            self._window.append(token)

    def _release(self, fresh: str, held: str = "") -> str:
        """Release certain text up to a stop string, or to what may become one; ``held`` is what follows it so far."""
        text = self._waiting + fresh
        start = self._stop_start(text + held)
        self._stopped = start is not None
        if start is None:
            start = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._waiting = "" if self._stopped else text[start:]
        released = (text + held)[:start]
        self._released.append(released)
        return released

    def _stop_start(self, text: str) -> int | None:
        """Return where the stop string begins that is complete first, None where there is none."""
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _shorten_window(self) -> None:
        """Drop tokens that nothing depends on any more; now and then, as it takes one more decoding."""
        if len(self._window) <= 2 * _CONTEXT_TOKENS:
            return
        held = self._window_text[len(self._seen) :]
        window = self._window[-_CONTEXT_TOKENS:]
        text = self._decode(window)
        if len(text) > len(held) and text.endswith(held):
            self._window, self._window_text, self._seen = window, text, text.removesuffix(held)


def _added(before: str, after: str) -> str:
    """Return what follows the part that two texts share from their start."""
    differs = (index for index, (old, new) in enumerate(zip(before, after, strict=False)) if old != new)
    return after[next(differs, len(before)) :]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that a stop string begins with and goes on from."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _require_stop_strings(stop: Sequence[str]) -> None:
    if isinstance(stop, str):
        raise MtpError(f"stop: the string {stop!r}; expected a list of strings. Write [{stop!r}].")
    if "" in stop:
        raise MtpError(f"stop: an empty string at place {list(stop).index('')}; it would end every text. Leave it out.")
