"""Write an EAGLE, EAGLE-3 or Medusa head as a draft model: a directory of its own that engines load beside the trunk.

EAGLE-3 (arXiv:2503.01840) is written in the format of its authors, which vLLM, SGLang and llama.cpp read, EAGLE
(arXiv:2401.15077) in the format that vLLM and SGLang read, Medusa (arXiv:2401.10774) in the format of vLLM 0.32. The
embedding is left out, because engines use the trunk's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from mtp_train.checkpoints.artifact import Artifact
from mtp_train.checkpoints.files import CONFIG_FILE, GENERATION_CONFIG_FILE, SINGLE_FILE, TORCH_DTYPES, Checkpoint
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.native import plain_tensor
from mtp_train.checkpoints.writing import PendingTensor, held_tensor, new_directory, write_json, write_safetensors
from mtp_train.errors import CheckpointError

OUTPUT_KEY = "lm_head.weight"
BIAS_KEY = "fc.bias"
# d2t: the offset from a row of a smaller output matrix to its token. t2d: whether a token has a row.
OFFSETS_KEY = "d2t"
CHOSEN_KEY = "t2d"


def write_draft_checkpoint(source: Checkpoint, artifact: Artifact, layer_config: PretrainedConfig, out: Path) -> None:
    """Write a draft model to a new directory: its weights, the rows of the lm_head that it uses, and its config.

    ``layer_config`` is ``layer.config`` of the head's family.
    """
    stored = artifact.kind.load_parts().format
    own = artifact.output
    vocab = own.token_ids_R if own is not None else artifact.draft_vocab if stored.draft_vocab else None
    tensors = [*artifact.head.tensors]
    dtype = tensors[0].dtype
    tensors += [held_tensor(key, dtype, torch.zeros(layer_config.hidden_size)) for key in stored.zeros]
    if stored.has_output:
        tensors.append(_output_rows(source, artifact.layout, layer_config, vocab) if own is None else own.weight)
    if stored.has_output and vocab is not None:
        tokens_R = vocab.long()
        chosen_V = torch.zeros(layer_config.vocab_size, dtype=torch.bool)
        chosen_V[tokens_R] = True
        tensors.append(held_tensor(OFFSETS_KEY, "I64", tokens_R - torch.arange(len(tokens_R))))
        tensors.append(held_tensor(CHOSEN_KEY, "BOOL", chosen_V))
    config = (
        artifact.draft_config
        if stored.config is None
        else {
            "architectures": stored.written_as,
            "vocab_size": layer_config.vocab_size,
            "dtype": str(TORCH_DTYPES[dtype]).removeprefix("torch."),
            **stored.config(
                layer_config, artifact.num_modules, source.text_config, None if vocab is None else len(vocab)
            ),
        }
    )
    with new_directory(out, what="the draft model") as directory:
        write_safetensors(directory / SINGLE_FILE, tensors)
        write_json(directory / CONFIG_FILE, config)
        if stored.depth_field is not None:
            write_json(directory / GENERATION_CONFIG_FILE, {stored.depth_field: artifact.num_depths})


def _output_rows(
    source: Checkpoint, layout: HeadLayout, layer_config: PretrainedConfig, draft_vocab: Tensor | None
) -> PendingTensor:
    """Return the rows of the trunk's lm_head that the head uses, in plain floats."""
    stored = layout.lm_head_key
    # An lm_head that is not stored is tied to the embedding, or packed.
    key = stored if stored in source.tensors else layout.embed_key
    packed = [name for name in source.tensors if name.startswith(stored.removesuffix("weight")) and name != key]
    if key not in source.tensors or (key == layout.embed_key and packed):
        raise CheckpointError(
            f"{source.path}: {', '.join(sorted(packed)[:3]) or f'no {key}'}; expected {stored} in plain floats or FP8, "
            "as its rows go into the draft model. Export with the unquantised trunk."
        )
    whole = plain_tensor(source, key, OUTPUT_KEY)
    if draft_vocab is None:
        return whole
    rows_R = draft_vocab.long()
    return PendingTensor(OUTPUT_KEY, whole.dtype, (len(rows_R), whole.shape[1]), lambda: _picked(whole.parts(), rows_R))


def _picked(blocks: Iterable[Tensor], rows_R: Tensor) -> Iterator[Tensor]:
    """Yield the given rows, in ascending order, of a matrix that comes in blocks of rows."""
    first = 0
    for block in blocks:
        stop = first + len(block)
        yield block[rows_R[(rows_R >= first) & (rows_R < stop)] - first]
        first = stop
