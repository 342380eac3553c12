"""Texts of a correct decoder part at near ties only, in every dtype; a fault planted in the decoder is found.

The rule follows from the model's own rounding, so that it holds for fp32 and bf16, for tiny trunks and for a real one.
The real one is a checkpoint directory in ``MTP_REAL_MODEL``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from mtp_inference import Comparison, HeadDrafting, NgramDrafting, SpeculativeDecoder, batch, compare
from mtp_inference.cache.model_cache import AttentionStore, WindowCache
from mtp_inference.cache.window import Window
from mtp_inference.drafters.drafter import Drafting
from mtp_inference.lossless import NOISE_RATIO, measure_errors
from mtp_train.errors import NotLosslessError
from mtp_train.runs.refusals import check_decoder
from mtp_train.trunk.load import Trunk
from tiny import CACHE_KINDS, VOCAB_SIZE, chained_head, tiny_head, tiny_trunk

PROMPTS = torch.randint(VOCAB_SIZE, (16, 6), generator=torch.Generator().manual_seed(50)).tolist()
NEW_TOKENS = 20
REAL_PROMPTS = (
    "Explain what a hash table is.",
    "Write a short story about a lighthouse keeper and her dog.\n",
    "List: one, two, three, one, two, three, one, two,",
    "import json\n\ndef load(path):\n    with open(path) as f:\n",
)


@functools.cache
def bf16_trunk(name: str) -> Trunk:
    return tiny_trunk(name).bfloat16()


def drafting_of(name: str, kind: str) -> Drafting:
    if kind == "ngram":
        return NgramDrafting()
    trunk = bf16_trunk(name)
    return HeadDrafting((tiny_head(trunk) if kind == "head" else chained_head(trunk, 4)).bfloat16())


def compared(
    trunk: Trunk, drafting: Drafting, prompts: Sequence[Sequence[int]], fault: Callable[[pytest.MonkeyPatch], None]
) -> list[Comparison]:
    """Compare texts decoded with a fault with the texts of correct plain decoding."""
    plain = SpeculativeDecoder(trunk, None, 0, ()).generate(prompts, NEW_TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        drafted = SpeculativeDecoder(trunk, drafting, 3, ()).generate(prompts, NEW_TOKENS)
        return [
            compare(one.token_ids, other.token_ids, trunk, prompt, rounds=one.round_log)
            for one, other, prompt in zip(drafted, plain, prompts, strict=True)
        ]


def faults_of(found: Sequence[Comparison]) -> int:
    return sum(one.verdict == "divergence" for one in found)


def no_fault(_patch: pytest.MonkeyPatch) -> None:
    """Leave the decoder as it is."""


def no_rollback(patch: pytest.MonkeyPatch) -> None:
    """Keep the recurrent state of rejected drafts."""
    commit = WindowCache.commit
    patch.setattr(WindowCache, "commit", lambda cache, _num_kept_B: commit(cache, None))


def late_positions(patch: pytest.MonkeyPatch) -> None:
    """Rotate drafts as if they stood one position further."""
    run = batch.window_states

    class Late:
        def __init__(self, trunk: Trunk) -> None:
            self._trunk = trunk

        def __getattr__(self, name: str) -> Any:
            return getattr(self._trunk, name)

        def window_hidden(self, tokens_BT: Tensor, *, positions_BT: Tensor, **rest: Any) -> Tensor:
            late_BT = positions_BT + torch.arange(positions_BT.shape[1]).clamp(max=1)
            return self._trunk.window_hidden(tokens_BT, positions_BT=late_BT, **rest)

    patch.setattr(batch, "window_states", lambda trunk, *rest: run(Late(trunk), *rest))  # type: ignore[arg-type]


def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    """Let each row of a verify window attend to the next token's key."""
    places = Window._places

    def wider(window: Window, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        seen_by_B1T1, held_B11S = places(window, *args, **kwargs)
        return seen_by_B1T1 + int(window.num_tokens > 1 and not window.is_fresh), held_B11S

    patch.setattr(Window, "_places", wider)


def shifted_rows(patch: pytest.MonkeyPatch) -> None:
    """Give verify windows every cached key and value of the position before."""
    update = AttentionStore.update

    def shifted(store: AttentionStore, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        found = update(store, keys, values, *args, **kwargs)
        is_verified = keys.shape[2] > 1 and store.window is not None and not store.window.is_fresh
        return tuple(one.roll(1, 2) for one in found) if is_verified else found

    patch.setattr(AttentionStore, "update", shifted)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen3_5", "head"), ("qwen3_5", "chained"), ("qwen2", "ngram"), ("mistral", "ngram"), ("glm4_moe", "head")],
)
def test_a_correct_decoder_in_bf16_is_lossless(name: str, kind: str) -> None:
    assert faults_of(compared(bf16_trunk(name), drafting_of(name, kind), PROMPTS, no_fault)) == 0


@pytest.mark.parametrize(
    ("name", "kind", "fault"),
    [
        # Attention needs no rollback, and of this family's layers one in four attends.
        ("qwen3_5", "head", no_rollback),
        *(
            (name, "ngram", fault)
            for name in ("qwen2", "mistral")
            for fault in (late_positions, one_token_too_many, shifted_rows)
        ),
    ],
)
def test_a_planted_fault_is_found_in_bf16(name: str, kind: str, fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    found = compared(bf16_trunk(name), drafting_of(name, kind), PROMPTS, fault)
    assert faults_of(found) >= 3, found
    console = Console(quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(NotLosslessError, match="nothing was trained"):
            check_decoder(bf16_trunk(name), PROMPTS, (), 3, console)
    check_decoder(bf16_trunk(name), PROMPTS, (), 3, console)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_windows_are_as_noisy_as_plain_decoding(kind: str, dtype: torch.dtype) -> None:
    trunk = tiny_trunk(CACHE_KINDS[kind]).to(dtype)
    for prompt, other in zip(PROMPTS[:3], PROMPTS[3:6], strict=True):
        errors = measure_errors(trunk, prompt, [*other, *other])
        assert errors.is_rounding, errors
        # The reference of an fp32 trunk is fp32: its noise is the last bits of a logit.
        assert dtype is torch.bfloat16 or errors.noise < 1e-3


def test_a_state_in_bf16_is_no_rounding_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of an fp32 decoder as small as bf16's rounding changes no token here, and is found."""
    trunk = tiny_trunk("qwen3_5")
    assert measure_errors(trunk, PROMPTS[0], PROMPTS[1]).is_rounding
    update = AttentionStore.update

    def coarse(store: AttentionStore, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return update(store, keys.bfloat16().float(), values.bfloat16().float(), *args, **kwargs)

    monkeypatch.setattr(AttentionStore, "update", coarse)
    errors = measure_errors(trunk, PROMPTS[0], PROMPTS[1])
    assert not errors.is_rounding
    assert errors.window_ratio is not None
    assert errors.window_ratio > 10 * NOISE_RATIO


@pytest.mark.slow
@pytest.mark.skipif("MTP_REAL_MODEL" not in os.environ, reason="MTP_REAL_MODEL names no checkpoint directory")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_real_model_is_lossless_and_planted_faults_are_found(dtype: torch.dtype) -> None:
    directory = Path(os.environ["MTP_REAL_MODEL"])
    decoder = SpeculativeDecoder.from_pretrained(directory, head="ngram", device="cpu", dtype=dtype)
    assert decoder.tokenizer is not None
    prompts = [decoder.tokenizer(text).input_ids for text in REAL_PROMPTS]
    assert faults_of(compared(decoder.trunk, NgramDrafting(), prompts, no_fault)) == 0
    for fault in (late_positions, one_token_too_many, shifted_rows):
        assert faults_of(compared(decoder.trunk, NgramDrafting(), prompts, fault)) > 0, fault.__name__
