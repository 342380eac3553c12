"""A model whose releases have no head gets a head of every other kind, by the recipe and commands of others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_attach_head import ATTACH, write_headless

import mtp_train as mtp
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.cli.main import main
from mtp_train.errors import GateRefusedError
from mtp_train.evaluation.results import load_report
from mtp_train.families.drafts.eagle import Eagle3Layer
from mtp_train.heads.build import build_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.draft_model import draft_model, draft_plan
from mtp_train.recipe.loading import load_recipe
from mtp_train.train.log import read_metrics
from runs import TINY_RESCUE, document, refusal, run_quietly, shorten_probes, write_recipe

KINDS = ("eagle", "eagle3", "medusa")
RUN: dict[str, Any] = {**ATTACH, "head__init": "random"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_headless(tmp_path_factory.mktemp("kinds") / "in", "qwen3", num_layers=8).parent


def run(inputs: Path, directory: Path, **overrides: Any) -> Path:
    directory.mkdir(exist_ok=True)
    recipe = write_recipe(directory / "recipe.yaml", inputs, directory / "run", **{**RUN, **overrides})
    assert run_quietly(load_recipe(recipe)).stage == "done"
    return directory / "run"


@pytest.fixture(scope="module")
def runs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("runs")
    vocab = {"eagle3": 100}
    return {kind: run(inputs, directory / kind, head__kind=kind, head__draft_vocab=vocab.get(kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_trained_measured_and_decodes_losslessly(
    kind: str, runs: dict[str, Path], inputs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = json.loads((runs[kind] / "report.json").read_text())
    assert (report["gate"]["passed"], report["gate"]["baseline"]) == (True, "none")
    assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0
    ask = ["generate", inputs / "finetune", "--prompt", "say 3", "--max-new-tokens", 16]
    plain = document([*ask, "--depth", 0], capfd)["requests"][0]
    (drafted,) = document([*ask, "--head", runs[kind] / "head", "--depth", 2], capfd)["requests"]
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["num_draft_tokens"] == 2 * drafted["num_drafts"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_its_export_is_a_draft_model_that_drafts_the_same(
    kind: str, runs: dict[str, Path], inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    export, trunk = runs[kind] / "export", inputs / "finetune"
    promised = document(["check", runs[kind].parent / "recipe.yaml"], capfd)["serves"]
    found = document(["inspect", export, "--base", trunk], capfd)
    assert (found["family"], found["status"], found["missing_keys"]) == (kind, "healthy", [])
    assert found["serves"] == promised
    assert main(["check", str(runs[kind].parent / "recipe.yaml")]) == 0
    announced = "/export, a draft model beside its TRUNK, for"
    assert announced in capfd.readouterr().out
    assert main(["check", str(runs[kind].parent / "recipe.yaml"), "export.enabled=false"]) == 0
    assert announced not in capfd.readouterr().out
    ask = ["generate", trunk, "--prompt", "say 3", "--max-new-tokens", 16, "--depth", 2, "--head"]
    for path in (runs[kind] / "head", export):
        found[path.name] = document([*ask, path], capfd)["requests"]
    assert found["head"] == found["export"]

    card = (export / "README.md").read_text()
    assert "draft model for finetune" in card
    assert ("vllm serve TRUNK" in card) == promised["vllm"].startswith("vllm serve")
    assert {path.name for path in export.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    again = tmp_path / "again"
    document(["export", runs[kind], "--out", again], capfd)
    assert (again / "model.safetensors").read_bytes() == (export / "model.safetensors").read_bytes()
    assert "Export it without --head-only" in refusal(
        ["export", runs[kind], "--head-only", "--out", tmp_path / "alone"], capfd
    )


def test_a_draft_model_of_another_trunk_or_half_a_one_is_refused(
    runs: dict[str, Path], inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ask = ["generate", inputs / "finetune", "--prompt", "a", "--depth", 1, "--head"]
    draft = tmp_path / "draft"
    shutil.copytree(runs["eagle3"] / "export", draft)
    tensors = load_file(draft / "model.safetensors")
    config = json.loads((draft / "config.json").read_text())

    save_file({key: value for key, value in tensors.items() if key != "norm.weight"}, draft / "model.safetensors")
    assert "norm.weight" in refusal([*ask, draft], capfd)
    assert document(["inspect", draft], capfd)["status"] == "partial"

    other = torch.zeros_like(load_file(inputs / "finetune" / "model.safetensors")["model.embed_tokens.weight"])
    save_file({**tensors, "embed_tokens.weight": other}, draft / "model.safetensors")
    assert "embed_tokens.weight differs from the embedding of" in refusal([*ask, draft], capfd)

    save_file(tensors, draft / "model.safetensors")
    (draft / "config.json").write_text(json.dumps({**config, "vocab_size": 7}))
    assert "vocab_size is 7, in " in refusal([*ask, draft], capfd)


def test_one_comparison_has_them_all(
    runs: dict[str, Path], inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arms = [f"{kind}={inputs / 'finetune'}+{path / 'head'}" for kind, path in runs.items()]
    flags = ["--suite", inputs / "chats.jsonl", "--prompts-per-task", 3, "--max-new-tokens", 12, "--depths", 2]
    report = document(["compare", *arms, *flags, "--out", tmp_path / "out"], capfd)
    taus = {cell["arm"]: cell["tau"] for cell in report["cells"]}
    assert taus.keys() == {"none", *KINDS}
    assert all(taus[kind] >= 1 for kind in KINDS)
    assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0


@pytest.mark.parametrize("begins", [False, True])
def test_a_draft_model_says_where_its_residual_begins(
    begins: bool, runs: dict[str, Path], inputs: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(runs["eagle3"] / "export", tmp_path / "draft"))
    config = json.loads((path / "config.json").read_text())
    assert config["norm_before_residual"] is False
    (path / "config.json").write_text(json.dumps({**config, "norm_before_residual": begins}))
    draft, trunk = draft_model(open_checkpoint(path)), open_checkpoint(inputs / "finetune")
    assert draft is not None
    head = build_head(draft_plan(draft, trunk), text_config_of(trunk), dtype=torch.float32)
    layer = head.get_submodule("blocks.0.layer")
    assert isinstance(layer, Eagle3Layer)
    assert layer.adds_normed is begins


def test_it_is_retrained_from_its_run_or_its_export(runs: dict[str, Path], inputs: Path, tmp_path: Path) -> None:
    first = load_report(runs["eagle3"] / "report.json").arms["retrained"]
    for name, source in {"run": runs["eagle3"] / "head", "export": runs["eagle3"]}.items():
        settings = {
            "model__head_from": str(source),
            "head__kind": "eagle3",
            "head__init": "graft",
            "gate__baseline": "auto",
        }
        settings |= {"evaluate__arms": ["none", "graft", "retrained"], "train__max_steps": 2, "train__lr": 1e-9}
        with pytest.raises(GateRefusedError, match=f"not shown to be worse: {source}"):
            run(inputs, tmp_path / name, **settings)
        arms = load_report(tmp_path / name / "run" / "report.json").arms
        # The same head on the same trunk: what was exported drafts as before, from its own draft vocabulary.
        assert arms["graft"].tau == pytest.approx(first.tau, abs=0.02)
        head = load_artifact(tmp_path / name / "run" / "head")
        assert head.family.kind == "eagle3"
        assert head.draft_vocab is not None
        assert len(head.draft_vocab) == 100


def test_a_fine_tune_with_a_draft_model_is_probed_and_rescued(
    runs: dict[str, Path],
    inputs: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shorten_probes(monkeypatch)
    ask = [inputs / "finetune", "--from", runs["eagle3"], "--data", inputs / "chats.jsonl"]
    found = document(["probe", *ask, "--out", "probed"], capfd)
    assert found["verdict"] in ("graft", "retrain", "undecided", "fault")
    assert found["base"]["tau"] == found["graft"]["tau"]
    # From the export alone its trunk is not known.
    alone = shutil.copytree(runs["eagle3"] / "export", tmp_path / "alone")
    found = document(["probe", ask[0], "--from", alone, *ask[3:], "--out", "alone-probed"], capfd)
    assert found["base"] is None
    argv = ["rescue", ask[0], "--from", alone, *ask[3:], "--out", "out", "--set", *TINY_RESCUE]
    rescued = document(argv, capfd)
    assert rescued["head"] in ("graft", "retrained")
    assert rescued["serves"]["vllm"].startswith("vllm serve TRUNK") or "eagle3" in rescued["serves"]["vllm"]
    assert draft_model(open_checkpoint(Path(rescued["out"]))) is not None
    written = mtp.write_recipe(tmp_path / "r.yaml", ask[0], alone, data=[inputs / "chats.jsonl"])
    assert written.start == "graft"


def test_a_head_of_another_kind_than_the_recipe_names_is_refused(
    runs: dict[str, Path], inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = {"model__head_from": str(runs["eagle"]), "head__kind": "eagle3", "head__init": "graft"}
    arms = {"evaluate__arms": ["none", "graft", "retrained"], "gate__baseline": "auto"}
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", **{**RUN, **wrong, **arms})
    assert "has a head of kind eagle;" in refusal(["run", recipe], capfd)


def test_a_released_draft_model_keeps_its_own_output_matrix_and_layer(
    runs: dict[str, Path], inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As third parties release them: the output rows were trained, and the layer adds the normed state."""
    released = shutil.copytree(runs["eagle3"] / "export", tmp_path / "released")
    tensors = load_file(released / "model.safetensors")
    rows_RD = tensors["lm_head.weight"]
    noise_RD = torch.randn(rows_RD.shape, generator=torch.Generator().manual_seed(0)) * rows_RD.std()
    tensors["lm_head.weight"] = (rows_RD + noise_RD).to(rows_RD.dtype)
    save_file(tensors, released / "model.safetensors")
    config = json.loads((released / "config.json").read_text())
    (released / "config.json").write_text(json.dumps({**config, "norm_before_residual": True}))
    settings = {"model__head_from": str(released), "head__kind": "eagle3", "head__init": "graft"}
    settings |= {"evaluate__arms": ["none", "graft", "retrained"], "gate__baseline": "auto", "train__max_steps": 12}
    out = run(inputs, tmp_path / "again", **settings)
    lines = [line["loss"] for line in read_metrics(out) if "loss" in line]
    assert lines[-1] < lines[0]
    report = load_report(out / "report.json")
    ask = ["generate", inputs / "finetune", "--prompt", "say 3", "--max-new-tokens", 16, "--depth", 2]
    drafts = {}
    for head in (out / "head", out / "export"):
        (drafts[head.name],) = document([*ask, "--head", head], capfd)["requests"]
    assert drafts["head"] == drafts["export"]
    assert report.arms["retrained"].tau > report.arms["graft"].tau
    exported = load_file(out / "export" / "model.safetensors")
    assert torch.equal(exported["lm_head.weight"], tensors["lm_head.weight"])
    assert torch.equal(exported["d2t"], tensors["d2t"])
    assert not torch.equal(exported["fc.weight"], tensors["fc.weight"])
    assert json.loads((out / "export" / "config.json").read_text())["norm_before_residual"] is True
