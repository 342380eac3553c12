"""Decode tokens to text incrementally, and end the text at a stop string.

A token's text depends on its neighbours: a character may span several tokens, and a word may start with a space only
after another word. Each new token is therefore decoded together with a few tokens before it. Its text is the difference
to the text without it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from mtp_train.errors import MtpError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Character that a tokenizer decodes incomplete or invalid bytes to."""

_CONTEXT_TOKENS = 8
"""Number of earlier tokens to decode a new token with: a character has at most four bytes."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TextStream:
    """The text of one request, released as soon as later tokens cannot change it.

    The return values of :meth:`push` and :meth:`finish`, joined, are the text that the new tokens add when the prompt
    and all tokens are decoded at once, without special tokens. With an empty prompt that equals
    ``tokenizer.decode(tokens, skip_special_tokens=True)``. The work per token does not grow with the text. Only a run
    of byte-fallback tokens (``<0xE2>``) is decoded and held back as a whole, as one invalid byte turns all characters
    of the run into replacement characters.

    The text ends before the first stop string that is complete. If two stop strings become complete with the same
    character, the longer one counts. The end therefore does not depend on how the text is split into tokens.

    Args:
        prompt_ids: Token ids of the prompt. Its text is only context: a stop string that begins in it is ignored.

    Raises:
        MtpError: ``stop`` is a single string, or contains an empty string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        _require_stop_strings(stop)
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window = self._context(prompt_ids)
        self._window_text = self._decode(self._window)
        self._seen = self._window_text
        """The part of the window's text that is certain: already released, or part of the prompt."""
        self._waiting = ""
        """Certain text that may be the beginning of a stop string."""
        self._released: list[str] = []
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text; later tokens are ignored."""
        return self._stopped

    @property
    def text(self) -> str:
        return "".join(self._released)

    def push(self, token: int) -> str:
        """Add a token; return the text that became certain, which may be empty or longer than the token's own."""
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
        # A stop string ends the text at once, even in text that is not certain yet, as no later tokens follow.
        released = self._release(fresh, held=_added(self._seen, text).rstrip(REPLACEMENT))
        self._shorten_window()
        return released

    def finish(self) -> str:
        """End the text; return the text held back so far, with incomplete characters as the tokenizer decodes them."""
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
        """Return whether a token is a single byte of a tokenizer with byte fallback."""
        # Models often have more token ids than their tokenizer, which then returns None.
        return _BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens(token) or "") is not None

    def _add_silent(self, token: int) -> None:
        """Add a token without text of its own to the window, if the text of later tokens may depend on it."""
        settled = self._seen == self._window_text and not self._window_text.endswith(REPLACEMENT)
        if not settled or not self._window_text:
            self._window.append(token)

    def _release(self, fresh: str, held: str = "") -> str:
        """Release certain text up to a stop string or a possible beginning of one.

        ``held`` is the uncertain text after ``fresh``.
        """
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
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _shorten_window(self) -> None:
        """Drop tokens that no later text depends on. This takes another decoding, so it is done only now and then."""
        if len(self._window) <= 2 * _CONTEXT_TOKENS:
            return
        held = self._window_text[len(self._seen) :]
        window = self._window[-_CONTEXT_TOKENS:]
        text = self._decode(window)
        if len(text) > len(held) and text.endswith(held):
            self._window, self._window_text, self._seen = window, text, text.removesuffix(held)


def marked_pieces(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    from_drafts: Sequence[bool],
    stop: Sequence[str] = (),
) -> tuple[tuple[str, bool], ...]:
    """Return a text in pieces of accepted drafts (True) and of the trunk's own tokens (False).

    A character of several tokens belongs to the piece of its last token.
    """
    stream = TextStream(tokenizer, prompt_ids, stop)
    pieces: list[tuple[str, bool]] = []
    shown = [
        *((stream.push(token), flag) for token, flag in zip(token_ids, from_drafts, strict=True)),
        (stream.finish(), False),
    ]
    for text, flag in shown:
        if text and pieces and pieces[-1][1] == flag:
            pieces[-1] = (pieces[-1][0] + text, flag)
        elif text:
            pieces.append((text, flag))
    return tuple(pieces)


def _added(before: str, after: str) -> str:
    """Return the rest of ``after`` behind its common prefix with ``before``."""
    differs = (index for index, (old, new) in enumerate(zip(before, after, strict=False)) if old != new)
    return after[next(differs, len(before)) :]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _require_stop_strings(stop: Sequence[str]) -> None:
    if isinstance(stop, str):
        raise MtpError(f"stop: the string {stop!r}; expected a list of strings. Write [{stop!r}].")
    if "" in stop:
        raise MtpError(f"stop: an empty string at place {list(stop).index('')}; it would end every text. Leave it out.")
