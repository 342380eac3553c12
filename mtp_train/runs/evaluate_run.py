"""Measure the arms of a run on its held-out prompts and judge the retrained head."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from mtp_inference import HeadDrafting
from mtp_inference.drafters.drafter import Drafting
from mtp_inference.text import marked_pieces
from mtp_train.acceptance.counts import Interval
from mtp_train.acceptance.gate import GateVerdict, Pair, decide_gate
from mtp_train.acceptance.intervals import marginal_intervals
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.demo import PREFIX, RECORDED_FILE, home_source, recorded
from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.locations import head_directory
from mtp_train.checkpoints.run_export import EXPORT
from mtp_train.checkpoints.suggestions import evaluate_command, graft_command, grafted_name
from mtp_train.data.pack import collate, pack_documents
from mtp_train.data.tokenize import Document
from mtp_train.evaluation.decoding import PLAIN, DecodingOptions, Prompts, decode_prompts, joined, num_decodings
from mtp_train.evaluation.dense import own_text
from mtp_train.evaluation.prompt_records import HELD_OUT_TASK, Decoded, Setting, TaskPrompt
from mtp_train.evaluation.results import (
    UNJUDGED,
    ArmResult,
    RunCell,
    RunReport,
    SampleText,
    TeacherForced,
    recommended,
)
from mtp_train.evaluation.settings import draft_depth, left_out, served_settings
from mtp_train.evaluation.statistics import MeasuredArm, arm_result, checked_records, lossless, run_cell
from mtp_train.heads.build import HeadPlan, build_head, native_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.held_out import HELD_OUT, held_out_figures
from mtp_train.runs.inputs import Inputs
from mtp_train.train.aligned import PackedBatch
from mtp_train.train.launch import RunAccelerator
from mtp_train.train.machine import set_threads
from mtp_train.train.teacher_forced import DenseMetrics, dense_metrics
from mtp_train.trunk.load import Trunk, load_trunk
from mtp_train.trunk.offload import offload_layers
from mtp_train.trunk.progress import shown_loading

RETRAINED, VANILLA = "retrained", "vanilla"
NUM_SAMPLES, SAMPLE_PROMPT_CHARS = 3, 400
"""Texts that the report shows, and the most characters of each prompt."""
DEPTH_PROMPTS = 16
"""Most prompts that are decoded at each depth below the recipe's: round times vary little between prompts."""
GRAFT_INSTEAD = "The base's own head is not shown to be worse:"
"""Text of a refusal before the graft command."""


@dataclass(frozen=True)
class Evaluation:
    """A report, its gate, and the intervals that its figures show besides."""

    report: RunReport
    gate: GateVerdict | None
    """None where `gate.enabled` is false."""
    marginal_ci95: dict[str, list[Interval | None]]


@dataclass(frozen=True)
class MeasuredRun:
    """The records of a run's arms; every figure of the report is computed from them."""

    arms: tuple[MeasuredArm, ...]
    """Plain decoding, then the heads on the run's trunk, then the vanilla model, which has the first setting only."""
    settings: tuple[Setting, ...]
    """The report's table of arms shows the first, its cells the others."""
    dense: Mapping[str, DenseMetrics]
    """Teacher-forced metrics by arm, at the first setting."""
    facts: dict[str, Any]
    """How everything was measured: the report's settings."""
    by_depth: Sequence[tuple[MeasuredArm, Setting]] = field(default=())
    """The retrained head at fewer drafts a round, on :data:`DEPTH_PROMPTS` prompts."""

    @property
    def results(self) -> dict[str, ArmResult]:
        """Return the report's arms."""
        first = self.settings[0]
        return {arm.name: run_result(arm, first, self.dense.get(arm.name)) for arm in self.arms}

    @property
    def cells(self) -> tuple[RunCell, ...]:
        """Return the figures of the arms on the run's trunk at every setting but the first."""
        return tuple(
            run_cell(arm, setting)
            for setting in self.settings[1:]
            for arm in self.arms
            if arm.own(setting) in arm.decoded
        )

    @property
    def depths(self) -> tuple[RunCell, ...]:
        """Return the figures of the retrained head at fewer drafts a round."""
        return tuple(run_cell(arm, setting) for arm, setting in self.by_depth)

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        """Return the plain texts of the run's trunk at the first setting."""
        return outputs(self.arms[0], self.settings[0])

    @property
    def checked(self) -> list[Decoded]:
        """Return every record that was compared with plain decoding."""
        shallow = [record for arm, setting in self.by_depth for record in checked_records([arm], [setting])]
        return [*checked_records(self.arms, self.settings), *shallow]

    @property
    def marginal_ci95(self) -> dict[str, list[Interval | None]]:
        """Return by drafting arm the interval of the marginal acceptance at each position, at the first setting."""
        first = self.settings[0]
        return {arm.name: marginal_intervals(arm.counts(first)) for arm in self.arms if arm.head is not None}

    def pairs(self, baseline: str) -> dict[str, Pair]:
        """Return the counts that the gate compares, by the name of the setting."""
        by_name = {arm.name: arm for arm in self.arms}
        mine, theirs = by_name[RETRAINED], by_name[baseline]
        return {setting.name: (mine.counts(setting), theirs.counts(setting)) for setting in self.settings}


