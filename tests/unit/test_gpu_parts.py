"""The parts of a GPU measurement: limits that add up, programs that exist, results saved whatever happens."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_machine, gpu_parts, gpu_probe, gpu_profile, rollback, sampling, training
from benchmarks.gpu_parts import (
    MACHINE,
    MEASURED,
    PART_LIMIT_S,
    PARTS,
    REPOSITORY,
    STOP_S,
    TOTAL_LIMIT_S,
    PartRun,
    Place,
    Step,
    main,
    run_within,
    steps_of,
)
from mtp_inference.bench import __main__ as bench_main
from mtp_train.recipe.loading import load_recipe

SCRIPT = REPOSITORY / "inference" / "benchmarks" / "gpu.sh"
RECIPES = REPOSITORY / "recipes"
PLACES = [True, False]


def all_steps(on_gpu: bool, directory: Path = REPOSITORY / "nowhere") -> dict[str, list[Step]]:
    place = Place(on_gpu, directory / "results", directory / "work")
    return {part: steps_of(part, place, "c0ffee") for part in PARTS}


@pytest.fixture
def part_run(tmp_path: Path) -> PartRun:
    for name in ("results", "work", "out"):
        (tmp_path / name).mkdir()
    return PartRun("A", Place(True, tmp_path / "results", tmp_path / "work"), tmp_path / "out")


def program(code: str, name: str = "one", **more: Any) -> Step:
    return Step(name, 60, ("-c", code), **more)


def saved(part_run: PartRun) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((part_run.out / "A.json").read_text())
    return document


def test_the_script_is_valid_bash_and_runs_the_parts() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0
    assert os.access(SCRIPT, os.X_OK)
    env = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(["bash", SCRIPT, "F"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'F'" in done.stderr


def test_the_limits_of_a_part_and_of_all_parts_add_up() -> None:
    taken = {part: sum(step.limit_s + STOP_S for step in steps) for part, steps in all_steps(True).items()}
    assert max(taken.values()) < PART_LIMIT_S == 600
    assert sum(taken[part] for part in MEASURED) < TOTAL_LIMIT_S == 26 * 60


@pytest.mark.parametrize("on_gpu", PLACES)
def test_every_program_and_file_that_a_step_names_exists(on_gpu: bool) -> None:
    for steps in all_steps(on_gpu).values():
        assert len({step.name for step in steps}) == len(steps)
        for step in steps:
            for word, following in zip(step.words, [*step.words[1:], ""], strict=True):
                if word == "-m" and following != "gpu":
                    assert importlib.util.find_spec(following) is not None, following
                if word.endswith((".py", ".yaml")):
                    assert Path(word).is_file(), word


@pytest.mark.parametrize("on_gpu", PLACES)
def test_every_program_takes_the_words_that_it_is_given(on_gpu: bool) -> None:
    parsers = {"training.py": training._parse, "rollback.py": rollback._parse, "sampling.py": sampling._parse}
    understood = []
    for part, steps in all_steps(on_gpu).items():
        for step in steps:
            words = list(step.words)
            if Path(words[0]).name in parsers:
                parsers[Path(words[0]).name](words[1:])
            elif words[1] == "mtp_inference.bench":
                bench_main._parser().parse_args(words[2:])
            elif "mtp_train" in words:
                recipe, *fields = words[words.index("mtp_train") + 1 :]
                load_recipe(Path(recipe), fields)
            else:
                continue
            understood.append(f"{part} {step.name}")
    assert len(understood) == 14


def test_words_that_a_recipe_refuses_are_found() -> None:
    with pytest.raises(Exception, match="expected fewer than"):
        load_recipe(RECIPES / "retrain_head.yaml", ["train.max_steps=2"])


def test_decoding_and_training_are_measured_without_the_packages_that_an_image_may_lack() -> None:
    lacking = ("datasets", "dill", "multiprocess", "gguf", "wandb", "fla")
    modules = ("gpu_machine", "gpu_probe", "gpu_profile", "rollback", "sampling", "training")
    code = f"""
