"""``mtp-train evaluate`` and ``compare``: measure acceptance over a grid of settings, of one arm or of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import RenderableType
from rich.progress import Progress

from mtp_inference import MAX_DEPTH
from mtp_inference.opening import OWN
from mtp_train.answers.endpoint import RESPONSE_TIMEOUT_SECONDS
from mtp_train.checkpoints.demo import PREFIX
from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.run_export import is_run
from mtp_train.checkpoints.writing import full_disk_is_named
from mtp_train.errors import DataError
from mtp_train.evaluation.arms import BITS_OPTIONS, ArmSpec, arm_of_run, named, open_arm, parse_arm
from mtp_train.evaluation.cells import StudyReport
from mtp_train.evaluation.grid import Grid
from mtp_train.evaluation.prompt_records import Rule
from mtp_train.evaluation.results import REPORT_FILE, ArmResult
from mtp_train.evaluation.run import run_study
from mtp_train.evaluation.served import Server
from mtp_train.report.study_table import study_summary
from mtp_train.report.study_write import WandbMode, log_study, write_study
from mtp_train.runs.display import quiet_progress, rich_to_html, rich_to_text
from mtp_train.runs.run_directory import RunDirectory, checkpoint_identity, environment_facts
from mtp_train.trunk.quantise import Quantization

AUTO = "auto"
DEPTHS = (1, 2, 3, 5)
RULES: tuple[Rule, ...] = ("greedy", "argmax", "sampled")
WANDB_PROJECT = "mtp-train"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EvaluationGrid:
    """The settings that :func:`evaluate` and :func:`compare` measure: every combination of the values below.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.EvaluationGrid(temperatures=[0.0, 0.6], contexts=[None, 8192], depths=[3])
    """

    suite: str = AUTO
    """``builtin``, ``demo``, ``mt-bench:LOC``, ``spec-bench:LOC``, ``speed-bench:LOC``, ``humaneval:LOC``,
    ``gsm8k:LOC``, or a file of prompts. ``auto``: ``demo`` for the demo's trunks, else ``builtin``."""
    tasks: Sequence[str] | None = None
    """Tasks of the suite; None for all."""
    prompts_per_task: int = 8
    temperatures: Sequence[float] = (0.0, 1.0)
    contexts: Sequence[int | None] = (None,)
    """Prompt lengths in tokens, reached by other text before the prompt; None leaves prompts as they are."""
    depths: Sequence[int] | None = None
    """Draft tokens per round, 1 to 7; None for 1, 2, 3 and 5 as far as the heads of all arms can draft."""
    rules: Sequence[Rule] = RULES
    """``greedy`` applies at temperature 0; above it, ``argmax`` drafts, or ``sampled`` drafts with rejection."""
    max_new_tokens: int = 128
    batch: int = 1
    """Prompts decoded together."""
    seed: int = 0

    def settled(self, arms: Sequence[ArmSpec], trunks: Sequence[str]) -> Grid:
        """Return the grid to measure: values in range and without repeats, suite and depths chosen for the arms.

        Args:
            arms: The arms, for the depths that all of them can draft.
            trunks: Their trunks, or the served trunk, for the suite.

        Raises:
            MtpError: A value is out of range, or the files of an arm are missing or damaged.
        """
        # The demo's trunks were trained on two kinds of text and can write nothing else.
        suite = "demo" if all(trunk.startswith(PREFIX) for trunk in trunks) else "builtin"
        grid = Grid(
            suite=suite if self.suite == AUTO else self.suite,
            tasks=None if self.tasks is None else _unique(self.tasks),
            prompts_per_task=self.prompts_per_task,
            temperatures=_unique(map(float, self.temperatures)),
            contexts=_unique(self.contexts),
            depths=_default_depths(arms) if self.depths is None else _unique(self.depths),
            rules=_unique(self.rules),
            max_new_tokens=self.max_new_tokens,
            batch=self.batch,
            seed=self.seed,
        )
        require_grid(grid)
        return grid


@dataclass(frozen=True)
class EvaluationResult:
    """Measurements of one or more arms, as :func:`evaluate` and :func:`compare` return them.

    Printed, and in a notebook, it shows the verdict, the arms, tau by task and the depths to serve.
    """

    out: Path
    """Directory with ``report.html``, ``report.json``, ``acceptance.csv``, ``comparisons.csv`` and ``figures/``."""
    report: StudyReport = field(repr=False)
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
        return study_summary(self.report)

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
    server = server_of(subject, endpoint, served_model, api_key_env, concurrency, request_timeout_seconds, served_only)
    arms = [] if served_only else packed_arms(subject, trunk_bits, head_bits)
    settled = (grid or EvaluationGrid()).settled(arms, [subject.trunk])
    return _measure(arms, settled, Path(out), progress, costs, wandb, server)


