"""Keep a model's MTP head while another trainer fine-tunes the model: one line in the user's own script.

    from mtp_train.preserve import KeepHead

    trainer = Trainer(model=model, ..., callbacks=[KeepHead()])  # or TRL's SFTTrainer, with or without peft

transformers has no module for the head, so that whatever it saves lacks it. ``Trainer.save_model`` tells no callback
that it was called; all saving goes through the model's own ``save_pretrained``, whose place is taken here. Checkpoints
of the trainer, its last save, and the save of a LoRA merged with ``merge_and_unload`` then hold the base's head, byte
for byte, in a shard of its own. The head is that of the base: stale, as after ``mtp-train graft``, and to be retrained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mtp_train.cures import graft_command
from mtp_train.errors import CheckpointError, MtpError, UnsupportedModelError
from mtp_train.families import family_for, raw_text_config
from mtp_train.heads.attach import graft_plan
from mtp_train.heads.diagnose import diagnose_head, layout_of
from mtp_train.inputs import open_location
from mtp_train.weights.adapter import is_adapter, merge_command
from mtp_train.weights.export import add_in_place
from mtp_train.weights.files import INDEX_FILE, SINGLE_FILE, Checkpoint, open_checkpoint
from mtp_train.weights.native import NativeHead, native_head_of
from mtp_train.weights.writing import held_tensor

logger = logging.getLogger(__name__)

SAME_SHAPE_FIELDS = ("hidden_size", "num_hidden_layers")


class KeepHead(TrainerCallback):
    """Let everything that a ``Trainer`` saves of its model hold the base's head.

    Given to ``Trainer(callbacks=...)`` it works from then on; added later, from the beginning of ``train()``.

    Args:
        base: A checkpoint that has the head: a directory, a hub id or ``demo:NAME``. None for the one that the model
            was loaded from.

    Raises:
        CheckpointError: When the trainer is made: there is no base, or it has no complete head for this model.
        UnsupportedModelError: When the trainer is made: the model belongs to no family with heads.
    """

    def __init__(self, base: str | Path | None = None) -> None:
        self.base = base
        self._told = False

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any = None, **others: Any
    ) -> None:
        """Take hold of the model; one that ``model_init`` makes comes later."""
        if model is not None:
            keep_head(model, self.base)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any, **others: Any
    ) -> None:
        """Take hold of the model where that is still to do."""
        keep_head(model, self.base)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any, **others: Any
    ) -> None:
        """Say once that checkpoints hold no model to add a head to: adapters, or shards in a form of the trainer's."""
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._told or not state.is_world_process_zero or not directory.is_dir() or _holds_model(directory):
            return
        self._told = True
        base = str(kept_base(model).path)
        if is_adapter(directory):
            logger.warning(
                "%s: holds an adapter and no model, so that the head stays in %s. It comes along where this model is "
                "merged and saved (merge_and_unload, save_pretrained), and with: %s",
                directory,
                base,
                merge_command(base, str(directory)),
            )
        else:
            logger.warning(
                "%s: holds the model in shards of the trainer's own form, to which no head can be added. Once they are "
                "put together: %s",
                directory,
                graft_command("MERGED", base),
            )


def keep_head(model: Any, base: str | Path | None = None) -> None:
    """Let every ``save_pretrained`` of a model write the base's head too. For scripts without a ``Trainer``.

    What is uploaded by ``save_pretrained(push_to_hub=True)`` itself goes before the head is there; ``push_to_hub()``
    and the trainer's own uploads have it.

    Args:
        model: A transformers model, as it is or wrapped by peft, ``torch.compile`` or a way to train on many devices.
        base: See :class:`KeepHead`.

    Raises:
        CheckpointError: There is no base, or it has no complete head for this model.
        UnsupportedModelError: The model belongs to no family with heads.
    """
    inner = inside(model)
    if not isinstance(vars(inner).get("save_pretrained"), _SaveWithHead):
        inner.save_pretrained = _SaveWithHead(inner, _open_base(inner, base))


def kept_base(model: Any) -> Checkpoint:
    """Return the checkpoint whose head is kept with a model that :func:`keep_head` was given."""
    base: Checkpoint = inside(model).save_pretrained.base
    return base


