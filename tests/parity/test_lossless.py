"""Every round leaves exactly the state of plain decoding, of which test_decoder_fuzz.py compares the texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from mtp_inference.cache.delta import DeltaWindow
from mtp_inference.cache.model_cache import CompressedStore
from mtp_inference.cache.recurrent import ConvolutionInputs, RecurrentLayers, RecurrentStore
from mtp_train.trunk.load import Trunk
from scripted import BatchRun, ScriptedDrafting, plain_texts, random_prompt, state_bound, state_errors
from tiny import CACHE_KINDS, tiny_trunk
from tolerances import FAR

NEW_TOKENS = 24
# The last goes beyond the window of the sliding trunks.
PROMPTS = [random_prompt(4, seed=1), random_prompt(1, seed=2), random_prompt(11, seed=3)]
# Drafts to get right per round; 9 means all, whatever the depth.
SCRIPT = [1, 9, 0, 2, 0, 3, 9, 9, 1]


@cache
def trunk_and_texts(kind: str) -> tuple[Trunk, dict[tuple[int, ...], list[int]]]:
    """Return a trunk and the plain texts of the prompts, longer than what is asked for by the drafts of two rounds."""
    trunk = tiny_trunk(CACHE_KINDS[kind])
    texts = plain_texts(trunk, PROMPTS, NEW_TOKENS + 16)
    assert all(len(set(text[:NEW_TOKENS])) >= 6 for text in texts.values()), "a text that loops proves little"
    return trunk, texts


def run_rounds(
    kind: str, depths: Sequence[int], after_round: Callable[[BatchRun, int], None] | None = None
) -> tuple[bool, list[list[dict[str, float]]]]:
    """Decode eight rounds of a ragged batch; say whether the texts are plain; return every row's errors by round."""
    trunk, texts = trunk_and_texts(kind)
    run = BatchRun(trunk, ScriptedDrafting(texts, SCRIPT), PROMPTS, max(depths))
    errors = []
    for index in range(8):
        run.run_round(depths[index % len(depths)])
        if after_round is not None:
            after_round(run, depths[index % len(depths)])
        errors.append([state_errors(run.cache, trunk, text[:-1], row) for row, text in enumerate(run.tokens)])
    plain = [[*prompt, *texts[tuple(prompt)]] for prompt in PROMPTS]
    return all(ours == text[: len(ours)] for ours, text in zip(run.tokens, plain, strict=True)), errors


def far_off(kind: str) -> float:
    """Return an error of states that rounding cannot explain."""
    return FAR * state_bound(trunk_and_texts(kind)[0])


# The last changes depth from round to round: rounds without drafts follow accepting ones.
@pytest.mark.parametrize("depths", [[7, 0], [3, 0, 0, 2, 0, 5]], ids=str)
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_every_round_leaves_the_states_of_a_plain_forward(kind: str, depths: list[int]) -> None:
    is_plain, rounds = run_rounds(kind, depths)
    assert is_plain
    bound = state_bound(trunk_and_texts(kind)[0])
    for index, rows in enumerate(rounds):
        for row, errors in enumerate(rows):
            assert max(errors.values()) < bound, (index, row, errors)


def commit_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what rejected drafts added in the recurrent state."""
    commit = DeltaWindow.commit
    monkeypatch.setattr(
        DeltaWindow, "commit", lambda window, num_kept_B, out: commit(window, torch.full_like(num_kept_B, 4), out)
    )


def keep_the_last_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the inputs of rejected drafts in the convolution."""
    commit = RecurrentLayers.commit
    take = RecurrentStore.take_window
    seen: dict[int, Tensor] = {}

    def remember(store: RecurrentStore) -> tuple[Tensor, Tensor | DeltaWindow]:
        conv, state = take(store)
        seen[id(store)] = conv
        return conv, state

    def spoil(layers: RecurrentLayers, num_kept_B: Tensor | None) -> None:
        commit(layers, num_kept_B)
        for store in layers.stores if num_kept_B is not None else []:
            assert store.conv_BCW is not None
            store.conv_BCW.copy_(seen[id(store)][..., -store.conv_BCW.shape[-1] :])

    monkeypatch.setattr(RecurrentStore, "take_window", remember)
    monkeypatch.setattr(RecurrentLayers, "commit", spoil)


def keep_the_first_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the compressed keys of rejected drafts."""
    write = CompressedStore.write_entries

    def keep_the_first(store: CompressedStore, name: str, groups_BG: Tensor, entries_BGX: Tensor) -> Tensor:
        written = store.buffers_BZ.get(f"{name} entries")
        before_BEX = None if written is None else written.clone()
        found_BEX = write(store, name, groups_BG, entries_BGX)
        if written is not None:
            written.copy_(torch.where(before_BEX == 0, written, before_BEX))
        return found_BEX

    monkeypatch.setattr(CompressedStore, "write_entries", keep_the_first)


def forget_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the drafts of a window write over the inputs before it."""
    ring = ConvolutionInputs.buffer
    monkeypatch.setattr(
        ConvolutionInputs,
        "buffer",
        lambda layer, number, like_BT, num_places: ring(layer, number, like_BT, num_places - layer.max_undecided + 1),
    )


SPOILT = [
    ("recurrent", "recurrent", commit_everything),
    ("recurrent", "conv", keep_the_last_inputs),
    ("compressed", "entries", keep_the_first_entries),
    ("convolved", "conv", forget_what_came_before),
]


@pytest.mark.parametrize(("kind", "broken", "spoil"), [one for one in SPOILT if one[0] in CACHE_KINDS])
def test_a_state_that_rejected_drafts_changed_is_found(
    kind: str, broken: str, spoil: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    is_plain, rounds = run_rounds(kind, [3])
    assert not is_plain
    assert max(errors[broken] for rows in rounds for errors in rows) > far_off(kind)


# transformers' indexer of blocks refuses positions past the last key by itself.
@pytest.mark.parametrize("kind", [kind for kind in CACHE_KINDS if kind != "blocks"])
def test_positions_that_count_rejected_drafts_are_found(kind: str) -> None:
    lengths = [len(prompt) for prompt in PROMPTS]

    def stay_behind_the_drafts(run: BatchRun, depth: int) -> None:
        for row in range(len(lengths)):
            lengths[row] += depth + 1
        run.batch.length_B.copy_(torch.tensor(lengths))

    is_plain, rounds = run_rounds(kind, [3], stay_behind_the_drafts)
    assert not is_plain
    assert max(errors["keys"] for rows in rounds for errors in rows) > far_off(kind)
