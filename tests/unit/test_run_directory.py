from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from filelock import SoftFileLease, Timeout
from rich.console import Console

from checkpoints import save_stripped, shard
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.checkpoints.writing import LOCK_FILE
from mtp_train.errors import OutputExistsError
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs import run_directory
from mtp_train.runs.run_directory import Outcome, RunDirectory, checkpoint_identity, environment_facts
from runs import tiny_recipe, tree
from tiny import tiny_trunk

REFUSED = Outcome(exit_code=2, reason="bad_input", message="data: gone; expected it. Restore it.", stage="data")


@pytest.fixture
def recipe(tmp_path: Path, new_run: Path) -> Recipe:
    return tiny_recipe(tmp_path / "in", new_run)


def test_a_new_an_empty_and_a_refused_run_dir_are_ours(tmp_path: Path, new_run: Path, recipe: Recipe) -> None:
    RunDirectory(new_run).require_ours(recipe)
    new_run.mkdir()
    RunDirectory(new_run).require_ours(recipe)
    RunDirectory(new_run).write_outcome(REFUSED)
    RunDirectory(new_run).require_ours(recipe)
    assert list(tree(tmp_path)) == ["run", "run/outcome.json"]
    # Files of a claim that was killed.
    for name in ("inputs.json", ".inputs.json.tmp", "provenance.json", ".recipe.yaml.tmp"):
        (new_run / name).write_text("{}")
    RunDirectory(new_run).require_ours(recipe)


def test_a_claimed_run_dir_is_its_recipes_and_no_others(tmp_path: Path, new_run: Path, recipe: Recipe) -> None:
    for argv in ("first", "second"):
        RunDirectory(new_run).claim(recipe, {"seed": 0, "argv": [argv]}, {})
    assert load_recipe(new_run / "recipe.yaml") == recipe
    assert json.loads((new_run / "provenance.json").read_text())["argv"] == ["first"]
    (new_run / "metrics.jsonl").write_text("")
    RunDirectory(new_run).require_ours(recipe)
    # Trackers change no figure: a run goes on with others.
    RunDirectory(new_run).require_ours(recipe.replaced({"track.tensorboard": True}))
    other = tiny_recipe(tmp_path / "in", new_run, train__lr=2e-3, data__regenerate={}, seed=7)
    differ = (
        r"seed: 0 there, 7 here, data\.regenerate: null there, a section here, train\.lr: 0\.001 there, 0\.002 here"
    )
    with pytest.raises(OutputExistsError, match=rf"holds the run of another recipe \(.*recipe\.yaml\): {differ}; exp"):
        RunDirectory(new_run).require_ours(other)
    (new_run / "provenance.json").write_text("{}")
    with pytest.raises(OutputExistsError, match=r"a run of format_version None, .*; expected 1\. Choose another"):
        RunDirectory(new_run).require_ours(recipe)


@pytest.mark.parametrize("beside", [[], ["outcome.json"], ["provenance.json"], [".recipe.yaml.tmp"]])
def test_files_that_are_not_ours_are_refused(beside: list[str], tmp_path: Path, new_run: Path, recipe: Recipe) -> None:
    new_run.mkdir()
    for name in [*beside, "thesis.txt"]:
        (new_run / name).write_text("{}")
    before = tree(tmp_path)
    # By check, and by a run.
    for refuses in (RunDirectory.require_place, RunDirectory.require_ours):
        with pytest.raises(OutputExistsError, match=r"run holds files that are not a run's \(thesis\.txt\); expected"):
            refuses(RunDirectory(new_run), recipe)
    assert tree(tmp_path) == before


class KilledError(Exception):
    """Stands for the end of the process at some instant."""


@pytest.mark.parametrize("leave_temporary", [False, True])
@pytest.mark.parametrize("killed_write", ["write_json", "write_text"])
def test_a_run_killed_while_it_claims_can_claim_again(
    killed_write: str, leave_temporary: bool, new_run: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, content: object) -> None:
        if leave_temporary:
            path.with_name(f".{path.name}.tmp").write_text("half")
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(run_directory, killed_write, killed)
        with pytest.raises(KilledError):
            RunDirectory(new_run).claim(recipe, {"seed": 0}, {})
    RunDirectory(new_run).require_ours(recipe)
    RunDirectory(new_run).clear_leftovers()
    RunDirectory(new_run).claim(recipe, {"seed": 0}, {})
    assert list(tree(new_run)) == ["inputs.json", "provenance.json", "recipe.yaml"]


