"""Read and write recipes as text, with the messages of texts that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mtp_train.errors import RecipeError
from mtp_train.recipe.loading import dump_recipe, load_recipe
from mtp_train.recipe.schema import Recipe

TEXT = """\
run_dir: runs/x
model:
  trunk: finetune
  head_from: base
data:
  sources:
    - path: chats.jsonl
    - path: more.jsonl
train:
  max_steps: 10
  tokens_per_step: 1024
  lr: 1e-4
evaluate:
  arms: [none, graft, retrained]
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def problems_in(path: Path, text: str) -> list[str]:
    path.write_text(text, encoding="utf-8")
    return problems_of(path)


def test_overrides_are_yaml_and_the_last_one_counts(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        [
            "train.lr=1",
            "train.lr=5e-4",
            "data.pack=false",
            "model.adapter=",
            "evaluate.arms=[graft, retrained]",
            "data.sources.1.path=a=b.jsonl",
            "data.regenerate.max_prompts=7",
        ],
    )
    assert recipe.train.lr == 5e-4
    assert recipe.data.pack is False
    assert recipe.model.adapter is None
    assert recipe.evaluate.arms == ("graft", "retrained")
    assert [source.path for source in recipe.data.sources] == ["chats.jsonl", "a=b.jsonl"]
    assert recipe.data.regenerate is not None
    assert recipe.data.regenerate.max_prompts == 7


@pytest.mark.parametrize("text", ["off", "no", "yes", "12:30", "2026-01-01", "<<", "="])
def test_words_that_yaml_1_1_reads_otherwise_stay_text(recipe_file: Path, text: str) -> None:
    assert load_recipe(recipe_file, [f"run_dir={text}"]).run_dir == text
    assert load_recipe(recipe_file, ["track.wandb=off"]).track.wandb == "off"


def test_all_problems_are_reported_at_once(recipe_file: Path) -> None:
    problems = problems_of(
        recipe_file,
        "train.lr=fast",
        "head.num_depths=0",
        "train.sav_steps=5",
        "model.offload=cpu",
        "data.pack.x=1",
        "model.quantization=4bit",
    )
    assert [problem.partition(":")[0] for problem in problems] == [
        "train.sav_steps",
        "model.offload",
        "head.num_depths",
        "data.pack",
        "train.lr",
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.lr=fast", "train.lr: 'fast'; expected a valid number. Correct it."),
        ("model.trunk=3", "model.trunk: 3; expected a valid string. Correct it."),
        ("model=finetune", "model: 'finetune'; expected an object."),
        ("data.sources=a.jsonl", "data.sources: 'a.jsonl'; expected a valid array."),
        ("evaluate.arms=[graft, retraned]", "evaluate.arms.1: 'retraned'; expected 'none', 'graft', 'native', "),
    ],
)
def test_wrong_types_are_named(recipe_file: Path, override: str, problem: str) -> None:
    assert problems_of(recipe_file, override)[0].startswith(problem)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("train.max_step", "train.max_steps"),
        ("trian.lr", "train"),
        ("lr", "train.lr"),
        ("temperature", "data.regenerate.temperature or objective.temperature or evaluate.temperature"),
        ("data.max_prompts", "data.regenerate.max_prompts"),
        ("data.sources.0.pth", "data.sources.0.path"),
    ],
)
def test_unknown_fields_come_with_the_one_that_was_meant(recipe_file: Path, path: str, meant: str) -> None:
    (problem,) = problems_of(recipe_file, f"{path}=1")
    assert problem.endswith(f"Did you mean {meant}?")


def test_missing_fields_are_named(recipe_file: Path) -> None:
    problems = problems_in(recipe_file, "model: {head_from: base}\n")
    assert [problem.partition("; ")[0] for problem in problems] == [
        f"{name}: missing" for name in ("run_dir", "model.trunk", "data", "train", "evaluate")
    ]


@pytest.mark.parametrize(
    ("text", "place", "found"),
    [
        ("run_dir: x\nmodel: a: b\n", "line 2, column 9", "mapping values are not allowed here"),
        ("model:\n\ttrunk: x\n", "line 2, column 1", "found character '\\t' that cannot start any token"),
        ("evaluate:\n  arms: [none, graft\n", "line 3, column 1", "expected ',' or ']'"),
        ("run_dir: 'x\n", "line 2, column 1", "unexpected end of stream"),
        ("run_dir: !!python/name:os.system x\n", "line 1, column 10", "could not determine a constructor"),
        ("a: 1\n---\na: 2\n", "line 2, column 1", "expected a single document"),
    ],
)
def test_syntax_errors_have_line_and_column(recipe_file: Path, text: str, place: str, found: str) -> None:
    (problem,) = problems_in(recipe_file, text)
    assert problem.startswith(f"{recipe_file}, {place}: ")
    assert found in problem
    assert "; expected well-formed YAML. " in problem


