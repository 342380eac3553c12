"""Heads whose modules all read the text as the first one does, as llama.cpp has those of Step-3.5 and MiMo-V2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mtp_inference import HeadDrafting
from mtp_inference.drafters.drafter import BatchSize
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from redrafted import drafts_from_scratch, drafts_of_training, states_from_scratch, states_of_training
from scripted import made, random_prompt, spied_drafts
from tiny import ALL_FAMILIES, tiny_head, tiny_trunk

FAMILIES = [name for name in ("step3p7", "mimo_v2_flash") if name in ALL_FAMILIES]
"""Their heads see less than these texts, through sliding windows."""
NUM_MODULES = 3


def models(family_name: str, convention: str = "llama.cpp") -> tuple[Trunk, MtpHead]:
    trunk = tiny_trunk(family_name)
    head = tiny_head(trunk, num_modules=NUM_MODULES)
    head.convention = trunk.family.convention(convention)
    return trunk, head


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("family_name", FAMILIES)
@torch.inference_mode()
def test_drafts_of_a_ragged_batch_are_those_of_scratch_and_of_training(family_name: str, depth: int) -> None:
    trunk, head = models(family_name)
    # The script accepts all drafts in a round and refuses the first or a later one in the next; rests come between.
    for rows in spied_drafts(trunk, head, [depth] * 6 + [0, depth, 0, 0, depth, 1, depth], deepest=NUM_MODULES):
        for tokens, drafts in rows:
            assert drafts == drafts_from_scratch(trunk, head, tokens, len(drafts))
            assert drafts == drafts_of_training(trunk, head, tokens, drafts)


@pytest.mark.parametrize("family_name", FAMILIES)
@torch.inference_mode()
def test_the_familys_own_chain_drafts_other_tokens(family_name: str) -> None:
    """Else the test above could not tell who chains; llama.cpp's places alone change no draft."""
    trunk, head = models(family_name)
    placed = replace(trunk.family.wiring.default, position_offset=1)
    rounds = {}
    for name, convention in (("drafts", head.convention), ("auto", trunk.family.wiring.default), ("placed", placed)):
        head.convention = convention
        rounds[name] = spied_drafts(trunk, head, [3] * 6, deepest=NUM_MODULES)
    assert rounds["auto"] == rounds["placed"] != rounds["drafts"]


@pytest.mark.parametrize(("convention", "num_rows"), [("llama.cpp", 0), ("auto", 12 - 1 + 12 - 2)])
@torch.inference_mode()
def test_a_prompt_takes_every_module_no_further_than_keys(convention: str, num_rows: int) -> None:
    trunk, head = models(FAMILIES[-1], convention)
    rows: list[int] = []
    for block in head.blocks:
        block.layer.mlp.register_forward_hook(lambda _module, _inputs, output: rows.append(output.shape[1]))
    drafter = made(HeadDrafting(head), trunk, BatchSize(1, 64, NUM_MODULES, 64))
    prompt_1T = torch.tensor([random_prompt(12)])
    drafter.start(slice(0, 1), trunk.hidden(prompt_1T), prompt_1T, torch.tensor([5]))
    assert sum(rows) == num_rows
    assert all(layer.is_initialized for layer in drafter.cache.layers)


@torch.inference_mode()
def test_training_takes_rows_of_earlier_depths_no_further_than_keys() -> None:
    trunk, head = models(FAMILIES[-1])
    passes: list[Tensor] = []
    for block in head.blocks:
        block.layer.mlp.register_forward_hook(lambda _module, _inputs, output: passes.append(output))
    states_of_training(trunk, head, random_prompt(10), random_prompt(NUM_MODULES, seed=1))
    assert len(passes) == NUM_MODULES


def gradient(head: MtpHead, states: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return that of what the head says of one draft."""
    head.zero_grad()
    torch.stack(list(states)).square().sum().backward()
    return {name: value.grad.clone() for name, value in head.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family_name", FAMILIES)
def test_what_every_module_reads_of_the_text_trains_it(family_name: str, recompute: bool) -> None:
    trunk, head = models(family_name)
    text = random_prompt(10)
    drafts = random_prompt(3, seed=1)
    expected = gradient(head, states_from_scratch(trunk, head, text, 3, drafts))
    found = gradient(head, states_of_training(trunk, head, text, drafts, recompute=recompute))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
