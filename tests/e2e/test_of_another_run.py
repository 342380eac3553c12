"""A run takes the responses and the trained head of another run on the same trunk, and leaves that run as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from checkpoints import save_tensors
from json_files import read_json, write_json
from launching import head
from mtp_train.answers.store import stored_rows
from mtp_train.runs import regeneration
from runs import LEARNS, Capture, document, refusal, run_command, tree, write_recipe


@pytest.fixture
def first(refused: Path) -> Path:
    """The directory of a run in float32 that the gate refused: it has responses and a head, and no export."""
    return refused.parent / "run"


def second(directory: Path, inputs: Path, first: Path, **fields: Any) -> Path:
    """Write the recipe of a run in bfloat16 with the responses and the head of the first."""
    fields = {"model__head_from": str(first), "data__responses": str(first), "model__dtype": "bfloat16", **fields}
    return write_recipe(directory / "second.yaml", inputs, directory / "second", **{**LEARNS, **fields})


def stored(run: Path) -> list[Any]:
    (directory,) = run.glob("data/responses-*")
    return sorted(stored_rows(directory), key=lambda row: row.id)


def test_another_dtype_takes_the_responses_and_the_head_of_a_refused_run(
    first: Path, pristine: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(first)
    recipe = second(tmp_path, pristine, first, train__lr=1e-9, train__max_steps=1)
    assert document(["check", recipe], capfd)["disk_bytes"] > 0
    monkeypatch.setattr(regeneration, "SpeculativeDecoder", None)
    assert run_command("run", recipe) == 3
    capfd.readouterr()
    run = tmp_path / "second"
    assert stored(run) == stored(first)
    assert [path.name for path in run.glob("data/*/regenerated-*")] == []
    assert_close(head(run), head(first), rtol=0, atol=1e-6)
    base = load_file(pristine / "base" / "model.safetensors")
    with pytest.raises(AssertionError):
        assert_close(head(run), {key: base[key] for key in head(run)}, rtol=0, atol=1e-6)
    report = read_json(run / "report.json")
    assert report["arms"]["graft"]["head"] == str(first)
    assert report["gate"]["baseline"] == "graft"
    assert "mtp-train graft" not in report["gate"]["reason"]
    provenance = read_json(run / "provenance.json")["head_from"]
    assert (provenance["path"], list(provenance["sha256"])) == (str(first / "head"), ["head_config.json"])
    recorded = read_json(run / "inputs.json")["inputs"]["model.head_from"]["files"]
    assert recorded.keys() == {"head.safetensors", "head_config.json"}
    assert tree(first) == before


def copied(first: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first, tmp_path / "first"))


def test_only_missing_responses_are_generated_and_the_copy_outlives_the_run(
    first: Path, pristine: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor = copied(first, tmp_path)
    (file,) = donor.glob("data/*/regenerated-*.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    left_out = json.loads(lines.pop())["id"]
    # A last line that a kill cut off must stay as it is.
    file.write_text("".join(lines) + '{"id": "cut')
    before = tree(donor)
    recipe = second(tmp_path, pristine, donor, model__head_from=str(pristine / "base"))
    assert run_command("regenerate", recipe) == 0
    said = capfd.readouterr()
    run = tmp_path / "second"
    count = len(lines)
    assert f"{count} of {count + 1} prompts have responses of" in (said.out + said.err).replace("\n", " ")
    assert tree(donor) == before
    (generated,) = run.glob("data/*/regenerated-*.jsonl")
    assert [json.loads(line)["id"] for line in generated.read_text().splitlines()] == [left_out]
    assert [row for row in stored(run) if row.id != left_out] == [row for row in stored(first) if row.id != left_out]
    (record,) = run.glob("data/*/copied.json")
    (settings,) = read_json(record)["responses"]
    assert (settings["count"], settings["dtype"]) == (count, "float32")

    shutil.rmtree(donor)
    kept = tree(run / "data")
    monkeypatch.setattr(regeneration.SpeculativeDecoder, "generate", None)
    assert run_command("regenerate", recipe) == 0
    assert tree(run / "data") == kept


def test_responses_of_another_trunk_are_refused_before_anything_is_written(
    first: Path, own_inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    file = own_inputs / "finetune" / "model.safetensors"
    weights = load_file(file)
    save_tensors({**weights, min(weights): weights[min(weights)] + 1e-3}, file)
    said = refusal(["run", second(tmp_path, own_inputs, first, model__head_from=str(own_inputs / "base"))], capfd)
    assert f"data.responses: {first} has responses of another trunk than model.trunk (model.safetensors differ)" in said
    assert not (tmp_path / "second" / "recipe.yaml").exists()


def test_what_is_no_run_with_responses_is_refused(first: Path, pristine: Path, tmp_path: Path, capfd: Capture) -> None:
    unfinished = copied(first, tmp_path)
    shutil.rmtree(unfinished / "data")
    for location, found in {
        pristine: "is no run (recipe.yaml is missing)",
        tmp_path / "nowhere": "is no run (recipe.yaml is missing)",
        unfinished: "has no responses",
    }.items():
        recipe = second(tmp_path, pristine, first, data__responses=str(location))
        assert f"data.responses: {location} {found}" in refusal(["check", recipe], capfd)
    recipe = second(tmp_path, pristine, first, data__regenerate=None)
    assert "while data.regenerate is null; expected null" in refusal(["check", recipe], capfd)
    inside = write_recipe(tmp_path / "inside.yaml", pristine, first / "more", **LEARNS, data__responses=str(first))
    assert f"lies within data.responses ({first})" in refusal(["run", inside], capfd)


def test_a_refused_run_lends_its_head_to_commands(first: Path, pristine: Path, out: Path, capfd: Capture) -> None:
    words = ["generate", pristine / "finetune", "--prompt", "x", "--max-new-tokens", "6", "--head"]
    of_run, of_head = (document([*words, place], capfd)["requests"] for place in (first, first / "head"))
    assert of_run == of_head
    short = ["--suite", pristine / "chats.jsonl", "--prompts-per-task", "2", "--temperatures", "0", "--depths", "1"]
    short += ["--max-new-tokens", "4", "--out", out]
    assert run_command("evaluate", pristine / "finetune", "--head", first, *short) == 0
    assert (out / "report.json").is_file()


def test_a_head_that_does_not_fit_is_refused(first: Path, pristine: Path, tmp_path: Path, capfd: Capture) -> None:
    donor = copied(first, tmp_path)
    recipe = second(tmp_path, pristine, donor)
    config = donor / "head" / "head_config.json"
    fields = read_json(config)
    for change, found in {
        ("family", "glm4_moe"): "a head of kind mtp for GLM",
        ("kind", "eagle3"): "has a head of kind eagle3; expected the same kind",
        ("num_hidden_layers", 99): " of 99 layers; expected kind mtp",
    }.items():
        write_json(config, {**fields, **dict([change])})
        said = refusal(["run", recipe], capfd)
        assert f"{donor / 'head'}" in said
        assert found in said
