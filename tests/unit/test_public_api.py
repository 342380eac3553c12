"""The public Python API: its names and signatures, that it loads lazily, and that its results print well."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import mtp_train as mtp
from mtp_train.checkpoints.demo import demo_path
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs.resolve import recipe_of
from repository import RECIPES
from runs import Capture, document

HEAVY = {"torch", "transformers", "accelerate", "datasets", "numpy", "wandb", "peft"}
RECIPE = RECIPES / "retrain_head.yaml"


def test_every_public_name_is_there_and_records_are_frozen() -> None:
    with pytest.raises(AttributeError, match="module 'mtp_train' has no attribute 'inspekt'"):
        _ = mtp.inspekt  # type: ignore[attr-defined]
    for name in {*mtp.__all__} - {"__version__"}:
        found = getattr(mtp, name)
        if dataclasses.is_dataclass(found):
            assert found.__dataclass_params__.frozen, name


def test_the_names_outlive_the_import_of_every_module() -> None:
    """Importing a submodule sets it as an attribute of the package, in the place of a name of the API."""
    for module in pkgutil.walk_packages(mtp.__path__, "mtp_train."):
        if module.name != "mtp_train.__main__":
            importlib.import_module(module.name)
    assert [name for name in mtp.__all__ if isinstance(getattr(mtp, name), types.ModuleType)] == []


# Imports


def imported(words: list[str]) -> set[str]:
    """Return the heavy packages that a fresh interpreter holds after a command line, or after the bare import."""
    code = "import sys\nimport mtp_train\n"
    if words:
        code += f"from mtp_train.cli.main import main\ntry:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
    code += f"print('heavy:', *{HEAVY} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("heavy:")[2].split())


@pytest.mark.parametrize(
    "words",
    [[], ["evaluate", "--help"], ["demo", "D"], ["recipes"], ["check", "retrain_head", "train.lrr=1"]],
    ids=lambda words: " ".join(words),
)
def test_what_reads_no_checkpoint_loads_nothing_heavy(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert imported(words) == set()


def test_a_command_that_runs_is_seen_to_load_torch() -> None:
    assert {"torch", "transformers"} <= imported(["inspect", "nowhere"])


def test_a_command_without_data_does_not_import_datasets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "datasets" not in imported(["inspect", str(tmp_path)])


# Results


def test_an_inspection_is_the_document_of_the_command_and_a_table(capfd: Capture) -> None:
    found = mtp.inspect("demo:finetune", base=demo_path("base"))
    printed = document(["inspect", "demo:finetune", "--base", "demo:base"], capfd)
    assert {
        name: list(value) if isinstance(value, tuple) else value for name, value in found.to_json().items()
    } == printed
    assert str(found).splitlines()[0].endswith("finetune: declared_but_missing")
    page = found._repr_html_()
    assert re.match(r"<pre>\S*finetune: declared_but_missing\n", page)
    marked = dataclasses.replace(found, checkpoint="<b>", serves={"vllm": "a && b"})._repr_html_()
    assert marked.startswith("<pre>&lt;b&gt;: declared_but_missing\n")
    assert "a &amp;&amp; b" in marked


def test_one_export_has_one_form(out: Path) -> None:
    with pytest.raises(mtp.MtpError, match="--head-only: given with --gguf, which writes the head alone"):
        mtp.export("demo:base", out, head_only=True, gguf="f16")


def test_a_rule_is_one_of_three(out: Path) -> None:
    with pytest.raises(mtp.DataError, match="--rules: 'fast'; expected greedy, argmax, sampled"):
        mtp.evaluate("demo:base", out, grid=mtp.EvaluationGrid(rules=["fast"]))  # type: ignore[list-item]


# Recipes and overrides


def test_overrides_are_a_mapping_or_strings() -> None:
    changes = {
        "train.lr": 1e-9,
        "data.sources.0.path": Path("a b.jsonl"),
        "evaluate.arms": ("none", "graft", "retrained"),
        "seed": 7,
    }
    strings = ["train.lr=1.0e-9", "data.sources.0.path=a b.jsonl", "evaluate.arms=[none, graft, retrained]", "seed=7"]
    expected = load_recipe(RECIPE, strings)
    assert recipe_of(str(RECIPE), changes) == recipe_of(RECIPE, strings) == expected
    assert recipe_of(load_recipe(RECIPE), changes) == expected
    assert recipe_of(expected) is expected
    odd = {"model.adapter": None, "run_dir": "\N{SNOWMAN} \N{PILE OF POO} 'x': #y"}
    assert recipe_of(RECIPE, odd).run_dir == odd["run_dir"]