@pytest.mark.parametrize(
    "text", ["[" * 5000, "a: 1" + "0" * 5000, "run_dir: \x07\n", "seed: !!bool abc\n", 'seed: "\\Uffffffff"\n']
)
def test_absurd_yaml_is_refused_like_any_other(recipe_file: Path, text: str) -> None:
    (problem,) = problems_in(recipe_file, text)
    assert "; expected well-formed YAML. " in problem


def test_keys_given_twice_are_refused_with_their_lines(recipe_file: Path) -> None:
    problems = problems_in(recipe_file, TEXT.replace("  lr: 1e-4\n", "  lr: 1e-4\n  warmup_steps: 10\n  lr: 2e-4\n"))
    assert problems == [
        f"{recipe_file}, line 14: 'lr' again (first in line 12); expected each field once. Remove one of them."
    ]


def test_aliases_without_end_end_in_a_message(recipe_file: Path) -> None:
    problems = problems_in(recipe_file, TEXT + "export: &loop\n  enabled: *loop\n")
    assert problems == [
        "recipe: Circular reference detected; expected plain values. Write aliases and keys out as text."
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.lr", "override 'train.lr': no field with a value; expected section.field=value."),
        ("=3", "override '=3': no field with a value; expected section.field=value."),
        ("train..lr=3", "override 'train..lr=3': no field with a value; expected section.field=value."),
        ("train.lr=[", "override train.lr, line 1, column 2: while parsing a flow node expected the node content"),
        ("head={a: 1, a: 2}", "override head, line 1: 'a' again (first in line 1); expected each field once."),
        ("data.sources.2.path=x", "data.sources.2: past the end of a list of 2; expected one of its items."),
        ("data.sources.path=x", "data.sources.path: data.sources is a list of 2; expected a section."),
        ("train.betas.0=0.8", "train.betas.0: train.betas is null; expected a list. Set train.betas as a whole."),
        ("data.0=x", "data.0: data is a section; expected a list. Set data as a whole."),
        ("run_dir.x=1", "run_dir.x: run_dir is 'runs/x'; expected a section. Set run_dir as a whole."),
    ],
)
def test_overrides_that_fit_nowhere_are_refused(recipe_file: Path, override: str, problem: str) -> None:
    (found,) = problems_of(recipe_file, override)
    assert found.startswith(problem)


def test_files_that_cannot_be_read_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    (missing,) = problems_of(tmp_path / "recpe.yaml")
    assert missing.endswith(f"no such file; expected a recipe in YAML. Did you mean {recipe_file}?")
    for path in (tmp_path, "a\0b", "\ud800"):
        with pytest.raises(RecipeError, match=r": cannot be read \("):
            load_recipe(path)
    recipe_file.write_bytes(b"run_dir: \xff\n")
    (binary,) = problems_of(recipe_file)
    assert binary.startswith(f"{recipe_file}: cannot be read ('utf-8' codec can't decode byte 0xff in position 9: ")


@pytest.fixture(
    params=["off", "null", "1e5", "089", "0x1F", "12:30", "a: b", "# c", "  x ", "'", "two\nlines", "\u00e9\U0001f600"]
)
def odd_recipe(request: pytest.FixtureRequest, recipe_file: Path) -> Recipe:
    """A recipe whose text fields hold what careless quoting would turn into something else."""
    odd = yaml.safe_dump({"run_dir": request.param, "evaluate": yaml.safe_load(TEXT)["evaluate"]}, allow_unicode=True)
    lines = TEXT.splitlines(keepends=True)[1:-2]
    recipe_file.write_text(odd.replace("run_dir: ", "run_dir: !!str ", 1) + "".join(lines), encoding="utf-8")
    recipe = load_recipe(recipe_file, ["track.wandb=off", "train.lr=1e-7", "data.regenerate={}"])
    assert recipe.run_dir == request.param
    return recipe


def test_writing_and_reading_gives_an_equal_recipe(odd_recipe: Recipe, tmp_path: Path) -> None:
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_recipe(odd_recipe), encoding="utf-8")
    assert load_recipe(dumped) == odd_recipe
    assert dump_recipe(load_recipe(dumped)) == dump_recipe(odd_recipe)
