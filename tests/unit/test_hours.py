"""The hours that ``check`` announces, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_inference import HeadDrafting
from mtp_inference.bench.launches import launches_of_a_round
from mtp_inference.kernels.fused import FusedKernels
from mtp_train.errors import DataError
from mtp_train.heads.module import MtpHead
from mtp_train.job.round_launches import count_launches
from mtp_train.recipe.schema import Recipe
from mtp_train.train.estimate import Cost, Sizes
from mtp_train.train.hours import (
    DEVICES,
    KERNELS_PER_LAYER,
    Device,
    Hours,
    RoundLaunches,
    RoundModel,
    Speeds,
    device_named,
    estimate_hours,
    probed,
)
from mtp_train.train.plan import Plan
from mtp_train.trunk.load import Trunk
from runs import document, tiny_recipe, write_inputs, write_recipe
from tiny import tiny_head, tiny_trunk

# 1e9 weights that every token uses, 1e8 in the output matrix.
SIZES = Sizes(
    trunk=10**9, head=0, head_keys=0, lm_head=10**8, draft_lm_head=10**8, head_stored=0, state=1, head_trained=0
)
LAUNCHES = RoundLaunches(plain=1000, drafting=1300)
# With the assumed shares: 4e13 operations and 7e11 bytes a second.
DEVICE = Device("made up", "cuda", 0, 100.0, 1000.0, 1e-6)


def recipe(**overrides: Any) -> Recipe:
    settings: dict[str, Any] = {
        "data__regenerate": {"max_prompts": 1000, "max_new_tokens": 500, "batch_size": 10},
        "head__num_depths": 2,
        "evaluate": {"arms": ["none", "graft", "retrained"], "prompts": 100, "max_new_tokens": 200, "temperature": 0.0},
    }
    return tiny_recipe(Path("nowhere"), Path("nowhere/run"), **{**settings, **overrides})


def hours(device: Device = DEVICE, world_size: int = 1, **overrides: Any) -> Hours:
    plan = Plan(
        max_steps=100,
        seq_len_tokens=1000,
        sequences_per_step=8,
        micro_batch_sequences=1,
        world_size=world_size,
        accumulation=8 // world_size,
    )
    cost = Cost(regenerate_flops=0, trunk_flops=10**17, head_flops=2 * 10**17, loss_flops=10**17, disk_bytes=0)
    found = estimate_hours(
        recipe(**overrides),
        plan,
        cost,
        SIZES,
        trunk_parameters=10**9,
        num_layers=10,
        launches=LAUNCHES,
        device=device,
    )
    assert found is not None
    return found


def test_hours_are_those_worked_out_by_hand() -> None:
    found = hours()
    # A round reads 2.2 GB in 3.143 ms, which is more than 2.2e10 operations take, and launches 1000 kernels in 1 ms.
    assert found.rounds.plain_seconds == pytest.approx(4.142857e-3)
    # Two drafts read 0.2 GB each in 0.286 ms, and there are 1300 kernels.
    assert found.rounds.drafting_seconds == pytest.approx(3.142857e-3 + 2 * 0.285714e-3 + 1.3e-3)
    assert found.regenerate * 3600 == pytest.approx(100 * 500 * 4.142857e-3)
    # 4e17 operations at 4e13 a second, and 800 micro-batches of 3 ms of launches.
    assert found.train * 3600 == pytest.approx(10_000 + 2.4)
    assert found.step_seconds == pytest.approx(100 + 0.024)
    # One arm without drafts and two with drafts, none of which counts as accepted.
    assert found.evaluate * 3600 == pytest.approx(100 * 200 * (4.142857e-3 + 2 * 5.014285e-3), rel=1e-6)
    assert found.total == pytest.approx(found.regenerate + found.train + found.evaluate)


def test_processes_share_answers_training_and_evaluation() -> None:
    one, four = hours(), hours(world_size=4)
    assert four.regenerate == pytest.approx(one.regenerate / 4)
    assert four.train == pytest.approx(one.train / 4)
    assert four.evaluate == pytest.approx(one.evaluate / 4)
    # A process decodes whole prompts.
    assert hours(world_size=8, evaluate__prompts=9).evaluate == hours(world_size=8, evaluate__prompts=16).evaluate


def test_many_rows_take_the_time_of_their_operations() -> None:
    settings = {"data__regenerate": {"max_prompts": 1000, "max_new_tokens": 500, "batch_size": 1000}}
    # 2.2e12 operations in 55 ms, and 1 ms of launches.
    assert hours(**settings).regenerate * 3600 == pytest.approx(500 * 56e-3)


def test_a_servers_answers_cost_this_machine_nothing() -> None:
    server = {"endpoint": "http://localhost:1/v1", "max_prompts": 1000}
    assert hours(data__regenerate=server).regenerate == 0.0


def test_an_unjudged_run_evaluates_nothing() -> None:
    assert hours(gate={"enabled": False}).evaluate == 0.0


def test_a_cpu_is_probed_and_other_devices_are_not() -> None:
    here = device_named(None)
    assert here.bf16_tflops is None
    measured = probed(here)
    assert measured.bf16_tflops is not None
    assert measured.bf16_tflops > 0
    assert probed(DEVICES["h100"]) == DEVICES["h100"]
    with pytest.raises(DataError, match=r"^--device: 'h10'; expected one of h100, h200, a100, l40s, rtx4090, mi300x\."):
        device_named("h10")


def test_a_smaller_draft_vocabulary_and_experts_make_rounds_shorter() -> None:
    speeds = Speeds.of(DEVICE)
    assert speeds is not None
    sizes = replace(SIZES, head=10**8, head_stored=4 * 10**8)

    def seconds(rows: int = 1, **changed: int) -> float:
        model = RoundModel(replace(sizes, **changed), 4 * 10**9, RoundLaunches(0, 0), 2, speeds)
        return model.seconds(rows, drafts=True)

    # Three rows of a mixture read three times the weights that one token uses; eight rows more than there are.
    assert seconds() == pytest.approx((3.1e9 + 2 * 2e8) * 2 / 7e11)
    assert seconds(8) == pytest.approx((4.1e9 + 2 * 5e8) * 2 / 7e11)
    assert seconds() - seconds(draft_lm_head=10**7) == pytest.approx(2 * 9e7 * 2 / 7e11)


def empty_models(name: str) -> tuple[Trunk, MtpHead]:
    """Return a tiny trunk and a head without weights."""
    trunk = tiny_trunk(name)
    head = tiny_head(trunk)
    return Trunk(trunk.causal_lm.to("meta"), trunk.family), head.to("meta")


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
def test_launches_without_weights_are_those_of_a_round_with_weights(name: str) -> None:
    trunk = tiny_trunk(name)
    trunk.causal_lm.to(torch.bfloat16)
    head = tiny_head(trunk).to(torch.bfloat16)
    fused = FusedKernels([trunk.causal_lm, head])
    expected = RoundLaunches(
        launches_of_a_round(trunk, None, 0, fused).total(),
        launches_of_a_round(trunk, HeadDrafting(head), 3, fused).total(),
    )
    assert count_launches(*empty_models(name), 3, fuses=True) == (expected, None)
    unfused, _ = count_launches(*empty_models(name), 3, fuses=False)
    assert unfused.plain > expected.plain
    assert unfused.drafting > expected.drafting


def test_launches_that_cannot_be_counted_are_assumed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_unused: object) -> None:
        raise NotImplementedError("nonzero has no meta kernel. Long text.")

    monkeypatch.setattr("mtp_train.job.round_launches.launches_of_a_round", refuse)
    trunk, head = empty_models("qwen3_5")
    found, reason = count_launches(trunk, head, 3, fuses=True)
    assert found == RoundLaunches(len(trunk.layers) * KERNELS_PER_LAYER, (len(trunk.layers) + 3) * KERNELS_PER_LAYER)
    assert reason == "nonzero has no meta kernel"


def test_check_plans_for_another_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    inputs = write_inputs(tmp_path / "in")
    path = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", train__precision="auto")
    there = document(["check", path, "--device", "h200"], capfd)
    assert (there["hours"]["device"], there["recipe"]["train"]["precision"]) == ("h200", "bf16")
    assert there["precision_reason"] == "h200 multiplies bf16 natively"
    launches = there["hours"]["rounds"]["launches"]
    assert launches["drafting"] > launches["plain"] > 0
    assert there["launches_assumed"] is None
    here = document(["check", path], capfd)
    # On a CPU, torch's operations run one by one.
    assert here["hours"]["rounds"]["launches"]["plain"] > launches["plain"]
    assert here["hours"]["device"] == "cpu"
    assert here["hours"]["total"] > there["hours"]["total"] > 0
