"""The directory of a run is taken for the checkpoint that it exported, wherever a checkpoint is expected."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from adapters import write_adapter
from runs import Capture, copy_run, document, refusal, tree, write_recipe

READING = (
    "inspect RUN",
    "inspect FINE --base RUN",
    "generate RUN --prompt x --max-new-tokens 4",
    "generate FINE --head RUN --prompt x --max-new-tokens 4",
    "graft FINE --from RUN --out OUT",
    "merge RUN --adapter LORA --out OUT",
    "init OUT --trunk RUN --data CHATS",
)


def words(command: str, run: Path, inputs: Path, out: Path) -> list[str]:
    named = {"FINE": "finetune", "LORA": "lora", "CHATS": "chats.jsonl"}
    names = {"RUN": run, "OUT": out, **{word: inputs / name for word, name in named.items()}}
    return [str(names.get(word, word)) for word in command.split(" ")]


@pytest.fixture
def adapted(own_inputs: Path, run_dir: Path) -> Path:
    """Inputs with an adapter of the run's export."""
    write_adapter(run_dir / "export", own_inputs / "lora")
    return own_inputs


@pytest.mark.parametrize("command", READING)
def test_a_run_stands_for_its_export(
    command: str, run_dir: Path, adapted: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[dict[str, Any]] = []
    written = []
    for run in (run_dir, run_dir / "export"):
        out = tmp_path / run.name / "out.yaml"
        out.parent.mkdir()
        found.append(document(words(command, run, adapted, out), capfd))
        written.append(tree(out) if out.is_dir() else {})
    if command.startswith("generate"):
        assert found[0]["requests"] == found[1]["requests"]
    assert written[0].keys() == written[1].keys()
    weights = [{key: value for key, value in one.items() if key.endswith(".safetensors")} for one in written]
    assert weights[0] == weights[1]


def test_a_recipe_trains_on_the_export_of_a_run(run_dir: Path, inputs: Path, tmp_path: Path, capfd: Capture) -> None:
    plans = []
    for trunk in (str(run_dir), str(run_dir / "export")):
        model = {"trunk": trunk, "head_from": trunk}
        recipe = write_recipe(tmp_path / "again.yaml", inputs, tmp_path / "again", model=model)
        plans.append(document(["check", recipe], capfd))
    assert plans[0]["memory"] == plans[1]["memory"]


@pytest.mark.parametrize("command", [READING[0], READING[3], READING[5]])
def test_a_run_without_an_export_is_one_message(
    command: str, run_dir: Path, adapted: Path, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    refused = tmp_path / "refused"
    refused.mkdir()
    shutil.copy(run_dir / "recipe.yaml", refused)
    said = refusal(words(command, refused, adapted, out), capfd)
    assert said.startswith(f"mtp-train: {refused}: the directory of a run that has exported no checkpoint; expected ")
    assert not out.exists()


def test_a_checkpoint_with_a_directory_of_that_name_stays_a_checkpoint(own_inputs: Path, capfd: Capture) -> None:
    (own_inputs / "base" / "export").mkdir()
    assert document(["inspect", own_inputs / "base"], capfd)["status"] == "healthy"


def test_a_suite_that_a_head_was_trained_on_is_named(
    run_dir: Path, inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    suites = {"same": shutil.copy(inputs / "chats.jsonl", tmp_path / "copied.jsonl"), "new": tmp_path / "new.jsonl"}
    suites["new"].write_text('{"prompt": "a b"}\n{"prompt": "c d"}\n')
    arms = [f"exported={run_dir / 'export'}", f"head={inputs / 'finetune'}+{run_dir / 'head'}"]
    arms.append(f"base={inputs / 'base'}")
    grid = ["--prompts-per-task", 2, "--temperatures", 0, "--depths", 1, "--max-new-tokens", 4]
    told = {}
    for name, suite in suites.items():
        report = document(["compare", *arms, *grid, "--suite", suite, "--out", tmp_path / name], capfd)
        told[name] = report["settings"].get("trained_on")
    source = f"was trained on it (data.sources.0 of {run_dir})"
    assert told["new"] is None
    assert f"arm exported {source}" in told["same"]
    assert f"arm head {source}" in told["same"]
    assert "arm base" not in told["same"]
    assert told["same"] in (tmp_path / "same" / "report.html").read_text().replace("&#39;", "'")


def test_a_run_is_measured_with_its_recipes_template_variables(
    run_dir: Path, inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    runs = [copy_run(run_dir, tmp_path / name) for name in ("a", "b")]
    recipe = runs[0] / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("chat_template_kwargs: {}", "chat_template_kwargs: {mode: short}"))
    (tmp_path / "new.jsonl").write_text(
        "".join(f'{{"messages": [{{"role": "user", "content": "{n}"}}]}}\n' for n in range(4))
    )
    suite = ["--suite", tmp_path / "new.jsonl"]
    said = refusal(["evaluate", runs[0], *suite, "--out", tmp_path / "one"], capfd)
    assert "--chat-template-kwargs: 'mode', which the chat template does not read" in said
    said = refusal(["compare", *runs, *suite, "--out", tmp_path / "both"], capfd)
    assert f"{runs[0]} and {runs[1]}: other data.chat_template_kwargs; expected one form of the prompts" in said
