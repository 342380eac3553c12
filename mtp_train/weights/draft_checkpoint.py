"""An EAGLE or Medusa head as a draft model in a directory of its own, which engines load beside any copy of its trunk.

EAGLE-3 (arXiv:2503.01840) goes out as its authors keep it, which vLLM, SGLang and llama.cpp all read, or as the
speculators package does, which vLLM reads too. EAGLE (arXiv:2401.15077) goes out as vLLM and SGLang read it, Medusa
(arXiv:2401.10774) as vLLM 0.32 does. The embedding is left out: engines, and speculators, take the trunk's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from mtp_train.errors import CheckpointError
from mtp_train.families import HeadKind
from mtp_train.families.draft_engines import require_trunk_layers
from mtp_train.weights.artifact import Artifact
from mtp_train.weights.draft_config import draft_config, speculators_config
from mtp_train.weights.files import CONFIG_FILE, SINGLE_FILE, Checkpoint
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.native import plain_tensor
from mtp_train.weights.writing import PendingTensor, held_tensor, new_directory, write_json, write_safetensors

DraftForm = Literal["engines", "speculators"]
OUTPUT_KEY, BIAS_KEY = "lm_head.weight", "fc.bias"
# Where the rows of a smaller output matrix are found in the vocabulary, and which tokens have one.
OFFSETS_KEY, CHOSEN_KEY = "d2t", "t2d"
LAYER, SPECULATORS_LAYER = "midlayer.", "layers.0."
"""How the names of EAGLE-3's layer begin: for engines, and for speculators."""


def write_draft_checkpoint(
    source: Checkpoint,
    artifact: Artifact,
    layer_config: PretrainedConfig,
    out: Path,
    *,
    form: DraftForm = "engines",
    verifier: str | None = None,
) -> None:
    """Write a draft model to a new directory: its weights, the rows of the lm_head that it uses, and its config.

    Args:
        source: The trunk's checkpoint; only read.
        artifact: The head, of another kind than ``mtp``.
        layer_config: Of its layers (``head_layer_config`` of its family).
        out: The new directory.
        form: For engines, or for the speculators package, which holds EAGLE-3 alone.
        verifier: What speculators and ``vllm serve OUT`` load as the trunk; None for ``source``'s path.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The form does not hold this head, the trunk's lm_head cannot be copied, or the disk is full.
        UnsupportedModelError: Engines would not give it what it reads.
    """
    kind = artifact.family.kind
    require_readable(source, kind, form)
    # No engine loads such a list of the others: vLLM 0.32 has one of Medusa, and then misses it among what it loaded.
    vocab = artifact.draft_vocab if kind == "eagle3" else None
    tensors = [*artifact.head.tensors]
    dtype = tensors[0].dtype
    if kind == "eagle":
        # SGLang's projection has a bias, of random numbers where a file has none; vLLM's has none, and ignores one.
        tensors.append(held_tensor(BIAS_KEY, dtype, torch.zeros(layer_config.hidden_size)))
    else:
        tensors += [
            _output_rows(source, artifact.layout, layer_config, vocab),
            *_vocab_tensors(layer_config.vocab_size, vocab),
        ]
    config = draft_config(
        kind,
        layer_config,
        artifact.num_modules,
        source.text_config,
        num_drafted=None if vocab is None else len(vocab),
        dtype=dtype,
    )
    if form == "speculators":
        tensors = [
            replace(pending, key=SPECULATORS_LAYER + pending.key.removeprefix(LAYER))
            if pending.key.startswith(LAYER)
            else pending
            for pending in tensors
        ]
        architectures = list(source.config.get("architectures") or [])
        config = speculators_config(config, artifact.num_depths, verifier or str(source.path.resolve()), architectures)
    with new_directory(out, what="the draft model") as directory:
        write_safetensors(directory / SINGLE_FILE, tensors)
        write_json(directory / CONFIG_FILE, config)


def require_readable(source: Checkpoint, kind: HeadKind, form: DraftForm = "engines") -> None:
    """Check that whoever reads a draft model in this form gives a head of this kind what it reads of this trunk.

    Raises:
        CheckpointError: The form holds no such head.
        UnsupportedModelError: The trunk has too few layers.
    """
    if form == "speculators" and kind != "eagle3":
        raise CheckpointError(f"speculators holds no head of kind {kind}; expected eagle3. Write it for engines.")
    require_trunk_layers(kind, source.text_config, where=str(source.path))


def _output_rows(
    source: Checkpoint, layout: HeadLayout, layer_config: PretrainedConfig, draft_vocab: Tensor | None
) -> PendingTensor:
    """Return the rows of the trunk's lm_head that the head uses, in plain floats."""
    stored = layout.lm_head_key
    # One that is not stored is tied to the embedding, or packed.
    key = stored if stored in source.tensors else layout.embed_key
    packed = [name for name in source.tensors if name.startswith(stored.removesuffix("weight")) and name != key]
    if key not in source.tensors or (key == layout.embed_key and packed):
        raise CheckpointError(
            f"{source.path}: {', '.join(sorted(packed)[:3]) or f'no {key}'}; expected {stored} in plain floats or FP8, "
            "as its rows go into the draft model. Export with the trunk that is not quantised."
        )
    whole = plain_tensor(source, key, OUTPUT_KEY)
    expected = (layer_config.vocab_size, layer_config.hidden_size)
    if whole.shape != expected:
        raise CheckpointError(
            f"{source.path}: {key} is {list(whole.shape)}; expected {list(expected)}, as config.json and the head have "
            "it. Use the trunk that the head was trained on."
        )
    if draft_vocab is None:
        return whole
    rows_R = draft_vocab.long()
    return PendingTensor(
        OUTPUT_KEY,
        whole.dtype,
        (len(rows_R), whole.shape[1]),
        load=lambda: torch.cat([*_picked(whole.parts(), rows_R)]),
        blocks=lambda: _picked(whole.parts(), rows_R),
    )


def _picked(blocks: Iterable[Tensor], rows_R: Tensor) -> Iterator[Tensor]:
    """Yield some rows, ascending, of a matrix that comes in blocks of rows."""
    first = 0
    for block in blocks:
        stop = first + len(block)
        yield block[rows_R[(rows_R >= first) & (rows_R < stop)] - first]
        first = stop


def _vocab_tensors(vocab_size: int, draft_vocab: Tensor | None) -> list[PendingTensor]:
    """Return what leads from the rows of a smaller lm_head to tokens: offsets, and which tokens have a row."""
    if draft_vocab is None:
        return []
    tokens_R = draft_vocab.long()
    chosen_V = torch.zeros(vocab_size, dtype=torch.bool)
    chosen_V[tokens_R] = True
    return [
        held_tensor(OFFSETS_KEY, "I64", tokens_R - torch.arange(len(tokens_R))),
        held_tensor(CHOSEN_KEY, "BOOL", chosen_V),
    ]
