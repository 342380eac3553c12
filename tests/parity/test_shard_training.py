"""A head that processes with shards of the trunk train together has the losses of one process with the whole trunk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sharded_families
from json_files import read_json
from launching import FSDP2, ZERO3, Setup, cases, start
from mtp_train.train.launch import make_accelerator
from repository import REPOSITORY
from sharded_families import CASES, HALF, HALF_EXPERTS, RESUMED, SEQ_LEN, SEQUENCES, STEPS, train
from tolerances import FAR, rounding_of_mean

pytestmark = pytest.mark.slow


def loss_bound(case: str, loss: float) -> float:
    """Return how far rounding moves a case's loss: sums of another order, and in bf16 the rounding of every row's."""
    return rounding_of_mean(loss, SEQUENCES * SEQ_LEN, torch.bfloat16) if "bfloat16" in case else 1e-4


@pytest.mark.parametrize("case", [HALF, "qwen3_5"])
def test_a_process_that_trains_alone_has_another_loss(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test below: training on half the sequences differs by more than rounding."""
    accelerator = make_accelerator()
    joined = train(case, accelerator).losses
    halves = {step: sharded_families.sequences(step)[: SEQUENCES // 2] for step in range(STEPS)}
    monkeypatch.setattr(sharded_families, "sequences", lambda step: [*halves[step], *halves[step]])
    alone = train(case, accelerator).losses
    assert abs(alone[0] - joined[0]) > FAR * loss_bound(case, joined[0])


@cases(FSDP2, ZERO3)
def test_every_family_trains_in_shards_as_it_does_whole(setup: Setup, tmp_path: Path) -> None:
    done = start(
        setup.machine,
        REPOSITORY / "tests" / "sharded_families.py",
        tmp_path / "written.json",
        flags=("--num_processes", "2"),
        **setup.variables,
    )
    assert done.returncode == 0, done.stderr
    written = read_json(tmp_path / "written.json")
    for case, (first, second) in written["kept"].items():
        for own in (first, second):
            assert own["off"] < (0.02 if case == HALF else 1e-5), case
            assert own["held"] <= 0.6 * own["whole"], case
            assert own["left"] == 0, case
    found = written["trained"]
    accelerator = make_accelerator()
    expected = {case: train(case, accelerator) for case in CASES}
    assert {case: one["losses"] for case, one in found.items()} == {
        case: pytest.approx(one.losses, abs=loss_bound(case, max(one.losses))) for case, one in expected.items()
    }
    for case, one in expected.items():
        assert one.held == one.whole == found[case]["whole"], case
        # Some matrices do not divide evenly.
        assert found[case]["held"] < 0.6 * (one.whole - one.ends) + one.ends, case
        assert found[case]["left"] == 0, case
    for case in RESUMED:
        _, last, again = found[case]["losses"]
        assert again == last, case
    if setup is FSDP2:
        # The ends are in no shards, so that nothing gathers them.
        assert all(one["held_ends"] == one["ends"] for one in found.values())
        # In each of two micro-batches a process once, for all depths: in both steps, and in the one that was repeated.
        assert found[HALF_EXPERTS]["gathered"] == (STEPS + 1) * 2
        assert found[HALF_EXPERTS]["summed"] == ["torch.float32"]