def test_leftovers_of_a_kill_go_and_everything_else_stays(tmp_path: Path) -> None:
    kept = ["recipe.yaml", "head/head.safetensors", "export/config.json", "state/step-00000002/state.json"]
    kept += [
        "figures/tau.png",
        "data/regenerated-00000-of-00001.jsonl",
        "wandb/.keep",
        "hidden/ab/states-00000.safetensors",
    ]
    leftovers = [".head.x1/head.safetensors", ".export.y2/model.safetensors", ".report.json.7.tmp", ".recipe.yaml.tmp"]
    leftovers += [
        "figures/.tau.png.7.tmp",
        "state/.step-00000004.z3/head.safetensors",
        "hidden/ab/states-00001.host-7.partial",
    ]
    for name in [*kept, *leftovers]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    RunDirectory(tmp_path).clear_leftovers()
    assert {name for name, content in tree(tmp_path).items() if content is not None} == set(kept)
    RunDirectory(tmp_path / "nowhere").clear_leftovers()


LOST = Outcome(exit_code=1, reason="lost_process", message="launcher: another process is gone", stage="train")
STOPPED = dataclasses.replace(LOST, exit_code=143, reason="stopped", message="stopped")
FULL = Outcome(exit_code=2, reason="bad_input", message="data: no space left", stage="train")
NAMED = dataclasses.replace(FULL, message="process 1: data: no space left")


@pytest.mark.parametrize(
    ("failures", "kept"),
    [
        # The first failure is kept if the other processes fail because of it, or are told to stop.
        ([(1, FULL), (0, LOST)], NAMED),
        ([(1, FULL), (0, STOPPED)], NAMED),
        ([(0, FULL), (1, LOST)], FULL),
        # An error of rank 0 itself replaces earlier outcomes.
        ([(1, FULL), (0, REFUSED)], REFUSED),
        ([(0, REFUSED), (1, FULL)], REFUSED),
        # Rank 0 was killed and recorded nothing.
        ([(1, LOST)], LOST),
        ([(0, STOPPED), (1, STOPPED)], STOPPED),
    ],
)
def test_the_outcome_is_that_of_the_process_that_failed_first(
    failures: list[tuple[int, Outcome]], kept: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, outcome in failures:
        monkeypatch.setenv("RANK", str(rank))
        before = RunDirectory(tmp_path).outcome
        said = RunDirectory(tmp_path).record_failure(outcome)
        assert said in (None, before)
        assert (said is None) == (RunDirectory(tmp_path).outcome != before)
    assert RunDirectory(tmp_path).outcome == kept


def test_an_attempt_replaces_the_outcome_of_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_outcome(REFUSED)
    # The first process of a second node.
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "8")
    with directory.recording():
        assert directory.outcome == REFUSED
    monkeypatch.setenv("RANK", "0")
    with directory.recording():
        assert directory.outcome is None


def test_a_checkpoint_is_identified_by_path_and_small_files(tmp_path: Path) -> None:
    path = save_stripped(tiny_trunk("qwen3_5"), tmp_path / "finetune")
    config = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
    assert checkpoint_identity("demo:finetune", open_checkpoint(path)) == {
        "name": "demo:finetune",
        "path": str(path.resolve()),
        "revision": None,
        "sha256": {"config.json": config},
    }
    shard(path)
    index = hashlib.sha256((path / "model.safetensors.index.json").read_bytes()).hexdigest()
    hashes = checkpoint_identity("demo:finetune", open_checkpoint(path))["sha256"]
    assert hashes == {"config.json": config, "model.safetensors.index.json": index}


def test_environment_facts_do_not_need_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = environment_facts()
    assert facts["git"] is None
    assert facts["versions"]["torch"]
    assert facts["hardware"]["threads"] == 1
    json.dumps(facts)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"exit_code": 0}'])
def test_an_outcome_that_cannot_be_read_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text(content)
    assert RunDirectory(tmp_path).outcome is None


def test_a_lock_of_another_machine_is_taken_over_only_without_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "LEASE_SECONDS", 0.2)
    record = f"filelock/2\npid=7\nhost=elsewhere\nmode=lease\ntoken={'0' * 32}\nduration=0.2\nstart=1\n"
    (tmp_path / LOCK_FILE).write_text(record)
    with RunDirectory(tmp_path).held(Console(quiet=True)):
        assert "host=elsewhere" not in (tmp_path / LOCK_FILE).read_text()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / LOCK_FILE).write_text(record)

    def never(lock: SoftFileLease, **_settings: Any) -> None:
        raise Timeout(lock.lock_file)

    monkeypatch.setattr(SoftFileLease, "acquire", never)
    with (
        pytest.raises(OutputExistsError, match="in use by process 7 on elsewhere"),
        RunDirectory(tmp_path).held(Console(quiet=True)),
    ):
        pass
    assert (tmp_path / LOCK_FILE).read_text() == record
