"""A tokenizer of two-letter words, made rather than trained: every word is one token, whatever stands around it.

Engines that take text only must read a text as the tokens that it was made of. All of them split text before a space,
so that a word with the space before it always becomes the same token.
"""

from __future__ import annotations

from itertools import product
from string import ascii_lowercase

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPACE = "Ġ"
"""How a byte-level vocabulary writes a space."""
WORDS = tuple(f"{SPACE}{first}{second}" for first, second in product(ascii_lowercase, repeat=2))
"""The tokens with the lowest ids; texts are made of nothing else."""
END_OF_TEXT = "<|endoftext|>"
# The others are asked for by name by llama.cpp's converter.
SPECIALS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>", "[gMASK]", "<|user|>", "<|observation|>")
VOCAB_SIZE = 1024
"""Rows of the embedding: some more than there are tokens."""


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer; it adds no token of its own to a text."""
    halves = [f"{SPACE}{first}" for first in ascii_lowercase]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*WORDS, *halves, *alphabet])}
    merges = [(SPACE, half[1:]) for half in halves] + [(word[:2], word[2:]) for word in WORDS]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
