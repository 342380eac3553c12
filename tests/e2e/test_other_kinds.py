"""A model whose releases have no head gets a head of every other kind, by the recipe and commands of others."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mtp_train as mtp
from json_files import read_json, write_json
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.cli.main import main
from mtp_train.errors import GateRefusedError
from mtp_train.evaluation.results import load_report
from mtp_train.heads.draft_model import draft_model
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import pipeline
from mtp_train.train.log import read_metrics
from runs import (
    ATTACH,
    TINY_RESCUE,
    Capture,
    document,
    drafted_by,
    passed_report,
    refusal,
    shorten_probes,
    tree,
    write_headless,
    write_recipe,
)

KINDS = ("eagle", "eagle3", "medusa")
RUN: dict[str, Any] = {**ATTACH, "head__init": "random"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_headless(tmp_path_factory.mktemp("kinds") / "in", "qwen3", num_layers=8).parent


def run(inputs: Path, directory: Path, **overrides: Any) -> Path:
    directory.mkdir(exist_ok=True)
    recipe = write_recipe(directory / "recipe.yaml", inputs, directory / "run", **{**RUN, **overrides})
    assert pipeline.run(load_recipe(recipe)).stage == "done"
    return directory / "run"


def from_donor(donor: Path) -> dict[str, Any]:
    """Return the settings that retrain an EAGLE-3 head."""
    model = {"model__head_from": str(donor), "head__kind": "eagle3", "head__init": "graft"}
    return {**model, "evaluate__arms": ["none", "graft", "retrained"], "gate__baseline": "auto"}


@pytest.fixture(scope="module")
def runs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("runs")
    vocab = {"eagle3": 100}
    return {kind: run(inputs, directory / kind, head__kind=kind, head__draft_vocab=vocab.get(kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_trained_and_its_export_is_a_draft_model_that_drafts_losslessly(
    kind: str, runs: dict[str, Path], inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    run_dir = runs[kind]
    trunk = inputs / "finetune"
    passed_report(run_dir, "none")
    ask = ["generate", trunk, "--prompt", "say 3", "--max-new-tokens", 16]
    drafted = drafted_by(run_dir / "head", 2, ask, capfd)
    export = run_dir / "export"
    assert document([*ask, "--head", export, "--depth", 2], capfd)["requests"] == [drafted]

    promised = document(["check", run_dir.parent / "recipe.yaml"], capfd)["serves"]
    found = document(["inspect", export, "--base", trunk], capfd)
    assert (found["family"], found["status"], found["missing_keys"]) == (kind, "healthy", [])
    assert found["serves"] == promised
    assert main(shlex.split(found["runs_here"].replace("TRUNK", shlex.quote(str(trunk))))[1:]) == 0
    card = (export / "README.md").read_text()
    assert "draft model for finetune" in card
    assert ("vllm serve TRUNK" in card) == promised["vllm"].startswith("vllm serve")
    assert {path.name for path in export.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    document(["export", run_dir, "--out", tmp_path / "again"], capfd)
    assert tree(tmp_path / "again") == tree(export)
    alone = ["export", run_dir, "--head-only", "--out", tmp_path / "alone"]
    assert "Export it without --head-only" in refusal(alone, capfd)


def test_a_draft_model_of_another_trunk_or_half_a_one_is_refused(
    runs: dict[str, Path], inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    ask = ["generate", inputs / "finetune", "--prompt", "a", "--depth", 1, "--head"]
    draft = tmp_path / "draft"
    shutil.copytree(runs["eagle3"] / "export", draft)
    tensors = load_file(draft / "model.safetensors")
    config = read_json(draft / "config.json")

    save_file({key: value for key, value in tensors.items() if key != "norm.weight"}, draft / "model.safetensors")
    assert "norm.weight" in refusal([*ask, draft], capfd)
    assert document(["inspect", draft], capfd)["status"] == "partial"

    other = torch.zeros_like(load_file(inputs / "finetune" / "model.safetensors")["model.embed_tokens.weight"])
    save_file({**tensors, "embed_tokens.weight": other}, draft / "model.safetensors")
    assert "embed_tokens.weight differs from the embedding of" in refusal([*ask, draft], capfd)

    save_file(tensors, draft / "model.safetensors")
    write_json(draft / "config.json", {**config, "vocab_size": 7})
    assert "vocab_size is 7, in " in refusal([*ask, draft], capfd)


def test_it_is_retrained_from_its_run(runs: dict[str, Path], inputs: Path, tmp_path: Path) -> None:
    first = load_report(runs["eagle3"] / "report.json").arms["retrained"]
    with pytest.raises(GateRefusedError, match=f"not shown to be worse: {runs['eagle3']}"):
        run(inputs, tmp_path / "again", **from_donor(runs["eagle3"]), train__max_steps=2, train__lr=1e-9)
    arms = load_report(tmp_path / "again" / "run" / "report.json").arms
    # The same head on the same trunk: what was exported drafts as before, from its own draft vocabulary.
    assert arms["graft"].tau == pytest.approx(first.tau, abs=0.02)
    head = load_artifact(tmp_path / "again" / "run" / "head")
    assert (head.family.kind.name, head.draft_vocab is not None and len(head.draft_vocab)) == ("eagle3", 100)


@pytest.mark.parametrize(("kind", "field", "wrong"), [("eagle3", "draft_vocab", 50), ("medusa", "num_depths", 6)])
def test_what_the_grafted_head_decides_is_refused_with_what_to_write(
    kind: str, field: str, wrong: int, runs: dict[str, Path], inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    donor = shutil.copytree(runs[kind] / "export", tmp_path / "donor")
    if kind == "eagle3":
        # Its output matrix is no longer a copy of the trunk's rows.
        tensors = load_file(donor / "model.safetensors")
        save_file({**tensors, "lm_head.weight": 2 * tensors["lm_head.weight"]}, donor / "model.safetensors")
    settings = {**RUN, **from_donor(donor), "head__kind": kind}
    check = ["check", write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", **settings)]
    (value,) = re.findall(rf"Write head\.{field}: (\w+)\.", refusal([*check, f"head.{field}={wrong}"], capfd))
    assert document([*check, f"head.{field}={value}"], capfd)["launch"]


def test_a_fine_tune_with_a_draft_model_is_probed_and_rescued(
    runs: dict[str, Path],
    inputs: Path,
    tmp_path: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shorten_probes(monkeypatch)
    trunk = inputs / "finetune"
    data = ["--data", inputs / "chats.jsonl"]
    found = document(["probe", trunk, "--from", runs["eagle3"], *data, "--out", "probed"], capfd)
    assert found["verdict"] in ("graft", "retrain", "undecided", "fault")
    assert found["base"]["tau"] == found["graft"]["tau"]
    # From the export alone its trunk is not known.
    alone = shutil.copytree(runs["eagle3"] / "export", tmp_path / "alone")
    found = document(["probe", trunk, "--from", alone, *data, "--out", "alone-probed"], capfd)
    assert found["base"] is None
    rescued = document(["rescue", trunk, "--from", alone, *data, "--out", "out", "--set", *TINY_RESCUE], capfd)
    assert rescued["head"] in ("graft", "retrained")
    assert rescued["serves"]["vllm"].startswith("vllm serve TRUNK") or "eagle3" in rescued["serves"]["vllm"]
    assert draft_model(open_checkpoint(Path(rescued["out"]))) is not None
    mtp.write_recipe(tmp_path / "r.yaml", trunk, alone, data=[inputs / "chats.jsonl"])


def test_a_released_draft_model_keeps_its_own_output_matrix_and_layer(
    runs: dict[str, Path], inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    """As third parties release them: the output rows were trained, and the layer adds the normed state."""
    released = shutil.copytree(runs["eagle3"] / "export", tmp_path / "released")
    tensors = load_file(released / "model.safetensors")
    rows_RD = tensors["lm_head.weight"]
    noise_RD = torch.randn(rows_RD.shape, generator=torch.Generator().manual_seed(0)) * rows_RD.std()
    tensors["lm_head.weight"] = (rows_RD + noise_RD).to(rows_RD.dtype)
    save_file(tensors, released / "model.safetensors")
    config = read_json(released / "config.json")
    write_json(released / "config.json", {**config, "norm_before_residual": True})
    out = run(inputs, tmp_path / "again", **from_donor(released), train__max_steps=12)
    lines = [line["loss"] for line in read_metrics(out) if "loss" in line]
    assert lines[-1] < lines[0]
    report = load_report(out / "report.json")
    ask = ["generate", inputs / "finetune", "--prompt", "say 3", "--max-new-tokens", 16, "--depth", 2]
    of_head, of_export = (document([*ask, "--head", out / name], capfd)["requests"] for name in ("head", "export"))
    assert of_head == of_export
    assert report.arms["retrained"].tau > report.arms["graft"].tau
    exported = load_file(out / "export" / "model.safetensors")
    assert torch.equal(exported["lm_head.weight"], tensors["lm_head.weight"])
    assert torch.equal(exported["d2t"], tensors["d2t"])
    assert not torch.equal(exported["fc.weight"], tensors["fc.weight"])
    assert read_json(out / "export" / "config.json")["norm_before_residual"] is True
