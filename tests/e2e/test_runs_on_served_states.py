"""A run on hidden states from a server of its trunk: the losses of a run that computes them, and what goes wrong."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load

from launching import CPU_SHARDS, DDP, FSDP2, Setup, assert_same_lines, cases, head, metrics, outcome, start
from mtp_train.answers.states import StatesServer
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.cli.main import main
from mtp_train.runs import served_states, trunks
from mtp_train.runs.check import check
from mtp_train.runs.served_states import PROVED_TEXTS
from mtp_train.train import fetched_states, hidden_cache, loop
from mtp_train.trunk.load import load_trunk
from openai_server import Reply, ReplyFn, openai_server
from runs import overrides_of, write_headless, write_inputs, write_recipe
from states_engine import Engine, states_of

Capture = pytest.CaptureFixture[str]

UNJUDGED: dict[str, Any] = {
    "gate__enabled": False,
    "export__enabled": False,
    "data__holdout": 0.1,
    "evaluate__arms": ["none", "retrained"],
    "gate__baseline": "none",
    "train__select": {"share": 0.2, "every_steps": 2},
}
EAGLE3: dict[str, Any] = {"model__head_from": None, "head__kind": "eagle3", "head__init": "random"}
FAMILY = "glm4_moe"
CLAIMED = {"recipe.yaml", "inputs.json", "provenance.json", "outcome.json", "run.log"}
NUM_TEXTS, NUM_PROOFS = 22, 1 + PROVED_TEXTS
CACHED: dict[str, Any] = {"train__hidden_cache": {}}
ONLINE_OR_CACHED = pytest.mark.parametrize("settings", [{}, CACHED], ids=["online", "cached"])


class Case(NamedTuple):
    """The recipe of a short run, a server of its trunk's states, and the run that computes them itself."""

    recipe: Path
    engine: Engine
    here: Path

    def words(self, run_dir: Path, url: str, **settings: Any) -> list[str]:
        states = {"endpoint": url, "concurrency": 2}
        return [str(self.recipe), f"run_dir={run_dir}", *overrides_of(train__states=states, **settings)]

    def run(self, run_dir: Path, reply: ReplyFn, **settings: Any) -> tuple[int, list[Any]]:
        """Run on a server's states, and return the exit code and the texts that were asked for after the proof."""
        with openai_server(reply, owner="vllm") as served:
            code = main(["run", *self.words(run_dir, served.url, **settings)])
        return code, [tuple(payload["prompt"]) for payload in served.payloads[NUM_PROOFS:]]


def make_case(directory: Path, family_name: str, **settings: Any) -> Case:
    layers = []
    here = directory / "here"
    if family_name == "qwen3":
        write_headless(directory, family_name, num_layers=8)
        layers = [2, 4, 5]
        settings = settings | EAGLE3
    else:
        write_inputs(directory, family_name)
    recipe = write_recipe(directory / "recipe.yaml", directory, here, **UNJUDGED, **settings)
    assert main(["run", str(recipe)]) == 0
    return Case(recipe, Engine(directory / "states", states_of(directory / "finetune", layers)), here)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("one") / "in", FAMILY)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nothing, fetch little ahead, and keep few documents in a shard."""

    def hasty(*args: Any, **named: Any) -> StatesServer:
        server = StatesServer(*args, **named)
        server.wait = server.endpoint.wait = lambda seconds: None
        return server

    monkeypatch.setattr(served_states, "StatesServer", hasty)
    monkeypatch.setattr(fetched_states, "AHEAD_BYTES", 1)
    monkeypatch.setattr(hidden_cache, "SHARD_BYTES", 96 * 32 * 4)


def assert_same_training(run_dir: Path, expected: Path) -> None:
    assert_same_lines(run_dir, expected, "loss", "held_out_tau_sampled", within=1e-5)
    torch.testing.assert_close(head(run_dir), head(expected), rtol=1e-4, atol=1e-5)


BEFORE = set[threading.Thread]()
"""The threads that other tests left, such as one whose server never answers."""


@pytest.fixture(autouse=True)
def _threads_before() -> None:
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def assert_nothing_left(engine: Engine) -> None:
    assert not [one for one in {*threading.enumerate()} - BEFORE if "_fill" in one.name or "answer)" in one.name]
    assert not list(engine.directory.iterdir())


@pytest.mark.parametrize("num_steps", [4, 8], ids=["online", "cached"])
@pytest.mark.parametrize("family_name", ["qwen3_5", "glm4_moe", "qwen3"], ids=["before-norm", "after-norm", "eagle3"])
def test_a_run_on_served_states_trains_as_one_that_computes_them(
    family_name: str, num_steps: int, tmp_path: Path, new_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In less than an epoch, and in more."""
    case = make_case(tmp_path / "in", family_name, train__max_steps=num_steps)
    monkeypatch.setattr(trunks, "load_trunk", lambda *_, **__: pytest.fail("loads a trunk"))
    code, texts = case.run(new_run, case.engine)
    assert code == 0
    assert_same_training(new_run, case.here)
    assert_nothing_left(case.engine)
    assert len(set(texts)) == len(texts)
    assert (len(texts) == NUM_TEXTS) == (num_steps > 4) == (new_run / "hidden").exists()


