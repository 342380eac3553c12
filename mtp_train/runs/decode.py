"""``mtp-train generate``, ``evaluate`` and ``compare``: decode with the built-in decoder, and measure acceptance.

``evaluate`` measures one arm over a grid of settings, ``compare`` several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.progress import Progress

from mtp_inference import GenerationResult, Request, Sampling, SpeculativeDecoder
from mtp_inference.opening import OWN, open_model, prompt_tokens, refuse_images
from mtp_inference.requests import MtpMode
from mtp_inference.sampling.chooser import DraftSampling
from mtp_train.acceptance.gate import DEFAULT_RULE, GateRule
from mtp_train.acceptance.names import SERVED
from mtp_train.checkpoints.files import JsonObject, read_json
from mtp_train.checkpoints.identity import InputFiles, hash_inputs
from mtp_train.checkpoints.locations import is_run, open_location
from mtp_train.checkpoints.tokenizer import chat_prompt_tokens, load_tokenizer, require_variables
from mtp_train.data.sources import local_files
from mtp_train.errors import DataError
from mtp_train.evaluation.arms import ArmSpec, arm_of_run, local_device, named, parse_arm, require_sound
from mtp_train.evaluation.grid import EvaluationGrid
from mtp_train.evaluation.results import REPORT_FILE, ArmResult, Report, load_report
from mtp_train.evaluation.run import Study, study_report
from mtp_train.evaluation.served import Server, served_checkpoint
from mtp_train.evaluation.store import STUDY_FILE
from mtp_train.evaluation.suites import suite_location
from mtp_train.report.summary import summary
from mtp_train.report.write import log_report, write_report
from mtp_train.runs.display import Shown, as_text, quiet_progress
from mtp_train.runs.pipeline import record_verdict
from mtp_train.runs.run_directory import RunDirectory, checkpoint_identity, environment_facts
from mtp_train.train.log import Tracking, WandbMode
from mtp_train.train.machine import use_threads

_KWARGS = "--chat-template-kwargs"
_DOCUMENT = (
    *("text", "token_ids", "finish_reason", "num_drafts", "num_draft_tokens", "num_accepted_tokens"),
    "accepted_per_pos",
)
"""What of a result ``--json`` prints."""


@dataclass(frozen=True)
class GenerateResult(Shown):
    """New text and counters of each prompt, as :func:`generate` returns them."""

    requests: tuple[GenerationResult, ...]
    """One result per prompt: ``text``, ``token_ids``, ``num_drafts`` (rounds), ``accepted_per_pos``, ``tau``."""
    settings: JsonObject
    """Checkpoint, head, depth, sampling, dtype, device and the like."""

    def to_json(self) -> JsonObject:
        """Return plain JSON values, as ``mtp-train generate --json`` prints them; counters have vLLM's names."""
        requests = [{name: getattr(one, name) for name in _DOCUMENT} for one in self.requests]
        return {"requests": requests, "settings": self.settings}

    @property
    def summary(self) -> str:
        """Tau and speed in a line. The prompts are decoded together, so the longest one's time counts."""
        tokens = sum(len(one.token_ids) for one in self.requests)
        rounds = sum(one.rounds for one in self.requests)
        tau = 1.0 + sum(one.num_accepted_tokens for one in self.requests) / max(1, rounds)
        seconds = max(one.seconds_prefill + one.seconds_decode for one in self.requests)
        return f"{tokens} tokens in {rounds} rounds: tau {tau:.2f}, {tokens / max(seconds, 1e-9):.1f} tokens/s"

    def __str__(self) -> str:
        if len(self.requests) == 1:
            return self.requests[0].text
        return "\n".join(f"--- prompt {number}\n{one.text}" for number, one in enumerate(self.requests, start=1))


OnText = Callable[[str, bool], None]
"""Called with a piece of text, and whether it is of an accepted draft."""


