"""Decode the same held-out prompts with every arm and count: what acceptance and speed each head gives.

An arm is a trunk with or without a head. Arms on one trunk take turns prompt by prompt, so that a machine that slows
down slows them all down alike. The arm without drafts runs through the same decoder at depth 0, and every output of
the others is checked against its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mtp_inference import SpeculativeDecoder
from mtp_inference.draft import DrafterMaker
from mtp_inference.reference import NEAR_TIE_GAP, Comparison, compare
from mtp_train.acceptance import PromptCounts
from mtp_train.data.prompts import Prompt
from mtp_train.data.tokenize import Document
from mtp_train.heads.trunk import Trunk

PLAIN = "none"
LOW_PRECISION_TIE_GAP = 0.25
"""Logit gap that counts as a tie below fp32: four steps of bfloat16 at the size logits have (8 to 16).

Measured on the demo: of 384 texts 3 parted from plain decoding, each at one step (`tests/parity/test_bf16_ties.py`)."""


@dataclass
class ArmRun:
    """What one arm did on all prompts."""

    counts: list[PromptCounts] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    identical: int = 0
    near_ties: int = 0
    divergences: list[str] = field(default_factory=list)
    """Prompts whose output differs from plain decoding at no near tie: each is a bug."""
    captured_rounds: int = 0
    """See :attr:`SpeculativeDecoder.captured_rounds`."""

    @property
    def new_tokens(self) -> int:
        """Tokens returned."""
        return sum(len(output) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """Returned tokens over wall time, prefill included."""
        seconds = sum(count.seconds or 0.0 for count in self.counts)
        return self.new_tokens / seconds if seconds else 0.0


def run_arms(
    trunk: Trunk,
    drafting: Mapping[str, DrafterMaker],
    prompts: Sequence[Prompt],
    *,
    depth: int,
    max_new_tokens: int,
    eos_ids: Collection[int],
    on_prompt: Callable[[], None],
) -> dict[str, ArmRun]:
    """Decode every prompt plainly and with each head, on one trunk.

    Args:
        trunk: The trunk.
        drafting: Arm name to what drafts in it.
        prompts: Held-out prompts.
        depth: Drafts per round.
        max_new_tokens: Limit per prompt.
        eos_ids: Tokens that end a response.
        on_prompt: Called after each prompt, for a progress bar.

    Returns:
        A run per arm, ``none`` first.
    """
    decoders = {PLAIN: SpeculativeDecoder(trunk, None, depth=0, eos_ids=eos_ids)}
    for arm, maker in drafting.items():
        decoders[arm] = SpeculativeDecoder(trunk, maker, depth=depth, eos_ids=eos_ids)
    runs = {arm: ArmRun() for arm in decoders}
    # The first call of each decoder pays for lazy initialisation; nobody should read that as decoding time.
    for decoder in decoders.values():
        decoder.generate([prompts[0].prompt_ids], min(8, max_new_tokens))
    for prompt in prompts:
        for arm, decoder in decoders.items():
            (result,) = decoder.generate([prompt.prompt_ids], max_new_tokens)
            run = runs[arm]
            run.counts.append(result.counts(prompt.id))
            run.outputs.append(tuple(result.token_ids))
            if arm != PLAIN:
                _check(run, prompt, runs[PLAIN].outputs[-1], trunk)
        on_prompt()
    for arm, decoder in decoders.items():
        runs[arm].captured_rounds = decoder.captured_rounds
    return runs


def _check(run: ArmRun, prompt: Prompt, plain: tuple[int, ...], trunk: Trunk) -> None:
    verdict = compare_greedy(run.outputs[-1], plain, trunk, prompt.prompt_ids).verdict
    if verdict == "identical":
        run.identical += 1
    elif verdict == "near_tie":
        run.near_ties += 1
    else:
        run.divergences.append(prompt.id)


def compare_greedy(
    tokens: Sequence[int], plain_tokens: Sequence[int], trunk: Trunk, prompt_ids: Sequence[int]
) -> Comparison:
    """Compare a greedy text with the plain one, as :func:`compare` does, by the gap of the trunk's precision."""
    gap = NEAR_TIE_GAP if trunk.lm_head_VD.dtype is torch.float32 else LOW_PRECISION_TIE_GAP
    return compare(tokens, plain_tokens, trunk, prompt_ids, gap)


def own_text(prompts: Sequence[Prompt], outputs: Sequence[tuple[int, ...]], seq_len_tokens: int) -> list[Document]:
    """Turn outputs into documents whose targets are the output's tokens: the text that dense metrics are taken on."""
    documents = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = (prompt.prompt_ids + output)[:seq_len_tokens]
        mask = ((False,) * len(prompt.prompt_ids) + (True,) * len(output))[:seq_len_tokens]
        documents.append(Document(tokens, mask, prompt.group, prompt.id))
    return documents