@pytest.mark.parametrize("what", ["model", "layer", "norm"])
def test_a_server_of_something_else_is_refused_before_the_first_step_and_the_right_one_goes_on(
    what: str, one: Case, tmp_path: Path, new_run: Path, capfd: Capture
) -> None:
    trunk = one.here.with_name("base" if what == "model" else "finetune")
    wrong = Engine(tmp_path / "wrong", states_of(trunk, [], num_fewer=what == "layer"))
    wrong.fingerprints = itertools.repeat("of something else")
    if what == "norm":
        wrong.states = load_trunk(open_checkpoint(trunk), dtype="float32").of_last_layer
    assert one.run(new_run, wrong)[0] == 2
    assert re.search(r"prefers .* at [0-9]?[0-8]\.\d% of \d+ positions, and a far one at ", capfd.readouterr().err)
    assert {path.name for path in new_run.iterdir()} == CLAIMED
    assert_nothing_left(wrong)
    assert one.run(new_run, one.engine)[0] == 0
    assert_same_training(new_run, one.here)


def shards(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run_dir.glob("hidden/*/*.safetensors")}


@ONLINE_OR_CACHED
@pytest.mark.parametrize(("how", "code"), [("dead", 2), ("stopped", 143)])
# The signal may arrive between the call of open and the block that would close the file: Python closes it then.
@pytest.mark.filterwarnings(r"ignore:Exception ignored in. <_io\.FileIO:pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_run_goes_on_from_what_it_has_with_the_same_server(
    how: str, code: int, settings: dict[str, Any], one: Case, tmp_path: Path, new_run: Path, capfd: Capture
) -> None:
    signals = [signal.SIGTERM]

    def reply(payload: dict[str, Any]) -> Reply:
        if list(new_run.glob("hidden/*/states-00002.safetensors" if settings else "state/step-00000002")):
            if how == "dead":
                return Reply(503)
            while signals:
                os.kill(os.getpid(), signals.pop())
        return one.engine(payload)

    found, first = one.run(new_run, reply, **settings)
    assert found == code
    waits = "answers 503 (Service Unavailable); waiting for it." in (new_run / "run.log").read_text()
    assert waits == (", 14 times; expected an answer. " in capfd.readouterr().err) == (how == "dead")
    assert_nothing_left(one.engine)
    finished = shards(new_run)
    one.engine.fingerprints = itertools.repeat("of FP8")
    assert one.run(new_run, one.engine, **settings)[0] == 2
    assert re.search(r": is \[.*'of FP8'.*; expected \[.*'vllm-0.32.0-abc'.*, with which", capfd.readouterr().err)
    one.engine.fingerprints = itertools.repeat("vllm-0.32.0-abc")
    found, second = one.run(new_run, one.engine, **settings)
    assert found == 0
    assert_same_training(new_run, one.here)
    # Those of finished steps are not asked for again.
    assert set(first) - set(second)
    if settings:
        assert sum(len(load(content)) for content in finished.values()) == NUM_TEXTS - len(second)
        one.run(tmp_path / "whole", one.engine, **settings)
        assert shards(new_run) == shards(tmp_path / "whole") | finished


@contextmanager
def stopped_at_the_first_save() -> Iterator[None]:
    save = loop.save

    def stopping(*given: Any) -> None:
        save(*given)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "save", stopping)
        yield


def test_a_complete_cache_needs_no_server(one: Case, new_run: Path) -> None:
    with stopped_at_the_first_save():
        assert one.run(new_run, one.engine, **CACHED)[0] == 143
    assert one.run(new_run, lambda payload: Reply(503), **CACHED) == (0, [])
    assert_same_training(new_run, one.here)


def test_a_run_that_goes_on_from_its_own_cache_loads_no_layers_and_check_says_so(
    one: Case, new_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = overrides_of(**CACHED)

    def trunk_bytes(*more: str) -> int:
        return check(one.recipe, [f"run_dir={new_run}", *words, *more]).memory.trunk_bytes

    whole = trunk_bytes()
    ends = trunk_bytes("train.states.endpoint=http://localhost:1/v1")
    assert whole > ends
    with stopped_at_the_first_save():
        assert main(["run", str(one.recipe), f"run_dir={new_run}", *words]) == 143
    assert trunk_bytes() == ends
    # To decode, and to compute states in each step, the whole trunk is needed.
    assert trunk_bytes("gate.enabled=true", "data.holdout=0.4") == trunk_bytes("train.hidden_cache=null") == whole
    monkeypatch.setattr(trunks, "load_trunk", lambda *_, **__: pytest.fail("loads a trunk"))
    assert main(["run", str(one.recipe), f"run_dir={new_run}", *words]) == 0
    assert_same_training(new_run, one.here)


@pytest.mark.slow
@cases(DDP, FSDP2)
@ONLINE_OR_CACHED
def test_two_processes_share_a_server(settings: dict[str, Any], setup: Setup, one: Case, new_run: Path) -> None:
    """Of the one shard of a cache, a process has nothing to write."""
    flags = ("--num_processes", "2")
    with openai_server(one.engine, owner="vllm") as served:
        words = one.words(new_run, served.url, **settings)
        done = start(setup.machine, CPU_SHARDS, *words, flags=flags, **setup.variables)
    assert outcome(new_run)["reason"] == "unjudged", done.stderr
    assert {line["wrapper"] for line in metrics(new_run) if "loss" in line} == {setup.wrapper}
    assert_same_training(new_run, one.here)
    assert_nothing_left(one.engine)
