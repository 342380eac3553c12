"""``mtp-train graft`` and ``mtp-train merge``: put two checkpoints together without training.

``graft`` puts the base's MTP head back on a fine-tune. ``merge`` merges a LoRA adapter into a checkpoint, whose layout
and MTP head stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mtp_train.checkpoints.adapter import read_adapter, tokenizer_files
from mtp_train.checkpoints.contents import left_out, unnamed_files
from mtp_train.checkpoints.export import LinkMode, write_checkpoint
from mtp_train.checkpoints.files import is_gguf, open_checkpoint
from mtp_train.checkpoints.gguf.sidecar import GgufKind
from mtp_train.checkpoints.keymap import REDUCED_OUTPUT
from mtp_train.checkpoints.locations import locate_checkpoint, open_location
from mtp_train.checkpoints.lora_merge import Merged, plan_changes, resized, write_merged
from mtp_train.checkpoints.suggestions import export_command, graft_command, probe_command, train_command
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.checkpoints.writing import refuse_existing, removed_on_failure
from mtp_train.errors import MtpError
from mtp_train.heads.build import graft_plan
from mtp_train.heads.diagnose import diagnose_head, layout_of
from mtp_train.runs.checkpoint_tools.gguf_files import GgufGraftResult, graft_gguf
from mtp_train.runs.checkpoint_tools.inspect import SUGGESTED_DEPTH, serving_commands
from mtp_train.runs.display import Shown, quiet_progress, serving_lines
from mtp_train.runs.export import write_untrained_card
from mtp_train.runs.run_directory import checkpoint_identity
from mtp_train.trunk.tokenizer import load_tokenizer
from mtp_train.trunk.whole import first_of, require_whole_trunk


@dataclass(frozen=True)
class GraftResult(Shown):
    """The checkpoint that :func:`graft` wrote."""

    out: Path
    fine_tune: str
    """The trunk's checkpoint, as the caller named it."""
    base: str
    """The head's checkpoint, as the caller named it."""
    serves: Mapping[str, str]
    """Engine to the command that serves ``out``, or ``no: REASON``."""
    notes: tuple[str, ...] = ()
    """Sentences about weight files that were left out."""

    def __str__(self) -> str:
        served = (f"{engines}: {text}" for engines, text in serving_lines(self.serves))
        wrote = f"Wrote {self.out}: the trunk of {self.fine_tune}, the head of {self.base}."
        next_step = f"Would training it pay? {probe_command(self.fine_tune, self.base)}"
        return "\n".join([wrote, *self.notes, *served, next_step])


def graft(
    fine_tune: str | Path,
    base: str | Path,
    out: str | Path,
    *,
    head: GgufKind | None = None,
    copy: bool = False,
    progress: Progress | None = None,
) -> GraftResult | GgufGraftResult:
    """Write a fine-tune together with the MTP head of its base. Every tensor keeps its bytes.

    Args:
        fine_tune: The checkpoint without its head: a directory, a hub id, ``demo:NAME``, or a GGUF file.
        base: The checkpoint to take the head from, of the same trunk shape; for a GGUF file also one with a head.
        out: The new directory, or the new GGUF file.
        head: Storage of the head in a GGUF file: ``"q8_0"``, ``"f16"``, ``"bf16"`` or ``"f32"``; None for Q8_0, or as
            the base's GGUF file has it.
        copy: Copy unchanged files; False hard-links them where the file system allows.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The base has no complete head, its trunk has another shape, or a weight is not finite.
        UnsupportedModelError: No family record fits one of the two.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.graft("demo:finetune", "demo:base", "grafted").serves["vllm"]
        'vllm serve grafted ...'
    """
    out, progress = Path(out), progress or quiet_progress()
    link: LinkMode = "copy" if copy else "hard"
    if is_gguf(fine_tune):
        return graft_gguf(Path(fine_tune), str(base), out, head, link, progress)
    if head is not None:
        raise MtpError(
            f"--head: given for {fine_tune}, whose head keeps its bytes; expected a GGUF file. Leave it out."
        )
    trunk, donor = open_location(str(fine_tune)), open_location(str(base))
    refuse_existing(out, what="the checkpoint")
    plan = graft_plan(trunk, donor, "auto")
    require_whole_trunk(trunk)
    require_finite_checkpoint(trunk, progress)
    require_finite_checkpoint(donor, progress)
    write_checkpoint(trunk, plan.layout, plan.head, out, link=link)
    with removed_on_failure(out):
        identities = checkpoint_identity(str(fine_tune), trunk), checkpoint_identity(str(base), donor)
        write_untrained_card(out, *identities, None, SUGGESTED_DEPTH)
        written = open_checkpoint(out)
        serves = serving_commands(written, diagnose_head(written), "healthy")
    notes = left_out(unnamed_files(trunk, plan.layout))
    if diagnose_head(trunk).unnamed_in:
        command = export_command(str(trunk.path))
        notes += (f"The head among them was replaced by the base's. To keep it instead: {command}",)
    reduced = [key for key in donor.tensors if REDUCED_OUTPUT.fullmatch(key)]
    if reduced:
        notes += (f"Left out, as it is of {donor.path}'s own tokens: {first_of(reduced)}.",)
    return GraftResult(out, str(fine_tune), str(base), serves, notes)


