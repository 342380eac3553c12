"""``compare`` of two servers: the gate judges the second head by the counts of both servers on the same prompts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from json_files import read_json, write_json, write_rows
from llama_server import GROUPS, NEW_TOKENS, llama, serving
from mtp_train.checkpoints.demo import demo_path
from mtp_train.cli.main import main
from mtp_train.evaluation.results import load_report
from openai_server import ReplyFn, openai_server
from runs import Capture, run_command


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{'word ' * number}?", "group": f"g{number}"} for number in range(GROUPS)]
    return write_rows(tmp_path / "suite.jsonl", rows)


@pytest.fixture
def compare(suite: Path, tmp_path: Path, capfd: Capture) -> Callable[..., tuple[int, str]]:
    def run(*replies: ReplyFn, names: tuple[str, ...] = ("stale", "retrained"), more: tuple[str, ...] = ()) -> Any:
        with ExitStack() as stack:
            served = [stack.enter_context(serving(one)) for one in replies]
            # As llama-server prints its address: without the API's version.
            arms = [f"{name}={one.url.removesuffix('/v1')}" for name, one in zip(names, served, strict=True)]
            flags = ["--suite", str(suite), "--temperatures", "0", "--out", str(tmp_path / "out")]
            code = run_command("compare", *arms, *more, *flags)
        return code, capfd.readouterr()

    return run


def test_a_better_head_passes_by_the_counts_of_both_servers(compare: Callable[..., Any], out: Path) -> None:
    code, printed = compare(llama(0), llama(2))
    report = load_report(out / "report.json")
    assert (code, report.gate.outcome, report.gate.passed, report.gate.baseline) == (0, "passed", True, "stale")
    (setting,) = report.gate.settings
    assert (setting.setting, setting.groups, setting.prompts) == ("greedy", GROUPS, GROUPS)
    # A round commits accepted drafts and one token more; prefill gives the first.
    for name, tau in (("stale", setting.baseline_tau), ("retrained", setting.tau)):
        (cell,) = [one for one in report.cells if (one.arm, one.task) == (name, "all")]
        assert tau == pytest.approx(report.arms[name].tau) == 1 + cell.accepted_tokens / cell.rounds
        assert cell.rounds + cell.accepted_tokens == GROUPS * (NEW_TOKENS - 1)
    low, high = report.gate.delta_tau_ci95
    assert low < setting.tau - setting.baseline_tau < high
    comparison = next(one for one in report.comparisons if one.task == "all")
    assert (comparison.first, comparison.differs, comparison.same_trunk) == ("stale", True, True)
    assert set(report.endpoint) == {"stale", "retrained"}
    assert "retrained beats stale" in printed.out
    assert (out / "report.html").is_file()


@pytest.mark.parametrize(
    ("replies", "outcome", "baseline"),
    [
        ((llama(2), llama(2)), "refused", "stale"),
        ((llama(2), llama(0)), "refused", "stale"),
        ((llama(-1), llama(2)), "undecided", "none"),
        ((llama(-1), llama(2, ms_per_token=3.0)), "refused", "none"),
    ],
    ids=["equal", "worse", "as slow as without drafts", "slower than without drafts"],
)
def test_a_head_that_is_not_better_exits_with_3(
    compare: Callable[..., Any], out: Path, replies: tuple[ReplyFn, ...], outcome: str, baseline: str
) -> None:
    code, _ = compare(*replies)
    gate = load_report(out / "report.json").gate
    assert (code, gate.outcome, gate.baseline) == (3, outcome, baseline)


def test_against_plain_decoding_the_servers_own_clock_decides(compare: Callable[..., Any], out: Path) -> None:
    code, _ = compare(llama(-1, ms_per_token=3.0), llama(2))
    (setting,) = load_report(out / "report.json").gate.settings
    assert (code, setting.decides, setting.verdict) == (0, "speedup", "above")
    assert setting.speedup == pytest.approx((1 + 3 * NEW_TOKENS) / (1 + NEW_TOKENS))


def test_servers_that_write_other_texts_may_not_serve_one_trunk(compare: Callable[..., Any], out: Path) -> None:
    compare(llama(0), llama(2, text="another"))
    report = load_report(out / "report.json")
    assert "Only 0% of the greedy texts are the same: do both serve one trunk?" in report.gate.reason
    assert {one.same_trunk for one in report.comparisons} == {False}


def test_three_servers_are_compared_without_a_verdict(compare: Callable[..., Any], out: Path) -> None:
    code, _ = compare(llama(0), llama(2), llama(1), names=("a", "b", "c"))
    report = load_report(out / "report.json")
    assert (code, report.gate, list(report.arms)) == (0, None, ["a", "b", "c"])
    assert {(one.first, one.second) for one in report.comparisons} == {("a", "b"), ("a", "c"), ("b", "c")}


def test_speeds_are_over_that_of_the_first_server_without_drafts(compare: Callable[..., Any], out: Path) -> None:
    compare(llama(2), llama(-1), llama(-1, ms_per_token=2.0), names=("drafts", "plain", "another"))
    arms = load_report(out / "report.json").arms
    # Prefill takes a millisecond.
    slower = (1 + NEW_TOKENS) / (1 + 2 * NEW_TOKENS)
    found = [arms[name].speedup for name in ("drafts", "plain", "another")]
    assert found == pytest.approx([1.0, 1.0, slower])
    assert [one.pays for one in arms.values()] == ["neither", None, None]


def test_servers_are_measured_at_several_loads_and_the_first_decides(compare: Callable[..., Any], out: Path) -> None:
    code, _ = compare(llama(0), llama(2), more=("--concurrency", "1", "4"))
    report = load_report(out / "report.json")
    names = ["stale@1", "retrained@1", "stale@4", "retrained@4"]
    assert (code, list(report.arms), report.gate.baseline) == (0, names, "stale@1")
    assert [report.endpoint[one]["concurrency"] for one in names] == [1, 1, 4, 4]
    assert {(one.first, one.second) for one in report.comparisons} == {tuple(names[:2]), tuple(names[2:])}
    assert all((one.tokens_per_second or 0.0) > 0.0 for one in report.arms.values())


def test_a_server_is_compared_with_arms_that_are_decoded_here(
    compare: Callable[..., Any], out: Path, capfd: Capture
) -> None:
    code, printed = compare(llama(2), names=("engine",), more=("here=demo:finetune+ngram",))
    report = load_report(out / "report.json")
    assert (code, report.gate, list(report.arms)) == (0, None, ["none", "here", "engine"])
    compared = {(one.first, one.second, one.same_trunk) for one in report.comparisons}
    # The server's answers are a fixed text.
    assert compared == {("here", "engine", False)}
    assert "engine: The responses at temperature 0 are not the trunk's" in printed.err


@pytest.mark.parametrize(
    ("replies", "more", "told"),
    [
        (
            (llama(0), llama(-1)),
            (),
            "arm retrained: no drafts, .* Start llama-server with --spec-type draft-mtp",
        ),
        ((llama(0), llama(2)), ("http://127.0.0.1:1",), "expected NAME=http://host:port for a server"),
        ((llama(0), llama(2)), ("stale=http://127.0.0.1:1",), "under different names"),
    ],
    ids=["no head", "no name", "one name twice"],
)
def test_what_the_gate_cannot_judge_is_an_error(
    compare: Callable[..., Any], out: Path, replies: tuple[ReplyFn, ...], more: tuple[str, ...], told: str
) -> None:
    code, printed = compare(*replies, more=more)
    assert code == 2
    assert re.search(told, printed.err), printed.err
    assert not out.exists()


def test_servers_are_asked_with_a_key(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERS_KEY", "word")
    shows = {"/props": lambda: json.dumps({"model_path": str(demo_path("finetune"))})}
    with (
        openai_server(llama(0), owner="llamacpp", shows=shows) as first,
        openai_server(llama(2), owner="llamacpp", shows=shows) as second,
    ):
        arms = [f"stale={first.url}", f"retrained={second.url}", "--suite", "demo", "--temperatures", "0"]
        run_command("compare", *arms, "--api-key-env", "SERVERS_KEY", "--concurrency", "2", "--out", out)
        for one in (first, second):
            assert one.headers
            assert all(sent["Authorization"] == "Bearer word" for sent in one.headers)


def test_a_server_elsewhere_needs_the_name_of_its_trunk(out: Path, capfd: Capture) -> None:
    with openai_server(llama(0), owner="llamacpp", shows={"/props": lambda: '{"model_path": "/far/away.gguf"}'}) as one:
        assert run_command("compare", f"a={one.url}", f"b={one.url}", "--out", out) == 2
    told = capfd.readouterr().err
    assert "serves /far/away.gguf; expected files on this machine" in told
    assert "--tokenizer CKPT" in told


# One server after the other

GREEDY = ("--temperatures", "0")


@pytest.fixture
def evaluate(suite: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that measures a server of the trunk alone and gives the directory."""

    def run(name: str, reply: ReplyFn, *more: str) -> Path:
        out = tmp_path / name
        with serving(reply) as served:
            command = ["evaluate", str(demo_path("finetune")), "--endpoint", served.url, "--served-only"]
            assert run_command(*command, "--suite", suite, *GREEDY, *more, "--out", out) == 0
        return out

    return run


