"""In bf16 a window and a single token round differently: texts may part, but only where tokens are as good as equal.

How good is measured in steps: the distance between neighbouring bf16 numbers at the size of the best logit. Where two
texts part, the logits are computed again by one plain forward over what they share: in bf16, where the two tokens lie
within a few steps of the best, and in fp32 from the same weights, where they differ by no more than what bf16 does to
this trunk's logits.

Over 24 tokens after each of 128 prompts, for each of eight tiny trunks without experts, the widest parting was 4 steps.
A mixture of experts knows no such bound: rounding may send a token to another expert, in plain decoding as elsewhere.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import mtp_inference.cache.recurrent
from mtp_inference import HeadDrafting, SpeculativeDecoder, compare
from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.drafters.drafter import DrafterMaker
from mtp_inference.drafters.other_drafters import ModelDrafting
from mtp_inference.reference import generate_equal_length
from mtp_train.trunk.load import Trunk
from tiny import VOCAB_SIZE, chained_head, tiny_head, tiny_trunk

MOST_STEPS = 8.0
PROMPTS = torch.randint(VOCAB_SIZE, (32, 6), generator=torch.Generator().manual_seed(50)).tolist()
NEW_TOKENS = 20


@pytest.fixture(autouse=True)
def products_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply as held: a CPU that is slow in bf16 would run prompts, and batches of this size, in fp32."""
    # Every CPU runs its own bf16 products here; test_held_in_half.py runs the conversion to fp32.
    monkeypatch.setattr("mtp_train.trunk.precision.bf16_support", lambda _device: (True, "as everywhere"))


class Parting(NamedTuple):
    """Where two texts first differ."""

    steps: float
    """How far the worse token lies below the best logit, in bf16 steps."""
    fp32_gap: float
    """The same in fp32, as a difference of logits."""


@functools.cache
def bf16_trunk(name: str) -> Trunk:
    return tiny_trunk(name).bfloat16()


@functools.cache
def fp32_twin(name: str) -> Trunk:
    """Return a trunk of the same, rounded weights that computes in fp32."""
    return copy.deepcopy(bf16_trunk(name)).float()


@functools.cache
def plain_texts(name: str) -> list[list[int]]:
    return generate_equal_length(bf16_trunk(name), PROMPTS, NEW_TOKENS, ())


def decoded(name: str, drafting: DrafterMaker | None, depth: int) -> list[list[int]]:
    decoder = SpeculativeDecoder(bf16_trunk(name), drafting, depth, (), max_batch=16)
    return [list(result.token_ids) for result in decoder.decode(PROMPTS, NEW_TOKENS)]


@torch.inference_mode()
def logits(trunk: Trunk, tokens: Sequence[int]) -> Tensor:
    hidden: Tensor = trunk.hidden(torch.tensor([list(tokens)]))
    return trunk.logits(hidden[0]).float()


def step_at(logit: float) -> float:
    """Return the distance between neighbouring bf16 numbers of that size: eight bits hold it."""
    return 2.0 ** (math.floor(math.log2(abs(logit))) - 7)


def partings(name: str, texts: Sequence[Sequence[int]]) -> list[Parting]:
    """Return the partings from plain decoding, of those texts that part."""
    found = []
    for prompt, text, plain in zip(PROMPTS, texts, plain_texts(name), strict=True):
        comparison = compare(text, plain, bf16_trunk(name), prompt)
        if comparison.verdict == "identical":
            continue
        assert comparison.position is not None
        assert comparison.gap is not None
        prefix = [*prompt, *plain[: comparison.position]]
        pair = [text[comparison.position], plain[comparison.position]]
        best = float(logits(bf16_trunk(name), prefix)[-1].max())
        fp32_V = logits(fp32_twin(name), prefix)[-1]
        found.append(Parting(comparison.gap / step_at(best), float(fp32_V.max() - fp32_V[pair].min())))
    return found


def rounding_error(name: str) -> float:
    """Return how far bf16 moves the ten best logits of plain texts, at most."""
    errors = []
    for prompt, plain in zip(PROMPTS, plain_texts(name), strict=True):
        fp32_TV = logits(fp32_twin(name), [*prompt, *plain])
        best_TN = fp32_TV.topk(10).indices
        errors.append((logits(bf16_trunk(name), [*prompt, *plain]) - fp32_TV).gather(1, best_TN).abs().max())
    return float(torch.stack(errors).max())


def drafting_of(name: str, kind: str) -> DrafterMaker:
    trunk = bf16_trunk(name)
    if kind == "itself":
        return ModelDrafting(trunk)
    head = tiny_head(trunk) if kind == "head" else chained_head(trunk, 4)
    return HeadDrafting(head.bfloat16())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen3_5", "head"), ("qwen3_5", "chained"), ("qwen3_5", "itself"), ("qwen2", "itself"), ("mistral", "itself")],
)
def test_texts_part_at_ties_only(name: str, kind: str) -> None:
    parted = partings(name, decoded(name, drafting_of(name, kind), 4))
    assert len(parted) < len(PROMPTS) / 4
    assert max((parting.steps for parting in parted), default=0.0) <= MOST_STEPS
    assert max((parting.fp32_gap for parting in parted), default=0.0) <= 2 * rounding_error(name)


@pytest.mark.parametrize("kind", ["head", "itself"])
def test_a_mixture_of_experts_parts_seldom_and_mostly_at_ties(kind: str) -> None:
    parted = partings("glm4_moe", decoded("glm4_moe", drafting_of("glm4_moe", kind), 4))
    assert len(parted) < len(PROMPTS) / 3
    assert sum(parting.steps > MOST_STEPS for parting in parted) <= 2


def test_a_wrong_token_is_no_tie() -> None:
    generator = torch.Generator().manual_seed(0)
    for name in ("qwen3_5", "qwen2"):
        texts = [list(plain) for plain in plain_texts(name)]
        for text in texts:
            place = int(torch.randint(NEW_TOKENS, (), generator=generator))
            text[place] = (text[place] + 1 + int(torch.randint(VOCAB_SIZE - 1, (), generator=generator))) % VOCAB_SIZE
        steps = torch.tensor([parting.steps for parting in partings(name, texts)])
        assert len(steps) == len(PROMPTS)
        assert float(steps.median()) > 10 * MOST_STEPS
        assert float((steps > MOST_STEPS).float().mean()) > 0.9


def test_a_state_that_is_not_rolled_back_is_no_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = WindowCache.commit
    monkeypatch.setattr(WindowCache, "commit", lambda cache, num_kept_B: commit(cache, None))
    parted = partings("qwen3_5", decoded("qwen3_5", drafting_of("qwen3_5", "head"), 4))
    assert sum(parting.steps > MOST_STEPS for parting in parted) > len(PROMPTS) / 2


def test_rounding_every_product_of_the_convolution_parts_half_of_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(partings("qwen3_5", decoded("qwen3_5", None, 0))) < len(PROMPTS) / 8

    def rounded_products(inputs_BCN: Tensor, weight_CW: Tensor, *_unused: object, **_also_unused: object) -> Tensor:
        taps_BCTW = inputs_BCN.unfold(2, weight_CW.shape[-1], 1)
        return torch.nn.functional.silu((taps_BCTW * weight_CW[:, None]).sum(-1))

    monkeypatch.setattr(mtp_inference.cache.recurrent, "window_conv", rounded_products)
    assert len(partings("qwen3_5", decoded("qwen3_5", None, 0))) > len(PROMPTS) / 4
