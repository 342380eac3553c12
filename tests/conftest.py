"""Make every test start from the same state: seeded, offline, one CPU thread, fp32, no state left by accelerate."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

# The Hugging Face libraries read these once, when a test file first imports them; launched programs inherit them.
# The private HF_HOME hides the user's caches and default accelerate configuration.
HF_HOME = tempfile.mkdtemp(prefix="mtp-train-tests-")
os.environ.update(
    HF_HOME=HF_HOME,
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    MPLBACKEND="agg",
    OMP_NUM_THREADS="1",
    # MKL's sums depend on where tensors lie in memory otherwise, so that a process rounds now so, now otherwise.
    MKL_CBWR="AUTO,STRICT",
)

torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    shutil.rmtree(HF_HOME, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the gpu tests by name where torch sees no accelerator."""
    if torch.accelerator.is_available():
        return
    for item in items:
        # Not by keyword: the names of the directories that a test lies in are keywords too.
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="gpu: torch sees no accelerator here"))


def seed() -> None:
    """Seed the three generators."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def seeded_module() -> None:
    """Seed before the fixtures of a module, which would otherwise depend on the files that ran before."""
    seed()


@pytest.fixture(scope="module", autouse=True)
def quick_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let whole runs time few prompts."""
    from runs import few_timed_prompts

    with few_timed_prompts() if request.path.parent.name == "e2e" else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Seed before a test; put back what a test may have changed for the process after it."""
    seed()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    # accelerate keeps its state for the life of the process; a test that never imported it pays nothing.
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A path to write to, at which there is nothing."""
    return tmp_path / "out"


@pytest.fixture
def new_run(tmp_path: Path) -> Path:
    """The path of a run directory that does not exist yet."""
    return tmp_path / "run"


@pytest.fixture
def heard() -> Iterator[None]:
    """Let SIGINT through: a shell makes its background jobs ignore it, and what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Imports inside: most tests read no datasets, and need no run.
@pytest.fixture
def own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of the test's own: a file of the same name is another one. No progress bars."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, a tiny Qwen3.5 with its head, and ``finetune``, a fine-tune of it without; to read."""
    from checkpoints import base_and_finetune

    directory = tmp_path_factory.mktemp("saved")
    base_and_finetune(directory, "qwen3_5")
    return directory


@pytest.fixture
def base(saved: Path, tmp_path: Path) -> Path:
    """A copy of the base that a test may change."""
    return Path(shutil.copytree(saved, tmp_path, dirs_exist_ok=True)) / "base"


@pytest.fixture
def finetune(base: Path) -> Path:
    """A copy of the fine-tune, beside it."""
    return base.with_name("finetune")


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory of the whole test run: the first process to ask has it made, and the others wait for it."""
    root = factory.getbasetemp()
    # Processes of pytest-xdist have a directory each in the one of the test run.
    directory = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    complete = directory.with_suffix(".complete")
    with FileLock(f"{directory}.lock"):
        if not complete.exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            make(directory)
            complete.touch()
    return directory


def finished_run(directory: Path, inputs: Path, exit_code: int, **settings: Any) -> None:
    """Run a recipe that learns, but for some settings, in a directory."""
    from mtp_train.cli.main import main
    from runs import LEARNS, few_timed_prompts, write_recipe

    path = write_recipe(directory / "recipe.yaml", inputs, directory / "run", **{**LEARNS, **settings})
    with few_timed_prompts():
        assert main(["run", str(path)]) == exit_code


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, its stripped fine-tune and chats."""
    from runs import write_inputs

    return made_once(tmp_path_factory, "pristine", write_inputs)


@pytest.fixture(scope="session")
def inputs(pristine: Path) -> Path:
    """The same; a file whose tests damage their inputs makes copies of it under this name."""
    return pristine


@pytest.fixture
def own_inputs(pristine: Path, tmp_path: Path) -> Path:
    """A copy of them that a test may change."""
    return Path(shutil.copytree(pristine, tmp_path / "in"))


@pytest.fixture(scope="session")
def recipe(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run that has finished and exported, in ``run`` beside it; answers come in batches of two."""

    def make(directory: Path) -> None:
        answers = {"max_new_tokens": 24, "temperature": 0.0, "batch_size": 2}
        arms = ["none", "graft", "retrained", "vanilla"]
        finished_run(directory, pristine, 0, data__regenerate=answers, evaluate__arms=arms)

    return made_once(tmp_path_factory, "finished", make) / "recipe.yaml"


@pytest.fixture(scope="session")
def run_dir(recipe: Path) -> Path:
    """The run directory of that recipe."""
    return recipe.parent / "run"


@pytest.fixture(scope="session")
def refused(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run in float32 that the gate refused: ``run`` beside it has responses, a head and no export."""

    def make(directory: Path) -> None:
        # One step changes the weights measurably, and the drafts hardly.
        finished_run(directory, pristine, 3, train__lr=1e-4, train__max_steps=1, model__dtype="float32")

    return made_once(tmp_path_factory, "refused", make) / "recipe.yaml"
