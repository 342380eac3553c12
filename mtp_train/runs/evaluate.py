"""``mtp-train evaluate`` and ``compare``: measure acceptance over a grid of settings, of one arm or of several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.progress import Progress

from mtp_inference.opening import OWN
from mtp_train.acceptance.names import SERVED
from mtp_train.answers.endpoint import RESPONSE_TIMEOUT_SECONDS
from mtp_train.checkpoints.identity import InputFiles, hash_inputs
from mtp_train.checkpoints.locations import is_run, open_location
from mtp_train.checkpoints.writing import full_disk_is_named
from mtp_train.data.sources import local_files
from mtp_train.errors import DataError
from mtp_train.evaluation.arms import BITS_OPTIONS, ArmSpec, arm_of_run, named, parse_arm
from mtp_train.evaluation.grid import EvaluationGrid
from mtp_train.evaluation.results import REPORT_FILE, ArmResult, Report
from mtp_train.evaluation.run import run_study
from mtp_train.evaluation.served import Server, served_checkpoint
from mtp_train.evaluation.suites import BUILTIN, BUILTIN_FILE, suite_location
from mtp_train.report.summary import summary
from mtp_train.report.write import log_report, write_report
from mtp_train.runs.display import quiet_progress, rich_to_html, rich_to_text
from mtp_train.runs.run_directory import RunDirectory, checkpoint_identity, environment_facts
from mtp_train.train.log import Tracking, WandbMode
from mtp_train.trunk.quantise import Quantization


@dataclass(frozen=True)
class EvaluationResult:
    """Measurements of one or more arms, as :func:`evaluate` and :func:`compare` return them.

    Printed, and in a notebook, it shows the verdict, the arms, tau by task and the depths to serve.
    """

    out: Path
    """Directory with ``report.html``, ``report.json``, ``acceptance.csv``, ``comparisons.csv`` and ``figures/``."""
    report: Report = field(repr=False)
    """All figures: ``arms``, ``cells``, ``comparisons``, ``costs`` and more."""

    @property
    def arms(self) -> Mapping[str, ArmResult]:
        """Figures of each arm at the headline setting, all tasks together; ``none`` is plain decoding."""
        return self.report.arms

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as ``--json`` prints them: the content of ``report.json``."""
        return self.report.to_json()

    def __str__(self) -> str:
        return rich_to_text(self.__rich__())

    def __rich__(self) -> RenderableType:
        return summary(self.report)

    def _repr_html_(self) -> str:
        return rich_to_html(self.__rich__())


def evaluate(
    checkpoint: str | Path,
    out: str | Path,
    *,
    head: str | Path | None = None,
    adapter: str | Path | None = None,
    trunk_bits: Sequence[str] | None = None,
    head_bits: Sequence[str] = ("none",),
    grid: EvaluationGrid | None = None,
    endpoint: str | None = None,
    served_model: str | None = None,
    api_key_env: str | None = None,
    concurrency: int = 1,
    request_timeout_seconds: float = RESPONSE_TIMEOUT_SECONDS,
    served_only: bool = False,
    costs: bool = True,
    wandb: WandbMode = "off",
    progress: Progress | None = None,
) -> EvaluationResult:
    """Measure acceptance and speed of a checkpoint by task, temperature, context, draft depth and verify rule.

    Args:
        checkpoint: A checkpoint, or a run directory: its trunk with its trained head.
        out: A new directory, or the directory of the same evaluation, which is then resumed.
        head: What drafts: a head directory, a checkpoint to take the head from, a draft model, ``"ngram"`` or
            ``"model:CKPT"``. None for the checkpoint's own head.
        adapter: A peft adapter to apply to the trunk without merging.
        trunk_bits: ``"none"``, ``"8bit"``, ``"4bit"``: an arm for each. None: as in a run's recipe, else unquantised.
        head_bits: The same for the head.
        grid: The settings to measure; None for the defaults of :class:`EvaluationGrid`.
        endpoint: URL of a server of the same model, which is measured as one more arm: ``http://host:port/v1``.
        served_model: The model's name at the server; None where it serves only one.
        api_key_env: Environment variable with the server's key.
        concurrency: Requests to the server at a time.
        request_timeout_seconds: Longest wait for the server to send a part of a response. A server that finishes no
            request for ten minutes is given up, whatever this is.
        served_only: Measure the server alone and load no weights.
        costs: Also measure memory and prefill.
        wandb: Log the report to Weights & Biases: ``"off"``, ``"offline"`` or ``"online"``.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        MtpError: A setting is out of range, an arm cannot be measured, or ``out`` holds something else.

    Example:
        >>> import mtp_train as mtp
        >>> grid = mtp.EvaluationGrid(temperatures=[0.0], depths=[1, 3], prompts_per_task=4)
        >>> tau = mtp.evaluate("runs/a", "eval/a", grid=grid).arms["a"].tau
    """
    subject = subject_arm(str(checkpoint), head, adapter)
    server = server_of(
        subject,
        endpoint,
        served_only,
        model=served_model,
        api_key_env=api_key_env,
        concurrency=concurrency,
        request_timeout_seconds=request_timeout_seconds,
    )
    arms = [] if served_only else packed_arms(subject, trunk_bits, head_bits)
    settled = (grid or EvaluationGrid()).settled(arms, [subject.trunk])
    servers = [] if server is None else [server]
    return _measure(arms, [named(subject)], settled, Path(out), progress, costs, wandb, servers)


