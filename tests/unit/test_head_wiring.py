"""What a family's record makes of a config that says something of the head, or says nothing."""

from __future__ import annotations

import pytest
import torch

from mtp_train.families import FAMILIES
from tiny import ALL_FAMILIES, tiny_head, tiny_trunk
from tiny_configs import SLIDING_WINDOW, tiny_config

FAMILY = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({}, SLIDING_WINDOW),
        ({"layer_types": ["full_attention"] * 3}, 2048),
        ({"mtp_layer_types": ["full_attention"]}, 2048),
        ({"mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [5]}, 5),
        ({"layer_types": ["full_attention"] * 3, "mtp_layer_types": ["sliding_attention"]}, SLIDING_WINDOW),
    ],
)
def test_a_k_exaone_head_slides_as_its_config_or_the_first_layer_of_the_trunk_does(
    fields: dict[str, list[str]], window: int
) -> None:
    config = tiny_config("exaone_moe")
    config.max_position_embeddings = 2048
    for name, value in fields.items():
        setattr(config, name, value)
    head = FAMILY["exaone_moe"].head_layer_config(config, 1)
    assert (head.layer_types, head.sliding_window) == (["sliding_attention"], window)


@pytest.mark.skipif("dots3_note" not in ALL_FAMILIES, reason="this transformers has no dots3-note")
def test_a_head_with_an_embedding_of_its_own_reads_that_one_and_never_trains_it() -> None:
    trunk = tiny_trunk("dots3_note")
    tokens_T = torch.arange(9)
    own_VD = tiny_head(trunk).own_embedding_VD
    assert own_VD is not None
    assert not own_VD.requires_grad
    read_TD = tiny_head(trunk).embedding(trunk.embed)(tokens_T)
    assert torch.equal(read_TD, own_VD[tokens_T])
    assert (read_TD - trunk.embed(tokens_T)).abs().max() > 1e-2
    other = tiny_trunk("glm4_moe")
    assert torch.equal(tiny_head(other).embedding(other.embed)(tokens_T), other.embed(tokens_T))
