"""Use the responses of another run on the same trunk (``data.responses``): copy them once, and read that run only then.

The trunk and its adapter are compared by content. Dtype, seed and sampling settings may differ, as the text of any
sampler can be trained on; they are printed, and recorded beside the copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mtp_train.answers.store import COPIED_FILE, RegeneratedRow, response_files, stored_rows, write_copied
from mtp_train.checkpoints.files import read_json
from mtp_train.checkpoints.identity import Contents, changed_files
from mtp_train.checkpoints.locations import RECIPE_FILE, is_run
from mtp_train.checkpoints.writing import write_json
from mtp_train.data.tokenize import Prompt
from mtp_train.errors import DataError
from mtp_train.recipe.schema import Recipe

DATA, SETTINGS_FILE = "data", "settings.json"
COPIED_FROM_FILE = "copied.json"


class Answers(NamedTuple):
    """The responses that a run generated at some settings."""

    directory: Path
    settings: dict[str, Any]


Trunk = tuple[Contents, Contents | None]
"""The contents of a trunk and of its adapter."""


def require_answers(recipe: Recipe, run_dir: Path, trunk: Trunk | None = None) -> None:
    """Check that ``data.responses`` names a run with responses, of ``trunk`` if given, unless they are copied."""
    is_copied = any(run_dir.glob(f"{DATA}/responses-*/{COPIED_FILE}"))
    if recipe.data.responses is not None and not is_copied:
        _answers_of(recipe.data.responses, trunk)


def copy_answers(location: str, directory: Path, prompts: Sequence[Prompt], trunk: Trunk) -> list[str]:
    """Copy the responses of another run to prompts of this run into this run's directory of responses.

    A response belongs to a prompt with the same tokens: ids contain the path of the data as the recipe spells it.
    A directory with a complete copy is left as it is. Returns sentences for the log.
    """
    if (directory / COPIED_FILE).is_file():
        return []
    unanswered: dict[tuple[int, ...], dict[str, Prompt]] = defaultdict(dict)
    for prompt in prompts:
        unanswered[prompt.prompt_ids][prompt.id] = prompt
    matched = [(list(_matching(stored_rows(one.directory), unanswered)), one) for one in _answers_of(location, trunk)]
    if not any(rows for rows, _ in matched):
        raise DataError(
            f"data.responses: {location} has no response to any of the {len(prompts)} prompts to train on; expected "
            "prompts in common, of the same data and chat template. Write data.responses: null."
        )
    copied = {"run": location, "responses": [{"count": len(rows), **one.settings} for rows, one in matched]}
    write_json(directory / COPIED_FROM_FILE, copied)
    write_copied(directory, (row for rows, _ in matched for row in rows))
    return [
        f"{len(rows)} of {len(prompts)} prompts have responses of {location} (dtype {one.settings.get('dtype')}, "
        f"temperature {one.settings.get('temperature')})."
        for rows, one in matched
        if rows
    ]


def _answers_of(location: str, trunk: Trunk | None) -> list[Answers]:
    def refused(found: str, expected: str, instead: str) -> DataError:
        told = f"data.responses: {location} {found}; expected {expected}"
        return DataError(f"{told}. {instead}, or write data.responses: null.")

    run = Path(location).expanduser()
    if not is_run(run):
        expected = "the directory of a run with responses"
        raise refused(f"is no run ({RECIPE_FILE} is missing)", expected, "Check the path")
    found = [
        Answers(path.parent, read_json(path))
        for path in sorted(run.glob(f"{DATA}/responses-*/{SETTINGS_FILE}"))
        if response_files(path.parent)
    ]
    if not found:
        raise refused(f"has no responses (in {run / DATA})", "a run with data.regenerate", "Name such a run")
    same = [one for one in found if trunk in (None, (one.settings.get("trunk"), one.settings.get("adapter")))]
    if trunk is not None and not same:
        recorded = found[0].settings.get("trunk")
        names = changed_files(recorded, trunk[0]) if isinstance(recorded, dict) else []
        differs = f"{', '.join(names[:3])} differ" if names else "the adapter differs"
        other = f"has responses of another trunk than model.trunk ({differs})"
        raise refused(other, "the same content", "Name a run on this trunk")
    return same


def _matching(
    rows: Iterable[RegeneratedRow], unanswered: dict[tuple[int, ...], dict[str, Prompt]]
) -> Iterator[RegeneratedRow]:
    """Yield each row for a prompt with its tokens, preferably of its id, and remove that prompt."""
    for row in rows:
        same = unanswered.get(row.prompt_ids)
        if same:
            prompt = same.pop(row.id if row.id in same else next(iter(same)))
            yield replace(row, id=prompt.id, group=prompt.group)
