"""Every kind of state, window by window: what is kept, what is taken back, who sees what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import FalconH1Config
from transformers.models.qwen3_5 import modeling_qwen3_5

from mtp_inference.cache.delta import MAX_WINDOW, delta_token, delta_window
from mtp_inference.cache.model_cache import AttentionStore, WindowCache
from mtp_inference.cache.recurrent import undecided_states, window_conv
from mtp_inference.cache.window import Window
from mtp_train.errors import UnsupportedModelError
from scripted import BatchRun, random_prompt, state_bound, state_errors
from tiny import CACHE_KINDS, SLIDING_WINDOW, tiny_trunk

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
VALUE_HEADS = 4

Inputs = dict[str, Tensor]


def drawn(num_tokens: int, key_heads: int = 2) -> Inputs:
    """Return the inputs of a Gated DeltaNet layer, two rows."""
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator)

    return {
        "query": draw(num_tokens, key_heads, 8),
        "key": draw(num_tokens, key_heads, 8),
        "value": draw(num_tokens, VALUE_HEADS, 6),
        "g": -draw(num_tokens, VALUE_HEADS).abs(),
        "beta": draw(num_tokens, VALUE_HEADS).sigmoid(),
        "initial_state": draw(VALUE_HEADS, 8, 6),
    }


def alike(num_tokens: int) -> Inputs:
    """Return the worst case for the solve: every token writes along the same key, fully, and nothing decays."""
    inputs = drawn(num_tokens)
    same_key = inputs["key"][:, :1].expand_as(inputs["key"])
    return inputs | {"key": same_key, "g": torch.zeros_like(inputs["g"]), "beta": torch.ones_like(inputs["beta"])}


def forgetful(num_tokens: int) -> Inputs:
    """Return decays so strong that their inverse overflows fp32."""
    inputs = drawn(num_tokens)
    return inputs | {"g": inputs["g"] * 100}


def stock(inputs: Inputs, num_tokens: int, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """Return the output and the last state of transformers' kernel over the first tokens."""
    first = {name: part if name == "initial_state" else part[:, :num_tokens] for name, part in inputs.items()}
    # transformers 5.17 takes heads that are repeated already.
    for name in ("query", "key"):
        first[name] = first[name].repeat_interleave(VALUE_HEADS // first[name].shape[2], dim=2)
    kernel = modeling_qwen3_5.torch_recurrent_gated_delta_rule
    output, state = kernel(**first, output_final_state=True, use_qk_l2norm_in_kernel=normalise)
    return output, state


def check_window(inputs: Inputs, normalise: bool = True, one_off: int = 0) -> None:
    """Compare the outputs, and the states of every pair of kept counts, with transformers' kernel."""
    num_tokens = inputs["value"].shape[1]
    outputs = [stock(inputs, kept, normalise) for kept in range(1, num_tokens + 1)]
    states = [inputs["initial_state"], *(state for _, state in outputs)]
    output, window = delta_window(**inputs, use_qk_l2norm_in_kernel=normalise)
    torch.testing.assert_close(output, outputs[-1][0], **CLOSE)
    for kept in range(num_tokens + 1):
        num_kept = [kept, num_tokens - kept]
        found = torch.full_like(states[0], torch.nan)
        window.commit(torch.tensor(num_kept) - one_off, found)
        expected = torch.stack([states[count][row] for row, count in enumerate(num_kept)])
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, MAX_WINDOW])
def test_a_window_gives_the_stock_kernels_outputs_and_every_state(
    num_tokens: int, key_heads: int, normalise: bool
) -> None:
    inputs = drawn(num_tokens, key_heads)
    if not normalise:
        inputs["key"] = inputs["key"] / 3
    check_window(inputs, normalise)


@pytest.mark.parametrize("hard", [alike, forgetful])
def test_hard_inputs_lose_no_accuracy(hard: Callable[[int], Inputs]) -> None:
    check_window(hard(MAX_WINDOW))


def test_a_count_that_is_one_off_is_found() -> None:
    with pytest.raises(AssertionError, match="not close"):
        check_window(drawn(4), one_off=1)


