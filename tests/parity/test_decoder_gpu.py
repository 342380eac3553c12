"""Captured rounds equal the same rounds run one operation at a time."""

from __future__ import annotations

import pytest
import torch

from mtp_inference import GenerationResult, HeadDrafting, Request, Sampling, SpeculativeDecoder, compare, fault_of
from mtp_inference.sampling.chooser import DraftSampling
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from tiny import CACHE_KINDS, VOCAB_SIZE, tiny_head, tiny_trunk

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
LENGTHS = (1, 2, 9, 9, 40)
NEW_TOKENS = 40


def models(dtype: torch.dtype = torch.float32) -> tuple[Trunk, MtpHead]:
    return models_of("qwen3_5", dtype)


def models_of(name: str, dtype: torch.dtype) -> tuple[Trunk, MtpHead]:
    trunk = tiny_trunk(name, seed=1)
    head = tiny_head(trunk, seed=1)
    return trunk.to(DEVICE, dtype), head.to(DEVICE, dtype)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]


def plain_results(trunk: Trunk) -> list[GenerationResult]:
    """Return plain decoding of each prompt alone, uncaptured."""
    decoder = SpeculativeDecoder(trunk, None, 0, (), max_batch=1, captures=False, records=True)
    return decoder.generate(prompts(), NEW_TOKENS)


@pytest.mark.parametrize("depth", [0, 1, 3, 7])
@pytest.mark.parametrize("max_batch", [1, 3])
def test_captured_decoding_equals_plain_decoding_call_after_call(depth: int, max_batch: int) -> None:
    trunk, head = models()
    decoder = SpeculativeDecoder(trunk, HeadDrafting(head), depth, (), max_batch=max_batch, records=True)
    plain = plain_results(trunk)
    for _ in range(3):
        assert fault_of(compare(decoder.generate(prompts(), NEW_TOKENS), plain, trunk)) is None


@pytest.mark.parametrize("draft_sampling", ["argmax", "sampled"])
def test_captured_sampling_equals_sampling_one_operation_at_a_time(draft_sampling: DraftSampling) -> None:
    trunk, head = models()
    requests = [
        Request(
            prompt_ids=prompt,
            max_new_tokens=NEW_TOKENS,
            sampling=Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=seed),
            depth=seed % 4,
        )
        for seed, prompt in enumerate(prompts())
    ]
    texts = []
    for captures in (True, False):
        decoder = SpeculativeDecoder(trunk, head, 3, (), draft_sampling=draft_sampling, max_batch=3, captures=captures)
        texts.append([result.token_ids for result in decoder.generate(requests)])
    assert texts[0] == texts[1]


def test_captured_bf16_decoding_diverges_at_near_ties_only() -> None:
    trunk, head = models(torch.bfloat16)
    decoder = SpeculativeDecoder(trunk, head, 3, (), max_batch=3, records=True)
    assert fault_of(compare(decoder.generate(prompts(), NEW_TOKENS), plain_results(trunk), trunk)) is None


def dtype_of(name: str) -> torch.dtype:
    """Return fp32, or bf16 for experts: torch's grouped product captures in no other."""
    experts = any(".experts." in parameter for parameter, _ in tiny_trunk(name).named_parameters())
    return torch.bfloat16 if experts else torch.float32


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_every_kind_of_cache_is_captured_and_says_what_it_says_uncaptured(kind: str) -> None:
    """A round that cannot be captured is warned of, and so fails here by its reason."""
    dtype = dtype_of(CACHE_KINDS[kind])
    trunk, head = models_of(CACHE_KINDS[kind], dtype)
    captured, uncaptured = (
        SpeculativeDecoder(trunk, HeadDrafting(head), 3, (), max_batch=3, captures=captures, records=True)
        for captures in (True, False)
    )
    plain = plain_results(trunk)
    for _ in range(2):
        for decoder in (captured, uncaptured):
            assert fault_of(compare(decoder.generate(prompts(), NEW_TOKENS), plain, trunk)) is None
    assert captured.captured_rounds > 0
    assert uncaptured.captured_rounds == 0
