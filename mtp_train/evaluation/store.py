"""The measurements of a study on disk, one line per prompt, so that an interrupted study resumes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mtp_inference.opening import MODEL, NGRAM, OWN
from mtp_train.answers.store import whole_bytes
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
_WRITER = re.compile(r"(\.\d+)?\.jsonl")


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
        self._suffix = f".{writer}.jsonl" if writer else ".jsonl"
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

    def read(self, arm: str, setting: Setting, *, timed: bool = False) -> dict[str, PromptRecord]:
        """Return the records of an arm and setting by prompt id, without an incomplete last line."""
        found: dict[str, PromptRecord] = {}
        stem = _stem(setting, timed)
        for path in self._of(arm).glob(f"{stem}*.jsonl"):
            # The stem of another setting may begin with this one.
            if _WRITER.fullmatch(path.name.removeprefix(stem)) is None:
                continue
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [read_record(PromptRecord, line, str(path)) for line in lines if line.endswith("\n")]
            found |= {one.prompt_id: one for one in whole}
        return found

    def add(self, arm: str, setting: Setting, records: Iterable[PromptRecord], *, timed: bool = False) -> None:
        path = self.file(arm, f"{_stem(setting, timed)}{self._suffix}")
        if path.exists():
            os.truncate(path, whole_bytes(path))
        with path.open("ab") as file:
            file.writelines(f"{json.dumps(asdict(one))}\n".encode() for one in records)

    def file(self, arm: str, name: str) -> Path:
        """Return the path of a file of an arm, in a directory that exists."""
        path = self._of(arm) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.claim()
        return path

    def _of(self, arm: str) -> Path:
        # The arm of a run's head is named RUN/head.
        return self.out / MEASURED / arm.replace("/", "_")

    def claim(self) -> None:
        """Create the directory and write this study's identity into it."""
        self.out.mkdir(parents=True, exist_ok=True)
        is_claimed = (self.out / STUDY_FILE).is_file()
        # A killed study may leave hashes without an identity; its inputs may have changed since.
        if self._records and not (is_claimed and (self.out / RECORD_FILE).is_file()):
            write_records(self.out, self._records)
        if not is_claimed:
            write_json(self.out / STUDY_FILE, self.identity)


def _stem(setting: Setting, timed: bool) -> str:
    return f"timed-{setting.slug}" if timed else setting.slug


def _require_ours(out: Path, identity: dict[str, Any]) -> None:
    if out.exists() and not out.is_dir():
        raise OutputExistsError(f"--out: {out} is a file; expected a directory. Choose another --out.")
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
    found, expected = _compared(read_json(recorded)), _compared(identity)
    if found != expected:
        odd = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
        raise OutputExistsError(
            f"--out: {out} holds another study (its {', '.join(odd)} differ, {recorded}); expected the same arms and "
            "grid to go on. Choose another --out, or remove that one."
        )


def _compared(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an identity that must be equal: without paths of arms, whose content is compared instead."""
    return {**identity, "arms": [_without_places(**arm) for arm in identity.get("arms", ())]}


def _without_places(trunk: str, head: str | None, adapter: str | None, **kept: Any) -> dict[str, Any]:
    kind = head if head in (None, OWN, NGRAM) else MODEL if head.startswith(MODEL) else "files"
    return {**kept, "head": kind, "adapter": adapter is not None}
