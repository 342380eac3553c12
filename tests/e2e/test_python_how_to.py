"""recipes/python.md, run block by block, and what its results look like in a notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
HOW_TO = RECIPES / "python.md"


@pytest.mark.slow
def test_every_block_of_the_how_to_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(RECIPES)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 8
    for number, block in enumerate(blocks):
        exec(compile(block, f"{HOW_TO.name}, block {number + 1}", "exec"), names)
    assert names["found"].status == "declared_but_missing"
    # The head drafts better than the one it started from.
    assert names["report"].arms["retrained"].tau > names["report"].arms["graft"].tau + 0.2
    assert names["done"].export == Path("runs/first/export")
    assert names["texts"] == [one.text for one in names["result"].requests]
    printed = capsys.readouterr().out
    assert "grafted: already exists" in printed
    for result in (names["done"], names["one"], names["both"], names["found"], names["result"]):
        shown(result)


def shown(result: Any) -> None:
    """Check that a result prints as text and shows as HTML."""
    assert str(result)
    if hasattr(result, "_repr_html_"):
        assert re.match(r"<(table|pre)", result._repr_html_())
