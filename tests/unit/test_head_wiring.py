"""What a family's record makes of a config that says something of the head, or says nothing."""

from __future__ import annotations

import pytest

from mtp_train.families import FAMILIES
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