def test_states_stay_fp32_under_bf16_inputs() -> None:
    inputs = {name: part if name == "initial_state" else part.bfloat16() for name, part in drawn(4).items()}
    output, window = delta_window(**inputs, use_qk_l2norm_in_kernel=True)
    expected, state = stock(inputs, 4)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected)
    found = torch.empty_like(state)
    window.commit(torch.tensor([4, 4]), found)
    torch.testing.assert_close(found, state, **CLOSE)
    one = {name: part if name == "initial_state" else part[:, :1] for name, part in inputs.items()}
    expected = stock(one, 1)[1]
    output, state = delta_token(**one, use_qk_l2norm_in_kernel=True)
    assert (output.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(state, expected, **CLOSE)


def test_a_window_too_long_for_the_solve_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens; expected at most 8"):
        delta_window(**drawn(MAX_WINDOW + 1), use_qk_l2norm_in_kernel=True)


def test_the_stock_kernels_are_back_after_an_error() -> None:
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn")
    before = [getattr(modeling_qwen3_5, name) for name in names]

    def fail_inside() -> None:
        with undecided_states(tiny_trunk("qwen3_5").family):
            inside = [getattr(modeling_qwen3_5, name) for name in names]
            assert inside == [delta_window, delta_token, window_conv]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert [getattr(modeling_qwen3_5, name) for name in names] == before


def mask_errors(size: int, sliding_window: int | None, max_window: int, *, ragged: bool) -> int:
    """Run random windows over slots that say which position they hold; count slots and positions wrongly seen."""
    generator = torch.Generator().manual_seed(0)
    num_rows = 3
    errors = 0
    held_BS = torch.full((num_rows, size), -1)
    first_B = torch.tensor([0, 3, 1]) if ragged else torch.zeros(num_rows, dtype=torch.long)
    for row, first in enumerate(first_B.tolist()):
        held_BS[row, :first] = torch.arange(first)
    for _ in range(25):
        num_tokens = int(torch.randint(1, max_window + 1, (1,), generator=generator))
        positions_BT = first_B[:, None] + torch.arange(num_tokens)
        held_BS.scatter_(1, positions_BT % size, positions_BT)
        used = int(positions_BT.max()) + 1
        start = None if ragged else int(first_B[0])
        window = Window(slice(0, num_rows), positions_BT, used, start)
        mask = window.mask(size, sliding_window)
        num_seen = min(used, size)
        if mask is None:
            mask = torch.ones(num_tokens, num_seen, dtype=torch.bool).tril(num_seen - num_tokens)[None, None]
        mask_BTS = mask[:, 0].expand(num_rows, -1, -1)
        reach = used if sliding_window is None else sliding_window
        for row, token in torch.cartesian_prod(torch.arange(num_rows), torch.arange(num_tokens)).tolist():
            position = int(positions_BT[row, token])
            seen = sorted(held_BS[row, :num_seen][mask_BTS[row, token]].tolist())
            errors += seen != list(range(max(0, position - reach + 1), position + 1))
        # Rows keep different numbers of tokens; what they reject stays in its slots.
        kept_B = torch.randint(1, num_tokens + 1, (num_rows if ragged else 1,), generator=generator)
        first_B = first_B + kept_B
    return errors


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 1, 6, 80])
def test_a_token_sees_the_positions_before_it_and_nothing_else(sliding_window: int | None, ragged: bool) -> None:
    capacity = 240
    max_window = 8
    size = capacity if sliding_window is None else min(capacity, sliding_window + max_window)
    assert mask_errors(size, sliding_window, max_window, ragged=ragged) == 0


def test_a_ring_without_room_for_a_window_is_found() -> None:
    assert mask_errors(6 + 8 - 2, 6, 8, ragged=True) > 0


def test_a_mask_is_left_out_only_where_the_bounds_are_tight() -> None:
    for positions, start in (([4], 4), ([0, 1, 2], 0)):
        used = positions[-1] + 1
        tight = Window(slice(0, 1), torch.tensor([positions]), used, start)
        loose = Window(slice(0, 1), torch.tensor([positions]), used + 3, start)
        assert tight.mask(50, None) is tight.mask(50, used) is None
        assert tight.mask(50, used - 1) is not None
        mask = loose.mask(50, None)
        assert mask is not None
        assert mask.sum(-1).flatten().tolist() == [position + 1 for position in positions]


@pytest.mark.parametrize("prefill_chunk", [3, 8])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_a_prompt_prefilled_in_chunks_leaves_what_one_forward_leaves(kind: str, prefill_chunk: int) -> None:
    trunk = tiny_trunk(CACHE_KINDS[kind])
    # The last chunks have one token, one token fewer than a chunk, and a whole chunk.
    prompts = [random_prompt(num_tokens, seed=num_tokens) for num_tokens in (25, 23, 24)]
    run = BatchRun(trunk, None, prompts, depth=0, prefill_chunk=prefill_chunk)
    for row, prompt in enumerate(prompts):
        assert max(state_errors(run.cache, trunk, prompt, row).values()) < state_bound(trunk)
        with torch.inference_mode():
            first = trunk.logits(trunk.hidden(torch.tensor([prompt]))[:, -1]).argmax()
        assert run.tokens[row] == [*prompt, int(first)]


def test_a_window_beyond_the_buffers_is_refused() -> None:
    cache = WindowCache(tiny_trunk("mistral").config, num_rows=1, capacity=12, max_window=4, max_undecided=4)
    with pytest.raises(RuntimeError, match=r"5 tokens up to position 9; .* 4 tokens and 12 positions"):
        cache.begin(Window(slice(0, 1), torch.arange(4, 9)[None], 9))
    with pytest.raises(RuntimeError, match="up to position 13"):
        cache.begin(Window(slice(0, 1), torch.arange(10, 13)[None], 13))
    sizes = [layer.size for layer in cache.layers if isinstance(layer, AttentionStore)]
    assert sizes == [min(12, SLIDING_WINDOW + 4)] * 3


def test_a_commit_of_no_forward_is_refused() -> None:
    cache = WindowCache(tiny_trunk("qwen3_5").config, num_rows=1, capacity=12, max_window=4, max_undecided=4)
    cache.begin(Window(slice(0, 1), torch.arange(4)[None], 4, 0))
    with pytest.raises(RuntimeError, match="no window ran; expected one forward before every commit"):
        cache.commit(None)


def test_a_trunk_whose_state_cannot_be_taken_back_is_refused() -> None:
    config = FalconH1Config(num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match=r"trunk layer 0: .* cannot undo a rejected draft"):
        WindowCache(config, num_rows=1, capacity=16, max_window=8, max_undecided=8)
