"""Measure and judge a run on servers (``gate.endpoint``), without a trunk in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.progress import Progress

from mtp_train.data.endpoint import RESPONSE_TIMEOUT_SECONDS, Endpoint, SettingNames, read_api_key
from mtp_train.data.tokenize import Document
from mtp_train.errors import DataError
from mtp_train.evaluation.decoding import PLAIN
from mtp_train.evaluation.prompt_records import HELD_OUT_TASK, Decoded, Setting, TaskPrompt
from mtp_train.evaluation.results import RunReport
from mtp_train.evaluation.served.asking import Asking
from mtp_train.evaluation.served.rounds import MIN_SAME_STARTS, Starts, greedy_starts, measure_arm
from mtp_train.evaluation.settings import draft_depth, served_settings
from mtp_train.evaluation.statistics import MeasuredArm, lossless
from mtp_train.evaluation.store import Store
from mtp_train.heads.diagnose import text_config_of
from mtp_train.job.evaluate_run import Evaluation, MeasuredRun, evaluation_settings, judge, outputs
from mtp_train.job.held_out import HELD_OUT, held_out_figures
from mtp_train.job.inputs import Inputs
from mtp_train.job.served_arms import RETRAINED, ServedArm, served_arms, write_served
from mtp_train.recipe.schema import GateServers, Recipe
from mtp_train.weights.files import read_json
from mtp_train.weights.run_export import HEAD
from mtp_train.weights.writing import write_json

SERVED = "servers"
"""Directory of a run with the records of its servers."""
SERVER_FILE = "server.json"
Waiting = Callable[[float], object]


@dataclass(frozen=True)
class _Server:
    """The server that made an arm's records."""

    engine: str
    version: str | None
    url: str
    starts: dict[str, list[int]]
    """Beginnings of its greedy responses, by prompt id."""

    @property
    def release(self) -> str:
        """Engine and version."""
        return f"{self.engine or 'an unnamed server'} {self.version or 'of an unknown version'}"


@dataclass(frozen=True)
class _Question:
    """What every arm is asked."""

    recipe: Recipe
    inputs: Inputs
    servers: GateServers
    prompts: Sequence[TaskPrompt]
    settings: Sequence[Setting]
    store: Store

    def settings_of(self, arm: str) -> list[Setting]:
        """Return an arm's own settings."""
        return list(dict.fromkeys(one.plain for one in self.settings)) if arm == PLAIN else list(self.settings)

    def stored(self, one: ServedArm) -> dict[Setting, list[Decoded]] | None:
        """Return an arm's records; None where some are missing."""
        found = {setting: self.store.read(one.name, setting) for setting in self.settings_of(one.arm)}
        if any(prompt.id not in records for records in found.values() for prompt in self.prompts):
            return None
        if _recorded(self.store, one) is None:
            return None
        return {setting: [records[prompt.id] for prompt in self.prompts] for setting, records in found.items()}


def evaluate_served(
    recipe: Recipe,
    servers: GateServers,
    run_dir: Path,
    inputs: Inputs,
    training: Sequence[Document],
    progress: Progress,
    wait: Waiting | None = None,
) -> Evaluation:
    """Measure the retrained head and its baseline on the recipe's servers, and apply the gate.

    The servers need not run at the same time: an arm whose server does not answer yet is measured by a later call, and
    records are kept in the run directory.

    Args:
        recipe: The recipe.
        servers: Its ``gate.endpoint``.
        run_dir: The run directory, with the trained head.
        inputs: The run's inputs.
        training: The documents that the head was trained on.
        progress: Shows how many prompts are answered.
        wait: Function that waits a number of seconds (:class:`~mtp_train.data.endpoint.Endpoint`).

    Raises:
        DataError: A server does not answer, or serves something else: the message has the commands that start it. Or a
            server cannot be measured, or the two are of different engines or trunks.
    """
    arms = served_arms(recipe, servers, run_dir, inputs, progress)
    write_served(recipe, run_dir, inputs, arms, progress)
    settings = [_by_server(one) for one in served_settings(recipe.evaluate, inputs.finetune, draft_depth(recipe))]
    prompts = [TaskPrompt.of(one, HELD_OUT_TASK) for one in inputs.held_out]
    identity = {"settings": [one.slug for one in settings], "max_new_tokens": recipe.evaluate.max_new_tokens}
    asked = _Question(recipe, inputs, servers, prompts, settings, Store(run_dir / SERVED, identity))
    found = _measure_all(asked, arms, progress, wait)
    made_by = {one.arm: _recorded(asked.store, one) for one in arms}
    _require_alike(asked.store, arms, [server for server in made_by.values() if server is not None])
    measured = _measured_run(asked, run_dir, found, made_by)
    held_out = held_out_figures(inputs, outputs(measured.arms[-1], settings[0]), training)
    gate = judge(recipe, measured)
    report = RunReport(
        arms=measured.results,
        lossless=lossless(measured.checked),
        gate=gate,
        settings={**measured.facts, HELD_OUT: held_out},
        cells=measured.cells,
    )
    return Evaluation(report, gate, measured.marginal_ci95)


def _by_server(setting: Setting) -> Setting:
    """Return a setting as a server applies it: above temperature 0 it verifies by a rule that it does not report."""
    return setting if setting.rule == "greedy" else replace(setting, rule="served")


