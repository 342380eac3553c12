"""``mtp-train merge``: a LoRA adapter into a checkpoint's own layout, its head kept as it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mtp_train.commands.inspect import SUGGESTED_DEPTH
from mtp_train.cures import attach_command, graft_command, retrain_command
from mtp_train.heads.diagnose import layout_of
from mtp_train.heads.whole import require_whole_trunk
from mtp_train.inputs import open_location
from mtp_train.model_card import write_merge_card
from mtp_train.run_dir import checkpoint_identity
from mtp_train.weights.adapter import read_adapter
from mtp_train.weights.export import LinkMode
from mtp_train.weights.files import locate_checkpoint
from mtp_train.weights.finite import require_finite_checkpoint
from mtp_train.weights.merge import Merged, plan_changes, write_merged
from mtp_train.weights.writing import refuse_existing


@dataclass(frozen=True)
class MergeReport:
    """What was merged into what, and what to do about the head now."""

    out: str
    checkpoint: str
    adapter: str
    merged: Merged
    attached: bool
    """Whether its releases carry no head."""

    @property
    def cure(self) -> str:
        """The next command: retrain the head that went stale with the trunk, or put back or train a missing one."""
        if self.merged.head_keys:
            return retrain_command(self.out, self.checkpoint)
        return attach_command(self.out) if self.attached else graft_command(self.out, "BASE")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        values = asdict(self) | {"cure": self.cure}
        return values | values.pop("merged")

    def to_text(self) -> str:
        """Return the report for a reader."""
        merged = self.merged
        shards = merged.shards_rewritten + merged.shards_kept
        lines = [
            f"Wrote {self.out}: {merged.num_tensors} tensors changed, in {merged.shards_rewritten} of {shards} files."
        ]
        if merged.head_keys:
            lines.append(
                f"Its head is that of {self.checkpoint}, bit for bit, and stale now that the trunk has moved: "
                f"mtp-train inspect --base {self.checkpoint} says so. Retrain it: {self.cure}"
            )
        else:
            what = "Attach one" if self.attached else "Put the base's back"
            lines.append(f"It has no head, like {self.checkpoint}. {what}: {self.cure}")
        return "\n".join(lines)


def merge(checkpoint: str, adapter: str, out: Path, *, link: LinkMode, progress: Progress) -> MergeReport:
    """Write a checkpoint with an adapter merged into its trunk.

    Args:
        checkpoint: A path, a hub id or ``demo:NAME``.
        adapter: A peft adapter directory, or its hub id.
        out: The new directory.
        link: Hard-link files without a changed tensor, or copy them.
        progress: Where to show progress.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The adapter is none that can be merged, does not fit, or a weight is not finite.
    """
    refuse_existing(out, what="the checkpoint")
    lora = read_adapter(locate_checkpoint(adapter))
    source = open_location(checkpoint)
    layout = layout_of(source)
    changes = plan_changes(source, layout, lora)
    require_whole_trunk(source, adapter_beside=True)
    require_finite_checkpoint(source, progress)
    merged = write_merged(source, layout, changes, out, link=link, progress=progress)
    depths = SUGGESTED_DEPTH if merged.head_keys else None
    write_merge_card(out, checkpoint_identity(checkpoint, source), adapter, depths)
    return MergeReport(str(out), checkpoint, adapter, merged, source.family.attached)
