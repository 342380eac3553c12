"""What each command prints and writes when its input is right."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from byte_tokenizer import byte_tokenizer
from checkpoints import all_tensors
from mtp_inference import SpeculativeDecoder
from mtp_inference.reference import plain_greedy
from mtp_train.cli import main
from mtp_train.families import FAMILIES
from mtp_train.heads.trunk import load_trunk
from mtp_train.recipe_io import load_recipe
from mtp_train.weights.artifact import load_artifact
from runs import GETS_NO_BETTER, LEARNS, tree, write_inputs, write_recipe

ROOT = Path(__file__).parents[2]
COMMANDS = ("run", "check", "regenerate", "inspect", "graft", "export", "generate", "demo")
# What the head of the run was trained for: its recipe's chats, through the template.
PROMPTS = tuple(f"<|im_start|>user\nsay {number}<|im_end|>\n<|im_start|>assistant\n" for number in (1, 4))
COUNTERS = {"num_draft_tokens", "num_accepted_tokens", "accepted_per_pos"}
REQUEST_FIELDS = {"text", "token_ids", "finish_reason", "num_drafts", *COUNTERS}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs") / "in")


@pytest.fixture(scope="module")
def recipe(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run that has finished and exported, in ``run`` beside it."""
    directory = tmp_path_factory.mktemp("finished")
    path = write_recipe(directory / "recipe.yaml", inputs, directory / "run", **LEARNS)
    assert main(["run", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def run_dir(recipe: Path) -> Path:
    return recipe.parent / "run"


@pytest.fixture(scope="module")
def refused(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run that the gate refused."""
    directory = tmp_path_factory.mktemp("refused")
    path = write_recipe(directory / "recipe.yaml", inputs, directory / "run", **GETS_NO_BETTER)
    assert main(["run", str(path)]) == 3
    return path


def document(argv: list[Any], capfd: Capture, exit_code: int = 0) -> Any:
    """Run a command with ``--json`` and return the one document that it printed."""
    capfd.readouterr()
    assert main([*(str(word) for word in argv), "--json"]) == exit_code
    return json.loads(capfd.readouterr().out)


def requests(argv: list[Any], capfd: Capture) -> list[dict[str, Any]]:
    """Generate 24 tokens for each prompt."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    found: list[dict[str, Any]] = document(["generate", *argv, *prompts, "--max-new-tokens", 24], capfd)["requests"]
    return found


def texts(found: list[dict[str, Any]]) -> list[Any]:
    return [(one["text"], one["token_ids"]) for one in found]


# generate


def test_generate_prints_new_tokens_of_every_prompt_and_consistent_counters(run_dir: Path, capfd: Capture) -> None:
    tokenizer = byte_tokenizer()
    trunk = load_trunk(run_dir / "export", FAMILIES[0], dtype=torch.float32)
    found = requests([run_dir / "export", "--depth", 3], capfd)
    assert len(found) == len(PROMPTS)
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert one.keys() == REQUEST_FIELDS
        plain = plain_greedy(trunk, tokenizer(prompt)["input_ids"], 24, {tokenizer.eos_token_id})
        assert one["token_ids"] == plain
        assert one["text"] == tokenizer.decode(plain, skip_special_tokens=True)
        assert one["num_draft_tokens"] == 3 * one["num_drafts"]
        marginal = one["accepted_per_pos"]
        assert len(marginal) == 3
        assert [one["num_drafts"], *marginal] == sorted([one["num_drafts"], *marginal], reverse=True)
        assert one["num_accepted_tokens"] == sum(marginal)
        # The first token comes from prefill; each round commits its accepted drafts and one token more.
        committed = 1 + one["num_drafts"] + one["num_accepted_tokens"]
        assert len(plain) <= committed <= len(plain) + 3
    assert sum(one["num_accepted_tokens"] for one in found) > 0


def test_generate_says_the_same_at_every_depth_and_depth_zero_is_plain(run_dir: Path, capfd: Capture) -> None:
    drafted = requests([run_dir / "export", "--depth", 3], capfd)
    plain = requests([run_dir / "export", "--depth", 0], capfd)
    assert texts(drafted) == texts(plain) == texts(requests([run_dir / "export", "--mtp", "off"], capfd))
    for one in plain:
        counters = {key: one[key] for key in COUNTERS}
        assert counters == {"num_draft_tokens": 0, "num_accepted_tokens": 0, "accepted_per_pos": []}
        assert one["num_drafts"] == len(one["token_ids"]) - 1


def test_generate_takes_a_head_from_a_run_and_from_a_base(inputs: Path, run_dir: Path, capfd: Capture) -> None:
    own = requests([run_dir / "export"], capfd)
    assert requests([inputs / "finetune", "--head", run_dir / "head"], capfd) == own
    stale = requests([inputs / "finetune", "--head", inputs / "base"], capfd)
    assert texts(stale) == texts(own)
    accepted = [sum(one["num_accepted_tokens"] for one in found) for found in (own, stale)]
    assert accepted[0] > accepted[1]


def test_generate_states_its_settings(inputs: Path, run_dir: Path, capfd: Capture) -> None:
    head = str(run_dir / "head")
    argv = ["generate", inputs / "finetune", "--head", head, "--prompt", "x", "--depth", 2, "--max-new-tokens", 1]
    settings = document(argv, capfd)["settings"]
    assert settings == {
        "checkpoint": str(inputs / "finetune"),
        "head": head,
        "depth": 2,
        "max_new_tokens": 1,
        "chat": False,
        "mtp": "on",
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": 0,
        "stop": [],
        "draft_sampling": "sampled",
        "dtype": "float32",
        "device": "cpu",
    }


def test_generate_applies_the_chat_template_only_when_asked(run_dir: Path, capfd: Capture) -> None:
    argv = ["generate", run_dir / "export", "--max-new-tokens", 8, "--prompt"]
    chat = document([*argv, "say 1", "--chat"], capfd)["requests"]
    assert chat == document([*argv, PROMPTS[0]], capfd)["requests"]
    assert chat != document([*argv, "say 1"], capfd)["requests"]


def test_generate_stops_at_the_declared_end_of_text(run_dir: Path, tmp_path: Path, capfd: Capture) -> None:
    checkpoint = Path(shutil.copytree(run_dir / "export", tmp_path / "checkpoint"))
    argv = ["generate", checkpoint, "--prompt", PROMPTS[0], "--max-new-tokens", 24]
    whole = document(argv, capfd)["requests"][0]["token_ids"]
    end = whole[9]
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    for depth in (0, 3):
        assert document([*argv, "--depth", depth], capfd)["requests"][0]["token_ids"] == whole[: whole.index(end) + 1]


def test_generate_samples_the_same_text_with_and_without_argmax_drafts(run_dir: Path, capfd: Capture) -> None:
    sampled = [run_dir / "export", "--temperature", 1.5, "--top-k", 20, "--draft-sampling", "argmax", "--seed", 3]
    drafted, plain = requests(sampled, capfd), requests([*sampled, "--mtp", "off"], capfd)
    assert texts(drafted) == texts(plain)
    assert texts(plain) != texts(requests([run_dir / "export"], capfd))
    assert texts(plain) != texts(requests([*sampled[:-1], 4, "--mtp", "off"], capfd))
    assert sum(one["num_draft_tokens"] for one in drafted) > 0


def test_generate_leaves_the_depth_to_the_decoder_on_request(run_dir: Path, capfd: Capture) -> None:
    found = requests([run_dir / "export", "--mtp", "auto", "--depth", 7], capfd)
    assert texts(found) == texts(requests([run_dir / "export", "--mtp", "off"], capfd))
    assert all(len(one["accepted_per_pos"]) == 7 for one in found)


def test_generate_cuts_the_text_before_a_stop_string(run_dir: Path, capfd: Capture) -> None:
    whole = requests([run_dir / "export"], capfd)[0]["text"]
    stop = whole[4:6]
    one = requests([run_dir / "export", "--stop", stop], capfd)[0]
    assert one["text"] == whole[: whole.index(stop)]
    assert one["finish_reason"] == "stop"
    assert len(one["token_ids"]) < 24


def test_generate_drafts_from_a_reduced_vocabulary(inputs: Path, tmp_path: Path, capfd: Capture) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", **LEARNS, head__draft_vocab=40)
    assert main(["run", str(recipe)]) in (0, 3)
    capfd.readouterr()
    artifact = load_artifact(tmp_path / "run" / "head")
    assert artifact.draft_vocab is not None
    assert len(artifact.draft_vocab) == 40
    argv = [inputs / "finetune", "--head", tmp_path / "run" / "head"]
    drafted, plain = requests(argv, capfd), requests([*argv, "--mtp", "off"], capfd)
    assert texts(drafted) == texts(plain)
    assert sum(one["num_accepted_tokens"] for one in drafted) > 0


def test_a_reduced_vocabulary_that_is_the_whole_is_refused(inputs: Path, tmp_path: Path, capfd: Capture) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", head__draft_vocab=100000)
    for command in ("run", "check"):
        assert main([command, str(recipe)]) == 2
        assert "head.draft_vocab: 100000; expected fewer than the trunk's" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--depth", "8"], "--depth: 8; expected 0 to 7. 0 is plain decoding."),
        (["--depth", "-1"], "--depth: -1; expected 0 to 7. 0 is plain decoding."),
        (["--max-new-tokens", "0"], "--max-new-tokens: 0; expected at least 1. Ask for more tokens."),
        (["--prompt", ""], "--prompt 2: no token; expected some text. Write a prompt."),
    ],
)
def test_generate_refuses_numbers_out_of_range(words: list[str], message: str, run_dir: Path, capfd: Capture) -> None:
    assert main(["generate", str(run_dir / "export"), "--prompt", "x", *words]) == 2
    assert capfd.readouterr() == ("", f"mtp-train: {message}\n")


def test_generate_without_a_head_names_the_cure(inputs: Path, capfd: Capture) -> None:
    assert main(["generate", str(inputs / "finetune"), "--prompt", "x"]) == 2
    assert "holds no head tensors (config declares 1 module(s)); expected a complete head" in capfd.readouterr().err


# check


def test_check_prints_the_resolved_recipe_and_the_plan(recipe: Path, tmp_path: Path, capfd: Capture) -> None:
    assert main(["check", str(recipe), "train.lr=3e-3"]) == 0
    printed = capfd.readouterr().out
    (tmp_path / "printed.yaml").write_text(printed)
    assert load_recipe(tmp_path / "printed.yaml") == load_recipe(recipe, ["train.lr=3e-3"])
    assert "30 steps of 4 x 96 tokens (0.01 M in all), 1 process(es), 4 micro-batch(es) each" in printed
    assert "memory per process, about" in printed


def test_check_counts_parameters_and_memory(recipe: Path, inputs: Path, capfd: Capture) -> None:
    found = document(["check", recipe], capfd)
    base, finetune = all_tensors(inputs / "base"), all_tensors(inputs / "finetune")
    memory = found["memory"]
    assert memory["trunk_parameters"] == sum(tensor.numel() for tensor in finetune.values())
    assert memory["head_parameters"] == sum(t.numel() for key, t in base.items() if key.startswith("mtp."))
    parts = ("trunk_bytes", "head_and_optimizer_bytes", "loss_bytes", "activation_bytes")
    assert all(memory[part] > 0 for part in parts)
    assert memory["total_bytes"] == sum(memory[part] for part in parts)
    assert found["plan"] == {
        "max_steps": 30,
        "seq_len_tokens": 96,
        "sequences_per_step": 4,
        "micro_batch_sequences": 1,
        "world_size": 1,
        "accumulation": 4,
        "total_tokens": 30 * 4 * 96,
    }
    assert found["recipe"]["train"]["max_steps"] == 30


def test_check_touches_no_weights(recipe: Path, inputs: Path, tmp_path: Path, capfd: Capture) -> None:
    hollow = Path(shutil.copytree(inputs, tmp_path / "in"))
    emptied = list(hollow.rglob("*.safetensors"))
    assert len(emptied) == 2
    for file in emptied:
        os.truncate(file, 0)
    moved = [f"model.trunk={hollow / 'finetune'}", f"model.head_from={hollow / 'base'}", f"run_dir={tmp_path / 'run'}"]
    before = tree(tmp_path)
    assert document(["check", recipe, *moved], capfd)["memory"] == document(["check", recipe], capfd)["memory"]
    assert tree(tmp_path) == before
    # The same files stop a command that reads weights.
    assert main(["generate", str(hollow / "base"), "--prompt", "x"]) == 2


def test_check_sees_that_a_step_does_not_divide(recipe: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["check", str(recipe)]) == 2
    message = capfd.readouterr().err
    assert "train.tokens_per_step: 384 is 4 sequences; expected a multiple of 3 (micro_batch_sequences x 3" in message


# regenerate


def test_a_run_goes_on_from_regenerated_responses(
    inputs: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"enabled": True, "max_new_tokens": 6, "batch_size": 2}
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", data__regenerate=data)
    counts = document(["regenerate", recipe], capfd)
    (file,) = (tmp_path / "run" / "data").glob("*.jsonl")
    written = file.read_bytes()
    assert counts["responses"] == len(written.splitlines())
    assert not (tmp_path / "run" / "head").exists()
    batches: list[int] = []
    generate = SpeculativeDecoder.generate

    def counted(decoder: SpeculativeDecoder, requests: Any, *settings: Any) -> Any:
        batches.append(len(requests))
        return generate(decoder, requests, *settings)

    monkeypatch.setattr(SpeculativeDecoder, "generate", counted)
    assert document(["regenerate", recipe], capfd) == counts
    assert batches == []
    # A response that got lost is the only one that is generated again.
    lines = written.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    assert document(["regenerate", recipe], capfd) == counts
    assert len(batches) == 1
    assert main(["run", str(recipe)]) in (0, 3)
    assert sorted(file.read_bytes().splitlines()) == sorted(written.splitlines())
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["stage"] == "done"


def test_regenerate_needs_a_recipe_that_regenerates(inputs: Path, tmp_path: Path, capfd: Capture) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run")
    assert main(["regenerate", str(recipe)]) == 2
    assert "data.regenerate: off; expected it enabled. Write data.regenerate.enabled: true." in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


# export


def test_export_of_a_run_is_what_the_run_exported(run_dir: Path, tmp_path: Path) -> None:
    assert main(["export", str(run_dir), "--out", str(tmp_path / "linked")]) == 0
    assert main(["export", str(run_dir), "--out", str(tmp_path / "copied"), "--copy"]) == 0
    assert tree(tmp_path / "linked") == tree(tmp_path / "copied") == tree(run_dir / "export")
    trunk, head = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    assert (tmp_path / "linked" / trunk).samefile(run_dir / "export" / trunk)
    assert not (tmp_path / "copied" / trunk).samefile(run_dir / "export" / trunk)
    assert load_file(tmp_path / "linked" / head).keys() == load_file(run_dir / "head" / "head.safetensors").keys()


def test_export_respects_the_gate(refused: Path, tmp_path: Path, capfd: Capture) -> None:
    assert main(["export", str(refused.parent / "run"), "--out", str(tmp_path / "out")]) == 3
    assert "lie above 0. The base's own head is not shown to be worse: mtp-train graft" in capfd.readouterr().err
    assert tree(tmp_path) == {}


def test_export_of_a_run_that_was_never_measured_is_refused(run_dir: Path, tmp_path: Path, capfd: Capture) -> None:
    unmeasured = Path(shutil.copytree(run_dir, tmp_path / "run"))
    (unmeasured / "report.json").unlink()
    assert main(["export", str(unmeasured), "--out", str(tmp_path / "out")]) == 2
    assert "its head has not been measured; expected a run that reached the gate" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_head_trained_on_an_adapter_is_not_put_on_the_bare_trunk(
    run_dir: Path, tmp_path: Path, capfd: Capture
) -> None:
    adapted = Path(shutil.copytree(run_dir, tmp_path / "run"))
    recipe = yaml.safe_load((adapted / "recipe.yaml").read_text())
    recipe["model"]["adapter"], recipe["export"]["enabled"] = "lora", False
    (adapted / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["export", str(adapted), "--out", str(tmp_path / "out")]) == 2
    assert "trained on a trunk with the adapter lora; expected a trunk whose weights are in" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


# --json, --help, and recipes as programs


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_document_and_all_there_is_on_stdout(
    command: str, recipe: Path, inputs: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The demo's own checkpoints are large beside these.
    monkeypatch.setattr("mtp_train.demo.demo_path", lambda name: inputs / name)
    argv: dict[str, list[Any]] = {
        "run": ["run", recipe, f"run_dir={tmp_path / 'run'}"],
        "check": ["check", recipe],
        "regenerate": ["regenerate", recipe],
        "inspect": ["inspect", inputs / "finetune", "--base", inputs / "base"],
        "graft": ["graft", inputs / "finetune", "--from", inputs / "base", "--out", tmp_path / "out"],
        "export": ["export", recipe.parent / "run", "--out", tmp_path / "out"],
        "generate": ["generate", inputs / "base", "--prompt", "x", "--max-new-tokens", "2"],
        "demo": ["demo", tmp_path / "demo"],
    }
    fields = {
        "run": {"run_dir", "exit_code", "reason", "message", "stage"},
        "check": {"recipe", "family", "plan", "memory"},
        "regenerate": {"responses", "documents", "response_tokens", "too_short", "truncated", "unfinished"},
        "inspect": {"family", "status", "stale", "missing_keys", "serves", "cure"},
        "graft": {"out"},
        "export": {"out"},
        "generate": {"requests", "settings"},
        "demo": {"base", "finetune"},
    }
    found = document(argv[command], capfd)
    assert found.keys() >= fields[command]


def test_a_refused_run_prints_its_verdict_as_a_document(refused: Path, tmp_path: Path, capfd: Capture) -> None:
    again = document(["run", refused], capfd, exit_code=3)
    first = document(["run", refused, f"run_dir={tmp_path / 'run'}"], capfd, exit_code=3)
    assert again["run_dir"] == str(refused.parent / "run")
    for found in (again, first):
        assert (found["exit_code"], found["reason"], found["stage"]) == (3, "gate_refused", "done")
        assert "does not lie above 0" in found["message"]
    assert not (tmp_path / "run" / "export").exists()


def test_a_recipe_in_the_place_of_a_command_is_run(recipe: Path, capfd: Capture) -> None:
    capfd.readouterr()
    assert main([str(recipe)]) == 0
    assert "run: finished before (done); nothing left to do." in " ".join(capfd.readouterr().out.split())


def program(command: list[Any], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a program as a user of this environment would."""
    paths = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "inference")]),
    }
    return subprocess.run(command, cwd=cwd, env={**os.environ, **paths}, capture_output=True, text=True, check=False)


def test_help_names_every_command() -> None:
    done = program([sys.executable, "-m", "mtp_train", "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^    ([a-z]+)(?: |$)", done.stdout, flags=re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capfd: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    printed = capfd.readouterr()
    assert printed.out.startswith(f"usage: mtp-train {command} ")
    assert "--json" in printed.out
    assert printed.err == ""


def test_a_recipe_is_a_program(inputs: Path, tmp_path: Path) -> None:
    shipped = ROOT / "recipes" / "retrain_head.yaml"
    assert os.access(shipped, os.X_OK)
    helped = program([f"./{shipped.relative_to(ROOT)}", "--help"])
    assert (helped.returncode, helped.stderr) == (0, "")
    assert helped.stdout.startswith("usage: mtp-train run ")
    # Another one with the same first line: the program's exit code is the command's.
    own = write_recipe(tmp_path / "own.yaml", inputs, tmp_path / "run", train__steps=3)
    own.write_text(shipped.read_text().splitlines()[0] + "\n" + own.read_text())
    own.chmod(0o755)
    refused = program([str(own)], cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("mtp-train: train.steps: unknown; expected a field of train. Did you mean")
