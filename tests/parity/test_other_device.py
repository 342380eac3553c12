"""What is on a device stays there: the decoder and whole jobs, on one that refuses tensors of the CPU."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from mtp_inference import HeadDrafting, Request, Sampling, SpeculativeDecoder
from mtp_inference.chooser import DraftSampling
from mtp_inference.other_drafters import NgramDrafting
from mtp_train.commands import generate
from mtp_train.errors import GateRefusedError
from mtp_train.study import run as study_run
from runs import document, run_quietly, tiny_recipe, write_inputs
from simulated_device import AVAILABLE, DEVICE, simulated_device
from tiny import CACHE_KINDS, tiny_head, tiny_trunk

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch takes no device that is written in Python")
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=3)
# One that grows, one that is taken back.
TELLING = {"full", "recurrent"}
SHORT = {"train__max_steps": 2, "evaluate__prompts": 2, "evaluate__max_new_tokens": 6}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    with simulated_device() as device:
        monkeypatch.setattr(accelerate.Accelerator, "device", property(lambda self: device))
        for module in (generate, study_run):
            monkeypatch.setattr(module, "local_device", lambda: device)
        yield device


def requests() -> list[Request]:
    return [
        Request(prompt_ids=range(5), max_new_tokens=10),
        Request(prompt_ids=range(3, 20), max_new_tokens=9, sampling=SAMPLED),
        Request(prompt_ids=[7], max_new_tokens=8, mtp="auto"),
        Request(prompt_ids=[7], max_new_tokens=8, mtp="off"),
    ]


def test_a_tensor_of_the_cpu_is_refused_there(device: torch.device) -> None:
    there = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match=r"add.Tensor: CPU tensors of shapes \[\(3,\)\] beside"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="index_select"):
        there.index_select(0, torch.tensor([1]))
    assert ((there + torch.tensor(1.0))[torch.tensor([0])]).tolist() == [2.0]
    assert (there.device.type, there.cpu().device.type) == (DEVICE, "cpu")


@pytest.mark.parametrize("draft_sampling", ["argmax", "sampled"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in TELLING else pytest.mark.slow) for kind in CACHE_KINDS]
)
def test_every_kind_of_cache_decodes_there_as_on_the_cpu(
    kind: str, draft_sampling: DraftSampling, device: torch.device
) -> None:
    trunk = tiny_trunk(CACHE_KINDS[kind])
    head = tiny_head(trunk)
    texts = []
    for where in ("cpu", device):
        decoder = SpeculativeDecoder(
            trunk.to(where), HeadDrafting(head.to(where)), 3, (), draft_sampling=draft_sampling, max_batch=4
        )
        texts.append([result.token_ids for result in decoder.generate(requests())])
    assert texts[0] == texts[1]


def test_prompt_lookup_drafts_there(device: torch.device) -> None:
    trunk = tiny_trunk("llama").to(device)
    plain, drafted = (
        [result.token_ids for result in SpeculativeDecoder(trunk, drafting, 3, ()).generate(requests())]
        for drafting in (None, NgramDrafting())
    )
    assert plain == drafted


def measured(inputs: Path, run_dir: Path, **settings: Any) -> Path:
    """Run a job up to its report; whether the gate lets such a short one pass is not asked."""
    with contextlib.suppress(GateRefusedError):
        run_quietly(tiny_recipe(inputs, run_dir, **{**SHORT, **settings}))
    return run_dir


def test_jobs_run_there_from_regeneration_to_evaluation(
    device: torch.device, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    inputs = write_inputs(tmp_path / "in")
    run_dir = measured(inputs, tmp_path / "run", data__regenerate={"enabled": True, "max_new_tokens": 8})
    given = [inputs / "finetune", "--head", run_dir / "head", "--max-new-tokens", "6"]
    said = document(["generate", *given, "--prompt", "say 1"], capfd)
    assert (said["settings"]["device"], said["requests"][0]["num_drafts"] > 0) == (str(device), True)
    grid = ["--suite", "demo", "--prompts-per-task", "2", "--temperatures", "1", "--depths", "2", "--no-costs"]
    assert document(["evaluate", *given, *grid, "--out", tmp_path / "eval"], capfd)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"train__precision": "bf16"},
        {"train__select": {"every_steps": 1, "share": 0.3, "prompts": 2}},
        {"train__hidden_cache": {"max_gib": 0.01}},
        {"head__lora": {"r": 4, "alpha": 8}},
        {"head__draft_vocab": 40, "objective__vocab": "draft", "objective__loss": "tv"},
        {"objective__unroll": "fastmtp", "objective__loss": "ce"},
        {"objective__loss": "e2e_tv"},
        {"objective__loss": "lk", "objective__on_policy": True},
        {"data__pack": True, "objective__loss": "reverse_kl"},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_so_does_every_way_to_train(settings: dict[str, Any], device: torch.device, tmp_path: Path) -> None:
    run_dir = measured(write_inputs(tmp_path / "in"), tmp_path / "run", **settings)
    assert json.loads((run_dir / "report.json").read_text())["arms"]["retrained"]["rounds"] > 0
