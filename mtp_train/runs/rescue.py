"""``mtp-train rescue``: put a head on a fine-tune that lost it or has a stale one, retrained if that helps.

A rescue is one recipe with defaults for everything: the fine-tune answers prompts, the base's head is retrained on the
answers, both heads are measured on held-out prompts, and the better one is exported. If retraining does not measurably
help, the base's head is exported as it is, as by ``mtp-train graft``. A probe goes before it: where it finds the base's
head good enough nothing is trained, and where it finds a fault nothing is written.

``mtp-train probe`` makes three measurements, on text that the fine-tune writes itself:

1. The base's head on the fine-tune, and the same head on the base, on the same held-out prompts. The two models write
   different text, so the level is compared by overlap of p and q at depth 1 at equal target entropy
   (``statistics.overlap_difference``). What is missing there is what fine-tuning cost the head.
2. A short training on a few dozen answers, and the paired gain in tau on the held-out prompts.
3. Whether the base's head drafts for the base at all, and whether it drafts better in a known wrong form or under
   another convention (``better_wiring``). If so, the head or the tokenizer is at fault, and training on the
   fine-tune hides it at best.
"""

from __future__ import annotations

import gc
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress

from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_inference.opening import OWN, open_model
from mtp_train.acceptance.counts import Interval
from mtp_train.acceptance.names import GRAFT, RETRAINED
from mtp_train.answers.store import answer_document
from mtp_train.checkpoints.adapter import merge_command
from mtp_train.checkpoints.artifact import Artifact
from mtp_train.checkpoints.files import is_gguf, left_out
from mtp_train.checkpoints.gguf.model_file import SPLIT, split_path
from mtp_train.checkpoints.locations import EXPORT, RECIPE_FILE, is_run, open_location
from mtp_train.checkpoints.suggestions import (
    graft_command,
    inspect_command,
    output_of,
    retrain_command,
    serve_as_it_is,
)
from mtp_train.checkpoints.tokenizer import eos_token_ids, load_tokenizer
from mtp_train.checkpoints.writing import removed_on_failure
from mtp_train.data.tokenize import build_prompts, choose_evenly
from mtp_train.errors import CheckpointError, MtpError
from mtp_train.evaluation.arms import ArmSpec, local_device
from mtp_train.evaluation.dense import better_wiring
from mtp_train.evaluation.results import REPORT_FILE, ArmResult, load_report
from mtp_train.evaluation.run import Study, study_report
from mtp_train.families import of_kind
from mtp_train.progress import progress_on, shown_loading
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.sections import StudySection
from mtp_train.report.wording import bounds, format_estimate, format_number
from mtp_train.report.write import write_report
from mtp_train.runs.checkpoint_tools.gguf_files import graft_gguf
from mtp_train.runs.checkpoint_tools.write import WriteResult
from mtp_train.runs.display import Rows, Shown, wiring_note
from mtp_train.runs.evaluate_run import GRAFT_INSTEAD
from mtp_train.runs.export import serves_of, write_export, write_untrained_card
from mtp_train.runs.forecast import Forecast, Stage, stages_of
from mtp_train.runs.inputs import (
    LoneHead,
    adapter_of,
    evaluation_prompts,
    is_lone,
    open_head_source,
    open_trunk,
    recipe_tokenizer,
    source_plan,
    split_records,
    trunk_of,
)
from mtp_train.runs.pipeline import page_of, run_recipe
from mtp_train.runs.refusals import require_trainable
from mtp_train.runs.resolve import Choice, Overrides, override_texts, resolved_recipe
from mtp_train.runs.run import processes_of
from mtp_train.runs.run_directory import PROBE, RunDirectory, checkpoint_identity
from mtp_train.runs.study import comparison_of, grid_of
from mtp_train.runs.write_recipe import settings_of
from mtp_train.train.launch import RunAccelerator, lost_process_is_named, make_accelerator
from mtp_train.train.log import read_metrics

Verdict = Literal["graft", "retrain", "fault", "undecided"]

