"""Plan a head for a trunk without loading weights (:class:`HeadPlan`), and build it.

The head comes from a checkpoint, from a head directory, or is new, with random weights or a copy of the trunk's last
layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.checkpoints import native
from mtp_train.checkpoints.artifact import Artifact, HeadPlan
from mtp_train.checkpoints.files import SAFETENSORS_DTYPES, Checkpoint, require_finite
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.native import NativeHead
from mtp_train.checkpoints.suggestions import inspect_command, train_command
from mtp_train.checkpoints.writing import PendingTensor, held_tensor
from mtp_train.errors import CheckpointError
from mtp_train.families import of_kind
from mtp_train.families.kinds.kind import Block
from mtp_train.heads.diagnose import (
    HeadDiagnosis,
    compare_shapes,
    diagnose_head,
    empty_head,
    stored_dtype,
    text_config_of,
)
from mtp_train.heads.head import Head
from mtp_train.heads.module import MtpHead, OutputRows, chaining_of

FreshStart = Literal["copy_last_layer", "random"]


def deepest(plan: HeadPlan) -> int | None:
    """Return the largest number of drafts in a round, by the head's modules or its own config; None for no limit."""
    described = plan.head.config_fields if plan.draft_config is None else plan.draft_config
    most = plan.kind.load_parts().most_drafts(described)
    if most is not None:
        return int(most)
    chaining = chaining_of(plan.family, plan.family.convention(plan.convention), plan.num_modules)
    return None if chaining == "recursive" else plan.num_modules


def graft_plan(finetune: Checkpoint, base: Checkpoint, convention: str) -> HeadPlan:
    """Plan to start from the base's head on the fine-tune's trunk; the two may be one checkpoint.

    Raises:
        CheckpointError: The base has no complete head, or its trunk has another shape.
    """
    finetune.family.require_layer()
    finetune.family.convention(convention)
    native.require_same_trunk_shape(finetune, base)
    foreign = diagnose_head(finetune).foreign
    if foreign is not None:
        raise CheckpointError(
            f"{finetune.path}: has {foreign}; expected no drafter, or an MTP head to replace. Serve it with its own "
            f"drafter: {inspect_command(str(finetune.path))} prints the flags."
        )
    diagnosis = diagnose_head(base)
    if not diagnosis.complete:
        hint = "Point at the base with its original weights."
        if base.family.attached and not diagnosis.found_keys:
            hint = f"Releases of {base.family.title} have none. Attach one: {train_command(str(finetune.path))}"
        raise CheckpointError(f"{base.path}: {diagnosis.describe()}; expected a complete head. {hint}")
    # Engines read stacked experts and single ones: the head keeps the layout of the base.
    layout = replace(finetune.layout, fused_experts=base.layout.fused_experts)
    template = native.native_head_of(base, layout)
    return HeadPlan(layout, diagnosis.present_modules, convention, template)


def graft_artifact_plan(finetune: Checkpoint, artifact: Artifact, directory: Path, convention: str) -> HeadPlan:
    """Plan to start from the head in a head directory on the fine-tune's trunk.

    Raises:
        CheckpointError: The head is of another family or kind, was trained with another wiring, or has another shape.
    """
    theirs = artifact.family
    family = of_kind(finetune.family, artifact.kind.name, artifact.draft_config)
    layout = replace(finetune.layout, family=family, fused_experts=artifact.layout.fused_experts)
    ours = family.name, family.kind, layout.num_hidden_layers
    if (theirs.name, theirs.kind, artifact.layout.num_hidden_layers) != ours:
        raise CheckpointError(
            f"{directory}: a head of kind {theirs.kind.name} for {theirs.title} of {artifact.layout.num_hidden_layers} "
            f"layers; expected kind {family.kind.name}, {family.title}, {layout.num_hidden_layers} layers, as "
            f"{finetune.path}. Use a head of this model."
        )
    if family.convention(convention) != family.convention(artifact.convention):
        raise CheckpointError(
            f"{directory}: a head with the wiring {artifact.convention}, and head.convention is {convention}; expected "
            f"the same. Write head.convention: {artifact.convention}."
        )
    empty = empty_head(family, text_config_of(finetune), artifact.num_modules)
    head = artifact.head
    tensors = tuple(replace(one, key=artifact.layout.renamed(one.key, layout)) for one in head.tensors)
    _require_shapes({one.key: one.shape for one in tensors}, layout.native_shapes(empty))
    shared = tuple(artifact.layout.renamed(key, layout) for key in head.shared_keys)
    template = replace(head, tensors=tensors, shared_keys=shared)
    return HeadPlan(
        layout,
        artifact.num_modules,
        convention,
        template,
        artifact.draft_vocab,
        artifact.output,
        artifact.draft_config,
    )


