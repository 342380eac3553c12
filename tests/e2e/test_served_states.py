"""A run on hidden states from a server of its trunk: the losses of a run that computes them, and what goes wrong."""

from __future__ import annotations

import os
import re
import signal
import threading
from ast import literal_eval
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from launching import CPU_SHARDS, DDP, FSDP2, Setup, cases, ended, head, metrics, outcome, start
from mtp_train.checkpoints.files import read_json
from mtp_train.cli.main import main
from mtp_train.runs import trunks
from mtp_train.runs.served_states import PROVED_TEXTS, SERVER_FILE
from mtp_train.train import fetched_states, hidden_cache
from mtp_train.trunk.load import Trunk
from openai_server import Reply, Served
from runs import overrides_of, write_headless, write_inputs, write_recipe
from states_engine import StatesEngine, without_waits

Capture = pytest.CaptureFixture[str]

UNJUDGED: dict[str, Any] = {
    "gate__enabled": False,
    "export__enabled": False,
    "evaluate__prompts": 1,
    "data__holdout": 0.1,
    "train__select": {"share": 0.2, "every_steps": 2},
}
EAGLE3: dict[str, Any] = {
    "model__head_from": None,
    "head__kind": "eagle3",
    "head__init": "random",
    "evaluate__arms": ["none", "retrained"],
}
AFTER_NORM = "glm4_moe"
ONCE, EPOCHS = 4, 8
"""Steps of less than an epoch, and of more."""
NUM_TEXTS, NUM_PROOFS = 22, 1 + PROVED_TEXTS
CACHED: dict[str, Any] = {"train__hidden_cache": {}}
LOGGED = ("loss", "loss_depth_1", "loss_depth_2", "held_out_tau", "held_out_tau_sampled", "held_out_overlap_depth_2")
CLAIMED = {"recipe.yaml", "inputs.json", "provenance.json", "outcome.json", "run.log"}
STEP_2 = Path("state", "step-00000002")


class Case(NamedTuple):
    """A trunk, a server of its states, and the recipe of a short run on it."""

    recipe: Path
    engine: StatesEngine
    here: dict[int, Path]
    """The runs that compute the states themselves, by their steps."""

    @property
    def finetune(self) -> Path:
        return self.recipe.parent / "finetune"

    def words(self, run_dir: Path, served: Served | None, **settings: Any) -> list[str]:
        """Return the arguments of a run on a server's states, if there is one."""
        states = {} if served is None else {"train__states": {"endpoint": served.url, "concurrency": 2}}
        overrides = overrides_of(**{"train__max_steps": ONCE, **states, **settings})
        return [str(self.recipe), f"run_dir={run_dir}", *overrides]

    def run(self, run_dir: Path, served: Served | None, **settings: Any) -> int:
        return main(["run", *self.words(run_dir, served, **settings)])


def make_case(directory: Path, family_name: str) -> Case:
    settings, layers = UNJUDGED, list[int]()
    if family_name == "qwen3":
        write_headless(directory, family_name, num_layers=8)
        settings, layers = UNJUDGED | EAGLE3, [2, 4, 5]
    else:
        write_inputs(directory, family_name)
    recipe = write_recipe(directory / "recipe.yaml", directory, directory / "run", **settings)
    engine = StatesEngine(directory / "finetune", family_name, directory / "states", layers)
    case = Case(recipe, engine, {steps: directory / f"here-{steps}" for steps in (ONCE, EPOCHS)})
    for steps, run_dir in case.here.items():
        assert case.run(run_dir, None, train__max_steps=steps) == 0
    return case


@pytest.fixture(scope="module", params=["qwen3_5", "glm4_moe", "qwen3"], ids=["before-norm", "after-norm", "eagle3"])
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("each") / "in", request.param)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("one") / "in", AFTER_NORM)


