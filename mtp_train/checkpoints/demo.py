"""Locate the demo in the installed package: two tiny real checkpoints and prompts, so that every recipe runs offline.

``base`` is a Qwen3.5-shaped trunk, trained on code together with its native head. ``finetune`` is the same trunk,
fine-tuned to answer questions in JSON, and saved by transformers, which removes the head. ``scripts/make_demo.py``
makes both again; ``demo_assets/provenance.json`` records the settings.
"""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.errors import MtpError

PREFIX = "demo:"
GROUP_FIELD = "group"
"""The field of the demo's data by which records are grouped: no two groups are about the same modules."""
_ASSETS = Path(__file__).parents[1] / "demo_assets"
PROMPTS_FILE = "prompts.jsonl"
RECORDED_FILE = _ASSETS / "recorded.json"
_PATHS = {
    "base": "base",
    "finetune": "finetune",
    # Chats about modules that neither trunk was trained on, in any form.
    "prompts": "data/prompts.jsonl",
    # Source code of the same modules: unseen text like the base's training data.
    "code": "data/code.jsonl",
}


def demo_path(name: str) -> Path:
    """Return the path of a part of the demo in the installed package.

    Raises:
        MtpError: There is no part of that name.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.demo_path("prompts").name  # or "base", "finetune", "code"
        'prompts.jsonl'
    """
    if name not in _PATHS:
        known = ", ".join(f"{PREFIX}{part}" for part in _PATHS)
        raise MtpError(f"{PREFIX}{name}: no such part of the demo; expected one of {known}. Use one of them or a path.")
    return _ASSETS / _PATHS[name]


def resolve(location: str) -> str:
    """Return the path for ``demo:NAME``, and any other location (a path, a hub id) unchanged."""
    return str(demo_path(location.removeprefix(PREFIX))) if location.startswith(PREFIX) else location


def home_source(base: str | None) -> str | None:
    """Return the location of unseen text like a base's training data: code for the demo's base, None for others."""
    return f"{PREFIX}code" if base == f"{PREFIX}base" else None


def recorded() -> dict[str, Any]:
    """Return the recorded figures that are too slow to measure in a recipe: ``arms`` and the ``settings`` of each."""
    return json.loads(RECORDED_FILE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class DemoResult:
    """The two checkpoints and the prompts that :func:`demo` wrote."""

    base: Path
    """Trunk and MTP head, trained together."""
    finetune: Path
    """The fine-tuned trunk, saved by ``save_pretrained``: its head is missing."""
    prompts: Path
    """Chats of the kind that the fine-tune answers; ``group`` names what each is about."""

    def to_json(self) -> dict[str, str]:
        return {name: str(path) for name, path in vars(self).items()}

    def __str__(self) -> str:
        pair = f"{shlex.quote(str(self.finetune))} --from {shlex.quote(str(self.base))}"
        return (
            f"Wrote {self.base} (trunk and head), {self.finetune} (its head stripped by save_pretrained) and "
            f"{self.prompts}.\nmtp-train rescue {pair} --data {shlex.quote(str(self.prompts))} --out rescued"
        )


def demo(out: str | Path) -> DemoResult:
    """Write the two demo checkpoints and their prompts to a new directory, all or nothing.

    Args:
        out: The new directory. ``out/base`` and ``out/finetune`` are about 5 MB each, ``out/prompts.jsonl`` 1 MB.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The disk is full or not writable.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.demo("demo").finetune
        PosixPath('demo/finetune')
    """
    # Imported here: locating the demo must not import torch.
    from mtp_train.checkpoints.writing import new_directory

    out = Path(out)
    with new_directory(out, what="the demo") as directory:
        for name in ("base", "finetune"):
            (directory / name).mkdir()
            # Contents without permissions: an installed package may be read-only, and the copy belongs to the user. One
            # file at a time: shutil.copytree collects errors, and with them loses that the disk is full.
            for file in sorted(demo_path(name).iterdir()):
                shutil.copyfile(file, directory / name / file.name)
        shutil.copyfile(demo_path("prompts"), directory / PROMPTS_FILE)
    return DemoResult(out / "base", out / "finetune", out / PROMPTS_FILE)