def build_head(plan: HeadPlan, text_config: PretrainedConfig, *, dtype: torch.dtype) -> Head:
    """Build the head of a plan and load its weights, cast to ``dtype``."""
    convention = plan.family.convention(plan.convention)
    head = plan.kind.make_head(plan.family, text_config, num_modules=plan.num_modules, convention=convention)
    native = {pending.key: pending.load() for pending in plan.head.tensors}
    for key, value in native.items():
        require_finite(key, value)
    needed = plan.layout.native_shapes(head.state_dict())
    _require_shapes({key: value.shape for key, value in native.items()}, needed)
    head.load_state_dict(plan.layout.join(native))
    # Buffers keep their dtype: a router's fp32 correction bias must not be rounded.
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype)
    if plan.output is not None:
        output_RD = plan.output.weight.load()
        require_finite(plan.output.weight.key, output_RD)
        output = OutputRows(output_RD.to(dtype), plan.output.token_ids_R, text_config.vocab_size)
        for block in head.blocks:
            cast(Block, block).lm_head = output
    return head


def drafting_of(plan: HeadPlan, checkpoint: Checkpoint, like: Tensor) -> Any:
    """Return the decoder's ``Drafting`` with the head of a plan, on the device and in the dtype of a tensor."""
    head = build_head(plan, text_config_of(checkpoint), dtype=like.dtype)
    return plan.kind.draft_with(head.to(like.device).eval(), plan.draft_vocab)


def _require_shapes(stored: Mapping[str, Sequence[int]], needed: Mapping[str, Sequence[int]]) -> None:
    found = HeadDiagnosis(1, 1, tuple(stored), *compare_shapes(stored, needed))
    if not found.complete:
        raise CheckpointError(
            f"{found.describe()}; expected a head of this trunk's shape. Use the head that was trained on it."
        )


def trained_head(plan: HeadPlan, state: Mapping[str, Tensor]) -> NativeHead:
    """Return the plan's native head with trained values: the same keys, dtypes, shapes and config fields."""
    dtypes = {pending.key: pending.dtype for pending in plan.head.tensors}
    tensors = native_tensors(state, plan.layout, dtypes)
    return replace(plan.head, tensors=tensors, trained=True)


def native_tensors(
    state: Mapping[str, Tensor], layout: HeadLayout, dtypes: Mapping[str, str]
) -> tuple[PendingTensor, ...]:
    """Return our parameters as native tensors with the given stored dtypes, in their order."""
    split = {key: value for name, tensor in state.items() for key, value in layout.split(name, tensor)}
    return tuple(held_tensor(key, dtype, split[key]) for key, dtype in dtypes.items())