import sys
from importlib.machinery import PathFinder
class Lacking(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {lacking} else PathFinder.find_spec(name, path, target)
sys.meta_path = [Lacking if finder is PathFinder else finder for finder in sys.meta_path]
for name in {modules}:
    __import__("benchmarks." + name)
import mtp_inference.bench.__main__
try:
    import mtp_train.data.sources
except ModuleNotFoundError as error:
    print("lacks", error.name)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "inference")])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The control: what reads data cannot do without.
    assert done.stdout.split() == ["lacks", "datasets"]


def test_a_part_saves_every_kind_of_end_and_goes_on(part_run: PartRun, tmp_path: Path) -> None:
    report, outcome = tmp_path / "work" / "report.json", tmp_path / "work" / "outcome.json"
    report.write_text('{"half": true}')
    outcome.write_text('{"exit_code": 3}')
    steps = [
        program("print('text'); print('{\"figure\": 1}')", "good"),
        program("import sys; print('why'); sys.exit(4)", "bad"),
        replace(program("import signal; signal.pause()", "long", result=report), limit_s=0),
        program("", "needy", needs=("no_such_package", "json")),
        program("", "elsewhere", left_out="for a reason"),
        program("import sys; sys.exit(3)", "refused", outcome=outcome, result=report, keeps=(report,)),
    ]
    missed = part_run.run(steps)
    assert missed == ["A bad (failed with 4)", "A long (out of time)", "A needy (lacks packages)"]
    document = saved(part_run)
    assert not document["complete"]
    records = {record["name"]: record for record in document["steps"]}
    assert records["good"]["result"] == {"figure": 1}
    assert records["bad"]["last_lines"] == ["why"]
    # What was written before the limit counts.
    assert records["long"]["result"] == {"half": True}
    assert records["needy"]["reason"].startswith("no_such_package: not installed")
    assert records["elsewhere"] | {"reason": "for a reason", "status": "left out"} == records["elsewhere"]
    assert records["refused"]["status"] == "done"
    with tarfile.open(part_run.out / "A.tgz") as tar:
        names = set(tar.getnames())
    assert {"A/good.txt", "A/bad.txt", "A/long.txt", "A/refused/report.json"} <= names
    assert sorted(path.name for path in part_run.out.iterdir()) == ["A.json", "A.tgz"]


def test_a_run_that_fails_without_a_verdict_is_a_failure(part_run: PartRun, tmp_path: Path) -> None:
    refused = program("import sys; sys.exit(3)", outcome=tmp_path / "work" / "outcome.json")
    assert part_run.run([refused]) == ["A one (failed with 3)"]


def test_a_part_that_is_stopped_has_saved_what_came_before(part_run: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_unused: object) -> None:
        raise SystemExit(143)

    assert part_run.run([program("print('{\"figure\": 1}')")]) == []
    assert saved(part_run)["complete"]
    monkeypatch.setattr(gpu_parts, "run_within", stopped)
    with pytest.raises(SystemExit):
        part_run.run([program("", "two"), program("", "three")])
    assert [(one["name"], one["status"]) for one in saved(part_run)["steps"]] == [("one", "done"), ("two", "running")]


def test_a_part_ends_where_the_machine_cannot_be_measured(part_run: PartRun) -> None:
    steps = [program("import sys; print('{\"gpu\": null}'); sys.exit(1)", MACHINE), program("print(1)")]
    assert part_run.run(steps) == [f"A {MACHINE} (failed with 1)"]
    assert saved(part_run)["steps"][1:] == []


def test_a_part_goes_on_where_the_machine_is_only_slow_to_start(part_run: PartRun) -> None:
    slow = replace(program("import signal; signal.pause()", MACHINE), limit_s=0)
    assert part_run.run([slow, program("print('{\"figure\": 1}')")]) == [f"A {MACHINE} (out of time)"]
    assert saved(part_run)["steps"][1]["result"] == {"figure": 1}