def evaluate_run(
    recipe: Recipe,
    run_dir: Path,
    inputs: Inputs,
    trunk: Trunk,
    training: Sequence[Document],
    accelerator: RunAccelerator,
    progress: Progress,
) -> Evaluation:
    """Measure the arms and apply the gate. The trunk's weights may be freed to make room for the vanilla model's.

    Every process must call it, and returns the same.
    """
    plans = head_plans(recipe, run_dir, inputs)
    measured = measure_arms(recipe, run_dir, inputs, trunk, plans, accelerator, progress)
    held_out = held_out_figures(inputs, measured.outputs, training)
    # The recorded arms are heads of the trunk's own kind.
    recorded = recorded_arms(recipe.model.trunk) if recipe.head.kind == "mtp" else {}
    gate = judge(recipe, measured)
    report = RunReport(
        arms={**measured.results, **recorded},
        lossless=lossless(measured.checked),
        gate=gate,
        settings={**measured.facts, HELD_OUT: held_out},
        cells=measured.cells,
        depths=measured.depths,
        samples=sample_texts(measured, inputs),
    )
    return Evaluation(report, gate, measured.marginal_ci95)


def unjudged(recipe: Recipe, inputs: Inputs) -> Evaluation:
    """Return the report of a run whose recipe turns the gate off: it measures nothing."""
    found = evaluation_settings(recipe, inputs, served_settings(recipe.evaluate, inputs.finetune, draft_depth(recipe)))
    of_training = {name: found[name] for name in _OF_TRAINING}
    report = RunReport(arms={}, lossless=None, gate=None, settings={"gate": UNJUDGED, **of_training})
    return Evaluation(report, None, {})


def served_commands(recipe: Recipe, run_dir: Path) -> str:
    """Return how to compare an unjudged head with its baseline on servers, in lines of commands."""
    trunk, donor, baseline = recipe.model.trunk, recipe.model.head_from, recipe.gate_baseline
    export = str(run_dir / EXPORT if recipe.export.enabled else run_dir)
    served, before = export if recipe.head.kind == "mtp" else trunk, trunk
    lines = ["Serve each of the two with its drafts, and measure it:", evaluate_command(served, f"{run_dir}-served")]
    if baseline == "graft" and donor is not None and recipe.head.kind == "mtp":
        lines.append(graft_command(trunk, donor))
        before = grafted_name(trunk)
    return "\n  ".join([*lines, evaluate_command(before, f"{run_dir}-baseline")])


def measure_arms(
    recipe: Recipe,
    run_dir: Path,
    inputs: Inputs,
    trunk: Trunk,
    plans: Mapping[str, HeadPlan],
    accelerator: RunAccelerator,
    progress: Progress,
) -> MeasuredRun:
    """Decode with every planned head, and with the vanilla model where the recipe names it.

    The arms on the run's trunk decode at every setting of the recipe, the vanilla model at the first one only. The
    processes share the prompts, and each has all records in the end.
    """
    set_threads("decoding", 1, inputs.finetune, trunk.lm_head_VD.device, progress.console)
    heads = {arm: _drafting(plan, inputs.finetune, trunk) for arm, plan in plans.items()}
    names = {
        "graft": recipe.model.head_from or recipe.model.trunk,
        "native": recipe.model.trunk,
        RETRAINED: str(run_dir / "head"),
    }
    settings = served_settings(recipe.evaluate, inputs.finetune, draft_depth(recipe))
    arms, captured_rounds = decode(recipe, inputs, trunk, heads, names, settings, accelerator, progress)
    by_depth = measure_depths(recipe, inputs, trunk, heads, names, settings[0], accelerator, progress)
    dense = measure_dense(recipe, inputs, trunk, heads, outputs(arms[0], settings[0]), progress)
    facts = evaluation_settings(recipe, inputs, settings) | trunk_facts(recipe, trunk)
    facts |= {
        "processes": accelerator.num_processes,
        "captured_rounds": captured_rounds,
        "target_entropy_median": dense[PLAIN].median_entropy,
    }
    if VANILLA in recipe.evaluate.arms and inputs.base is not None:
        dtype = trunk.lm_head_VD.dtype
        trunk.drop_layers()
        trunk.to("meta")
        vanilla, dense[VANILLA] = measure_vanilla(
            recipe, run_dir, inputs, inputs.base, settings[0], dtype, accelerator, progress
        )
        arms.append(vanilla)
    return MeasuredRun(tuple(arms), tuple(settings), dense, facts, by_depth)


