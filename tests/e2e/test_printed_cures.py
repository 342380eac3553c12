"""Every command that messages and reports propose runs as it is printed, from an empty directory, on tiny models."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import mtp_train as mtp
from checkpoints import set_fields
from mtp_train.cli.main import main
from mtp_train.runs import pipeline, rescue
from runs import overrides_of, shorten_probes, write_headless, write_inputs

Capture = pytest.CaptureFixture[str]

# The built-in prompts are long for a tokenizer of bytes; all else is as small as it can be.
TINY = overrides_of(
    head__num_depths=1,
    data__regenerate={"max_prompts": 4, "max_new_tokens": 4, "temperature": 0.0},
    data__seq_len_tokens=2048,
    data__holdout=0.4,
    train__max_steps=1,
    train__tokens_per_step=2048,
    train__warmup_steps=0,
    train__precision="fp32",
    evaluate__prompts=6,
    evaluate__max_new_tokens=4,
    track__wandb="off",
)
LAUNCH = ["accelerate", "launch", "-m", "mtp_train"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


def paste(command: str) -> list[int]:
    """Run a printed command in this process, a run with tiny settings; return the exit code of each part."""
    codes = []
    for part in command.split(" && "):
        words = shlex.split(part)
        if words[:4] == LAUNCH:
            # The gate may refuse a head after one step.
            codes.append(main([*words[4:], *TINY]))
        else:
            assert words[0] == "mtp-train"
            codes.append(main([*words[1:], *(["--set", *TINY] if words[1] == "rescue" else [])]))
    return codes


def cure(checkpoint: Path, base: Path | None = None) -> str:
    found = mtp.inspect(checkpoint, base).cure
    assert found is not None
    return found


def test_a_head_that_a_tool_dropped_with_its_declaration_is_found_by_the_base(own_inputs: Path, tmp_path: Path) -> None:
    inputs = own_inputs
    set_fields(inputs / "finetune", {"mtp_num_hidden_layers": 0})
    proposed = cure(inputs / "finetune")
    assert proposed == f"mtp-train inspect {inputs / 'finetune'} --base BASE"
    assert paste(proposed.replace("BASE", str(inputs / "base"))) == [0]
    assert cure(inputs / "finetune", inputs / "base").startswith("mtp-train graft ")
    # A new head would be second best, as its recipe states.
    written = mtp.write_recipe("new.yaml", inputs / "finetune", data=[inputs / "chats.jsonl"])
    assert "If this model's base has one, write the recipe with --base BASE." in str(written)
    headless = write_headless(tmp_path / "llama", "llama")
    assert mtp.write_recipe("llama.yaml", headless, data=[inputs / "chats.jsonl"]).notes == ()
    assert cure(headless).startswith("mtp-train init ")


def test_a_lost_head_is_grafted_measured_and_retrained_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    shorten_probes(monkeypatch)
    # The random head of the base is no fault, and what a probe finds here is chance.
    monkeypatch.setattr(rescue, "is_at_fault", lambda own: False)
    monkeypatch.setattr(rescue, "judge", lambda found: ("retrain", "as the test says"))
    inputs = write_inputs(tmp_path / "in puts")
    grafting = cure(inputs / "finetune", inputs / "base")
    assert paste(grafting) == [0]
    probing = cure(Path(shlex.split(grafting)[-1]), inputs / "base")
    capsys.readouterr()
    assert paste(probing) == [0]
    retraining = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    assert paste(retraining) == [0]
    assert mtp.inspect(Path(shlex.split(retraining)[-1]) / "export", inputs / "base").status == "healthy"


def test_an_undeclared_head_is_declared_as_printed(own_inputs: Path) -> None:
    base = own_inputs / "base"
    set_fields(base, {"mtp_num_hidden_layers": None})
    command = cure(base)
    assert paste(command) == [0]
    assert mtp.inspect(shlex.split(command)[-1]).status == "healthy"


def test_a_graft_from_a_model_without_a_head_names_the_command_that_attaches_one(tmp_path: Path) -> None:
    trunk = write_headless(tmp_path / "inputs", "llama")
    with pytest.raises(mtp.CheckpointError) as refused:
        mtp.graft(trunk, trunk, "grafted")
    (command,) = re.findall(r"Attach one: (mtp-train .*)", str(refused.value))
    assert paste(command.partition(" && ")[0]) == [0]
    assert main(["check", "finetune.yaml"]) == 0


def test_a_run_that_does_not_fit_is_planned_with_the_settings_that_are_printed(tmp_path: Path, capfd: Capture) -> None:
    inputs = write_inputs(tmp_path / "in")
    pair = ["--trunk", str(inputs / "finetune"), "--base", str(inputs / "base"), "--data", str(inputs / "chats.jsonl")]
    assert main(["init", "my.yaml", *pair, "--device", "0.006GiB"]) == 0
    assert capfd.readouterr().out.endswith("on a GPU of 0.006 GiB.\nnext: mtp-train check my.yaml --device 0.006GiB\n")
    planned = ["check", "my.yaml", "--processes", "2", "--device", "0.006GiB"]
    assert main(planned) == 2
    first, _, *lines = capfd.readouterr().out.splitlines()
    assert first.startswith("does not fit: ")
    fitting = [line.partition(": ")[2] for line in lines if line.startswith("  ") and " a process" in line]
    assert fitting
    for arguments in fitting:
        assert main([*planned, *shlex.split(arguments)]) == 0, arguments
        assert "launch: " in capfd.readouterr().out


def test_a_server_answers_the_prompts_of_a_recipe_that_was_written_before(inputs: Path) -> None:
    mtp.write_recipe("my.yaml", inputs / "finetune", inputs / "base", data=[inputs / "chats.jsonl"])
    for recipe in ("my.yaml", "retrain_head"):
        assert mtp.check(recipe, ["data.regenerate.endpoint=http://localhost:8000/v1"]).room.problem is None


def test_the_launch_line_starts_the_run_that_was_planned(inputs: Path) -> None:
    mtp.write_recipe("my.yaml", inputs / "finetune", inputs / "base", data=[inputs / "chats.jsonl"], processes=4)
    planned = mtp.check("my.yaml", ["train.lr=1e-3"], processes=2, device="h100")
    assert planned.launch is not None
    words = shlex.split(planned.launch)
    assert words[:2] == LAUNCH[:2]
    assert Path(words[words.index("--config_file") + 1]).is_file()
    assert words[words.index("--num_processes") + 1] == "2"
    launched = mtp.check("my.yaml", words[words.index("mtp_train") + 2 :], device="h100")
    assert (launched.plan, launched.recipe.train) == (planned.plan, planned.recipe.train.replaced({"processes": 2}))


def test_a_run_that_exported_nothing_is_finished_as_printed(inputs: Path, capfd: Capture) -> None:
    mtp.write_recipe("my.yaml", inputs / "finetune", inputs / "base", data=[inputs / "chats.jsonl"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline, "_export", Mock(side_effect=RuntimeError("a crash")))
        with pytest.raises(RuntimeError, match="a crash"):
            mtp.run("my.yaml", [*TINY, "gate.enabled=false", "run_dir=half done"])
    assert main(["inspect", "half done"]) == 2
    (command,) = re.findall(r"Finish it with '(.*)', or name", capfd.readouterr().err)
    assert paste(command) == [0]
    assert main(["inspect", "half done"]) == 0


def test_the_demo_is_rescued_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_probes(monkeypatch)
    command = str(mtp.demo("my demo")).splitlines()[-1]
    assert paste(command) in ([0], [3])


@pytest.mark.parametrize(
    "command",
    [
        "hf download OWNER/NAME --local-dir 'my model'",
        "hf upload OWNER/NAME . --private",
        pytest.param("hf download OWNER/NAME --localdir .", marks=pytest.mark.xfail(strict=True, reason="a control")),
    ],
)
def test_the_hubs_commands_are_commands_of_its_tool(command: str) -> None:
    """Without a network they fail (1), and as wrong usage they would end in 2."""
    argv = [sys.executable, "-m", "huggingface_hub.cli.hf", *shlex.split(command)[1:]]
    done = subprocess.run(argv, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False)
    assert (done.returncode, "offline mode" in done.stderr) == (1, True)
