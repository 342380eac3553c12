"""The plans for released models' shapes, against hand arithmetic and the sizes that their makers state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtp_train.heads.module import MtpHead
from mtp_train.job.round_launches import count_launches
from mtp_train.train.hours import RoundLaunches
from mtp_train.trunk.load import Trunk
from scripts.plan_table import BEGIN, END, PAGE, RECIPE, planned, row, table
from tiny import IS_OLD

# Qwen3.5 9B: 32 layers, every fourth with full attention, the others with Gated DeltaNet.
VOCAB, WIDTH, LAYERS, FULL = 248_320, 4096, 32, 8
MLP = 3 * WIDTH * 12_288
ATTENTION = WIDTH * 2 * 16 * 256 + 2 * WIDTH * 4 * 256 + 16 * 256 * WIDTH + 2 * 256
"""Queries with their gate, keys and values, output, two norms of 256 channels."""
DELTA = WIDTH * (2 * 2048 + 4096) + WIDTH * 4096 + 2 * WIDTH * 32 + 4 * 8192 + 4096 * WIDTH + 2 * 32 + 128
"""Queries, keys and values; gate; decay and beta; convolution of four taps; output; decay's parameters; norm."""
OUTSIDE = 2 * VOCAB * WIDTH + WIDTH
"""Embedding, output matrix and the last norm."""
TRUNK = OUTSIDE + LAYERS * (MLP + 2 * WIDTH) + FULL * ATTENTION + (LAYERS - FULL) * DELTA
HEAD = 2 * WIDTH * WIDTH + MLP + ATTENTION + 5 * WIDTH
"""A layer with full attention, the projection of two states, and its three norms."""


