"""Keep a model's MTP head while another trainer fine-tunes the model: one line in the user's own script.

    from mtp_train import KeepHead

    trainer = Trainer(model=model, ..., callbacks=[KeepHead()])  # or TRL's SFTTrainer, with or without peft

transformers has no module for the head, so checkpoints that it saves lack the head. ``Trainer.save_model`` calls no
callback, but all saving goes through the model's own ``save_pretrained``, which is replaced here. The trainer's
checkpoints, its last save, and the save of a LoRA merged with ``merge_and_unload`` then contain the base's head, byte
for byte, in a shard of its own. This head is stale, as after ``mtp-train graft``: retrain it after the fine-tune.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mtp_train.checkpoints.adapter import is_adapter, merge_command
from mtp_train.checkpoints.export import add_in_place
from mtp_train.checkpoints.files import INDEX_FILE, SINGLE_FILE, Checkpoint, open_checkpoint
from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.native import native_head_of
from mtp_train.checkpoints.suggestions import graft_command
from mtp_train.checkpoints.writing import held_tensor
from mtp_train.errors import CheckpointError, MtpError, UnsupportedModelError
from mtp_train.families import family_for, raw_text_config
from mtp_train.heads.build import graft_plan
from mtp_train.heads.diagnose import diagnose_head

logger = logging.getLogger(__name__)

SAME_SHAPE_FIELDS = ("hidden_size", "num_hidden_layers")


class KeepHead(TrainerCallback):
    """Add the base's head to every checkpoint that a ``Trainer`` saves.

    Passed to ``Trainer(callbacks=...)``, it takes effect at once; added later, at the start of ``train()``.

    Args:
        base: The checkpoint with the head: a directory, a hub id or ``demo:NAME``. None is the checkpoint that the
            model was loaded from.

    Raises:
        CheckpointError: On creation of the trainer: there is no base, or it has no complete head for this model.
        UnsupportedModelError: On creation of the trainer: the model belongs to no family with heads.

    Example:
        >>> import mtp_train as mtp
        >>> trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[mtp.KeepHead()])
        >>> trainer.train()
    """

    def __init__(self, base: str | Path | None = None) -> None:
        self.base = base
        self._told = False

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any = None, **others: Any
    ) -> None:
        """Replace the model's ``save_pretrained``, unless ``model_init`` creates the model later."""
        if model is not None:
            keep_head(model, self.base)

    # At the start of train(), if that is still to do.
    on_train_begin = on_init_end

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any, **others: Any
    ) -> None:
        """Warn once if checkpoints hold no model to add a head to, but an adapter or shards in the trainer's format."""
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._told or not state.is_world_process_zero or not directory.is_dir() or _holds_model(directory):
            return
        self._told = True
        base = str(kept_base(model).path)
        adapter = is_adapter(directory)
        logger.warning(
            "%s: holds %s, so that the head stays in %s. It is added when the whole model is saved (save_pretrained, "
            "after merge_and_unload), and by: %s",
            directory,
            "an adapter and no model" if adapter else "the model in shards of the trainer's own format",
            base,
            merge_command(base, str(directory)) if adapter else graft_command("MERGED", base),
        )


def keep_head(model: Any, base: str | Path | None = None) -> None:
    """Make every ``save_pretrained`` of a model write the base's head too, in scripts without a ``Trainer``.

    ``save_pretrained(push_to_hub=True)`` uploads before the head is written; ``push_to_hub()`` and the trainer's own
    uploads include the head.

    Args:
        model: A transformers model, plain or wrapped by peft, ``torch.compile`` or a wrapper for several devices.
        base: See :class:`KeepHead`.

    Raises:
        CheckpointError: There is no base, or it has no complete head for this model.
        UnsupportedModelError: The model belongs to no family with heads.

    Example:
        >>> import mtp_train as mtp
        >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3.6-27B")
        >>> mtp.keep_head(model)
        >>> model.save_pretrained("my-27b")  # with the head of Qwen/Qwen3.6-27B
    """
    inner = inside(model)
    if not isinstance(vars(inner).get("save_pretrained"), _SaveWithHead):
        inner.save_pretrained = _SaveWithHead(inner, _open_base(inner, base))


def kept_base(model: Any) -> Checkpoint:
    """Return the checkpoint whose head :func:`keep_head` adds to a model's saves."""
    return inside(model).save_pretrained.base


class _SaveWithHead:
    """Replacement of one model's ``save_pretrained``. A copy of the model gets a copy of it."""

    def __init__(self, model: PreTrainedModel, base: Checkpoint) -> None:
        self.model = model
        self.base = base
        self.trained: Callable[[], list[Tensor]] | None = None
        """Returns the head's tensors in the order of :func:`native_head_of`; None for the base's own tensors."""

    def __call__(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **settings: Any,
    ) -> None:
        """Save as transformers does, then add the head. A failure to add it is logged and does not stop training."""
        directory = Path(save_directory)
        overwrites = is_main_process and directory.resolve() == self.base.path.resolve()
        held = None
        if is_main_process and self.trained is not None:
            held = self.trained()
        elif overwrites:
            held = [pending.load().clone() for pending in native_head_of(self.base, self.base.layout).tensors]
        type(self.model).save_pretrained(self.model, save_directory, is_main_process, state_dict, **settings)
        # DeepSpeed first saves a file without tensors, which it removes again.
        is_empty = state_dict is not None and not state_dict
        if not is_main_process or is_empty or not _holds_model(directory):
            return
        try:
            put_head(directory, self.base, held, trained=self.trained is not None)
            if overwrites:
                self.base = open_checkpoint(directory)
        except (MtpError, OSError) as error:
            logger.warning(
                "%s: saved without its MTP head: %s To add it later: %s",
                directory,
                error,
                graft_command(str(directory), str(self.base.path)),
            )


def put_head(directory: Path, base: Checkpoint, values: list[Tensor] | None, *, trained: bool) -> None:
    """Add the base's head, or other ``values`` for it, to a saved checkpoint, unless it has a complete head."""
    saved = open_checkpoint(directory)
    if diagnose_head(saved).complete:
        return
    plan = graft_plan(saved, base, "auto")
    head = plan.head
    if values is not None:
        tensors = (held_tensor(one.key, one.dtype, value) for one, value in zip(head.tensors, values, strict=True))
        head = replace(head, tensors=tuple(tensors), trained=trained or head.trained)
    add_in_place(saved, head)


def _holds_model(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


def inside(model: Any) -> PreTrainedModel:
    """Return the transformers model inside the wrappers of peft, ``torch.compile`` and training on several devices."""
    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
    inner = unwrapped.get_base_model() if isinstance(unwrapped, PeftModel) else unwrapped
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(
            f"KeepHead: the model is a {type(inner).__name__}; expected a transformers model, or one wrapped by peft. "
            "Save it, then use mtp-train graft."
        )
    return inner


def _open_base(model: PreTrainedModel, named: str | Path | None) -> Checkpoint:
    location = str(named or model.config.name_or_path)
    if not location:
        raise CheckpointError(
            "KeepHead: the model was not loaded from a checkpoint; expected a checkpoint with the head. Name it: "
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
    ours = raw_text_config(config)
    theirs = base.text_config
    shape = [(field, theirs[field], ours.get(field)) for field in SAME_SHAPE_FIELDS if field in theirs]
    for name, of_base, of_model in (("family", base.family.title, family.title), *shape):
        if of_base != of_model:
            raise CheckpointError(
                f"{base.path}: {name} {of_base}, but the model has {of_model}; expected the base that the model is "
                "trained from. Name that checkpoint."
            )
    return base