@pytest.fixture
def one(made: Case, tmp_path: Path) -> Case:
    """A case whose server a test may break."""
    return made._replace(engine=StatesEngine(made.finetune, AFTER_NORM, tmp_path / "states"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nothing, fetch little ahead, and keep few documents in a shard."""
    without_waits(monkeypatch)
    monkeypatch.setattr(fetched_states, "AHEAD_BYTES", 1)
    monkeypatch.setattr(hidden_cache, "SHARD_BYTES", 96 * 32 * 4)


def assert_same_training(run_dir: Path, expected: Path) -> None:
    found, whole = metrics(run_dir), metrics(expected)
    assert {name for line in whole for name in line} >= {*LOGGED}
    assert [line["step"] for line in found] == [line["step"] for line in whole]
    for ours, theirs in zip(found, whole, strict=True):
        figures = [[line.get(name, 0) for name in LOGGED] for line in (ours, theirs)]
        assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    torch.testing.assert_close(head(run_dir), head(expected), rtol=1e-4, atol=1e-5)


def assert_nothing_left(engine: StatesEngine) -> None:
    names = [one.name for one in threading.enumerate() if one not in engine.threads]
    assert [name for name in names if "_fill" in name or "answer" in name] == []
    assert engine.left == []


def prompts(served: Served) -> list[tuple[int, ...]]:
    """Return the texts that a run asked for after the proof."""
    return [tuple(payload["prompt"]) for payload in served.payloads[NUM_PROOFS:]]


@pytest.mark.parametrize("steps", [ONCE, EPOCHS], ids=["online", "cached"])
def test_a_run_on_served_states_trains_as_one_that_computes_them(
    steps: int, each: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trunks, "load_trunk", lambda *_, **__: pytest.fail("loads a trunk"))
    monkeypatch.setattr(Trunk, "hidden", lambda *_, **__: pytest.fail("runs a trunk"))
    run_dir = tmp_path / "run"
    with each.engine.serving() as served:
        assert each.run(run_dir, served, train__max_steps=steps) == 0
    assert_same_training(run_dir, each.here[steps])
    assert_nothing_left(each.engine)
    # Each text once, and in an epoch that is not finished not all of them.
    asked = prompts(served)
    assert len(asked) == len(set(asked))
    assert (len(asked) < NUM_TEXTS) == (steps == ONCE) == (not (run_dir / "hidden").exists())
    log = (run_dir / "run.log").read_text()
    assert re.search(r": prefers the trunk's token at (\d+) of \1 positions\. ", log)
    assert (" s for the server, and the server " in log) == (steps == ONCE)


def test_the_comparison_sees_states_that_are_wrong_by_a_thousandth(one: Case, tmp_path: Path) -> None:
    one.engine.served = lambda states_TLD: states_TLD + 1e-3 * torch.randn(states_TLD.shape)
    with one.engine.serving() as served:
        assert one.run(tmp_path / "run", served) == 0
    with pytest.raises(AssertionError, match="approx"):
        assert_same_training(tmp_path / "run", one.here[ONCE])


def wrong_engine(what: str, finetune: Path, directory: Path) -> StatesEngine:
    engine = StatesEngine(finetune.with_name("base") if what == "model" else finetune, AFTER_NORM, directory)
    engine.fingerprint = "vllm-of-something-else"
    if what == "layer":
        engine.layers[-1] -= 1
    if what == "norm":
        engine.served = engine.norm
    return engine


@pytest.mark.parametrize("what", ["model", "layer", "norm"])
@pytest.mark.parametrize("settings", [{}, CACHED], ids=["online", "cached"])
def test_a_server_of_something_else_is_refused_before_the_first_step_and_the_right_one_goes_on(
    what: str, settings: dict[str, Any], one: Case, tmp_path: Path, capfd: Capture
) -> None:
    run_dir, wrong = tmp_path / "run", wrong_engine(what, one.finetune, tmp_path / "wrong")
    with wrong.serving() as served:
        assert one.run(run_dir, served, **settings) == 2
    found = r"prefers the token of lm_head\(norm\(state\)\) at (\d+\.\d)% of \d+ positions, and a far one at "
    share = re.search(found, capfd.readouterr().err)
    assert share
    assert float(share[1]) < 99
    assert ended(run_dir) == (2, "bad_input", "train")
    assert {path.name for path in run_dir.iterdir()} <= CLAIMED
    assert_nothing_left(wrong)
    with one.engine.serving() as served:
        assert one.run(run_dir, served, **settings) == 0
    assert_same_training(run_dir, one.here[ONCE])


def as_ever(number: int) -> None:
    """Let a server reply."""


def until(path: Path, reply: Reply) -> Callable[[int], Reply | None]:
    return lambda number: reply if path.exists() else None


GONE = {
    "busy": (Reply(503), r"answers 503 \(Service Unavailable\)"),
    "cut": (Reply(body=b"{", headers={"Content-Length": "9"}), r"does not answer \(RemoteProtocolError\)"),
}


@pytest.mark.parametrize("how", GONE)
def test_a_server_that_dies_is_waited_for_and_the_run_goes_on_from_its_last_step(
    how: str, one: Case, tmp_path: Path, capfd: Capture
) -> None:
    run_dir, (reply, says) = tmp_path / "run", GONE[how]
    with one.engine.serving() as served:
        one.engine.arrived = until(run_dir / STEP_2, reply)
        assert one.run(run_dir, served) == 2
        assert re.search(rf"{served.url}: {says}, 14 times; expected an answer\. Start it", capfd.readouterr().err)
        assert re.search(rf"{served.url}: {says}; waiting for it\.\n", (run_dir / "run.log").read_text())
        assert ended(run_dir) == (2, "bad_input", "train")
        assert [line["step"] for line in metrics(run_dir)][-1] in (2, 3)
        assert_nothing_left(one.engine)
        one.engine.arrived = as_ever
        served.payloads.clear()
        assert one.run(run_dir, served) == 0
    assert_same_training(run_dir, one.here[ONCE])
    with one.engine.serving() as whole:
        assert one.run(tmp_path / "whole", whole) == 0
    assert len(prompts(served)) < len(prompts(whole))


def shards(run_dir: Path) -> dict[str, Path]:
    return {path.name: path for path in run_dir.glob("hidden/*/*")}


def test_a_cache_that_a_dead_server_left_goes_on_with_what_is_missing(one: Case, tmp_path: Path) -> None:
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    with one.engine.serving() as served:
        one.engine.arrived = lambda number: Reply(503) if number > NUM_PROOFS + NUM_TEXTS // 2 else None
        assert one.run(run_dir, served, **CACHED) == 2
        assert_nothing_left(one.engine)
        finished = {name: path.stat().st_mtime_ns for name, path in shards(run_dir).items()}
        assert {Path(name).suffix for name in finished} == {".safetensors"}
        one.engine.arrived = as_ever
        served.payloads.clear()
        assert one.run(run_dir, served, **CACHED) == 0
        kept = sum(len(load_file(path)) for name, path in shards(run_dir).items() if name in finished)
        assert 0 < kept == NUM_TEXTS - len(prompts(served)) < NUM_TEXTS
        assert one.run(whole, served, **CACHED) == 0
    assert {name: shards(run_dir)[name].stat().st_mtime_ns for name in finished} == finished
    contents = [{name: path.read_bytes() for name, path in shards(found).items()} for found in (run_dir, whole)]
    assert contents[0] == contents[1]
    assert_same_training(run_dir, one.here[ONCE])


def signalled(reached: Callable[[int], bool]) -> Callable[[int], None]:
    """Return a function that sends this process one SIGTERM once something is reached."""
    signals = iter([signal.SIGTERM])

    def arrived(number: int) -> None:
        if reached(number):
            for one in signals:
                os.kill(os.getpid(), one)

    return arrived


STOPS: dict[str, tuple[dict[str, Any], Callable[[Path, int], bool], str]] = {
    "online": ({}, lambda run_dir, number: (run_dir / STEP_2).exists(), r"stopped by SIGTERM after step [34] of 4"),
    "cached": (CACHED, lambda run_dir, number: bool(shards(run_dir)), "stopped by SIGTERM in the stage 'train'"),
}


@pytest.mark.parametrize("stage", STOPS)
def test_a_run_that_is_stopped_leaves_no_thread_and_no_file_and_goes_on(stage: str, one: Case, tmp_path: Path) -> None:
    run_dir, (settings, reached, says) = tmp_path / "run", STOPS[stage]
    with one.engine.serving() as served:
        one.engine.arrived = signalled(partial(reached, run_dir))
        assert one.run(run_dir, served, **settings) == 143
        assert re.search(says, outcome(run_dir)["message"])
        assert_nothing_left(one.engine)
        assert one.run(run_dir, served, **settings) == 0
    assert_same_training(run_dir, one.here[ONCE])


@pytest.mark.parametrize("settings", [{}, CACHED], ids=["online", "cached"])
def test_a_run_does_not_go_on_with_another_server(
    settings: dict[str, Any], one: Case, tmp_path: Path, capfd: Capture
) -> None:
    run_dir, engine = tmp_path / "run", one.engine
    with engine.serving() as served:
        engine.arrived = signalled(lambda number: number == NUM_PROOFS + 4)
        assert one.run(run_dir, served, **settings) == 143
        began = read_json(run_dir / SERVER_FILE)["identity"]
        others = {"fingerprint": "vllm-0.32.0-fp8", "release": "0.33.0", "served": Tensor.bfloat16}
        for name, value in others.items():
            capfd.readouterr()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine, name, value)
                assert one.run(run_dir, served, **settings) == 2
            said = capfd.readouterr().err
            found = re.search(r": is (\[.*\]); expected (\[.*\]), with which the run began .*\. Serve that", said)
            assert found
            assert sum(ours != theirs for ours, theirs in zip(*map(literal_eval, found.groups()), strict=True)) == 1
            assert literal_eval(found[2]) == began == read_json(run_dir / SERVER_FILE)["identity"]
            assert_nothing_left(engine)
        assert one.run(run_dir, served, **settings) == 0
    assert_same_training(run_dir, one.here[ONCE])


@pytest.mark.slow
@cases(DDP, FSDP2)
@pytest.mark.parametrize("settings", [{}, CACHED], ids=["online", "cached"])
def test_two_processes_share_a_server(settings: dict[str, Any], setup: Setup, one: Case, tmp_path: Path) -> None:
    """Of the one shard of a cache, a process has nothing to write."""
    run_dir, flags = tmp_path / "run", ("--num_processes", "2")
    with one.engine.serving() as served:
        words = one.words(run_dir, served, **settings)
        done = start(setup.machine, CPU_SHARDS, *words, flags=flags, **setup.variables)
    assert outcome(run_dir)["reason"] == "unjudged", done.stderr
    trained = [line for line in metrics(run_dir) if "loss" in line]
    assert {(line["world_size"], line["wrapper"]) for line in trained} == {(2, setup.wrapper)}
    assert_same_training(run_dir, one.here[ONCE])
    assert_nothing_left(one.engine)
