"""A study from its arms to its report: one trunk in memory at a time, and everything it measures kept on the way."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mtp_inference.draft import DrafterMaker
from mtp_train.errors import DataError
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk
from mtp_train.heads.whole import require_whole_trunk
from mtp_train.inputs import eos_token_ids, load_tokenizer, open_location
from mtp_train.report.cells import ArmCosts, Latency, StudyReport, load_study
from mtp_train.report.schema import REPORT_FILE, build
from mtp_train.run_inputs import Loaders
from mtp_train.study.arms import (
    PLAIN,
    ArmSpec,
    OpenArm,
    load_arm_trunk,
    load_drafting,
    local_device,
    open_arm,
    require_distinct,
    trunk_label,
)
from mtp_train.study.assemble import Measured, assemble
from mtp_train.study.beside import SERVED, Server, ask, judged, with_served
from mtp_train.study.costs import head_costs
from mtp_train.study.dense import DenseRows, dense_rows
from mtp_train.study.endpoint import Served
from mtp_train.study.latency import measure_latency
from mtp_train.study.measure import Grid, grid_prompts, measure_block
from mtp_train.study.records import Decoded, Setting, TaskPrompt
from mtp_train.study.statistics import MeasuredArm
from mtp_train.study.store import Store
from mtp_train.study.suites import load_suite
from mtp_train.weights.files import Checkpoint, read_json
from mtp_train.weights.finite import require_finite_checkpoint
from mtp_train.weights.identity import InputFiles, checkpoint_files, directory_files
from mtp_train.weights.writing import write_json

COSTS_FILE = "costs.json"
LATENCY_BATCHES = (1, 4, 16)
LATENCY_REPEATS = 2
DENSE_SEQ_LEN_TOKENS = 8192
"""Longest text that teacher-forced figures are taken on; a longer one counts with its beginning."""
Prompts = Mapping[int | None, Sequence[TaskPrompt]]
"""By the length they were brought to."""


@dataclass(frozen=True)
class _Study:
    grid: Grid
    store: Store
    progress: Progress
    costs: bool
    given: Sequence[TaskPrompt] | None
    served: Served | None = None
    served_trunk: str | None = None
    """Where the trunk of the served model is."""


@dataclass(frozen=True)
class _Loaded:
    """A trunk in memory, and what drafts for it."""

    name: str
    plain_name: str
    trunk: Trunk
    arms: Sequence[OpenArm]
    drafting: Mapping[str, DrafterMaker]
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
    prompts: Sequence[TaskPrompt] | None = None,
    server: Server | None = None,
) -> StudyReport:
    """Measure arms over a grid.

    Args:
        specs: The arms, in the order they are shown.
        grid: The settings.
        out: Where measurements are kept. A study that was broken off there goes on; of one that was finished the report
            is read.
        progress: Shows how far it is.
        title: What the report is called.
        costs: Whether latency and prefill are timed as well.
        prompts: Prompts in the place of the grid's suite, as they are.
        server: A server that is asked the suite's prompts, before anything is decoded here.

    Raises:
        MtpError: An arm cannot be measured, or ``out`` holds something else.
    """
    arms = _open(specs)
    store = Store(out, _identity(arms, grid, costs, prompts, server))
    store.require_inputs(_inputs(arms, server), progress)
    if (out / REPORT_FILE).is_file():
        return load_study(out / REPORT_FILE)
    _require_sound(arms, progress)
    store.hash_inputs(progress)
    served = None if server is None else ask(server, grid, progress)
    served_trunk = None if server is None else server.checkpoint
    found = _measure_all(arms, _Study(grid, store, progress, costs, prompts, served, served_trunk))
    served = found.served or served
    # Also where a server alone was asked, and nothing was kept so far.
    store.claim()
    report = assemble(found, grid, title)
    return report if served is None else with_served(report, served)


def measure_study(
    specs: Sequence[ArmSpec], grid: Grid, out: Path, progress: Progress, prompts: Sequence[TaskPrompt]
) -> Measured:
    """Measure arms on given prompts, their costs left out, for a report that more goes into.

    Args:
        specs: The arms, in the order they are shown.
        grid: The settings.
        out: As for :func:`run_study`.
        progress: Shows how far it is.
        prompts: What is decoded.

    Raises:
        MtpError: An arm cannot be measured, or ``out`` holds something else.
    """
    arms = _open(specs)
    store = Store(out, _identity(arms, grid, False, prompts, None))
    store.require_inputs(_inputs(arms, None), progress)
    _require_sound(arms, progress)
    store.hash_inputs(progress)
    return _measure_all(arms, _Study(grid, store, progress, False, prompts))


def _open(specs: Sequence[ArmSpec]) -> list[OpenArm]:
    require_distinct(specs)
    return [open_arm(spec) for spec in specs]


def _require_sound(arms: Sequence[OpenArm], progress: Progress) -> None:
    trunks = {arm.checkpoint.path: (arm.checkpoint, arm.family) for arm in arms}
    trunks |= {arm.draft_model.path: (arm.draft_model, arm.draft_model.family) for arm in arms if arm.draft_model}
    for checkpoint, family in trunks.values():
        require_whole_trunk(checkpoint, family)
    for checkpoint in _checkpoints(arms):
        require_finite_checkpoint(checkpoint, progress)


def _measure_all(arms: Sequence[OpenArm], study: _Study) -> Measured:
    by_trunk: dict[Any, list[OpenArm]] = {}
    for arm in arms:
        by_trunk.setdefault(arm.spec.trunk_key, []).append(arm)
    found = Measured()
    for group in by_trunk.values():
        plain_name = PLAIN if len(by_trunk) == 1 else f"{PLAIN}@{trunk_label(group[0].spec)}"
        loaded = _load(study, group, plain_name)
        study.store.require_unchanged(study.progress)
        _measure(study, loaded, found)
        # Its weights go before the next one's come.
        del loaded
        gc.collect()
    return found


def _checkpoints(arms: Sequence[OpenArm]) -> list[Checkpoint]:
    every = [checkpoint for arm in arms for checkpoint in (arm.checkpoint, *arm.draft_checkpoints)]
    return list({checkpoint.path: checkpoint for checkpoint in every}.values())


def _identity(
    arms: Sequence[OpenArm],
    grid: Grid,
    costs: bool,
    prompts: Sequence[TaskPrompt] | None,
    server: Server | None,
) -> dict[str, Any]:
    """Say what a study is, for its directory. Two that say the same, of the same inputs, may go on with each other's
    measurements. Prompts that are given are a run's, whose own inputs are recorded."""
    return {
        "arms": [asdict(arm.spec) for arm in arms],
        "grid": {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(grid).items()},
        "costs": costs,
        "prompts": None if prompts is None else [prompt.id for prompt in prompts],
        "prompt_texts": _suite_digest(grid.suite) if prompts is None else None,
        "server": None if server is None else server.identity(),
        "device": local_device().type,
    }