def save_with(model: Any, values: Callable[[], list[Tensor]]) -> None:
    """Let a model that :func:`keep_head` was given save other values for its head: see ``_SaveWithHead.trained``."""
    inside(model).save_pretrained.trained = values


class _SaveWithHead:
    """Stands in for the ``save_pretrained`` of one model. A copy of that model gets a copy of this with it."""

    def __init__(self, model: PreTrainedModel, base: Checkpoint) -> None:
        self.model = model
        self.base = base
        self.trained: Callable[[], list[Tensor]] | None = None
        """Gives the head's tensors, in the order of :func:`native_head_of`, where they are no longer the base's."""

    def __call__(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **settings: Any,
    ) -> None:
        """Save as transformers does, then add the head. What goes wrong with that is told, and ends no training."""
        directory = Path(save_directory)
        overwrites = is_main_process and directory.resolve() == self.base.path.resolve()
        held = _values(self.base) if overwrites else None
        if is_main_process and self.trained is not None:
            held = self.trained()
        type(self.model).save_pretrained(self.model, save_directory, is_main_process, state_dict, **settings)
        # DeepSpeed's way of saving without weights: a file with no tensors, which it takes away again.
        is_empty = state_dict is not None and not state_dict
        if not is_main_process or is_empty or not _holds_model(directory):
            return
        try:
            put_head(directory, self.base, held)
            if overwrites:
                self.base = open_checkpoint(directory)
        except (MtpError, OSError) as error:
            cure = graft_command(str(directory), str(self.base.path))
            logger.warning("%s: saved without its MTP head: %s To put it back later: %s", directory, error, cure)


def put_head(directory: Path, base: Checkpoint, values: list[Tensor] | None = None) -> None:
    """Add the base's head to a checkpoint that was just saved; leave alone one that has a complete head.

    Args:
        directory: The checkpoint.
        base: Where the head is from.
        values: Its tensors in the order of :func:`native_head_of`, where they are no longer in the base's files.

    Raises:
        CheckpointError: The head does not fit the checkpoint, or the disk is full.
    """
    saved = open_checkpoint(directory)
    if diagnose_head(saved).complete:
        return
    plan = graft_plan(saved, base, "auto")
    head = plan.template
    if values is not None:
        tensors = (held_tensor(one.key, one.dtype, value) for one, value in zip(head.tensors, values, strict=True))
        head = NativeHead(tuple(tensors), head.shared_keys, head.config_fields)
    add_in_place(saved, plan.layout, head)


def _values(base: Checkpoint) -> list[Tensor]:
    layout = layout_of(base)
    return [pending.load().clone() for pending in native_head_of(base, layout, layout).tensors]


def _holds_model(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


def inside(model: Any) -> PreTrainedModel:
    """Return the transformers model in what peft, ``torch.compile`` or a way to train on many devices wrapped.

    Raises:
        UnsupportedModelError: There is none.
    """
    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
    inner = unwrapped.get_base_model() if isinstance(unwrapped, PeftModel) else unwrapped
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(
            f"KeepHead: the model is a {type(inner).__name__}; expected one of transformers, or one that peft wraps. "
            "Save it, then use mtp-train graft."
        )
    return inner


def _open_base(model: PreTrainedModel, named: str | Path | None) -> Checkpoint:
    location = str(named or model.config._name_or_path)
    if not location:
        raise CheckpointError(
            "KeepHead: the model was not loaded from a checkpoint; expected one that has the head. Name it: "
            "KeepHead('BASE')."
        )
    base = open_location(location)
    diagnosis = diagnose_head(base)
    if not diagnosis.complete:
        raise CheckpointError(
            f"{base.path}: {diagnosis.describe()}; expected a complete head. Name the checkpoint that has it: "
            "KeepHead('BASE')."
        )
    config = model.config.to_dict()
    family = family_for(config, where="KeepHead: the model")
    ours, theirs = raw_text_config(config), base.text_config
    facts: list[tuple[str, Any, Any]] = [("family", base.family.title, family.title)]
    facts += [(field, theirs[field], ours.get(field)) for field in SAME_SHAPE_FIELDS if field in theirs]
    for name, of_base, of_model in facts:
        if of_base != of_model:
            raise CheckpointError(
                f"{base.path}: {name} {of_base}, but the model has {of_model}; expected the base that the model is "
                "trained from. Name that one."
            )
    return base
