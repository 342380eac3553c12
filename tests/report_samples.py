"""A report with every kind of arm, for the tests of its files."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from mtp_train.acceptance.gate import GateSetting
from mtp_train.evaluation.results import RunCell, SampleText, TeacherForced
from mtp_train.report import ArmResult, GateResult, Lossless, RunReport

PLAIN = ArmResult(
    trunk="models/finetune",
    head=None,
    tau=1.0,
    tau_ci95=None,
    acceptance_rate=None,
    marginal=None,
    conditional=None,
    teacher_forced=TeacherForced(dense=None, overlap=None, target_entropy=0.38),
    repeated_8gram_share=0.002,
    tokens_per_second=312.5,
    speedup=1.0,
    rounds=None,
    prompts=48,
    groups=12,
    measured_here=True,
)
RETRAINED = replace(
    PLAIN,
    head="runs/one/head",
    tau=3.44,
    tau_ci95=(3.38, 3.5),
    acceptance_rate=0.8125,
    marginal=(0.88, 0.82, 0.74),
    conditional=(0.88, 0.93, None),
    teacher_forced=TeacherForced(dense=(0.87, 0.81, 0.73), overlap=(0.8, 0.79, 0.78), target_entropy=0.38),
    tokens_per_second=1691.25,
    speedup=2.21,
    rounds=1412,
)
GRAFT = replace(RETRAINED, head="models/base", tau=1.33, tau_ci95=(1.29, 1.37), marginal=(0.24, 0.07), speedup=0.97)
VANILLA = replace(
    RETRAINED,
    trunk="models/base",
    head="models/base",
    tau=2.41,
    teacher_forced=replace(RETRAINED.teacher_forced, target_entropy=1.21),
    speedup=1.58,
)
CEILING = replace(RETRAINED, tau=3.58, measured_here=False, tokens_per_second=None, speedup=None)
GREEDY = GateSetting(
    setting="greedy",
    tau=3.44,
    baseline_tau=1.33,
    delta_tau_ci95=(2.04, 2.18),
    verdict="above",
    detectable_gain=0.11,
    prompts=48,
    groups=12,
)
SERVED = replace(
    GREEDY,
    setting="temperature 0.6, top-p 0.95, argmax drafts",
    tau=3.1,
    baseline_tau=1.3,
    delta_tau_ci95=(1.71, 1.9),
    detectable_gain=0.16,
)
PASSED = GateResult(
    passed=True,
    baseline="graft",
    delta_tau_ci95=(2.04, 2.18),
    reason="tau 3.44 against 1.33: the gain lies above 0",
    groups=12,
    detectable_gain=0.11,
    settings=(GREEDY, SERVED),
)


def served_cell(name: str, arm: ArmResult, tau: float) -> RunCell:
    """Return an arm at the second setting."""
    none = replace(arm.teacher_forced, dense=None, overlap=None)
    found = replace(arm, tau=tau, teacher_forced=none)
    shared: dict[str, Any] = {one.name: getattr(found, one.name) for one in fields(ArmResult)}
    return RunCell(**shared, arm=name, temperature=0.6, top_p=0.95, depth=3 if arm.head else 0, rule="argmax")


SAMPLE = RunReport(
    arms={"none": PLAIN, "graft": GRAFT, "retrained": RETRAINED, "vanilla": VANILLA, "ceiling": CEILING},
    lossless=Lossless(checked=48, identical=48, near_tie_divergences=0),
    gate=PASSED,
    settings={"temperature": 0.0, "verify_rule": "greedy", "depth": 3, "device": {"name": "cpu", "threads": 2}},
    cells=(served_cell("none", PLAIN, 1.0), served_cell("graft", GRAFT, 1.3), served_cell("retrained", RETRAINED, 3.1)),
    samples=(
        SampleText(
            prompt_id="p1", prompt="def add(a, b):", pieces=(("\n", False), ("    return a", True), (" + b\n", False))
        ),
    ),
)
METRICS = [
    {"step": 10, "loss": 2.5, "loss_depth_1": 2.0, "loss_depth_2": 3.0},
    {"step": 10, "held_out_tau": 1.5, "held_out_tau_sampled": 1.4},
    {"step": 20, "loss": 1.5, "loss_depth_1": 1.0, "loss_depth_2": None},
    {"step": 20, "held_out_tau": 1.8, "held_out_tau_sampled": 1.7},
    {"step": 30, "loss": 1.2, "loss_depth_1": 0.8, "loss_depth_2": 1.9},
]


def at_depths(report: RunReport, intervals: dict[int, tuple[float, float]]) -> RunReport:
    """Return the report with the retrained head's speedup at each depth: the middle of its interval."""
    arms = {
        depth: replace(
            RETRAINED, speedup=(low + high) / 2, speedup_ci95=(low, high), break_even_tau=1.0 + depth / 4, prompts=16
        )
        for depth, (low, high) in intervals.items()
    }
    cells = []
    for depth, arm in arms.items():
        shared: dict[str, Any] = {one.name: getattr(arm, one.name) for one in fields(ArmResult)}
        cells.append(RunCell(**shared, arm="retrained", temperature=0.0, depth=depth, rule="greedy"))
    own = {**report.arms, "retrained": arms[3]}
    return replace(report, arms=own, depths=tuple(cell for cell in cells if cell.depth < 3))


EMPTY = RunReport(arms={}, lossless=None, gate=None, settings={})