def _suite_digest(name: str) -> str:
    """Return the SHA-256 of a suite's texts, before any template: some templates write the date into a prompt."""
    texts = [(one.task, one.record.id, one.record.content) for one in load_suite(name).records]
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def _inputs(arms: Sequence[OpenArm], server: Server | None) -> Loaders:
    """Return the files that measurements depend on."""
    loaders: dict[str, Callable[[], InputFiles]] = {}
    for arm in arms:
        name = arm.spec.name
        loaders[f"{name}: trunk"] = partial(checkpoint_files, arm.checkpoint)
        if arm.adapter is not None:
            loaders[f"{name}: adapter"] = partial(directory_files, arm.adapter)
        if arm.head_loader is not None:
            loaders[f"{name}: head"] = arm.head_loader
    if server is not None:
        loaders["the served checkpoint"] = lambda: checkpoint_files(open_location(server.checkpoint))
    return loaders


def _load(study: _Study, group: Sequence[OpenArm], plain_name: str) -> _Loaded:
    first = group[0]
    tokenizer = load_tokenizer(first.checkpoint, trust_remote_code=False)
    prompts: Prompts = {None: study.given} if study.given is not None else _enough_prompts(study.grid, tokenizer)
    trunk = load_arm_trunk(first, local_device())
    drafting: dict[str, DrafterMaker] = {}
    heads: dict[str, MtpHead] = {}
    for arm in group:
        maker, head = load_drafting(arm, trunk)
        if maker is not None:
            maker.check(trunk, max(study.grid.depths))
            drafting[arm.spec.name] = maker
        if head is not None:
            heads[arm.spec.name] = head
    eos_ids = eos_token_ids(first.checkpoint, tokenizer)
    return _Loaded(first.spec.trunk_name, plain_name, trunk, group, drafting, heads, prompts, eos_ids)