def head_plans(recipe: Recipe, run_dir: Path, inputs: Inputs) -> dict[str, HeadPlan]:
    """Return the heads to measure on the fine-tune's trunk; the gate's baseline is always among them."""
    wanted = {*recipe.evaluate.arms, recipe.gate_baseline, RETRAINED}
    plans: dict[str, HeadPlan] = {}
    if "graft" in wanted and (graft := inputs.graft(recipe)) is not None:
        plans["graft"] = graft
    if "native" in wanted:
        plans["native"] = native_plan(inputs.finetune, recipe.head.convention)
    plans[RETRAINED] = load_artifact(run_dir / "head")
    return plans


def _drafting(plan: HeadPlan, checkpoint: Checkpoint, trunk: Trunk) -> HeadDrafting:
    weight = trunk.lm_head_VD
    head = build_head(plan, text_config_of(checkpoint), dtype=weight.dtype).to(weight.device).eval()
    return HeadDrafting(head, plan.draft_vocab)


def decode(
    recipe: Recipe,
    inputs: Inputs,
    trunk: Trunk,
    drafting: Mapping[str, Drafting],
    names: Mapping[str, str],
    settings: Sequence[Setting],
    accelerator: RunAccelerator,
    progress: Progress,
    trunk_name: str | None = None,
) -> tuple[list[MeasuredArm], int]:
    """Decode the held-out prompts plainly and with every drafter; the processes take every n-th prompt each.

    Args:
        recipe: Limits and seed.
        inputs: The prompts.
        trunk: The trunk.
        drafting: The drafters, by arm.
        names: The drafters as the report names them, by arm.
        settings: The settings with drafts.
        accelerator: The processes; every one must call this.
        progress: Shows how many of this process's prompts are decoded.
        trunk_name: The trunk as the report names it; None for the recipe's.

    Returns:
        The arms, plain decoding first, and the number of captured rounds. Every process returns the same.
    """
    order = [prompt.id for prompt in inputs.held_out]
    own = inputs.held_out[accelerator.process_index :: accelerator.num_processes]
    prompts = held_out_prompts(replace(inputs, held_out=own))
    total = num_decodings(len(drafting), prompts, settings)
    task = progress.add_task(f"decoding held-out prompts ({', '.join(one.name for one in settings)})", total=total)
    options = DecodingOptions(max_new_tokens=recipe.evaluate.max_new_tokens, eos_ids=inputs.eos_ids, seed=recipe.seed)
    found = decode_prompts(trunk, drafting, prompts, settings, options, on_prompt=lambda: progress.advance(task))
    table = joined(accelerator.gather_items([found]), order)
    name, plain = trunk_name or recipe.model.trunk, table.decoded[PLAIN]
    drafted = [MeasuredArm(arm, name, names[arm], {**plain, **table.decoded[arm]}) for arm in drafting]
    return [MeasuredArm(PLAIN, name, None, plain), *drafted], table.captured_rounds


def measure_depths(
    recipe: Recipe,
    inputs: Inputs,
    trunk: Trunk,
    heads: Mapping[str, HeadDrafting],
    names: Mapping[str, str],
    setting: Setting,
    accelerator: RunAccelerator,
    progress: Progress,
) -> list[tuple[MeasuredArm, Setting]]:
    """Decode some prompts with the retrained head at every depth below the setting's, for break-even tau by depth."""
    shallower = [replace(setting, depth=depth) for depth in range(1, setting.depth)]
    if RETRAINED not in heads or not shallower:
        return []
    few = replace(inputs, held_out=inputs.held_out[:DEPTH_PROMPTS])
    drafting = {RETRAINED: heads[RETRAINED]}
    (_, arm), _ = decode(recipe, few, trunk, drafting, names, shallower, accelerator, progress)
    return [(arm, one) for one in shallower]


def held_out_prompts(inputs: Inputs) -> Prompts:
    """Return the held-out prompts in the engine's form, as they are."""
    return {None: [TaskPrompt.of(one, HELD_OUT_TASK) for one in inputs.held_out]}


