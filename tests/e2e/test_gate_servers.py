"""``gate.endpoint``: a run trains its head, names the servers to start, and judges what they measured."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from drafting_server import Dialect, DraftingServer
from launching import ROOT, metrics, outcome, responses, start
from mtp_train.errors import DataError, GateRefusedError, MtpError
from mtp_train.evaluation.arms import PLAIN, ArmSpec, load_arm_trunk, open_arm
from mtp_train.trunk.tokenizer import eos_token_ids, load_tokenizer
from mtp_train.upstream.transformers_private import splits_models
from openai_server import Reply, Served, openai_server
from runs import GETS_NO_BETTER, LEARNS, run_quietly, tiny_recipe, write_inputs, write_recipe

DEPTH = 2
# Nothing listens there.
CLOSED = "http://127.0.0.1:9/v1"
ARMS = ["graft", "retrained"]
FIGURES = ("tau", "tau_ci95", "acceptance_rate", "marginal", "conditional", "rounds", "prompts", "groups", "head")
SERVER = {"gate__endpoint": {"retrained": CLOSED, "baseline": CLOSED}, "evaluate__arms": ARMS}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def trained(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that waits for its servers."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    with pytest.raises(DataError, match="does not answer; expected"):
        run_quietly(tiny_recipe(inputs, run_dir, **LEARNS, **SERVER))
    return run_dir


@pytest.fixture(scope="module")
def here(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, measured by the built-in decoder."""
    run_dir = tmp_path_factory.mktemp("here") / "run"
    run_quietly(tiny_recipe(inputs, run_dir, **{**LEARNS, "evaluate__arms": ARMS}))
    return run_dir


def copied(run_dir: Path, to: Path) -> Path:
    """Copy a run as if it had been started there."""
    shutil.copytree(run_dir, to)
    recipe = to / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(run_dir), str(to)))
    return to


def names_of(run_dir: Path) -> dict[str, str]:
    """Return the names under which a run expects its arms, by arm."""
    return {path.name.partition("-")[0]: path.name for path in (run_dir / "serve").iterdir()}


def engine(path: Path, *, depth: int = DEPTH, drafts: bool = True, dialect: Dialect = "vllm") -> DraftingServer:
    """Return an engine that serves a checkpoint."""
    arm = open_arm(ArmSpec("arm", str(path), "own" if drafts else None))
    trunk = load_arm_trunk(arm, torch.device("cpu"))
    eos_ids = eos_token_ids(arm.model.checkpoint, load_tokenizer(arm.model.checkpoint, trust_remote_code=False))
    drafting = arm.model.load_drafting(trunk)[0] if drafts else None
    return DraftingServer(trunk, drafting, depth if drafts else 0, sorted(eos_ids), dialect, beside=dialect == "sglang")


