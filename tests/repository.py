"""Directories of the repository."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
RECIPES = REPOSITORY / "recipes"
SCRIPTS = REPOSITORY / "scripts"
