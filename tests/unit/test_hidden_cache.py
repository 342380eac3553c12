"""Hidden states on disk equal the trunk's, are complete or absent, and are never read for other inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from documents import random_documents
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.checkpoints.identity import Contents
from mtp_train.data.pack import PackedSequence, collate, pack_documents
from mtp_train.data.tokenize import Document
from mtp_train.errors import TrainingError
from mtp_train.runs import trunks
from mtp_train.runs.run_directory import ADAPTER, TRUNK
from mtp_train.train import hidden_cache
from mtp_train.train.head_training import HeadTraining, MicroBatch
from mtp_train.train.hidden_cache import CachedStates, HiddenCache
from mtp_train.train.launch import make_accelerator
from mtp_train.train.shard import ShardedStates
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.states import TrunkStates, isolated_hidden
from runs import tiny_recipe
from tiny import tiny_head, tiny_trunk
from tolerances import assert_differs, assert_same, num_terms

CPU = torch.device("cpu")
SEQ_LEN = 24
OPTIONS: dict[str, Any] = {"num_depths": 2, "kind": "kl", "temperature": 1.0}
LENGTHS = (5, 24, 9, 3, 17, 11, 2, 8)


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 3) -> list[Document]:
    return random_documents(lengths, seed=seed, prompt_tokens=2)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of two documents."""
    monkeypatch.setattr(hidden_cache, "SHARD_BYTES", 2 * SEQ_LEN * 32 * 4)


def built(trunk: Trunk, directory: Path, world: int = 1) -> tuple[HiddenCache, list[int]]:
    """Build a cache with each rank in turn; return it and the number of turns each was told of."""
    cache = HiddenCache(directory, documents(), width=trunk.state_width, dtype=torch.float32)
    return cache, build(TrunkStates(trunk), cache, world)


def build(states: TrunkStates, cache: HiddenCache, world: int) -> list[int]:
    """Write what is missing with each rank in turn; return the number of turns each was told of."""
    told = list[int]()
    missing = cache.missing()
    for rank in range(world):
        cache.build(
            states,
            missing,
            device=CPU,
            max_tokens=2 * SEQ_LEN,
            rank=rank,
            world=world,
            on_shard=lambda done, _total: told.append(done),
        )
    return told


def packed(epoch: int = 0) -> list[PackedSequence]:
    return pack_documents(documents(), SEQ_LEN, pack=True, seed=0, epoch=epoch)


def computed(trunk: Trunk, sequences: Sequence[PackedSequence]) -> Tensor:
    batch = collate(sequences)
    return isolated_hidden(trunk, batch.tokens_BT, batch.document_BT)


@pytest.mark.parametrize("family_name", ["qwen3_5", "deepseek_v4"])
@pytest.mark.parametrize("world", [1, 3])
def test_states_are_what_the_trunk_computes_in_every_epoch(family_name: str, world: int, tmp_path: Path) -> None:
    trunk = tiny_trunk(family_name)
    cache, _ = built(trunk, tmp_path, world=world)
    states = CachedStates(trunk, cache, torch.float32)
    assert len(list(tmp_path.iterdir())) == cache.num_shards > 2
    for epoch in range(2):
        assert_same(states.prepare([packed(epoch)], 0), computed(trunk, packed(epoch)), num_terms(trunk))
    assert_differs(states.prepare([packed(0)], 0), computed(trunk, packed(1)), num_terms(trunk))


def test_a_build_that_was_cut_off_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk("qwen3_5")
    built(trunk, tmp_path)
    lost = sorted(tmp_path.iterdir())[1]
    whole = lost.read_bytes()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path != lost}
    lost.unlink()
    (tmp_path / "states-00001.1.partial").write_bytes(whole[:40])
    rows: list[int] = []
    stock = Trunk.hidden

    def counted(self: Trunk, tokens_BT: Tensor, **options: Any) -> Tensor:
        rows.append(tokens_BT.shape[0])
        return stock(self, tokens_BT, **options)

    monkeypatch.setattr(Trunk, "hidden", counted)
    _, told = built(trunk, tmp_path)
    assert lost.read_bytes() == whole
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    # Those of the missing shard.
    assert sum(rows) == 2
    assert told == [1]


