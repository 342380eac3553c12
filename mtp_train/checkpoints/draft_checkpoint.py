"""Write an EAGLE, EAGLE-3 or Medusa head as a draft model: a directory of its own that engines load beside the trunk.

EAGLE-3 (arXiv:2503.01840) is written in the format of its authors, which vLLM, SGLang and llama.cpp read, or in the
format of the speculators package, which vLLM reads too. EAGLE (arXiv:2401.15077) is written in the format that vLLM and
SGLang read, Medusa (arXiv:2401.10774) in the format of vLLM 0.32. The embedding is left out, because engines and
speculators use the trunk's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from mtp_train.checkpoints.artifact import Artifact
from mtp_train.checkpoints.files import CONFIG_FILE, SINGLE_FILE, TORCH_DTYPES, Checkpoint
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.native import plain_tensor
from mtp_train.checkpoints.writing import PendingTensor, held_tensor, new_directory, write_json, write_safetensors
from mtp_train.errors import CheckpointError
from mtp_train.families import require_served_trunk
from mtp_train.families.drafts.record import parts_of
from mtp_train.head_kinds import draft_kinds, find_head_kind

# The fields that speculators stores outside of the layer's config.
_NOT_OF_THE_LAYER = ("architectures", "draft_vocab_size", "target_hidden_size", "norm_before_residual", "dtype")
DraftForm = Literal["engines", "speculators"]
OUTPUT_KEY, BIAS_KEY = "lm_head.weight", "fc.bias"
# d2t: the offset from a row of a smaller output matrix to its token. t2d: whether a token has a row.
OFFSETS_KEY, CHOSEN_KEY = "d2t", "t2d"


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

    ``layer_config`` is ``layer.config`` of the head's family. ``verifier`` is the trunk that speculators and
    ``vllm serve OUT`` load, None for ``source``'s path.
    """
    kind = find_head_kind(artifact.family.kind)
    require_readable(source, kind.name, form)
    stored = parts_of(kind).format
    own = artifact.output
    vocab = own.token_ids_R if own is not None else artifact.draft_vocab if stored.draft_vocab else None
    tensors = [*artifact.head.tensors]
    dtype = tensors[0].dtype
    tensors += [held_tensor(key, dtype, torch.zeros(layer_config.hidden_size)) for key in stored.zeros]
    if stored.has_output:
        tensors += [
            _output_rows(source, artifact.layout, layer_config, vocab) if own is None else own.weight,
            *_vocab_tensors(layer_config.vocab_size, vocab),
        ]
    config = {
        "architectures": list(stored.written_as),
        "vocab_size": layer_config.vocab_size,
        "dtype": str(TORCH_DTYPES[dtype]).removeprefix("torch."),
        **stored.config(layer_config, artifact.num_modules, source.text_config, None if vocab is None else len(vocab)),
    }
    if form == "speculators" and stored.speculators is not None:
        tensors = [replace(pending, key=_renamed(pending.key, stored.renames)) for pending in tensors]
        trunk = {
            "name_or_path": verifier or str(source.path.resolve()),
            "architectures": list(source.config.get("architectures") or []),
        }
        config = _speculators_config(kind.name, stored.speculators, config, artifact.num_depths, trunk)
    with new_directory(out, what="the draft model") as directory:
        write_safetensors(directory / SINGLE_FILE, tensors)
        write_json(directory / CONFIG_FILE, config)


def require_readable(source: Checkpoint, kind: str, form: DraftForm = "engines") -> None:
    """Check that readers of this format give a head of this kind the inputs it was trained with on this trunk."""
    if form == "speculators" and parts_of(find_head_kind(kind)).format.speculators is None:
        supported = ", ".join(one.name for one in draft_kinds() if parts_of(one).format.speculators is not None)
        raise CheckpointError(
            f"speculators does not support heads of kind {kind}; expected {supported}. Write it for engines."
        )
    require_served_trunk(kind, source.text_config, where=str(source.path))


def _renamed(key: str, renames: Mapping[str, str]) -> str:
    theirs = next((theirs for theirs, ours in renames.items() if key.startswith(ours)), "")
    return theirs + key.removeprefix(renames[theirs]) if theirs else key


def _speculators_config(
    algorithm: str, architecture: str, config: Mapping[str, Any], num_depths: int, verifier: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        **{field: config[field] for field in _NOT_OF_THE_LAYER},
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_depths}],
            "verifier": verifier,
        },
        "tie_word_embeddings": False,
        "transformer_layer_config": {field: value for field, value in config.items() if field not in _NOT_OF_THE_LAYER},
    }


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
    expected = (layer_config.vocab_size, layer_config.hidden_size)
    if whole.shape != expected:
        raise CheckpointError(
            f"{source.path}: {key} is {list(whole.shape)}; expected {list(expected)}, as in config.json and in the "
            "head. Use the trunk that the head was trained on."
        )
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


def _vocab_tensors(vocab_size: int, draft_vocab: Tensor | None) -> list[PendingTensor]:
    """Return the tensors that map rows of a smaller lm_head to tokens: offsets, and a flag for each chosen token."""
    if draft_vocab is None:
        return []
    tokens_R = draft_vocab.long()
    chosen_V = torch.zeros(vocab_size, dtype=torch.bool)
    chosen_V[tokens_R] = True
    return [
        held_tensor(OFFSETS_KEY, "I64", tokens_R - torch.arange(len(tokens_R))),
        held_tensor(CHOSEN_KEY, "BOOL", chosen_V),
    ]
