"""Decode the same held-out prompts with every arm and count: what acceptance and speed each head gives.

An arm is a trunk with or without a head. Arms on one trunk take turns prompt by prompt, so that a machine that slows
down slows them all down alike. The arm without drafts runs through the same decoder at depth 0, and every output of
the others is checked against its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from mtp_inference import Request, Sampling, SpeculativeDecoder
from mtp_inference.draft import DrafterMaker
from mtp_inference.reference import NEAR_TIE_GAP, Comparison, compare, compare_sampled
from mtp_train.acceptance import PromptCounts
from mtp_train.data.prompts import Prompt
from mtp_train.data.regenerated import noise_seed
from mtp_train.data.tokenize import Document
from mtp_train.heads.trunk import Trunk
from mtp_train.serving import ServedSetting

PLAIN = "none"
LOW_PRECISION_TIE_GAP = 0.25
"""Logit gap that counts as a tie below fp32: four steps of bfloat16 at the size logits have (8 to 16).

Measured on the demo: of 384 texts 3 parted from plain decoding, each at one step (`tests/parity/test_bf16_ties.py`)."""

TIE_OF_DRAWS, LOW_PRECISION_TIE_OF_DRAWS = 1e-4, 1e-2
"""How far a uniform number may lie beside a token's stretch of the distribution, where rounding decides."""


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
    def checked(self) -> int:
        """Outputs that were compared with plain decoding."""
        return self.identical + self.near_ties + len(self.divergences)

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
    setting: ServedSetting,
    max_new_tokens: int,
    eos_ids: Collection[int],
    seed: int,
    on_prompt: Callable[[], None],
) -> dict[str, ArmRun]:
    """Decode every prompt plainly and with each head, on one trunk.

    Every arm samples a prompt with the same noise. Outputs are compared with plain decoding, but for sampled drafts,
    whose text follows the same distribution with other noise.

    Args:
        trunk: The trunk.
        drafting: Arm name to what drafts in it.
        prompts: Held-out prompts.
        depth: Drafts per round.
        setting: How the trunk samples and drafts are verified.
        max_new_tokens: Limit per prompt.
        eos_ids: Tokens that end a response.
        seed: Fixes the noise, with each prompt's id.
        on_prompt: Called after each prompt, for a progress bar.

    Returns:
        A run per arm, ``none`` first.
    """
    decoders = {PLAIN: SpeculativeDecoder(trunk, None, depth=0, eos_ids=eos_ids)}
    draft_sampling: Literal["argmax", "sampled"] = "sampled" if setting.rule == "sampled" else "argmax"
    for arm, maker in drafting.items():
        decoders[arm] = SpeculativeDecoder(trunk, maker, depth=depth, eos_ids=eos_ids, draft_sampling=draft_sampling)
    runs = {arm: ArmRun() for arm in decoders}

    def ask(prompt: Prompt, limit: int) -> Request:
        sampling = setting.sampling(noise_seed(prompt.id, seed))
        return Request(prompt_ids=prompt.prompt_ids, max_new_tokens=limit, sampling=sampling)

    # The first call of each decoder pays for lazy initialisation; nobody should read that as decoding time.
    for decoder in decoders.values():
        decoder.generate([ask(prompts[0], min(8, max_new_tokens))])
    for prompt in prompts:
        for arm, decoder in decoders.items():
            request = ask(prompt, max_new_tokens)
            (result,) = decoder.generate([request])
            run = runs[arm]
            run.counts.append(result.counts(prompt.id, prompt.group))
            run.outputs.append(tuple(result.token_ids))
            if arm != PLAIN and setting.rule != "sampled":
                _check(run, prompt, runs[PLAIN].outputs[-1], trunk, request.sampling)
        on_prompt()
    for arm, decoder in decoders.items():
        runs[arm].captured_rounds = decoder.captured_rounds
    return runs


def _check(run: ArmRun, prompt: Prompt, plain: tuple[int, ...], trunk: Trunk, sampling: Sampling) -> None:
    verdict = compare_with_plain(run.outputs[-1], plain, trunk, prompt.prompt_ids, sampling).verdict
    if verdict == "identical":
        run.identical += 1
    elif verdict == "near_tie":
        run.near_ties += 1
    else:
        run.divergences.append(prompt.id)


def compare_with_plain(
    tokens: Sequence[int],
    plain_tokens: Sequence[int],
    trunk: Trunk,
    prompt_ids: Sequence[int],
    sampling: Sampling,
) -> Comparison:
    """Compare a text with that of plain decoding under the same settings, by the gaps of the trunk's precision.

    Args:
        tokens: New tokens of the decoder under test; its drafts were not sampled.
        plain_tokens: New tokens of plain decoding.
        trunk: The trunk that decoded both.
        prompt_ids: Their prompt.
        sampling: The settings of both, seed included.
    """
    exact = trunk.lm_head_VD.dtype is torch.float32
    if sampling.temperature == 0.0:
        return compare(tokens, plain_tokens, trunk, prompt_ids, NEAR_TIE_GAP if exact else LOW_PRECISION_TIE_GAP)
    gap = TIE_OF_DRAWS if exact else LOW_PRECISION_TIE_OF_DRAWS
    return compare_sampled(tokens, plain_tokens, trunk, prompt_ids, sampling, gap)


def own_text(prompts: Sequence[Prompt], outputs: Sequence[tuple[int, ...]], seq_len_tokens: int) -> list[Document]:
    """Turn outputs into documents whose targets are the output's tokens: the text that dense metrics are taken on."""
    documents = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = (prompt.prompt_ids + output)[:seq_len_tokens]
        mask = ((False,) * len(prompt.prompt_ids) + (True,) * len(output))[:seq_len_tokens]
        documents.append(Document(tokens, mask, prompt.group, prompt.id))
    return documents
