"""What the head is worth on the trunk that was tuned, and which of two heads the export gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import Progress

from mtp_train.acceptance_gate import GateVerdict, decide_gate
from mtp_train.arms import ArmRun
from mtp_train.cures import retrain_native_command
from mtp_train.evaluation import RETRAINED, MeasuredArms, changed_output, measure_arms, pairs
from mtp_train.heads.attach import HeadPlan, artifact_plan, graft_plan
from mtp_train.heads.trunk import Trunk
from mtp_train.held_out import HELD_OUT, held_out_figures
from mtp_train.inputs import Inputs
from mtp_train.recipe import Recipe
from mtp_train.recipe_sft import SftSection
from mtp_train.report.schema import RunReport
from mtp_train.serving import ServedSetting
from mtp_train.weights.artifact import load_artifact
from mtp_train.weights.files import Checkpoint

GRAFT = "graft"


@dataclass(frozen=True)
class Tuned:
    """The fine-tuned trunk in the place of the trunk of a recipe: what decoding and counting go by."""

    recipe: Recipe
    inputs: Inputs


def after_tuning(recipe: Recipe, inputs: Inputs, tuned: Checkpoint, name: str) -> Tuned:
    """Return the recipe and the inputs of a run on the tuned trunk, whose grafted head is the one from before.

    Args:
        recipe: The recipe of the fine-tune.
        inputs: Its inputs.
        tuned: The fine-tuned checkpoint.
        name: What it will be called.
    """
    donor = recipe.model.head_from or recipe.model.trunk
    return Tuned(
        replace(
            recipe,
            model=replace(recipe.model, trunk=name, head_from=donor),
            head=replace(recipe.head, init="graft"),
        ),
        replace(inputs, finetune=tuned, base=inputs.base or inputs.finetune),
    )


def tuned_plans(run_dir: Path, sft: SftSection, tuned: Tuned) -> dict[str, HeadPlan]:
    """Return the heads to measure on the tuned trunk."""
    donor = tuned.inputs.base or tuned.inputs.finetune
    plans = {GRAFT: graft_plan(tuned.inputs.finetune, donor, tuned.recipe.head.convention)}
    if sft.head == "beside":
        plans[RETRAINED] = artifact_plan(load_artifact(run_dir / "head"))
    return plans


def measure_tuned(
    run_dir: Path, sft: SftSection, tuned: Tuned, trunk: Trunk, progress: Progress
) -> tuple[RunReport, MeasuredArms]:
    """Decode with every head and judge; the trunk may lose its layers at the end.

    Without a head beside there is nothing to judge, and the report has no gate.
    """
    plans = tuned_plans(run_dir, sft, tuned)
    measured = measure_arms(tuned.recipe, run_dir, tuned.inputs, trunk, plans, progress)
    gate = None
    if sft.head == "beside":
        gate = judge_beside(measured.served, measured.checked, tuned.recipe.gate.confidence)
    settings = {
        **measured.settings,
        HELD_OUT: held_out_figures(tuned.inputs, measured.plain.outputs, tuned.inputs.documents),
        "fine_tuned": "all weights" if sft.lora is None else f"LoRA, rank {sft.lora.r}",
        "head": sft.head,
        "next": retrain_native_command(tuned.recipe.model.trunk),
    }
    report = RunReport(
        arms=measured.results, lossless=measured.lossless, gate=gate, settings=settings, cells=measured.cells
    )
    return report, measured


def judge_beside(
    served: Mapping[ServedSetting, Mapping[str, ArmRun]], checked: Sequence[ArmRun], confidence: float
) -> GateVerdict:
    """Say whether the export gets the head that was trained beside the trunk; the reason says which it gets."""
    broken = [prompt for run in checked for prompt in run.divergences]
    if broken:
        return GateVerdict(passed=False, baseline=GRAFT, delta_tau_ci95=None, reason=changed_output(broken))
    verdict = decide_gate(pairs(served, GRAFT), GRAFT, confidence)
    told = "trained beside the trunk" if verdict.passed else "from before, which is not shown to be worse"
    return replace(verdict, reason=f"{verdict.reason}. The export has the head {told}")
