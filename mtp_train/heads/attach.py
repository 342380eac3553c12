"""Building a head for a trunk: from a checkpoint that has one, or from an artifact. Fresh ones are in ``fresh.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from mtp_train.errors import CheckpointError
from mtp_train.families import Family
from mtp_train.heads.diagnose import diagnose_head, layout_of
from mtp_train.heads.module import MtpHead, unroll_of
from mtp_train.heads.output import OutputRows
from mtp_train.weights.artifact import Artifact, load_artifact
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.native import NativeHead, native_head_of, require_same_trunk_shape
from mtp_train.weights.writing import PendingTensor, held_tensor


@dataclass(frozen=True)
class OwnOutput:
    """An output matrix that a head brings along, for the decoder alone."""

    weight: PendingTensor
    """(R, D)."""
    token_ids_R: Tensor | None
    """int, the tokens of its rows; None where these are the vocabulary."""


@dataclass(frozen=True)
class HeadPlan:
    """What a head of one checkpoint looks like in its own layout: the template that a trained head is written by."""

    family: Family
    layout: HeadLayout
    num_modules: int
    convention: str
    template: NativeHead
    """Keys, dtypes and shapes to write; its loaders give the head before training."""
    draft_vocab: Tensor | None = None
    """int32, the tokens that it may draft; None for all."""
    output: OwnOutput | None = None
    """None where it drafts with the trunk's output matrix, or its family gives each module one."""

    @property
    def deepest(self) -> int | None:
        """Most drafts a round may have, where each depth has a module of its own; None for any number."""
        unroll = unroll_of(self.family, self.family.convention(self.convention), self.num_modules)
        return None if unroll == "recursive" else self.num_modules


def native_plan(checkpoint: Checkpoint, convention: str) -> HeadPlan:
    """Plan to start from the head that the checkpoint itself holds.

    Raises:
        CheckpointError: It holds none, or not a complete one.
    """
    return graft_plan(checkpoint, checkpoint, convention)


def graft_plan(finetune: Checkpoint, base: Checkpoint, convention: str) -> HeadPlan:
    """Plan to start from the base's head on the fine-tune's trunk.

    Raises:
        CheckpointError: The base has no complete head, or its trunk has another shape.
        UnsupportedModelError: The convention is unknown to the family.
    """
    layout, base_layout = layout_of(finetune), layout_of(base)
    finetune.family.convention(convention)
    require_same_trunk_shape(finetune, layout, base, base_layout)
    diagnosis = diagnose_head(base)
    if not diagnosis.complete:
        cure = "Point at the base with its original weights."
        if base.family.attached and not diagnosis.found_keys:
            cure = f"Releases of {base.family.title} have none: attach one with recipes/attach_head.yaml."
        raise CheckpointError(f"{base.path}: {diagnosis.describe()}; expected a complete head. {cure}")
    # The head keeps the expert layout that it has: engines read both.
    layout = replace(layout, fused_experts=base_layout.fused_experts)
    template = native_head_of(base, base_layout, layout)
    return HeadPlan(finetune.family, layout, diagnosis.present_modules, convention, template)


def build_head(plan: HeadPlan, text_config: PretrainedConfig, *, dtype: torch.dtype) -> MtpHead:
    """Build the head of a plan and load its weights, cast to ``dtype``.

    Raises:
        CheckpointError: A weight is missing, of another shape, NaN or infinite.
    """
    convention = plan.family.convention(plan.convention)
    head = MtpHead(plan.family, text_config, num_modules=plan.num_modules, convention=convention)
    native = {pending.key: pending.load() for pending in plan.template.tensors}
    require_finite(native)
    needed = plan.layout.native_shapes({name: value.shape for name, value in head.state_dict().items()})
    for key in sorted(needed.keys() | native.keys()):
        found = list(native[key].shape) if key in native else "absent"
        expected = list(needed[key]) if key in needed else "absent"
        if found != expected:
            raise CheckpointError(
                f"head: {key} is {found}, for this trunk it is {expected}; expected a head of the trunk's shape. Use "
                "the head that was trained on it."
            )
    head.load_state_dict(plan.layout.join(native))
    # Buffers keep their dtype: a router's fp32 correction bias must not be rounded.
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype)
    if plan.output is not None:
        output_RD = plan.output.weight.load()
        require_finite({plan.output.weight.key: output_RD})
        head.give_output(OutputRows(output_RD.to(dtype), plan.output.token_ids_R, text_config.vocab_size))
    return head


def stored_head_plan(directory: Path, family: Family) -> HeadPlan:
    """Plan to use the head of a head directory on a trunk of ``family``.

    Raises:
        CheckpointError: It is damaged, or a head for another family.
    """
    artifact = load_artifact(directory)
    if artifact.family.name != family.name:
        raise CheckpointError(
            f"{directory}: a head for {artifact.family.title}; expected one for {family.title}. Use a head of this "
            "model."
        )
    return artifact_plan(artifact)


def artifact_plan(artifact: Artifact) -> HeadPlan:
    """Plan to use the head of an artifact."""
    return HeadPlan(
        artifact.family,
        artifact.layout,
        artifact.num_modules,
        artifact.convention,
        artifact.head,
        artifact.draft_vocab,
    )


def trained_head(plan: HeadPlan, state: Mapping[str, Tensor]) -> NativeHead:
    """Return the plan's native head with trained values: the same keys, dtypes, shapes and config fields."""
    dtypes = {pending.key: pending.dtype for pending in plan.template.tensors}
    tensors = native_tensors(state, plan.layout, dtypes)
    return NativeHead(tensors, plan.template.shared_keys, plan.template.config_fields)


def native_tensors(
    state: Mapping[str, Tensor], layout: HeadLayout, dtypes: Mapping[str, str]
) -> tuple[PendingTensor, ...]:
    """Turn our parameters into native tensors of the given stored dtypes, in the order of ``dtypes``."""
    split = {key: value for name, tensor in state.items() for key, value in layout.split(name, tensor)}
    return tuple(held_tensor(key, dtype, split[key]) for key, dtype in dtypes.items())


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Check that no weight is NaN or infinite.

    Raises:
        CheckpointError: One is; the message names it.
    """
    for key, value in tensors.items():
        if value.is_floating_point() and not torch.isfinite(value.float()).all():
            raise CheckpointError(
                f"{key}: holds NaN or infinite values; expected finite weights. Use a checkpoint saved before it "
                "diverged."
            )
