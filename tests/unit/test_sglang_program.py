"""The programs that drive SGLang as a witness, beside a stand-in for SGLang: what they ask for, write down, replace."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

PROGRAMS = Path(__file__).parents[2] / "scripts" / "engines" / "programs"
PARTS = ("", ".srt", ".srt.entrypoints", ".srt.entrypoints.engine", ".srt.managers", ".srt.managers.scheduler")
WORKERS = ("eagle_worker_v2", "multi_layer_eagle_worker_v2")
DRAFTED, ACCEPTED = [5, 6, 7], 2


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the program, all that it wants of SGLang replaced."""
    modules = {f"sglang{part}": ModuleType(f"sglang{part}") for part in PARTS}
    modules["sglang.srt.entrypoints.engine"].Engine = object  # type: ignore[attr-defined]
    modules["sgl_kernel"] = ModuleType("sgl_kernel")
    modules["sgl_kernel"].__version__ = "0"  # type: ignore[attr-defined]
    modules["sglang_gated_delta"] = ModuleType("sglang_gated_delta")
    modules["sglang_gated_delta"].install = lambda: None  # type: ignore[attr-defined]
    speculative = ModuleType("sglang.srt.speculative")
    for name in WORKERS:
        worker = ModuleType(f"sglang.srt.speculative.{name}")
        worker.run_eagle_verify = verify  # type: ignore[attr-defined]
        setattr(speculative, name, worker)
    modules["sglang.srt.speculative"] = speculative

    def decode(worker: str) -> None:
        batch = SimpleNamespace(spec_info=SimpleNamespace(draft_token=torch.tensor([4, *DRAFTED])))
        getattr(speculative, worker).run_eagle_verify(batch, device="cpu")

    modules["sglang.srt.managers.scheduler"].run_scheduler_process = decode  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND"):
        # The program sets them, and what is set here is taken back.
        monkeypatch.setenv(name, "1")
    return load("run_sglang")


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verify(batch: Any, *, device: str) -> Any:
    """Stand in for SGLang's function: accept the first draft, commit it and another token."""
    assert device == "cpu"
    return SimpleNamespace(accept_lens=torch.tensor([ACCEPTED]), next_token_ids=torch.tensor([5, 8, 0, 0]))


