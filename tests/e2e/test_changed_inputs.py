"""A run or a study whose inputs changed is refused by the file's name; one whose files were only touched goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adapters import write_adapter
from launching import outcome
from mtp_train.cli.main import main
from mtp_train.errors import ChangedInputError
from mtp_train.evaluation import run as study_run
from mtp_train.evaluation.results import load_report
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import pipeline
from runs import Capture, document, refusal, run_command, tree, write_recipe

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def place(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, an adapter, and a run that was killed before its training: ``run``, of ``recipe.yaml``."""
    directory = Path(shutil.copytree(pristine, tmp_path_factory.mktemp("changed") / "in"))
    for name in ("base", "finetune"):
        (directory / name / "generation_config.json").write_text('{"eos_token_id": 257}')
    write_adapter(directory / "finetune", directory / "lora")
    # A relative path of two parts reads as a hub id where there is nothing.
    (directory / "data" / "chats").mkdir(parents=True)
    (directory / "chats.jsonl").rename(directory / "data" / "chats" / "chats.jsonl")
    settings = {"model__adapter": str(directory / "lora"), "data__sources": [{"path": "data/chats"}]}
    assert reaches_training(write_recipe(directory / "recipe.yaml", directory, directory / "run", **settings))
    return directory


def reaches_training(recipe: Path) -> bool:
    """Whether a run comes as far as its training, where it is killed."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(recipe.parent)
        patched.setattr(pipeline, "train_stage", killed)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(load_recipe(recipe))
    return True


def killed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def flip(path: Path) -> None:
    """Change a bit of a file in place: its size stays, and so does its modification time."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def more(path: Path) -> None:
    path.write_text(path.read_text() + "\n")


@contextmanager
def changed(path: Path, change: Callable[[Path], Any]) -> Iterator[None]:
    """Change a file, and put the old one back, as a copy."""
    kept = path.read_bytes() if path.exists() else None
    try:
        change(path)
        yield
    finally:
        path.unlink(missing_ok=True)
        if kept is not None:
            path.write_bytes(kept)