def generate(
    checkpoint: str | Path,
    prompts: str | Sequence[str],
    *,
    head: str | Path | None = None,
    adapter: str | Path | None = None,
    chat: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_new_tokens: int = 128,
    depth: int = 3,
    mtp: MtpMode = "on",
    sampling: Sampling | None = None,
    draft_sampling: DraftSampling = "sampled",
    on_text: OnText | None = None,
    progress: Progress | None = None,
) -> GenerateResult:
    """Decode prompts together with a checkpoint's speculative decoder. The text equals plain decoding.

    Args:
        checkpoint: A directory, a hub id or ``demo:NAME``. It is loaded on every call; for many calls, use
            ``mtp_inference.SpeculativeDecoder``.
        prompts: One prompt or several, raw text.
        head: What drafts, as for :func:`evaluate`, or an external drafter. None for the checkpoint's own head.
        adapter: A peft adapter to apply to the trunk without merging.
        chat: Put each prompt through the chat template as a user's message.
        chat_template_kwargs: With ``chat``, variables for the template: ``{"enable_thinking": False}``.
        max_new_tokens: Limit per prompt, at least 1.
        depth: Draft tokens per round, 0 to 7 (a block drafter's: one less than its block); 0 is plain decoding.
        mtp: ``"on"`` drafts ``depth`` tokens every round, ``"off"`` none, ``"auto"`` as many as pay, up to ``depth``.
        sampling: Temperature, top-k, top-p, min-p and seed; None is greedy. Prompt i has seed + i.
        draft_sampling: ``"argmax"`` or ``"sampled"`` drafts above temperature 0; sampled ones are accepted more often.
        on_text: Called with the text of a single prompt piece by piece, as it becomes certain, and whether the piece is
            of an accepted draft; not for several prompts.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        MtpError: A number is out of range.
        DataError: A prompt has no token or contains an image.
        CheckpointError: A weight is missing or not finite, or the checkpoint has no head to draft with.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.generate("demo:base", "import os", max_new_tokens=32).requests[0].text
    """
    request = _asked(max_new_tokens, sampling, mtp, depth)
    opened = _Opened(checkpoint, head, adapter, chat, chat_template_kwargs, draft_sampling, request, progress)
    texts = [prompts] if isinstance(prompts, str) else prompts
    contents = [[{"role": "user", "content": text}] if chat else text for text in texts]
    return opened.decode([opened.tokens(one, f"--prompt {place}") for place, one in enumerate(contents, 1)], on_text)


def converse(
    checkpoint: str | Path,
    turns: Iterable[str],
    *,
    head: str | Path | None = None,
    adapter: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_new_tokens: int = 128,
    depth: int = 3,
    mtp: MtpMode = "on",
    sampling: Sampling | None = None,
    draft_sampling: DraftSampling = "sampled",
    on_text: OnText | None = None,
    progress: Progress | None = None,
) -> Iterator[GenerateResult]:
    """Yield the answer to each of a user's turns in one conversation; the checkpoint is loaded once.

    Args:
        turns: The user's messages; the next one is taken after an answer. The arguments beside it are those of
            :func:`generate`.
    """
    request = _asked(max_new_tokens, sampling, mtp, depth)
    opened = _Opened(checkpoint, head, adapter, True, chat_template_kwargs, draft_sampling, request, progress)
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(turns, start=1):
        messages.append({"role": "user", "content": turn})
        found = opened.decode([opened.tokens(messages, f"turn {number}")], on_text)
        messages.append({"role": "assistant", "content": found.requests[0].text})
        yield found


def _asked(max_new_tokens: int, sampling: Sampling | None, mtp: MtpMode, depth: int) -> Request:
    """Return the settings of every request, before files are read: numbers that are out of range are refused."""
    return Request(
        prompt_ids=(0,),
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(),
        mtp=mtp,
        depth=0 if mtp == "off" else depth,
    )


