"""``mtp-train rescue``: put a head on a fine-tune whose head is missing or stale, retrained if that helps.

A rescue is one recipe with defaults for everything: the fine-tune answers prompts, the base's head is retrained on the
answers, both heads are measured on held-out prompts, and the better one is exported. If retraining does not measurably
help, the base's head is exported as it is, as by ``mtp-train graft``. A probe goes before it
(``mtp_train.runs.probe``): where it finds the base's head good enough nothing is trained, and where it finds a fault
nothing is written.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from mtp_train.acceptance.names import GRAFT, RETRAINED
from mtp_train.checkpoints.artifact import Artifact
from mtp_train.checkpoints.contents import left_out, unnamed_files
from mtp_train.checkpoints.files import is_gguf, open_checkpoint
from mtp_train.checkpoints.gguf.model_file import SPLIT, open_gguf, split_path
from mtp_train.checkpoints.locations import EXPORT, is_run, locate_adapter, open_location
from mtp_train.checkpoints.writing import full_disk_is_named, removed_on_failure
from mtp_train.errors import ChangedInputError, CheckpointError, GateRefusedError, MtpError, OutputExistsError
from mtp_train.evaluation.results import REPORT_FILE, load_report
from mtp_train.families import of_kind
from mtp_train.families.engines import engine_commands
from mtp_train.heads.diagnose import diagnose_head, layout_of
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.checkpoint_tools.gguf_files import graft_gguf, inspect_gguf
from mtp_train.runs.checkpoint_tools.inspect import serving_commands
from mtp_train.runs.display import Shown, serving_lines, wiring_note
from mtp_train.runs.evaluate_run import GRAFT_INSTEAD
from mtp_train.runs.export import write_export, write_untrained_card
from mtp_train.runs.head_source import open_head_source, source_plan
from mtp_train.runs.pipeline import page_of, run_recipe
from mtp_train.runs.probe import ProbeResult, default_out, probe_with
from mtp_train.runs.resolve import Overrides, require_one_process, resolved_recipe
from mtp_train.runs.run_directory import PROBE, RunDirectory, checkpoint_identity
from mtp_train.runs.write_recipe import settings_of
from mtp_train.trunk.progress import progress_on


@dataclass(frozen=True)
class RescueResult(Shown):
    """The checkpoint that :func:`rescue` wrote, and the head it has."""

    out: str
    """The exported checkpoint."""
    head: str
    """``retrained``, or ``graft`` if the retrained head is not measurably better, or the probe found that none is
    needed."""
    reason: str
    """The verdict of the gate, or of the probe."""
    serves: dict[str, str]
    """Engine to the command that serves ``out``."""
    page: str | None
    """URI of the report; None where nothing was trained."""
    notes: tuple[str, ...] = ()
    """Which engines wire the head otherwise than it was measured; weight files of the fine-tune that no copy has."""

    def _title(self) -> str:
        return f"{self.reason}.\nWrote {self.out}, with the {self.head} head."

    def _rows(self) -> list[tuple[str, str]]:
        page = [] if self.page is None else [("report", self.page)]
        return [*page, *serving_lines(self.serves), *(("note", one) for one in self.notes)]


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
    require_one_process("rescue")
    tuned, donor, out, paths = str(fine_tune), str(base), Path(out), [str(path) for path in data]
    recipe, choices = resolved_recipe(settings_of("graft", tuned, donor, str(out), paths), overrides)
    if is_gguf(tuned) and recipe.model.adapter:
        raise MtpError(f"model.adapter: given with {tuned}, which keeps its bytes; expected null. Leave it out.")
    console = console or Console(quiet=True)
    # A user who sets the length of the training has decided to train; a run that has begun goes on.
    if any(choice.field == "train.max_steps" for choice in choices) and not is_run(out):
        if not (out / PROBE).exists():
            RunDirectory(out).require_ours(recipe)
        found = _probed(tuned, donor, out, paths, overrides, console)
        if found.verdict == "fault":
            raise CheckpointError(
                f"{donor}: {found.reason}; nothing was trained. Look at it with {found.command}, or train all the same "
                "with --set train.max_steps=500."
            )
        if found.verdict == "graft":
            again = "To retrain the head all the same, choose another --out and add --set train.max_steps=500"
            return _result(recipe, GRAFT, f"{found.reason}. {again}", console)
    with contextlib.suppress(GateRefusedError):
        run_recipe(recipe, console, choices)
    gate = load_report(out / REPORT_FILE).gate
    refused = gate is not None and not gate.passed
    # The refusal ends in the command for a graft, which is written here.
    reason = "" if gate is None else gate.reason.partition(f". {GRAFT_INSTEAD}")[0]
    return _result(recipe, GRAFT if refused else RETRAINED, reason, console)


def _probed(
    tuned: str, donor: str, out: Path, paths: Sequence[str], overrides: Overrides, console: Console
) -> ProbeResult:
    """Probe below the run directory, or return what ``mtp-train probe`` found before with these settings."""
    earlier, found = default_out(tuned), None
    if earlier.is_dir() and not (out / PROBE).exists():
        # A probe of other settings, or of inputs that changed since, is refused before it writes anything.
        with contextlib.suppress(ChangedInputError, OutputExistsError):
            found = probe_with(tuned, donor, earlier, paths, overrides, console)
    if found is None:
        found = probe_with(tuned, donor, out / PROBE, paths, overrides, console)
    # Without the command that the probe proposes: the rescue goes on by itself.
    console.print(f"probe: {found.verdict}. {found.reason}.", highlight=False, markup=False)
    # The probe's models must not lie beside those of the run.
    gc.collect()
    return found


def _result(recipe: Recipe, head: str, reason: str, console: Console) -> RescueResult:
    """Export the head as it was if nothing better was exported, and return what serves the export."""
    run_dir = Path(recipe.run_dir)
    export, held = run_dir / EXPORT, RunDirectory(run_dir).held(console)
    with full_disk_is_named(run_dir, what="the rescue"), held, progress_on(console) as progress:
        if head == GRAFT and not export.exists():
            write_graft(recipe, export, progress)
        if is_gguf(recipe.model.trunk):
            return _in_gguf(Path(recipe.model.trunk), export, head, reason, progress)
    checkpoint, tuned = open_checkpoint(export), open_location(recipe.model.trunk)
    family = of_kind(tuned.family, recipe.head.kind)
    if recipe.head.kind == "mtp":
        serves = serving_commands(checkpoint, diagnose_head(checkpoint), "healthy")
    else:
        serves = dict(engine_commands(family.serving, str(export), recipe.head.num_depths))
    rewired = wiring_note(family, recipe.head.convention, serves)
    notes = [
        *([] if rewired is None else [f"The head is {rewired}."]),
        *left_out(unnamed_files(tuned, layout_of(tuned))),
    ]
    return RescueResult(str(checkpoint.path), head, reason, serves, page_of(run_dir), tuple(notes))


def _in_gguf(trunk: Path, export: Path, head: str, reason: str, progress: Progress) -> RescueResult:
    """Write the trunk's GGUF file with the exported head in it, ``NAME-mtp.gguf`` beside the export."""
    model = open_gguf(trunk)
    stem = SPLIT.sub("", trunk.name).removesuffix(".gguf")
    out = split_path(export.with_name(f"{stem}-mtp.gguf"), 0, len(model.files))
    if not out.exists():
        graft_gguf(trunk, str(export), export.with_name(f"{stem}-mtp.gguf"), None, "hard", progress)
    found = inspect_gguf(out)
    return RescueResult(str(out), head, reason, dict(found.serves), page_of(export.parent))


def write_graft(recipe: Recipe, out: Path, progress: Progress) -> None:
    """Write the recipe's trunk with the head as it was, or that head as a draft model; an adapter is merged."""
    model = recipe.model
    if model.head_from is None or recipe.gate_baseline != GRAFT:
        raise MtpError(
            f"gate.baseline: {recipe.gate_baseline} in a rescue; expected graft, which replaces a head that is not "
            "better. Leave the override out."
        )
    finetune, source = open_location(model.trunk), open_head_source(model.head_from)
    plan = source_plan(recipe, finetune, source)
    adapter = locate_adapter(model.adapter, model.trunk) if model.adapter else None
    head = Artifact(**vars(plan), num_depths=recipe.head.num_depths, notes={})
    write_export(finetune, head, out, adapter=adapter, link=recipe.export.link, progress=progress)
    if plan.family.kind != "mtp":
        return
    with removed_on_failure(out):
        identities = checkpoint_identity(model.trunk, finetune), checkpoint_identity(model.head_from, source)
        write_untrained_card(out, *identities, model.adapter, recipe.head.num_depths)
