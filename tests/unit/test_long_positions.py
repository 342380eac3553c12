"""Rotary frequencies past the trained length: transformers' own where they are fixed, refused where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_train.errors import UnsupportedModelError
from mtp_train.trunk.load import Trunk
from tiny import VOCAB_SIZE, family_of, tiny_head
from tiny_configs import tiny_config

TRAINED = 16
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": TRAINED}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def model(rope: dict[str, Any], most_positions: int) -> Any:
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.rope_parameters = rope
    config.max_position_embeddings = most_positions
    return AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()


def tokens(number: int) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (1, number), generator=torch.Generator().manual_seed(1))


def test_yarn_past_the_original_length_is_transformers_in_trunk_head_and_decoder() -> None:
    stock = model(YARN, 4 * TRAINED)
    prompt = tokens(TRAINED + 4)
    trunk = Trunk(model(YARN, 4 * TRAINED), family_of("llama"))
    head = tiny_head(trunk)
    positions = torch.arange(4 * TRAINED)[None]
    state = torch.zeros(1, 1, 1)
    ours = head.rotary(state, positions)
    theirs = stock.model.rotary_emb(state, positions)
    assert all(map(torch.equal, ours, theirs))
    plain = model({"rope_type": "default", "rope_theta": 1e4}, 4 * TRAINED).model.rotary_emb
    assert not torch.allclose(plain(state, positions)[0], ours[0], atol=0.1)
    expected = stock.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :].tolist()
    decoded = SpeculativeDecoder(trunk, HeadDrafting(head), 2, ()).generate(prompt.tolist(), 12)
    assert list(decoded[0].token_ids) == expected


def test_dynamic_frequencies_are_transformers_up_to_the_trained_length_and_refused_beyond() -> None:
    stock = model(DYNAMIC, TRAINED)
    trunk = Trunk(model(DYNAMIC, TRAINED), family_of("llama"))
    within = tokens(TRAINED)
    beyond = tokens(TRAINED + 1)
    expected = stock.model(input_ids=within).last_hidden_state
    assert torch.equal(trunk.causal_lm.model(input_ids=within).last_hidden_state, expected)
    with pytest.raises(UnsupportedModelError, match=r"expected at most 16 \(max_position_embeddings\)"):
        trunk.hidden(beyond)


def test_a_draft_beyond_the_trained_length_leaves_dynamic_frequencies_alone() -> None:
    trunk = Trunk(model(DYNAMIC, TRAINED), family_of("llama"))
    stock = model(DYNAMIC, TRAINED)
    head = tiny_head(trunk)
    state = torch.zeros(1, 1, 1)
    for rotary, moves in ((head.rotary, False), (trunk.decoder.rotary_emb, False), (stock.model.rotary_emb, True)):
        before = rotary.inv_freq.clone()
        rotary(state, torch.tensor([[TRAINED + 8]]))
        assert torch.equal(rotary.inv_freq, before) is not moves
