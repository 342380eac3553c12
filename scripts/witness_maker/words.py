"""Build a tokenizer of two-letter words in which every word is one token, in any context. It is not trained.

Engines that take only text must tokenise a text to the tokens that it was made of. All of them split text before a
space, so a word with its leading space always becomes the same token.
"""

from __future__ import annotations

from itertools import product
from string import ascii_lowercase

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPACE = "Ġ"
"""The space in a byte-level vocabulary."""
WORDS = tuple(f"{SPACE}{first}{second}" for first, second in product(ascii_lowercase, repeat=2))
"""The tokens with the lowest ids. Texts contain no others."""
END_OF_TEXT = "<|endoftext|>"
# llama.cpp's converter looks up the other tokens by name.
SPECIALS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>", "[gMASK]", "<|user|>", "<|observation|>")
NUM_TOKENS = len(WORDS) + len(ascii_lowercase) + 256 + len(SPECIALS)
VOCAB_SIZE = 1024
"""Rows of the embedding: more than the tokenizer has tokens."""


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer. It adds no special token to a text."""
    halves = [f"{SPACE}{first}" for first in ascii_lowercase]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*WORDS, *halves, *alphabet])}
    merges = [(SPACE, half[1:]) for half in halves] + [(word[:2], word[2:]) for word in WORDS]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
