"""Run a study: measure its arms with one trunk in memory at a time, and store every measurement."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mtp_inference import HeadDrafting
from mtp_inference.opening import OpenModel
from mtp_train.acceptance.names import PLAIN
from mtp_train.acceptance.speed import measured_speedup
from mtp_train.checkpoints.files import is_gguf
from mtp_train.checkpoints.identity import InputFiles, checkpoint_files, directory_files
from mtp_train.checkpoints.locations import open_location
from mtp_train.data.tokenize import Prompt
from mtp_train.evaluation.arms import (
    ArmSpec,
    head_files,
    load_arm_trunk,
    local_device,
    open_arm,
    require_distinct,
    require_sound,
    trunk_label,
)
from mtp_train.evaluation.decoding import (
    SPEED_PASSES,
    SPEED_SECONDS,
    SPEED_SETTINGS,
    Lane,
    LaneRecords,
    Prompts,
    Stopwatch,
    TrunkArms,
    decode_prompts,
    joined,
    speed_prompts,
)
from mtp_train.evaluation.dense import DenseRows, dense_rows, replayed
from mtp_train.evaluation.grid import EvaluationGrid, grid_prompts
from mtp_train.evaluation.prompt_records import PromptRecord, Setting
from mtp_train.evaluation.results import REPORT_FILE, Report, load_report
from mtp_train.evaluation.served import Server, ask, judged
from mtp_train.evaluation.statistics import MeasuredArm, Measurements, Records, assemble
from mtp_train.evaluation.store import Store
from mtp_train.evaluation.suites import load_suite
from mtp_train.train.machine import device_name
from mtp_train.trunk.progress import shown_loading
from mtp_train.trunk.tokenizer import eos_token_ids, load_tokenizer

FORMAT_VERSION = 1
"""Of a study's directory: its identity and its measurements."""


@dataclass(frozen=True)
class Processes:
    """The processes that decode prompts together, every n-th prompt each."""

    index: int
    """Number of this process; 0 measures all that is not decoding."""
    count: int
    gather: Callable[[list[Any]], list[Any]]
    """Returns the items of all processes, in their order; all of them must call it."""


ALONE = Processes(0, 1, lambda own: own)


def measure_trunk(
    arms: TrunkArms,
    prompts: Prompts,
    settings: Sequence[Setting],
    progress: Progress,
    processes: Processes = ALONE,
    *,
    shallow: Sequence[Lane] = (),
) -> list[MeasuredArm]:
    """Measure the arms of a trunk in memory: acceptance on all prompts, times on a few, teacher-forced metrics.

    Args:
        settings: Those at which every drafter decodes.
        shallow: Heads with fewer drafts a round, greedily. They are timed, and their rounds are replayed from
            teacher-forced drafts.

    Returns:
        Plain decoding, then the drafters; every process returns the same, but only the first has teacher-forced
        metrics and ``shallow``.
    """
    lanes = arms.lanes(settings)
    own = {context: some[processes.index :: processes.count] for context, some in prompts.items()}
    decoded = joined(processes.gather([decode_prompts(arms, own, lanes, progress)]), prompts)
    timed: LaneRecords = {}
    for some in arms.by_plain([*lanes, *shallow]).values():
        timed |= _timed(arms, prompts, some, decoded, progress, processes)
    depth, plain = max(one.depth for one in settings), of_arm(decoded, arms.plain_arm)
    dense = _dense(arms, prompts, plain, depth, progress) if processes.index == 0 else {}
    for name, setting in shallow if dense else ():
        rows = dense[name][setting.temperature, setting.context_tokens]
        decoded[name, setting] = replayed(rows, plain[setting.plain], setting.depth)
    # The trunk's entropy is the same with any head, and plain decoding has no head to measure it with.
    first = _arm(arms, arms.plain_arm, decoded, timed, next(iter(dense.values()), {}))
    return [first, *(_arm(arms, name, decoded, timed, dense.get(name, {}), first) for name in arms.drafting)]


def _arm(
    arms: TrunkArms, name: str, decoded: LaneRecords, timed: LaneRecords, dense: Any, plain: MeasuredArm | None = None
) -> MeasuredArm:
    mine, my_times = (of_arm(one, name) for one in (decoded, timed))
    return MeasuredArm(name, arms.name, arms.head_names.get(name), mine, my_times, dense, plain)


def of_arm(records: LaneRecords, name: str) -> dict[Setting, list[PromptRecord]]:
    return {setting: found for (arm, setting), found in records.items() if arm == name}


