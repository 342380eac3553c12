"""``mtp-train graft``: put the base's MTP head back on a fine-tune, without training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mtp_train.checkpoints.contents import left_out, unnamed_files
from mtp_train.checkpoints.export import LinkMode, write_checkpoint
from mtp_train.checkpoints.files import is_gguf, open_checkpoint
from mtp_train.checkpoints.gguf.sidecar import GgufKind
from mtp_train.checkpoints.keymap import REDUCED_OUTPUT
from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.suggestions import export_command, probe_command
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.checkpoints.writing import refuse_existing, removed_on_failure
from mtp_train.errors import MtpError
from mtp_train.heads.build import graft_plan
from mtp_train.heads.diagnose import diagnose_head
from mtp_train.runs.checkpoint_tools.gguf_files import GgufGraftResult, graft_gguf
from mtp_train.runs.checkpoint_tools.inspect import SUGGESTED_DEPTH, serving_commands
from mtp_train.runs.display import quiet_progress, serving_lines
from mtp_train.runs.export import write_untrained_card
from mtp_train.runs.run_directory import checkpoint_identity
from mtp_train.trunk.whole import first_of, require_whole_trunk


@dataclass(frozen=True)
class GraftResult:
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

    def to_json(self) -> dict[str, Any]:
        return {"out": str(self.out), "serves": dict(self.serves), "notes": self.notes}

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
