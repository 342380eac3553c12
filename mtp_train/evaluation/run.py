"""Run a study: measure its arms with one trunk in memory at a time, store every measurement, return the report."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mtp_inference import HeadDrafting
from mtp_inference.drafters.drafter import Drafting
from mtp_train.checkpoints.files import Checkpoint, read_json
from mtp_train.checkpoints.identity import InputFiles, Loaders, checkpoint_files, directory_files
from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.checkpoints.writing import write_json
from mtp_train.errors import DataError
from mtp_train.evaluation.arms import (
    PLAIN,
    ArmSpec,
    OpenArm,
    load_arm_trunk,
    local_device,
    open_arm,
    require_distinct,
    trunk_label,
)
from mtp_train.evaluation.assemble import Measured, assemble
from mtp_train.evaluation.cells import ArmCosts, StudyReport, load_study
from mtp_train.evaluation.costs import head_costs
from mtp_train.evaluation.decoding import Prompts, RecordTable, decode_prompts, joined, num_decodings
from mtp_train.evaluation.dense import DenseRows, dense_rows
from mtp_train.evaluation.grid import Grid, grid_prompts
from mtp_train.evaluation.prompt_records import Decoded, Setting, TaskPrompt
from mtp_train.evaluation.results import REPORT_FILE, build
from mtp_train.evaluation.served import SERVED, Served, Server, ask, judged, with_served
from mtp_train.evaluation.statistics import MeasuredArm
from mtp_train.evaluation.store import Store
from mtp_train.evaluation.suites import load_suite
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.progress import shown_loading
from mtp_train.trunk.tokenizer import eos_token_ids, load_tokenizer
from mtp_train.trunk.whole import require_whole_trunk

COSTS_FILE = "costs.json"
FORMAT_VERSION = 1
"""Of a study's directory: its identity and its measurements."""
DENSE_SEQ_LEN_TOKENS = 8192
"""Longest text for teacher-forced metrics, prompt included; a longer text is cut at its end."""


@dataclass(frozen=True)
class Processes:
    """The processes that decode a study's prompts together, every n-th prompt each."""

    index: int
    """Number of this process; 0 measures all that is not decoding."""
    count: int
    gather: Callable[[list[Any]], list[Any]]
    """Returns the items of all processes, in their order; all of them must call it."""


ALONE = Processes(0, 1, lambda own: own)


@dataclass(frozen=True)
class _Study:
    grid: Grid
    store: Store
    progress: Progress
    costs: bool
    given: Sequence[TaskPrompt] | None
    served: Served | None = None
    served_trunk: str | None = None
    """Location of the served model's trunk."""
    processes: Processes = ALONE


@dataclass(frozen=True)
class _Loaded:
    """A trunk in memory, and its drafters."""

    name: str
    plain_name: str
    trunk: Trunk
    arms: Sequence[OpenArm]
    drafting: Mapping[str, Drafting]
    heads: Mapping[str, MtpHead]
    prompts: Prompts
    eos_ids: frozenset[int]


def run_study(
    specs: Sequence[ArmSpec],
    grid: Grid,
    out: Path,
    progress: Progress,
    *,
    title: str,
    costs: bool,
    server: Server | None = None,
) -> StudyReport:
    """Measure arms over a grid and return the report.

    Args:
        specs: The arms, in the order they are shown.
        grid: The settings.
        out: Directory of the measurements. An interrupted study in it is resumed; the report of a finished one is read.
        progress: Shows progress bars.
        title: Title of the report.
        costs: Whether memory and prefill are measured as well.
        server: A server that is sent the suite's prompts before anything is decoded here.

    Raises:
        MtpError: An arm cannot be measured, or ``out`` contains other files.
    """
    arms = _open(specs)
    store = Store(out, _identity(arms, grid, costs, None, server))
    store.require_inputs(_inputs(arms, server), progress)
    if (out / REPORT_FILE).is_file():
        return load_study(out / REPORT_FILE)
    _require_sound(arms, progress)
    store.hash_inputs(progress)
    served = None if server is None else ask(server, grid, progress)
    served_trunk = None if server is None else server.checkpoint
    found = _measure_all(arms, _Study(grid, store, progress, costs, None, served, served_trunk))
    served = found.served or served
    # With a server alone, nothing has been stored so far.
    store.claim()
    report = assemble(found, grid, title)
    return report if served is None else with_served(report, served)


