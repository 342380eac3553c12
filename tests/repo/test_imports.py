"""Imports point one way: down the list of layers; and the light modules stay light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCE_ROOTS = (REPOSITORY, REPOSITORY / "inference")

# Low to high. A module may import its own unit and the units of lower layers; the units of one layer do not know
# each other. A unit is a name, everything under it, and the modules beside it that carry it on (recipe, recipe_io).
LAYERS: tuple[tuple[str, ...], ...] = (
    ("mtp_train.errors",),
    ("mtp_train.recipe", "mtp_train.losses", "mtp_train.acceptance"),
    ("mtp_train.families",),
    ("mtp_train.weights",),
    ("mtp_train.heads",),
    ("mtp_train.data",),
    ("mtp_train.train", "mtp_inference"),
)
# Everything in mtp_train that no layer names is the product on top of both packages; these are its upper floors.
PRODUCT = len(LAYERS)
FLOORS = {"mtp_train.commands": PRODUCT + 1, "mtp_train.cli": PRODUCT + 2, "mtp_train.__main__": PRODUCT + 3}
# The decoder is used alone: it sees less than what lies below it.
DECODER_SEES = (
    "mtp_inference",
    "mtp_train.errors",
    "mtp_train.acceptance",
    "mtp_train.families",
    "mtp_train.weights",
    "mtp_train.heads",
)


def is_under(module: str, unit: str) -> bool:
    return module == unit or module.startswith((unit + ".", unit + "_"))


def place(module: str) -> tuple[int, str]:
    """Return the layer's number and the unit a module belongs to."""
    for number, layer in enumerate(LAYERS):
        for unit in layer:
            if is_under(module, unit):
                return number, unit
    for unit, number in FLOORS.items():
        if is_under(module, unit):
            return number, unit
    return PRODUCT, "the product"


def is_allowed(importer: str, imported: str) -> bool:
    if imported == "mtp_train":  # holds the version alone
        return True
    if is_under(importer, "mtp_inference"):
        return any(is_under(imported, name) for name in DECODER_SEES)
    (own_layer, own_unit), (its_layer, its_unit) = place(importer), place(imported)
    return its_layer < own_layer or own_unit == its_unit


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

    ``from a import b`` counts as ``a.b``, which is right for a module and falls in ``a``'s unit for anything else.
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
            if base == "mtp_train" and all(alias.name.startswith("__") for alias in node.names):
                found.add(base)
            else:
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


@pytest.mark.parametrize(
    ("module", "line", "imported"),
    [
        ("mtp_train.heads.step", "from mtp_train.train.loop import train", "mtp_train.train.loop.train"),
        ("mtp_train.heads.step", "def f():\n    import mtp_train.train", "mtp_train.train"),
        ("mtp_train.heads.step", "from ..train import loop", "mtp_train.train.loop"),
        ("mtp_train.families", "from .. import weights", "mtp_train.weights"),
        ("mtp_train.losses", "from mtp_train import acceptance", "mtp_train.acceptance"),
        ("mtp_train.data.pack", "from mtp_inference import reference", "mtp_inference.reference"),
        ("mtp_train.train.loop", "import mtp_inference.decoder", "mtp_inference.decoder"),
        ("mtp_train.train.loop", "import mtp_train.pipeline", "mtp_train.pipeline"),
        ("mtp_train.pipeline", "from mtp_train.commands import inspect", "mtp_train.commands.inspect"),
        ("mtp_inference.draft", "from mtp_train.losses import depth_weights", "mtp_train.losses.depth_weights"),
        ("mtp_inference.draft", "from mtp_train.data import pack", "mtp_train.data.pack"),
    ],
)
def test_a_wrong_import_is_found(module: str, line: str, imported: str) -> None:
    # The last family case is written in a package's own __init__.py, where one dot means the package itself.
    is_package = module == "mtp_train.families"
    assert upward_imports(line, module, is_package=is_package) == [f"{module} imports {imported}"]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("mtp_train.heads.step", "from .module import MtpHead"),
        ("mtp_train.heads.step", "from mtp_train.losses import depth_weights"),
        ("mtp_train.recipe_io", "from mtp_train.recipe import Recipe"),
        ("mtp_train.pipeline", "from mtp_inference.decoder import generate"),
        ("mtp_train.cli", "from mtp_train import __version__\nfrom mtp_train.commands import inspect"),
        ("mtp_inference.draft", "from mtp_train.heads.step import mtp_step\nimport torch"),
    ],
)
def test_a_right_import_passes(module: str, line: str) -> None:
    assert upward_imports(line, module) == []


def heavy_imports(statement: str, heavy: set[str], *paths: Path) -> set[str]:
    """Return which of the heavy packages a fresh interpreter holds after one statement."""
    code = f"{statement}\nimport sys\nprint(*(name for name in {sorted(heavy)} if name in sys.modules))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*paths, *SOURCE_ROOTS)))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


TRAINER_STACK = {"accelerate", "deepspeed", "wandb", "datasets", "peft"}


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import mtp_train", TRAINER_STACK | {"torch", "transformers"}),
        ("import mtp_train.recipe_io", TRAINER_STACK | {"torch", "transformers"}),
        ("import mtp_train.cli", TRAINER_STACK | {"torch", "transformers"}),
    ],
)
def test_a_light_module_leaves_the_heavy_packages_alone(statement: str, heavy: set[str]) -> None:
    assert heavy_imports(statement, heavy) == set()


def test_the_decoder_leaves_the_trainer_stack_alone() -> None:
    # transformers imports accelerate by itself, for anything that has to do with models.
    not_ours = heavy_imports("from transformers import AttentionInterface", TRAINER_STACK)
    assert not_ours <= {"accelerate"}
    assert heavy_imports("import mtp_inference", TRAINER_STACK) <= not_ours


def test_a_heavy_import_is_found_in_a_package_that_hides_it(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").touch()
    (tmp_path / "innocent.py").write_text("import json\ntry:\n    import wandb\nexcept ImportError:\n    pass\n")
    assert heavy_imports("import innocent", TRAINER_STACK, tmp_path) == {"wandb"}