def fresh_plan(
    checkpoint: Checkpoint,
    text_config: PretrainedConfig,
    convention: str,
    *,
    seed: int,
    start: FreshStart = "random",
    kind: str = "mtp",
    num_modules: int = 1,
) -> HeadPlan:
    """Plan to start from a new head, stored in the trunk's dtype.

    Norms start as the identity in their own parametrisation (transformers' initial values). Matrices of n columns are
    drawn with the standard deviation 1 / sqrt(n), EAGLE-3's projection of the trunk's states with a fifth of it. With
    ``copy_last_layer`` the head's layer starts as the trunk's last layer of the same kind, the final norm as the
    trunk's, and the projection as the mean of its two inputs. Parallel modules always start as the identity.
    """
    family = of_kind(checkpoint.family, kind)
    layout = replace(checkpoint.layout, family=family)
    family.convention(convention)
    trunk_dtype = stored_dtype(checkpoint)
    head = MtpHead(family, text_config, num_modules=num_modules, convention=family.wiring.default)
    _init_random(head, seed)
    if start == "copy_last_layer":
        _init_last_norm(checkpoint, head)
        _init_projection(head)
    if family.wiring.own_lm_head:
        stored = layout.lm_head_key in checkpoint.tensors
        output_VD = checkpoint.read(layout.lm_head_key if stored else layout.embed_key)
        for weight_VD in head.own_lm_heads(num_modules) or []:
            weight_VD.data.copy_(output_VD)
    if family.wiring.own_embedding:
        head.get_parameter("blocks.0.embedding.weight").data.copy_(checkpoint.read(layout.embed_key))
    trained = dict(head.named_parameters())
    # Buffers, such as a router's correction bias, keep the precision that transformers gives them.
    dtypes = {
        key: trunk_dtype if name in trained else SAFETENSORS_DTYPES[value.dtype]
        for name, value in head.state_dict().items()
        for key, _ in layout.split(name, value)
    }
    tensors = native_tensors(head.state_dict(), layout, dtypes)
    if start == "copy_last_layer":
        copies = _copied_layer(checkpoint, layout, head, tensors, text_config)
        tensors = tuple(copies.get(pending.key, pending) for pending in tensors)
    # The trunk's config does not describe a head in a file of its own.
    inherited = {} if family.kind.has_file else native.head_config_fields(checkpoint)
    fields = {**inherited, **family.declaring(num_modules, checkpoint.config)}
    return HeadPlan(layout, num_modules, convention, NativeHead(tensors, (), fields))


def _init_random(head: MtpHead, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            # Chosen by name, not by shape: stacked experts have a matrix of biases, and some norms have a weight for
            # each attention head.
            if head.chaining == "parallel" or name.endswith(("bias", "sinks", "base")):
                parameter.zero_()
            elif parameter.ndim > 1 and not name.endswith("norm.weight"):
                # What EAGLE-3's layer reads of the next token is added to its projection of states, which are large.
                size = 0.2 if name.endswith(".fc.weight") else 1.0
                parameter.normal_(std=size * parameter.shape[-1] ** -0.5, generator=generator)
            elif name.endswith("scale"):
                parameter.fill_(1.0)


def _init_last_norm(checkpoint: Checkpoint, head: MtpHead) -> None:
    """Start the head's final norm as the trunk's."""
    key = checkpoint.layout.final_norm_key
    norm = head.module_for(1).final_norm
    if not isinstance(norm, nn.Identity) and key in checkpoint.tensors:
        with torch.no_grad():
            norm.get_parameter("weight").copy_(checkpoint.read(key))


def _init_projection(head: MtpHead) -> None:
    half_DD = 0.5 * torch.eye(head.config.hidden_size)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith(("_proj.weight", ".proj.weight")) and ".layer." not in name:
                parameter.copy_(half_DD.repeat(1, parameter.shape[1] // len(half_DD)))


def _copied_layer(
    checkpoint: Checkpoint,
    layout: HeadLayout,
    head: MtpHead,
    tensors: tuple[PendingTensor, ...],
    text_config: PretrainedConfig,
) -> dict[str, PendingTensor]:
    """Return the trunk's tensors for the head's layer by head key, from the last layer that has them all.

    Layers of the same kind as the head's layer (such as full attention) come before the others.
    """
    mapped = ((pending, layout.map_key(pending.key)) for pending in tensors)
    of_layer = {one.key: one.shape for one, found in mapped if found is not None and ".layer." in found.ours}
    kinds = text_config.to_dict().get(head.family.trunk.layer_kinds) or []
    same_kind = head.config.to_dict().get(head.family.trunk.layer_kinds) or [None]
    last_first = sorted(
        range(layout.num_hidden_layers),
        key=lambda layer: (layer < len(kinds) and kinds[layer] == same_kind[0], layer),
        reverse=True,
    )
    for layer in last_first:
        copies = {}
        for key in of_layer:
            theirs = layout.same_in_trunk(key, layer)
            take = native.plain_tensor if theirs in checkpoint.tensors else native.plain_experts
            if theirs is not None and (pending := take(checkpoint, theirs, key)) is not None:
                copies[key] = pending
        if {key: pending.shape for key, pending in copies.items()} == of_layer:
            return copies
    raise CheckpointError(
        f"{checkpoint.path}: no layer of the trunk has the tensors of the head's layer; expected one to copy. "
        "Write head.init: random."
    )
