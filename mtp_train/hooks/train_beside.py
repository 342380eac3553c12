"""Train the MTP head while another trainer fine-tunes the model: one line after the trainer is created.

    from mtp_train import train_head_beside

    train_head_beside(trainer)  # transformers' Trainer or TRL's SFTTrainer, with or without peft

The head is trained towards the model's current distribution (KL): in every training forward it reads the hidden states
of the trainer's own forward pass. No gradient flows into the model, because gradients of the head's loss are known to
hurt it: its training stays the same, bit for bit. The model's modules, config and random numbers are unchanged; hooks
are on it only while ``train()`` runs. Saved checkpoints (see ``hooks/keep_head.py``) contain the head as trained so
far, and the trainer's logs contain its loss.

Shapes: B rows, T tokens, K depths.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mtp_train.checkpoints.adapter import is_adapter
from mtp_train.checkpoints.artifact import Artifact, save_artifact
from mtp_train.data.pack import PackedBatch
from mtp_train.errors import UnsupportedModelError
from mtp_train.heads.alignment import PADDING_DOCUMENT
from mtp_train.heads.build import build_head, graft_plan, trained_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.experts import autocast_dtype
from mtp_train.hooks.keep_head import inside, keep_head, kept_base
from mtp_train.losses.chunked import depth_weights, frozen_head_loss
from mtp_train.train.packed_rows import aligned_rows
from mtp_train.train.shard import shards_trunk
from mtp_train.trunk.load import Trunk

logger = logging.getLogger(__name__)

# A hidden file: copies, exports and uploads of a checkpoint leave it out.
STATE_FILE = ".mtp_head_state.safetensors"
HEAD_DIRECTORY = "mtp_head"
MOMENTS = ("exp_avg", "exp_avg_sq")
MAX_GRAD_NORM = 1.0


def train_head_beside(
    trainer: Trainer,
    base: str | Path | None = None,
    *,
    lr: float = 1e-4,
    num_depths: int = 3,
    depth_decay: float = 0.6,
) -> None:
    """Train the model's head during the trainer's ``train()``, and add it to every checkpoint that is saved.

    Every process has to hold the whole model: one process, data parallelism, or DeepSpeed's ZeRO-2. Checkpoints of an
    adapter get a head directory ``mtp_head`` instead, for ``mtp-train generate --head``.

    Args:
        trainer: A trainer, before ``train()``.
        base: The checkpoint with the initial head, see :class:`mtp_train.hooks.keep_head.KeepHead`.
        lr: AdamW's peak learning rate for the head; it follows the trainer's schedule.
        num_depths: Number of depths to train; at most the number of modules if each depth has a module of its own.
        depth_decay: The weight of depth k is proportional to this to the power k - 1.

    Raises:
        CheckpointError: There is no base, or it has no complete head for this model.
        UnsupportedModelError: The model's head is not supported in training, or the model is in shards.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.train_head_beside(trainer, num_depths=3)
        >>> trainer.train()  # logs mtp_loss, mtp_loss_1, mtp_loss_2, mtp_loss_3
    """
    keep_head(trainer.model, base)
    callback = HeadBeside(trainer.model, trainer.accelerator, lr=lr, num_depths=num_depths, depth_decay=depth_decay)
    # First of all callbacks, so that those that write logs find the head's loss in them.
    trainer.callback_handler.callbacks.insert(0, callback)
    train = trainer.train

    @functools.wraps(train)
    def train_and_release(*arguments: Any, **named: Any) -> Any:
        try:
            return train(*arguments, **named)
        finally:
            # An interrupted training does not call on_train_end.
            callback.release()

    trainer.train = train_and_release


class HeadBeside(TrainerCallback):
    """The callback that holds the head and its optimiser and trains it; see :func:`train_head_beside`."""

    def __init__(self, model: Any, accelerator: Accelerator, *, lr: float, num_depths: int, depth_decay: float) -> None:
        self.model, self.accelerator, self.lr = inside(model), accelerator, lr
        base = kept_base(model)
        self.plan = graft_plan(base, base, "auto")
        with unchanged_random_state(self.model.device):
            self.head = build_head(self.plan, text_config_of(base), dtype=torch.float32).to(self.model.device)
        if self.head.chaining != "recursive":
            num_depths = min(num_depths, len(self.head.blocks))
        self.head.freeze_unused(num_depths)
        # Keep peft's wrapper: the trunk detects an adapter by it.
        self.trunk = Trunk(extract_model_from_parallel(model, keep_torch_compile=False), base.family, is_view=True)
        self.weight_K = torch.tensor(depth_weights(num_depths, depth_decay), device=self.model.device)
        self.named = {name: value for name, value in self.head.named_parameters() if value.requires_grad}
        self.optimizer = torch.optim.AdamW(self.named.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.window = torch.zeros(2, num_depths, device=self.model.device)
        """Sums of loss and targets of each depth since the last log, shape (2, K)."""
        self._targets = torch.zeros((), device=self.model.device)
        """The number of targets since the last step."""
        self._arguments: dict[str, Any] = {}
        self._micro_batches = 0
        self._told = False
        self._hooks: list[RemovableHandle] = []
        self.model.save_pretrained.trained = self.native_values

    def native_values(self) -> list[Tensor]:
        return [pending.load() for pending in trained_head(self.plan, self.head.state_dict()).tensors]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Add the hooks to the model, and restore the head if the trainer resumes from a checkpoint."""
        if shards_trunk(self.accelerator):
            kind = self.accelerator.distributed_type.value
            raise UnsupportedModelError(
                f"train_head_beside: the model is in shards ({kind}); expected it whole in every process. Train the "
                "head after it, in shards: mtp-train init writes the recipe."
            )
        # A trainer that retries with smaller batches calls on_train_begin again without on_train_end.
        self.release()
        self.optimizer.zero_grad()
        self._micro_batches = 0
        self.window.zero_()
        self.head.to(self.model.device).train()
        self.trunk.listen()
        self.trunk.show_layers(self.head.trunk_layers)
        self._hooks = [
            self.model.register_forward_pre_hook(self._keep_arguments, with_kwargs=True),
            self.trunk.decoder.register_forward_hook(self._learn, with_kwargs=True),
        ]
        if state.global_step:
            self.restore(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Remove the hooks, and restore the head of the best checkpoint if the trainer loaded that."""
        self.release()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.restore(Path(state.best_model_checkpoint))

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._arguments = {}
        self.trunk.release()

    def _keep_arguments(self, _model: nn.Module, _inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._arguments = named

    def _learn(self, decoder: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Add the gradient of the head's loss on the decoder's output to the gradients of the head's parameters."""
        hidden_BTD = self.trunk.last_state(output).detach()
        outer = self._arguments
        self._arguments = {}
        tokens_BT = inputs[0] if inputs else named.get("input_ids")
        if tokens_BT is None:
            # A vision-language model embeds the tokens before it calls its decoder: take them from the outer call.
            tokens_BT = outer.get("input_ids")
        with_images = any(name.startswith("pixel_values") for name in outer)
        if not decoder.training or not torch.is_grad_enabled() or tokens_BT is None or with_images:
            return
        batch = batch_of(tokens_BT, named.get("attention_mask"), named.get("position_ids"), outer.get("labels"))
        # The trainer uses no autocast for a model in bf16, but the head is in fp32 and needs it.
        dtype = hidden_BTD.dtype
        autocast = None if dtype == torch.float32 else dtype
        # A head with dropout would use up random numbers of the model's own dropout.
        with unchanged_random_state(self.model.device):
            rows = aligned_rows(self.trunk, self.head, batch, hidden_BTD, len(self.weight_K), autocast=autocast)
        count_K = rows.valid_KN.sum(dim=1)
        scale_K = self.weight_K / count_K.clamp(min=1)
        terms = frozen_head_loss(
            rows.student_KND,
            rows.teacher_ND,
            self.trunk.lm_head_VD,
            rows.targets_N,
            rows.valid_KN.float() * scale_K[:, None],
            kind="kl",
            own_heads=self.head.own_lm_heads(len(self.weight_K)),
            compute_dtype=autocast_dtype(hidden_BTD.device),
        )
        # Gradients of the head's own parameters only: it also uses the model's embedding and norm.
        gradients = torch.autograd.grad(terms.total, list(self.named.values()), materialize_grads=True)
        for parameter, gradient in zip(self.named.values(), gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._micro_batches += 1
        self.window += torch.stack([terms.sum_K.detach(), count_K])
        self._targets += count_K.sum()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, optimizer: Any, **others: Any
    ) -> None:
        """Step the head's optimiser together with the model's, after all micro-batches."""
        if not self._told and not self._targets:
            self._told = True
            logger.warning(
                "Step %d: no batch had a target for the head: %s. The head is not trained by such batches.",
                state.global_step + 1,
                "labels of -100 alone" if self._micro_batches else "no input_ids, or images",
            )
        self._targets.zero_()
        parameters = self.named.values()
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.accelerator.reduce(gradient / max(self._micro_batches, 1))
        nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * optimizer.param_groups[0]["lr"] / args.learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._micro_batches = 0

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Add the mean loss of each depth since the last log of the training loss, over all processes."""
        if logs is None or "loss" not in logs:
            return
        self.window = self.accelerator.reduce(self.window, "sum")
        if not self.window[1].any():
            return
        sums_K, count_K = self.window
        mean_K = sums_K / count_K.clamp(min=1)
        found = {
            "mtp_loss": float(mean_K @ self.weight_K),
            **{f"mtp_loss_{depth}": float(mean) for depth, mean in enumerate(mean_K, start=1)},
        }
        logs.update(found)
        state.log_history[-1].update(found)
        self.window.zero_()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Save the head's training state in a checkpoint, and the head itself beside an adapter."""
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if not state.is_world_process_zero or not directory.is_dir():
            return
        temporary = directory / f"{STATE_FILE}.tmp"
        save_file(self.state(), temporary)
        temporary.replace(directory / STATE_FILE)
        if is_adapter(directory):
            shutil.rmtree(directory / HEAD_DIRECTORY, ignore_errors=True)
            trained = replace(self.plan, head=trained_head(self.plan, self.head.state_dict()))
            save_artifact(
                Artifact(**vars(trained), num_depths=len(self.weight_K), notes={"trained": "beside the model"}),
                directory / HEAD_DIRECTORY,
            )

    def state(self) -> dict[str, Tensor]:
        found = {f"weight.{name}": value.detach() for name, value in self.named.items()}
        for name, value in self.named.items():
            found |= {f"{field}.{name}": entry for field, entry in self.optimizer.state[value].items()}
        return {name: value.cpu().contiguous() for name, value in found.items()}

    def restore(self, checkpoint: Path) -> None:
        """Load weights and moments from a checkpoint; without any, warn and keep the current head."""
        if not (checkpoint / STATE_FILE).is_file():
            logger.warning("%s: has no state of the head; it starts from %s.", checkpoint, kept_base(self.model).path)
            return
        found = load_file(checkpoint / STATE_FILE)
        for name, value in self.named.items():
            value.data.copy_(found[f"weight.{name}"])
            moments = {field: found[f"{field}.{name}"].to(value.device) for field in MOMENTS}
            self.optimizer.state[value] = {"step": found[f"step.{name}"], **moments}


def unchanged_random_state(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restore torch's random state at the end of the block, on the CPU and on a device."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def batch_of(tokens_BT: Tensor, mask: Any, positions_BT: Tensor | None, labels_BT: Tensor | None) -> PackedBatch:
    """Return the tokens of a forward pass as a training batch of the head, with padding and packed documents separated.

    The attention mask counts where it has the shape of the tokens. Positions restart at each document of a packed row;
    labels of -100 mark tokens that are no targets.
    """
    real_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.shape == tokens_BT.shape:
        real_BT = mask.bool()
    if positions_BT is None or positions_BT.ndim != 2:
        positions_BT = real_BT.cumsum(dim=1) - 1
    positions_BT = positions_BT.expand_as(tokens_BT).clamp(min=0)
    starts_BT = positions_BT[:, 1:] != positions_BT[:, :-1] + 1
    document_BT = torch.nn.functional.pad((starts_BT & real_BT[:, :-1]).cumsum(dim=1), (1, 0))
    told = labels_BT is not None and labels_BT.shape == tokens_BT.shape
    wanted_BT = real_BT & (labels_BT != -100) if told else real_BT
    return PackedBatch(tokens_BT, positions_BT, document_BT.masked_fill(~real_BT, PADDING_DOCUMENT), wanted_BT)
