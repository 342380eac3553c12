"""Measure the arms of a run on its held-out prompts and judge the retrained head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtp_inference.drafters.drafter import Drafting
from mtp_inference.text import marked_pieces
from mtp_train.acceptance.gate import GateVerdict, decide_gate
from mtp_train.acceptance.names import GRAFT, NATIVE, PLAIN, RETRAINED, VANILLA
from mtp_train.checkpoints.adapter import merge_command
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.demo import PREFIX, RECORDED_FILE, home_source, recorded
from mtp_train.checkpoints.files import Checkpoint, JsonObject
from mtp_train.checkpoints.locations import EXPORT, HEAD, head_directory
from mtp_train.checkpoints.suggestions import (
    evaluate_command,
    graft_command,
    grafted_name,
    judge_command,
    serve_as_it_is,
)
from mtp_train.data.tokenize import Prompt
from mtp_train.evaluation.decoding import MAX_BATCH, SPEED_SETTINGS, Lane, TrunkArms, measure_trunk
from mtp_train.evaluation.grid import left_out
from mtp_train.evaluation.prompt_records import PromptRecord, Setting
from mtp_train.evaluation.results import UNJUDGED, ArmResult, Cell, Report, SampleText, read_record, recommended
from mtp_train.evaluation.statistics import MeasuredArm, Measurements, assemble, lossless
from mtp_train.heads.build import HeadPlan, drafting_of, graft_plan
from mtp_train.losses.catalogue import find_loss
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.inputs import Inputs, source_plan
from mtp_train.runs.run import HeldTrunk, Run
from mtp_train.runs.settings import run_settings
from mtp_train.runs.training import SELECTED
from mtp_train.runs.trunks import decoding_trunk
from mtp_train.train.machine import device_name, set_threads
from mtp_train.trunk.load import Trunk

NUM_SAMPLES, SAMPLE_PROMPT_CHARS = 3, 400
"""Texts that the report shows, and the most characters of each prompt."""
GRAFT_INSTEAD = "The head as it was is not shown to be worse:"
"""Text of a refusal before the graft command, or before the location of a head without a trunk."""


def evaluate_run(run: Run) -> Report:
    """Measure the arms and apply the gate.

    Every process must call it; the main process returns the report.
    """
    recipe = run.recipe
    inputs = run.inputs
    settings = run_settings(recipe, inputs.finetune)
    found = measure_arms(run, settings)
    report = assemble(found, settings[0], evaluation_settings(recipe, inputs, settings))
    # The recorded arms are heads of the trunk's own kind.
    others = {} if recipe.kind.has_file else recorded_arms(recipe.model.trunk)
    depths = report.by_depth(RETRAINED)
    no_gain = without_gain(run.directory.path)
    return replace(
        report,
        arms={**report.arms, **others},
        gate=judge(recipe, found.arms, settings, depths, no_gain),
        samples=sample_texts(found.arms, settings[0], inputs.text.held_out, inputs.tokenizer, recipe.gate_baseline),
    )


def unjudged(recipe: Recipe, inputs: Inputs) -> Report:
    """Return the report of a run whose recipe turns the gate off: it measures nothing."""
    settings = run_settings(recipe, inputs.finetune)
    return assemble(Measurements(), settings[0], {"gate": UNJUDGED, **training_settings(recipe)})


def served_commands(recipe: Recipe, run_dir: Path) -> str:
    """Return how to compare an unjudged head with its baseline on servers, in lines of commands."""
    trunk = recipe.model.trunk
    donor = recipe.model.head_from
    export = str(run_dir / EXPORT if recipe.export.enabled else run_dir)
    served = trunk if recipe.kind.has_file else export
    before = trunk
    lines = [
        "Serve each of the two with its drafts, one after the other, and measure it:",
        evaluate_command(served, f"{run_dir}-served"),
    ]
    if recipe.gate_baseline == GRAFT and donor is not None and not recipe.kind.has_file:
        lines.append(graft_command(trunk, donor))
        before = grafted_name(trunk)
    return "\n  ".join([*lines, evaluate_command(before, f"{run_dir}-baseline"), judge_command(run_dir)])


def measure_arms(run: Run, settings: Sequence[Setting]) -> Measurements:
    """Decode with every planned head, and with the vanilla model where the recipe names it.

    The arms on the run's trunk decode at every setting, the vanilla model at the first one only. The retrained head is
    also measured at every depth below the recipe's, greedily.
    """
    recipe, inputs, trunk = run.recipe, run.inputs, decoding_trunk(run)
    set_threads("decoding", 1, inputs.finetune, trunk.lm_head_VD.device, run.progress.console)
    # The gate's baseline is always among the heads.
    wanted = {*recipe.evaluate.arms, recipe.gate_baseline}
    plans: dict[str, HeadPlan] = {}
    if GRAFT in wanted and inputs.donor is not None:
        plans[GRAFT] = source_plan(recipe, inputs.finetune, inputs.donor)
    if NATIVE in wanted:
        plans[NATIVE] = graft_plan(inputs.finetune, inputs.finetune, recipe.head.convention)
    plans[RETRAINED] = load_artifact(run.directory.path / HEAD)
    heads = {arm: drafting_of(plan, inputs.finetune, trunk.lm_head_VD) for arm, plan in plans.items()}
    first = settings[0]
    depths = range(1, first.depth if first.rule == "greedy" else 0)
    shallow = [(RETRAINED, replace(first, depth=depth)) for depth in depths]
    arms = measure(run, trunk, heads, settings, shallow=shallow)
    facts = {
        "dtype": trunk.dtype_name,
        "offload": recipe.model.offload,
        "device": device_name(trunk.lm_head_VD.device),
        "processes": run.accelerator.num_processes,
    }
    if VANILLA in recipe.evaluate.arms and inputs.base is not None:
        # One trunk is in memory at a time.
        del trunk, heads
        run.held.release(run.accelerator)
        arms.append(measure_vanilla(run, inputs.base, first, facts["dtype"]))
    return Measurements(arms, facts=facts)


def measure(
    run: Run,
    trunk: Trunk,
    drafting: Mapping[str, Drafting],
    settings: Sequence[Setting],
    *,
    shallow: Sequence[Lane] = (),
) -> list[MeasuredArm]:
    """Measure drafters of a trunk on the held-out prompts, after plain decoding (:func:`measure_trunk`)."""
    recipe = run.recipe
    inputs = run.inputs
    name = recipe.model.trunk
    trained = str(run.directory.path / HEAD)
    names = dict.fromkeys(drafting, name) | {GRAFT: recipe.model.head_from or name, RETRAINED: trained}
    arms = TrunkArms(
        trunk=trunk,
        name=name,
        drafting=drafting,
        head_names=names,
        max_new_tokens=recipe.evaluate.max_new_tokens,
        eos_ids=inputs.eos_ids,
        seed=recipe.seed,
        seq_len_tokens=recipe.data.seq_len_tokens,
        dense_tokens=recipe.evaluate.dense_tokens,
    )
    return measure_trunk(arms, {None: inputs.text.held_out}, settings, run.progress, run.processes, shallow=shallow)


def measure_vanilla(run: Run, base: Checkpoint, setting: Setting, dtype: str) -> MeasuredArm:
    """Measure the base with its own head, as this run would with the base for its trunk.

    It decodes prompts of its own kind where there are any, else those of the run. Its speedup is relative to its own
    plain decoding.
    """
    inputs = run.inputs
    text = inputs.text._replace(held_out=inputs.home or inputs.text.held_out)
    vanilla = replace(
        run,
        recipe=run.recipe.replaced(
            {"model.trunk": run.recipe.model.head_from, "model.adapter": None, "model.dtype": dtype}
        ),
        inputs=replace(inputs, finetune=base, adapter=None, text=text),
        held=HeldTrunk(),
    )
    trunk = decoding_trunk(vanilla)
    heads = {VANILLA: drafting_of(graft_plan(base, base, run.recipe.head.convention), base, trunk.lm_head_VD)}
    return measure(vanilla, trunk, heads, [setting])[1]


def without_gain(run_dir: Path) -> str | None:
    """Return that training gave no gain, with the figures that it was selected by; None if it did, or nothing chose."""
    selected = load_artifact(run_dir / HEAD).notes.get(SELECTED)
    if selected is None or selected["step"]:
        return None
    return (
        f"training gave no gain: in {selected['since']} measurements on text kept out of training, no head had a "
        f"higher tau than the {selected['start']:.2f} before the first step (teacher-forced)"
    )


def judge(
    recipe: Recipe,
    arms: Sequence[MeasuredArm],
    settings: Sequence[Setting],
    depths: Mapping[int, Cell],
    no_gain: str | None = None,
) -> GateVerdict:
    """Apply the gate: refuse a decoder that changed an output, and a head that is not better than its baseline."""
    baseline = recipe.gate_baseline
    faults = lossless(arms).faults
    if faults:
        reason = f"Refused: {faults[0]}. Acceptance measured this way means nothing; please report it"
        return GateVerdict(outcome="refused", baseline=baseline, delta_tau_ci95=None, reason=reason)
    by_name = {arm.name: arm for arm in arms}
    head = by_name[RETRAINED]
    other = by_name[baseline]
    pairs = {one.name: head.against(other, one) for one in settings}
    verdict = decide_gate(pairs, baseline, recipe.gate.confidence, target_break_even=recipe.gate.break_even_tau)
    return advised(recipe, verdict, depths, no_gain)


def advised(recipe: Recipe, verdict: GateVerdict, depths: Mapping[int, Cell], no_gain: str | None) -> GateVerdict:
    """Return a verdict with what to do instead of serving the head, refused where training gave no gain."""
    baseline = recipe.gate_baseline
    if no_gain is not None and baseline == recipe.head.init:
        verdict = replace(verdict, outcome="refused", reason=f"Refused: {no_gain}")
    if verdict.passed:
        return verdict
    if baseline == PLAIN and verdict.settings:
        return replace(verdict, reason=f"{verdict.reason}. {_next_step(recipe, verdict, depths)}")
    trunk, donor, adapter = recipe.model.trunk, recipe.model.head_from, recipe.model.adapter
    if adapter is None and (baseline == NATIVE or (baseline == GRAFT and donor == trunk)):
        better = serve_as_it_is(trunk)
    elif baseline != GRAFT or donor is None:
        return verdict
    elif head_directory(donor) is not None or recipe.kind.has_file:
        # No command grafts a head without a trunk.
        better = donor
    else:
        better = graft_command(trunk, donor) if adapter is None else merge_command(donor, adapter)
    return replace(verdict, reason=f"{verdict.reason}. {GRAFT_INSTEAD} {better}")


def _next_step(recipe: Recipe, verdict: GateVerdict, depths: Mapping[int, Cell]) -> str:
    best = recommended(depths.values())
    if best is not None and best.depth != recipe.draft_depth and recipe.gate.break_even_tau is None:
        return f"Fewer drafts a round are shown to pay: set evaluate.depth to {best.depth}"
    if verdict.outcome == "undecided":
        return "Measure more: raise evaluate.prompts and data.holdout, or leave the machine to the evaluation alone"
    advice = "Train for longer, or serve without drafts"
    if recipe.gate.break_even_tau is None:
        advice += ". If another engine will serve the head, set gate.break_even_tau to that engine's"
    return advice


def sample_texts(
    arms: Sequence[MeasuredArm], setting: Setting, held_out: Sequence[Prompt], tokenizer: Any, baseline: str
) -> tuple[SampleText, ...]:
    """Return texts of the retrained head and of its baseline at a setting, accepted drafts apart."""
    decoded = {arm.name: arm.decoded[setting] for arm in arms if setting in arm.decoded}
    before = {one.prompt_id: one for one in decoded.get(baseline, ())}
    prompts = {prompt.id: prompt for prompt in held_out}

    def pieces(one: PromptRecord) -> tuple[tuple[str, bool], ...]:
        return marked_pieces(tokenizer, prompts[one.prompt_id].prompt_ids, one.token_ids, one.from_drafts)

    return tuple(
        SampleText(
            prompt_id=one.prompt_id,
            prompt=tokenizer.decode(list(prompts[one.prompt_id].prompt_ids))[-SAMPLE_PROMPT_CHARS:],
            pieces=pieces(one),
            before=pieces(before[one.prompt_id]) if one.prompt_id in before else (),
        )
        for one in decoded.get(RETRAINED, ())[:NUM_SAMPLES]
    )


def evaluation_settings(recipe: Recipe, inputs: Inputs, settings: Sequence[Setting]) -> JsonObject:
    """Return how everything was measured, sampling parameters as of the first setting, which the report's arms have."""
    first = settings[0]
    ignored = left_out(inputs.finetune)
    return {
        **training_settings(recipe),
        "temperature": first.temperature,
        "top_p": first.top_p,
        "top_k": first.top_k,
        "draft_sampling": "sampled" if first.rule == "sampled" else "argmax",
        "verify_rule": "greedy" if first.rule == "greedy" else "rejection",
        "judged": [setting.name for setting in settings],
        **({"not_measured": ignored} if ignored else {}),
        "batch_size": MAX_BATCH,
        **SPEED_SETTINGS,
        "speed_batch_size": 1,
        "max_new_tokens": recipe.evaluate.max_new_tokens,
        "prompts": len(inputs.text.held_out),
        "vanilla_prompts": home_source(recipe.model.head_from) if inputs.home else None,
        "groups": len({prompt.group for prompt in inputs.text.held_out}),
    }


def training_settings(recipe: Recipe) -> JsonObject:
    return {
        "trunk": recipe.model.trunk,
        "head_from": recipe.model.head_from,
        "depth": recipe.draft_depth,
        "train_precision": recipe.train.precision,
        "loss": find_loss(recipe.objective.loss).name,
        "train_steps": recipe.train.max_steps,
        "tokens_per_step": recipe.train.tokens_per_step,
        "seed": recipe.seed,
    }


def recorded_arms(trunk: str) -> dict[str, ArmResult]:
    """Return the demo's recorded arms (``report.wording.RECORDED``), on its held-out prompts; none on other trunks."""
    if trunk != f"{PREFIX}finetune":
        return {}
    arms = recorded()["arms"]
    return {name: read_record(ArmResult, arm, f"{RECORDED_FILE}: arms.{name}") for name, arm in arms.items()}