class _Opened:
    """A checkpoint and its tokenizer, and the settings of every request, which the result repeats."""

    def __init__(
        self,
        checkpoint: str | Path,
        head: str | Path | None,
        adapter: str | Path | None,
        chat: bool,
        variables: Mapping[str, Any] | None,
        draft_sampling: DraftSampling,
        asked: Request,
        progress: Progress | None,
    ) -> None:
        self.asked = asked
        self.variables = dict(variables or {})
        self.given: JsonObject = {
            "checkpoint": str(checkpoint),
            "head": head and str(head),
            "adapter": adapter and str(adapter),
            "chat": chat,
            "chat_template_kwargs": self.variables,
            "draft_sampling": draft_sampling,
        }
        if self.variables and not chat:
            raise DataError(f"{_KWARGS}: given without --chat; expected a chat, which the template writes. Add --chat.")
        # Depth 0 needs no head.
        own = OWN if head is None and asked.depth else self.given["head"]
        self.model = open_model(self.given["checkpoint"], own, adapter=self.given["adapter"])
        require_sound([self.model], progress or quiet_progress())
        self.device = local_device()
        if self.device.type == "cpu":
            use_threads(self.model.checkpoint.text_config)
        self.tokenizer = load_tokenizer(self.model.checkpoint, adapter=self.model.adapter)
        require_variables(self.tokenizer, self.variables, _KWARGS)

    @cached_property
    def decoder(self) -> SpeculativeDecoder:
        """Loaded after the first prompts were read, which may be refused."""
        return SpeculativeDecoder.from_open_model(
            self.model,
            self.tokenizer,
            depth=self.asked.depth or 0,
            device=self.device,
            draft_sampling=self.given["draft_sampling"],
        )

    def tokens(self, content: str | Sequence[Mapping[str, str]], where: str) -> list[int]:
        """Return the token ids of a raw text, or of a chat's messages."""
        if isinstance(content, str):
            found = prompt_tokens(self.tokenizer, content, chat=False, where=where)
        else:
            found = chat_prompt_tokens(self.tokenizer, content, where, self.variables)
        refuse_images(found, self.model.image_ids, where)
        return found

    def decode(self, prompts: Sequence[Sequence[int]], on_text: OnText | None) -> GenerateResult:
        """Decode prompts together; the pieces of a single one go to ``on_text``."""
        decoder = self.decoder
        asked = self.asked
        show = on_text if len(prompts) == 1 else None
        results: dict[int, GenerationResult] = {}
        for chunk in decoder.stream(prompts, asked.max_new_tokens, sampling=asked.sampling, mtp=asked.mtp):
            if show is not None:
                for piece, is_draft in chunk.pieces:
                    show(piece, is_draft)
            if chunk.result is not None:
                results[chunk.index] = chunk.result
        settings = {
            **self.given,
            "max_new_tokens": asked.max_new_tokens,
            "depth": asked.depth,
            "mtp": asked.mtp,
            **asdict(asked.sampling),
            "dtype": decoder.trunk.dtype_name,
            "device": str(self.device),
            "captured_rounds": decoder.captured_rounds,
        }
        return GenerateResult(tuple(results[index] for index in sorted(results)), settings)


@dataclass(frozen=True)
class EvaluationResult(Shown):
    """Measurements of one or more arms, as :func:`evaluate` and :func:`compare` return them.

    Printed, and in a notebook, it shows the verdict, the arms, tau by task and the depths to serve.
    """

    out: Path
    """Directory with ``report.html``, ``report.json``, ``acceptance.csv``, ``comparisons.csv`` and ``figures/``."""
    report: Report = field(repr=False)
    """All figures: ``arms``, ``cells``, ``comparisons`` and more."""

    @property
    def arms(self) -> Mapping[str, ArmResult]:
        """Figures of each arm at the headline setting, all tasks together; ``none`` is plain decoding."""
        return self.report.arms

    def to_json(self) -> JsonObject:
        """Return plain JSON values, as ``--json`` prints them: the content of ``report.json``."""
        return self.report.to_json()

    def __rich__(self) -> RenderableType:
        return summary(self.report)

    def __str__(self) -> str:
        return as_text(self.__rich__()).rstrip()


def evaluate(
    checkpoint: str | Path,
    out: str | Path,
    *,
    head: str | Path | None = None,
    adapter: str | Path | None = None,
    grid: EvaluationGrid | None = None,
    endpoint: str | None = None,
    served_model: str | None = None,
    api_key_env: str | None = None,
    concurrency: int = 1,
    served_only: bool = False,
    wandb: WandbMode = "off",
    progress: Progress | None = None,
) -> EvaluationResult:
    """Measure acceptance and speed of a checkpoint by task, temperature, context, draft depth and verify rule.

    Args:
        checkpoint: A checkpoint, or a run directory: its trunk with its trained head.
        out: A new directory, or the directory of the same evaluation, which is then resumed.
        head: What drafts: a head directory, a checkpoint to take the head from, a draft model or ``"ngram"``.
            None for the checkpoint's own head.
        adapter: A peft adapter to apply to the trunk without merging.
        grid: The settings to measure; None for the defaults of :class:`EvaluationGrid`.
        endpoint: URL of a server of the same model, which is measured as one more arm: ``http://host:port/v1``.
        served_model: The model's name at the server; None where it serves only one.
        api_key_env: Environment variable with the server's key.
        concurrency: Requests to the server at a time.
        served_only: Measure the server alone and load no weights.
        wandb: Log the report to Weights & Biases: ``"off"``, ``"offline"`` or ``"online"``.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        MtpError: A setting is out of range, an arm cannot be measured, or ``out`` holds something else.

    Example:
        >>> import mtp_train as mtp
        >>> grid = mtp.EvaluationGrid(temperatures=[0.0], depths=[1, 3], prompts_per_task=4)
        >>> tau = mtp.evaluate("runs/a", "eval/a", grid=grid).arms["a"].tau
    """
    subject = named(subject_arm(str(checkpoint), head, adapter))
    servers = []
    if endpoint is None:
        given = {"served-model": served_model, "api-key-env": api_key_env, "served-only": served_only}
        _refuse_flags(given, "without --endpoint; expected a server. Add --endpoint URL.")
    else:
        servers = [
            Server(
                url=endpoint,
                checkpoint=subject.trunk,
                model=served_model,
                api_key_env=api_key_env,
                concurrency=concurrency,
            )
        ]
    return _measure([] if served_only else [subject], [subject], grid, Path(out), progress, wandb, servers)