def _timed(
    arms: TrunkArms,
    prompts: Prompts,
    lanes: Sequence[Lane],
    decoded: LaneRecords,
    progress: Progress,
    processes: Processes,
) -> LaneRecords:
    """Return the best times of a few prompts in plain decoding and in the lanes after it.

    Passes are added while a lane is undecided for lack of precise times (:attr:`Speedup.needs_passes`), up to
    :data:`SPEED_SECONDS`.
    """
    context = lanes[0][1].context_tokens
    few = speed_prompts(prompts[context], arms.seed)
    watch = Stopwatch(arms, few[processes.index :: processes.count], lanes)
    task = progress.add_task(f"timing {arms.name}", total=0)
    begun, measures = time.perf_counter(), 0
    while True:
        measures += 1
        progress.update(task, total=measures * SPEED_PASSES * len(watch.prompts) * len(lanes))
        watch.run(SPEED_PASSES, partial(progress.advance, task))
        found = joined(processes.gather([watch.records]), {context: few})
        spent = max(processes.gather([time.perf_counter() - begun]))
        if spent * (1 + 1 / measures) > SPEED_SECONDS or not _needs_passes(arms, lanes, decoded, found):
            return found


def _needs_passes(arms: TrunkArms, lanes: Sequence[Lane], decoded: LaneRecords, timed: LaneRecords) -> bool:
    plain = _arm(arms, arms.plain_arm, decoded, timed, {})
    for name, setting in lanes[1:]:
        arm = _arm(arms, name, decoded, timed, {})
        speedup = measured_speedup(arm.against(plain, setting)) if setting in arm.decoded else None
        if speedup is not None and speedup.needs_passes:
            return True
    return False


def _dense(
    arms: TrunkArms, prompts: Prompts, plain: Records, depth: int, progress: Progress
) -> dict[str, dict[tuple[float, int | None], DenseRows]]:
    """Return each head's teacher-forced metrics on the trunk's own texts, by temperature and context."""
    found: dict[str, dict[tuple[float, int | None], DenseRows]] = {}
    limits = arms.seq_len_tokens, arms.dense_tokens
    heads = {name: one for name, one in arms.drafting.items() if isinstance(one, HeadDrafting)}
    for name, head in heads.items():
        for one, texts in progress.track(plain.items(), description=f"teacher-forced figures, {name}"):
            rows = dense_rows(arms.trunk, head, prompts[one.context_tokens], texts, depth, one.temperature, *limits)
            found.setdefault(name, {})[one.temperature, one.context_tokens] = rows
    return found


class Study:
    """Arms to measure over a grid, opened and checked as far as this takes no weights in memory.

    Figures do not depend on the number of processes, each of which must make the study and measure; speeds do.

    Args:
        specs: The arms, in the order they are shown.
        out: Directory of the measurements. Those of an interrupted study in it are not measured again.
        prompts: Prompts that are given; None for the suite's.
        servers: Servers that are sent the suite's prompts before anything is decoded here.

    Raises:
        MtpError: An arm cannot be measured, or ``out`` contains other files.
    """

    def __init__(
        self,
        specs: Sequence[ArmSpec],
        grid: EvaluationGrid,
        out: Path,
        progress: Progress,
        *,
        prompts: Sequence[Prompt] | None = None,
        servers: Sequence[Server] = (),
        processes: Processes = ALONE,
    ) -> None:
        require_distinct(specs)
        self.arms = {spec: open_arm(spec) for spec in specs}
        self.grid, self.prompts, self.servers = grid, prompts, servers
        self.progress, self.processes = progress, processes
        if processes.index == 0:
            self.store = Store(out, self._identity())
            self.store.hash_inputs(_inputs(self.arms, servers), progress)
            if not self.store.is_finished:
                require_sound(self.arms.values(), progress)
            if processes.count > 1:
                self.store.claim()
        # The others write into the directory once it is claimed.
        processes.gather([])
        if processes.index > 0:
            self.store = Store(out, self._identity(), processes.index)

    def measure(self) -> Measurements:
        """Measure all arms, with one trunk in memory at a time."""
        found = Measurements(served={one.name: ask(one, self.grid, self.progress) for one in self.servers})
        by_trunk: dict[Any, list[ArmSpec]] = {}
        for spec in self.arms:
            by_trunk.setdefault(spec.trunk_key, []).append(spec)
        names = plain_names([group[0] for group in by_trunk.values()])
        for plain_name, group in zip(names, by_trunk.values(), strict=True):
            self._measure(group, plain_name, found)
            # Free the weights before the next trunk is loaded.
            gc.collect()
        return found

    def _measure(self, group: Sequence[ArmSpec], plain_name: str, found: Measurements) -> None:
        """Load one trunk, measure all its arms, and add the results to ``found``."""
        first, grid, progress = group[0], self.grid, self.progress
        model = self.arms[first]
        tokenizer = load_tokenizer(model.checkpoint, trust_remote_code=False, adapter=model.adapter)
        prompts: Prompts = (
            {None: self.prompts} if self.prompts is not None else grid_prompts(grid, tokenizer, grid.contexts)
        )
        with shown_loading(progress, first.trunk_name, model.checkpoint.num_bytes):
            trunk = load_arm_trunk(model, local_device())
        drafting = {one.name: maker for one in group if (maker := self.arms[one].load_drafting(trunk)) is not None}
        for maker in drafting.values():
            maker.check(trunk, max(grid.depths or ()))
        self.store.require_unchanged(progress)
        eos_ids = eos_token_ids(model.checkpoint, tokenizer)
        for server in self.servers:
            if server.checkpoint == first.trunk:
                found.served[server.name] = judged(found.served[server.name], trunk, eos_ids)
                for warning in found.served[server.name].document["warnings"]:
                    progress.console.print(f"{server.name}: {warning}", highlight=False)
        found.facts = {"dtype": trunk.dtype_name, "device": device_name(trunk.lm_head_VD.device)}
        arms = TrunkArms(
            trunk=trunk,
            name=first.trunk_name,
            drafting=drafting,
            head_names={one.name: str(one.head_name) for one in group},
            plain_arm=plain_name,
            max_new_tokens=grid.max_new_tokens,
            eos_ids=eos_ids,
            seed=grid.seed,
            batch=grid.batch,
            store=self.store,
        )
        found.arms += measure_trunk(arms, prompts, grid.settings(), progress, self.processes)

    def _identity(self) -> dict[str, Any]:
        """Return the identity of the study, written into its directory.

        A study may resume the measurements of one with an equal identity and unchanged inputs. Prompts that are given
        come from a run, and the run's directory records its inputs.
        """
        prompts = self.prompts
        return {
            "format_version": FORMAT_VERSION,
            "arms": [spec.identity() for spec in self.arms],
            "grid": json.loads(json.dumps(asdict(self.grid))),
            "prompts": None if prompts is None else _digest([(one.id, one.prompt_ids) for one in prompts]),
            "prompt_texts": _suite_digest(self.grid.suite) if prompts is None else None,
            "server": [one.identity() for one in self.servers] or None,
            "device": local_device().type,
        }


