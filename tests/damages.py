"""Ways in which a checkpoint on disk can be wrong, each with the message that must say so."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from checkpoints import all_tensors, shard
from mtp_train.checkpoints.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE


class Damage(NamedTuple):
    """Something wrong with ``base`` or ``finetune``."""

    do: Callable[[Path], None]
    """Given the directory that holds both."""
    message: str
    """Pattern of the message it must cause."""


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})


def lose_a_shard(inputs: Path) -> None:
    shard(inputs / "finetune")
    (inputs / "finetune" / "model-00002-of-00003.safetensors").unlink()


def truncate_a_shard(inputs: Path) -> None:
    shard(inputs / "finetune")
    file = inputs / "finetune" / "model-00003-of-00003.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def index_a_file_that_never_was(inputs: Path) -> None:
    shard(inputs / "base")
    index = json.loads((inputs / "base" / INDEX_FILE).read_text())
    index["weight_map"]["lm_head.weight"] = "model-00004-of-00003.safetensors"
    (inputs / "base" / INDEX_FILE).write_text(json.dumps(index))


def reshape_the_head(inputs: Path) -> None:
    save(inputs / "base", load_file(inputs / "base" / SINGLE_FILE) | {"mtp.fc.weight": torch.zeros(32, 48)})


def poison(inputs: Path, name: str, key: str) -> None:
    """Put one NaN into a tensor of a single-file checkpoint."""
    tensors = load_file(inputs / name / SINGLE_FILE)
    tensors[key].view(-1)[-1] = float("nan")
    save(inputs / name, tensors)


def narrow_the_base(inputs: Path) -> None:
    tensors = all_tensors(inputs / "base")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:-1]
    shutil.copytree(inputs / "base", inputs / "narrow", ignore=shutil.ignore_patterns("model*"))
    save_file(tensors, inputs / "narrow" / SINGLE_FILE, {"format": "pt"})
    shutil.rmtree(inputs / "base")
    (inputs / "narrow").rename(inputs / "base")


def rename_the_architecture(inputs: Path) -> None:
    config = json.loads((inputs / "finetune" / CONFIG_FILE).read_text()) | {"model_type": "gpt2"}
    (inputs / "finetune" / CONFIG_FILE).write_text(json.dumps(config))


def pickle_the_weights(inputs: Path) -> None:
    (inputs / "finetune" / SINGLE_FILE).rename(inputs / "finetune" / "pytorch_model.bin")


DAMAGES = {
    "missing shard": Damage(
        lose_a_shard,
        r"finetune/model\.safetensors\.index\.json: names model-00002-of-00003\.safetensors, which is not there .*; "
        r"expected every shard beside the index\. Download the missing shards\.",
    ),
    "truncated shard": Damage(
        truncate_a_shard,
        r"finetune/model-00003-of-00003\.safetensors: truncated or damaged .*; expected a whole safetensors file\. "
        r"Download or copy it again\.",
    ),
    "index of a missing file": Damage(
        index_a_file_that_never_was,
        r"base/model\.safetensors\.index\.json: names model-00004-of-00003\.safetensors, which is not there",
    ),
    "head of another shape": Damage(
        reshape_the_head,
        r"base: head shape mismatch: mtp\.fc\.weight: found \[32, 48\], expected \[32, 64\] .*; expected a complete "
        r"head\. Point at the base with its original weights\.",
    ),
    "NaN in the trunk": Damage(
        lambda inputs: poison(inputs, "finetune", "model.norm.weight"),
        r"finetune: model\.norm\.weight holds NaN or infinite values \(1 such tensors\); expected finite weights\. "
        r"Use a checkpoint saved before training diverged\.",
    ),
    "NaN in the head": Damage(
        lambda inputs: poison(inputs, "base", "mtp.norm.weight"),
        r"mtp\.norm\.weight.* holds NaN or infinite values.*; expected finite weights\. Use a checkpoint saved before",
    ),
    "base of another trunk": Damage(
        narrow_the_base,
        r"base: trunk tensor layers\.0\.mlp\.up_proj\.weight is \[47, 32\], in .*finetune it is \[48, 32\]; "
        r"expected the same trunk shape\. Point at the base that the fine-tune came from\.",
    ),
    "unknown architecture": Damage(
        rename_the_architecture,
        r"finetune: config\.json has model_type 'gpt2', an architecture without a known head layout; expected one of "
        r".*qwen3_5_text.*\. Add a family record .* or use a supported model\.",
    ),
    "pickle": Damage(
        pickle_the_weights,
        r"finetune: weights are pickles \(pytorch_model\.bin\), which can run code when read; expected safetensors\. "
        r"Convert them once",
    ),
}
