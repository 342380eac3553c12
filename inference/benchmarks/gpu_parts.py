#!/usr/bin/env python
"""Run the measurements of one GPU in parts. Every step has a time limit, and results are saved after each step.

    inference/benchmarks/gpu.sh A --out DIR
    inference/benchmarks/gpu.sh all --cpu --out DIR

A part writes two files to DIR: ``PART.json`` with the machine, every step's exit status, time and result, and
``PART.tgz`` with the output of the steps and the files they made. After a step that fails or times out, the next one
runs. ``gpu/README.md`` lists the parts. Only the standard library is imported here, so that a missing package fails one
step only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PART_LIMIT_S, TOTAL_LIMIT_S = 600, 1560
"""Time limits of each part, and of A, B and C together."""
CPU_PATIENCE = 4
"""Factor on the time limit of a step on a CPU, which may be busy with other work."""
STOP_S = 10
"""Seconds between SIGTERM, on which a step saves its state, and SIGKILL."""
SHOWN_LINES, KEPT_LINES, LINE_CHARS = 12, 40, 220
MACHINE = "machine"
NO_FLEX = "torch has no backward pass of flex_attention on a CPU"
LEAST_RUN = (
    "train.max_steps=2 train.warmup_steps=1 data.regenerate.max_prompts=24 data.regenerate.max_new_tokens=16 "
    "evaluate.prompts=5 evaluate.max_new_tokens=8 evaluate.arms=[graft,retrained]"
)
"""Overrides for a short run of every stage of a recipe on a CPU."""
DATA = ("datasets", "dill", "multiprocess")
"""Packages that a recipe's data needs, and that a minimal image may lack."""


@dataclass(frozen=True)
class Step:
    """A program with its time limit."""

    name: str
    limit_s: int
    words: tuple[str, ...]
    """Arguments of the Python interpreter."""
    result: Path | None = None
    """A JSON file that the step writes; None if the last line of its output is the result."""
    keeps: tuple[Path, ...] = ()
    """Files and directories to save with the output."""
    outcome: Path | None = None
    """A run's ``outcome.json``: a gate that refused the head (exit code 3) is a result, not a failure."""
    needs: tuple[str, ...] = ()
    """Modules that the step needs; without them it is not started."""
    env: Mapping[str, str] = field(default_factory=dict)
    left_out: str | None = None
    """The reason why the step does not run on this device; else None."""


@dataclass(frozen=True)
class Shapes:
    """Names of model shapes (``mtp_inference/bench/subject.py``)."""

    gpu: str
    cpu: str


DENSE, EXPERTS = Shapes("9b", "tiny-qwen"), Shapes("7b-moe", "tiny-glm")


@dataclass(frozen=True)
class Place:
    """Device and directories of the steps of a part."""

    on_gpu: bool
    results: Path
    """Directory of files to save."""
    work: Path
    """Directory of files that are too large to save. The calls of part D share it."""

    @property
    def device(self) -> str:
        """The name of the device in torch."""
        return "cuda" if self.on_gpu else "cpu"

    def script(self, name: str, limit_s: int, file: str, both: str, gpu: str, cpu: str, **more: Any) -> Step:
        """Return a step that runs a program of this directory, with arguments for both devices and for each."""
        words = (str(HERE / file), "--device", self.device, *both.split(), *(gpu if self.on_gpu else cpu).split())
        return Step(name, limit_s, words, **more)

    def bench(self, name: str, limit_s: int, both: str, gpu: str, cpu: str, shapes: Shapes = DENSE) -> Step:
        """Return a step of ``mtp_inference.bench``, whose file keeps the cells that were measured before a timeout."""
        out = self.results / f"{name}.json"
        shape = shapes.gpu if self.on_gpu else shapes.cpu
        words = ("-m", "mtp_inference.bench", "--shape", shape, "--device", self.device, "--dtype", "bfloat16")
        rest = (gpu if self.on_gpu else cpu).split()
        return Step(name, limit_s, (*words, "--out", str(out), *both.split(), *rest), result=out)

    def train(self, name: str, limit_s: int, both: str = "", shapes: Shapes = DENSE, **more: Any) -> Step:
        """Return a step that times head training in bf16."""
        gpu = f"--shape {shapes.gpu} --tokens 8192 --seq-len 2048 --repeats 3"
        cpu = f"--shape {shapes.cpu} --trunk-dtype bfloat16 --tokens 16 --seq-len 16 --repeats 1"
        return self.script(name, limit_s, "training.py", f"--precision bf16 {both}", gpu, cpu, **more)