OWN_BASE = "base"
TRAINING, COMPARISON = "training", "comparison"
WIRING_PROMPTS, WIRING_TOKENS = 16, 32
MARGIN = 0.03
"""A head that lost at most this share of its level is good enough: retraining it would not be noticed."""
LEAST_TAU = 1.3
"""A head that drafts worse than this for its own base is at fault. Heads that are released accept well over half of
their first drafts."""
SHORT = {
    "data.regenerate.max_prompts": 48,
    "data.regenerate.max_new_tokens": 96,
    "evaluate.prompts": 32,
    "evaluate.max_new_tokens": 64,
    "evaluate.temperature": 0.0,
    "export.enabled": False,
    "gate.enabled": True,
}
"""Settings of the short training and of all measurements; the others are those of a rescue."""


@dataclass(frozen=True)
class HeadLevel:
    """How well the base's head drafts for a model, greedily."""

    tau: float
    tau_ci95: Interval | None
    overlap: float | None
    """Overlap of p and q at depth 1."""


@dataclass(frozen=True)
class ProbeResult(Shown):
    """Result of :func:`probe`: a verdict and its figures."""

    verdict: Verdict
    """``graft``: the base's head is good enough as it is. ``retrain``: a rescue will help. ``fault``: the head, or the
    tokenizer, does not fit even the base. ``undecided``: more prompts are needed."""
    reason: str
    """The figures that decided, in a sentence."""
    command: str
    """What to run next."""
    graft: HeadLevel
    """The base's head on the fine-tune."""
    base: HeadLevel | None = None
    """The base's head on the base; None for a draft model, whose own trunk is not known."""
    lost_overlap: float | None = None
    """What the head lost at depth 1 at equal target entropy; None if the texts share too few entropies."""
    lost_overlap_ci95: Interval | None = None
    trained_tau: float | None = None
    """Tau after the short training; a rescue trains for longer. None if nothing was trained."""
    gain_ci95: Interval | None = None
    """Paired interval of the gain in tau over the graft."""
    trained_steps: int | None = None
    wiring: str | None = None
    """The form or convention in which the base's head drafts better for the base, with its figures; None if ours is
    the best."""

    def _title(self) -> str:
        return f"{self.verdict}: {self.reason}"

    def _rows(self) -> Rows:
        trained = (
            f"{format_number(self.trained_tau, 2)} after {self.trained_steps} steps, gain {_interval(self.gain_ci95)}"
        )
        return [
            ("base's head on the fine-tune", _level_text(self.graft)),
            ("base's head on the base", None if self.base is None else _level_text(self.base)),
            ("overlap lost at equal entropy", None if self.graft.overlap is None else _lost_text(self)),
            ("base's head, wired otherwise", self.wiring),
            ("briefly retrained", None if self.trained_tau is None else trained),
            ("next", self.command),
        ]


def probe(
    fine_tune: str | Path,
    base: str | Path,
    out: str | Path | None = None,
    *,
    data: Sequence[str | Path] = (),
    overrides: Overrides = (),
    console: Console | None = None,
) -> ProbeResult:
    """Find out whether retraining a fine-tune's head will help, from a few dozen answers and a short training.

    The same call goes on with a probe that was interrupted. Processes that ``accelerate launch`` starts share the work.

    Args:
        fine_tune: A checkpoint, or a peft adapter of ``base``: a directory, a hub id or ``demo:NAME``.
        base: The checkpoint that it came from, with its head.
        out: The directory of the measurements; None for the one where the proposed rescue finds them.
        data: Files of prompts or chats like those that the model will serve; empty for 100 built-in prompts.
        overrides: Changes to the recipe of the short training, as for :func:`run`. Its length stays the probe's.
        console: Where progress bars and tables are printed; None prints nothing.

    Raises:
        MtpError: The two checkpoints do not fit, the data cannot be read, or ``out`` holds something else.

    Example:
        >>> import mtp_train as mtp
        >>> found = mtp.probe("my-27b", "Qwen/Qwen3.6-27B", data=["chats.jsonl"])
        >>> found.verdict, found.graft.tau, found.base.tau
        ('retrain', 2.04, 3.31)
    """
    tuned = str(fine_tune)
    place = Path(output_of(tuned, "-rescued")) / PROBE if out is None else Path(out)
    paths = list(map(str, data))
    return _probed(tuned, str(base), place, paths, overrides, console or Console(quiet=True), make_accelerator())[0]