def compare(
    arms: Sequence[str | Path],
    out: str | Path,
    *,
    grid: EvaluationGrid | None = None,
    tokenizer: str | Path | None = None,
    costs: bool = True,
    wandb: WandbMode = "off",
    progress: Progress | None = None,
) -> EvaluationResult:
    """Measure several arms on the same prompts and settings, and test which differences are real.

    Args:
        arms: For each arm ``[NAME=]TRUNK[+HEAD]`` or ``[NAME=]RUN``: a checkpoint with its own head, a trunk and what
            drafts (see ``head`` of :func:`evaluate`), or a run directory. ``@8bit`` or ``@4bit`` behind one packs it.
            Or ``NAME=http://host:port`` for every arm: servers of one trunk, which have to run at the same time. Of
            two, the gate's rule judges the second against the first (``report.gate``).
        out: A new directory, or the directory of the same comparison, which is then resumed.
        grid: The settings to measure; None for the defaults of :class:`EvaluationGrid`.
        tokenizer: The trunk of servers, whose tokenizer writes the prompts; None for the files of the first one, where
            they are on this machine.
        costs: Also measure memory and prefill.
        wandb: Log the report to Weights & Biases: ``"off"``, ``"offline"`` or ``"online"``.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        MtpError: A setting is out of range, an arm cannot be measured, or ``out`` holds something else.

    Example:
        >>> import mtp_train as mtp
        >>> found = mtp.compare(["graft=demo:finetune+demo:base", "new=runs/a"], "eval/both")
        >>> [(row.first, row.second, row.delta_tau, row.differs) for row in found.report.comparisons]
    """
    servers = served_arms(list(map(str, arms)), None if tokenizer is None else str(tokenizer))
    specs = [] if servers else [parse_arm(str(arm)) for arm in arms]
    settled = (grid or EvaluationGrid()).settled(
        specs, [one.checkpoint for one in servers] or [one.trunk for one in specs]
    )
    return _measure(specs, specs, settled, Path(out), progress, costs, wandb, servers)


def served_arms(arms: Sequence[str], tokenizer: str | None) -> list[Server]:
    """Return the servers that arms name; none where the arms are checkpoints.

    Raises:
        DataError: Only some arms are servers, or the tokenizer's files are not known.
    """
    if tokenizer is None and not any("://" in arm for arm in arms):
        return []
    urls = dict(arm.split("=", 1) for arm in arms if "://" in arm.partition("=")[2])
    if len(urls) != len(arms):
        raise DataError(
            f"arms: {', '.join(arms)}; expected NAME=http://host:port for each where one is a server, under different "
            "names. To compare a checkpoint with its server, use mtp-train evaluate CKPT --endpoint URL."
        )
    make = partial(Server, request_timeout_seconds=RESPONSE_TIMEOUT_SECONDS)
    servers = [make(name=name, url=url, checkpoint=tokenizer or "") for name, url in urls.items()]
    place = tokenizer or served_checkpoint(servers[0])
    return [replace(one, checkpoint=place) for one in servers]


def _measure(
    specs: Sequence[ArmSpec],
    subjects: Sequence[ArmSpec],
    grid: EvaluationGrid,
    out: Path,
    progress: Progress | None,
    costs: bool,
    wandb: WandbMode,
    servers: Sequence[Server],
) -> EvaluationResult:
    """Measure arms and servers, write the report and return it. ``subjects`` are the arms as the user named them."""
    names = [one.name for one in specs] + [one.url if one.name == SERVED else one.name for one in servers]
    title = f"{'evaluation' if len(names) == 1 else 'comparison'} of {', '.join(names)}"
    progress, tracking = progress or quiet_progress(), Tracking(wandb)
    tracking.require("--")
    grid = replace(grid, chat_template_kwargs=_variables(subjects, grid))
    with full_disk_is_named(out, what="the report"), RunDirectory(out).held(progress.console):
        if told := _trained_on(subjects, grid.suite, progress):
            progress.console.print(f"Is the text new to the head? {told}", highlight=False)
        report = run_study(specs, grid, out, progress, title=title, costs=costs, servers=servers)
        if told:
            report = replace(report, settings={**report.settings, "trained_on": told})
        if not (out / REPORT_FILE).is_file():
            identities = {one.name: checkpoint_identity(one.trunk, open_location(one.trunk)) for one in specs}
            write_report(report, out, {"arms": identities, **environment_facts()})
        log_report(report, out, tracking)
    return EvaluationResult(out, report)


