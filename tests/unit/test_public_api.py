"""The public Python API: its names and signatures, that it loads lazily, and that its results print well."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect as python_inspect
import pkgutil
import re
import subprocess
import sys
import types
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

import mtp_train as mtp
from mtp_train.checkpoints.demo import demo_path
from mtp_train.errors import RecipeError
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs.resolve import recipe_of
from runs import document

RECIPE = Path(__file__).parents[2] / "recipes" / "retrain_head.yaml"

# Users build on these. A change here is a line under "Changed" or "Removed" in CHANGELOG.md.
FUNCTIONS = {
    "check": "(recipe: RecipeLike, overrides: Overrides = (), *, processes: int | None = None, "
    "device: str | None = None) -> CheckResult",
    "compare": "(arms: Sequence[str | Path], out: str | Path, *, grid: EvaluationGrid | None = None, "
    "costs: bool = True, wandb: WandbMode = 'off', progress: Progress | None = None) -> EvaluationResult",
    "demo": "(out: str | Path) -> DemoResult",
    "demo_path": "(name: str) -> Path",
    "evaluate": "(checkpoint: str | Path, out: str | Path, *, head: str | Path | None = None, "
    "adapter: str | Path | None = None, trunk_bits: Sequence[str] | None = None, head_bits: Sequence[str] = ('none',), "
    "grid: EvaluationGrid | None = None, endpoint: str | None = None, served_model: str | None = None, "
    "api_key_env: str | None = None, concurrency: int = 1, request_timeout_seconds: float = 3600.0, "
    "served_only: bool = False, costs: bool = True, "
    "wandb: WandbMode = 'off', progress: Progress | None = None) -> EvaluationResult",
    "export": "(source: str | Path, out: str | Path, *, head_only: bool = False, gguf: GgufKind | None = None, "
    "speculators: bool = False, copy: bool = False, progress: Progress | None = None) -> ExportResult",
    "generate": "(checkpoint: str | Path, prompts: str | Sequence[str], *, head: str | Path | None = None, "
    "adapter: str | Path | None = None, chat: bool = False, max_new_tokens: int = 128, depth: int = 3, "
    "mtp: MtpMode = 'on', sampling: Sampling | None = None, stop: Sequence[str] = (), "
    "draft_sampling: DraftSampling = 'sampled', on_text: Callable[[str], None] | None = None, "
    "progress: Progress | None = None) -> GenerateResult",
    "graft": "(fine_tune: str | Path, base: str | Path, out: str | Path, *, copy: bool = False, "
    "progress: Progress | None = None) -> GraftResult",
    "inspect": "(checkpoint: str | Path, base: str | Path | None = None, *, progress: Progress | None = None) "
    "-> Inspection",
    "keep_head": "(model: Any, base: str | Path | None = None) -> None",
    "merge": "(checkpoint: str | Path, adapter: str | Path, out: str | Path, *, copy: bool = False, "
    "progress: Progress | None = None) -> MergeResult",
    "open_report": "(source: str | Path) -> Report",
    "recipes": "() -> RecipesResult",
    "regenerate": "(recipe: RecipeLike, overrides: Overrides = (), *, progress: Progress | None = None) "
    "-> RegenerateResult",
    "probe": "(fine_tune: str | Path, base: str | Path, out: str | Path | None = None, *, "
    "data: Sequence[str | Path] = (), console: Console | None = None) -> ProbeResult",
    "rescue": "(fine_tune: str | Path, base: str | Path, out: str | Path, *, data: Sequence[str | Path] = (), "
    "overrides: Overrides = (), console: Console | None = None) -> RescueResult",
    "run": "(recipe: RecipeLike, overrides: Overrides = (), *, console: Console | None = None) -> RunResult",
    "write_recipe": "(out: str | Path, trunk: str | Path, base: str | Path | None = None, *, "
    "data: Sequence[str | Path] = (), processes: int | None = None) -> WriteRecipeResult",
    "train_head_beside": "(trainer: Trainer, base: str | Path | None = None, *, lr: float = 0.0001, "
    "num_depths: int = 3, depth_decay: float = 0.6) -> None",
}
RECORDS = {
    "CheckResult": "recipe precision_reason family plan memory memory_in_shards disk_bytes serves kinds choices "
    "decoding device_bytes data",
    "DemoResult": "base finetune prompts",
    "WriteRecipeResult": "out start family note",
    "EvaluationGrid": "suite tasks prompts_per_task temperatures contexts depths rules max_new_tokens batch seed",
    "EvaluationResult": "out report",
    "ExportResult": "out trunk file flag notes",
    "GenerateResult": "requests settings pieces",
    "GraftResult": "out fine_tune base notes",
    "Inspection": "checkpoint family status stale head trunk trunk_changed weights problems serves cure runs_here note "
    "other_cure",
    "MergeResult": "out checkpoint adapter merged attached notes",
    "RecipesResult": "recipes accelerate",
    "RegenerateResult": "run_dir counts",
    "ProbeResult": "verdict reason command graft base lost_overlap lost_overlap_ci95 trained_tau gain_ci95 "
    "trained_steps",
    "Report": "title arms lossless gate settings cells comparisons positions costs findings endpoint depths samples",
    "RescueResult": "out head reason serves notes",
    "RunResult": "run_dir exit_code reason message stage",
}
EXIT_CODES = {
    "ChangedInputError": 2,
    "CheckpointError": 2,
    "DataError": 2,
    "FullDiskError": 2,
    "GateRefusedError": 3,
    "LostProcessError": 1,
    "MtpError": 2,
    "OutOfMemoryError": 2,
    "OutputExistsError": 2,
    "RecipeError": 2,
    "StoppedError": 143,
    "TrainingError": 2,
    "UnsupportedModelError": 2,
}


def test_the_public_names_are_these() -> None:
    assert {*mtp.__all__} == {*FUNCTIONS, *RECORDS, *EXIT_CODES, "KeepHead", "__version__"}
    assert {*mtp.__all__} <= {*dir(mtp)}
    with pytest.raises(AttributeError, match="module 'mtp_train' has no attribute 'inspekt'"):
        _ = mtp.inspekt  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_signature_that_users_rely_on(name: str) -> None:
    found = str(python_inspect.signature(getattr(mtp, name)))
    assert re.sub(r"(: |-> )'([^']*)'", r"\1\2", found) == FUNCTIONS[name]


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_frozen_and_has_the_fields_that_users_rely_on(name: str) -> None:
    record = getattr(mtp, name)
    assert [field.name for field in dataclasses.fields(record)] == RECORDS[name].split()
    assert record.__dataclass_params__.frozen


def test_an_exception_has_its_exit_code() -> None:
    assert {name: getattr(mtp, name).exit_code for name in EXIT_CODES} == EXIT_CODES
    assert all(issubclass(getattr(mtp, name), mtp.MtpError) for name in EXIT_CODES)


@pytest.mark.parametrize("name", [*FUNCTIONS, *RECORDS, *EXIT_CODES, "KeepHead"])
def test_every_public_name_is_documented(name: str) -> None:
    text = python_inspect.getdoc(getattr(mtp, name)) or ""
    assert text.partition("\n")[0].endswith(".")
    if name in FUNCTIONS:
        assert "Raises:" in text
        assert "Args:" in text or name in ("demo_path", "recipes")
    if name in FUNCTIONS or name in ("KeepHead", "EvaluationGrid", "MtpError"):
        assert "Example:\n    >>> " in text


def is_submodule(name: str) -> bool:
    return PathFinder.find_spec(f"mtp_train.{name}", mtp.__path__) is not None


def test_no_public_name_is_a_submodule() -> None:
    """Importing a submodule sets it as an attribute of the package, in the place of a name of the API."""
    assert [name for name in mtp.__all__ if is_submodule(name)] == []
    assert is_submodule("runs")


def test_the_names_outlive_the_import_of_every_module() -> None:
    for module in pkgutil.walk_packages(mtp.__path__, "mtp_train."):
        if module.name != "mtp_train.__main__":
            importlib.import_module(module.name)
    assert [name for name in mtp.__all__ if isinstance(getattr(mtp, name), types.ModuleType)] == []


def test_type_checkers_read_the_same_names_as_the_interpreter() -> None:
    tree = ast.parse(Path(mtp.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    typed = {
        alias.name: f"{node.module}".removeprefix("mtp_train.")
        for node in imports
        if f"{node.module}".startswith("mtp_train.")
        for alias in node.names
    }
    assert typed == mtp._MODULES


# Imports


def imported(words: list[str]) -> set[str]:
    """Return the heavy packages that a fresh interpreter holds after a command line, or after the bare import."""
    code = "import sys\nimport mtp_train\n"
    if words:
        code += f"from mtp_train.cli.main import main\ntry:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
    code += "print('heavy:', *{'torch', 'transformers', 'accelerate', 'datasets', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("heavy:")[2].split())


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["evaluate", "--help"], ["check"]], ids=lambda words: " ".join(words)
)
def test_importing_parsing_and_help_load_nothing_heavy(words: list[str]) -> None:
    assert imported(words) == set()


def test_a_command_that_runs_is_seen_to_load_torch() -> None:
    assert {"torch", "transformers"} <= imported(["inspect", "nowhere"])


def test_a_command_without_data_does_not_import_datasets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "datasets" not in imported(["inspect", str(tmp_path)])


def imports_of_ours(path: Path) -> set[str]:
    """Return the modules of our two packages that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(f"{node.module}")
    return {name for name in found if name.split(".")[0] in ("mtp_train", "mtp_inference")}


