"""A run on tiny random models: how it ends, what interrupts it, who may write to its directory, and what it exports."""

from __future__ import annotations

import contextlib
import errno
import os
import pkgutil
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console

from json_files import read_json
from launching import assert_same_run, ended, holding, outcome, responses
from mtp_train.checkpoints.identity import RECORD_FILE
from mtp_train.checkpoints.writing import LOCK_FILE
from mtp_train.cli.main import main
from mtp_train.errors import GateRefusedError, OutputExistsError, StoppedError
from mtp_train.evaluation.results import UNJUDGED_SENTENCE
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import pipeline, run as run_module
from mtp_train.runs.run_directory import DONE, Outcome, RunDirectory
from runs import LEARNS, Capture, copy_run, run_command, tiny_recipe, tree

pytestmark = pytest.mark.usefixtures("heard")


# Interrupted


class Interruption(NamedTuple):
    """What happens to a run in a call of a function, and what the run records of it."""

    place: str
    call: int
    happens: signal.Signals | Exception
    exit_code: int
    reason: str
    stage: str
    says: str


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 8")
STAGE_STOPPED = r"stopped by {} in the stage '{}'\.\nStart the same command again: it goes on from what that stage"


def stopped(place: str, call: int, number: signal.Signals, stage: str, says: str = STAGE_STOPPED) -> Interruption:
    return Interruption(place, call, number, 128 + number, "stopped", stage, says.format(number.name, stage))


INTERRUPTIONS = (
    stopped("mtp_train.runs.run.gather_inputs", 1, signal.SIGINT, "check"),
    # Not before the second batch of answers, so that something is saved.
    stopped("mtp_train.answers.store.RegeneratedStore.append", 2, signal.SIGTERM, "data"),
    stopped("mtp_train.train.loop.optimise", 4, signal.SIGTERM, "train", "stopped by {} after step 4 of 30"),
    # In step 17; step 10 was the last one saved.
    Interruption(
        *("mtp_train.train.loop.optimise", 13, ZeroDivisionError("by zero"), 1, "bug", "train"),
        "ZeroDivisionError: by zero",
    ),
    Interruption(
        *("mtp_train.trunk.states.isolated_hidden", 1, OUT_OF_MEMORY, 2, "out_of_memory", "train"),
        r"stage 'train': .*gradient_checkpointing: true",
    ),
    stopped("mtp_train.runs.pipeline.evaluate_run", 1, signal.SIGINT, "evaluate"),
    Interruption(
        "mtp_train.checkpoints.export.write_safetensors",
        *(1, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 2, "bad_input", "export"),
        r"writing the checkpoint failed \(No space left on device\)",
    ),
    stopped("mtp_train.runs.pipeline.write_card", 1, signal.SIGTERM, "export"),
)


@contextlib.contextmanager
def interrupted(one: Interruption) -> Iterator[None]:
    """Let it happen once: a signal before the call, an error at its end."""
    stock = pkgutil.resolve_name(one.place)
    calls = iter(range(1, one.call))

    def until_then(*args: Any, **named: Any) -> Any:
        if next(calls, None) is not None:
            return stock(*args, **named)
        if isinstance(one.happens, signal.Signals):
            os.kill(os.getpid(), one.happens)
        result = stock(*args, **named)
        if isinstance(one.happens, Exception):
            raise one.happens
        return result

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(one.place, until_then)
        # A bug keeps its traceback.
        with pytest.raises(type(one.happens)) if one.reason == "bug" else contextlib.nullcontext():
            yield


def test_a_run_that_is_interrupted_in_every_stage_ends_as_an_unbroken_one(
    recipe: Path, run_dir: Path, new_run: Path, capfd: Capture
) -> None:
    run = new_run
    command = ["run", str(recipe), f"run_dir={new_run}"]
    for one in INTERRUPTIONS:
        capfd.readouterr()
        with interrupted(one):
            assert main(command) == one.exit_code, one
        message = outcome(run)["message"]
        printed = capfd.readouterr().err
        assert ended(run) == (one.exit_code, one.reason, one.stage)
        assert re.search(one.says, message, flags=re.DOTALL)
        assert "Traceback" not in printed
        if one.reason != "bug":
            assert printed.endswith(f"mtp-train: {message}\n")
            assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []
        assert not (run / LOCK_FILE).exists()
        assert (0 < len(responses(run)) < len(responses(run_dir))) == (one.stage == "data")
        assert not (run / "export").exists() or one.stage == "export"
    assert main(command) == 0
    assert_same_run(run, run_dir)


# Finished


def written(run_dir: Path) -> dict[Path, int]:
    """Return when each file was written; but not the record of inputs, which notes files that were hashed again."""
    return {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.name != RECORD_FILE}


def test_a_finished_run_is_left_alone_and_shows_its_report_and_the_commands_that_serve_it(
    recipe: Path, run_dir: Path, capfd: Capture
) -> None:
    before = written(run_dir)
    capfd.readouterr()
    assert run_command("run", recipe) == 0
    assert written(run_dir) == before
    printed = capfd.readouterr().out
    assert "finished before (done); nothing left to do." in " ".join(printed.split())
    lines = printed.splitlines()
    assert f"report: {(run_dir / 'report.html').resolve().as_uri()}" in lines
    served = [line for line in lines if line.startswith(("vllm: ", "sglang: ", "llama.cpp: "))]
    assert len(served) == 3
    assert sum(str(run_dir / "export") in line for line in served) >= 2


