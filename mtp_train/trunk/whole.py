"""Check a trunk against its config from the headers of its files. Only an lm_head that the config ties is read.

transformers' own loader compares the two, on tensors without data, because it implements how each release's keys are
renamed, stacked and split.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_train.checkpoints import quantised
from mtp_train.checkpoints.adapter import refuse_embedded_adapter
from mtp_train.checkpoints.files import CONFIG_FILE, TORCH_DTYPES, Checkpoint, StoredTensors
from mtp_train.checkpoints.native import trunk_tensors
from mtp_train.checkpoints.suggestions import output_of
from mtp_train.checkpoints.values import equal_values
from mtp_train.errors import CheckpointError, UnsupportedModelError, first_of, one_line
from mtp_train.heads.diagnose import named_rejections, trunk_config
from mtp_train.trunk.load import as_plain, empty_trunk
from mtp_train.upstream.transformers_private import quiet_loading, without_deepspeed


@dataclass(frozen=True)
class TrunkDiagnosis:
    """A trunk's stored tensors compared with its config."""

    missing_keys: tuple[str, ...] = ()
    """Parameters, by transformers' names, that no stored tensor provides."""
    shape_errors: tuple[str, ...] = ()
    """``parameter: found [..], expected [..]``: the stored shape and the shape by the config."""
    dtype_errors: tuple[str, ...] = ()
    """``key: found DTYPE, expected ..``."""
    untied: str | None = None
    """Key of an lm_head that differs from the embedding, while the config says that they are tied."""
    misread_keys: tuple[str, ...] = ()
    """Keys that the index names in one shard, while transformers loads the copy in a later one."""

    @property
    def problems(self) -> tuple[str, ...]:
        """One phrase for each kind of problem; empty for a complete trunk."""
        found = {
            "trunk weights that transformers loads from a later shard than the index names": self.misread_keys,
            "trunk weights missing": self.missing_keys,
            "trunk shape mismatch": self.shape_errors,
            "trunk dtype": self.dtype_errors,
        }
        phrases = tuple(f"{what}: {first_of(keys)}" for what, keys in found.items() if keys)
        if self.untied is None:
            return phrases
        return (
            *phrases,
            f"{self.untied} differs from the embedding, while tie_word_embeddings is true: transformers decodes with "
            "the stored lm_head, vLLM and SGLang with the embedding",
        )


class _Shape(Tensor):
    """A meta tensor that stays on the meta device when transformers moves it to the CPU for a conversion."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            dtypes = [one for one in (*args[1:], *(kwargs or {}).values()) if isinstance(one, torch.dtype)]
            args = (args[0], *dtypes)
            kwargs = {}
        return super().__torch_function__(func, types, args, kwargs or {})


def holds_trunk(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint has more of a trunk than embedding and lm_head, the rest of ``--head-only``."""
    beside = (checkpoint.layout.embed_key, checkpoint.layout.embed_norm_key)
    return any(key not in beside for key in trunk_tensors(checkpoint).values())


def require_whole_trunk(checkpoint: Checkpoint, *, adapter_beside: bool = False) -> None:
    """Check that a trunk has every tensor that its config needs, in a shape and dtype that loads.

    Args:
        adapter_beside: Whether an adapter may be in the model's directory, for commands that do not copy it.
    """
    if not adapter_beside:
        refuse_embedded_adapter(checkpoint.path)
    quantised.require_declared(checkpoint)
    found = diagnose_trunk(checkpoint)
    problems = found.problems
    if found.untied is not None:
        raise CheckpointError(
            f"{checkpoint.path}: {problems[-1]}; expected a flag that fits the weights. If it was trained with this "
            f"lm_head: {untie_command(checkpoint.path)}"
        )
    if problems:
        raise CheckpointError(
            f"{checkpoint.path}: {problems[0]}; expected every weight of the decoder, as config.json describes it. "
            "Restore the original files, or point at the complete checkpoint."
        )


