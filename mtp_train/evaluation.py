"""Measure the arms of a run on its held-out prompts and judge the retrained head."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from mtp_inference import HeadDrafting
from mtp_inference.draft import DrafterMaker
from mtp_train.acceptance import (
    Interval,
    acceptance_rate,
    conditional,
    marginal,
    num_groups,
    repeated_ngram_share,
    tau,
)
from mtp_train.acceptance_gate import GateVerdict, Pair, decide_gate
from mtp_train.acceptance_intervals import marginal_intervals, tau_interval
from mtp_train.arms import PLAIN, ArmRun, own_text, run_arms
from mtp_train.cures import graft_command
from mtp_train.data.pack import collate, full_batches, pack_documents
from mtp_train.data.tokenize import Document
from mtp_train.demo import home_source, recorded_arms
from mtp_train.heads.attach import HeadPlan, artifact_plan, build_head, graft_plan, native_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.offload import offload_layers
from mtp_train.heads.trunk import Trunk, load_trunk
from mtp_train.held_out import HELD_OUT, held_out_figures
from mtp_train.inputs import Inputs
from mtp_train.machine import settle_threads
from mtp_train.measuring import measured_together
from mtp_train.recipe import Recipe
from mtp_train.report.schema import ArmResult, Lossless, RunCell, RunReport
from mtp_train.serving import ServedSetting, left_out, served_settings
from mtp_train.train.dense import DenseMetrics, dense_metrics
from mtp_train.train.module import Batch
from mtp_train.weights.artifact import load_artifact
from mtp_train.weights.files import Checkpoint

RETRAINED, VANILLA = "retrained", "vanilla"
NO_DENSE = DenseMetrics([], [], None, [])
GRAFT_INSTEAD = "The base's own head is not shown to be worse:"
"""What a refusal says before the command that grafts it."""


@dataclass(frozen=True)
class Evaluation:
    """A report, and what its figures need besides."""

    report: RunReport
    gate: GateVerdict
    marginal_ci95: dict[str, list[Interval | None]]


@dataclass(frozen=True)
class MeasuredArms:
    """What the arms of a run did."""

    results: dict[str, ArmResult]
    served: dict[ServedSetting, dict[str, ArmRun]]
    """By setting, the first one foremost, the arms on the run's trunk."""
    vanilla: ArmRun | None
    """The vanilla model with its own head, at the first setting."""
    cells: tuple[RunCell, ...]
    """Figures of the arms on the run's trunk at every setting but the first."""
    settings: dict[str, Any]

    @property
    def plain(self) -> ArmRun:
        """The run's trunk without drafts, at the first setting."""
        return next(iter(self.served.values()))[PLAIN]

    @property
    def drafted(self) -> dict[str, ArmRun]:
        """Arms that drafted at the first setting, vanilla among them."""
        first = next(iter(self.served.values()))
        beside = {} if self.vanilla is None else {VANILLA: self.vanilla}
        return {arm: run for arm, run in first.items() if arm != PLAIN} | beside

    @property
    def checked(self) -> list[ArmRun]:
        """Everything that drafted, at every setting."""
        _, *further = self.served.values()
        return [*self.drafted.values(), *(run for runs in further for arm, run in runs.items() if arm != PLAIN)]

    @property
    def lossless(self) -> Lossless:
        """All comparisons with plain decoding."""
        return lossless(self.checked)

    @property
    def marginal_ci95(self) -> dict[str, list[Interval | None]]:
        """By arm, the interval of the marginal acceptance at each position."""
        return {arm: marginal_intervals(run.counts) for arm, run in self.drafted.items()}


def evaluate_run(
    recipe: Recipe, run_dir: Path, inputs: Inputs, trunk: Trunk, training: Sequence[Document], progress: Progress
) -> Evaluation:
    """Decode, count and judge. The trunk's weights are given up at the end to make room for the vanilla one."""
    measured = measure_arms(recipe, run_dir, inputs, trunk, head_plans(recipe, run_dir, inputs), progress)
    held_out = held_out_figures(inputs, measured.plain.outputs, training)
    # What was recorded is of heads of the trunk's own kind.
    recorded = recorded_arms(recipe.model.trunk) if recipe.head.kind == "mtp" else {}
    arms = {**measured.results, **recorded}
    gate = judge(recipe, measured.served, measured.checked)
    settings = {**measured.settings, HELD_OUT: held_out}
    report = RunReport(arms=arms, lossless=measured.lossless, gate=gate, settings=settings, cells=measured.cells)
    return Evaluation(report, gate, measured.marginal_ci95)