@lost_process_is_named()
def _probed(
    tuned: str,
    donor: str,
    place: Path,
    paths: list[str],
    overrides: Overrides,
    console: Console,
    accelerator: RunAccelerator,
    later: Sequence[Stage] = (),
) -> tuple[ProbeResult, Forecast]:
    """Make a probe, and return its result and the forecast with the stages after it."""
    settings = settings_of("graft", tuned, donor, str(place / TRAINING), paths)
    changes = override_texts(overrides)
    answers = load_recipe(settings, changes).data.regenerate is not None
    short = {field: value for field, value in SHORT.items() if answers or not field.startswith("data.regenerate.")}
    recipe, choices = resolved_recipe(settings, [*changes, *override_texts(short)])
    own = stages_of(recipe, open_trunk(recipe), local_device().type)
    forecast = Forecast([Stage("comparing", "comparing"), *own, *later], console)
    forecast.begin("comparing")
    found = _compare(recipe, donor, place / COMPARISON, console, accelerator)
    console.print(f"base's head on the fine-tune: {_level_text(found.graft)}")
    # A training that began found no fault before.
    if not is_lone(donor) and not accelerator.made_by_main(lambda: is_run(place / TRAINING)):
        found = replace(found, wiring=_better_wiring(recipe, donor, console, accelerator))
    if open_trunk(recipe).family.kind.starts and not is_at_fault(found.base) and found.wiring is None:
        # Two models were loaded before this one.
        gc.collect()
        run_recipe(recipe, console, choices, forecast)
        found = accelerator.made_by_main(partial(_trained, found, place / TRAINING))
    # These models must not lie beside those of a rescue.
    gc.collect()
    verdict, reason = judge(found)
    command = retrain_command(tuned, donor, paths, changes)
    if verdict == "fault":
        command = inspect_command(tuned if recipe.model.adapter is None else donor, donor)
    elif verdict == "graft" and donor == tuned:
        command = serve_as_it_is(tuned)
    elif verdict == "graft" and not is_lone(donor):
        command = graft_command(tuned, donor) if recipe.model.adapter is None else merge_command(donor, tuned)
    forecast.number = len(own)
    return replace(found, verdict=verdict, reason=reason, command=command), forecast


def judge(found: ProbeResult) -> tuple[Verdict, str]:
    """Return the verdict on a probe's figures, and the figures that decided.

    A loss or a gain counts if its whole 95 % interval does.
    """
    own, gain, lost = found.base, found.gain_ci95, found.lost_overlap_ci95
    if found.wiring is not None:
        return "fault", f"{found.wiring}. It is in a wrong form, or was trained with that wiring"
    if own is not None and is_at_fault(own):
        return "fault", (
            f"The base's head drafts for the base itself with tau {format_estimate(own.tau, own.tau_ci95)}; expected "
            f"more than {LEAST_TAU:g}. The head is damaged or of another model, or the tokenizer is not the base's"
        )
    if found.trained_steps is None:
        return "graft", "Drafters of its kind are not trained here"
    tau = found.graft.tau
    level = None if own is None else own.overlap
    lost_text = f"Overlap lost at equal target entropy: {_lost_text(found)}"
    changed = f"{found.trained_steps} steps changed tau by {_interval(gain)}"
    helps_much = gain is not None and gain[0] > MARGIN * tau
    if lost is not None and level is not None and lost[1] < MARGIN * level and not helps_much:
        return "graft", f"{lost_text}, less than {100 * MARGIN:g} % of the base's {level:.2f}"
    if gain is not None and gain[0] > 0.0:
        return "retrain", (
            f"{found.trained_steps} steps raised tau from {tau:.2f} by {_interval(gain)} to "
            f"{format_number(found.trained_tau, 2)}, and a rescue trains for longer. {lost_text}"
        )
    if lost is not None and lost[0] > 0.0:
        return "retrain", f"{lost_text}. {found.trained_steps} steps were too few to win it back"
    if gain is not None and gain[1] < MARGIN * tau:
        return "graft", f"{changed}, less than {100 * MARGIN:g} %"
    return "undecided", f"{lost_text}. {changed}. More prompts in --data would tell"


