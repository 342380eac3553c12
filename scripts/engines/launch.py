"""List the supported engines, and run the program of an engine in the engine's own Python environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True, kw_only=True)
class EngineUnderTest:
    """An engine, with the properties that a comparison depends on."""

    program: str
    """Name of its file under ``programs/``."""
    convention: str
    """The convention of its head's wiring, as named in the family records."""
    leading_row: bool = False
    """Whether its head reads an extra first row: the first token with a hidden state of zeros."""
    drafts_first: bool = False
    """Whether it drafts before the first token of the answer is known."""
    assistant: tuple[int, int] = (1, 1)
    """``POSITION_OFFSET`` and ``MORE_SLIDING_KEYS`` of :mod:`mtp_train.heads.assistant` with which it drafts."""


ENGINES: Mapping[str, EngineUnderTest] = {
    "vllm": EngineUnderTest(program="run_vllm.py", convention="vllm", assistant=(0, 0)),
    "sglang": EngineUnderTest(program="run_sglang.py", convention="sglang"),
    "llama.cpp": EngineUnderTest(
        program="run_llama_cpp.py",
        convention="llama.cpp",
        leading_row=True,
        drafts_first=True,
        assistant=(1, -1),
    ),
    "transformers": EngineUnderTest(program="run_transformers.py", convention="auto"),
}


class EngineProgramError(Exception):
    """Raised for a program that ended without its document."""


def engine_threads() -> int:
    """Return the OpenMP threads of an engine's process: ``OMP_NUM_THREADS``, else 1."""
    # Its first value: OpenMP accepts a list, one value per level of nesting.
    return int(os.environ.get("OMP_NUM_THREADS", "1").split(",")[0])


def run_program(engine: EngineUnderTest, python: str, job: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """Run an engine's program and return the document it writes.

    Args:
        engine: The engine.
        python: The interpreter of its environment.
        job: The job, as JSON.
        work: A directory for the job, the document and the program's log.

    Raises:
        EngineProgramError: The program failed; the message ends with the last lines of its log.
    """
    work.mkdir(parents=True, exist_ok=True)
    job_file, out, log = work / "job.json", work / "out.json", work / "log.txt"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    # Variables of our environment must not affect another interpreter.
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(engine_threads())}
    command = [python, str(PROGRAMS / engine.program), str(job_file), str(out)]
    with log.open("w", encoding="utf-8") as handle:
        done = subprocess.run(command, env=env, stdout=handle, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0 or not out.is_file():
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise EngineProgramError(
            f"{engine.program}: exit code {done.returncode}, no document; expected one. Its docstring says what the "
            f"environment needs. The log ends:\n{last}"
        )
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return document
