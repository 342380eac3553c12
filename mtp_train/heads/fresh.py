"""Building a head for a trunk that has none: random, or with one of the trunk's own layers in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from transformers import PretrainedConfig

from mtp_train.errors import CheckpointError
from mtp_train.families import HeadKind, of_kind
from mtp_train.heads.attach import HeadPlan, native_tensors
from mtp_train.heads.diagnose import layout_of, stored_dtype
from mtp_train.heads.module import MtpHead
from mtp_train.weights.files import SAFETENSORS_DTYPES, Checkpoint
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.native import NativeHead, head_config_fields, plain_experts, plain_tensor
from mtp_train.weights.writing import PendingTensor

FreshStart = Literal["copy_last_layer", "random"]


def fresh_plan(
    checkpoint: Checkpoint,
    text_config: PretrainedConfig,
    convention: str,
    *,
    seed: int,
    start: FreshStart = "random",
    kind: HeadKind = "mtp",
    num_modules: int = 1,
) -> HeadPlan:
    """Plan to start from a head that no checkpoint has, in the trunk's dtype.

    Norms start as the identity of their flavour (transformers' own initial values), matrices as the trunk's do. With
    ``copy_last_layer`` the head's layer starts as the trunk's last one of its kind, the final norm as the trunk's, and
    the projection as the mean of the two halves that it reads. EAGLE-3's last norm starts as the trunk's in any case,
    Medusa's blocks as the identity.

    Raises:
        CheckpointError: No layer of the trunk fits where one is to be copied.
        UnsupportedModelError: The convention is unknown to the family, or its trunks get no heads of this kind.
    """
    family = of_kind(checkpoint.family, kind)
    layout = replace(layout_of(checkpoint), family=family)
    family.convention(convention)
    trunk_dtype = stored_dtype(checkpoint)
    head = MtpHead(family, text_config, num_modules=num_modules, convention=family.default)
    _init_random(head, text_config.initializer_range, seed)
    if kind == "eagle3":
        _init_last_norm(checkpoint, layout, text_config, head)
    if start == "copy_last_layer":
        _init_projection(head)
    if family.own_lm_head:
        stored = layout.lm_head_key in checkpoint.tensors
        output_VD = checkpoint.read(layout.lm_head_key if stored else layout.embed_key)
        for weight_VD in head.own_lm_heads(num_modules) or []:
            weight_VD.data.copy_(output_VD)
    if head.own_embedding_VD is not None:
        head.own_embedding_VD.data.copy_(checkpoint.read(layout.embed_key))
    trained = dict(head.named_parameters())
    # Buffers (a router's correction bias) keep the precision transformers gives them.
    dtypes = {
        key: trunk_dtype if name in trained else SAFETENSORS_DTYPES[value.dtype]
        for name, value in head.state_dict().items()
        for key, _ in layout.split(name, value)
    }
    tensors = native_tensors(head.state_dict(), layout, dtypes)
    if start == "copy_last_layer":
        copies = _copied_layer(checkpoint, layout, head, tensors, text_config) | _copied_norm(checkpoint, layout, head)
        tensors = tuple(copies.get(pending.key, pending) for pending in tensors)
    # Other kinds are checkpoints of their own, of which the trunk's config says nothing.
    inherited = head_config_fields(checkpoint) if kind == "mtp" else {}
    fields = {**inherited, **family.declaring(num_modules, checkpoint.config)}
    return HeadPlan(family, layout, num_modules, convention, NativeHead(tensors, (), fields))


def _init_random(head: MtpHead, std: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            # Whatever their shape: stacked experts have a bias each, and some norms a weight for each attention head.
            if head.unroll == "parallel" or name.endswith(("bias", "sinks", "base")):
                parameter.zero_()
            elif parameter.ndim > 1 and not name.endswith("norm.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            elif name.endswith("scale"):
                parameter.fill_(1.0)


def _init_last_norm(checkpoint: Checkpoint, layout: HeadLayout, text_config: PretrainedConfig, head: MtpHead) -> None:
    """Start as the trunk's final norm, in whichever of the two flavours (w, or 1 + w) that is stored."""
    family = checkpoint.family
    key = f"{layout.trunk_prefix}{family.trunk_final_norm}.weight"
    identity_D = next(family.classes.make_norm(text_config).parameters())
    with torch.no_grad():
        module = head.module_for(1)
        module.final_norm.get_parameter("weight").copy_(checkpoint.read(key).float() + 1 - identity_D)


def _init_projection(head: MtpHead) -> None:
    """Let the layer read the mean of the two normed halves."""
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
    """Return the trunk's tensors for the head's layer, by head key: of the last layer that has them all.

    Layers of the kind that the head's is of (full attention, say) are taken before others.

    Raises:
        CheckpointError: No layer has tensors of these names and shapes.
    """
    of_layer = {pending.key: pending.shape for pending in tensors if ".layer." in _ours(layout, pending.key)}
    kinds = text_config.to_dict().get(head.family.layer_kinds) or []
    same_kind = head.config.to_dict().get(head.family.layer_kinds) or [None]
    last_first = sorted(
        range(layout.num_hidden_layers),
        key=lambda layer: (layer < len(kinds) and kinds[layer] == same_kind[0], layer),
        reverse=True,
    )
    for layer in last_first:
        found = {key: _of_layer(checkpoint, layout, layer, key) for key in of_layer}
        copies = {key: pending for key, pending in found.items() if pending is not None}
        if {key: pending.shape for key, pending in copies.items()} == of_layer:
            return copies
    raise CheckpointError(
        f"{checkpoint.path}: no layer of the trunk has the tensors of the head's; expected one to copy. Write "
        "head.init: random."
    )


def _of_layer(checkpoint: Checkpoint, layout: HeadLayout, layer: int, key: str) -> PendingTensor | None:
    """Return what a trunk layer has where the head's has ``key``, None where it has no such thing."""
    theirs = layout.same_in_trunk(key, layer)
    if theirs is None or theirs in checkpoint.tensors:
        return None if theirs is None else plain_tensor(checkpoint, theirs, key)
    return plain_experts(checkpoint, theirs, key)


def _copied_norm(checkpoint: Checkpoint, layout: HeadLayout, head: MtpHead) -> dict[str, PendingTensor]:
    """Return the trunk's final norm for the head's, by head key; nothing where the head has none."""
    name = "blocks.0.final_norm.weight"
    theirs = f"{layout.trunk_prefix}{layout.family.trunk_final_norm}.weight"
    value = head.state_dict().get(name)
    if value is None or theirs not in checkpoint.tensors:
        return {}
    return {key: plain_tensor(checkpoint, theirs, key) for key, _ in layout.split(name, value)}


def _ours(layout: HeadLayout, key: str) -> str:
    mapped = layout.map_key(key)
    return "" if mapped is None else mapped.ours
