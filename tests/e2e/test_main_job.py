"""The main job on tiny random models: from a fine-tune without its head to an exported checkpoint."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.drafters.drafter import BatchSize, Drafter, RoundPlan
from mtp_inference.sampling.chooser import DraftChoice, Drafts
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.checkpoints.identity import RECORD_FILE
from mtp_train.checkpoints.native import NativeHead
from mtp_train.cli.main import main
from mtp_train.errors import GateRefusedError, RecipeError
from mtp_train.evaluation.results import UNJUDGED_SENTENCE
from mtp_train.heads.build import build_head, native_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.module import MtpHead
from mtp_train.recipe.schema import Recipe
from mtp_train.runs import run as run_module
from mtp_train.runs.display import quiet_progress
from mtp_train.runs.inputs import gather_inputs
from mtp_train.runs.run import require_room
from mtp_train.runs.run_directory import RunDirectory
from mtp_train.trunk.load import Trunk, load_trunk
from runs import GETS_NO_BETTER, LEARNS, run_quietly, tiny_recipe, write_inputs, write_recipe


def test_glm_drafts_equal_those_of_transformers_own_mtp_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = write_inputs(tmp_path / "in", "glm4_moe")
    run_quietly(tiny_recipe(inputs, tmp_path / "run", **LEARNS))
    export = tmp_path / "run" / "export"
    prompt = [97, 98, 99, 100]
    ours, our_tokens = our_drafts(export, prompt, num_tokens=24)
    theirs, their_tokens = their_drafts(export, prompt, 24, monkeypatch)
    assert our_tokens == their_tokens
    # transformers drafts nothing where only one token is left to make.
    assert len(theirs) >= 5
    assert ours[: len(theirs)] == theirs


def our_drafts(export: Path, prompt: list[int], num_tokens: int) -> tuple[list[int], list[int]]:
    """Return what each round at depth 1 drafted, and the new tokens."""
    checkpoint = open_checkpoint(export)
    trunk = load_trunk(export, checkpoint.family, dtype=torch.float32)
    head = build_head(native_plan(checkpoint, "auto"), text_config_of(checkpoint), dtype=torch.float32).eval()
    spy = Spy(head)
    (result,) = SpeculativeDecoder(trunk, spy, 1, ()).decode([prompt], num_tokens)
    return spy.drafts, list(result.token_ids)


class Spy(HeadDrafting):
    """Draft with the head, one token per round, and record the drafts."""

    def __init__(self, head: MtpHead) -> None:
        super().__init__(head)
        self.drafts: list[int] = []

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        drafter = super().make(trunk, size, cache)
        draft = drafter.draft

        def recorded(plan: RoundPlan, choice: DraftChoice) -> Drafts:
            drafts = draft(plan, choice)
            self.drafts += drafts.tokens_BK.flatten().tolist()
            return drafts

        drafter.draft = recorded  # type: ignore[method-assign]
        return drafter


def their_drafts(
    export: Path, prompt: list[int], num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[int]]:
    """Return the same of transformers' ``generate(use_mtp=True)``."""
    from transformers.generation import candidate_generator

    model = AutoModelForCausalLM.from_pretrained(export)
    if not hasattr(candidate_generator, "MTPCandidateGenerator"):
        pytest.skip("this transformers has no generate(use_mtp=True)")
    # transformers lists the head's layer number for the released sizes only.
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]
    generator = candidate_generator.MTPCandidateGenerator
    drafts: list[int] = []
    get_candidates = generator.get_candidates

    def recorded(self: object, input_ids: torch.Tensor, *args: object, **kwargs: object) -> object:
        candidates = get_candidates(self, input_ids, *args, **kwargs)
        if candidates[0].shape[1] > input_ids.shape[1]:
            drafts.append(int(candidates[0][0, -1]))
        return candidates

    monkeypatch.setattr(generator, "get_candidates", recorded)
    model.generation_config.eos_token_id = None
    output = model.generate(
        torch.tensor([prompt]), use_mtp=True, do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
    )
    return drafts, output[0, len(prompt) :].tolist()


def test_a_run_without_a_gate_exports_an_unjudged_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_train.runs.pipeline.evaluate_run", None)
    inputs, run_dir = write_inputs(tmp_path / "in"), tmp_path / "run"
    recipe = tiny_recipe(inputs, run_dir, gate={"enabled": False}, evaluate__prompts=1)
    outcome = run_quietly(recipe)
    assert (outcome.exit_code, outcome.reason, outcome.stage) == (0, "unjudged", "done")
    assert outcome.message.startswith(UNJUDGED_SENTENCE)
    for path in (run_dir / "export", inputs / "finetune-mtp"):
        assert f"mtp-train evaluate {path} --endpoint http://localhost:8000/v1" in outcome.message
    assert json.loads((run_dir / "report.json").read_text())["settings"]["gate"] == "unjudged"
    assert UNJUDGED_SENTENCE in (run_dir / "report.html").read_text()
    assert UNJUDGED_SENTENCE in (run_dir / "export" / "README.md").read_text()
    assert main(["export", str(run_dir), "--out", str(tmp_path / "again")]) == 0
    assert run_quietly(recipe) == outcome


