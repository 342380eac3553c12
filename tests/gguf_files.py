"""Exporting a tiny checkpoint's head as GGUF, and reading the file back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from byte_tokenizer import byte_tokenizer
from checkpoints import save_with_head
from mtp_train.cli.main import main
from tiny import tiny_head, tiny_trunk

VOCAB_SIZE = 272


def checkpoint_with_head(path: Path, family_name: str) -> Path:
    trunk = tiny_trunk(family_name, vocab_size=VOCAB_SIZE)
    save_with_head(trunk, tiny_head(trunk), path)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[gMASK]", "<|user|>", "<|observation|>"]})
    tokenizer.save_pretrained(path)
    return path


def exported(checkpoint: Path, out: Path, kind: str = "f16") -> gguf.GGUFReader:
    assert main(["export", str(checkpoint), "--out", str(out), "--gguf", kind]) == 0
    assert [file.name for file in out.iterdir()] == [f"mtp-{checkpoint.name}.gguf"]
    return gguf.GGUFReader(out / f"mtp-{checkpoint.name}.gguf")


def values(reader: gguf.GGUFReader) -> dict[str, np.ndarray[Any, Any]]:
    """Return every tensor, dequantised, in torch's order of axes."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        for tensor in reader.tensors
    }


def metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {key: field.contents() for key, field in reader.fields.items()}
