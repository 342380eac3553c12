"""Reading a draft model: a head of another kind in a directory of its own, ours or anybody's.

Whatever was trained of it comes along: its own rows of an output matrix, its own shape of the layer. What it repeats of
its trunk, the embedding, must be the trunk's.

Shapes: D hidden, R tokens that it may draft, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from mtp_train.errors import CheckpointError, UnsupportedModelError
from mtp_train.families import Family, HeadKind, draft_kind, draft_title, of_kind
from mtp_train.families.attached import LLAMA
from mtp_train.heads.attach import HeadPlan, OwnOutput
from mtp_train.heads.diagnose import HeadDiagnosis, head_shapes, layout_of, text_config_of
from mtp_train.weights.draft_checkpoint import (
    BIAS_KEY,
    CHOSEN_KEY,
    LAYER,
    OFFSETS_KEY,
    OUTPUT_KEY,
    SPECULATORS_LAYER,
)
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.native import NativeHead, stored_tensor
from mtp_train.weights.quantised import PLAIN_DTYPES

# What others keep too: their embedding, and the tokens of a Medusa head's rows.
EMBED_KEY, TOKENS_KEY = "embed_tokens.weight", "token_map"
_BESIDE = (OUTPUT_KEY, EMBED_KEY, OFFSETS_KEY, TOKENS_KEY, CHOSEN_KEY, BIAS_KEY)
# Settings that change the forward, and the values that say it is as the paper has it.
_PLAIN_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "norm_before_fc": (False, None),
    "fc_norm": (False, None),
    "norm_output": (False, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "num_hidden_layers": (1,),
}


@dataclass(frozen=True)
class DraftModel:
    """A draft model's checkpoint, opened."""

    checkpoint: Checkpoint
    kind: HeadKind

    @property
    def title(self) -> str:
        """What it is, for messages."""
        return f"{draft_title(self.kind)} draft model"

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Its config, that of its layer on the same level."""
        config = self.checkpoint.config
        return {**config, **(config.get("transformer_layer_config") or {})}

    @property
    def num_modules(self) -> int:
        """Blocks of a Medusa head; 1 of others."""
        return self.number("num_heads") if self.kind == "medusa" else 1

    @property
    def num_drafted(self) -> int | None:
        """R, as its config says; None where it has no output matrix of its own."""
        if self.kind == "eagle":
            return None
        field = "truncated_vocab_size" if self.kind == "medusa" else "draft_vocab_size"
        return self.number(field if self.config.get(field) else "vocab_size")

    def number(self, name: str) -> int:
        """Return a count of its config.

        Raises:
            CheckpointError: It is not there, or none.
        """
        found = self.config.get(name)
        if not isinstance(found, int):
            raise CheckpointError(
                f"{self.checkpoint.path}/config.json: {name} is {found!r}; expected a count. Restore the original."
            )
        return found

    def family(self, trunk: Family) -> Family:
        """Return the record of a trunk with this head, its layer as its own config has it."""
        found = of_kind(trunk, self.kind)
        own = found.head_layer_config if self.kind == "medusa" else self._layer_config
        layers = self._trunk_layers()
        return replace(
            found,
            head_layer_config=own,
            trunk_layers=found.trunk_layers if layers is None else lambda text_config: layers,
        )

    def _layer_config(self, text_config: Any, num_modules: int) -> LlamaConfig:
        config: LlamaConfig = LlamaConfig.from_dict(
            {name: value for name, value in self.config.items() if name not in ("architectures", "model_type")}
        )
        return config

    def _trunk_layers(self) -> tuple[int, ...] | None:
        """Return the layers whose input it reads, where its config says them: counted as vLLM and llama.cpp do."""
        nested = self.config.get("eagle_config") or {}
        layers = self.config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
        return None if layers is None else tuple(int(layer) for layer in layers)

    def renamed(self, key: str) -> str:
        """Return our name of one of its keys."""
        of_layer = self.kind == "eagle3" and key.startswith(SPECULATORS_LAYER)
        return LAYER + key.removeprefix(SPECULATORS_LAYER) if of_layer else key

    def require_plain(self) -> None:
        """Check that its forward is the one that is known here.

        Raises:
            UnsupportedModelError: It is not.
        """
        for name, plain in _PLAIN_SETTINGS.items():
            if self.kind != "medusa" and self.config.get(name, plain[0]) not in plain:
                raise UnsupportedModelError(
                    f"{self.checkpoint.path}/config.json: {name} = {self.config[name]!r}, a form of {self.title} that "
                    f"is not known here; expected {plain[0]!r}. Measure it with the engine that it was made for."
                )


def draft_model(checkpoint: Checkpoint) -> DraftModel | None:
    """Return a checkpoint as the draft model that it is, None where it is none."""
    kind = draft_kind(checkpoint.config)
    return None if kind is None else DraftModel(checkpoint, kind)


def diagnose_draft(draft: DraftModel) -> HeadDiagnosis:
    """Compare the keys of a draft model with what its config says; allocates nothing."""
    found = {draft.renamed(key): info.shape for key, info in draft.checkpoint.tensors.items() if key not in _BESIDE}
    # Such a head is the same, whatever the trunk.
    family = draft.family(LLAMA)
    hidden_size, vocab_size = draft.number("hidden_size"), draft.number("vocab_size")
    # Of a trunk as wide, of which nothing else is known.
    text_config = LlamaConfig(hidden_size=hidden_size, vocab_size=vocab_size, num_attention_heads=1)
    shapes = head_shapes(family, text_config, draft.num_modules)
    needed = HeadLayout(family, "model.", 0).native_shapes(shapes)
    if draft.num_drafted is not None:
        needed[OUTPUT_KEY] = (draft.num_drafted, hidden_size)
        found |= {key: info.shape for key, info in draft.checkpoint.tensors.items() if key == OUTPUT_KEY}
    return HeadDiagnosis(
        declared_modules=draft.num_modules,
        present_modules=draft.num_modules if found else 0,
        found_keys=tuple(found),
        missing_keys=tuple(sorted(needed.keys() - found.keys())),
        unexpected_keys=tuple(sorted(found.keys() - needed.keys())),
        shape_errors=tuple(
            f"{key}: found {list(found[key])}, expected {list(shape)}"
            for key, shape in needed.items()
            if key in found and tuple(found[key]) != tuple(shape)
        ),
        dtype_errors=tuple(
            f"{key}: found {info.dtype}, expected a floating-point dtype"
            for key, info in draft.checkpoint.tensors.items()
            if key not in (OFFSETS_KEY, CHOSEN_KEY, TOKENS_KEY) and info.dtype not in PLAIN_DTYPES
        ),
    )


def draft_plan(draft: DraftModel, trunk: Checkpoint) -> HeadPlan:
    """Plan to draft with a draft model on a trunk.

    Raises:
        CheckpointError: It is not whole, or made for a trunk of another size or with another embedding.
        UnsupportedModelError: Its forward is not known here, or the trunk gets no such heads.
    """
    draft.require_plain()
    diagnosis = diagnose_draft(draft)
    if not diagnosis.complete:
        raise CheckpointError(
            f"{draft.checkpoint.path}: {diagnosis.describe()}; expected a whole {draft.title}. Download or export it "
            "again."
        )
    _require_same_size(draft, trunk)
    _require_same_embedding(draft, trunk)
    family = draft.family(trunk.family)
    tensors = tuple(
        stored_tensor(draft.checkpoint, key, draft.renamed(key))
        for key in draft.checkpoint.tensors
        if key not in _BESIDE
    )
    output = None
    if draft.num_drafted is not None:
        output = OwnOutput(stored_tensor(draft.checkpoint, OUTPUT_KEY, OUTPUT_KEY), _drafted_tokens(draft.checkpoint))
    layout = replace(layout_of(trunk), family=family)
    return HeadPlan(family, layout, draft.num_modules, "auto", NativeHead(tensors, (), {}), None, output)


def _drafted_tokens(checkpoint: Checkpoint) -> Tensor | None:
    """Return the tokens of the output matrix's rows; None where these are the vocabulary."""
    if TOKENS_KEY in checkpoint.tensors:
        return checkpoint.read(TOKENS_KEY).long()
    if OFFSETS_KEY not in checkpoint.tensors:
        return None
    offsets_R = checkpoint.read(OFFSETS_KEY).long()
    return offsets_R + torch.arange(len(offsets_R))