def compare(
    arms: Sequence[str | Path],
    out: str | Path,
    *,
    grid: EvaluationGrid | None = None,
    costs: bool = True,
    wandb: WandbMode = "off",
    progress: Progress | None = None,
) -> EvaluationResult:
    """Measure several arms on the same prompts and settings, and test which differences are real.

    Args:
        arms: For each arm ``[NAME=]TRUNK[+HEAD]`` or ``[NAME=]RUN``: a checkpoint with its own head, a trunk and what
            drafts (see ``head`` of :func:`evaluate`), or a run directory. ``@8bit`` or ``@4bit`` behind one packs it.
        out: A new directory, or the directory of the same comparison, which is then resumed.
        grid: The settings to measure; None for the defaults of :class:`EvaluationGrid`.
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
    specs = [parse_arm(str(arm)) for arm in arms]
    settled = (grid or EvaluationGrid()).settled(specs, [one.trunk for one in specs])
    return _measure(specs, settled, Path(out), progress, costs, wandb, None)


def _measure(
    specs: Sequence[ArmSpec],
    grid: Grid,
    out: Path,
    progress: Progress | None,
    costs: bool,
    wandb: WandbMode,
    server: Server | None,
) -> EvaluationResult:
    """Measure arms and a server, write the report and return it."""
    names = [one.name for one in specs] + ([] if server is None else [server.url])
    title = f"{'evaluation' if len(names) == 1 else 'comparison'} of {', '.join(names)}"
    progress = progress or quiet_progress()
    with full_disk_is_named(out, what="the report"), RunDirectory(out).held(progress.console):
        report = run_study(specs, grid, out, progress, title=title, costs=costs, server=server)
        if not (out / REPORT_FILE).is_file():
            identities = {one.name: checkpoint_identity(one.trunk, open_location(one.trunk)) for one in specs}
            write_study(report, out, {"arms": identities, **environment_facts()})
        log_study(report, out, WANDB_PROJECT, wandb)
    return EvaluationResult(out, report)


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
    return _unique(BITS_OPTIONS[name] for name in names)


def server_of(
    subject: ArmSpec,
    endpoint: str | None,
    served_model: str | None,
    api_key_env: str | None,
    concurrency: int,
    request_timeout_seconds: float,
    served_only: bool,
) -> Server | None:
    """Return the server to measure, None without an endpoint.

    Raises:
        DataError: A setting of a server is given without an endpoint, or a number is out of range.
    """
    if endpoint is None:
        for flag, value in (("served-model", served_model), ("api-key-env", api_key_env), ("served-only", served_only)):
            if value:
                raise DataError(f"--{flag}: given without --endpoint; expected a server. Add --endpoint URL.")
        return None
    if concurrency < 1:
        raise DataError(f"--concurrency: {concurrency}; expected 1 or more. Correct it.")
    if not 0 < request_timeout_seconds < math.inf:
        raise DataError(f"--request-timeout: {request_timeout_seconds:g}; expected seconds above 0. Correct it.")
    return Server(
        url=endpoint,
        checkpoint=subject.trunk,
        model=served_model,
        api_key_env=api_key_env,
        concurrency=concurrency,
        request_timeout_seconds=request_timeout_seconds,
    )


def _default_depths(specs: Sequence[ArmSpec]) -> tuple[int, ...]:
    """Return the usual depths that the heads of all arms can draft."""
    deepest = min((open_arm(spec).model.deepest for spec in specs), default=MAX_DEPTH)
    return tuple(depth for depth in DEPTHS if depth <= deepest)


def _unique(values: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


def require_grid(grid: Grid) -> None:
    """Check the numbers of a grid.

    Raises:
        DataError: A number is out of range, or no setting is left.
    """
    contexts = [one for one in grid.contexts if one is not None]
    checks: tuple[tuple[str, Sequence[float], float, float, str], ...] = (
        ("--depths", grid.depths, 1, MAX_DEPTH, f"1 to {MAX_DEPTH}"),
        ("--temperatures", grid.temperatures, 0.0, math.inf, "0 or more"),
        ("--contexts", contexts, 1, math.inf, "1 or more, or own"),
        ("--prompts-per-task", [grid.prompts_per_task], 1, math.inf, "1 or more"),
        ("--max-new-tokens", [grid.max_new_tokens], 2, math.inf, "2 or more, as the first token needs no round"),
        ("--batch", [grid.batch], 1, math.inf, "1 or more"),
    )
    for flag, values, low, high, expected in checks:
        for value in values:
            if not low <= value <= high:
                raise DataError(f"{flag}: {value:g}; expected {expected}. Correct it, or leave the flag out.")
    for rule in grid.rules:
        if rule not in RULES:
            raise DataError(f"--rules: {rule!r}; expected {', '.join(RULES)}. Correct it.")
    for temperature in grid.temperatures:
        if not grid.drafted(temperature, None):
            wanted = "greedy" if temperature == 0.0 else "argmax or sampled"
            raise DataError(
                f"--rules: {' '.join(grid.rules)}, none of them for temperature {temperature:g}; expected {wanted}. "
                "Add it, or leave the temperature out."
            )
