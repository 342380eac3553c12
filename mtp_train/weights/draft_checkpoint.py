"""Write an EAGLE, EAGLE-3 or Medusa head as a draft model: a directory of its own that engines load beside the trunk.

EAGLE-3 (arXiv:2503.01840) is written in the format of its authors, which vLLM, SGLang and llama.cpp read, or in the
format of the speculators package, which vLLM reads too. EAGLE (arXiv:2401.15077) is written in the format that vLLM and
SGLang read, Medusa (arXiv:2401.10774) in the format of vLLM 0.32. The embedding is left out, because engines and
speculators use the trunk's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from mtp_train.errors import CheckpointError
from mtp_train.families.draft_engines import require_trunk_layers
from mtp_train.families.drafts import SPECULATORS_ARCHITECTURE, WRITTEN_ARCHITECTURES
from mtp_train.families.spec import HeadKind, RawConfig
from mtp_train.weights.artifact import Artifact
from mtp_train.weights.files import CONFIG_FILE, SINGLE_FILE, TORCH_DTYPES, Checkpoint
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.native import plain_tensor
from mtp_train.weights.writing import PendingTensor, held_tensor, new_directory, write_json, write_safetensors

_LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
)
_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# The fields that speculators stores outside of the layer's config.
_NOT_OF_THE_LAYER = ("architectures", "draft_vocab_size", "target_hidden_size", "norm_before_residual", "dtype")
DraftForm = Literal["engines", "speculators"]
OUTPUT_KEY, BIAS_KEY = "lm_head.weight", "fc.bias"
# d2t: the offset from a row of a smaller output matrix to its token. t2d: whether a token has a row.
OFFSETS_KEY, CHOSEN_KEY = "d2t", "t2d"
LAYER, SPECULATORS_LAYER = "midlayer.", "layers.0."
"""The prefix of EAGLE-3's layer in tensor keys, for engines and for speculators."""


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
        layer_config: The config of its layers (``head_layer_config`` of its family).
        out: The new directory.
        form: For engines, or for the speculators package, which supports EAGLE-3 only.
        verifier: The trunk that speculators and ``vllm serve OUT`` load; None for ``source``'s path.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The form does not support this head, the lm_head cannot be copied, or the disk is full.
        UnsupportedModelError: Engines would give the head other inputs than it was trained with.
    """
    kind = artifact.family.kind
    require_readable(source, kind, form)
    # For the other kinds no engine loads such a list: vLLM 0.32 has code for a Medusa list, and then reports the list
    # as missing.
    vocab = artifact.draft_vocab if kind == "eagle3" else None
    tensors = [*artifact.head.tensors]
    dtype = tensors[0].dtype
    if kind == "eagle":
        # SGLang's projection has a bias, with random values where the file has none. vLLM's projection has no bias, and
        # ignores a stored one.
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
    """Check that the readers of this format give a head of this kind the inputs that it was trained with on this trunk.

    Raises:
        CheckpointError: The format does not support this kind of head.
        UnsupportedModelError: The trunk has too few layers.
    """
    if form == "speculators" and kind != "eagle3":
        raise CheckpointError(
            f"speculators does not support heads of kind {kind}; expected eagle3. Write it for engines."
        )
    require_trunk_layers(kind, source.text_config, where=str(source.path))


def draft_config(
    kind: HeadKind,
    layer_config: PretrainedConfig,
    num_modules: int,
    trunk: RawConfig,
    *,
    num_drafted: int | None,
    dtype: str,
) -> dict[str, Any]:
    """Return the ``config.json`` for engines.

    It does not name the layers whose states an EAGLE-3 head reads: engines agree on the default, but count named layers
    from different ends.

    Args:
        kind: The kind of head.
        layer_config: The config of the head's layers.
        num_modules: Blocks of a Medusa head.
        trunk: The trunk's raw text config.
        num_drafted: The number of the trunk's tokens that may be drafted; None for all.
        dtype: The dtype of the head's tensors, in safetensors' spelling.
    """
    vocab_size = layer_config.vocab_size
    common = {
        "architectures": list(WRITTEN_ARCHITECTURES[kind]),
        "vocab_size": vocab_size,
        "dtype": str(TORCH_DTYPES[dtype]).removeprefix("torch."),
    }
    if kind == "medusa":
        return {
            **common,
            "model_type": "medusa",
            "hidden_size": layer_config.hidden_size,
            "num_heads": num_modules,
            "num_hidden_layers": 1,
            "medusa_fc_bias": True,
            "original_lm_head": True,
            "truncated_vocab_size": vocab_size,
        }
    layer = layer_config.to_dict()
    config = {
        **common,
        "model_type": "llama",
        **{field: layer[field] for field in _LAYER_FIELDS},
        **{field: trunk.get(field) for field in _TOKEN_FIELDS},
        **_older_rope(layer["rope_parameters"]),
        "num_hidden_layers": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if kind == "eagle3":
        config["draft_vocab_size"] = num_drafted or vocab_size
        config["target_hidden_size"] = layer["hidden_size"]
        # Always written: vLLM's default for a missing field is true.
        config["norm_before_residual"] = bool(layer.get("norm_before_residual"))
    return config


def speculators_config(
    config: Mapping[str, Any], num_depths: int, verifier: str, architectures: Sequence[str]
) -> dict[str, Any]:
    """Return the ``config.json`` of an EAGLE-3 head for the speculators package.

    Args:
        config: The config for engines.
        num_depths: The default draft depth.
        verifier: Path or hub id of the trunk.
        architectures: The trunk's architectures.
    """
    return {
        **{field: config[field] for field in _NOT_OF_THE_LAYER},
        "architectures": [SPECULATORS_ARCHITECTURE],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_depths}],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "tie_word_embeddings": False,
        "transformer_layer_config": {field: value for field, value in config.items() if field not in _NOT_OF_THE_LAYER},
    }


def _older_rope(rope_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding's settings in the format of transformers 4, which some engines read."""
    scaled = rope_parameters.get("rope_type", "default") != "default"
    scaling = {name: value for name, value in rope_parameters.items() if name != "rope_theta"} if scaled else None
    return {"rope_theta": rope_parameters["rope_theta"], "rope_scaling": scaling}


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
    return PendingTensor(
        OUTPUT_KEY,
        whole.dtype,
        (len(rows_R), whole.shape[1]),
        load=lambda: torch.cat([*_picked(whole.parts(), rows_R)]),
        blocks=lambda: _picked(whole.parts(), rows_R),
    )


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