def measure_study(
    specs: Sequence[ArmSpec],
    grid: Grid,
    out: Path,
    progress: Progress,
    prompts: Sequence[TaskPrompt],
    processes: Processes = ALONE,
) -> Measured:
    """Measure arms on given prompts, without memory and prefill, for a caller that assembles the report itself.

    Args:
        specs: The arms, in the order they are shown.
        grid: The settings.
        out: As for :func:`run_study`.
        progress: Shows progress bars.
        prompts: The prompts to decode.
        processes: The processes, each of which must call this. Figures do not depend on their number, speeds excepted.

    Returns:
        The measurements; without arms for all processes but the first.

    Raises:
        MtpError: An arm cannot be measured, or ``out`` contains other files.
    """
    arms = _open(specs)
    identity = _identity(arms, grid, False, prompts, None)
    if processes.index == 0:
        store = Store(out, identity)
        store.require_inputs(_inputs(arms, None), progress)
        _require_sound(arms, progress)
        store.hash_inputs(progress)
        if processes.count > 1:
            store.claim()
    # The others write into the directory once it is claimed.
    processes.gather([])
    if processes.index > 0:
        store = Store(out, identity, processes.index)
    return _measure_all(arms, _Study(grid, store, progress, False, prompts, processes=processes))


def _open(specs: Sequence[ArmSpec]) -> list[OpenArm]:
    require_distinct(specs)
    return [open_arm(spec) for spec in specs]


def _require_sound(arms: Sequence[OpenArm], progress: Progress) -> None:
    models = [arm.model for arm in arms]
    trunks = {one.checkpoint.path: (one.checkpoint, one.family) for one in models}
    trunks |= {one.draft_model.path: (one.draft_model, one.draft_model.family) for one in models if one.draft_model}
    for checkpoint, family in trunks.values():
        require_whole_trunk(checkpoint, family)
    for checkpoint in _checkpoints(arms):
        require_finite_checkpoint(checkpoint, progress)


def _measure_all(arms: Sequence[OpenArm], study: _Study) -> Measured:
    by_trunk: dict[Any, list[OpenArm]] = {}
    for arm in arms:
        by_trunk.setdefault(arm.spec.trunk_key, []).append(arm)
    found = Measured()
    names = plain_names([group[0].spec for group in by_trunk.values()])
    for plain_name, group in zip(names, by_trunk.values(), strict=True):
        loaded = _load(study, group, plain_name)
        study.store.require_unchanged(study.progress)
        _measure(study, loaded, found)
        # Free the weights before the next trunk is loaded.
        del loaded
        gc.collect()
    return found


def plain_names(specs: Sequence[ArmSpec]) -> list[str]:
    """Name plain decoding with each trunk after the trunk, or after its first arm where two trunks are called alike."""
    if len(specs) == 1:
        return [PLAIN]
    labels = [trunk_label(spec) for spec in specs]
    pairs = zip(labels, specs, strict=True)
    return [f"{PLAIN}@{label if labels.count(label) == 1 else spec.name}" for label, spec in pairs]


def _checkpoints(arms: Sequence[OpenArm]) -> list[Checkpoint]:
    every = [checkpoint for arm in arms for checkpoint in (arm.model.checkpoint, *arm.model.draft_checkpoints)]
    return list({checkpoint.path: checkpoint for checkpoint in every}.values())


def _identity(
    arms: Sequence[OpenArm],
    grid: Grid,
    costs: bool,
    prompts: Sequence[TaskPrompt] | None,
    server: Server | None,
) -> dict[str, Any]:
    """Return the identity of a study, written into its directory.

    A study may resume the measurements of one with an equal identity and unchanged inputs. Prompts that are given come
    from a run, and the run's directory records its inputs.
    """
    return {
        "format_version": FORMAT_VERSION,
        "arms": [asdict(arm.spec) for arm in arms],
        "grid": {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(grid).items()},
        "costs": costs,
        "prompts": None if prompts is None else [prompt.id for prompt in prompts],
        "prompt_texts": _suite_digest(grid.suite) if prompts is None else None,
        "server": None if server is None else server.identity(),
        "device": local_device().type,
    }


def _suite_digest(name: str) -> str:
    """Return the SHA-256 of a suite's texts, before any template: some templates insert the date."""
    texts = [(one.task, one.record.id, one.record.content) for one in load_suite(name).records]
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def _inputs(arms: Sequence[OpenArm], server: Server | None) -> Loaders:
    """Return loaders of the files that the measurements depend on, by label."""
    loaders: dict[str, Callable[[], InputFiles]] = {}
    for arm in arms:
        name = arm.spec.name
        loaders[f"{name}: trunk"] = partial(checkpoint_files, arm.model.checkpoint)
        if arm.model.adapter is not None:
            loaders[f"{name}: adapter"] = partial(directory_files, arm.model.adapter)
        if arm.head_loader is not None:
            loaders[f"{name}: head"] = arm.head_loader
    if server is not None:
        loaders["the served checkpoint"] = lambda: checkpoint_files(open_location(server.checkpoint))
    return loaders


