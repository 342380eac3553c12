"""Run a study: measure its arms with one trunk in memory at a time, and store every measurement."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mtp_inference.opening import NGRAM, OWN, OpenModel
from mtp_train.acceptance.gate import DEFAULT_RULE, GateRule
from mtp_train.acceptance.names import PLAIN
from mtp_train.checkpoints.files import is_gguf
from mtp_train.checkpoints.identity import InputFiles, checkpoint_files, directory_files
from mtp_train.checkpoints.locations import is_head_directory, open_location
from mtp_train.checkpoints.tokenizer import eos_token_ids, load_tokenizer
from mtp_train.data.tokenize import Prompt
from mtp_train.evaluation.arms import (
    ArmSpec,
    load_arm_trunk,
    local_device,
    open_arm,
    require_distinct,
    require_sound,
    trunk_label,
)
from mtp_train.evaluation.decoding import ALONE, SPEED_SETTINGS, Processes, Prompts, TrunkArms, measure_trunk
from mtp_train.evaluation.grid import EvaluationGrid, grid_prompts
from mtp_train.evaluation.results import Report
from mtp_train.evaluation.served import Server, ask, judged
from mtp_train.evaluation.statistics import Measurements, assemble
from mtp_train.evaluation.store import Store
from mtp_train.evaluation.suites import load_suite
from mtp_train.progress import shown_loading
from mtp_train.train.machine import device_name

FORMAT_VERSION = 1
"""Of a study's directory: its identity and its measurements."""


SERVED_CHECKPOINT = "the served checkpoint"
"""Label of its files among the inputs of a study with servers."""


class Study:
    """Arms to measure over a grid, opened and checked as far as this takes no weights in memory.

    Figures do not depend on the number of processes, each of which must make the study and measure; speeds do.

    Args:
        specs: The arms, in the order they are shown.
        out: Directory of the measurements. Those of an interrupted study in it are not measured again.
        prompts: Prompts that are given; None for the suite's.
        servers: Servers that are sent the suite's prompts before anything is decoded here.
        rule: Judges the second of two servers.

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
        rule: GateRule = DEFAULT_RULE,
    ) -> None:
        require_distinct(specs)
        self.arms = {spec: open_arm(spec) for spec in specs}
        self.grid, self.prompts, self.servers = grid, prompts, servers
        self.progress, self.processes, self.rule = progress, processes, rule
        if processes.index == 0:
            self.store = Store(out, self._identity())
            self.store.hash_inputs(_inputs(self.arms, [one for one in servers if one.evaluation is None]), progress)
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
        found = Measurements(served=ask(self.servers, self.grid, self.progress), rule=self.rule)
        by_trunk: dict[Any, list[ArmSpec]] = {}
        for spec in self.arms:
            # These share a loaded trunk.
            by_trunk.setdefault((spec.trunk, spec.adapter, spec.quantization), []).append(spec)
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
        tokenizer = load_tokenizer(model.checkpoint, adapter=model.adapter)
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
                found.served[server.name] = served = judged(found.served[server.name], trunk, eos_ids)
                for warning in served.document["warnings"]:
                    progress.console.print(f"{server.name}: {warning}", highlight=False)
        found.facts = {"dtype": trunk.dtype_name, "device": device_name(trunk.lm_head_VD.device)}
        arms = TrunkArms(
            trunk=trunk,
            name=first.trunk_name,
            drafting=drafting,
            head_names={one.name: one.trunk if one.head == OWN else str(one.head) for one in group},
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
        grid = self.grid
        return {
            "format_version": FORMAT_VERSION,
            "arms": [spec.identity() for spec in self.arms],
            "grid": json.loads(json.dumps(asdict(grid))),
            "prompts": None if prompts is None else _digest([(one.id, one.prompt_ids) for one in prompts]),
            # Before any template: some templates insert the date.
            "prompt_texts": None
            if prompts is not None
            else _digest(
                [(one.task, one.id, one.content) for one in load_suite(grid.suite, columns=grid.columns or {})]
            ),
            "server": [one.identity() for one in self.servers] or None,
            "device": local_device().type,
            **({} if self.rule == DEFAULT_RULE else {"gate": list(self.rule)}),
        }


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
    return [
        f"{PLAIN}@{label if labels.count(label) == 1 else spec.name}" for label, spec in zip(labels, specs, strict=True)
    ]


def _digest(texts: object) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def _inputs(arms: Mapping[ArmSpec, OpenModel], servers: Sequence[Server]) -> dict[str, InputFiles]:
    inputs: dict[str, InputFiles] = {}
    for spec, model in arms.items():
        inputs[f"{spec.name}: trunk"] = checkpoint_files(model.checkpoint)
        if model.adapter is not None:
            inputs[f"{spec.name}: adapter"] = directory_files(model.adapter)
        # Other drafters have no files besides the trunk's.
        head = model.head
        if head is not None and head not in (OWN, NGRAM):
            is_apart = is_head_directory(Path(head))
            inputs[f"{spec.name}: head"] = (
                directory_files(Path(head)) if is_apart else checkpoint_files(open_location(head))
            )
    if servers:
        place = servers[0].checkpoint
        of_gguf = InputFiles(Path(place), {Path(place).name: Path(place)})
        inputs[SERVED_CHECKPOINT] = of_gguf if is_gguf(place) else checkpoint_files(open_location(place))
    return inputs