def part_a(place: Place) -> list[Step]:
    """Return the steps that measure the hardware, test the GPU path, and measure decoding at batch 1."""
    tests = [path for path in (REPOSITORY / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    quiet = ("-p", "no:cacheprovider", "-W", "default", "-W", "error:decoder", "--continue-on-collection-errors")
    return [
        place.script("probe", 90, "gpu_probe.py", "", "", ""),
        Step("tests", 150, ("-m", "pytest", "-v", *quiet, "-m", "gpu", *map(str, sorted(tests)))),
        place.script("profile", 80, "gpu_profile.py", "--depths 3,0", "", "--shape tiny-qwen --used 64"),
        place.bench(
            *("decode", 120, "--accept 0.8 --depths 0,3 --batches 1 --prompt-lengths 32"),
            gpu="--new-tokens 128 --repeats 3",
            cpu="--new-tokens 16 --repeats 1",
        ),
    ]


def part_b(place: Place) -> list[Step]:
    """Return the steps that time head training: default, with Triton kernels, smaller chunks, and flex_attention."""
    # Without a GPU, Triton's kernels run in its interpreter.
    triton: dict[str, Any] = {"needs": ("triton",), "env": {} if place.on_gpu else {"TRITON_INTERPRET": "1"}}
    return [
        place.train("train", 90),
        place.train("train-triton", 90, "--rows triton", **triton),
        place.train("train-triton-256", 90, "--rows triton --chunk-rows 256", **triton),
        place.train("train-flex", 120, "--attention flex", left_out=None if place.on_gpu else NO_FLEX),
    ]


def part_c(place: Place) -> list[Step]:
    """Return the steps for batches, transformers' decoding, the demo's recipe, FSDP2, rollback and sampling."""
    short = "train.max_steps=6 data.regenerate.max_prompts=64 evaluate.prompts=8"
    launcher = ("-m", "accelerate.commands.launch", "--num_processes", "1", "--config_file")
    config = REPOSITORY / "recipes" / "accelerate" / ("fsdp2.yaml" if place.on_gpu else "single.yaml")
    return [
        place.bench(
            *("batches", 130, "--accept 0.8 --prefill"),
            gpu="--depths 0,1,3,7 --batches 1,16 --prompt-lengths 2048 --new-tokens 64 --repeats 2",
            cpu="--depths 0,3 --batches 1,2 --prompt-lengths 32 --new-tokens 8 --repeats 1",
        ),
        place.bench(
            *("transformers", 60, "--accept 0.8 --depths 0,3 --batches 1 --prompt-lengths 32 --against transformers"),
            gpu="--new-tokens 48 --repeats 1",
            cpu="--new-tokens 8 --repeats 1",
        ),
        recipe_step("recipe", 130, ("-m",), place.work / "recipe", "" if place.on_gpu else LEAST_RUN),
        recipe_step(
            *("fsdp2", 60, (*launcher, str(config), "-m"), place.work / "fsdp2"), short if place.on_gpu else LEAST_RUN
        ),
        place.script(
            *("rollback", 30, "rollback.py", "--key-heads 16 --heads 32"),
            gpu="--rows 1,16 --window 4,8 --key-width 128 --value-width 128 --layers 24 --repeats 30",
            cpu="--rows 1,2 --window 4 --key-width 8 --value-width 8 --layers 2 --repeats 2",
        ),
        place.script(
            *("sampling", 30, "sampling.py", ""),
            gpu="--rows 1,4,64 --repeats 30",
            cpu="--rows 1,4 --vocab 4096 --repeats 2",
        ),
    ]


def recipe_step(
    name: str, limit_s: int, launched: tuple[str, ...], run: Path, fields: str, recipe: str = "retrain_head"
) -> Step:
    """Return a step that runs a recipe, or resumes its run of an earlier call."""
    words = (*launched, "mtp_train", str(REPOSITORY / "recipes" / f"{recipe}.yaml"), f"run_dir={run}")
    settings = ("track.wandb=off", "export.enabled=false", *fields.split())
    names = ("metrics.jsonl", "report.json", "report.html", "acceptance.csv", "comparisons.csv", "figures")
    return Step(
        *(name, limit_s, (*words, *settings)),
        result=run / "report.json",
        keeps=(run / "outcome.json", *(run / name for name in names)),
        outcome=run / "outcome.json",
        needs=DATA,
    )


def part_d1(place: Place) -> list[Step]:
    """Return the step that makes the base of the larger pair."""
    return [maker_step("base", place, "base", ("base.json",))]


def part_d2(place: Place) -> list[Step]:
    """Return the step that makes the fine-tune of the larger pair, its prompts and its code."""
    return [maker_step("finetune", place, "finetune check texts", ("finetune.json", "check.json"))]


def part_d3(place: Place) -> list[Step]:
    """Return the step that runs or resumes the study on the larger pair."""
    work = place.work
    pair = f"model.trunk={work}/finetune model.head_from={work}/base data.sources.0.path={work}/prompts.jsonl"
    sizes = "train.max_steps=200 train.tokens_per_step=12288 train.lr=1.5e-3 train.micro_batch_sequences=8"
    sizes += " evaluate.prompts=64"
    arms = "evaluate.arms=[graft,retrained,vanilla]"
    least = f"{LEAST_RUN} {arms} study.objectives=[kl] study.temperatures=[0.0] study.rules=[greedy]"
    fields = f"{pair} study.vanilla_sources=[{work}/code.jsonl] {sizes}" if place.on_gpu else least
    return [recipe_step("study", 540, ("-m",), work / "study", fields, recipe="vanilla_vs_distill")]


def part_e(place: Place) -> list[Step]:
    """Return the steps that time decoding and head training of a mixture of experts."""
    return [
        place.bench(
            *("experts", 120, "--accept 0.8 --depths 0,3 --batches 1 --prompt-lengths 32 --against transformers"),
            gpu="--new-tokens 64 --repeats 2",
            cpu="--new-tokens 8 --repeats 1",
            shapes=EXPERTS,
        ),
        place.train("train-experts", 120, shapes=EXPERTS),
    ]


def maker_step(name: str, place: Place, stages: str, notes: tuple[str, ...]) -> Step:
    """Return a step that makes models of the larger pair."""
    words = (str(REPOSITORY / "scripts" / "make_demo.py"), *stages.split(), "--size", "large", "--device", "cuda")
    kept = tuple(place.work / note for note in notes)
    left_out = None if place.on_gpu else "the larger pair takes hours on a CPU; part D3 studies the demo's there"
    words = (*words, "--work", str(place.work))
    return Step(name, 540, words, result=kept[0], keeps=kept, needs=DATA, left_out=left_out)


PARTS: dict[str, Callable[[Place], list[Step]]] = {
    "A": part_a,
    "B": part_b,
    "C": part_c,
    "D1": part_d1,
    "D2": part_d2,
    "D3": part_d3,
    "E": part_e,
}
MEASURED = ("A", "B", "C")
"""The parts of ``all``."""
STUDY = ("D1", "D2", "D3")
"""Parts with a common work directory."""


def steps_of(part: str, place: Place, commit: str | None) -> list[Step]:
    """Return the steps of a part; the first one records the machine."""
    commit_words = f"--commit {commit}" if commit else ""
    return [place.script(MACHINE, 30, "gpu_machine.py", commit_words, "", ""), *PARTS[part](place)]


class PartRun:
    """One run of a part.

    Args:
        part: Name of the part.
        place: Device and directories.
        out: Directory for its two files.
    """

    def __init__(self, part: str, place: Place, out: Path) -> None:
        self.part = part
        self.place = place
        self.out = out
        self.shown: list[str] = []
        self.document: dict[str, Any] = {"part": part, "complete": False, MACHINE: None, "steps": []}

    def run(self, steps: Sequence[Step]) -> list[str]:
        """Run steps one after the other, and return the names of steps without a result."""
        missed = []
        for step in steps:
            limit_s = step.limit_s * (1 if self.place.on_gpu else CPU_PATIENCE)
            record: dict[str, Any] = {"name": step.name, "status": "running", "limit_s": limit_s}
            self.document["steps"].append(record)
            try:
                self._run(step, record)
            finally:
                self._keep(step, record)
                self.save()
            print(f"== {self.part} {step.name}: {record['status']}, {record.get('seconds', 0):.0f} s", flush=True)
            print("\n".join(line[:LINE_CHARS] for line in self.shown), flush=True)
            if record["status"] not in ("done", "left out"):
                missed.append(f"{self.part} {step.name} ({record['status']})")
                # Stop the part if there is no GPU, but not because the machine step timed out.
                if step.name == MACHINE and record["status"] != "out of time":
                    return missed
        self.document["complete"] = not missed
        self.save()
        return missed

    def save(self) -> None:
        """Write both files again, each atomically."""
        for name, write in ((f"{self.part}.json", self._write_json), (f"{self.part}.tgz", self._write_tar)):
            partial = self.out / f".{name}.partial"
            write(partial)
            partial.replace(self.out / name)

    def _write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")

    def _write_tar(self, path: Path) -> None:
        with tarfile.open(path, "w:gz") as tar:
            tar.add(self.place.results, arcname=self.part)

    def _run(self, step: Step, record: dict[str, Any]) -> None:
        missing = [name for name in step.needs if importlib.util.find_spec(name) is None]
        if step.left_out is not None or missing:
            record["status"] = "left out" if step.left_out is not None else "lacks packages"
            record["reason"] = step.left_out or f"{', '.join(missing)}: not installed; see gpu/README.md"
            return
        log = self.place.results / f"{step.name}.txt"
        started = time.monotonic()
        status = run_within(step.words, record["limit_s"], log, environment(step, on_gpu=self.place.on_gpu))
        record["seconds"] = round(time.monotonic() - started, 1)
        record["status"] = "out of time" if status is None else f"failed with {status}" if status else "done"
        if status and step.outcome is not None and _read(step.outcome, {}).get("exit_code") == 3:
            record["status"] = "done"

    def _keep(self, step: Step, record: dict[str, Any]) -> None:
        """Copy the files of a step to the saved directory, and its result to its record."""
        for path in step.keeps:
            target = self.place.results / step.name / path.name
            target.parent.mkdir(exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target, dirs_exist_ok=True)
            elif path.is_file():
                shutil.copyfile(path, target)
        log = self.place.results / f"{step.name}.txt"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        last = _parsed(lines[-1] if lines else "", None)
        result = last if step.result is None else _read(step.result, None)
        if step.name == MACHINE:
            self.document[MACHINE] = result
        else:
            record["result"] = result
        text = lines if last is None else lines[:-1]
        self.shown = [record["reason"]] if "reason" in record else text[-SHOWN_LINES:]
        if record["status"] != "done" or result is None:
            record["last_lines"] = [line[:LINE_CHARS] for line in text[-KEPT_LINES:]]


def _parsed(text: str, otherwise: Any) -> Any:
    """Return the JSON object in a text, or ``otherwise``."""
    try:
        found = json.loads(text)
    except ValueError:
        return otherwise
    return found if isinstance(found, dict) else otherwise


def _read(path: Path, otherwise: Any) -> Any:
    return _parsed(path.read_text(encoding="utf-8"), otherwise) if path.is_file() else otherwise


def environment(step: Step, *, on_gpu: bool) -> dict[str, str]:
    """Return the environment of a step."""
    paths = [str(REPOSITORY), str(REPOSITORY / "inference"), str(REPOSITORY / "tests")]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    cpu = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    ours = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**os.environ, **ours, **cpu, **step.env}


def run_within(words: Sequence[str], limit_s: float, log: Path, env: Mapping[str, str]) -> int | None:
    """Run the interpreter with its output in a file, and return its exit status; None after a timeout.

    The whole process group is killed at the end of this call, also after an exception.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=REPOSITORY,
            env=dict(env),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                _wait(process, STOP_S)
            _kill_group(process.pid)
            process.wait()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"{process.args!r}: still running {seconds} s after SIGTERM; killed.", file=sys.stderr)


def _kill_group(group: int) -> None:
    """Kill a process group, including processes that a step left running, since they would occupy the GPU."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=(*PARTS, "all"), metavar="PART", help=", ".join((*PARTS, "all")))
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="for the results; default: $OUT")
    parser.add_argument("--work", type=Path, help="of the parts D, kept from call to call")
    parser.add_argument("--cpu", action="store_true", help="the same steps in small shapes, without a GPU")
    parser.add_argument("--commit", help="of the code, where git cannot say")
    options = parser.parse_args(arguments)
    options.parts = [one for part in options.parts for one in (MEASURED if part == "all" else (part,))]
    if options.out is None:
        parser.error("--out: none, and $OUT is not set; expected a directory for the results. Give --out DIR.")
    if options.work is None and not set(options.parts).isdisjoint(STUDY):
        parser.error("--work: none; expected a directory that the parts D share. Give --work DIR.")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested parts.

    Returns:
        0 if every step has a result, else 1; 2 for wrong arguments; 128 plus the signal number after a signal.
    """
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    options.out.mkdir(parents=True, exist_ok=True)
    missed = []
    for part in options.parts:
        with tempfile.TemporaryDirectory() as scratch:
            results = Path(scratch, "results")
            work = options.work.absolute() if part in STUDY else Path(scratch, "work")
            results.mkdir()
            work.mkdir(parents=True, exist_ok=True)
            place = Place(not options.cpu, results, work)
            missed += PartRun(part, place, options.out).run(steps_of(part, place, options.commit))
    print(f"{options.out}: {', '.join(f'{part}.json, {part}.tgz' for part in options.parts)}")
    if missed:
        print(f"gpu.sh: without a result: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
