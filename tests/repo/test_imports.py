"""Imports point one way: down the list of packages; and the light modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from textwrap import dedent

import pytest

from launching import environment
from repository import REPOSITORY

SOURCE_ROOTS = (REPOSITORY, REPOSITORY / "inference")

# Low to high: a package may import from itself and from the packages before it. Every module belongs to one of them.
# "mtp_train" is its __init__.py alone, the public API.
ORDER = (
    "mtp_train.errors",
    "mtp_train.progress",
    "mtp_train.upstream",
    "mtp_train.head_kinds",
    "mtp_train.losses",
    "mtp_train.acceptance",
    "mtp_train.families",
    "mtp_train.checkpoints",
    "mtp_train.heads",
    "mtp_train.trunk",
    "mtp_train.data",
    "mtp_train.train",
    "mtp_inference",
    "mtp_train.answers",
    "mtp_train.evaluation",
    "mtp_train.report",
    "mtp_train.hooks",
    "mtp_train.recipe",
    "mtp_train.runs",
    "mtp_train",
    "mtp_train.cli",
    "mtp_train.__main__",
)
# The decoder is used without the trainer: neither it nor what it imports may import more than this.
DECODER_SEES = (
    "mtp_inference",
    "mtp_train.errors",
    "mtp_train.upstream",
    "mtp_train.head_kinds",
    "mtp_train.acceptance",
    "mtp_train.families",
    "mtp_train.checkpoints",
    "mtp_train.heads",
    "mtp_train.trunk",
)
# Signals and the terminal belong to the process; a recipe is checked before the API's imports of seconds.
COMMAND_LINE_SEES = (
    "mtp_train.cli",
    "mtp_train",
    "mtp_inference",
    "mtp_train.errors",
    "mtp_train.progress",
    "mtp_train.recipe.loading",
    "mtp_train.train.stopping",
)


def is_under(module: str, package: str) -> bool:
    return module == package or (package != "mtp_train" and module.startswith(package + "."))


def is_any(module: str, packages: Iterable[str]) -> bool:
    return any(is_under(module, package) for package in packages)


def place(module: str) -> int:
    """Return the position in ``ORDER`` of the package that a module or a name belongs to."""
    return next(number for number, package in enumerate(ORDER) if is_under(module, package))


def is_allowed(importer: str, imported: str) -> bool:
    if imported == "mtp_train.__version__":
        return True
    for seen, begins in ((DECODER_SEES, DECODER_SEES), (COMMAND_LINE_SEES, COMMAND_LINE_SEES[:1])):
        if is_any(importer, begins) and not is_any(imported, seen):
            return False
    return place(imported) <= place(importer)


def modules() -> dict[str, Path]:
    """Map the name of every module of both packages to its file."""
    found = {}
    for root, package in zip(SOURCE_ROOTS, ("mtp_train", "mtp_inference"), strict=True):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(source: str, module: str, *, is_package: bool) -> set[str]:
    """Return what a module imports of our two packages, at any depth of its code, relative names resolved.

    ``from a import b`` counts as ``a.b``, which is right for a module and falls in ``a``'s package for anything else.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                anchor = parts[: len(parts) - node.level + is_package]
                base = ".".join([*anchor, base] if base else anchor)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return {name for name in found if name.split(".")[0] in ("mtp_train", "mtp_inference")}


def upward_imports(source: str, module: str, *, is_package: bool = False) -> list[str]:
    return [
        f"{module} imports {imported}"
        for imported in sorted(imports_of(source, module, is_package=is_package))
        if not is_allowed(module, imported)
    ]


def test_every_import_points_down() -> None:
    found = modules()
    assert {"mtp_train.errors", "mtp_inference"} <= found.keys()
    upward = [
        line
        for module, path in found.items()
        for line in upward_imports(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")
    ]
    assert upward == []


def test_every_module_has_its_place() -> None:
    outside = [module for module in modules() if not is_any(module, ORDER)]
    assert outside == []


def imported_modules() -> dict[str, set[str]]:
    """Return, for each module, the modules that it imports, without the public API that imports lazily."""
    found = modules()
    graph = {}
    for module, path in found.items():
        imported = imports_of(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")
        targets = {name if name in found else name.rpartition(".")[0] for name in imported}
        graph[module] = {name for name in targets if name in found and name not in (module, "mtp_train")}
    return graph


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circle(imported_modules()) == []


def test_the_packages_of_the_decoder_import_one_another_one_way() -> None:
    graph: dict[str, set[str]] = {}
    for module, targets in imported_modules().items():
        if module.startswith("mtp_inference."):
            package = module.split(".")[1]
            graph.setdefault(package, set()).update(name.split(".")[1] for name in targets if "mtp_inference." in name)
            graph[package].discard(package)
    assert circle(graph) == []


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return nodes of a graph that reach themselves, in the order of a walk; none where there are no circles."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph.get(node, ())):
            if found := walk(target, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := walk(node, []))), [])