def _load(study: _Study, group: Sequence[OpenArm], plain_name: str) -> _Loaded:
    first = group[0]
    tokenizer = load_tokenizer(first.model.checkpoint, trust_remote_code=False)
    prompts: Prompts = {None: study.given} if study.given is not None else _enough_prompts(study.grid, tokenizer)
    with shown_loading(study.progress, first.spec.trunk_name, first.model.checkpoint.num_bytes):
        trunk = load_arm_trunk(first, local_device())
    drafting: dict[str, Drafting] = {}
    heads: dict[str, MtpHead] = {}
    for arm in group:
        maker = arm.model.load_drafting(trunk)
        if maker is not None:
            maker.check(trunk, max(study.grid.depths))
            drafting[arm.spec.name] = maker
        if isinstance(maker, HeadDrafting):
            heads[arm.spec.name] = maker.head
    eos_ids = eos_token_ids(first.model.checkpoint, tokenizer)
    return _Loaded(first.spec.trunk_name, plain_name, trunk, group, drafting, heads, prompts, eos_ids)


def _enough_prompts(grid: Grid, tokenizer: Any) -> Prompts:
    prompts = grid_prompts(grid, tokenizer, grid.contexts)
    for context, some in prompts.items():
        if len(some) < 2:
            told, cure = f"--prompts-per-task {grid.prompts_per_task}", "Ask for more prompts, or add some"
            if context is not None:
                told, cure = f"--contexts {context}", "Ask for a longer context, or for more prompts"
            raise DataError(
                f"{told}: {len(some)} prompt(s) of {grid.suite} fit; expected at least 2, as intervals are over groups "
                f"of prompts. {cure}."
            )
    return prompts


def _measure(study: _Study, loaded: _Loaded, found: Measured) -> None:
    """Measure all arms of one trunk, and add the results to ``found``."""
    if study.served is not None and loaded.arms[0].spec.trunk == study.served_trunk:
        found.served = judged(study.served, loaded.trunk, loaded.eos_ids)
        for warning in found.served.document["warnings"]:
            study.progress.console.print(f"{SERVED}: {warning}", highlight=False)
    weight = loaded.trunk.lm_head_VD
    found.facts = {"dtype": str(weight.dtype).removeprefix("torch."), "device": str(weight.device)}
    decoded = _decode(study, loaded).decoded
    if study.processes.index > 0:
        return
    plain = decoded[loaded.plain_name]
    dense = {name: _dense(study, loaded, name, plain) for name in loaded.heads}
    # The trunk's entropy is the same with any head, and plain decoding has no head to measure it with.
    found.arms.append(MeasuredArm(loaded.plain_name, loaded.name, None, plain, next(iter(dense.values()), {})))
    for arm in loaded.arms:
        name, head_name = arm.spec.name, arm.spec.head_name
        if name not in loaded.drafting:
            continue
        both = {**plain, **decoded[name]}
        found.arms.append(MeasuredArm(name, loaded.name, head_name, both, dense.get(name, {})))
    if study.costs:
        _measure_costs(study, loaded, found)


def _decode(study: _Study, loaded: _Loaded) -> RecordTable:
    """Decode this process's share of the prompts, and return the records of all."""
    settings, processes = study.grid.settings(), study.processes
    own = {context: some[processes.index :: processes.count] for context, some in loaded.prompts.items()}
    total = num_decodings(len(loaded.drafting), own, settings)
    task = study.progress.add_task(f"decoding with {loaded.name}", total=total)
    found = decode_prompts(
        loaded.trunk,
        loaded.drafting,
        own,
        settings,
        study.grid.options(loaded.eos_ids),
        plain_arm=loaded.plain_name,
        store=study.store,
        on_prompt=partial(study.progress.advance, task),
    )
    tables = processes.gather([found])
    if len(tables) == 1:
        return found
    # Only prompts that are given are shared, and those are decoded as they are.
    return joined(tables, [prompt.id for prompt in loaded.prompts[None]])


def _dense(
    study: _Study, loaded: _Loaded, name: str, plain: Mapping[Setting, Sequence[Decoded]]
) -> dict[tuple[float, int | None], DenseRows]:
    """Return teacher-forced metrics at every position of the trunk's own texts, by temperature and context."""
    found = {}
    plan = next(arm.model.plan for arm in loaded.arms if arm.spec.name == name)
    for setting, texts in study.progress.track(plain.items(), description=f"teacher-forced figures, {name}"):
        path = study.store.file(name, f"dense-{setting.slug}.npz")
        if not path.is_file():
            rows = dense_rows(
                loaded.trunk,
                loaded.heads[name],
                loaded.prompts[setting.context_tokens],
                texts,
                max(study.grid.depths),
                setting.temperature,
                DENSE_SEQ_LEN_TOKENS,
                None if plan is None else plan.draft_vocab,
            )
            rows.save(path)
        found[setting.temperature, setting.context_tokens] = DenseRows.load(path)
    return found


def _measure_costs(study: _Study, loaded: _Loaded, found: Measured) -> None:
    for name, maker in study.progress.track(loaded.drafting.items(), description="memory and prefill"):
        path = study.store.file(name, COSTS_FILE)
        if not path.is_file():
            write_json(path, {"costs": asdict(head_costs(name, loaded.trunk, maker))})
        found.costs.append(build(ArmCosts, read_json(path)["costs"], str(path)))
