"""The report of a study with every kind of content, computed from a few made-up rates."""

from __future__ import annotations

from itertools import accumulate, combinations
from operator import mul

from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import (
    ALL_TASKS,
    ArmComparison,
    Cell,
    Finding,
    Lossless,
    Report,
)

PLAIN = "distilled"
RATES = {"vanilla+native": 0.72, "distilled+graft": 0.38, "distilled+retrained": 0.8}
"""Conditional acceptance of each arm that drafts."""
TRUNKS = {arm: f"models/{arm.split('+')[0]}" for arm in (PLAIN, *RATES)}
TASKS = {"coding": 0.06, "math": 0.0, "writing": -0.12}
TEMPERATURES = (0.0, 0.6, 1.0)
CONTEXTS = (None, 512, 2048)
DEPTHS = (1, 2, 3, 5)
HEADLINE = Setting(0.0, None, 3, "greedy")
PLAIN_SECONDS = 0.021


def make_cell(arm: str, task: str, setting: Setting) -> Cell:
    """Return a cell with consistent figures."""
    depth = setting.depth
    rate = RATES.get(arm, 0.0) + TASKS.get(task, 0.0) - 0.1 * setting.temperature
    rate += 0.05 * (setting.rule == "sampled") - 0.01 * CONTEXTS.index(setting.context_tokens)
    marginal = tuple(accumulate([rate] * depth, mul))
    tau = 1.0 + sum(marginal)
    needed = 1.0 + 0.12 * depth
    prompts = 48 if task == ALL_TASKS else 16
    rounds = round(prompts * 128 / tau)
    return Cell(
        arm=arm,
        task=task,
        **vars(setting),
        trunk=TRUNKS[arm],
        head=f"heads/{arm}" if depth else None,
        tau=tau,
        tau_ci95=(tau - 0.15, tau + 0.14) if depth else None,
        acceptance_rate=sum(marginal) / depth if depth else None,
        marginal=marginal or None,
        marginal_ci95=tuple((share - 0.05, share + 0.04) for share in marginal) or None,
        conditional=(rate,) * depth or None,
        dense=tuple(rate - 0.01 * k for k in range(depth)) or None,
        overlap=tuple(rate - 0.02 * k for k in range(depth)) or None,
        target_entropy=1.21 if arm.startswith("vanilla") else 0.38,
        repeated_8gram_share=0.002,
        draft_tokens=rounds * depth,
        accepted_tokens=round(rounds * sum(marginal)),
        new_tokens=prompts * 128,
        mean_prompt_tokens=float(setting.context_tokens or 96),
        seconds_prefill=0.08,
        round_seconds=PLAIN_SECONDS * needed,
        break_even_tau=needed if depth else None,
        tokens_per_second=tau / needed / PLAIN_SECONDS,
        speedup=tau / needed,
        speedup_ci95=(0.95 * tau / needed, 1.05 * tau / needed) if depth else None,
        rounds=rounds,
        prompts=prompts,
        groups=prompts // 2,
    )


def make_cells() -> tuple[Cell, ...]:
    """Return the whole grid, including plain decoding."""
    rules = [(t, rule) for t in TEMPERATURES for rule in (("sampled", "argmax") if t else ("greedy",))]
    drafting = [Setting(t, c, k, rule) for t, rule in rules for c in CONTEXTS for k in DEPTHS]
    plain = [Setting(t, c, 0, "none") for t in TEMPERATURES for c in CONTEXTS]
    tasks = (ALL_TASKS, *TASKS)
    cells = [make_cell(PLAIN, task, setting) for task in tasks for setting in plain]
    return (*cells, *(make_cell(arm, task, setting) for arm in RATES for task in tasks for setting in drafting))


def make_comparisons() -> list[ArmComparison]:
    """Return every pair of arms that draft, at each setting and task."""
    rows = []
    for setting in (HEADLINE, Setting(0.6, None, 3, "sampled")):
        for first, second in combinations(RATES, 2):
            for task in (ALL_TASKS, *TASKS):
                taus = [make_cell(arm, task, setting).tau or 0.0 for arm in (first, second)]
                delta = taus[0] - taus[1]
                graft = "distilled+graft" in (first, second)
                rows.append(
                    ArmComparison(
                        first=first,
                        second=second,
                        task=task,
                        **vars(setting),
                        delta_tau=delta,
                        delta_tau_ci95=(delta - 0.18, delta + 0.17),
                        groups=24 if task == ALL_TASKS else 8,
                        p_value=0.0002 if graft else 0.004,
                        differs=graft or task == ALL_TASKS,
                        same_trunk=TRUNKS[first] == TRUNKS[second],
                        delta_overlap_at_equal_entropy=0.21 if graft else -0.004,
                        delta_overlap_at_equal_entropy_ci95=(0.18, 0.24) if graft else (-0.02, 0.012),
                    )
                )
    return rows


STUDY = Report(
    title="vanilla against distilled",
    arms={
        PLAIN: make_cell(PLAIN, ALL_TASKS, HEADLINE.plain).result,
        **{arm: make_cell(arm, ALL_TASKS, HEADLINE).result for arm in RATES},
    },
    lossless=Lossless(checked=720, identical=718, near_tie_divergences=2),
    settings={"headline": vars(HEADLINE), "suite": "builtin", "seed": 0, "device": {"name": "cpu", "threads": 2}},
    cells=make_cells(),
    comparisons=tuple(make_comparisons()),
    findings=(
        Finding(
            tone="good",
            statement="Retraining on the distilled distribution brings acceptance back to the vanilla level",
            evidence="Tau 2.95 [2.80, 3.09] against 2.61 [2.46, 2.75]: at least as high.",
        ),
        Finding(tone="bad", statement="The graft keeps the vanilla level", evidence="Tau 1.58 against 2.61."),
        Finding(tone="neutral", statement="Longer contexts lower tau", evidence="-0.02 [-0.10, 0.06]."),
    ),
    endpoint={"url": "(given)", "engine": "vllm", "failures": [{"temperature": 0.0, "prompt": "p1"}], "depths": [1, 3]},
)
BARE = Report(title="one", arms={}, settings={})
