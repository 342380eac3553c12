"""The witness that compares our decoder with engines in other environments: what it says, and that it can say no.

transformers' own ``generate(use_mtp=True)`` is the one engine that is always there. The others run where a variable
names the interpreter of their environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engine_parity
from checkpoints import save_with_head, set_fields
from engines.launch import ENGINES, engine_threads, run_program
from engines.ours import decode
from engines.verdict import count_controls, is_evidence
from engines.witness import Task, compare_decoding, controls, job_of, witness
from json_files import read_json, write_json
from mtp_train.checkpoints.locations import open_location
from mtp_train.families import FAMILIES
from repository import SCRIPTS
from tiny import random_tokens, tiny_head, tiny_trunk
from witness_maker.making import make_witness

PROMPTS = random_tokens(7, 4).tolist()
NEW_TOKENS = 40
PYTHONS = {
    "vllm": "MTP_VLLM_PYTHON",
    "sglang": "MTP_SGLANG_PYTHON",
}


def task_for(engine: str, checkpoint: str, work: Path, python: str = sys.executable) -> Any:
    return Task(
        engine=ENGINES[engine],
        checkpoint=open_location(checkpoint),
        prompts=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        dtype="bfloat16" if engine in ("vllm", "sglang") else "float32",
        python=python,
        files={},
        work=work,
    )


# Comparing


def skip_without_mtp_model() -> None:
    modeling = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(getattr(modeling, "MtpModel", None), "forward_layer"):
        pytest.skip("this transformers has no MtpModel.forward_layer")


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Mapping[str, Any]]:
    """Let transformers decode a tiny checkpoint with its own MTP, in a process of its own."""
    skip_without_mtp_model()
    directory = tmp_path_factory.mktemp("witness")
    trunk = tiny_trunk("glm4_moe")
    save_with_head(trunk, tiny_head(trunk), directory / "checkpoint")
    task = task_for("transformers", str(directory / "checkpoint"), directory / "work")
    return task, run_program(task.engine, task.python, job_of(task, 1), task.work)


def test_transformers_drafts_accepts_and_says_what_we_do(decoded: tuple[Any, Mapping[str, Any]]) -> None:
    entry = compare_decoding(decoded[0], 1, decoded[1])
    assert (entry["verdict"], entry["texts_equal"]) == ("equal", len(PROMPTS))
    assert entry["near_ties"]["ours"] == entry["near_ties"]["theirs"] == []
    assert entry["ours"] == entry["theirs"]
    assert entry["ours"]["accepted_tokens"] > 0
    assert entry["ours"]["draft_tokens"] > 100


# What transformers' head has of the trunk's that ours has not: windows that its cache forgets beyond, and dropout.
ON_TERMS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
}


@pytest.mark.parametrize(
    "family_name",
    [family.name for family in FAMILIES if family.attached and family.serving["transformers"].supported],
)
def test_transformers_drafts_with_every_attached_head_that_it_is_said_to_draft_with(
    family_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_mtp_model()
    monkeypatch.syspath_prepend(str(SCRIPTS / "engines" / "programs"))
    from run_transformers import load, rounds_of

    trunk = tiny_trunk(family_name)
    path = save_with_head(trunk, tiny_head(trunk), tmp_path / "checkpoint")
    set_fields(path, ON_TERMS.get(family_name, {}))
    task = replace(task_for("transformers", str(path), tmp_path / "work"), prompts=PROMPTS[:3], max_new_tokens=24)
    model = load({"checkpoint": str(path), "dtype": "float32"})
    texts = [rounds_of(model, prompt_ids, task.max_new_tokens) for prompt_ids in task.prompts]
    entry = compare_decoding(task, 1, {"engine": "transformers", "texts": texts})
    assert (entry["verdict"], entry["ours"]) == ("equal", entry["theirs"])
    assert entry["ours"]["draft_tokens"] > 10


def test_the_record_says_what_was_compared_and_what_a_wrong_wiring_gives(
    decoded: tuple[Any, Mapping[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, document = decoded
    monkeypatch.setattr("engines.witness.run_program", lambda *_: document)
    write_json(tmp_path / "prompts.json", PROMPTS)
    out = tmp_path / "records" / "transformers.json"
    options = f"--depths 1 --dtype float32 --max-new-tokens {NEW_TOKENS} --prompts {tmp_path / 'prompts.json'}"
    command = ["engine_parity.py", str(task.checkpoint.path), "--engine", "transformers", *options.split()]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(out)])
    assert engine_parity.main() == 0
    record = read_json(out)
    assert (record["engine"], record["verdict"]) == ("transformers", "equal")
    assert record["versions"].keys() == {"transformers", "torch"}
    asked = {"prompts": len(PROMPTS), "max_new_tokens": NEW_TOKENS, "dtype": "float32"}
    assert asked.items() <= record["settings"].items()
    threads = {"threads": torch.get_num_threads(), "engine_threads": engine_threads()}
    assert threads.items() <= record["machine"].items()
    assert record["controls"] == {"run": 4, "changed": 3}
    found = {name: entry["verdict"] for name, entry in record["depths"]["1"]["controls"].items()}
    # What is recycled is read from depth 2 on.
    assert found == {
        "recycle": "equal",
        "zero_first_embedding": "different",
        "leading_row": "different",
        "other_state": "different",
    }


@pytest.mark.parametrize(
    ("engine", "read", "other"),
    [
        ("sglang", "after_final_norm", "before_final_norm"),
        ("vllm", "before_final_norm", "after_final_norm"),
    ],
)
def test_a_control_reads_the_trunk_on_the_other_side_of_its_norm(
    engine: str, read: str, other: str, tmp_path: Path
) -> None:
    trunk = tiny_trunk("mimo")
    save_with_head(trunk, tiny_head(trunk), tmp_path / "checkpoint")
    task = task_for(engine, str(tmp_path / "checkpoint"), tmp_path / "work")
    assert task.fp32.head.convention.hidden == read
    assert replace(task, control="other_state").fp32.head.convention.hidden == other


@pytest.mark.slow
@pytest.mark.parametrize("engine", list(PYTHONS))
def test_an_installed_engine_does_what_we_do(engine: str, tmp_path: Path) -> None:
    python = os.environ.get(PYTHONS[engine])
    if python is None:
        pytest.skip(f"{engine}: {PYTHONS[engine]} names no interpreter")
    entry, versions = witness(task_for(engine, "demo:base", tmp_path, python), 3, with_controls=False)
    assert entry["verdict"] in ("equal", "explained")
    assert versions["torch"]


# Draft models


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """Make a trunk and an EAGLE-3 head, and have our own decoder play the engine that drafts with it."""
    directory = tmp_path_factory.mktemp("beside")
    make_witness("qwen3", directory, num_steps=1, seed=0, kind="eagle3", num_drafted=50)
    task = replace(
        task_for("vllm", str(directory), directory / "work"),
        prompts=PROMPTS[:2],
        max_new_tokens=12,
        dtype="float32",
        draft=directory / "draft",
    )
    ours = our_document(task)
    assert compare_decoding(task, 2, ours)["verdict"] == "equal"
    return task, ours


def our_document(task: Any) -> dict[str, Any]:
    texts = decode(task.tested, task.prompts, depth=2, max_new_tokens=12, eos_ids=(), leading_row=False)
    rounds = [[{"drafts": one.drafts, "committed": one.committed} for one in text.rounds] for text in texts]
    return {"engine": "ours", "texts": rounds}


def test_streams_read_in_another_order_or_mixed_as_the_trunk_does_are_seen(tmp_path: Path) -> None:
    save_with_head(tiny_trunk("deepseek_v4"), tiny_head(tiny_trunk("deepseek_v4")), tmp_path / "checkpoint")
    task = task_for("vllm", str(tmp_path / "checkpoint"), tmp_path / "work")
    task = replace(task, prompts=PROMPTS[:1], max_new_tokens=12, dtype="float32")
    document = our_document(task)

    def compare(one: Any) -> dict[str, Any]:
        return compare_decoding(one, 2, document)

    found = {name: entry["verdict"] for name, entry in controls(task, compare).items()}
    assert found.keys() == {"zero_first_embedding", "leading_row", "other_streams", "trunk_mixer"}
    assert found["other_streams"] == found["trunk_mixer"] == "different"


def test_drafts_are_the_best_of_those_that_may_be_drafted(beside: tuple[Any, dict[str, Any]]) -> None:
    task, ours = beside
    entry = compare_decoding(task, 2, ours)
    assert entry["near_ties"]["ours"] == []
    chosen = set(task.fp32.head.blocks[0].lm_head.token_ids_R.tolist())
    assert len(chosen) == 50
    assert {draft for text in ours["texts"] for one in text for draft in one["drafts"]} <= chosen


@pytest.mark.parametrize("control", ["later_layers", "other_tokens"])
def test_other_layers_and_other_tokens_are_seen(control: str, beside: tuple[Any, dict[str, Any]]) -> None:
    assert compare_decoding(replace(beside[0], control=control), 2, beside[1])["verdict"] == "different"


@pytest.mark.slow
# SGLang computes in bf16, in which an untrained head's choices are all near ties.
@pytest.mark.parametrize("engine", ["vllm"])
def test_an_installed_engine_drafts_with_a_draft_model_as_we_do(
    engine: str, beside: tuple[Any, dict[str, Any]]
) -> None:
    python = os.environ.get(PYTHONS[engine])
    if python is None:
        pytest.skip(f"{engine}: {PYTHONS[engine]} names no interpreter")
    task = replace(
        beside[0],
        engine=ENGINES[engine],
        draft=beside[0].draft.with_name("draft"),
        python=python,
        work=beside[0].work / engine,
    )
    entry, _ = witness(task, 2, with_controls=False)
    assert entry["verdict"] == "equal"


def test_a_record_in_which_no_control_changed_the_result_is_no_evidence() -> None:
    def entries(*controls: str) -> dict[str, Any]:
        told = {str(number): {"verdict": verdict} for number, verdict in enumerate(controls)}
        return {"1": {"verdict": "equal"}, "3": {"verdict": "equal", "controls": told}}

    blind = entries("equal", "explained")
    seeing = entries("equal", "different", "different")
    assert count_controls(blind.values()) == {"run": 2, "changed": 0}
    assert count_controls(seeing.values()) == {"run": 3, "changed": 2}
    assert not is_evidence({"verdict": "equal", "depths": blind})
    assert is_evidence({"verdict": "explained", "depths": seeing})
    assert not is_evidence({"verdict": "different", "depths": seeing})
    assert not is_evidence({"verdict": "equal", "depths": {"1": {"verdict": "equal"}}})
