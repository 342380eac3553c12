"""Logits that are NaN or infinite end decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_inference import HeadDrafting, Request, Sampling, SpeculativeDecoder
from mtp_train.errors import CheckpointError
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from scripted import random_prompt
from tiny import tiny_head, tiny_trunk

PROMPT = random_prompt(5)
SAMPLED = Sampling(temperature=1.0)


@pytest.fixture
def trunk() -> Trunk:
    return tiny_trunk("qwen3_5")


@pytest.fixture
def head(trunk: Trunk) -> MtpHead:
    return tiny_head(trunk)


def decode(trunk: Trunk, head: MtpHead | None, depth: int, sampling: Sampling | None = None) -> Any:
    decoder = SpeculativeDecoder(trunk, head, depth, (), draft_sampling="sampled")
    requests = [
        Request(prompt_ids=PROMPT[: 3 + row], max_new_tokens=12, sampling=sampling or Sampling()) for row in range(2)
    ]
    return decoder.generate(requests)


class BadAfter(torch.nn.Module):
    """A layer that makes one infinite value after so many calls."""

    def __init__(self, inner: torch.nn.Module, calls: int) -> None:
        super().__init__()
        self.inner = inner
        self.calls = calls

    def forward(self, state: Tensor) -> Tensor:
        self.calls -= 1
        made: Tensor = self.inner(state)
        return made if self.calls >= 0 else made * torch.inf


def refused(source: str) -> Any:
    message = rf"{source}: its logits after \d+ tokens are NaN or infinite \(float32\); expected finite logits\."
    return pytest.raises(CheckpointError, match=message)


@pytest.mark.parametrize("calls", [0, 1, 4])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_layer_of_the_trunk_that_overflows(
    trunk: Trunk, head: MtpHead, depth: int, calls: int, sampling: Sampling
) -> None:
    """In prefill, in the first round, and in a later one."""
    assert len(decode(trunk, head, depth, sampling)) == 2, "the control"
    mlp = trunk.layers[2].mlp
    mlp.up_proj = BadAfter(mlp.up_proj, calls)
    with refused("trunk"):
        decode(trunk, head, depth, sampling)


def test_one_logit_of_a_prompt_that_is_no_number_ends_decoding(trunk: Trunk) -> None:
    # The first token comes from the prompt's own forward: no round runs.
    decoder = SpeculativeDecoder(trunk, None, 0, ())
    assert len(decoder.generate([PROMPT], max_new_tokens=1)[0].token_ids) == 1, "the control"
    with torch.no_grad():
        trunk.lm_head_VD[7] = torch.nan
    with refused("trunk"):
        decoder.generate([PROMPT], max_new_tokens=1)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_head_is_told_from_the_trunk(trunk: Trunk, head: MtpHead, sampling: Sampling) -> None:
    with torch.no_grad():
        head.blocks[0].final_norm.weight[3] = torch.inf
    with refused("drafter"):
        decode(trunk, head, 3, sampling)
    assert len(decode(trunk, head, 0, sampling)) == 2, "without drafts nobody reads it"


def test_tokens_that_a_head_may_not_draft_are_no_fault(trunk: Trunk, head: MtpHead) -> None:
    """Their logits are minus infinity."""
    drafting = HeadDrafting(head, torch.arange(10))
    (result,) = SpeculativeDecoder(trunk, drafting, 3, ()).generate([PROMPT], max_new_tokens=12)
    assert len(result.token_ids) == 12


def test_a_decoder_goes_on_with_other_requests_afterwards(trunk: Trunk, head: MtpHead) -> None:
    decoder = SpeculativeDecoder(trunk, head, 3, ())
    (expected,) = decoder.generate([PROMPT], max_new_tokens=12)
    up_proj = trunk.layers[2].mlp.up_proj
    trunk.layers[2].mlp.up_proj = BadAfter(up_proj, 2)
    with pytest.raises(CheckpointError):
        decoder.generate([PROMPT], max_new_tokens=12)
    trunk.layers[2].mlp.up_proj = up_proj
    assert decoder.generate([PROMPT], max_new_tokens=12)[0].token_ids == expected.token_ids