def test_processes_that_have_nothing_to_write_take_every_turn(tmp_path: Path) -> None:
    """With a trunk in shards, all processes run every forward pass."""
    trunk = tiny_trunk("qwen3_5")
    cache, _ = built(trunk, tmp_path)
    (tmp_path / "states-00000.safetensors").unlink()
    passes: list[int] = []
    trunk.decoder.register_forward_hook(lambda _decoder, _inputs, output: passes.append(output[0][..., 0].numel()))
    build(ShardedStates(trunk), cache, world=2)
    # 24 and 5 tokens in a pass of two rows, and the other process's idle pass.
    assert passes == [2 * 24, 1]


def test_a_full_disk_leaves_no_shard_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk("qwen3_5")

    def fails(path: Path, _tensors: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hidden_cache, "write_safetensors", fails)
    with pytest.raises(OSError, match="No space"):
        built(trunk, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("family_name", ["qwen3_5", "glm4_moe"])
def test_the_loss_is_that_of_the_trunk_itself(family_name: str, tmp_path: Path) -> None:
    trunk = tiny_trunk(family_name)
    cache, _ = built(trunk, tmp_path)
    sequences = packed()[:2]
    batch = collate(sequences)
    module = HeadTraining(TrunkStates(trunk), tiny_head(trunk), **OPTIONS)
    expected = module(MicroBatch(batch, torch.ones(2)))
    trunk.decoder.layers = torch.nn.ModuleList()
    cached = HeadTraining(CachedStates(trunk, cache, torch.float32), module.head, **OPTIONS)
    found, other = (
        cached(MicroBatch(batch, torch.ones(2), cached.states.prepare([some], 0)))
        for some in (sequences, packed()[1:3])
    )
    torch.testing.assert_close(found, expected)
    assert (other.total - expected.total).abs() > 1e-2


def joined(found: list[Document]) -> list[Document]:
    """The same tokens, with the end of the first document elsewhere."""
    first, second, *rest = found
    ids = (*first.input_ids, second.input_ids[0])
    mask = (*first.loss_mask, second.loss_mask[0])
    return [
        replace(first, input_ids=ids, loss_mask=mask),
        replace(second, input_ids=second.input_ids[1:], loss_mask=second.loss_mask[1:]),
        *rest,
    ]


def test_runs_share_a_cache_of_the_same_states_alone(finetune: Path, tmp_path: Path) -> None:
    """In one directory: what a run passes to the name."""

    def directory_of(
        adapter: Contents | None = None,
        trunk: str = "a",
        text: Sequence[Document] = (),
        layers: tuple[int, ...] = (),
        **fields: Any,
    ) -> str:
        shared = {"directory": str(tmp_path / "shared")}
        recipe = tiny_recipe(tmp_path, tmp_path / "run", train__hidden_cache=shared, **fields)
        run: Any = SimpleNamespace(
            recipe=recipe,
            inputs=SimpleNamespace(
                contents={TRUNK: {"model.safetensors": trunk}, ADAPTER: adapter or {}},
                adapter=None if adapter is None else tmp_path,
                finetune=open_checkpoint(finetune),
                head_plan=SimpleNamespace(family=open_checkpoint(finetune).family),
            ),
            accelerator=make_accelerator(),
        )
        cache, _ = trunks.cache_of(run, [*(text or documents())], layers, None)
        assert cache.directory.parent == tmp_path / "shared"
        return cache.directory.name

    names = [
        directory_of(),
        directory_of(trunk="b"),
        directory_of({"adapter_model.safetensors": "a"}),
        directory_of({"adapter_model.safetensors": "b"}),
        directory_of(text=documents(seed=4)),
        directory_of(text=documents()[::-1]),
        directory_of(text=joined(documents())),
        # Rounded weights that multiply in fp32.
        directory_of(model__dtype="bfloat16"),
        directory_of(train__precision="bf16"),
        directory_of(model__quantization="8bit"),
        directory_of(model__quantization="4bit"),
        # Other states of the same width.
        directory_of(layers=(0, 1)),
        directory_of(layers=(0, 2)),
    ]
    assert len(set(names)) == len(names)
    assert directory_of(head__num_depths=1, objective__loss="ce") == names[0]


def test_too_large_a_cache_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = HiddenCache(tmp_path / "new" / "cache", documents((10,)), width=32, dtype=torch.bfloat16)

    class Full:
        free = 639

    monkeypatch.setattr(hidden_cache.shutil, "disk_usage", lambda _path: Full)
    with pytest.raises(TrainingError, match=r"0\.00 GiB of hidden states for 10 tokens .*hidden_cache\.directory"):
        cache.require_room()
    Full.free = 640
    cache.require_room()
    assert not list(tmp_path.iterdir())