@dataclass(frozen=True)
class MergeResult(Shown):
    """The checkpoint that :func:`merge` wrote, and the next command for its head."""

    out: str
    """The new directory."""
    checkpoint: str
    """The checkpoint that the adapter was merged into, as the caller named it."""
    adapter: str
    """The adapter, as the caller named it."""
    merged: Merged
    """Numbers of changed tensors, of shards, and of the head's tensors, and the files of the adapter's tokenizer."""
    attached: bool
    """Whether the family's releases have no MTP head, so that one has to be trained from scratch."""
    notes: tuple[str, ...] = ()
    """Sentences about weight files that were left out."""

    @property
    def cure(self) -> str:
        """The command to run next: measure what the head lost, put the base's head back, or train a new one.

        ``BASE`` in it stands for the base model, which is not known here.
        """
        if self.merged.head_keys:
            return probe_command(self.out, self.checkpoint)
        return train_command(self.out) if self.attached else graft_command(self.out, "BASE")

    def to_json(self) -> dict[str, Any]:
        values = super().to_json() | {"cure": self.cure}
        return values | values.pop("merged")

    def __str__(self) -> str:
        merged = self.merged
        shards = merged.shards_rewritten + merged.shards_kept
        lines = [
            f"Wrote {self.out}: {merged.num_tensors} tensors changed, in {merged.shards_rewritten} of {shards} files."
        ]
        if merged.head_keys:
            lines.append(
                f"Its head is the head of {self.checkpoint}, bit for bit, and was not trained for the merged trunk. "
                f"Measure whether it drafts worse: {self.cure}"
            )
        else:
            what = "Attach one" if self.attached else "Put the base's back"
            lines.append(f"It has no head, like {self.checkpoint}. {what}: {self.cure}")
        if merged.tokenizer_files:
            lines.append(f"Its tokenizer is the adapter's: {', '.join(merged.tokenizer_files)}.")
        return "\n".join([*lines, *self.notes])


def merge(
    checkpoint: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    copy: bool = False,
    progress: Progress | None = None,
) -> MergeResult:
    """Write a checkpoint with a LoRA adapter merged into its trunk. The model is not loaded; its head stays as it is.

    Args:
        checkpoint: The model that the adapter was trained on: a directory, a hub id or ``demo:NAME``.
        adapter: A peft LoRA adapter: a directory or a hub id.
        out: The new directory.
        copy: Copy files without a changed tensor; False hard-links them where the file system allows.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The adapter cannot be merged or does not fit, or a weight is not finite.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.merge("Qwen/Qwen3.6-27B", "my-lora", "my-27b").merged.num_tensors
        448
    """
    result_dir, checkpoint, adapter = Path(out), str(checkpoint), str(adapter)
    progress = progress or quiet_progress()
    refuse_existing(result_dir, what="the checkpoint")
    lora = read_adapter(locate_checkpoint(adapter))
    source = open_location(checkpoint)
    layout = layout_of(source)
    changes = plan_changes(source, layout, lora)
    require_whole_trunk(source, adapter_beside=True)
    if tokenizer_files(source.path, lora.path):
        # Refuses a token without an embedding.
        load_tokenizer(resized(source, layout, changes), trust_remote_code=False, adapter=lora.path)
    require_finite_checkpoint(source, progress)
    link: LinkMode = "copy" if copy else "hard"
    merged = write_merged(source, layout, lora.path, changes, result_dir, link=link, progress=progress)
    with removed_on_failure(result_dir):
        identity = checkpoint_identity(checkpoint, source)
        head_from = identity if merged.head_keys else None
        write_untrained_card(result_dir, identity, head_from, adapter, SUGGESTED_DEPTH)
    notes = left_out(unnamed_files(source, layout))
    return MergeResult(str(result_dir), checkpoint, adapter, merged, source.family.attached, notes)