def test_a_trunk_that_no_gpu_can_decode_with_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = write_inputs(tmp_path / "in")
    accelerator: Any = SimpleNamespace(device=torch.device("cuda"))
    judged = tiny_recipe(inputs, tmp_path / "run", model__dtype="float32")
    gathered = gather_inputs(judged, 1, quiet_progress())
    run = run_module.Run(judged, RunDirectory(tmp_path / "run"), gathered, accelerator, quiet_progress())
    weights = sum(
        one.numel() for one in load_trunk(inputs / "finetune", gathered.finetune.family, dtype="float32").parameters()
    )
    for size, refused in ((4 * weights, True), (20 * weights, False)):
        monkeypatch.setattr(run_module, "device_named", lambda _, size=size: SimpleNamespace(memory_bytes=size))
        with pytest.raises(RecipeError, match=r"gate\.enabled: false") if refused else contextlib.nullcontext():
            require_room(run)
        require_room(replace(run, recipe=judged.replaced(gate=judged.gate.replaced(enabled=False))))


@pytest.mark.parametrize("shuffled", [True, False])
def test_the_gate_refuses_a_head_that_got_worse(
    shuffled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start from a good head; with shuffled targets training spoils it, with the right ones it does not."""
    inputs = write_inputs(tmp_path / "in")
    run_quietly(tiny_recipe(inputs, tmp_path / "first", **LEARNS))
    if shuffled:
        from mtp_train.train import aligned as module

        shift = module.shift_left
        monkeypatch.setattr(module, "shift_left", lambda tokens, by, fill: (shift(tokens, by, fill) * 7 + 3) % 256)
    # Hard targets: kl looks at no target token, so shuffling them would spoil nothing.
    overrides = {
        **LEARNS,
        "objective__loss": "ce",
        "model__trunk": str(tmp_path / "first" / "export"),
        "model__head_from": None,
    }
    recipe = tiny_recipe(
        inputs,
        tmp_path / "second",
        **overrides | {"head__init": "native", "evaluate__arms": ["none", "native", "retrained"]},
    )
    if shuffled:
        with pytest.raises(GateRefusedError, match=r"against .* \(native\)"):
            run_quietly(recipe)
        outcome = json.loads((tmp_path / "second" / "outcome.json").read_text())
        assert (outcome["exit_code"], outcome["reason"], outcome["stage"]) == (3, "gate_refused", "done")
        assert not (tmp_path / "second" / "export").exists()
        assert (tmp_path / "second" / "report.html").exists()
    else:
        report_tau = retrained_tau(recipe, tmp_path / "second")
        assert report_tau > 1.8


def retrained_tau(recipe: Recipe, run_dir: Path) -> float:
    # Training on may help or not; either way it must not spoil the head.
    with contextlib.suppress(GateRefusedError):
        run_quietly(recipe)
    return float(json.loads((run_dir / "report.json").read_text())["arms"]["retrained"]["tau"])


def written(run_dir: Path) -> dict[Path, int]:
    """Return when each file was written; but not the record of inputs, which notes files that were hashed again."""
    return {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.name != RECORD_FILE}


def test_a_finished_run_says_so_and_is_left_alone(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "in")
    recipe = tiny_recipe(inputs, tmp_path / "run", **LEARNS)
    first = run_quietly(recipe)
    before = written(tmp_path / "run")
    assert run_quietly(recipe) == first
    assert written(tmp_path / "run") == before


def head_bytes(run_dir: Path) -> dict[str, bytes]:
    """Return the artifact's tensors as bytes."""
    head: NativeHead = load_artifact(run_dir / "head").head
    return {pending.key: pending.load().numpy().tobytes() for pending in head.tensors}


class KilledError(Exception):
    """Stands for the end of the process at some instant."""


@pytest.mark.parametrize("step", [1, 10, 17, 30])
def test_a_run_killed_in_training_ends_with_the_same_head(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtp_train.train import loop

    inputs = write_inputs(tmp_path / "in")
    run_quietly(tiny_recipe(inputs, tmp_path / "unbroken", **LEARNS))
    calls = {"count": 0}
    optimise = loop.optimise

    def killed(*args: object) -> object:
        calls["count"] += 1
        if calls["count"] == step:
            raise KilledError
        return optimise(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(loop, "optimise", killed)
        with pytest.raises(KilledError):
            run_quietly(tiny_recipe(inputs, tmp_path / "killed", **LEARNS))
    run_quietly(tiny_recipe(inputs, tmp_path / "killed", **LEARNS))
    assert head_bytes(tmp_path / "killed") == head_bytes(tmp_path / "unbroken")
    steps = [json.loads(line)["step"] for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [10, 20, 30]


def test_a_run_ends_with_its_report_and_the_commands_that_serve_it(
    recipe: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert main(["run", str(recipe)]) == 0
    lines = capfd.readouterr().out.splitlines()
    page = (run_dir / "report.html").resolve()
    assert f"report: {page.as_uri()}" in lines
    export = run_dir / "export"
    served = [line for line in lines if line.startswith(("vllm: ", "sglang: ", "llama.cpp: "))]
    assert len(served) == 3
    assert sum(str(export) in line for line in served) >= 2


def test_a_refused_run_ends_with_its_report_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_inputs(tmp_path / "in")
    recipe = write_recipe(tmp_path / "recipe.yaml", tmp_path / "in", tmp_path / "run", **GETS_NO_BETTER)
    assert main(["run", str(recipe)]) == 3
    printed = capfd.readouterr()
    assert printed.out.splitlines()[-1] == f"report: {(tmp_path / 'run' / 'report.html').as_uri()}"
    assert printed.err.startswith("mtp-train: ")
