"""``mtp-train push``: upload an export to the hub; without ``--yes`` only say what would be uploaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress

from mtp_train.commands.inspect import head_status
from mtp_train.cures import export_command, graft_command, named_base
from mtp_train.errors import CheckpointError, MtpError
from mtp_train.heads.diagnose import diagnose_head, layout_of
from mtp_train.heads.draft_model import DraftModel, diagnose_draft, draft_model
from mtp_train.heads.whole import holds_trunk, require_whole_trunk
from mtp_train.inputs import refuse_adapter
from mtp_train.model_card import CARD_FILE
from mtp_train.weights.export import source_files
from mtp_train.weights.files import Checkpoint, open_checkpoint
from mtp_train.weights.finite import require_finite_checkpoint

COMMIT_MESSAGE = "Upload a checkpoint with its MTP head (mtp-train)"


@dataclass(frozen=True)
class Upload:
    """What is, or would be, uploaded."""

    export: str
    repo: str
    files: dict[str, int]
    """Size in bytes by path in the repository."""
    uploaded: bool
    url: str | None
    """The commit; None where nothing was uploaded."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "total_bytes": sum(self.files.values())}

    def to_text(self) -> str:
        """Return the upload for a reader."""
        total = sum(self.files.values())
        lines = [f"{self.export} -> https://huggingface.co/{self.repo}: {len(self.files)} files, {total:,} bytes"]
        lines += [f"  {size:>15,}  {name}" for name, size in self.files.items()]
        if CARD_FILE not in self.files:
            lines.append(f"There is no {CARD_FILE}: the hub will show no model card.")
        if self.uploaded:
            return "\n".join([*lines, f"Uploaded: {self.url}"])
        return "\n".join(
            [*lines, "Nothing was uploaded. Add --yes to upload it with your token (a new repository is private)."]
        )


def push(export: Path, repo: str, *, yes: bool, progress: Progress) -> Upload:
    """Upload a checkpoint with a healthy head, or a whole draft model, or say what would be uploaded.

    Args:
        export: The checkpoint or draft model.
        repo: The model repository, ``owner/name``. It is made where there is none, and is then private.
        yes: Whether to upload.
        progress: Where to show progress.

    Raises:
        CheckpointError: It has no healthy head, or a weight is not finite.
        MtpError: The repository's name is none, or the hub refused the upload.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise MtpError(f"{repo}: {error}; expected the name of a repository. Write OWNER/NAME.") from None
    checkpoint = _require_healthy(export, progress)
    files = {str(file.relative_to(export)): file.stat().st_size for file in source_files(checkpoint)}
    if not yes:
        return Upload(str(export), repo, files, uploaded=False, url=None)
    api = HfApi()
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=export, allow_patterns=list(files), commit_message=COMMIT_MESSAGE
        )
    # The hub's own errors are among these.
    except (OSError, httpx.HTTPError) as error:
        reason = " ".join(str(error).split())
        raise MtpError(
            f"{repo}: the hub refused the upload ({type(error).__name__}: {reason}); expected a network and a token "
            "that may write there. Run 'hf auth login', then the same command again."
        ) from error
    return Upload(str(export), repo, files, uploaded=True, url=str(commit.commit_url))


def _require_healthy(export: Path, progress: Progress) -> Checkpoint:
    refuse_adapter(export, str(export))
    checkpoint = open_checkpoint(export)
    draft = draft_model(checkpoint)
    if draft is not None:
        _require_whole(draft)
        require_finite_checkpoint(checkpoint, progress)
        return checkpoint
    diagnosis = diagnose_head(checkpoint)
    status = head_status(diagnosis, base_has_head=False)
    if status != "healthy":
        undeclared = status == "undeclared"
        cure = export_command(str(export)) if undeclared else graft_command(str(export), named_base(export) or "BASE")
        found = "its config does not declare the head that it holds" if undeclared else diagnosis.describe()
        raise CheckpointError(f"{export}: {found}; expected a checkpoint with a healthy head. Run '{cure}' first.")
    # A head alone is a draft model for its trunk, which is pushed on its own.
    if holds_trunk(checkpoint, layout_of(checkpoint)):
        require_whole_trunk(checkpoint)
    require_finite_checkpoint(checkpoint, progress)
    return checkpoint


def _require_whole(draft: DraftModel) -> None:
    diagnosis = diagnose_draft(draft)
    if not diagnosis.complete:
        raise CheckpointError(
            f"{draft.checkpoint.path}: {diagnosis.describe()}; expected a whole {draft.title}. Export it again."
        )