def outputs(arm: MeasuredArm, setting: Setting) -> list[tuple[int, ...]]:
    """Return an arm's texts at a setting, in the order of the prompts."""
    return [one.token_ids for one in arm.decoded[arm.own(setting)]]


def measure_dense(
    recipe: Recipe,
    inputs: Inputs,
    trunk: Trunk,
    heads: Mapping[str, HeadDrafting],
    plain: Sequence[tuple[int, ...]],
    progress: Progress,
) -> dict[str, DenseMetrics]:
    """Return the teacher-forced metrics of every head, and of plain decoding, on the trunk's own plain texts."""
    batches = dense_batches(recipe, inputs, plain, trunk)
    dense: dict[str, DenseMetrics] = {}
    for arm, head in progress.track(heads.items(), description="teacher-forced metrics"):
        dense[arm] = dense_metrics(trunk, head.head, batches, draft_depth(recipe))
        # The trunk's entropy is the same with any head, and plain decoding has no head to measure it with.
        dense[PLAIN] = DenseMetrics([], [], dense[arm].target_entropy, [], dense[arm].median_entropy)
    return dense


def dense_batches(
    recipe: Recipe, inputs: Inputs, outputs: Sequence[tuple[int, ...]], trunk: Trunk
) -> list[PackedBatch]:
    """Pack the trunk's own outputs, up to the recipe's budget of tokens, a sequence in each batch."""
    device = trunk.lm_head_VD.device
    seq_len = recipe.data.seq_len_tokens
    documents = own_text(inputs.held_out, outputs, seq_len)
    packed = pack_documents(documents, seq_len, pack=True, seed=recipe.seed, epoch=0)
    kept = packed[: max(1, recipe.evaluate.dense_tokens // seq_len)]
    return [PackedBatch(*(column.to(device) for column in collate([one]).values())) for one in kept]


def run_result(arm: MeasuredArm, setting: Setting, dense: DenseMetrics | None) -> ArmResult:
    """Return what the report's table of arms shows of an arm, with its teacher-forced metrics if it has any."""
    result = arm_result(arm, arm.own(setting))
    if dense is None:
        return result
    drafts = arm.head is not None
    found = TeacherForced(
        dense=_measured(dense.agreement) if drafts else None,
        overlap=_measured(dense.overlap) if drafts else None,
        target_entropy=dense.target_entropy,
    )
    return replace(result, teacher_forced=found)


def _measured(values: Sequence[float | None]) -> tuple[float, ...]:
    """Drop depths without a target (outputs shorter than the depth)."""
    return tuple(value for value in values if value is not None)


def measure_vanilla(
    recipe: Recipe,
    run_dir: Path,
    inputs: Inputs,
    base: Checkpoint,
    setting: Setting,
    dtype: torch.dtype,
    accelerator: RunAccelerator,
    progress: Progress,
) -> tuple[MeasuredArm, DenseMetrics]:
    """Measure the base with its own head: on prompts of the base's own domain where it has any, else on the run's.

    Its speedup is relative to its own trunk without drafts.
    """
    name = recipe.model.head_from or str(base.path)
    with shown_loading(progress, name, base.num_bytes):
        trunk = load_trunk(
            base.path,
            base.family,
            dtype=dtype,
            device=accelerator.device if recipe.model.offload is None else "cpu",
            quantization=recipe.model.quantization,
            trust_remote_code=recipe.model.trust_remote_code,
        )
    if recipe.model.offload is not None:
        offload_layers(trunk, recipe.model.offload, accelerator.device, run_dir)
    heads = {VANILLA: _drafting(native_plan(base, recipe.head.convention), base, trunk)}
    own = replace(inputs, held_out=inputs.home or inputs.held_out)
    (plain, vanilla), _ = decode(
        recipe, own, trunk, heads, {VANILLA: name}, [setting], accelerator, progress, trunk_name=name
    )
    return vanilla, measure_dense(recipe, own, trunk, heads, outputs(plain, setting), progress)[VANILLA]


def judge(recipe: Recipe, measured: MeasuredRun) -> GateVerdict:
    """Apply the gate: refuse a decoder that changed an output, and a head that is not better than its baseline."""
    baseline = recipe.gate_baseline
    refused = changed_output(measured, baseline)
    if refused is not None:
        return refused
    verdict = decide_gate(
        measured.pairs(baseline), baseline, recipe.gate.confidence, target_break_even=recipe.gate.break_even_tau
    )
    if not verdict.passed and baseline == PLAIN and verdict.settings:
        return replace(verdict, reason=f"{verdict.reason}. {_faster_depth(measured.depths)}")
    donor = recipe.model.head_from
    # No command grafts the head of a run that exported none.
    if verdict.passed or baseline != "graft" or donor is None or head_directory(donor) is not None:
        return verdict
    better = graft_command(recipe.model.trunk, donor)
    return replace(verdict, reason=f"{verdict.reason}. {GRAFT_INSTEAD} {better}")


def _faster_depth(depths: Sequence[RunCell]) -> str:
    """Return what to do about drafts that do not pay."""
    best = recommended(depths)
    if best is not None:
        return f"Fewer drafts a round are shown to pay: set evaluate.depth to {best.depth}"
    return (
        "Serve without drafts, or train for longer. If another engine will serve the head, set gate.break_even_tau to "
        "that engine's"
    )


def sample_texts(measured: MeasuredRun, inputs: Inputs) -> tuple[SampleText, ...]:
    """Return texts of the retrained head at the first setting, accepted drafts apart; none without such a head."""
    first = measured.settings[0]
    arm = next((arm for arm in measured.arms if arm.name == RETRAINED), None)
    prompts = {prompt.id: prompt for prompt in inputs.held_out}
    chosen = arm.decoded[first][:NUM_SAMPLES] if arm is not None else ()
    return tuple(
        SampleText(
            prompt_id=one.prompt_id,
            prompt=inputs.tokenizer.decode(list(prompts[one.prompt_id].prompt_ids))[-SAMPLE_PROMPT_CHARS:],
            pieces=draft_pieces(one, prompts[one.prompt_id].prompt_ids, inputs.tokenizer),
        )
        for one in chosen
    )


def draft_pieces(decoded: Decoded, prompt_ids: Sequence[int], tokenizer: Any) -> tuple[tuple[str, bool], ...]:
    """Return a text in pieces, see :func:`mtp_inference.text.marked_pieces`."""
    return marked_pieces(tokenizer, prompt_ids, decoded.token_ids, decoded.from_drafts)


def changed_output(measured: MeasuredRun, baseline: str) -> GateVerdict | None:
    """Return the refusal of a decoder that changed an output; None where decoding was lossless."""
    broken = [one.prompt_id for one in measured.checked if one.same_as_plain == "divergence"]
    if not broken:
        return None
    reason = (
        f"Refused: decoding with drafts changed the output of {len(broken)} prompts ({broken[0]} first), and no near "
        "tie explains it. Acceptance measured this way means nothing; please report it"
    )
    return GateVerdict(passed=False, baseline=baseline, delta_tau_ci95=None, reason=reason)


def evaluation_settings(recipe: Recipe, inputs: Inputs, settings: Sequence[Setting]) -> dict[str, Any]:
    """Return how everything was measured; figures measured with other settings are not comparable.

    The sampling parameters are the first setting's, which the report's arms are measured at.
    """
    first, ignored = settings[0], left_out(inputs.finetune)
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
        "train_precision": recipe.train.precision,
        "loss": recipe.objective.loss,
        "train_steps": recipe.train.max_steps,
        "tokens_per_step": recipe.train.tokens_per_step,
        "seed": recipe.seed,
        "torch": torch.__version__,
        "platform": platform.platform(),
    }


_OF_TRAINING = (
    *("trunk", "head_from", "depth", "train_precision", "loss", "train_steps", "tokens_per_step", "seed", "torch"),
    "platform",
)


def trunk_facts(recipe: Recipe, trunk: Trunk) -> dict[str, Any]:
    """Return how the trunk was held while the built-in decoder measured it."""
    weight = trunk.lm_head_VD
    on_cuda = weight.device.type == "cuda"
    return {
        "dtype": str(weight.dtype).removeprefix("torch."),
        "offload": recipe.model.offload,
        "device": torch.cuda.get_device_name(weight.device) if on_cuda else str(weight.device),
        "threads": torch.get_num_threads(),
    }


def recorded_arms(trunk: str) -> dict[str, ArmResult]:
    """Return the recorded arms on the fine-tune, ``measured_here`` false; none for any other trunk.

    - ``control``: a head trained for as many steps on the base's old code instead of the fine-tune's answers.
    - ``ceiling``: a head trained for ten times the steps.
    - ``random``: a head that starts from random weights.
    - ``ngram``: no head, but a static table of n-grams and their next tokens in the fine-tune's answers.

    All were measured on the recipe's own held-out prompts.

    Args:
        trunk: The trunk as the recipe names it.
    """
    if trunk != f"{PREFIX}finetune":
        return {}
    arms = recorded()["arms"]
    return {name: ArmResult.from_json(arm, f"{RECORDED_FILE}: arms.{name}") for name, arm in arms.items()}