def is_at_fault(own: HeadLevel | None) -> bool:
    return own is not None and (own.tau if own.tau_ci95 is None else own.tau_ci95[1]) < LEAST_TAU


def _compare(recipe: Recipe, donor: str, out: Path, console: Console, accelerator: RunAccelerator) -> ProbeResult:
    """Measure the base's head on the fine-tune and on the base, on the recipe's held-out prompts."""
    model = recipe.model
    source = open_head_source(donor)
    tokenizer = recipe_tokenizer(recipe, open_trunk(recipe))
    held_out = evaluation_prompts(recipe, split_records(recipe)[1], tokenizer)
    head = donor
    own = OWN
    if isinstance(source, LoneHead):
        head = own = str(source.path)
        base = trunk_of(donor)
    else:
        # An adapter may have added tokens that the base has no embeddings for.
        largest = max(token for prompt in held_out for token in prompt.prompt_ids)
        base = donor if largest < int(source.text_config["vocab_size"]) else None
    arms = [ArmSpec(GRAFT, model.trunk, head, adapter=model.adapter)]
    arms += [] if base is None else [ArmSpec(OWN_BASE, base, own)]
    grid = grid_of(recipe, StudySection(temperatures=(0.0,), rules=("greedy",), depths=(recipe.head.num_depths,)))
    with progress_on(console) as progress, RunDirectory(out).held(console, "the probe"):
        study = Study(arms, grid, out, progress, prompts=held_out, processes=processes_of(accelerator))
        measured = study.measure()
    # Other processes have no teacher-forced metrics.
    report = accelerator.made_by_main(lambda: study_report(measured, grid, f"probe of {model.trunk}"))
    found = ProbeResult("undecided", "", "", _level(report.arms[GRAFT]))
    if base is None:
        return found
    one = comparison_of(report, OWN_BASE, GRAFT, grid.headline)
    return replace(
        found,
        base=_level(report.arms[OWN_BASE]),
        lost_overlap=one.delta_overlap_at_equal_entropy,
        lost_overlap_ci95=one.delta_overlap_at_equal_entropy_ci95,
    )


def _better_wiring(recipe: Recipe, donor: str, console: Console, accelerator: RunAccelerator) -> str | None:
    """Draft for the base with its head in every known wrong form; return the one that fits better, in a sentence."""
    model = open_model(donor, OWN)
    tokenizer = load_tokenizer(replace(model.checkpoint, trusts_code=recipe.model.trust_remote_code))
    prompts = choose_evenly(build_prompts(split_records(recipe)[1], tokenizer), WIRING_PROMPTS, recipe.seed)
    prompts = prompts[accelerator.process_index :: accelerator.num_processes]
    with progress_on(console) as progress:
        with shown_loading(progress, donor, model.checkpoint.num_bytes):
            trunk = model.load_trunk(local_device())
        drafting = model.load_drafting(trunk)
        if not isinstance(drafting, HeadDrafting):
            return None
        plain = SpeculativeDecoder(trunk, None, 0, eos_token_ids(model.checkpoint, tokenizer))
        found = plain.generate([prompt.prompt_ids for prompt in prompts], WIRING_TOKENS)
        texts = [
            answer_document(prompt, one.token_ids, recipe.data.seq_len_tokens)
            for prompt, one in zip(prompts, found, strict=True)
        ]
        return better_wiring(trunk, drafting, texts, min(2, model.deepest), progress, accelerator.gather_items)


def _level(arm: ArmResult) -> HeadLevel:
    return HeadLevel(arm.tau or 1.0, arm.tau_ci95, arm.overlap[0] if arm.overlap else None)


def _trained(found: ProbeResult, run_dir: Path) -> ProbeResult:
    """Return a probe's result with the figures of its short training."""
    report = load_report(run_dir / REPORT_FILE)
    return replace(
        found,
        trained_tau=report.arms[RETRAINED].tau,
        gain_ci95=None if report.gate is None else report.gate.delta_tau_ci95,
        trained_steps=load_recipe(run_dir / RECIPE_FILE).train.max_steps,
    )


