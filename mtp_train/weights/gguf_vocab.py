"""The vocabulary part of a GGUF file: loaders size the embedding by it, also where another file holds the trunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from mtp_train.errors import CheckpointError
from mtp_train.families.gguf_head import GgufHead
from mtp_train.weights.files import read_json


def add_vocabulary(writer: gguf.GGUFWriter, path: Path, tokenizer: Any, record: GgufHead, vocab_size: int) -> None:
    """Write a byte-level BPE vocabulary, with padding up to the embedding's rows.

    Args:
        writer: Where to.
        path: The checkpoint's directory, for merges, special tokens and the chat template.
        tokenizer: Its tokenizer.
        record: The pre-tokenizer's name and the special tokens that only the family knows.
        vocab_size: Rows of the embedding.

    Raises:
        CheckpointError: The tokenizer has more tokens than the embedding, or no merges.
    """
    texts = {token_id: text for text, token_id in tokenizer.get_vocab().items()}
    if max(texts) >= vocab_size:
        raise CheckpointError(
            f"{path}: its tokenizer knows token {max(texts)}; expected fewer than the embedding's {vocab_size} rows. "
            "Put the tokenizer back that the model was trained with."
        )
    special = gguf.SpecialVocab(path, load_merges=True)
    if not special.merges:
        raise CheckpointError(
            f"{path}/tokenizer.json: holds no merges; expected a byte-level BPE tokenizer, as this family has. Put it "
            "back from the base."
        )
    added = tokenizer.get_added_vocab()
    entries = [_entry(tokenizer, texts.get(number), number, added) for number in range(vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(record.pre_tokenizer)
    writer.add_token_list([text for text, _ in entries])
    writer.add_token_types([kind for _, kind in entries])
    of_family = {kind: added[text] for kind, text in record.special_tokens.items() if text in added}
    special.special_token_ids = of_family | special.special_token_ids
    for kind in ("bos", "eos") if _is_byte_level(path) else ():
        # gguf 0.19 leaves out what llama.cpp's own copy of it writes.
        special.add_special_token.setdefault(kind, False)
    special.add_to_gguf(writer, quiet=True)


def _is_byte_level(path: Path) -> bool:
    """Whether the tokenizer ends in a byte-level step, which adds no tokens at either end."""
    step = read_json(path / "tokenizer.json").get("post_processor") or {}
    return any(one.get("type") == "ByteLevel" for one in step.get("processors", [step]))


def _entry(tokenizer: Any, text: str | None, number: int, added: dict[str, int]) -> tuple[str, int]:
    """Return how llama.cpp keeps one token: its text and its kind."""
    if text is None:
        return f"[PAD{number}]", gguf.TokenType.UNUSED
    if text not in added:
        return text, gguf.TokenType.NORMAL
    token = tokenizer.added_tokens_decoder[number]
    if not token.normalized:
        # llama.cpp looks for added tokens in text that is normalised already.
        text = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    if token.special or _looks_special(text):
        return text, gguf.TokenType.CONTROL
    return text.replace("\u2581", " "), gguf.TokenType.USER_DEFINED


def _looks_special(text: str) -> bool:
    """Whether a token is a control token in all but its flag, as llama.cpp's converter judges it."""
    marks = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    marked = any(text.startswith(left) and text.endswith(right) for left, right in marks)
    return marked or text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
