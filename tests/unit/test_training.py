"""Optimiser steps in this process: what reaches the gradient, and what never does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from checkpoints import Tensors, holds
from documents import random_documents
from mtp_train.data.pack import PackedSequence, count_targets, global_batches, pack_documents
from mtp_train.data.tokenize import Document
from mtp_train.errors import TrainingError
from mtp_train.losses.chunked import depth_weights
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.settings import plan_of, train_options
from mtp_train.train import loop
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.log import RunLog, read_metrics
from mtp_train.train.loop import make_optimizer, micro_batches, optimise, train_head
from mtp_train.train.select import Selection
from mtp_train.train.state import newest_whole_step
from mtp_train.trunk.states import TrunkStates
from redrafted import unrolled
from runs import tiny_recipe
from tiny import FAMILY_NAMES, VOCAB_SIZE, tiny_head, tiny_trunk

SEQ_LEN, NUM_DEPTHS, SEQUENCES = 16, 3, 4
KINDS: tuple[str, ...] = ("ce", "kl")


def recipe(**overrides: Any) -> Recipe:
    settings = {
        "head__num_depths": NUM_DEPTHS,
        "data__seq_len_tokens": SEQ_LEN,
        "train__tokens_per_step": SEQUENCES * SEQ_LEN,
        "train__max_grad_norm": 1e9,
    }
    return tiny_recipe(Path("anywhere"), Path("anywhere"), **{**settings, **overrides})


def training_module(
    family_name: str = "qwen3_5", kind: str = "kl", temperature: float = 1.0, **options: Any
) -> HeadTraining:
    trunk = tiny_trunk(family_name)
    return HeadTraining(
        TrunkStates(trunk), tiny_head(trunk), num_depths=NUM_DEPTHS, kind=kind, temperature=temperature, **options
    )


def weights_of(used: Recipe) -> list[float]:
    """Return the weight of each depth."""
    return depth_weights(used.head.num_depths, used.objective.depth_decay)


def make_documents(*lengths: int) -> list[Document]:
    return random_documents(lengths, prompt_tokens=2)


def sequences_of(documents: Sequence[Document], *, pack: bool, seq_len_tokens: int = SEQ_LEN) -> list[PackedSequence]:
    return pack_documents(documents, seq_len_tokens, pack=pack, seed=0, epoch=0)


def four_sequences() -> list[PackedSequence]:
    return sequences_of(make_documents(16, 9, 14, 11), pack=False)


def one_step(module: HeadTraining, sequences: Sequence[PackedSequence], used: Recipe) -> tuple[Tensors, Tensor]:
    """Do one step of gradient descent; return the gradient by parameter and the loss sums of the depths."""
    plan = plan_of(used, 1)
    gradient: Tensors = {}

    def keep_gradient(*_: Any) -> None:
        for name, parameter in module.head.named_parameters():
            assert parameter.grad is not None, name
            gradient[name] = parameter.grad.clone()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=plan.accumulation)
    wrapped, optimizer = accelerator.prepare(module, torch.optim.SGD(module.head.parameters(), lr=0.0))
    optimizer.optimizer.register_step_pre_hook(keep_gradient)
    wrapped.train()
    given = micro_batches(sequences, plan, weights_of(used), accelerator, module.states)
    (sums_K, count_K), norm = optimise(wrapped, optimizer, accelerator, used.train.max_grad_norm, given)
    targets = zip(*(count_targets(one, NUM_DEPTHS) for one in sequences), strict=True)
    assert count_K.tolist() == [sum(column) for column in targets]
    squares = sum(float(value.double().square().sum()) for value in gradient.values())
    assert norm.item() == pytest.approx(math.sqrt(squares), rel=1e-4)
    return gradient, sums_K


def assert_same_gradient(found: Tensors, expected: Tensors) -> None:
    scale = max(float(value.abs().max()) for value in expected.values())
    torch.testing.assert_close(found, expected, atol=1e-5 * scale, rtol=1e-4)


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_changes_no_gradient(family_name: str, kind: str) -> None:
    used = recipe(train__micro_batch_sequences=4)
    expected, sums_K = one_step(training_module(family_name, kind), four_sequences(), used)
    for micro_batch_sequences in (2, 1):
        used = recipe(train__micro_batch_sequences=micro_batch_sequences)
        found, found_K = one_step(training_module(family_name, kind), four_sequences(), used)
        assert_same_gradient(found, expected)
        torch.testing.assert_close(found_K, sums_K)


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_packing_changes_no_gradient(family_name: str) -> None:
    documents = make_documents(16, 9, 7, 5, 5, 6)
    packed = sequences_of(documents, pack=True)
    alone = sequences_of(documents, pack=False)
    assert (len(packed), len(alone)) == (3, 6)
    expected, sums_K = one_step(
        training_module(family_name), alone, recipe(train__tokens_per_step=6 * SEQ_LEN, train__micro_batch_sequences=6)
    )
    found, found_K = one_step(
        training_module(family_name), packed, recipe(train__tokens_per_step=3 * SEQ_LEN, train__micro_batch_sequences=3)
    )
    assert_same_gradient(found, expected)
    torch.testing.assert_close(found_K, sums_K)


def test_the_gradient_is_that_of_the_mean_over_the_steps_targets() -> None:
    """The one expected value is written out: cross entropy of each target, by depth over its number, weighted."""
    documents = make_documents(9, 6)
    module = training_module("glm4_moe", "ce")
    used = recipe(train__tokens_per_step=2 * SEQ_LEN, objective__depth_decay=0.5)
    found, sums_K = one_step(module, sequences_of(documents, pack=False), used)
    losses: list[list[Tensor]] = [[], [], []]
    for document in documents:
        tokens_1T = torch.from_numpy(document.input_ids)[None].long()
        hidden_1TD = module.ends.hidden(tokens_1T).detach()
        states = unrolled(module.head, hidden_1TD, tokens_1T, module.ends.embed, NUM_DEPTHS)
        for depth in range(NUM_DEPTHS):
            for start in range(len(document.input_ids) - depth - 2):
                target = start + depth + 2
                if document.loss_mask[target]:
                    log_q_V = torch.log_softmax(module.ends.logits(states[depth][0, start]), dim=-1)
                    losses[depth].append(-log_q_V[document.input_ids[target]])
    weighted = [
        weight * torch.stack(one).mean() for weight, one in zip(depth_weights(NUM_DEPTHS, 0.5), losses, strict=True)
    ]
    torch.testing.assert_close(sums_K, torch.stack([torch.stack(one).sum() for one in losses]).detach())
    names = dict(module.head.named_parameters())
    expected = torch.autograd.grad(torch.stack(weighted).sum(), list(names.values()))
    assert_same_gradient(found, dict(zip(names, expected, strict=True)))


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_only_the_head_learns(family_name: str) -> None:
    module = training_module(family_name)
    trunk_before = {name: value.clone() for name, value in module.ends.state_dict().items()}
    head_before = {name: value.clone() for name, value in module.head.named_parameters()}
    accelerator = Accelerator(cpu=True)
    used = recipe(train__micro_batch_sequences=4)
    wrapped, optimizer = accelerator.prepare(module, make_optimizer(module.head, train_options(used)))
    wrapped.train()
    given = micro_batches(four_sequences(), plan_of(used, 1), weights_of(used), accelerator, module.states)
    optimise(wrapped, optimizer, accelerator, used.train.max_grad_norm, given)
    assert holds(trunk_before, module.ends.state_dict())
    assert all(value.grad is None and not value.requires_grad for value in module.ends.parameters())
    assert not any(part.training for part in module.ends.modules())
    assert module.head.training
    still = [name for name, value in module.head.named_parameters() if torch.equal(value, head_before[name])]
    assert still == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_target_and_read_by_none_gives_nothing(kind: str) -> None:
    used = recipe(train__tokens_per_step=SEQ_LEN)
    (sequence,) = sequences_of(make_documents(11), pack=False)
    sequence.loss_mask_T[10] = False  # the document's last token: read only to predict what is not there
    expected, sums_K = one_step(training_module(kind=kind), [sequence], used)
    sequence.input_ids_T[10:] = (sequence.input_ids_T[10:] + 1) % VOCAB_SIZE
    found, found_K = one_step(training_module(kind=kind), [sequence], used)
    assert torch.equal(found_K, sums_K)
    assert holds(expected, found)
    sequence.loss_mask_T[10] = True
    found, found_K = one_step(training_module(kind=kind), [sequence], used)
    assert (found_K > sums_K).all()


def run_training(
    directory: Path,
    used: Recipe,
    module: HeadTraining | None = None,
    *,
    documents: Sequence[Document] | None = None,
    selection: Selection | None = None,
    stop_after: int | None = None,
    on_step: Callable[[int], None] = lambda _: None,
) -> Tensors:
    """Train as the pipeline does, on a few documents for ever; ``stop_after`` kills the run."""

    def after_step(done: int) -> None:
        on_step(done)
        if done == stop_after:
            raise KeyboardInterrupt

    plan = plan_of(used, 1)
    return train_head(
        module or training_module(),
        options=train_options(used),
        plan=plan,
        batch_fn=global_batches(
            documents or make_documents(16, 9, 14, 11, 7, 12, 5, 8),
            seq_len_tokens=SEQ_LEN,
            pack=True,
            sequences_per_step=plan.sequences_per_step,
            seed=0,
        ),
        accelerator=Accelerator(cpu=True, gradient_accumulation_steps=plan.accumulation),
        selection=selection,
        state_dir=directory / "state",
        make_log=lambda step: RunLog(directory, step),
        on_step=after_step,
    )


def test_the_loss_falls_and_every_step_is_logged(tmp_path: Path) -> None:
    used = recipe(train__max_steps=20, train__lr=2e-2, train__save_steps=20, train__micro_batch_sequences=4)
    run_training(tmp_path, used)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    weights = depth_weights(NUM_DEPTHS, used.objective.depth_decay)
    by_depth = [lines[0][f"loss_depth_{depth}"] for depth in (1, 2, 3)]
    assert lines[0]["loss"] == pytest.approx(sum(map(math.prod, zip(weights, by_depth, strict=True))))
    assert (lines[0]["wrapper"], lines[0]["world_size"]) == ("HeadTraining", 1)


def test_the_recipes_numbers_reach_the_optimiser(tmp_path: Path) -> None:
    used = recipe(
        train__max_steps=4,
        train__warmup_steps=2,
        train__betas=[0.8, 0.9],
        train__weight_decay=0.1,
        train__max_grad_norm=0.01,
        train__save_steps=3,
        train__micro_batch_sequences=4,
    )
    seen: list[tuple[float, tuple[float, float], float]] = []
    norms: list[float] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        group = optimizer.param_groups[0]
        seen.append((group["lr"], group["betas"], group["weight_decay"]))
        gradients = [value.grad for group in optimizer.param_groups for value in group["params"]]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    handle = register_optimizer_step_pre_hook(look)
    try:
        run_training(tmp_path, used)
    finally:
        handle.remove()
    assert seen == [(train_options(used).lr_at(step), (0.8, 0.9), 0.1) for step in range(4)]
    assert norms == pytest.approx([0.01] * 4, rel=1e-3)
    lines = read_metrics(tmp_path)
    assert [line["lr"] for line in lines] == [lr for lr, _, _ in seen]
    assert all(line["grad_norm"] > 0.1 for line in lines), "what is logged is the norm before it was cut"
    assert newest_whole_step(tmp_path / "state")[0] == 4, "the last step leaves a state whatever save_steps says"


def test_a_line_is_the_mean_over_the_steps_since_the_one_before(tmp_path: Path) -> None:
    lines = {}
    for log_steps in (1, 3):
        (tmp_path / str(log_steps)).mkdir()
        run_training(tmp_path / str(log_steps), recipe(train__max_steps=5, train__log_steps=log_steps))
        lines[log_steps] = read_metrics(tmp_path / str(log_steps))
    assert [line["step"] for line in lines[3]] == [3, 5]
    tokens = [line["tokens"] for line in lines[1]]
    assert [line["tokens"] for line in lines[3]] == [sum(tokens[:3]), sum(tokens[3:])]
    losses = [line["loss_depth_1"] for line in lines[1]]
    assert min(losses[:3]) < lines[3][0]["loss_depth_1"] < max(losses[:3])
    assert min(losses[3:]) < lines[3][1]["loss_depth_1"] < max(losses[3:])


TIMED = ("seconds", "tokens_per_second")


@pytest.mark.parametrize("forgets", [False, True], ids=["", "control"])
def test_a_run_killed_between_log_lines_logs_the_lines_of_an_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    """The control loses the window: the line after the kill is then another."""
    if forgets:
        monkeypatch.setattr(loop, "load_sums", lambda *_: vars(loop.LogSums.zero(NUM_DEPTHS)))
    used = recipe(train__max_steps=7, train__save_steps=2, train__log_steps=3, train__micro_batch_sequences=2)
    for name in ("unbroken", "killed"):
        (tmp_path / name).mkdir()
    run_training(tmp_path / "unbroken", used)
    for stop_after in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            run_training(tmp_path / "killed", used, stop_after=stop_after)
    run_training(tmp_path / "killed", used)
    unbroken, killed = (read_metrics(tmp_path / name) for name in ("unbroken", "killed"))
    assert [line["step"] for line in killed] == [line["step"] for line in unbroken] == [3, 6, 7]
    timeless = [
        [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines]
        for lines in (unbroken, killed)
    ]
    assert all(line["seconds"] > 0 for line in killed)
    assert (timeless[0] == timeless[1]) is not forgets


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(tmp_path: Path) -> None:
    used = recipe(train__lr=1e30, train__max_steps=6, train__save_steps=1, train__schedule="constant")
    with pytest.raises(TrainingError, match=r"step 2: loss .* expected finite numbers\. Lower train\.lr"):
        run_training(tmp_path, used)
    (saved,) = (tmp_path / "state").iterdir()
    assert saved.name == "step-00000001"
    assert all(torch.isfinite(value).all() for value in load_file(saved / "head.safetensors").values())


def test_weight_decay_is_for_matrices_alone() -> None:
    head = tiny_head(tiny_trunk("glm4_moe"))
    matrices, vectors = make_optimizer(head, train_options(recipe(train__weight_decay=0.1))).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.ndim > 1 for parameter in matrices["params"])
    assert all(parameter.ndim == 1 for parameter in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(head.parameters()))


def test_a_damaged_line_of_the_log_costs_no_other_line(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "loss": 2.0}',
        "\x00\x00",
        '{"step": 2, "lo',
        "[]",
        '{"loss": 1.0}',
        '{"step": 3, "loss": 1.0}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]
    RunLog(tmp_path, 3).log(4, {"loss": 0.5})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3, 4]
