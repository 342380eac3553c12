"""An EAGLE or Medusa head as a draft model in a directory of its own, which engines load beside any copy of its trunk.

EAGLE-3 (arXiv:2503.01840) goes out as its authors keep it, which vLLM, SGLang and llama.cpp all read, or as the
speculators package does, which vLLM reads too. EAGLE (arXiv:2401.15077) goes out as vLLM and SGLang read it, Medusa
(arXiv:2401.10774) as vLLM 0.32 does. The embedding is left out: engines, and speculators, take the trunk's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from mtp_train.errors import CheckpointError
from mtp_train.families.draft_engines import LEAST_TRUNK_LAYERS, DraftKind
from mtp_train.weights.draft_config import draft_config, speculators_config
from mtp_train.weights.files import CONFIG_FILE, SINGLE_FILE, Checkpoint
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.native import plain_tensor
from mtp_train.weights.writing import PendingTensor, held_tensor, new_directory, write_json, write_safetensors

DraftForm = Literal["engines", "speculators"]
OUTPUT_KEY = "lm_head.weight"
_LAYER_PREFIX: Mapping[DraftKind, str] = {"eagle": "layers.0.", "eagle3": "midlayer."}


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """A head that stands beside its trunk, to be written."""

    kind: DraftKind
    tensors: tuple[PendingTensor, ...]
    """The head's own, under the names that ``draft_shapes`` gives."""
    layer_config: PretrainedConfig
    """Of its decoder layer: Llama's, without biases. Of the trunk for Medusa, which has no such layer."""
    num_depths: int
    """How deep to draft by default; for Medusa the number of its blocks."""
    draft_vocab: Tensor | None = None
    """int, ascending: the tokens that it may draft; None for all."""


def write_draft_checkpoint(
    source: Checkpoint,
    layout: HeadLayout,
    draft: DraftModel,
    out: Path,
    *,
    form: DraftForm = "engines",
    verifier: str | None = None,
) -> None:
    """Write a draft model to a new directory: its weights, the rows of the lm_head that it uses, and its config.

    Args:
        source: Its trunk's checkpoint; only read.
        layout: The layout of that checkpoint.
        draft: The head.
        out: The new directory.
        form: For engines, or for the speculators package, which holds EAGLE-3 alone.
        verifier: What speculators and ``vllm serve OUT`` load as the trunk; None for ``source``'s path.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The form does not hold this head, an engine would not read what the head reads, or the disk is
            full.
    """
    _check(source, draft, form)
    if draft.kind == "eagle":
        # SGLang's projection has a bias, of random numbers where a file has none; vLLM's has none, and ignores one.
        bias_D = torch.zeros(draft.layer_config.hidden_size)
        tensors = [*draft.tensors, held_tensor("fc.bias", draft.tensors[0].dtype, bias_D)]
    else:
        output = _output_rows(source, layout, draft.draft_vocab)
        tensors = [*draft.tensors, output, *_vocab_tensors(source, draft)]
    vocab_sizes = (int(source.text_config["vocab_size"]), None if draft.draft_vocab is None else len(draft.draft_vocab))
    config = draft_config(draft.kind, draft.layer_config, draft.num_depths, vocab_sizes, draft.tensors[0].dtype)
    if form == "speculators":
        tensors = [_renamed(pending) for pending in tensors]
        architectures = list(source.config.get("architectures") or [])
        config = speculators_config(config, draft.num_depths, verifier or str(source.path.resolve()), architectures)
    with new_directory(out, what="the draft model") as directory:
        write_safetensors(directory / SINGLE_FILE, tensors)
        write_json(directory / CONFIG_FILE, config)