def diagnose_trunk(checkpoint: Checkpoint) -> TrunkDiagnosis:
    """Compare the stored tensors of a trunk with the parameters that transformers would load for its config.

    A trunk that the installed transformers cannot build is not compared, and neither is one with packed weights: their
    shapes do not show what they unpack to.
    """
    layout = checkpoint.layout
    tensors = {key: info for key, info in checkpoint.tensors.items() if not layout.is_head_key(key)}
    if undeclared := quantised.undeclared_weights(checkpoint):
        return TrunkDiagnosis(
            dtype_errors=tuple(f"{key}: of a packed weight, and config.json declares no method" for key in undeclared)
        )
    dtype_errors = tuple(
        f"{key}: found {tensors[key].dtype} without scales, expected scales beside it"
        for key in sorted(tensors)
        if quantised.lacks_scales(key, tensors)
    )
    misread = tuple(key for key in checkpoint.misread_keys if key in tensors)
    plain = _plain_weights(tensors)
    # The model has no weights to partition, but under ZeRO-3 transformers would partition it all the same.
    with without_deepspeed():
        model = None if plain is None else _model_without_weights(checkpoint)
        if plain is None or model is None:
            return TrunkDiagnosis(dtype_errors=dtype_errors, misread_keys=misread)
        missing, misshapen = _match(checkpoint, model, plain)
    if quantised.quant_method(checkpoint.config) is None:
        dtype_errors += tuple(
            f"{key}: found {tensors[key].dtype}, expected a floating-point dtype"
            for key in _whole_numbers(tensors, plain, model)
        )
    return TrunkDiagnosis(missing, misshapen, dtype_errors, _untied(checkpoint), misread)


def untie_command(path: Path) -> str:
    """Return the command that unties the lm_head in a config, of a copy for a checkpoint of the hub's cache."""
    flag = '"tie_word_embeddings": '
    place = output_of(str(path), "")
    copied = "" if place == str(path) else f"{shlex.join(['cp', '-rL', str(path), place])} && "
    return copied + shlex.join(["sed", "-i", f"s/{flag}*true/{flag}false/", f"{place}/{CONFIG_FILE}"])


def _untied(checkpoint: Checkpoint) -> str | None:
    key, embed_key = checkpoint.layout.lm_head_key, checkpoint.layout.embed_key
    tied = checkpoint.config.get("tie_word_embeddings", checkpoint.text_config.get("tie_word_embeddings"))
    if not tied or key not in checkpoint.tensors or equal_values(checkpoint, key, checkpoint, embed_key):
        return None
    return key


def _whole_numbers(tensors: StoredTensors, plain: Iterable[str], model: Any) -> list[str]:
    """Return the keys of integer and boolean tensors where the model has floating-point parameters.

    Only the last part of a name is compared. Tables of experts by token are integers in the model too, and positions of
    a vision tower are no parameters.
    """
    state = model.state_dict().items()
    floats = {name.rpartition(".")[2] for name, value in state if value.is_floating_point()}
    floats -= {name.rpartition(".")[2] for name, value in state if not value.is_floating_point()}
    return [
        key
        for key in sorted(plain)
        if not TORCH_DTYPES[tensors[key].dtype].is_floating_point
        and not quantised.is_packed(key, tensors)
        and key.rpartition(".")[2] in floats
    ]


def _model_without_weights(checkpoint: Checkpoint) -> Any | None:
    """Return transformers' model on the meta device; None for a family that cannot be built here."""
    try:
        _ = checkpoint.family.classes
        config = trunk_config(checkpoint)
        with named_rejections(checkpoint.path):
            return empty_trunk(config, checkpoint).causal_lm
    except UnsupportedModelError:
        return None


def _plain_weights(tensors: StoredTensors) -> list[str] | None:
    """Return the keys without the scales of FP8 and FP4 weights; None for a trunk with weights in another format."""
    parts = {key: quantised.packed_weight(key, tensors) for key in tensors}
    if any(
        weight is not None and (weight not in tensors or tensors[weight].dtype not in quantised.FP8_DTYPES)
        for weight in parts.values()
    ):
        return None
    return [key for key, weight in parts.items() if weight is None and not quantised.is_scale(key, tensors)]


def _match(checkpoint: Checkpoint, model: Any, plain: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parameters that transformers would miss, and those with another shape."""
    state = {
        key: torch.empty(quantised.plain_shape(key, checkpoint.tensors), device="meta").as_subclass(_Shape)
        for key in plain
    }
    try:
        with quiet_loading(), checkpoint.family.trunk.loading(checkpoint.tensors):
            _, info = type(model).from_pretrained(
                None,
                config=as_plain(model.config),
                state_dict=state,
                device_map={"": "meta"},
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except RuntimeError as error:
        # Tensors that transformers joins do not fit together.
        return (), (f"tensors that transformers joins or splits: {one_line(error):.200}",)
    return tuple(sorted(info["missing_keys"])), tuple(
        f"{name}: found {list(found)}, expected {list(expected)}"
        for name, found, expected in sorted(info["mismatched_keys"])
    )