def run_study(
    specs: Sequence[ArmSpec],
    grid: EvaluationGrid,
    out: Path,
    progress: Progress,
    *,
    title: str,
    servers: Sequence[Server] = (),
) -> Report:
    """Measure arms and return the report; a finished study in ``out`` gives its own. See :class:`Study`."""
    study = Study(specs, grid, out, progress, servers=servers)
    if study.store.is_finished:
        return load_report(out / REPORT_FILE)
    report = study_report(study.measure(), grid, title)
    # With servers alone, nothing has been stored so far.
    study.store.claim()
    return report


def study_report(found: Measurements, grid: EvaluationGrid, title: str) -> Report:
    settings = {
        **json.loads(json.dumps(asdict(grid))),
        "contexts": ["own" if one is None else one for one in grid.contexts],
        **SPEED_SETTINGS,
        "headline": {key: getattr(grid.headline, key) for key in ("temperature", "context_tokens", "depth", "rule")},
    }
    return assemble(found, grid.headline, settings, title=title)


def plain_names(specs: Sequence[ArmSpec]) -> list[str]:
    """Name plain decoding with each trunk after the trunk, or after its first arm where two trunks are called alike."""
    if len(specs) == 1:
        return [PLAIN]
    labels = [trunk_label(spec) for spec in specs]
    pairs = zip(labels, specs, strict=True)
    return [f"{PLAIN}@{label if labels.count(label) == 1 else spec.name}" for label, spec in pairs]


def _suite_digest(name: str) -> str:
    """Return the SHA-256 of a suite's texts, before any template: some templates insert the date."""
    texts = [(one.task, one.id, one.content) for one in load_suite(name).records]
    return _digest(texts)


def _digest(texts: object) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def _inputs(arms: Mapping[ArmSpec, OpenModel], servers: Sequence[Server]) -> dict[str, InputFiles]:
    inputs: dict[str, InputFiles] = {}
    for spec, model in arms.items():
        inputs[f"{spec.name}: trunk"] = checkpoint_files(model.checkpoint)
        if model.adapter is not None:
            inputs[f"{spec.name}: adapter"] = directory_files(model.adapter)
        if (of_head := head_files(model)) is not None:
            inputs[f"{spec.name}: head"] = of_head
    if servers:
        place = servers[0].checkpoint
        of_gguf = InputFiles(Path(place), {Path(place).name: Path(place)})
        inputs["the served checkpoint"] = of_gguf if is_gguf(place) else checkpoint_files(open_location(place))
    return inputs