def arrows() -> dict[str, set[str]]:
    """Return, for each package of ``ORDER``, the packages that its modules import."""
    found: dict[str, set[str]] = {package: set() for package in ORDER}
    for module, path in modules().items():
        for name in imports_of(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py"):
            if name != "mtp_train.__version__":
                found[ORDER[place(module)]].add(ORDER[place(name)])
    return {package: targets - {package} for package, targets in found.items()}


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out the arrows of a graph without circles that a longer path makes too."""

    def below(node: str) -> set[str]:
        return graph[node].union(*(below(target) for target in graph[node]))

    return {
        node: {target for target in targets if not any(target in below(other) for other in targets)}
        for node, targets in graph.items()
    }


def drawn(graph: dict[str, set[str]]) -> str:
    """Draw a graph of packages for Mermaid, highest first."""
    short = {package: package.removeprefix("mtp_train.").strip("_") for package in ORDER}
    lines = [f"    {short[node]} --> {short[target]}" for node in reversed(ORDER) for target in sorted(graph[node])]
    return "\n".join(["```mermaid", "graph TD", *lines, "```"])


def test_the_graph_of_packages_is_drawn_as_it_is() -> None:
    page = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    expected = drawn(reduced(arrows()))
    assert expected in page, f"CONTRIBUTING.md: expected this graph\n{expected}"


def test_an_arrow_that_a_longer_path_makes_is_left_out() -> None:
    assert reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    ("module", "line", "imported"),
    [
        ("mtp_train.heads.step", "from mtp_train.train.loop import train", "mtp_train.train.loop.train"),
        ("mtp_train.heads.step", "def f():\n    import mtp_train.train", "mtp_train.train"),
        ("mtp_train.heads.step", "from ..train import loop", "mtp_train.train.loop"),
        ("mtp_train.families", "from .. import checkpoints", "mtp_train.checkpoints"),
        ("mtp_train.runs.pipeline", "from mtp_train.cli import main", "mtp_train.cli.main"),
        ("mtp_train.runs.pipeline", "import mtp_train as mtp", "mtp_train"),
        ("mtp_inference.session", "from mtp_train.data import pack", "mtp_train.data.pack"),
        ("mtp_train.heads.step", "from mtp_train.losses import rows", "mtp_train.losses.rows"),
        ("mtp_train.cli.main", "from mtp_train.runs import check", "mtp_train.runs.check"),
    ],
)
def test_a_wrong_import_is_found(module: str, line: str, imported: str) -> None:
    # The family case is written in a package's own __init__.py, where one dot means the package itself.
    is_package = module == "mtp_train.families"
    assert upward_imports(line, module, is_package=is_package) == [f"{module} imports {imported}"]


TRAINER_STACK = {"accelerate", "deepspeed", "wandb", "datasets", "peft"}


def test_the_decoder_needs_neither_the_trainer_stack_nor_the_recipe() -> None:
    program = f"""
        import sys
        # transformers imports accelerate by itself, for anything that has to do with models.
        from transformers import AttentionInterface
        stack = {sorted(TRAINER_STACK)}
        not_ours = {{name for name in stack if name in sys.modules}}
        import mtp_inference
        assert not_ours <= {{"accelerate"}} and {{name for name in stack if name in sys.modules}} <= not_ours
        decoder = mtp_inference.SpeculativeDecoder.from_pretrained("demo:base", depth=3, device="cpu")
        (result,) = decoder.generate("import ", max_new_tokens=8)
        assert len(result.token_ids) == 8 and result.num_drafts
        import mtp_train.checkpoints.artifact
        assert not [name for name in sys.modules if name.startswith("mtp_train.recipe")]
    """
    command = [sys.executable, "-c", dedent(program)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