def compare(
    arms: Sequence[str | Path],
    out: str | Path,
    *,
    grid: EvaluationGrid | None = None,
    tokenizer: str | Path | None = None,
    api_key_env: str | None = None,
    concurrency: int | Sequence[int] = 1,
    judges: str | Path | None = None,
    wandb: WandbMode = "off",
    progress: Progress | None = None,
) -> EvaluationResult:
    """Measure several arms on the same prompts and settings, and test which differences are real.

    Args:
        arms: For each arm ``[NAME=]TRUNK[+HEAD]`` or ``[NAME=]RUN``: a checkpoint with its own head, a trunk and what
            drafts (see ``head`` of :func:`evaluate`), or a run directory. ``@8bit`` or ``@4bit`` behind one packs it.
            Or ``NAME=http://host:port``: servers of one trunk that run at the same time, or in place of an address the
            directory of a finished evaluation of a server, with the same settings. They take turns, and have a speedup
            over the first one without drafts, if there is one. Of two, the gate's rule judges the second against the
            first (``report.gate``).
        out: A new directory, or the directory of the same comparison, which is then resumed.
        grid: The settings to measure; None for the defaults of :class:`EvaluationGrid`.
        tokenizer: The trunk of servers, whose tokenizer writes the prompts; None for that of the first other arm, else
            for the files of the first server, where they are on this machine.
        api_key_env: Environment variable with the key of the servers.
        concurrency: Requests to each server at a time. Several numbers measure it at each, as arms ``NAME@N``; a
            verdict is of the first.
        judges: A run without a gate whose baseline and export two evaluations measured, in this order. The verdict, by
            the ``gate`` of its recipe, is recorded in its outcome, its report and the card of its export.
        wandb: Log the report to Weights & Biases: ``"off"``, ``"offline"`` or ``"online"``.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        MtpError: A setting is out of range, an arm cannot be measured, or ``out`` holds something else.

    Example:
        >>> import mtp_train as mtp
        >>> found = mtp.compare(["graft=demo:finetune+demo:base", "new=runs/a"], "eval/both")
        >>> [(row.first, row.second, row.delta_tau, row.differs) for row in found.report.comparisons]
    """
    loads = [concurrency] if isinstance(concurrency, int) else [*concurrency]
    elsewhere = [one for one in map(str, arms) if _is_served(one.partition("=")[2])]
    specs = [parse_arm(one) for one in map(str, arms) if one not in elsewhere]
    servers = served_arms(elsewhere, None if tokenizer is None else str(tokenizer), api_key_env, loads, specs)
    subjects = specs if judges is None else [subject_arm(str(judges), None, None)]
    recipe = None if judges is None else RunDirectory(Path(judges)).recipe
    rule = DEFAULT_RULE if recipe is None else GateRule(recipe.gate.confidence, recipe.gate.break_even_tau)
    found = _measure(specs, subjects, grid, Path(out), progress, wandb, servers, rule)
    if judges is None:
        return found
    evaluation = servers[-1].evaluation if servers else None
    return replace(found, report=record_verdict(Path(judges), found.report, Path(out), evaluation))


def served_arms(
    arms: Sequence[str],
    tokenizer: str | None,
    api_key_env: str | None,
    loads: Sequence[int],
    specs: Sequence[ArmSpec],
) -> list[Server]:
    """Return the servers that arms name, at each number of requests, beside the arms that are decoded here."""
    urls = dict(one.split("=", 1) for one in arms)
    nameless = [one.trunk for one in specs if "://" in one.trunk]
    unused = not arms and (tokenizer, api_key_env, [*loads]) != (None, None, [1])
    if nameless or unused or len(urls) != len(arms) or not all(map(_is_measured, urls.values())):
        raise DataError(
            f"arms: {', '.join([*arms, *nameless]) or 'no servers'}; expected NAME=http://host:port for a server, or "
            "NAME=DIR of a finished evaluation of one, under different names; --tokenizer, --api-key-env and "
            "--concurrency are for servers. Correct it."
        )
    place = tokenizer or (specs[0].trunk if specs else "")
    servers = [
        Server(
            name=name if len(loads) == 1 else f"{name}@{load}",
            url=url,
            checkpoint=place,
            api_key_env=api_key_env,
            concurrency=load,
        )
        for load in loads
        for name, url in urls.items()
    ]
    if place or not servers:
        return servers
    place = served_checkpoint(servers[0])
    return [replace(one, checkpoint=place) for one in servers]


