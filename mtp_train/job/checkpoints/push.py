"""``mtp-train push``: upload an export to the Hugging Face hub; a dry run by default."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress

from mtp_train.errors import CheckpointError, MtpError
from mtp_train.heads.diagnose import diagnose_head, layout_of
from mtp_train.heads.draft_model import DraftModel, diagnose_draft, draft_model
from mtp_train.job.checkpoints.inspect import head_status
from mtp_train.job.display import quiet_progress
from mtp_train.job.model_card import CARD_FILE
from mtp_train.trunk.whole import holds_trunk, require_whole_trunk
from mtp_train.weights.contents import source_files, unnamed_weights
from mtp_train.weights.files import CONFIG_FILE, Checkpoint, locate_checkpoint, open_checkpoint, read_json
from mtp_train.weights.finite import require_finite_checkpoint
from mtp_train.weights.locations import refuse_adapter
from mtp_train.weights.suggestions import export_command, graft_command, named_base

# What a model repository needs beside its weights; everything else stays here.
_PUBLISHED = re.compile(
    r"(?:(?:generation|tokenizer|adapter|head|quantization|quantize|hf_quant)_)?config\.json"
    r"|(?:[a-z]+_)?(?:pre)?processor_config\.json|.*\.safetensors\.index\.json"
    r"|tokenizer\.(?:json|model)|(?:spiece|sentencepiece\.bpe)\.model|.*\.tiktoken|tekken\.json"
    r"|(?:vocab|added_tokens|special_tokens_map)\.(?:json|txt)|merges\.txt"
    r"|chat_template.*\.(?:json|jinja)|additional_chat_templates/.+\.jinja"
    rf"|{re.escape(CARD_FILE)}|(?:LICENSE|LICENCE|NOTICE|USE_POLICY|COPYING)(?:\.(?:txt|md))?",
    re.IGNORECASE,
)
_IMPORTED = re.compile(r"^\s*from\s+\.(\w+)\s+import|^\s*from\s+\.\s+import\s+(\w+)", re.MULTILINE)
COMMIT_MESSAGE = "Upload a checkpoint with its MTP head (mtp-train)"


@dataclass(frozen=True)
class PushResult:
    """The files that :func:`push` uploaded, or would upload."""

    export: str
    repo: str
    files: dict[str, int]
    """Size in bytes by path in the repository."""
    left_out: tuple[str, ...]
    """Other files of the directory, which stay on this machine: no model repository needs them."""
    uploaded: bool
    url: str | None
    """URL of the commit; None for a dry run."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as ``mtp-train push --json`` prints them."""
        return {**asdict(self), "total_bytes": sum(self.files.values())}

    def __str__(self) -> str:
        total = sum(self.files.values())
        lines = [f"{self.export} -> https://huggingface.co/{self.repo}: {len(self.files)} files, {total:,} bytes"]
        lines += [f"  {size:>15,}  {name}" for name, size in self.files.items()]
        if self.left_out:
            lines.append(f"Left out, as no model needs them: {', '.join(self.left_out)}.")
        if CARD_FILE not in self.files:
            lines.append(f"There is no {CARD_FILE}: the hub will show no model card.")
        lines.append(f"Uploaded: {self.url}" if self.uploaded else "Nothing was uploaded.")
        return "\n".join(lines)


def push(export: str | Path, repo: str, *, dry_run: bool = True, progress: Progress | None = None) -> PushResult:
    """Upload a checkpoint with a healthy head, or a complete draft model. By default only list its files.

    Args:
        export: The checkpoint or draft model, a local directory.
        repo: The model repository, ``owner/name``. A new repository is private.
        dry_run: Upload nothing.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        CheckpointError: The checkpoint has no healthy head, or a weight is not finite.
        MtpError: ``repo`` is no valid name, or the hub refused the upload.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.push("runs/my-27b/export", "me/my-27b-mtp").files["config.json"]
        1847
        >>> mtp.push("runs/my-27b/export", "me/my-27b-mtp", dry_run=False).url
        'https://huggingface.co/me/my-27b-mtp/commit/...'
    """
    export, progress = Path(export), progress or quiet_progress()
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise MtpError(f"{repo}: {error}; expected the name of a repository. Write OWNER/NAME.") from None
    checkpoint = _require_healthy(locate_checkpoint(str(export)), progress)
    export = checkpoint.path
    sizes = {file.relative_to(export).as_posix(): file.stat().st_size for file in source_files(checkpoint)}
    published = published_files(checkpoint, sizes)
    files = {name: size for name, size in sizes.items() if name in published}
    left_out = (*(name for name in sizes if name not in published), *unnamed_weights(checkpoint))
    if dry_run:
        return PushResult(str(export), repo, files, left_out, uploaded=False, url=None)
    api = HfApi()
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=export, allow_patterns=list(files), commit_message=COMMIT_MESSAGE
        )
    # huggingface_hub's own errors derive from these two.
    except (OSError, httpx.HTTPError) as error:
        reason = " ".join(str(error).split())
        raise MtpError(
            f"{repo}: the hub refused the upload ({type(error).__name__}: {reason}); expected a network and a token "
            "that may write there. Run 'hf auth login', then the same command again."
        ) from error
    return PushResult(str(export), repo, files, left_out, uploaded=True, url=str(commit.commit_url))


def published_files(checkpoint: Checkpoint, names: Collection[str]) -> set[str]:
    """Return the files that a model repository needs, as paths from its root.

    These are weights and index, configs, tokenizer, processor, templates, card and licence, the code that a config's
    ``auto_map`` names (with the modules of the directory that it imports), and files that the card shows.

    Args:
        checkpoint: The checkpoint.
        names: All files of its directory.
    """
    root = checkpoint.path
    kept = {info.file for info in checkpoint.tensors.values()} | {name for name in names if _PUBLISHED.fullmatch(name)}
    if CARD_FILE in names:
        card = (root / CARD_FILE).read_text(encoding="utf-8", errors="replace")
        kept |= {name for name in names if "/" in name and name in card}
    waiting = [
        name
        for config in kept
        if config.endswith("_config.json") or config == CONFIG_FILE
        for name in _code_files(read_json(root / config))
    ]
    while waiting:
        name = waiting.pop()
        if name in names and name not in kept:
            kept.add(name)
            code = (root / name).read_text(encoding="utf-8", errors="replace")
            waiting += [f"{module or other}.py" for module, other in _IMPORTED.findall(code)]
    return kept & {*names}


def _code_files(config: Mapping[str, Any]) -> list[str]:
    """Return the modules that an ``auto_map`` names: ``module.Class``, a list of such, or one of another repository."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return []
    listed = [one for value in auto_map.values() for one in (value if isinstance(value, list) else [value])]
    here = [one for one in listed if isinstance(one, str) and "--" not in one]
    return [f"{one.rpartition('.')[0].replace('.', '/')}.py" for one in here]


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
        keeps = undeclared or diagnosis.unnamed_in
        cure = export_command(str(export)) if keeps else graft_command(str(export), named_base(export) or "BASE")
        found = "its config does not declare the head that it holds" if undeclared else diagnosis.describe()
        raise CheckpointError(f"{export}: {found}; expected a checkpoint with a healthy head. Run '{cure}' first.")
    # A head-only export has no trunk to check.
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
