"""How a user names arms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_train.errors import CheckpointError, DataError
from mtp_train.evaluation.arms import ArmSpec, parse_arm, require_distinct
from mtp_train.evaluation.run import plain_names
from mtp_train.recipe.loading import dump_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.decode import subject_arm
from runs import tiny_recipe


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("demo:base", ArmSpec("base", "demo:base", "own")),
        ("demo:finetune+demo:base", ArmSpec("finetune+base", "demo:finetune", "demo:base")),
        ("old=demo:finetune+demo:base", ArmSpec("old", "demo:finetune", "demo:base")),
        ("./my-27b+ngram", ArmSpec("my-27b+ngram", "./my-27b", "ngram")),
        ("runs/a/export", ArmSpec("a/export", "runs/a/export", "own")),
        ("m@8bit", ArmSpec("m@8bit", "m", "own", None, "8bit")),
        ("m@4bit+h", ArmSpec("m@4bit+h", "m", "h", None, "4bit")),
    ],
)  # fmt: skip
def test_an_arm_is_a_trunk_and_what_drafts(text: str, arm: ArmSpec) -> None:
    assert parse_arm(text) == arm


@pytest.mark.parametrize("text", ["", "+demo:base", "demo:finetune+"])
def test_half_an_arm_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"expected \[NAME=\]TRUNK"):
        parse_arm(text)


def test_a_path_may_hold_the_signs_of_the_syntax(tmp_path: Path) -> None:
    odd = tmp_path / "a=b+c"
    odd.mkdir()
    assert parse_arm(str(odd)).trunk == str(odd)


def run_of(tmp_path: Path, **overrides: Any) -> tuple[Path, Recipe]:
    """Return the directory of a run that has trained, and its recipe."""
    run_dir = tmp_path / "run7"
    (run_dir / "head").mkdir(parents=True)
    recipe = tiny_recipe(tmp_path / "in", run_dir, **overrides)
    (run_dir / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    return run_dir, recipe


def test_a_run_is_its_trunk_with_its_retrained_head(tmp_path: Path) -> None:
    run_dir, recipe = run_of(tmp_path)
    assert parse_arm(str(run_dir)) == ArmSpec("run7", recipe.model.trunk, str(run_dir / "head"))
    assert parse_arm(f"new={run_dir}").name == "new"
    subject = subject_arm(str(run_dir), None, None)
    assert subject == parse_arm(str(run_dir))
    assert subject.trunk == recipe.model.trunk
    with pytest.raises(DataError, match=r"--head: given with .*run7, a run, which has its own"):
        subject_arm(str(run_dir), "ngram", None)
    (run_dir / "head").rmdir()
    with pytest.raises(CheckpointError, match="without a head so far"):
        parse_arm(str(run_dir))


def test_a_run_is_packed_as_it_was_trained_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    run_dir, recipe = run_of(tmp_path, model__quantization="8bit")
    own = parse_arm(str(run_dir))
    assert (own.name, own.quantization, own.trunk_name) == ("run7", "8bit", f"{recipe.model.trunk}@8bit")
    assert subject_arm(str(run_dir), None, None) == own
    plain = parse_arm(f"{run_dir}@none")
    packed = parse_arm(f"{run_dir}@4bit")
    assert (plain.name, plain.quantization) == ("run7@none", None)
    assert (packed.name, packed.quantization) == ("run7@4bit", "4bit")
    assert packed == replace(own, name="run7@4bit", quantization="4bit")


def test_arms_need_names_of_their_own() -> None:
    one = ArmSpec("a", "t", "own")
    require_distinct([one, ArmSpec("b", "t", "own")])
    with pytest.raises(DataError, match="a names more than one"):
        require_distinct([one, one])
    with pytest.raises(DataError, match="plain decoding"):
        require_distinct([ArmSpec("none", "t", "own")])


def test_plain_decoding_is_named_after_its_trunk_and_after_an_arm_where_two_are_called_alike() -> None:
    def names(*arms: str) -> list[str]:
        return plain_names([parse_arm(arm) for arm in arms])

    assert names("a/ckpt") == ["none"]
    assert names("a/ckpt", "b/other") == ["none@ckpt", "none@other"]
    assert names("x=a/ckpt", "y=b/ckpt", "c/other") == ["none@x", "none@y", "none@other"]