def _enough_prompts(grid: Grid, tokenizer: Any) -> Prompts:
    prompts = grid_prompts(grid, tokenizer, grid.contexts)
    for context, some in prompts.items():
        if len(some) < 2:
            raise DataError(
                f"--contexts {context}: {len(some)} prompts of {grid.suite} fit; expected at least 2, as intervals are "
                "over groups of prompts. Ask for a longer context, or for more prompts."
            )
    return prompts


def _measure(study: _Study, loaded: _Loaded, found: Measured) -> None:
    """Measure everything on one trunk, and add it to what was found."""
    if study.served is not None and loaded.arms[0].spec.trunk == study.served_trunk:
        found.served = judged(study.served, loaded.trunk, loaded.eos_ids)
        for warning in found.served.document["warnings"]:
            study.progress.console.print(f"{SERVED}: {warning}", highlight=False)
    weight = loaded.trunk.lm_head_VD
    found.facts = {"dtype": str(weight.dtype).removeprefix("torch."), "device": str(weight.device)}
    decoded = _decode(study, loaded)
    plain = decoded[loaded.plain_name]
    dense = {name: _dense(study, loaded, name, plain) for name in loaded.heads}
    # The trunk's entropy is the same with any head, and plain decoding has none to measure it with.
    found.arms.append(MeasuredArm(loaded.plain_name, loaded.name, None, plain, next(iter(dense.values()), {})))
    for arm in loaded.arms:
        name, head_name = arm.spec.name, arm.spec.head_name
        if name not in loaded.drafting:
            continue
        both = {**plain, **decoded[name]}
        found.arms.append(MeasuredArm(name, loaded.name, head_name, both, dense.get(name, {})))
        found.checked += [one for texts in decoded[name].values() for one in texts if one.same_as_plain is not None]
        flags = arm.flags
        if flags is not None:
            found.flags[name] = flags
    if study.costs:
        _measure_costs(study, loaded, found)


def _decode(study: _Study, loaded: _Loaded) -> dict[str, dict[Setting, list[Decoded]]]:
    grid, prompts = study.grid, loaded.prompts
    blocks = [(context, grid.drafted(t, context)) for context in prompts for t in grid.temperatures]
    total = sum(len(prompts[context]) * (1 + len(loaded.drafting) * len(settings)) for context, settings in blocks)
    task = study.progress.add_task(f"decoding with {loaded.name}", total=total)
    decoded: dict[str, dict[Setting, list[Decoded]]] = {name: {} for name in (loaded.plain_name, *loaded.drafting)}
    for context, settings in blocks:
        block = measure_block(
            loaded.trunk,
            loaded.drafting,
            prompts[context],
            settings,
            plain_arm=loaded.plain_name,
            grid=grid,
            eos_ids=loaded.eos_ids,
            store=study.store,
            on_prompt=partial(study.progress.advance, task),
        )
        for name, by_setting in block.items():
            decoded[name].update(by_setting)
    return decoded


def _dense(
    study: _Study, loaded: _Loaded, name: str, plain: Mapping[Setting, Sequence[Decoded]]
) -> dict[tuple[float, int | None], DenseRows]:
    """Look at every position of the trunk's own texts, once for each temperature and context."""
    found = {}
    plan = next(arm.plan for arm in loaded.arms if arm.spec.name == name)
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
    headline = study.grid.headline
    prompts = [prompt.prompt_ids for prompt in loaded.prompts[headline.context_tokens]]
    for name, maker in study.progress.track(loaded.drafting.items(), description="latency and prefill"):
        path = study.store.file(name, COSTS_FILE)
        if not path.is_file():
            costs = head_costs(name, loaded.trunk, maker)
            latency = measure_latency(
                name,
                loaded.trunk,
                maker,
                depth=headline.depth,
                prompts=prompts,
                batches=[batch for batch in LATENCY_BATCHES if batch <= len(prompts)],
                repeats=LATENCY_REPEATS,
                on_run=lambda: None,
            )
            write_json(path, {"costs": asdict(costs), "latency": [asdict(one) for one in latency]})
        kept = read_json(path)
        found.costs.append(build(ArmCosts, kept["costs"], str(path)))
        found.latency += [build(Latency, one, str(path)) for one in kept["latency"]]
