"""The ways of benchmarks/rollback.py are exact: they differ in cost alone, so that their times may be compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks.rollback import (
    MAX_WINDOW,
    WAYS,
    DeltaInputs,
    Shape,
    Way,
    commit_replay,
    draw_layers,
    graph_times,
    main,
)
from mtp_inference.bench import clock
from mtp_inference.bench.clock import Piece
from recorded_graph import Recorder

NUM_ROWS, NUM_LAYERS = 3, 2


def stock(inputs: DeltaInputs, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the stock kernel's output and last state over the first tokens."""
    query, key, value, g, beta = (part[:, :num_tokens] for part in inputs[:5])
    # transformers 5.17 takes heads that are repeated already.
    query, key = (part.repeat_interleave(value.shape[2] // part.shape[2], dim=2) for part in (query, key))
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    kernel = modeling_qwen3_5.torch_recurrent_gated_delta_rule
    output, state = kernel(query, key, value, g=g, beta=beta, initial_state=inputs.initial_state, **options)
    return output, state


def check(way: Way, window: int, key_heads: int = 2) -> None:
    """Compare outputs, and the states of every kept count in every row and layer, with the stock kernel."""
    shape = Shape(rows=NUM_ROWS, window=window, heads=4, key_heads=key_heads, key_width=16, value_width=8)
    for first in range(window):
        num_kept = [(first + 2 * row) % window + 1 for row in range(NUM_ROWS)]
        layers, state_LBHKV = draw_layers(shape, NUM_LAYERS, "cpu")
        expected = torch.stack([torch.stack(kept_states(inputs, num_kept)) for inputs in layers])
        ran = [way.run(inputs) for inputs in layers]
        for (output, _), inputs in zip(ran, layers, strict=True):
            torch.testing.assert_close(output, stock(inputs, window)[0], rtol=1e-5, atol=1e-5)
        way.commit([kept for _, kept in ran], torch.tensor(num_kept), state_LBHKV)
        torch.testing.assert_close(state_LBHKV, expected, rtol=1e-5, atol=1e-5)


def kept_states(inputs: DeltaInputs, num_kept: list[int]) -> list[Tensor]:
    return [stock(inputs, kept)[1][row] for row, kept in enumerate(num_kept)]


@pytest.mark.parametrize("window", [1, 3, MAX_WINDOW])
@pytest.mark.parametrize("key_heads", [4, 1])
@pytest.mark.parametrize("name", WAYS)
def test_every_way_gives_the_stock_kernels_outputs_and_states(name: str, key_heads: int, window: int) -> None:
    check(WAYS[name], window, key_heads)


@pytest.mark.parametrize("forgotten", ["g", "beta"])
def test_a_replay_that_forgets_a_mask_is_found(forgotten: str) -> None:
    def commit(kept: Sequence[tuple[Tensor, ...]], num_kept_B: Tensor, state_LBHKV: Tensor) -> None:
        masked = []
        for key, value, g, beta in kept:
            is_kept_BT1 = (torch.arange(g.shape[1]) < num_kept_B[:, None])[..., None]
            kept_g, kept_beta = (g, beta * is_kept_BT1) if forgotten == "g" else (g * is_kept_BT1, beta)
            masked.append((key, value, kept_g, kept_beta))
        commit_replay(masked, torch.full_like(num_kept_B, 4), state_LBHKV)

    with pytest.raises(AssertionError, match="not close"):
        check(Way(WAYS["replay"].run, commit), 4)


@pytest.mark.parametrize("name", WAYS)
def test_a_count_that_is_one_off_is_found(name: str) -> None:
    def commit(kept: Sequence[Any], num_kept_B: Tensor, state_LBHKV: Tensor) -> None:
        WAYS[name].commit(kept, (num_kept_B - 1).clamp(min=1), state_LBHKV)

    with pytest.raises(AssertionError, match="not close"):
        check(Way(WAYS[name].run, commit), 4)


def test_on_a_gpu_every_phase_of_every_way_is_captured_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(rows=NUM_ROWS, window=3, heads=4, key_heads=2, key_width=16, value_width=8)
    layers, state_LBHKV = draw_layers(shape, NUM_LAYERS, "cpu")
    captured: list[Recorder] = []

    def record(piece: Piece) -> Callable[[], None]:
        captured.append(Recorder())
        with captured[-1]:
            piece()
        return captured[-1].replay

    replayed: list[object] = []
    monkeypatch.setattr(clock, "captured", record)
    monkeypatch.setattr(clock, "_event_seconds", lambda run: float(replayed.append(run) or len(replayed)))
    found = graph_times(layers, torch.tensor([1, 2, 3]), state_LBHKV, 1, torch.device("cuda"))
    # One turn to warm up, one that counts; pieces in the order of the ways and their phases.
    assert len(captured) == len(set(replayed)) == len(replayed) / 2 == 9
    assert found == {"states": [10.0, 11.0, 12.0], "replay": [13.0, 14.0, 15.0], "corrections": [16.0, 17.0, 18.0]}
    # The graph of a commit runs no window.
    window, commit, both = (len(one.operations) for one in captured[-3:])
    assert both == window + commit


def test_the_program_ends_in_one_line_with_every_result(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--key-width", "4", "--value-width", "4", "--layers", "2", "--repeats", "1"]
    main(["--rows", "1,2", "--window", "2,3", *sizes])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = [(result["rows"], result["window"], result["way"]) for result in report["results"]]
    assert found == [(rows, window, way) for rows in (1, 2) for window in (2, 3) for way in WAYS]
    # Two layers, two rows, three tokens: a state of each head, or two keys and four times a value and two numbers.
    assert report["results"][-3]["kept_bytes"] == 4 * 2 * 2 * 3 * (4 * 4 * 4)
    assert report["results"][-2]["kept_bytes"] == 4 * 2 * 2 * 3 * (2 * 4 + 4 * (4 + 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "9"], "--window: found 9; expected at most 8"),
        (["--key-heads", "3"], "--key-heads: found 3; expected a divisor of --heads, 4"),
        (["--rows", "0"], "found 0; expected whole numbers from 1 on"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