@contextmanager
def serving(engines: Mapping[str, DraftingServer]) -> Iterator[dict[str, Served]]:
    """Serve each engine under its model's name, at an address of its own."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(openai_server(one.reply, [name], owner=one.dialect, shows=one.shows))
            for name, one in engines.items()
        }


def at(inputs: Path, run_dir: Path, retrained: str, baseline: str, **changes: Any) -> Any:
    """Return the recipe with the addresses of running servers."""
    servers = {"retrained": retrained, "baseline": baseline}
    return tiny_recipe(inputs, run_dir, **{**LEARNS, **SERVER, "gate__endpoint": servers, **changes})


def test_a_run_without_its_servers_says_how_to_start_them(inputs: Path, trained: Path) -> None:
    told = json.loads((trained / "outcome.json").read_text())
    assert (told["exit_code"], told["stage"]) == (2, "evaluate")
    names = names_of(trained)
    assert sorted(names) == ARMS
    for arm, field in (("graft", "baseline"), ("retrained", "retrained")):
        path = (trained / "serve" / names[arm]).resolve()
        assert f"gate.endpoint.{field}: {CLOSED} does not answer; expected {names[arm]}." in told["message"]
        command = f"vllm serve {path} --speculative-config '.*\"num_speculative_tokens\":{DEPTH}}}'"
        assert re.search(f"{command} --served-model-name {names[arm]} --port 9\n", told["message"])
        assert re.search(f"sglang.launch_server .*--served-model-name {names[arm]} --port 9\n", told["message"])
    assert told["message"].endswith("Then run the same command again; on any machine that has the run.")


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_servers_give_the_verdict_of_the_built_in_decoder(
    inputs: Path, trained: Path, here: Path, tmp_path: Path, dialect: Dialect
) -> None:
    run_dir = copied(trained, tmp_path / "run")
    names = {arm: name for arm, name in names_of(run_dir).items()}
    engines = {name: engine(run_dir / "serve" / name, dialect=dialect) for name in names.values()}
    with serving(engines) as served:
        recipe = at(inputs, run_dir, served[names["retrained"]].url, served[names["graft"]].url)
        outcome = run_quietly(recipe)
    assert (outcome.exit_code, outcome.stage) == (0, "done")
    assert (run_dir / "export" / "config.json").is_file()
    assert not (run_dir / "serve").exists()
    found, expected = (json.loads((path / "report.json").read_text()) for path in (run_dir, here))
    for arm in ARMS:
        theirs, ours = ({name: one["arms"][arm][name] for name in FIGURES} for one in (found, expected))
        assert theirs == json.loads(json.dumps(ours).replace(str(here), str(run_dir))), arm
    assert found["gate"] == expected["gate"]
    assert found["lossless"]["checked"] == 0
    assert found["settings"]["servers"]["graft"]["engine"] == f"{dialect} {'1.2.3' if dialect == 'vllm' else '4.5.6'}"
    assert found["settings"]["verify_rule"] == "greedy"


def test_servers_may_run_one_after_the_other(inputs: Path, trained: Path, tmp_path: Path) -> None:
    """On a machine with room for one of them, at one address."""
    run_dir = copied(trained, tmp_path / "run")
    names = names_of(run_dir)
    first = engine(run_dir / "serve" / names["retrained"])
    with serving({names["retrained"]: first}) as served:
        url = served[names["retrained"]].url
        with pytest.raises(DataError, match=f"serves {names['retrained']}; expected {names['graft']}") as raised:
            run_quietly(at(inputs, run_dir, url, url))
    assert "gate.endpoint.retrained" not in str(raised.value)
    asked = len(first.results)
    second = engine(run_dir / "serve" / names["graft"])
    with serving({names["graft"]: second}) as served:
        outcome = run_quietly(at(inputs, run_dir, served[names["graft"]].url, served[names["graft"]].url))
    assert outcome.exit_code == 0
    # A warm-up, the beginnings, and every held-out prompt.
    assert (asked, len(second.results)) == (len(first.results), asked)
    assert asked == 1 + 2 * 8


def refusal(inputs: Path, run_dir: Path, engines: Mapping[str, DraftingServer], **changes: Any) -> str:
    """Return why a run refuses the servers of its arms, ``{arm: engine}``."""
    names = names_of(run_dir)
    with serving({names[arm]: one for arm, one in engines.items()}) as served:
        urls = [served[names[arm]].url if arm in engines else CLOSED for arm in ("retrained", "graft")]
        with pytest.raises(MtpError) as raised:
            run_quietly(at(inputs, run_dir, *urls, **changes))
    return str(raised.value)


def test_swapped_addresses_are_refused(inputs: Path, trained: Path, tmp_path: Path) -> None:
    run_dir = copied(trained, tmp_path / "run")
    names = names_of(run_dir)
    engines = {names[arm]: engine(run_dir / "serve" / names[arm]) for arm in ARMS}
    with serving(engines) as served, pytest.raises(DataError) as raised:
        run_quietly(at(inputs, run_dir, served[names["graft"]].url, served[names["retrained"]].url))
    assert f"serves {names['graft']}; expected {names['retrained']}" in str(raised.value)


def test_a_server_of_an_earlier_head_is_refused(inputs: Path, trained: Path, tmp_path: Path) -> None:
    """The name has a digest of the weights: a head that is trained anew is another name."""
    run_dir = tmp_path / "run"
    with pytest.raises(DataError):
        run_quietly(tiny_recipe(inputs, run_dir, **{**LEARNS, "train__max_steps": 2, **SERVER}))
    other, same = names_of(run_dir), names_of(trained)
    assert other["retrained"] != same["retrained"]
    assert other["graft"] == same["graft"]


def test_another_number_of_drafts_is_refused(inputs: Path, trained: Path, tmp_path: Path) -> None:
    run_dir = copied(trained, tmp_path / "run")
    place = run_dir / "serve" / names_of(run_dir)["retrained"]
    for depth in (1, 3):
        told = refusal(inputs, run_dir, {"retrained": engine(place, depth=depth)})
        assert f"drafts {depth} tokens a round; expected {DEPTH}" in told
        # Nothing of it is kept for the server that comes next.
        assert not list((run_dir / "servers").glob("measured/*/*"))
    told = refusal(inputs, run_dir, {"retrained": engine(place, drafts=False)})
    assert "does not report the rounds of a response" in told


def test_another_trunk_is_refused(inputs: Path, trained: Path, tmp_path: Path) -> None:
    run_dir = copied(trained, tmp_path / "run")
    names = names_of(run_dir)
    engines = {arm: engine(run_dir / "serve" / names[arm]) for arm in ARMS}
    with torch.no_grad():
        engines["graft"].trunk.causal_lm.get_output_embeddings().weight.copy_(engines["graft"].trunk.lm_head_VD.flip(0))
    told = refusal(inputs, run_dir, engines)
    assert "of greedy responses with the same tokens; expected at least 50%" in told


def test_two_engines_are_refused(inputs: Path, trained: Path, tmp_path: Path) -> None:
    run_dir = copied(trained, tmp_path / "run")
    names = names_of(run_dir)
    engines = {
        "graft": engine(run_dir / "serve" / names["graft"], dialect="vllm"),
        "retrained": engine(run_dir / "serve" / names["retrained"], dialect="sglang"),
    }
    assert "was served by vllm 1.2.3" in refusal(inputs, run_dir, engines)


def test_an_interrupted_arm_goes_on_with_the_same_server_only(inputs: Path, trained: Path, tmp_path: Path) -> None:
    run_dir = copied(trained, tmp_path / "run")
    place = run_dir / "serve" / names_of(run_dir)["retrained"]
    fails = engine(place)
    prompts_before = 3

    def reply(payload: Any) -> Reply:
        return Reply(400) if len(fails.results) == 1 + 8 + prompts_before else fails.reply(payload)

    name = names_of(run_dir)["retrained"]
    with (
        openai_server(reply, [name], owner="vllm", shows=fails.shows) as served,
        pytest.raises(DataError, match=r"refuses prompt .* the same command resumes from here"),
    ):
        run_quietly(at(inputs, run_dir, served.url, CLOSED))
    other = engine(place, dialect="sglang")
    told = refusal(inputs, run_dir, {"retrained": other})
    assert "is sglang 4.5.6, and vllm 1.2.3 answered the first prompts" in told
    again = engine(place)
    refusal(inputs, run_dir, {"retrained": again})
    assert len(again.results) == 1 + 8 + 8 - prompts_before


def test_without_a_baseline_drafts_must_pay(inputs: Path, tmp_path: Path) -> None:
    """Against plain decoding the served speeds decide, or the engine's break-even tau."""
    run_dir = tmp_path / "run"
    changes = {"evaluate__arms": [PLAIN, "retrained"], "head__init": "graft", "gate__baseline": PLAIN}
    with pytest.raises(DataError) as raised:
        run_quietly(at(inputs, run_dir, CLOSED, CLOSED, **changes, gate__break_even_tau=1.01))
    names = names_of(run_dir)
    assert list(names) == ["retrained"]
    plain_name = re.search(r"expected (none-\w+)\.", str(raised.value))
    assert plain_name is not None
    path = run_dir / "serve" / names["retrained"]
    engines = {plain_name[1]: engine(path, drafts=False), names["retrained"]: engine(path)}
    with serving(engines) as served:
        urls = [served[name].url for name in (names["retrained"], plain_name[1])]
        outcome = run_quietly(at(inputs, run_dir, *urls, **changes, gate__break_even_tau=1.01))
    report = json.loads((run_dir / "report.json").read_text())
    assert outcome.exit_code == 0
    assert report["arms"]["none"]["tau"] == 1.0
    assert report["arms"]["retrained"]["speedup"] > 0.0
    assert report["arms"]["retrained"]["break_even_tau"] > 0.0