def measure_arms(
    recipe: Recipe, run_dir: Path, inputs: Inputs, trunk: Trunk, plans: Mapping[str, HeadPlan], progress: Progress
) -> MeasuredArms:
    """Decode and count with every head that is planned, and with the vanilla model where the recipe names it.

    The arms on the run's trunk decode at every setting of the recipe, the vanilla model at the first one only.
    """
    settle_threads("decoding", 1, inputs.finetune, trunk.lm_head_VD.device, progress.console)
    drafting = {arm: _drafting(plan, inputs.finetune, trunk) for arm, plan in plans.items()}
    names = {
        PLAIN: None,
        "graft": recipe.model.head_from,
        "native": recipe.model.trunk,
        RETRAINED: str(run_dir / "head"),
    }
    settings = served_settings(recipe.evaluate, inputs.finetune)
    first, *further = settings
    runs, dense = measure(recipe, inputs, trunk, drafting, first, progress)
    results = {
        arm: arm_result(run, recipe.model.trunk, names[arm], dense[arm], runs[PLAIN]) for arm, run in runs.items()
    }
    served = {first: runs}
    served |= {setting: decode(recipe, inputs, trunk, drafting, setting, progress) for setting in further}
    cells = tuple(
        run_cell(recipe, setting, arm, names[arm], served[setting]) for setting in further for arm in served[setting]
    )
    told = evaluation_settings(recipe, inputs, trunk, settings) | {
        "captured_rounds": sum(run.captured_rounds for by_arm in served.values() for run in by_arm.values()),
        "target_entropy_median": dense[PLAIN].median_entropy,
    }
    vanilla: ArmRun | None = None
    if VANILLA in recipe.evaluate.arms and inputs.base is not None:
        dtype, device = trunk.lm_head_VD.dtype, trunk.lm_head_VD.device
        trunk.drop_layers()
        trunk.to("meta")
        results[VANILLA], vanilla = measure_vanilla(
            recipe, run_dir, inputs, inputs.base, first, dtype, device, progress
        )
    return MeasuredArms(results, served, vanilla, cells, told)


def head_plans(recipe: Recipe, run_dir: Path, inputs: Inputs) -> dict[str, HeadPlan]:
    """Return the heads to measure on the fine-tune's trunk; the gate's baseline is always among them."""
    wanted = {*recipe.evaluate.arms, recipe.gate_baseline, RETRAINED}
    plans: dict[str, HeadPlan] = {}
    if "graft" in wanted and inputs.base is not None:
        plans["graft"] = graft_plan(inputs.finetune, inputs.base, recipe.head.convention)
    if "native" in wanted:
        plans["native"] = native_plan(inputs.finetune, recipe.head.convention)
    plans[RETRAINED] = artifact_plan(load_artifact(run_dir / "head"))
    return plans


def _drafting(plan: HeadPlan, checkpoint: Checkpoint, trunk: Trunk) -> HeadDrafting:
    weight = trunk.lm_head_VD
    head = build_head(plan, text_config_of(checkpoint), dtype=weight.dtype).to(weight.device).eval()
    return HeadDrafting(head, plan.draft_vocab)


def decode(
    recipe: Recipe,
    inputs: Inputs,
    trunk: Trunk,
    drafting: Mapping[str, DrafterMaker],
    setting: ServedSetting,
    progress: Progress,
) -> dict[str, ArmRun]:
    """Run every arm on one trunk at one setting."""
    task = progress.add_task(f"decoding held-out prompts ({setting.name})", total=len(inputs.held_out))
    return run_arms(
        trunk,
        drafting,
        inputs.held_out,
        depth=draft_depth(recipe),
        setting=setting,
        max_new_tokens=recipe.evaluate.max_new_tokens,
        eos_ids=inputs.eos_ids,
        seed=recipe.seed,
        on_prompt=lambda: progress.advance(task),
    )