def _require_same_size(draft: DraftModel, trunk: Checkpoint) -> None:
    of_trunk = text_config_of(trunk).to_dict()
    for name in ("hidden_size", "vocab_size"):
        found, expected = draft.config.get(name), of_trunk[name]
        if found != expected:
            raise CheckpointError(
                f"{draft.checkpoint.path}: {name} {found}, of {trunk.path} it is {expected}; expected a draft model of "
                "this trunk. Use the trunk that it was made for."
            )


def _require_same_embedding(draft: DraftModel, trunk: Checkpoint) -> None:
    """Check what a draft model repeats of its trunk, or may leave out."""
    checkpoint = draft.checkpoint
    if BIAS_KEY in checkpoint.tensors and checkpoint.read(BIAS_KEY).any():
        raise UnsupportedModelError(
            f"{checkpoint.path}: {BIAS_KEY} is not zero, which engines read differently; expected none. Measure it "
            "with the engine that it was made for."
        )
    if EMBED_KEY not in checkpoint.tensors:
        return
    pairs = zip(checkpoint.read_in_blocks(EMBED_KEY), trunk.read_in_blocks(layout_of(trunk).embed_key), strict=False)
    if checkpoint.tensors[EMBED_KEY].shape != trunk.tensors[layout_of(trunk).embed_key].shape or not all(
        mine.shape == theirs.shape and torch.equal(mine.float(), theirs.float()) for mine, theirs in pairs
    ):
        raise UnsupportedModelError(
            f"{checkpoint.path}: {EMBED_KEY} is not that of {trunk.path}; expected the trunk's, which is read in its "
            "place. Use the trunk that it was made for."
        )