def _measure_all(
    asked: _Question, arms: Sequence[ServedArm], progress: Progress, wait: Waiting | None
) -> dict[str, dict[Setting, list[Decoded]]]:
    """Return the records by arm: those that are stored, and those of the servers that answer now.

    Raises:
        DataError: Some are missing, and their servers do not answer.
    """
    found: dict[str, dict[Setting, list[Decoded]]] = {}
    missing: list[str] = []
    for one in arms:
        stored = asked.stored(one)
        if stored is not None:
            found[one.arm] = stored
            continue
        with _endpoint(asked, one, wait) as endpoint:
            served = endpoint.models()
            if served is None or one.name not in served:
                what = "does not answer" if served is None else f"serves {', '.join(served) or 'no model'}"
                missing.append(
                    f"{one.field}: {one.url} {what}; expected {one.name}. Start it with one of these commands:\n"
                    f"{one.to_start()}"
                )
                continue
            endpoint.choose_model(one.name)
            found[one.arm] = _measure(asked, one, endpoint, progress)
    if missing:
        raise DataError("\n".join([*missing, "Then run the same command again; on any machine that has the run."]))
    return found


@contextlib.contextmanager
def _endpoint(asked: _Question, one: ServedArm, wait: Waiting | None) -> Iterator[Endpoint]:
    inputs, servers = asked.inputs, asked.servers
    names = SettingNames(one.field, "--served-model-name", "gate.endpoint.api_key_env", "then run the same command")
    endpoint = Endpoint(
        one.url,
        inputs.tokenizer,
        inputs.eos_ids,
        text_config_of(inputs.finetune, trust_remote_code=asked.recipe.model.trust_remote_code).vocab_size,
        api_key=read_api_key(servers.api_key_env, names),
        timeout_seconds=servers.request_timeout_seconds or RESPONSE_TIMEOUT_SECONDS,
        wait=wait,
        names=names,
    )
    with contextlib.closing(endpoint):
        yield endpoint


def _measure(asked: _Question, one: ServedArm, endpoint: Endpoint, progress: Progress) -> dict[Setting, list[Decoded]]:
    """Measure one arm on a server that serves it."""
    asking = Asking(endpoint, asked.recipe.seed)
    asking.warm_up(asked.prompts[0])
    earlier = _recorded(asked.store, one)
    now = _Server(asking.server, asking.version, endpoint.url, {})
    if earlier is not None and earlier.release != now.release:
        raise DataError(
            f"{one.field}: {endpoint.url} is {now.release}, and {earlier.release} answered the first prompts of "
            f"{one.name}; expected one server for all of them. Start that one, or remove "
            f"{asked.store.out} to ask for all of them again."
        )
    # Also of a server that goes on: it may have been started again with another number of drafts.
    found = greedy_starts(asking, asked.prompts, 0 if one.arm == PLAIN else draft_depth(asked.recipe))
    if earlier is None:
        starts = {prompt: list(tokens) for prompt, tokens in found.tokens.items()}
        write_json(asked.store.file(one.name, SERVER_FILE), asdict(replace(now, starts=starts)))
    settings = asked.settings_of(one.arm)
    bar = progress.add_task(f"asking {one.name}", total=len(settings) * len(asked.prompts))
    return measure_arm(
        asking,
        one.name,
        asked.prompts,
        settings,
        asked.recipe.evaluate.max_new_tokens,
        asked.store,
        lambda: progress.advance(bar),
    )


def _recorded(store: Store, one: ServedArm) -> _Server | None:
    path = store.file(one.name, SERVER_FILE)
    return _Server(**read_json(path)) if path.is_file() else None


def _require_alike(store: Store, arms: Sequence[ServedArm], servers: Sequence[_Server]) -> None:
    """Check that two servers are of one release and serve one trunk, so that only the heads differ."""
    first, second = servers
    if first.release != second.release:
        raise DataError(
            f"gate.endpoint: {arms[0].name} was served by {first.release}, {arms[1].name} by {second.release}; "
            "expected the same engine and version, as tau and speed differ between engines. Serve both with one of "
            f"them: remove {store.out}, and run the same command again."
        )
    same = _starts(first).same_share(_starts(second))
    if same < MIN_SAME_STARTS:
        raise DataError(
            f"gate.endpoint: {arms[0].name} and {arms[1].name} begin {same:.0%} of greedy responses with the same "
            f"tokens; expected at least {MIN_SAME_STARTS:.0%} of servers with one trunk. Serve both checkpoints of "
            f"this run in the same precision: remove {store.out}, and run the same command again."
        )


def _starts(server: _Server) -> Starts:
    return Starts({prompt: tuple(tokens) for prompt, tokens in server.starts.items()})


def _measured_run(
    asked: _Question,
    run_dir: Path,
    found: Mapping[str, Mapping[Setting, Sequence[Decoded]]],
    made_by: Mapping[str, _Server | None],
) -> MeasuredRun:
    recipe, baseline = asked.recipe, asked.recipe.gate_baseline
    trunk = recipe.model.trunk
    heads = {"graft": recipe.model.head_from or trunk, "native": trunk, PLAIN: None}
    plain = found[baseline] if baseline == PLAIN else {}
    arms = (
        MeasuredArm(baseline, trunk, heads[baseline], found[baseline]),
        MeasuredArm(RETRAINED, trunk, str(run_dir / HEAD), {**plain, **found[RETRAINED]}),
    )
    servers = {arm: {"engine": one.release, "url": one.url} for arm, one in made_by.items() if one is not None}
    facts = evaluation_settings(recipe, asked.inputs, asked.settings) | {"servers": servers}
    return MeasuredRun(arms, tuple(asked.settings), {}, facts)