def _lost_text(found: ProbeResult) -> str:
    if found.lost_overlap is None:
        if found.base is None:
            return "unknown, as the trunk that the head was made for is not known"
        return "unknown, as the texts of the two models share too few entropies"
    return format_estimate(found.lost_overlap, found.lost_overlap_ci95)


def _interval(interval: Interval | None) -> str:
    return bounds(interval).strip() or "(no interval)"


def _level_text(level: HeadLevel) -> str:
    return f"tau {format_estimate(level.tau, level.tau_ci95)}, overlap {format_number(level.overlap, 2)}"


@dataclass(frozen=True, kw_only=True)
class RescueResult(WriteResult):
    """The checkpoint that :func:`rescue` wrote, and the head it has."""

    head: str
    """``retrained``, or ``graft`` if the retrained head is not measurably better, or the probe found that none is
    needed."""
    reason: str
    """The verdict of the gate, or of the probe."""
    page: str | None
    """URI of the report; None where nothing was trained."""

    def _title(self) -> str:
        return f"{self.reason}.\n{super()._title()}"

    def _rows(self) -> Rows:
        return [("report", self.page), *super()._rows()]


@lost_process_is_named()
def rescue(
    fine_tune: str | Path,
    base: str | Path,
    out: str | Path,
    *,
    data: Sequence[str | Path] = (),
    overrides: Overrides = (),
    console: Console | None = None,
) -> RescueResult:
    """Put a head on a fine-tune, or on a LoRA adapter's merged model, retrained if that measurably helps.

    A :func:`probe` goes first, unless it was made before, or ``overrides`` sets ``train.max_steps``. If the base's head
    is good enough as it is, it is exported without training. The same call resumes a rescue that was interrupted.
    Processes that ``accelerate launch`` starts share the work.

    Args:
        fine_tune: A checkpoint, or a peft adapter of ``base``: a directory, a hub id, ``demo:NAME``, or a GGUF file.
        base: The checkpoint that it came from, with its head.
        out: The run directory; the checkpoint is written to ``out/export``, a GGUF file to ``out/NAME-mtp.gguf``.
        data: Files of prompts or chats like those that the model will serve; empty for 100 built-in prompts.
        overrides: Changes to the recipe, as for :func:`run`: ``{"train.max_steps": 1000}``.
        console: Where progress bars and the table of results are printed; None prints nothing.

    Raises:
        RecipeError: An override is wrong.
        MtpError: The two checkpoints do not fit, the data cannot be read, or ``out`` holds something else; or the probe
            finds a fault.

    Example:
        >>> import mtp_train as mtp
        >>> rescued = mtp.rescue("my-27b", "Qwen/Qwen3.6-27B", "rescued", data=["chats.jsonl"])
        >>> rescued.head, rescued.out
        ('retrained', 'rescued/export')
    """
    tuned, donor, out, paths = str(fine_tune), str(base), Path(out), list(map(str, data))
    accelerator = make_accelerator()
    recipe, choices = resolved_recipe(settings_of("graft", tuned, donor, str(out), paths), overrides)
    require_trainable(open_trunk(recipe).family)
    if is_gguf(tuned) and recipe.model.adapter:
        raise MtpError(f"model.adapter: given with {tuned}, which keeps its bytes; expected null. Leave it out.")
    console = console or Console(quiet=True)
    forecast = None
    if accelerator.made_by_main(partial(_begins_with_probe, recipe, choices)):
        later = stages_of(recipe, open_trunk(recipe), local_device().type)
        found, forecast = _probed(tuned, donor, out / PROBE, paths, overrides, console, accelerator, later)
        # Without the command that the probe proposes: the rescue goes on by itself.
        console.print(f"probe: {found.verdict}. {found.reason}.", markup=False)
        if found.verdict == "fault":
            raise CheckpointError(
                f"{donor}: {found.reason}; nothing was trained. Look at it with {found.command}, or train all the same "
                "with --set train.max_steps=500."
            )
        if found.verdict == "graft":
            again = "To retrain the head all the same, choose another --out and add --set train.max_steps=500"
            return accelerator.made_by_main(lambda: _result(recipe, GRAFT, f"{found.reason}. {again}", console))
    run_recipe(recipe, console, choices, forecast)
    return accelerator.made_by_main(lambda: _judged(recipe, console))