def without_times(report: Any) -> Any:
    """Return a report without wall times and addresses."""
    if isinstance(report, dict):
        wall = ("tokens_per_second", "url", "head")
        return {name: without_times(value) for name, value in report.items() if name not in wall}
    return [without_times(one) for one in report] if isinstance(report, list) else report


@pytest.mark.parametrize("replies", [(llama(0), llama(2)), (llama(2), llama(0)), (llama(-1), llama(2))])
def test_evaluations_of_servers_are_judged_as_servers_at_once_are(
    compare: Callable[..., Any], evaluate: Callable[..., Path], suite: Path, tmp_path: Path, out: Path, replies: Any
) -> None:
    code, _ = compare(*replies)
    at_once = load_report(out / "report.json").to_json()
    arms = [f"{name}={evaluate(name, one)}" for name, one in zip(("stale", "retrained"), replies, strict=True)]
    command = ["compare", *arms, "--suite", str(suite), *GREEDY, "--out", str(tmp_path / "after")]
    assert main(command) == code
    found = load_report(tmp_path / "after" / "report.json").to_json()
    assert without_times(found) == without_times(at_once)
    assert found["arms"]["retrained"]["tokens_per_second"] > 0
    # It is finished.
    assert main(command) == code


def test_an_evaluation_is_compared_with_a_server_that_runs(
    compare: Callable[..., Any], evaluate: Callable[..., Path], out: Path
) -> None:
    code, _ = compare(llama(2), names=("retrained",), more=(f"stale={evaluate('stale', llama(0))}",))
    gate = load_report(out / "report.json").gate
    assert (code, gate.outcome, gate.baseline) == (3, "refused", "retrained")


