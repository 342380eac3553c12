"""Make every test start from the same state: seeded, offline, one CPU thread, fp32, no state left by accelerate."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

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


@contextlib.contextmanager
def few_timed_prompts() -> Iterator[None]:
    """Time three prompts of a run once: decoding one at a time is most of a tiny run's work, and no test reads it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtp_train.evaluation.decoding.SPEED_PROMPTS", 3)
        patch.setattr("mtp_train.evaluation.run.SPEED_PASSES", 1)
        patch.setattr("mtp_train.evaluation.run.SPEED_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let whole runs time few prompts."""
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
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, its stripped fine-tune and chats."""
    from runs import write_inputs

    return write_inputs(tmp_path_factory.mktemp("pristine") / "in")


@pytest.fixture(scope="session")
def inputs(pristine: Path) -> Path:
    """The same; a file whose tests damage their inputs makes copies of it under this name."""
    return pristine


@pytest.fixture(scope="session")
def recipe(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run that has finished and exported, in ``run`` beside it; answers come in batches of two."""
    from mtp_train.cli.main import main
    from runs import LEARNS, write_recipe

    directory = tmp_path_factory.mktemp("finished")
    settings = {
        **LEARNS,
        "data__regenerate": {**LEARNS["data__regenerate"], "batch_size": 2},
        "evaluate__arms": ["none", "graft", "retrained", "vanilla"],
    }
    path = write_recipe(directory / "recipe.yaml", pristine, directory / "run", **settings)
    assert main(["run", str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def run_dir(recipe: Path) -> Path:
    """The run directory of that recipe."""
    return recipe.parent / "run"


@pytest.fixture(scope="session")
def refused(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run in float32 that the gate refused: ``run`` beside it has responses, a head and no export."""
    from mtp_train.cli.main import main
    from runs import LEARNS, write_recipe

    directory = tmp_path_factory.mktemp("refused")
    # One step changes the weights measurably, and the drafts hardly.
    no_better = {"train__lr": 1e-4, "train__max_steps": 1, "model__dtype": "float32"}
    path = write_recipe(directory / "recipe.yaml", pristine, directory / "run", **{**LEARNS, **no_better})
    with few_timed_prompts():
        assert main(["run", str(path)]) == 3
    return path
