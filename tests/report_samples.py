"""A report with every kind of arm, for the tests of its files."""

from __future__ import annotations

from dataclasses import asdict, replace

from mtp_train.acceptance.gate import GateSetting, GateVerdict
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import ArmResult, Cell, Lossless, Report, SampleText

PLAIN = ArmResult(
    trunk="models/finetune",
    head=None,
    tau=1.0,
    target_entropy=0.38,
    repeated_8gram_share=0.002,
    tokens_per_second=312.5,
    speedup=1.0,
    prompts=48,
    groups=12,
)
RETRAINED = replace(
    PLAIN,
    head="runs/one/head",
    tau=3.44,
    tau_ci95=(3.38, 3.5),
    acceptance_rate=0.8125,
    marginal=(0.88, 0.82, 0.74),
    conditional=(0.88, 0.93, None),
    dense=(0.87, 0.81, 0.73),
    overlap=(0.8, 0.79, 0.78),
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
    target_entropy=1.21,
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
WARM_GATE = replace(
    GREEDY,
    setting="temperature 0.6, top-p 0.95, argmax drafts",
    tau=3.1,
    baseline_tau=1.3,
    delta_tau_ci95=(1.71, 1.9),
    detectable_gain=0.16,
)
PASSED = GateVerdict(
    outcome="passed",
    baseline="graft",
    delta_tau_ci95=(2.04, 2.18),
    reason="tau 3.44 against 1.33: the gain lies above 0",
    settings=(GREEDY, WARM_GATE),
)


HEADLINE = Setting(0.0, None, 3, "greedy")
WARM = Setting(0.6, None, 3, "argmax", top_p=0.95)


def cell_of(name: str, arm: ArmResult, setting: Setting = HEADLINE) -> Cell:
    """Return an arm at a setting."""
    own = setting if arm.head else setting.plain
    counts = {"draft_tokens": 0, "accepted_tokens": 0, "new_tokens": 96}
    return Cell(**asdict(arm), **vars(own), **counts, arm=name, mean_prompt_tokens=32.0)


def run_cells(arms: dict[str, ArmResult]) -> tuple[Cell, ...]:
    """Return the cells of the arms that were measured, at the first setting."""
    return tuple(cell_of(name, arm) for name, arm in arms.items() if arm.measured_here)


ARMS = {"none": PLAIN, "graft": GRAFT, "retrained": RETRAINED, "vanilla": VANILLA, "ceiling": CEILING}
SAMPLE = Report(
    arms=ARMS,
    lossless=Lossless(checked=48, identical=48, near_tie_divergences=0),
    gate=PASSED,
    settings={
        "headline": vars(HEADLINE),
        "temperature": 0.0,
        "verify_rule": "greedy",
        "depth": 3,
        "device": {"name": "cpu", "threads": 2},
    },
    cells=(
        *run_cells(ARMS),
        cell_of("none", PLAIN, WARM),
        cell_of("graft", replace(GRAFT, tau=1.3), WARM),
        cell_of("retrained", replace(RETRAINED, tau=3.1), WARM),
    ),
    samples=(
        SampleText(
            prompt_id="p1", prompt="def add(a, b):", pieces=(("\n", False), ("    return a", True), (" + b\n", False))
        ),
    ),
)
METRICS = [
    {"step": 10, "loss": 2.5, "loss_depth_1": 2.0, "loss_depth_2": 3.0, "seconds_fetch": 0.5, "seconds_waiting": 1.0},
    {"step": 10, "held_out_tau": 1.5, "held_out_tau_sampled": 1.4},
    {"step": 20, "loss": 1.5, "loss_depth_1": 1.0, "loss_depth_2": None, "seconds_fetch": 0.5, "seconds_waiting": 0.0},
    {"step": 20, "held_out_tau": 1.8, "held_out_tau_sampled": 1.7},
    {"step": 30, "loss": 1.2, "loss_depth_1": 0.8, "loss_depth_2": 1.9},
]


def at_depths(report: Report, intervals: dict[int, tuple[float, float]]) -> Report:
    """Return the report with the retrained head's speedup at each depth: the middle of its interval."""
    arms = {
        depth: replace(
            RETRAINED, speedup=(low + high) / 2, speedup_ci95=(low, high), break_even_tau=1.0 + depth / 4, prompts=16
        )
        for depth, (low, high) in intervals.items()
    }
    own = {**report.arms, "retrained": arms[3]}
    shallow = tuple(
        cell_of("retrained", arm, replace(HEADLINE, depth=depth)) for depth, arm in arms.items() if depth < 3
    )
    return replace(report, arms=own, cells=(*run_cells(own), *shallow))


EMPTY = Report(arms={}, settings={})