def test_a_run_without_a_gate_exports_an_unjudged_head(
    pristine: Path, tmp_path: Path, new_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "evaluate_run", None)
    run_dir = new_run
    recipe = tiny_recipe(pristine, run_dir, gate={"enabled": False}, evaluate__prompts=1)
    found = pipeline.run(recipe)
    assert (found.exit_code, found.reason, found.stage) == (0, "unjudged", "done")
    assert found.message.startswith(UNJUDGED_SENTENCE)
    for path in (run_dir / "export", pristine / "finetune-mtp"):
        assert f"mtp-train evaluate {path} --endpoint http://localhost:8000/v1" in found.message
    judged = f"stale={run_dir}-baseline retrained={run_dir}-served --judges {run_dir} --out {run_dir}-judged"
    assert found.message.endswith(f"mtp-train compare {judged}")
    assert read_json(run_dir / "report.json")["settings"]["gate"] == "unjudged"
    for page in ("report.html", "export/README.md"):
        assert UNJUDGED_SENTENCE in (run_dir / page).read_text()
    assert run_command("export", run_dir, "--out", tmp_path / "again") == 0
    assert pipeline.run(recipe) == found


def test_a_run_names_missing_kernels_before_it_loads_anything(
    pristine: Path, new_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(pipeline, "missing_kernels", lambda recurrent, kind: f"{recurrent.rule} on {kind} is slow")
    monkeypatch.setattr(pipeline, "run_stages", lambda *_: Outcome(0, "passed", "", DONE))
    pipeline.run(tiny_recipe(pristine, new_run), console=Console())
    assert "gated_delta on cpu is slow" in capsys.readouterr().out.splitlines()


ANY_VERDICT = contextlib.suppress(GateRefusedError)


@pytest.mark.parametrize("shuffled", [True, False])
def test_the_gate_refuses_a_head_that_got_worse(
    shuffled: bool, pristine: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start from a good head; with shuffled targets training spoils it, with the right ones it does not."""
    if shuffled:
        from mtp_train.train import packed_rows as module

        shift = module.shift_left
        monkeypatch.setattr(module, "shift_left", lambda tokens, by, fill: (shift(tokens, by, fill) * 7 + 3) % 256)
    overrides = {
        **LEARNS,
        # Hard targets: kl looks at no target token, so shuffling them would spoil nothing.
        "objective__loss": "ce",
        "model": {"trunk": str(run_dir / "export")},
        "head__init": "native",
        "evaluate__arms": ["none", "native", "retrained"],
    }
    recipe = tiny_recipe(pristine, tmp_path / "second", **overrides)
    second = tmp_path / "second"
    # Training on may help or not; either way it must not spoil the head.
    with pytest.raises(GateRefusedError, match=r"against .* \(native\)") if shuffled else ANY_VERDICT:
        pipeline.run(recipe)
    assert (second / "report.html").exists()
    if shuffled:
        assert ended(second) == (3, "gate_refused", "done")
        assert not (second / "export").exists()
    else:
        assert read_json(second / "report.json")["arms"]["retrained"]["tau"] > 1.8


# One writer


def test_a_second_start_is_refused_and_a_killed_one_is_taken_over(
    recipe: Path, tmp_path: Path, new_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = new_run
    again = load_recipe(recipe, [f"run_dir={run_dir}"])
    with holding(run_dir) as other:
        before = tree(tmp_path)
        with pytest.raises(OutputExistsError, match=rf"run is in use by process {other.pid} on .*; expected one run"):
            pipeline.run(again)
        assert tree(tmp_path) == before
        other.kill()
    assert (run_dir / LOCK_FILE).exists()
    monkeypatch.setattr(run_module, "gather_inputs", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedError):
        pipeline.run(again)
    assert not (run_dir / LOCK_FILE).exists()


def test_a_run_directory_that_is_removed_is_named_and_not_made_again(
    recipe: Path, run_dir: Path, new_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = copy_run(run_dir, new_run, "report.json", "export")
    stock = pipeline.evaluate_run

    def removed(*arguments: Any) -> Any:
        shutil.rmtree(gone)
        return stock(*arguments)

    monkeypatch.setattr(pipeline, "evaluate_run", removed)
    with pytest.raises(OutputExistsError, match=r"run was removed, or run\.lock in it, while this run wrote there"):
        pipeline.run(load_recipe(recipe, [f"run_dir={gone}"]))
    assert RunDirectory(gone).outcome is None


@pytest.mark.parametrize("command", ["run RECIPE run_dir=OUT", "regenerate RECIPE run_dir=OUT", "demo OUT"])
def test_a_place_that_cannot_be_written_is_named(command: str, recipe: Path, tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "file").write_text("mine")
    target = tmp_path / "file" / "run"
    capfd.readouterr()
    assert main(command.replace("RECIPE", str(recipe)).replace("OUT", str(target)).split(" ")) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert re.search(rf"{target}.*(Not a directory|cannot write there|lies below the file)", said)
    assert (tmp_path / "file").read_text() == "mine"