def draft_shapes(kind: DraftKind, layer_config: PretrainedConfig, num_depths: int) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a head of this kind has of its own.

    Args:
        kind: Which.
        layer_config: As for :class:`DraftModel`, as ``num_depths``.
        num_depths: Medusa has a block for each.
    """
    hidden = layer_config.hidden_size
    if kind == "medusa":
        shapes = {"weight": (hidden, hidden), "bias": (hidden,)}
        return {f"blocks.{depth}.layers.0.{n}": shape for depth in range(num_depths) for n, shape in shapes.items()}
    inner = layer_config.intermediate_size
    queries = layer_config.num_attention_heads * layer_config.head_dim
    keys = layer_config.num_key_value_heads * layer_config.head_dim
    read = hidden if kind == "eagle" else 2 * hidden
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, read),
        "self_attn.k_proj": (keys, read),
        "self_attn.v_proj": (keys, read),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "post_attention_layernorm": (hidden,),
    }
    around: dict[str, tuple[int, ...]] = {"fc": (hidden, 2 * hidden)}
    if kind == "eagle3":
        layer |= {"input_layernorm": (hidden,), "hidden_norm": (hidden,)}
        around = {"fc": (hidden, 3 * hidden), "norm": (hidden,)}
    names = around | {_LAYER_PREFIX[kind] + name: shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in names.items()}


def _check(source: Checkpoint, draft: DraftModel, form: DraftForm) -> None:
    found = {pending.key: pending.shape for pending in draft.tensors}
    expected = draft_shapes(draft.kind, draft.layer_config, draft.num_depths)
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            raise CheckpointError(
                f"{key}: {_text(found.get(key))} in the head; expected {_text(expected.get(key))}, as its config has "
                "it. Use a head of this trunk."
            )
    if form == "speculators" and draft.kind != "eagle3":
        raise CheckpointError(f"speculators holds no head of kind {draft.kind}; expected eagle3. Write it for engines.")
    if draft.kind == "eagle" and draft.draft_vocab is not None:
        raise CheckpointError(
            f"the head drafts {len(draft.draft_vocab)} tokens; expected all, as engines read no such list of an EAGLE "
            "head. Train it with head.draft_vocab=null, or one of kind eagle3."
        )
    num_layers = int(source.text_config["num_hidden_layers"])
    if draft.kind == "eagle3" and num_layers < LEAST_TRUNK_LAYERS:
        raise CheckpointError(
            f"{source.path}: {num_layers} layers; expected {LEAST_TRUNK_LAYERS} or more, or two of the three states "
            "that engines give an EAGLE-3 head are one. Attach a head of another kind."
        )


def _text(shape: tuple[int, ...] | None) -> str:
    return "no such tensor" if shape is None else str(list(shape))


def _output_rows(source: Checkpoint, layout: HeadLayout, draft_vocab: Tensor | None) -> PendingTensor:
    """Return the rows of the trunk's lm_head that the head uses, in plain floats."""
    stored = layout.family.lm_head_key
    # A wrapper may put its own name before the lm_head; one that is not stored is tied to the embedding, or packed.
    key = next((key for key in (stored, f"language_model.{stored}") if key in source.tensors), layout.embed_key)
    packed = [name for name in source.tensors if name.startswith(stored.removesuffix("weight")) and name != key]
    if key not in source.tensors or (key == layout.embed_key and packed):
        raise CheckpointError(
            f"{source.path}: {', '.join(sorted(packed)[:3]) or f'no {key}'}; expected {stored} in plain floats or FP8, "
            "as its rows go into the draft model. Export with the trunk that is not quantised."
        )
    whole = plain_tensor(source, key, OUTPUT_KEY)
    vocab_size = int(source.text_config["vocab_size"])
    if whole.shape[0] != vocab_size:
        raise CheckpointError(
            f"{source.path}: {key} has {whole.shape[0]} rows; expected vocab_size, {vocab_size}. Restore config.json."
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


def _vocab_tensors(source: Checkpoint, draft: DraftModel) -> list[PendingTensor]:
    """Return what leads from the rows of a smaller lm_head to tokens: EAGLE-3 keeps offsets, Medusa the tokens."""
    if draft.draft_vocab is None:
        return []
    tokens_R = draft.draft_vocab.long()
    if draft.kind == "medusa":
        return [held_tensor("token_map", "I64", tokens_R)]
    chosen_V = torch.zeros(int(source.text_config["vocab_size"]), dtype=torch.bool)
    chosen_V[tokens_R] = True
    return [held_tensor("d2t", "I64", tokens_R - torch.arange(len(tokens_R))), held_tensor("t2d", "BOOL", chosen_V)]


def _renamed(pending: PendingTensor) -> PendingTensor:
    name = pending.key.replace(_LAYER_PREFIX["eagle3"], "layers.0.")
    return PendingTensor(name, pending.dtype, pending.shape, pending.load, pending.blocks, pending.origin)