def test_a_step_out_of_time_ends_with_all_that_it_started(tmp_path: Path) -> None:
    # The grandchild keeps the pipe open until it is killed.
    read, write = os.pipe()
    os.set_inheritable(write, True)
    code = (
        f"import os, signal, subprocess, sys; os.set_inheritable({write}, True);"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0));"
        f"subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE, pass_fds=[{write}]);"
        "signal.pause()"
    )
    real = subprocess.Popen

    class Inheriting(real):  # type: ignore[type-arg, misc, valid-type]
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings, pass_fds=[write])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_parts.subprocess, "Popen", Inheriting)
        assert run_within(["-c", code], 1.5, tmp_path / "log", dict(os.environ)) is None
    os.close(write)
    # End of file: no process has the pipe open.
    assert os.read(read, 1) == b""
    os.close(read)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["A"], "--out: none, and $OUT is not set"),
        (["D3", "--out", "x"], "--work: none"),
        (["--out", "x"], "the following arguments are required: PART"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUT", raising=False)
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err


def test_all_is_what_is_measured_and_out_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", "results")
    options = gpu_parts._parse(["all", "--cpu"])
    assert (options.parts, options.out, options.cpu) == (["A", "B", "C"], Path("results"), True)


def test_the_machine_is_recorded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the record of a machine without a GPU is tested, on machines that have one too.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_machine.main(["--device", "cpu", "--commit", "c0ffee"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["commit"], record["gpu"], record["packages"]["torch"]) == ("c0ffee", None, torch.__version__)
    assert {"date", "cpu", "python", "cuda", "compiler"} <= record.keys()
    assert gpu_machine.main(["--device", "cuda"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["device"] == "cuda"
    assert "torch sees no GPU" in captured.err


def test_the_probe_ends_in_one_line_with_every_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_probe, "CPU", gpu_probe.CPU._replace(backends=("default", "CUDNN_ATTENTION")))
    gpu_probe.main(["--device", "cpu"])
    *_, last = capsys.readouterr().out.splitlines()
    results = json.loads(last)["results"]
    works, lacks = results["windows"]
    assert works["relative_error"] < 0.01
    assert works["graph_us"] > 0
    assert lacks["error"].startswith("RuntimeError: No ")
    assert results["unrolls"][0]["not_finite"] == {"output": 0, "query": 0, "key": 0, "value": 0}
    assert results["ceilings"].keys() > {"copy_bytes_per_second", "tiny_kernel_seconds"}
    assert results["capture_error"] is None


def test_the_probe_counts_gradients_that_are_not_finite() -> None:
    cpu = torch.device("cpu")
    case = gpu_probe.unroll_case(8, 4, "default", cpu)
    with torch.no_grad():
        case.value[0, 0, 0, 0] = torch.inf
    found = gpu_probe.trained_call(case, cpu)["not_finite"]
    assert min(found["output"], found["query"]) > 0


def test_the_probe_captures_nothing_after_a_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def refuse(pieces: object, *_unused: object) -> None:
        tried.append(pieces)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(gpu_probe, "time_alone", refuse)
    cases = gpu_probe.window_cases(gpu_probe.CPU, torch.device("cpu"))
    assert len(cases) == 2
    assert "not permitted" in str(gpu_probe.time_in_graphs(cases, torch.device("cpu")))
    assert len(tried) == 1


def test_the_profile_lists_what_a_round_runs(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_profile.main(["--device", "cpu", "--shape", "tiny-qwen", "--used", "32", "--depths", "1,0"])
    deep, plain = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert (deep["depth"], plain["depth"]) == (1, 0)
    assert deep["num_kernels"] > plain["num_kernels"] > 0
    names = {kernel["name"] for kernel in plain["kernels"]}
    assert any("mm" in name or "linear" in name for name in names)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton: not installed")
def test_every_part_runs_on_a_cpu_and_leaves_its_two_files(tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    settings = ("--cpu", "--out", out, "--work", work, "--commit", "c0ffee")
    command = ["bash", SCRIPT, "all", *(part for part in PARTS if part not in MEASURED), *settings]
    env = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in out.iterdir()} == {f"{part}.{kind}" for part in PARTS for kind in ("json", "tgz")}
    without = {"left out": [], "no result": []}
    for part, steps in all_steps(False).items():
        document = json.loads((out / f"{part}.json").read_text())
        assert document["complete"]
        assert (document[MACHINE]["commit"], document[MACHINE]["device"]) == ("c0ffee", "cpu")
        assert [record["name"] for record in document["steps"]] == [step.name for step in steps]
        for record in document["steps"][1:]:
            if record["status"] == "left out":
                without["left out"].append(record["name"])
            elif record["result"] is None:
                without["no result"].append(record["name"])
    assert without == {"left out": ["train-flex", "base", "finetune"], "no result": ["tests"]}
