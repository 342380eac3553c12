"""The wheel holds the two packages, the demo checkpoints and the recipes, and nothing else; the recipes run from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from repository import REPOSITORY

ASSETS = Path("mtp_train/demo_assets")
SHIPPED = Path("mtp_train/shipped_recipes")
MAX_ASSET_BYTES = 12_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from a copy of everything in the checkout, so that a stray directory could slip in."""
    source = tmp_path_factory.mktemp("source") / "copy"
    out = tmp_path_factory.mktemp("wheel")
    leave = shutil.ignore_patterns(".git", ".venv", "*_cache", "__pycache__", "build", "dist", "*.egg-info")

    def left(directory: str, names: list[str]) -> set[str]:
        return leave(directory, names) | ({"runs"} if Path(directory) == REPOSITORY else set())

    shutil.copytree(REPOSITORY, source, ignore=left)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", out, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def names_under(wheel: zipfile.ZipFile, directory: Path) -> set[str]:
    return {name for name in wheel.namelist() if name.startswith(f"{directory.as_posix()}/")}


def files_under(directory: Path) -> set[str]:
    """Return the files of a directory of the checkout, as paths from its root."""
    return {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / directory).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_exactly_two_packages(wheel: zipfile.ZipFile) -> None:
    top_level = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"mtp_train", "mtp_inference"}


def test_the_wheel_holds_every_module_and_type_marker(wheel: zipfile.ZipFile) -> None:
    decoder = {name.removeprefix("inference/") for name in files_under(Path("inference/mtp_inference"))}
    assert files_under(Path("mtp_train")) | decoder <= set(wheel.namelist())
    data = {"mtp_train/py.typed", "mtp_inference/py.typed", "mtp_train/recipe/schema.json"}
    assert data <= set(wheel.namelist())


def test_the_wheel_holds_the_recipes_and_launch_files(wheel: zipfile.ZipFile) -> None:
    held = {name.removeprefix(f"{SHIPPED}/") for name in names_under(wheel, SHIPPED)}
    files = {name.removeprefix("recipes/") for name in files_under(Path("recipes"))}
    expected = {name for name in files if name.endswith((".yaml", ".sh"))}
    assert held == expected
    assert {"retrain_head.yaml", "accelerate/ddp.yaml", "slurm/nodes.sh"} <= held


PROGRAM = """
import sys
from mtp_train.cli.main import main
from mtp_train.recipe.shipped import accelerate_file
print(accelerate_file("ddp"))
sys.exit(main(["check", "retrain_head"]) or main(["check", "recipes/retrain_head.yaml"]))
"""


def test_an_installed_recipe_is_checked_by_name_from_an_empty_directory(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    site = tmp_path / "site"
    empty = tmp_path / "empty"
    wheel.extractall(site)
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=empty,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    # The clone's path of the recipe does not exist here, which its name replaces.
    assert done.returncode == 2
    assert "Did you mean retrain_head?" in done.stderr
    assert done.stdout.startswith(f"{site / SHIPPED / 'accelerate' / 'ddp.yaml'}\ntrains: a head of kind mtp, ")
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("name", ["base", "finetune"])
def test_the_wheel_holds_the_demo_checkpoints(wheel: zipfile.ZipFile, name: str) -> None:
    held = names_under(wheel, ASSETS / name)
    assert held == files_under(ASSETS / name)
    endings = {Path(path).name for path in held}
    assert {"config.json", "tokenizer.json"} <= endings
    assert any(ending.endswith(".safetensors") for ending in endings)


def test_the_demo_checkpoints_stay_small(wheel: zipfile.ZipFile) -> None:
    sizes = {name: wheel.getinfo(name).file_size for name in names_under(wheel, ASSETS)}
    assert 0 < sum(sizes.values()) < MAX_ASSET_BYTES
