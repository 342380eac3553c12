"""recipes/python.md block by block, and the notebooks of recipes from top to bottom, by the public API."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mtp_train as mtp
from json_files import read_json
from repository import RECIPES
from runs import LEARNS, TINY_RESCUE, Capture, overrides_of, write_inputs

HOW_TO, NOTEBOOK, ON_GPU = RECIPES / "python.md", RECIPES / "rescue.ipynb", RECIPES / "rescue_gpu.ipynb"


@pytest.mark.slow
def test_every_block_of_the_how_to_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
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


def cells(notebook: Path) -> list[dict[str, Any]]:
    return [cell for cell in read_json(notebook)["cells"] if cell["cell_type"] == "code"]


def sources(notebook: Path = NOTEBOOK) -> dict[str, str]:
    """Return the source of each code cell by its id."""
    return {cell["id"]: "".join(cell["source"]) for cell in cells(notebook)}


@pytest.mark.parametrize("notebook", [NOTEBOOK, ON_GPU], ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(notebook: Path) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(notebook))
    assert notebook.stat().st_size < 20_000


def tiny_demo(out: Path) -> None:
    """Write tiny models in place of the demo's."""
    out.mkdir()
    write_inputs(out)
    (out / "chats.jsonl").rename(out / "prompts.jsonl")


def display_module(shown: list[Any]) -> ModuleType:
    """Return a stand-in for IPython's module, which tests do without."""
    module: Any = ModuleType("IPython.display")
    module.HTML = lambda text: shown.append(text)
    module.Image = lambda path, width: Path(path).read_bytes()
    module.display = lambda *found: shown.extend(found)
    return module


def run_cell(source: str, names: dict[str, Any], shown: list[Any]) -> None:
    """Run a cell as a notebook does: the value of its last line is shown."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NOTEBOOK.name, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
        shown.extend([] if value is None else [value._repr_html_()])


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """On tiny models, with settings that suit them; the second time it shows finished work."""
    monkeypatch.chdir(tmp_path)
    shown: list[Any] = []
    monkeypatch.setitem(vars(mtp), "demo", tiny_demo)
    monkeypatch.setitem(sys.modules, "IPython.display", display_module(shown))
    for variable in re.findall(r'"([A-Z_]+)": "', sources()["setup"]):
        monkeypatch.setenv(variable, "1")
    for _ in range(2):
        shown.clear()
        names: dict[str, Any] = {"tiny": [*TINY_RESCUE, *overrides_of(**LEARNS)]}
        for source in sources().values():
            run_cell(source.replace("overrides=settings", "overrides=tiny"), names, shown)
        assert names["rescued"].head == "retrained"
        assert names["probed"].verdict == "fault", "the heads of tiny models are random"
        texts = [one for one in shown if isinstance(one, str)]
        assert len(texts) == 5
        assert any("<mark>" in text for text in texts)
        assert [one[:4] for one in shown if isinstance(one, bytes)] == [b"\x89PNG"] * 3
        printed = capsys.readouterr().out
        assert "gate passed: True" in printed
        assert "vllm: vllm serve rescue-demo/rescued/export" in printed


def test_the_notebook_for_a_gpu_runs_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_demo(tmp_path / "demo")
    changed = {'"my-9b"': '"demo/finetune"', '"BASE"': '"demo/base"', '"chats.jsonl"': '"demo/prompts.jsonl"'}
    changed |= {"base, run, data=[chats]": "base, run, data=[chats], overrides=tiny"}
    changed |= {"base, data=[chats]": "base, data=[chats], overrides=tiny"}
    shown: list[Any] = []
    names: dict[str, Any] = {"tiny": [*TINY_RESCUE, *overrides_of(**LEARNS)]}
    of_cells = sources(ON_GPU)
    assert of_cells.pop("install") == '%pip install -q "mtp-train[cuda]"'
    for source in of_cells.values():
        for theirs, ours in changed.items():
            source = source.replace(theirs, ours)
        run_cell(source, names, shown)
    assert names["rescued"].head == "retrained"
    assert len(shown) == 4
    assert "vllm: vllm serve rescued/export" in capsys.readouterr().out