def _runs_of(spec: ArmSpec) -> list[RunDirectory]:
    """Return the runs that trained an arm's head: of a run's head or export, or of the run itself."""
    places = [Path(one) for one in (spec.trunk, spec.head) if one is not None]
    return [RunDirectory(one) for place in places for one in (place, place.parent) if is_run(one)]


def _variables(specs: Sequence[ArmSpec], grid: EvaluationGrid) -> Mapping[str, Any]:
    """Return the grid's variables for the chat template, or where it has none those of the arms' recipes.

    Raises:
        DataError: The recipes have several.
    """
    if grid.chat_template_kwargs is not None:
        return grid.chat_template_kwargs
    recipes = {run.path: run.recipe for spec in specs for run in _runs_of(spec)}
    given = {path: recipe.data.chat_template_kwargs for path, recipe in recipes.items() if recipe is not None}
    first: Mapping[str, Any] = next(iter(given.values()), {})
    if other := next((path for path, variables in given.items() if variables != first), None):
        raise DataError(
            f"{next(iter(given))} and {other}: other data.chat_template_kwargs; expected one form of the prompts for "
            "all arms. Write it as --chat-template-kwargs NAME=VALUE."
        )
    return first


def _trained_on(specs: Sequence[ArmSpec], suite: str, progress: Progress) -> str:
    """Return sentences on arms whose heads were trained on a file of the suite, by its content; empty if none was."""
    sources = [
        (spec.name, f"{label} of {run.path}", contents.values())
        for spec in specs
        for run in _runs_of(spec)
        for label, contents in run.contents.items()
        if label.startswith("data.sources.")
    ]
    place = str(BUILTIN_FILE) if suite == BUILTIN else suite_location(suite)
    files = local_files(place, suite) if place is not None and sources else None
    if not files:
        return ""
    inputs = {suite: InputFiles(Path(place or ""), {str(file): file for file in files})}
    digests = set(hash_inputs(inputs, {}, progress)[suite].contents.values())
    told = [
        f"arm {name} was trained on it ({source}), but for held-out groups"
        for name, source, contents in sources
        if not digests.isdisjoint(contents)
    ]
    if not told:
        return ""
    return f"No: {'; '.join(told)}. Tau is lower on new prompts: the report in the run's directory has held-out ones."


def subject_arm(checkpoint: str, head: str | Path | None, adapter: str | Path | None) -> ArmSpec:
    """Return the arm of ``evaluate``. The arm of a run has the run's name and its recipe's quantisation.

    Raises:
        MtpError: A head or an adapter is given for a run, or the run has no head so far.
    """
    if not is_run(Path(checkpoint)):
        return ArmSpec("", checkpoint, OWN if head is None else str(head), None if adapter is None else str(adapter))
    for flag, value in (("--head", head), ("--adapter", adapter)):
        if value is not None:
            raise DataError(
                f"{flag}: given with {checkpoint}, a run, which has its own; expected a checkpoint. Leave {flag} out, "
                "or name the run's trunk."
            )
    return arm_of_run(Path(checkpoint))


def packed_arms(subject: ArmSpec, trunk_bits: Sequence[str] | None, head_bits: Sequence[str]) -> list[ArmSpec]:
    """Return an arm for each way to pack trunk and head."""
    own = (subject.quantization, None)
    trunks = own[:1] if trunk_bits is None else _quantizations("--trunk-bits", trunk_bits)
    packings = [(trunk, head) for trunk in trunks for head in _quantizations("--head-bits", head_bits)]
    return [
        named(replace(subject, name=subject.name if one == own else "", quantization=one[0], head_quantization=one[1]))
        for one in packings
    ]


def _quantizations(flag: str, names: Sequence[str]) -> tuple[Quantization | None, ...]:
    for name in names:
        if name not in BITS_OPTIONS:
            raise DataError(f"{flag}: {name!r}; expected {', '.join(BITS_OPTIONS)}. Correct it.")
    return tuple(dict.fromkeys(BITS_OPTIONS[name] for name in names))


def server_of(subject: ArmSpec, endpoint: str | None, served_only: bool, **settings: Any) -> Server | None:
    """Return the server to measure, with the settings as its fields; None without an endpoint.

    Raises:
        DataError: A setting of a server is given without an endpoint, or a number is out of range.
    """
    if endpoint is None:
        given = {"served-model": settings["model"], "api-key-env": settings["api_key_env"], "served-only": served_only}
        for flag, value in given.items():
            if value:
                raise DataError(f"--{flag}: given without --endpoint; expected a server. Add --endpoint URL.")
        return None
    concurrency, seconds = settings["concurrency"], settings["request_timeout_seconds"]
    if concurrency < 1:
        raise DataError(f"--concurrency: {concurrency}; expected 1 or more. Correct it.")
    if not 0 < seconds < math.inf:
        raise DataError(f"--request-timeout: {seconds:g}; expected seconds above 0. Correct it.")
    return Server(url=endpoint, checkpoint=subject.trunk, **settings)