@pytest.mark.parametrize(
    ("more", "odd"),
    [
        (("--seed", "7"), "seed"),
        (("--max-new-tokens", "64"), "max_new_tokens"),
        (("--temperatures", "0", "1"), "temperatures"),
        (("--concurrency", "2"), "concurrency"),
        (("--suite", "other.jsonl"), "suite, prompts"),
        ((), "prompts"),
    ],
)
def test_evaluations_with_other_prompts_or_settings_are_refused(
    evaluate: Callable[..., Path],
    suite: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Capture,
    more: tuple[str, ...],
    odd: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("other.jsonl"), [{"prompt": f"other {number}"} for number in range(GROUPS)])
    arms = [f"stale={evaluate('stale', llama(0))}"]
    if not more:
        # The file has other prompts by now.
        Path("other.jsonl").replace(suite)
    arms.append(f"retrained={evaluate('retrained', llama(2), *more)}")
    assert run_command("compare", *arms, "--suite", suite, *GREEDY, "--out", "out") == 2
    told = capfd.readouterr().err
    assert f"arm {'retrained' if more else 'stale'}: " in told
    assert f" differs in {odd}; expected" in told
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("report.json", "NAME=DIR of a finished evaluation"),
        ("measured", "and a record of each prompt"),
        ("server", "NAME=DIR of a finished evaluation of one"),
    ],
)
def test_an_unfinished_evaluation_or_one_without_records_is_refused(
    evaluate: Callable[..., Path],
    suite: Path,
    tmp_path: Path,
    out: Path,
    capfd: Capture,
    lost: str,
    told: str,
) -> None:
    arms = [f"{name}={evaluate(name, llama(0))}" for name in ("stale", "retrained")]
    place = tmp_path / "retrained"
    if lost == "server":
        # As of a checkpoint that was measured here.
        study = read_json(place / "study.json")
        write_json(place / "study.json", {**study, "server": None})
    else:
        (place / lost).rename(tmp_path / "lost")
    assert run_command("compare", *arms, "--suite", suite, *GREEDY, "--out", out) == 2
    assert told in capfd.readouterr().err


def test_a_comparison_is_not_of_an_evaluation_that_was_made_again(
    evaluate: Callable[..., Path], suite: Path, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    arms = [f"{name}={evaluate(name, llama(0))}" for name in ("stale", "retrained")]
    command = ["compare", *arms, "--suite", str(suite), *GREEDY, "--out", str(out)]
    assert main(command) == 3
    shutil.rmtree(tmp_path / "retrained")
    evaluate("retrained", llama(2))
    assert main(command) == 2
    assert "another study (its server differ" in capfd.readouterr().err
