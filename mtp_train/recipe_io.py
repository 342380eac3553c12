"""Read, check, write and identify recipes. ``python -m mtp_train.recipe_io`` prints ``recipes/README.md``."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_train.errors import RecipeError
from mtp_train.recipe import Recipe
from mtp_train.recipe_decode import Decoder
from mtp_train.recipe_docs import field_reference
from mtp_train.recipe_hints import AUTO
from mtp_train.recipe_rules import contradictions
from mtp_train.recipe_yaml import apply_override, dump_yaml, parse_yaml

__all__ = ["dump_recipe", "field_reference", "load_recipe", "recipe_digest", "recipe_from_mapping"]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file.

    Args:
        path: A YAML file.
        overrides: ``section.field=value`` each, the value in YAML; applied in order, then checked with the rest.

    Raises:
        RecipeError: There is no such file, it is not YAML, or something in it is wrong; the message names all problems.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    data, repeated_keys = parse_yaml(text, str(path))
    return _decode({} if data is None else data, overrides, repeated_keys)


def recipe_from_mapping(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Build a recipe from plain values, checked as a file would be. ``data`` is left as it is.

    Raises:
        RecipeError: Something is wrong; the message names all problems.
    """
    return _decode(copy.deepcopy(dict(data)), overrides, [])


def dump_recipe(recipe: Recipe) -> str:
    """Write a recipe as YAML, every field spelled out; reading it gives an equal recipe."""
    return dump_yaml(_plain(recipe))


def recipe_digest(recipe: Recipe) -> str:
    """Return the SHA-256 of the resolved recipe, in hexadecimal: equal recipes, however written, have equal digests."""
    canonical = json.dumps(_plain(recipe), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _decode(data: object, overrides: Sequence[str], problems: list[str]) -> Recipe:
    if isinstance(data, dict):
        for override in overrides:
            problems = [*problems, *apply_override(data, override)]
    decoder = Decoder()
    recipe = decoder.decode(Recipe, data)
    problems = [*problems, *decoder.problems, *contradictions(recipe, decoder.usable)]
    if problems:
        raise RecipeError(problems)
    return recipe


def _plain(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as YAML and JSON know it: sections as dictionaries, tuples as lists."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(recipe)))
    # Reads as it did before there were sections and settings that are left out: run directories of then go on.
    for section in ("study", "sft"):
        if plain[section] is None:
            del plain[section]
    evaluate = plain["evaluate"]
    for name in ("top_p", "top_k", "rule"):
        if evaluate[name] == AUTO:
            del evaluate[name]
    match evaluate["temperature"]:
        case [one]:
            evaluate["temperature"] = one
    return plain


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> RecipeError:
    if isinstance(error, UnicodeDecodeError):
        found, cure = "not text in UTF-8", "Save it as UTF-8, or check the path."
    elif isinstance(error, FileNotFoundError):
        siblings = [str(file) for file in path.parent.glob("*.yaml")]
        near = difflib.get_close_matches(str(path), siblings, n=1)
        found, cure = "no such file", f"Did you mean {near[0]}?" if near else "Check the path."
    else:
        found, cure = f"cannot be read ({error.strerror})", "Check the path and its permissions."
    return RecipeError([f"{path}: {found}; expected a recipe in YAML. {cure}"])


if __name__ == "__main__":
    sys.stdout.write(field_reference())
