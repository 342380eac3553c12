"""Read draft models: heads of other kinds than MTP in a directory of their own, written by us or by a third party.

A copy of the trunk's embedding in it is not read, but has to equal the trunk's.

Shapes: D hidden, R tokens that it may draft, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaConfig

from mtp_train.checkpoints.artifact import HeadPlan, OwnOutput
from mtp_train.checkpoints.draft_checkpoint import BIAS_KEY, CHOSEN_KEY, OFFSETS_KEY, OUTPUT_KEY
from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.native import NativeHead, stored_tensor
from mtp_train.checkpoints.quantised import PLAIN_DTYPES
from mtp_train.checkpoints.values import equal_values
from mtp_train.errors import CheckpointError, UnsupportedModelError
from mtp_train.families import Family, draft_kind, of_kind, raw_text_config
from mtp_train.families.kinds.kind import DraftFormat
from mtp_train.families.models.attached import LLAMA
from mtp_train.head_kinds import HeadKind
from mtp_train.heads.diagnose import (
    HeadDiagnosis,
    compare_shapes,
    empty_head,
    named_rejections,
    text_config_of,
)

# Third-party draft models also store the trunk's embedding, and the token of each row of a Medusa head's output matrix.
EMBED_KEY, TOKENS_KEY = "embed_tokens.weight", "token_map"
_INTEGERS = ("I64", "I32", "I16", "I8", "U8")
_BESIDE = (OUTPUT_KEY, EMBED_KEY, OFFSETS_KEY, TOKENS_KEY, CHOSEN_KEY, BIAS_KEY)
_WHOLE_NUMBERS = (OFFSETS_KEY, CHOSEN_KEY, TOKENS_KEY, "masked_embedding.token_ordering")


@dataclass(frozen=True)
class DraftModel:
    """An opened checkpoint of a draft model."""

    checkpoint: Checkpoint
    kind: HeadKind

    @property
    def format(self) -> DraftFormat:
        return self.kind.load_parts().format

    @property
    def title(self) -> str:
        return f"{self.kind.title} draft model"

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The config, with speculators' config of the layer and that of DFlash's authors merged into the top level."""
        config = self.checkpoint.config
        of_layer, of_drafter = (config.get(name) or {} for name in ("transformer_layer_config", "dflash_config"))
        return {**raw_text_config(config), **config, **of_layer, **of_drafter}

    @property
    def stand_in(self) -> Family:
        """A family with such heads: what a draft model has to contain does not depend on its trunk's family."""
        return self.kind.load_parts().only_trunk or LLAMA

    @property
    def num_modules(self) -> int:
        field = self.format.modules_field
        return 1 if field is None else self.number(field)

    @property
    def num_drafted(self) -> int | None:
        """R, as the config declares it; None for a model without an output matrix, which drafts with the trunk's."""
        return None if self.borrows_output or not self.format.has_output else self._num_rows

    @property
    def _num_rows(self) -> int:
        field = self.format.drafted_field
        return self.number(field if field is not None and self.config.get(field) else "vocab_size")

    @cached_property
    def borrows_output(self) -> bool:
        """Whether an EAGLE-3 draft of the whole vocabulary leaves its lm_head to the trunk, as engines allow."""
        if not self.format.draft_vocab or OUTPUT_KEY in self.checkpoint.tensors:
            return False
        tokens_R = _drafted_tokens(self.checkpoint)
        in_order = tokens_R is None or torch.equal(tokens_R, torch.arange(len(tokens_R)))
        return in_order and self._num_rows == self.number("vocab_size")

    def number(self, name: str) -> int:
        found = self.config.get(name)
        if not isinstance(found, int):
            raise CheckpointError(
                f"{self.checkpoint.path}/config.json: {name} is {found!r}; expected an integer. Restore the original."
            )
        return found

    def family(self, trunk: Family) -> Family:
        """Return the family record of a trunk with this head, and with the layer of the draft model's config."""
        found = of_kind(trunk, self.kind.name, self.config)
        layers = self.trunk_layers
        if layers is None:
            return found
        return replace(found, wiring=replace(found.wiring, trunk_layers=lambda text_config: layers))

    @property
    def trunk_layers(self) -> tuple[int, ...] | None:
        """Return the layers whose input the head reads, counted as vLLM and llama.cpp do; None without such a field."""
        nested = self.config.get("eagle_config") or {}
        layers = self.config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
        return None if layers is None else tuple(map(int, layers))

    @property
    def keys(self) -> list[str]:
        """The keys of the tensors that the head is built from."""
        return [key for key in self.checkpoint.tensors if key not in _BESIDE and not key.startswith(self.format.unread)]

    def renamed(self, key: str) -> str:
        for theirs, ours in self.format.renames.items():
            if key.startswith(theirs):
                return ours + key.removeprefix(theirs)
        return key

    @property
    def unsupported(self) -> str | None:
        """A phrase that names a setting for which we do not implement the forward; None without one."""
        for name, plain in self.format.plain_settings.items():
            if self.config.get(name, plain[0]) not in plain:
                return (
                    f"{name} = {self.config[name]!r}, a form of {self.title} that we do not support; expected "
                    f"{plain[0]!r}"
                )
        return None


