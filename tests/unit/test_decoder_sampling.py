"""Sampled text from the whole decoder: the same text where drafts are first choices, the same distribution where drawn.

The distribution is checked end to end on a trunk of eleven tokens. Thousands of requests that differ in their seeds are
decoded on rows that are filled again and again. The joint distribution of their first three tokens is known exactly: it
is computed in double from the trunk's forward over every prefix. A right decoder lies within six standard deviations of
chance (about 1e-9). The seeds are fixed, so that each figure is the same in every run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from test_sampling import by_transformers, wilson_hilferty
from torch import Tensor

from mtp_inference import GenerationResult, HeadDrafting, Request, Sampling, SpeculativeDecoder
from mtp_inference.drafters.drafter import Drafting, RoundPlan
from mtp_inference.drafters.ngram_drafter import NgramDrafting
from mtp_inference.sampling.chooser import Drafts
from mtp_train.trunk.load import Trunk
from scripted import PassingDrafting, RandomDrafting, RereadingDrafting
from tiny import FAMILY_NAMES, VOCAB_SIZE, chained_head, nearly_tiny, tiny_head, tiny_trunk

SETTINGS = [
    Sampling(temperature=0.8),
    Sampling(temperature=0.8, top_k=12),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=0.8, min_p=0.05),
    Sampling(),
    Sampling(temperature=0.8, top_k=20, top_p=0.95, min_p=0.02),
    Sampling(),
]


trunk_of = functools.cache(tiny_trunk)


DRAFTING: dict[str, Callable[[str], Drafting]] = {
    "head": lambda name: HeadDrafting(tiny_head(trunk_of(name))),
    "chained": lambda name: HeadDrafting(chained_head(trunk_of(name), 4)),
    "random": lambda name: RandomDrafting(),
    "ngram": lambda name: NgramDrafting(),
    "model": lambda name: RereadingDrafting(nearly_tiny(name)),
}
HEADS = [(name, drafting) for name in FAMILY_NAMES for drafting in ("head", "chained", "random")]
OTHERS = [("glm4_moe", "ngram"), ("qwen3_5", "model"), ("mistral", "model")]


@functools.cache
def mixed_requests() -> list[Request]:
    """Return seven requests of several settings, lengths and depths."""
    generator = torch.Generator().manual_seed(0)
    return [
        Request(
            prompt_ids=torch.randint(VOCAB_SIZE, (3 + 4 * (row % 3) + row % 2,), generator=generator).tolist(),
            max_new_tokens=17 - row,
            sampling=dataclasses.replace(sampling, seed=10 * row),
            depth=(4, 2, 3, 0, 1, 4, 2)[row],
        )
        for row, sampling in enumerate(SETTINGS)
    ]


@functools.cache
def undrafted(name: str) -> list[tuple[int, ...]]:
    decoder = SpeculativeDecoder(trunk_of(name), None, 0, ())
    return [decoder.generate([request])[0].token_ids for request in mixed_requests()]


def texts(results: Sequence[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize(("name", "drafting"), HEADS + OTHERS)
def test_first_choice_drafts_leave_every_sampled_text_as_it_is(name: str, drafting: str) -> None:
    decoder = SpeculativeDecoder(trunk_of(name), DRAFTING[drafting](name), 4, (), max_batch=3)
    results = decoder.generate(mixed_requests())
    assert texts(results) == undrafted(name)
    if drafting == "model":
        assert sum(result.num_accepted_tokens for result in results) > 15


@pytest.mark.parametrize(
    ("name", "drafting"),
    [("qwen3_5", "head"), ("glm4_moe", "chained"), ("qwen2", "model"), ("mistral", "ngram")],
)
def test_with_drawn_drafts_a_row_says_what_it_says_alone(name: str, drafting: str) -> None:
    decoder = SpeculativeDecoder(trunk_of(name), DRAFTING[drafting](name), 4, (), max_batch=3, draft_sampling="sampled")
    alone = [decoder.generate([request])[0] for request in mixed_requests()]
    together = decoder.generate(mixed_requests())
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.rounds, one.accepted_per_pos) == (
            other.token_ids,
            other.rounds,
            other.accepted_per_pos,
        )
    # A row that drafts nothing, a greedy one, and what no drafter has drawn.
    is_undrafted = [ours == plain for ours, plain in zip(texts(together), undrafted(name), strict=True)]
    assert is_undrafted[:5] == ([True] * 5 if drafting == "ngram" else [False, False, False, True, True])


VOCAB, LENGTH, SEEDS, FAR_OUT = 11, 3, 4096, 6.0
PROMPTS = ([1, 5, 3, 9], [2, 2, 7, 0, 10, 4, 8])
PLAIN = Sampling(temperature=1.0)


def small(name: str, drafting: str) -> tuple[Trunk, Drafting]:
    trunk = trunk_of(name, vocab_size=VOCAB)
    if drafting == "model":
        return trunk, RereadingDrafting(nearly_tiny(name, vocab_size=VOCAB, noise=0.3))
    return trunk, HeadDrafting(tiny_head(trunk) if drafting == "head" else chained_head(trunk, 3))


def exact_steps(trunk: Trunk, prompt: Sequence[int], sampling: Sampling = PLAIN) -> list[Tensor]:
    """Return the probabilities of the next token after every prefix of 0, 1, 2 tokens, in double, (VOCAB**n, VOCAB)."""
    steps = []
    prefix_NT = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(LENGTH):
            logits_NV = trunk.logits(trunk.hidden(prefix_NT)[:, -1]).double()
            steps.append(by_transformers(logits_NV, sampling))
            next_N1 = torch.arange(VOCAB).repeat(len(prefix_NT))[:, None]
            prefix_NT = torch.cat([prefix_NT.repeat_interleave(VOCAB, dim=0), next_N1], dim=1)
    return steps


def joint(steps: Sequence[Tensor]) -> Tensor:
    p_N = torch.ones(1, dtype=torch.float64)
    for step_NV in steps:
        p_N = (p_N[:, None] * step_NV).flatten()
    return p_N


def sampled_texts(
    trunk: Trunk, drafting: Drafting | None, sampling: Sampling, num_prompts: int
) -> list[list[GenerationResult]]:
    """Decode every prompt with every seed, all in one batch."""
    requests = [
        Request(prompt_ids=prompt, max_new_tokens=LENGTH, sampling=dataclasses.replace(sampling, seed=seed))
        for prompt in PROMPTS[:num_prompts]
        for seed in range(SEEDS)
    ]
    decoder = SpeculativeDecoder(trunk, drafting, 2, (), max_batch=len(requests), draft_sampling="sampled")
    results = decoder.generate(requests)
    return [results[start : start + SEEDS] for start in range(0, len(results), SEEDS)]


def deviation(results: Sequence[GenerationResult], p_N: Tensor) -> float:
    """Return the chi-square of the first tokens in standard deviations.

    Cells that expect fewer than 5 are counted together; infinite where the impossible came.
    """
    tokens_BL = torch.tensor([result.token_ids for result in results])
    cells_B = (tokens_BL * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(-1)
    counts_N = torch.bincount(cells_B, minlength=len(p_N))
    if bool((counts_N[p_N == 0.0] > 0).any()):
        return math.inf
    expected_N, order = (p_N * len(results)).sort()
    counts_N = counts_N[order]
    # What is pooled comes first, and expects 5 or more itself.
    num_pooled = max(int((expected_N < 5.0).sum()), int((expected_N.cumsum(0) < 5.0).sum()) + 1)
    expected = torch.cat([expected_N[:num_pooled].sum()[None], expected_N[num_pooled:]])
    counts = torch.cat([counts_N[:num_pooled].sum()[None], counts_N[num_pooled:]])
    assert float(expected.min()) >= 5.0
    return wilson_hilferty(counts, expected)


def worst_deviation(trunk: Trunk, drafting: Drafting | None, sampling: Sampling, num_prompts: int = 2) -> float:
    by_prompt = zip(sampled_texts(trunk, drafting, sampling, num_prompts), PROMPTS, strict=False)
    return max(deviation(results, joint(exact_steps(trunk, prompt, sampling))) for results, prompt in by_prompt)


@pytest.mark.parametrize(
    ("name", "drafting", "sampling"),
    [
        ("glm4_moe", "chained", PLAIN),
        ("qwen3_5", "head", PLAIN),
        ("mistral", "model", PLAIN),
        ("mistral", "model", Sampling(temperature=1.0, top_k=4)),
        ("mistral", "model", Sampling(temperature=0.7, top_p=0.75)),
        ("glm4_moe", "chained", Sampling(temperature=1.3, min_p=0.15)),
    ],
)
def test_drawn_drafts_leave_the_distribution_as_it_is(name: str, drafting: str, sampling: Sampling) -> None:
    trunk, maker = small(name, drafting)
    assert worst_deviation(trunk, maker, sampling, num_prompts=1 if name == "qwen3_5" else 2) < FAR_OUT


def test_drawn_drafts_are_accepted_as_often_as_the_distributions_overlap() -> None:
    trunk, maker = small("glm4_moe", "head")
    overlaps: list[Tensor] = []

    def watch(_plan: RoundPlan, newest_B1: Tensor, drafts: Drafts) -> Drafts:
        p_BV = exact_steps(trunk, PROMPTS[0])[1][newest_B1[:, 0]]
        assert drafts.q_BKV is not None
        overlaps.append(torch.minimum(p_BV, drafts.q_BKV[:, 0].double()).sum(-1))
        return drafts

    requests = [
        Request(prompt_ids=PROMPTS[0], max_new_tokens=2, sampling=dataclasses.replace(PLAIN, seed=seed))
        for seed in range(SEEDS)
    ]
    watched = PassingDrafting(maker, watch)
    decoder = SpeculativeDecoder(trunk, watched, 1, (), max_batch=SEEDS, draft_sampling="sampled")
    accepted = sum(result.num_accepted_tokens for result in decoder.generate(requests))
    overlap_B = torch.cat(overlaps)
    assert len(overlap_B) == SEEDS
    sigma = math.sqrt(float((overlap_B * (1.0 - overlap_B)).sum()))
    assert abs(accepted - float(overlap_B.sum())) < FAR_OUT * sigma
    assert 0.2 < accepted / SEEDS < 0.9