CHANGES: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "trunk": ("finetune/model.safetensors", "model.trunk", flip),
    "base": ("base/model.safetensors", "model.head_from", flip),
    "adapter": ("lora/adapter_model.safetensors", "model.adapter", flip),
    "adapter config": ("lora/adapter_config.json", "model.adapter", more),
    "no generation config": ("finetune/generation_config.json", "model.trunk", Path.unlink),
    "chat template": ("finetune/chat_template.jinja", "model.trunk", lambda path: path.write_text(CHAT_TEMPLATE)),
    "data": ("data/chats/chats.jsonl", "data.sources.0", flip),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_killed_run_does_not_go_on_with_another_input(
    name: str, place: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    file, field, change = CHANGES[name]
    before = tree(place / "run")
    with changed(place / file, change):
        said = refusal(["run", "recipe.yaml"], capfd)
    start, _, rest = said.partition(" (")
    assert start == f"mtp-train: {place / 'run'}: inputs changed since it was begun: {field}"
    assert f"): {Path(file).name}" in rest
    assert "; expected the files that it began with. Restore the old files, or choose another run_dir" in rest
    found = outcome(place / "run")
    assert (found["exit_code"], found["stage"]) == (2, "check")
    assert f"mtp-train: {found['message']}\n" == said
    assert tree(place / "run").keys() - {"outcome.json"} == before.keys() - {"outcome.json"}


def test_a_directory_of_data_that_is_gone_is_no_dataset_of_the_hub(
    place: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "data").rename(place / "away")
    said = refusal(["run", "recipe.yaml"], capfd)
    (place / "away").rename(place / "data")
    assert "data.sources.0: no such file or directory" in said


def copied(place: Path) -> None:
    """Take new files of the old content in the place of each checkpoint, and touch the data."""
    for name in ("finetune", "base", "lora"):
        if (place / name).is_dir():
            shutil.move(place / name, place / "old")
            shutil.copytree(place / "old", place / name, copy_function=shutil.copyfile)
            shutil.rmtree(place / "old")
    for file in place.rglob("chats.jsonl"):
        file.touch()


def test_a_killed_run_goes_on_with_files_that_were_copied_or_touched(place: Path) -> None:
    copied(place)
    assert reaches_training(place / "recipe.yaml")


@pytest.fixture(scope="module")
def finished(pristine: Path, run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has finished and exported, and inputs of its own."""
    directory = Path(shutil.copytree(pristine, tmp_path_factory.mktemp("finished") / "in"))
    shutil.copytree(run_dir, directory / "run")
    shutil.copy(run_dir.parent / "recipe.yaml", directory)
    for path in (directory / "recipe.yaml", *(directory / "run").glob("*.yaml"), *(directory / "run").glob("*.json")):
        text = path.read_text().replace(str(run_dir), str(directory / "run"))
        path.write_text(text.replace(str(pristine), str(directory)))
    return directory


def test_a_finished_run_whose_inputs_changed_says_so_and_keeps_its_outcome(finished: Path, capfd: Capture) -> None:
    before = tree(finished / "run")
    with changed(finished / "finetune" / "model.safetensors", flip):
        said = refusal(["run", finished / "recipe.yaml"], capfd)
    assert f"inputs changed since it was begun: model.trunk ({finished / 'finetune'}): model.safetensors;" in said
    assert f"The results in {finished / 'run'} are complete, and were computed from the old files." in said
    assert tree(finished / "run") == before
    copied(finished)
    assert main(["run", str(finished / "recipe.yaml")]) == 0
    assert "finished before (done)" in " ".join(capfd.readouterr().out.split())
    assert tree(finished / "run").keys() == before.keys()


def test_an_export_of_another_trunk_than_was_measured_is_refused(finished: Path, out: Path, capfd: Capture) -> None:
    forms: list[list[str]] = [[], ["--head-only"], ["--gguf", "f16"]]
    with changed(finished / "finetune" / "model.safetensors", flip):
        for form in forms:
            assert "model.trunk (" in refusal(["export", finished / "run", *form, "--out", out], capfd)
    assert not out.exists()
    # The base and the data are not in the export.
    with changed(finished / "chats.jsonl", Path.unlink), changed(finished / "base" / "config.json", more):
        document(["export", finished / "run", "--out", out], capfd)


def test_a_trunk_that_is_rewritten_while_its_head_trains_is_refused(
    finished: Path, tmp_path: Path, new_run: Path
) -> None:

    def rewriting(*_: Any, **__: Any) -> None:
        flip(finished / "finetune" / "model.safetensors")
        shutil.copytree(finished / "run" / "head", new_run / "head")

    recipe = load_recipe(write_recipe(tmp_path / "recipe.yaml", finished, new_run))
    with pytest.MonkeyPatch.context() as patched, changed(finished / "finetune" / "model.safetensors", Path.touch):
        patched.setattr(pipeline, "train_stage", rewriting)
        patched.setattr(pipeline, "evaluate_run", lambda *_: load_report(finished / "run" / "report.json"))
        with pytest.raises(ChangedInputError, match=r"model\.trunk \(.*\): model\.safetensors;"):
            pipeline.run(recipe)
    assert not (new_run / "report.json").exists()


def study(out: Path, inputs: Path, *arms: str) -> list[Any]:
    command = ["compare", *arms] if len(arms) > 1 else ["evaluate", *arms]
    small = ["--prompts-per-task", 2, "--depths", 1, "--max-new-tokens", 6, "--temperatures", 0]
    return [*command, "--suite", inputs / "chats.jsonl", *small, "--out", out]


def test_a_study_is_not_read_or_continued_for_other_arms(
    pristine: Path, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    inputs = shutil.copytree(pristine, tmp_path / "in")
    arms = [f"vanilla={inputs / 'base'}", f"graft={inputs / 'finetune'}+{inputs / 'base'}"]
    argv = study(out, inputs, *arms)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(study_run, "assemble", killed)
        with pytest.raises(KeyboardInterrupt):
            run_command(*argv)
    for finishes in (False, True):
        before = tree(out)
        with changed(inputs / "base" / "model.safetensors", flip):
            said = refusal(argv, capfd)
        assert f"{out}: inputs changed since it was begun: vanilla: trunk ({inputs / 'base'})" in said
        assert f"graft: head ({inputs / 'base'}): model.safetensors; expected" in said
        assert "Restore the old files, or choose another --out for the new ones." in said
        with changed(inputs / "finetune" / "tokenizer.json", more):
            assert "graft: trunk (" in refusal(argv, capfd)
        with changed(inputs / "chats.jsonl", lambda path: path.write_text(path.read_text().replace("say", "tell"))):
            assert "another study (its prompt_texts differ" in refusal(argv, capfd)
        assert tree(out) == before
        copied(inputs)
        report = document(argv, capfd)
        assert list(report["arms"])[1] == "vanilla"
        assert finishes == ("report.json" in before)


def test_an_arm_that_is_rewritten_while_it_is_loaded_is_refused(
    pristine: Path, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    base = Path(shutil.copytree(pristine / "base", tmp_path / "base"))
    load = study_run.load_arm_trunk

    def rewriting(*args: Any) -> Any:
        flip(base / "model.safetensors")
        return load(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(study_run, "load_arm_trunk", rewriting)
        assert "base: trunk changed while it was measured" in refusal(study(out, pristine, str(base)), capfd)
    assert not (out / "study.json").exists()
