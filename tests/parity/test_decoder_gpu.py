"""Captured rounds say what the same rounds say one operation at a time."""

from __future__ import annotations

import pytest
import torch

from mtp_inference import HeadDrafting, Request, Sampling, SpeculativeDecoder, compare, plain_greedy
from mtp_inference.chooser import DraftSampling
from mtp_inference.reference import NEAR_TIE_GAP
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk
from tiny import VOCAB_SIZE, tiny_head, tiny_trunk

pytestmark = pytest.mark.gpu
LENGTHS = (1, 2, 9, 9, 40)
NEW_TOKENS = 40


def models(dtype: torch.dtype = torch.float32) -> tuple[Trunk, MtpHead]:
    trunk = tiny_trunk("qwen3_5", seed=1)
    head = tiny_head(trunk, seed=1)
    return trunk.to("cuda", dtype), head.to("cuda", dtype)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("depth", [0, 1, 3, 7])
@pytest.mark.parametrize("max_batch", [1, 3])
def test_captured_decoding_equals_plain_decoding_call_after_call(depth: int, max_batch: int) -> None:
    trunk, head = models()
    decoder = SpeculativeDecoder(trunk, HeadDrafting(head), depth, (), max_batch=max_batch)
    for _ in range(3):
        for prompt, result in zip(prompts(), decoder.generate(prompts(), NEW_TOKENS), strict=True):
            plain = plain_greedy(trunk, prompt, NEW_TOKENS, ())
            assert compare(result.token_ids, plain, trunk, prompt, NEAR_TIE_GAP).verdict != "divergence"


@pytest.mark.parametrize("draft_sampling", ["argmax", "sampled"])
def test_captured_sampling_equals_sampling_one_operation_at_a_time(draft_sampling: DraftSampling) -> None:
    trunk, head = models()
    requests = [
        Request(
            prompt_ids=prompt,
            max_new_tokens=NEW_TOKENS,
            sampling=Sampling(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1, seed=seed),
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
    decoder = SpeculativeDecoder(trunk, head, 3, (), max_batch=3)
    for prompt, result in zip(prompts(), decoder.generate(prompts(), NEW_TOKENS), strict=True):
        plain = plain_greedy(trunk, prompt, NEW_TOKENS, ())
        assert compare(result.token_ids, plain, trunk, prompt, 0.25).verdict != "divergence"
