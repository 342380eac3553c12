"""Read and write head directories, which contain a head on its own.

``head.safetensors`` has the weights under native keys. ``head_config.json`` has the family, the layout and the origin.
A head with a draft vocabulary also has ``draft_vocab.safetensors``, one with an output matrix of its own
``output.safetensors``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field, PositiveInt
from torch import Tensor

from mtp_train.checkpoints.files import Checkpoint, JsonObject, read_json, scan_safetensors, validated
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.native import NativeHead, stored_tensor
from mtp_train.checkpoints.writing import PendingTensor, held_tensor, new_directory, write_json, write_safetensors
from mtp_train.errors import CheckpointError
from mtp_train.families import Family, RawConfig, family_named, of_kind
from mtp_train.head_kinds import HeadKind

WEIGHTS_FILE = "head.safetensors"
HEAD_CONFIG_FILE = "head_config.json"
VOCAB_FILE = "draft_vocab.safetensors"
VOCAB_KEY = "token_ids"
OUTPUT_FILE = "output.safetensors"
OUTPUT_KEY = "lm_head.weight"
FORMAT_VERSION = 1


_Count = Annotated[int, Field(ge=1, le=1000)]


class HeadConfigFile(BaseModel):
    """The fields of ``head_config.json``."""

    format_version: int
    family: str
    kind: str
    trunk_prefix: str
    num_hidden_layers: Annotated[int, Field(ge=0, le=1000)]
    """0 in layouts whose head keys do not count the trunk's layers."""
    num_sublayers: _Count
    fused_experts: bool
    num_modules: _Count
    num_depths: _Count
    convention: str
    draft_vocab: PositiveInt | None
    shared_keys: list[str]
    config_fields: JsonObject
    notes: JsonObject
    draft_config: JsonObject | None = None


class OwnOutput(NamedTuple):
    """The head's own output matrix, which is not trained."""

    weight: PendingTensor
    """Shape (R, D)."""
    token_ids_R: Tensor | None
    """int, the token of each row; None where the rows are the whole vocabulary in order."""


@dataclass(frozen=True)
class HeadPlan:
    """Describe a head in the native layout of one checkpoint: the template by which a trained head is written."""

    layout: HeadLayout
    num_modules: int
    convention: str
    head: NativeHead
    """Keys, dtypes and shapes to write; its loaders return the weights before training."""
    draft_vocab: Tensor | None = None
    """int32, the tokens that the head may draft; None for all."""
    output: OwnOutput | None = None
    """None where the head drafts with the trunk's output matrix, or the family gives each module one."""
    draft_config: RawConfig | None = None
    """The config of the draft model that describes the head's layer; None for the family's own."""

    @property
    def family(self) -> Family:
        """The record of the trunk's family with a head of this kind."""
        return self.layout.family

    @property
    def kind(self) -> HeadKind:
        return self.family.kind


@dataclass(frozen=True, kw_only=True)
class Artifact(HeadPlan):
    """A head on its own, with what a head directory tells of it besides."""

    num_depths: int
    """The number of depths that it was trained for, and the default draft depth."""
    notes: JsonObject
    """The origin of the head, free-form; written and read back unchanged."""


def save_artifact(artifact: Artifact, out: Path) -> None:
    with new_directory(out, what="the head") as directory:
        write_safetensors(directory / WEIGHTS_FILE, artifact.head.tensors)
        if artifact.draft_vocab is not None:
            write_safetensors(directory / VOCAB_FILE, [held_tensor(VOCAB_KEY, "I32", artifact.draft_vocab)])
        if artifact.output is not None:
            ids_R = artifact.output.token_ids_R
            rows = [] if ids_R is None else [held_tensor(VOCAB_KEY, "I64", ids_R.long())]
            write_safetensors(directory / OUTPUT_FILE, [replace(artifact.output.weight, key=OUTPUT_KEY), *rows])
        written = HeadConfigFile.model_validate(
            {
                **vars(artifact.layout),
                **vars(artifact.head),
                **vars(artifact),
                "format_version": FORMAT_VERSION,
                "family": artifact.family.name,
                "kind": artifact.kind.name,
                "draft_vocab": None if artifact.draft_vocab is None else len(artifact.draft_vocab),
            }
        )
        write_json(directory / HEAD_CONFIG_FILE, written.model_dump())


def load_artifact(path: Path) -> Artifact:
    """Open a head directory; tensors are read on demand.

    Raises:
        CheckpointError: It is no head directory, has another format version, or is damaged.
    """
    config = read_json(path / HEAD_CONFIG_FILE)
    if config.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path / HEAD_CONFIG_FILE}: format_version {config.get('format_version')!r}; expected {FORMAT_VERSION}. "
            "Write the head again with this version of mtp-train."
        )
    written = validated(HeadConfigFile, config, path / HEAD_CONFIG_FILE, "Write the head again.")
    try:
        family = of_kind(family_named(written.family), written.kind, written.draft_config)
    except KeyError as error:
        raise CheckpointError(
            f"{path / HEAD_CONFIG_FILE}: of an unknown family or kind ({error}); expected a head that mtp-train wrote. "
            "Write it again."
        ) from None
    layout = HeadLayout(
        family, written.trunk_prefix, written.num_hidden_layers, written.num_sublayers, written.fused_experts
    )
    stored = _stored(path / WEIGHTS_FILE)
    tensors = tuple(stored_tensor(stored, key, key) for key in stored.tensors)
    output = None
    if (path / OUTPUT_FILE).is_file():
        stored = _stored(path / OUTPUT_FILE)
        ids_R = stored.read(VOCAB_KEY) if VOCAB_KEY in stored.tensors else None
        output = OwnOutput(stored_tensor(stored, OUTPUT_KEY, OUTPUT_KEY), ids_R)
    return Artifact(
        layout=layout,
        num_modules=written.num_modules,
        num_depths=written.num_depths,
        convention=written.convention,
        head=NativeHead(tensors, tuple(written.shared_keys), written.config_fields, trained=True),
        notes=written.notes,
        draft_vocab=None if written.draft_vocab is None else _stored(path / VOCAB_FILE).read(VOCAB_KEY),
        output=output,
        draft_config=written.draft_config,
    )


def _stored(file: Path) -> Checkpoint:
    return Checkpoint(file.parent, {}, None, scan_safetensors(file))
