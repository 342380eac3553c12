"""Two tiny real checkpoints and prompts that travel with the package, so that every recipe runs without a download.

``base`` is a Qwen3.5-shaped trunk trained on code together with its native head; ``finetune`` is the same trunk,
fine-tuned to answer questions in JSON and saved by transformers, which strips the head. ``assets/provenance.json`` says
how they were made; ``scripts/make_demo.py`` makes them again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mtp_train.errors import MtpError
from mtp_train.report.schema import ArmResult

PREFIX = "demo:"
GROUP_FIELD = "group"
"""The column of the demo's data that groups records: modules that do not repeat each other."""
_ASSETS = Path(__file__).parent / "assets"
_RECORDED = _ASSETS / "recorded.json"
_PATHS = {
    "base": "base",
    "finetune": "finetune",
    # Exchanges about modules that neither trunk was trained on, in any form.
    "prompts": "data/prompts.jsonl",
    # Source of the same modules: unseen text of the kind the base was trained on.
    "code": "data/code.jsonl",
}


def demo_path(name: str) -> Path:
    """Return where a part of the demo lies in the installed package.

    Raises:
        MtpError: There is no part of that name.
    """
    if name not in _PATHS:
        known = ", ".join(f"{PREFIX}{part}" for part in _PATHS)
        raise MtpError(f"{PREFIX}{name}: no such part of the demo; expected one of {known}. Use one of them or a path.")
    return _ASSETS / _PATHS[name]


def resolve(location: str) -> str:
    """Turn ``demo:NAME`` into a path and return anything else (a path, a hub id) as it is.

    Raises:
        MtpError: There is no part of that name.
    """
    return str(demo_path(location.removeprefix(PREFIX))) if location.startswith(PREFIX) else location


def home_source(base: str | None) -> str | None:
    """Return the location of unseen text of the kind that a base was trained on: code for the demo's, else None."""
    return f"{PREFIX}code" if base == f"{PREFIX}base" else None


def write_demo(target: Path) -> None:
    """Copy both checkpoints to ``target/base`` and ``target/finetune``, all or nothing.

    Raises:
        OutputExistsError: The target exists.
        CheckpointError: The disk is full or not writable.
    """
    # Here and not above: asking where the demo lies must not import torch.
    from mtp_train.weights.writing import new_directory

    with new_directory(target, what="the demo") as directory:
        for name in ("base", "finetune"):
            # Contents only: an installed package may be read-only, a copy is the user's own.
            shutil.copytree(demo_path(name), directory / name, copy_function=shutil.copyfile)


def recorded() -> dict[str, Any]:
    """Return the file of figures that are too slow to measure in a recipe: ``arms`` and the ``settings`` of each."""
    content: dict[str, Any] = json.loads(_RECORDED.read_text(encoding="utf-8"))
    return content


def recorded_arms(trunk: str) -> dict[str, ArmResult]:
    """Return the recorded arms on the fine-tune, ``measured_here`` false; none for any other trunk.

    ``control`` is a head trained for as many steps on the base's old code instead of the fine-tune's answers;
    ``ceiling`` is one trained for ten times the steps, and ``random`` one that starts from random weights.
    ``ngram`` is no head but a static table of what follows what in the same answers. All were measured on the recipe's
    own held-out prompts.

    Args:
        trunk: The trunk as the recipe names it.
    """
    if trunk != f"{PREFIX}finetune":
        return {}
    arms = recorded()["arms"]
    return {name: ArmResult.from_json(arm, f"{_RECORDED}: arms.{name}") for name, arm in arms.items()}