@pytest.mark.parametrize("worker", WORKERS)
def test_every_round_is_written_down_as_it_is_verified(
    worker: str, program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = tmp_path / "out.rounds"
    monkeypatch.setattr(torch.cuda, "synchronize", torch.cuda.synchronize)
    monkeypatch.setenv(program.ROUNDS, str(rounds))
    program.run_recorded(worker)
    assert [json.loads(line) for line in rounds.read_text().splitlines()] == [{"drafts": DRAFTED, "committed": [5, 8]}]


def test_the_first_round_is_the_prefill_and_rounds_may_pass_the_limit(program: Any) -> None:
    verified = [{"drafts": DRAFTED, "committed": [5, 8]}]
    assert program.rounds_of([4, 5], verified) == [{"drafts": [], "committed": [4]}, *verified]


@pytest.mark.parametrize("output_ids", [[4, 6], [4, 5, 8, 9]])
def test_rounds_that_are_not_what_was_returned_are_refused(output_ids: list[int], program: Any) -> None:
    with pytest.raises(RuntimeError, match=r"the rounds committed \[4, 5, 8\]; expected what SGLang returned"):
        program.rounds_of(output_ids, [{"drafts": DRAFTED, "committed": [5, 8]}])


def test_a_chain_of_drafts_is_asked_for_of_the_own_head_or_of_a_draft_model(program: Any) -> None:
    chain = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    job = {"depth": 3, "draft": None}
    assert program.speculation_of(job) == {"speculative_algorithm": "NEXTN", **chain}
    draft = {"kind": "eagle3", "path": "DRAFT"}
    assert program.speculation_of({**job, "draft": draft}) == {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "DRAFT",
        **chain,
    }


LINEAR, FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ({}, {}),
        ({"layer_types": [FULL, FULL], "rope_parameters": {"partial_rotary_factor": 0.5}}, {}),
        ({"layer_types": [LINEAR, LINEAR, FULL, LINEAR, LINEAR, FULL]}, {"full_attention_interval": 3}),
        ({"layer_types": [LINEAR, FULL], "full_attention_interval": 2, "rope_parameters": {"rope_theta": 1e4}}, {}),
        (
            {"layer_types": [LINEAR, FULL], "rope_parameters": {"partial_rotary_factor": 0.5}},
            {"full_attention_interval": 2, "partial_rotary_factor": 0.5},
        ),
        (
            {
                "layer_types": [LINEAR, FULL],
                "full_attention_interval": 2,
                "partial_rotary_factor": 0.5,
                "rope_parameters": {"partial_rotary_factor": 0.5},
            },
            {},
        ),
    ],
)
def test_a_hybrid_trunk_is_told_what_its_config_says_elsewhere(
    config: dict[str, Any], overrides: dict[str, float], program: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert program.overrides_of(tmp_path) == overrides


# Gated DeltaNet


GATED_DELTA = (
    *("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.mamba", "sglang.srt", "sglang.srt.layers"),
    *("sglang.srt.layers.attention", "sglang.srt.layers.attention.hybrid_linear_attn_backend"),
    *("sglang.srt.layers.attention.linear", "sglang.srt.layers.attention.linear.kernels"),
)


@pytest.fixture
def gated_delta(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the CPU replacement of SGLang's verification, with fakes for all parts of SGLang."""
    modules = {name: ModuleType(name) for name in GATED_DELTA}
    backend = SimpleNamespace(_scatter_speculative_state_with_mask=None)
    for parent, name, value in (
        ("sglang.kernels.ops.mamba", "mamba_state_scatter_triton", SimpleNamespace()),
        ("sglang.srt.layers.attention.hybrid_linear_attn_backend", "HybridLinearAttnBackend", backend),
        ("sglang.srt.layers.attention.linear", "gdn_backend", SimpleNamespace()),
        ("sglang.srt.layers.attention.linear.kernels", "gdn_triton", SimpleNamespace()),
    ):
        setattr(modules[parent], name, value)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return load("sglang_gated_delta")


STEPS, PLACE, ROW = 3, 2, 1


def test_a_verified_window_is_kept_after_every_token_and_the_state_left_alone(gated_delta: Any) -> None:
    def one_token(token: Any, states: Any, *_: Any, conv_state_indices: Any) -> Any:
        place = int(conv_state_indices)
        states[place] = torch.cat([states[place][:, 1:], token.T], dim=1)
        return states[place].sum(dim=1)[None]

    mixed, states, windows = torch.randn(1, 4, STEPS), torch.randn(3, 4, 2), torch.zeros(2, STEPS, 4, 2)
    before = states.clone()
    found = gated_delta.convolve(
        one_token,
        mixed,
        states,
        *(None, None, "silu"),
        conv_state_indices=torch.tensor([PLACE]),
        intermediate_conv_window=windows,
        intermediate_state_indices=torch.tensor([ROW]),
        retrieve_parent_token=None,
    )
    whole = torch.cat([before[PLACE], mixed[0]], dim=1).unfold(1, 2, 1)[:, 1:]
    assert torch.equal(found[0], whole.sum(dim=-1))
    assert torch.equal(windows[ROW], whole.transpose(0, 1))
    assert torch.equal(states, before)


def test_a_verified_recurrence_keeps_its_state_after_every_token_and_the_first_as_it_was(gated_delta: Any) -> None:
    def one_token(*, q: Any, k: Any, v: Any, a: Any, b: Any, initial_state_source: Any, **same: Any) -> Any:
        assert same["softplus_beta"] == 1.0
        assert same["cu_seqlens"].tolist() == [0, 1]
        state = initial_state_source[int(same["initial_state_indices"])]
        state.mul_(a.view(())).add_(k.view(-1, 1) * v.view(1, -1) * b.view(()))
        return (q.view(1, -1) @ state).view(1, 1, 1, -1)

    q, k, v = (torch.randn(1, STEPS, 1, 2) for _ in range(3))
    a, b = torch.rand(STEPS, 1), torch.rand(STEPS, 1)
    states, kept = torch.randn(3, 2, 2), torch.zeros(2, STEPS, 2, 2)
    before = states.clone()
    found = gated_delta.update(
        one_token,
        **{"q": q, "k": k, "v": v, "a": a, "b": b},
        initial_state_source=states,
        initial_state_indices=torch.tensor([PLACE]),
        cu_seqlens=torch.tensor([0, STEPS]),
        intermediate_states_buffer=kept,
        intermediate_state_indices=torch.tensor([ROW, 0]),
        **{"is_kda": False, "disable_state_update": True, "cache_steps": STEPS, "retrieve_parent_token": None},
        softplus_beta=1.0,
    )
    state = before[PLACE]
    for step in range(STEPS):
        state = state * a[step] + torch.outer(k[0, step, 0], v[0, step, 0]) * b[step]
        torch.testing.assert_close(kept[ROW, step], state)
        torch.testing.assert_close(found[0, step, 0], q[0, step, 0] @ state)
    assert torch.equal(states, before)


def test_a_tree_of_drafts_is_refused(gated_delta: Any) -> None:
    with pytest.raises(NotImplementedError, match="drafts that are a tree"):
        gated_delta.require_chain({"retrieve_parent_token": torch.tensor([0])})
