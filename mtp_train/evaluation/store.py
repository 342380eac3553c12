"""The decoded prompts of a study on disk, one line each, so that an interrupted study resumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mtp_train.answers.store import append_rows, whole_lines
from mtp_train.checkpoints.files import read_json
from mtp_train.checkpoints.identity import (
    RECORD_FILE,
    InputFiles,
    Records,
    hash_inputs,
    read_records,
    require_same,
    write_records,
)
from mtp_train.checkpoints.writing import LOCK_FILE, write_json
from mtp_train.errors import ChangedInputError, OutputExistsError
from mtp_train.evaluation.prompt_records import PromptRecord, Setting
from mtp_train.evaluation.results import REPORT_FILE, read_record

STUDY_FILE = "study.json"
MEASURED = "measured"


class Store:
    """The measurements in a directory.

    The directory is created with the first measurement, so that a refused study leaves none.

    Args:
        identity: Arms, grid and options as plain JSON. A directory with another identity is refused.
        writer: Number of this process. Several may write at a time once the first one, 0, has claimed the directory;
            each appends to files of its own, and reads those of all.

    Raises:
        OutputExistsError: The directory contains another study, or other files.
    """

    def __init__(self, out: Path, identity: dict[str, Any], writer: int = 0) -> None:
        self.out = out
        self.identity = identity
        self.writer = writer
        self._inputs: Mapping[str, InputFiles] = {}
        self._records: Records = {}
        _require_ours(out, identity)

    @property
    def is_finished(self) -> bool:
        return (self.out / REPORT_FILE).is_file()

    def hash_inputs(self, inputs: Mapping[str, InputFiles], progress: Progress) -> None:
        """Hash the inputs, and check that measurements in the directory, if any, were made from these."""
        self._inputs = inputs
        if (self.out / STUDY_FILE).is_file():
            require_same(self.out, inputs, progress, finished=self.is_finished, option="--out")
        if not self.is_finished:
            self._records = hash_inputs(inputs, read_records(self.out), progress)

    def require_unchanged(self, progress: Progress) -> None:
        """Check that the inputs did not change since they were hashed, so that the loaded weights match the hashes.

        Raises:
            ChangedInputError: An input changed.
        """
        found = hash_inputs(self._inputs, self._records, progress)
        changed = sorted(label for label, one in found.items() if one.contents != self._records[label].contents)
        if changed:
            raise ChangedInputError(
                f"--out: {self.out}: {', '.join(changed)} changed while it was measured; expected files that nobody "
                "writes to. Start again with another --out when the writer is done."
            )

    def read(self, arm: str, setting: Setting, kind: type[Any] = PromptRecord) -> dict[str, Any]:
        """Return the records of an arm and setting by prompt id, of all processes."""
        lines = ((path, line) for path in self._of(arm, setting).glob("*.jsonl") for line in whole_lines(path))
        records = (read_record(kind, line, str(path)) for path, line in lines)
        return {one.prompt_id: one for one in records}

    def add(self, arm: str, setting: Setting, records: Iterable[PromptRecord]) -> None:
        self.claim()
        directory = self._of(arm, setting)
        directory.mkdir(parents=True, exist_ok=True)
        append_rows(directory / f"{self.writer}.jsonl", records)

    def _of(self, arm: str, setting: Setting) -> Path:
        # The arm of a run's head is named RUN/head.
        return self.out / MEASURED / arm.replace("/", "_") / setting.slug

    def claim(self) -> None:
        """Create the directory and write this study's identity into it."""
        self.out.mkdir(parents=True, exist_ok=True)
        is_claimed = (self.out / STUDY_FILE).is_file()
        # A killed study may leave hashes without an identity; its inputs may have changed since.
        if self._records and not (is_claimed and (self.out / RECORD_FILE).is_file()):
            write_records(self.out, self._records)
        if not is_claimed:
            write_json(self.out / STUDY_FILE, self.identity)


def _require_ours(out: Path, identity: dict[str, Any]) -> None:
    entries = sorted(path.name for path in out.iterdir() if path.name != LOCK_FILE) if out.is_dir() else []
    # A kill during `claim` leaves only these.
    claims = {MEASURED, RECORD_FILE, f".{RECORD_FILE}.tmp", f".{STUDY_FILE}.tmp"}
    if set(entries) <= claims and not list(out.glob(f"{MEASURED}/*/*")):
        return
    recorded = out / STUDY_FILE
    if not recorded.is_file():
        raise OutputExistsError(
            f"--out: {out} holds files that are not a study's ({', '.join(entries[:3])}); expected a new or empty "
            "directory. Choose another --out."
        )
    found = read_json(recorded)
    if found != identity:
        odd = sorted(key for key in found.keys() | identity.keys() if found.get(key) != identity.get(key))
        raise OutputExistsError(
            f"--out: {out} holds another study (its {', '.join(odd)} differ, {recorded}); expected the same arms and "
            "grid to go on. Choose another --out, or remove that one."
        )