def draft_model(checkpoint: Checkpoint) -> DraftModel | None:
    """Return a checkpoint as a draft model, None where it is not one."""
    kind = draft_kind(checkpoint.config)
    return None if kind is None else DraftModel(checkpoint, kind)


def diagnose_draft(draft: DraftModel) -> HeadDiagnosis:
    """Compare the tensor keys of a draft model with those that its config needs; allocates no weights."""
    found = {draft.renamed(key): draft.checkpoint.tensors[key].shape for key in draft.keys}
    hidden_size = draft.number("hidden_size")
    vocab_size = draft.number("vocab_size")
    num_modules = draft.num_modules
    with named_rejections(draft.checkpoint.path):
        family = draft.family(draft.stand_in)
        # A stand-in for the trunk's config: the head needs only these sizes of it.
        text_config = LlamaConfig(hidden_size=hidden_size, vocab_size=vocab_size, num_attention_heads=1)
        empty = empty_head(family, text_config, num_modules)
    needed = HeadLayout(family, "model.", 0).native_shapes(empty)
    if draft.num_drafted is not None:
        needed[OUTPUT_KEY] = (draft.num_drafted, hidden_size)
        if OUTPUT_KEY in draft.checkpoint.tensors:
            found[OUTPUT_KEY] = draft.checkpoint.tensors[OUTPUT_KEY].shape
    return HeadDiagnosis(
        num_modules,
        num_modules if found else 0,
        tuple(found),
        *compare_shapes(found, needed),
        dtype_errors=tuple(
            f"{key}: found {info.dtype}, expected a floating-point dtype"
            for key, info in draft.checkpoint.tensors.items()
            if key not in _WHOLE_NUMBERS and info.dtype not in PLAIN_DTYPES
        ),
    )


def draft_plan(draft: DraftModel, trunk: Checkpoint) -> HeadPlan:
    """Plan to draft with a draft model on a trunk.

    Raises:
        CheckpointError: The draft model is incomplete, or was made for a trunk of another size.
        UnsupportedModelError: Its forward or its embedding is not supported, or the trunk's family has no such heads.
    """
    if draft.unsupported is not None:
        raise UnsupportedModelError(
            f"{draft.checkpoint.path}/config.json: {draft.unsupported}. Measure it with the engine that it was made "
            "for."
        )
    diagnosis = diagnose_draft(draft)
    if not diagnosis.complete:
        raise CheckpointError(
            f"{draft.checkpoint.path}: {diagnosis.describe()}; expected a complete {draft.title}. Download or "
            "export it again."
        )
    family = draft.family(trunk.family)
    for name, (theirs, ours) in draft.format.sizes(draft.config, text_config_of(trunk)).items():
        if theirs != ours:
            raise CheckpointError(
                f"{draft.checkpoint.path}: {name} is {theirs}, in {trunk.path} it is {ours}; expected a draft model of "
                "this trunk. Use the trunk that it was made for."
            )
    _require_same_embedding(draft, trunk)
    problem = values_problem(draft)
    if problem is not None:
        raise CheckpointError(f"{draft.checkpoint.path}: {problem}. Download or export the draft model again.")
    tensors = tuple(stored_tensor(draft.checkpoint, key, draft.renamed(key)) for key in draft.keys)
    output = None
    if draft.num_drafted is not None:
        output = OwnOutput(stored_tensor(draft.checkpoint, OUTPUT_KEY, OUTPUT_KEY), _drafted_tokens(draft.checkpoint))
    layout = replace(trunk.layout, family=family)
    # What is written again is written as it is.
    config = draft.checkpoint.config if draft.format.config is None and draft.kind.starts else draft.config
    return HeadPlan(layout, draft.num_modules, "auto", NativeHead(tensors, (), {}), None, output, config)


