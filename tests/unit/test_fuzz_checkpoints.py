"""Randomly damaged checkpoints, adapters and resume states: the right result, or one message; nothing left behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtp_train as mtp
from adapters import write_adapter
from byte_tokenizer import byte_tokenizer
from checkpoints import all_tensors, base_and_finetune, shard
from mtp_train.errors import MtpError
from mtp_train.train.state import (
    head_state,
    load_best,
    load_moments,
    load_weights,
    load_window,
    newest_whole_step,
    save_state,
)
from mtp_train.weights.files import INDEX_FILE
from random_damage import Damage, damages, fuzz
from runs import tree


class Net(nn.Module):
    """A head of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, tuple[Any, ...]]]:
    """Two resume states, and what each of them holds."""
    directory, net = tmp_path_factory.mktemp("states"), Net()
    optimizer, held = torch.optim.AdamW(net.parameters(), lr=0.1), {}
    for step in (1, 2):
        net.matrix.square().sum().backward()
        optimizer.step()
        save_state(directory, step, net, optimizer, window={"step": step})
        held[step] = contents(directory, step)
    return directory, held


def contents(directory: Path, step: int) -> tuple[Any, ...]:
    """Load all that a state holds."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    load_weights(directory, step, net)
    load_moments(directory, step, net, optimizer)
    moments = next(iter(optimizer.state.values()))
    values = head_state(net)["matrix"].tolist(), moments["exp_avg"].tolist(), float(moments["step"])
    return *values, load_best(directory, step), load_window(directory, step)


def check_states(states: tuple[Path, dict[int, tuple[Any, ...]]], damage: Damage) -> None:
    """Either a state is found that holds what was saved, or one message says that none is whole."""
    intact, held = states
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "state"
        shutil.copytree(intact, directory)
        damage(directory)
        before = tree(directory)
        step, broken = newest_whole_step(directory)
        assert contents(directory, step) == held[step]
        assert step == 2 or broken
        assert tree(directory) == before


STATE_FILES = tuple(
    f"step-0000000{step}/{name}"
    for step in (2,)
    for name in ("head.safetensors", "optimizer.safetensors", "state.json")
)


@pytest.mark.parametrize("examples", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_run_resumes_from_a_state_as_it_was_saved(
    states: tuple[Path, dict[int, tuple[Any, ...]]], examples: int
) -> None:
    fuzz(examples, damages(STATE_FILES), lambda damage: check_states(states, damage))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    base, finetune = base_and_finetune(directory, "qwen3_5", vocab_size=259)
    for path in (base, finetune):
        byte_tokenizer().save_pretrained(path)
    write_adapter(base, directory / "lora", target_modules=["q_proj"])
    shard(base)
    return directory


def outcome_of(inputs: Path, damage: Damage, part: str, run: Callable[[Path, Path], Any]) -> Any:
    """Damage a copy of a part of the inputs, and run something; return its result, None where it was refused."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        shutil.copytree(inputs, work / "in")
        damage(work / "in" / part)
        before, out = tree(work / "in"), work / "out"
        result, refusal = None, None
        try:
            result = run(work / "in", out)
        except MtpError as error:
            refusal = error
        if refusal is not None:
            assert refusal.exit_code == 2, refusal
            assert "; expected " in str(refusal)
            assert "\n" not in str(refusal)
            assert not out.exists()
        assert tree(work / "in") == before
        assert sorted(path.name for path in work.iterdir()) == (["in", "out"] if out.exists() else ["in"])
        return result


CONFIG_FILES = ("config.json", INDEX_FILE, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")


def graft(work: Path, out: Path) -> int:
    """Graft the base's head; return the number of its tensors, which have the bytes that the base has."""
    mtp.graft(work / "finetune", work / "base", out)
    base, written = all_tensors(work / "base"), all_tensors(out)
    heads = [key for key in written if key.startswith("mtp.")]
    assert all(torch.equal(written[key], base[key]) for key in heads)
    return len(heads)


def merge(work: Path, out: Path) -> int:
    """Merge the adapter; return the number of tensors that it changed."""
    mtp.merge(work / "base", work / "lora", out)
    base, written = all_tensors(work / "base"), all_tensors(out)
    return sum(not torch.equal(written[key], base[key]) for key in base)


def test_intact_inputs_are_used(inputs: Path) -> None:
    assert outcome_of(inputs, lambda part: None, "base", graft) > 0
    assert outcome_of(inputs, lambda part: None, "lora", merge) > 0


def check_base(inputs: Path, damage: Damage) -> None:
    outcome_of(inputs, damage, "base", lambda work, out: mtp.inspect(work / "base"))
    assert outcome_of(inputs, damage, "base", graft) != 0


@pytest.mark.parametrize("examples", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_damaged_base_is_grafted_as_it_is_or_refused(inputs: Path, examples: int) -> None:
    fuzz(examples, damages(CONFIG_FILES), lambda damage: check_base(inputs, damage))


def check_adapter(inputs: Path, damage: Damage) -> None:
    outcome_of(inputs, damage, "lora", merge)


@pytest.mark.parametrize("examples", [80, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_damaged_adapter_is_merged_or_refused(inputs: Path, examples: int) -> None:
    files = ("adapter_config.json", "adapter_model.safetensors")
    fuzz(examples, damages(files), lambda damage: check_adapter(inputs, damage))
