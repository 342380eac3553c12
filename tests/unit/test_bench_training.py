"""The training benchmark measures the steps that a run takes, and counts memory as it would be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import training
from benchmarks.training import Bench, HeldStates, Loop, all_logits_kl, loss_memory, main, make_bench
from flex_on_cpu import flex_on_cpu
from mtp_inference.bench.memory import PeakMemory
from mtp_inference.bench.subject import shape_subject
from mtp_train.heads.flex import Attention
from mtp_train.losses.chunked import frozen_head_loss
from mtp_train.train.aligned import aligned_rows
from mtp_train.trunk.load import Trunk

NOTHING_MEASURED: dict[str, Any] = {
    "seconds": {},
    "step_over_floor": {"median": 1.0, "least": 1.0, "most": 1.0},
    "kept_step_over_floor": {"median": 1.0, "least": 1.0, "most": 1.0},
    "tokens_per_second": {},
    "loss_bytes": {"chunked": 0, "all_logits": 0},
    "loss_seconds": {"products": 1.0, "rows": 1.0},
    "rows_over_products": 1.0,
    "rows_over_floor": 1.0,
    "loop_seconds": {},
}


def bench(
    attention: Attention = "dense", *, held: torch.dtype = torch.float32, compute: torch.dtype = torch.float32
) -> Bench:
    subject = shape_subject("tiny-qwen", dtype=held, device=torch.device("cpu"), seed=0)
    return make_bench(subject, 1024, 128, 2, compute_dtype=compute, attention=attention)


@pytest.mark.parametrize(("held", "compute"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_a_step_moves_the_head_and_the_one_with_states_at_hand_does_the_same(
    held: torch.dtype, compute: torch.dtype
) -> None:
    steps = []
    for name in ("step", "kept_step"):
        one = bench(held=held, compute=compute)
        before = {key: value.clone() for key, value in one.module.head.state_dict().items()}
        getattr(one, name)()
        steps.append({key: value - before[key] for key, value in one.module.head.state_dict().items()})
    assert max(float(change.abs().max()) for change in steps[0].values()) > 0
    for key, change in steps[0].items():
        torch.testing.assert_close(steps[1][key], change, atol=3e-7, rtol=0)


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_a_step_in_bf16_multiplies_in_bf16_whatever_the_trunk_is_held_in(held: torch.dtype) -> None:
    one = bench(held=held, compute=torch.bfloat16)
    made: dict[str, set[torch.dtype]] = {"trunk": set(), "head": set()}
    for name, part in (("trunk", one.module.trunk.decoder), ("head", one.module.head)):
        for module in part.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda _module, _given, output, name=name: made[name].add(output.dtype))
    one.step()
    assert made == {"trunk": {torch.bfloat16}, "head": {torch.bfloat16}}
    assert one.output_VD.dtype == torch.bfloat16


def test_the_head_is_unrolled_as_it_is_trained() -> None:
    expected = bench().head().student_KND
    with flex_on_cpu() as counter:
        found = bench("flex").head().student_KND
        assert counter.frame_count == 1
    torch.testing.assert_close(found, expected)


def test_states_at_hand_spare_the_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench()
    monkeypatch.setattr(Trunk, "hidden", None)
    one.kept_step()
    with pytest.raises(TypeError):
        one.step()


@pytest.mark.parametrize("kept", [False, True], ids=["with the trunk", "states kept"])
def test_both_loops_take_the_same_steps(kept: bool) -> None:
    heads = []
    for name in ("ahead", "in_turn"):
        # Not Adam, which makes whole steps of differences in rounding.
        one = bench()
        one = one._replace(optimizer=torch.optim.SGD(one.module.head.parameters(), lr=1.0))
        states = HeldStates(torch.randn(one.hidden_BTD.shape, generator=torch.Generator().manual_seed(1)))
        getattr(Loop(one, states if kept else None), name)()
        heads.append(one.module.head.state_dict())
    start = bench().module.head.state_dict()
    moved = max(float((value - start[key]).abs().max()) for key, value in heads[0].items())
    apart = max(float((value - heads[1][key]).abs().max()) for key, value in heads[0].items())
    assert apart < 1e-3 * moved


def test_memory_that_is_only_counted_is_what_computing_takes() -> None:
    one = bench()
    counted = loss_memory(one)
    rows = aligned_rows(one.module.trunk, one.module.head, one.batch, 2, hidden_BTD=one.hidden_BTD)
    student_KND, weight_KN = rows.student_KND.detach().requires_grad_(True), rows.valid_KN.float()
    matrix_VD = one.module.trunk.lm_head_VD
    given = [student_KND, rows.teacher_ND, matrix_VD, weight_KN]
    with PeakMemory(given) as computed:
        whole = all_logits_kl(student_KND, rows.teacher_ND, matrix_VD, weight_KN)
        whole.backward()
    assert counted["all_logits"] == computed.peak_bytes - student_KND.nbytes
    assert counted["chunked"] < counted["all_logits"] / 3
    ours = frozen_head_loss(student_KND, rows.teacher_ND, matrix_VD, rows.targets_N, weight_KN, kind="kl").total
    torch.testing.assert_close(ours, whole)


def test_the_last_line_is_everything(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--shape", "tiny-qwen", "--tokens", "256", "--seq-len", "64", "--repeats", "1", "--precision", "fp32"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    results = found["results"]
    assert results["over_trunk"]["trunk alone"] == 1.0
    flops = results["flops"]
    assert results["flops_over_trunk"] == pytest.approx(sum(flops.values()) / flops["trunk"])
    ratio = results["step_over_floor"]
    assert ratio["median"] == pytest.approx(results["seconds"]["step"] / results["seconds"]["products"])
    # By hand: 96 x 512 weights, 256 tokens, p once and q twice at 3 depths.
    assert flops["loss"] == 2 * 96 * 512 * 256 * 7
    assert found["settings"]["seq_len"] == "64"
    of_loss = results["loss_seconds"]
    # At 3 depths, nine tensors of logits are read or written at the least; a copy does two.
    assert results["rows_over_floor"] == pytest.approx(of_loss["rows"] / (4.5 * of_loss["copy"]))
    assert results["rows_over_products"] == pytest.approx(of_loss["rows"] / of_loss["products"])
    assert results["loss_rows"] == 256
    assert list(results["loop_seconds"]) == ["ahead", "in turn", "ahead, states kept", "in turn, states kept"]
    assert min(results["loop_seconds"].values()) > 0


@pytest.mark.parametrize(
    ("asked", "precision", "held"),
    [
        ([], "fp32", "torch.float32"),
        (["--precision", "bf16"], "bf16", "torch.float32"),
        (["--precision", "bf16", "--trunk-dtype", "bfloat16"], "bf16", "torch.bfloat16"),
        (["--precision", "fp32", "--trunk-dtype", "bfloat16"], "fp32", "torch.bfloat16"),
    ],
)
def test_precision_and_the_rows_of_a_chunk_are_recorded_and_passed_on(
    asked: list[str],
    precision: str,
    held: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Bench] = []

    def measured(one: Bench, _repeats: int) -> dict[str, Any]:
        made.append(one)
        return NOTHING_MEASURED

    monkeypatch.setattr(training, "measure", measured)
    main(["--shape", "tiny-qwen", "--tokens", "64", "--seq-len", "64", "--chunk-rows", "16", *asked])
    settings = json.loads(capsys.readouterr().out.splitlines()[-1])["settings"]
    assert (settings["precision"], settings["dtype"], settings["chunk_rows"]) == (precision, held, "16")
    assert made[0].module.compute_dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    assert made[0].module.loss_rows == made[0].loss_rows == 16


@pytest.mark.parametrize("tokens", ["100", "32"])
def test_rows_must_be_full(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tokens", tokens, "--seq-len", "64"])
    assert "multiple of --seq-len" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_page_has_the_figures_of_the_recorded_steps(precision: str) -> None:
    folder = Path(__file__).parents[2] / "inference" / "benchmarks" / "cpu"
    document = json.loads((folder / f"training-{precision}.json").read_text(encoding="utf-8"))
    assert document["settings"]["precision"] == precision
    ratios = [document["results"][key] for key in ("step_over_floor", "kept_step_over_floor")]
    cells = [f"{one['median']:.2f} | {one['least']:.2f} to {one['most']:.2f}" for one in ratios]
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert f"| {precision} | {' | '.join(cells)} |\n" in page