def _drafted_tokens(checkpoint: Checkpoint) -> Tensor | None:
    """Return the token of each row of the output matrix; None where the rows are the whole vocabulary in order."""
    key = _map_key(checkpoint)
    if key is None:
        return None
    stored_R = checkpoint.read(key).long()
    return stored_R + torch.arange(len(stored_R)) if key == OFFSETS_KEY else stored_R


def _map_key(checkpoint: Checkpoint) -> str | None:
    return next((key for key in (TOKENS_KEY, OFFSETS_KEY) if key in checkpoint.tensors), None)


def values_problem(draft: DraftModel) -> str | None:
    """Return what is wrong with the values of a complete draft model, as a phrase: zeros, or its map of tokens."""
    checkpoint = draft.checkpoint
    matrices = [key for key, info in checkpoint.tensors.items() if len(info.shape) > 1 and key not in _BESIDE]
    # Medusa's blocks start as zeros, and add to the trunk's state.
    if not draft.kind.parallel and not any(block.any() for key in matrices for block in checkpoint.read_in_blocks(key)):
        return f"all {len(matrices)} matrices are zero; expected a trained {draft.title}"
    return _vocabulary_problem(draft)


def _vocabulary_problem(draft: DraftModel) -> str | None:
    """Return what is wrong with the map from rows of the output matrix to tokens, as a phrase; None for a sound map."""
    checkpoint, num_rows, vocab_size = draft.checkpoint, draft.num_drafted, draft.number("vocab_size")
    if num_rows is None:
        return None
    key = _map_key(checkpoint)
    if key is None:
        missing = f"no {OFFSETS_KEY} for {num_rows} of {vocab_size} tokens; expected an offset for each row"
        return None if num_rows == vocab_size else missing
    info = checkpoint.tensors[key]
    if info.dtype not in _INTEGERS or info.shape != (num_rows,):
        return f"{key} is {info.dtype} {list(info.shape)}; expected one integer for each of {num_rows} rows"
    tokens_R = cast(Tensor, _drafted_tokens(checkpoint))
    least = int(tokens_R.min())
    most = int(tokens_R.max())
    if least < 0 or most >= vocab_size:
        return f"{key} maps rows to tokens {least} to {most}; expected tokens below {vocab_size}"
    tokens = {*tokens_R.tolist()}
    if len(tokens) < num_rows:
        return f"{key} maps {num_rows} rows to {len(tokens)} tokens; expected another token for each row"
    flags_V = checkpoint.read(CHOSEN_KEY) if CHOSEN_KEY in checkpoint.tensors else torch.empty(0)
    # Other numbers than flags have no meaning that we know.
    if len(flags_V) and {*flags_V.unique().tolist()} <= {0, 1}:
        odd = tokens ^ {*flags_V.nonzero().flatten().tolist()}
        if odd:
            return f"{key} and {CHOSEN_KEY} choose other tokens ({min(odd)}, {len(odd)} in all); expected the same ones"
    return None


def _require_same_embedding(draft: DraftModel, trunk: Checkpoint) -> None:
    """Check that the stored embedding equals the trunk's, and that the projection's bias, which we ignore, is zero."""
    checkpoint = draft.checkpoint
    if BIAS_KEY in checkpoint.tensors and checkpoint.read(BIAS_KEY).any():
        raise UnsupportedModelError(
            f"{checkpoint.path}: {BIAS_KEY} is not zero, and engines treat it differently; expected zeros or no bias. "
            "Measure it with the engine that it was made for."
        )
    theirs = trunk.layout.embed_key
    if EMBED_KEY in checkpoint.tensors and not equal_values(checkpoint, EMBED_KEY, trunk, theirs):
        raise UnsupportedModelError(
            f"{checkpoint.path}: {EMBED_KEY} differs from the embedding of {trunk.path}; expected the same values, as "
            "the trunk's embedding is used in its place. Use the trunk that the draft model was made for."
        )
