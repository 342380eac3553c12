"""Choosing among the heads on the way: by acceptance, kept whole through kills, measured as the decoder would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from test_training import NUM_DEPTHS, SEQ_LEN, recipe as recipe_of_training, run_training, training_module
from torch import Tensor

from checkpoints import Tensors, same
from documents import random_documents
from mtp_train.data.pack import pack_documents
from mtp_train.data.tokenize import Document
from mtp_train.errors import DataError, StoppedError, TrainingError
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.training import part_documents
from mtp_train.train import loop
from mtp_train.train.log import read_metrics
from mtp_train.train.select import Selection
from mtp_train.train.state import Best, load_best, newest_whole_step
from tiny import tiny_head, tiny_trunk


def recipe(select: dict[str, Any] | None) -> Recipe:
    return recipe_of_training(
        train__max_steps=12,
        train__micro_batch_sequences=4,
        train__max_grad_norm=1.0,
        train__lr=2e-2,
        train__schedule="constant",
        train__save_steps=4,
        train__select=select,
    )


def documents(count: int, first: int = 0) -> list[Document]:
    return random_documents([SEQ_LEN] * (first + count), seed=5, prompt_tokens=2)[first:]


Score = float | tuple[float, float]
"""Tau greedily and sampled; one number for both."""


class Scripted(Selection):
    """Measures that are given; the real ones are made all the same."""

    scores: list[Score]

    def measure(self, *arguments: Any) -> dict[str, Any]:
        found = super().measure(*arguments)
        assert found["held_out_tau"] >= 1.0
        score = self.scores.pop(0)
        greedy, sampled = score if isinstance(score, tuple) else (score, score)
        return {**found, "held_out_tau": greedy, "held_out_tau_sampled": sampled}


def train(
    directory: Path,
    used: Recipe,
    scores: Sequence[Score] | None = None,
    stop_after: int | None = None,
    lr_for: Callable[[float], float] | None = None,
) -> tuple[Tensors, dict[int, Tensors]]:
    """Train; return the weights that were chosen, and those after every step."""

    def on_step(done: int) -> None:
        after[done] = {name: value.detach().clone() for name, value in module.head.state_dict().items()}

    after: dict[int, Tensors] = {}
    module = training_module()
    spec = used.train.select
    assert spec is not None
    kept = pack_documents(documents(3, first=20), SEQ_LEN, pack=True, seed=0, epoch=0)
    selection = (Selection if scores is None else Scripted)(spec.every_steps, spec.patience, kept, lr_for)
    if isinstance(selection, Scripted):
        selection.scores = list(scores or [])
    weights = run_training(
        directory, used, module, documents=documents(12), selection=selection, stop_after=stop_after, on_step=on_step
    )
    return weights, after


def test_the_first_head_with_the_best_mean_of_greedy_and_sampled_tau_is_returned(tmp_path: Path) -> None:
    """Step 3 has the highest tau greedily, step 9 sampled. Step 6 has the highest mean first, and the last step too."""
    weights, after = train(
        tmp_path, recipe({"every_steps": 3}), [(1.5, 1.5), (2.5, 1.0), (2.0, 2.0), (1.0, 2.75), (2.0, 2.0)]
    )
    assert same(weights, after[6])
    assert not same(weights, after[12])
    assert load_best(tmp_path / "state", 12) == Best(6, 2.0, 2, 1.5)


NO_GAIN = {0: 2.0, 3: 1.5, 6: 2.0, 9: 1.9, 12: 1.7}


def test_training_returns_the_head_that_it_was_given_if_none_is_better(tmp_path: Path) -> None:
    weights, after = train(tmp_path, recipe({"every_steps": 3}), [*NO_GAIN.values()])
    assert same(weights, tiny_head(tiny_trunk("qwen3_5")).state_dict())
    assert not same(weights, after[12])
    assert load_best(tmp_path / "state", 12) == Best(0, 2.0, 4, 2.0)


def test_the_learning_rate_follows_from_the_head_before_the_first_step(tmp_path: Path) -> None:
    asked = []

    def lr_for(overlap: float) -> float:
        asked.append(overlap)
        return 5e-3

    used = recipe({"every_steps": 4})
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, used, stop_after=6, lr_for=lr_for)
    found = {line["step"]: line for line in read_metrics(tmp_path)}
    assert asked == [found[0]["held_out_overlap_depth_1"]]
    assert {line["lr"] for step, line in found.items() if "lr" in line} == {5e-3}
    # A resumed training has the recorded rate, and does not ask again.
    train(tmp_path, used.replaced({"train.lr": 5e-3}), lr_for=lr_for)
    assert len(asked) == 1


def test_training_stops_once_nothing_got_better_for_long_enough(tmp_path: Path) -> None:
    used = recipe({"every_steps": 2, "patience": 2})
    weights, after = train(tmp_path, used, [1.1, 1.2, 1.6, 1.5, 1.55])
    assert max(after) == 8
    assert same(weights, after[4])
    again, nothing = train(tmp_path, used, [])
    assert nothing == {}
    assert same(again, weights)


@pytest.mark.parametrize(
    ("killed_after", "scores"),
    [*((step, {**NO_GAIN, 0: 1.4}) for step in (0, 1, 5, 6, 9, 11)), *((step, NO_GAIN) for step in (3, 7))],
)
def test_a_killed_run_chooses_what_an_unbroken_one_would(
    killed_after: int, scores: dict[int, float], tmp_path: Path
) -> None:
    used = recipe({"every_steps": 3})
    expected, _ = train(tmp_path / "whole", used, list(scores.values()))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", used, list(scores.values()), stop_after=killed_after)
    resumed = newest_whole_step(tmp_path / "killed" / "state")[0]
    # Every fourth step is saved, and each that was measured.
    assert resumed == max(step for step in (0, 3, 4, 6, 8, 9) if step <= killed_after)
    rest = [score for step, score in scores.items() if step > resumed or not resumed]
    found, _ = train(tmp_path / "killed", used, rest)
    assert same(found, expected)


def test_what_is_measured_is_logged_by_depth(tmp_path: Path) -> None:
    train(tmp_path, recipe({"every_steps": 6}))
    lines = [line for line in read_metrics(tmp_path) if "held_out_tau" in line]
    assert [line["step"] for line in lines] == [0, 6, 12]
    for line in lines:
        assert 1.0 <= line["held_out_tau"] <= 1 + NUM_DEPTHS
        assert 1.0 < line["held_out_tau_sampled"] < 1 + NUM_DEPTHS
        assert line["held_out_entropy"] > 0
        assert all(0 < line[f"held_out_overlap_depth_{depth}"] < 1 for depth in (1, 2, 3))


def test_measuring_changes_nothing_that_is_trained(tmp_path: Path) -> None:
    _, after = train(tmp_path / "often", recipe({"every_steps": 1}))
    _, other = train(tmp_path / "once", recipe({"every_steps": 12}))
    assert same(after[12], other[12])


def test_text_to_choose_by_is_kept_from_training_by_its_groups() -> None:
    text = [Document((1, 2, 3, 4), (True,) * 4, f"g{number % 20}", str(number)) for number in range(60)]
    training, measured = part_documents(recipe({"every_steps": 3, "share": 0.3}), text)
    assert sorted(training + measured) == list(range(60))
    assert not {text[index].group for index in training} & {text[index].group for index in measured}
    assert len(measured) == 18
    # No more than it needs: 3 texts of 4 tokens in a group.
    _, fewer = part_documents(recipe({"share": 0.3, "tokens": 20}), text)
    assert len(fewer) == 6
    assert set(fewer) <= set(measured)
    everything, nothing = part_documents(recipe(None), text)
    assert (everything, nothing) == (list(range(60)), [])
    assert len(part_documents(recipe({}), text[:2])[1]) == 1
    with pytest.raises(DataError, match=r"1 training texts in one group \(g0\)"):
        part_documents(recipe({}), text[:1])


# Failures


def test_sigterm_ends_the_step_saves_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = recipe({"every_steps": 12})
    expected, _ = train(tmp_path / "whole", used)
    stock = loop.optimise
    calls = iter(range(1, 100))

    def told_in_the_middle(*arguments: Any) -> Any:
        import os
        import signal

        if next(calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return stock(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "optimise", told_in_the_middle)
        with pytest.raises(StoppedError, match=r"(?s)after step 6 of 12\..*start the same command again") as stopped:
            train(tmp_path / "told", used)
    assert stopped.value.exit_code == 143
    assert newest_whole_step(tmp_path / "told" / "state") == (6, {})
    found, after = train(tmp_path / "told", used)
    assert min(after) == 6
    assert same(found, expected)


def test_a_text_without_targets_cannot_choose(tmp_path: Path) -> None:
    text = [Document((1, 2, 3, 4), (False,) * 4, "g", "d")]
    module = training_module()
    kept = pack_documents(text, SEQ_LEN, pack=True, seed=0, epoch=0)
    selection = Selection(1, None, kept)
    with pytest.raises(TrainingError, match=r"train\.select\.share"):
        selection.measure(module, module, Accelerator(cpu=True))


@pytest.mark.parametrize("world", [2, 3])
def test_a_measure_is_the_same_however_many_processes_share_it(world: int, tmp_path: Path) -> None:
    """Processes have room for more sequences than there are."""
    module = training_module()
    sequences = pack_documents(documents(5), SEQ_LEN, pack=True, seed=0, epoch=0)

    def sums_of(world: int) -> list[Tensor]:
        selection = Selection(1, None, sequences)
        found = []
        for rank in range(world):
            accelerator: Any = SimpleNamespace(num_processes=world, process_index=rank, device=torch.device("cpu"))
            accelerator.reduce = lambda value, reduction: value
            found.append(selection._sums(module, module, accelerator))
        return [sum(columns[1:], columns[0]) for columns in zip(*found, strict=True)]

    torch.testing.assert_close(sums_of(world), sums_of(1), atol=1e-4, rtol=1e-5)
