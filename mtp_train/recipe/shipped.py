"""Find the recipes and accelerate files of the package by name.

A wheel contains them as ``mtp_train/shipped_recipes``. A clone, also one that is installed in editable form, has them
in ``recipes/`` at its top level.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]
SCHEMA_FILE = Path(__file__).with_name("schema.json")
"""The JSON Schema of recipes, for editors."""
_HEADLINE = "# Trains: "


@dataclass(frozen=True)
class ShippedFile:
    """A recipe or an accelerate file of the package."""

    name: str
    """The file's name without its ending; a recipe can be named by it in place of a path."""
    summary: str
    """What the recipe trains, or how the accelerate file launches."""
    path: Path


@dataclass(frozen=True)
class RecipesResult:
    """The recipes and accelerate files of the package, as :func:`recipes` returns them."""

    recipes: tuple[ShippedFile, ...]
    """For ``run``, ``check`` and ``regenerate``, by name or by path."""
    accelerate: tuple[ShippedFile, ...]
    """For ``accelerate launch --config_file``, by path."""

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self), default=str))

    def __str__(self) -> str:
        return "\n\n".join(
            (
                _listed("Recipes", self.recipes),
                _listed("Accelerate files", self.accelerate),
                "Run a recipe by its name: mtp-train run NAME, or on several processes "
                "accelerate launch --config_file PATH -m mtp_train NAME.",
            )
        )


def recipes() -> RecipesResult:
    """Return the recipes and accelerate files that come with the package.

    Example:
        >>> import mtp_train as mtp
        >>> [one.name for one in mtp.recipes().recipes][:2]
        ['attach_head', 'fastmtp']
    """
    return RecipesResult(_files(_directory()), _files(_directory() / "accelerate"))


def recipe_names() -> list[str]:
    return [file.name for file in _files(_directory())]


def recipe_path(recipe: str | Path) -> Path:
    """Return the path of a recipe that is given by path or by name. A file of that name comes first."""
    path = Path(recipe)
    if str(recipe) not in recipe_names() or (path.exists() and not path.is_dir()):
        return path
    return _directory() / f"{recipe}.yaml"


def accelerate_file(name: str) -> str:
    """Return the path of an accelerate file of the package, quoted for a shell and relative where that is shorter."""
    path = _directory() / "accelerate" / f"{name}.yaml"
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _directory() -> Path:
    installed = _PACKAGE / "shipped_recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"


def _files(directory: Path) -> tuple[ShippedFile, ...]:
    return tuple(ShippedFile(path.stem, _summary(path), path) for path in sorted(directory.glob("*.yaml")))


def _summary(path: Path) -> str:
    """Return the headline in the comment of a file, or its first sentence."""
    lines = path.read_text(encoding="utf-8").splitlines()
    told = (line.removeprefix(_HEADLINE) for line in lines if line.startswith(_HEADLINE))
    comment = " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))
    return next(told, comment.partition(". ")[0].rstrip(".") + ".")


def _listed(title: str, files: Sequence[ShippedFile]) -> str:
    """Return the files under each other, in 70 columns but for their paths."""
    lines = [f"{title}:"]
    for file in files:
        lines += [textwrap.fill(f"{file.name}  {file.summary}"), f"  {file.path}"]
    return "\n".join(lines)