def _is_served(place: str) -> bool:
    """Return whether an arm is a server: an address, or the directory of an evaluation."""
    return "://" in place or (Path(place) / STUDY_FILE).is_file()


def _is_measured(place: str) -> bool:
    """Return whether the directory of an evaluation is one of a server that is finished; True for an address."""
    study = Path(place) / STUDY_FILE
    report = Path(place) / REPORT_FILE
    return "://" in place or (report.is_file() and bool(read_json(study)["server"]))


def _measure(
    specs: Sequence[ArmSpec],
    subjects: Sequence[ArmSpec],
    grid: EvaluationGrid | None,
    out: Path,
    progress: Progress | None,
    wandb: WandbMode,
    servers: Sequence[Server],
    rule: GateRule = DEFAULT_RULE,
) -> EvaluationResult:
    """Measure arms and servers, write the report and return it. ``subjects`` are the arms as the user named them."""
    names = [one.name for one in specs] + [one.url if one.name == SERVED else one.name for one in servers]
    title = f"{'evaluation' if len(names) == 1 else 'comparison'} of {', '.join(names)}"
    progress = progress or quiet_progress()
    tracking = Tracking(wandb)
    trunks = [one.checkpoint for one in servers] or [one.trunk for one in subjects]
    grid = (grid or EvaluationGrid()).settled(specs, trunks)
    tracking.require("--")
    grid = replace(grid, chat_template_kwargs=_variables(subjects, grid))
    with RunDirectory(out).held(progress.console, "the report"):
        if told := _trained_on(subjects, grid.suite, progress):
            progress.console.print(f"Is the text new to the head? {told}")
        study = Study(specs, grid, out, progress, servers=servers, rule=rule)
        found = None if study.store.is_finished else study.measure()
        report = load_report(out / REPORT_FILE) if found is None else study_report(found, grid, title)
        if told:
            report = replace(report, settings={**report.settings, "trained_on": told})
        if found is not None:
            # With servers alone, nothing has been stored so far.
            study.store.claim()
            for served in found.served.values():
                for setting, records in served.arm.decoded.items():
                    study.store.add(served.arm.name, setting, records)
            identities = {one.name: checkpoint_identity(one.trunk, open_location(one.trunk)) for one in specs}
            write_report(report, out, {"arms": identities, **environment_facts()})
        log_report(report, out, tracking)
    return EvaluationResult(out, report)


def _runs_of(spec: ArmSpec) -> list[RunDirectory]:
    """Return the runs that trained an arm's head: of a run's head or export, or of the run itself."""
    places = [Path(one) for one in (spec.trunk, spec.head) if one is not None]
    return [RunDirectory(one) for place in places for one in (place, place.parent) if is_run(one)]


def _variables(specs: Sequence[ArmSpec], grid: EvaluationGrid) -> Mapping[str, Any]:
    """Return the grid's variables for the chat template, or where it has none those of the arms' recipes."""
    if grid.chat_template_kwargs is not None:
        return grid.chat_template_kwargs
    given = {
        run.path: recipe.data.chat_template_kwargs
        for spec in specs
        for run in _runs_of(spec)
        if (recipe := run.recipe) is not None
    }
    first = next(iter(given.values()), {})
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
    place = suite_location(suite)
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
    """Return the arm of ``evaluate``. The arm of a run has the run's name and its recipe's quantisation."""
    if not is_run(Path(checkpoint)):
        return ArmSpec("", checkpoint, str(head or OWN), None if adapter is None else str(adapter))
    told = f"with {checkpoint}, a run, which has its own; expected a checkpoint. Leave it out, or name the run's trunk."
    _refuse_flags({"head": head, "adapter": adapter}, told)
    return arm_of_run(Path(checkpoint))


def _refuse_flags(given: Mapping[str, object], told: str) -> None:
    for flag, value in given.items():
        if value:
            raise DataError(f"--{flag}: given {told}")