def test_the_command_line_uses_the_public_api_alone() -> None:
    package = Path(mtp.__file__).parent
    for path in (package / "cli").glob("*.py"):
        deep = {name for name in imports_of_ours(path) if not name.startswith("mtp_train.cli")}
        # Signals and the terminal belong to the process.
        assert deep <= {
            "mtp_train",
            "mtp_inference",
            "mtp_train.trunk.progress",
            "mtp_train.train.stopping",
            "mtp_train.errors",
        }, path.name
    assert "mtp_train.runs" in {name.rpartition(".")[0] for name in imports_of_ours(package / "runs" / "check.py")}


# Results


def test_an_inspection_is_the_document_of_the_command_and_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    found = mtp.inspect("demo:finetune", base=demo_path("base"))
    printed = document(["inspect", "demo:finetune", "--base", "demo:base"], capfd)
    assert {
        name: list(value) if isinstance(value, tuple) else value for name, value in found.to_json().items()
    } == printed
    assert str(found).splitlines()[0].endswith("finetune: declared_but_missing")
    page = found._repr_html_()
    assert page.startswith("<table><caption>")
    assert ">declared_but_missing</td>" in page
    marked = dataclasses.replace(found, checkpoint="<b>", serves={"vllm": "a && b"})._repr_html_()
    assert "<caption>&lt;b&gt;</caption>" in marked
    assert "a &amp;&amp; b" in marked


def test_functions_print_nothing_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = mtp.graft("demo:finetune", demo_path("base"), str(tmp_path / "grafted"))
    assert done.out == tmp_path / "grafted"
    result = mtp.generate(done.out, "import os", max_new_tokens=4, depth=2)
    assert result.to_json()["settings"]["depth"] == 2
    assert "<td" in result._repr_html_()
    assert str(result) == result.requests[0].text
    assert capfd.readouterr().out == ""


def test_one_export_has_one_form(tmp_path: Path) -> None:
    with pytest.raises(mtp.MtpError, match="--head-only and --gguf: given together; expected one of them"):
        mtp.export("demo:base", tmp_path / "out", head_only=True, gguf="f16")


def test_a_rule_is_one_of_three(tmp_path: Path) -> None:
    with pytest.raises(mtp.DataError, match="--rules: 'fast'; expected greedy, argmax, sampled"):
        mtp.evaluate("demo:base", tmp_path / "out", grid=mtp.EvaluationGrid(rules=["fast"]))  # type: ignore[list-item]


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


def test_a_wrong_override_is_named_by_its_field() -> None:
    with pytest.raises(RecipeError, match=r"train\.max_step: unknown"):
        recipe_of(RECIPE, {"train.max_step": 3})
