"""What a study has measured so far, on disk: a line a prompt, so that it goes on where it was broken off."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtp_train.errors import OutputExistsError
from mtp_train.study.records import Decoded, Setting
from mtp_train.weights.files import read_json
from mtp_train.weights.writing import write_json

STUDY_FILE = "study.json"
MEASURED = "measured"


class Store:
    """The measurements in a directory.

    Nothing is written before there is something to keep: a study that is refused leaves no directory.

    Args:
        out: The directory.
        identity: What is being measured and how, as plain JSON: a directory of another study is refused.

    Raises:
        OutputExistsError: It holds another study, or files that are not a study's.
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.out = out
        self.identity = identity
        _require_ours(out, identity)

    def read(self, arm: str, setting: Setting) -> dict[str, Decoded]:
        """Return what was decoded, by prompt id; a line that a kill cut off does not count."""
        path = self._decoded(arm, setting)
        if not path.is_file():
            return {}
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [Decoded.from_json(json.loads(line)) for line in lines if line.endswith("\n")]
        return {one.prompt_id: one for one in whole}

    def add(self, arm: str, setting: Setting, decoded: Iterable[Decoded]) -> None:
        """Append prompts."""
        self._claim(arm)
        path = self._decoded(arm, setting)
        with path.open("a+b") as file:
            _drop_partial_line(file)
            file.writelines(f"{json.dumps(one.to_json())}\n".encode() for one in decoded)

    def file(self, arm: str, name: str) -> Path:
        """Return where something else of an arm is kept."""
        self._claim(arm)
        return self._of(arm) / name

    def _decoded(self, arm: str, setting: Setting) -> Path:
        return self._of(arm) / f"{setting.slug}.jsonl"

    def _of(self, arm: str) -> Path:
        # A run's head is named RUN/head.
        return self.out / MEASURED / arm.replace("/", "_")

    def claim(self) -> None:
        """Make the directory this study's."""
        self.out.mkdir(parents=True, exist_ok=True)
        if not (self.out / STUDY_FILE).is_file():
            write_json(self.out / STUDY_FILE, self.identity)

    def _claim(self, arm: str) -> None:
        self._of(arm).mkdir(parents=True, exist_ok=True)
        self.claim()


def _drop_partial_line(file: Any) -> None:
    end = file.seek(0, 2)
    while end:
        file.seek(end - 1)
        if file.read(1) == b"\n":
            break
        end -= 1
    file.truncate(end)
    file.seek(0, 2)


def _require_ours(out: Path, identity: dict[str, Any]) -> None:
    if out.exists() and not out.is_dir():
        raise OutputExistsError(f"--out: {out} is a file; expected a directory. Choose another --out.")
    entries = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    # What a kill leaves of a claim.
    if set(entries) <= {MEASURED, f".{STUDY_FILE}.tmp"} and not list(out.glob(f"{MEASURED}/*/*")):
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