def test_a_head_that_gains_nothing_is_refused(inputs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(DataError):
        run_quietly(tiny_recipe(inputs, run_dir, **{**LEARNS, **SERVER, **GETS_NO_BETTER}))
    names = names_of(run_dir)
    engines = {names[arm]: engine(run_dir / "serve" / names[arm]) for arm in ARMS}
    with serving(engines) as served:
        recipe = at(inputs, run_dir, *(served[names[arm]].url for arm in ("retrained", "graft")), **GETS_NO_BETTER)
        with pytest.raises(GateRefusedError):
            run_quietly(recipe)


def test_sampling_settings_reach_the_server(inputs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    sampled = {"evaluate__temperature": [0.0, 0.7], "evaluate__top_p": 0.9, "evaluate__top_k": 20}
    with pytest.raises(DataError):
        run_quietly(tiny_recipe(inputs, run_dir, **{**LEARNS, **SERVER, **sampled}))
    names = names_of(run_dir)
    engines = {names[arm]: engine(run_dir / "serve" / names[arm]) for arm in ARMS}
    with serving(engines) as served:
        urls = [served[names[arm]].url for arm in ("retrained", "graft")]
        # Whether the head gains enough at both settings does not matter here.
        with suppress(GateRefusedError):
            run_quietly(at(inputs, run_dir, *urls, **sampled))
        payloads = served[names["graft"]].payloads
    asked = {(one["temperature"], one["top_p"], one["top_k"]) for one in payloads}
    assert asked == {(0.0, 1.0, -1), (0.7, 0.9, 20)}
    report = json.loads((run_dir / "report.json").read_text())
    assert [cell["rule"] for cell in report["cells"]] == ["served", "served"]


@pytest.mark.slow
@pytest.mark.skipif(not splits_models(), reason="transformers cannot load a part of a model")
def test_four_processes_answer_train_and_leave_the_verdict_to_servers(tmp_path: Path) -> None:
    """The stages of a model that no process can hold: parts to answer with, shards to train on, servers to measure."""
    inputs = write_inputs(tmp_path / "in", "deepseek_v3", num_records=48)
    run_dir = tmp_path / "run"
    changes = {**LEARNS, **SERVER, "model__tensor_parallel": 4, "train__max_steps": 8, "train__select": None}

    def launched(**more: Any) -> str:
        path = write_recipe(tmp_path / "recipe.yaml", inputs, run_dir, **changes, **more)
        flags = ("--num_processes", "4")
        return start(
            "fsdp2.yaml", ROOT / "tests" / "cpu_shards.py", path, "--json", flags=flags, ACCELERATE_USE_CPU="true"
        ).stderr

    told = launched()
    assert outcome(run_dir)["exit_code"] == 2, told
    assert "Then run the same command again" in outcome(run_dir)["message"]
    assert {line["wrapper"] for line in metrics(run_dir)} == {"FSDPHeadTraining"}
    # The four that share the trunk answered every prompt together.
    assert len(responses(run_dir, 0, 4)) + len(responses(run_dir)) > 0
    names = names_of(run_dir)
    engines = {names[arm]: engine(run_dir / "serve" / names[arm]) for arm in ARMS}
    with serving(engines) as served:
        servers = {"retrained": served[names["retrained"]].url, "baseline": served[names["graft"]].url}
        changes["gate__endpoint"] = servers
        told = launched()
    assert outcome(run_dir)["stage"] == "done", told
    assert outcome(run_dir)["exit_code"] in (0, GateRefusedError.exit_code)
    report = json.loads((run_dir / "report.json").read_text())
    assert {arm: report["arms"][arm]["prompts"] for arm in ARMS} == dict.fromkeys(ARMS, 8)
