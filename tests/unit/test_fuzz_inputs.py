"""Random data files and recipes: the records that were written, or one message; nothing is left behind."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtp_train.data.records import PlainText
from mtp_train.data.sources import load_records
from mtp_train.errors import DataError, RecipeError
from mtp_train.recipe.loading import dump_recipe, load_recipe

FUZZ = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text.strip("\n"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "function_call", "bot"]) | VALUES,
        "content": st.text() | VALUES,
        "from": st.sampled_from(["human", "gpt"]) | VALUES,
        "value": VALUES,
        "tool_calls": VALUES
        | st.lists(st.fixed_dictionaries({"function": st.dictionaries(st.just("arguments"), VALUES)})),
    },
)
JSON_TEXTS = VALUES | VALUES.map(json.dumps)
ROWS = VALUES | st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(MESSAGES) | VALUES,
        "text": st.text() | VALUES,
        "prompt": st.lists(MESSAGES) | VALUES,
        "completion": st.lists(MESSAGES) | VALUES,
        **dict.fromkeys(("instruction", "input", "output", "system"), st.text() | VALUES),
        **dict.fromkeys(("tools", "chat_template_kwargs"), JSON_TEXTS),
    },
)


def in_directory(check: Callable[[Path], None]) -> None:
    """Run a check in a new directory. The check must leave the files as they are, and add none."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        check(directory)


def read_unchanged(path: Path, content: bytes) -> list[Any] | None:
    """Return the records of a file; None if it is refused with one message."""
    path.write_bytes(content)
    found, refusal = None, "; expected "
    try:
        found = load_records(str(path))
    except DataError as error:
        refusal = str(error)
    assert "; expected " in refusal
    assert "\n" not in refusal
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == content
    return found


def check_records_written_are_read(texts: list[str], other: Any) -> None:
    lines = [json.dumps({"text": text, "other": other}) for text in texts]

    def check(directory: Path) -> None:
        found = read_unchanged(directory / "a.jsonl", "\n".join(lines).encode())
        assert found is not None
        assert [record.content for record in found] == [PlainText(text.strip("\n")) for text in texts]

    in_directory(check)


def check_any_rows(rows: list[Any], compressed: bool) -> None:
    content = "\n".join(json.dumps(row) for row in rows).encode()
    name = "a.jsonl.gz" if compressed else "a.jsonl"
    in_directory(lambda directory: read_unchanged(directory / name, gzip.compress(content) if compressed else content))


def check_any_bytes(name: str, content: bytes, cut: int) -> None:
    whole = gzip.compress(content) if name.endswith(".gz") else content
    in_directory(lambda directory: read_unchanged(directory / name, whole[: max(0, len(whole) - cut)]))


RECIPE: dict[str, Any] = {
    "run_dir": "runs/a",
    "seed": 0,
    "model": {"trunk": "a", "head_from": "b"},
    "data": {"sources": [{"path": "c"}]},
    "train": {"max_steps": 10, "tokens_per_step": 512, "lr": 0.1, "warmup_steps": 0},
    "evaluate": {"arms": ["graft", "retrained"]},
}
PATHS = [("run_dir",), ("seed",), ("model",), ("model", "trunk"), ("data", "sources"), ("train", "max_steps")]
PATHS += [("train", "lr"), ("evaluate", "arms"), ("evaluate", "temperature"), ("objective",), ("study",), ("extra",)]


def refused_or_equal(path: Path, content: bytes) -> None:
    """Read a recipe: it equals the one that its own text gives, or every problem is one line."""
    path.write_bytes(content)
    recipe, problems = None, list[str]()
    try:
        recipe = load_recipe(path)
    except RecipeError as error:
        problems = error.problems
    assert all("; expected " in problem and "\n" not in problem for problem in problems), problems
    if recipe is None:
        assert problems
    else:
        assert load_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def check_any_value(path: tuple[str, ...], value: Any) -> None:
    recipe = json.loads(json.dumps(RECIPE))
    section = recipe
    for part in path[:-1]:
        section = section[part]
    section[path[-1]] = value
    in_directory(lambda directory: refused_or_equal(directory / "a.yaml", json.dumps(recipe).encode()))


def check_any_text(text: str, at: int) -> None:
    whole = yaml.safe_dump(RECIPE)
    at %= len(whole)
    content = (whole[:at] + text + whole[at:]).encode(errors="surrogatepass")
    in_directory(lambda directory: refused_or_equal(directory / "a.yaml", content))


YAML_PARTS = st.sampled_from(
    ["&a ", "*a", "!!int ", "!!set ", "!!binary ", "<<: ", "---\n", "[", "{", "? ", "|", "\t", "'"]
)
CHECKS: dict[str, tuple[Callable[..., None], tuple[st.SearchStrategy[Any], ...], int]] = {
    # The check, its arguments, and the number of examples.
    "records": (check_records_written_are_read, (st.lists(TEXTS, min_size=1, max_size=5), VALUES), 1000),
    "rows": (check_any_rows, (st.lists(ROWS, max_size=4), st.booleans()), 1500),
    "bytes": (
        check_any_bytes,
        (st.sampled_from(["a.jsonl", "a.json", "a.txt", "a.parquet", "a.jsonl.gz"]), st.binary(), st.integers(0, 20)),
        1500,
    ),
    "recipe values": (check_any_value, (st.sampled_from(PATHS), VALUES), 3000),
    "recipe text": (check_any_text, (YAML_PARTS | st.text(st.characters()), st.integers(0, 400)), 3000),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_random_inputs_are_read_or_refused(name: str) -> None:
    check, arguments, examples = CHECKS[name]
    settings(FUZZ, max_examples=examples)(given(st.tuples(*arguments))(lambda values: check(*values)))()