def _begins_with_probe(recipe: Recipe, choices: Sequence[Choice]) -> bool:
    """Return whether to probe: a run that has begun goes on, and a user who sets the length has decided to train."""
    out = Path(recipe.run_dir)
    begins = any(choice.field == "train.max_steps" for choice in choices) and not is_run(out)
    if begins and not (out / PROBE).exists():
        RunDirectory(out).require_ours(recipe)
    return begins


def _judged(recipe: Recipe, console: Console) -> RescueResult:
    if (gate := load_report(Path(recipe.run_dir) / REPORT_FILE).gate) is None:
        return _result(recipe, RETRAINED, "", console)
    # The refusal ends in the command for a graft, which is written here.
    reason = gate.reason.partition(f". {GRAFT_INSTEAD}")[0]
    return _result(recipe, RETRAINED if gate.passed else GRAFT, reason, console)


def _result(recipe: Recipe, head: str, reason: str, console: Console) -> RescueResult:
    """Export the head as it was if nothing better was exported, and return what serves the export."""
    run_dir = Path(recipe.run_dir)
    trunk = recipe.model.trunk
    out = run_dir / EXPORT
    with RunDirectory(run_dir).held(console, "the rescue"), progress_on(console) as progress:
        if head == GRAFT and not out.exists():
            write_graft(recipe, out, progress)
        gguf = _gguf_of(recipe)
        if gguf is not None and not gguf.exists():
            graft_gguf(Path(trunk), str(out), gguf, None, "hard", progress)
    tuned = open_location(trunk)
    family = of_kind(tuned.family, recipe.head.kind)
    report = load_report(run_dir / REPORT_FILE) if (run_dir / REPORT_FILE).is_file() else None
    server = None if gguf is None else f"llama-server -m {shlex.quote(str(gguf))}"
    serves = serves_of(out, family, recipe.head.num_depths, report if head == RETRAINED else None, gguf=server)
    if gguf is not None:
        # The export is the trunk's dequantised copy.
        out = gguf
        serves = {"llama.cpp": serves["llama.cpp"]}
    if report is not None and (gguf is not None or head == GRAFT):
        # The page of the run was written before this file, or the graft.
        write_report(report, run_dir, RunDirectory(run_dir).provenance, read_metrics(run_dir), serves)
    rewired = wiring_note(family, recipe.head.convention, serves)
    notes = [] if rewired is None else [f"The head is {rewired}."]
    notes += left_out(tuned)
    return RescueResult(
        out=out,
        content=f"the {head} head for {trunk}",
        serves=serves,
        notes=tuple(notes),
        head=head,
        reason=reason,
        page=page_of(run_dir),
    )


def _gguf_of(recipe: Recipe) -> Path | None:
    """Return where a rescue writes its trunk's GGUF file, or the first split, with the head; None for a checkpoint."""
    name = Path(recipe.model.trunk).name
    if not is_gguf(name):
        return None
    split = SPLIT.search(name)
    whole = f"{SPLIT.sub('', name).removesuffix('.gguf')}-mtp.gguf"
    return split_path(Path(recipe.run_dir, whole), 0, 1 if split is None else int(split[2]))


def write_graft(recipe: Recipe, out: Path, progress: Progress) -> None:
    """Write the recipe's trunk with the head as it was, or that head as a draft model; an adapter is merged."""
    model = recipe.model
    if model.head_from is None or recipe.gate_baseline != GRAFT:
        raise MtpError(
            f"gate.baseline: {recipe.gate_baseline} in a rescue; expected graft, which replaces a head that is not "
            "better. Leave the override out."
        )
    finetune = open_trunk(recipe)
    source = open_head_source(model.head_from)
    plan = source_plan(recipe, finetune, source)
    write_export(
        finetune,
        Artifact(**vars(plan), num_depths=recipe.head.num_depths, notes={}),
        out,
        adapter=adapter_of(recipe),
        link=recipe.export.link,
        progress=progress,
    )
    if plan.kind.has_file:
        return
    with removed_on_failure(out):
        write_untrained_card(
            out,
            checkpoint_identity(model.trunk, finetune),
            checkpoint_identity(model.head_from, source),
            model.adapter,
            recipe.head.num_depths,
        )