def measure(
    recipe: Recipe,
    inputs: Inputs,
    trunk: Trunk,
    drafting: Mapping[str, HeadDrafting],
    setting: ServedSetting,
    progress: Progress,
) -> tuple[dict[str, ArmRun], dict[str, DenseMetrics]]:
    """Run every arm on one trunk, then the teacher-forced metrics on the trunk's own outputs."""
    runs = decode(recipe, inputs, trunk, drafting, setting, progress)
    batches = dense_batches(recipe, inputs, runs[PLAIN].outputs, trunk)
    dense: dict[str, DenseMetrics] = {}
    for arm, maker in progress.track(drafting.items(), description="teacher-forced metrics"):
        dense[arm] = dense_metrics(trunk, maker.head, batches, draft_depth(recipe), recipe.train.attention)
        # The trunk's entropy is the same with any head, and the plain arm has none to measure it with.
        dense[PLAIN] = DenseMetrics([], [], dense[arm].target_entropy, [], dense[arm].median_entropy)
    return runs, dense


def draft_depth(recipe: Recipe) -> int:
    """Return how deep the arms draft."""
    return recipe.head.num_depths if recipe.evaluate.depth is None else recipe.evaluate.depth


def dense_batches(recipe: Recipe, inputs: Inputs, outputs: Sequence[tuple[int, ...]], trunk: Trunk) -> list[Batch]:
    """Pack the trunk's own outputs, up to the recipe's budget of tokens, in batches of :func:`measured_together`."""
    device = trunk.lm_head_VD.device
    seq_len = recipe.data.seq_len_tokens
    documents = own_text(inputs.held_out, outputs, seq_len)
    packed = pack_documents(documents, seq_len, pack=True, seed=recipe.seed, epoch=0)
    kept = packed[: max(1, recipe.evaluate.dense_tokens // seq_len)]
    return [
        Batch(*(column.to(device) for column in collate(together).values()))
        for together in full_batches(kept, measured_together(recipe))
    ]


def run_cell(
    recipe: Recipe, setting: ServedSetting, arm: str, head_name: str | None, runs: Mapping[str, ArmRun]
) -> RunCell:
    """Return what an arm did at a setting; teacher-forced figures are taken at the first setting only."""
    found = arm_result(runs[arm], recipe.model.trunk, head_name, NO_DENSE, runs[PLAIN])
    return RunCell(
        **asdict(replace(found, dense=None, overlap=None)),
        arm=arm,
        temperature=setting.temperature,
        top_p=setting.top_p,
        top_k=setting.top_k,
        depth=0 if head_name is None else draft_depth(recipe),
        rule=setting.rule,
    )


def arm_result(run: ArmRun, trunk_name: str, head_name: str | None, dense: DenseMetrics, plain: ArmRun) -> ArmResult:
    """Bring an arm's counts into the report's form."""
    drafted = head_name is not None
    base_speed = plain.tokens_per_second
    return ArmResult(
        trunk=trunk_name,
        head=head_name,
        tau=tau(run.counts),
        tau_ci95=tau_interval(run.counts) if drafted else None,
        acceptance_rate=acceptance_rate(run.counts),
        marginal=tuple(marginal(run.counts)) if drafted else None,
        conditional=tuple(conditional(run.counts)) if drafted else None,
        dense=_measured(dense.agreement) if drafted else None,
        overlap=_measured(dense.overlap) if drafted else None,
        target_entropy=dense.target_entropy,
        repeated_8gram_share=repeated_ngram_share(run.outputs),
        tokens_per_second=run.tokens_per_second,
        speedup=run.tokens_per_second / base_speed if base_speed else None,
        rounds=sum(count.rounds for count in run.counts),
        prompts=len(run.counts),
        groups=num_groups(run.counts),
        measured_here=True,
    )


def _measured(values: Sequence[float | None]) -> tuple[float, ...]:
    """Drop depths without a target (outputs shorter than the depth)."""
    return tuple(value for value in values if value is not None)


def measure_vanilla(
    recipe: Recipe,
    run_dir: Path,
    inputs: Inputs,
    base: Checkpoint,
    setting: ServedSetting,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> tuple[ArmResult, ArmRun]:
    """Measure the base with its own head, on text of its own kind where that comes with it, else on the same prompts.

    Its speedup is over its own trunk without drafts.
    """
    trunk = load_trunk(
        base.path,
        base.family,
        dtype=dtype,
        device=device if recipe.model.offload is None else "cpu",
        quantization=recipe.model.quantization,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    if recipe.model.offload is not None:
        offload_layers(trunk, recipe.model.offload, device, run_dir)
    native = _drafting(native_plan(base, recipe.head.convention), base, trunk)
    own = replace(inputs, held_out=inputs.home or inputs.held_out)
    runs, dense = measure(recipe, own, trunk, {VANILLA: native}, setting, progress)
    name = recipe.model.head_from or str(base.path)
    return arm_result(runs[VANILLA], name, name, dense[VANILLA], runs[PLAIN]), runs[VANILLA]


def lossless(runs: Sequence[ArmRun]) -> Lossless:
    """Sum the comparisons with plain decoding."""
    return Lossless(
        checked=sum(run.checked for run in runs),
        identical=sum(run.identical for run in runs),
        near_tie_divergences=sum(run.near_ties for run in runs),
    )


def judge(
    recipe: Recipe, served: Mapping[ServedSetting, Mapping[str, ArmRun]], checked: Sequence[ArmRun]
) -> GateVerdict:
    """Apply the gate: a decoder that changed an output, or a head that is not better, may not be exported.

    Args:
        recipe: Names the baseline and the confidence.
        served: The arms on the run's trunk, by setting.
        checked: Everything that drafted.
    """
    baseline = recipe.gate_baseline
    broken = [prompt for run in checked for prompt in run.divergences]
    if broken:
        return GateVerdict(passed=False, baseline=baseline, delta_tau_ci95=None, reason=changed_output(broken))
    verdict = decide_gate(pairs(served, baseline), baseline, recipe.gate.confidence)
    if verdict.passed or baseline != "graft" or recipe.model.head_from is None:
        return verdict
    better = graft_command(recipe.model.trunk, recipe.model.head_from)
    return replace(verdict, reason=f"{verdict.reason}. {GRAFT_INSTEAD} {better}")


def pairs(served: Mapping[ServedSetting, Mapping[str, ArmRun]], baseline: str) -> dict[str, Pair]:
    """Return what the gate compares at each setting."""
    return {setting.name: (runs[RETRAINED].counts, runs[baseline].counts) for setting, runs in served.items()}


def changed_output(prompts: Sequence[str]) -> str:
    """Return the reason for which nothing may be exported: decoding is not lossless."""
    return (
        f"Refused: decoding with drafts changed the output of {len(prompts)} prompts ({prompts[0]} first), and no near "
        "tie explains it. Acceptance measured this way means nothing; please report it"
    )


def evaluation_settings(
    recipe: Recipe, inputs: Inputs, trunk: Trunk, settings: Sequence[ServedSetting]
) -> dict[str, Any]:
    """Say how everything was measured; figures of other settings do not compare.

    Sampling settings at the top are those of the first setting, which the arms are shown at.
    """
    first, ignored = settings[0], left_out(inputs.finetune)
    weight = trunk.lm_head_VD
    on_cuda = weight.device.type == "cuda"
    return {
        "trunk": recipe.model.trunk,
        "head_from": recipe.model.head_from,
        "temperature": first.temperature,
        "top_p": first.top_p,
        "top_k": first.top_k,
        "draft_sampling": "sampled" if first.rule == "sampled" else "argmax",
        "verify_rule": "greedy" if first.rule == "greedy" else "rejection",
        "judged": [setting.name for setting in settings],
        **({"not_measured": ignored} if ignored else {}),
        "depth": draft_depth(recipe),
        "batch_size": 1,
        "max_new_tokens": recipe.evaluate.max_new_tokens,
        "prompts": len(inputs.held_out),
        "vanilla_prompts": home_source(recipe.model.head_from) if inputs.home else None,
        "groups": len({prompt.group for prompt in inputs.held_out}),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "train_precision": recipe.train.precision,
        "offload": recipe.model.offload,
        "device": torch.cuda.get_device_name(weight.device) if on_cuda else str(weight.device),
        "threads": torch.get_num_threads(),
        "loss": recipe.objective.loss,
        "train_steps": recipe.train.max_steps,
        "tokens_per_step": recipe.train.tokens_per_step,
        "seed": recipe.seed,
        "torch": torch.__version__,
        "platform": platform.platform(),
    }