@pytest.fixture(scope="module", autouse=True)
def counted_once() -> Iterator[None]:
    """Count the launches of a model once: a hundred layers take seconds."""
    known: dict[tuple[Any, ...], tuple[RoundLaunches, str | None]] = {}

    def count(trunk: Trunk, head: MtpHead, depth: int, *, fuses: bool) -> tuple[RoundLaunches, str | None]:
        asked = trunk.family.name, len(trunk.layers), depth, fuses
        if asked not in known:
            known[asked] = count_launches(trunk, head, depth, fuses=fuses)
        return known[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtp_train.job.check.count_launches", count)
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


def test_memory_of_nine_billion_parameters_on_one_gpu(directory: Path) -> None:
    memory = planned("Qwen3.5 9B", 1, directory).memory
    assert memory.trunk_parameters == TRUNK == 8_953_803_264
    assert memory.trunk_bytes == 2 * TRUNK
    assert memory.head_parameters == memory.trained_parameters == HEAD
    # Weights, gradients and two moments in fp32.
    assert memory.head_and_optimizer_bytes == 16 * HEAD
    # Five fp32 tensors of as many rows, in units of 128, as take 2 GB.
    assert memory.loss_rows == 384
    assert memory.loss_bytes == 5 * 384 * VOCAB * 4 < 2e9 < 5 * 512 * VOCAB * 4
    # A thirty-second part of 24 GB has no room for 256 rows.
    small = planned("Qwen3.5 9B", 1, directory, device="rtx4090")
    assert small.memory.loss_rows == 256
    assert f"loss {small.memory.loss_bytes / 2**30:.2f} in chunks of 256 rows, activations" in str(small)


def test_memory_of_nine_billion_parameters_in_eight_shards(directory: Path) -> None:
    memory = planned("Qwen3.5 9B", 8, directory).memory_in_shards
    assert memory is not None
    # A shard, and beside it what is whole during a step: everything outside of the layers, and the two largest layers.
    largest = MLP + 2 * WIDTH + DELTA
    assert memory.trunk_bytes == 2 * TRUNK // 8 + 2 * (OUTSIDE + 2 * largest)
    assert memory.head_and_optimizer_bytes == 16 * HEAD // 8 + 8 * HEAD


def test_main_memory_while_nine_billion_parameters_are_loaded(directory: Path) -> None:
    found = planned("Qwen3.5 9B", 8, directory)
    assert found.memory_in_shards is not None
    assert found.memory.loading_bytes == 2 * TRUNK
    # Everything outside of the layers, the largest layer and a copy of it.
    largest = MLP + 2 * WIDTH + DELTA
    assert found.memory_in_shards.loading_bytes == 2 * (OUTSIDE + 2 * largest)
    text = (
        "# main memory of each process while it loads the trunk: whole 16.68 GiB; to train with fsdp2.yaml 4.60 GiB\n"
    )
    assert text in str(found)


def test_hours_of_training_of_twenty_seven_billion_parameters(directory: Path) -> None:
    found = planned("Qwen3.6 27B", 1, directory)
    tokens = 500 * 65_536
    in_layers = found.memory.trunk_parameters - 2 * VOCAB * 5120
    # Norms and other vectors, a few numbers in a hundred thousand, are in no product.
    assert found.cost.trunk_flops == pytest.approx(2 * in_layers * tokens, rel=5e-5)
    flops = found.cost.trunk_flops + found.cost.head_flops + found.cost.loss_flops
    # 40 % of 989 TFLOP/s; 16,000 forward and backward passes of 64 layers, each of 100 kernels, with 2 us a kernel.
    seconds = flops / (0.4 * 989e12) + 16_000 * 3 * 64 * 100 * 2e-6
    assert found.hours is not None
    assert found.hours.train == pytest.approx(seconds / 3600, rel=1e-9)
    on_eight = planned("Qwen3.6 27B", 8, directory).hours
    assert on_eight is not None
    assert on_eight.train == pytest.approx(found.hours.train / 8, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen3.6 27B", 26.9), ("Qwen3 235B-A22B, EAGLE-3", 235.1), ("DeepSeek V3 671B", 671.0)]
)
def test_the_shapes_are_those_of_the_models(name: str, billions: float, directory: Path) -> None:
    """The sizes that the model cards state; DeepSeek's without the head."""
    assert round(planned(name, 1, directory).memory.trunk_parameters / 1e9, 1) == billions


def test_what_does_not_fit_is_crossed_out(directory: Path) -> None:
    large = planned("DeepSeek V3 671B", 8, directory)
    assert "# a run is refused: model.trunk: " in str(large)
    assert planned("Qwen3.6 27B", 1, directory).decoding is None
    cells = row("DeepSeek V3 671B", 8, large)
    assert cells[:2] == ["DeepSeek V3 671B", "8"]
    assert all(cell.startswith("~~") for cell in cells[2:4])
    assert "~~" not in "".join(row("Qwen3.6 27B", 1, planned("Qwen3.6 27B", 1, directory)))


def test_nodes_of_eight_are_planned_for_deepseek_v3_unjudged(directory: Path) -> None:
    """Answers by a server, training in shards with LoRA, no verdict: what each stage takes, and whether it fits."""
    answers = {"endpoint": "http://node-0:8000/v1", "max_prompts": 20_000, "max_new_tokens": 512}
    changes = {
        "head.lora": {"r": 16, "targets": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]},
        "data.regenerate": answers,
        "gate.enabled": False,
        "evaluate.arms": ["native", "retrained"],
        "train.gradient_checkpointing": True,
    }
    found = {
        (device, processes): planned("DeepSeek V3 671B", processes, directory, device, changes)
        for device, processes in (("mi300x", 16), ("mi300x", 32), ("h200", 32))
    }
    for plan in found.values():
        assert plan.memory_in_shards is not None
        assert plan.hours is not None
        assert plan.hours.regenerate == 0.0
        assert plan.hours.train > 0.0
        assert plan.hours.evaluate == 0.0
        assert plan.decoding is None
        assert "# gate: off; the head is not measured" in str(plan)
    assert "does not fit" not in str(found["mi300x", 32])
    everywhere = planned("DeepSeek V3 671B", 32, directory, "mi300x", changes | {"head.lora": {"r": 16}})
    assert (
        "# training does not fit: 198 GiB on a process, and its device has 192 GiB. Less is needed with more "
        "processes, fewer head.lora.targets or smaller data.seq_len_tokens\n"
    ) in str(everywhere)
    for asked, needs, has in ((("mi300x", 16), 196, 192), (("h200", 32), 156, 141)):
        expected = f"# training does not fit: {needs} GiB on a process, and its device has {has} GiB."
        assert expected in str(found[asked])


@pytest.mark.skipif(IS_OLD, reason="the launches of an older transformers are others")
def test_the_page_has_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = PAGE.read_text(encoding="utf-8").partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]
    assert shown == table()
    monkeypatch.setitem(RECIPE["train"], "max_steps", 600)
    assert shown != table(), "the control"
