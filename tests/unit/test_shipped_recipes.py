"""Recipes and accelerate files of the package are found by name from any directory; a user's own file comes first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

import mtp_train as mtp
from mtp_train.cli.main import main
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.shipped import accelerate_file, recipe_path
from mtp_train.runs.resolve import recipe_of
from repository import RECIPES
from runs import Capture, document, refusal, write_inputs


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_is_found_by_name(path: Path) -> None:
    assert recipe_path(path.stem).samefile(path)
    assert load_recipe(path.stem) == recipe_of(path.stem) == recipe_of(Path(path.stem)) == load_recipe(path)


def test_a_file_comes_before_a_name_and_a_directory_does_not() -> None:
    Path("retrain_head").mkdir()
    assert recipe_path("retrain_head").samefile(RECIPES / "retrain_head.yaml")
    Path("retrain_head").rmdir()
    Path("retrain_head").write_text((RECIPES / "fastmtp.yaml").read_text())
    assert recipe_path("retrain_head") == Path("retrain_head")
    assert load_recipe("retrain_head") == load_recipe(RECIPES / "fastmtp.yaml")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["retain_head"], "Did you mean retrain_head"),
        (["run", "recipes/fastmtp.yaml"], "Did you mean fastmtp?"),
        (["check", "fastmpt"], "Did you mean fastmtp?"),
        (["check", "nothing_like_it"], "Check the path, or see mtp-train recipes."),
    ],
)
def test_an_unknown_name_is_answered_with_the_names_there_are(words: list[str], named: str, capfd: Capture) -> None:
    assert main(words) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"{words[-1]}: no such file; expected a recipe in YAML, or the name of one of the package: " in said
    assert ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml"))) in said
    assert named in said


def test_the_list_names_every_file_and_says_what_it_is_for(capfd: Capture) -> None:
    found = mtp.recipes()
    assert [one.path.name for one in found.recipes] == sorted(path.name for path in RECIPES.glob("*.yaml"))
    launches = sorted((RECIPES / "accelerate").glob("*.yaml"))
    assert [one.path.name for one in found.accelerate] == [path.name for path in launches]
    assert all(one.path.is_file() and one.summary.endswith(".") for one in (*found.recipes, *found.accelerate))
    summaries = {one.name: one.summary for one in found.accelerate}
    assert summaries["single"] == "One process: the GPU if there is one, else the CPU."
    printed = document(["recipes"], capfd)
    assert printed == json.loads(json.dumps(found.to_json()))
    assert main(["recipes"]) == 0
    assert capfd.readouterr().out == f"{found}\n"
    assert all(f"{one.name}  " in str(found) and str(one.path) in str(found) for one in found.recipes)


@pytest.mark.parametrize("name", [path.stem for path in sorted((RECIPES / "accelerate").glob("*.yaml"))])
def test_messages_name_an_accelerate_file_by_a_path_that_accelerate_reads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_config_from_file(accelerate_file(name)).mixed_precision == "no"
    monkeypatch.chdir(RECIPES.parent)
    assert accelerate_file(name) == f"recipes/accelerate/{name}.yaml"


def words_for(trunk: object) -> list[str]:
    return ["check", "attach_head", f"model.trunk={trunk}", "run_dir=run"]


def test_the_demos_data_is_for_the_demos_models_alone(tmp_path: Path, capfd: Capture) -> None:
    write_inputs(tmp_path / "inputs")
    mtp.demo("demo")
    for trunk in ("demo:base", tmp_path / "demo" / "finetune"):
        assert main(words_for(trunk)) == 0
    other = tmp_path / "inputs" / "finetune"
    said = refusal(words_for(other), capfd)
    assert said.startswith(
        f"mtp-train: data.sources.0.path: demo:prompts, the demo's data, while model.trunk is {other};"
    )
    assert "data.sources.0.path=chats.jsonl data.group_field=null" in said
    # A run refuses it too, before it writes anything.
    assert refusal(["run", *words_for(other)[1:]], capfd) == said
    assert [path.name for path in Path("run").iterdir()] == ["outcome.json"]
    chats = [f"data.sources.0.path={tmp_path / 'inputs' / 'chats.jsonl'}", "data.group_field=null"]
    assert main([*words_for(other), *chats, "data.holdout=0.6", "gate.confidence=0.6"]) == 0
